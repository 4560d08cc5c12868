"""The empty caption in place of some."""

from __future__ import annotations

import torch

from frameloom.models.text.base import TextStates, drop_text


def states(batch: int, length: int, value: float) -> TextStates:
    tokens = torch.full((batch, length, 3), value) + torch.arange(length)[:, None]
    return TextStates(tokens, torch.ones(batch, length, dtype=torch.bool), torch.full((batch, 2), value))


def test_only_the_drawn_samples_change_and_the_rest_is_as_it_was() -> None:
    text, null = states(3, 4, 10.0), states(1, 4, 0.0)
    dropped = drop_text(text, null, *[torch.tensor([[True], [False], [False]])] * 2)
    assert torch.equal(dropped.tokens_BKD[0], null.tokens_BKD[0])
    assert torch.equal(dropped.tokens_BKD[1:], text.tokens_BKD[1:])
    assert torch.equal(dropped.pooled_BD[:, 0], torch.tensor([0.0, 10.0, 10.0]))


def test_tokens_and_pooled_vector_can_be_drawn_apart() -> None:
    text, null = states(2, 4, 10.0), states(1, 4, 0.0)
    dropped = drop_text(text, null, torch.tensor([[True], [False]]), torch.tensor([[False], [True]]))
    assert torch.equal(dropped.pooled_BD[:, 0], torch.tensor([10.0, 0.0]))
    assert torch.equal(dropped.tokens_BKD[1], text.tokens_BKD[1])


def test_a_short_null_text_repeats_its_last_token_and_a_long_one_is_cut() -> None:
    text, everyone = states(1, 4, 10.0), torch.tensor([[True]])
    short = drop_text(text, states(1, 2, 0.0), everyone, everyone)
    assert short.tokens_BKD[0, :, 0].tolist() == [0.0, 1.0, 1.0, 1.0]
    assert drop_text(text, states(1, 6, 0.0), everyone, everyone).tokens_BKD.shape == text.tokens_BKD.shape
