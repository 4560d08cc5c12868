"""What every denoiser family promises. A family's test class inherits DenoiserContract and names its family.

Shape letters: B batch, C channels, F frames, H height, W width, K text tokens, D width.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from frameloom.core.errors import ConfigError
from frameloom.core.random import stream
from frameloom.models.denoisers.base import Conditions
from frameloom.models.layers.attention import attention
from frameloom.models.registry import get_denoiser
from frameloom.models.spec import DenoiserSpec
from frameloom.models.text.base import TextStates
from frameloom.training.compiling import compile_blocks
from frameloom.training.memory.recompute import recompute_blocks
from tests.models.denoisers.bucket_sizes import list_shapes

LATENT_CHANNELS = 4
TEXT_WIDTH = 24
POOLED_WIDTH = 12
TEXT_TOKENS = 5


class DenoiserContract:
    """Set `family_name`, at least one of `overrides`, which make the tiny size smaller still, and what differs below.

    latent_sizes   (F, H, W) to run, `default_size` among the usual ones; it must let every parameter learn
    longest_clip   frames of the longest clip that buckets may have
    uses_pooled    whether the pooled text vector has a say
    takes          conditions that this model has an input for
    rule_cases     a latent (F, H, W) that breaks a rule, and words of the rule in the error
    """

    family_name: ClassVar[str]
    overrides: ClassVar[dict[str, Any]] = {}
    latent_sizes: ClassVar[list[tuple[int, int, int]]] = [(1, 4, 4), (3, 4, 8), (2, 8, 4)]
    default_size: ClassVar[tuple[int, int, int]] = (2, 4, 4)
    longest_clip: ClassVar[int] = 9
    uses_pooled: ClassVar[bool] = True
    takes: ClassVar[tuple[str, ...]] = ()
    rule_cases: ClassVar[list[tuple[tuple[int, int, int], str]]] = [
        ((2, 5, 4), r"5x4 cells.*multiples of 2"),
        ((1, 4, 7), r"4x7 cells.*multiples of 2"),
    ]

    @property
    def family(self) -> DenoiserSpec:
        return get_denoiser(self.family_name)

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

    def give(self, noisy_BCFHW: Tensor) -> Conditions:
        """What the model is always told besides text."""
        return {}

    def denoise(self, model: nn.Module, noisy_BCFHW: Tensor, timestep_B: Tensor, text: TextStates) -> Tensor:
        return model(noisy_BCFHW, timestep_B, {**text.conditions(), **self.give(noisy_BCFHW)})

    def make_inputs(
        self, size: tuple[int, int, int] | None = None, batch: int = 2
    ) -> tuple[Tensor, Tensor, TextStates]:
        size = size or self.default_size
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
            prediction = self.denoise(model, noisy, timestep, text)
            assert prediction.shape == noisy.shape
            assert prediction.dtype == noisy.dtype
            assert prediction.isfinite().all()

    def test_number_of_tokens_follows_the_patch(self) -> None:
        config = self.configure()
        for size in self.latent_sizes:
            frames, rows, columns = (side // patch for side, patch in zip(size, config.patch, strict=True))
            assert config.num_tokens(size) == frames * rows * columns

    def test_latent_timestep_and_text_all_change_the_prediction(self) -> None:
        model = self.build_awake()
        noisy, timestep, text = self.make_inputs()
        reference = self.denoise(model, noisy, timestep, text)
        assert torch.equal(reference, self.denoise(model, noisy, timestep, text))
        other_tokens = TextStates(text.tokens_BKD + 1, text.mask_BK, text.pooled_BD)
        other_pooled = TextStates(text.tokens_BKD, text.mask_BK, text.pooled_BD + 1)
        for inputs in ((noisy + 1, timestep, text), (noisy, timestep / 2, text), (noisy, timestep, other_tokens)):
            assert not torch.allclose(reference, self.denoise(model, *inputs), atol=1e-4)
        changed = self.denoise(model, noisy, timestep, other_pooled)
        if self.uses_pooled:
            assert not torch.allclose(reference, changed, atol=1e-4)
        else:
            assert torch.equal(reference, changed)

    def test_samples_of_a_batch_do_not_see_each_other(self) -> None:
        model = self.build_awake()
        noisy, timestep, text = self.make_inputs(batch=2)
        together = self.denoise(model, noisy, timestep, text)
        first = TextStates(text.tokens_BKD[:1], text.mask_BK[:1], text.pooled_BD[:1])
        alone = self.denoise(model, noisy[:1], timestep[:1], first)
        torch.testing.assert_close(together[:1], alone, atol=1e-5, rtol=1e-5)
        assert not torch.allclose(together[1:], alone, atol=1e-3)

    @pytest.mark.parametrize("precision", ["fp32", "autocast"])
    def test_gradients_reach_every_trainable_parameter(self, precision: str) -> None:
        model = self.build_awake()
        noisy, timestep, text = self.make_inputs()
        with torch.autocast("cpu", torch.bfloat16, enabled=precision == "autocast"):
            loss = self.denoise(model, noisy, timestep, text).square().mean()
        loss.backward()
        gradients = {name: p.grad for name, p in model.named_parameters() if p.requires_grad}
        assert [name for name, gradient in gradients.items() if gradient is None or not gradient.any()] == []
        assert all(gradient.isfinite().all() for gradient in gradients.values() if gradient is not None)

    def test_weights_survive_a_file(self, tmp_path: Path) -> None:
        model, other = self.build_awake(seed=0), self.build_awake(seed=1)
        noisy, timestep, text = self.make_inputs()
        expected = self.denoise(model, noisy, timestep, text)
        assert not torch.equal(expected, self.denoise(other, noisy, timestep, text))
        save_file(model.state_dict(), tmp_path / "model.safetensors")
        other.load_state_dict(load_file(tmp_path / "model.safetensors"))
        assert torch.equal(expected, self.denoise(other, noisy, timestep, text))

    def test_own_weights_load_like_published_ones(self) -> None:
        model, other = self.build_awake(seed=0), self.build_awake(seed=1)
        noisy, timestep, text = self.make_inputs()
        self.family.load_original(other, model.state_dict())
        expected = self.denoise(model, noisy, timestep, text)
        assert torch.equal(expected, self.denoise(other, noisy, timestep, text))

    def test_bf16_is_close_to_fp32(self) -> None:
        model = self.build_awake()
        noisy, timestep, text = self.make_inputs()
        expected = self.denoise(model, noisy, timestep, text)
        rounded = self.denoise(model.to(torch.bfloat16), noisy, timestep, text)
        assert rounded.dtype == noisy.dtype
        error = (rounded - expected).norm() / expected.norm()
        assert 0 < error < 0.03

    def test_autocast_is_close_to_fp32(self) -> None:
        model = self.build_awake()
        noisy, timestep, text = self.make_inputs()
        expected = self.denoise(model, noisy, timestep, text)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            rounded = self.denoise(model, noisy, timestep, text)
        error = (rounded - expected).norm() / expected.norm()
        assert 0 < error < 0.03

    def test_a_fixed_batch_can_be_learned(self) -> None:
        model = self.build()
        noisy, timestep, text = self.make_inputs(batch=4)
        target = torch.randn(noisy.shape, generator=stream(0, "contract target"))
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
        losses = []
        for _ in range(40):
            loss = (self.denoise(model, noisy, timestep, text) - target).square().mean()
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
        owned = [id(p) for block in model.blocks() for p in block.parameters()]
        assert len(owned) == len(set(owned))
        total = sum(p.numel() for p in model.parameters())
        assert sum(p.numel() for block in model.blocks() for p in block.parameters()) > total / 2

    def test_recomputed_blocks_keep_less_and_change_nothing(self) -> None:
        noisy, timestep, text = self.make_inputs()
        gradients, num_bytes, num_calls = [], [], []
        for recompute in (False, True):
            model = self.build_awake()
            blocks = model.blocks()
            calls = [_count_calls(next(block.children())) for block in blocks]
            if recompute:
                recompute_blocks(blocks)
            with SavedBytes(model) as saved:
                loss = self.denoise(model, noisy, timestep, text).square().mean()
            loss.backward()
            gradients.append([p.grad for p in model.parameters()])
            num_bytes.append(saved.total)
            num_calls.append([len(call) for call in calls])
        assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))
        assert num_bytes[1] < 0.8 * num_bytes[0]
        assert num_calls[1] == [2 * count for count in num_calls[0]] and all(num_calls[0])

    def test_blocks_compile_as_one_graph(self) -> None:
        """A graph break inside a block is an error here."""
        model = self.build_awake()
        noisy, timestep, text = self.make_inputs()
        graphs: list[Any] = []

        def keep(graph: torch.fx.GraphModule, inputs: Any) -> Callable[..., Any]:
            graphs.append(graph)
            return graph.forward

        torch.compiler.reset()
        with torch.no_grad():
            expected = self.denoise(model, noisy, timestep, text)
            compile_blocks(model.blocks(), backend=keep)
            compiled = self.denoise(model, noisy, timestep, text)
        torch.compiler.reset()
        assert 0 < len(graphs) <= len(model.blocks())
        torch.testing.assert_close(compiled, expected, atol=1e-6, rtol=1e-5)

    def test_tokens_lie_in_one_piece(self) -> None:
        """What blocks are given: they add to it, and would keep another layout to the end."""
        model = self.build_awake()
        given: list[Tensor] = []

        def keep(block: Any, args: tuple[Any, ...], options: dict[str, Any]) -> None:
            given.extend(value for value in (*args, *options.values()) if isinstance(value, Tensor) and value.ndim > 2)

        for block in model.blocks():
            block.register_forward_pre_hook(keep, with_kwargs=True)
        _, height, width = self.default_size
        for size in (self.default_size, (1, height, width)):
            with torch.no_grad():
                self.denoise(model, *self.make_inputs(size))
        assert given and all(value.is_contiguous() for value in given)

    def test_all_attention_goes_through_one_door(self, monkeypatch: pytest.MonkeyPatch) -> None:
        callers: list[str] = []
        real = torch.nn.functional.scaled_dot_product_attention

        def watch(*args: Any, **options: Any) -> Tensor:
            callers.append(sys._getframe(1).f_globals["__name__"])
            return real(*args, **options)

        model = self.build_awake()
        monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", watch)
        with torch.no_grad():
            self.denoise(model, *self.make_inputs())
        assert set(callers) == {attention.__name__}

    def test_every_batch_of_every_bucket_policy_runs(self) -> None:
        config, model = self.configure(), self.build_awake()
        shapes = list_shapes(config.patch, self.longest_clip)
        assert len({shape[1:] for shape in shapes}) >= 30 and len({shape[0] for shape in shapes}) == 3
        for (batch, *size), tokens in shapes.items():
            latent_FHW = (size[0], size[1], size[2])
            noisy, timestep, text = self.make_inputs(latent_FHW, batch)
            with torch.no_grad():
                prediction = self.denoise(model, noisy, timestep, text)
            assert prediction.shape == noisy.shape and prediction.isfinite().all(), size
            assert config.num_tokens(latent_FHW) == tokens, size

    def test_a_size_that_breaks_a_rule_names_the_rule(self) -> None:
        model = self.build()
        assert self.rule_cases
        for size, words in self.rule_cases:
            with pytest.raises(ConfigError, match=words):
                self.denoise(model, *self.make_inputs(size))

    def test_a_condition_without_an_input_is_refused(self) -> None:
        model = self.build()
        noisy, timestep, text = self.make_inputs()
        batch, _, *size = noisy.shape
        values = {
            "cond_latents": torch.zeros(batch, 1, *size),
            "sizes": torch.ones(batch, 6),
            "image_text": text.tokens_BKD,
            "image_text_mask": text.mask_BK,
            "guidance": torch.ones(batch),
            "dropout_seeds": torch.arange(batch),
        }
        assert values.keys() >= set(self.takes) == set(model.accepted())
        for name, value in values.items():
            if name in self.takes:
                continue
            with pytest.raises(ConfigError, match=f"no input for the condition '{name}'"):
                model(noisy, timestep, {**text.conditions(), name: value})

    def test_dropout_follows_from_the_seeds_of_samples(self) -> None:
        """Where the family has dropout: nothing without seeds or training, and the same when blocks are recomputed."""
        if "dropout_seeds" not in self.takes:
            assert not hasattr(self.configure(), "dropout_seeds")
            return
        noisy, timestep, text = self.make_inputs()
        seeds = torch.arange(len(noisy))
        other = seeds + 100

        def given(seeds: Tensor) -> Conditions:
            return {**self.give(noisy), "dropout_seeds": seeds}

        found = []
        for change in (lambda model: None, lambda model: recompute_blocks(model.blocks())):
            model = self.build_awake(dropout=0.2)
            change(model)
            made = model(noisy, timestep, {**text.conditions(), **given(seeds)})
            made.square().sum().backward()
            gradients = [weight.grad for weight in model.parameters() if weight.grad is not None]
            found.append([made.detach(), *gradients])
            with torch.no_grad():
                again = model(noisy, timestep, {**text.conditions(), **given(other)})
                assert not torch.equal(again, made)
                plain = self.denoise(model, noisy, timestep, text)
                assert not torch.equal(plain, made)
                assert torch.equal(self.denoise(self.build_awake(), noisy, timestep, text), plain)
                quiet = model.eval()(noisy, timestep, {**text.conditions(), **given(seeds)})
                assert torch.equal(quiet, plain)
        assert len(found[0]) == len(found[1]) > 1
        assert all(torch.equal(one, two) for one, two in zip(*found, strict=True))
        for wrong in (-0.1, 1.1):
            with pytest.raises(ConfigError, match=f"dropout is {wrong}; it must be from 0 to 1"):
                self.configure(dropout=wrong)

    def test_tables_made_while_sampling_serve_training(self) -> None:
        """Tensors of inference mode could not be saved for a backward pass."""
        model, inputs = self.build_awake(), self.make_inputs()
        with torch.inference_mode():
            self.denoise(model, *inputs)
        self.denoise(model, *inputs).sum().backward()
        assert any(parameter.grad is not None for parameter in model.parameters())

    def test_without_a_generator_weights_are_still_fixed(self) -> None:
        config, before = self.configure(), torch.random.get_rng_state()
        one, again = (self.family.build(config).state_dict() for _ in range(2))
        assert all(torch.equal(one[name], again[name]) for name in one)
        assert torch.equal(torch.random.get_rng_state(), before)

    def test_unknown_setting_names_the_nearest(self) -> None:
        known = next(iter(self.overrides))
        with pytest.raises(ConfigError, match=f"did you mean '{known}'"):
            self.configure(**{f"{known}x": 1})

    def test_unknown_size_names_the_nearest(self) -> None:
        with pytest.raises(ConfigError, match="did you mean 'tiny'"):
            self.family.configure("tinyy", latent_channels=4, text_width=8, pooled_width=8, overrides={})


def _count_calls(module: nn.Module) -> list[None]:
    calls: list[None] = []
    module.register_forward_pre_hook(lambda *_: calls.append(None))
    return calls


class SavedBytes(contextlib.AbstractContextManager["SavedBytes"]):
    """How much memory the operations inside hold for the backward pass, parameters apart."""

    def __init__(self, model: nn.Module) -> None:
        self._owned = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
        # Held here too, so that no address is used twice.
        self._saved: dict[int, Tensor] = {}
        self._hooks = saved_tensors_hooks(self._keep, lambda tensor: tensor)

    @property
    def total(self) -> int:
        return sum(tensor.untyped_storage().nbytes() for tensor in self._saved.values())

    def _keep(self, tensor: Tensor) -> Tensor:
        place = tensor.untyped_storage().data_ptr()
        if place not in self._owned:
            self._saved[place] = tensor
        return tensor

    def __enter__(self) -> SavedBytes:
        self._hooks.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._hooks.__exit__(*error)
