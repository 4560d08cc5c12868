"""Golden cases of the Open-Sora 2.0 denoiser: whole forwards with their intermediate states, and the packing."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn

from frameloom.builders.denoiser import LoadedDenoiser
from frameloom.config.schema.sampling import SampleSection
from frameloom.models.denoisers.base import NUM_TIMESTEPS
from frameloom.models.denoisers.opensora2.config import SIZES, MMDiTConfig
from frameloom.models.denoisers.opensora2.model import MMDiT, embed_time, joint_positions, rotary_precision, turn_table
from frameloom.models.denoisers.opensora2.weights import order_pairs
from frameloom.models.layers.patches import pack, unpack
from frameloom.models.layers.positions import axis_angles
from frameloom.models.spec import token_grid
from frameloom.sampling.conditions import Prepared
from frameloom.sampling.guidance import GuidedDenoiser
from tests.parity.cases import ParityCase, ParityOutput, compare, golden, under
from tests.parity.opensora2_sampling import FAMILY, NUM_BRANCHES, RecordedModel, load_denoiser
from tests.parity.sampling import make_text, repeat_text

MODEL_TOLERANCE = 1e-5
# Sinusoids of guidance 4 are taken at 4,000, where a last bit of their frequencies, which processors round in their own
# way, moves them by up to 5e-4.
GUIDED_TOLERANCE = 1e-4
EXACT = 1e-6
_MODEL_INPUTS = {"img", "img_ids", "txt", "txt_ids", "timesteps", "y_vec"}
Tensors = Mapping[str, Tensor]


def _variants(inputs: Tensors) -> list[str]:
    """Prefixes of the shapes in one case: "" for a single one, else "name."."""
    prefixes = [key.removesuffix("img_ids") for key in inputs if key == "img_ids" or key.endswith(".img_ids")]
    return [prefix for prefix in prefixes if all(prefix + name in inputs for name in _MODEL_INPUTS)]


@golden(lambda case: {"axes_dim", "depth_single_blocks"} <= case.config.keys() and bool(_variants(case.inputs)))
@torch.no_grad()
def run_model(case: ParityCase) -> list[ParityOutput]:
    denoiser = load_denoiser(case.config, case.weights)
    model, config = cast(MMDiT, denoiser.model), cast(MMDiTConfig, denoiser.config)
    results: list[ParityOutput] = []
    for prefix in _variants(case.inputs):
        inputs = under(case.inputs, prefix)
        states = _trace(model, inputs)
        outputs = under(case.outputs, prefix)
        tolerance = GUIDED_TOLERANCE if "guidance" in inputs else MODEL_TOLERANCE
        results += [_compare(prefix + name, states.get(name), value, tolerance) for name, value in outputs.items()]
        results += _compare_packed_inputs(prefix, inputs, config.patch_size)
    return results


def _compare(name: str, ours: Tensor | None, expected: Tensor, tolerance: float) -> ParityOutput:
    if ours is None:
        return ParityOutput(name, None, expected, tolerance, note="no tensor of our model has this name")
    if len(ours) == 1:
        ours = ours.expand(len(expected), *ours.shape[1:])  # a table that all samples share
    return compare(name, ours, expected, tolerance)


def _trace(model: MMDiT, inputs: Tensors) -> dict[str, Tensor]:
    """The prediction and every state on the way, under the names of the golden files."""
    config = model.config
    position = torch.cat([inputs["txt_ids"], inputs["img_ids"]], dim=1)
    if config.use_liger_rope or (position == position[:1]).all():
        position = position[:1]  # the published half-split kernel reads the table of the first sample for all
    table = turn_table(config, position)
    states = _name_table(table, half_split=config.use_liger_rope)
    handles = list(_record(model, states))
    prediction = model.predict_tokens(
        inputs["img"],
        inputs["txt"],
        inputs["timesteps"],
        inputs["y_vec"],
        table,
        inputs.get("cond"),
        inputs.get("guidance"),
    )
    for handle in handles:
        handle.remove()
    return states | {"sample": prediction}


def _name_table(table_BN1P: Tensor, *, half_split: bool) -> dict[str, Tensor]:
    cos, sin = table_BN1P.real.squeeze(-2), table_BN1P.imag.squeeze(-2)
    if half_split:
        return {"pe.cos": torch.cat([cos, cos], dim=-1), "pe.sin": torch.cat([sin, sin], dim=-1)}
    return {"pe": _rotation_matrices(cos, sin).unsqueeze(1)}


def _rotation_matrices(cos: Tensor, sin: Tensor) -> Tensor:
    return torch.unflatten(torch.stack([cos, -sin, sin, cos], dim=-1), -1, (2, 2))


def _record(model: MMDiT, states: dict[str, Tensor]) -> Iterator[Any]:
    """Hooks that fill `states` with what enters the first block and leaves each one."""

    def keep_input(module: nn.Module, args: Any) -> None:
        states["block_in.img"], states["block_in.txt"], states["block_in.vec"] = args[:3]

    def keep_double(name: str, module: nn.Module, args: Any, output: Any) -> None:
        states[f"{name}.img"], states[f"{name}.txt"] = output

    def keep_single(name: str, module: nn.Module, args: Any, output: Any) -> None:
        states[f"{name}.x"] = output

    for kind, blocks, keep in (
        ("double", model.double_blocks, keep_double),
        ("single", model.single_blocks, keep_single),
    ):
        for index, block in enumerate(blocks):
            yield block.register_forward_hook(partial(keep, f"{kind}{index}"))
    if len(model.double_blocks):
        yield model.double_blocks[0].register_forward_pre_hook(keep_input)


def _compare_packed_inputs(prefix: str, inputs: Tensors, patch_size: int) -> list[ParityOutput]:
    """A case also holds latents, masks and the tokens made of them."""
    results = []
    if "latents_bcthw" in inputs:
        latent = inputs["latents_bcthw"]
        grid = token_grid((latent.shape[2], latent.shape[3], latent.shape[4]), patch_size)
        position = joint_positions(grid, inputs["txt"].shape[1]).expand(len(latent), -1, -1)
        results.append(ParityOutput(f"{prefix}packed", pack(latent, patch_size), inputs["img"], 0.0))
        expected = torch.cat([inputs["txt_ids"], inputs["img_ids"]], dim=1)
        results.append(ParityOutput(f"{prefix}positions", position, expected, 0.0))
    if {"cond", "masks", "masked_ref"} <= inputs.keys():
        # The mask comes before the latent that it leaves.
        ours = pack(torch.cat([inputs["masks"], inputs["masked_ref"]], dim=1), patch_size)
        results.append(ParityOutput(f"{prefix}packed condition", ours, inputs["cond"], 0.0))
    return results


@golden(lambda case: "cases" in case.config and any(key.endswith(".packed") for key in case.outputs))
@torch.no_grad()
def run_packing(case: ParityCase) -> list[ParityOutput]:
    ours = _embed_and_rotate(case)
    for settings in case.config["cases"]:
        prefix = f"{settings['i']}."
        ours |= {prefix + name: value for name, value in _pack_one(settings, under(case.inputs, prefix)).items()}
    # A last bit of a frequency, at the largest index of the file.
    time_tolerance = float(case.inputs["time.t"].abs().max()) * NUM_TIMESTEPS * torch.finfo(torch.float32).eps
    results = []
    for name, expected in case.outputs.items():
        if ".get_noise_seed" in name:
            results.append(ParityOutput(name, None, expected, 0.0, deviation="start-noise-by-request"))
        else:
            results.append(_compare(name, ours.get(name), expected, time_tolerance if name[:5] == "time." else EXACT))
    for settings in case.config["cases"]:
        packed = case.outputs[f"{settings['i']}.packed"]
        latent = case.inputs[f"{settings['i']}.latents"]
        grid = token_grid((settings["T"], settings["H"], settings["W"]), settings["patch_size"])
        unpacked = unpack(packed, grid, settings["patch_size"])
        results.append(ParityOutput(f"{settings['i']}.unpacked", unpacked, latent, 0.0))
    return results


def _pack_one(settings: Mapping[str, int], inputs: Tensors) -> dict[str, Tensor]:
    """Tokens of one shape, and the three-fold batch that the sampler gives to the model."""
    latent, patch = inputs["latents"], settings["patch_size"]
    call = _record_call(latent, inputs["t5_1row"], inputs["clip_1row"], patch)
    grid, num_text = token_grid((settings["T"], settings["H"], settings["W"]), patch), call["text"].shape[1]
    position_BM3 = joint_positions(grid, num_text).expand(len(call["x"]), -1, -1)
    return {
        "packed": pack(latent, patch),
        "prepare_3x.img": pack(call["x"], patch),
        "prepare_3x.img_ids": position_BM3[:, num_text:],
        "prepare_3x.txt": call["text"],
        "prepare_3x.txt_ids": position_BM3[:, :num_text],
        "prepare_3x.y_vec": call["pooled"],
    }


def _record_call(latent: Tensor, tokens_BKD: Tensor, pooled_BD: Tensor, patch: int) -> Tensors:
    """What a model is called with in one step of three-fold guidance."""
    batch, channels, *size = latent.shape
    config = replace(SIZES["tiny"], in_channels=channels * patch**2, patch_size=patch, cond_embed=True)
    model = RecordedModel(config, [latent.repeat(NUM_BRANCHES, 1, 1, 1, 1)])
    beside = torch.zeros(batch, 1 + channels, *size)
    text = repeat_text(make_text(tokens_BKD, pooled_BD), batch)
    prepared = Prepared({"cond_latents": beside}, {"cond_latents": beside})
    predict = GuidedDenoiser(
        LoadedDenoiser(FAMILY, model, config), text, text, prepared, SampleSection(image_guidance=3)
    )
    predict(latent, torch.ones(batch))
    return model.calls[0]


def _embed_and_rotate(case: ParityCase) -> dict[str, Tensor]:
    """Time embeddings, one-axis rotary tables and channel orders; widths are read from the golden names."""
    ours: dict[str, Tensor] = {}
    for name, expected in case.outputs.items():
        width = int(name.rpartition("dim")[2]) if re.search(r"dim\d+$", name) else 0
        if name.startswith("time.embedding"):
            ours[name] = embed_time(case.inputs["time.t"], width)
        elif name.startswith("rope."):
            half_split = "liger" in name
            precision = rotary_precision(half_split=half_split)
            angles = axis_angles(case.inputs["rope.positions"], width, precision=precision)
            cos, sin = angles.cos().float(), angles.sin().float()
            ours[name] = (cos if "cos" in name else sin) if half_split else _rotation_matrices(cos, sin)
        elif name == "reorder.rearranged":
            ours[name] = case.inputs["reorder.x"][..., order_pairs(expected.shape[-1], "half-split")]
        elif name == "reorder.restored":
            rearranged = case.outputs["reorder.rearranged"]
            ours[name] = rearranged[..., order_pairs(expected.shape[-1], "pairwise")]
    return ours
