"""Faults put into the objectives on purpose: each is caught by a property that the real code has."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from frameloom.diffusion import noise_levels, objectives
from frameloom.diffusion.objectives import Coefficients, DDPMObjective, EDMObjective, FlowObjective, LevelBias
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


def changed(**changes: Callable[[Coefficients], Tensor]) -> Make:
    """Coefficients of which some are wrong."""

    def make(right: Any) -> Any:
        def coefficients(self: Any, timestep_B: Tensor) -> Coefficients:
            found = right(self, timestep_B)
            return found._replace(**{name: change(found) for name, change in changes.items()})

        return coefficients

    return make


def per_frame_weight(right: Any) -> Any:
    """Weights of samples spread along the frames."""

    def weighted_error_B(prediction: Tensor, noised: Any, *, motion_share: float = 0.0) -> Tensor:
        plain = right(prediction, noised._replace(weight_B=torch.ones(len(prediction))), motion_share=motion_share)
        return plain * noised.weight_B.mean()

    return weighted_error_B


def with_bias(**changes: Any) -> Make:
    """Weights of a bias whose settings were misread."""

    def make(right: Any) -> Any:
        return lambda self, num_levels: right(
            replace(self, **{key: change(self) for key, change in changes.items()}), num_levels
        )

    return make


_OTHER = {"earlier": "later", "later": "earlier", "range": "range", "none": "none"}
_DDPM, _FLOW, _EDM, _ALL = (DDPMObjective,), (FlowObjective,), (EDMObjective,), (objectives,)

MUTANTS = [
    # coefficients
    Mutant(
        "sign of v",
        "check_ddpm_identities",
        "coefficients",
        changed(target_latent=lambda c: -c.target_latent, target_noise=lambda c: -c.target_noise),
        _DDPM,
    ),
    Mutant(
        "v with latent and noise swapped",
        "check_ddpm_identities",
        "coefficients",
        changed(target_latent=lambda c: c.target_noise, target_noise=lambda c: c.target_latent),
        _DDPM,
    ),
    Mutant(
        "noising without square roots",
        "check_ddpm_identities",
        "coefficients",
        changed(alpha=lambda c: c.alpha**2),
        _DDPM,
    ),
    Mutant(
        "sign of the flow target",
        "check_flow_identities",
        "coefficients",
        changed(target_latent=lambda c: -c.target_latent, target_noise=lambda c: -c.target_noise),
        _FLOW,
    ),
    Mutant(
        "flow target without sigma_min",
        "check_flow_identities",
        "coefficients",
        changed(target_noise=lambda c: torch.ones_like(c.alpha)),
        _FLOW,
    ),
    Mutant(
        "EDM without its preconditioning",
        "check_edm_identities",
        "coefficients",
        changed(alpha=lambda c: torch.ones_like(c.alpha)),
        _EDM,
    ),
    Mutant(
        "noisy latents without the latent",
        "check_noisy_and_target",
        "add_noise",
        lambda f: lambda made, latent, *rest: f(made, 0 * latent, *rest),
        (properties,),
    ),
    Mutant(
        "perturbation in the target too",
        "check_perturbation",
        "add_noise",
        lambda f: lambda made, x, n, t, extra=None: f(made, x, n if extra is None else n + extra, t),
        (properties,),
    ),
    Mutant(
        "perturbation forgotten",
        "check_perturbation",
        "add_noise",
        lambda f: lambda made, x, n, t, extra=None: f(made, x, n, t),
        (properties,),
    ),
    Mutant(
        "timestep one too high",
        "check_timesteps",
        "add_noise",
        lambda f: lambda *given: (n := f(*given))._replace(timestep_B=n.timestep_B + 0.001),
        (properties,),
    ),
    Mutant(
        "error of the noise not squared",
        "check_noise_error_factor",
        "noise_error_factor",
        lambda f: lambda self: f(self).sqrt(),
        (Coefficients,),
    ),
    # schedules
    Mutant("betas without roots", "check_schedule", "make_betas", lambda f: lambda _, *rest: f("linear", *rest), _ALL),
    Mutant("SNR multiplied, not divided", "check_schedule", "shift_snr", lambda f: lambda a, s: f(a, 1 / s), _ALL),
    Mutant(
        "terminal SNR rescaled in alpha_bar, not in its root",
        "check_schedule",
        "rescale_to_zero_terminal_snr",
        lambda f: lambda a: (a - a[-1]) * a[0] / (a[0] - a[-1]),
        _ALL,
    ),
    # weights
    Mutant("SNR upside down", "check_min_snr", "snr", lambda f: lambda a: 1 / f(a), _ALL),
    Mutant(
        "min-SNR of all predictions as of epsilon",
        "check_min_snr",
        "min_snr_weight",
        lambda f: lambda a, g, p: f(a, g, "epsilon"),
        _ALL,
    ),
    Mutant("min-SNR without limit", "check_min_snr", "min_snr_weight", lambda f: lambda a, g, p: f(a, 1e9, p), _ALL),
    Mutant("1 / time, not squared", "check_flow_weights", "weight", lambda f: lambda *given: f(*given).sqrt(), _FLOW),
    Mutant("weight on the wrong axis", "check_loss", "weighted_error_B", per_frame_weight, _ALL),
    Mutant(
        "EDM weight without its limit",
        "check_edm_identities",
        "weight",
        lambda f: lambda self, timestep: torch.ones_like(timestep),
        _EDM,
    ),
    # distributions
    Mutant("shift the wrong way", "check_shift", "shift_time", lambda f: lambda time, a: f(time, 1 / a), _ALL),
    Mutant(
        "size shift that ignores length",
        "check_size_shift",
        "open_sora2_shift",
        lambda f: lambda n, h, w, *, patch_area: f(1, h, w, patch_area=patch_area),
        _ALL,
    ),
    Mutant("token shift without its root", "check_size_shift", "sd3_shift", lambda f: lambda n, base: n / base, _ALL),
    Mutant(
        "variance taken for deviation",
        "check_densities",
        "logit_normal_time",
        lambda f: lambda n, m, s: f(n, m, s**2),
        _ALL,
    ),
    Mutant(
        "density without the slope of the logit",
        "check_densities",
        "logit_normal_density",
        lambda f: lambda time, *rest: f(time, *rest) * time * (1 - time) * 4,
        _ALL,
    ),
    Mutant(
        "index one too high",
        "check_index_law",
        "timesteps",
        lambda f: lambda *given: (f(*given) + 0.001).clamp_max(0.999),
        _DDPM,
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
        (noise_levels,),
    ),
    Mutant("mode turned to the ends", "check_mode_law", "mode_time", lambda f: lambda u, scale: f(u, -scale), _ALL),
    Mutant("offset squared", "check_offset", "offset_noise", lambda f: lambda noise, u, s: f(noise, u, s * s), _ALL),
    # sampling
    Mutant(
        "visits start one level too low",
        "check_sampling_follows_training",
        "steps",
        lambda f: lambda *given: [(max(now - 0.001, 0), then) for now, then in f(*given)],
        _DDPM,
    ),
    Mutant(
        "steps that stay at their level",
        "check_sampling_follows_training",
        "steps",
        lambda f: lambda *given: [(now, now) for now, _ in f(*given)],
        _DDPM,
    ),
    Mutant(
        "flow from data to noise",
        "check_sampling_follows_training",
        "steps",
        lambda f: lambda *given: [(then, now) for now, then in reversed(f(*given))],
        _FLOW,
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
