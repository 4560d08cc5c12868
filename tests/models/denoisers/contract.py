"""What every denoiser family promises. A family's test class inherits DenoiserContract and names its family.

Shape letters: B batch, C channels, F frames, H height, W width, K text tokens, D width.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from frameloom.core.errors import ConfigError
from frameloom.core.random import stream
from frameloom.models.denoisers import DenoiserFamily, get_family
from frameloom.models.text import TextStates

LATENT_CHANNELS = 4
TEXT_WIDTH = 24
POOLED_WIDTH = 12
TEXT_TOKENS = 5


class DenoiserContract:
    """Set `family_name` and at least one of `overrides`, which make the tiny size smaller still; `latent_sizes` are
    the (F, H, W) to run."""

    family_name: ClassVar[str]
    overrides: ClassVar[dict[str, Any]] = {}
    latent_sizes: ClassVar[list[tuple[int, int, int]]] = [(1, 4, 4), (3, 4, 8), (2, 8, 4)]

    @property
    def family(self) -> DenoiserFamily:
        return get_family(self.family_name)

    def configure(self, **overrides: Any) -> Any:
        return self.family.configure(
            "tiny",
            latent_channels=LATENT_CHANNELS,
            text_width=TEXT_WIDTH,
            pooled_width=POOLED_WIDTH,
            overrides=self.overrides | overrides,
        )

    def build(self, *, seed: int = 0, **overrides: Any) -> nn.Module:
        return self.family.build(self.configure(**overrides), generator=stream(seed, "contract weights"))

    def build_awake(self, *, seed: int = 0, **overrides: Any) -> nn.Module:
        """A model whose zero-initialised layers are shaken, so that every part has a say in the output."""
        model = self.build(seed=seed, **overrides)
        generator = stream(seed, "contract shake")
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.05 * torch.randn(parameter.shape, generator=generator))
        return model

    def make_inputs(self, size: tuple[int, int, int] = (2, 4, 4), batch: int = 2) -> tuple[Tensor, Tensor, TextStates]:
        generator = stream(0, "contract inputs", *size)

        def draw(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator)

        mask = torch.ones(batch, TEXT_TOKENS, dtype=torch.bool)
        text = TextStates(draw(batch, TEXT_TOKENS, TEXT_WIDTH), mask, draw(batch, POOLED_WIDTH))
        return draw(batch, LATENT_CHANNELS, *size), torch.rand(batch, generator=generator), text

    def test_prediction_has_the_shape_of_the_latent(self) -> None:
        model = self.build_awake()
        for size in self.latent_sizes:
            noisy, timestep, text = self.make_inputs(size)
            prediction = self.family.denoise(model, noisy, timestep, text)
            assert prediction.shape == noisy.shape
            assert prediction.dtype == noisy.dtype
            assert prediction.isfinite().all()

    def test_number_of_tokens_follows_the_patch(self) -> None:
        config = self.configure()
        for size in self.latent_sizes:
            frames, rows, columns = (side // patch for side, patch in zip(size, self.family.patch(config), strict=True))
            assert self.family.num_tokens(config, size) == frames * rows * columns

    def test_latent_timestep_and_text_all_change_the_prediction(self) -> None:
        model = self.build_awake()
        noisy, timestep, text = self.make_inputs()
        reference = self.family.denoise(model, noisy, timestep, text)
        assert torch.equal(reference, self.family.denoise(model, noisy, timestep, text))
        other_tokens = TextStates(text.tokens_BKD + 1, text.mask_BK, text.pooled_BD)
        other_pooled = TextStates(text.tokens_BKD, text.mask_BK, text.pooled_BD + 1)
        for inputs in (
            (noisy + 1, timestep, text),
            (noisy, timestep / 2, text),
            (noisy, timestep, other_tokens),
            (noisy, timestep, other_pooled),
        ):
            assert not torch.allclose(reference, self.family.denoise(model, *inputs), atol=1e-4)

    def test_samples_of_a_batch_do_not_see_each_other(self) -> None:
        model = self.build_awake()
        noisy, timestep, text = self.make_inputs(batch=2)
        together = self.family.denoise(model, noisy, timestep, text)
        first = TextStates(text.tokens_BKD[:1], text.mask_BK[:1], text.pooled_BD[:1])
        alone = self.family.denoise(model, noisy[:1], timestep[:1], first)
        torch.testing.assert_close(together[:1], alone, atol=1e-5, rtol=1e-5)
        assert not torch.allclose(together[1:], alone, atol=1e-3)

    def test_gradients_reach_every_trainable_parameter(self) -> None:
        model = self.build_awake()
        noisy, timestep, text = self.make_inputs()
        self.family.denoise(model, noisy, timestep, text).square().mean().backward()
        without = [
            name for name, p in model.named_parameters() if p.requires_grad and (p.grad is None or not p.grad.any())
        ]
        assert without == []

    def test_weights_survive_a_file(self, tmp_path: Path) -> None:
        model, other = self.build_awake(seed=0), self.build_awake(seed=1)
        noisy, timestep, text = self.make_inputs()
        expected = self.family.denoise(model, noisy, timestep, text)
        assert not torch.equal(expected, self.family.denoise(other, noisy, timestep, text))
        save_file(model.state_dict(), tmp_path / "model.safetensors")
        other.load_state_dict(load_file(tmp_path / "model.safetensors"))
        assert torch.equal(expected, self.family.denoise(other, noisy, timestep, text))

    def test_own_weights_load_like_published_ones(self) -> None:
        model, other = self.build_awake(seed=0), self.build_awake(seed=1)
        noisy, timestep, text = self.make_inputs()
        self.family.load_original(other, model.state_dict())
        expected = self.family.denoise(model, noisy, timestep, text)
        assert torch.equal(expected, self.family.denoise(other, noisy, timestep, text))

    def test_bf16_is_close_to_fp32(self) -> None:
        model = self.build_awake()
        noisy, timestep, text = self.make_inputs()
        expected = self.family.denoise(model, noisy, timestep, text)
        rounded = self.family.denoise(model.to(torch.bfloat16), noisy, timestep, text)
        assert rounded.dtype == noisy.dtype
        error = (rounded - expected).norm() / expected.norm()
        assert 0 < error < 0.03

    def test_autocast_is_close_to_fp32(self) -> None:
        model = self.build_awake()
        noisy, timestep, text = self.make_inputs()
        expected = self.family.denoise(model, noisy, timestep, text)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            rounded = self.family.denoise(model, noisy, timestep, text)
        error = (rounded - expected).norm() / expected.norm()
        assert 0 < error < 0.03

    def test_a_fixed_batch_can_be_learned(self) -> None:
        model = self.build()
        noisy, timestep, text = self.make_inputs(batch=4)
        target = torch.randn(noisy.shape, generator=stream(0, "contract target"))
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
        losses = []
        for _ in range(40):
            loss = (self.family.denoise(model, noisy, timestep, text) - target).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(float(loss.detach()))
        assert losses[-1] < 0.5 * losses[0]

    def test_fresh_weights_follow_from_the_generator_alone(self) -> None:
        state = torch.get_rng_state()
        first, again, other = (self.build(seed=seed).state_dict() for seed in (0, 0, 1))
        assert torch.equal(state, torch.get_rng_state())
        assert all(torch.equal(first[name], again[name]) for name in first)
        assert any(not torch.equal(first[name], other[name]) for name in first)

    def test_meta_model_has_the_same_parameters(self) -> None:
        with torch.device("meta"):
            shapes = {name: p.shape for name, p in self.family.build(self.configure()).named_parameters()}
        assert shapes == {name: p.shape for name, p in self.build().named_parameters()}

    def test_blocks_hold_most_parameters_once(self) -> None:
        model = self.build()
        owned = [id(p) for block in self.family.blocks(model) for p in block.parameters()]
        assert len(owned) == len(set(owned))
        total = sum(p.numel() for p in model.parameters())
        assert sum(p.numel() for block in self.family.blocks(model) for p in block.parameters()) > total / 2

    def test_blocks_can_be_recomputed(self) -> None:
        noisy, timestep, text = self.make_inputs()
        gradients = []
        for recompute in (False, True):
            model = self.build_awake()
            if recompute:
                for block in self.family.blocks(model):
                    block.forward = _checkpointed(block.forward)  # type: ignore[method-assign]
            self.family.denoise(model, noisy, timestep, text).square().mean().backward()
            gradients.append([p.grad for p in model.parameters()])
        assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))

    def test_unknown_setting_names_the_nearest(self) -> None:
        known = next(iter(self.overrides))
        with pytest.raises(ConfigError, match=f"did you mean '{known}'"):
            self.configure(**{f"{known}x": 1})

    def test_unknown_size_names_the_nearest(self) -> None:
        with pytest.raises(ConfigError, match="did you mean 'tiny'"):
            self.family.configure("tinyy", latent_channels=4, text_width=8, pooled_width=8, overrides={})


def _checkpointed(forward: Any) -> Any:
    def run(*args: Tensor) -> Any:
        return torch.utils.checkpoint.checkpoint(forward, *args, use_reentrant=False, preserve_rng_state=False)

    return run
