"""What every autoencoder promises. A test class inherits VAEContract and names its family.

Shape letters: B batch, C channels, F frames, H height, W width.
"""

from __future__ import annotations

import dataclasses
import json
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from frameloom.core.errors import CheckpointError, DataError
from frameloom.core.random import stream
from frameloom.models.registry import get_vae
from frameloom.models.spec import VAESpec
from frameloom.models.vaes.base import EncodePolicy, VideoVAE
from tests.parity.weights import draw_recipe_weight


def draw_clip(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=stream(0, "clip", *shape), dtype=dtype).clamp(-1, 1)


def make_waves(frames: int, side_px: int, batch: int = 2) -> Tensor:
    """Smooth moving colours, as (B, 3, F, H, W)."""
    f, y, x = torch.meshgrid(
        torch.arange(frames) * 0.2, torch.linspace(-1, 1, side_px), torch.linspace(-1, 1, side_px), indexing="ij"
    )
    clips = [
        torch.stack([torch.sin(3 * x + f + b), torch.cos(2 * y - f), torch.sin(4 * x * y + b)]) for b in range(batch)
    ]
    return 0.8 * torch.stack(clips)


def _count_saved(kept: list[int], tensor: Tensor) -> Tensor:
    kept.append(tensor.numel())
    return tensor


