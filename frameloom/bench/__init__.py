"""Measured comparisons, one file each."""
