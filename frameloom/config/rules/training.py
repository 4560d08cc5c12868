"""Rules of training: optimizer, loop, precision, recompute, objective. Each yields every mistake that it finds."""

from __future__ import annotations

from collections.abc import Iterator
from math import floor, log10

from frameloom.config.loading.problems import Problem
from frameloom.config.loading.yaml_values import KeyPath, format_value
from frameloom.config.schema.data import DataSection
from frameloom.config.schema.objective import BiasSection, ObjectiveSection, beta_range
from frameloom.config.schema.optim import OWN_BETAS, OptimSection, ScheduleSection
from frameloom.config.schema.recipe import Recipe
from frameloom.config.schema.training import LossScaleSection
from frameloom.core.spelling import suggest
from frameloom.models.registry import DENOISERS

MAX_LR = 0.1
WITHOUT_OFFLOAD = {
    "prodigy": "whose rate follows from the state of all weights at once",
    "adamw8bit": "whose state is small and managed by its own package",
}
_WITH_EPS = ("adamw", "adamw8bit", "prodigy", "muon")
_FALLING = ("cosine", "linear", "polynomial", "cosine_with_restarts")
_SCHEDULES_OF = {
    "min_share": (*_FALLING, "multi_step"),
    "decay_steps": _FALLING,
    "num_cycles": ("cosine_with_restarts",),
    "power": ("polynomial",),
    "milestones": ("multi_step",),
    "gamma": ("multi_step",),
}


def check_optim(recipe: Recipe) -> Iterator[Problem]:
    yield from _check_schedule(recipe)
    yield from _check_rate(recipe.optim)
    yield from _check_kind(recipe.optim)
    yield from _check_offload(recipe)
    yield from _check_clipping(recipe.optim)
    yield from _check_parts(recipe)
    yield from _check_scale(recipe)


def _check_rate(optim: OptimSection) -> Iterator[Problem]:
    if optim.lr <= MAX_LR or (optim.name == "prodigy" and optim.lr <= 10):
        return
    exponent = floor(log10(optim.lr))
    flipped = optim.lr / 10 ** (2 * exponent) if exponent >= 3 else 1e-5
    usual = "the usual one of prodigy is 1" if optim.name == "prodigy" else "usual rates are 1e-6 to 1e-3"
    text = f"optim.lr is {format_value(optim.lr)}; nothing trains above {10 if optim.name == 'prodigy' else MAX_LR}"
    yield Problem(("optim", "lr"), f"{text}, {usual}; did you mean {format_value(float(f'{flipped:.3g}'))}?")


def _check_kind(optim: OptimSection) -> Iterator[Problem]:
    own, also = OWN_BETAS[optim.name], (("optim", "name"),)
    if len(optim.betas) != len(own):
        text = f"optim.betas is {format_value(list(optim.betas))}, but {optim.name} takes a list of {len(own)}"
        yield Problem(("optim", "betas"), f"{text}; write {format_value(list(own))}, or remove it", also)
    if optim.eps != OptimSection.model_fields["eps"].default and optim.name not in _WITH_EPS:
        text = f"optim.eps is {format_value(optim.eps)}, which {optim.name} does not use"
        yield Problem(("optim", "eps"), f"{text}; remove it", also)
    for number, group in enumerate(optim.groups):
        if optim.name == "prodigy" and group.lr is not None:
            text = f"optim.groups.{number}.lr is {format_value(group.lr)}, but prodigy has one rate for all parameters"
            yield Problem(("optim", "groups", str(number), "lr"), f"{text}; remove it", also)


def _check_offload(recipe: Recipe) -> Iterator[Problem]:
    name, zero, path = recipe.optim.name, recipe.parallel.zero, ("optim", "offload")
    if not recipe.optim.offload:
        return
    if name in WITHOUT_OFFLOAD:
        text = f"optim.offload is true, but optim.name is {name}, {WITHOUT_OFFLOAD[name]}"
        yield Problem(path, f"{text}; set it to false, or choose adamw", (("optim", "name"),))
    if zero >= 2:
        text = f"optim.offload is true, but parallel.zero is {zero}, which splits the state over processes already"
        yield Problem(path, f"{text}; set it to false, or use zero 0 or 1", (("parallel", "zero"),))


