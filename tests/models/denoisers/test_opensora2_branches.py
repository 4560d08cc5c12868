"""The three predictions of Open-Sora 2.0's guidance."""

from __future__ import annotations

import dataclasses

import torch

from frameloom.models.denoisers.opensora2.branches import three_branches
from frameloom.models.denoisers.opensora2.config import SIZES
from frameloom.models.denoisers.opensora2.model import build
from frameloom.models.text.base import TextStates


def test_three_branches_are_three_forwards():
    config = dataclasses.replace(SIZES["tiny"], cond_embed=True, init="default")
    generator = torch.Generator().manual_seed(0)
    model = build(config, generator)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.1, generator=generator)
    channels = config.in_channels // config.patch_size**2

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    texts = [
        TextStates(draw(1, 3, config.context_in_dim), torch.ones(1, 3, dtype=torch.bool), draw(1, config.vec_in_dim))
        for _ in range(2)
    ]
    x, beside, time = draw(1, channels, 2, 4, 4), draw(1, 1 + channels, 2, 4, 4), torch.tensor([0.5])
    with torch.no_grad():
        found = three_branches(model, *texts, beside)(x, time)
        singles = [
            model(x, time, text.tokens_BKD, text.pooled_BD, given)
            for text, given in ((texts[0], beside), (texts[1], beside), (texts[1], None))
        ]
    for ours, single in zip(found, singles, strict=True):
        torch.testing.assert_close(ours, single, rtol=0, atol=1e-5)
    assert float((found[1] - found[2]).abs().max()) > 1e-3
