"""Rules of the models: names and sizes, autoencoder, text encoders, conditioning, LoRA, subject tuning."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from pathlib import Path

from frameloom.config.loading.problems import Problem
from frameloom.config.loading.yaml_values import KeyPath, format_value
from frameloom.config.schema.models import KnownSection, TextEncoderSection
from frameloom.config.schema.recipe import Recipe
from frameloom.core.spelling import suggest
from frameloom.diffusion.mask_kinds import MASK_KINDS
from frameloom.models.registry import DENOISERS, TEXT_ENCODERS, VAES
from frameloom.models.spec import DenoiserSpec, fits_type


def check_names(recipe: Recipe) -> Iterator[Problem]:
    model, vae = recipe.model, recipe.vae
    if model.family not in DENOISERS:
        yield _unknown(("model", "family"), model.family, DENOISERS, kind="families")
    elif model.size not in DENOISERS[model.family].sizes:
        sizes = DENOISERS[model.family].sizes
        yield _unknown(
            ("model", "size"), model.size, sizes, kind=f"sizes of {model.family}", also=(("model", "family"),)
        )
    if vae.name not in VAES:
        yield _unknown(("vae", "name"), vae.name, VAES, kind="autoencoders")
    elif vae.size not in VAES[vae.name].sizes:
        sizes = VAES[vae.name].sizes
        yield _unknown(("vae", "size"), vae.size, sizes, kind=f"sizes of {vae.name}", also=(("vae", "name"),))


def _unknown(path: KeyPath, name: str, known: Collection[str], *, kind: str, also: tuple[KeyPath, ...] = ()) -> Problem:
    return Problem(path, f"{'.'.join(path)} is '{name}', which does not exist; {suggest(name, known, kind=kind)}", also)


_FIELD_KINDS = {
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    str: "text",
    tuple: "a list of numbers",
}


def check_overrides(recipe: Recipe) -> Iterator[Problem]:
    """Fields of an architecture, which are no keys of the recipe's own."""
    sections = (
        ("model", recipe.model.overrides, DENOISERS.get(recipe.model.family)),
        ("vae", recipe.vae.overrides, VAES.get(recipe.vae.name)),
    )
    for section, overrides, spec in sections:
        for name, value in overrides.items() if spec else ():
            path = (section, "overrides", name)
            assert spec is not None
            if name not in spec.fields:
                text = f"{section}.overrides has '{name}', which is no field of this architecture"
                yield Problem(path, f"{text}; {suggest(name, spec.fields, kind='fields')}")
            elif not fits_type(value, spec.fields[name]):
                given = f"'{value}'" if isinstance(value, str) else format_value(value)
                text = f"{'.'.join(path)} is {given}; expected {_FIELD_KINDS[spec.fields[name]]}"
                yield Problem(path, text)


_AUTOENCODER = ("autoencoder",)


def check_autoencoder(recipe: Recipe) -> Iterator[Problem]:
    yield from _check_inflate(recipe)
    if recipe.task != "autoencoder":
        return
    yield from _check_losses(recipe)
    if recipe.vae.mini_batch is not None:
        text = f"vae.mini_batch is {recipe.vae.mini_batch}, but task autoencoder trains on whole micro-batches"
        advice = "remove it, and write smaller batches in data with train.accumulate"
        yield Problem(("vae", "mini_batch"), f"{text}; {advice}", (("task",),))


def _check_inflate(recipe: Recipe) -> Iterator[Problem]:
    """An image autoencoder as the start of a video one."""
    vae, path = recipe.vae, ("vae", "inflate")
    if not vae.inflate:
        return
    inflating = [name for name, spec in VAES.items() if spec.can_inflate]
    if vae.name not in inflating:
        text = f"vae.inflate is true, but {vae.name} cannot start from an image autoencoder"
        yield Problem(path, f"{text}; choose vae.name {' or '.join(inflating)}, or remove it", (("vae", "name"),))
    if vae.weights is None:
        text = "vae.inflate is true, but vae.weights is null; name the weights of the image autoencoder"
        yield Problem(path, text, (("vae", "weights"),))


def _check_losses(recipe: Recipe) -> Iterator[Problem]:
    section = recipe.autoencoder
    if section.lpips is not None and section.lpips.weights is None:
        text = "autoencoder.lpips.weights is null, but LPIPS needs the weights of VGG16 with the published linear heads"
        advice = (
            "name their .safetensors file (frameloom convert makes one of a pickle), or set autoencoder.lpips: null"
        )
        yield Problem((*_AUTOENCODER, "lpips"), f"{text}; {advice}")
    judge = section.discriminator
    if judge is None:
        return
    path: KeyPath = (*_AUTOENCODER, "discriminator")
    if judge.adaptive and section.train_only == "encoder":
        text = "autoencoder.discriminator.adaptive compares gradients at the decoder's last layer, which does not train"
        advice = "set it to false, with a weight of your choice"
        yield Problem((*path, "adaptive"), f"{text}; {advice}", ((*_AUTOENCODER, "train_only"),))
    every = recipe.train.ema.every if recipe.train.ema else 1
    if judge.turns == "alternate" and every % 2 == 0:
        text = f"train.ema.every is {every}, but only odd steps train the autoencoder, so it would never be averaged"
        advice = f"write {every - 1} or {every + 1}, or autoencoder.discriminator.turns: both"
        yield Problem(("train", "ema", "every"), f"{text}; {advice}", ((*path, "turns"),))


