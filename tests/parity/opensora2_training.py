"""Golden cases of Open-Sora 2.0's training: what the model is given, the target, the loss, and the conditions.

Shape letters: B batch, C channels, F frames, H height, W width, N tokens, K text tokens, D width.
"""

from __future__ import annotations

import math
import random
import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from frameloom.diffusion.conditioning import draw_end_mask, pick_kind, usable_kinds
from frameloom.diffusion.objectives import FlowObjective, Noised, add_noise, weighted_error_B
from frameloom.diffusion.tables import END_KINDS
from frameloom.models.denoisers.opensora2.conditioning import pack_known
from frameloom.models.denoisers.opensora2.model import joint_positions
from frameloom.models.layers.patches import pack, unpack
from frameloom.models.spec import token_grid
from frameloom.models.text.base import TextStates, drop_text
from tests.parity.cases import ParityCase, ParityOutput, compare_facts, golden, pair_outputs, under
from tests.parity.opensora2_sampling import put_references
from tests.parity.sampling import make_text

Tensors = dict[str, Tensor]
_STRIDES = (4, 8)
# Kinds as the names of tables have them, in full or short; longer ones first.
_WEIGHT_NAMES = {kind: kind for kind in sorted(END_KINDS, key=len, reverse=True)} | {
    "head": "i2v_head",
    "loop": "i2v_loop",
    "tail": "i2v_tail",
}


@golden(lambda case: any(name.endswith(".x_0_bcthw") for name in case.inputs))
def run_train_step(case: ParityCase) -> list[ParityOutput]:
    ours: Tensors = {}
    for settings in case.config["cases"]:
        given = under(case.inputs, f"{settings['name']}.")
        ours |= {f"{settings['name']}.{name}": tensor for name, tensor in _train_step(settings, given).items()}
    guided = {name: "guidance-while-training" for name in case.outputs if name.endswith("model_input.guidance")}
    return pair_outputs(case, ours, 1e-6, guided)


