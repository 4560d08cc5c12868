import torch

from frameloom.core.random import stream
from frameloom.models.text.base import TextStates
from frameloom.models.text.scaling import TextScaling, measure_scaling


def make_states(count: int = 200) -> TextStates:
    """A loud feature, a quiet one that is a fiftieth of it times ten, and noise far below both."""
    draw = stream(0, "captions")
    loud, quiet = (torch.randint(0, 2, (count, 1), generator=draw) * 2.0 - 1 for _ in range(2))
    noise = torch.randn(count, 8, generator=draw) * 0.001
    pooled = torch.cat([loud, 0.2 * quiet], dim=1) @ torch.eye(2, 8) + noise + 3.0
    mask = torch.zeros(count, 5, dtype=torch.bool)
    mask[:, :3] = True
    tokens = torch.where(mask[..., None], 0.4 * torch.randn(count, 5, 8, generator=draw) + 2, 0.0)
    return TextStates(tokens, mask, pooled)


def test_quiet_words_become_as_loud_as_others_and_noise_stays_out():
    states = make_states()
    scaled = measure_scaling(states).apply(states)
    spread = scaled.pooled_BD.std(0, correction=0)
    loud = torch.full((2,), (8 / 2) ** 0.5)  # two of eight directions are kept and share the spread of eight
    assert torch.allclose(spread[:2], loud, atol=0.04) and float(spread[2:].max()) < 0.2
    assert torch.allclose(scaled.pooled_BD.mean(0), torch.zeros(8), atol=1e-4)


def test_tokens_get_one_scale_and_padding_stays_zero():
    states = make_states()
    scaled = measure_scaling(states).apply(states)
    real = scaled.tokens_BKD[states.mask_BK]
    assert torch.allclose(real.mean(0), torch.zeros(8), atol=1e-4) and torch.allclose(
        real.std(0), torch.ones(8), atol=0.01
    )
    assert not scaled.tokens_BKD[~states.mask_BK].any()


def test_a_checkpoint_brings_the_same_scaling_back():
    states = make_states()
    scaling = measure_scaling(states)
    again = TextScaling.from_tensors(scaling.tensors())
    assert again is not None and torch.equal(again.apply(states).pooled_BD, scaling.apply(states).pooled_BD)
    assert TextScaling.from_tensors(None) is None
