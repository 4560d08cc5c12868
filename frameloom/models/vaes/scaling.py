"""Numbers per latent channel in an autoencoder's config."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from frameloom.core.errors import ConfigError


def spread_scaling(config: Any, num_channels: int, *, where: str) -> None:
    """Give a frozen config, at the end of its making, one `scale` and one `shift` for each latent channel."""
    for name in ("scale", "shift"):
        values = _spread(getattr(config, name), num_channels, where=f"{where}: {name}")
        object.__setattr__(config, name, values)


def _spread(values: Sequence[float], num_channels: int, *, where: str) -> tuple[float, ...]:
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
