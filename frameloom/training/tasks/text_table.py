"""All text states of a small set at hand: a step picks rows of one table instead of reading, dropping and scaling."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from frameloom.models.text.base import TextStates

MOST_BYTES = 64 * 2**20
_CHUNK = 256
_EMPTY = ""  # every cache has its states


@dataclass(frozen=True)
class KnownText:
    """`states` of the captions in `rows`, as the denoiser sees them; the last are those of the empty caption."""

    rows: Mapping[str, int]
    states: TextStates

    def pick(self, captions: Sequence[str], dropped_B: Tensor | None) -> TextStates | None:
        """The states of these captions, empty where they are dropped; None if one is not known."""
        rows = [self.rows.get(caption, -1) for caption in captions]
        if not rows or min(rows) < 0:
            return None
        index_B = torch.tensor(rows)
        if dropped_B is not None:
            index_B[dropped_B] = len(self.states.tokens_BKD) - 1
        index_B = index_B.to(self.states.tokens_BKD.device)
        return TextStates(*(part.index_select(0, index_B) for part in vars(self.states).values()))
