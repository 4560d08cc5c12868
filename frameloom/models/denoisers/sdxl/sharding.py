"""Names of the lists of blocks that are sharded, recomputed and compiled."""

from __future__ import annotations

# Thirds of the UNet, in the order of the forward pass.
STAGES = ("down_blocks", "mid_block", "up_blocks")
# Lists of repeated blocks, wherever they stand in a stage; together they hold nearly all weights. Whole levels are no
# blocks: they pass tuples of skip connections.
BLOCK_LISTS = ("resnets", "transformer_blocks")
