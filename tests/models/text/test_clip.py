"""CLIP-L and bigG against transformers called directly: layers, pooled vectors, padding and windows of long texts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import CLIPConfig, CLIPModel, CLIPTextModel, CLIPTextModelWithProjection

from frameloom.core.errors import CheckpointError, ConfigError
from frameloom.models.text.base import TextEncoder, build_text_encoder
from frameloom.models.text.clip import join_windows, split_windows, weigh_windows
from frameloom.models.text.transformers_folder import quiet_transformers
from tests.models.text import tiny
from tests.models.text.tiny import CAPTIONS, POSITIONS

SHORT, LONG = "a red circle", CAPTIONS[3]
BODY = POSITIONS - 2


@pytest.fixture(scope="module")
def sdxl(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.make_sdxl(tmp_path_factory.mktemp("sdxl"))


def build(name: str, folder: Path, *, max_length: int = POSITIONS, **options: Any) -> TextEncoder:
    return build_text_encoder(name, max_length=max_length, path=folder, options=options)


def load(kind: Any, folder: Path) -> Any:
    with quiet_transformers():
        return kind.from_pretrained(folder).eval()


@torch.no_grad()
def run(model: Any, ids: torch.Tensor) -> Any:
    return model(ids, output_hidden_states=True)


def test_both_encoders_of_a_pipeline_are_found_by_name(sdxl: Path) -> None:
    small, large = build("clip_l", sdxl), build("clip_bigg", sdxl)
    assert (small.width, small.pooled_width) == (16, 16)
    assert (large.width, large.pooled_width) == (24, 28)
    again = build("clip_l", sdxl / "text_encoder").encode([SHORT])
    assert torch.equal(again.tokens_BKD, small.encode([SHORT]).tokens_BKD)


def test_token_states_are_the_input_of_the_last_block_without_the_final_norm(sdxl: Path) -> None:
    encoder = build("clip_l", sdxl)
    ids, _ = encoder.tokenize([SHORT, LONG])
    model = load(CLIPTextModel, sdxl / "text_encoder")
    full = run(model, ids).last_hidden_state
    del model.encoder.layers[-1]
    states = encoder.encode([SHORT, LONG])
    wanted = run(model, ids).last_hidden_state  # of one block fewer, after the final norm
    with torch.no_grad():
        torch.testing.assert_close(model.final_layer_norm(states.tokens_BKD), wanted, atol=1e-5, rtol=1e-4)
    assert states.mask_BK.all() and not torch.allclose(states.tokens_BKD, wanted, atol=1e-2)
    last = build("clip_l", sdxl, layer="last").encode([SHORT, LONG]).tokens_BKD
    torch.testing.assert_close(last, full, atol=1e-5, rtol=1e-4)


def test_pooled_vector_is_the_state_of_the_end_token_or_its_projection(sdxl: Path) -> None:
    small, large = build("clip_l", sdxl), build("clip_bigg", sdxl)
    last = build("clip_l", sdxl, layer="last").encode([SHORT, ""]).tokens_BKD
    ends = small.tokenize([SHORT, ""])[1].sum(1) - 1
    torch.testing.assert_close(small.encode([SHORT, ""]).pooled_BD, last[[0, 1], ends], atol=1e-6, rtol=1e-5)
    model = load(CLIPTextModelWithProjection, sdxl / "text_encoder_2")
    with torch.no_grad():
        state = model.text_model(large.tokenize([SHORT])[0]).pooler_output
    projected = state @ model.text_projection.weight.T
    torch.testing.assert_close(large.encode([SHORT]).pooled_BD, projected, atol=1e-5, rtol=1e-4)
    plain = build("clip_bigg", sdxl, pooled="pooler")
    torch.testing.assert_close(plain.encode([SHORT]).pooled_BD, state, atol=1e-5, rtol=1e-4)
    assert build("clip_bigg", sdxl, pooled="none").encode([SHORT]).pooled_BD.shape == (1, 0)


def test_small_pads_with_the_end_and_large_with_zero(sdxl: Path) -> None:
    small, large = build("clip_l", sdxl), build("clip_bigg", sdxl)
    (short, long), mask = small.tokenize([SHORT, LONG])
    start, end, used = int(short[0]), int(short[-1]), int(mask[0].sum())
    assert short[used - 1 :].tolist() == [end] * (POSITIONS - used + 1)
    assert (int(long[0]), int(long[-1])) == (start, end) and end not in long[:-1]  # cut, and closed in the last slot
    zeros = large.tokenize([SHORT])[0][0]
    assert zeros[:used].tolist() == short[:used].tolist() and zeros[used:].tolist() == [0] * (POSITIONS - used)


def test_an_exclamation_mark_is_a_word_to_large_unless_its_tokenizer_decides(sdxl: Path) -> None:
    text = "a star! turns"
    small, large = build("clip_l", sdxl).tokenize([text]), build("clip_bigg", sdxl).tokenize([text])
    assert torch.equal(small[0][small[1]], large[0][large[1]]) and 0 not in large[0][large[1]]
    ids, mask = build("clip_bigg", sdxl, pad="tokenizer").tokenize([text])
    assert 0 in ids[mask] and not ids[~mask].any()


def test_masking_the_padding_changes_only_the_padding(sdxl: Path) -> None:
    attended, masked = (build("clip_l", sdxl, padding=padding).encode([SHORT]) for padding in ("attend", "mask"))
    used = masked.mask_BK[0]
    # Attention looks back only, so the words before the padding are the same.
    torch.testing.assert_close(masked.tokens_BKD[0, used], attended.tokens_BKD[0, used], atol=1e-5, rtol=1e-4)
    assert not masked.tokens_BKD[0, ~used].any() and attended.tokens_BKD[0, ~used].any()


class TestWindows:
    def test_long_text_is_laid_out_with_its_end_last(self, sdxl: Path) -> None:
        num_words = int(build("clip_bigg", sdxl, max_length=5 * BODY + 2).tokenize([LONG])[0].ne(0).sum()) - 2
        assert BODY < num_words < 5 * BODY
        ids, mask = build("clip_bigg", sdxl, max_length=5 * BODY + 2).tokenize([LONG])
        end = int(ids[0, -1])
        assert mask[0].tolist() == [True] * (num_words + 1) + [False] * (5 * BODY - num_words) + [True]
        assert not ids[0, num_words + 1 : -1].any() and end not in ids[0, :-1]
        cut, _ = build("clip_bigg", sdxl, max_length=2 * BODY + 2).tokenize([" ".join(CAPTIONS)])
        assert int(cut[0, -1]) == end and end not in cut[0, :-1] and 0 not in cut

    def test_each_window_is_encoded_alone(self, sdxl: Path) -> None:
        encoder = build("clip_l", sdxl, max_length=3 * BODY + 2)
        ids, states = encoder.tokenize([LONG, SHORT])[0], encoder.encode([LONG, SHORT])
        model = load(CLIPTextModel, sdxl / "text_encoder")
        parts = []
        for first in (0, BODY, 2 * BODY):
            window = torch.cat([ids[:, :1], ids[:, first + 1 : first + 1 + BODY], ids[:, -1:]], dim=1)
            parts.append(run(model, window).hidden_states[-2])
        wanted = torch.cat([parts[0][:, :-1], parts[1][:, 1:-1], parts[2][:, 1:]], dim=1)
        torch.testing.assert_close(states.tokens_BKD, wanted, atol=1e-5, rtol=1e-4)
        assert states.tokens_BKD.shape == (2, 3 * BODY + 2, 16) and states.mask_BK.all()

    def test_pooled_vector_weighs_windows_by_the_place_of_the_first_pad(self) -> None:
        # A start, eight words and padding in ten-token bodies: windows of 10, 6 and no words.
        ids = torch.tensor([[90, *range(1, 17), *[0] * 14, 91]])
        windows = split_windows(ids, POSITIONS)
        assert windows[0, :, 0].tolist() == [90] * 3 and windows[0, :, -1].tolist() == [91] * 3
        pooled = torch.eye(3)[None]
        # A full window weighs its ten words; the others, the index of their first pad: 7 and 1.
        torch.testing.assert_close(weigh_windows(pooled, windows, 0), torch.tensor([[10.0, 7.0, 1.0]]) / 18)

    def test_windows_join_to_the_text_they_were_cut_from(self) -> None:
        ids = torch.arange(2 * (4 * BODY + 2)).reshape(2, -1)
        windows = split_windows(ids, POSITIONS)
        assert windows.shape == (2, 4, POSITIONS)
        assert torch.equal(join_windows(windows[..., None])[..., 0], ids)

    @pytest.mark.parametrize("max_length", [2, POSITIONS + 1, 2 * BODY + 1, 9 * BODY + 2])
    def test_other_lengths_are_refused_with_the_rule(self, sdxl: Path, max_length: int) -> None:
        with pytest.raises(
            ConfigError, match=rf"choose 3 to 12 tokens, or 10n\+2 for longer texts, up to {8 * BODY + 2}"
        ):
            build("clip_l", sdxl, max_length=max_length)

    def test_masks_and_windows_exclude_each_other(self, sdxl: Path) -> None:
        with pytest.raises(ConfigError, match="exclude each other"):
            build("clip_l", sdxl, max_length=2 * BODY + 2, padding="mask")


def test_zeros_as_null_prompt_cover_the_pooled_vector(sdxl: Path) -> None:
    states = build("clip_bigg", sdxl, null="zeros").encode([SHORT, ""])
    assert states.tokens_BKD[0].any() and states.pooled_BD[0].any()
    assert not states.tokens_BKD[1].any() and not states.pooled_BD[1].any()
    assert build("clip_bigg", sdxl).encode([""]).pooled_BD.any()


def test_the_text_half_of_a_whole_clip_is_used(tmp_path: Path) -> None:
    text = tiny.clip_config(width=16).to_dict()
    vision = {"hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = CLIPConfig(text_config=text, vision_config={**vision, "image_size": 8, "patch_size": 4}, projection_dim=20)
    whole = tiny.draw(lambda: CLIPModel(config), 5)
    tiny.save(whole, tmp_path)
    tiny.write_clip_words(tmp_path, pad=tiny.END)
    for pooled in ("pooler", "projected"):
        encoder = build("clip_l", tmp_path, pooled=pooled)
        with torch.no_grad():
            state = whole.text_model(encoder.tokenize([SHORT])[0]).pooler_output
            wanted = whole.text_projection(state) if pooled == "projected" else state
        torch.testing.assert_close(encoder.encode([SHORT]).pooled_BD, wanted, atol=1e-5, rtol=1e-4)


def test_files_with_the_older_names_are_the_same_model(tmp_path: Path, sdxl: Path) -> None:
    old = tiny.copy(sdxl, tmp_path / "old")
    path = old / "text_encoder" / "model.safetensors"
    tensors = {f"text_model.{name}": tensor for name, tensor in load_file(path).items()}
    tensors["text_model.embeddings.position_ids"] = torch.arange(POSITIONS)[None]
    save_file(tensors, path, metadata={"format": "pt"})
    states = [build("clip_l", folder).encode([SHORT]).tokens_BKD for folder in (sdxl, old)]
    assert torch.equal(*states)


def test_a_missing_projection_is_never_drawn_at_random(sdxl: Path) -> None:
    encoder = build("clip_l", sdxl, pooled="projected")
    with pytest.raises(CheckpointError, match=r"text_encoder: .* no weights for text_projection\.weight; .*'pooler'"):
        encoder.encode([SHORT])


def test_a_tokenizer_with_another_end_is_refused(tmp_path: Path, sdxl: Path) -> None:
    other = tiny.copy(sdxl, tmp_path / "other")
    config = (other / "text_encoder" / "config.json").read_text()
    end = tiny.clip_config(width=16).eos_token_id
    (other / "text_encoder" / "config.json").write_text(
        config.replace(f'"eos_token_id": {end}', f'"eos_token_id": {end - 7}')
    )
    with pytest.raises(CheckpointError, match=f"its end token is {end - 7}, that of the tokenizer in .* is {end}"):
        build("clip_l", other).encode([SHORT])
