"""Complete-or-absent saves, resume, retention and parity."""
