"""Commands of CogVideoX-Fun (`scripts/train.py`, `scripts/train_lora.py`) as recipes."""

from __future__ import annotations

from typing import Any

from frameloom.config.loading.recipe import resolve
from frameloom.interop.importers.job import (
    PRECISIONS,
    Draft,
    Job,
    set_deepspeed,
    set_keep,
    set_length,
    set_output,
    set_resume,
    set_stride,
)

_SCHEDULES = {
    "constant": "constant",
    "constant_with_warmup": "constant",
    "linear": "linear",
    "cosine": "cosine",
    "cosine_with_restarts": "cosine_with_restarts",
    "polynomial": "polynomial",
}
_BUCKET_KEYS = (
    *("token_sample_size", "random_hw_adapt", "training_with_video_token_length", "random_frame_crop"),
    *("random_ratio_crop", "keep_all_node_same_token_length"),
)
_TOKEN_KEYS = (
    *("image_sample_size", "video_sample_size", "video_sample_stride", "video_sample_n_frames", "train_batch_size"),
    *_BUCKET_KEYS,
)
_TRACKERS = {"tensorboard": ["jsonl", "tensorboard"], "wandb": ["jsonl", "wandb"], "all": ["jsonl", "tensorboard"]}


def translate(job: Job, *, script: str) -> Draft:
    """The recipe of one command."""
    is_lora = script.endswith("train_lora.py")
    job.draft = Draft.start(_choose_template(job))
    _set_weights(job)
    _set_data(job)
    _set_optimizer(job, is_lora=is_lora)
    _set_loop(job)
    if is_lora:
        rank, alpha = job.given.get("rank"), job.given.get("network_alpha")
        job.draft.set("lora", {"rank": rank, "alpha": alpha, "targets": ["*"]})
    else:
        for name in ("rank", "network_alpha"):
            job.leave(name, "adapters are those of train_lora.py; the section lora adds them")
    return job.draft


def _choose_template(job: Job) -> dict[str, Any]:
    """The shipped recipe of the same model and mode; the folder's name tells which."""
    folder = job.given.get("pretrained_model_name_or_path") or ""
    mode = job.given.get("train_mode")
    if mode not in ("normal", "inpaint"):
        job.given.problems.append(f"{job.told('train_mode')}: unknown; known: normal, inpaint")
    name = folder.lower()
    is_inpaint = mode == "inpaint"
    if "1.5" in name:
        template = resolve("cogvideox_fun/5b-1.5-inpaint")
        size = "5b-1.5-inpaint" if is_inpaint else "5b-1.5"
    elif "5b" in name:
        template = resolve("cogvideox_fun/5b-inpaint")
        is_first = "v1.1" not in name
        size = ("5b-inpaint" if is_first else "5b-1.1-inpaint") if is_inpaint else "5b"
    else:
        template = resolve("cogvideox_fun/2b-inpaint")
        size = "2b-inpaint" if is_inpaint else "2b"
        if "2b" not in name:
            text = "the name does not tell the model's size; expected 2b, 5b or V1.5 in it; rename or link the folder"
            job.given.problems.append(f"{job.told('pretrained_model_name_or_path')}: {text}")
    template["model"]["size"] = size
    if not is_inpaint:
        template["known"] = None
    return template


def _set_weights(job: Job) -> None:
    draft, folder = job.draft, job.given.get("pretrained_model_name_or_path")
    draft.set("model.weights", job.given.first("transformer_path") or folder)
    draft.set("vae.weights", job.given.first("vae_path") or folder)
    draft.set("text.encoders.0.path", folder)
    job.copy("text.encoders.0.max_length", "tokenizer_max_length")
    precision = PRECISIONS.get(_precision(job), "fp32")
    for key in ("vae.precision", "text.encoders.0.precision"):
        draft.set(key, precision)
    draft.set("vae.mini_batch", job.given.get("vae_mini_batch"))


def _precision(job: Job) -> str:
    """The script's own argument wins over the launcher's."""
    launched = job.launcher.get("mixed_precision") if "mixed_precision" in job.launcher.arguments else None
    return job.given.get("mixed_precision") or launched or "no"


def _set_data(job: Job) -> None:
    draft, given = job.draft, job.given
    draft.set("data.manifest", given.get("train_data_meta"))
    job.copy("data.root", "train_data_dir")
    job.copy("data.workers", "dataloader_num_workers")
    _set_repeat(job)
    draft.set("sample.frames", given.get("video_sample_n_frames"))
    if given.get("enable_bucket"):
        draft.set("data.ratio_tokens", {name: given.get(name) for name in _TOKEN_KEYS if given.get(name) is not None})
        return
    _set_squares(job)


