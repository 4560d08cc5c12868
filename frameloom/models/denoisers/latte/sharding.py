"""Names of the lists of blocks that are sharded, recomputed and compiled."""

from __future__ import annotations

# Lists of repeated blocks. The forward pass takes one of each in turn.
BLOCK_LISTS = ("transformer_blocks", "temporal_transformer_blocks")
