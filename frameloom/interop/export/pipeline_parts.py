"""The parts of a diffusers pipeline from the recipe of a run: autoencoder, text encoders, tokenizers, scheduler.

`find_obstacle` names what a pipeline cannot hold, so that no export computes something else than the run.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from frameloom.builders.vae import LoadedVAE, build_vae
from frameloom.config.schema.models import TextEncoderSection
from frameloom.config.schema.objective import DDPMObjectiveSection, beta_range
from frameloom.config.schema.recipe import Recipe
from frameloom.interop.convert.files import open_source
from frameloom.interop.convert.pipeline import PartFolder, PipelineFolder, Tokenizer, arrange_pipeline
from frameloom.models.text.transformers_folder import find_folder
from frameloom.weights.files import read_config
from frameloom.weights.lazy_tensors import LazyTensors, defer_tensors, rename_tensors

_SDXL = ("StableDiffusionXLPipeline", "StableDiffusionXLImg2ImgPipeline")
_PREDICTIONS = {"v": "v_prediction", "epsilon": "epsilon", "sample": "sample"}
# What each pipeline is made of, in the words of a recipe.
_VAES = {"StableDiffusionXL": "kl", "CogVideoX": "cogvideox"}
_TEXTS: dict[str, tuple[str, ...]] = {
    "StableDiffusionXLPipeline": ("clip_l", "clip_bigg"),
    "StableDiffusionXLImg2ImgPipeline": ("clip_bigg",),
    "CogVideoXPipeline": ("t5",),
    "CogVideoXFunControlPipeline": ("t5",),
}


def build_pipeline(recipe: Recipe, kind: str, denoiser: PartFolder) -> PipelineFolder:
    """The whole pipeline around a trained denoiser; other parts are read one tensor at a time."""
    vae = build_vae(recipe.vae.model_copy(update={"precision": "fp32", "mini_batch": None}), seed=recipe.seed)
    state, description = defer_tensors(vae.model.state_dict()), describe_vae_of(vae)
    parts = [denoiser, PartFolder("vae", state, description, "diffusers", str(description["_class_name"]))]
    tokenizers: dict[str, Tokenizer] = {}
    for encoder in recipe.text.encoders:
        part, folder = _open_text(encoder)
        parts.append(part)
        tokenizers[part.name.replace("text_encoder", "tokenizer")] = (folder, encoder.max_length)
    assert isinstance(recipe.objective, DDPMObjectiveSection)  # find_obstacle refuses others
    scheduler = _describe_scheduler(recipe.objective, kind)
    if kind not in _SDXL:
        return PipelineFolder(kind, parts, scheduler, tokenizers)
    named: dict[Any, PartFolder] = {part.name: part for part in parts}
    return arrange_pipeline(
        {name: part.tensors for name, part in named.items()},
        {name: part.config for name, part in named.items()},
        tokenizers,
        scheduler=scheduler,
        force_zeros=all(encoder.null == "zeros" for encoder in recipe.text.encoders),
    )


def find_obstacle(recipe: Recipe, kind: str) -> str:
    """Why this run is no pipeline of the class `kind`; empty when it is one."""
    vae = next(name for start, name in _VAES.items() if kind.startswith(start))
    texts = tuple(encoder.name for encoder in recipe.text.encoders)
    objective = recipe.objective
    if recipe.vae.name != vae:
        return f"its autoencoder is {recipe.vae.name}, the pipeline has {vae}"
    if texts != _TEXTS[kind]:
        return f"its text encoders are {', '.join(texts)}, the pipeline has {', '.join(_TEXTS[kind])}"
    if recipe.text.rescale:
        return "text.rescale changes the text states before the model sees them"
    if not isinstance(objective, DDPMObjectiveSection) or objective.kind not in _PREDICTIONS:
        return f"objective.kind is {objective.kind}, the schedulers of the pipeline predict {', '.join(_PREDICTIONS)}"
    if kind in _SDXL and objective.snr_shift != 1:
        return f"objective.snr_shift is {objective.snr_shift:g}, the scheduler of the pipeline has none"
    return ""


def describe_vae_of(vae: LoadedVAE) -> Mapping[str, Any]:
    """The `config.json` of an autoencoder for diffusers; empty where diffusers has no such class."""
    if vae.name == "kl":
        from frameloom.models.denoisers.sdxl.weights import describe_vae

        return describe_vae(vae.config)
    if vae.name == "cogvideox":
        content: Mapping[str, Any] = vae.config.to_original()
        return content
    return {}


def _open_text(section: TextEncoderSection) -> tuple[PartFolder, Path]:
    """The weights of a text encoder as transformers names them, and the folder of its tokenizer."""
    name = "text_encoder_2" if section.name == "clip_bigg" else "text_encoder"
    classes = {"clip_l": "CLIPTextModel", "clip_bigg": "CLIPTextModelWithProjection", "t5": "T5EncoderModel"}
    path = Path(section.path or "")
    if path.is_file():
        from frameloom.builders.text import open_text_file

        file = open_text_file(path, encoder=section.name, tokenizer=section.tokenizer)
        tensors = file.tensors if isinstance(file.tensors, LazyTensors) else defer_tensors(file.tensors)
        return PartFolder(name, tensors, file.config, "transformers", classes[section.name]), file.tokenizer
    from frameloom.models.text import clip, t5

    kinds = {"t5"} if section.name == "t5" else {"clip_text_model", "clip"}
    subfolders = t5.SUBFOLDERS if section.name == "t5" else clip.SUBFOLDERS[section.name]
    folder = find_folder(path, encoder=section.name, kinds=kinds, subfolders=subfolders)
    tensors, config = open_source(folder.weights).tensors, read_config(folder.weights)
    if "text_config" in config:  # a whole CLIP, of which the pipeline takes the text half
        tensors = LazyTensors({one: tensors.pending[one] for one in tensors if one.startswith("text_")})
        config = {**config["text_config"], "model_type": "clip_text_model"}
    if section.name != "t5":
        # As published folders have it; new versions of transformers leave the outer name out, and read both.
        outer = lambda name: name if name.startswith("text_") else f"text_model.{name}"  # noqa: E731
        tensors = rename_tensors(tensors, outer, where=str(folder.weights))
    return PartFolder(name, tensors, config, "transformers", classes[section.name]), folder.tokenizer


def _describe_scheduler(objective: DDPMObjectiveSection, kind: str) -> dict[str, Any]:
    start, end = beta_range(objective)
    zero_snr = objective.kind == "v" if objective.zero_terminal_snr is None else objective.zero_terminal_snr
    content: dict[str, Any] = {
        "_class_name": "EulerDiscreteScheduler" if kind in _SDXL else "CogVideoXDDIMScheduler",
        "num_train_timesteps": 1000,
        "beta_start": start,
        "beta_end": end,
        "beta_schedule": objective.betas,
        "prediction_type": _PREDICTIONS[objective.kind],
        "rescale_betas_zero_snr": zero_snr,
        "timestep_spacing": objective.spacing,
        "steps_offset": 1 if objective.spacing == "leading" else 0,
    }
    if kind in _SDXL:
        return content | {"interpolation_type": "linear", "use_karras_sigmas": False}
    return content | {"snr_shift_scale": objective.snr_shift, "clip_sample": False, "set_alpha_to_one": True}
