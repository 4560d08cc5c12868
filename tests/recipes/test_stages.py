"""The shipped recipes of published systems: each is valid, and its tiny twin really trains with its settings."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from frameloom.builders.objective import build_objective
from frameloom.checkpoint.model_folder import read_weights
from frameloom.config.loading.recipe import SHIPPED, load_recipe, resolve, shipped_recipes
from frameloom.config.schema.recipe import Recipe
from frameloom.training.caching import write_caches
from frameloom.training.loop import Trainer
from frameloom.training.run.folder import RunFolder
from frameloom.training.tasks.denoiser import DenoiserTask
from frameloom.training.train import build_trainer
from tests.recipes.twins import NUM_STEPS, Workshop, trains_clips

# Moving Shapes is tiny already, and the tests of the demo train it.
STAGES = [name for name, _ in shipped_recipes() if not name.startswith("shapes/")]
# Of the networks that judge an autoencoder: where their weights lie, and how wide they are.
SMALL_LOSSES = {"lpips": {"weights", "channels"}, "discriminator": {"channels"}}
GOLDENS = Path(__file__).parents[1] / "goldens" / "open-sora-v2"


@dataclass(frozen=True)
class Run:
    """A twin after its steps; `before` are the weights that train, as they were at the start."""

    twin: Recipe
    trainer: Trainer
    before: dict[str, Tensor]

    def metrics(self, name: str) -> list[float]:
        lines = [json.loads(line) for line in self.trainer.folder.metrics.read_text().splitlines()]
        return [line[name] for line in lines if name in line]


@pytest.fixture(scope="session")
def workshop(shared_world: Path, tmp_path_factory: pytest.TempPathFactory) -> Workshop:
    return Workshop(shared_world / "data" / "manifest.parquet", tmp_path_factory.mktemp("workshop"))


@pytest.fixture(scope="session")
def runs(workshop: Workshop, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Run]:
    """The run of each twin by the name of its recipe, trained when it is first asked for."""
    folder, known = tmp_path_factory.mktemp("runs"), {}

    def find(name: str) -> Run:
        if name not in known:
            known[name] = train_twin(workshop.load_twin(name, run_folder=folder))
        return known[name]

    return find


@cache
def find_stage(name: str) -> Recipe:
    return load_recipe(name)


def start_twin(twin: Recipe) -> Trainer:
    if twin.data.cache.latents is not None:
        list(write_caches(twin))
    folder = RunFolder(Path(twin.run.folder) / twin.name)
    folder.path.mkdir()
    return build_trainer(twin, folder, first_step=1)


def shake(model: nn.Module) -> None:
    """Weights as trained ones are: layers that start from zero would keep gradients from all that stand before them."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=generator))


def train_twin(twin: Recipe) -> Run:
    trainer = start_twin(twin)
    if twin.task == "denoiser":
        shake(trainer.task.model)
    before = {name: value.detach().clone() for name, value in trained_weights(trainer).items()}
    trainer.run()
    for tracker in trainer.trackers:
        tracker.close()
    return Run(twin, trainer, before)


def trained_weights(trainer: Trainer) -> dict[str, Tensor]:
    return {name: value for name, value in trainer.task.model.named_parameters() if value.requires_grad}


@pytest.mark.parametrize("name", STAGES)
def test_the_twin_of_a_stage_trains(runs, name: str) -> None:
    run = runs(name)
    losses = run.metrics("train/loss")
    assert len(losses) == NUM_STEPS and all(math.isfinite(loss) and loss > 0 for loss in losses)
    assert bool(run.metrics("train/discriminator_accuracy")) == (len(run.trainer.stepper.updates) == 2)
    moved = [not torch.equal(run.before[name], value) for name, value in trained_weights(run.trainer).items()]
    assert sum(moved) > 0.9 * len(moved), f"{sum(moved)} of {len(moved)} tensors moved"
    assert all(torch.isfinite(value).all() for value in trained_weights(run.trainer).values())


@pytest.mark.parametrize("name", STAGES)
def test_the_twin_has_the_settings_of_its_stage(runs, name: str) -> None:
    stage, run = find_stage(name), runs(name)
    twin, task, update = run.twin, run.trainer.task, run.trainer.stepper.updates[0]
    same: dict[str, Callable[[Recipe], Any]] = {
        "task": lambda recipe: (recipe.task, recipe.seed, recipe.model.family, recipe.vae.name, recipe.lora),
        "conditions": lambda recipe: recipe.known,
        "objective": lambda recipe: (recipe.objective, recipe.autoencoder.model_dump(exclude=SMALL_LOSSES)),
        "optimizer": lambda recipe: recipe.optim.model_dump(exclude={"schedule": {"warmup_steps"}}),
        "loop": lambda recipe: (recipe.train.ema, recipe.train.accumulate),
        "text": lambda recipe: (recipe.text.dropout, recipe.text.independent_dropout),
        "encoders": lambda recipe: [item.model_dump(exclude={"path", "max_length"}) for item in recipe.text.encoders],
        "data": lambda recipe: (recipe.data.policy, recipe.data.use_image_num, recipe.data.fps_max, recipe.data.flip),
        "transforms": lambda recipe: [item.model_dump(exclude={"max_area"}) for item in recipe.data.transforms],
    }
    for what, select in same.items():
        assert select(twin) == select(stage), what
    groups = update.optimizer.param_groups
    assert {group["betas"] for group in groups} == {stage.optim.betas}
    assert {group.get("eps", stage.optim.eps) for group in groups} == {stage.optim.eps}  # came has none
    assert max(group["weight_decay"] for group in groups) == stage.optim.weight_decay
    last, falls = run.metrics("train/lr")[-1], stage.optim.schedule.name != "constant"
    assert stage.optim.lr * stage.optim.schedule.min_share <= last < stage.optim.lr if falls else last == stage.optim.lr
    assert (update.phase.optim.clip_norm, update.fade is None) == (stage.optim.clip_norm, stage.optim.clip_fade is None)
    assert (update.ema.section if update.ema else None) == stage.train.ema
    if isinstance(task, DenoiserTask):
        assert run.trainer.stepper.precision.compute == stage.train.precision
        assert task.objective == build_objective(stage.objective)
        assert (task.conditions.known, task.section.dropout) == (stage.known, stage.text.dropout)


