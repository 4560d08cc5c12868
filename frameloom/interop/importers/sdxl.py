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
from frameloom.interop.importers.given import Given
from frameloom.interop.importers.job import Draft, Job, set_keep, set_length, set_memory

# Published configurations by a part of their name, as they are shipped here; the first that fits counts.
PUBLISHED = {"lora": "sdxl/lora", "multi_aspect": "sdxl/multi-aspect", "sd_xl_base_finetune": "sdxl/finetune"}


def translate(job: Job, config: Given | None, raw: Mapping[str, Any], *, base: str | None, name: str) -> Draft:
    """`config` is the configuration with its names dotted and `raw` as it is written; `base` is the shipped recipe that
    stands for a published one which is not there."""
    job.draft = Draft({"_base_": base, "name": name}) if base else Draft.start(resolve("sdxl/finetune"))
    job.draft.set("name", name)
    if config is not None:
        set_config(job, config, raw)
    _set_weights(job)
    _set_data(job)
    _set_objective(job)
    _set_optimizer(job)
    _set_loop(job)
    _set_cache(job)
    return job.draft


def _set_weights(job: Job) -> None:
    given, draft = job.given, job.draft
    weights = [name for name in (given.get("weight") or "").split(",") if name]
    if not weights:
        return
    text = "names the denoiser; autoencoder and text encoders are read from vae.weights and text.encoders"
    draft.set("model.weights", weights[-1], f"{job.told('weight')}: {text}")
    if weights[-1].endswith(".ckpt"):
        draft.note("model.weights", "MindSpore's .ckpt is not read: take the .safetensors that it was made from")


def _set_data(job: Job) -> None:
    given, draft = job.given, job.draft
    if given.get("data_path"):
        draft.set("data.manifest", given.get("data_path"))
    if given.get("per_batch_size") is not None:
        is_multi = draft.get("data.policy") == "multi_aspect" or draft.values.get("_base_") == "sdxl/multi-aspect"
        policy = "multi_aspect" if is_multi else "fixed"
        draft.set(f"data.{policy}.batch", given.get("per_batch_size"))
    if given.get("lpw"):
        length = 75 * given.get("max_embeddings_multiples") + 2
        encoders = draft.get("text.encoders") or resolve(draft.values["_base_"])["text"]["encoders"]
        draft.set("text.encoders", [{**encoder, "max_length": length} for encoder in encoders])
    if "refiner" in (given.get("version") or ""):
        given.problems.append(f"{job.told('version')}: only the base model is trained")


def _set_objective(job: Job) -> None:
    given, draft = job.given, job.draft
    if given.get("snr_gamma"):
        job.copy("objective.min_snr_gamma", "snr_gamma")
    strategy = given.get("timestep_bias_strategy")
    names = ("multiplier", "begin", "end", "portion")
    if strategy is None:
        for name in names:
            job.ignore(f"timestep_bias_{name}", "no noise level comes more often without --timestep_bias_strategy")
        return
    draft.set("objective.bias", {"strategy": strategy, "multiplier": given.get("timestep_bias_multiplier")})
    used = ("begin", "end") if strategy == "range" else ("portion",)
    for name in names[1:]:
        if name in used:
            job.copy(f"objective.bias.{name}", f"timestep_bias_{name}")
        else:
            job.ignore(f"timestep_bias_{name}", f"the strategy {strategy} does not use it")


def _set_optimizer(job: Job) -> None:
    given, draft = job.given, job.draft
    if given.get("clip_grad"):
        job.copy("optim.clip_norm", "max_grad_norm")
        if given.get("gradient_accumulation_steps") == 1:
            draft.note("optim.clip_norm", "the original limits each tensor by itself; here all of them together")
    else:
        draft.set("optim.clip_norm", None)
        job.ignore("max_grad_norm", "nothing is clipped without --clip_grad")
    if given.get("scale_lr"):
        draft.set("optim.scale_lr", True)


