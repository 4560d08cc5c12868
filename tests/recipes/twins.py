"""Tiny twins of shipped recipes: what costs is made small, every other setting is the recipe's own.

A twin inherits from its recipe, so it can only differ in what is written here: sizes of networks and pictures, numbers
of frames, clips and steps, and where files lie.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import yaml
from safetensors.torch import save_file

from frameloom.builders.vae import build_vae
from frameloom.checkpoint.model_folder import write_model_folder
from frameloom.config.loading.recipe import load_recipe
from frameloom.config.schema.models import TextEncoderSection, VAESection
from frameloom.config.schema.recipe import Recipe
from frameloom.core.files import digest_value
from frameloom.models.registry import DENOISERS, VAES, get_denoiser
from frameloom.models.vaes.lpips import LPIPS
from tests.models.text import tiny

NUM_STEPS = 2
LONGEST = 9  # frames; no clip of Moving Shapes is shorter
SIDE = 64
TEXT_LENGTH = 32
NARROW = 4  # channels of networks that judge an autoencoder
# Fields that make a model large; all others (positions, layouts, conditions) are kept.
_DIMENSIONS = {
    "sdxl": (
        *("model_channels", "channel_mult", "transformer_depth", "num_res_blocks", "num_head_channels"),
        *("norm_groups", "size_embed_dim"),
    ),
    "latte": ("num_layers", "num_attention_heads", "attention_head_dim", "sample_size", "video_length"),
    "opensora_plan": ("num_layers", "num_attention_heads", "attention_head_dim"),
    "cogvideox_fun": (
        *("num_attention_heads", "num_layers", "attention_head_dim", "time_embed_dim"),
        *("sample_height", "sample_width", "sample_frames"),
    ),
    "opensora2": ("hidden_size", "num_heads", "depth", "depth_single_blocks", "axes_dim"),
}


@dataclasses.dataclass(frozen=True)
class Workshop:
    """`manifest` lists Moving Shapes; tiny autoencoders and text encoders are made in `folder` as they are needed."""

    manifest: Path
    folder: Path

    def load_twin(self, name: str, *, run_folder: Path, **sections: Any) -> Recipe:
        """The twin of a shipped recipe; `sections` are merged over it."""
        recipe = load_recipe(name)
        path = run_folder / f"{recipe.name}.yaml"
        base = path.with_name(f"{recipe.name}-base.yaml")
        base.write_text(yaml.safe_dump({"_base_": name, **self._shrink(recipe, run_folder)}))
        path.write_text(yaml.safe_dump({"_base_": base.name, **sections}))
        return load_recipe(path)

    def _shrink(self, recipe: Recipe, run_folder: Path) -> dict[str, Any]:
        warmup = min(recipe.optim.schedule.warmup_steps, NUM_STEPS - 1)
        train: dict[str, Any] = {"steps": count_steps(recipe), "log_every": 1, "device": "cpu"}
        if not isinstance(recipe.train.recompute, bool):
            train["recompute"] = {"offload": False}  # memory of a GPU only
        if recipe.task == "autoencoder":
            train["precision"] = "fp32"  # a CPU takes twenty times as long for convolutions in bf16
        return {
            "run": {"folder": str(run_folder), "trackers": ["jsonl"]},
            "data": _shrink_data(recipe, self.manifest, run_folder),
            "optim": {"schedule": {"warmup_steps": warmup}},
            "train": train,
            "parallel": {"sequence": 1},  # one process
            **(self._shrink_models(recipe) if recipe.task == "denoiser" else self._shrink_autoencoder(recipe)),
        }

    def _shrink_autoencoder(self, recipe: Recipe) -> dict[str, Any]:
        """Its own networks and those that judge it, all narrow; weights of the losses stay."""
        losses: dict[str, Any] = {}
        if recipe.autoencoder.discriminator is not None:
            losses["discriminator"] = {"channels": NARROW}
        if recipe.autoencoder.lpips is not None:
            losses["lpips"] = {"weights": str(self._lpips()), "channels": NARROW}
        return {"vae": {"size": "tiny", "weights": None}, "autoencoder": losses}

    def _lpips(self) -> Path:
        path = self.folder / "lpips.safetensors"
        if not path.exists():
            write_lpips(path, NARROW)
        return path

    def _shrink_models(self, recipe: Recipe) -> dict[str, Any]:
        return {
            "model": {"size": "tiny", "weights": None, "overrides": {"_delete_": True, **_kept_fields(recipe)}},
            "vae": {"size": "tiny", "weights": str(self._vae(recipe.vae))},
            "text": {"encoders": [self._encoder(encoder) for encoder in recipe.text.encoders]},
        }

    def _vae(self, section: VAESection) -> Path:
        """The recipe's autoencoder at its tiny size, with the recipe's switches."""
        folder = self.folder / f"{section.name}-{digest_value(section.overrides)[:8]}"
        if not folder.exists():
            vae = build_vae(section.model_copy(update={"size": "tiny", "weights": None}), seed=0)
            config = dataclasses.asdict(vae.config)
            write_model_folder(folder, kind="vae", name=vae.name, config=config, tensors=vae.model.state_dict())
        return folder

    def _encoder(self, section: TextEncoderSection) -> dict[str, Any]:
        """The recipe's text encoder with its options, of a few thousand weights."""
        is_clip = section.name.startswith("clip")
        folder = self.folder / ("clip" if is_clip else section.name)
        if not folder.exists() and is_clip:
            tiny.make_sdxl(folder)
        elif not folder.exists():
            tiny.make_t5(folder, kind=section.name)
        values = section.model_dump(exclude_none=True)
        length = tiny.POSITIONS if is_clip else TEXT_LENGTH
        return {**values, "path": str(folder), "max_length": length}