def _check_schedule(recipe: Recipe) -> Iterator[Problem]:
    schedule, steps, also = recipe.optim.schedule, recipe.train.steps, (("train", "steps"),)
    path = ("optim", "schedule")
    if steps is not None and schedule.warmup_steps >= steps:
        text = f"optim.schedule.warmup_steps is {schedule.warmup_steps}, but the run has only train.steps {steps}"
        yield Problem((*path, "warmup_steps"), f"{text}; make it shorter than the run", also)
    for name, users in _SCHEDULES_OF.items():
        value, default = getattr(schedule, name), ScheduleSection.model_fields[name].default
        if value != default and schedule.name not in users:
            text = f"optim.schedule.{name} is {format_value(list(value) if isinstance(value, tuple) else value)}"
            why = "a constant schedule does not fall" if schedule.name == "constant" else f"{schedule.name} has none"
            advice = f"remove it, or choose {' or '.join(users[:2])}"
            yield Problem((*path, name), f"{text}, but {why}; {advice}", ((*path, "name"),))
    if not schedule.warmup_steps:
        for name in ("start_share", "idle_start"):
            if value := getattr(schedule, name):
                text = f"optim.schedule.{name} is {format_value(value)}, but there is no warm-up"
                yield Problem((*path, name), f"{text}; remove it, or set warmup_steps", ((*path, "warmup_steps"),))
    if schedule.name == "multi_step":
        yield from _check_milestones(schedule)


def _check_milestones(schedule: ScheduleSection) -> Iterator[Problem]:
    path, found = ("optim", "schedule", "milestones"), schedule.milestones
    if not found:
        text = "optim.schedule needs the key 'milestones' for multi_step"
        yield Problem(path, f"{text}; e.g. milestones: [200, 400]", (("optim", "schedule", "name"),))
    elif list(found) != sorted(set(found)) or found[0] < schedule.warmup_steps:
        text = f"optim.schedule.milestones is {format_value(list(found))}; expected rising steps after the warm-up"
        yield Problem(path, f"{text} of {schedule.warmup_steps}", (("optim", "schedule", "warmup_steps"),))


def _check_clipping(optim: OptimSection) -> Iterator[Problem]:
    if optim.clip_fade is not None and optim.clip_norm is None:
        text = "optim.clip_fade is set, but optim.clip_norm is null, so there is no limit that could fade"
        path = ("optim", "clip_fade")
        yield Problem(path, f"{text}; remove it, or set clip_norm", (("optim", "clip_norm"),))


def _check_parts(recipe: Recipe) -> Iterator[Problem]:
    """What can be seen of the chosen parameters before there is a model."""
    optim = recipe.optim
    if recipe.lora is not None:
        for name in ("trainable", "frozen"):
            if value := getattr(optim, name):
                text = f"optim.{name} is {format_value(list(value))}, but with lora only the adapters train"
                yield Problem(("optim", name), f"{text}; remove it, and choose layers with lora.targets", (("lora",),))
    for number, group in enumerate(optim.groups):
        path = ("optim", "groups", str(number))
        if not group.match:
            text = f"optim.groups.{number} needs the key 'match'"
            yield Problem((*path, "match"), f"{text}: parts of the parameters' names; e.g. match: img_in")
        elif group.lr is None and group.weight_decay is None:
            text = f"optim.groups.{number} changes nothing for '{group.match}'"
            yield Problem(path, f"{text}; give it lr or weight_decay, or remove it")


def _check_scale(recipe: Recipe) -> Iterator[Problem]:
    if not recipe.optim.scale_lr:
        return
    also = (("data", "policy"), ("data", "buckets"))
    sizes = batch_sizes(recipe.data)
    if len(sizes) != 1:
        found = f"are {' and '.join(map(str, sizes))}" if sizes else f"follow from the clips ({recipe.data.policy})"
        text = f"optim.scale_lr is true, but batch sizes {found}, so there is no one factor"
        yield Problem(("optim", "scale_lr"), f"{text}; remove it and write the scaled rate in optim.lr", also)
    elif (rate := scaled_rate(recipe)) > MAX_LR and recipe.optim.name != "prodigy":
        text = f"optim.scale_lr is true, which makes the rate {format_value(float(f'{rate:.3g}'))}"
        yield Problem(("optim", "scale_lr"), f"{text}; nothing trains above {MAX_LR}, lower optim.lr", also)


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
    yield from _check_length(recipe)
    yield from _check_loss_scale(recipe)
    yield from _check_precision(recipe)
    yield from _check_profile(recipe)
    yield from _check_trained_text(recipe)


