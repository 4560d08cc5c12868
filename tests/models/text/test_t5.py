"""T5 and mT5 against transformers called directly, and the options by which published systems differ."""

from __future__ import annotations

import io
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import MT5EncoderModel, T5Config, T5EncoderModel, T5Model

from frameloom.core.errors import CheckpointError, ConfigError, MissingExtra
from frameloom.models.text import transformers_folder as loading
from frameloom.models.text.base import TextEncoder, build_text_encoder
from frameloom.models.text.t5 import T5Encoder
from frameloom.models.text.transformers_folder import quiet_transformers
from tests.models.text import tiny
from tests.models.text.tiny import CAPTIONS

LENGTH = 24
SHORT, LONG = "a red circle", " ".join(CAPTIONS)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.make_t5(tmp_path_factory.mktemp("t5"))


def build(folder: Path, *, name: str = "t5", max_length: int = LENGTH, **options: Any) -> TextEncoder:
    return build_text_encoder(name, max_length=max_length, path=folder, options={"precision": "fp32", **options})


def direct(folder: Path, captions: list[str], *, masked: bool, kind: Any = T5EncoderModel) -> torch.Tensor:
    """The states as the originals compute them: padding to the full length, with or without the mask."""
    with quiet_transformers():
        model = kind.from_pretrained(folder).eval()
    ids = tiny.t5_tokenizer()(captions, padding="max_length", truncation=True, max_length=LENGTH, return_tensors="pt")
    with torch.no_grad():
        return model(ids["input_ids"], attention_mask=ids["attention_mask"] if masked else None).last_hidden_state


def test_states_are_those_of_the_model_that_attends_to_its_padding(folder: Path) -> None:
    states = build(folder).encode([SHORT, "", LONG])
    wanted = direct(folder, [SHORT, "", LONG], masked=False)
    torch.testing.assert_close(states.tokens_BKD, wanted, atol=1e-6, rtol=1e-5)
    assert states.mask_BK.all() and states.tokens_BKD.dtype == torch.float32
    assert not torch.allclose(wanted, direct(folder, [SHORT, "", LONG], masked=True), atol=1e-2)


def test_masked_padding_is_zero_and_does_not_touch_the_caption(folder: Path) -> None:
    states = build(folder, padding="mask").encode([SHORT, ""])
    wanted = direct(folder, [SHORT, ""], masked=True)
    torch.testing.assert_close(states.tokens_BKD[states.mask_BK], wanted[states.mask_BK], atol=1e-6, rtol=1e-5)
    assert not states.tokens_BKD[~states.mask_BK].any() and states.mask_BK[1].sum() == 1
    longer = build(folder, padding="mask", max_length=LENGTH + 8).encode([SHORT, ""])
    torch.testing.assert_close(longer.tokens_BKD[:, :LENGTH], states.tokens_BKD, atol=1e-5, rtol=1e-4)
    attended = [build(folder, max_length=length).encode([SHORT]).tokens_BKD[0, 0] for length in (LENGTH, LENGTH + 8)]
    assert not torch.allclose(*attended, atol=1e-3)


def test_mt5_masks_unless_told_otherwise(tmp_path: Path) -> None:
    folder = tiny.make_t5(tmp_path / "mt5", kind="mt5")
    states = build(folder, name="mt5").encode([SHORT])
    wanted = direct(folder, [SHORT], masked=True, kind=MT5EncoderModel)
    torch.testing.assert_close(states.tokens_BKD[states.mask_BK], wanted[states.mask_BK], atol=1e-6, rtol=1e-5)
    assert not states.mask_BK.all() and build(folder, name="mt5", padding="attend").encode([SHORT]).mask_BK.all()


def test_tokens_are_cut_before_the_end_token_and_padded_after_it(folder: Path) -> None:
    ids, mask = build(folder).tokenize([LONG, ""])
    assert ids.shape == mask.shape == (2, LENGTH)
    assert ids[0, -1] == 1 and mask[0].all()
    assert ids[1].tolist() == [1] + [0] * (LENGTH - 1) and mask[1].tolist() == [True] + [False] * (LENGTH - 1)


def test_there_is_no_pooled_vector(folder: Path) -> None:
    encoder = build(folder)
    assert (encoder.width, encoder.pooled_width) == (16, 0)
    assert encoder.encode([SHORT, ""]).pooled_BD.shape == (2, 0)
    with pytest.raises(ConfigError, match="t5: has last token states only"):
        build(folder, pooled="pooler")


def test_null_prompt_is_encoded_or_zeros(folder: Path) -> None:
    encoded, zeros = (build(folder, null=null).encode(["", SHORT]).tokens_BKD for null in ("encode", "zeros"))
    assert encoded[0].abs().min(-1).values.max() > 0 and not zeros[0].any()
    assert torch.equal(encoded[1], zeros[1])


def test_captions_are_cleaned_when_asked_and_the_null_prompt_never(folder: Path) -> None:
    messy, clean = "A Red+circle <b>moves</b>", "a red circle moves"
    plain, cleaned, listed = (build(folder, cleaning=how) for how in ("off", "once", "list"))
    assert torch.equal(cleaned.encode([messy]).tokens_BKD, plain.encode([clean]).tokens_BKD)
    assert not torch.equal(plain.encode([messy]).tokens_BKD, plain.encode([clean]).tokens_BKD)
    assert torch.equal(listed.encode([""]).tokens_BKD, plain.encode([""]).tokens_BKD)