@pytest.mark.parametrize("name", STAGES)
def test_the_twin_sees_clips_where_its_stage_does(runs, name: str) -> None:
    feed = runs(name).trainer.feed
    batches = [batch for step, _ in islice(feed.steps(0, 0, 1), NUM_STEPS) for batch in step]
    stage = find_stage(name)
    assert {batch.bucket.frames > 1 for batch in batches} == {trains_clips(stage)}
    assert {0 if batch.images is None else batch.images.rows_BN.shape[1] for batch in batches} == {
        stage.data.use_image_num
    }
    if stage.data.cache.latents is not None:
        assert all(batch.pixels_BCFHW is None and batch.latents is not None for batch in batches)


def test_other_settings_train_to_other_weights(workshop: Workshop, runs, tmp_path: Path) -> None:
    name = "opensora2/stage1-i2v"
    ours = trained_weights(runs(name).trainer)
    for changed in ({"optim": {"lr": 2e-5}}, {"known": {"shares": {"i2v_head": 0}}}):
        folder = tmp_path / next(iter(changed))
        folder.mkdir()
        other = trained_weights(train_twin(workshop.load_twin(name, run_folder=folder, **changed)).trainer)
        assert any(not torch.equal(value, other[key]) for key, value in ours.items()), changed


def list_chains() -> list[tuple[str, str, str]]:
    """(stage, the stage it starts from, place in the run of that one) for recipes that start from another's run."""
    written = {name: resolve(name) for name in STAGES}
    names = {values["name"]: name for name, values in written.items()}
    chains = []
    for name, values in written.items():
        weights = values["model" if values["task"] == "denoiser" else "vae"].get("weights") or ""
        if weights.startswith("runs/"):
            run, _, place = weights.removeprefix("runs/").partition("/")
            chains.append((name, names[run], place))
    return chains


# Two that a head comment offers: a condition input is added to the weights of a text-to-video stage.
OFFERED = [
    ("opensora2/stage1-i2v", "opensora2/stage1", "export/model.safetensors"),
    ("opensora_plan/i2v-stage1", "opensora_plan/stage3", "export/model.safetensors"),
]


@pytest.mark.parametrize(("name", "start", "place"), [*list_chains(), *OFFERED])
def test_a_stage_goes_on_from_the_one_before(
    workshop: Workshop, runs, tmp_path: Path, name: str, start: str, place: str
) -> None:
    stage = find_stage(name)
    weights = runs(start).trainer.folder.path / place
    key = "model" if stage.task == "denoiser" else "vae"
    twin = workshop.load_twin(name, run_folder=tmp_path, **{key: {"weights": str(weights)}})
    trainer = start_twin(twin)
    for tracker in trainer.trackers:
        tracker.close()
    ours, theirs = dict(trainer.task.model.state_dict()), read_weights(weights).tensors
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    untrained = runs(start).before
    assert any(not torch.equal(ours[name], untrained[name]) for name in theirs if name in untrained)


def test_titles_are_one_line_each_and_tell_the_recipes_apart() -> None:
    titles = [title for _, title in shipped_recipes()]
    assert len(set(titles)) == len(titles)
    assert all(20 < len(title) <= 118 for title in titles)


@pytest.mark.parametrize("name", STAGES)
def test_what_must_be_downloaded_is_told_at_the_head(name: str) -> None:
    """Every published folder or file that a recipe names stands in its head comment, or in that of its base."""
    recipe, heads = find_stage(name), []
    file: Path | None = SHIPPED / f"{name}.yaml"
    while file is not None:
        lines = file.read_text().splitlines()
        heads.append(" ".join(line.removeprefix("# ") for line in lines if line.startswith("#")))
        base = [line.partition(": ")[2] for line in lines if line.startswith("_base_: ")]
        file = file.with_name(base[0]) if base else None
    wanted = [recipe.vae.weights] if recipe.task == "autoencoder" else [recipe.model.weights, recipe.vae.weights]
    wanted += [item.path for item in recipe.text.encoders] if recipe.task == "denoiser" else []
    wanted += [recipe.autoencoder.lpips.weights] if recipe.autoencoder.lpips else []
    for path in filter(None, wanted):
        place, *parts = path.split("/")
        assert place in ("models", "runs")
        told = parts[0] if place == "runs" else "/".join(parts[:2]).removeprefix("Diffusion_Transformer/")
        run_owner = [other for other in STAGES if find_stage(other).name == told]
        assert any(told in head for head in heads) or any(owner in head for owner in run_owner for head in heads), path


@pytest.mark.parametrize("name", ["demo", "image", "stage1", "stage2", "stage2-i2v", "high-compression"])
def test_buckets_of_open_sora_2_are_the_published_ones(name: str) -> None:
    case = json.loads((GOLDENS / "bucket_decisions.json").read_text())["configs"][name.replace("-", "_")]
    buckets = find_stage(f"opensora2/{name}").data.buckets
    assert buckets is not None
    assert {key: sorted(cells) for key, cells in buckets.items()} == {
        key: sorted(lengths) for key, lengths in case["search_order"].items()
    }
