"""Configurations and commands of Open-Sora 2.0 (`scripts/diffusion/train.py`) as recipes.

Only what is written is translated: published configurations say everything, and a command adds to one of them.
"""

from __future__ import annotations

from pathlib import PurePosixPath
from typing import Any

from frameloom.config.loading.recipe import resolve
from frameloom.interop.importers.job import PRECISIONS, Draft, Job, set_length, set_output, set_zero

# Published configurations by the name of their file, as they are shipped here.
PUBLISHED = {
    "image": "opensora2/image",
    "stage1": "opensora2/stage1",
    "stage2": "opensora2/stage2",
    "stage1_i2v": "opensora2/stage1-i2v",
    "stage2_i2v": "opensora2/stage2-i2v",
    "demo": "opensora2/demo",
    "high_compression": "opensora2/high-compression",
}
# Variables that the published configurations repeat in a section, whose value counts.
REPEATED = ("lr", "grad_ckpt_settings", "grad_ckpt_setting")
_DEPTHS = {"double_blocks": 19, "single_blocks": 38}
_FIELDS = (
    *("guidance_embed", "fused_qkv", "use_liger_rope", "cond_embed", "hidden_size", "mlp_ratio", "num_heads", "depth"),
    *("depth_single_blocks", "axes_dim", "theta", "qkv_bias"),
)
_VAES = {"hunyuan_vae": ("hunyuan", "opensora2"), "dc_ae": ("dc_ae", "f32t4c128")}
_VAE_FIELDS = {
    "ae.layers_per_block": "layers_per_block",
    "ae.latent_channels": "latent_channels",
    "ae.use_spatial_tiling": "spatial_tiling",
    "ae.use_temporal_tiling": "temporal_tiling",
}
_TILES = {
    "ae.spatial_tile_size": "tile_px",
    "ae.temporal_tile_size": "tile_frames",
    "ae.tile_overlap_factor": "tile_overlap",
}
_PUBLISHED_VAE = {"ae.layers_per_block": 2, "ae.latent_channels": 16}


def start(config: str | None) -> Draft:
    """An empty recipe over a shipped one, or a whole one to write the values of a configuration into."""
    if config is not None:
        return Draft({"_base_": config})
    draft = Draft.start(resolve("opensora2/image"))
    draft.set("model", {"family": "opensora2", "size": "11b", "overrides": {}})
    draft.set("train.ema", None)
    return draft


def translate(job: Job, *, base: str | None, name: str) -> Draft:
    """`base` is the shipped recipe that a command builds on; None: `job.given` is a whole configuration."""
    job.draft = start(base)
    job.draft.set("name", name)
    _set_model(job, is_whole=base is None)
    _set_frozen_parts(job)
    _set_note(job)
    _set_data(job)
    _set_conditions(job)
    _set_optimizer(job)
    _set_recompute(job)
    _set_loop(job)
    _set_parallel(job)
    _set_resume(job)
    return job.draft


def _copy(job: Job, dotted: str, name: str, **options: Any) -> None:
    if job.given.has(name):
        job.copy(dotted, name, **options)


def _set_model(job: Job, *, is_whole: bool) -> None:
    draft, given = job.draft, job.given
    if given.get("model.from_pretrained"):
        draft.set("model.weights", given.get("model.from_pretrained"))
    elif not (given.has("load")):
        text = "no weights are named, so the model starts fresh; the guide fine-tunes Flux or Open-Sora 2.0 instead"
        draft.set("model.weights", None, text)
    if given.has("model.type") and given.get("model.type") != "flux":
        given.problems.append(f"{job.told('model.type')}: unknown; known: flux")
    if given.has("model.patch_size") and given.get("model.patch_size") == 1:
        draft.set("model.size", "11b-dcae")
        # Sampling counts tokens of one cell there, training of four.
        draft.set("objective.sampling_shift_patch", 1)
    overrides = {}
    for name in _FIELDS:
        value = given.get(f"model.{name}") if given.has(f"model.{name}") else None
        if value is not None and (value != given.arguments[f"model.{name}"].default or name == "cond_embed"):
            overrides[name] = value
    if is_whole or overrides:
        # The named size takes images; configurations say whether theirs does.
        draft.set("model.overrides", {"cond_embed": False, **overrides} if is_whole else overrides)
    for name in ("model.in_channels", "model.vec_in_dim", "model.context_in_dim"):
        given.has(name)


