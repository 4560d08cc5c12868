"""Every mode of every family writes a playable file and keeps what it was given; guidance is that of published runs."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from frameloom.builders.denoiser import LoadedDenoiser
from frameloom.config.schema.sampling import SampleSection
from frameloom.core.errors import ConfigError, DataError
from frameloom.core.random import stream
from frameloom.data.media.decode import probe_clip, read_image
from frameloom.data.media.transforms import to_signed_range, to_uint8
from frameloom.diffusion.guidance import dynamic_scale
from frameloom.diffusion.objectives import DDPMObjective
from frameloom.diffusion.samplers import run_sampler
from frameloom.models.denoisers.cogvideox_fun.weights import read_config
from frameloom.models.registry import get_denoiser
from frameloom.models.text.base import TextStates
from frameloom.sampling.batch import make_first_frames, sample_many
from frameloom.sampling.conditions import Prepared, choose_known_frames, read_given
from frameloom.sampling.guidance import GuidedDenoiser
from frameloom.sampling.outputs import read_frames
from frameloom.sampling.pipeline import Pipeline, encode_given, encode_prompts, solve
from tests.parity.cases import read_case
from tests.sampling.conftest import ALONE, INPAINT, MODELS, Files, Load, make_frames

PROMPT = "a yellow square moves right"
GIVEN = {
    "image": {"image": "picture"},
    "last": {"last_image": "other"},
    "both": {"image": "picture", "last_image": "other"},
    "continue": {"video": "clip"},
}
CASES = [(name, mode) for name in INPAINT for mode in (*GIVEN, "inpaint")]


def make(pipeline: Pipeline, files: Files | None = None, *, seed: int = 1, **given: str) -> np.ndarray:
    media = {name: getattr(files, value) for name, value in given.items()}
    return pipeline.sample(PROMPT, seed=seed, **media).frames


def write(sampler: Pipeline, out: Path, files: Files, **given: str) -> Path:
    media = {name: getattr(files, value) for name, value in given.items()}
    (path,) = sample_many(sampler, [sampler.request(PROMPT, 1, **media)], out, ALONE)
    return path


@pytest.mark.parametrize("name", MODELS)
def test_text_becomes_a_picture_or_a_video(load: Load, files: Files, tmp_path: Path, name: str) -> None:
    sampler = load(name)
    picture = write(load(name, frames=1), tmp_path, files)
    assert picture.suffix == ".png" and read_frames(picture).shape == (1, 32, 48, 3)
    if name != "sdxl":
        video = write(sampler, tmp_path, files)
        facts = probe_clip(video)
        assert (facts.frames, facts.height, facts.width, facts.fps) == (9, 32, 48, 8)
        assert read_frames(video).std() > 1


@pytest.mark.parametrize(("name", "mode"), CASES)
def test_what_is_given_becomes_a_video(load: Load, files: Files, tmp_path: Path, name: str, mode: str) -> None:
    inpaint = {"video": "clip", "mask": "ending" if name == "opensora2" else "square"}
    sampler = load(name)
    given = GIVEN.get(mode, inpaint)
    facts = probe_clip(write(sampler, tmp_path, files, **given))
    assert (facts.frames, facts.height, facts.width) == (9, 32, 48)
    assert not np.array_equal(make(sampler, files, **given), make(sampler))


@pytest.mark.parametrize("name", MODELS)
def test_a_video_is_changed_as_far_as_its_strength(load: Load, files: Files, tmp_path: Path, name: str) -> None:
    given = {"image": "picture"} if name == "sdxl" else {"video": "clip"}
    weak, strong = (load(name, strength=share, steps=10) for share in (0.1, 1.0))
    path = write(weak, tmp_path, files, **given)
    assert read_frames(path).shape == (1 if name == "sdxl" else 9, 32, 48, 3)
    origin = make(weak, files, **given)
    vae = weak.vae
    source = to_signed_range(read_image(files.picture, height=32, width=48))
    with torch.no_grad():
        kept = to_uint8(vae.decode(vae.encode(source[None]).mode())[0])[:, 0].permute(1, 2, 0).numpy()
    distance = [np.abs(frames[0].astype(int) - kept).mean() for frames in (origin, make(strong, files, **given))]
    assert distance[0] < distance[1]


@pytest.mark.parametrize("name", INPAINT)
def test_image_to_video_keeps_its_first_frame(load: Load, files: Files, name: str) -> None:
    """Within one level of 255 of what the autoencoder makes of the picture alone; exactly, with keep: pixels."""
    sampler = load(name)
    picture = read_image(files.picture, height=32, width=48)
    with torch.no_grad():
        latent = sampler.vae.encode(to_signed_range(picture[None])).mode()
        alone = to_uint8(sampler.vae.decode(latent)[0])[:, 0].permute(1, 2, 0).numpy()
    first = make(sampler, files, image="picture")[0]
    assert np.abs(first.astype(int) - alone).max() <= 1
    free = make(load(name, keep="none"), files, image="picture")[0]
    assert np.abs(free.astype(int) - alone).max() > 10
    exact = make(load(name, keep="pixels"), files, image="picture", last_image="other")
    assert np.array_equal(exact[0], picture[:, 0].permute(1, 2, 0).numpy())
    assert np.array_equal(exact[-1], read_image(files.other, height=32, width=48)[:, 0].permute(1, 2, 0).numpy())


def test_inpainting_keeps_the_black_parts_of_the_mask(load: Load, files: Files) -> None:
    sampler = load("cogvideox_fun", keep="pixels")
    made = make(sampler, files, video="clip", mask="square")
    source = read_frames(files.clip)[:9]
    assert np.array_equal(made[:, :8], source[:, :8]) and not np.array_equal(
        made[:, 8:24, 16:40], source[:, 8:24, 16:40]
    )


def test_a_continuation_starts_with_the_last_frames_of_the_video(load: Load, files: Files) -> None:
    made = make(load("opensora_plan", keep="pixels", known_frames=3), files, video="clip")
    assert np.array_equal(made[:3], read_frames(files.clip)[-3:])
    for causal, cases in ((True, {5: 1, 9: 5, 93: 45, 129: 65}), (False, {128: 64})):
        vae = SimpleNamespace(causal=causal, strides=(4, 8, 8))
        assert {frames: choose_known_frames(frames, vae) for frames in cases} == cases


@pytest.mark.parametrize("name", MODELS)
def test_guidance_1_is_the_conditional_model(load: Load, name: str) -> None:
    sampler = load(name, guidance=1)
    model = sampler.denoiser.model
    request = sampler.request(PROMPT, 1)
    text = encode_prompts(sampler, [request])
    frames = 1 if name == "sdxl" else 3
    noise = torch.randn((1, 4, frames, 4, 6), generator=stream(1, "sample"))
    prepared = encode_given(sampler, [request], [read_given(request, sampler.vae)])
    with torch.no_grad():
        alone = run_sampler(
            "default",
            sampler.objective,
            lambda *given: model(*given, {**text[0].conditions(), **prepared.cond}),
            noise,
            num_steps=3,
            generators=[],
        )
        guided = solve(sampler, [request], text, noise, prepared)
        other = solve(sampler, [request.model_copy(update={"guidance": 3.0})], text, noise, prepared)
    assert torch.equal(alone, guided) and not torch.allclose(alone, other)


def test_a_picture_is_made_first_and_the_video_from_it(load: Load, tmp_path: Path) -> None:
    """Text to image to video, with the model itself and with one that makes pictures."""
    sampler = load("opensora2")
    for maker, folder in ((sampler, "self"), (load("sdxl"), "sdxl")):
        out = tmp_path / folder
        (request,) = make_first_frames(maker, [sampler.request(PROMPT, 4)], out, ALONE)
        assert request.image is not None and request.image.parent == out / "first-frames"
        (path,) = sample_many(sampler, [request], out, ALONE)
        first = read_frames(path)[0]
        without = make(sampler, seed=4)[0]
        assert np.abs(first.astype(int) - without).mean() > 1


MISTAKES = [
    ("latte", {"image": "picture"}, {}, "latte: this model has no input for given frames"),
    ("sdxl", {"image": "picture"}, {}, "with one frame there is nothing left to make"),
    ("opensora2", {"mask": "square"}, {}, "name the video with --video"),
    ("opensora2", {"video": "clip", "mask": "square"}, {}, "whole frames at the two ends"),
    ("opensora2", {"video": "clip", "image": "picture"}, {}, "leave --image and --last-image out"),
    ("opensora2", {}, {"strength": 0.5}, "name it with --video"),
    ("opensora2", {"video": "clip"}, {"known_frames": 9}, "at most 8 can be taken over"),
    ("cogvideox_fun", {"video": "picture", "mask": "square"}, {}, "is a picture, and 9 frames are needed"),
    (
        "cogvideox_fun",
        {"video": "clip", "mask": "square"},
        {"fps": 2},
        "has 6 frames at 2 frames per second",
    ),
]


@pytest.mark.parametrize(("name", "given", "settings", "message"), MISTAKES)
def test_what_a_model_cannot_take_is_told(
    load: Load, files: Files, name: str, given: dict[str, str], settings: dict[str, Any], message: str
) -> None:
    sampler = load(name, **settings)
    media = {key: getattr(files, value) for key, value in given.items()}
    with pytest.raises((ConfigError, DataError), match=message):
        sampler.sample(PROMPT, **media)


GOLDENS = Path(__file__).parents[1] / "goldens"


def states(tokens_BKD: Tensor, pooled_BD: Tensor | None = None) -> TextStates:
    mask = torch.ones(tokens_BKD.shape[:2], dtype=torch.bool)
    return TextStates(tokens_BKD, mask, tokens_BKD.new_zeros(len(tokens_BKD), 0) if pooled_BD is None else pooled_BD)


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
    plain = make_frames(sampler)
    for change in (
        {"guidance": 3.0},
        {"negative_prompt": "blurry"},
        {"guidance_law": "oscillating"},
        {"guidance_law": "oscillating_text"},
        {"guidance_law": "dynamic"},
        {"guidance_rescale": 0.7},
    ):
        assert not np.array_equal(plain, make_frames(sampler, **change)), change
