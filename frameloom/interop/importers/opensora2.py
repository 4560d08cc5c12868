"""Configurations and commands of Open-Sora 2.0 (`scripts/diffusion/train.py`) as recipes.

Only what is written is translated: published configurations say everything, and a command adds to one of them.
"""

from __future__ import annotations

from pathlib import PurePosixPath
from typing import Any

from frameloom.config.loading.recipe import resolve
from frameloom.interop.importers.job import ImportJob, set_length, set_output, set_zero

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


def translate(job: ImportJob, *, base: str | None, name: str) -> None:
    """`base` is the shipped recipe that a command builds on; None: `job.given` is a whole configuration."""
    given, recipe = job.given, job.recipe
    if base is not None:
        recipe.values["_base_"] = base
    else:
        recipe.start(resolve("opensora2/image"))
        recipe.set("model", {"family": "opensora2", "size": "11b", "overrides": {}})
        recipe.set("train.ema", None)
    recipe.set("name", name)
    job.apply_table()
    _set_model(job, is_whole=base is None)
    _set_frozen_parts(job)
    _set_data(job)
    _set_optimizer(job)
    _set_recompute(job)
    if given.has("epochs"):
        set_length(job, None, given.get("epochs"))
    if given.get("ema_decay"):
        recipe.set("train.ema", {"decay": given.get("ema_decay"), "warmup": False})
    _set_parallel(job)
    _set_resume(job)


def _set_model(job: ImportJob, *, is_whole: bool) -> None:
    recipe, given = job.recipe, job.given
    if not given.get("model.from_pretrained") and not given.has("load"):
        text = "no weights are named, so the model starts fresh; the guide fine-tunes Flux or Open-Sora 2.0 instead"
        recipe.set("model.weights", None, text)
    if given.has("model.patch_size") and given.get("model.patch_size") == 1:
        recipe.set("model.size", "11b-dcae")
        # Sampling counts tokens of one cell there, training of four.
        recipe.set("objective.sampling_shift_patch", 1)
    overrides = {}
    for name in _FIELDS:
        value = given.get(f"model.{name}") if given.has(f"model.{name}") else None
        if value is not None and (value != given.arguments[f"model.{name}"].default or name == "cond_embed"):
            overrides[name] = value
    if is_whole or overrides:
        # The named size takes images; configurations say whether theirs does.
        recipe.set("model.overrides", {"cond_embed": False, **overrides} if is_whole else overrides)


def _set_frozen_parts(job: ImportJob) -> None:
    recipe, given = job.recipe, job.given
    if given.has("ae.type"):
        name, size = job.choose("ae.type", _VAES)
        recipe.set("vae.name", name)
        recipe.set("vae.size", size)
        overrides = {
            field: given.get(key)
            for key, field in (_VAE_FIELDS | _TILES).items()
            if given.has(key) and given.get(key) != _PUBLISHED_VAE.get(key, False)
            if name == "hunyuan" or field.endswith("tiling") or field.startswith("tile")
        }
        recipe.set("vae.overrides", overrides)
    for index, name in enumerate(("t5", "clip")):
        path, length = f"{name}.from_pretrained", f"{name}.max_length"
        if given.has(path) or given.has(length):
            recipe.set("text.encoders", recipe.encoders)
        for key, source in (("path", path), ("max_length", length)):
            if given.has(source):
                job.copy(f"text.encoders.{index}.{key}", source)
    if given.has("dropout_ratio.clip") and given.get("dropout_ratio.clip") != given.get("dropout_ratio.t5"):
        recipe.note("text.dropout", f"{given.quote('dropout_ratio.clip')}: both encoders have one share here")
    # The original says frame rate and motion behind a caption.
    if given.has("dataset.vmaf"):
        recipe.set("text.note", {"motion": "score_vmafmotion" if given.get("dataset.vmaf") else None})


