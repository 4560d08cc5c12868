"""Dropout with masks keyed by a seed per sample, so that recompute and resume repeat them.

In training, the step gives a model `dropout_seeds`: one seed per sample, keyed by (recipe seed, "model dropout", epoch,
ordinal). A layer's mask of a sample is drawn from a stream of its own, keyed by (seed of the sample, part of the model,
site in that part), over all tokens of the sample. So a mask is the same in a recomputed pass, in a compiled block, in
any micro-batch, on any number of ranks and after a resume; ranks that share a clip take their rows of one mask.

Parts get their keys as a small tensor among their inputs: nothing is set on a module, so that passes may run side by
side, and blocks of a kind, which have the same sites, share their compiled code.

Shape letters: B batch, N tokens, `_` any further dimensions.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor, nn

from frameloom.core.random import bits_at


def dropout_keys(seeds_B: Tensor | None, part: int, num_tokens: int, first: int = 0) -> Tensor | None:
    """What the layers of a `part` of the model draw from: (first, num_tokens, a seed for each sample).

    They see tokens from `first` on, of `num_tokens` in the whole sequence. On the host: drawing needs the seeds there,
    and must not wait for a device. Without seeds nothing is dropped.
    """
    if seeds_B is None:
        return None
    seeds = bits_at(part, seeds_B.numpy().view(np.uint64)).view(np.int64).tolist()
    return torch.tensor([first, num_tokens, *seeds], dtype=torch.int64, device="cpu")


class KeyedDropout(nn.Module):
    """Zeroes a `share` of the numbers and divides the others by what is left, while training and given `keys`.

    `site` distinguishes the layers of one part of the model.
    """

    def __init__(self, share: float, site: int = 0) -> None:
        super().__init__()
        self.share, self.site = share, site

    def forward(self, x_BN_: Tensor, keys: Tensor | None) -> Tensor:
        if not self.share or keys is None or not self.training:
            return x_BN_
        kept_BN_ = draw_kept(x_BN_.detach(), keys, self.site, self.share)
        factor = 1 / (1 - self.share) if self.share < 1 else 0.0
        return torch.where(kept_BN_, x_BN_ * factor, 0.0)


def has_dropout(model: nn.Module) -> bool:
    """Whether a model drops anything in training, and so needs seeds."""
    return any(isinstance(module, KeyedDropout) and module.share > 0 for module in model.modules())


# A custom op, because torch.compile cannot trace generators.
@torch.library.custom_op("frameloom::draw_kept", mutates_args=())
def draw_kept(like_BN_: Tensor, keys: Tensor, site: int, share: float) -> Tensor:
    """True where a number is kept, in the shape of `like_BN_`."""
    first, num_tokens, *seeds = keys.tolist()
    kept_BN_ = torch.empty(like_BN_.shape, dtype=torch.bool, device=like_BN_.device)
    generator = torch.Generator(like_BN_.device)
    streams = (bits_at(site, np.array(seeds, dtype=np.int64)) >> np.uint64(1)).tolist()
    for kept_N_, seed in zip(kept_BN_.unbind(), streams, strict=True):
        generator.manual_seed(seed)
        if len(kept_N_) == num_tokens:
            kept_N_.bernoulli_(1 - share, generator=generator)
            continue
        # Numbers of a generator depend on how many are drawn at once, so a part is cut from the whole mask.
        whole = kept_N_.new_empty(num_tokens, *kept_N_.shape[1:]).bernoulli_(1 - share, generator=generator)
        own = whole[first : first + len(kept_N_)]
        kept_N_[: len(own)] = own
        kept_N_[len(own) :] = True  # what fills a sequence up
    return kept_BN_


@draw_kept.register_fake
def _(like_BN_: Tensor, keys: Tensor, site: int, share: float) -> Tensor:
    return like_BN_.new_empty(like_BN_.shape, dtype=torch.bool)
