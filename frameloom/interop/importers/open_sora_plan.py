"""Commands of Open-Sora-Plan 1.3 (`opensora/train/train_t2v_diffusers.py`) as recipes."""

from __future__ import annotations

import math

from frameloom.config.loading.recipe import resolve
from frameloom.interop.importers.job import PRECISIONS, Draft, Job, set_deepspeed, set_keep, set_length, set_zero
from frameloom.interop.importers.mindspore import set_embeddings, set_loop, set_optimizer, set_parts

# The original on PyTorch has other defaults than its port; launchers tell them apart.
_TORCH_DEFAULTS = {
    "start_learning_rate": 1e-4,
    "lr_warmup_steps": 500,
    "optim_eps": 1e-15,
    "group_strategy": "not_grouping",
    "clip_grad": True,
    "ema_decay": 0.9999,
    "noise_offset": 0.0,
    "vae_precision": "bf16",
    "text_embed_cache": False,
}
_KINDS = {"epsilon": "epsilon", "v_prediction": "v", "sample": "sample"}


def translate(job: Job) -> Draft:
    """`opensora/train/train_t2v_diffusers.py` of 1.3."""
    draft = job.draft = Draft.start(resolve("opensora_plan/stage1-full"))
    if job.is_torch:
        job.given.defaults.update(_TORCH_DEFAULTS)
    for section in ("optim", "train", "objective"):
        draft.set(section, {})
    _set_model(job)
    set_parts(job, "text_encoder_name_1", "text_encoder_name")
    if job.given.get("vae_fp32"):
        draft.set("vae.precision", "fp32")
    job.copy("text.encoders.0.max_length", "model_max_length")
    job.copy("text.dropout", "cfg")
    _set_grouped(job)
    _set_objective(job)
    set_optimizer(job, rate=("start_learning_rate", "learning_rate"))
    set_loop(job, "output_dir")
    _set_loop(job)
    _set_validation(job)
    return draft


def _set_model(job: Job) -> None:
    draft, given = job.draft, job.given
    name = given.get("model")
    sizes = {"OpenSoraT2V_v1_3-2B/122": "2b", "OpenSoraInpaint_v1_3-2B/122": "2b-inpaint"}
    if name not in sizes:
        given.problems.append(f"{job.told('model')}: unknown; known: {', '.join(sizes)}")
        return
    draft.set("model.size", sizes[name])
    overrides = {"sparse1d": bool(given.get("sparse1d"))}
    if given.get("sparse1d"):
        overrides["sparse_n"] = given.get("sparse_n")
    for axis in ("t", "h", "w"):
        if (scale := given.get(f"interpolation_scale_{axis}")) != 1:
            overrides[f"interpolation_scale_{axis}"] = scale
    draft.set("model.overrides", overrides)
    if name.startswith("OpenSoraInpaint"):
        draft.set("known", {"law": "frames"}, "the published shares; the original reads them from a file of its own")


