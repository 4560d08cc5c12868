"""Commands of CogVideoX-Fun (`scripts/train.py`, `scripts/train_lora.py`) as recipes."""

from __future__ import annotations

from typing import Any

from frameloom.config.loading.recipe import resolve
from frameloom.interop.importers.job import (
    PRECISIONS,
    ImportJob,
    set_deepspeed,
    set_length,
    set_output,
    set_resume,
    set_stride,
)

_BUCKET_KEYS = (
    *("token_sample_size", "random_hw_adapt", "training_with_video_token_length", "random_frame_crop"),
    *("random_ratio_crop", "keep_all_node_same_token_length"),
)
_TOKEN_KEYS = (
    *("image_sample_size", "video_sample_size", "video_sample_stride", "video_sample_n_frames", "train_batch_size"),
    *_BUCKET_KEYS,
)


def translate(job: ImportJob, *, is_lora: bool) -> None:
    """The recipe of one command."""
    given, recipe = job.given, job.recipe
    recipe.start(_choose_template(job), "optim", "train")
    job.apply_table()
    _set_parts(job)
    _set_data(job)
    _set_optimizer(job, is_lora=is_lora)
    _set_loop(job)
    if is_lora:
        rank, alpha = given.get("rank"), given.get("network_alpha")
        recipe.set("lora", {"rank": rank, "alpha": alpha, "targets": ["*"]})
    else:
        for name in ("rank", "network_alpha"):
            job.unsupported(name, "adapters are those of train_lora.py; the section lora adds them")


def _choose_template(job: ImportJob) -> dict[str, Any]:
    """The shipped recipe of the same model and mode; the folder's name tells which."""
    folder, mode = job.given.get("pretrained_model_name_or_path") or "", job.given.get("train_mode")
    if mode not in ("normal", "inpaint"):
        job.given.problems.append(f"{job.given.quote('train_mode')}: unknown; known: normal, inpaint")
    name, is_inpaint = folder.lower(), mode == "inpaint"
    if "1.5" in name:
        template, size = resolve("cogvideox_fun/5b-1.5-inpaint"), "5b-1.5-inpaint" if is_inpaint else "5b-1.5"
    elif "5b" in name:
        template, inpaint = resolve("cogvideox_fun/5b-inpaint"), "5b-1.1-inpaint" if "v1.1" in name else "5b-inpaint"
        size = inpaint if is_inpaint else "5b"
    else:
        template, size = resolve("cogvideox_fun/2b-inpaint"), "2b-inpaint" if is_inpaint else "2b"
        if "2b" not in name:
            text = "the name does not tell the model's size; expected 2b, 5b or V1.5 in it; rename or link the folder"
            job.given.problems.append(f"{job.given.quote('pretrained_model_name_or_path')}: {text}")
    template["model"]["size"] = size
    if not is_inpaint:
        template["known"] = None
    return template


def _set_parts(job: ImportJob) -> None:
    given, recipe = job.given, job.recipe
    folder = given.get("pretrained_model_name_or_path")
    recipe.set("model.weights", given.get("transformer_path") or folder)
    recipe.set("vae.weights", given.get("vae_path") or folder)
    recipe.set("text.encoders.0.path", folder)
    # The script's own argument wins over the launcher's.
    launched = job.launcher.get("mixed_precision") if "mixed_precision" in job.launcher.arguments else None
    precision = PRECISIONS.get(given.get("mixed_precision") or launched or "no", "fp32")
    for key in ("train.precision", "vae.precision", "text.encoders.0.precision"):
        recipe.set(key, precision)


