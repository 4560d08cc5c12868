from __future__ import annotations

import torch

from frameloom.core.random import stream
from frameloom.diffusion.guidance import guided, guided_by_image, oscillate, rescale_guided, scale_by_frame


def normal(*shape: int, purpose: str) -> torch.Tensor:
    return torch.randn(shape, generator=stream(5, purpose))


def test_scale_one_is_conditional_and_zero_is_unconditional():
    conditional, unconditional = normal(2, 3, 4, 5, 6, purpose="a"), normal(2, 3, 4, 5, 6, purpose="b")
    torch.testing.assert_close(guided(conditional, unconditional, 1.0), conditional)
    torch.testing.assert_close(guided(conditional, unconditional, 0.0), unconditional)
    assert not torch.allclose(guided(conditional, unconditional, 2.0), conditional)


def test_equal_image_branches_reduce_to_plain_guidance():
    full, empty = normal(1, 2, 3, 4, 4, purpose="a"), normal(1, 2, 3, 4, 4, purpose="b")
    three = guided_by_image(full, empty, empty, text_scale=6.0, image_scale_F=torch.full((full.shape[-3],), 3.0))
    torch.testing.assert_close(three, guided(full, empty, 6.0))


def test_rescaling_gives_the_spread_of_the_conditional_prediction():
    conditional, unconditional = normal(2, 3, 4, 5, 6, purpose="a"), normal(2, 3, 4, 5, 6, purpose="b")
    strong = guided(conditional, unconditional, 8.0)
    rescaled = rescale_guided(strong, conditional, 1.0)
    torch.testing.assert_close(rescaled.flatten(1).std(dim=1), conditional.flatten(1).std(dim=1))
    torch.testing.assert_close(rescale_guided(strong, conditional, 0.0), strong)
    assert strong.std() > 2 * conditional.std()


def test_oscillation_spares_the_first_steps_and_every_even_one():
    assert [oscillate(7.5, step) for step in range(13)] == [7.5] * 11 + [1.0, 7.5]


def test_image_guidance_grows_along_the_frames_and_fades_over_the_steps():
    assert scale_by_frame(3.0, 0, 10, 3).tolist() == [1.0, 2.0, 3.0]
    assert scale_by_frame(3.0, 5, 10, 3).tolist() == [1.0, 1.5, 2.0]
    assert scale_by_frame(0.5, 5, 10, 3).tolist() == [0.5] * 3
