"""Cache keys and fingerprints: how a cached sample is identified, which are stale, and how a mismatch is explained.

The fingerprint says what all samples of a recipe share: the encoder, the transforms, the dtype. A latent is identified
besides by its clip's path and reading facts, the shape of its bucket and the state of its file; an embedding by its
caption. So a change makes exactly those samples stale that depend on it.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import polars as pl

from frameloom.config.schema.data import CacheSection, DataSection
from frameloom.core.disk_names import READ_SETTINGS
from frameloom.core.errors import CacheError, ConfigError
from frameloom.data.buckets.policy import BucketPolicy, Pairs, refuse_random
from frameloom.data.cache.folder import CacheFolder, name_fingerprint
from frameloom.data.cache.shards import REBUILD
from frameloom.data.cache.source_state import LOCATION, SOURCE, FileDigests, find_valid, format_source
from frameloom.data.manifest.manifest import Manifest
from frameloom.data.media.transforms import parse_transforms
from frameloom.models.precision import DTYPES

LATENT_KEY = ("path", "facts", "frames", "height", "width")
LATENT_COLUMNS = {
    **{"path": pl.String, "facts": pl.String, "frames": pl.Int32, "height": pl.Int32, "width": pl.Int32},
    **SOURCE,
    "reason": pl.String,
}
TEXT_COLUMNS = {"key": pl.Int64}
# Columns of a manifest, where it has them, that decide which frames of a file are read.
_FACTS = ("kind", "frames", "fps", "start_frame", "end_frame", "crop", "member", "offset", "bytes")
# Parts of a policy's geometry that the shape and the facts of each sample say already.
_PER_SAMPLE = ("buckets", "stride", "fps_max")
_NUM_SHOWN = 12


def latent_fingerprint(
    policy: BucketPolicy, data: DataSection, *, encoder: Mapping[str, Any], seed: int = 0
) -> dict[str, Any]:
    """What all latents of a recipe share; `encoder` has the weights' digest and config. Random settings are refused.

    `seed` counts only for stored samples, whose noise is drawn from it.
    """
    refuse_random(policy)
    read = {name: getattr(data, name) for name in READ_SETTINGS} | {"transforms": parse_transforms(data.transforms)}
    _refuse_random_settings(data, read)
    geometry = {name: value for name, value in policy.geometry().items() if name not in _PER_SAMPLE}
    return {
        "kind": "latents",
        "transforms": {
            **{name: _describe(value) for name, value in read.items()},
            "policy": {**_describe(geometry), "frame_rule": _describe(policy.frame_rule)},
        },
        "encoder": dict(encoder),
        "dtype": str(DTYPES[data.cache.precision]).removeprefix("torch."),
        "store": {"kind": data.cache.store, **({"seed": seed} if data.cache.store == "sample" else {})},
    }


def _refuse_random_settings(data: DataSection, read: Mapping[str, Any]) -> None:
    problems = []
    if data.flip:
        problems.append(f"data.flip: {data.flip:g} cannot be cached; use 0, or no latent cache")
    if data.use_image_num:
        problems.append(f"data.use_image_num: {data.use_image_num} cannot be cached, these images are drawn; use 0")
    for name, value in read.items():
        for part in value if isinstance(value, tuple) else (value,):
            text = part if isinstance(part, str) else str(getattr(part, "disk_name", ""))
            if text.lower().startswith("random"):
                advice = "use first or center" if name == "frame_start" else "use one that is not random"
                problems.append(f"data.{name}: {text} cannot be cached, a cache holds one view per clip; {advice}")
    if problems:
        raise ConfigError(problems)


def _describe(value: Any) -> Any:
    """Settings as JSON-like values; a dataclass keeps its name on disk, for two kinds of crop may have equal fields."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {field.name: _describe(getattr(value, field.name)) for field in dataclasses.fields(value)}
        named: Any = value
        return {"is": named.disk_name, **fields}
    if isinstance(value, Mapping):
        return {str(name): _describe(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_describe(inner) for inner in value]
    return value


def text_fingerprint(
    cache: CacheSection, *, encoder: Mapping[str, Any], note: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """What a text cache depends on, besides the captions, which are its keys; `note` is what was added to them."""
    about = {"kind": "text", "encoder": dict(encoder), "dtype": str(DTYPES[cache.precision]).removeprefix("torch.")}
    return about if note is None else {**about, "note": dict(note)}


def latent_items(manifest: Manifest, policy: BucketPolicy, pairs: Pairs) -> pl.DataFrame:
    """One row per (row, bucket) of `pairs`, in their order, with all that a latent is known by."""
    clips = _clips(manifest).with_columns(pl.Series("interval", policy.intervals(manifest.fps)))
    names = [name for name in (*_FACTS, "interval", "same_path_in") if name in clips.columns]
    facts = clips.select(pl.struct(names).struct.json_encode().alias("facts"), *LOCATION)
    shapes = np.array([(b.frames, b.height, b.width) for b in policy.buckets], dtype=np.int32).reshape(-1, 3)
    chosen = shapes[pairs.buckets]
    return facts[pairs.rows].with_columns(
        pl.Series("row", pairs.rows),
        pl.Series("bucket", pairs.buckets),
        *(pl.Series(name, chosen[:, column]) for column, name in enumerate(("frames", "height", "width"))),
    )


def _clips(manifest: Manifest) -> pl.DataFrame:
    """Where each row's file is and how it is read."""
    names = [name for name in ("path", *_FACTS) if name in manifest.columns]
    clips = pl.DataFrame({name: manifest.column(name) for name in names}).with_columns(
        pl.concat([pl.repeat(str(part.root), len(part.rows), eager=True) for part in manifest.parts]).alias("root"),
        pl.concat([pl.repeat(part.source, len(part.rows), eager=True) for part in manifest.parts]).alias("source"),
    )
    # A member of a tar has an offset; for all others the whole file counts.
    inside = "offset" in names and "bytes" in names
    clips = clips.with_columns(
        (pl.col("offset") if inside else pl.lit(None)).cast(pl.Int64).alias("offset"),
        (pl.col("bytes") if inside else pl.lit(None)).cast(pl.Int64).alias("num_bytes"),
    )
    # Roots may move, so they are no part of a clip's identity; the names of two sources with one path are.
    is_shared = pl.col("source").n_unique().over("path") > 1 if len(manifest.parts) > 1 else pl.lit(False)
    return clips.with_columns(pl.when(is_shared).then(pl.col("source")).alias("same_path_in"))


def find_latents(items: pl.DataFrame, entries: pl.DataFrame, made_by: str, known: FileDigests | None) -> pl.DataFrame:
    """`items` in their order with the entry of each; `group` is null where there is none that is fresh.

    `changed` marks items whose latent was made from another version of their file. `known` are digests of touched
    files, which may grow; with None, files are not looked at. Where that leaves several versions, because the file is
    gone, the last of `entries` counts, and a latent before a reason why there is none.
    """
    ours = entries.filter(pl.col("made_by") == made_by)
    numbered = items.with_row_index("item")
    found = numbered.join(ours, on=list(LATENT_KEY), how="inner", maintain_order="left_right")
    fresh = found if known is None else find_valid(found, known)
    fresh = fresh.sort(pl.col("reason").is_null(), maintain_order=True).unique("item", keep="last")
    columns = [name for name in fresh.columns if name not in items.columns]
    placed = numbered.join(fresh.select(columns), on="item", how="left", maintain_order="left")
    is_known = pl.col("item").is_in(found["item"].unique().implode())
    return placed.with_columns((pl.col("group").is_null() & is_known).alias("changed")).drop("item")


def caption_key(caption: str) -> int:
    """A signed 64-bit hash of the text, the key of a text cache."""
    return int.from_bytes(hashlib.blake2b(caption.encode(), digest_size=8).digest(), "little", signed=True)


def caption_keys(captions: Iterable[str]) -> pl.DataFrame:
    """The different captions and the null prompt "", each with its key, in the order of the captions."""
    unique = ["", *sorted(set(captions) - {""})]
    keys = [caption_key(caption) for caption in unique]
    if len(set(keys)) != len(keys):
        raise CacheError("two captions have the same 64-bit hash; change one of them by a character")
    return pl.DataFrame({"caption": unique, "key": keys}, schema={"caption": pl.String, "key": pl.Int64})


def explain_latents(
    folder: CacheFolder, fingerprint: Mapping[str, Any], placed: pl.DataFrame, entries: pl.DataFrame
) -> list[str]:
    """Why latents are missing, as lines: how many, what differs from the cached ones, and the command."""
    missing = placed.filter(pl.col("group").is_null())
    lines = [f"{folder.path}: lacks {missing.height} of {placed.height} latents; {REBUILD}"]
    changed = missing.filter(pl.col("changed")).unique("path", maintain_order=True).head(_NUM_SHOWN)
    for item in (
        changed.select(*LATENT_KEY, "root", "offset", "num_bytes")
        .join(entries, on=list(LATENT_KEY))
        .iter_rows(named=True)
    ):
        lines.append(f"  {item['path']}: {format_source(item)}")
    rest = missing.filter(~pl.col("changed"))
    shape = ["path", "frames", "height", "width"]
    lines += _format_fingerprints(folder, fingerprint, rest.join(entries, on=list(LATENT_KEY), how="semi"), entries)
    ours = entries.filter(pl.col("made_by") == name_fingerprint(fingerprint))
    for item in rest.join(ours, on=shape, how="inner", suffix="_cached").head(_NUM_SHOWN).iter_rows(named=True):
        found = format_differences(json.loads(item["facts"]), json.loads(item["facts_cached"]))
        lines += [f"  {item['path']}: {line.strip()}" for line in found]
    return lines


def explain_text(
    folder: CacheFolder, fingerprint: Mapping[str, Any], missing: pl.DataFrame, num_wanted: int, entries: pl.DataFrame
) -> list[str]:
    shown = ", ".join(repr(text) for text in missing["caption"].head(3).to_list())
    lines = [f"{folder.path}: no embedding for {missing.height} of {num_wanted} captions, first {shown}; {REBUILD}"]
    return lines + _format_fingerprints(folder, fingerprint, missing.join(entries, on="key", how="semi"), entries)


def _format_fingerprints(
    folder: CacheFolder, fingerprint: Mapping[str, Any], known: pl.DataFrame, entries: pl.DataFrame
) -> list[str]:
    """The differences to the fingerprint that most other entries have, if missing samples are among them."""
    others = entries.filter(pl.col("made_by") != name_fingerprint(fingerprint))
    if not known.height or not others.height:
        return []
    most = others.group_by("made_by").len().sort("len", "made_by", descending=True)["made_by"][0]
    found = folder.read_fingerprints().get(most)
    if found is None:
        return []
    head = f"  made for something else ({others.height} samples):"
    return [head, *format_differences(json.loads(json.dumps(dict(fingerprint), default=str)), found)]


def format_differences(wanted: Mapping[str, Any], found: Mapping[str, Any]) -> list[str]:
    """One line per leaf that differs between two nested dictionaries."""
    ours, theirs = _flatten(wanted), _flatten(found)
    keys = [name for name in ours | theirs if ours.get(name) != theirs.get(name)]
    keys.sort(key=lambda name: ("[" in name, name))  # long lists must not push the rest out of sight
    lines = [f"  {name}: wanted {ours.get(name, 'nothing')}, cache has {theirs.get(name, 'nothing')}" for name in keys]
    return lines[:_NUM_SHOWN] + ([f"  and {len(lines) - _NUM_SHOWN} more"] if len(lines) > _NUM_SHOWN else [])


def _flatten(value: Any, prefix: str = "") -> dict[str, str]:
    if isinstance(value, Mapping):
        items = [(f"{prefix}.{name}" if prefix else str(name), inner) for name, inner in value.items()]
    elif isinstance(value, list | tuple):
        items = [(f"{prefix}[{i}]", inner) for i, inner in enumerate(value)]
    else:
        return {prefix: json.dumps(value, default=str)}
    return {name: leaf for key, inner in items for name, leaf in _flatten(inner, key).items()}
