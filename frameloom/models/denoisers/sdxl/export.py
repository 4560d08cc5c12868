"""SDXL leaves as diffusers' UNet, or under the keys of Stability's single files."""

from __future__ import annotations

from frameloom.models.denoisers.export_forms import ExportForms
from frameloom.models.denoisers.sdxl.pipeline import describe_unet
from frameloom.models.denoisers.sdxl.single_file import to_single_file

EXPORT = ExportForms(
    original_layout="single",
    diffusers_layout="diffusers",
    describe_diffusers=describe_unet,
    part="unet",
    pipeline=lambda config: "StableDiffusionXLImg2ImgPipeline" if config.aesthetic else "StableDiffusionXLPipeline",
    join_parts=lambda config, parts: to_single_file(parts, refiner=config.aesthetic),
)
