"""Metrics and reports on videos."""
