"""Modulation, the embedding of noise levels, sinusoids, MLPs, and frames in the batch."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from frameloom.core.random import stream
from frameloom.models.denoisers.base import initialize
from frameloom.models.layers.mlp import FeedForward
from frameloom.models.layers.modulation import ModulationTable, SharedModulation, modulate, norm_samples
from frameloom.models.layers.patches import fold_frames, unfold_frames
from frameloom.models.layers.positions import embed_index, embed_position


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=stream(seed, "test modulation"))


def difference(one: Tensor, other: Tensor) -> float:
    return float((one - other).detach().abs().max())


def test_modulation_follows_a_norm_without_parameters() -> None:
    x, shift, scale = draw(2, 5, 8, seed=0), draw(2, 1, 8, seed=1), draw(2, 1, 8, seed=2)
    expected = F.layer_norm(x, (8,), eps=1e-6) * (1 + scale) + shift
    assert difference(modulate(x, shift, scale), expected) < 1e-5
    assert difference(modulate(x, shift, scale, eps=1.0), expected) > 1e-2


def test_one_embedding_serves_all_blocks() -> None:
    shared = SharedModulation(8)
    vectors, embedded = shared(torch.tensor([3.0, 700.0]))
    assert vectors.shape == (2, 6, 8) and embedded.shape == (2, 8)
    assert difference(vectors[0], vectors[1]) > 1e-3
    assert set(shared.state_dict()) == {
        *(f"emb.timestep_embedder.linear_{layer}.{leaf}" for layer in (1, 2) for leaf in ("weight", "bias")),
        "linear.weight",
        "linear.bias",
    }


def test_a_table_starts_with_vectors_of_unit_length() -> None:
    module = ModulationTable(6, 400)
    initialize(module, stream(0, "test table"))
    assert module.scale_shift_table.norm(dim=1).sub(1).abs().max() < 0.2


def test_noise_levels_have_cosines_first() -> None:
    sinusoids = embed_index(torch.tensor([3]), 256)[0]
    assert sinusoids[0] == torch.tensor(3.0).cos() and sinusoids[128] == torch.tensor(3.0).sin()
    assert torch.allclose(sinusoids[1], torch.tensor(3 * 10_000 ** (-1 / 128)).cos())
    assert embed_index(torch.tensor([3]), 7).shape == (1, 7) and embed_index(torch.tensor([3]), 7)[0, -1] == 0


def test_neighbouring_noise_levels_stay_apart() -> None:
    """In bfloat16 their indices would be one number; sinusoids are float32 whatever comes in."""
    late, later = embed_index(torch.tensor([998.0, 999.0]), 256)
    assert difference(late, later) > 0.1
    assert embed_index(torch.tensor([3]).bfloat16(), 256).dtype == torch.float32


def test_positions_have_sines_first() -> None:
    sinusoids = embed_position(torch.tensor([3.0]), 8)[0]
    angles = 3.0 * torch.tensor([1.0, 0.1, 0.01, 0.001])
    torch.testing.assert_close(sinusoids, torch.cat([angles.sin(), angles.cos()]))
    assert difference(sinusoids, torch.cat([angles.cos(), angles.sin()])) > 0.1


def test_an_mlp_has_the_published_names() -> None:
    mlp = FeedForward(4)
    assert set(mlp.state_dict()) == {"net.0.proj.weight", "net.0.proj.bias", "net.2.weight", "net.2.bias"}
    x = draw(2, 3, 4)
    first, last = mlp.net[0].get_submodule("proj"), mlp.net[2]
    assert isinstance(first, nn.Linear) and isinstance(last, nn.Linear)
    assert difference(mlp(x), last(F.gelu(first(x), approximate="tanh"))) < 1e-6
    assert difference(mlp(x), last(F.gelu(first(x)))) > 0


def test_frames_come_back_from_the_batch() -> None:
    clip = torch.arange(2 * 3 * 4 * 2 * 2.0).reshape(2, 3, 4, 2, 2)
    pictures = fold_frames(clip)
    assert pictures.shape == (8, 3, 2, 2)
    assert torch.equal(pictures[5], clip[1, :, 1])
    assert torch.equal(unfold_frames(pictures, 4), clip)
    assert not torch.equal(unfold_frames(pictures.flip(0), 4), clip)


@pytest.mark.parametrize("shape", [(1, 5, 8), (3, 5, 8), (2, 2048, 136)], ids=["one sample", "several", "large ones"])
def test_the_norm_of_samples_has_the_numbers_and_gradients_of_its_formula(shape: tuple[int, int, int]) -> None:
    batch, _, width = shape
    inputs = [draw(*shape, seed=0), draw(batch, 1, width, seed=1), draw(batch, 1, width, seed=2)]
    push = draw(*shape, seed=3)

    def formula(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return F.layer_norm(x, (width,), eps=1e-6) * weight + bias

    found = []
    for run, dtype in ((lambda *given: norm_samples(*given, 1e-6), torch.float32), (formula, torch.float64)):
        given = [part.to(dtype).requires_grad_() for part in inputs]
        made = run(*given)
        found.append([made.detach(), *torch.autograd.grad(made, given, push.to(dtype))])
    for ours, exact in zip(*found, strict=True):
        assert difference(ours, exact) <= 3e-6 * float(exact.abs().max())
    other = norm_samples(inputs[0], inputs[1], inputs[2] + 1e-2, 1e-6)
    assert difference(other, found[0][0]) > 5e-3


def test_vectors_of_another_precision_are_not_rounded() -> None:
    x, scale, shift = draw(1, 5, 8, seed=0).bfloat16(), draw(1, 1, 8, seed=1), draw(1, 1, 8, seed=2)
    assert norm_samples(x, 1 + scale, shift, 1e-6).dtype == torch.float32
