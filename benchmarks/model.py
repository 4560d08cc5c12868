"""A training step of every family, forward, backward, clip and AdamW, against the same model of another hand.

Where diffusers has a class for the architecture it gets our weights; where it has none, the model is written out
plainly. It is trained as diffusers' scripts do it, with accelerate and torch's AdamW, in a process of its own. Both
predict the same before they are timed. For the larger size the other side runs a second time, in a process that keeps
memory as ours does, which tells how much of the difference that makes; and a product of matrices takes its turn: the
arithmetic of the step, counted as the planner counts it, over its time is a share of that rate. A bare DiT tells what
share a transformer can have on the machine (`plain_models.py`). At last the larger size comes with a batch of four,
beside which the optimizer, whose time does not grow with the batch, weighs less.

`compile` is the same step with compiled blocks (`train.compile`), against the other side as its scripts have it; the
note of a row tells what is left when the other side is compiled, too.

Shape letters: B batch, C channels, F frames, H height, W width.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.baselines import Baseline, build_baseline
from benchmarks.harness import (
    BenchSettings,
    Contender,
    IsolatedProcess,
    Row,
    Times,
    Work,
    compare_numbers,
    compare_times,
    load_baseline,
    measure_or_skip,
    median_ratio,
    take_turns,
)
from benchmarks.plain_models import BareDiT
from frameloom.config.schema.optim import OptimSection
from frameloom.core.random import stream
from frameloom.models.denoisers.base import Denoiser
from frameloom.models.registry import get_denoiser
from frameloom.models.spec import DenoiserSpec
from frameloom.models.text.base import TextStates
from frameloom.planner.costs import MetaDenoiser, TextShape, measure_costs
from frameloom.training.compiling import compile_blocks
from frameloom.training.optim.clipping import clip_within_step
from frameloom.training.optim.optimizer import build_optimizer

_TEXT = TextShape(tokens=32, width=384, pooled_width=384)
_CHANNELS = 4
_LR, _CLIP = 1e-5, 1.0
_MATRIX_SIDE, _MATRIX_TIMES = 2048, 8
_PRODUCT_FLOPS = 2.0 * _MATRIX_TIMES * _MATRIX_SIDE**3
# The first steps take memory from the system that later ones find at hand.
_WARMUP = 3
_LARGEST_GAP = 1e-3
# Steps of several clips are long, and calmer than short ones.
_BATCH, _BATCH_ROUNDS, _BATCH_WARMUP = 4, 5, 1


@dataclass(frozen=True)
class Case:
    """`latent` is frames, height, width."""

    family: str
    size: str
    latent: tuple[int, int, int]
    batch: int
    overrides: dict[str, Any]
    compiler: str | None = None
    """for the blocks of our model"""

    @property
    def name(self) -> str:
        batch = f", batch of {self.batch}" if self.is_large and self.batch > 1 else ""
        return f"{self.family} {self.size}{batch}" + (", compiled" if self.compiler else "")

    @property
    def is_large(self) -> bool:
        return self.size != "tiny"


_FLUX_LIKE = {"theta": 10_000, "normalize_vec": False, "absolute_positions": False}
# Few layers, nearer in width to published models than many narrow ones, in which attention and norms weigh more; heads
# are as wide as the published ones.
_LARGE: dict[str, dict[str, Any]] = {
    "sdxl": {"model_channels": 96, "transformer_depth": (1, 1, 2), "norm_groups": 32, "size_embed_dim": 64},
    "latte": {"num_layers": 3, "num_attention_heads": 8, "attention_head_dim": 72},
    "opensora_plan": {"num_layers": 5, "num_attention_heads": 6, "attention_head_dim": 96},
    "cogvideox_fun": {"num_layers": 5, "num_attention_heads": 10, "attention_head_dim": 64},
    "opensora2": {
        **{"hidden_size": 512, "num_heads": 4, "depth": 1, "depth_single_blocks": 5, "axes_dim": (16, 56, 56)},
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


def list_batches() -> Iterator[Case]:
    """The larger models on several clips."""
    for case in list_cases():
        if case.is_large:
            yield replace(case, batch=_BATCH)


def measure(bench: BenchSettings) -> Iterator[Row]:
    yield from measure_cases("model", list_cases(is_quick=bench.is_quick), bench)
    if not bench.is_quick:
        yield from measure_cases("model", list_batches(), bench)


def measure_compiled(bench: BenchSettings) -> Iterator[Row]:
    yield from measure_cases("compile", list_compiled(is_quick=bench.is_quick), bench)


def list_compiled(*, is_quick: bool = False) -> Iterator[Case]:
    """On one clip and on four. A quick run traces the blocks of tiny models and generates no code.

    Only transformers of about 30 million parameters: a tiny model is compiled for longer than it trains, and the UNet
    is diffusers' own on both sides.
    """
    for case in list_cases(is_quick=True) if is_quick else (*list_cases(), *list_batches()):
        if case.family != "sdxl" and (is_quick or case.is_large):
            yield replace(case, compiler="eager" if is_quick else "inductor")


def measure_cases(topic: str, cases: Iterable[Case], bench: BenchSettings) -> Iterator[Row]:
    with ExitStack() as stack:
        processes = [stack.enter_context(IsolatedProcess())]
        if not bench.is_quick:
            processes.append(stack.enter_context(IsolatedProcess(keeps_memory=True)))
        for case in cases:
            yield from measure_or_skip(topic, case.name, _measure_case, topic, case, processes, bench)


def configure(case: Case) -> tuple[DenoiserSpec, Any]:
    family = get_denoiser(case.family)
    return family, family.configure(
        "tiny",
        latent_channels=_CHANNELS,
        text_width=_TEXT.width,
        pooled_width=_TEXT.pooled_width,
        overrides=case.overrides,
    )


def build_model(case: Case) -> tuple[DenoiserSpec, Any, Denoiser]:
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


def _measure_case(topic: str, case: Case, processes: list[IsolatedProcess], bench: BenchSettings) -> Iterator[Row]:
    family, config, model = build_model(case)
    inputs = draw_inputs(case)
    if case.compiler:
        compile_blocks(model.blocks(), backend=case.compiler)
    against, gap = _check_peer(case, family, model, inputs)

    tokens = case.batch * config.num_tokens(case.latent)
    sides: dict[str, Work | Contender | IsolatedProcess] = {"ours": our_step(family, model, inputs)}
    sides["other"] = processes[0].build(build_other_step, case)
    if case.is_large and case.batch == 1:
        sides["kept"] = processes[1].build(build_other_step, case, case.compiler)
    if case.is_large:
        sides["product"] = _build_product()
    bare = choose_bare(case, config.num_tokens(case.latent))
    if bare is not None:
        sides["bare"] = bare.build_step()
    times = take_turns(sides, *_choose_rounds(case, bench))
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    note = f"{num_parameters / 1e6:.1f}M parameters, {tokens:,} tokens; predictions within {gap:.0e}"
    if "kept" in times:
        alike = "is compiled and keeps" if case.compiler else "keeps"
        note += f"; if it {alike} memory as ours does {median_ratio(times['kept'].walls, times['ours'].walls):.2f}x"
    loop = f"{against} in accelerate's loop"
    yield compare_times(topic, case.name, times["ours"], times["other"], against=loop, note=note)
    if case.is_large:
        flops = count_flops(case)
        name = f"{case.name}, of the rate of a product"
        own, product = _Done(times["ours"], flops), times["product"]
        yield _compare_shares(topic, name, own, _Done(times["other"], flops), product, against)
        if bare is not None:
            yardstick = _Done(times["bare"], bare.count_flops())
            yield _compare_shares(topic, f"{name}, and a bare DiT", own, yardstick, product, bare.name)


def _choose_rounds(case: Case, bench: BenchSettings) -> tuple[int, int]:
    """Rounds that count, and those before them."""
    if case.is_large and case.batch > 1:
        return min(bench.rounds, _BATCH_ROUNDS), _BATCH_WARMUP
    return bench.rounds * (1 if case.is_large or bench.is_quick else 4), bench.pick(_WARMUP, 1)


def _check_peer(case: Case, family: DenoiserSpec, model: nn.Module, inputs: Inputs) -> tuple[str, float]:
    """What the other side is called, and how far its prediction is from ours."""
    load_baseline("accelerate")
    baseline = build_baseline(case.family, model)
    return baseline.name, find_gap(family, model, baseline, inputs)


def _build_product() -> Work:
    matrix = torch.randn(_MATRIX_SIDE, _MATRIX_SIDE, generator=stream(0, "bench matrix"))

    def run() -> None:
        for _ in range(_MATRIX_TIMES):
            torch.mm(matrix, matrix)

    return run


def choose_bare(case: Case, num_tokens: int) -> BareDiT | None:
    """As wide as a larger transformer, with heads as wide."""
    if not case.is_large or case.family == "sdxl":
        return None
    num_heads = case.overrides.get("num_heads") or case.overrides["num_attention_heads"]
    width = case.overrides.get("hidden_size") or num_heads * case.overrides["attention_head_dim"]
    return BareDiT(width, num_heads, case.batch, num_tokens)


@dataclass(frozen=True)
class _Done:
    """The times of a side, and the operations of one turn of it."""

    times: Times
    flops: float

    def share_of(self, product: Times) -> float:
        """Of the rate of a product, as the median of the rounds' own shares."""
        rounds = zip(product.walls, self.times.walls, strict=True)
        return statistics.median(self.flops * turn / (_PRODUCT_FLOPS * step) for turn, step in rounds)


