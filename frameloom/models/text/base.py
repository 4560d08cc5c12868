"""Base of the text encoders: captions in, states out, and a fingerprint for caches.

Shape letters: B batch, K text tokens, D width.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Self, get_args, get_type_hints

import torch
from torch import Tensor, nn

from frameloom.core.errors import ConfigError
from frameloom.core.spelling import refuse_unknown
from frameloom.models.registry import get_text_encoder


@dataclass(frozen=True)
class TextOptions:
    """How an encoder is used, where published systems that share it differ.

    padding       "attend": pads are tokens like any other, to the encoder and to the denoiser;
                  "mask": both leave them out, and their states are zero
    pad           the token that fills up: "end" of text, id "zero", or the one that the "tokenizer" names
    layer         token states: the "last" ones after the final norm, or the "penultimate" ones before the last block
    pooled        "none"; "pooler": the end token's last state; "projected": the text projection of that
    null          states of the empty caption: "encode" it like others, or "zeros"
    cleaning      of captions before they are tokenised, as Open-Sora-Plan does: see `cleaning.clean_as`
    keep_chinese  cleaning leaves Chinese characters in
    precision     of the weights and of the computation; the states are float32 in any case
    """

    padding: Literal["attend", "mask"] = "attend"
    pad: Literal["end", "zero", "tokenizer"] = "tokenizer"
    layer: Literal["last", "penultimate"] = "last"
    pooled: Literal["none", "pooler", "projected"] = "none"
    null: Literal["encode", "zeros"] = "encode"
    cleaning: Literal["off", "once", "twice", "list"] = "off"
    keep_chinese: bool = False
    precision: Literal["fp32", "bf16", "fp16"] = "fp32"


def choose_options(defaults: TextOptions, given: Mapping[str, Any], *, encoder: str) -> TextOptions:
    """An encoder's own options with some replaced by what a recipe gives; ConfigError for what does not exist."""
    kinds = get_type_hints(TextOptions)
    for name, value in given.items():
        where = f"text encoder {encoder}"
        refuse_unknown(name, kinds, what=f"{where}: option")
        known = (True, False) if kinds[name] is bool else get_args(kinds[name])
        if value not in known or isinstance(value, bool) != (kinds[name] is bool):
            raise ConfigError(f"{where}: {name} is {value!r}; choose {' or '.join(map(repr, known))}")
    return dataclasses.replace(defaults, **given)


@dataclass(frozen=True)
class TextStates:
    """What a denoiser sees of its captions.

    `tokens_BKD` is zero where `mask_BK` is False (padding); `pooled_BD` sums up the whole caption, and has width 0
    where an encoder gives no such vector.
    """

    tokens_BKD: Tensor
    mask_BK: Tensor
    pooled_BD: Tensor

    def to(self, device: torch.device | str) -> TextStates:
        return TextStates(self.tokens_BKD.to(device), self.mask_BK.to(device), self.pooled_BD.to(device))

    def conditions(self) -> dict[str, Tensor]:
        """As denoisers take them."""
        return {"text": self.tokens_BKD, "text_mask": self.mask_BK, "pooled": self.pooled_BD}

    @classmethod
    def concatenate(cls, parts: Sequence[TextStates]) -> TextStates:
        """The captions of all parts, in order."""
        return cls(
            torch.cat([part.tokens_BKD for part in parts]),
            torch.cat([part.mask_BK for part in parts]),
            torch.cat([part.pooled_BD for part in parts]),
        )


def drop_text(states: TextStates, null: TextStates, words_BD: Tensor, pooled_B1: Tensor) -> TextStates:
    """Caption dropout of classifier-free guidance: `null`, the states of the empty caption, where `words_BD` is true,
    and its pooled vector where `pooled_B1` is.

    `words_BD` has a column for each feature, because those of several encoders can stand side by side, or one for all.
    A null text that is shorter than the captions is filled up by repeating its last token.
    """

    def fit(values: Tensor) -> Tensor:
        missing = states.mask_BK.shape[1] - values.shape[1]
        if missing <= 0:
            return values[:, : states.mask_BK.shape[1]]
        return torch.cat([values, values[:, -1:].repeat_interleave(missing, dim=1)], dim=1)

    kept_BK = states.mask_BK.bool() & ~words_BD.all(1, keepdim=True)
    return TextStates(
        tokens_BKD=torch.where(words_BD[:, None], fit(null.tokens_BKD), states.tokens_BKD),
        mask_BK=kept_BK | (fit(null.mask_BK).bool() & words_BD.any(1, keepdim=True)),
        pooled_BD=torch.where(pooled_B1, null.pooled_BD, states.pooled_BD),
    )


class TextEncoder:
    """A frozen text encoder. `width` is that of the token states, `pooled_width` that of the pooled vector or 0.

    Both are known once the encoder is built; its weights are read when they are first needed. A subclass says how to
    read them and how to encode a batch.
    """

    name: str
    width: int
    pooled_width: int
    max_length: int
    batch_size = 32
    """captions per forward; bounds memory when a whole data set is encoded in one call"""
    learns = False
    """whether `encode` keeps what gradients need: for new words, or because the encoder itself trains"""
    _model: nn.Module | None = None
    _device = torch.device("cpu")

    def fingerprint(self) -> str:
        """A digest of everything that the states depend on besides the caption: weights, config, `max_length`."""
        raise NotImplementedError

    def tokenize(self, captions: Sequence[str]) -> tuple[Tensor, Tensor]:
        """Token ids and a mask, ids_BK and mask_BK with K = `max_length`; the mask is False for padding.

        Always the full length: states then follow from the caption alone, not from the longest of its batch.
        """
        raise NotImplementedError

    def read_model(self) -> nn.Module:
        """The network with its weights, on the host."""
        raise NotImplementedError

    def encode_batch(self, captions: Sequence[str]) -> TextStates:
        raise NotImplementedError

    def encode(self, captions: Sequence[str]) -> TextStates:
        """States of the captions, K = `max_length`. The empty caption is the null prompt.

        In the encoder's own precision whatever a run uses: states are those that a cache would hold.
        """
        if isinstance(captions, str) or not captions:
            raise ValueError(f"encode takes a list of at least one caption, got {captions!r}")
        size = self.batch_size
        # Frozen unless vectors of a new word are learnt through it, or it trains itself.
        learns = self.learns and torch.is_grad_enabled()
        with torch.set_grad_enabled(learns), torch.autocast(self._device.type, enabled=False):
            parts = [self.encode_batch(captions[start : start + size]) for start in range(0, len(captions), size)]
        return TextStates.concatenate(parts)

    def to(self, device: torch.device | str) -> Self:
        """Move the encoder; its states then live on `device`."""
        self._device = torch.device(device)
        if self._model is not None:
            self._model.to(self._device)
        return self

    def load(self) -> Any:
        """The network, read if it was not yet; None for an encoder without weights on this process."""
        if self._model is None:
            self._model = self.read_model().to(self._device)
        return self._model

    def unload(self) -> None:
        """Free the memory of the weights; the next `encode` reads them again. Not while the encoder learns: its files
        do not hold what it has learnt."""
        if not self.learns:
            self._model = None


def build_text_encoder(
    name: str, *, max_length: int, path: str | Path | None = None, options: Mapping[str, Any] | None = None
) -> TextEncoder:
    """A frozen encoder. `path` is its folder; None takes the installed package that carries it.

    `options` are fields of `TextOptions` that differ from the encoder's own.
    """
    folder = Path(path) if path is not None else None
    return get_text_encoder(name).build(name, max_length, folder, options or {})