def check_vae_weights(recipe: Recipe) -> Iterator[Problem]:
    if recipe.task == "denoiser" and recipe.vae.weights is None:
        text = "vae.weights is null, but task denoiser needs a trained autoencoder to encode and to sample with"
        yield Problem(
            ("vae", "weights"), f"{text}; name its file or folder, or train one with task: autoencoder", (("task",),)
        )


def check_text(recipe: Recipe) -> Iterator[Problem]:
    seen: dict[tuple[str, str | None], int] = {}
    for index, encoder in enumerate(recipe.text.encoders):
        path = ("text", "encoders", str(index))
        if encoder.name not in TEXT_ENCODERS:
            yield _unknown((*path, "name"), encoder.name, TEXT_ENCODERS, kind="text encoders")
        elif encoder.max_length > TEXT_ENCODERS[encoder.name].max_length:
            limit = TEXT_ENCODERS[encoder.name].max_length
            text = (
                f"text.encoders.{index}.max_length is {encoder.max_length}; {encoder.name} reads at most {limit} tokens"
            )
            yield Problem((*path, "max_length"), f"{text}; write {limit} or less")
        else:
            yield from _check_window(path, encoder)
        first = seen.setdefault((encoder.name, encoder.path), index)
        if first != index:
            yield Problem(
                path, f"text.encoders.{index} is the same encoder as text.encoders.{first}; remove one of them"
            )


def _check_window(path: KeyPath, encoder: TextEncoderSection) -> Iterator[Problem]:
    """Encoders with a short window read long captions in several; packages carry only small encoders."""
    window = TEXT_ENCODERS[encoder.name].window
    where = ".".join(path)
    if window and encoder.max_length > window and (encoder.max_length - 2) % (window - 2):
        below = (encoder.max_length - 2) // (window - 2) * (window - 2) + 2
        text = f"{where}.max_length is {encoder.max_length}; {encoder.name} reads windows of {window - 2} tokens"
        yield Problem((*path, "max_length"), f"{text}; write {below} or {below + window - 2}")
    if encoder.path is None and not TEXT_ENCODERS[encoder.name].packaged:
        text = f"{where}.path is null, but no package carries {encoder.name}"
        yield Problem((*path, "path"), f"{text}; name the folder with its weights and tokenizer", ((*path, "name"),))


# Folder of the tokenizer beside a single file, by encoder; the others lie in folders of their own only.
TOKENIZER_FOLDERS = {"clip_l": "tokenizer", "clip_bigg": "tokenizer_2"}
_ENCODER_OPTIONS = ("padding", "pad", "layer", "pooled", "null", "cleaning", "keep_chinese", "precision")


def check_text_place(recipe: Recipe) -> Iterator[Problem]:
    """What can be said without looking at the disk."""
    for index, encoder in enumerate(recipe.text.encoders):
        path: KeyPath = ("text", "encoders", str(index))
        where, also = ".".join(path), ((*path, "name"),)
        if encoder.name in TOKENIZER_FOLDERS:
            continue
        known = " and ".join(TOKENIZER_FOLDERS)
        if encoder.tokenizer is not None:
            text = f"{where}.tokenizer is set, but only {known} take a tokenizer from elsewhere"
            yield Problem((*path, "tokenizer"), f"{text}; remove it, {encoder.name} finds its own in its folder", also)
        if encoder.path is not None and encoder.path.endswith(".safetensors"):
            text = f"{where}.path is the file '{encoder.path}', but only {known} are parts of single files"
            yield Problem((*path, "path"), f"{text}; name the folder of {encoder.name}", also)


def check_text_options(recipe: Recipe) -> Iterator[Problem]:
    """An encoder that comes with the package is used in one way."""
    for index, encoder in enumerate(recipe.text.encoders):
        spec = TEXT_ENCODERS.get(encoder.name)
        if spec is None or not spec.packaged:
            continue
        for name in _ENCODER_OPTIONS:
            if getattr(encoder, name) is not None:
                path: KeyPath = ("text", "encoders", str(index), name)
                yield Problem(path, f"{'.'.join(path)} is set, but {encoder.name} is used in one way only; remove it")


