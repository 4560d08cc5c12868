"""Manifest, bucket policy and batch plan from the data sections of a recipe."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from pathlib import Path

import numpy as np
import polars as pl
from numpy.typing import NDArray

from frameloom.config.rules.models import token_patch
from frameloom.config.schema.buckets import (
    FixedSection,
    GroupedSection,
    MultiAspectSection,
    RatioTokensSection,
    TokenBudgetSection,
)
from frameloom.config.schema.data import DataSection, SourceSection
from frameloom.config.schema.recipe import Recipe
from frameloom.config.schema.training import DreamBoothSection
from frameloom.core.errors import DataError
from frameloom.core.logging import get_logger
from frameloom.data.buckets.fixed import Fixed, MultiAspect
from frameloom.data.buckets.grid import apply_token_budget, build_grid
from frameloom.data.buckets.grouped import Grouped
from frameloom.data.buckets.policy import BucketPolicy, assign, count_unused
from frameloom.data.buckets.ratio_tokens import RatioTokens
from frameloom.data.manifest.captions import CaptionSuffix, append_suffix, override_captions, read_templates
from frameloom.data.manifest.filters import Where
from frameloom.data.manifest.manifest import Manifest, Part, rows_in_epoch
from frameloom.data.manifest.rows import TableRows, check_table
from frameloom.data.media.decode import kind_of
from frameloom.data.media.probe import probe_header
from frameloom.data.order.plan import BatchPlan, plan_epoch
from frameloom.models.registry import VAES
from frameloom.models.vaes.config import LengthRule

_log = get_logger(__name__)
_SOURCE = "dreambooth.class_folder"


def build_policy(recipe: Recipe) -> BucketPolicy:
    """Buckets whose sizes fit the autoencoder, and the denoiser's patches where one is trained."""
    vae = VAES[recipe.vae.name]
    patch = token_patch(recipe) if recipe.task == "denoiser" else (1, 1, 1)
    return build_bucket_policy(recipe.data, stride=vae.strides[1] * patch[1], rule=vae.lengths(patch[0]))


def build_bucket_policy(data: DataSection, *, stride: int, rule: LengthRule) -> BucketPolicy:
    """The policy that `data.policy` names; `stride` is pixels per token on a side, `rule` the lengths a model takes."""
    match data.policy:
        case "ratio_tokens":
            return RatioTokens(data.ratio_tokens or RatioTokensSection(), stride=stride, rule=rule)
        case "grouped":
            return Grouped(data.grouped or GroupedSection(), rule=rule)
        case "multi_aspect":
            return MultiAspect(data.multi_aspect or MultiAspectSection(), fps_max=data.fps_max)
        case "fixed":
            return Fixed(data.fixed or FixedSection(), fps_max=data.fps_max)
        case "grid" | "token_budget":
            grid = build_grid(data.buckets or {}, stride=stride, fps_max=data.fps_max)
            if data.policy == "grid":
                return grid
            return apply_token_budget(grid, (data.token_budget or TokenBudgetSection()).tokens, rule)


def read_manifest(recipe: Recipe, where: Where | None = None) -> Manifest:
    """The clips of `data.manifest` or of all `data.sources`, their captions with the notes of `text.note`.

    `where` stands in for `data.where`.
    """
    data = recipe.data
    sections = data.sources or (SourceSection(path=data.manifest or "", root=data.root),)
    manifest = _override_captions(recipe, Manifest.read_sources(sections, where=data.where if where is None else where))
    note = recipe.text.note
    if note is None or recipe.task != "denoiser":
        return manifest
    policy = build_policy(recipe)
    notes = CaptionSuffix(note.fps, note.motion, data.fps_max, policy.frame_rule.stride, policy.frame_rule.fps)
    return append_suffix(manifest, notes)


def _override_captions(recipe: Recipe, manifest: Manifest) -> Manifest:
    """Other captions, where the recipe has prompts or templates for all pictures."""
    word = recipe.inversion
    if recipe.dreambooth is not None:
        return with_class_images(manifest, recipe.dreambooth)
    if word is None or word.templates == "captions":
        return manifest
    file = Path(word.template_file) if word.template_file else None
    return override_captions(manifest, read_templates(word.templates, file, word.placeholder))


