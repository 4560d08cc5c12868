"""Golden cases of Open-Sora 2.0's training: what the model is given, the target, the loss, and the conditions.

Shape letters: B batch, C channels, F frames, H height, W width, N tokens, K text tokens, D width.
"""

from __future__ import annotations

import math
import random
import re
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from frameloom.core.parity import ParityCase, ParityOutput, compare_facts, pair_outputs, under
from frameloom.diffusion.end_masks import known_frames, learned_cells, pick_kind, place_references, usable_kinds
from frameloom.diffusion.flow import FlowObjective, logit_normal_time, shift_time
from frameloom.diffusion.mask_kinds import END_KINDS
from frameloom.diffusion.objective import Noised
from frameloom.models.denoisers.opensora2.config import SIZES
from frameloom.models.denoisers.opensora2.known import pack_known
from frameloom.models.denoisers.opensora2.positions import video_positions
from frameloom.models.layers.patches import pack, token_grid, unpack
from frameloom.models.text.base import TextStates
from frameloom.models.text.dropout import drop_text

Tensors = dict[str, Tensor]
_STRIDES = (4, 8)
_WEIGHT_NAMES = {"t2v": "t2v", "head": "i2v_head", "loop": "i2v_loop", "tail": "i2v_tail"}


def matches(case: ParityCase) -> bool:
    return any(is_kind(case) for is_kind, _ in _RUNNERS)


def run(case: ParityCase) -> list[ParityOutput]:
    return next(run_kind for is_kind, run_kind in _RUNNERS if is_kind(case))(case)


def _states(tokens_BKD: Tensor, pooled_BD: Tensor) -> TextStates:
    return TextStates(tokens_BKD, torch.ones(tokens_BKD.shape[:2], dtype=torch.bool), pooled_BD)


def _is_train_step(case: ParityCase) -> bool:
    return any(name.endswith(".x_0_bcthw") for name in case.inputs)


def _run_train_step(case: ParityCase) -> list[ParityOutput]:
    ours: Tensors = {}
    for settings in case.config["cases"]:
        given = under(case.inputs, f"{settings['name']}.")
        found = _train_step(settings, given) | _prepare_text(settings, given)
        ours |= {f"{settings['name']}.{name}": tensor for name, tensor in found.items()}
    return pair_outputs(case, ours, 1e-6)