def check_text_files(recipe: Recipe) -> list[Problem]:
    """Of a file of weights, that a tokenizer was named or lies beside it."""
    problems = []
    for index, encoder in enumerate(recipe.text.encoders):
        place = Path(encoder.path) if encoder.path is not None else None
        folder = TOKENIZER_FOLDERS.get(encoder.name)
        if place is None or folder is None or not place.is_file() or encoder.tokenizer is not None:
            continue
        beside = place.parent / folder
        if not beside.is_dir():
            path: KeyPath = ("text", "encoders", str(index), "tokenizer")
            text = f"{'.'.join(path)} is null, but {place} holds weights alone, and there is no {beside}"
            problems.append(Problem(path, f"{text}; name the folder of the tokenizer of {encoder.name}"))
    return problems


def check_note(recipe: Recipe) -> Iterator[Problem]:
    note = recipe.text.note
    if note is not None and not note.fps and note.motion is None:
        text = "text.note has fps: false and motion: null, so it would say nothing; set one of them, or note: null"
        yield Problem(("text", "note"), text)


def check_known(recipe: Recipe) -> Iterator[Problem]:
    """What can be seen of inpaint training and of images beside clips before a model is built."""
    takes = DENOISERS[recipe.model.family].conditions if recipe.model.family in DENOISERS else ("known", "images")
    also: tuple[KeyPath, ...] = (("model", "family"),)
    if recipe.known is not None:
        if "known" not in takes:
            yield Problem(("known",), f"known is set, but {recipe.model.family} has no inpaint models; remove it", also)
        if recipe.data.cache.latents is not None or recipe.data.cache.foreign in ("sdxl", "open_sora2"):
            text = "known is set, but with a latent cache there are no pixels to take known parts from"
            yield Problem(("data", "cache", "latents"), f"{text}; remove the latent cache", (("known",),))
        share = KnownSection.model_fields["known_share"].default
        if recipe.known.law != "frames" and recipe.known.known_share != share:
            text = f"known.known_share is set, but only law frames draws by it, and known.law is {recipe.known.law}"
            yield Problem(("known", "known_share"), f"{text}; remove it", (("known", "law"),))
        kinds = MASK_KINDS[recipe.known.law]
        for key, allowed in (("shares", kinds[0]), ("image_shares", kinds[1])):
            for name in getattr(recipe.known, key):
                if name not in allowed:
                    text = f"known.{key} has '{name}', which law {recipe.known.law} does not know"
                    path = ("known", key, name)
                    yield Problem(path, f"{text}; {suggest(name, allowed, kind='kinds')}", (("known", "law"),))
    if recipe.data.use_image_num and "images" not in takes:
        text = f"data.use_image_num is {recipe.data.use_image_num}, but {recipe.model.family} takes no images beside"
        yield Problem(("data", "use_image_num"), f"{text} clips; use buckets of 1 frame for images instead", also)
    if recipe.data.use_img_from_vid and not recipe.data.use_image_num:
        text = "data.use_img_from_vid is true, but data.use_image_num is 0, so no images come beside clips"
        yield Problem(
            ("data", "use_img_from_vid"), f"{text}; set their number, or remove it", (("data", "use_image_num"),)
        )


def check_control(recipe: Recipe) -> Iterator[Problem]:
    """A control model and `data.control` belong together, and pixels are needed to take control clips from."""
    family, path = DENOISERS.get(recipe.model.family), ("data", "control")
    if family is None:
        return
    also: tuple[KeyPath, ...] = (("model", "size"), ("model", "family"), ("task",))
    if recipe.data.control:
        if recipe.task != "denoiser":
            text = f"data.control is true, but task {recipe.task} has no use for control clips"
            yield Problem(path, f"{text}; remove it", also)
        elif "control" not in family.conditions:
            text = f"data.control is true, but {recipe.model.family} has no control models"
            yield Problem(path, f"{text}; remove it, or choose cogvideox_fun", also)
        yield from _check_control_excludes(recipe)
    elif recipe.task == "denoiser" and "control" in family.conditions and _is_control(family, recipe):
        text = f"data.control is false, but {recipe.model.family} {recipe.model.size} is a control model"
        yield Problem(path, f"{text}; set it to true, and name a control clip for each row (column control)", also)


def _check_control_excludes(recipe: Recipe) -> Iterator[Problem]:
    if recipe.data.cache.latents is not None or recipe.data.cache.foreign in ("sdxl", "open_sora2"):
        text = "data.control is true, but a latent cache holds no control clips"
        yield Problem(("data", "cache", "latents"), f"{text}; remove the latent cache", (("data", "control"),))
    if recipe.validation is not None and recipe.validation.samples is not None:
        text = "validation.samples is set, but a control model needs a control clip for each sample"
        advice = "remove it, and sample with `frameloom sample --control FILE`"
        yield Problem(("validation", "samples"), f"{text}; {advice}", (("data", "control"),))


