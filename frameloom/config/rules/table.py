"""Which keys of a recipe need, exclude or only go with others: one table, from which the messages are made.

`ONLY_WITH` lists keys that only some values of another key read: any value but the default is then a mistake. `RULES`
lists the rest: KEY is set while other keys have certain values. What needs arithmetic is in the modules beside.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel

from frameloom.config.loading.problems import Problem, explain_reader, format_found
from frameloom.config.schema.recipe import Recipe

SET, UNSET = object(), object()
"""A value that differs from the key's default, and the default."""


@dataclass(frozen=True)
class But:
    """Any of the other values."""

    values: tuple[Any, ...]


@dataclass(frozen=True)
class Rule:
    """A mistake: `key` is set, or has the value that `when` names for it, and all else in `when` holds.

    The message is "KEY is VALUE, but TEXT"; {dotted.keys} in the text become their values.
    """

    key: str
    when: Mapping[str, Any]
    text: str


_FALLING = ("cosine", "linear", "polynomial", "cosine_with_restarts")
_GRID = ("grid", "token_budget")

# (section, the key that chooses, its values, keys that only these values read)
ONLY_WITH: tuple[tuple[str, str, tuple[Any, ...], str], ...] = (
    ("data", "policy", _GRID, "buckets"),
    *(("data", "policy", (name,), name) for name in ("token_budget", "ratio_tokens", "grouped", "multi_aspect")),
    ("data", "policy", ("fixed",), "fixed"),
    ("data.cache", "external", ("open_sora_plan",), "external_name"),
    ("data.ratio_tokens", "training_with_video_token_length", (True,), "keep_all_node_same_token_length"),
    ("known", "law", ("frames",), "known_share"),
    ("objective", "distribution", ("logit_normal",), "logit_mean logit_std"),
    ("objective", "distribution", ("mode",), "mode_scale"),
    ("objective", "shift", ("sd3",), "shift_tokens"),
    ("objective", "shift", ("open_sora2", "sd3"), "shift_patch sampling_shift_patch"),
    ("objective.bias", "strategy", ("range",), "begin end"),
    ("objective.bias", "strategy", ("earlier", "later"), "portion"),
    ("objective.bias", "strategy", ("earlier", "later", "range"), "multiplier"),
    ("optim", "name", ("adamw", "adamw8bit", "prodigy", "muon"), "eps"),
    ("optim.schedule", "name", _FALLING, "decay_steps"),
    ("optim.schedule", "name", (*_FALLING, "multi_step"), "min_share"),
    ("optim.schedule", "name", ("cosine_with_restarts",), "num_cycles"),
    ("optim.schedule", "name", ("polynomial",), "power"),
    ("optim.schedule", "name", ("multi_step",), "milestones gamma"),
    ("train.loss_scale", "mode", ("dynamic",), "factor window minimum"),
)

_LATENTS, _TEXT, _EXTERNAL = "data.cache.latents", "data.cache.text", "data.cache.external"
_BRINGS_LATENTS = ("sdxl", "open_sora2")
_DENOISER, _AUTOENCODER = {"task": "denoiser"}, {"task": "autoencoder"}
_EVERY_EPOCH = "it gives a clip another shape in each epoch, which the latent cache data.cache.latents cannot honour"

