"""Frameloom: one training system for open image and video diffusion models."""

__version__ = "0.1.0"
