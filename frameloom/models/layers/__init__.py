"""Layers that models share, under the names of published checkpoints where they have parameters."""
