from __future__ import annotations

import pytest
import torch

from frameloom.core.random import stream
from frameloom.diffusion.guidance import ThreeBranchGuidance, guided, oscillate, rescale_guided

VARIANTS = ["plain", "text_osci", "image_osci", "both_osci", "scale_only", "all"]


def normal(*shape: int, purpose: str) -> torch.Tensor:
    return torch.randn(shape, generator=stream(5, purpose))


def run(golden, unpack, flags: dict[str, bool]) -> dict[str, torch.Tensor]:
    """Euler steps through the stored predictions; the latent entering each step, and the final one."""
    tensors, config = golden("open-sora-v2", "cfg_combination")
    size = config["latent_B_C_T_H_W"][1:]
    num_steps = config["num_steps"]
    guidance = ThreeBranchGuidance(
        text_scale=config["guidance"],
        image_scale=config["guidance_img"],
        oscillate_text=flags.get("text_osci", False),
        oscillate_image=flags.get("image_osci", False),
        scale_image_by_frame=flags.get("scale_temporal_osci", False),
    )
    predictions = iter([unpack(tensors[f"in.pred.{step}"], *size) for step in range(num_steps)])
    predict = guidance.predictor(lambda x, timestep_B: tuple(next(predictions).split(1)), num_steps=num_steps)
    times = tensors["in.timesteps"].tolist()
    x = unpack(tensors["in.img"][:1], *size)
    states = {}
    for step in range(num_steps):
        states[f"img_entering_step{step}"] = x
        x = x + (times[step + 1] - times[step]) * predict(x, torch.tensor([times[step]]))
    return states | {"final": x}


@pytest.mark.parametrize("variant", VARIANTS)
def test_three_branch_guidance_matches_open_sora2(golden, unpack, variant):
    tensors, config = golden("open-sora-v2", "cfg_combination")
    size = config["latent_B_C_T_H_W"][1:]
    states = run(golden, unpack, config["variants"][variant])
    outputs = [name.split(".")[-1] for name in tensors if name.startswith(f"out.{variant}.")]
    assert len(outputs) == 7
    for name in outputs:
        expected = unpack(tensors[f"out.{variant}.{name}"], *size)
        torch.testing.assert_close(states[name], expected, rtol=0, atol=1e-6)


def test_guidance_variants_differ(golden, unpack):
    _, config = golden("open-sora-v2", "cfg_combination")
    finals = [run(golden, unpack, config["variants"][variant])["final"] for variant in VARIANTS]
    gaps = [(a - b).abs().max() for i, a in enumerate(finals) for b in finals[:i]]
    assert min(gaps) > 0.01


def test_oscillation_matches_open_sora2(golden):
    _, config = golden("open-sora-v2", "cfg_combination")
    for label, values in config["oscillation_by_step"].items():
        scale = float(label.split()[-1])
        assert [oscillate(scale, step) for step in range(len(values))] == values


def test_scale_one_is_conditional_and_zero_is_unconditional():
    conditional, unconditional = normal(2, 3, 4, 5, 6, purpose="a"), normal(2, 3, 4, 5, 6, purpose="b")
    torch.testing.assert_close(guided(conditional, unconditional, 1.0), conditional)
    torch.testing.assert_close(guided(conditional, unconditional, 0.0), unconditional)
    assert not torch.allclose(guided(conditional, unconditional, 2.0), conditional)


def test_equal_image_branches_reduce_to_plain_guidance():
    full, empty = normal(1, 2, 3, 4, 4, purpose="a"), normal(1, 2, 3, 4, 4, purpose="b")
    three = ThreeBranchGuidance(text_scale=6.0, image_scale=3.0).combine(full, empty, empty, step=0, num_steps=5)
    torch.testing.assert_close(three, guided(full, empty, 6.0))


def test_rescaling_gives_the_spread_of_the_conditional_prediction():
    conditional, unconditional = normal(2, 3, 4, 5, 6, purpose="a"), normal(2, 3, 4, 5, 6, purpose="b")
    strong = guided(conditional, unconditional, 8.0)
    rescaled = rescale_guided(strong, conditional, 1.0)
    torch.testing.assert_close(rescaled.flatten(1).std(dim=1), conditional.flatten(1).std(dim=1))
    torch.testing.assert_close(rescale_guided(strong, conditional, 0.0), strong)
    assert strong.std() > 2 * conditional.std()


def test_a_new_predictor_counts_from_the_first_step():
    guidance = ThreeBranchGuidance(oscillate_text=True)
    branches = (torch.ones(1, 1, 1, 1, 1), torch.zeros(1, 1, 1, 1, 1), torch.zeros(1, 1, 1, 1, 1))
    for _ in range(2):
        predict = guidance.predictor(lambda x, timestep_B: branches, num_steps=13)
        scales = [predict(branches[0], torch.ones(1)).item() for _ in range(13)]
        assert scales == [7.5] * 11 + [1.0, 7.5]
