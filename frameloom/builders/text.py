"""Text encoders from a recipe section or a single file, their trained weights, and learned words.

Shape letters: B batch, K text tokens, D width, E encoders, V vectors of a word.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from frameloom.checkpoint.model_folder import EXPORT
from frameloom.config.schema.models import ModelSection, TextSection
from frameloom.core.errors import CheckpointError, ConfigError
from frameloom.core.files import digest_value, replace_folder
from frameloom.models.denoisers.sdxl.single_file import PREFIXES, Part, from_single_file
from frameloom.models.denoisers.sdxl.weights import ENCODERS, check_description, published_descriptions
from frameloom.models.registry import get_denoiser
from frameloom.models.state_dict import check_fit
from frameloom.models.text.base import TextEncoder, TextStates, build_text_encoder, drop_text
from frameloom.models.text.clip import build_from_file
from frameloom.models.text.pretrained import PretrainedEncoder
from frameloom.models.text.textual_inversion import add_word, clip_encoders
from frameloom.models.text.transformers_folder import EncoderFile, holds_tokenizer
from frameloom.weights.files import CONFIG, find_weights, open_weights, read_config, refuse_pickle
from frameloom.weights.lazy_tensors import LazyTensors, defer_tensors, to_deferred, to_pending
from frameloom.weights.safetensors_file import open_safetensors, write_safetensors

PREFIX = "text_encoders"
"""begins the names of their parameters"""
TRAINED_TEXT = "text_encoders"
"""where a run writes them, beside its export"""
_TENSORS = "model.safetensors"
_PARTS: dict[str, Part] = {name: part for part, name in ENCODERS.items()}
_TOKENIZERS = {"clip_l": ("tokenizer",), "clip_bigg": ("tokenizer_2", "tokenizer")}
_WORD_FILE = "learned_embeds.safetensors"
_WORD_KIND = "inversion"
_WORD_NOTE = "placeholder"


class TextPipeline:
    """All text encoders of a recipe as one.

    `join` "first": token states of the first encoder; "concat": of all, side by side along D. The pooled vector is that
    of the last encoder that has one. An encoder that adds to neither is not run.
    """

    def __init__(self, encoders: Sequence[TextEncoder], *, join: Literal["first", "concat"] = "first") -> None:
        self.encoders, self._join = tuple(encoders), join
        self._words = self.encoders if join == "concat" else self.encoders[:1]
        pooling = [index for index, encoder in enumerate(self.encoders) if encoder.pooled_width]
        self._pooling = pooling[-1] if pooling else None
        if len({encoder.max_length for encoder in self._words}) > 1:
            found = ", ".join(f"{encoder.name} has {encoder.max_length}" for encoder in self._words)
            raise ConfigError(
                f"text.encoders: their token states stand side by side, so max_length must be equal, but {found}"
            )
        self.width = sum(encoder.width for encoder in self._words)
        self.pooled_width = 0 if self._pooling is None else self.encoders[self._pooling].pooled_width
        self.max_length = self.encoders[0].max_length

    def with_each(self, change: Callable[[TextEncoder], TextEncoder]) -> TextPipeline:
        """The same with other encoders instead of its own, one for one."""
        return TextPipeline([change(encoder) for encoder in self.encoders], join=self._join)

    def fingerprint(self) -> str:
        found = [encoder.fingerprint() for encoder in self.encoders]
        return digest_value(found if self._join == "first" else [self._join, *found])

    def to(self, device: torch.device | str) -> TextPipeline:
        for encoder in self.encoders:
            encoder.to(device)
        return self

    def unload(self) -> None:
        """Free the memory of the weights, for as long as nothing is encoded."""
        for encoder in self.encoders:
            encoder.unload()

    def encode(self, captions: Sequence[str]) -> TextStates:
        used = {*range(len(self._words)), *([] if self._pooling is None else [self._pooling])}
        states = {index: self.encoders[index].encode(captions) for index in sorted(used)}
        words = [states[index] for index in range(len(self._words))]
        mask_BK = words[0].mask_BK
        for other in words[1:]:
            mask_BK = mask_BK | other.mask_BK
        tokens_BKD = torch.cat([part.tokens_BKD for part in words], dim=-1) if len(words) > 1 else words[0].tokens_BKD
        pooled_BD = tokens_BKD.new_zeros(len(captions), 0) if self._pooling is None else states[self._pooling].pooled_BD
        return TextStates(tokens_BKD, mask_BK, pooled_BD)

    def drop(self, states: TextStates, null: TextStates, dropped_BE: Tensor) -> TextStates:
        """`null`, the states of the empty caption, for the encoders that are dropped for a sample.

        Works on joined states, so on cached ones too. Equal columns drop a caption as a whole.
        """
        words_BD = dropped_BE[:, :1]
        if len(self._words) > 1:
            columns = [dropped_BE[:, [index]].expand(-1, part.width) for index, part in enumerate(self._words)]
            words_BD = torch.cat(columns, dim=1)
        return drop_text(states, null, words_BD, dropped_BE[:, [self._pooling or 0]])


def build_text(section: TextSection, model: ModelSection) -> TextPipeline:
    """The text encoders of a recipe, joined as its denoiser's family asks; on the host until they are moved."""
    encoders: list[TextEncoder] = []
    for item in section.encoders:
        options = item.model_dump(exclude={"name", "max_length", "path", "tokenizer", "train", "lr"}, exclude_none=True)
        if item.path is not None and Path(item.path).is_file():
            file = open_text_file(Path(item.path), encoder=item.name, tokenizer=item.tokenizer)
            encoders.append(build_from_file(item.name, item.max_length, file, options))
        else:
            encoders.append(build_text_encoder(item.name, max_length=item.max_length, path=item.path, options=options))
    return TextPipeline(encoders, join=get_denoiser(model.family).text_join)


