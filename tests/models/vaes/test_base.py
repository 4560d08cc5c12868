"""Statistics of latents against plain means over everything at once."""

from __future__ import annotations

import torch

from frameloom.core.random import stream
from frameloom.models.vaes.base import LatentStatistics, Moments

OFFSET = torch.tensor([0.0, 5.0, -3.0]).view(1, 3, 1, 1, 1)
SIZE = torch.tensor([1.0, 0.2, 4.0]).view(1, 3, 1, 1, 1)


def draw(index: int, frames: int, side: int) -> Moments:
    generator = stream(0, "test statistics", index)
    shape = (2, 3, frames, side, side)
    mean = torch.randn(shape, generator=generator) * SIZE + OFFSET
    return Moments(mean, torch.rand(shape, generator=generator) - 4)


def test_parts_of_any_shape_equal_the_whole() -> None:
    parts = [draw(0, 3, 8), draw(1, 1, 16), draw(2, 5, 4)]
    found = LatentStatistics(3)
    for part in parts:
        found.add(part)
    flat_CN = torch.cat([part.mean_BCFHW.transpose(0, 1).flatten(1) for part in parts], dim=1).double()
    variance_CN = torch.cat([part.logvar_BCFHW.transpose(0, 1).flatten(1).exp() for part in parts], dim=1).double()
    assert found.count == flat_CN.shape[1]
    torch.testing.assert_close(found.mean_C, flat_CN.mean(1))
    torch.testing.assert_close(found.posterior_std_C, variance_CN.mean(1).sqrt())
    torch.testing.assert_close(found.std_C, (flat_CN.var(1, correction=0) + variance_CN.mean(1)).sqrt())
    assert not torch.allclose(found.std_C, flat_CN.std(1, correction=0), rtol=1e-4)


def test_sampled_latents_get_unit_size() -> None:
    found, moments = LatentStatistics(3), draw(0, 4, 32)
    found.add(moments)
    eps = torch.randn(moments.mean_BCFHW.shape, generator=stream(0, "test statistics noise"))
    sampled = moments.sample(eps).double()
    assert abs(float((sampled * found.scale_for_all()).square().mean()) - 1) < 0.01
    scale_C, shift_C = found.scale_per_channel()
    normal = (sampled - shift_C.view(1, 3, 1, 1, 1)) * scale_C.view(1, 3, 1, 1, 1)
    assert normal.mean(dim=(0, 2, 3, 4)).abs().max() < 0.01
    assert (normal.std(dim=(0, 2, 3, 4)) - 1).abs().max() < 0.01


def test_large_means_do_not_cancel() -> None:
    found, plain = LatentStatistics(3), draw(0, 2, 8)
    for frame in plain.mean_BCFHW.unbind(2):
        found.add(Moments((frame[:, :, None].double() + 1e7), torch.full_like(frame[:, :, None], -30.0)))
    expected = plain.mean_BCFHW.double().transpose(0, 1).flatten(1).std(1, correction=0)
    torch.testing.assert_close(found.std_C, expected, rtol=1e-5, atol=0)