def _set_frozen_parts(job: Job) -> None:
    draft, given = job.draft, job.given
    if given.has("ae.type"):
        name, size = job.copy_pair("ae.type", _VAES)
        draft.set("vae.name", name)
        draft.set("vae.size", size)
        overrides = {
            field: given.get(key)
            for key, field in (_VAE_FIELDS | _TILES).items()
            if given.has(key) and given.get(key) != _PUBLISHED_VAE.get(key, False)
        }
        draft.set("vae.overrides", overrides if name == "hunyuan" else _keep_tiling(overrides))
    _copy(job, "vae.weights", "ae.from_pretrained")
    for name in ("ae.in_channels", "ae.out_channels", "ae.model_name", "is_causal_vae", "t5.type", "clip.type"):
        given.has(name)
    for index, name in enumerate(("t5", "clip")):
        if draft.get("text.encoders") or given.has(f"{name}.from_pretrained") or given.has(f"{name}.max_length"):
            if not draft.get("text.encoders"):
                draft.set("text.encoders", resolve(draft.values["_base_"])["text"]["encoders"])
            _copy(job, f"text.encoders.{index}.path", f"{name}.from_pretrained")
            _copy(job, f"text.encoders.{index}.max_length", f"{name}.max_length")
    _copy(job, "text.dropout", "dropout_ratio.t5")
    if given.has("dropout_ratio.clip") and given.get("dropout_ratio.clip") != given.get("dropout_ratio.t5"):
        draft.note("text.dropout", f"{job.told('dropout_ratio.clip')}: both encoders have one share here")


def _set_note(job: Job) -> None:
    """The original says frame rate and motion behind a caption."""
    if job.given.has("dataset.vmaf"):
        job.draft.set("text.note", {"motion": "score_vmafmotion" if job.given.get("dataset.vmaf") else None})


def _keep_tiling(overrides: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in overrides.items() if name.endswith("tiling") or name.startswith("tile")}


def _set_data(job: Job) -> None:
    draft, given = job.draft, job.given
    if given.get("dataset.data_path"):
        draft.set("data.manifest", given.get("dataset.data_path"))
    elif "_base_" not in draft.values:
        text = "no table is named; --dataset.data-path names one for the original"
        draft.note("data.manifest", text)
    if given.get("dataset.memory_efficient"):
        text = "--dataset.memory_efficient: name the folder that `frameloom data shard` writes, or the one of shard.py"
        draft.note("data.manifest", text)
    if given.has("bucket_config"):
        draft.set("data.buckets", _read_buckets(job))
    _copy(job, "data.fps_max", "dataset.fps_max")
    _copy(job, "data.workers", "num_workers")
    if given.has("dataset.transform_name") and given.get("dataset.transform_name") != "resize_crop":
        given.problems.append(f"{job.told('dataset.transform_name')}: unknown; known: resize_crop")
    if any([given.get("cached_text"), given.get("cached_video")]):
        draft.set("data.cache.foreign", "open_sora2")


def _read_buckets(job: Job) -> dict[str, Any]:
    buckets: dict[str, Any] = {}
    for name, cells in (job.given.get("bucket_config") or {}).items():
        if not isinstance(cells, dict) or not all(isinstance(cell, list) and len(cell) == 2 for cell in cells.values()):
            job.given.problems.append(f"bucket_config[{name!r}]: expected {{frames: (probability, batch size)}}")
            continue
        buckets[name] = {frames: list(cell) for frames, cell in cells.items()}
    return buckets


def _set_conditions(job: Job) -> None:
    if job.given.has("condition_config"):
        shares = job.given.get("condition_config")
        job.draft.set("known", {"law": "ends", "shares": dict(shares)} if shares else None)


def _set_optimizer(job: Job) -> None:
    draft, given = job.draft, job.given
    if given.has("optim.cls") and given.get("optim.cls") != "HybridAdam":
        given.problems.append(f"{job.told('optim.cls')}: unknown; known: HybridAdam")
    given.has("optim.adamw_mode")
    _copy(job, "optim.lr", "optim.lr")
    if given.has("lr"):
        text = "in the original this changes a variable that nothing reads, and --optim.lr would; meant is the rate"
        draft.set("optim.lr", given.get("lr"), f"{job.told('lr')}: {text}")
    for name in ("eps", "weight_decay", "betas"):
        _copy(job, f"optim.{name}", f"optim.{name}")
    if given.has("grad_clip"):
        draft.set("optim.clip_norm", given.get("grad_clip", may_be_none=True) or None)
    if given.get("warmup_steps", may_be_none=True):
        job.copy("optim.schedule.warmup_steps", "warmup_steps")
    if given.get("use_cosine_scheduler"):
        draft.set("optim.schedule.name", "cosine")


