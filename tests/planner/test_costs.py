"""Predicted against measured: memory by the allocator's own record, operations by torch's counter."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from frameloom.core.random import stream
from frameloom.models.registry import get_denoiser
from frameloom.models.spec import DenoiserSpec
from frameloom.models.text.base import TextStates
from frameloom.planner.costs import MetaDenoiser, Shape, StepCost, TextShape, measure_costs
from frameloom.training.memory.recompute import recompute_blocks
from tests.planner.measuring import count_flops, record_peak


@dataclass(frozen=True)
class Setting:
    family: str
    channels: int
    shape: Shape
    batch: int
    recompute: bool = False
    bf16: bool = False
    overrides: dict[str, Any] = field(default_factory=dict, hash=False)

    @property
    def text(self) -> TextShape:
        return TextShape({"cogvideox_fun": 226, "sdxl": 77}.get(self.family, 20), 64, 32)

    def build(self, device: str) -> tuple[DenoiserSpec, nn.Module]:
        family = get_denoiser(self.family)
        text = self.text
        with torch.device(device):
            config = family.configure(
                "tiny",
                latent_channels=self.channels,
                text_width=text.width,
                pooled_width=text.pooled_width,
                overrides=self.overrides,
            )
            model = family.build(config)
        if self.recompute:
            recompute_blocks(model.blocks())
        return family, model

    def meta(self) -> MetaDenoiser:
        return MetaDenoiser(*self.build("meta"), None, self.text, self.channels)


@cache
def predict(setting: Setting) -> StepCost:
    return measure_costs(setting.meta(), [setting.shape], bf16=setting.bf16)[setting.shape]


# Models of 12 to 18 million parameters, whose weights and gradients weigh as much as what a pass keeps.
MID: dict[str, dict[str, Any]] = {
    "opensora2": {"hidden_size": 384, "num_heads": 6, "depth": 2, "depth_single_blocks": 3, "axes_dim": (16, 24, 24)},
    "opensora_plan": {"num_layers": 5, "num_attention_heads": 4, "attention_head_dim": 96},
    "latte": {"num_layers": 3, "num_attention_heads": 6, "attention_head_dim": 64},
    "cogvideox_fun": {"num_layers": 5, "num_attention_heads": 6, "attention_head_dim": 64},
    "sdxl": {"model_channels": 64, "transformer_depth": (1, 1, 2), "norm_groups": 32, "size_embed_dim": 64},
}


def mid(family: str, channels: int, shape: Shape, batch: int, **options: Any) -> Setting:
    return Setting(family, channels, shape, batch, overrides=MID[family], **options)


SETTINGS = [
    Setting("opensora2", 4, (3, 16, 16), 2),
    Setting("opensora2", 4, (5, 16, 16), 1, recompute=True),
    Setting("opensora2", 4, (2, 24, 16), 3, bf16=True),
    Setting("opensora_plan", 8, (3, 16, 16), 2),
    Setting("opensora_plan", 8, (5, 16, 16), 2, recompute=True),
    Setting("opensora_plan", 8, (2, 24, 16), 1, bf16=True),
    Setting("latte", 4, (3, 16, 16), 2),
    Setting("latte", 4, (5, 16, 16), 1, recompute=True),
    Setting("latte", 4, (5, 24, 16), 2),
    Setting("cogvideox_fun", 16, (3, 16, 16), 2),
    Setting("cogvideox_fun", 16, (5, 16, 16), 1, recompute=True),
    Setting("sdxl", 4, (1, 32, 32), 2),
    Setting("sdxl", 4, (1, 48, 32), 1),
    mid("opensora2", 4, (4, 32, 32), 1),
    mid("opensora2", 4, (4, 32, 32), 1, recompute=True),
    mid("opensora_plan", 8, (4, 32, 32), 1),
    mid("latte", 4, (4, 32, 32), 1, recompute=True),
    mid("latte", 4, (4, 8, 8), 2, bf16=True),
    mid("cogvideox_fun", 16, (4, 32, 32), 1),
    mid("sdxl", 4, (1, 32, 32), 2),
]


def take_pass(setting: Setting, family: DenoiserSpec, model: nn.Module) -> None:
    generator = stream(0, "pass")
    noisy_BCFHW = torch.randn(setting.batch, setting.channels, *setting.shape, generator=generator)
    text = setting.text
    states = TextStates(
        tokens_BKD=torch.randn(setting.batch, text.tokens, text.width, generator=generator),
        mask_BK=torch.ones(setting.batch, text.tokens, dtype=torch.bool),
        pooled_BD=torch.randn(setting.batch, text.pooled_width, generator=generator),
    )
    target = torch.randn(noisy_BCFHW.shape, generator=generator)
    with torch.autocast("cpu", torch.bfloat16, enabled=setting.bf16):
        made = model(noisy_BCFHW, torch.rand(setting.batch, generator=generator), states.conditions())
    loss = F.mse_loss(made.float(), target)
    del made
    torch.autograd.backward(loss)


def measure_peak(setting: Setting) -> int:
    """Bytes above the weights at the worst moment, as the allocator has seen it, gradients of weights included."""
    family, model = setting.build("cpu")
    return record_peak(lambda: take_pass(setting, family, model))


def weight_bytes(setting: Setting) -> int:
    _, model = setting.build("meta")
    return sum(weight.nbytes for weight in model.parameters())


def test_the_peak_of_a_step_is_predicted_within_a_tenth() -> None:
    errors = {}
    for setting in SETTINGS:
        weights = weight_bytes(setting)
        predicted = weights + predict(setting).transient_bytes(setting.batch, weights)
        measured = weights + measure_peak(setting)
        errors[setting] = predicted / measured - 1
    shown = "\n".join(f"{error:+.1%} {setting}" for setting, error in errors.items())
    assert max(map(abs, errors.values())) < 0.1, shown


def test_casts_of_weights_do_not_grow_with_the_batch() -> None:
    """Beside a large shape, in whose worst moment there are none."""
    setting = mid("opensora2", 4, (1, 8, 8), 8, bf16=True)
    costs = measure_costs(setting.meta(), [setting.shape, (4, 32, 32)], bf16=True)
    weights = weight_bytes(setting)
    predicted = weights + costs[setting.shape].transient_bytes(setting.batch, weights)
    assert predicted == pytest.approx(weights + measure_peak(setting), rel=0.1)


@pytest.mark.parametrize("setting", SETTINGS, ids=lambda setting: f"{setting.family}-{setting.shape}-{setting.batch}")
def test_operations_are_those_that_torch_counts(setting: Setting) -> None:
    family, model = setting.build("cpu")
    counted = count_flops(lambda: take_pass(setting, family, model))
    assert setting.batch * predict(setting).flops == pytest.approx(counted, rel=0.02)


def test_shapes_that_were_not_measured_follow_from_those_that_were() -> None:
    setting = SETTINGS[0]
    shapes = [(frames, side, 16) for frames in (1, 2, 3, 5, 7, 9) for side in (8, 16, 24)]
    costs = measure_costs(setting.meta(), shapes, bf16=False)
    fitted = [shape for shape, cost in costs.items() if not cost.is_measured]
    assert len(fitted) > len(shapes) / 2
    for shape in fitted[:3]:
        alone = measure_costs(setting.meta(), [shape], bf16=False)[shape]
        assert costs[shape].flops == pytest.approx(alone.flops, rel=0.01)
        assert costs[shape].activation_bytes(4) == pytest.approx(alone.activation_bytes(4), rel=0.1)
    small, large = costs[(1, 8, 16)], costs[(2, 8, 16)]
    assert large.flops > 1.5 * small.flops
