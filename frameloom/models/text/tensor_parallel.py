"""Tensor parallelism of T5 text encoders: each process holds some heads and some columns of every layer.

A process of a group of P has 1 / P of the heads of every attention, with their columns of the table of relative
positions, 1 / P of the inner width of every feed-forward layer, and 1 / P of the word vectors. All see all tokens; what
the heads and columns of a process add to the states is summed up over the group, twice a layer. The sum is made in
float32 whatever the dtype of the weights. All processes of a group encode the captions of all of them at the
same time, so they must call `encode` equally often.

Shape letters: B batch, K text tokens, D width.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Self

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch._C._distributed_c10d import _resolve_process_group

from frameloom.core.errors import ConfigError
from frameloom.models.text.base import TextEncoder, TextStates
from frameloom.models.text.t5 import T5Encoder


class SharedEncoder(TextEncoder):
    """What encoders that several processes share take over from the one that they stand for."""

    def __init__(self, inner: TextEncoder, device: torch.device) -> None:
        self.inner, self.device = inner, device
        self.name, self.max_length = inner.name, inner.max_length
        self.width, self.pooled_width = inner.width, inner.pooled_width

    def fingerprint(self) -> str:
        return self.inner.fingerprint()

    def tokenize(self, captions: Sequence[str]) -> tuple[Tensor, Tensor]:
        return self.inner.tokenize(captions)

    def to(self, device: torch.device | str) -> Self:
        """States come to where the run computes; the encoder itself is moved there when it is first used."""
        return self

    def load(self) -> Any:
        return None

    def unload(self) -> None:
        """Parts of an encoder stay: they are small, and reading the whole again would need all processes at once."""


class TensorEncoder(SharedEncoder):
    """The part of this process of a T5 that `group` shares. `key` is what a person has set, for the words of an error.

    Weights are read when they are first needed, by one process after the other: only one has them whole at a time.
    """

    def __init__(
        self,
        inner: TextEncoder,
        group: dist.ProcessGroup,
        device: torch.device | None = None,
        *,
        key: str = "parallel.tensor",
    ) -> None:
        super().__init__(inner, device or torch.device("cpu"))
        assert isinstance(inner, T5Encoder)
        self._group, self._is_split = group, False
        check_sizes(inner.name, group.size(), key=key, **inner.sizes())

    def to(self, device: torch.device | str) -> Self:
        self.device = torch.device(device)
        if self._is_split:
            self.inner.to(self.device)
        return self

    def encode(self, captions: Sequence[str]) -> TextStates:
        """Encodes each distinct caption of the group once; returns the states of this process's captions."""
        self._split()
        asked: list[Any] = [None] * self._group.size()
        dist.all_gather_object(asked, list(captions), group=self._group)
        different = list(dict.fromkeys(caption for part in asked for caption in part))
        states = self.inner.encode(different)
        positions = {caption: index for index, caption in enumerate(different)}
        own = torch.tensor([positions[caption] for caption in captions], device=states.tokens_BKD.device)
        return TextStates(*(tensor[own] for tensor in vars(states).values()))

    def load(self) -> Any:
        self._split()
        return self.inner.load()

    def _split(self) -> None:
        if self._is_split:
            return
        index, degree = self._group.rank(), self._group.size()
        for turn in range(degree):
            if turn == index:
                model = self.inner.to("cpu").load()
                assert model is not None
                split_layers(model, index, degree, self._group)
            dist.all_reduce(torch.zeros(1), group=self._group)
        self.inner.to(self.device)
        self._is_split = True


def can_split(encoder: TextEncoder) -> bool:
    """Whether an encoder's layers can be split; others are small, and every process has them whole."""
    return isinstance(encoder, T5Encoder)


def find_group(name: dist.GroupName) -> dist.ProcessGroup:
    """The process group of a sequence group."""
    return _resolve_process_group(name)


def check_sizes(name: str, degree: int, *, num_heads: int, feed_forward: int, key: str) -> None:
    """ConfigError when so many processes cannot have equally many heads and columns."""
    for what, count in (("attention heads", num_heads), ("inner columns", feed_forward)):
        if count % degree:
            fitting = [few for few in range(1, num_heads + 1) if num_heads % few == 0 and feed_forward % few == 0]
            raise ConfigError(
                f"{key} is {degree}, but the text encoder {name} has {count} {what}, and {count} / {degree} leaves "
                f"{count % degree}; set it to one of {', '.join(map(str, fitting))}"
            )


@torch.no_grad()
def split_layers(model: Any, index: int, degree: int, group: dist.ProcessGroup) -> None:
    """Keep part `index` of `degree` of a T5; it then gives what the whole gives, if all of `group` run together."""

    def add_up(module: nn.Module, inputs: Any, output: Tensor) -> Tensor:
        return sum_over(output, group)

    for module in list(model.modules()):
        if all(hasattr(module, name) for name in ("q", "k", "v", "o", "n_heads")):
            attention: Any = module
            for name in ("q", "k", "v"):
                _keep(getattr(attention, name), 0, index, degree)
            _keep(attention.o, 1, index, degree)
            if attention.has_relative_attention_bias:
                _keep(attention.relative_attention_bias, 1, index, degree)
            attention.n_heads //= degree
            attention.inner_dim //= degree
            module.o.register_forward_hook(add_up)
        elif hasattr(module, "wo"):
            for name, child in module.named_children():
                if isinstance(child, nn.Linear):
                    _keep(child, 1 if name == "wo" else 0, index, degree)
            module.wo.register_forward_hook(add_up)
    words = SplitWords(model.get_input_embeddings().weight, index, degree, group)
    model.set_input_embeddings(words)
    model.encoder.set_input_embeddings(words)


def sum_over(part: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The sum over the group in the dtype of the parts, made in float32."""
    total = part.float().contiguous()
    # `float` gives the tensor itself where it is float32 already, which the sum may overwrite: nobody else has it.
    dist.all_reduce(total, group=group)
    return total.to(part.dtype)


def _keep(layer: Any, dim: int, index: int, degree: int) -> None:
    """A part of a weight along `dim`, in memory of its own, so that the whole can be freed."""
    part = layer.weight.chunk(degree, dim)[index].clone()
    layer.weight = nn.Parameter(part, requires_grad=False)


class SplitWords(nn.Module):
    """Some rows of a table of word vectors; other words are zero here, and another process has them."""

    def __init__(self, whole: Tensor, index: int, degree: int, group: dist.ProcessGroup) -> None:
        super().__init__()
        self._first, self._end = (len(whole) * part // degree for part in (index, index + 1))
        self._group = group
        self.weight = nn.Parameter(whole[self._first : self._end].clone(), requires_grad=False)

    def forward(self, ids_BK: Tensor) -> Tensor:
        is_own_BK = (ids_BK >= self._first) & (ids_BK < self._end)
        rows_BK = (ids_BK - self._first).clamp(0, len(self.weight) - 1)
        words_BKD = F.embedding(rows_BK, self.weight).masked_fill(~is_own_BK[..., None], 0.0)
        return sum_over(words_BKD, self._group)