def write_lpips(path: Path, channels: int) -> None:
    """LPIPS of random weights, with heads that are not below 0 as the published ones."""
    generator = torch.Generator().manual_seed(0)
    tensors = {}
    for name, value in LPIPS(channels).state_dict().items():
        drawn = torch.randn(value.shape, generator=generator) * max(1, value[0].numel()) ** -0.5
        tensors[name] = value if name.startswith("scaling_layer.") else drawn.abs() if "lin" in name else drawn
    save_file(tensors, path)


def _kept_fields(recipe: Recipe) -> dict[str, Any]:
    """All of the architecture but its dimensions, for `model.overrides` of the tiny size."""
    name = recipe.model.family
    full = dataclasses.replace(get_denoiser(name).sizes[recipe.model.size], **recipe.model.overrides)
    kept = [field for field in DENOISERS[name].fields if field not in _DIMENSIONS[name]]
    values = {field: getattr(full, field) for field in kept}
    values |= {field: TEXT_LENGTH for field in kept if field == "max_text_seq_length"}
    return {field: list(value) if isinstance(value, tuple) else value for field, value in values.items()}


def _shrink_data(recipe: Recipe, manifest: Path, run_folder: Path) -> dict[str, Any]:
    data = recipe.data
    section = _SHRINK[data.policy](recipe)
    transforms = [item.model_dump(exclude_none=True) for item in data.transforms]
    for item in transforms:
        if "max_area" in item:
            item["max_area"] = section["max_hxw"]
    # Of clips and images, two steps could see images alone.
    only_clips = trains_clips(recipe) and not data.use_image_num
    caches = {key: str(run_folder / "cache" / key) for key in ("latents", "text") if getattr(data.cache, key)}
    return {
        "manifest": str(manifest),
        "where": "split == 'train' and frames > 1" if only_clips else "split == 'train'",
        "workers": 0,
        "transforms": transforms,
        "cache": caches,
        "buckets" if data.policy == "grid" else data.policy: section,
    }


def count_steps(recipe: Recipe) -> int:
    """Steps in which the model itself takes `NUM_STEPS`: a discriminator may have every second one."""
    judge = recipe.autoencoder.discriminator if recipe.task == "autoencoder" else None
    return 2 * NUM_STEPS - 1 if judge is not None and judge.update == "alternate" else NUM_STEPS


