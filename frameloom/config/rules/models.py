"""Rules of the models: names and sizes, frames and sides that they take, text encoders, conditioning."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from pathlib import Path

from frameloom.config.loading.problems import Problem
from frameloom.config.loading.yaml_values import KeyPath, format_value
from frameloom.config.schema.models import TextEncoderSection
from frameloom.config.schema.recipe import Recipe
from frameloom.core.spelling import suggest
from frameloom.diffusion.tables import MASK_KINDS, SAMPLERS
from frameloom.models.registry import DENOISERS, TEXT_ENCODERS, VAES
from frameloom.models.spec import VAESpec, fits_type

MODEL_KEYS: tuple[KeyPath, ...] = (("model", "family"), ("vae", "name"), ("task",))
_FIELD_TYPES = {
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    str: "text",
    tuple: "a list of numbers",
}


def check_names(recipe: Recipe) -> Iterator[Problem]:
    model, vae = recipe.model, recipe.vae
    for path, size, registry, kind in (
        (("model", "family"), model.size, DENOISERS, "families"),
        (("vae", "name"), vae.size, VAES, "autoencoders"),
    ):
        name = getattr(getattr(recipe, path[0]), path[1])
        if name not in registry:
            yield _unknown(path, name, registry, kind=kind)
        elif size not in registry[name].sizes:
            yield _unknown((path[0], "size"), size, registry[name].sizes, kind=f"sizes of {name}", also=(path,))
    inflating = [name for name, spec in VAES.items() if spec.can_inflate]
    if vae.inflate and vae.name not in inflating:
        text = f"vae.inflate is true, but {vae.name} cannot start from an image autoencoder"
        advice = f"choose vae.name {' or '.join(inflating)}, or remove it"
        yield Problem(("vae", "inflate"), f"{text}; {advice}", (("vae", "name"),))


def _unknown(path: KeyPath, name: str, known: Collection[str], *, kind: str, also: tuple[KeyPath, ...] = ()) -> Problem:
    return Problem(path, f"{'.'.join(path)} is '{name}', which does not exist; {suggest(name, known, kind=kind)}", also)


def check_overrides(recipe: Recipe) -> Iterator[Problem]:
    """Fields of an architecture, which are no keys of the recipe's own."""
    for section, overrides, spec in (
        ("model", recipe.model.overrides, DENOISERS.get(recipe.model.family)),
        ("vae", recipe.vae.overrides, VAES.get(recipe.vae.name)),
    ):
        for name, value in overrides.items() if spec else ():
            path = (section, "overrides", name)
            assert spec is not None
            if name not in spec.fields:
                text = f"{section}.overrides has '{name}', which is no field of this architecture"
                yield Problem(path, f"{text}; {suggest(name, spec.fields, kind='fields')}")
            elif not fits_type(value, spec.fields[name]):
                given = f"'{value}'" if isinstance(value, str) else format_value(value)
                yield Problem(path, f"{'.'.join(path)} is {given}; expected {_FIELD_TYPES[spec.fields[name]]}")


# Folder of the tokenizer beside a single file, by encoder; the others lie in folders of their own only.
TOKENIZER_FOLDERS = {"clip_l": "tokenizer", "clip_bigg": "tokenizer_2"}
_ENCODER_OPTIONS = ("padding", "pad", "layer", "pooled", "null", "cleaning", "keep_chinese", "precision")


def check_text(recipe: Recipe) -> Iterator[Problem]:
    encoders = recipe.text.encoders
    seen: dict[tuple[str, str | None], int] = {}
    for index, encoder in enumerate(encoders):
        path: KeyPath = ("text", "encoders", str(index))
        first = seen.setdefault((encoder.name, encoder.path), index)
        if first != index:
            text = f"text.encoders.{index} is the same encoder as text.encoders.{first}"
            yield Problem(path, f"{text}; remove one of them")
        if encoder.name not in TEXT_ENCODERS:
            yield _unknown((*path, "name"), encoder.name, TEXT_ENCODERS, kind="text encoders")
            continue
        for key, text in _encoder_problems(encoder, ".".join(path)):
            yield Problem((*path, key), text, () if key == "max_length" else ((*path, "name"),))
    if recipe.inversion is not None and any(encoder.name not in TOKENIZER_FOLDERS for encoder in encoders):
        text = f"inversion is set, but text.encoders has {', '.join(encoder.name for encoder in encoders)}"
        advice = f"only {' and '.join(TOKENIZER_FOLDERS)} learn words"
        yield Problem(("text", "encoders"), f"{text}; {advice}", (("inversion",),))