def _set_loop(job: Job) -> None:
    given, draft = job.given, job.draft
    job.copy("seed", "seed")
    job.copy("run.folder", "save_path")
    job.copy("train.accumulate", "gradient_accumulation_steps")
    job.copy("train.log_every", "log_interval")
    job.copy("train.save_every", "save_ckpt_interval")
    set_keep(job, "max_num_ckpt")
    draft.set("train.ema", {"decay": 0.9999} if given.get("use_ema") else None)
    level = given.get("ms_amp_level")
    if level == "O0":
        draft.set("train.precision", "fp32")
    else:
        text = "fp16 and its loss scale as in the original; bf16 needs none, where the device has it"
        draft.set("train.precision", "fp16", f"--ms_amp_level {level}: {text}")
        draft.set("train.loss_scale", {"mode": "static", "initial": 1024})
    set_memory(job, "max_device_memory")
    _set_resume(job)
    if given.get("infer_during_train"):
        every = given.get("infer_interval")
        samples = {"prompts": ["a photo"], "every": every, "steps": 40, "guidance": 5.0}
        text = "--infer_during_train: the original has a prompt of its own; write yours"
        draft.set("validation", {"every": every, "batches": 0, "samples": samples}, text)
    job.leave("device_target", "train.device is auto: a GPU if there is one")


def _set_resume(job: Job) -> None:
    given = job.given
    for name in ("resume_step", "optimizer_weight"):
        job.leave(name, "a run goes on from its own folder, where checkpoints know their step and hold all state")
    if given.get("resume_step"):
        job.draft.set("run.resume", "latest")
    job.leave("save_optimizer", "checkpoints always hold the state of the optimizer")


def _set_cache(job: Job) -> None:
    given, draft = job.given, job.draft
    wants = given.get("cache_latent"), given.get("cache_text_embedding")
    folder, fills = (given.get("cache_path") or "").rstrip("/"), given.get("task") == "cache"
    if not any(wants):
        job.ignore("cache_path", "nothing is cached without --cache_latent and --cache_text_embedding")
        return
    if not folder:
        given.problems.append(f"{job.told('cache_path')}: expected a folder for what is cached")
        return
    if all(wants) and not fills and any((place / folder / "latent_cache").is_dir() for place in job.folders):
        draft.set("data.cache", {"foreign": "sdxl", "foreign_folders": [folder]}, "the original's own cache, as it is")
        return
    section = {key: f"{folder}/{key}" for key, wanted in zip(("latents", "text"), wants, strict=True) if wanted}
    text = "filled by `frameloom data cache` with this recipe" + ("; then train with it" if fills else "")
    draft.set("data.cache", section, text)
    if wants[0]:
        draft.set("data.frame_start", "first")
        text = "a cache holds one cut of each picture, so it is the middle"
        draft.set("data.transforms", [{"name": "resize"}, {"name": "center_crop"}], text)


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


def set_config(job: Job, config: Given, raw: Mapping[str, Any]) -> None:
    """What the configuration itself says; problems and comments go to the same place as the command's."""
    inner = Job(config, job.launcher, job.draft, job.folders)
    if "model" in raw:
        _set_network(inner, raw)
        _set_config_objective(inner, raw)
    if "optim" in raw:
        _set_config_optimizer(inner, raw)
    if "data" in raw:
        _set_config_data(inner)


def _target(raw: Mapping[str, Any], *path: str) -> str:
    """The class that a part of the configuration names, without its module."""
    value: Any = raw
    for key in (*path, "target"):
        value = value.get(key) if isinstance(value, Mapping) else None
    return str(value or "").rpartition(".")[2]


