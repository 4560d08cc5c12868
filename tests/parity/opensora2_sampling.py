"""Golden cases of Open-Sora 2.0's sampling: three-fold guidance on given predictions, and whole runs.

Shape letters: B batch, C channels, F frames, H height, W width, N tokens, K text tokens, D width.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from frameloom.builders.denoiser import LoadedDenoiser
from frameloom.config.schema.sampling import SampleSection
from frameloom.diffusion.conditioning import known_cells
from frameloom.diffusion.guidance import oscillate
from frameloom.diffusion.objectives import FlowObjective
from frameloom.diffusion.samplers import run_sampler
from frameloom.models.denoisers.base import Conditions, Denoiser
from frameloom.models.denoisers.opensora2.conditioning import pack_known
from frameloom.models.denoisers.opensora2.config import SIZES, MMDiTConfig
from frameloom.models.layers.patches import Grid, pack, unpack
from frameloom.models.registry import get_denoiser
from frameloom.models.spec import token_grid
from frameloom.models.vaes.base import VideoVAE
from frameloom.sampling.conditions import Prepared
from frameloom.sampling.guidance import GuidedDenoiser
from tests.parity.cases import ParityCase, ParityOutput, compare_facts, golden, pair_outputs
from tests.parity.sampling import compare_frames, load_vae, make_sampler, make_text, sample_latents

Tensors = dict[str, Tensor]
FAMILY = get_denoiser("opensora2")
# Both kinds of guidance at once: text and image, image alone, neither.
NUM_BRANCHES = 3
_FRAME_STRIDE = 4
_LAWS: dict[tuple[bool, bool], Any] = {
    (False, False): "constant",
    (True, False): "oscillating_text",
    (False, True): "oscillating_image",
    (True, True): "oscillating",
}


class RecordedModel(Denoiser):
    """A denoiser whose predictions are given; it keeps what it was called with."""

    def __init__(self, config: MMDiTConfig, predictions: Sequence[Tensor]) -> None:
        super().__init__()
        self.config = config
        self.predictions = predictions
        self.calls: list[Tensors] = []
        self.dtype_of_model = nn.Parameter(torch.zeros(()))

    def forward(self, noisy_BCFHW: Tensor, timestep_B: Tensor, conditions: Conditions) -> Tensor:
        self.calls.append({"x": noisy_BCFHW, "timesteps": timestep_B, **conditions})
        return self.predictions[len(self.calls) - 1]


@dataclasses.dataclass(frozen=True, kw_only=True)
class RecordedTimes(FlowObjective):
    """Walks along given times."""

    times: tuple[float, ...] = ()

    def steps(self, num_steps: int, latent_BCFHW: Tensor) -> list[tuple[float, float | None]]:
        return list(zip(self.times, self.times[1:], strict=False))


def put_references(
    kind: str, references: Sequence[Tensor], size_CFHW: Sequence[int], *, causal: bool, batch: int
) -> Tensor:
    """What the first sample of a batch is given besides the text: recorded latents at the ends, packed by the family.

    A longer reference is used from its beginning at the head, and to its end at the tail.
    """
    channels, frames, height, width = size_CFHW
    head, tail = known_cells(kind, causal=causal)
    latent_BCFHW = torch.zeros(batch, channels, frames, height, width)
    known_BF = torch.zeros(batch, frames)
    if head:
        latent_BCFHW[0, :, :head] = references[0][:, :head]
        known_BF[0, :head] = 1
    if tail:
        latent_BCFHW[0, :, frames - tail :] = references[-1][:, -tail:]
        known_BF[0, frames - tail :] = 1
    # Latent frames as pixel frames, each for as many as it stands for, so that every fourth of them is the latent.
    repeats = torch.full((frames,), _FRAME_STRIDE)
    repeats[0] = 1 if causal else _FRAME_STRIDE
    known_B1FHW = known_BF[:, None, :, None, None].expand(-1, 1, -1, height, width)
    clip_BCFHW, known_B1FHW = (part.repeat_interleave(repeats, dim=2) for part in (latent_BCFHW, known_B1FHW))
    return pack_known(clip_BCFHW, known_B1FHW, lambda pixels: pixels[:, :, ::_FRAME_STRIDE])


@golden(lambda case: {"guidance", "guidance_img", "variants"} <= case.config.keys())
@torch.no_grad()
def run_guidance(case: ParityCase) -> list[ParityOutput]:
    config = case.config
    batch, channels, *size = config["latent_B_C_T_H_W"]
    patch = config["patch_size"]
    grid = token_grid((size[0], size[1], size[2]), patch)
    ours: Tensors = {}
    for variant, flags in config["variants"].items():
        settings = _read_settings(config, flags)
        model = _record(case, grid, channels, has_guidance=False)
        final = _walk(case, grid, model, settings, batch)
        entering = (call["x"][:batch] for call in model.calls)
        ours |= {f"{variant}.img_entering_step{step}": pack(x, patch) for step, x in enumerate(entering)}
        ours[f"{variant}.final"] = pack(final, patch)
        ours["model_call0.timesteps"] = model.calls[0]["timesteps"]
        ours["model_call0.cond"] = pack(model.calls[0]["cond_latents"], patch)
    distilled = _record(case, grid, channels, has_guidance=True)
    ours["distilled.final"] = pack(_walk(case, grid, distilled, _read_settings(config, {}), batch), patch)
    # The published loop tells the scale to every model; one that was not distilled does not read it.
    ours["model_call0.guidance"] = distilled.calls[0]["guidance"].repeat(NUM_BRANCHES)
    tables = config.get("oscillation_by_step", {})
    scales = {
        name: [oscillate(float(name.removeprefix("guidance ")), step) for step in range(len(values))]
        for name, values in tables.items()
    }
    return [*pair_outputs(case, ours, 1e-6), compare_facts("oscillation", scales, tables)]


def _read_settings(config: Mapping[str, Any], flags: Mapping[str, bool]) -> SampleSection:
    return SampleSection(
        steps=config["num_steps"],
        guidance=config["guidance"],
        image_guidance=config["guidance_img"],
        guidance_law=_LAWS[flags.get("text_osci", False), flags.get("image_osci", False)],
        image_guidance_by_frame=flags.get("scale_temporal_osci", False),
    )


def _record(case: ParityCase, grid: Grid, channels: int, *, has_guidance: bool) -> RecordedModel:
    """The recorded predictions; a distilled model makes one for each sample, the others make three."""
    patch, num_steps = case.config["patch_size"], case.config["num_steps"]
    config = dataclasses.replace(
        SIZES["tiny"],
        in_channels=channels * patch**2,
        patch_size=patch,
        cond_embed=True,
        guidance_embed=has_guidance,
    )
    predictions = [unpack(case.inputs[f"pred.{step}"], grid, patch) for step in range(num_steps)]
    if has_guidance:
        predictions = [prediction[: len(prediction) // NUM_BRANCHES] for prediction in predictions]
    return RecordedModel(config, predictions)


def _walk(case: ParityCase, grid: Grid, model: RecordedModel, settings: SampleSection, batch: int) -> Tensor:
    """Euler steps along the times of the file."""
    beside = torch.cat([case.inputs["masks"], case.inputs["masked_ref"]], dim=1).expand(batch, -1, -1, -1, -1)
    cond, uncond = {"cond_latents": beside}, {"cond_latents": torch.zeros_like(beside)}
    text = make_text(torch.zeros(batch, 1, 1), torch.zeros(batch, 1))
    denoiser = LoadedDenoiser(FAMILY, model, model.config)
    predict = GuidedDenoiser(denoiser, text, text, Prepared(cond, uncond), settings)

    def count(step: int, latent: Tensor) -> None:
        predict.step = step

    objective = RecordedTimes(times=tuple(case.inputs["timesteps"].tolist()))
    start = unpack(case.inputs["img"][:batch], grid, case.config["patch_size"])
    return run_sampler("default", objective, predict, start, num_steps=settings.steps, on_step=count)


@golden(lambda case: {"vae_case", "model", "num_steps"} <= case.config.keys() and "reference_latent" in case.inputs)
@torch.no_grad()
def run_sampling(case: ParityCase) -> list[ParityOutput]:
    denoiser, vae = (
        load_denoiser(case.config["model"], case.weights),
        load_vae(case, "hunyuan", use_spatial_tiling=False, use_temporal_tiling=False),
    )
    ours: Tensors = {}
    frames: list[ParityOutput] = []
    for kind in sorted({name.partition(".")[0] for name in case.outputs}):
        latent, compared = _sample(case, denoiser, vae, kind)
        ours |= {f"{kind}.{name}": tensor for name, tensor in latent.items()}
        frames += compared
    return [*pair_outputs(case, ours, 1e-3), *frames]


def load_denoiser(settings: Mapping[str, Any], weights: Tensors) -> LoadedDenoiser:
    """From the published constructor arguments; what only picks a kernel is left out."""
    known = {field.name for field in dataclasses.fields(MMDiTConfig)}
    config = MMDiTConfig(**{key: value for key, value in settings.items() if key in known})
    model = FAMILY.build(config).eval()
    FAMILY.load_original(model, weights)
    return LoadedDenoiser(FAMILY, model, config)


def _sample(case: ParityCase, denoiser: LoadedDenoiser, vae: VideoVAE, kind: str) -> tuple[Tensors, list[ParityOutput]]:
    config, given = case.config, case.inputs
    noise = next(tensor for name, tensor in given.items() if name.startswith("start_noise"))
    text, negative = (make_text(given[f"t5.{name}"], given[f"clip.{name}"]) for name in ("pos", "neg"))
    batch, *size = noise.shape
    # As published, only the first sample of a batch has the reference.
    beside = put_references(kind, [given["reference_latent"]], size, causal=True, batch=batch)
    cond, uncond = {"cond_latents": beside}, {"cond_latents": torch.zeros_like(beside)}
    is_given = bool(beside[:, :1].any())
    known = denoiser.model.find_known(beside)
    prepared = Prepared(cond, uncond, None, known) if is_given else Prepared(cond)
    settings = SampleSection(
        steps=config["num_steps"],
        guidance=config["guidance"],
        image_guidance=config["guidance_img"],
        guidance_law=_LAWS[bool(config["text_osci"]), bool(config["image_osci"])],
        image_guidance_by_frame=is_given,
        frames=config["num_frames"],
    )
    # A token holds the channels of a whole patch.
    area = config["model"]["in_channels"] // size[0]
    objective = FlowObjective(shift="open_sora2", sampling_shift_patch=area)
    loop = make_sampler(denoiser, vae, objective, settings)
    latent = sample_latents(loop, text, negative, noise, prepared)
    pixels = vae.decode(vae.denormalize(latent))[:, :, : config["num_frames"]]
    expected = case.outputs.get(f"{kind}.video")
    frames = [] if expected is None else [compare_frames(f"{kind}.frames", loop, latent, expected / 2 + 0.5)]
    return {"latents": latent, "video": pixels}, frames
