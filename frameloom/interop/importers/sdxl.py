"""Commands and configurations of the SDXL trainer (`train.py` with a yaml) as recipes."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from frameloom.config.loading.recipe import resolve
from frameloom.config.loading.yaml_values import parse_document, read_text
from frameloom.config.schema.buckets import SDXL_SIZES
from frameloom.core.errors import ConfigError
from frameloom.interop.importers.arguments import load_system
from frameloom.interop.importers.job import ImportJob, set_length
from frameloom.interop.importers.parsed_arguments import ParsedArguments

# Published configurations by a part of their name, as they are shipped here; the first that fits counts.
PUBLISHED = {"lora": "sdxl/lora", "multi_aspect": "sdxl/multi-aspect", "sd_xl_base_finetune": "sdxl/finetune"}


def translate(
    job: ImportJob, config: ParsedArguments | None, raw: Mapping[str, Any], *, base: str | None, name: str
) -> None:
    """`config` is the configuration with its names dotted and `raw` as it is written; `base` is the shipped recipe that
    stands for a published one which is not there."""
    given, recipe = job.given, job.recipe
    if base is None:
        recipe.start(resolve("sdxl/finetune"))
    else:
        recipe.values["_base_"] = base
    recipe.set("name", name)
    if config is not None:
        _set_config(ImportJob(config, job.launcher, job.folders, recipe), raw)
    job.apply_table()
    if weights := [name for name in (given.get("weight") or "").split(",") if name]:
        text = "names the denoiser; autoencoder and text encoders are read from vae.weights and text.encoders"
        recipe.set("model.weights", weights[-1], f"{given.quote('weight')}: {text}")
        if weights[-1].endswith(".ckpt"):
            text = "MindSpore's .ckpt is not read: take the .safetensors that it was made from"
            recipe.note("model.weights", text)
    if given.get("per_batch_size") is not None:
        is_multi = recipe.get("data.policy") == "multi_aspect" or base == "sdxl/multi-aspect"
        recipe.set(f"data.{'multi_aspect' if is_multi else 'fixed'}.batch", given.get("per_batch_size"))
    if given.get("lpw"):
        length = 75 * given.get("max_embeddings_multiples") + 2
        recipe.set("text.encoders", [{**encoder, "max_length": length} for encoder in recipe.encoders])
    if "refiner" in (given.get("version") or ""):
        given.problems.append(f"{given.quote('version')}: only the base model is trained")
    if (strategy := given.get("timestep_bias_strategy")) is not None:
        recipe.set("objective.bias", {"strategy": strategy, "multiplier": given.get("timestep_bias_multiplier")})
        for name in ("begin", "end", "portion"):
            if (name == "portion") != (strategy == "range"):
                job.copy(f"objective.bias.{name}", f"timestep_bias_{name}")
            else:
                job.ignore(f"timestep_bias_{name}", f"the strategy {strategy} does not use it")
    _set_loop(job)
    _set_cache(job)


def _set_loop(job: ImportJob) -> None:
    given, recipe = job.given, job.recipe
    if given.get("clip_grad") and given.get("gradient_accumulation_steps") == 1:
        recipe.note("optim.clip_norm", "the original limits each tensor by itself; here all of them together")
    level = given.get("ms_amp_level")
    if level == "O0":
        recipe.set("train.precision", "fp32")
    else:
        text = "fp16 and its loss scale as in the original; bf16 needs none, where the device has it"
        recipe.set("train.precision", "fp16", f"--ms_amp_level {level}: {text}")
        recipe.set("train.loss_scale", {"mode": "static", "initial": 1024})
    if given.get("resume_step"):
        recipe.set("run.resume", "latest")
    if given.get("infer_during_train"):
        every = given.get("infer_interval")
        samples = {"prompts": ["a photo"], "every": every, "steps": 40, "guidance": 5.0}
        text = "--infer_during_train: the original has a prompt of its own; write yours"
        recipe.set("validation", {"every": every, "batches": 0, "samples": samples}, text)


def _set_cache(job: ImportJob) -> None:
    given, recipe = job.given, job.recipe
    wants = given.get("cache_latent"), given.get("cache_text_embedding")
    folder, fills = (given.get("cache_path") or "").rstrip("/"), given.get("task") == "cache"
    if not any(wants):
        job.ignore("cache_path", "nothing is cached without --cache_latent and --cache_text_embedding")
        return
    if not folder:
        given.problems.append(f"{given.quote('cache_path')}: expected a folder for what is cached")
        return
    if all(wants) and not fills and any((parent / folder / "latent_cache").is_dir() for parent in job.folders):
        text = "the original's own cache, as it is"
        recipe.set("data.cache", {"external": "sdxl", "external_folders": [folder]}, text)
        return
    section = {key: f"{folder}/{key}" for key, wanted in zip(("latents", "text"), wants, strict=True) if wanted}
    text = "filled by `frameloom data cache` with this recipe" + ("; then train with it" if fills else "")
    recipe.set("data.cache", section, text)
    if wants[0]:
        recipe.set("data.frame_start", "first")
        text = "a cache holds one cut of each picture, so it is the middle"
        recipe.set("data.transforms", [{"name": "resize"}, {"name": "center_crop"}], text)


_STEPS: dict[str, list[dict[str, str]]] = {
    "Resize": [{"name": "resize"}],
    "AddOriginalImageSizeAsTupleAndCropToSquare": [{"name": "random_crop"}],
    "CenterCrop": [{"name": "center_crop"}],
    "BatchedResizedAndRandomCrop": [{"name": "resize", "rounding": "up"}, {"name": "random_crop"}],
    "RandomHorizontalFlip": [],
    "Rescaler": [],
    "Transpose": [],
    "BatchedRescaler": [],
    "BatchedTranspose": [],
}
_NET = "model.params.network_config.params"
_SCHEDULE = "optim.scheduler_config.params"
_DATASET = "data.dataset_config.params"
# Parts of a configuration that only spell out the published model; the shipped recipe has them.
_STRUCTURE = (
    "model.params.first_stage_config.",
    "model.params.conditioner_config.",
    "model.params.denoiser_config.",
    "model.params.sigma_sampler_config.",
    "model.params.loss_fn_config.",
    "model.params.network_config.",
    "model.params.latents_",
)
_TARGETS = ("optim.optimizer_config.target", "optim.scheduler_config.target", "data.dataset_config.target")


def _set_config(job: ImportJob, raw: Mapping[str, Any]) -> None:
    """What the configuration itself says, of the sections that it has."""
    job.apply_table(raw.keys())
    if "model" in raw:
        _set_network(job, raw)
        _set_config_objective(job, raw)
    if "optim" in raw:
        _set_config_optimizer(job, raw)
    if "data" in raw:
        _set_config_data(job)


def _target(raw: Mapping[str, Any], *path: str) -> str:
    """The class that a part of the configuration names, without its module."""
    value: Any = raw
    for key in (*path, "target"):
        value = value.get(key) if isinstance(value, Mapping) else None
    return str(value or "").rpartition(".")[2]


def _set_network(job: ImportJob, raw: Mapping[str, Any]) -> None:
    recipe, config = job.recipe, job.given
    engine = _target(raw, "model")
    if config.has("model.target") and engine != "DiffusionEngine":
        config.problems.append(f"model.target {engine}: unknown; known: DiffusionEngine")
    depth = config.get(f"{_NET}.transformer_depth")
    if depth is not None and [int(number) for number in depth] != [1, 2, 10]:
        recipe.set("model.overrides", {"transformer_depth": [int(number) for number in depth]})
    if _target(raw, "model", "params", "network_config") == "UNetModel_lora":
        rank = config.get(f"{_NET}.lora_dim") or 4
        alpha = config.get(f"{_NET}.lora_alpha") or rank
        recipe.set("lora", {"rank": rank, "alpha": alpha, "targets": ["to_q", "to_k", "to_v", "to_out.0"]})
    else:
        for name in ("lora_dim", "lora_alpha"):
            job.ignore(f"{_NET}.{name}", "adapters are those of UNetModel_lora")
    if config.has("version") and "refiner" in str(config.get("version")):
        config.problems.append(f"version {config.get('version')}: only the base model is trained from a configuration")
    has_amp = not config.get("model.params.disable_first_stage_amp")
    recipe.set("vae.precision", "fp16" if has_amp else "fp32")
    # Text encoders that train with the denoiser; embedders of sizes have no weights.
    embedders = config.get("model.params.conditioner_config.params.emb_models")
    trained = {
        "clip_bigg" if "OpenCLIP" in _target(item) else "clip_l"
        for item in (embedders if isinstance(embedders, list) else [])
        if isinstance(item, Mapping) and item.get("is_trainable") is True and "CLIP" in _target(item)
    }
    if trained:
        here = {"train": True, "precision": "fp32"}
        encoders = [{**item, **(here if item["name"] in trained else {})} for item in recipe.encoders]
        recipe.set("text.encoders", encoders)


def _set_config_objective(job: ImportJob, raw: Mapping[str, Any]) -> None:
    recipe, config, params = job.recipe, job.given, "model.params.sigma_sampler_config.params"
    if _target(raw, "model", "params", "sigma_sampler_config") == "EDMSampling":
        distribution = {name: config.get(f"{params}.{name}") for name in ("p_mean", "p_std")}
        recipe.set("objective", {"kind": "edm", "edm": distribution})
        recipe.set("vae.size", "playground-2.5")
    else:
        for name in ("p_mean", "p_std"):
            job.ignore(f"{params}.{name}", "only EDMSampling draws by them")
    if level := config.get("model.params.loss_fn_config.params.offset_noise_level"):
        recipe.set("objective.noise_offset", level)
        recipe.set("objective.noise_offset_per", "sample")


def _set_config_optimizer(job: ImportJob, raw: Mapping[str, Any]) -> None:
    recipe, config, params = job.recipe, job.given, "optim.optimizer_config.params"
    recipe.set("optim.betas", [config.get(f"{params}.beta1"), config.get(f"{params}.beta2")])
    if _target(raw, "optim", "optimizer_config") == "AdamWeightDecay":
        text = "AdamWeightDecay corrects no bias, so its first steps are several times larger than these"
        recipe.note("optim.betas", text)
    kind = _target(raw, "optim", "scheduler_config")
    if not kind:
        return
    names = {"LambdaWarmUpScheduler": "constant", "LambdaWarmUpCosineScheduler": "cosine", "MultiStepLR": "multi_step"}
    if kind not in names:
        config.problems.append(f"optim.scheduler_config.target {kind}: unknown; known: {', '.join(names)}")
        return
    recipe.set("optim.schedule", {"name": names[kind], "idle_start": True})
    config.has(f"{_SCHEDULE}.lr_max")  # the rate itself is the largest
    pairs = (("warmup_steps", "warm_up_steps"), ("min_share", "lr_min"), ("start_share", "lr_start"))
    for ours, theirs in (*pairs, ("decay_steps", "max_decay_steps"), ("milestones", "milestones"), ("gamma", "gamma")):
        value = config.get(f"{_SCHEDULE}.{theirs}")
        if value is not None and value != -1:
            recipe.set(f"optim.schedule.{ours}", [int(n) for n in value] if theirs == "milestones" else value)


def _set_config_data(job: ImportJob) -> None:
    recipe, config = job.recipe, job.given
    batch = config.get("data.per_batch_size")
    sizes = config.get(f"{_DATASET}.multi_aspect") or []
    if not isinstance(sizes, list) or not all(isinstance(size, list) and len(size) == 2 for size in sizes):
        config.problems.append(f"{config.quote(f'{_DATASET}.multi_aspect', 'is')}; expected a list of [height, width]")
        sizes = []
    if sizes:
        recipe.drop("data.fixed")
        recipe.set("data.policy", "multi_aspect")
        section = {"batch": batch, "as_published": True}
        if sizes != [list(size) for size in SDXL_SIZES]:
            section["sizes"] = sizes
        text = "the original draws a size for each batch, whatever the shapes; as_published: false takes the nearest"
        recipe.set("data.multi_aspect", section, text)
        config.has(f"{_DATASET}.target_size")
    else:
        name = f"{_DATASET}.target_size"
        size = config.get(name) if config.has(name) else 1024
        sides = size if isinstance(size, list) else [size]
        if len(sides) not in (1, 2):
            config.problems.append(f"{config.quote(name, 'is')}; expected a number, or [height, width]")
            sides = [1024]
        recipe.set("data.fixed", {"height": sides[0], "width": sides[-1], "frames": 1, "batch": batch})
    set_length(job, config.get("data.total_step"), config.get("data.num_epochs"))
    if config.get("data.total_step") is None and not config.get("data.num_epochs"):
        config.problems.append("data.total_step: not given; expected the steps of the run")
    least = config.get(f"{_DATASET}.image_filter_size")
    if config.get(f"{_DATASET}.filter_small_size") and least:
        recipe.set("data.where", f"height >= {least} and width >= {least}")
    steps = []
    for name in ("transforms", "batched_transforms"):
        listed = config.get(f"{_DATASET}.{name}")
        for item in listed if isinstance(listed, list) else []:
            kind = _target(item) if isinstance(item, Mapping) else str(item)
            if kind not in _STEPS:
                config.problems.append(f"{_DATASET}.{name}: {kind} is unknown; known: {', '.join(_STEPS)}")
            elif kind == "RandomHorizontalFlip":
                recipe.set("data.flip", 0.5)
            steps += _STEPS.get(kind, [])
    if steps:
        recipe.set("data.transforms", steps)


def drop_structure(values: Mapping[str, Any]) -> dict[str, Any]:
    """`values` without what is null or spells out the model; settings among them that a recipe has stay."""
    rows = load_system("sdxl").programs["configuration"]
    return {
        name: value
        for name, value in values.items()
        if value is not None and (name in rows or not name.startswith(_STRUCTURE)) and name not in _TARGETS
    }


_PLACEHOLDER = re.compile(r"^\s*(?:- )?\.\.\.\s*$")
_EMPTY = re.compile(r"^(\s*[^#\n]*:)\s*\.\.\.\s*$")


def read_sdxl_yaml(path: Path) -> tuple[dict[str, Any], bool]:
    """(the values, whether something was left out); line numbers of mistakes are those of the file."""
    text = read_text(path, shown=str(path))
    lines = ["" if _PLACEHOLDER.match(line) else _EMPTY.sub(r"\1", line) for line in text.splitlines()]
    cleaned = "\n".join(lines)
    value, _ = parse_document(cleaned, where=str(path))
    if not isinstance(value, dict):
        raise ConfigError(f"{path}: no configuration; expected keys such as model, optim and data")
    if "model" not in value and "params" in value:
        value = {"model": value}  # the inside of that section alone
    return value, lines != text.splitlines()