def test_precision_is_that_of_the_computation_only(folder: Path) -> None:
    exact = build(folder).encode(CAPTIONS).tokens_BKD
    for precision, tolerance in (("bf16", 0.1), ("fp16", 0.01)):
        states = build(folder, precision=precision).encode(CAPTIONS).tokens_BKD
        assert states.dtype == torch.float32 and 0 < (states - exact).abs().max() < tolerance


def test_default_precision_of_t5_is_bf16(folder: Path) -> None:
    encoder = build_text_encoder("t5", max_length=LENGTH, path=folder)
    assert isinstance(encoder, T5Encoder) and encoder.options.precision == "bf16"
    assert torch.equal(encoder.encode([SHORT]).tokens_BKD, build(folder, precision="bf16").encode([SHORT]).tokens_BKD)


def test_autocast_of_the_caller_changes_nothing(folder: Path) -> None:
    encoder = build(folder)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside = encoder.encode([SHORT]).tokens_BKD
    assert torch.equal(inside, encoder.encode([SHORT]).tokens_BKD) and not inside.requires_grad


def test_many_captions_are_encoded_in_order_and_do_not_touch_each_other(folder: Path) -> None:
    encoder = build(folder)
    captions = (CAPTIONS * 3)[: T5Encoder.batch_size + 2]
    states = encoder.encode(captions)
    alone = encoder.encode(captions[-1:])
    torch.testing.assert_close(states.tokens_BKD[-1], alone.tokens_BKD[0], atol=1e-5, rtol=1e-4)
    assert not torch.allclose(states.tokens_BKD[0], alone.tokens_BKD[0], atol=1e-2)
    for wrong in ([], SHORT):
        with pytest.raises(ValueError, match="list of at least one caption"):
            encoder.encode(wrong)


@pytest.mark.parametrize("max_length", [1, 513])
def test_a_length_outside_of_the_training_is_refused(folder: Path, max_length: int) -> None:
    with pytest.raises(ConfigError, match="choose 2 to 512"):
        build(folder, max_length=max_length)


def test_the_decoder_half_is_left_aside(tmp_path: Path, folder: Path) -> None:
    config = T5Config.from_pretrained(folder)
    config.num_decoder_layers = 1
    whole = tiny.draw(lambda: T5Model(config), 3)
    tiny.save(whole, tmp_path)
    tiny.t5_tokenizer().save_pretrained(tmp_path)
    encoder = build(tmp_path)
    ids, _ = encoder.tokenize([SHORT])
    with torch.no_grad():
        wanted = whole.encoder(ids).last_hidden_state
    torch.testing.assert_close(encoder.encode([SHORT]).tokens_BKD, wanted, atol=1e-6, rtol=1e-5)


@pytest.fixture(scope="module")
def spiece(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With the tokenizer file of the published T5 folders."""
    pieces = pytest.importorskip("sentencepiece")
    folder = tiny.make_t5(tmp_path_factory.mktemp("spiece"))
    (folder / "tokenizer.json").unlink()
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "T5Tokenizer", "extra_ids": 0}')
    model = io.BytesIO()
    pieces.SentencePieceTrainer.train(
        sentence_iterator=iter(CAPTIONS * 5),
        model_writer=model,
        vocab_size=110,
        model_type="unigram",
        hard_vocab_limit=False,
        minloglevel=2,
        **{"pad_id": 0, "eos_id": 1, "unk_id": 2, "bos_id": -1},
    )
    (folder / "spiece.model").write_bytes(model.getvalue())
    return folder


def test_ids_of_a_sentencepiece_file_are_those_of_the_library_and_an_end(spiece: Path) -> None:
    import sentencepiece

    pieces = sentencepiece.SentencePieceProcessor(model_file=str(spiece / "spiece.model"))
    odd = ["  two   spaces ", "Unknown ΩΨ letters", "ﬁne ligature", "tab\tand\nline", "中文 words", "24 FPS, 5!"]
    captions = [*CAPTIONS, *odd, ""]
    ids, mask = build(spiece, max_length=128).tokenize(captions)
    for row, caption in enumerate(captions):
        assert ids[row][mask[row]].tolist() == [*pieces.encode(caption), 1], caption
    assert len({tuple(row) for row in ids.tolist()}) == len(captions)


def test_without_sentencepiece_the_extra_is_named(spiece: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loading, "find_spec", lambda name: None if name == "sentencepiece" else find_spec(name))
    with pytest.raises(MissingExtra, match=r"spiece\.model.*frameloom\[t5\]"):
        build(spiece).encode([SHORT])


def test_a_tokenizer_without_an_end_token_is_refused(tmp_path: Path, folder: Path) -> None:
    broken = tiny.copy(folder, tmp_path / "t5")
    text = (broken / "tokenizer.json").read_text()
    assert "TemplateProcessing" in text
    tokenizer = tiny.t5_tokenizer()
    tokenizer.backend_tokenizer.post_processor = None
    tokenizer.save_pretrained(broken)
    with pytest.raises(CheckpointError, match="does not close a text with an end token"):
        build(broken).encode([SHORT])
