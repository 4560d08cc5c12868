"""Commands of Open-Sora-Plan as recipes: 1.3 (`train_t2v_diffusers.py`), 1.1 on MindSpore (`train_t2v.py`), and the
trainer of autoencoders (`train_causalvae.py`)."""

from __future__ import annotations

import math
from typing import Any

from frameloom.config.loading.recipe import resolve
from frameloom.interop.importers.job import (
    ImportJob,
    set_deepspeed,
    set_length,
    set_output,
    set_resume,
    set_stride,
    set_zero,
)

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
_SCHEDULES = {
    "constant": "constant",
    "cosine_decay": "cosine",
    "cosine": "cosine",
    "polynomial_decay": "polynomial",
    "linear": "linear",
    "multi_step_decay": "constant",
    "constant_with_warmup": "constant",
}
_VAES = {
    "CausalVAEModel_4x8x8": ("causal", "v1.1"),
    "CausalVAEModel_D4_4x8x8": ("causal", "v1.2"),
    "WFVAEModel_D8_4x8x8": ("wfvae", "8ch"),
    "WFVAEModel_D16_4x8x8": ("wfvae", "16ch"),
}
_PICKLES = (".ckpt", ".bin", ".pt", ".pth")


def translate(job: ImportJob) -> None:
    """`opensora/train/train_t2v_diffusers.py` of 1.3."""
    given, recipe = job.given, job.recipe
    recipe.start(resolve("opensora_plan/stage1-full"), "optim", "train", "objective")
    recipe.drop("model.weights")
    if job.is_torch:
        given.defaults.update(_TORCH_DEFAULTS)
    job.apply_table()
    sizes = {"OpenSoraT2V_v1_3-2B/122": "2b", "OpenSoraInpaint_v1_3-2B/122": "2b-inpaint"}
    name = given.get("model")
    if name not in sizes:
        given.problems.append(f"{given.quote('model')}: unknown; known: {', '.join(sizes)}")
    else:
        recipe.set("model.size", sizes[name])
        overrides = {"sparse1d": bool(given.get("sparse1d"))}
        if given.get("sparse1d"):
            overrides["sparse_n"] = given.get("sparse_n")
        for axis in ("t", "h", "w"):
            if (scale := given.get(f"interpolation_scale_{axis}")) != 1:
                overrides[f"interpolation_scale_{axis}"] = scale
        recipe.set("model.overrides", overrides)
        if name.startswith("OpenSoraInpaint"):
            text = "the published shares; the original reads them from a file of its own"
            recipe.set("known", {"law": "frames"}, text)
    _set_parts(job)
    if given.get("vae_fp32"):
        recipe.set("vae.precision", "fp32")
    _set_grouped(job)
    _set_objective(job)
    _set_optimizer(job)
    _set_loop(job)
    set_length(job, given.get("max_train_steps"), given.get("epochs"))
    set_deepspeed(job)
    if given.get("parallel_mode") == "zero":
        set_zero(job, given.get("zero_stage"), given.quote("zero_stage"))
    if not given.get("validate"):
        return
    # Held-out clips are rows of the same set here, told apart by a column.
    every = given.get("val_interval")
    text = f"--val_data {given.get('val_data')}: write its rows into one manifest with the others, a column 'split' "
    recipe.set("validation", {"every": f"{every} epoch{'s' if every > 1 else ''}", "where": {"split": "val"}})
    recipe.note("validation", f"{text}telling train from val")
    recipe.set("data.where", {"split": "train"})


