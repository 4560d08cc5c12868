"""A training step of every family, forward, backward, clip and AdamW, against the same model of another hand.

Where diffusers has a class for the architecture it gets our weights and is trained as its scripts do it, with
accelerate and torch's AdamW; where it has none, the model is written out plainly and gets our optimizer. Both predict
the same before they are timed. For the larger size a product of matrices takes its turn, too: the arithmetic of the
step, counted as the planner counts it, over its time is a share of that rate.

Shape letters: B batch, C channels, F frames, H height, W width.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from frameloom.bench.harness import Effort, Row, Side, Work, attempt, compare_numbers, compare_times, take_turns
from frameloom.bench.model_peers import Peer, build_peer
from frameloom.bench.peers import load_peer
from frameloom.core.random import stream
from frameloom.models.denoisers import get_family
from frameloom.models.denoisers.base import DenoiserFamily
from frameloom.models.text import TextStates
from frameloom.plan.costs import TextShape, measure_costs
from frameloom.train.optimizer import build_optimizer, clip_within_step

_TEXT = TextShape(tokens=32, width=384, pooled_width=384)
_CHANNELS = 4
_LR, _CLIP = 1e-5, 1.0
_MATRIX_SIDE = 2048
_LARGEST_GAP = 1e-3


@dataclass(frozen=True)
class Case:
    """`latent` is frames, height, width."""

    family: str
    size: str
    latent: tuple[int, int, int]
    batch: int
    overrides: dict[str, Any]


_FLUX_LIKE = {"theta": 10_000, "normalize_vec": False, "absolute_positions": False}
_LARGE: dict[str, dict[str, Any]] = {
    "sdxl": {"model_channels": 96, "transformer_depth": (1, 1, 2), "norm_groups": 32, "size_embed_dim": 64},
    "latte": {"num_layers": 7, "num_attention_heads": 6, "attention_head_dim": 64},
    "opensora_plan": {"num_layers": 12, "num_attention_heads": 4, "attention_head_dim": 96},
    "cogvideox_fun": {"num_layers": 12, "num_attention_heads": 6, "attention_head_dim": 64},
    "opensora2": {
        **{"hidden_size": 384, "num_heads": 6, "depth": 3, "depth_single_blocks": 6, "axes_dim": (16, 24, 24)},
        **_FLUX_LIKE,
    },
}
_SMALL: dict[str, dict[str, Any]] = {"opensora2": _FLUX_LIKE}


def list_cases(*, is_quick: bool = False) -> Iterator[Case]:
    """Tiny models on small clips, and larger ones on 1,024 tokens (a picture of 64 x 64 cells for the UNet)."""
    for family, overrides in _LARGE.items():
        is_picture = family == "sdxl"
        tiny, large = (1, 16, 16) if is_picture else (3, 16, 16), (1, 64, 64) if is_picture else (4, 32, 32)
        yield Case(family, "tiny", tiny, 4, {**_SMALL.get(family, {}), **_fit(family, tiny)})
        if not is_quick:
            yield Case(family, "30M", large, 1, {**overrides, **_fit(family, large)})


def _fit(family: str, latent: tuple[int, int, int]) -> dict[str, Any]:
    """Latte's positions are made for one size, beyond which diffusers would compute them in every step."""
    return {"sample_size": latent[1:], "video_length": latent[0]} if family == "latte" else {}


def measure(effort: Effort) -> Iterator[Row]:
    for case in list_cases(is_quick=effort.is_quick):
        yield from attempt("model", f"{case.family} {case.size}", _measure_case, case, effort)


def configure(case: Case) -> tuple[DenoiserFamily, Any]:
    family = get_family(case.family)
    return family, family.configure(
        "tiny",
        latent_channels=_CHANNELS,
        text_width=_TEXT.width,
        pooled_width=_TEXT.pooled_width,
        overrides=case.overrides,
    )


def build_model(case: Case) -> tuple[DenoiserFamily, Any, nn.Module]:
    """With weights that are zero nowhere: an idle branch would hide a difference."""
    family, config = configure(case)
    model, generator = family.build(config), stream(0, "bench weights")
    with torch.no_grad():
        for parameter in model.parameters():
            if not parameter.any():
                parameter.normal_(std=0.02, generator=generator)
    return family, config, model


@dataclass(frozen=True)
class Inputs:
    noisy_BCFHW: Tensor
    timestep_B: Tensor
    text: TextStates
    target_BCFHW: Tensor


