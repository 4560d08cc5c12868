"""Golden cases of the CogVideoX-Fun transformer: forwards, refusals, rotary tables, channel surgery.

Golden latents are [B, F, C, H, W].
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor, nn

from frameloom.core.errors import ConfigError
from frameloom.models.denoisers.base import NUM_TIMESTEPS, build_fresh
from frameloom.models.denoisers.cogvideox_fun.config import SIZES, CogVideoXFunConfig
from frameloom.models.denoisers.cogvideox_fun.model import (
    Block,
    CogVideoXFunTransformer,
    fit_region,
    turn_table,
)
from frameloom.models.denoisers.cogvideox_fun.weights import fit_input_channels, load_original, read_config
from tests.parity.cases import ParityCase, ParityOutput, compare, compare_numbers, golden, under

TOLERANCE = 1e-5
Tensors = Mapping[str, Tensor]


def _list(case: ParityCase, key: str) -> list[Any]:
    value = case.config.get(key)
    return value if isinstance(value, list) else []


@golden(
    lambda case: (
        {"attention_head_dim", "max_text_seq_length", "sample_frames"} <= case.config.keys() and bool(case.inputs)
    )
)
@torch.no_grad()
def run_model(case: ParityCase) -> list[ParityOutput]:
    model = load_case_model(case.config, case.weights)
    results: list[ParityOutput] = []
    for variant in sorted({key.partition(".")[0] for key in case.inputs}):
        inputs = under(case.inputs, f"{variant}.")
        ours = _trace(model, inputs)
        expected = under(case.outputs, f"{variant}.")
        # The published code is given its rotary tables; ours computes them, so they are compared as well.
        expected |= {name: inputs[name] for name in ("rope_cos", "rope_sin") if name in inputs}
        for name, tensor in expected.items():
            note = "" if name in ours else "no tensor of our model has this name"
            results.append(compare(f"{variant}.{name}", ours.get(name), tensor, TOLERANCE, note))
    return results


def load_case_model(config: Mapping[str, Any], weights: Tensors) -> CogVideoXFunTransformer:
    model = build_fresh(CogVideoXFunTransformer, read_config(config))
    load_original(model, weights)
    return model.eval()


def name_rotary(model: CogVideoXFunTransformer, latent_FHW: tuple[int, int, int]) -> dict[str, Tensor]:
    """Our rotary table of a latent in the published form: every cosine and sine twice."""
    if not model.config.use_rotary_positional_embeddings:
        return {}
    return _split_complex(turn_table(model.config, model.config.token_grid(latent_FHW)))


def _split_complex(table_N1P: Tensor) -> dict[str, Tensor]:
    doubled = table_N1P.squeeze(1).repeat_interleave(2, dim=-1)
    return {"rope_cos": doubled.real, "rope_sin": doubled.imag}


def _trace(model: CogVideoXFunTransformer, inputs: Tensors) -> dict[str, Tensor]:
    """The prediction and states on the way, under the names of the golden files."""
    noisy_BCFHW = inputs["hidden_states"].transpose(1, 2)
    beside = inputs.get("inpaint_latents", inputs.get("control_latents"))
    text = inputs["encoder_hidden_states"]
    states = name_rotary(model, (noisy_BCFHW.shape[2], noisy_BCFHW.shape[3], noisy_BCFHW.shape[4]))
    handles = _record(model, states, num_text=text.shape[1])
    cond = {} if beside is None else {"cond_latents": beside.transpose(1, 2)}
    sample_BCFHW = model(noisy_BCFHW, inputs["timestep"] / NUM_TIMESTEPS, {"text": text, **cond})
    for handle in handles:
        handle.remove()
    return states | {"sample": sample_BCFHW.transpose(1, 2)}


def _record(model: CogVideoXFunTransformer, states: dict[str, Tensor], *, num_text: int) -> list[Any]:
    """Hooks that fill `states` with what enters the first block and what it makes of it."""

    def keep_inputs(module: nn.Module, args: Any) -> None:
        states["patch_embed"], states["temb"] = torch.cat([args[1], args[0]], dim=1), args[2]

    def keep_attended(module: nn.Module, args: Any, output: Tensor) -> None:
        states["block0.attn.encoder_hidden_states"] = output[:, :num_text]
        states["block0.attn.hidden_states"] = output[:, num_text:]

    def keep_outputs(module: nn.Module, args: Any, output: tuple[Tensor, Tensor]) -> None:
        states["block0.hidden_states"], states["block0.encoder_hidden_states"] = output

    block = cast(Block, model.transformer_blocks[0])
    return [
        block.register_forward_pre_hook(keep_inputs),
        block.attn1.register_forward_hook(keep_attended),
        block.register_forward_hook(keep_outputs),
    ]


@golden(lambda case: any(isinstance(table, dict) and "base_size_hw" in table for table in _list(case, "tables")))
@torch.no_grad()
def run_tables(case: ParityCase) -> list[ParityOutput]:
    results = []
    for settings in case.config["tables"]:
        (base_h, base_w), (rows, columns) = settings["base_size_hw"], settings["grid_size"]
        config = replace(
            SIZES["5b-1.5"] if settings["grid_type"] == "slice" else SIZES["5b"],
            attention_head_dim=settings["embed_dim"],
            sample_height=2 * base_h,
            sample_width=2 * base_w,
        )
        table = _split_complex(turn_table(config, (settings["temporal_size"], rows, columns)))
        prefix = f"{settings['index']}."
        # The file keeps some rows of each table, evenly from the first to the last.
        published_rows = case.outputs[f"{prefix}rows"]
        kept = torch.linspace(0, len(table["rope_cos"]) - 1, len(published_rows)).round().long()
        results.append(ParityOutput(f"{prefix}rows", kept, published_rows, 0.0))
        for name in ("cos", "sin"):
            ours = table[f"rope_{name}"][kept]
            results.append(compare(prefix + name, ours, case.outputs[prefix + name], TOLERANCE))
        results.append(compare_numbers(f"{prefix}n_rows", len(table["rope_cos"]), settings["n_rows"]))
        if settings["crops_coords"]:
            region = fit_region((base_h, base_w), (rows, columns))
            results.append(compare_numbers(f"{prefix}region", region, settings["crops_coords"]))
    return results


@golden(
    lambda case: any(isinstance(entry, dict) and "in_channels_checkpoint" in entry for entry in _list(case, "cases"))
)
@torch.no_grad()
def run_surgery(case: ParityCase) -> list[ParityOutput]:
    results = []
    for key, weight in case.inputs.items():
        expected = case.outputs[key]
        results.append(ParityOutput(key, fit_input_channels(weight, expected.shape[1]), expected, 0.0))
    return results


# What the published code fails on -> our size, latent (frames, height, width), text tokens; the base grid of `_shrink`
# is 3 x 4 x 6 tokens. A number in a name is that of latent frames.
_REFUSED: dict[str, tuple[str, tuple[int, int, int], int]] = {
    r"v15 odd latent frames (\d+)": ("5b-1.5", (0, 4, 6), 6),
    r"v15 grid larger than base grid": ("5b-1.5", (2, 16, 12), 6),
    r"2b more latent frames than the table": ("2b", (5, 4, 6), 6),
    r"2b text shorter than max_text_seq_length": ("2b", (3, 8, 12), 4),
}


def _find_refused(name: str) -> tuple[str, tuple[int, int, int], int] | None:
    for pattern, (size, (frames, height, width), num_text) in _REFUSED.items():
        if found := re.fullmatch(pattern, name):
            return size, (int(found[1]) if found.groups() else frames, height, width), num_text
    return None


@golden(lambda case: bool(case.config) and all(_find_refused(name) is not None for name in case.config))
@torch.no_grad()
def run_refusals(case: ParityCase) -> list[ParityOutput]:
    """Whether ours refuses the same; the message goes into the note."""
    results = []
    for name in case.config:
        refused = _find_refused(name)
        assert refused is not None
        size, latent_FHW, num_text = refused
        message = _find_refusal(_shrink(SIZES[size]), latent_FHW, num_text)
        results.append(ParityOutput(name, torch.tensor(float(bool(message))), torch.tensor(1.0), 0.0, note=message))
    return results


def _shrink(config: CogVideoXFunConfig) -> CogVideoXFunConfig:
    """The same rules with a base grid of 3 x 4 x 6 tokens and as few weights as possible."""
    narrow = replace(config, num_attention_heads=2, attention_head_dim=16, num_layers=1, time_embed_dim=8)
    base = replace(narrow, sample_height=8, sample_width=12, sample_frames=9)
    return replace(base, max_text_seq_length=6, context_in_dim=8)


def _find_refusal(config: CogVideoXFunConfig, latent_FHW: tuple[int, int, int], num_text: int) -> str:
    latent, text = torch.zeros(1, config.in_channels, *latent_FHW), torch.zeros(1, num_text, config.context_in_dim)
    try:
        build_fresh(CogVideoXFunTransformer, config)(latent, torch.zeros(1), {"text": text})
    except ConfigError as error:
        return str(error)
    return ""