def _set_data(job: ImportJob) -> None:
    recipe, given = job.recipe, job.given
    if not given.get("dataset.data_path") and "_base_" not in recipe.values:
        recipe.note("data.manifest", "no table is named; --dataset.data-path names one for the original")
    if given.get("dataset.memory_efficient"):
        text = "--dataset.memory_efficient: name the folder that `frameloom data shard` writes, or the one of shard.py"
        recipe.note("data.manifest", text)
    if given.has("bucket_config"):
        buckets: dict[str, Any] = {}
        for name, cells in (given.get("bucket_config") or {}).items():
            if isinstance(cells, dict) and all(isinstance(cell, list) and len(cell) == 2 for cell in cells.values()):
                buckets[name] = {frames: list(cell) for frames, cell in cells.items()}
            else:
                given.problems.append(f"bucket_config[{name!r}]: expected {{frames: (probability, batch size)}}")
        recipe.set("data.buckets", buckets)
    if any([given.get("cached_text"), given.get("cached_video")]):
        recipe.set("data.cache.external", "open_sora2")
    if given.has("condition_config"):
        shares = given.get("condition_config")
        recipe.set("known", {"law": "ends", "shares": dict(shares)} if shares else None)


def _set_optimizer(job: ImportJob) -> None:
    recipe, given = job.recipe, job.given
    if given.has("lr"):
        text = "in the original this changes a variable that nothing reads, and --optim.lr would; meant is the rate"
        recipe.set("optim.lr", given.get("lr"), f"{given.quote('lr')}: {text}")
    if given.has("grad_clip"):
        recipe.set("optim.clip_norm", given.get("grad_clip", may_be_none=True) or None)
    if given.get("warmup_steps", may_be_none=True):
        job.copy("optim.schedule.warmup_steps", "warmup_steps")


def _set_recompute(job: ImportJob) -> None:
    """(a, b): the first a double and b single blocks; a number of all blocks or more is all of them."""
    recipe, given = job.recipe, job.given
    names = ("model.grad_ckpt_settings", "model.grad_ckpt_setting", "grad_ckpt_settings", "grad_ckpt_setting")
    name = next((name for name in names if given.has(name)), None)
    for other in names:
        given.has(other)
    if given.has("grad_checkpoint") and not given.get("grad_checkpoint"):
        recipe.set("train.recompute", False)
        return
    offload = bool(given.get("grad_ckpt_buffer_size", may_be_none=True))
    if name is None:
        if offload:
            recipe.set("train.recompute", {"offload": True})
        return
    numbers = given.get(name)
    if numbers is None:
        recipe.set("train.recompute", {"offload": True} if offload else True)
        return
    if not isinstance(numbers, list) or len(numbers) != 2 or not all(isinstance(n, int) and n >= 0 for n in numbers):
        given.problems.append(f"{given.quote(name)}: expected two whole numbers, (double blocks, single blocks)")
        return
    kinds = dict(zip(_DEPTHS, numbers, strict=True))
    blocks = {kind: number for kind, number in kinds.items() if number < _DEPTHS[kind]}
    section = {**({"blocks": blocks} if blocks else {}), **({"offload": True} if offload else {})}
    recipe.set("train.recompute", section or True)


def _set_parallel(job: ImportJob) -> None:
    given = job.given
    plugin = given.get("plugin") if given.has("plugin") else None
    if plugin in ("zero1", "zero2"):
        set_zero(job, int(plugin[-1]), given.quote("plugin"))
    elif plugin == "hybrid" and given.get("plugin_config.zero_stage"):
        set_zero(job, given.get("plugin_config.zero_stage"), given.quote("plugin_config.zero_stage"))
    elif plugin not in (None, "hybrid"):
        job.unsupported("plugin", "known here: zero1, zero2 and hybrid")
    if given.get("plugin_config.sp_size") > 1:
        job.copy("parallel.sequence", "plugin_config.sp_size")
    if given.get("plugin_config.tp_size") > 1:
        job.unsupported(
            "plugin_config.tp_size", "layers are not split; parallel.zero 3 and parallel.sequence share the model"
        )


def _set_resume(job: ImportJob) -> None:
    """A checkpoint lies in the folder of its run; without the position in the data, a new run starts from it."""
    recipe, given = job.recipe, job.given
    if not given.get("load"):
        return
    folder = PurePosixPath(given.get("load"))
    run = folder.parent if folder.name.startswith("epoch") else folder
    restarts = [name for name in ("start_step", "start_epoch") if given.has(name)]
    if not restarts:
        set_output(recipe, str(run))
        text = f"{given.quote('load')}: a run goes on from its own folder; checkpoints of the original are not read"
        recipe.set("run.resume", "latest", text)
        return
    words = " ".join(given.quote(name) for name in ("load", *restarts))
    text = f"{words}: a new run from the weights of that one; the optimizer starts fresh"
    recipe.set("model.weights", str(run), text)
    recipe.set("name", f"{recipe.get('name')}-again")
