"""Faults put into the objectives on purpose: each is caught by a property that the real code has."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from frameloom.diffusion import ddpm, edm, flow, objective
from frameloom.diffusion import noise_levels as timesteps
from frameloom.diffusion.ddpm import DDPMObjective
from frameloom.diffusion.edm import EDMObjective
from frameloom.diffusion.flow import FlowObjective
from frameloom.diffusion.noise_levels import LevelBias
from tests.diffusion import properties

Make = Callable[[Any], Any]


@dataclass(frozen=True)
class Mutant:
    """`make` gets the right function and gives the wrong one, which is put in at every owner."""

    fault: str
    caught_by: str
    name: str
    make: Make
    owners: tuple[Any, ...]


def wrong_noising(right: Any) -> Any:
    """Coefficients without their square roots."""

    def add_noise_at(self: DDPMObjective, latent: Tensor, noise: Tensor, place_B: Tensor, extra: Any = None) -> Any:
        level = self.alpha_bar_T[place_B].float()[:, None, None, None, None]
        noised = right(self, latent, noise, place_B, extra)
        return noised._replace(noisy_BCFHW=level * latent + (1 - level) * noise)

    return add_noise_at


def per_frame_weight(right: Any) -> Any:
    """Weights of samples spread along the frames."""

    def weighted_error_B(prediction: Tensor, noised: Any, *, motion_share: float = 0.0) -> Tensor:
        plain = right(prediction, noised._replace(weight_B=torch.ones(len(prediction))), motion_share=motion_share)
        return plain * noised.weight_B.mean()

    return weighted_error_B


def perturbed_target(right: Any) -> Any:
    def add_noise_at(self: Any, latent: Tensor, noise: Tensor, place_B: Tensor, extra: Any = None) -> Any:
        return right(self, latent, noise if extra is None else noise + extra, place_B)

    return add_noise_at


def with_bias(**changes: Any) -> Make:
    """Weights of a bias whose settings were misread."""

    def make(right: Any) -> Any:
        return lambda self, num_levels: right(
            replace(self, **{key: change(self) for key, change in changes.items()}), num_levels
        )

    return make


_OTHER = {"earlier": "later", "later": "earlier", "range": "range", "none": "none"}
_DDPM, _FLOW, _EDM = (DDPMObjective,), (FlowObjective,), (EDMObjective,)
_LOSSES = (ddpm, flow, edm)

MUTANTS = [
    # predictions
    Mutant("sign of v", "check_ddpm_identities", "velocity", lambda f: lambda x, n, a: -f(x, n, a), (ddpm,)),
    Mutant(
        "v with latent and noise swapped",
        "check_ddpm_identities",
        "velocity",
        lambda f: lambda x, n, a: f(n, x, a),
        (ddpm,),
    ),
    Mutant("noising without square roots", "check_noisy_and_target", "add_noise_at", wrong_noising, _DDPM),
    Mutant(
        "epsilon split without dividing by the signal",
        "check_ddpm_identities",
        "split",
        lambda f: lambda self, x, p, a: (f(self, x, p, a)[0] * math.sqrt(a), f(self, x, p, a)[1]),
        _DDPM,
    ),
    Mutant(
        "sign of the flow target",
        "check_flow_identities",
        "add_noise_at",
        lambda f: lambda self, *given: (n := f(self, *given))._replace(target_BCFHW=-n.target_BCFHW),
        _FLOW,
    ),
    Mutant(
        "flow target without sigma_min",
        "check_flow_identities",
        "add_noise_at",
        lambda f: lambda self, x, n, *more: f(self, x, n, *more)._replace(target_BCFHW=n - x),
        _FLOW,
    ),
    Mutant(
        "perturbation in the target too",
        "check_perturbation",
        "add_noise_at",
        perturbed_target,
        (*_DDPM, *_FLOW, *_EDM),
    ),
    Mutant("perturbation forgotten", "check_perturbation", "perturbed", lambda f: lambda noise, extra: noise, _LOSSES),
    # schedules
    Mutant(
        "schedule without square roots",
        "check_schedule",
        "make_betas",
        lambda f: lambda kind, *rest: f("linear", *rest),
        (ddpm,),
    ),
    Mutant(
        "SNR multiplied instead of divided", "check_schedule", "shift_snr", lambda f: lambda a, s: f(a, 1 / s), (ddpm,)
    ),
    Mutant(
        "terminal SNR rescaled in alpha_bar, not in its root",
        "check_schedule",
        "rescale_to_zero_terminal_snr",
        lambda f: lambda a: (a - a[-1]) * a[0] / (a[0] - a[-1]),
        (ddpm,),
    ),
    # weights
    Mutant("SNR upside down", "check_min_snr", "snr", lambda f: lambda a: 1 / f(a), (ddpm,)),
    Mutant(
        "min-SNR of v as of epsilon",
        "check_min_snr",
        "min_snr_weight",
        lambda f: lambda a, g, p: f(a, g, "epsilon" if p == "v" else p),
        (ddpm,),
    ),
    Mutant(
        "min-SNR of the latent as of epsilon",
        "check_min_snr",
        "min_snr_weight",
        lambda f: lambda a, g, p: f(a, g, "epsilon" if p == "sample" else p),
        (ddpm,),
    ),
    Mutant(
        "min-SNR without its limit", "check_min_snr", "min_snr_weight", lambda f: lambda a, g, p: f(a, 1e9, p), (ddpm,)
    ),
    Mutant(
        "1 / time instead of 1 / time^2",
        "check_flow_weights",
        "weight_B",
        lambda f: lambda self, time: f(self, time).sqrt(),
        _FLOW,
    ),
    Mutant("weight on the wrong axis", "check_loss", "weighted_error_B", per_frame_weight, _LOSSES),
    Mutant(
        "EDM weight without its limit",
        "check_edm_identities",
        "weight_at",
        lambda f: lambda self, place: torch.ones_like(place),
        _EDM,
    ),
    # laws
    Mutant(
        "shift in the wrong direction", "check_shift", "shift_time", lambda f: lambda time, a: f(time, 1 / a), (flow,)
    ),
    Mutant(
        "size shift without the root of the frames",
        "check_size_shift",
        "open_sora2_alpha",
        lambda f: lambda n, h, w, *, patch_area: f(1, h, w, patch_area=patch_area) * n,
        (flow,),
    ),
    Mutant(
        "size shift that ignores length",
        "check_size_shift",
        "open_sora2_alpha",
        lambda f: lambda n, h, w, *, patch_area: f(1, h, w, patch_area=patch_area),
        (flow,),
    ),
    Mutant(
        "token shift without its root", "check_size_shift", "sd3_alpha", lambda f: lambda n, base: n / base, (flow,)
    ),
    Mutant(
        "sign of the logit's mean",
        "check_densities",
        "logit_normal_time",
        lambda f: lambda n, m, s: f(n, -m, s),
        (flow,),
    ),
    Mutant(
        "variance taken for deviation",
        "check_densities",
        "logit_normal_time",
        lambda f: lambda n, m, s: f(n, m, s**2),
        (flow,),
    ),
    Mutant(
        "density without the slope of the logit",
        "check_densities",
        "logit_normal_density",
        lambda f: lambda time, *rest: f(time, *rest) * time * (1 - time) * 4,
        (flow, edm),
    ),
    Mutant(
        "index one too high",
        "check_index_law",
        "index_B",
        lambda f: lambda self, draw: (f(self, draw) + 1).clamp_max(999),
        _DDPM,
    ),
    Mutant(
        "draw on an edge falls below it",
        "check_index_law",
        "pick_levels",
        lambda f: lambda draw, running: torch.searchsorted(running, draw, right=False).clamp_max(len(running) - 1),
        (ddpm,),
    ),
    Mutant(
        "earlier and later swapped",
        "check_bias",
        "weights_T",
        with_bias(strategy=lambda bias: _OTHER[bias.strategy]),
        (LevelBias,),
    ),
    Mutant(
        "range with its end included", "check_bias", "weights_T", with_bias(end=lambda bias: bias.end + 1), (LevelBias,)
    ),
    Mutant(
        "strata that do not fill their part",
        "check_strata",
        "stratify",
        lambda f: lambda draw, part, n: f(draw / 2, part, n),
        (timesteps,),
    ),
    Mutant(
        "mode law turned to the ends",
        "check_mode_law",
        "mode_time",
        lambda f: lambda draw, scale: f(draw, -scale),
        (flow,),
    ),
    # what the network is told, and noise
    Mutant(
        "timestep one too high",
        "check_timesteps",
        "timestep_B",
        lambda f: lambda self, index: f(self, index + 1),
        _DDPM,
    ),
    Mutant(
        "EDM told ln(sigma)",
        "check_edm_identities",
        "timestep_B",
        lambda f: lambda self, sigma: 4 * f(self, sigma),
        _EDM,
    ),
    Mutant(
        "offset squared",
        "check_offset",
        "offset_noise",
        lambda f: lambda noise, draw, s: f(noise, draw, s * s),
        (objective,),
    ),
    Mutant(
        "offset of the first channel for all",
        "check_offset",
        "offset_noise",
        lambda f: lambda noise, draw, s: f(noise, draw[:, :1], s),
        (objective,),
    ),
    # sampling
    Mutant(
        "visits start one level too low",
        "check_sampling_follows_training",
        "schedule",
        lambda f: lambda self, n: [max(index - 1, 0) for index in f(self, n)],
        _DDPM,
    ),
    Mutant(
        "steps that stay at their level",
        "check_sampling_follows_training",
        "levels",
        lambda f: lambda self, indices: [(now, now) for now, _ in f(self, indices)],
        _DDPM,
    ),
    Mutant(
        "flow schedule from data to noise",
        "check_sampling_follows_training",
        "schedule",
        lambda f: lambda self, latent, n: f(self, latent, n)[::-1],
        _FLOW,
    ),
    Mutant(
        "EDM without its skip",
        "check_edm_identities",
        "find_latent",
        lambda f: lambda self, x, out, sigma: f(self, 0 * x, out, sigma),
        _EDM,
    ),
    Mutant(
        "noise level of variances",
        "check_noisy_and_target",
        "level_of",
        lambda f: lambda mix: f(mix._replace(signal_B=mix.signal_B**2, spread_B=mix.spread_B**2)),
        (objective,),
    ),
    Mutant(
        "error of the noise not squared",
        "check_noise_error_factor",
        "noise_error_factor",
        lambda f: lambda mix: f(mix).sqrt(),
        (objective,),
    ),
]


@pytest.mark.parametrize("mutant", MUTANTS, ids=[mutant.fault for mutant in MUTANTS])
def test_fault_is_caught(mutant: Mutant, monkeypatch: pytest.MonkeyPatch) -> None:
    for owner in mutant.owners:
        monkeypatch.setattr(owner, mutant.name, mutant.make(getattr(owner, mutant.name)))
    with pytest.raises(AssertionError):
        properties.CHECKS[mutant.caught_by]()


def test_faults_are_many_and_every_property_catches_one() -> None:
    assert len({mutant.fault for mutant in MUTANTS}) == len(MUTANTS) >= 15
    assert {mutant.caught_by for mutant in MUTANTS} == set(properties.CHECKS)


@pytest.mark.parametrize("name", properties.CHECKS)
def test_right_code_passes(name: str) -> None:
    properties.CHECKS[name]()
