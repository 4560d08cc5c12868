"""Objectives, timestep laws and samplers: mathematics on tensors, no models."""
