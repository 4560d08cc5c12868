"""Complete-or-absent saves, resume and retention."""
