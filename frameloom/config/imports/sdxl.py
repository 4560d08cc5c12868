"""Commands and configurations of the SDXL trainer (`train.py` with a yaml) as recipes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from frameloom.config.imports.draft import Draft
from frameloom.config.imports.given import Given
from frameloom.config.imports.job import Job, set_keep, set_memory
from frameloom.config.imports.sdxl_config import set_config
from frameloom.config.load import resolve

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