def trains_clips(recipe: Recipe) -> bool:
    """Whether any bucket of a recipe holds more than one frame."""
    data = recipe.data
    if data.policy == "grid":
        return any(length > 1 for cells in (data.buckets or {}).values() for length in cells)
    section = getattr(data, data.policy)
    lengths = [getattr(section, key, 1) for key in ("frames", "num_frames", "video_sample_n_frames")]
    return max(lengths) > 1


def _shorten(recipe: Recipe, frames: int) -> int:
    """The largest number of frames that the models take, up to `LONGEST`, or a little more where tokens span frames."""
    patch = 1
    if recipe.task == "denoiser":
        patch = DENOISERS[recipe.model.family].patch_of(recipe.model.size, recipe.model.overrides)[0]
    vae = VAES[recipe.vae.name]
    return max(n for n in range(1, min(frames, LONGEST + 4 * (patch - 1)) + 1) if vae.lengths(patch).accepts(n))


def _shrink_grid(recipe: Recipe) -> dict[str, Any]:
    """The smallest resolution becomes 64px, the next 96px and so on; lengths of Moving Shapes stay."""
    small: dict[str, Any] = {"_delete_": True}
    buckets = recipe.data.buckets or {}
    for rank, name in enumerate(sorted(buckets, key=lambda name: int(name.partition("px")[0]))):
        cells = {length: cell for length, cell in buckets[name].items() if length <= LONGEST}
        clips = {length: cell for length, cell in buckets[name].items() if length > 1}
        if clips and max(cells, default=1) == 1:
            cells[_shorten(recipe, min(clips))] = clips[min(clips)]
        shrunk = {str(length): [share, min(batch, 2)] for length, (share, batch) in cells.items()}
        # Without a ratio: small tables do not have them all.
        small[f"{SIDE + 32 * rank}px"] = shrunk
    return small


def _shrink_fixed(recipe: Recipe) -> dict[str, Any]:
    section = recipe.data.fixed
    assert section is not None
    return {
        "height": SIDE,
        "width": SIDE,
        "frames": _shorten(recipe, section.frames),
        "batch": min(section.batch, 2),
    }


def _shrink_grouped(recipe: Recipe) -> dict[str, Any]:
    section = recipe.data.grouped
    assert section is not None
    small: dict[str, Any] = {"num_frames": _shorten(recipe, section.num_frames), "batch": min(section.batch, 2)}
    if section.force_resolution:
        is_wide = section.max_width > section.max_height
        return {**small, "max_height": SIDE, "max_width": SIDE + 32 * is_wide}
    return {**small, "max_hxw": SIDE * SIDE}


def _shrink_multi_aspect(recipe: Recipe) -> dict[str, Any]:
    section = recipe.data.multi_aspect
    assert section is not None
    sizes = [[max(32, side // 256 * 16) for side in size] for size in section.sizes]
    return {"sizes": sizes, "batch": min(section.batch, 2)}


def _shrink_ratio_tokens(recipe: Recipe) -> dict[str, Any]:
    section = recipe.data.ratio_tokens
    assert section is not None
    return {
        "image_sample_size": SIDE,
        "video_sample_size": SIDE // 2,
        # 48, 56 and 64 for 512, 768 and 1024: larger pictures have fewer frames, and still more than one.
        "token_sample_size": SIDE // 2 + section.token_sample_size // 32,
        "video_sample_stride": 1,
        "video_sample_n_frames": _shorten(recipe, section.video_sample_n_frames),
        "train_batch_size": min(section.train_batch_size, 2),
    }


_SHRINK: dict[str, Callable[[Recipe], dict[str, Any]]] = {
    "grid": _shrink_grid,
    "fixed": _shrink_fixed,
    "grouped": _shrink_grouped,
    "multi_aspect": _shrink_multi_aspect,
    "ratio_tokens": _shrink_ratio_tokens,
}
