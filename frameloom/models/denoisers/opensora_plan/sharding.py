"""Names of the parts that recompute, sharding, compilation and sequence parallelism work on."""

from __future__ import annotations

# Lists of repeated blocks, in the order of the forward pass.
BLOCK_LISTS = ("transformer_blocks",)
# Inside a block: the parameter-free attention of the video tokens among themselves.
ATTENTION = "attn1.attend"
