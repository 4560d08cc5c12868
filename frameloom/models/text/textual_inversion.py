"""Textual inversion: new words for CLIP's text encoders, as trained vectors beside a frozen embedding table.

A word of several vectors is written as several tokens, `<toy> <toy>_1 <toy>_2`, wherever its first name stands.

Shape letters: B batch, K text tokens, V vectors of a word, D width.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

from frameloom.core.errors import ConfigError
from frameloom.models.text.clip import CLIPEncoder

# What published files call the vectors of an encoder.
FILE_KEYS = {"clip_l": "clip_l", "clip_bigg": "clip_g"}


class WordTable(nn.Module):
    """An embedding table with a few more rows; only these can learn."""

    def __init__(self, table: nn.Embedding, vectors_VD: nn.Parameter, first_id: int) -> None:
        super().__init__()
        self.table, self.vectors_VD, self.first_id = table, vectors_VD, first_id

    @property
    def weight(self) -> Tensor:
        """That of the old words: transformers looks here for the dtype."""
        return self.table.weight

    def forward(self, ids_BK: Tensor) -> Tensor:
        index_BK = ids_BK - self.first_id
        is_new_BK = (index_BK >= 0) & (index_BK < len(self.vectors_VD))
        old_BKD = self.table(ids_BK.masked_fill(is_new_BK, 0))
        new_BKD = self.vectors_VD[index_BK.clamp(0, len(self.vectors_VD) - 1)].to(old_BKD.dtype)
        return torch.where(is_new_BK[..., None], new_BKD, old_BKD)


def name_tokens(placeholder: str, num_vectors: int) -> list[str]:
    return [placeholder, *(f"{placeholder}_{number}" for number in range(1, num_vectors))]


def add_word(encoder: CLIPEncoder, placeholder: str, vectors_VD: nn.Parameter) -> None:
    """Add a word: its name to the tokenizer, its vectors to the embedding table, which shares and does not copy them.

    The weights must stay loaded from then on. Words are added one after another.
    """
    text: Any = find_text_model(encoder)
    if vectors_VD.ndim != 2 or vectors_VD.shape[1] != encoder.width:
        raise ConfigError(
            f"text encoder {encoder.name}: the word '{placeholder}' has vectors of shape {tuple(vectors_VD.shape)}, "
            f"expected [number, {encoder.width}]; it was made for another encoder"
        )
    tokens = name_tokens(placeholder, len(vectors_VD))
    known = encoder.tokenizer.get_vocab()
    if taken := [token for token in tokens if token in known]:
        raise ConfigError(
            f"text encoder {encoder.name}: '{taken[0]}' is a word that it knows already; choose another placeholder"
        )
    encoder.tokenizer.add_tokens(tokens)
    first_id = encoder.tokenizer.convert_tokens_to_ids(tokens[0])
    # Old configurations make transformers pool at the largest id, which would be the new word and not the end.
    text.eos_token_id = encoder.tokenizer.eos_token_id
    old = text.embeddings.token_embedding
    text.embeddings.token_embedding = WordTable(old, vectors_VD, first_id)
    encoder.spellings.append((placeholder, " ".join(tokens)))


def find_text_model(encoder: CLIPEncoder) -> nn.Module:
    """The part of the model with embeddings and pooling, whichever class of transformers holds it."""
    model = encoder.load()
    return cast(nn.Module, getattr(model, "text_model", model))


@torch.no_grad()
def start_vectors(
    encoder: CLIPEncoder, num_vectors: int, *, initializer: str | None, generator: torch.Generator
) -> Tensor:
    """Vectors [V, D] of a word that is to be learnt: those of a known word, or small random numbers."""
    if initializer is None:
        return 0.01 * torch.randn(num_vectors, encoder.width, generator=generator)
    ids = encoder.tokenizer(initializer, add_special_tokens=False)["input_ids"]
    if len(ids) != 1:
        raise ConfigError(
            f"inversion.initializer is '{initializer}', which {encoder.name} reads as {len(ids)} tokens; "
            "choose a word that is one token, or null for random numbers"
        )
    text: Any = find_text_model(encoder)
    device = text.embeddings.position_embedding.weight.device
    vector_1D: Tensor = text.embeddings.token_embedding(torch.tensor(ids, device=device))
    return vector_1D.float().cpu().expand(num_vectors, -1).clone()


def clip_encoders(encoders: Sequence[object]) -> dict[str, CLIPEncoder]:
    """Those that can learn words, by the key of their vectors in files."""
    return {FILE_KEYS[one.name]: one for one in encoders if isinstance(one, CLIPEncoder)}
