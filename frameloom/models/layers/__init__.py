"""Layers that three or more models share."""