def _train_step(settings: Mapping[str, Any], given: Tensors) -> Tensors:
    latent = given["x_0_bcthw"]
    batch, channels, frames, height, width = latent.shape
    # A token holds the channels of a whole patch.
    patch = math.isqrt(given["model_pred"].shape[2] // channels)
    grid = token_grid((frames, height, width), patch)
    objective = FlowObjective(sigma_min=settings["sigma_min"], shift="open_sora2")
    noise = unpack(given[f"draw{settings['draw_order'].index('randn_like')}_randn_like"], grid, patch)
    # Our law of noise levels starts from a uniform draw, the published one from its normal quantile.
    uniform_B = torch.special.ndtr(given[f"draw{settings['draw_order'].index('randn')}_randn"].double())
    noised = add_noise(objective, latent, noise, objective.timesteps(uniform_B, latent))
    loss = weighted_error_B(unpack(given["model_pred"], grid, patch), noised).mean()
    text = _prepare_text(settings, given)
    num_text = text.tokens_BKD.shape[1]
    position_BM3 = joint_positions(grid, num_text).expand(batch, -1, -1)
    return {
        "model_input.timesteps": noised.timestep_B,
        "model_input.img": pack(noised.noisy_BCFHW, patch),
        "model_input.img_ids": position_BM3[:, num_text:],
        "model_input.txt_ids": position_BM3[:, :num_text],
        "model_input.txt": text.tokens_BKD,
        "model_input.y_vec": text.pooled_BD,
        "target": pack(noised.target_BCFHW, patch),
        "loss": loss[None],
    }


def _prepare_text(settings: Mapping[str, Any], given: Tensors) -> TextStates:
    text = make_text(given["t5"], given["clip"])
    ratios = settings.get("dropout_ratio")
    if not ratios:
        return text
    # The T5 states are drawn for first, the pooled vector after them; what has no ratio is not drawn for.
    numbers = (index for index, kind in enumerate(settings["draw_order"]) if kind == "rand")
    dropped = dict.fromkeys(("t5", "clip"), torch.zeros(len(text.tokens_BKD), dtype=torch.bool))
    for name in dropped:
        if name in ratios:
            dropped[name] = given[f"draw{next(numbers)}_rand"] < ratios[name]
    null = make_text(given["null_t5"], given["null_clip"])
    return drop_text(text, null, dropped["t5"][:, None], dropped["clip"][:, None])


def _encode_toy(pixels_BCFHW: Tensor, *, causal: bool) -> Tensor:
    """The closed form that stands for an autoencoder in the file."""
    pooled = F.avg_pool3d(pixels_BCFHW, (1, _STRIDES[1], _STRIDES[1]))
    if pooled.shape[2] == 1:
        return pooled
    first, rest = (pooled[:, :, :1], pooled[:, :, 1:]) if causal else (pooled[:, :, :0], pooled)
    return torch.cat([first, torch.unflatten(rest, 2, (-1, _STRIDES[0])).mean(3)], dim=2)


@golden(lambda case: "toy_autoencoder" in case.config)
def run_conditions(case: ParityCase) -> list[ParityOutput]:
    ours: Tensors = {}
    for name in ("causal", "uncausal"):
        if f"{name}.video" in case.inputs:
            found = _condition_clips(case, case.inputs[f"{name}.video"], name)
            ours |= {f"{name}.{key}": value for key, value in found.items()}
        ours |= {f"inference.{name}.{key}": value for key, value in _condition_sampling(case, name).items()}
    ours["loss.without_masks"] = _lose(under(case.inputs, "loss."))
    left_out = {name: "padded-frames" for name in case.outputs if ".pad." in name}
    left_out |= dict.fromkeys(("loss.per_sample", "loss.with_masks"), "loss-without-given-images")
    return [*pair_outputs(case, ours, 1e-6, left_out), *_compare_choices(case.config["info"])]


def _condition_clips(case: ParityCase, clip_BCFHW: Tensor, name: str) -> Tensors:
    causal = name == "causal"

    def encode(pixels_BCFHW: Tensor) -> Tensor:
        return _encode_toy(pixels_BCFHW, causal=causal)

    found = {}
    for kind in ("image", *END_KINDS):
        if f"{name}.{kind}.cond" not in case.outputs:
            continue
        clip = clip_BCFHW[:, :, :1] if kind == "image" else clip_BCFHW
        size = clip.shape[2], clip.shape[3], clip.shape[4]
        # Of a single frame nothing is given, whatever the kind.
        share = {"i2v_head" if kind == "image" else kind: 1.0}
        known_FHW = draw_end_mask(size, 0.5, share, stride=_STRIDES[0], causal=causal)
        known_B1FHW = known_FHW.expand(len(clip), 1, *size)
        found[f"{kind}.cond"] = pack_known(clip, known_B1FHW, encode)
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
        batch, *size = expected.shape
        references = [given["ref_video"]] if kind.startswith("v2v") else [given["ref_image"], given["ref_image2"]]
        used = references[:1] if kind != "i2v_loop" else references
        beside = put_references(kind, used, size, causal=name == "causal", batch=batch)
        found |= {f"{kind}.masks": beside[:, :1], f"{kind}.masked_ref": beside[:, 1:]}
    return found


def _lose(given: Tensors) -> Tensor:
    mask_BFHW = given["masks"]
    patch = math.isqrt(mask_BFHW[0].numel() // given["pred"].shape[1])
    grid = token_grid((mask_BFHW.shape[1], mask_BFHW.shape[2], mask_BFHW.shape[3]), patch)
    prediction, target = (unpack(given[name], grid, patch) for name in ("pred", "target"))
    ones_B = torch.ones(len(target))
    return weighted_error_B(prediction, Noised(target, ones_B, target, ones_B)).mean()[None]


def _compare_choices(info: Mapping[str, Any]) -> list[ParityOutput]:
    results = []
    for name, value in info.items():
        if name.startswith("picks_for_"):
            weights = {
                _WEIGHT_NAMES[word]: float(count)
                for word, count in re.findall(rf"({'|'.join(_WEIGHT_NAMES)})(\d+)", name.partition("weights")[2])
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
