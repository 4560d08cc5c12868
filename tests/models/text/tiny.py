"""Real text encoders of a few thousand weights, and real tokenizers trained on a few captions, as folders on disk."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import (
    CLIPTextConfig,
    CLIPTextModel,
    CLIPTextModelWithProjection,
    CLIPTokenizer,
    MT5Config,
    MT5EncoderModel,
    PreTrainedTokenizerFast,
    T5Config,
    T5EncoderModel,
)

from frameloom.models.text.transformers_folder import quiet_transformers

CAPTIONS = [
    "a red circle moves left over a gray background",
    "a blue square moves up over a white background",
    "a green star turns slowly in front of the camera!",
    "two dogs run along the beach while the sun is setting",
    "a woman in a yellow coat walks past a window, 24 FPS, 5 motion score.",
    "the camera follows a small boat between high rocks",
]
START, END = "<|startoftext|>", "<|endoftext|>"
POSITIONS = 12


def draw(build: Callable[[], Any], seed: int) -> Any:
    """A model with weights of its own seed; the global generator is left as it was."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = build()
        for parameter in model.parameters():
            if parameter.ndim < 2:  # norms and biases start as ones and zeros, which would hide mistakes
                parameter.data += 0.2 * torch.randn(parameter.shape)
    return model.eval()


def save(model: Any, folder: Path, **options: Any) -> Path:
    with quiet_transformers():
        model.save_pretrained(folder, **options)
    return folder


def t5_tokenizer() -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.normalizer = normalizers.NFKC()
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    special = ["<pad>", "</s>", "<unk>"]
    trainer = trainers.UnigramTrainer(vocab_size=120, special_tokens=special, unk_token="<unk>", show_progress=False)
    tokenizer.train_from_iterator(CAPTIONS, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="</s>", unk_token="<unk>")


def make_t5(folder: Path, *, seed: int = 0, kind: str = "t5") -> Path:
    """A folder with everything in it, as google/t5-v1_1-xxl has."""
    sizes = {"vocab_size": 128, "d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_heads": 2}
    config, model = {"t5": (T5Config, T5EncoderModel), "mt5": (MT5Config, MT5EncoderModel)}[kind]
    save(draw(lambda: model(config(feed_forward_proj="gated-gelu", **sizes)), seed), folder)
    t5_tokenizer().save_pretrained(folder)
    return folder


def clip_words() -> tuple[dict[str, int], list[tuple[str, str]]]:
    """Vocabulary and merges as CLIP orders them: "!" is 0, the start and the end of a text are last."""
    tokenizer = Tokenizer(models.BPE(end_of_word_suffix="</w>"))
    tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    trainer = trainers.BpeTrainer(vocab_size=150, end_of_word_suffix="</w>", show_progress=False)
    tokenizer.train_from_iterator(CAPTIONS, trainer)
    words = sorted({*tokenizer.get_vocab(), *(f"{letter}</w>" for letter in "abcdefghijklmnopqrstuvwxyz")} - {"!"})
    vocab = {word: index for index, word in enumerate(["!", *words, START, END])}
    merges = json.loads(tokenizer.to_str())["model"]["merges"]
    return vocab, [tuple(pair) for pair in merges]


def write_clip_words(folder: Path, *, pad: str) -> None:
    """The files that published tokenizers consist of: no tokenizer.json."""
    vocab, merges = clip_words()
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "vocab.json").write_text(json.dumps(vocab))
    (folder / "merges.txt").write_text("#version: 0.2\n" + "\n".join(map(" ".join, merges)) + "\n")
    special = {"bos_token": START, "eos_token": END, "pad_token": pad, "unk_token": END}
    (folder / "special_tokens_map.json").write_text(json.dumps(special))
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "CLIPTokenizer", **special}))


def clip_config(*, width: int, layers: int = 3, act: str = "quick_gelu") -> CLIPTextConfig:
    size = len(clip_words()[0])
    return CLIPTextConfig(
        vocab_size=size,
        hidden_size=width,
        intermediate_size=2 * width,
        projection_dim=width + 4,
        num_hidden_layers=layers,
        num_attention_heads=2,
        max_position_embeddings=POSITIONS,
        hidden_act=act,
        initializer_range=0.3,
        bos_token_id=size - 2,
        eos_token_id=size - 1,
    )


def make_clip(folder: Path, *, width: int = 16, projected: bool = False, seed: int = 0) -> Path:
    """A folder with everything in it and a tokenizer.json."""
    model = CLIPTextModelWithProjection if projected else CLIPTextModel
    save(draw(lambda: model(clip_config(width=width)), seed), folder)
    vocab, merges = clip_words()
    CLIPTokenizer(vocab=vocab, merges=merges).save_pretrained(folder)
    return folder


def make_sdxl(folder: Path) -> Path:
    """The text half of a diffusers pipeline: two encoders and two tokenizers in folders of their own."""
    make_clip(folder / "text_encoder", width=16, seed=1)
    make_clip(folder / "text_encoder_2", width=24, projected=True, seed=2)
    for number, pad in (("", END), ("_2", "!")):
        for found in (folder / f"text_encoder{number}").glob("*token*"):
            found.unlink()
        write_clip_words(folder / f"tokenizer{number}", pad=pad)
    return folder


def copy(folder: Path, to: Path) -> Path:
    return Path(shutil.copytree(folder, to))