RULES = (
    # the run
    Rule("train.epochs", {"train.steps": SET}, "train.steps is {train.steps} too; a run has one length: remove one"),
    Rule(
        "lora", _AUTOENCODER, "task is autoencoder; adapters train beside a denoiser: remove it, or set task: denoiser"
    ),
    Rule("validation.samples", _AUTOENCODER, "task is autoencoder; only a denoiser makes samples: remove it"),
    Rule(
        "validation.batches",
        {"validation.batches": 0, "validation.samples": UNSET},
        "validation.samples is null, so nothing would be done; set one of them, or remove the section (null)",
    ),
    # data
    Rule(
        "data.buckets",
        {"data.buckets": None, "data.policy": _GRID},
        "data.policy {data.policy} needs resolutions; e.g. buckets: {{64px: {{9: [1.0, 8]}}}}",
    ),
    *(
        Rule(f"data.ratio_tokens.{name}", {_LATENTS: SET}, f"{_EVERY_EPOCH}; use false, or encode while training")
        for name in (
            *("random_hw_adapt", "random_frame_crop", "random_ratio_crop"),
            "keep_all_node_same_token_length",
        )
    ),
    Rule("data.multi_aspect.as_published", {_LATENTS: SET}, f"{_EVERY_EPOCH}; use false, or encode while training"),
    Rule(
        "data.frame_start",
        {"data.frame_start": "random", _LATENTS: SET} | _DENOISER,
        "the latent cache data.cache.latents cannot honour that; use first or center, or encode while training",
    ),
    Rule(
        "data.flip",
        {_LATENTS: SET} | _DENOISER,
        "the latent cache data.cache.latents cannot honour that; use 0, or encode while training",
    ),
    *(
        Rule(key, _AUTOENCODER, "task autoencoder trains on the pixels themselves; remove it")
        for key in (_LATENTS, _TEXT)
    ),
    Rule(
        "data.cache.on_demand",
        {_LATENTS: UNSET, _TEXT: UNSET} | _DENOISER,
        "no cache is named; set data.cache.latents or data.cache.text",
    ),
    Rule(
        "data.cache.on_demand",
        {_LATENTS: UNSET, _TEXT: SET, "data.workers": But((0,))} | _DENOISER,
        "with a text cache alone, captions are encoded in the training process; set data.workers: 0, or name "
        "data.cache.latents too",
    ),
    Rule(_TEXT, {_EXTERNAL: SET} | _DENOISER, "data.cache.external {data.cache.external} brings its own; remove one"),
    Rule(
        _LATENTS,
        {_EXTERNAL: _BRINGS_LATENTS} | _DENOISER,
        "data.cache.external {data.cache.external} brings its own; remove one of them",
    ),
    Rule(
        "data.use_img_from_vid",
        {"data.use_image_num": 0},
        "data.use_image_num is 0, so no images come beside clips; set their number, or remove it",
    ),
    Rule("data.control", _AUTOENCODER, "task autoencoder has no use for control clips; remove it"),
    *(
        Rule(
            key,
            {"data.control": True, key: value},
            "data.control is true, and a latent cache holds no control clips; remove the latent cache",
        )
        for key, value in ((_LATENTS, SET), (_EXTERNAL, _BRINGS_LATENTS))
    ),
    Rule(
        "validation.samples",
        {"data.control": True},
        "a control model needs a control clip for each sample; remove it, and sample with `frameloom sample --control "
        "FILE`",
    ),
    *(
        Rule(
            key,
            {"known": SET, key: value},
            "known is set, and a latent cache leaves no pixels to take known parts from; remove the latent cache",
        )
        for key, value in ((_LATENTS, SET), (_EXTERNAL, _BRINGS_LATENTS))
    ),
    Rule(
        "validation.samples.images",
        {"known": UNSET},
        "this model is trained without known frames (known: null); remove the images, or train an inpaint model",
    ),
    Rule(
        "validation.samples.prompts_file",
        {"validation.samples.images": SET},
        "validation.samples.images has one picture for each of prompts; put the file's lines into prompts",
    ),
    # autoencoder
    Rule(
        "vae.weights",
        {"vae.weights": None} | _DENOISER,
        "task denoiser needs a trained autoencoder to encode and to sample with; name its file or folder, or train one "
        "with task: autoencoder",
    ),
    Rule("vae.inflate", {"vae.weights": None}, "vae.weights is null; name the weights of the image autoencoder"),
    Rule(
        "vae.mini_batch",
        _AUTOENCODER,
        "task autoencoder trains on whole micro-batches; remove it, and write smaller batches in data with "
        "train.accumulate",
    ),
    Rule("vae.fp32_norms", {"vae.precision": "fp32"}, "vae.precision is fp32, so all of it is; remove it"),
    *(
        Rule(
            key,
            _AUTOENCODER,
            "task autoencoder trains the autoencoder itself, with weights in fp32; use train.precision",
        )
        for key in ("train.weights_precision", "vae.precision")
    ),
    Rule(
        "autoencoder.lpips.weights",
        {"autoencoder.lpips.weights": None} | _AUTOENCODER,
        "LPIPS needs the weights of VGG16 with the published linear heads; name their .safetensors file (frameloom "
        "convert makes one of a pickle), or set autoencoder.lpips: null",
    ),
    Rule(
        "autoencoder.discriminator.adaptive",
        {"autoencoder.discriminator.adaptive": True, "autoencoder.train_only": "encoder"} | _AUTOENCODER,
        "it compares gradients at the decoder's last layer, which does not train; set it to false, with a weight of "
        "your choice",
    ),
    # text, LoRA, subject tuning
    Rule(
        "text.note",
        {"text.note.fps": False, "text.note.motion": None},
        "with fps: false and motion: null it would say nothing; set one of them, or note: null",
    ),
    Rule(
        "lora.dropout",
        {},
        "a run that resumes could not repeat its draws; write 0, and train fewer steps against overfitting",
    ),
    Rule(
        "sample.lora_scale",
        {"lora": UNSET, "sample.lora": UNSET},
        "there is no LoRA; remove it, or name one in sample.lora",
    ),
    *(
        Rule(key, {"lora": SET}, "with lora only the adapters train; remove it, and choose layers with lora.targets")
        for key in ("optim.trainable", "optim.frozen")
    ),
    *(
        Rule(section, {key: But((value,))}, f"it needs task denoiser and model.family sdxl, not {{{key}}}; remove it")
        for section in ("inversion", "dreambooth")
        for key, value in (("task", "denoiser"), ("model.family", "sdxl"))
    ),
    *(
        Rule(key, {"inversion": SET}, "inversion trains the vectors of a word and nothing else; remove one of them")
        for key in ("lora", "dreambooth")
    ),
    *(
        Rule(
            key,
            {"inversion": SET},
            f"cached text states know nothing of a word that is still being learnt; remove {key}",
        )
        for key in (_TEXT, _EXTERNAL)
    ),
    Rule(
        "text.rescale",
        {"inversion": SET},
        "with inversion the scale of captions changes while training; set it to false",
    ),
    Rule(
        "inversion.templates",
        {"inversion.template_file": SET},
        "inversion.template_file is set too; remove one of them",
    ),
    *(
        Rule(key, {"dreambooth": SET}, f"the pairs of pictures of dreambooth are drawn while training; remove {key}")
        for key in (_LATENTS, _TEXT, _EXTERNAL)
    ),
    *(
        Rule(
            f"dreambooth.{missing}",
            {f"dreambooth.{missing}": None, f"dreambooth.{other}": SET},
            "pictures of others of its kind need a prompt and a folder; set both, or none to train without them",
        )
        for missing, other in (("class_prompt", "class_folder"), ("class_folder", "class_prompt"))
    ),
    Rule(
        "sample.frames",
        {"sample.frames": But((1,)), "dreambooth": SET},
        "dreambooth needs an image model, which makes pictures; write 1",
    ),
    # optimizer
    Rule(
        "optim.clip_fade",
        {"optim.clip_norm": None},
        "optim.clip_norm is null, so there is no limit that could fade; remove it, or set clip_norm",
    ),
    *(
        Rule(
            f"optim.schedule.{name}",
            {"optim.schedule.warmup_steps": 0},
            "there is no warm-up; remove it, or set warmup_steps",
        )
        for name in ("start_share", "idle_start")
    ),
    *(
        Rule("optim.offload", {"optim.name": name}, f"optim.name is {name}, {why}; set it to false, or choose adamw")
        for name, why in (
            ("prodigy", "whose rate follows from the state of all weights at once"),
            ("adamw8bit", "whose state is small and managed by its own package"),
        )
    ),
    Rule(
        "optim.offload",
        {"parallel.zero": (2, 3)},
        "parallel.zero is {parallel.zero}, which splits the state over processes already; set it to false, or use zero "
        "0 or 1",
    ),
    Rule(
        "train.recompute.buffer",
        {"train.recompute.offload": False},
        "nothing waits in host memory; set train.recompute.offload: true, or remove it",
    ),
    # several processes
    Rule(
        "parallel.shard",
        {"parallel.zero": 0, "parallel.shard": But((None, 1))},
        "parallel.zero 0 splits nothing; set zero 1, 2 or 3, or remove it",
    ),
    Rule("parallel.sequence", _AUTOENCODER, "task autoencoder has no sequence of tokens; write 1"),
    Rule(
        "parallel.tensor",
        {"parallel.encoders": But(("tensor",))},
        "parallel.encoders is {parallel.encoders}; it splits text encoders: write encoders: tensor, or 1; the denoiser "
        "is split with zero 3 or sequence",
    ),
    Rule(
        "parallel.tensor",
        {"parallel.tensor": 1, "parallel.encoders": "tensor"} | _DENOISER,
        "parallel.encoders is tensor, so that nothing is split; say how many processes split a layer, as in tensor: 2",
    ),
    Rule("parallel.encoders", _AUTOENCODER, "task autoencoder has no text encoders; remove it"),
    Rule(
        "parallel.encoders",
        {"inversion": SET},
        "inversion learns a word in a text encoder; only frozen encoders are shared: write each",
    ),
    *(
        Rule(
            "parallel.gather",
            {key: value},
            f"it needs zero 2 or 3 and train.precision: bf16, and {key} is {{{key}}}; remove it",
        )
        for key, value in (("parallel.zero", (0, 1)), ("train.precision", But(("bf16",))))
    ),
    Rule(
        "parallel.zero",
        {"parallel.zero": (2, 3)} | _AUTOENCODER,
        "the weights of an autoencoder are not split, they are small; use zero 0 or 1",
    ),
    Rule(
        "parallel.zero",
        {"parallel.zero": (2, 3), "train.weights_precision": But(("fp32",))},
        "train.weights_precision is {train.weights_precision}; split weights are fp32: remove it (parallel.gather: "
        "bf16 sends half), or use zero 0 or 1",
    ),
    Rule(
        "parallel.zero",
        {"parallel.zero": (2, 3), "train.ema.on_cpu": True},
        "train.ema.on_cpu is true; the average is split like the weights: set it to false",
    ),
    # Optimizers whose step looks at each number of a weight alone, so that a part of the weight is enough for it.
    Rule(
        "parallel.zero",
        {"parallel.zero": (2, 3), "optim.name": But(("adamw", "lion"))},
        "optim.name {optim.name} looks at whole weights, of which a process has a part; use zero 1, or adamw or lion",
    ),
    Rule(
        "parallel.zero",
        {"parallel.zero": 1, "optim.name": "prodigy"},
        "prodigy finds one rate from the state of all weights, which is split; use zero 0, or another optimizer",
    ),
    # objective
    Rule(
        "objective.noise_offset_per",
        {"objective.noise_offset": 0},
        "objective.noise_offset is 0; set noise_offset, or remove it",
    ),
    Rule(
        "objective.zero_terminal_snr",
        {"objective.zero_terminal_snr": True, "objective.kind": "epsilon"},
        "at its last noise level epsilon says nothing of the picture; remove it, or set kind: v",
    ),
)

