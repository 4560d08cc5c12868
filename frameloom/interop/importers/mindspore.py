"""Translations shared by the trainers of Open-Sora-Plan: frozen parts, data lists, optimizer, EMA, loss scale."""

from __future__ import annotations

from frameloom.interop.importers.job import PRECISIONS, Job, set_memory, set_output, set_resume, set_zero

_OPTIMIZERS = {"adamw": "adamw", "adamw_re": "adamw", "adam": "adamw", "adamw_exp": "adamw", "came": "came"}
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


def set_parts(job: Job, *encoder: str) -> None:
    """Autoencoder, text encoder (by the names of its folder) and the weights to start from."""
    draft, given = job.draft, job.given
    name, size = job.copy_pair("ae", _VAES)
    draft.set("vae.name", name)
    draft.set("vae.size", size)
    job.copy("vae.weights", "ae_path")
    job.copy("text.encoders.0.path", *encoder)
    draft.drop("model.weights")
    if given.get("pretrained"):
        job.copy("model.weights", "pretrained")
    for key in ("model.weights", "vae.weights"):
        if str(draft.get(key) or "").endswith(_PICKLES):
            draft.note(key, "a pickle is not opened while training: `frameloom convert` makes a .safetensors of it")
    job.copy("vae.precision", "vae_precision", values=PRECISIONS)
    job.copy("text.encoders.0.precision", "text_encoder_precision", values=PRECISIONS)


def set_embeddings(job: Job, listed: str | None) -> None:
    """Lists with folders of embeddings bring captions that were encoded before."""
    if not job.given.get("text_embed_cache") or not listed:
        return
    file = job.find_file(listed)
    if file is None:
        text = "captions are encoded while training; where the list names a folder of embeddings, data.cache.foreign: "
        job.draft.note("text.encoders", f"{text}open_sora_plan and data.cache.foreign_folders read them as they are")
        return
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        job.given.problems.append(f"{file}: cannot be read ({error}); expected a list of folders in UTF-8")
        return
    lines = [line.split(",") for line in text.splitlines() if line.strip()]
    folders = {tuple(item.strip() for item in line[1:-1]) for line in lines}
    if len(folders) == 1 and len(next(iter(folders))) in (1, 2):
        job.draft.set("data.cache.foreign", "open_sora_plan")
        job.draft.set("data.cache.foreign_folders", list(next(iter(folders))))
    elif any(folders):
        text = f"{listed} names embeddings in several folders; captions are encoded while training instead"
        job.draft.note("text.encoders", text)


def set_loop(job: Job, *output: str) -> None:
    """`output` are the names of the run's folder."""
    draft, given = job.draft, job.given
    job.copy("seed", "seed")
    set_output(draft, given.first(*output) or "outputs")
    set_resume(job)
    job.copy("train.accumulate", "gradient_accumulation_steps")
    job.copy("train.log_every", "log_interval")
    set_memory(job, "max_device_memory")
    set_loss_scale(job)
    mode = given.get("parallel_mode")
    if mode == "optim":
        set_zero(job, 1, "--parallel_mode optim")
    elif mode not in ("data", "zero"):
        job.leave("parallel_mode", "known here: data, optim and zero")


def set_optimizer(job: Job, *, rate: tuple[str, ...]) -> None:
    """`rate` are the names of the learning rate."""
    draft, given = job.draft, job.given
    names = ("optim", "optimizer") if "optimizer" in given.arguments else ("optim",)
    job.copy("optim.name", *names, values=_OPTIMIZERS)
    job.copy("optim.lr", *rate)
    job.copy("optim.betas", "betas")
    if "optim_eps" in given.arguments:
        job.copy("optim.eps", *[name for name in ("optim_eps", "adam_epsilon") if name in given.arguments])
    job.copy("optim.weight_decay", *[name for name in ("weight_decay", "adam_weight_decay") if name in given.arguments])
    strategy = given.get("group_strategy") if "group_strategy" in given.arguments else "not_grouping"
    draft.set("optim.decay_norms", strategy == "not_grouping")
    if given.get("clip_grad"):
        job.copy("optim.clip_norm", "max_grad_norm")
    else:
        draft.set("optim.clip_norm", None)
        job.ignore("max_grad_norm", "nothing is clipped without --clip_grad")
    if "scale_lr" in given.arguments and given.get("scale_lr"):
        draft.set("optim.scale_lr", True)
    _set_schedule(job, rate)
    _set_average(job)


def _set_schedule(job: Job, rate: tuple[str, ...]) -> None:
    draft, given = job.draft, job.given
    written = given.get("lr_scheduler")
    name = job.copy("optim.schedule.name", "lr_scheduler", values=_SCHEDULES)
    if written == "multi_step_decay":
        text = "the original passes no milestones, so its rate never drops; multi_step with milestones would"
        draft.note("optim.schedule.name", text)
    if job.is_torch and written == "constant":
        job.ignore("lr_warmup_steps", "the schedule 'constant' has no warm-up")
    else:
        job.copy("optim.schedule.warmup_steps", "lr_warmup_steps")
    if draft.get("optim.schedule.warmup_steps"):
        draft.set("optim.schedule.idle_start", True)
    if "end_learning_rate" not in given.arguments:
        return
    if name in (None, "constant"):
        for unused in ("end_learning_rate", "lr_decay_steps"):
            job.ignore(unused, "a constant rate does not fall")
        return
    if written in ("cosine_decay", "polynomial_decay") and (start := given.first(*rate)):
        share = given.get("end_learning_rate") / start
        draft.set("optim.schedule.min_share", float(f"{share:.6g}"), job.default_note("end_learning_rate"))
    if written == "polynomial_decay":
        draft.set("optim.schedule.power", 0.9)
    if given.get("lr_decay_steps"):
        job.copy("optim.schedule.decay_steps", "lr_decay_steps")


def _set_average(job: Job) -> None:
    given = job.given
    names = [name for name in ("use_ema", "ema") if name in given.arguments]
    wanted = given.first(*names)
    note = job.default_note(*names)
    job.draft.set("train.ema", {"decay": given.get("ema_decay")} if wanted else None, note)
    if not wanted:
        job.ignore("ema_decay", "there is no average without --use_ema")


def set_loss_scale(job: Job) -> None:
    """Of fp16 alone; other formats need none."""
    names = ("loss_scaler_type", "init_loss_scale", "loss_scale_factor", "scale_window")
    given, draft = job.given, job.draft
    written = [name for name in ("precision", "mixed_precision") if name in given.arguments]
    if given.first(*written) != "fp16":
        for name in names:
            job.ignore(name, "a loss scale only counts with fp16")
        return
    mode, initial = given.get("loss_scaler_type"), given.get("init_loss_scale")
    draft.set("train.loss_scale", {"mode": mode, "initial": initial})
    if mode == "dynamic":
        text = "the document has it the wrong way round: the scale grows after steps without overflow, and falls on one"
        draft.set("train.loss_scale.factor", given.get("loss_scale_factor"))
        draft.set("train.loss_scale.window", given.get("scale_window"), text)
    else:
        job.ignore("loss_scale_factor", "a static scale does not change")
        job.ignore("scale_window", "a static scale does not change")
