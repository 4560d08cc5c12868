"""Rules of training: optimizer, loop, precision, recompute, objective. Each yields every mistake that it finds."""

from __future__ import annotations

from collections.abc import Iterator
from math import floor, log10

from frameloom.config.loading.problems import Problem
from frameloom.config.loading.yaml_values import KeyPath, format_value
from frameloom.config.schema.data import DataSection
from frameloom.config.schema.objective import DDPMObjectiveSection, EDMObjectiveSection, ObjectiveSection, beta_range
from frameloom.config.schema.optim import OWN_BETAS
from frameloom.config.schema.recipe import Recipe
from frameloom.core.spelling import suggest
from frameloom.models.registry import DENOISERS

MAX_LR = 0.1


def check_optim(recipe: Recipe) -> Iterator[Problem]:
    optim, own = recipe.optim, OWN_BETAS[recipe.optim.name]
    is_prodigy, also = optim.name == "prodigy", (("optim", "name"),)
    if optim.lr > (highest := 10 if is_prodigy else MAX_LR):
        exponent = floor(log10(optim.lr))
        flipped = optim.lr / 10 ** (2 * exponent) if exponent >= 3 else 1e-5
        usual = "the usual one of prodigy is 1" if is_prodigy else "usual rates are 1e-6 to 1e-3"
        text = f"optim.lr is {format_value(optim.lr)}; nothing trains above {highest}, {usual}"
        yield Problem(("optim", "lr"), f"{text}; did you mean {format_value(float(f'{flipped:.3g}'))}?")
    if len(optim.betas) != len(own):
        text = f"optim.betas is {format_value(optim.betas)}, but {optim.name} takes a list of {len(own)}"
        yield Problem(("optim", "betas"), f"{text}; write {format_value(own)}, or remove it", also)
    for number, group in enumerate(optim.groups):
        path = ("optim", "groups", str(number))
        if is_prodigy and group.lr is not None:
            text = f"optim.groups.{number}.lr is {format_value(group.lr)}, but prodigy has one rate for all parameters"
            yield Problem((*path, "lr"), f"{text}; remove it", also)
        if not group.match:
            text = f"optim.groups.{number} needs the key 'match'"
            yield Problem((*path, "match"), f"{text}: parts of the parameters' names; e.g. match: img_in")
        elif group.lr is None and group.weight_decay is None:
            text = f"optim.groups.{number} changes nothing for '{group.match}'"
            yield Problem(path, f"{text}; give it lr or weight_decay, or remove it")


def check_schedule(recipe: Recipe) -> Iterator[Problem]:
    schedule, steps, path = recipe.optim.schedule, recipe.train.steps, ("optim", "schedule")
    warmup, milestones = schedule.warmup_steps, schedule.milestones
    if steps is not None and warmup >= steps:
        text = f"optim.schedule.warmup_steps is {warmup}, but the run has only train.steps {steps}"
        yield Problem((*path, "warmup_steps"), f"{text}; make it shorter than the run", (("train", "steps"),))
    if schedule.name != "multi_step":
        return
    if not milestones:
        text = "optim.schedule needs the key 'milestones' for multi_step; e.g. milestones: [200, 400]"
        yield Problem((*path, "milestones"), text, ((*path, "name"),))
    elif list(milestones) != sorted(set(milestones)) or milestones[0] < warmup:
        text = f"optim.schedule.milestones is {format_value(milestones)}; expected rising steps after the warm-up"
        yield Problem((*path, "milestones"), f"{text} of {warmup}", ((*path, "warmup_steps"),))


def check_scaled_rate(recipe: Recipe) -> Iterator[Problem]:
    if not recipe.optim.scale_lr:
        return
    path, also = ("optim", "scale_lr"), (("data", "policy"), ("data", "buckets"))
    sizes = batch_sizes(recipe.data)
    if len(sizes) != 1:
        found = f"are {' and '.join(map(str, sizes))}" if sizes else f"follow from the clips ({recipe.data.policy})"
        text = f"optim.scale_lr is true, but batch sizes {found}, so there is no one factor"
        yield Problem(path, f"{text}; remove it and write the scaled rate in optim.lr", also)
    elif (rate := scaled_rate(recipe)) > MAX_LR and recipe.optim.name != "prodigy":
        text = f"optim.scale_lr is true, which makes the rate {format_value(float(f'{rate:.3g}'))}"
        yield Problem(path, f"{text}; nothing trains above {MAX_LR}, lower optim.lr", also)


def batch_sizes(data: DataSection) -> list[int]:
    """The different sizes of a full micro-batch; none when they follow from the clips."""
    if data.policy == "grid":
        return sorted({cell[1] for cells in (data.buckets or {}).values() for cell in cells.values()})
    if data.policy == "fixed" and data.fixed is not None:
        images = data.fixed.image_batch
        return sorted({data.fixed.batch} | ({images} if images is not None else set()))
    section = {"grouped": data.grouped, "multi_aspect": data.multi_aspect}.get(data.policy)
    if section is not None:
        return [section.batch]
    if data.ratio_tokens is not None and not data.ratio_tokens.training_with_video_token_length:
        return [data.ratio_tokens.train_batch_size]
    return []


