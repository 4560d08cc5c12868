"""Commands of Open-Sora-Plan 1.1 on MindSpore (`opensora/train/train_t2v.py`) as recipes."""

from __future__ import annotations

from frameloom.config.loading.recipe import resolve
from frameloom.interop.importers.job import PRECISIONS, Draft, Job, set_length
from frameloom.interop.importers.mindspore import set_embeddings, set_loop, set_optimizer, set_parts

_SIZES = {"LatteT2V-XL/122": "xl", "LatteT2V-D64-XL/122": "xl-d64"}


def translate(job: Job) -> Draft:
    """`opensora/train/train_t2v.py` of 1.1."""
    given = job.given
    draft = job.draft = Draft.start(resolve("latte/65x512x512"))
    for section in ("optim", "train"):
        draft.set(section, {})
    _set_model(job)
    set_parts(job, "text_encoder_name")
    _set_data(job)
    draft.set("text.dropout", 0.0)
    job.copy("text.encoders.0.max_length", "model_max_length")
    if given.get("snr_gamma"):
        job.copy("objective.min_snr_gamma", "snr_gamma")
    if given.get("noise_offset"):
        job.copy("objective.noise_offset", "noise_offset")
    set_optimizer(job, rate=("start_learning_rate",))
    set_loop(job, "output_dir", "output_path")
    _set_loop(job)
    return draft


def _set_model(job: Job) -> None:
    draft, given = job.draft, job.given
    size = job.copy("model.size", "model", values=_SIZES) or "xl"
    frames, overrides = given.get("num_frames"), {}
    length = frames // 4 + 1
    if size == "xl" and length in (56, 129):
        draft.set("model.size", {56: "xl-221", 129: "xl-513"}[length])
    elif length != 17:
        overrides["video_length"] = length
    if given.get("max_image_size") != 512:
        overrides["sample_size"] = [given.get("max_image_size") // 8] * 2
    if given.get("use_rope"):
        overrides["use_rope"] = True
    if given.get("compress_kv_factor") != 1:
        overrides["compress_kv_factor"] = given.get("compress_kv_factor")
    if overrides:
        draft.set("model.overrides", overrides)


def _set_data(job: Job) -> None:
    draft, given = job.draft, job.given
    side, batch = given.get("max_image_size"), given.get("batch_size")
    draft.set("data.fixed", {"height": side, "width": side, "frames": given.get("num_frames"), "batch": batch})
    job.copy("data.fixed.batch", "batch_size", "train_batch_size")
    for key, value in (("frames", given.get("num_frames")), ("height", side), ("width", side)):
        draft.set(f"sample.{key}", value)
    job.copy("data.workers", "dataloader_num_workers")
    job.copy("data.use_image_num", "use_image_num")
    if given.get("use_img_from_vid"):
        draft.set("data.use_img_from_vid", True)
    if given.get("enable_flip"):
        draft.set("data.flip", 0.5)
    videos, images = given.get("video_data"), given.get("image_data")
    needs_images = given.get("use_image_num") and not given.get("use_img_from_vid")
    if images and needs_images:
        draft.drop("data.manifest")
        draft.set("data.sources", [{"path": videos}, {"path": images}])
    else:
        draft.set("data.manifest", videos)
        job.ignore("image_data", "images are not used without --use_image_num, or with --use_img_from_vid")
    set_embeddings(job, videos)


def _set_loop(job: Job) -> None:
    draft, given = job.draft, job.given
    job.copy("train.precision", "precision", values=PRECISIONS)
    job.leave("amp_level", "PyTorch's autocast chooses layer by layer, as O1 does; weights stay fp32")
    if given.get("vae_keep_gn_fp32") and draft.get("vae.precision") != "fp32":
        draft.set("vae.fp32_norms", True)
    skip = given.get("num_no_recompute")
    if given.get("use_recompute"):
        draft.set("train.recompute", {"skip": skip} if skip else True)
    else:
        job.ignore("num_no_recompute", "nothing is computed again without --use_recompute")
    steps = given.get("max_train_steps")
    set_length(job, steps, given.get("epochs"))
    if steps is not None:
        job.ignore("epochs", "--max_train_steps decides")
    _set_saving(job)
    job.copy("train.keep", "ckpt_max_keep")
    if given.has("mode"):
        draft.set("train.compile", given.get("mode") == 0)
    if given.get("profile"):
        draft.set("train.profile", {})
    if given.get("parallel_mode") == "optim" and given.has("optimizer_weight_shard_size"):
        job.copy("parallel.shard", "optimizer_weight_shard_size")
    else:
        job.ignore("optimizer_weight_shard_size", "only counts with --parallel_mode optim")
    _set_log_level(job)
    _leave_rest(job)


def _set_saving(job: Job) -> None:
    """In steps with --checkpointing_steps or --step_mode, else in epochs."""
    draft, given = job.draft, job.given
    if given.get("checkpointing_steps") is not None:
        job.copy("train.save_every", "checkpointing_steps")
        job.ignore("ckpt_save_interval", "--checkpointing_steps decides")
        job.ignore("step_mode", "--checkpointing_steps decides")
    elif given.get("step_mode"):
        job.copy("train.save_every", "ckpt_save_interval")
    else:
        epochs = given.get("ckpt_save_interval")
        draft.set("train.save_every", f"{epochs} epoch{'s' if epochs > 1 else ''}")


def _set_log_level(job: Job) -> None:
    if job.given.has("log_level"):
        level = str(job.given.get("log_level")).rpartition(".")[2].lower()
        job.draft.left.append(f"{job.told('log_level')}: start with `frameloom train --log-level {level}`")


def _leave_rest(job: Job) -> None:
    job.leave("filter_nonexistent", "`frameloom data check` writes a list without files that cannot be read")
    job.leave("tile_overlap_factor", "latents are those of the whole clip; `frameloom vae reconstruct` cuts tiles")
    job.leave("device", "train.device is auto: a GPU if there is one")
    if job.given.get("multi_scale"):
        job.leave("multi_scale", "never worked in the original; data.policy grid or grouped trains on several sizes")
    elif job.given.has("multi_scale"):
        job.draft.unused.append(f"{job.told('multi_scale')}: one size, which is what the recipe has")
