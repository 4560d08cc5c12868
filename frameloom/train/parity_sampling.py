"""Golden cases of Open-Sora 2.0's sampling: three-fold guidance on given predictions, and whole runs.

Shape letters: B batch, C channels, F frames, H height, W width, N tokens, K text tokens, D width.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from frameloom.checkpoint.goldens import read_case
from frameloom.core.parity import ParityCase, ParityOutput, compare_facts, pair_outputs
from frameloom.diffusion.end_masks import place_references
from frameloom.diffusion.flow import FlowObjective
from frameloom.diffusion.guidance import ThreeBranchGuidance, oscillate
from frameloom.models.denoisers.opensora2.branches import three_branches
from frameloom.models.denoisers.opensora2.config import MMDiTConfig
from frameloom.models.denoisers.opensora2.model import build
from frameloom.models.layers.patches import Grid, pack, token_grid, unpack
from frameloom.models.registry import get_vae
from frameloom.models.text.base import TextStates
from frameloom.models.vaes.base import VideoVAE

Tensors = dict[str, Tensor]


def matches(case: ParityCase) -> bool:
    return _is_guidance(case) or _is_sampling(case)


def run(case: ParityCase) -> list[ParityOutput]:
    return _run_guidance(case) if _is_guidance(case) else _run_sampling(case)


def _states(tokens_BKD: Tensor, pooled_BD: Tensor) -> TextStates:
    return TextStates(tokens_BKD, torch.ones(tokens_BKD.shape[:2], dtype=torch.bool), pooled_BD)


def _is_guidance(case: ParityCase) -> bool:
    return {"guidance", "guidance_img", "variants"} <= case.config.keys()


class _Replay(nn.Module):
    """A model whose predictions are given; it keeps what it was called with first."""

    def __init__(self, predictions: list[Tensor]) -> None:
        super().__init__()
        self.predictions = predictions
        self.num_calls = 0
        self.first_call: Tensors = {}
        self.entering: list[Tensor] = []

    def forward(
        self, x: Tensor, time: Tensor, tokens: Tensor, pooled: Tensor, beside: Tensor, guidance: Tensor
    ) -> Tensor:
        if not self.num_calls:
            self.first_call = {"cond": beside, "timesteps": time, "guidance": guidance}
        self.entering.append(x[:1])
        self.num_calls += 1
        return self.predictions[self.num_calls - 1]


def _run_guidance(case: ParityCase) -> list[ParityOutput]:
    config, num_steps = case.config, case.config["num_steps"]
    patch, size = config["patch_size"], config["latent_B_C_T_H_W"][2:]
    grid = token_grid((size[0], size[1], size[2]), patch)
    ours: Tensors = {}
    for variant, flags in config["variants"].items():
        model = _Replay([unpack(case.inputs[f"pred.{step}"], grid, patch) for step in range(num_steps)])
        guidance = ThreeBranchGuidance(
            text_scale=config["guidance"],
            image_scale=config["guidance_img"],
            oscillate_text=flags.get("text_osci", False),
            oscillate_image=flags.get("image_osci", False),
            scale_image_by_frame=flags.get("scale_temporal_osci", False),
        )
        final = _walk(case, grid, model, guidance)
        ours |= {f"{variant}.img_entering_step{step}": pack(x, patch) for step, x in enumerate(model.entering)}
        ours[f"{variant}.final"] = pack(final, patch)
        ours |= {f"model_call0.{name}": value for name, value in model.first_call.items() if name != "cond"}
        ours["model_call0.cond"] = pack(model.first_call["cond"], patch)
    ours["distilled.final"] = _walk_distilled(case)
    return [*pair_outputs(case, ours, 1e-6), _compare_oscillation(config)]


def _walk(case: ParityCase, grid: Grid, model: _Replay, guidance: ThreeBranchGuidance) -> Tensor:
    """Euler steps along the times of the file."""
    times, num_steps = case.inputs["timesteps"].tolist(), case.config["num_steps"]
    text = _states(torch.zeros(1, 1, 1), torch.zeros(1, 1))
    beside = torch.cat([case.inputs["masks"], case.inputs["masked_ref"]], dim=1)
    branches = three_branches(model, text, text, beside, told_guidance=case.config["guidance"])
    predict = guidance.predictor(branches, num_steps=num_steps)
    x = unpack(case.inputs["img"][:1], grid, case.config["patch_size"])
    for step in range(num_steps):
        x = x + (times[step + 1] - times[step]) * predict(x, torch.tensor([times[step]], dtype=torch.float32))
    return x


def _walk_distilled(case: ParityCase) -> Tensor:
    """A distilled model is told its scale, so its one prediction is the guided one."""
    times = case.inputs["timesteps"].tolist()
    x = case.inputs["img"][:1]
    for step in range(case.config["num_steps"]):
        x = x + (times[step + 1] - times[step]) * case.inputs[f"pred.{step}"][:1]
    return x


def _compare_oscillation(config: Mapping[str, Any]) -> ParityOutput:
    tables = config.get("oscillation_by_step", {})
    ours = {
        name: [oscillate(float(name.removeprefix("guidance ")), step) for step in range(len(values))]
        for name, values in tables.items()
    }
    return compare_facts("oscillation", ours, tables)


def _is_sampling(case: ParityCase) -> bool:
    return {"vae_case", "model", "num_steps"} <= case.config.keys() and "reference_latent" in case.inputs


def _run_sampling(case: ParityCase) -> list[ParityOutput]:
    known = {field.name for field in dataclasses.fields(MMDiTConfig)}
    model = build(MMDiTConfig(**{key: value for key, value in case.config["model"].items() if key in known})).eval()
    model.load_state_dict(case.weights)
    vae = _load_vae(case)
    ours: Tensors = {}
    with torch.no_grad():
        for kind in sorted({name.partition(".")[0] for name in case.outputs}):
            latent = _sample(case, model, kind)
            ours[f"{kind}.latents"] = latent
            ours[f"{kind}.video"] = vae.decode(vae.denormalize(latent))[:, :, : case.config["num_frames"]]
    return pair_outputs(case, ours, 1e-3)


def _sample(case: ParityCase, model: nn.Module, kind: str) -> Tensor:
    config, given = case.config, case.inputs
    noise = next(tensor for name, tensor in given.items() if name.startswith("start_noise"))
    text, negative = (_states(given[f"t5.{name}"], given[f"clip.{name}"]) for name in ("pos", "neg"))
    _, channels, frames, height, width = noise.shape
    reference = given["reference_latent"]
    beside = place_references(kind, (channels, frames, height, width), [reference], causal=True)[None]
    guidance = ThreeBranchGuidance(
        text_scale=config["guidance"],
        image_scale=config["guidance_img"],
        oscillate_text=bool(config["text_osci"]),
        oscillate_image=bool(config["image_osci"]),
        scale_image_by_frame=kind != "t2v",
    )
    # A token holds the channels of a whole patch.
    area = config["model"]["in_channels"] // channels
    objective = FlowObjective(shift="open_sora2", sampling_patch_area=area)
    predict = guidance.predictor(three_branches(model, text, negative, beside), num_steps=config["num_steps"])
    latent = objective.sample(predict, noise, num_steps=config["num_steps"])
    # What was given stays as it was given.
    return torch.where(beside[:, :1] > 0, beside[:, 1:], latent)


def _load_vae(case: ParityCase) -> VideoVAE:
    """From the golden file that the case names, beside it."""
    assert case.path is not None
    name = case.config["vae_case"].partition(" ")[0]
    golden = read_case(case.path.with_name(f"{name}.safetensors"), name=name)
    family = get_vae("hunyuan")
    settings = {**golden.config, "use_spatial_tiling": False, "use_temporal_tiling": False}
    vae = family.build(family.config_class.from_original(settings)).eval()
    family.load_original(vae, golden.weights)
    return vae