def scaled_rate(recipe: Recipe, *, num_processes: int = 1) -> float:
    """The learning rate of the run: optim.lr, with scale_lr times the samples of a step over all processes."""
    if not recipe.optim.scale_lr:
        return recipe.optim.lr
    (batch,) = batch_sizes(recipe.data)
    return recipe.optim.lr * batch * recipe.train.accumulate * num_processes


def check_train(recipe: Recipe) -> Iterator[Problem]:
    """Length, precision, loss scale, profile, and blocks that are recomputed."""
    train, family, path = recipe.train, DENOISERS.get(recipe.model.family), ("train", "recompute", "blocks")
    scale, profile, settings = train.loss_scale, train.profile, train.recompute
    if train.steps is None and train.epochs is None:
        text = "train needs the key 'steps': optimizer steps of the whole run; or 'epochs': passes over the data"
        yield Problem(("train",), f"{text}; e.g. steps: 1000")
    if train.weights_precision not in ("fp32", train.precision):
        text = f"train.weights_precision is {train.weights_precision}, but train.precision is {train.precision}"
        advice = "weights are fp32, or of the same format"
        yield Problem(("train", "weights_precision"), f"{text}; {advice}", (("train", "precision"),))
    if scale is not None and scale.mode == "dynamic" and scale.minimum > scale.initial:
        minimum, first = format_value(scale.minimum), format_value(scale.initial)
        text = f"train.loss_scale.minimum is {minimum}, above the first scale {first}; make it smaller"
        yield Problem(("train", "loss_scale", "minimum"), text, (("train", "loss_scale", "initial"),))
    if profile is not None and train.steps is not None and (last := profile.start + profile.steps - 1) > train.steps:
        text = f"train.profile records steps {profile.start} to {last}, but the run has only train.steps {train.steps}"
        yield Problem(("train", "profile"), f"{text}; start earlier", (("train", "steps"),))
    # Kinds of blocks are those of the family; an autoencoder's are only known once it is built.
    if recipe.task == "denoiser" and family is not None and not isinstance(settings, bool):
        for kind in settings.blocks:
            if kind not in family.block_kinds:
                text = f"{'.'.join(path)} has '{kind}', which {recipe.model.family} has no blocks of"
                advice = suggest(kind, family.block_kinds, kind="blocks")
                yield Problem((*path, kind), f"{text}; {advice}", (("model", "family"),))
    judge, every = recipe.autoencoder.discriminator, train.ema.every if train.ema else 1
    if recipe.task == "autoencoder" and judge is not None and judge.update == "alternate" and every % 2 == 0:
        text = f"train.ema.every is {every}, but only odd steps train the autoencoder, so it would never be averaged"
        advice = f"write {every - 1} or {every + 1}, or autoencoder.discriminator.update: both"
        yield Problem(("train", "ema", "every"), f"{text}; {advice}", (("autoencoder", "discriminator", "update"),))


def check_objective(recipe: Recipe) -> Iterator[Problem]:
    """Ranges of noise levels that are empty, and schedules that cannot end where sampling begins."""
    section = recipe.objective
    for name, text, *also in _level_problems(section):
        path: KeyPath = ("objective", *name.split("."))
        yield Problem(path, f"objective.{name} is {text}", tuple(("objective", other) for other in also))


def _level_problems(section: ObjectiveSection) -> Iterator[tuple[str, ...]]:
    """(key, what it is and what to do, other keys that this rests on)"""
    if isinstance(section, EDMObjectiveSection) and section.edm.sigma_min >= section.edm.sigma_max:
        low, high = format_value(section.edm.sigma_min), format_value(section.edm.sigma_max)
        advice = "sampling goes from sigma_max down, so give a smaller sigma_min"
        yield "edm.sigma_min", f"{low} and sigma_max {high}; {advice}"
    if not isinstance(section, DDPMObjectiveSection):
        return
    is_zero = section.kind == "v" if section.zero_terminal_snr is None else section.zero_terminal_snr
    if is_zero and section.spacing == "leading":
        text = "leading, which never visits the last noise level, but with zero_terminal_snr sampling must begin there"
        yield "spacing", f"{text}; write trailing", "zero_terminal_snr", "kind"
    start, end = beta_range(section)
    if start >= end:
        name, value = ("beta_start", start) if section.beta_start is not None else ("beta_end", end)
        text = f"{format_value(value)}, but betas go from {format_value(start)} to {format_value(end)}"
        yield name, f"{text}; noise grows, so give a smaller start", "betas"
    if (levels := section.levels) is not None and levels[0] >= levels[1]:
        advice = "write the first level and the one after the last, e.g. [200, 500]"
        yield "levels", f"{format_value(levels)}, which is no level at all; {advice}"
    if (bias := section.bias) is not None and bias.strategy == "range" and bias.begin >= bias.end:
        yield "bias.begin", f"{bias.begin} and end is {bias.end}, which is no level at all; give a larger end"
