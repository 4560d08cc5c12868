"""Several text encoders as one: joined token states, the pooled vector, and dropout of each encoder by itself."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from frameloom.builders.text import TextPipeline, build_text
from frameloom.config.schema.models import ModelSection, TextEncoderSection, TextSection
from frameloom.core.errors import ConfigError
from frameloom.models.text.base import TextEncoder, TextStates, build_text_encoder
from frameloom.models.text.scaling import measure_scaling
from tests.models.text import tiny
from tests.models.text.tiny import CAPTIONS, POSITIONS

SHORT = "a red circle"


@pytest.fixture(scope="module")
def encoders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, TextEncoder]:
    folder = tmp_path_factory.mktemp("text")
    paths = {
        "t5": tiny.make_t5(folder / "t5"),
        **dict.fromkeys(("clip_l", "clip_bigg"), tiny.make_sdxl(folder / "sdxl")),
    }
    options = {"t5": {"padding": "mask", "precision": "fp32"}}
    return {
        name: build_text_encoder(name, max_length=POSITIONS, path=path, options=options.get(name))
        for name, path in paths.items()
    }


def pipeline(encoders: dict[str, TextEncoder], *names: str, join: str = "first") -> TextPipeline:
    return TextPipeline([encoders[name] for name in names], join=join)  # type: ignore[arg-type]


def is_equal(first: TextStates, second: TextStates) -> bool:
    pairs = zip(vars(first).values(), vars(second).values(), strict=True)
    return all(torch.equal(*pair) for pair in pairs)


def take(states: TextStates, row: int) -> TextStates:
    return TextStates(**{name: part[[row]] for name, part in vars(states).items()})


def test_concat_puts_states_side_by_side_and_takes_the_last_pooled_vector(encoders: dict[str, TextEncoder]) -> None:
    joined = pipeline(encoders, "clip_l", "clip_bigg", join="concat")
    assert (joined.width, joined.pooled_width, joined.max_length) == (16 + 24, 28, POSITIONS)
    states, small, large = (part.encode([SHORT, ""]) for part in (joined, encoders["clip_l"], encoders["clip_bigg"]))
    assert torch.equal(states.tokens_BKD, torch.cat([small.tokens_BKD, large.tokens_BKD], dim=-1))
    assert torch.equal(states.pooled_BD, large.pooled_BD) and states.mask_BK.all()


def test_first_takes_tokens_and_pooled_vector_from_different_encoders(encoders: dict[str, TextEncoder]) -> None:
    states = pipeline(encoders, "t5", "clip_l").encode([SHORT])
    words = encoders["t5"].encode([SHORT])
    assert torch.equal(states.tokens_BKD, words.tokens_BKD) and torch.equal(states.mask_BK, words.mask_BK)
    assert torch.equal(states.pooled_BD, encoders["clip_l"].encode([SHORT]).pooled_BD)


def test_pooled_vector_is_of_the_last_encoder_that_has_one(encoders: dict[str, TextEncoder]) -> None:
    states = pipeline(encoders, "clip_l", "t5").encode([SHORT])
    assert torch.equal(states.pooled_BD, encoders["clip_l"].encode([SHORT]).pooled_BD)
    alone = pipeline(encoders, "t5")
    assert alone.pooled_width == 0 and alone.encode([SHORT, ""]).pooled_BD.shape == (2, 0)


def test_concat_needs_equal_lengths(encoders: dict[str, TextEncoder], tmp_path: Path) -> None:
    longer = build_text_encoder("clip_l", max_length=2 * POSITIONS - 2, path=tiny.make_sdxl(tmp_path))
    with pytest.raises(ConfigError, match="max_length must be equal, but clip_l has 22, clip_bigg has 12"):
        TextPipeline([longer, encoders["clip_bigg"]], join="concat")
    assert TextPipeline([longer, encoders["clip_bigg"]]).max_length == 22


def test_fingerprint_follows_encoders_their_order_and_the_join(encoders: dict[str, TextEncoder]) -> None:
    names = ("clip_l", "clip_bigg")
    found = [
        pipeline(encoders, *names).fingerprint(),
        pipeline(encoders, *names, join="concat").fingerprint(),
        pipeline(encoders, *reversed(names)).fingerprint(),
        pipeline(encoders, "clip_l").fingerprint(),
    ]
    assert len(set(found)) == 4 and found[0] == pipeline(encoders, *names).fingerprint()


@pytest.mark.parametrize(("names", "join"), [(("t5", "clip_l"), "first"), (("clip_l", "clip_bigg"), "concat")])
def test_dropping_every_encoder_is_the_null_prompt(
    encoders: dict[str, TextEncoder], names: tuple[str, ...], join: str
) -> None:
    joined = pipeline(encoders, *names, join=join)
    states, null = joined.encode(CAPTIONS[:2]), joined.encode([""])
    dropped = joined.drop(states, null, torch.tensor([[True, True], [False, False]]))
    assert is_equal(take(dropped, 0), null) and is_equal(take(dropped, 1), take(states, 1))
    assert not is_equal(take(states, 0), null)


def test_encoders_are_dropped_each_by_itself(encoders: dict[str, TextEncoder]) -> None:
    joined = pipeline(encoders, "t5", "clip_l")
    states, null = joined.encode([SHORT, SHORT]), joined.encode([""])
    dropped = joined.drop(states, null, torch.tensor([[True, False], [False, True]]))
    assert torch.equal(dropped.tokens_BKD, torch.stack([null.tokens_BKD[0], states.tokens_BKD[1]]))
    assert torch.equal(dropped.mask_BK, torch.stack([null.mask_BK[0], states.mask_BK[1]]))
    assert torch.equal(dropped.pooled_BD, torch.stack([states.pooled_BD[0], null.pooled_BD[0]]))
    assert dropped.mask_BK[0].sum() < dropped.mask_BK[1].sum()


def test_dropping_one_of_two_joined_encoders_leaves_the_other(encoders: dict[str, TextEncoder]) -> None:
    joined = pipeline(encoders, "clip_l", "clip_bigg", join="concat")
    states, null = joined.encode([SHORT]), joined.encode([""])
    dropped = joined.drop(states, null, torch.tensor([[True, False]]))
    assert torch.equal(dropped.tokens_BKD[..., :16], null.tokens_BKD[..., :16])
    assert torch.equal(dropped.tokens_BKD[..., 16:], states.tokens_BKD[..., 16:])
    assert torch.equal(dropped.pooled_BD, states.pooled_BD)
    assert not torch.equal(dropped.tokens_BKD, states.tokens_BKD)


def test_text_without_pooled_vectors_can_be_rescaled(encoders: dict[str, TextEncoder]) -> None:
    states = pipeline(encoders, "t5").encode(CAPTIONS)
    scaled = measure_scaling(states).apply(states)
    words = scaled.tokens_BKD[states.mask_BK]
    assert scaled.pooled_BD.shape == (len(CAPTIONS), 0)
    torch.testing.assert_close(words.mean(0), torch.zeros(16), atol=1e-4, rtol=0)
    torch.testing.assert_close(words.std(0, correction=0), torch.ones(16), atol=1e-3, rtol=0)


def test_a_recipe_section_builds_the_pipeline(tmp_path: Path) -> None:
    folder = str(tiny.make_sdxl(tmp_path))
    items = [TextEncoderSection(name=name, max_length=POSITIONS, path=folder) for name in ("clip_l", "clip_bigg")]
    text = build_text(TextSection(encoders=tuple(items)), ModelSection(family="sdxl")).to("cpu")
    assert len(text.encoders) == 2 and text.encode([SHORT]).tokens_BKD.shape == (1, POSITIONS, 40)
    text.unload()
    assert text.encode([SHORT]).pooled_BD.shape == (1, 28)