def _set_network(job: Job, raw: Mapping[str, Any]) -> None:
    draft, config = job.draft, job.given
    engine = _target(raw, "model")
    if config.has("model.target") and engine != "DiffusionEngine":
        config.problems.append(f"model.target {engine}: unknown; known: DiffusionEngine")
    depth = config.get(f"{_NET}.transformer_depth") if config.has(f"{_NET}.transformer_depth") else None
    if depth is not None and [int(number) for number in depth] != [1, 2, 10]:
        draft.set("model.overrides", {"transformer_depth": [int(number) for number in depth]})
    if config.has(f"{_NET}.use_recompute"):
        job.copy("train.recompute", f"{_NET}.use_recompute")
    else:
        draft.set("train.recompute", False)
    if _target(raw, "model", "params", "network_config") == "UNetModel_lora":
        rank = config.get(f"{_NET}.lora_dim") or 4
        alpha = config.get(f"{_NET}.lora_alpha") or rank
        draft.set("lora", {"rank": rank, "alpha": alpha, "targets": ["to_q", "to_k", "to_v", "to_out.0"]})
    else:
        for name in ("lora_dim", "lora_alpha"):
            job.ignore(f"{_NET}.{name}", "adapters are those of UNetModel_lora")
    config.has("model.params.scale_factor")
    if config.has("version") and "refiner" in str(config.get("version")):
        config.problems.append(f"version {config.get('version')}: only the base model is trained from a configuration")
    has_amp = not config.get("model.params.disable_first_stage_amp")
    draft.set("vae.precision", "fp16" if has_amp else "fp32")
    _set_trained_text(job)


def _set_trained_text(job: Job) -> None:
    """Text encoders that train with the denoiser; embedders of sizes have no weights."""
    embedders = [
        item for item in _embedders(job.given) if isinstance(item, Mapping) and item.get("is_trainable") is True
    ]
    targets = [target for target in map(_target, embedders) if "CLIP" in target]
    trained = {"clip_bigg" if "OpenCLIP" in target else "clip_l" for target in targets}
    if not trained:
        return
    encoders = job.draft.get("text.encoders") or resolve(job.draft.values["_base_"])["text"]["encoders"]
    here = {"train": True, "precision": "fp32"}
    job.draft.set("text.encoders", [{**item, **(here if item["name"] in trained else {})} for item in encoders])


def _embedders(config: Given) -> list[Any]:
    name = "model.params.conditioner_config.params.emb_models"
    found = config.get(name) if config.has(name) else []
    return found if isinstance(found, list) else []


def _set_config_objective(job: Job, raw: Mapping[str, Any]) -> None:
    draft, config = job.draft, job.given
    if _target(raw, "model", "params", "sigma_sampler_config") == "EDMSampling":
        place = "model.params.sigma_sampler_config.params"
        law = {name: config.get(f"{place}.{name}") for name in ("p_mean", "p_std")}
        draft.set("objective", {"kind": "edm", "edm": law})
        draft.set("vae.size", "playground-2.5")
    else:
        for name in ("p_mean", "p_std"):
            job.ignore(f"model.params.sigma_sampler_config.params.{name}", "only EDMSampling draws by them")
    level = config.get("model.params.loss_fn_config.params.offset_noise_level")
    if level:
        draft.set("objective.noise_offset", level)
        draft.set("objective.noise_offset_per", "sample")


def _set_config_optimizer(job: Job, raw: Mapping[str, Any]) -> None:
    draft, config = job.draft, job.given
    place = "optim.optimizer_config.params"
    job.copy("optim.lr", "optim.base_learning_rate")
    draft.set("optim.betas", [config.get(f"{place}.beta1"), config.get(f"{place}.beta2")])
    job.copy("optim.eps", f"{place}.eps")
    job.copy("optim.weight_decay", f"{place}.weight_decay")
    if _target(raw, "optim", "optimizer_config") == "AdamWeightDecay":
        text = "AdamWeightDecay corrects no bias, so its first steps are several times larger than these"
        draft.note("optim.betas", text)
    kind = _target(raw, "optim", "scheduler_config")
    if not kind:
        return
    names = {"LambdaWarmUpScheduler": "constant", "LambdaWarmUpCosineScheduler": "cosine", "MultiStepLR": "multi_step"}
    if kind not in names:
        config.problems.append(f"optim.scheduler_config.target {kind}: unknown; known: {', '.join(names)}")
        return
    draft.set("optim.schedule", {"name": names[kind], "idle_start": True})
    pairs = (("warmup_steps", "warm_up_steps"), ("min_share", "lr_min"), ("start_share", "lr_start"))
    for ours, theirs in (*pairs, ("decay_steps", "max_decay_steps"), ("milestones", "milestones"), ("gamma", "gamma")):
        value = config.get(f"{_SCHEDULE}.{theirs}")
        if value is not None and value != -1:
            draft.set(f"optim.schedule.{ours}", [int(n) for n in value] if theirs == "milestones" else value)
    config.has(f"{_SCHEDULE}.lr_max")