def open_text_file(path: Path, *, encoder: str, tokenizer: str | None) -> EncoderFile:
    """The encoder in the file `path`; only headers are read now.

    `tokenizer` is the folder of the tokenizer, or of a whole pipeline; it may also hold the encoder's config.json,
    which only an encoder of another size than the published one needs.
    """
    if encoder not in _PARTS:
        raise ConfigError(
            f"text encoder {encoder}: {path} is a file, but only {' and '.join(_PARTS)} are parts of single files; "
            f"name the folder of {encoder}"
        )
    found = find_weights(path)
    refuse_pickle(found)
    part = _PARTS[encoder]
    prefixes = tuple(prefix for prefix, owner in PREFIXES.items() if owner == part)
    own = {name: one for name, one in open_weights(found).untied().pending.items() if name.startswith(prefixes)}
    if not own:
        raise CheckpointError(
            f"{path}: holds no {part}, no tensor begins with {' or '.join(prefixes)}; choose a file of the whole "
            "SDXL model, or name a folder"
        )
    tensors = to_pending(from_single_file(to_deferred(LazyTensors(own)))[part], where=str(path))
    is_given, folder = tokenizer is not None, path.parent if tokenizer is None else Path(tokenizer)
    words = _find_tokenizer(path, encoder, folder, is_given)
    config = _find_config(part, to_deferred(tensors), folder, is_given=is_given, where=str(path))
    return EncoderFile(path, tensors, config, words)


def _find_config(
    part: Part, tensors: Mapping[str, Tensor], folder: Path, *, is_given: bool, where: str
) -> Mapping[str, Any]:
    candidates = [folder / part, *([folder] if is_given else [])]
    for candidate in candidates:
        if (candidate / CONFIG).is_file() and read_config(candidate).get("model_type") == "clip_text_model":
            content = read_config(candidate)
            check_description(part, content, tensors, where=f"{where}: {part} as {candidate / CONFIG} describes it")
            return content
    content = published_descriptions(part)[0]
    try:
        check_description(part, content, tensors, where=f"{where}: {part}")
    except CheckpointError as error:
        raise CheckpointError(
            f"{where}: its {part} has not the published size, and weights alone do not tell the rest; put its {CONFIG} "
            f"into {candidates[0]}"
        ) from error
    return content


def _find_tokenizer(path: Path, encoder: str, folder: Path, is_given: bool) -> Path:
    candidates = [*([folder] if is_given else []), *(folder / name for name in _TOKENIZERS[encoder])]
    for candidate in candidates:
        if holds_tokenizer(candidate):
            return candidate
    looked = " or ".join(map(str, candidates))
    raise CheckpointError(
        f"{path}: holds the weights of {encoder}, but no tokenizer is in {looked}; name the folder of the tokenizer as "
        "tokenizer of this text encoder (that of openai/clip-vit-large-patch14 fits SDXL)"
    )


def list_trained(text: TextPipeline, section: TextSection) -> dict[str, nn.Module]:
    """The networks of the encoders that train, by their key in the recipe."""
    found: dict[str, nn.Module] = {}
    for index, (item, encoder) in enumerate(zip(section.encoders, text.encoders, strict=True)):
        if item.train:
            if not isinstance(encoder, PretrainedEncoder):
                raise ConfigError(f"text.encoders.{index}.train is true, but {item.name} cannot be trained; remove it")
            found[f"{PREFIX}.{index}"] = encoder.load()
    return found


