"""Rules between the keys of the objective."""

from __future__ import annotations

from pathlib import Path

import pytest

from frameloom.config.loading.recipe import load_recipe
from frameloom.config.schema.objective import ObjectiveSection, beta_range
from frameloom.core.errors import ConfigError

RIGHT = {
    "latent predicted": "{kind: sample, min_snr_gamma: 5}",
    "latent predicted at zero signal": "{kind: sample, zero_terminal_snr: true}",
    "SDXL's bias": "{kind: epsilon, bias: {strategy: range, multiplier: 2, begin: 200, end: 500}}",
    "later levels": "{kind: v, bias: {strategy: later, multiplier: 2, portion: 0.5}}",
    "some levels": "{kind: v, levels: [200, 500]}",
    "shift by tokens": "{shift: sd3, shift_tokens: 1024, shift_patch: 1}",
    "other patches when sampling": "{shift: open_sora2, sampling_shift_patch: 1}",
    "mode law": "{law: mode, mode_scale: 0.8}",
    "Open-Sora-Plan's flow": "{num_levels: 1000, sigma_min: 0, weighting: sigma_sqrt}",
    "noise of a sample": "{noise_offset: 0.05, noise_offset_per: sample, input_perturbation: 0.1}",
    "strata and motion": "{strata: 64, motion_share: 0.25}",
    "other betas": "{kind: v, betas: linear, beta_start: 0.001, beta_end: 0.03}",
    "leading": "{kind: epsilon, spacing: leading}",
}
WRONG = {
    "bias with flow": ("{bias: {strategy: later}}", "objective.bias is set", "kind v, epsilon or sample uses"),
    "levels with flow": ("{levels: [1, 5]}", "objective.levels is [1, 5]", "set kind: v"),
    "weighting with v": ("{kind: v, weighting: cosmap}", "objective.weighting is cosmap", "only kind flow uses"),
    "edm keys with v": ("{kind: v, edm: {p_mean: 0}}", "objective.edm is set", "only kind edm uses"),
    "mean of another law": (
        "{law: uniform, logit_mean: 1}",
        "objective.logit_mean is 1.0",
        "only law logit_normal uses",
    ),
    "scale of another law": ("{mode_scale: 1}", "which only law mode uses, but objective.law is logit_normal"),
    "tokens of another shift": ("{shift: 3, shift_tokens: 9}", "only shift sd3 uses, but objective.shift is 3.0"),
    "patches without a shift": ("{shift_patch: 1}", "only shift open_sora2 or sd3 uses, but objective.shift is null"),
    "offset of nothing": ("{noise_offset_per: sample}", "objective.noise_offset is 0", "set noise_offset"),
    "no level": ("{kind: v, levels: [500, 500]}", "which is no level at all", "[200, 500]"),
    "level 1001": ("{kind: v, levels: [0, 1001]}", "objective.levels"),
    "range of nothing": ("{kind: v, bias: {strategy: range, begin: 5, end: 5}}", "begin is 5 and end is 5"),
    "portion of a range": ("{kind: v, bias: {strategy: range, portion: 0.5}}", "strategy range does not use"),
    "range of later": ("{kind: v, bias: {strategy: later, begin: 5}}", "objective.bias.begin is 5", "strategy later"),
    "multiplier of none": ("{kind: v, bias: {multiplier: 2}}", "objective.bias.multiplier is 2.0", "strategy none"),
    "multiplier 0": ("{kind: v, bias: {strategy: later, multiplier: 0}}", "objective.bias.multiplier is 0"),
    "betas that fall": ("{kind: v, betas: linear, beta_start: 0.5}", "noise grows, so give a smaller start"),
    "leading at zero signal": ("{kind: v, spacing: leading}", "never visits the last noise level", "write trailing"),
    "edm of an index": ("{kind: edm}", "objective.kind is edm, but opensora2 is told a whole index"),
    "edm upside down": ("{kind: edm, edm: {sigma_min: 90}}", "objective.edm.sigma_min is 90.0 and sigma_max 80.0"),
    "scale that runs back": ("{law: mode, mode_scale: 2}", "objective.mode_scale is 2"),
}


@pytest.mark.parametrize("objective", RIGHT.values(), ids=RIGHT.keys())
def test_what_is_right_passes(recipe_file: Path, objective: str) -> None:
    load_recipe(recipe_file, ["--objective", objective])


@pytest.mark.parametrize(("objective", "fragments"), [(case[0], case[1:]) for case in WRONG.values()], ids=WRONG.keys())
def test_mistake_is_told(recipe_file: Path, objective: str, fragments: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError) as caught:
        load_recipe(recipe_file, ["--objective", objective])
    for fragment in fragments:
        assert fragment in str(caught.value)


def test_betas_follow_the_schedule_unless_they_are_given() -> None:
    assert beta_range(ObjectiveSection(kind="v")) == (0.00085, 0.012)
    assert beta_range(ObjectiveSection(kind="v", betas="linear")) == (1e-4, 0.02)
    assert beta_range(ObjectiveSection(kind="v", beta_end=0.5)) == (0.00085, 0.5)