def _set_config_data(job: Job) -> None:
    draft, config = job.draft, job.given
    batch = config.get("data.per_batch_size")
    sizes = _read_sizes(config)
    if sizes:
        draft.drop("data.fixed")
        draft.set("data.policy", "multi_aspect")
        section = {"batch": batch, "as_published": True}
        if sizes != [list(size) for size in SDXL_SIZES]:
            section["sizes"] = sizes
        text = "the original draws a size for each batch, whatever the shapes; as_published: false takes the nearest"
        draft.set("data.multi_aspect", section, text)
        config.has(f"{_DATASET}.target_size")
    else:
        height, width = _read_size(config)
        draft.set("data.fixed", {"height": height, "width": width, "frames": 1, "batch": batch})
    job.copy("data.workers", "data.num_parallel_workers")
    set_length(job, config.get("data.total_step"), config.get("data.num_epochs"))
    if config.get("data.total_step") is None and not config.get("data.num_epochs"):
        config.problems.append("data.total_step: not given; expected the steps of the run")
    if config.has("data.drop_remainder"):
        job.copy("data.drop_last", "data.drop_remainder")
    job.copy("text.dropout", f"{_DATASET}.prompt_empty_probability")
    least = config.get(f"{_DATASET}.image_filter_size")
    if config.get(f"{_DATASET}.filter_small_size") and least:
        draft.set("data.where", f"height >= {least} and width >= {least}")
    _set_transforms(job, bool(sizes))


def _read_sizes(config: Given) -> list[Any]:
    """The sizes of multi_aspect; none where one size is trained."""
    name = f"{_DATASET}.multi_aspect"
    sizes = (config.get(name) if config.has(name) else None) or []
    if isinstance(sizes, list) and all(isinstance(size, list) and len(size) == 2 for size in sizes):
        return sizes
    config.problems.append(f"{name} is {config.written(name)}; expected a list of [height, width]")
    return []


def _read_size(config: Given) -> tuple[Any, Any]:
    name = f"{_DATASET}.target_size"
    size = config.get(name) if config.has(name) else 1024
    sides = size if isinstance(size, list) else [size]
    if len(sides) in (1, 2):
        return sides[0], sides[-1]
    config.problems.append(f"{name} is {config.written(name)}; expected a number, or [height, width]")
    return 1024, 1024


def _set_transforms(job: Job, is_batched: bool) -> None:
    """Both lists of the configuration, in order."""
    config, steps = job.given, []
    for name in ("transforms", "batched_transforms"):
        listed = config.get(f"{_DATASET}.{name}") if config.has(f"{_DATASET}.{name}") else None
        for item in listed if isinstance(listed, list) else []:
            kind = _target(item) if isinstance(item, Mapping) else str(item)
            if kind not in _STEPS:
                config.problems.append(f"{_DATASET}.{name}: {kind} is unknown; known: {', '.join(_STEPS)}")
            elif kind == "RandomHorizontalFlip":
                job.draft.set("data.flip", 0.5)
            steps += _STEPS.get(kind, [])
    if steps:
        job.draft.set("data.transforms", steps)


def drop_structure(values: Mapping[str, Any]) -> dict[str, Any]:
    """`values` without what is null or spells out the model; settings among them that have a home stay."""
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