def draw_inputs(case: Case) -> Inputs:
    generator = stream(0, "bench inputs")
    shape = (case.batch, _CHANNELS, *case.latent)
    noisy, target = (torch.randn(shape, generator=generator) for _ in range(2))
    text = TextStates(
        torch.randn(case.batch, _TEXT.tokens, _TEXT.width, generator=generator),
        torch.ones(case.batch, _TEXT.tokens, dtype=torch.bool),
        torch.randn(case.batch, _TEXT.pooled_width, generator=generator),
    )
    # Levels of a DDPM, so that a family that rounds to them and one that does not agree.
    return Inputs(noisy, (torch.arange(case.batch) + 1) / (case.batch + 1) // 0.001 * 0.001, text, target)


def _measure_case(case: Case, effort: Effort) -> Iterator[Row]:
    family, config, model = build_model(case)
    inputs, peer = draw_inputs(case), build_peer(case.family, model)
    gap = _find_gap(family, model, peer, inputs)
    if gap > _LARGEST_GAP:
        raise ValueError(f"both sides should predict the same, but they differ by {gap:.1e}")
    ours: Predict = lambda: family.denoise(model, inputs.noisy_BCFHW, inputs.timestep_B, inputs.text)  # noqa: E731
    sides: dict[str, Work | Side] = {"ours": our_step(model, ours, inputs), "other": _other_step(peer, inputs)}
    is_large = case.size != "tiny"
    if is_large:
        matrix = torch.randn(_MATRIX_SIDE, _MATRIX_SIDE, generator=stream(0, "bench matrix"))
        sides["product"] = lambda: matrix @ matrix
    is_short = is_large or effort.is_quick
    times = take_turns(sides, effort.rounds * (1 if is_short else 4), warmup=1 if is_short else 3)
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    tokens = case.batch * family.num_tokens(config, case.latent)
    loop = "in accelerate's loop" if peer.is_library else "in our loop"
    name = f"{case.family} {case.size}"
    yield compare_times(
        "model",
        name,
        times["ours"],
        times["other"],
        against=f"{peer.name} {loop}",
        note=f"{num_parameters / 1e6:.1f}M parameters, {tokens:,} tokens; predictions within {gap:.0e}",
    )
    if is_large:
        flops = count_flops(case)
        product = 2 * _MATRIX_SIDE**3
        rate, cpu_rate = product / times["product"].wall_s, product / times["product"].cpu_s
        by_cpu = flops / times["ours"].cpu_s / cpu_rate
        yield compare_numbers(
            "model",
            f"{name}, of the rate of a product",
            flops / times["ours"].wall_s / rate,
            flops / times["other"].wall_s / rate,
            unit="share",
            against=peer.name,
            better="more",
            repeats=len(times["ours"].walls),
            note=f"{flops / 1e9:.0f} GFLOP a step, products {rate / 1e9:.0f} GFLOP/s; by processor time {by_cpu:.0%}",
        )


Predict = Callable[[], Tensor]


@torch.no_grad()
def _find_gap(family: DenoiserFamily, model: nn.Module, peer: Peer, inputs: Inputs) -> float:
    mine = family.denoise(model, inputs.noisy_BCFHW, inputs.timestep_B, inputs.text)
    theirs = peer.predict(inputs.noisy_BCFHW, inputs.timestep_B, inputs.text)
    return float((mine - theirs).abs().max() / theirs.abs().max())


def our_step(model: nn.Module, predict: Predict, inputs: Inputs) -> Work:
    """As `train/step.py` takes one, on tensors at hand."""
    optimizer = build_optimizer(model.named_parameters(), lr=_LR)
    model.train()

    def step() -> None:
        torch.autograd.backward(F.mse_loss(predict(), inputs.target_BCFHW))
        clip_within_step(optimizer, _CLIP)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def _other_step(peer: Peer, inputs: Inputs) -> Work:
    def predict() -> Tensor:
        return peer.predict(inputs.noisy_BCFHW, inputs.timestep_B, inputs.text)

    if not peer.is_library:
        return our_step(peer.module, predict, inputs)
    accelerator = load_peer("accelerate").Accelerator(cpu=True)
    optimizer: Any
    model, optimizer = accelerator.prepare(peer.module, torch.optim.AdamW(peer.module.parameters(), lr=_LR))
    model.train()

    def step() -> None:
        with accelerator.accumulate(model):
            accelerator.backward(F.mse_loss(predict().float(), inputs.target_BCFHW.float()))
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), _CLIP)
            optimizer.step()
            optimizer.zero_grad()

    return step


def count_flops(case: Case) -> float:
    """Forward and backward of the batch, by the planner's count."""
    family, config = configure(case)
    with torch.device("meta"):
        model = family.build(config)
    costs = measure_costs(family, model, [case.latent], latent_channels=_CHANNELS, text=_TEXT, bf16=False)
    return case.batch * costs[case.latent].flops
