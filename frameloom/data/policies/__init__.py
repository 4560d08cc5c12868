"""Bucket policies: each decides from a clip's size, length and rate which shape it is trained at."""