def _encoder_problems(encoder: TextEncoderSection, where: str) -> Iterator[tuple[str, str]]:
    """(key, text); what can be said without looking at the disk."""
    name, length, spec = encoder.name, encoder.max_length, TEXT_ENCODERS[encoder.name]
    if length > spec.max_length:
        text = f"{where}.max_length is {length}; {name} reads at most {spec.max_length} tokens"
        yield "max_length", f"{text}; write {spec.max_length} or less"
    elif spec.window and length > spec.window and (length - 2) % (step := spec.window - 2):
        # An encoder with a short window reads long captions in several.
        below = (length - 2) // step * step + 2
        text = f"{where}.max_length is {length}; {name} reads windows of {step} tokens"
        yield "max_length", f"{text}; write {below} or {below + step}"
    if encoder.path is None and not spec.packaged:
        text = f"{where}.path is null, but no package carries {name}"
        yield "path", f"{text}; name the folder with its weights and tokenizer"
    if name not in TOKENIZER_FOLDERS:
        known = " and ".join(TOKENIZER_FOLDERS)
        if encoder.tokenizer is not None:
            text = f"{where}.tokenizer is set, but only {known} take a tokenizer from elsewhere"
            yield "tokenizer", f"{text}; remove it, {name} finds its own in its folder"
        if encoder.path is not None and encoder.path.endswith(".safetensors"):
            text = f"{where}.path is the file '{encoder.path}', but only {known} are parts of single files"
            yield "path", f"{text}; name the folder of {name}"
    for option in _ENCODER_OPTIONS if spec.packaged else ():
        if getattr(encoder, option) is not None:
            yield option, f"{where}.{option} is set, but {name} is used in one way only; remove it"
    if encoder.lr is not None and not encoder.train:
        text = f"{where}.lr is {format_value(encoder.lr)}, but the encoder does not train"
        yield "lr", f"{text}; remove it, or set train: true"
    if encoder.train and name == "minilm":
        yield "train", f"{where}.train is true, but minilm is always frozen; remove it"
    elif encoder.train and encoder.precision not in (("fp32", None) if "clip" in name else ("fp32",)):
        found = f"is {encoder.precision}" if encoder.precision else "is left to the encoder, which is bf16"
        yield "precision", f"{where}.train is true, but its precision {found}; an encoder trains in fp32: write that"


def check_subject(recipe: Recipe) -> Iterator[Problem]:
    if recipe.dreambooth is not None and not recipe.dreambooth.instance_prompt.strip():
        text = "dreambooth.instance_prompt is empty; say what the pictures show, e.g. a photo of sks dog"
        yield Problem(("dreambooth", "instance_prompt"), text)


def check_trained_text(recipe: Recipe) -> Iterator[Problem]:
    """An encoder that trains has other states at every step, so nothing that is computed once can stand for them."""
    trained = next((index for index, encoder in enumerate(recipe.text.encoders) if encoder.train), None)
    if trained is None:
        return
    cache, encoders = recipe.data.cache, recipe.parallel.encoders
    shared = f"parallel.encoders is {encoders}, and only frozen encoders are shared: write each"
    for path, is_wrong, reason in (
        (("task",), recipe.task != "denoiser", "task is not denoiser"),
        (("text", "rescale"), recipe.text.rescale, "text.rescale is true, which is measured once"),
        (("data", "cache", "text"), cache.text, "data.cache.text holds captions as they were encoded once"),
        (("data", "cache", "external"), cache.external, "data.cache.external brings encoded captions"),
        (("lora",), recipe.lora, "with lora only the adapters train"),
        (("inversion",), recipe.inversion, "with inversion only a word is learnt"),
        (
            ("train", "encoder_offload"),
            recipe.train.encoder_offload,
            "train.encoder_offload sends it away between steps",
        ),
        (("parallel", "encoders"), encoders != "each", shared),
    ):
        if is_wrong:
            text = f"text.encoders.{trained}.train is true, but {reason}; remove one of them"
            yield Problem(path, text, (("text", "encoders", str(trained), "train"),))


def check_conditions(recipe: Recipe) -> Iterator[Problem]:
    """What can be seen of conditioning before a model is built: known frames, control clips, images beside clips."""
    model, known, data = recipe.model, recipe.known, recipe.data
    family, also = DENOISERS.get(model.family), (("model", "family"), ("model", "size"), ("task",))
    if known is not None:
        for key, allowed in zip(("shares", "image_shares"), MASK_KINDS[known.law], strict=True):
            for name in getattr(known, key):
                if name not in allowed:
                    text = f"known.{key} has '{name}', which law {known.law} does not know"
                    advice = suggest(name, allowed, kind="kinds")
                    yield Problem(("known", key, name), f"{text}; {advice}", (("known", "law"),))
    if family is None:
        return
    if known is not None and "known" not in family.supported_conditions:
        yield Problem(("known",), f"known is set, but {model.family} has no inpaint models; remove it", also)
    if data.use_image_num and "images" not in family.supported_conditions:
        text = f"data.use_image_num is {data.use_image_num}, but {model.family} takes no images beside clips"
        yield Problem(("data", "use_image_num"), f"{text}; use buckets of 1 frame for images instead", also)
    has_control = "control" in family.supported_conditions
    if recipe.task == "denoiser" and data.control and not has_control:
        text = f"data.control is true, but {model.family} has no control models"
        yield Problem(("data", "control"), f"{text}; remove it, or choose cogvideox_fun", also)
    is_control = has_control and family.preview(model.size, model.overrides).condition == "control"
    if recipe.task == "denoiser" and not data.control and is_control:
        text = f"data.control is false, but {model.family} {model.size} is a control model"
        advice = "set it to true, and name a control clip for each row (column control)"
        yield Problem(("data", "control"), f"{text}; {advice}", also)
    if recipe.objective.kind == "edm" and "log_sigma" not in family.supported_conditions:
        text = f"objective.kind is edm, but {model.family} is told a whole index and cannot be told ln(sigma)"
        yield Problem(("objective", "kind"), f"{text}; choose flow, v or epsilon", also)


