"""Specs say of the models what the models say of themselves, and load no torch to say it."""

from __future__ import annotations

import math
import subprocess
import sys
from typing import Any

import pytest
import torch

from frameloom.core.errors import ConfigError
from frameloom.models.denoisers.base import Denoiser
from frameloom.models.registry import DENOISERS, TEXT_ENCODERS, VAES, get_denoiser, get_text_encoder, get_vae
from frameloom.models.spec import DenoiserSpec, Link
from frameloom.training.memory.recompute import group_blocks

ALL = [*DENOISERS.values(), *VAES.values(), *TEXT_ENCODERS.values()]


def list_links(spec: Any) -> list[str]:
    return [name for kind in type(spec).__mro__ for name, value in vars(kind).items() if isinstance(value, Link)]


@pytest.mark.parametrize("spec", ALL, ids=lambda spec: f"{type(spec).__name__}-{spec.name}")
def test_every_link_leads_to_an_object(spec: Any) -> None:
    names = list_links(spec)
    assert {"build", "model"} & set(names)
    for name in names:
        target, found = vars(spec)[name], getattr(spec, name)
        assert (found is None) == (target == ""), name
        if found is not None:
            assert target.startswith("frameloom.models."), name


def test_a_spec_has_the_name_that_it_is_found_by() -> None:
    for registry in (DENOISERS, VAES, TEXT_ENCODERS):
        assert [spec.name for spec in registry.values()] == list(registry)
    for registry in (DENOISERS, VAES):
        assert all(next(iter(spec.sizes)) == "tiny" for spec in registry.values())


def test_unknown_names_are_answered_with_the_nearest() -> None:
    for get, wrong, near in (
        (get_denoiser, "late", "latte"),
        (get_vae, "wfvea", "wfvae"),
        (get_text_encoder, "minilmm", "minilm"),
    ):
        with pytest.raises(ConfigError, match=f"'{wrong}' is not known; did you mean '{near}'"):
            get(wrong)
    assert DENOISERS.get("late") is None and "late" not in DENOISERS


def test_a_spec_without_a_required_link_is_refused() -> None:
    with pytest.raises(TypeError, match="model"):
        DenoiserSpec(name="x", sizes={}, block_kinds=(), weights="x")  # type: ignore[call-arg]


@pytest.mark.parametrize("name", DENOISERS)
def test_block_kinds_are_those_of_the_model(name: str) -> None:
    spec = DENOISERS[name]
    with torch.device("meta"):
        model = spec.build(spec.sizes["tiny"])
    assert spec.block_kinds == tuple(group_blocks(model, model.blocks()))


@pytest.mark.parametrize("name", DENOISERS)
def test_a_token_is_a_patch_of_latent_cells(name: str) -> None:
    spec = DENOISERS[name]
    for size, config in spec.sizes.items():
        frames, height, width = spec.patch_of(size, {})
        assert (frames, height, width) == config.patch
        assert config.num_tokens((3 * frames, 4 * height, 5 * width)) == math.prod((3, 4, 5))


def test_patches_follow_overrides_that_could_be_right() -> None:
    cogvideox, opensora2 = DENOISERS["cogvideox_fun"], DENOISERS["opensora2"]
    assert cogvideox.patch_of("2b", {"patch_size_t": 2, "patch_size": 4}) == (2, 4, 4)
    assert cogvideox.patch_of("5b-1.5", {}) == cogvideox.patch_of("5b-1.5", {"patch_size_t": "two"}) == (2, 2, 2)
    assert cogvideox.patch_of("of no size", {}) == (1, 2, 2)
    # Checked with the other widths later; alone they would not fit each other.
    assert opensora2.patch_of("11b-dcae", {"patch_size": 3}) == (1, 3, 3)
    assert opensora2.patch_of("11b", {"patch_size": 0}) == (1, 1, 1)


@pytest.mark.parametrize("name", DENOISERS)
def test_fields_are_those_that_do_not_follow_from_other_parts(name: str) -> None:
    spec = DENOISERS[name]
    few, many = (
        vars(spec.configure("tiny", latent_channels=n, text_width=2 * n, pooled_width=4 * n, overrides={}))
        for n in (4, 8)
    )
    assert list(spec.fields) == [field for field in few if few[field] == many[field]]
    assert spec.fields == {field: type(few[field]) for field in spec.fields}
    with pytest.raises(ConfigError, match="follows from the autoencoder"):
        overrides = {"in_channels": 4}
        spec.configure("tiny", latent_channels=4, text_width=8, pooled_width=8, overrides=overrides)


@pytest.mark.parametrize("name", DENOISERS)
def test_conditions_are_those_that_some_size_has_an_input_for(name: str) -> None:
    spec = DENOISERS[name]
    assert ("known" in spec.supported_conditions) == (spec.model.pack_known is not Denoiser.pack_known)
    beside = {config.condition for config in spec.sizes.values()}
    assert ("known" in spec.supported_conditions) == ("inpaint" in beside)
    assert ("control" in spec.supported_conditions) == ("control" in beside)


@pytest.mark.parametrize("name", VAES)
def test_strides_and_causality_are_those_of_the_model(name: str) -> None:
    spec = VAES[name]
    assert all((config.strides, config.causal) == (spec.strides, spec.causal) for config in spec.sizes.values())
    time, height, width = spec.strides
    frames = 2 * time + spec.causal
    with torch.device("meta"):
        model = spec.build(spec.sizes["tiny"]).eval()
        latent = model.encode(torch.empty(1, 3, frames, 2 * height, 3 * width)).mean_BCFHW
    assert (model.strides, model.causal) == (spec.strides, spec.causal)
    assert tuple(latent.shape[2:]) == (2 + spec.causal, 2, 3)
    assert spec.lengths().accepts(frames) and spec.lengths().accepts(1)
    assert not spec.lengths().accepts(frames + 1) or time == 1


def test_specs_load_no_torch() -> None:
    code = (
        "import sys; from frameloom.models.registry import DENOISERS, TEXT_ENCODERS, VAES; "
        "[(spec.fields, spec.config_class) for registry in (DENOISERS, VAES) for spec in registry.values()]; "
        "print(len(TEXT_ENCODERS.values()), {'torch', 'numpy', 'diffusers', 'transformers'} & set(sys.modules)); "
        "DENOISERS['latte'].model; print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == [f"{len(TEXT_ENCODERS)} set()", "True"]
