"""Guidance against published runs; adapters, number formats, tiles, idle parts, skipped blocks; published folders."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from frameloom.builders.denoiser import LoadedDenoiser
from frameloom.builders.lora import write_lora
from frameloom.config.schema.sampling import SampleSection
from frameloom.core.errors import ConfigError, RunError
from frameloom.core.random import stream
from frameloom.diffusion.ddpm import DDPMObjective
from frameloom.diffusion.guidance import dynamic_scale
from frameloom.diffusion.samplers import run_sampler
from frameloom.models.denoisers.cogvideox_fun.weights import read_config
from frameloom.models.lora.adapters import Adapter, linear_layers
from frameloom.models.registry import get_denoiser
from frameloom.models.text.base import TextStates
from frameloom.sampling.block_cache import CacheCount, skipping_blocks
from frameloom.sampling.conditions import Prepared
from frameloom.sampling.guidance import GuidedDenoiser
from frameloom.sampling.jobs import measure_cache
from frameloom.sampling.load import Source, open_sampler
from frameloom.sampling.pipeline import Placement, Sampler, generate
from frameloom.sampling.request import Request
from tests.models.text import tiny
from tests.parity.cases import read_case
from tests.sampling.conftest import MODELS, Load
from tests.sampling.test_published_pipeline import TRANSFORMER, VAE, draw

GOLDENS = Path(__file__).parents[1] / "goldens"
PROMPT = "a yellow square moves right"


def states(tokens_BKD: Tensor, pooled_BD: Tensor | None = None) -> TextStates:
    mask = torch.ones(tokens_BKD.shape[:2], dtype=torch.bool)
    return TextStates(tokens_BKD, mask, tokens_BKD.new_zeros(len(tokens_BKD), 0) if pooled_BD is None else pooled_BD)


def frames(sampler: Sampler, **settings: Any) -> np.ndarray:
    chosen = SampleSection.model_validate({**sampler.settings.model_dump(), **settings})
    return generate(sampler, [Request(PROMPT, 1, settings=chosen)])[0].frames_FHWC


def test_text_guidance_is_that_of_the_original() -> None:
    case = read_case(GOLDENS / "cogvideox-fun" / "pipeline_2b_t2v.safetensors", name="pipeline_2b_t2v")
    family = get_denoiser("cogvideox_fun")
    config = read_config(case.config["transformer"])
    model = family.build(config).eval()
    model.load_state_dict(case.weights)
    schedule = {name: case.config["scheduler"][name] for name in ("beta_schedule", "beta_start", "beta_end")}
    objective = DDPMObjective(spacing="linspace", step_to="even", **schedule)
    found = {}
    for guidance in (6.0, 5.0):
        predict = GuidedDenoiser(
            LoadedDenoiser(family, model, config),
            states(case.inputs["prompt_embeds"]),
            states(case.inputs["negative_prompt_embeds"]),
            Prepared(),
            SampleSection(steps=3, guidance=guidance),
        )
        noise = case.inputs["start_latents"].transpose(1, 2)
        # diffusers' own DDIM is what the original samples with.
        for name in ("default", "ddim"):
            found[guidance, name] = run_sampler(name, objective, predict, noise, num_steps=3, generators=[])
    expected = case.outputs["ddim_origin.latents"].transpose(1, 2)
    torch.testing.assert_close(found[6.0, "default"], expected, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(found[6.0, "ddim"], expected, atol=1e-4, rtol=1e-4)
    assert not torch.allclose(found[5.0, "default"], expected, atol=1e-2)


def test_dynamic_guidance_grows_to_one_more_than_its_scale() -> None:
    scales = [dynamic_scale(6.0, step, 50) for step in range(50)]
    assert scales == sorted(scales) and scales[0] == pytest.approx(1) and scales[-1] == pytest.approx(7)
    # CogVideoX's formula, which counts noise indices as steps, at the one number of steps where they are the same.
    published = [1 + 6.0 * (1 - np.cos(np.pi * ((1000 - index) / 1000) ** 5)) / 2 for index in (999, 500, 0)]
    assert [dynamic_scale(6.0, step, 1000) for step in (0, 499, 999)] == pytest.approx(published)


def test_every_setting_of_guidance_matters(load: Load) -> None:
    sampler = load("opensora2", steps=12)
    plain = frames(sampler)
    for change in (
        {"guidance": 3.0},
        {"negative_prompt": "blurry"},
        {"guidance_law": "oscillating"},
        {"guidance_law": "oscillating_text"},
        {"guidance_law": "dynamic"},
        {"guidance_rescale": 0.7},
    ):
        assert not np.array_equal(plain, frames(sampler, **change)), change


@pytest.mark.parametrize("name", MODELS)
def test_half_precision_is_near(load: Load, model_folders: dict[str, Path], name: str) -> None:
    half = open_sampler(Source(model_folders[name], ("--sample.precision", "bf16")))
    assert {parameter.dtype for parameter in half.denoiser.model.parameters()} == {torch.bfloat16}
    difference = np.abs(frames(load(name)).astype(int) - frames(half)).mean()
    assert 0 < difference < 4


def test_tiles_and_idle_parts_do_not_change_what_is_made(load: Load, model_folders: dict[str, Path]) -> None:
    folder = model_folders["opensora2"]
    parked = open_sampler(Source(folder, ("--sample.offload", "true")))
    placement = parked.placement
    assert placement is not None and placement.resident == set()
    assert np.array_equal(frames(parked), frames(load("opensora2")))
    # One part at a time: text, the autoencoder for what is given, the denoiser, the autoencoder again.
    order = [part for part, place in placement.moves if place == "device"]
    assert order == ["text", "vae", "denoiser", "vae"] and placement.resident == set()
    assert placement.moves[1::2] == [(part, "host") for part in order]
    tiled = open_sampler(Source(folder, ("--sample.tile_px", "32")))
    near = np.abs(frames(tiled, width=64).astype(int) - frames(load("opensora2"), width=64)).mean()
    assert 0 < near < 16 and load("opensora2").placement.resident == {"text", "vae", "denoiser"}


class Recorder(torch.nn.Module):
    """A part that knows where it was moved."""

    def __init__(self) -> None:
        super().__init__()
        self.places: list[str] = []

    def to(self, device: torch.device) -> Recorder:  # type: ignore[override]
        self.places.append(str(device))
        return self


def test_a_part_is_parked_when_its_work_fails() -> None:
    parts = {"a": Recorder(), "b": Recorder()}
    placement = Placement(dict(parts), torch.device("meta"), offload=True)
    with pytest.raises(RuntimeError, match="out of memory"), placement.using("a"):
        assert placement.resident == {"a"}
        raise RuntimeError("out of memory")
    assert parts["a"].places == ["cpu", "meta", "cpu"] and placement.resident == set()


def make_adapters(denoiser: LoadedDenoiser, seed: int) -> dict[str, Adapter]:
    generator, found = stream(seed, "adapters"), {}
    for name, layer in list(linear_layers(denoiser.model).items())[2:8]:
        down = torch.randn(2, layer.in_features, generator=generator)
        found[name] = Adapter(down, 0.1 * torch.randn(layer.out_features, 2, generator=generator), 3.0)
    return found


def test_several_loras_work_beside_the_weights_as_in_them(
    load: Load, model_folders: dict[str, Path], tmp_path: Path
) -> None:
    plain = load("latte")
    for seed in (1, 2):
        adapters, layers = make_adapters(plain.denoiser, seed), list(linear_layers(plain.denoiser.model))
        write_lora(tmp_path / str(seed), plain.denoiser, adapters, layers=layers, base={})

    def open_with(scales: tuple[float, float], *, merge: bool) -> Sampler:
        chosen = [
            {"path": str(tmp_path / str(number)), "scale": scale} for number, scale in zip((1, 2), scales, strict=True)
        ]
        words = ("--sample.lora", json.dumps(chosen), "--sample.lora_merge", str(merge).lower())
        return open_sampler(Source(model_folders["latte"], words))

    before = plain.denoiser.model.state_dict()
    found = {merge: open_with((0.7, 0.4), merge=merge) for merge in (True, False)}
    for merge, sampler in found.items():
        after = sampler.denoiser.model.state_dict()
        assert all(torch.equal(before[name], after[name]) for name in before) != merge
        assert sampler.origin["weights"] != plain.origin["weights"]
    merged, beside = (frames(sampler).astype(int) for sampler in found.values())
    assert np.abs(merged - beside).max() <= 1
    assert np.abs(merged - frames(plain)).max() > 5
    assert np.abs(merged - frames(open_with((0.7, 0.1), merge=True))).max() > 1
    assert np.array_equal(frames(open_with((0.0, 0.0), merge=True)), frames(plain))


@pytest.mark.parametrize("name", MODELS)
def test_skipping_blocks_is_measured_and_leaves_no_trace(load: Load, name: str) -> None:
    sampler = load(name, steps=8, cache_threshold=0.12)
    report = measure_cache(sampler, Request(PROMPT, 1))
    assert 0 < report.share_skipped < 1 and 0 < report.latent_error < 0.5
    assert "blocks skipped" in report.describe() and f"{report.latent_error:.2%}" in report.describe()
    assert not np.array_equal(frames(sampler), frames(sampler, cache_threshold=0.0))
    tiny_threshold = measure_cache(load(name, steps=8, cache_threshold=1e-9), Request(PROMPT, 1))
    assert tiny_threshold.share_skipped == 0 == tiny_threshold.latent_error
    blocks = sampler.denoiser.family.blocks(sampler.denoiser.model)
    assert all("forward" not in vars(block) for block in blocks)


def test_a_skipped_block_adds_what_it_added_before() -> None:
    layer = torch.nn.Linear(4, 4)
    given, count = torch.ones(2, 4), CacheCount()

    class Block(torch.nn.Module):
        def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
            return x + layer(x), 2 * y

    real = Block()
    with torch.no_grad(), skipping_blocks([real], 0.1, count):
        first = real(given, given)
        near = real(1.05 * given, given)
        far = real(2 * given, given)
    assert count.calls == 3 and count.skipped == 1
    torch.testing.assert_close(near[0], 1.05 * given + (first[0] - given))
    assert torch.equal(far[0], real(2 * given, given)[0])


@pytest.fixture(scope="module")
def pipeline(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A whole published folder: transformer, autoencoder, text encoder, tokenizer, scheduler."""
    from diffusers import AutoencoderKLCogVideoX, CogVideoXTransformer3DModel

    folder = tmp_path_factory.mktemp("CogVideoX")
    with torch.random.fork_rng(devices=[]):
        draw(CogVideoXTransformer3DModel(**TRANSFORMER)).save_pretrained(folder / "transformer")
        draw(AutoencoderKLCogVideoX(**VAE)).save_pretrained(folder / "vae")
    tiny.make_t5(folder / "text_encoder")
    (folder / "scheduler").mkdir()
    content = {"prediction_type": "v_prediction", "rescale_betas_zero_snr": True, "timestep_spacing": "trailing"}
    settings = {**content, "beta_schedule": "scaled_linear", "beta_start": 0.00085, "beta_end": 0.012}
    (folder / "scheduler" / "scheduler_config.json").write_text(json.dumps(settings))
    return folder