def _check_length(recipe: Recipe) -> Iterator[Problem]:
    steps, epochs = recipe.train.steps, recipe.train.epochs
    if steps is None and epochs is None:
        text = "train needs the key 'steps': optimizer steps of the whole run; or 'epochs': passes over the data"
        yield Problem(("train",), f"{text}; e.g. steps: 1000")
    elif steps is not None and epochs is not None:
        text = f"train.epochs is {epochs}, and train.steps is {steps} too; a run has one length"
        yield Problem(("train", "epochs"), f"{text}: remove one of them, or write null", (("train", "steps"),))


def _check_loss_scale(recipe: Recipe) -> Iterator[Problem]:
    scale = recipe.train.loss_scale
    if scale is None:
        return
    path: KeyPath = ("train", "loss_scale")
    if scale.mode == "static":
        for name in ("factor", "window", "minimum"):
            value = getattr(scale, name)
            if value != LossScaleSection.model_fields[name].default:
                text = f"train.loss_scale.{name} is {format_value(value)}, but a static scale does not change"
                yield Problem((*path, name), f"{text}; remove it, or set mode: dynamic", ((*path, "mode"),))
    elif scale.minimum > scale.initial:
        text = f"train.loss_scale.minimum is {format_value(scale.minimum)}, above the first scale"
        yield Problem(
            (*path, "minimum"), f"{text} {format_value(scale.initial)}; make it smaller", ((*path, "initial"),)
        )


def _check_precision(recipe: Recipe) -> Iterator[Problem]:
    """What each part of a run can be computed in."""
    train, also = recipe.train, (("train", "precision"),)
    if train.weights_precision not in ("fp32", train.precision):
        text = f"train.weights_precision is {train.weights_precision}, but train.precision is {train.precision}"
        yield Problem(("train", "weights_precision"), f"{text}; weights are fp32, or of the same format", also)
    if recipe.task == "autoencoder":
        for path, value in (
            (("train", "weights_precision"), train.weights_precision),
            (("vae", "precision"), recipe.vae.precision),
        ):
            if value != "fp32":
                text = f"{'.'.join(path)} is {value}, but task autoencoder trains the autoencoder itself"
                yield Problem(path, f"{text}, with weights in fp32; use train.precision", (("task",),))
    if recipe.vae.fp32_norms and recipe.vae.precision == "fp32":
        text = "vae.fp32_norms is true, but vae.precision is fp32, so all of it is"
        yield Problem(("vae", "fp32_norms"), f"{text}; remove it, or set vae.precision", (("vae", "precision"),))


def _check_profile(recipe: Recipe) -> Iterator[Problem]:
    profile, steps = recipe.train.profile, recipe.train.steps
    if profile is not None and steps is not None and profile.start + profile.steps - 1 > steps:
        text = f"train.profile records steps {profile.start} to {profile.start + profile.steps - 1}"
        yield Problem(
            ("train", "profile"),
            f"{text}, but the run has only train.steps {steps}; start earlier",
            (("train", "steps"),),
        )