def with_class_images(manifest: Manifest, section: DreamBoothSection) -> Manifest:
    """All rows with the instance prompt; pictures of the class behind them, in no epoch by themselves."""
    subject = override_captions(manifest, [section.instance_prompt])
    if section.class_folder is None or section.class_prompt is None:
        return subject
    folder = Path(section.class_folder)
    specs = [(path.name, probe_header(path)) for path in list_pictures(folder)]
    if not specs:
        return subject
    table = pl.DataFrame(
        {
            "path": [name for name, _ in specs],
            "caption": [section.class_prompt] * len(specs),
            "kind": ["image"] * len(specs),
            "height": [found.height for _, found in specs],
            "width": [found.width for _, found in specs],
            "frames": [1] * len(specs),
            "fps": pl.Series([None] * len(specs), dtype=pl.Float64),
        }
    )
    weight = 0.0 if any(part.weight is not None for part in subject.parts) else None
    rows = TableRows(check_table(table, source=_SOURCE))
    return Manifest([*subject.parts, Part(rows, folder, _SOURCE, weight, repeat=0.0)])


def list_pictures(folder: Path) -> list[Path]:
    found = sorted(folder.iterdir()) if folder.is_dir() else []
    return [path for path in found if kind_of(path) == "image" and not path.name.startswith(".")]


def class_rows(manifest: Manifest) -> NDArray[np.int64]:
    """The rows of the class pictures, none if there are none."""
    last = manifest.parts[-1]
    count = len(last.rows) if last.source == _SOURCE else 0
    return np.arange(len(manifest) - count, len(manifest), dtype=np.int64)


def build_plan(recipe: Recipe, manifest: Manifest, policy: BucketPolicy) -> Callable[[int], BatchPlan]:
    """The plan of an epoch as a function; the last two are kept, because both sides of an epoch's end are needed."""

    @lru_cache(maxsize=2)
    def plan(epoch: int) -> BatchPlan:
        assignment = assign(manifest, policy, recipe.seed, epoch)
        if epoch == 0:
            unused = {reason: num for reason, num in count_unused(manifest, policy, assignment).items() if num}
            if unused:
                _log.warning("%d of %d clips fit no bucket: %s", sum(unused.values()), len(manifest), unused)
        made = order_epoch(recipe, policy, assignment, epoch, shown_rows(recipe, manifest, epoch))
        if made.num_microbatches == 0:
            raise DataError(
                f"{manifest.source}: no clip fits a bucket in epoch {epoch} "
                f"({count_unused(manifest, policy, assignment)}); add smaller sizes or shorter lengths to data.buckets"
            )
        return made

    return plan


def shown_rows(recipe: Recipe, manifest: Manifest, epoch: int) -> NDArray[np.int64] | None:
    """The rows of an epoch where sources have weights or repeats; None where every row comes once."""
    if all(part.share.is_plain for part in manifest.parts):
        return None
    return rows_in_epoch([part.share for part in manifest.parts], recipe.seed, epoch)


def order_epoch(
    recipe: Recipe,
    policy: BucketPolicy,
    assignment: NDArray[np.int32],
    epoch: int,
    shown: NDArray[np.int64] | None = None,
) -> BatchPlan:
    """The plan of an epoch from the bucket of each row; the number of ranks has no part in it."""
    return plan_epoch(
        assignment,
        policy.batch_sizes,
        clip_costs(recipe, policy),
        seed=recipe.seed,
        epoch=epoch,
        accumulate=recipe.train.accumulate,
        cost_group=recipe.data.cost_group,
        drop_last=recipe.data.drop_last,
        shown=shown,
    )


def clip_costs(recipe: Recipe, policy: BucketPolicy) -> NDArray[np.float64]:
    """What one clip of each bucket costs: tokens for a denoiser, pixels for an autoencoder.

    With a token budget whose `attention` is known, tokens are counted as often as they take longer in a long clip.
    """
    if recipe.task != "denoiser":
        return policy.costs
    vae, patch = VAES[recipe.vae.name], token_patch(recipe)
    latent_frames = [vae.lengths().latents(bucket.frames) for bucket in policy.buckets]
    areas = [bucket.height * bucket.width for bucket in policy.buckets]
    cell = vae.strides[1] * vae.strides[2] * patch[0] * patch[1] * patch[2]
    tokens = np.array(latent_frames, dtype=np.float64) * areas / cell
    budget = recipe.data.token_budget if recipe.data.policy == "token_budget" else None
    return tokens if budget is None or budget.attention is None else tokens * (1 + tokens / budget.attention)
