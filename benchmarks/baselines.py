"""The same model a second time, with the same weights: diffusers' class of it, or it written out.

A baseline takes what our models take and gives the same prediction.

Shape letters: B batch, C channels, F frames, H height, W width.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from benchmarks.harness import load_baseline
from benchmarks.plain_models import PlainOpenSoraT2V
from frameloom.models.denoisers.base import NUM_TIMESTEPS, find_index
from frameloom.models.layers.patches import pack, unpack
from frameloom.models.registry import get_denoiser
from frameloom.models.spec import token_grid
from frameloom.models.text.base import TextStates

Predict = Callable[[Tensor, Tensor, TextStates], Tensor]


@dataclass(frozen=True)
class Baseline:
    """`name` says what the other is."""

    name: str
    module: nn.Module
    predict: Predict

    def list_blocks(self) -> list[nn.Module]:
        """The repeated blocks of a transformer: what stands in the lists at its top."""
        lists = [child for child in self.module.children() if isinstance(child, nn.ModuleList)]
        return [block for one in lists for block in one]


def build_baseline(family: str, model: nn.Module) -> Baseline:
    return _BUILDERS[family](model)


def _describe(family: str, config: Any) -> tuple[str, dict[str, Any]]:
    """Name and arguments of diffusers' class for the same architecture."""
    forms = get_denoiser(family).export_forms
    assert forms.describe_diffusers is not None
    values = dict(forms.describe_diffusers(config))
    name = values.pop("_class_name")
    return name, values


def _build_flux(model: nn.Module) -> Baseline:
    from frameloom.models.denoisers.opensora2.weights import export_original

    config: Any = model.config
    name, values = _describe("opensora2", config)
    other = load_baseline("diffusers").FluxTransformer2DModel(**values)
    other.load_state_dict(export_original(model, "diffusers"))

    def predict(noisy_BCFHW: Tensor, timestep_B: Tensor, text: TextStates) -> Tensor:
        _, _, frames, height, width = noisy_BCFHW.shape
        grid = token_grid((frames, height, width), config.patch_size)
        (tokens,) = other(
            hidden_states=pack(noisy_BCFHW, config.patch_size),
            encoder_hidden_states=text.tokens_BKD,
            pooled_projections=text.pooled_BD,
            timestep=timestep_B,
            img_ids=torch.cartesian_prod(*(torch.arange(float(count)) for count in grid)),
            txt_ids=torch.zeros(text.tokens_BKD.shape[1], 3),
            return_dict=False,
        )
        return unpack(tokens, grid, config.patch_size)

    return Baseline(f"diffusers {name}", other, predict)


def _build_cogvideox(model: nn.Module) -> Baseline:
    from frameloom.models.denoisers.cogvideox_fun.model import turn_table
    from frameloom.models.denoisers.cogvideox_fun.weights import export_original

    name, values = _describe("cogvideox_fun", model.config)
    other = load_baseline("diffusers").CogVideoXTransformer3DModel(**values)
    other.load_state_dict(export_original(model))
    tables: dict[tuple[int, ...], Any] = {}

    def predict(noisy_BCFHW: Tensor, timestep_B: Tensor, text: TextStates) -> Tensor:
        size = noisy_BCFHW.shape[2], noisy_BCFHW.shape[3], noisy_BCFHW.shape[4]
        if size not in tables:  # its pipeline makes them once, too
            config = cast(Any, model).config
            tables[size] = _double_rotary(turn_table(config, config.token_grid(size)))
        arguments = (noisy_BCFHW.transpose(1, 2), text.tokens_BKD, find_index(timestep_B).long())
        (made,) = other(*arguments, image_rotary_emb=tables[size], return_dict=False)
        return cast(Tensor, made).transpose(1, 2)

    return Baseline(f"diffusers {name}", other, predict)


def _double_rotary(table_N1P: Tensor) -> tuple[Tensor, Tensor]:
    """Cosines and sines as diffusers takes them: each twice."""
    doubled = table_N1P.squeeze(1).repeat_interleave(2, dim=-1)
    return doubled.real, doubled.imag


def _build_latte(model: nn.Module) -> Baseline:
    from frameloom.models.denoisers.latte.weights import export_original

    name, values = _describe("latte", model.config)
    other = load_baseline("diffusers").LatteTransformer3DModel(**values)
    other.load_state_dict(export_original(model, "diffusers"))

    def predict(noisy_BCFHW: Tensor, timestep_B: Tensor, text: TextStates) -> Tensor:
        (made,) = other(
            noisy_BCFHW, timestep=find_index(timestep_B), encoder_hidden_states=text.tokens_BKD, return_dict=False
        )
        return cast(Tensor, made)[:, : noisy_BCFHW.shape[1]]

    return Baseline(f"diffusers {name}", other, predict)


def _build_unet(model: nn.Module) -> Baseline:
    from frameloom.models.denoisers.sdxl.model import PIXELS_PER_CELL, diffusers_arguments

    other = load_baseline("diffusers").UNet2DConditionModel(**diffusers_arguments(cast(Any, model).architecture))
    other.load_state_dict(model.state_dict())

    def predict(noisy_BCFHW: Tensor, timestep_B: Tensor, text: TextStates) -> Tensor:
        shown = [side * PIXELS_PER_CELL for side in noisy_BCFHW.shape[-2:]]
        sizes = torch.tensor([*shown, 0, 0, *shown]).expand(len(noisy_BCFHW), 6)
        (made,) = other(
            noisy_BCFHW[:, :, 0],
            timestep_B * NUM_TIMESTEPS,
            text.tokens_BKD,
            added_cond_kwargs={"text_embeds": text.pooled_BD, "time_ids": sizes},
            return_dict=False,
        )
        return cast(Tensor, made)[:, :, None]

    return Baseline("diffusers UNet2DConditionModel", other, predict)


def _build_written_out(model: nn.Module) -> Baseline:
    other = PlainOpenSoraT2V(cast(Any, model).config)
    other.load_state_dict(model.state_dict())

    def predict(noisy_BCFHW: Tensor, timestep_B: Tensor, text: TextStates) -> Tensor:
        made: Tensor = other(noisy_BCFHW, find_index(timestep_B), text.tokens_BKD, text.mask_BK)
        return made

    return Baseline("the model written out", other, predict)


_BUILDERS: dict[str, Callable[[nn.Module], Baseline]] = {
    "sdxl": _build_unet,
    "latte": _build_latte,
    "opensora_plan": _build_written_out,
    "cogvideox_fun": _build_cogvideox,
    "opensora2": _build_flux,
}