def _train_step(settings: Mapping[str, Any], given: Tensors) -> Tensors:
    latent = given["x_0_bcthw"]
    _, channels, frames, height, width = latent.shape
    # A token holds the channels of a whole patch.
    patch = math.isqrt(given["model_pred"].shape[2] // channels)
    grid = token_grid((frames, height, width), patch)
    objective = FlowObjective(sigma_min=settings["sigma_min"], shift="open_sora2")
    noise = unpack(given[f"draw{settings['draw_order'].index('randn_like')}_randn_like"], grid, patch)
    time_B = shift_time(logit_normal_time(given["draw0_randn"]), objective.alpha(latent))
    noised = objective.add_noise_at(latent, noise, time_B)
    loss = objective.loss_B(unpack(given["model_pred"], grid, patch), noised).mean()
    return {
        "model_input.timesteps": noised.timestep_B,
        "model_input.img": pack(noised.noisy_BCFHW, patch),
        "model_input.img_ids": video_positions(grid).expand(len(latent), -1, -1),
        "target": pack(noised.target_BCFHW, patch),
        "loss": loss[None],
    }


def _prepare_text(settings: Mapping[str, Any], given: Tensors) -> Tensors:
    text, batch = _states(given["t5"], given["clip"]), len(given["t5"])
    if ratios := settings.get("dropout_ratio"):
        # The T5 states are drawn for first, the pooled vector after them.
        first, second = (index for index, kind in enumerate(settings["draw_order"]) if kind == "rand")
        null = _states(given["null_t5"], given["null_clip"])
        words_B, pooled_B = given[f"draw{first}_rand"] < ratios["t5"], given[f"draw{second}_rand"] < ratios["clip"]
        text = drop_text(text, null, words_B[:, None], pooled_B[:, None])
    return {
        "model_input.txt": text.tokens_BKD,
        "model_input.y_vec": text.pooled_BD,
        "model_input.txt_ids": torch.zeros(batch, text.tokens_BKD.shape[1], 3),
        "model_input.guidance": torch.full((batch,), float(settings["guidance"])),
    }


def _is_conditions(case: ParityCase) -> bool:
    return "toy_autoencoder" in case.config


def _encode_toy(pixels_BCFHW: Tensor, *, causal: bool) -> Tensor:
    """The closed form that stands for an autoencoder in the file."""
    pooled = F.avg_pool3d(pixels_BCFHW, (1, _STRIDES[1], _STRIDES[1]))
    if pooled.shape[2] == 1:
        return pooled
    first, rest = (pooled[:, :, :1], pooled[:, :, 1:]) if causal else (pooled[:, :, :0], pooled)
    return torch.cat([first, torch.unflatten(rest, 2, (-1, _STRIDES[0])).mean(3)], dim=2)


def _run_conditions(case: ParityCase) -> list[ParityOutput]:
    ours: Tensors = {}
    for name in ("causal", "uncausal"):
        if f"{name}.video" in case.inputs:
            ours |= {
                f"{name}.{key}": value for key, value in _condition_clips(case.inputs[f"{name}.video"], name).items()
            }
        ours |= {f"inference.{name}.{key}": value for key, value in _condition_sampling(case, name).items()}
    ours |= {f"loss.{key}": value for key, value in _lose_with_masks(under(case.inputs, "loss.")).items()}
    padded = {name: "padded-frames" for name in case.outputs if ".pad." in name}
    return [*pair_outputs(case, ours, 1e-6, padded), *_compare_choices(case.config["info"])]


def _condition_clips(clip_BCFHW: Tensor, name: str) -> Tensors:
    causal = name == "causal"

    def encode(pixels_BCFHW: Tensor) -> Tensor:
        return _encode_toy(pixels_BCFHW, causal=causal)

    found = {}
    for kind in ("image", *END_KINDS):
        clip = clip_BCFHW[:, :, :1] if kind == "image" else clip_BCFHW
        known_F = known_frames("t2v" if kind == "image" else kind, clip.shape[2], stride=_STRIDES[0], causal=causal)
        known = known_F[None, None, :, None, None].expand(len(clip), 1, -1, *clip.shape[3:])
        found[f"{kind}.cond"] = pack_known(SIZES["tiny"], clip, known, encode)
        found[f"{kind}.x_0"] = encode(clip)
    return found


def _condition_sampling(case: ParityCase, name: str) -> Tensors:
    """Only the first sample of the batch has references."""
    found: Tensors = {}
    given = under(case.inputs, "inference.")
    for kind in END_KINDS:
        expected = case.outputs.get(f"inference.{name}.{kind}.masked_ref")
        if expected is None:
            continue
        batch, channels, frames, height, width = expected.shape
        references = [given["ref_video"]] if kind.startswith("v2v") else [given["ref_image"], given["ref_image2"]]
        used = references[:1] if kind != "i2v_loop" else references
        place = [
            place_references(
                kind if sample == 0 else "t2v", (channels, frames, height, width), used, causal=name == "causal"
            )
            for sample in range(batch)
        ]
        masks, latents = torch.split(torch.stack(place), [1, channels], dim=1)
        found |= {f"{kind}.masks": masks, f"{kind}.masked_ref": latents}
    return found


def _lose_with_masks(given: Tensors) -> Tensors:
    mask_BFHW = given["masks"]
    patch = math.isqrt(mask_BFHW[0].numel() // given["pred"].shape[1])
    grid = token_grid((mask_BFHW.shape[1], mask_BFHW.shape[2], mask_BFHW.shape[3]), patch)
    prediction, target = (unpack(given[name], grid, patch) for name in ("pred", "target"))
    ones_B = torch.ones(len(target))
    noised = Noised(target, ones_B, target, ones_B)
    with_masks = FlowObjective().loss_B(prediction, noised, learned_cells(mask_BFHW))
    without = FlowObjective().loss_B(prediction, noised)
    return {"per_sample": with_masks, "with_masks": with_masks.mean()[None], "without_masks": without.mean()[None]}


def _compare_choices(info: Mapping[str, Any]) -> list[ParityOutput]:
    results = []
    for name, value in info.items():
        if name.startswith("picks_for_"):
            weights = {
                _WEIGHT_NAMES[word]: float(count)
                for word, count in re.findall(r"(t2v|head|loop|tail)(\d+)", name.partition("weights")[2])
            }
            for entry in value:
                generator = random.Random(entry["python_random_seed"])
                ours = [pick_kind(weights, generator.random()) for _ in entry["picks"]]
                results.append(compare_facts(f"kinds with seed {entry['python_random_seed']}", ours, entry["picks"]))
        elif found := re.match(r"(un)?causal\.condition_config_after_a_(\d+)_frame_batch_\(was (.*)\)", name):
            causal, frames = found[1] is None, int(found[2])
            cells = (frames - 1) // _STRIDES[0] + 1 if causal else frames // _STRIDES[0]
            left = usable_kinds(dict.fromkeys(found[3].split(","), 1.0), cells, causal=causal)
            results.append(compare_facts(f"kinds for {frames} frames", sorted(left), sorted(value)))
    return results


_Run = Callable[[ParityCase], list[ParityOutput]]
_RUNNERS: tuple[tuple[Callable[[ParityCase], bool], _Run], ...] = (
    (_is_train_step, _run_train_step),
    (_is_conditions, _run_conditions),
)
