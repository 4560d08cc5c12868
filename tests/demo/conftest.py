"""Scores are taken of the small models that the sampling tests use."""

from __future__ import annotations

from tests.sampling.conftest import load, model_folders

__all__ = ["load", "model_folders"]