def _set_data(job: ImportJob) -> None:
    given, recipe = job.given, job.recipe
    recipe.set("data.manifest", given.get("train_data_meta"))
    repeat = given.get("video_repeat")
    # Images come once in an epoch, clips `video_repeat` times, which is never by default.
    if repeat == 0:
        text = "--video_repeat 0 leaves all videos out; remove this to train on them"
        recipe.set("data.where", {"kind": "image"}, text)
    elif repeat > 1:
        path, root = recipe.get("data.manifest"), recipe.get("data.root")
        clips = {"path": path, "root": root, "where": {"kind": "video"}, "repeat": repeat}
        recipe.drop("data.manifest")
        recipe.drop("data.root")
        recipe.set("data.sources", [clips, {"path": path, "root": root, "where": {"kind": "image"}}])
    if given.get("enable_bucket"):
        recipe.set("data.ratio_tokens", {name: given.get(name) for name in _TOKEN_KEYS if given.get(name) is not None})
        return
    # Without buckets images alone have their own size, and beside clips that of clips.
    trained, other = "video_sample_size", "image_sample_size"
    if repeat == 0:
        trained, other = other, trained
    recipe.drop("data.ratio_tokens")
    sizes = {"height": given.get(trained), "width": given.get(trained)}
    frames, batch = given.get("video_sample_n_frames"), given.get("train_batch_size")
    text = f"clips and images have one size here, --{trained}"
    recipe.set("data.policy", "fixed", f"without --enable_bucket squares are cut; {text}")
    recipe.set("data.fixed", {**sizes, "frames": frames, "batch": batch, "image_batch": batch})
    recipe.set("data.transforms", [{"name": "resize", "fit": "short_side"}, {"name": "center_crop"}])
    for name, side in sizes.items():
        recipe.set(f"sample.{name}", side)
    set_stride(job, "video_sample_stride")
    job.unsupported(other, text)
    for name in _BUCKET_KEYS:
        job.unsupported(name, "belongs to buckets, which this command does not enable")


def _set_optimizer(job: ImportJob, *, is_lora: bool) -> None:
    given, recipe = job.given, job.recipe
    is_came, is_8bit = given.get("use_came"), given.get("use_8bit_adam")
    name = "adamw8bit" if is_8bit else "came" if is_came else "adamw"
    recipe.set("optim.name", name)
    if name == "came":
        recipe.set("optim.weight_decay", 0.0)
        for ignored in ("adam_weight_decay", "adam_epsilon", "adam_beta1", "adam_beta2"):
            job.ignore(ignored, "CAME gets neither decay nor epsilon nor betas of the command")
    else:
        recipe.set("optim.betas", [given.get("adam_beta1"), given.get("adam_beta2")])
        job.copy("optim.eps", "adam_epsilon")
        job.copy("optim.weight_decay", "adam_weight_decay")
        recipe.set("optim.decay_norms", True)
    fade = {"ratio": given.get("initial_grad_norm_ratio"), "fade_steps": given.get("abnormal_norm_clip_start")}
    if not is_lora:
        recipe.set("optim.clip_fade", fade)
    if "use_deepspeed" in job.launcher.values or given.get("use_deepspeed"):
        text = "under DeepSpeed the original does not apply --max_grad_norm; null would be the same as there"
        recipe.note("optim.clip_norm", text)
    # Parts of names are letters anywhere in a name there.
    slow = given.get("trainable_modules_low_learning_rate") or []
    chosen = [*(given.get("trainable_modules") or ["."]), *slow]
    if "." not in chosen:
        recipe.set("optim.trainable", [f"*{part}*" for part in chosen])
    if slow:
        rate = given.get("learning_rate") / 2
        recipe.set("optim.groups", [{"match": f"*{part}*", "lr": rate} for part in slow])
    if given.get("lr_scheduler") == "constant":
        job.ignore("lr_warmup_steps", "the schedule 'constant' has no warm-up")
    elif recipe.get("optim.schedule.name") is not None:
        job.copy("optim.schedule.warmup_steps", "lr_warmup_steps")
        recipe.set("optim.schedule.idle_start", True)


def _set_loop(job: ImportJob) -> None:
    given, recipe = job.given, job.recipe
    set_output(recipe, given.get("output_dir"))
    set_resume(job)
    set_length(job, given.get("max_train_steps"), given.get("num_train_epochs"))
    if given.get("validation_prompts"):
        every = given.get("validation_steps")
        samples = {"prompts": given.get("validation_prompts"), "every": every}
        recipe.set("validation", {"every": every, "batches": 0, "samples": samples})
    set_deepspeed(job)