class VAEContract:
    """Set `family_name`; `narrow` overrides make the tiny size smaller still; `clip` is (F, H, W) of a test clip that
    has at least two latent frames; `wrong_frames` cannot be encoded; `learn_px` is the side of the clips it learns,
    in `num_steps` at `learn_rate`."""

    family_name: ClassVar[str]
    narrow: ClassVar[dict[str, Any]] = {}
    clip: ClassVar[tuple[int, int, int]]
    wrong_frames: ClassVar[int] = 0
    learn_px: ClassVar[int] = 16
    num_steps: ClassVar[int] = 8
    learn_rate: ClassVar[float] = 3e-3

    @property
    def family(self) -> VAESpec:
        return get_vae(self.family_name)

    def configure(self, **overrides: Any) -> Any:
        return dataclasses.replace(self.family.sizes["tiny"], **(self.narrow | overrides))

    def draw_weights(self, model: VideoVAE, seed: int = 0) -> dict[str, Tensor]:
        return {
            key: torch.from_numpy(draw_recipe_weight(key, tuple(tensor.shape), seed=seed))
            for key, tensor in model.state_dict().items()
        }

    def build(self, *, seed: int = 0, **overrides: Any) -> VideoVAE:
        model = self.family.build(self.configure(**overrides)).eval()
        self.family.load_original(model, self.draw_weights(model, seed))
        return model

    def draw_pixels(self, batch: int = 2) -> Tensor:
        return draw_clip(batch, 3, *self.clip)

    def test_shapes_follow_from_the_strides(self):
        model = self.build()
        pixels = self.draw_pixels()
        with torch.no_grad():
            moments = model.encode(pixels)
            decoded = model.decode(moments.mode())
        frames, height, width = self.clip
        _, stride_h, stride_w = model.strides
        cells = (model.latent_frames(frames), height // stride_h, width // stride_w)
        assert cells[0] >= 2
        assert moments.mean_BCFHW.shape == moments.logvar_BCFHW.shape == (2, model.latent_channels, *cells)
        assert decoded.shape == pixels.shape
        assert model.strides == self.configure().strides

    def test_an_image_is_one_latent_frame_and_comes_back_as_one(self):
        model = self.build()
        pixels = self.draw_pixels()[:, :, :1]
        with torch.no_grad():
            latent = model.encode(pixels).mode()
            assert latent.shape[2] == model.latent_frames(1) == 1
            assert model.decode(latent).shape == pixels.shape

    def test_gradients_reach_every_parameter(self):
        model = self.build().train()
        pixels = self.draw_pixels(1)
        moments = model.encode(pixels)
        decoded = model.decode(moments.sample(torch.ones_like(moments.mean_BCFHW)))
        ((decoded - pixels).square().sum() + moments.kl_B().sum()).backward()
        trained = [(name, value) for name, value in model.named_parameters() if value.requires_grad]
        without = [name for name, value in trained if value.grad is None or not value.grad.any()]
        assert not without

    def test_recompute_changes_neither_results_nor_gradients(self):
        pixels = self.draw_pixels(1)
        found, saved = [], []
        for recompute in (False, True):
            model = self.build()
            assert model.blocks()
            for block in model.blocks() if recompute else ():
                block.forward = partial(checkpoint, block.forward, use_reentrant=False, preserve_rng_state=False)
            kept: list[int] = []
            with torch.autograd.graph.saved_tensors_hooks(partial(_count_saved, kept), lambda tensor: tensor):
                decoded = model.decode(model.encode(pixels).mode())
            decoded.square().sum().backward()
            found.append((decoded.detach(), [value.grad for value in model.parameters()]))
            saved.append(len(kept))
        assert saved[1] < saved[0] / 2
        assert torch.equal(found[0][0], found[1][0])
        assert all(a is b or torch.equal(a, b) for a, b in zip(found[0][1], found[1][1], strict=True))

    def test_half_precision_is_close_to_full(self):
        model = self.build()
        pixels = self.draw_pixels(1)
        with torch.no_grad():
            latent = model.encode(pixels).mode()
            decoded = model.decode(latent)
            model.bfloat16()
            pairs = [
                (model.encode(pixels.bfloat16()).mode(), latent),
                (model.decode(latent.bfloat16()), decoded),
            ]
        for half, full in pairs:
            assert half.dtype == torch.bfloat16
            gap = (half.float() - full).abs().mean() / full.abs().mean()
            assert 0 < gap < 0.1

    def test_clips_one_by_one_equal_the_batch(self):
        pixels = self.draw_pixels(3).double()
        together, apart = (self.build().double().use(EncodePolicy(clips=clips)) for clips in (None, 1))
        seen = []
        apart.encoder.register_forward_pre_hook(lambda _, args: seen.append(len(args[0])))
        with torch.no_grad():
            whole, parts = together.encode(pixels).mode(), apart.encode(pixels).mode()
            assert torch.allclose(whole, parts, atol=1e-10)
            assert torch.allclose(together.decode(whole), apart.decode(whole), atol=1e-10)
            assert not torch.allclose(whole[0], whole[1], atol=1e-2)
        assert set(seen) <= {1, pixels.shape[2]}

    def test_a_few_steps_lower_the_reconstruction_error(self):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            model = self.family.build(self.family.sizes["tiny"]).train()
        pixels = make_waves(self.clip[0], self.learn_px)
        optimizer = torch.optim.Adam(model.parameters(), lr=self.learn_rate)
        errors = []
        for _ in range(self.num_steps):
            error = (model.decode(model.encode(pixels).mode()) - pixels).abs().mean()
            optimizer.zero_grad()
            error.backward()
            optimizer.step()
            errors.append(error.item())
        assert errors[-1] < 0.9 * errors[0]

    def test_saved_weights_come_back_bit_for_bit(self, tmp_path: Path):
        model, other = self.build(seed=1), self.build(seed=2)
        save_file(model.state_dict(), tmp_path / "model.safetensors")
        assert not all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))
        self.family.load_original(other, load_file(tmp_path / "model.safetensors"))
        assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))

    @pytest.mark.parametrize("change", ["missing", "unexpected", "of another shape"])
    def test_weights_that_do_not_fit_are_refused_by_name(self, change: str):
        model = self.build()
        weights = dict(model.state_dict())
        key = sorted(weights)[0]
        if change == "missing":
            del weights[key]
        elif change == "unexpected":
            key = "extra.weight"
            weights[key] = torch.zeros(1)
        else:
            weights[key] = torch.zeros(7, 7, 7)
        with pytest.raises(CheckpointError) as error:
            self.family.load_original(model, weights)
        assert f"1 {change}" in str(error.value) and key in str(error.value)

    def test_a_model_built_on_the_meta_device_works_after_loading(self):
        with torch.device("meta"):
            model = self.family.build(self.configure(scale=(0.5,)))
        self.family.load_original(model, self.draw_weights(model))
        pixels = self.draw_pixels(1)
        with torch.no_grad():
            assert torch.equal(model.eval().encode(pixels).mode(), self.build().encode(pixels).mode())
        ones = torch.ones(1, model.latent_channels, 1, 1, 1)
        assert torch.equal(model.normalize(ones), ones / 2)
        assert torch.equal(model.denormalize(model.normalize(ones)), ones)

    def test_a_run_on_the_meta_device_tells_shapes(self):
        with torch.device("meta"):
            model = self.family.build(self.configure())
            pixels = torch.empty(1, 3, *self.clip)
        assert model.decode(model.encode(pixels).mode()).shape == pixels.shape

    def test_autocast_gives_half_precision_and_gradients(self):
        model = self.build()
        with torch.autocast("cpu", torch.bfloat16):
            decoded = model.decode(model.encode(self.draw_pixels(1)).mode())
        assert decoded.dtype == torch.bfloat16
        decoded.float().square().sum().backward()
        assert all(value.grad is None or value.grad.isfinite().all() for value in model.parameters())

    def test_clips_that_do_not_fit_are_refused_with_the_rule(self):
        model = self.build()
        frames, height, width = self.clip
        with pytest.raises(DataError, match=rf"{self.wrong_frames} frames.*multiple of {model.strides[0]}"):
            model.encode(torch.zeros(1, 3, self.wrong_frames, height, width))
        with pytest.raises(DataError, match=f"multiples of {model.strides[1]}"):
            model.encode(torch.zeros(1, 3, frames, height + 4, width))
        with pytest.raises(DataError, match="expected \\(batch, 3"):
            model.encode(torch.zeros(1, 4, frames, height, width))

    def test_every_named_size_survives_json(self):
        for config in self.family.sizes.values():
            assert self.family.config_class(**json.loads(json.dumps(dataclasses.asdict(config)))) == config
        assert len(set(self.family.sizes.values())) == len(self.family.sizes)
