"""Base of the text encoders that run a model of transformers: options, tokens, batches, precision, null prompt, digest.

Shape letters: B batch, K text tokens, D width.
"""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from frameloom.core.errors import CheckpointError, ConfigError
from frameloom.core.files import digest_value
from frameloom.models.precision import DTYPES
from frameloom.models.text.base import TextEncoder, TextOptions, TextStates
from frameloom.models.text.transformers_folder import (
    EncoderFile,
    EncoderFolder,
    list_tokenizer,
    load_model,
    load_tokenizer,
)


class PretrainedEncoder(TextEncoder, ABC):
    """A frozen encoder from a local folder. The tokenizer and the weights are read when they are first needed.

    `config` is that of transformers. A subclass names the class of the model and runs it.
    """

    load_advice = ""
    """what to do when the folder lacks weights"""

    def __init__(
        self, name: str, folder: EncoderFolder | EncoderFile, config: Any, options: TextOptions, max_length: int
    ) -> None:
        self.name = name
        self.options = options
        self.max_length = max_length
        self._folder = folder
        self._config = config
        self._digest: str | None = None

    @property
    @abstractmethod
    def model_class(self) -> Any:
        """The class of transformers that holds the weights."""

    @abstractmethod
    def run(self, model: nn.Module, ids_BK: Tensor, mask_BK: Tensor | None) -> tuple[Tensor, Tensor]:
        """Token states and pooled vectors of any dtype; without a mask, pads are tokens like any other."""

    def fingerprint(self) -> str:
        if self._digest is None:
            parts = {"files": self._folder.digests(), "options": dataclasses.asdict(self.options)}
            self._digest = digest_value({"encoder": self.name, "max_length": self.max_length, **parts})
        return self._digest

    def tokenizer_files(self) -> list[Path]:
        """What a copy of the encoder needs to read captions alike."""
        return list_tokenizer(self._folder.tokenizer)

    def tokenize(self, captions: Sequence[str]) -> tuple[Tensor, Tensor]:
        if self.options.cleaning != "off":
            from frameloom.models.text.cleaning import clean_as

            chinese = self.options.keep_chinese
            captions = [clean_as(caption, self.options.cleaning, keep_chinese=chinese) for caption in captions]
        rows = self.tokenizer(list(captions), truncation=True, max_length=self.max_length)["input_ids"]
        ids_BK = torch.full((len(rows), self.max_length), self.pad_id)
        mask_BK = torch.zeros(ids_BK.shape, dtype=torch.bool)
        for row, ids in enumerate(rows):
            ids_BK[row, : len(ids)] = torch.tensor(ids)
            mask_BK[row, : len(ids)] = True
        return ids_BK, mask_BK

    def encode_batch(self, captions: Sequence[str]) -> TextStates:
        ids_BK, mask_BK = (part.to(self._device) for part in self.tokenize(captions))
        is_masked = self.options.padding == "mask"
        tokens_BKD, pooled_BD = self.run(self.load(), ids_BK, mask_BK if is_masked else None)
        tokens_BKD, pooled_BD = tokens_BKD.float(), pooled_BD.float()
        if self.options.precision == "fp16" and not bool(tokens_BKD.isfinite().all()):
            raise ConfigError(
                f"text encoder {self.name}: its states are beyond the range of fp16; set precision to 'bf16' or 'fp32'"
            )
        if is_masked:
            tokens_BKD = tokens_BKD.masked_fill(~mask_BK[..., None], 0.0)
        if self.options.null == "zeros":
            is_empty_B = torch.tensor([not caption for caption in captions], device=self._device)
            tokens_BKD = tokens_BKD.masked_fill(is_empty_B[:, None, None], 0.0)
            pooled_BD = pooled_BD.masked_fill(is_empty_B[:, None], 0.0)
        return TextStates(tokens_BKD, mask_BK if is_masked else torch.ones_like(mask_BK), pooled_BD)

    def load_tokenizer(self) -> Any:
        return load_tokenizer(self._folder.tokenizer)

    @cached_property
    def tokenizer(self) -> Any:
        tokenizer, folder = self.load_tokenizer(), self._folder.tokenizer
        end = tokenizer.eos_token_id
        if end is None or tokenizer("")["input_ids"][-1:] != [end]:
            raise CheckpointError(
                f"{folder}: the tokenizer does not close a text with an end token, which {self.name} was trained with; "
                "copy the tokenizer of the model again"
            )
        if len(tokenizer) > self._config.vocab_size:
            raise CheckpointError(
                f"{folder}: the tokenizer has {len(tokenizer)} tokens, the model in {self._folder.weights} only "
                f"{self._config.vocab_size}; put the tokenizer of this model there"
            )
        return tokenizer

    @cached_property
    def pad_id(self) -> int:
        if self.options.pad == "zero":
            return 0
        pad = self.tokenizer.eos_token_id if self.options.pad == "end" else self.tokenizer.pad_token_id
        if pad is None:
            raise ConfigError(
                f"text encoder {self.name}: the tokenizer in {self._folder.tokenizer} names no token for padding; "
                "set pad to 'end' or 'zero'"
            )
        return int(pad)

    def read_model(self) -> nn.Module:
        return load_model(self.model_class, self._folder, DTYPES[self.options.precision], advice=self.load_advice)
