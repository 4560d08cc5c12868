"""Prompt in, video file out."""
