"""Denoisers, autoencoders, text encoders and the few layers that they share."""