def _compare_shares(topic: str, name: str, ours: _Done, other: _Done, product: Times, against: str) -> Row:
    by_cpu = ours.flops * product.cpu_s / (_PRODUCT_FLOPS * ours.times.cpu_s)
    rate = _PRODUCT_FLOPS / product.wall_s
    return compare_numbers(
        topic,
        name,
        ours.share_of(product),
        other.share_of(product),
        unit="share",
        against=against,
        better="more",
        repeats=len(product.walls),
        note=f"{ours.flops / 1e9:.0f} GFLOP a step, products {rate / 1e9:.0f} GFLOP/s; by processor time {by_cpu:.0%}",
    )


@torch.no_grad()
def find_gap(family: DenoiserSpec, model: nn.Module, baseline: Baseline, inputs: Inputs) -> float:
    """How far both predictions are from each other; ValueError if that is far, or one of them is no number."""
    mine = model(inputs.noisy_BCFHW, inputs.timestep_B, inputs.text.conditions())
    theirs = baseline.predict(inputs.noisy_BCFHW, inputs.timestep_B, inputs.text)
    gap = float((mine - theirs).abs().max() / theirs.abs().max())
    if not gap <= _LARGEST_GAP:
        raise ValueError(f"both sides should predict the same, but they differ by {gap:.1e}")
    return gap