def _set_recompute(job: Job) -> None:
    """(a, b): the first a double and b single blocks; a number of all blocks or more is all of them."""
    draft, given = job.draft, job.given
    names = ("model.grad_ckpt_settings", "model.grad_ckpt_setting", "grad_ckpt_settings", "grad_ckpt_setting")
    name = next((name for name in names if given.has(name)), None)
    for other in names:
        given.has(other)
    if given.has("grad_checkpoint") and not given.get("grad_checkpoint"):
        draft.set("train.recompute", False)
        return
    offload = bool(given.get("grad_ckpt_buffer_size", may_be_none=True))
    if name is None:
        if offload:
            draft.set("train.recompute", {"offload": True})
        return
    numbers = given.get(name)
    if numbers is None:
        draft.set("train.recompute", {"offload": True} if offload else True)
        return
    if not isinstance(numbers, list) or len(numbers) != 2 or not all(isinstance(n, int) and n >= 0 for n in numbers):
        given.problems.append(f"{job.told(name)}: expected two whole numbers, (double blocks, single blocks)")
        return
    kinds = dict(zip(_DEPTHS, numbers, strict=True))
    blocks = {kind: number for kind, number in kinds.items() if number < _DEPTHS[kind]}
    section = {**({"blocks": blocks} if blocks else {}), **({"offload": True} if offload else {})}
    draft.set("train.recompute", section or True)


def _set_loop(job: Job) -> None:
    draft, given = job.draft, job.given
    for dotted, name in (
        ("seed", "seed"),
        ("run.folder", "outputs"),
        ("name", "exp_name"),
        ("train.accumulate", "accumulation_steps"),
        ("train.log_every", "log_every"),
        ("train.save_every", "ckpt_every"),
        ("train.keep", "keep_n_latest"),
        ("train.async_save", "async_io"),
    ):
        _copy(job, dotted, name)
    if given.has("epochs"):
        set_length(job, None, given.get("epochs"))
    _copy(job, "train.precision", "dtype", values=PRECISIONS)
    _copy(job, "vae.precision", "dtype", values=PRECISIONS)
    if given.get("ema_decay"):
        draft.set("train.ema", {"decay": given.get("ema_decay"), "warmup": False})
    if given.get("wandb"):
        draft.set("run.trackers", ["jsonl", "wandb"])
    if given.get("wandb_project"):
        draft.set("run.tracking.project", given.get("wandb_project"))


def _set_parallel(job: Job) -> None:
    given = job.given
    plugin = given.get("plugin") if given.has("plugin") else None
    if plugin in ("zero1", "zero2"):
        set_zero(job, int(plugin[-1]), job.told("plugin"))
    elif plugin == "hybrid" and given.get("plugin_config.zero_stage"):
        set_zero(job, given.get("plugin_config.zero_stage"), job.told("plugin_config.zero_stage"))
    elif plugin not in (None, "hybrid"):
        job.leave("plugin", "known here: zero1, zero2 and hybrid")
    given.has("plugin_config.enable_sequence_parallelism")
    if given.get("plugin_config.sp_size") > 1:
        job.copy("parallel.sequence", "plugin_config.sp_size")
    if given.get("plugin_config.tp_size") > 1:
        job.leave(
            "plugin_config.tp_size", "layers are not split; parallel.zero 3 and parallel.sequence share the model"
        )


def _set_resume(job: Job) -> None:
    """A checkpoint lies in the folder of its run; without the position in the data, a new run starts from it."""
    draft, given = job.draft, job.given
    if not given.get("load"):
        return
    folder = PurePosixPath(given.get("load"))
    run = folder.parent if folder.name.startswith("epoch") else folder
    restarts = [name for name in ("start_step", "start_epoch") if given.has(name)]
    if not restarts:
        set_output(draft, str(run))
        text = f"{job.told('load')}: a run goes on from its own folder; checkpoints of the original are not read"
        draft.set("run.resume", "latest", text)
        return
    words = " ".join(job.told(name) for name in ("load", *restarts))
    text = f"{words}: a new run from the weights of that one; the optimizer starts fresh"
    draft.set("model.weights", str(run), text)
    draft.set("name", f"{draft.get('name')}-again")