def _check_trained_text(recipe: Recipe) -> Iterator[Problem]:
    """An encoder that trains has other states at every step, so nothing that is computed once can stand for them."""
    trained = [index for index, encoder in enumerate(recipe.text.encoders) if encoder.train]
    for index, encoder in enumerate(recipe.text.encoders):
        path: KeyPath = ("text", "encoders", str(index))
        if encoder.lr is not None and not encoder.train:
            text = f"text.encoders.{index}.lr is {format_value(encoder.lr)}, but the encoder does not train"
            yield Problem((*path, "lr"), f"{text}; remove it, or set train: true")
        if encoder.train and encoder.name == "minilm":
            yield Problem(
                (*path, "train"), f"text.encoders.{index}.train is true, but minilm is always frozen; remove it"
            )
        elif encoder.train and encoder.precision not in (("fp32", None) if "clip" in encoder.name else ("fp32",)):
            found = f"is {encoder.precision}" if encoder.precision else "is left to the encoder, which is bf16"
            text = f"text.encoders.{index}.train is true, but its precision {found}"
            yield Problem((*path, "precision"), f"{text}; an encoder trains in fp32: write that")
    reasons: tuple[tuple[KeyPath, object, str], ...] = (
        (("task",), recipe.task != "denoiser", "task is not denoiser"),
        (("text", "rescale"), recipe.text.rescale, "text.rescale is true, which is measured once"),
        (("data", "cache", "text"), recipe.data.cache.text, "data.cache.text holds captions as they were encoded once"),
        (("data", "cache", "foreign"), recipe.data.cache.foreign, "data.cache.foreign brings encoded captions"),
        (("lora",), recipe.lora, "with lora only the adapters train"),
        (("inversion",), recipe.inversion, "with inversion only a word is learnt"),
        (("train", "park_encoders"), recipe.train.park_encoders, "train.park_encoders sends it away between steps"),
    )
    for path, is_wrong, reason in reasons if trained else ():
        if is_wrong:
            text = f"text.encoders.{trained[0]}.train is true, but {reason}"
            yield Problem(path, f"{text}; remove one of them", (("text", "encoders", str(trained[0]), "train"),))


def check_recompute(recipe: Recipe) -> Iterator[Problem]:
    """Kinds of blocks are those of the family; an autoencoder's are only known once it is built."""
    family, settings = DENOISERS.get(recipe.model.family), recipe.train.recompute
    if not isinstance(settings, bool) and settings.buffer is not None and not settings.offload:
        text = f"train.recompute.buffer is {settings.buffer}, but nothing waits in host memory"
        yield Problem(("train", "recompute", "buffer"), f"{text}; set train.recompute.offload: true, or remove it")
    if recipe.task != "denoiser" or family is None or isinstance(settings, bool):
        return
    path = ("train", "recompute", "blocks")
    for kind in settings.blocks:
        if kind not in family.block_kinds:
            text = f"{'.'.join(path)} has '{kind}', which {recipe.model.family} has no blocks of"
            advice = suggest(kind, family.block_kinds, kind="blocks")
            yield Problem((*path, kind), f"{text}; {advice}", (("model", "family"),))


_FLOW, _DDPM, _EDM = ("flow",), ("v", "epsilon", "sample"), ("edm",)


# The kinds that read a key; keys that are not here are read by all.
_READ_BY: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("law", "logit_mean", "logit_std", "mode_scale", "num_levels", "sigma_min", "weighting"), _FLOW),
    **dict.fromkeys(("shift", "shift_patch", "sampling_shift_patch", "shift_tokens"), _FLOW),
    **dict.fromkeys(("betas", "beta_start", "beta_end", "zero_terminal_snr", "snr_shift", "spacing"), _DDPM),
    **dict.fromkeys(("bias", "levels"), _DDPM),
    "min_snr_gamma": (*_DDPM, *_EDM),
    "edm": _EDM,
}


# Keys that only one value of another key of the same kind reads.
_NEEDS: dict[str, tuple[str, tuple[str, ...]]] = {
    "logit_mean": ("law", ("logit_normal",)),
    "logit_std": ("law", ("logit_normal",)),
    "mode_scale": ("law", ("mode",)),
    "shift_tokens": ("shift", ("sd3",)),
    "shift_patch": ("shift", ("open_sora2", "sd3")),
    "sampling_shift_patch": ("shift", ("open_sora2", "sd3")),
}


_OBJECTIVE = "objective"


def check_objective(recipe: Recipe) -> Iterator[Problem]:
    section = recipe.objective
    yield from _check_unread(section)
    yield from _check_ddpm(section)
    yield from _check_bias(section)
    if section.noise_offset_per != "channel" and not section.noise_offset:
        text = f"objective.noise_offset_per is {section.noise_offset_per}, but objective.noise_offset is 0"
        yield _objective_problem("noise_offset_per", f"{text}; set noise_offset, or remove it", "noise_offset")
    yield from _check_edm(recipe)


def _objective_problem(name: str, text: str, *also: str) -> Problem:
    return Problem((_OBJECTIVE, *name.split(".")), text, tuple((_OBJECTIVE, other) for other in also))