def token_patch(recipe: Recipe) -> tuple[int, int, int]:
    """Latent cells (frames, height, width) per token of the recipe's denoiser."""
    model = recipe.model
    return DENOISERS[model.family].patch_of(model.size, model.overrides)


def frame_problem(recipe: Recipe, vae: VAESpec, frames: int) -> str | None:
    """What the models take, and the nearest numbers that they do; None if `frames` is one of them."""
    is_denoiser = recipe.task == "denoiser" and recipe.model.family in DENOISERS
    patch = token_patch(recipe)[0] if is_denoiser else 1
    lengths = vae.lengths(patch)
    if lengths.accepts(frames):
        return None
    reach = vae.strides[0] * patch
    below = [n for n in range(max(1, frames - reach), frames) if lengths.accepts(n)][-1:]
    above = [n for n in range(frames + 1, frames + reach + 1) if lengths.accepts(n)][:1]
    name = recipe.vae.name if patch == 1 else f"{recipe.model.family} {recipe.model.size}"
    return f"{name} takes {lengths.describe()}; write {' or '.join(map(str, below + above))}"


def check_frames(recipe: Recipe, vae: VAESpec, path: KeyPath, frames: int) -> Iterator[Problem]:
    if advice := frame_problem(recipe, vae, frames):
        yield Problem(path, f"{'.'.join(path)} is {frames}; {advice}", MODEL_KEYS)


def check_multiple(path: KeyPath, value: int, step: int, who: str = "the models need") -> Iterator[Problem]:
    if value % step:
        below = value // step * step
        near = " or ".join(str(size) for size in (below, below + step) if size)
        text = f"{'.'.join(path)} is {value}; {who} a multiple of {step}"
        yield Problem(path, f"{text}; write {near}", MODEL_KEYS)


def check_sampling(recipe: Recipe) -> Iterator[Problem]:
    """Only a denoiser samples, so an autoencoder's recipe may keep defaults that its VAE could not decode."""
    if recipe.task != "denoiser":
        return
    kind, sampler, samplers = recipe.objective.kind, recipe.sample.sampler, SAMPLERS[recipe.objective.kind]
    if sampler not in samplers:
        text = f"sample.sampler is {sampler}, which a model with objective.kind {kind} cannot be sampled with"
        yield Problem(("sample", "sampler"), f"{text}; choose {', '.join(samplers)}", (("objective", "kind"),))
    vae, family = VAES.get(recipe.vae.name), recipe.model.family
    samples = recipe.validation.samples if recipe.validation else None
    for section, sizes in ((("sample",), recipe.sample), (("validation", "samples"), samples)):
        if sizes is None or vae is None or family not in DENOISERS:
            continue
        # Sizes that are null come from elsewhere and are checked there.
        if sizes.frames is not None:
            yield from check_frames(recipe, vae, (*section, "frames"), sizes.frames)
        for axis, name in ((1, "height"), (2, "width")):
            step = vae.strides[axis] * token_patch(recipe)[axis]
            who = f"{family} with {recipe.vae.name} needs"
            yield from check_multiple((*section, name), getattr(sizes, name) or 0, step, who)
    if samples is None:
        return
    path: KeyPath = ("validation", "samples")
    if not samples.prompts and samples.prompts_file is None:
        text = 'validation.samples has no prompts; write prompts: ["what to show"], or name a prompts_file'
        yield Problem((*path, "prompts"), text)
    for index, prompt in enumerate(samples.prompts):
        if not prompt.strip():
            yield Problem((*path, "prompts"), f"validation.samples.prompts.{index} is empty; say what to show")
    if samples.images and samples.prompts_file is None and len(samples.images) != len(samples.prompts):
        text = f"validation.samples has {len(samples.images)} images and {len(samples.prompts)} prompts"
        yield Problem((*path, "images"), f"{text}; give one picture for each prompt", ((*path, "prompts"),))


def check_text_files(recipe: Recipe) -> Iterator[Problem]:
    """Of a file of weights, that a tokenizer was named or lies beside it."""
    for index, encoder in enumerate(recipe.text.encoders):
        file = Path(encoder.path) if encoder.path is not None else None
        folder = TOKENIZER_FOLDERS.get(encoder.name)
        if file is None or folder is None or encoder.tokenizer is not None or not file.is_file():
            continue
        if not (file.parent / folder).is_dir():
            path: KeyPath = ("text", "encoders", str(index), "tokenizer")
            text = f"{'.'.join(path)} is null, but {file} holds weights alone, and there is no {file.parent / folder}"
            yield Problem(path, f"{text}; name the folder of the tokenizer of {encoder.name}")