def _set_grouped(job: ImportJob) -> None:
    given, recipe = job.given, job.recipe
    is_forced = bool(given.get("force_resolution"))
    height, width, area = given.get("max_height"), given.get("max_width"), given.get("max_hxw")
    section = {"num_frames": given.get("num_frames"), "batch": given.get("train_batch_size")}
    if is_forced:
        section |= {"force_resolution": True, "max_height": height, "max_width": width}
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
        recipe.set("parallel.sequence", shared)
    if not is_forced:
        height = width = max(32, math.isqrt(max(0, area)) // 32 * 32)
    for key, value in (("frames", given.get("num_frames")), ("height", height), ("width", width)):
        recipe.set(f"sample.{key}", value)
    recipe.set("data.grouped", section)
    recipe.set("data.transforms", transforms)
    _set_embeddings(job, given.get("data"))


def _set_objective(job: ImportJob) -> None:
    given, recipe = job.given, job.recipe
    if given.get("rf_scheduler"):
        for key, value in {"kind": "flow", "distribution": "logit_normal", "num_levels": 1000}.items():
            recipe.set(f"objective.{key}", value)
        recipe.set("sample.sampler", "default")
        return
    is_scaled = given.get("v1_5_scheduler"), given.get("cogvideox_scheduler")
    recipe.set("objective.betas", "scaled_linear" if any(is_scaled) else "linear")
    if given.get("cogvideox_scheduler"):
        recipe.set("objective.snr_shift", 3.0)


def translate_latte(job: ImportJob) -> None:
    """`opensora/train/train_t2v.py` of 1.1."""
    given, recipe = job.given, job.recipe
    recipe.start(resolve("latte/65x512x512"), "optim", "train")
    recipe.drop("model.weights")
    job.apply_table()
    side, frames = given.get("max_image_size"), given.get("num_frames")
    _set_latte_model(job, side, frames)
    _set_parts(job)
    recipe.set("data.fixed", {"height": side, "width": side, "frames": frames})
    job.copy("data.fixed.batch", "batch_size")
    for key, value in (("frames", frames), ("height", side), ("width", side)):
        recipe.set(f"sample.{key}", value)
    videos, images = given.get("video_data"), given.get("image_data")
    if images and given.get("use_image_num") and not given.get("use_img_from_vid"):
        recipe.drop("data.manifest")
        recipe.set("data.sources", [{"path": videos}, {"path": images}])
    else:
        recipe.set("data.manifest", videos)
        job.ignore("image_data", "images are not used without --use_image_num, or with --use_img_from_vid")
    _set_embeddings(job, videos)
    recipe.set("text.dropout", 0.0)
    _set_optimizer(job)
    _set_loop(job)
    if given.get("vae_keep_gn_fp32") and recipe.get("vae.precision") != "fp32":
        recipe.set("vae.fp32_norms", True)
    if given.get("use_recompute"):
        recipe.set("train.recompute", {"skip": skip} if (skip := given.get("num_no_recompute")) else True)
    steps = given.get("max_train_steps")
    set_length(job, steps, given.get("epochs"))
    if steps is not None:
        job.ignore("epochs", "--max_train_steps decides")
    _set_latte_saving(job)
    if given.get("parallel_mode") == "optim" and given.has("optimizer_weight_shard_size"):
        job.copy("parallel.shard", "optimizer_weight_shard_size")
    else:
        job.ignore("optimizer_weight_shard_size", "only counts with --parallel_mode optim")
    if given.has("log_level"):
        level = str(given.get("log_level")).rpartition(".")[2].lower()
        job.unsupported("log_level", f"start with `frameloom train --log-level {level}`")
    if given.get("multi_scale"):
        text = "never worked in the original; data.policy grid or grouped trains on several sizes"
        job.unsupported("multi_scale", text)
    else:
        job.ignore("multi_scale", "one size, which is what the recipe has")


def _set_latte_model(job: ImportJob, side: int, frames: int) -> None:
    given, recipe = job.given, job.recipe
    recipe.set("model.size", recipe.get("model.size") or "xl")
    overrides: dict[str, Any] = {}
    length = frames // 4 + 1
    if recipe.get("model.size") == "xl" and length in (56, 129):
        recipe.set("model.size", {56: "xl-221", 129: "xl-513"}[length])
    elif length != 17:
        overrides["video_length"] = length
    if side != 512:
        overrides["sample_size"] = [side // 8] * 2
    if given.get("use_rope"):
        overrides["use_rope"] = True
    if given.get("compress_kv_factor") != 1:
        overrides["compress_kv_factor"] = given.get("compress_kv_factor")
    if overrides:
        recipe.set("model.overrides", overrides)


def _set_latte_saving(job: ImportJob) -> None:
    """In steps with --checkpointing_steps or --step_mode, else in epochs."""
    given, recipe = job.given, job.recipe
    if given.get("checkpointing_steps") is not None:
        job.copy("train.save_every", "checkpointing_steps")
        job.ignore("ckpt_save_interval", "--checkpointing_steps decides")
        job.ignore("step_mode", "--checkpointing_steps decides")
    elif given.get("step_mode"):
        job.copy("train.save_every", "ckpt_save_interval")
    else:
        epochs = given.get("ckpt_save_interval")
        recipe.set("train.save_every", f"{epochs} epoch{'s' if epochs > 1 else ''}")


def translate_vae(job: ImportJob) -> None:
    """`opensora/train/train_causalvae.py`."""
    given, recipe = job.given, job.recipe
    recipe.start(resolve("opensora_plan/wfvae-stage1"), "optim", "train")
    job.apply_table()
    if given.get("model_name") not in ("WFVAE", "WFVAE2"):
        given.problems.append(f"{given.quote('model_name')}: unknown; known: WFVAE")
    recipe.set("vae.size", "16ch" if "16" in (given.get("model_config") or "wfvae_8dim") else "8ch")
    side, frames, batch = (given.get(name) for name in ("resolution", "video_num_frames", "train_batch_size"))
    recipe.set("data.fixed", {"height": side, "width": side, "frames": frames, "batch": batch})
    folder, table = given.get("video_path"), given.get("data_file_path")
    recipe.set("data.manifest", table or folder)
    if table:
        recipe.set("data.root", folder)
    if given.get("video_column") not in ("video", "path", "file_path", "video_path"):
        job.unsupported("video_column", "rename the column to 'path'")
    set_stride(job, "sample_rate")
    recipe.set("autoencoder.wavelet_weight", given.get("wavelet_weight") if given.get("wavelet_loss") else 0.0)
    if (weight := given.get("perceptual_weight")) > 0:
        text = "--perceptual_weight: LPIPS needs its weights; `frameloom convert` makes this file of the published one"
        recipe.set("autoencoder.lpips", {"weights": "pretrained/lpips_vgg.safetensors", "weight": weight}, text)
    if given.get("use_discriminator") or given.has("disc_weight"):
        # The MindSpore trainer has a constant weight and three layers.
        loss = {"weight": given.get("disc_weight"), "start": given.get("disc_start"), "adaptive": False}
        recipe.set("autoencoder.discriminator", {**loss, "num_layers": 3})
    else:
        recipe.drop("autoencoder.discriminator")
        job.ignore("disc_start", "there is no discriminator without --use_discriminator")
    _set_optimizer(job)
    set_resume(job)
    set_length(job, None if given.has("epochs") else given.get("max_steps"), given.get("epochs"))
    if given.has("epochs"):
        job.ignore("max_steps", "--epochs decides")


def _set_parts(job: ImportJob) -> None:
    recipe = job.recipe
    name, size = job.choose("ae", _VAES)
    recipe.set("vae.name", name)
    recipe.set("vae.size", size)
    for key in ("model.weights", "vae.weights"):
        if str(recipe.get(key) or "").endswith(_PICKLES):
            recipe.note(key, "a pickle is not opened while training: `frameloom convert` makes a .safetensors of it")


def _set_embeddings(job: ImportJob, listed: str | None) -> None:
    """Lists with folders of embeddings bring captions that were encoded before."""
    recipe = job.recipe
    if not job.given.get("text_embed_cache") or not listed:
        return
    file = job.find_file(listed)
    if file is None:
        text = "captions are encoded while training; where the list names a folder of embeddings, data.cache.external: "
        recipe.note("text.encoders", f"{text}open_sora_plan and data.cache.external_folders read them as they are")
        return
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        job.given.problems.append(f"{file}: cannot be read ({error}); expected a list of folders in UTF-8")
        return
    lines = [line.split(",") for line in text.splitlines() if line.strip()]
    folders = {tuple(item.strip() for item in line[1:-1]) for line in lines}
    if len(folders) == 1 and len(next(iter(folders))) in (1, 2):
        recipe.set("data.cache.external", "open_sora_plan")
        recipe.set("data.cache.external_folders", list(next(iter(folders))))
    elif any(folders):
        text = f"{listed} names embeddings in several folders; captions are encoded while training instead"
        recipe.note("text.encoders", text)


def _set_optimizer(job: ImportJob) -> None:
    given, recipe = job.given, job.recipe
    strategy = given.get("group_strategy") if "group_strategy" in given.arguments else "not_grouping"
    recipe.set("optim.decay_norms", strategy == "not_grouping")
    _set_schedule(job)
    wanted = given.get("use_ema")
    recipe.set("train.ema", {"decay": given.get("ema_decay")} if wanted else None, job.default_note("use_ema"))


def _set_schedule(job: ImportJob) -> None:
    given, recipe = job.given, job.recipe
    written = given.get("lr_scheduler")
    name = job.copy("optim.schedule.name", "lr_scheduler", _SCHEDULES) and _SCHEDULES[written]
    if written == "multi_step_decay":
        text = "the original passes no milestones, so its rate never drops; multi_step with milestones would"
        recipe.note("optim.schedule.name", text)
    if job.is_torch and written == "constant":
        job.ignore("lr_warmup_steps", "the schedule 'constant' has no warm-up")
    else:
        job.copy("optim.schedule.warmup_steps", "lr_warmup_steps")
    if recipe.get("optim.schedule.warmup_steps"):
        recipe.set("optim.schedule.idle_start", True)
    if "end_learning_rate" not in given.arguments:
        return
    if name in (None, "constant"):
        for unused in ("end_learning_rate", "lr_decay_steps"):
            job.ignore(unused, "a constant rate does not fall")
        return
    if written in ("cosine_decay", "polynomial_decay") and (start := given.get("start_learning_rate")):
        share = given.get("end_learning_rate") / start
        recipe.set("optim.schedule.min_share", float(f"{share:.6g}"), job.default_note("end_learning_rate"))
    if written == "polynomial_decay":
        recipe.set("optim.schedule.power", 0.9)
    if given.get("lr_decay_steps"):
        job.copy("optim.schedule.decay_steps", "lr_decay_steps")


def _set_loop(job: ImportJob) -> None:
    given, recipe = job.given, job.recipe
    set_output(recipe, given.get("output_dir") or "outputs")
    set_resume(job)
    mode = given.get("parallel_mode")
    if mode == "optim":
        set_zero(job, 1, "--parallel_mode optim")
    elif mode not in ("data", "zero"):
        job.unsupported("parallel_mode", "known here: data, optim and zero")
    if given.has("mode"):
        recipe.set("train.compile", given.get("mode") == 0)
    # A loss scale is one of fp16 alone.
    if given.get("precision") != "fp16":
        return
    mode, initial = given.get("loss_scaler_type"), given.get("init_loss_scale")
    recipe.set("train.loss_scale", {"mode": mode, "initial": initial})
    if mode == "dynamic":
        text = "the document has it the wrong way round: the scale grows after steps without overflow, and falls on one"
        recipe.set("train.loss_scale.factor", given.get("loss_scale_factor"))
        recipe.set("train.loss_scale.window", given.get("scale_window"), text)
    else:
        job.ignore("loss_scale_factor", "a static scale does not change")
        job.ignore("scale_window", "a static scale does not change")