def our_step(family: DenoiserSpec, model: nn.Module, inputs: Inputs) -> Work:
    """One optimizer step as `training/step.py` takes it, on given tensors."""
    optimizer = build_optimizer(model.named_parameters(), OptimSection(lr=_LR))
    model.train()

    def step() -> None:
        prediction = model(inputs.noisy_BCFHW, inputs.timestep_B, inputs.text.conditions())
        torch.autograd.backward(F.mse_loss(prediction, inputs.target_BCFHW))
        clip_within_step(optimizer, _CLIP)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def build_other_step(case: Case, compiler: str | None = None) -> Work:
    """A step of the other side, on the same inputs."""
    _, _, model = build_model(case)
    inputs, baseline = draw_inputs(case), build_baseline(case.family, model)
    if compiler:
        for block in baseline.list_blocks():
            block.compile(backend=compiler)
    accelerator = load_baseline("accelerate").Accelerator(cpu=True)
    optimizer: Any
    other, optimizer = accelerator.prepare(baseline.module, torch.optim.AdamW(baseline.module.parameters(), lr=_LR))
    other.train()

    def step() -> None:
        with accelerator.accumulate(other):
            prediction = baseline.predict(inputs.noisy_BCFHW, inputs.timestep_B, inputs.text)
            accelerator.backward(F.mse_loss(prediction.float(), inputs.target_BCFHW.float()))
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(other.parameters(), _CLIP)
            optimizer.step()
            optimizer.zero_grad()

    return step


def count_flops(case: Case) -> float:
    """Forward and backward of the batch, by the planner's count."""
    family, config = configure(case)
    with torch.device("meta"):
        model = family.build(config)
    denoiser = MetaDenoiser(family, model, config, _TEXT, _CHANNELS)
    costs = measure_costs(denoiser, [case.latent], bf16=False)
    return case.batch * costs[case.latent].flops
