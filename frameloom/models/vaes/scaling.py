"""Numbers per latent channel in an autoencoder's config."""

from __future__ import annotations

from collections.abc import Sequence

from frameloom.core.errors import ConfigError


def spread_over_channels(values: Sequence[float], num_channels: int, *, where: str) -> tuple[float, ...]:
    """One number for each latent channel.

    Equal numbers are spread, whatever their count, so that a width can be overridden without naming them again.
    """
    if len(set(values)) == 1:
        return (float(values[0]),) * num_channels
    if len(values) != num_channels:
        raise ConfigError(
            f"{where} has {len(values)} numbers for {num_channels} latent channels; give one for each channel, or one "
            "for all"
        )
    return tuple(float(value) for value in values)