_ABSENT = object()


def check_table(recipe: Recipe) -> Iterator[Problem]:
    """Every row of the table that the recipe breaks."""
    for section, chooser, values, names in ONLY_WITH:
        found, _ = _look(recipe, f"{section}.{chooser}")
        for name in names.split() if found is not _ABSENT and found not in values else ():
            value, default = _look(recipe, f"{section}.{name}")
            if value not in (_ABSENT, default):
                yield explain_reader((*section.split("."), name), value, chooser, found, values)
    for rule in RULES:
        wanted = {rule.key: SET} | dict(rule.when)
        if all(_holds(*_look(recipe, key), test) for key, test in wanted.items()):
            value, _ = _look(recipe, rule.key)
            text = f"{rule.key} is {format_found(value)}, but {rule.text.format_map(vars(recipe))}"
            yield Problem(tuple(rule.key.split(".")), text, tuple(tuple(key.split(".")) for key in rule.when))


def _look(recipe: Recipe, dotted: str) -> tuple[Any, Any]:
    """The value of a key and its default; `_ABSENT` where a section around it is null or of another kind."""
    value: Any = recipe
    default = None
    for name in dotted.split("."):
        if not isinstance(value, BaseModel) or name not in type(value).model_fields:
            return _ABSENT, None
        default = type(value).model_fields[name].default
        value = getattr(value, name)
    return value, default


def _holds(value: Any, default: Any, test: Any) -> bool:
    if test is UNSET:
        return value in (_ABSENT, default)
    if value is _ABSENT:
        return False
    if test is SET:
        return bool(value != default)
    if isinstance(test, But):
        return value not in test.values
    return value in test if isinstance(test, tuple) else bool(value == test)
