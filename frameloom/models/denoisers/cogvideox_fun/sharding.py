"""Names of the lists of blocks that are sharded, recomputed and compiled."""

from __future__ import annotations

# Lists of repeated blocks, in the order of the forward pass.
BLOCK_LISTS = ("transformer_blocks",)
