"""Sampling: the defaults of a recipe, the request for one video, and clips drawn while a denoiser trains."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from frameloom.config.schema.section import Count, ExpectedText, Section, Share
from frameloom.config.schema.training import Interval
from frameloom.diffusion.tables import SamplerName

Scale = Annotated[float, Field(ge=0)]


class LoraChoice(Section):
    path: str = Field(description="a LoRA: a file, or the folder of a run", examples=["runs/style/export"])
    scale: Scale = Field(default=1.0, description="its strength")


def _read_list(value: Any) -> Any:
    """Behind a validator that sees both, pydantic takes a list for no tuple."""
    if not isinstance(value, list):
        return value
    try:
        return tuple(LoraChoice.model_validate(one) for one in value)
    except ValueError:
        raise ValueError("not a list of {path, scale}") from None


Loras = Annotated[
    str | tuple[LoraChoice, ...] | None, BeforeValidator(_read_list), ExpectedText("a path, or a list of {path, scale}")
]


class SampleSection(Section):
    steps: Count = Field(default=30, description="solver steps")
    guidance: Scale = Field(default=4.0, description="classifier-free guidance scale; 1: none")
    frames: Count = Field(default=9, description="frames of the video")
    height: Count = Field(default=64, description="height in pixels")
    width: Count = Field(default=64, description="width in pixels")
    fps: Annotated[float, Field(gt=0)] = Field(default=8, description="frame rate of the written file")
    weights: Literal["auto", "ema", "raw"] = Field(
        default="auto", description="averaged (ema) or last (raw) weights; auto: averaged where there are any"
    )
    lora: Loras = Field(
        default=None,
        description="a LoRA to add to the model: a file, or the folder of a run; or several, each with its scale",
    )
    words: tuple[str, ...] = Field(
        default=(),
        description="words learnt by textual inversion, to be used in prompts: files, or folders of inversion runs",
    )
    lora_scale: Scale = Field(
        default=1.0, description="strength of adapters, the run's own and those of sample.lora; 0: without them"
    )
    lora_merge: bool = Field(
        default=True, description="add adapters into the weights; false: beside them, slower, the weights untouched"
    )
    sampler: SamplerName = Field(default="default", description="how steps are made; default: the objective's own way")
    negative_prompt: str = Field(default="", description="what not to show; empty: the empty caption")
    guidance_law: Literal["constant", "oscillating", "oscillating_text", "oscillating_image", "dynamic"] = Field(
        default="constant",
        description="over the steps: oscillating to 1 (Open-Sora 2.0; both, text or image), or growing from 1 "
        "(dynamic, CogVideoX)",
    )
    guidance_rescale: Share = Field(
        default=0.0, description="how far the spread of a guided prediction is pulled back; 0.7 is usual with zero SNR"
    )
    image_guidance: Scale | None = Field(
        default=None, description="guidance of what is given, beside that of text (Open-Sora 2.0: 3); null: none"
    )
    image_guidance_by_frame: bool = Field(
        default=True, description="image guidance that grows along the frames and fades over the steps (Open-Sora 2.0)"
    )
    strength: Annotated[float, Field(gt=0, le=1)] | None = Field(
        default=None, description="video to video: share of the steps that are made; null: a given video is continued"
    )
    known_frames: Count | None = Field(
        default=None, description="frames taken over from the end of a video that is continued; null: about half"
    )
    keep: Literal["latent", "pixels", "none"] = Field(
        default="latent",
        description="put what is given back: into the latent before it is decoded, into the frames, or not at all",
    )
    motion_score: Annotated[int, Field(ge=0)] | None = Field(
        default=None,
        description="motion score written behind the prompt, as Open-Sora 2.0 is trained; null: as text.note says",
    )
    precision: Literal["fp32", "bf16", "fp16"] = Field(default="fp32", description="dtype of the denoiser")
    tile_px: Count | None = Field(
        default=None, description="side of the tiles that the autoencoder cuts large pictures into; null: none"
    )
    offload: bool = Field(default=False, description="keep each part in host memory while another one works")
    cache_threshold: Share = Field(
        default=0.0, description="skip blocks whose inputs changed less than this since they last ran; 0: run all"
    )
    format: Literal["mp4", "webm", "gif", "png"] = Field(
        default="mp4", description="of clips; png: a folder of frames. A single frame is always a png file"
    )


class SampleRequest(SampleSection):
    """One video or picture to make; the same request gives the same one, alone or among others.

    The one list of what can be asked for: the flags of `frameloom sample`, the columns of a prompts file, the form of
    the studio and the arguments of `model.sample` are its fields. The files given decide the mode (`sampling.given`).
    """

    prompt: str = Field(default="", description="what to show")
    seed: int = Field(default=0, description="seed of the noise")
    name: str | None = Field(default=None, description="name of the file; null: the prompt", coerce_numbers_to_str=True)
    ratio: str | None = Field(
        default=None, description="width:height with about as many pixels as width x height, as 16:9"
    )
    image: Path | None = Field(default=None, description="first frame: a picture to start from")
    last_image: Path | None = Field(default=None, description="last frame: a picture to end with")
    video: Path | None = Field(default=None, description="a video to continue, or to change with strength")
    mask: Path | None = Field(default=None, description="a picture or video; white parts of the video are made anew")
    control: Path | None = Field(default=None, description="a video that a control model follows")


MEDIA = ("image", "last_image", "video", "mask", "control")
"""fields of a request that name files"""
MODEL_SETTINGS = ("weights", "lora", "words", "lora_scale", "lora_merge", "precision", "tile_px", "offload")
"""settings that a model is loaded with; all other fields belong to a single request"""


class SamplesSection(Section):
    prompts: tuple[str, ...] = Field(
        default=(), examples=[["a red circle moves left"]], description="what to show, one sample for each"
    )
    prompts_file: str | None = Field(default=None, description="a text file with more of them, one per line")
    images: tuple[str, ...] = Field(
        default=(),
        description="picture files, the given first frame of each prompt's clip; only for models trained with known",
    )
    every: Interval = Field(default=500, description="steps or epochs between samples; the last step always draws them")
    at_start: bool = Field(
        default=False, description="draw them before the first step too, so that a mistake is seen at once"
    )
    seed: Annotated[int, Field(ge=0, lt=2**62)] = Field(
        default=0, description="seed of the first sample, the same at every step; each further one counts up"
    )
    steps: Count | None = Field(default=None, description="solver steps; null, here and below: as in sample")
    guidance: Annotated[float, Field(ge=0)] | None = Field(default=None, description="classifier-free guidance scale")
    frames: Count | None = Field(default=None, description="frames of a clip")
    height: Count | None = Field(default=None, description="height in pixels")
    width: Count | None = Field(default=None, description="width in pixels")
    batch: Count = Field(default=1, description="samples drawn at once; more need more memory")
