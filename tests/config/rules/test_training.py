"""Rules of training: mistakes in the keys of the loop, optimizer, objective and memory are found before loading."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from frameloom.config.loading.recipe import load_recipe
from frameloom.config.loading.render import render_yaml
from frameloom.config.rules.training import batch_sizes, scaled_rate
from frameloom.config.schema.objective import DDPMObjectiveSection, beta_range
from frameloom.config.schema.optim import OWN_BETAS
from frameloom.config.schema.training import is_due
from frameloom.core.errors import ConfigError

MISTAKES = {
    "two lengths": (["--train.epochs", "3"], "train.epochs is 3, but train.steps is 100 too"),
    "no length": (["--train.steps", "null"], "train needs the key 'steps'"),
    "no epochs": (["--train.steps", "null", "--train.epochs", "0"], "whole number of at least 1"),
    "epochs misspelt": (["--train.save_every", "2 epocs"], "or of epochs: 500, 1 epoch, 2 epochs"),
    "no interval": (["--train.save_every", "0 epochs"], "train.save_every is '0 epochs'"),
    "window of a static scale": (
        ["--train.loss_scale", "{mode: static, window: 10}"],
        "train.loss_scale.window is 10, which only mode dynamic uses",
    ),
    "a minimum above the start": (["--train.loss_scale", "{initial: 8, minimum: 16}"], "above the first scale 8"),
    "a factor that does nothing": (["--train.loss_scale", "{factor: 1}"], "train.loss_scale.factor is 1"),
    "half weights in full precision": (["--train.weights_precision", "bf16"], "but train.precision is fp32"),
    "two halves": (
        ["--train.weights_precision", "bf16", "--train.precision", "fp16"],
        "weights are fp32, or of the same format",
    ),
    "norms of a full autoencoder": (["--vae.fp32_norms", "true"], "vae.precision is fp32, so all of it is"),
    "a frozen autoencoder that trains": (
        ["--task", "autoencoder", "--vae.precision", "bf16", "--vae.weights", "null"],
        "task autoencoder trains the autoencoder itself",
    ),
    "profile after the end": (["--train.profile", "{start: 99}"], "records steps 99 to 101, but the run has only"),
    "profile without end": (["--train.profile", "{steps: 1000}"], "train.profile.steps is 1000"),
    "a rate without training": (["--text.encoders.0.lr", "1e-5"], "but the encoder does not train"),
    "minilm trains": (["--text.encoders.0.train", "true"], "minilm is always frozen"),
    "t5 in bf16": (
        ["--text.encoders", "[{name: t5, path: ., train: true}]"],
        "its precision is left to the encoder, which is bf16",
    ),
    "trained and cached": (
        ["--text.encoders", "[{name: clip_l, path: ., train: true}]", "--data.cache.text", "cache"],
        "data.cache.text holds captions as they were encoded once",
    ),
    "trained beside adapters": (
        ["--text.encoders", "[{name: clip_l, path: ., train: true}]", "--lora", "{}"],
        "with lora only the adapters train",
    ),
    "more than the device": (["--train.max_device_memory", "1.5"], "0.9, 30GB, 800MB"),
    "memory in words": (["--train.max_device_memory", "30 gigabytes"], "0.9, 30GB, 800MB"),
    "two betas for came": (
        ["--optim.name", "came", "--optim.betas", "[0.9, 0.99]"],
        "optim.betas is [0.9, 0.99], but came takes a list of 3; write [0.9, 0.999, 0.9999], or remove it",
    ),
    "three betas for lion": (["--optim.name", "lion", "--optim.betas", "[0.9, 0.99, 0.9]"], "lion takes a list of 2"),
    "eps for came": (
        ["--optim.name", "came", "--optim.eps", "1e-10"],
        "prodigy or muon uses, but optim.name is came; remove it",
    ),
    "rate for prodigy": (["--optim.name", "prodigy", "--optim.lr", "20"], "the usual one of prodigy is 1"),
    "rates for prodigy": (
        ["--optim.name", "prodigy", "--optim.groups", "[{match: x, lr: 0.1}]"],
        "prodigy has one rate for all parameters",
    ),
    "group without match": (["--optim.groups", "[{lr: 0.1}]"], "optim.groups.0 needs the key 'match'"),
    "group without effect": (["--optim.groups", "[{match: x}]"], "give it lr or weight_decay"),
    "power of a cosine": (
        ["--optim.schedule", "{name: cosine, power: 2}"],
        "which only optim.schedule.name polynomial uses",
    ),
    "cycles of a constant": (["--optim.schedule.num_cycles", "2"], "but optim.schedule.name is constant"),
    "start without warm-up": (["--optim.schedule.start_share", "0.1"], "but there is no warm-up"),
    "no milestones": (["--optim.schedule.name", "multi_step"], "e.g. milestones: [200, 400]"),
    "milestones that fall": (
        ["--optim.schedule", "{name: multi_step, milestones: [9, 3]}"],
        "expected rising steps after the warm-up of 0",
    ),
    "fade without limit": (["--optim.clip_norm", "null", "--optim.clip_fade", "{}"], "there is no limit that could"),
    "frozen lora": (["--lora", "{}", "--optim.frozen", "[x]"], "with lora only the adapters train"),
    "trainable lora": (["--lora", "{}", "--optim.trainable", "[x]"], "with lora only the adapters train"),
    "scaled unevenly": (
        ["--optim.scale_lr", "true", "--data.buckets", "{64px: {1: [1.0, 8], 9: [1.0, 2]}}"],
        "batch sizes are 2 and 8, so there is no one factor",
    ),
    "scaled too far": (
        ["--optim.scale_lr", "true", "--optim.lr", "0.05", "--data.buckets", "{64px: {9: [1.0, 8]}}"],
        "makes the rate 0.4",
    ),
    "unknown optimizer": (["--optim.name", "adam"], "optim.name is 'adam'; expected adamw"),
}
RIGHT = {
    "epochs": ["--train.steps", "null", "--train.epochs", "3", "--train.save_every", "1 epoch"],
    "fp16": ["--train.precision", "fp16", "--train.loss_scale", "{initial: 1024, mode: static}"],
    "scaled bf16": ["--train.precision", "bf16", "--train.loss_scale", "{window: 100, minimum: 0.5}"],
    "half weights": ["--train.precision", "bf16", "--train.weights_precision", "bf16"],
    "half autoencoder": ["--vae.precision", "fp16", "--vae.fp32_norms", "true"],
    "profile": ["--train.profile", "{start: 98}", "--train.deterministic", "true"],
    "a trained text encoder": ["--text.encoders", "[{name: clip_l, path: ., train: true, lr: 1e-6}]"],
    "memory": ["--train.max_device_memory", "30GB"],
    "share of memory": ["--train.max_device_memory", "0.5"],
    "prodigy at one": ["--optim.name", "prodigy", "--optim.lr", "1"],
    "milestones": ["--optim.schedule", "{name: multi_step, milestones: [3, 9], gamma: 0.5}"],
    "fade": ["--optim.clip_fade", "{}", "--optim.skip_spikes", "{ratio: 4}"],
    "groups": ["--optim.groups", "[{match: img_in, lr: 1e-6}, {match: '*norm*', weight_decay: 0}]"],
    "lora groups": ["--lora", "{}", "--optim.groups", "[{match: '*', lr: 1e-6}]"],
    "scaled": ["--optim.scale_lr", "true", "--data.buckets", "{64px: {9: [1.0, 8]}}"],
}


@pytest.mark.parametrize("case", MISTAKES)
def test_a_mistake_is_refused_with_the_way_out(recipe_file: Path, case: str) -> None:
    overrides, message = MISTAKES[case]
    with pytest.raises(ConfigError) as caught:
        load_recipe(recipe_file, overrides)
    assert message in str(caught.value) and len(caught.value.problems) == 1


@pytest.mark.parametrize("case", RIGHT)
def test_what_is_right_passes_and_reads_back(recipe_file: Path, tmp_path: Path, case: str) -> None:
    recipe = load_recipe(recipe_file, RIGHT[case])
    shown = tmp_path / "shown.yaml"
    shown.write_text(render_yaml(recipe))
    assert load_recipe(shown) == recipe


def test_an_interval_counts_steps_or_ends_of_epochs() -> None:
    assert [step for step in range(1, 10) if is_due(4, step=step, epoch=0, position=step)] == [4, 8]
    # Five steps an epoch: the step that ends one leaves the run at position 0 of the next.
    ends = [(step, step // 5, step % 5) for step in range(1, 21)]
    due = [step for step, epoch, position in ends if is_due("2 epochs", step=step, epoch=epoch, position=position)]
    assert due == [10, 20]
    assert is_due("1 epoch", step=5, epoch=1, position=0) and not is_due("1 epoch", step=6, epoch=1, position=1)


@pytest.mark.parametrize("name", OWN_BETAS)
def test_betas_left_out_are_the_optimizers_own(recipe_file: Path, name: str) -> None:
    assert load_recipe(recipe_file, ["--optim.name", name]).optim.betas == OWN_BETAS[name]


def test_scaled_rate_is_rate_times_batch_accumulation_and_processes(recipe_file: Path) -> None:
    words = ["--optim.lr", "1e-5", "--data.buckets", "{64px: {9: [1.0, 8]}}", "--train.accumulate", "3"]
    plain = load_recipe(recipe_file, words)
    scaled = load_recipe(recipe_file, [*words, "--optim.scale_lr", "true"])
    assert batch_sizes(scaled.data) == [8]
    assert scaled_rate(scaled, num_processes=2) == pytest.approx(1e-5 * 8 * 3 * 2)
    assert scaled_rate(plain, num_processes=2) == 1e-5


OBJECTIVE_RIGHT = {
    "latent predicted": "{kind: sample, min_snr_gamma: 5}",
    "latent predicted at zero signal": "{kind: sample, zero_terminal_snr: true}",
    "SDXL's bias": "{kind: epsilon, bias: {strategy: range, multiplier: 2, begin: 200, end: 500}}",
    "later levels": "{kind: v, bias: {strategy: later, multiplier: 2, portion: 0.5}}",
    "some levels": "{kind: v, levels: [200, 500]}",
    "shift by tokens": "{shift: sd3, shift_tokens: 1024, shift_patch: 1}",
    "other patches when sampling": "{shift: open_sora2, sampling_shift_patch: 1}",
    "mode law": "{distribution: mode, mode_scale: 0.8}",
    "Open-Sora-Plan's flow": "{num_levels: 1000, sigma_min: 0, weighting: sigma_sqrt}",
    "noise of a sample": "{noise_offset: 0.05, noise_offset_per: sample, input_perturbation: 0.1}",
    "strata and motion": "{stratified_levels: 64, motion_share: 0.25}",
    "other betas": "{kind: v, betas: linear, beta_start: 0.001, beta_end: 0.03}",
    "leading": "{kind: epsilon, spacing: leading}",
}
OBJECTIVE_WRONG = {
    "bias with flow": ("{bias: {strategy: later}}", "objective.bias is set", "kind v, epsilon or sample uses"),
    "levels with flow": ("{levels: [1, 5]}", "objective.levels is [1, 5]", "set kind: v"),
    "weighting with v": ("{kind: v, weighting: cosmap}", "objective.weighting is cosmap", "only kind flow uses"),
    "edm keys with v": ("{kind: v, edm: {p_mean: 0}}", "objective.edm is set", "only kind edm uses"),
    "mean of another law": (
        "{distribution: uniform, logit_mean: 1}",
        "objective.logit_mean is 1.0",
        "only distribution logit_normal uses",
    ),
    "scale of another law": (
        "{mode_scale: 1}",
        "which only distribution mode uses, but objective.distribution is logit_normal",
    ),
    "tokens of another shift": ("{shift: 3, shift_tokens: 9}", "only shift sd3 uses, but objective.shift is 3.0"),
    "patches without a shift": ("{shift_patch: 1}", "only shift open_sora2 or sd3 uses, but objective.shift is null"),
    "offset of nothing": ("{noise_offset_per: sample}", "objective.noise_offset is 0", "set noise_offset"),
    "no level": ("{kind: v, levels: [500, 500]}", "which is no level at all", "[200, 500]"),
    "level 1001": ("{kind: v, levels: [0, 1001]}", "objective.levels"),
    "range of nothing": ("{kind: v, bias: {strategy: range, begin: 5, end: 5}}", "begin is 5 and end is 5"),
    "portion of a range": ("{kind: v, bias: {strategy: range, portion: 0.5}}", "only strategy earlier or later uses"),
    "range of later": (
        "{kind: v, bias: {strategy: later, begin: 5}}",
        "objective.bias.begin is 5",
        "strategy is later",
    ),
    "multiplier of none": ("{kind: v, bias: {multiplier: 2}}", "objective.bias.multiplier is 2.0", "strategy is none"),
    "multiplier 0": ("{kind: v, bias: {strategy: later, multiplier: 0}}", "objective.bias.multiplier is 0"),
    "betas that fall": ("{kind: v, betas: linear, beta_start: 0.5}", "noise grows, so give a smaller start"),
    "leading at zero signal": ("{kind: v, spacing: leading}", "never visits the last noise level", "write trailing"),
    "edm of an index": ("{kind: edm}", "objective.kind is edm, but opensora2 is told a whole index"),
    "edm upside down": ("{kind: edm, edm: {sigma_min: 90}}", "objective.edm.sigma_min is 90.0 and sigma_max 80.0"),
    "scale that runs back": ("{distribution: mode, mode_scale: 2}", "objective.mode_scale is 2"),
}


@pytest.mark.parametrize("objective", OBJECTIVE_RIGHT.values(), ids=OBJECTIVE_RIGHT.keys())
def test_what_is_right_passes(recipe_file: Path, objective: str) -> None:
    load_recipe(recipe_file, ["--objective", objective])


@pytest.mark.parametrize(
    ("objective", "fragments"), [(case[0], case[1:]) for case in OBJECTIVE_WRONG.values()], ids=OBJECTIVE_WRONG.keys()
)
def test_mistake_is_told(recipe_file: Path, objective: str, fragments: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError) as caught:
        load_recipe(recipe_file, ["--objective", objective])
    for fragment in fragments:
        assert fragment in str(caught.value)


def test_betas_follow_the_schedule_unless_they_are_given() -> None:
    assert beta_range(DDPMObjectiveSection(kind="v")) == (0.00085, 0.012)
    assert beta_range(DDPMObjectiveSection(kind="v", betas="linear")) == (1e-4, 0.02)
    assert beta_range(DDPMObjectiveSection(kind="v", beta_end=0.5)) == (0.00085, 0.5)


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (("--optim.name", "prodigy", "--optim.lr", "1"), "optim.name is prodigy, whose rate follows from the state"),
        (("--optim.name", "adamw8bit"), "optim.name is adamw8bit, whose state is small"),
        (("--parallel.zero", "3"), "parallel.zero is 3, which splits the state over processes already"),
    ],
)
def test_offload_of_state_is_refused_where_it_cannot_be(world: Any, words: tuple[str, ...], text: str) -> None:
    with pytest.raises(ConfigError) as found:
        world.recipe("--optim.offload", "true", *words)
    assert f"optim.offload is true, but {text}" in str(found.value)
    world.recipe("--optim.offload", "true", "--parallel.zero", "1")


def test_a_key_spelled_wrongly_is_told_the_right_one(world: Any) -> None:
    with pytest.raises(ConfigError, match=r"train\.preflight"):
        world.recipe("--train.rehearsal", "true")
