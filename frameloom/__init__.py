"""Frameloom: one training system for open image and video diffusion models."""

from frameloom.core.version import VERSION as __version__

__all__ = ["__version__"]
