"""Names of the parts that recompute, sharding and compilation work on."""

from __future__ import annotations

# Lists of repeated blocks. The forward pass takes one of each in turn.
BLOCK_LISTS = ("transformer_blocks", "temporal_transformer_blocks")