def _check_unread(section: ObjectiveSection) -> Iterator[Problem]:
    """A key that nothing reads is a mistake, unless it has its default."""
    kind = section.kind
    for name, field in ObjectiveSection.model_fields.items():
        value = getattr(section, name)
        if value == field.default:
            continue
        kinds = _READ_BY.get(name)
        if kinds is not None and kind not in kinds:
            shown = "set" if name in ("bias", "edm") else format_value(value)
            text = f"objective.{name} is {shown}, which only kind {_either(kinds)} uses, but objective.kind is {kind}"
            yield _objective_problem(name, f"{text}; remove it or set kind: {kinds[0]}", "kind")
        elif name in _NEEDS:
            key, values = _NEEDS[name]
            found = getattr(section, key)
            if found not in values:
                text = f"objective.{name} is {format_value(value)}, which only {key} {_either(values)} uses"
                text = f"{text}, but objective.{key} is {format_value(found)}"
                yield _objective_problem(name, f"{text}; remove it or set {key}: {values[0]}", key)


def _either(names: tuple[str, ...]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} or {names[-1]}"


def _check_ddpm(section: ObjectiveSection) -> Iterator[Problem]:
    if section.kind == "epsilon" and section.zero_terminal_snr:
        text = "objective.zero_terminal_snr is true, but at its last noise level epsilon says nothing of the picture"
        yield _objective_problem("zero_terminal_snr", f"{text}; remove it, or set kind: v", "kind")
    is_zero = section.kind == "v" if section.zero_terminal_snr is None else section.zero_terminal_snr
    if section.kind in _DDPM and is_zero and section.spacing == "leading":
        text = "objective.spacing is leading, which never visits the last noise level, but with zero_terminal_snr"
        yield _objective_problem(
            "spacing", f"{text} sampling must begin there; write trailing", "zero_terminal_snr", "kind"
        )
    start, end = beta_range(section)
    if section.kind in _DDPM and start >= end:
        text = f"objective.beta_start is {format_value(start)} and objective.beta_end {format_value(end)}"
        name = "beta_start" if section.beta_start is not None else "beta_end"
        yield _objective_problem(name, f"{text}; noise grows, so give a smaller start", "betas")


def _check_bias(section: ObjectiveSection) -> Iterator[Problem]:
    levels, bias = section.levels, section.bias
    if levels is not None and levels[0] >= levels[1]:
        text = f"objective.levels is {format_value(list(levels))}, which is no level at all"
        yield _objective_problem("levels", f"{text}; write the first level and the one after the last, e.g. [200, 500]")
    if bias is None:
        return
    if bias.strategy == "range" and bias.begin >= bias.end:
        text = f"objective.bias.begin is {bias.begin} and end is {bias.end}, which is no level at all"
        yield _objective_problem("bias.begin", f"{text}; give a larger end")
    unread = {"range": ("portion",), "earlier": ("begin", "end"), "later": ("begin", "end")}
    for name in unread.get(bias.strategy, ("multiplier", "begin", "end", "portion")):
        value = getattr(bias, name)
        if value != BiasSection.model_fields[name].default:
            text = f"objective.bias.{name} is {format_value(value)}, which strategy {bias.strategy} does not use"
            yield _objective_problem(f"bias.{name}", f"{text}; remove it, or choose another strategy")


def _check_edm(recipe: Recipe) -> Iterator[Problem]:
    section, family = recipe.objective, DENOISERS.get(recipe.model.family)
    if section.kind != "edm":
        return
    if section.edm.sigma_min >= section.edm.sigma_max:
        text = f"objective.edm.sigma_min is {format_value(section.edm.sigma_min)}"
        text = f"{text} and sigma_max {format_value(section.edm.sigma_max)}"
        yield _objective_problem(
            "edm.sigma_min", f"{text}; sampling goes from sigma_max down, so give a smaller sigma_min"
        )
    if family is not None and "log_sigma" not in family.conditions:
        text = f"objective.kind is edm, but {recipe.model.family} is told a whole index and cannot be told ln(sigma)"
        also = (("model", "family"),)
        yield Problem((_OBJECTIVE, "kind"), f"{text}; choose flow, v or epsilon", also)