def start_training(text: TextPipeline, section: TextSection) -> dict[str, nn.Parameter]:
    """Let the chosen encoders learn, and give their weights by name."""
    params: dict[str, nn.Parameter] = {}
    for key, network in list_trained(text, section).items():
        network.requires_grad_(True)
        params |= {f"{key}.{name}": param for name, param in network.named_parameters()}
    for item, encoder in zip(section.encoders, text.encoders, strict=True):
        if item.train and isinstance(encoder, PretrainedEncoder):
            encoder.learns = True
    return params


@torch.no_grad()
def use_trained(text: TextPipeline, section: TextSection, tensors: Mapping[str, Tensor], *, where: str) -> None:
    """Put the weights of a checkpoint into the encoders that were trained."""
    for key, network in list_trained(text, section).items():
        own = dict(network.named_parameters())
        given = {name.removeprefix(f"{key}."): part for name, part in tensors.items() if name.startswith(f"{key}.")}
        check_fit(own, given, where=f"{where}, {key}")
        for name, param in own.items():
            param.copy_(given[name])


def write_trained(folder: Path, text: TextPipeline, section: TextSection) -> None:
    """A folder for each, as transformers reads it and `text.encoders.N.path` takes it."""
    for index, (item, encoder) in enumerate(zip(section.encoders, text.encoders, strict=True)):
        if item.train and isinstance(encoder, PretrainedEncoder):
            with replace_folder(folder / str(index)) as temporary:
                encoder.load().save_pretrained(temporary, safe_serialization=True)
                for file in encoder.tokenizer_files():
                    shutil.copy2(file, temporary / file.name)


def read_trained(folder: Path, text: TextPipeline, section: TextSection) -> None:
    """The reverse of `write_trained`, into encoders that are built already."""
    tensors: dict[str, Tensor] = {}
    for key in list_trained(text, section):
        file = folder / key.removeprefix(f"{PREFIX}.") / _TENSORS
        if not file.is_file():
            raise CheckpointError(
                f"{file}: missing, but text.encoders.{key.removeprefix(f'{PREFIX}.')}.train is true, so its weights "
                "belong to the model; sample from the run folder"
            )
        tensors |= {f"{key}.{name}": part for name, part in load_file(file).items()}
    use_trained(text, section, tensors, where=str(folder))


@dataclass(frozen=True)
class LearntWord:
    """`vectors` are by the key of their encoder, each [V, D]."""

    placeholder: str
    vectors: Mapping[str, Tensor]


def write_word(folder: Path, word: LearntWord, *, family: str, base: Mapping[str, Any]) -> None:
    """Write the word as a folder; one that is there is replaced. `base` says which models it was learnt with."""
    with replace_folder(folder) as temporary:
        tensors = defer_tensors({name: part.detach().cpu() for name, part in word.vectors.items()})
        digest = write_safetensors(temporary / _WORD_FILE, tensors, metadata={_WORD_NOTE: word.placeholder})
        config = {_WORD_NOTE: word.placeholder, "base": dict(base)}
        content = {"kind": _WORD_KIND, "name": family, "config": config, "sha256": {_WORD_FILE: digest}}
        (temporary / CONFIG).write_text(json.dumps(content, indent=2) + "\n")


def read_word(path: Path) -> LearntWord:
    """A file, an exported folder or the folder of an inversion run; a file without a note is called by its name."""
    candidates = [path] if path.is_file() else [path / _WORD_FILE, path / EXPORT / _WORD_FILE]
    file = next((candidate for candidate in candidates if candidate.is_file()), None)
    if file is None or file.suffix != ".safetensors":
        raise CheckpointError(f"{path}: holds no {_WORD_FILE}; name a .safetensors file of vectors or an inversion run")
    tensors = open_safetensors(file)
    vectors = {name: tensors[name] for name in ("clip_l", "clip_g") if name in tensors}
    if not vectors or any(part.ndim != 2 for part in vectors.values()):
        found = ", ".join(sorted(tensors)[:4])
        raise CheckpointError(f"{file}: holds {found}; vectors for SDXL are called clip_l and clip_g, [vectors, width]")
    return LearntWord(tensors.metadata.get(_WORD_NOTE, f"<{file.stem}>"), vectors)


def use_word(text: TextPipeline, word: LearntWord, *, where: str) -> None:
    """Let the text encoders know a word; each must have vectors for it."""
    encoders = clip_encoders(text.encoders)
    if missing := sorted(set(encoders) - set(word.vectors)):
        raise CheckpointError(f"{where}: has no vectors {', '.join(missing)} for '{word.placeholder}'; learn it again")
    for name, encoder in encoders.items():
        add_word(encoder, word.placeholder, nn.Parameter(word.vectors[name].float(), requires_grad=False))
