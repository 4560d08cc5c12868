"""Every sampler finds the latent that an all-knowing model points to, from noise and from the middle of the way."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from frameloom.core.errors import ConfigError
from frameloom.core.random import stream
from frameloom.diffusion.objectives import DDPMObjective, EDMObjective, FlowObjective, Objective, spread
from frameloom.diffusion.samplers import Start, run_sampler
from frameloom.diffusion.tables import SAMPLERS

SHAPE = (2, 3, 2, 4, 4)
SDXL = {"zero_terminal_snr": False, "prediction": "epsilon", "spacing": "leading", "beta_schedule": "scaled_linear"}
OBJECTIVES: dict[str, Objective] = {
    "flow": FlowObjective(),
    "flow-shifted": FlowObjective(shift="open_sora2"),
    "v-zero-snr": DDPMObjective(),
    "v-shifted": DDPMObjective(snr_shift=3.0, beta_schedule="scaled_linear", beta_start=0.00085, beta_end=0.012),
    "epsilon": DDPMObjective(beta_start=0.00085, beta_end=0.012, **SDXL),  # type: ignore[arg-type]
    "edm": EDMObjective(),
}
CASES = [(kind, name) for kind, objective in OBJECTIVES.items() for name in SAMPLERS[objective.kind]]


def draw(purpose: str) -> Tensor:
    return torch.randn(SHAPE, generator=stream(3, purpose))


def generators(seed: int = 0) -> list[torch.Generator]:
    return [stream(seed + number, "sampler") for number in range(SHAPE[0])]


def knows(objective: Objective, latent: Tensor) -> Callable[[Tensor, Tensor], Tensor]:
    """A model that knows the latent: it finds the noise in what it sees and predicts what training would ask for."""

    def predict(x: Tensor, timestep_B: Tensor) -> Tensor:
        alpha, sigma, of_latent, of_noise = (spread(part, x) for part in objective.coefficients(timestep_B))
        noise = (x - alpha * latent) / sigma.clamp_min(1e-9)
        return (of_latent * latent + of_noise * noise).float()

    return predict


def walk(kind: str, name: str, latent: Tensor, **changes: Any) -> Tensor:
    objective = OBJECTIVES[kind]
    given: dict[str, Any] = {"num_steps": 20, "generators": generators(), **changes}
    return run_sampler(name, objective, knows(objective, latent), draw("noise"), **given)


@pytest.mark.parametrize(("kind", "name"), CASES)
def test_the_walk_ends_at_what_the_model_knows(kind: str, name: str) -> None:
    latent = draw("latent")
    torch.testing.assert_close(walk(kind, name, latent), latent, atol=2e-2, rtol=0)
    assert (walk(kind, name, latent) - walk(kind, name, -latent)).abs().max() > 1


@pytest.mark.parametrize(("kind", "name"), CASES)
def test_a_start_is_followed_as_far_as_its_strength_leaves_it(kind: str, name: str) -> None:
    """A model that has learned nothing but the mean of all latents leaves a weakly noised one nearly as it was."""
    objective, origin, seen = OBJECTIVES[kind], draw("origin"), []

    def predict(x: Tensor, timestep_B: Tensor) -> Tensor:
        seen.append(float(timestep_B[0]))
        return knows(objective, origin)(x, timestep_B)

    start = Start(origin, 0.25)
    result = run_sampler(name, objective, predict, draw("noise"), num_steps=20, generators=generators(), start=start)
    torch.testing.assert_close(result, origin, atol=2e-2, rtol=0)
    calls = 9 if name == "heun" else 5
    assert start.skip(20) == 15 and len(seen) == calls
    whole: list[float] = []
    run_sampler(
        name,
        objective,
        lambda x, timestep_B: (whole.append(float(timestep_B[0])), predict(x, timestep_B))[1],
        draw("noise"),
        num_steps=20,
        generators=generators(),
    )
    assert whole[-calls:] == seen[:calls]


def test_noise_on_the_way_follows_from_the_generators() -> None:
    latent = draw("latent")

    def blurry(x: Tensor, timestep_B: Tensor) -> Tensor:
        return 0.5 * knows(OBJECTIVES["v-zero-snr"], latent)(x, timestep_B)

    for name in ("ddpm", "euler_ancestral"):
        first, again, other = (
            run_sampler(name, OBJECTIVES["v-zero-snr"], blurry, draw("noise"), num_steps=5, generators=generators(seed))
            for seed in (0, 0, 7)
        )
        assert torch.equal(first, again) and not torch.equal(first, other)
        alone = run_sampler(
            name,
            OBJECTIVES["v-zero-snr"],
            lambda x, timestep_B: 0.5 * knows(OBJECTIVES["v-zero-snr"], latent[:1])(x, timestep_B),
            draw("noise")[:1],
            num_steps=5,
            generators=generators()[:1],
        )
        torch.testing.assert_close(alone, first[:1], atol=1e-5, rtol=0)


def test_our_ddim_is_that_of_diffusers() -> None:
    """For spacing trailing and a number of steps that divides the levels, where both visit and reach the same ones."""
    latent = draw("latent")
    objective = OBJECTIVES["v-zero-snr"]

    def predict(x: Tensor, timestep_B: Tensor) -> Tensor:
        return torch.tanh(knows(objective, latent)(x, timestep_B))

    ours, theirs = (
        run_sampler(name, objective, predict, draw("noise"), num_steps=20, generators=generators())
        for name in ("default", "ddim")
    )
    torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=0)
    assert (
        ours - run_sampler("euler_ancestral", objective, predict, draw("noise"), num_steps=20, generators=generators())
    ).abs().max() > 0.1


def test_heun_is_nearer_than_euler_with_as_few_steps() -> None:
    """Latents of a normal law with deviation s: the best velocity is known, and the path ends at s times the noise."""
    variance = 0.25

    def predict(x: Tensor, timestep_B: Tensor) -> Tensor:
        time = spread(timestep_B.double(), x)
        rest = 1 - time
        return ((time - rest * variance) / (rest.square() * variance + time.square()) * x).float()

    def error(name: str) -> float:
        objective = FlowObjective(sigma_min=0.0)
        found = run_sampler(name, objective, predict, draw("noise"), num_steps=16, generators=generators())
        return float((found - variance**0.5 * draw("noise")).abs().mean())

    assert error("heun") < error("euler") / 4


def test_a_sampler_of_another_objective_is_refused() -> None:
    with pytest.raises(ConfigError, match="'ddpm', which Flow models do not have; choose default, euler, heun"):
        walk("flow", "ddpm", draw("latent"))
