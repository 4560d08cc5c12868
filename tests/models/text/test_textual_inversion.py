"""New words of CLIP encoders: old words keep their states, the end token is pooled, and diffusers sees the same."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import CLIPTextModel, CLIPTextModelWithProjection, CLIPTokenizer

from frameloom.core.errors import ConfigError
from frameloom.models.text.base import build_text_encoder
from frameloom.models.text.clip import CLIPEncoder
from frameloom.models.text.textual_inversion import add_word, name_tokens, start_vectors
from tests.models.text.tiny import POSITIONS, make_sdxl

WORD = "<toy>"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_sdxl(tmp_path_factory.mktemp("words"))


def build(folder: Path, name: str = "clip_bigg") -> CLIPEncoder:
    encoder = build_text_encoder(name, max_length=POSITIONS, path=folder)
    assert isinstance(encoder, CLIPEncoder)
    return encoder


def vectors(encoder: CLIPEncoder, count: int, seed: int = 0) -> nn.Parameter:
    drawn = torch.randn(count, encoder.width, generator=torch.Generator().manual_seed(seed))
    return nn.Parameter(drawn)


@pytest.mark.parametrize("name", ["clip_l", "clip_bigg"])
def test_captions_without_the_word_are_as_before(folder, name):
    before, encoder = build(folder, name), build(folder, name)
    add_word(encoder, WORD, vectors(encoder, 2))
    captions = ["a red circle moves left!", ""]
    old, new = before.encode(captions), encoder.encode(captions)
    assert torch.equal(old.tokens_BKD, new.tokens_BKD) and torch.equal(old.pooled_BD, new.pooled_BD)
    told, other = encoder.encode(["a red <toy>"]), encoder.encode(["a red circle"])
    assert not torch.allclose(told.tokens_BKD, other.tokens_BKD, atol=1e-3)


def test_a_word_of_several_vectors_is_as_many_tokens(folder):
    encoder = build(folder)
    add_word(encoder, WORD, vectors(encoder, 3))
    first = encoder.tokenizer.convert_tokens_to_ids(WORD)
    ids, _ = encoder.tokenize(["a <toy> moves"])
    assert ids[0, 2:5].tolist() == [first, first + 1, first + 2]
    assert name_tokens(WORD, 3) == ["<toy>", "<toy>_1", "<toy>_2"]


@pytest.mark.parametrize("name", ["clip_l", "clip_bigg"])
def test_states_are_those_of_diffusers_with_the_same_vectors(folder, name):
    """As `load_textual_inversion` puts them into a grown table."""
    from diffusers.loaders import TextualInversionLoaderMixin

    class Pipeline(TextualInversionLoaderMixin):
        """Words are all that is loaded; the rest says that nothing is offloaded."""

        components: dict[str, object] = {}  # noqa: RUF012
        hf_device_map = None

    number = "" if name == "clip_l" else "_2"
    kind = CLIPTextModel if name == "clip_l" else CLIPTextModelWithProjection
    model = kind.from_pretrained(folder / f"text_encoder{number}")
    tokenizer = CLIPTokenizer.from_pretrained(folder / f"tokenizer{number}")
    encoder = build(folder, name)
    word = vectors(encoder, 2)
    Pipeline().load_textual_inversion(word.detach(), token=WORD, text_encoder=model, tokenizer=tokenizer)
    add_word(encoder, WORD, word)
    text = "a red <toy> moves left"
    grown = tokenizer("a red <toy> <toy>_1 moves left", padding="max_length", max_length=POSITIONS, return_tensors="pt")
    ids, _ = encoder.tokenize([text])
    assert ids.tolist() == grown["input_ids"].tolist()
    with torch.no_grad():
        output = model(grown["input_ids"], output_hidden_states=True)
    states = encoder.encode([text])
    assert torch.allclose(states.tokens_BKD, output.hidden_states[-2], atol=1e-5)
    pooled = output[0] if name == "clip_bigg" else output.pooler_output
    assert torch.allclose(states.pooled_BD, pooled, atol=1e-5)


def test_an_old_configuration_pools_at_the_end_and_not_at_the_new_word(tmp_path):
    import json

    folder = make_sdxl(tmp_path / "old")
    path = folder / "text_encoder_2" / "config.json"
    config = json.loads(path.read_text())
    right = build(folder)
    path.write_text(json.dumps({**config, "eos_token_id": 2}))
    old = build(folder)
    for encoder in (right, old):
        add_word(encoder, WORD, vectors(encoder, 1))
    caption = ["a <toy> moves left"]
    assert torch.equal(old.encode(caption).pooled_BD, right.encode(caption).pooled_BD)


def test_only_the_vectors_learn_and_only_when_asked(folder):
    encoder = build(folder)
    word = vectors(encoder, 1)
    add_word(encoder, WORD, word)
    assert not encoder.encode(["a <toy>"]).tokens_BKD.requires_grad
    encoder.learns = True
    encoder.encode(["a <toy>"]).tokens_BKD.sum().backward()
    assert word.grad is not None and word.grad.abs().sum() > 0
    assert all(part.grad is None for name, part in encoder.load().named_parameters() if "vectors" not in name)
    with torch.no_grad():
        assert not encoder.encode(["a <toy>"]).tokens_BKD.requires_grad


def test_vectors_start_from_a_word_or_from_small_numbers(folder):
    encoder = build(folder)
    generator = torch.Generator().manual_seed(0)
    start = start_vectors(encoder, 2, initializer="red", generator=generator)
    (index,) = encoder.tokenizer("red", add_special_tokens=False)["input_ids"]
    table = encoder.load().text_model.embeddings.token_embedding.weight
    assert torch.equal(start[0], table[index]) and torch.equal(start[0], start[1])
    fresh = start_vectors(encoder, 2, initializer=None, generator=generator)
    assert 0 < fresh.abs().max() < 0.1 and not torch.equal(fresh[0], fresh[1])
    with pytest.raises(ConfigError, match="tokens; choose a word that is one token"):
        start_vectors(encoder, 1, initializer="red circle", generator=generator)


def test_words_that_exist_or_do_not_fit_are_refused(folder):
    encoder = build(folder)
    with pytest.raises(ConfigError, match="knows already"):
        add_word(encoder, "red</w>", vectors(encoder, 1))
    with pytest.raises(ConfigError, match=r"expected \[number, 24\]"):
        add_word(encoder, WORD, nn.Parameter(torch.zeros(1, 5)))