def _set_squares(job: Job) -> None:
    """Without --enable_bucket: images alone have their own size, and beside clips that of clips."""
    draft, given = job.draft, job.given
    draft.drop("data.ratio_tokens")
    trained, other = "video_sample_size", "image_sample_size"
    if given.get("video_repeat") == 0:
        trained, other = other, trained
    sizes = {"height": given.get(trained), "width": given.get(trained)}
    batch = given.get("train_batch_size")
    text = f"without --enable_bucket squares are cut; clips and images have one size here, {given.shown(trained)}"
    draft.set("data.policy", "fixed", text)
    frames = given.get("video_sample_n_frames")
    draft.set("data.fixed", {**sizes, "frames": frames, "batch": batch, "image_batch": batch})
    draft.set("data.transforms", [{"name": "resize", "fit": "short_side"}, {"name": "center_crop"}])
    for name, side in sizes.items():
        draft.set(f"sample.{name}", side)
    set_stride(job, "video_sample_stride")
    job.leave(other, f"clips and images have one size here, {given.shown(trained)}")
    for name in _BUCKET_KEYS:
        job.leave(name, "belongs to buckets, which this command does not enable")


def _set_repeat(job: Job) -> None:
    """Images come once in an epoch, clips `video_repeat` times, which is never by default."""
    repeat, draft = job.given.get("video_repeat"), job.draft
    if repeat == 0:
        draft.set(
            "data.where", {"kind": "image"}, "--video_repeat 0 leaves all videos out; remove this to train on them"
        )
    elif repeat > 1:
        path, root = draft.get("data.manifest"), draft.get("data.root")
        clips = {"path": path, "root": root, "where": {"kind": "video"}, "repeat": repeat}
        images = {"path": path, "root": root, "where": {"kind": "image"}}
        draft.drop("data.manifest")
        draft.drop("data.root")
        draft.set("data.sources", [clips, images])


def _set_optimizer(job: Job, *, is_lora: bool) -> None:
    draft, given = job.draft, job.given
    draft.set("optim", {})
    is_came, is_8bit = given.get("use_came"), given.get("use_8bit_adam")
    name = "adamw8bit" if is_8bit else "came" if is_came else "adamw"
    draft.set("optim.name", name)
    job.copy("optim.lr", "learning_rate")
    if name == "came":
        draft.set("optim.weight_decay", 0.0)
        for ignored in ("adam_weight_decay", "adam_epsilon", "adam_beta1", "adam_beta2"):
            job.ignore(ignored, "CAME gets neither decay nor epsilon nor betas of the command")
    else:
        draft.set("optim.betas", [given.get("adam_beta1"), given.get("adam_beta2")])
        job.copy("optim.eps", "adam_epsilon")
        job.copy("optim.weight_decay", "adam_weight_decay")
        draft.set("optim.decay_norms", True)
    if given.get("scale_lr"):
        draft.set("optim.scale_lr", True)
    _set_clipping(job, is_lora=is_lora)
    _set_trainable(job)
    _set_schedule(job)


def _set_clipping(job: Job, *, is_lora: bool) -> None:
    draft, given = job.draft, job.given
    job.copy("optim.clip_norm", "max_grad_norm")
    fade = {"ratio": given.get("initial_grad_norm_ratio"), "fade_steps": given.get("abnormal_norm_clip_start")}
    if not is_lora:
        draft.set("optim.clip_fade", fade)
    if "use_deepspeed" in job.launcher.values or given.get("use_deepspeed"):
        text = "under DeepSpeed the original does not apply --max_grad_norm; null would be the same as there"
        draft.note("optim.clip_norm", text)


def _set_trainable(job: Job) -> None:
    """Parts of names there are letters anywhere in a name."""
    draft, given = job.draft, job.given
    slow = given.get("trainable_modules_low_learning_rate") or []
    chosen = [*(given.get("trainable_modules") or ["."]), *slow]
    if "." not in chosen:
        draft.set("optim.trainable", [f"*{part}*" for part in chosen])
    if slow:
        rate = given.get("learning_rate") / 2
        draft.set("optim.groups", [{"match": f"*{part}*", "lr": rate} for part in slow])


def _set_schedule(job: Job) -> None:
    name = job.copy("optim.schedule.name", "lr_scheduler", values=_SCHEDULES)
    if job.given.get("lr_scheduler") == "constant":
        job.ignore("lr_warmup_steps", "the schedule 'constant' has no warm-up")
    elif name is not None:
        job.copy("optim.schedule.warmup_steps", "lr_warmup_steps")
        job.draft.set("optim.schedule.idle_start", True)


def _set_loop(job: Job) -> None:
    draft, given = job.draft, job.given
    job.copy("seed", "seed")
    set_output(draft, given.get("output_dir"))
    set_resume(job)
    draft.set("train", {})
    set_length(job, given.get("max_train_steps"), given.get("num_train_epochs"))
    job.copy("train.accumulate", "gradient_accumulation_steps")
    draft.set("train.precision", PRECISIONS.get(_precision(job), "fp32"))
    draft.set("train.recompute", bool(given.get("gradient_checkpointing")))
    draft.set("train.ema", {"decay": 0.9999} if given.get("use_ema") else None)
    if given.get("low_vram"):
        draft.set("train.park_encoders", True)
    job.copy("train.save_every", "checkpointing_steps")
    set_keep(job, "checkpoints_total_limit")
    if given.has("report_to"):
        job.copy("run.trackers", "report_to", values=_TRACKERS)
    if given.get("validation_prompts"):
        every = given.get("validation_steps")
        samples = {"prompts": given.get("validation_prompts"), "every": every}
        draft.set("validation", {"every": every, "batches": 0, "samples": samples})
    set_deepspeed(job)
