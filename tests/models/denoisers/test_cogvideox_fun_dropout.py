"""CogVideoX-Fun with dropout: where it drops, that runs repeat it to the bit, and its published files."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from frameloom.core.errors import ConfigError
from frameloom.core.random import stream
from frameloom.models.denoisers.cogvideox_fun.weights import read_config, write_published
from frameloom.models.layers.dropout import draw_kept, dropout_keys
from frameloom.models.registry import get_denoiser
from frameloom.models.text.base import TextStates
from frameloom.training.compiling import compile_blocks
from frameloom.training.memory.recompute import recompute_blocks
from tests.models.denoisers.test_cogvideox_fun import KINDS, ROTARY, build_awake

FAMILY = get_denoiser("cogvideox_fun")
SHARE = 0.25
DROPPING = replace(ROTARY, dropout=SHARE)
SEEDS = torch.from_numpy(np.array([11, 12], dtype=np.uint64).view(np.int64))


def predict(model: nn.Module, seeds: Tensor | None = SEEDS) -> Tensor:
    generator = stream(0, "test inputs")
    noisy = torch.randn(2, 4, 2, 4, 6, generator=generator)
    text = torch.randn(2, 5, 20, generator=generator)
    states = TextStates(text, torch.ones(2, 5, dtype=torch.bool), torch.zeros(2, 0))
    return model(
        noisy, torch.tensor([0.3, 0.9]), {**states.conditions(), **({} if seeds is None else {"dropout_seeds": seeds})}
    )


def gradients(change: Callable[[nn.Module], None] = lambda model: None) -> tuple[Tensor, list[Tensor]]:
    model = build_awake(DROPPING)
    change(model)
    prediction = predict(model)
    prediction.square().sum().backward()
    return prediction.detach(), [parameter.grad for parameter in model.parameters() if parameter.grad is not None]


@pytest.mark.parametrize("kind", KINDS)
def test_without_training_nothing_changes(kind: str) -> None:
    plain = build_awake(KINDS[kind]).eval()
    dropping = build_awake(replace(KINDS[kind], dropout=SHARE)).eval()
    with torch.no_grad():
        assert torch.equal(predict(dropping), predict(plain, None))
        assert torch.equal(predict(dropping.train(), None), predict(plain, None))
        assert not torch.equal(predict(dropping), predict(plain, None))


def test_a_seed_gives_a_result_and_another_seed_another() -> None:
    model = build_awake(DROPPING)
    other = torch.from_numpy(np.array([11, 13], dtype=np.uint64).view(np.int64))
    with torch.no_grad():
        first, again, changed = predict(model), predict(model), predict(model, other)
    assert torch.equal(first, again)
    assert torch.equal(first[0], changed[0])
    assert not torch.equal(first[1], changed[1])


class _Masks(nn.Module):
    """Stands in for a dropout of diffusers, with our mask."""

    def __init__(self, keys: Tensor, site: int) -> None:
        super().__init__()
        self.keys, self.site = keys, site
        self.num_calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.num_calls += 1
        return x * draw_kept(x, self.keys, self.site, SHARE) / (1 - SHARE)


def test_diffusers_with_our_masks_in_its_dropouts_trains_the_same() -> None:
    """In every one of its dropouts that drops: so there is none elsewhere. Its attention's own never do."""
    diffusers = pytest.importorskip("diffusers")
    model = build_awake(replace(DROPPING, use_rotary_positional_embeddings=False))
    settings = {key: value for key, value in write_published(model.config).items() if not key.startswith("_")}
    settings.pop("add_noise_in_inpaint_model")
    other = diffusers.CogVideoXTransformer3DModel(**settings).train()
    other.load_state_dict(model.state_dict())
    length = 5 + 4 * 2 * 3
    masks = {"embedding_dropout": _Masks(dropout_keys(SEEDS, 0, length), 0)}
    for part in range(1, model.config.num_layers + 1):
        for site, place in enumerate((1, 3)):
            masks[f"transformer_blocks.{part - 1}.ff.net.{place}"] = _Masks(dropout_keys(SEEDS, part, length), site)
    dropping = {name for name, module in other.named_modules() if isinstance(module, nn.Dropout) and module.p > 0}
    assert dropping == set(masks)
    for name, mask in masks.items():
        other.set_submodule(name, mask)
    noisy = torch.randn(2, 4, 4, 4, 6, generator=stream(0, "test noisy"))
    text, index = torch.randn(2, 5, 20, generator=stream(0, "test text")), torch.tensor([3, 999])
    with torch.no_grad():
        theirs = other(noisy, text, index, return_dict=False)[0]
        ours = model(noisy.transpose(1, 2), index / 1000, {"text": text, "dropout_seeds": SEEDS}).transpose(1, 2)
        plain = model(noisy.transpose(1, 2), index / 1000, {"text": text}).transpose(1, 2)
    assert all(mask.num_calls == 1 for mask in masks.values())
    assert (ours - theirs).abs().max() <= 1e-5
    assert (ours - plain).abs().max() > 0.01


def _recompute(model: nn.Module) -> None:
    recompute_blocks(model.blocks())


def test_recomputed_blocks_drop_what_they_dropped_before() -> None:
    torch.manual_seed(0)
    prediction, expected = gradients()
    torch.manual_seed(1)  # torch's own numbers have no say
    again, found = gradients(_recompute)
    assert torch.equal(prediction, again)
    assert len(found) == len(expected) > 0
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
def test_compiled_and_recomputed_blocks_drop_the_same() -> None:
    def change(model: nn.Module) -> None:
        compile_blocks(model.blocks(), backend="aot_eager")
        _recompute(model)

    torch.compiler.reset()
    prediction, expected = gradients()
    again, found = gradients(change)
    torch.compiler.reset()
    assert torch.allclose(prediction, again, atol=1e-4)
    for one, other in zip(found, expected, strict=True):
        assert (one - other).abs().max() <= 1e-4 * max(1.0, float(other.abs().max()))


@pytest.mark.parametrize("dropout", [-0.1, 1.5])
def test_a_share_that_is_none_is_refused(dropout: float) -> None:
    with pytest.raises(ConfigError, match=f"dropout is {dropout}; it must be from 0 to 1"):
        replace(ROTARY, dropout=dropout)


def test_a_published_config_with_dropout_is_read_and_written() -> None:
    published = write_published(ROTARY) | {"dropout": 0.1}
    config = read_config(published)
    assert config == replace(ROTARY, dropout=0.1)
    assert write_published(config) == published
