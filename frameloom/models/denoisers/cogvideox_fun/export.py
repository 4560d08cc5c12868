"""CogVideoX-Fun leaves under its published keys, which are those of diffusers too."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from frameloom.models.denoisers.cogvideox_fun.config import CogVideoXFunConfig
from frameloom.models.denoisers.cogvideox_fun.published import write_published
from frameloom.models.denoisers.export_forms import ExportForms, as_json

# diffusers has no pipeline for inpaint models, whose mask has a channel of its own.
_PIPELINES = {"none": "CogVideoXPipeline", "control": "CogVideoXFunControlPipeline"}


def describe_diffusers(config: CogVideoXFunConfig) -> Mapping[str, Any]:
    # A setting of the published trainer that no model computes with.
    return as_json({name: one for name, one in write_published(config).items() if name != "add_noise_in_inpaint_model"})


EXPORT = ExportForms(
    describe_original=lambda config: as_json(write_published(config)),
    describe_diffusers=describe_diffusers,
    pipeline=lambda config: _PIPELINES.get(config.condition, ""),
)
