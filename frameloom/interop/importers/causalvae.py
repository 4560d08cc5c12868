"""Commands of Open-Sora-Plan's trainer of autoencoders (`opensora/train/train_causalvae.py`) as recipes."""

from __future__ import annotations

from frameloom.config.loading.recipe import resolve
from frameloom.interop.importers.job import PRECISIONS, Draft, Job, set_length, set_memory, set_resume, set_stride
from frameloom.interop.importers.mindspore import set_optimizer


def translate(job: Job) -> Draft:
    """`opensora/train/train_causalvae.py`."""
    given = job.given
    draft = job.draft = Draft.start(resolve("opensora_plan/wfvae-stage1"))
    for section in ("optim", "train"):
        draft.set(section, {})
    model = given.get("model_name")
    if model not in ("WFVAE", "WFVAE2"):
        given.problems.append(f"{job.told('model_name')}: unknown; known: WFVAE")
    config = given.get("model_config") or "wfvae_8dim"
    draft.set("vae.size", "16ch" if "16" in config else "8ch")
    if given.first("pretrained_model_name_or_path", "load_from_checkpoint"):
        job.copy("vae.weights", "pretrained_model_name_or_path", "load_from_checkpoint")
    _set_data(job)
    _set_losses(job)
    set_optimizer(job, rate=("start_learning_rate", "lr"))
    draft.set("name", given.get("exp_name"))
    job.copy("run.folder", "output_dir")
    _set_loop(job)
    return draft


def _set_data(job: Job) -> None:
    draft, given = job.draft, job.given
    side = given.get("resolution")
    frames, batch = given.first("video_num_frames", "num_frames"), given.first("train_batch_size", "batch_size")
    draft.set("data.fixed", {"height": side, "width": side, "frames": frames, "batch": batch})
    folder, table = given.get("video_path"), given.get("data_file_path")
    draft.set("data.manifest", table or folder)
    if table:
        draft.set("data.root", folder)
    if given.get("video_column") not in ("video", "path", "file_path", "video_path"):
        job.leave("video_column", "rename the column to 'path'")
    job.copy("data.workers", "dataloader_num_workers")
    set_stride(job, "sample_rate")


def _set_losses(job: Job) -> None:
    draft, given = job.draft, job.given
    job.copy("autoencoder.reconstruction", "loss_type", values={"l1": "l1", "l2": "l2"})
    job.copy("autoencoder.kl_weight", "kl_weight")
    draft.set("autoencoder.wavelet_weight", given.get("wavelet_weight") if given.get("wavelet_loss") else 0.0)
    if (weight := given.get("perceptual_weight")) > 0:
        text = "--perceptual_weight: LPIPS needs its weights; `frameloom convert` makes this file of the published one"
        draft.set("autoencoder.lpips", {"weights": "pretrained/lpips_vgg.safetensors", "weight": weight}, text)
    if given.get("use_discriminator") or given.has("disc_weight"):
        # The MindSpore trainer has a constant weight and three layers.
        judge = {"weight": given.get("disc_weight"), "start": given.get("disc_start"), "adaptive": False}
        draft.set("autoencoder.discriminator", {**judge, "num_layers": 3})
    else:
        draft.drop("autoencoder.discriminator")
        job.ignore("disc_start", "there is no discriminator without --use_discriminator")


def _set_loop(job: Job) -> None:
    draft, given = job.draft, job.given
    job.copy("seed", "seed")
    set_resume(job)
    set_length(job, None if given.has("epochs") else given.get("max_steps"), given.get("epochs"))
    if given.has("epochs"):
        job.ignore("max_steps", "--epochs decides")
    job.copy("train.precision", "precision", values=PRECISIONS)
    job.copy("train.accumulate", "gradient_accumulation_steps")
    job.copy("train.save_every", "save_steps", "save_ckpt_step")
    job.copy("train.keep", "ckpt_max_keep")
    if given.get("use_recompute"):
        draft.set("train.recompute", True)
    set_memory(job, "max_device_memory")
    if given.has("init_loss_scale") and draft.get("train.precision") == "fp16":
        job.copy("train.loss_scale.initial", "init_loss_scale")
    else:
        job.ignore("init_loss_scale", "only counts with fp16")