def _set_grouped(job: Job) -> None:
    draft, given = job.draft, job.given
    is_forced = bool(given.get("force_resolution"))
    height, width, area = given.get("max_height"), given.get("max_width"), given.get("max_hxw")
    section = {"num_frames": given.get("num_frames"), "batch": given.first("train_batch_size", "batch_size")}
    if is_forced:
        section |= {"force_resolution": True, "max_height": height, "max_width": width}
        for name in ("max_hxw", "min_hxw"):
            job.ignore(name, "one size for all clips: --force_resolution")
        transforms = [{"name": "center_crop", "rounding": "even"}, {"name": "resize", "fit": "stretch"}]
    else:
        area = area or height * width
        section["max_hxw"] = area
        transforms = [{"name": "resize", "fit": "area", "max_area": area}, {"name": "center_crop"}]
        if given.get("min_hxw"):
            section["min_hxw"] = given.get("min_hxw")
    for name in ("hw_stride", "train_fps", "speed_factor", "drop_short_ratio", "too_long_factor"):
        section[name] = given.get(name)
    if (shared := given.get("sp_size")) > 1:
        section["sp_size"] = shared
        draft.set("parallel.sequence", shared)
    if not is_forced:
        height = width = max(32, math.isqrt(max(0, area)) // 32 * 32)
    for key, value in (("frames", given.get("num_frames")), ("height", height), ("width", width)):
        draft.set(f"sample.{key}", value)
    draft.set("data.grouped", section)
    draft.set("data.transforms", transforms)
    job.copy("data.manifest", "data")
    job.copy("data.workers", "dataloader_num_workers")
    set_embeddings(job, given.get("data"))
    job.leave("filter_nonexistent", "`frameloom data check` writes a list without files that cannot be read")


def _set_objective(job: Job) -> None:
    draft, given = job.draft, job.given
    if given.get("rf_scheduler"):
        draft.set("objective", {"kind": "flow", "law": "logit_normal", "num_levels": 1000})
        draft.set("sample.sampler", "default")
        for name in ("prediction_type", "rescale_betas_zero_snr", "snr_gamma", "v1_5_scheduler", "cogvideox_scheduler"):
            job.ignore(name, "flow matching has none of it")
    else:
        job.copy("objective.kind", "prediction_type", values=_KINDS)
        is_scaled = given.get("v1_5_scheduler"), given.get("cogvideox_scheduler")
        draft.set("objective.betas", "scaled_linear" if any(is_scaled) else "linear")
        draft.set("objective.zero_terminal_snr", bool(given.get("rescale_betas_zero_snr")))
        if given.get("cogvideox_scheduler"):
            draft.set("objective.snr_shift", 3.0)
        if given.get("snr_gamma"):
            job.copy("objective.min_snr_gamma", "snr_gamma")
    if given.get("noise_offset"):
        job.copy("objective.noise_offset", "noise_offset")


def _set_loop(job: Job) -> None:
    draft, given = job.draft, job.given
    job.copy("train.precision", "precision", "mixed_precision", values=PRECISIONS)
    draft.set("train.recompute", bool(given.get("gradient_checkpointing")))
    set_length(job, given.get("max_train_steps"), given.first("epochs", "num_train_epochs"))
    job.copy("train.save_every", "checkpointing_steps")
    set_keep(job, "checkpoints_total_limit")
    if given.get("extra_save_mem"):
        draft.set("train.park_encoders", True)
    set_deepspeed(job)
    if given.get("enable_tracker"):
        job.leave("enable_tracker", "validation.samples draws samples; its prompts are yours to write")
    if given.get("parallel_mode") == "zero":
        set_zero(job, given.get("zero_stage"), job.told("zero_stage"))
    else:
        job.ignore("zero_stage", "only counts with --parallel_mode zero")
    if given.has("mode"):
        draft.set("train.compile", given.get("mode") == 0)
    if given.has("report_to"):
        trackers = {"tensorboard": ["jsonl", "tensorboard"], "wandb": ["jsonl", "wandb"]}
        job.copy("run.trackers", "report_to", values=trackers)


def _set_validation(job: Job) -> None:
    """Held-out clips are rows of the same set here, told apart by a column."""
    draft, given = job.draft, job.given
    if not given.get("validate"):
        for name in ("val_data", "val_batch_size", "val_interval"):
            job.ignore(name, "nothing is validated without --validate")
        return
    every = given.get("val_interval")
    text = f"--val_data {given.get('val_data')}: write its rows into one manifest with the others, a column 'split' "
    draft.set("validation", {"every": f"{every} epoch{'s' if every > 1 else ''}", "where": {"split": "val"}})
    draft.note("validation", f"{text}telling train from val")
    draft.set("data.where", {"split": "train"})
    job.leave("val_batch_size", "micro-batches are those of training; validation.batches says how many are read")
