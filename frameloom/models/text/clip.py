"""CLIP text encoders: ViT-L/14 and OpenCLIP ViT-bigG/14, with long texts in windows.

Shape letters: B batch, K text tokens, M windows of a text, P tokens of a window, D width.

SDXL takes the penultimate states of both, without the final norm, and the projected vector of bigG; Open-Sora 2 takes
the pooled vector of CLIP-L. Nothing hides the padding, which is the end token for CLIP-L and id 0 for bigG. With `pad`
"tokenizer", bigG gets the ids that diffusers gives it, which differ where a caption has a "!".

Texts longer than the position table are read in windows: start, body and padding, end are laid out over
(table - 2) * windows + 2 tokens; each window gets a start and an end of its own and is encoded alone. Joined, the inner
starts and ends are left out. The pooled vector is the mean over windows, weighted by how far each one is filled.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from frameloom.core.errors import CheckpointError, ConfigError
from frameloom.models.text.base import TextOptions, choose_options
from frameloom.models.text.config import MAX_WINDOWS
from frameloom.models.text.pretrained import PretrainedEncoder
from frameloom.models.text.transformers_folder import EncoderFile, find_folder, quiet_transformers

DEFAULTS = {
    "clip_l": TextOptions(pad="end", layer="penultimate", pooled="pooler"),
    "clip_bigg": TextOptions(pad="zero", layer="penultimate", pooled="projected"),
}
SUBFOLDERS = {"clip_l": ("text_encoder",), "clip_bigg": ("text_encoder_2",)}
# Old configurations name 2 as the end token; transformers then pools at the largest id, which is the end token.
_LEGACY_END = 2


class CLIPEncoder(PretrainedEncoder):
    load_advice = "if it has no text projection, set pooled to 'pooler'; else copy the folder again"

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        config = self._config
        self.width, self.window = int(config.hidden_size), int(config.max_position_embeddings)
        widths = {"none": 0, "pooler": config.hidden_size, "projected": config.projection_dim}
        self.pooled_width = int(widths[self.options.pooled])
        self.num_windows = _count_windows(self.max_length, self.window, self.name)
        self.spellings: list[tuple[str, str]] = []
        """new words as a caption has them, and as the tokens that they are made of"""
        if self.num_windows > 1 and self.options.padding == "mask":
            raise ConfigError(
                f"text encoder {self.name}: padding 'mask' and texts of several windows exclude each other"
            )

    @property
    def model_class(self) -> Any:
        from transformers import CLIPTextModel, CLIPTextModelWithProjection

        return CLIPTextModelWithProjection if self.options.pooled == "projected" else CLIPTextModel

    def load_tokenizer(self) -> Any:
        tokenizer = super().load_tokenizer()
        return free_first_word(tokenizer) if self.options.pad == "zero" else tokenizer

    def tokenize(self, captions: Sequence[str]) -> tuple[Tensor, Tensor]:
        end = self.tokenizer.eos_token_id
        if self._config.eos_token_id not in (_LEGACY_END, end):
            raise CheckpointError(
                f"{self._folder.weights}: its end token is {self._config.eos_token_id}, that of the tokenizer in "
                f"{self._folder.tokenizer} is {end}; put the tokenizer of this model there"
            )
        for name, tokens in self.spellings:
            captions = [caption.replace(name, tokens) for caption in captions]
        ids_BK, mask_BK = super().tokenize(captions)
        if self.num_windows > 1:
            # Over several windows the end token stands at the very end, after the padding.
            last_B = mask_BK.sum(1, keepdim=True) - 1
            ids_BK.scatter_(1, last_B, self.pad_id)
            mask_BK.scatter_(1, last_B, False)
            ids_BK[:, -1], mask_BK[:, -1] = end, True
        return ids_BK, mask_BK

    def unload(self) -> None:
        """Not while it has new words, whose vectors live in the model."""
        if not self.spellings:
            super().unload()

    def run(self, model: nn.Module, ids_BK: Tensor, mask_BK: Tensor | None) -> tuple[Tensor, Tensor]:
        if self.num_windows == 1:
            return self._run_window(model, ids_BK, mask_BK)
        ids_BMP = split_windows(ids_BK, self.window)
        tokens, pooled = self._run_window(model, ids_BMP.flatten(0, 1), None)
        tokens_BMPD, pooled_BMD = (part.reshape(*ids_BMP.shape[:2], *part.shape[1:]) for part in (tokens, pooled))
        return join_windows(tokens_BMPD), weigh_windows(pooled_BMD, ids_BMP, self.pad_id)

    def _run_window(self, model: nn.Module, ids_BK: Tensor, mask_BK: Tensor | None) -> tuple[Tensor, Tensor]:
        output = model(input_ids=ids_BK, attention_mask=mask_BK, output_hidden_states=True)
        tokens_BKD = output.last_hidden_state if self.options.layer == "last" else output.hidden_states[-2]
        if self.options.pooled == "none":
            return tokens_BKD, tokens_BKD.new_zeros(len(ids_BK), 0)
        return tokens_BKD, output.text_embeds if self.options.pooled == "projected" else output.pooler_output


def free_first_word(tokenizer: Any) -> Any:
    """A tokenizer for which id 0, "!", is a word and nothing else.

    Published tokenizers of bigG name "!" as the pad, so that transformers takes every "!" of a caption for padding. The
    model was trained with OpenCLIP's tokenizer, where "!" is a word and 0 only what follows the end.
    """
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast

    kind: Any = PreTrainedTokenizerFast
    words = json.loads(tokenizer.backend_tokenizer.to_str())
    words["added_tokens"] = [token for token in words["added_tokens"] if token["id"] != 0]
    rebuilt = Tokenizer.from_str(json.dumps(words))
    return kind(tokenizer_object=rebuilt, eos_token=tokenizer.eos_token)


def split_windows(ids_BK: Tensor, window: int) -> Tensor:
    """Windows that overlap by two tokens, each with the start and the end of the whole text at its ends."""
    ids_BMP = ids_BK.unfold(1, window, window - 2).clone()
    ids_BMP[..., 0], ids_BMP[..., -1] = ids_BK[:, :1], ids_BK[:, -1:]
    return ids_BMP


def join_windows(tokens_BMPD: Tensor) -> Tensor:
    """The states of all windows as one text: the first start, every body, the last end."""
    body_BKD = tokens_BMPD[:, :, 1:-1].flatten(1, 2)
    return torch.cat([tokens_BMPD[:, 0, :1], body_BKD, tokens_BMPD[:, -1, -1:]], dim=1)


def weigh_windows(pooled_BMD: Tensor, ids_BMP: Tensor, pad_id: int) -> Tensor:
    """The mean over windows, each weighted by the place of its first pad; a full one counts as its body is long."""
    is_pad_BMP = ids_BMP[..., :-1] == pad_id
    body = is_pad_BMP.shape[-1] - 1
    weight_BM = torch.where(is_pad_BMP.any(-1), is_pad_BMP.int().argmax(-1), body).to(pooled_BMD.dtype)
    return (pooled_BMD * (weight_BM / weight_BM.sum(1, keepdim=True))[..., None]).sum(1)


def _count_windows(max_length: int, window: int, encoder: str) -> int:
    if 3 <= max_length <= window:
        return 1
    body = window - 2
    num_windows, rest = divmod(max_length - 2, body)
    if max_length > window and not rest and num_windows <= MAX_WINDOWS:
        return num_windows
    longer = f"{body}n+2 for longer texts, up to {body * MAX_WINDOWS + 2}"
    raise ConfigError(f"text encoder {encoder}: max_length is {max_length}; choose 3 to {window} tokens, or {longer}")


def build(name: str, max_length: int, path: Path | None, given: Mapping[str, Any]) -> CLIPEncoder:
    options = choose_options(DEFAULTS[name], given, encoder=name)
    folder = find_folder(path, encoder=name, kinds={"clip_text_model", "clip"}, subfolders=SUBFOLDERS[name])
    with quiet_transformers():
        from transformers import CLIPTextConfig

        # Of a folder that holds both halves, this is the configuration of the text half.
        config = CLIPTextConfig.from_pretrained(folder.weights, local_files_only=True)
    return CLIPEncoder(name, folder, config, options, max_length)


def build_from_file(name: str, max_length: int, file: EncoderFile, given: Mapping[str, Any]) -> CLIPEncoder:
    """An encoder whose weights lie in a single file, beside those of other parts."""
    options = choose_options(DEFAULTS[name], given, encoder=name)
    with quiet_transformers():
        from transformers import CLIPTextConfig

        config = CLIPTextConfig.from_dict(dict(file.config))
    return CLIPEncoder(name, file, config, options, max_length)


_ALIKE: dict[str, Any] = {
    "model_type": "clip_text_model",
    "vocab_size": 49408,
    "max_position_embeddings": 77,
    "layer_norm_eps": 1e-5,
    "attention_dropout": 0.0,
    "bos_token_id": 0,
    # As published: an old mark that stands for the largest id, see `_LEGACY_END`.
    "eos_token_id": 2,
    "pad_token_id": 1,
}
CLIP_CONFIGS: dict[str, dict[str, Any]] = {
    "clip_l": {
        "architectures": ["CLIPTextModel"],
        **_ALIKE,
        "hidden_act": "quick_gelu",
        "hidden_size": 768,
        "intermediate_size": 3072,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
        "projection_dim": 768,
    },
    "clip_bigg": {
        "architectures": ["CLIPTextModelWithProjection"],
        **_ALIKE,
        "hidden_act": "gelu",
        "hidden_size": 1280,
        "intermediate_size": 5120,
        "num_hidden_layers": 32,
        "num_attention_heads": 20,
        "projection_dim": 1280,
    },
}
