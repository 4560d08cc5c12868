"""Errors, logging, progress, random streams, safe paths and atomic files; knows nothing of video."""