def _is_control(family: DenoiserSpec, recipe: Recipe) -> bool:
    return family.beside(family.preview(recipe.model.size, recipe.model.overrides)) == "control"


def check_lora(recipe: Recipe) -> Iterator[Problem]:
    lora, sample = recipe.lora, recipe.sample
    if lora is not None and recipe.task != "denoiser":
        text = f"lora is set, but task is {recipe.task}; adapters are trained beside a denoiser"
        yield Problem(("lora",), f"{text}; remove it, or set task: denoiser", (("task",),))
    if lora is not None and lora.dropout:
        text = f"lora.dropout is {format_value(lora.dropout)}; a run that resumes could not repeat its draws"
        yield Problem(("lora", "dropout"), f"{text}; write 0, and train fewer steps against overfitting")
    if sample.lora_scale != 1 and lora is None and sample.lora is None:
        text = f"sample.lora_scale is {format_value(sample.lora_scale)}, but there is no LoRA"
        yield Problem(("sample", "lora_scale"), f"{text}; remove it, or name one in sample.lora", (("lora",),))


_SUBJECT_FAMILY = "sdxl"
_WORD_ENCODERS = ("clip_l", "clip_bigg")


def check_personal(recipe: Recipe) -> Iterator[Problem]:
    for name in ("inversion", "dreambooth"):
        if getattr(recipe, name) is None:
            continue
        if recipe.task != "denoiser" or recipe.model.family != _SUBJECT_FAMILY:
            text = f"{name} is set, but it needs task denoiser and model.family {_SUBJECT_FAMILY}"
            yield Problem((name,), f"{text}, not {recipe.task} and {recipe.model.family}; remove it", (("task",),))
    if recipe.inversion is not None:
        yield from _check_inversion(recipe)
    if recipe.dreambooth is not None:
        yield from _check_dreambooth(recipe)


def _check_inversion(recipe: Recipe) -> Iterator[Problem]:
    assert recipe.inversion is not None
    for name in ("lora", "dreambooth"):
        if getattr(recipe, name) is not None:
            text = f"inversion and {name} are both set, but inversion trains the vectors of a word and nothing else"
            yield Problem((name,), f"{text}; remove one of them", (("inversion",),))
    if any(encoder.name not in _WORD_ENCODERS for encoder in recipe.text.encoders):
        found = ", ".join(encoder.name for encoder in recipe.text.encoders)
        text = f"inversion is set, but text.encoders has {found}"
        yield Problem(
            ("text", "encoders"), f"{text}; only {' and '.join(_WORD_ENCODERS)} learn words", (("inversion",),)
        )
    if recipe.data.cache.text is not None or recipe.data.cache.foreign is not None:
        text = "inversion is set, but cached text states know nothing of a word that is still being learnt"
        key = "text" if recipe.data.cache.text is not None else "foreign"
        yield Problem(("data", "cache", key), f"{text}; remove data.cache.{key}", (("inversion",),))
    if recipe.text.rescale:
        text = "text.rescale is true, but with inversion the scale of the captions changes while training"
        yield Problem(("text", "rescale"), f"{text}; set it to false", (("inversion",),))
    if recipe.inversion.template_file is not None and recipe.inversion.templates != "object":
        text = f"inversion.template_file is set, and inversion.templates is {recipe.inversion.templates} too"
        yield Problem(("inversion", "templates"), f"{text}; remove one of them", (("inversion", "template_file"),))


def _check_dreambooth(recipe: Recipe) -> Iterator[Problem]:
    section = recipe.dreambooth
    assert section is not None
    path: KeyPath = ("dreambooth",)
    if not section.instance_prompt.strip():
        text = "dreambooth.instance_prompt is empty; say what the pictures show, e.g. a photo of sks dog"
        yield Problem((*path, "instance_prompt"), text)
    if (section.class_prompt is None) != (section.class_folder is None):
        missing = "class_prompt" if section.class_prompt is None else "class_folder"
        text = f"dreambooth.{missing} is null, but pictures of others of its kind need a prompt and a folder"
        yield Problem((*path, missing), f"{text}; set both, or none to train without them")
    if recipe.data.cache.latents is not None or recipe.data.cache.text is not None or recipe.data.cache.foreign:
        key = next(name for name in ("latents", "text", "foreign") if getattr(recipe.data.cache, name))
        text = f"dreambooth is set, but its pairs of pictures are drawn while training; remove data.cache.{key}"
        yield Problem(("data", "cache", key), text, (path,))
    if recipe.sample.frames != 1:
        text = f"sample.frames is {recipe.sample.frames}, but {_SUBJECT_FAMILY} makes pictures; write 1"
        yield Problem(("sample", "frames"), text, (path,))