def test_a_published_folder_is_sampled_by_its_family(pipeline: Path) -> None:
    sizes = ("--sample.frames", "9", "--sample.height", "32", "--sample.width", "48", "--sample.steps", "2")
    short = ("--text.encoders.0.max_length", "12")
    sampler = open_sampler(Source(pipeline, (*sizes, *short), family="cogvideox_fun"))
    assert sampler.denoiser.config.num_layers == 2 and sampler.vae.latent_channels == 4
    assert isinstance(sampler.objective, DDPMObjective) and sampler.objective.step_to == "even"
    assert frames(sampler).shape == (9, 32, 48, 3)
    file = pipeline / "transformer" / "diffusion_pytorch_model.safetensors"
    others = ("--vae.weights", str(pipeline), "--text.encoders.0.path", str(pipeline))
    vae = (
        "--vae.overrides",
        json.dumps({"block_channels": [8] * 4, "latent_channels": 4, "layers_per_block": 1, "norm_groups": 2}),
    )
    alone = open_sampler(Source(file, (*others, *vae, *sizes, *short), family="cogvideox_fun"))
    assert all(
        torch.equal(one, two)
        for one, two in zip(alone.denoiser.model.parameters(), sampler.denoiser.model.parameters(), strict=True)
    )


def test_what_cannot_be_sampled_from_is_told(pipeline: Path, tmp_path: Path) -> None:
    with pytest.raises(RunError, match="add --family NAME"):
        open_sampler(Source(pipeline))
    with pytest.raises(RunError, match="no such run"):
        open_sampler(Source(tmp_path / "nothing"))
    with pytest.raises(ConfigError, match=r"family.*cogvideox_fun"):
        open_sampler(Source(pipeline, family="cogvideox-fun"))
    with pytest.raises(ConfigError, match="is of the family sdxl"):
        open_sampler(Source(pipeline, family="latte", recipe="sdxl/finetune"))
