"""The section of the training objective: what a denoiser predicts, at which noise levels, with which weights.

Names in parentheses are those of the published trainers where they differ.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag, TypeAdapter

from frameloom.config.schema.section import Count, ExpectedText, Section, Share

Positive = Annotated[float, Field(gt=0)]
Level = Annotated[int, Field(ge=0, le=1000)]
Shift = Annotated[
    Positive | Literal["open_sora2", "sd3"] | None, ExpectedText("a number above 0, open_sora2, sd3 or null")
]

# The ranges that go with the two schedules in published models: Open-Sora-Plan, and SDXL and CogVideoX.
_BETA_RANGE = {"linear": (1e-4, 0.02), "scaled_linear": (0.00085, 0.012)}


class BiasSection(Section):
    strategy: Literal["none", "earlier", "later", "range"] = Field(
        default="none",
        description="levels drawn more often (timestep_bias_strategy): of least noise, of most, or a range",
    )
    multiplier: Positive = Field(
        default=1.0, description="how much more often; below 1: less often (timestep_bias_multiplier)"
    )
    begin: Level = Field(default=0, description="first level of the range (timestep_bias_begin)")
    end: Level = Field(default=1000, description="the level after its last one (timestep_bias_end)")
    portion: Share = Field(
        default=0.25, description="share of all levels that is earlier or later (timestep_bias_portion)"
    )


class EDMSection(Section):
    p_mean: float = Field(default=-1.2, description="mean of ln(sigma) in training")
    p_std: Positive = Field(default=1.2, description="its standard deviation")
    sigma_data: Positive = Field(default=0.5, description="standard deviation of the latents that the model expects")
    sigma_min: Positive = Field(default=0.002, description="least noise of a sampling step")
    sigma_max: Positive = Field(default=80.0, description="noise that sampling starts from")
    rho: Positive = Field(default=7.0, description="the larger, the more sampling steps have little noise")


class _NoiseSection(Section):
    """What every kind of objective has."""

    kind: str = Field(
        default="flow",
        description="flow matching (rf_scheduler), DDPM that predicts v, noise or latent (prediction_type), or EDM",
    )
    stratified_levels: Count = Field(
        default=1,
        description="of this many samples in a row each draws from its own part of the levels (uniform_sampling)",
    )
    noise_offset: Annotated[float, Field(ge=0)] = Field(
        default=0.0, description="move the mean of the noise by a number of this size (offset_noise_level)"
    )
    noise_offset_per: Literal["channel", "sample"] = Field(
        default="channel", description="another number for each channel, or one for a whole sample as in SDXL"
    )
    input_perturbation: Annotated[float, Field(ge=0)] = Field(
        default=0.0, description="noise on the noise that the target does not know of, 0.1 is usual"
    )
    motion_share: Share = Field(
        default=0.0,
        description="part of the loss on differences between frames (motion_sub_loss_ratio: 0.25)",
    )


class FlowObjectiveSection(_NoiseSection):
    kind: Literal["flow"] = Field(default="flow", description=_NoiseSection.model_fields["kind"].description)
    distribution: Literal["logit_normal", "uniform", "mode"] = Field(
        default="logit_normal", description="how noise levels are drawn (flow)"
    )
    logit_mean: float = Field(default=0.0, description="above 0: more noise (flow, distribution logit_normal)")
    logit_std: Positive = Field(default=1.0, description="the larger, the wider (flow, distribution logit_normal)")
    mode_scale: Annotated[float, Field(ge=-1, le=1.75)] = Field(
        default=1.29,
        description="above 0: more often near the middle, below 0: near the ends (flow, distribution mode)",
    )
    num_levels: Count | None = Field(
        default=None, description="draw from this many noise levels only; 1000: Open-Sora-Plan; null: any (flow)"
    )
    shift: Shift = Field(
        default=None,
        description="moves noise levels up (flow_shift): a factor, or open_sora2 or sd3 to follow the size (flow)",
    )
    shift_patch: Count = Field(
        default=4, description="latent cells that count as one token (flow, shift open_sora2 or sd3)"
    )
    sampling_shift_patch: Count | None = Field(
        default=None,
        description="the same in sampling; 1: Open-Sora 2.0's high-compression model; null: equal",
    )
    shift_tokens: Count = Field(default=256, description="number of tokens that is not shifted (flow, shift sd3)")
    sigma_min: Annotated[float, Field(ge=0, lt=1)] = Field(
        default=1e-5, description="noise left in the data end of the path (flow)"
    )
    weighting: Literal["none", "sigma_sqrt", "cosmap"] = Field(
        default="none", description="loss weight by noise level (weighting_scheme) (flow)"
    )


class DDPMObjectiveSection(_NoiseSection):
    kind: Literal["v", "epsilon", "sample"] = Field(default="v")
    betas: Literal["linear", "scaled_linear"] = Field(default="scaled_linear", description="noise schedule (DDPM)")
    beta_start: Annotated[float, Field(gt=0, lt=1)] | None = Field(
        default=None, description="its first beta; null: 1e-4 if linear, 0.00085 if scaled_linear (DDPM)"
    )
    beta_end: Annotated[float, Field(gt=0, lt=1)] | None = Field(
        default=None, description="its last beta; null: 0.02 if linear, 0.012 if scaled_linear (DDPM)"
    )
    zero_terminal_snr: bool | None = Field(
        default=None,
        description="the last level is pure noise (rescale_betas_zero_snr) (DDPM); null: with v only",
    )
    snr_shift: Positive = Field(
        default=1.0,
        description="divide signal to noise of every level by this (snr_shift_scale; cogvideox_scheduler: 3) (DDPM)",
    )
    spacing: Literal["trailing", "leading", "linspace"] = Field(
        default="trailing", description="the levels that sampling visits (timestep_spacing) (DDPM)"
    )
    min_snr_gamma: Positive | None = Field(
        default=None, description="clamp loss weights, 5 is usual (snr_gamma) (DDPM, edm)"
    )
    bias: BiasSection | None = Field(default=None, description="draw some noise levels more often (DDPM); null: none")
    levels: Annotated[tuple[Level, Level], ExpectedText("[first, the one after the last], from 0 to 1000")] | None = (
        Field(default=None, description="draw only these noise levels, [first, after the last]; null: all (DDPM)")
    )


class EDMObjectiveSection(_NoiseSection):
    kind: Literal["edm"] = Field(default="edm")
    min_snr_gamma: Positive | None = Field(
        default=None, description="clamp loss weights, 5 is usual (snr_gamma) (DDPM, edm)"
    )
    edm: EDMSection = Field(
        default=EDMSection(), description="distribution of noise levels and preconditioning of kind edm"
    )


def _choose_kind(value: Any) -> str:
    """The tag of a section; an unknown kind counts as the default one, which then refuses it."""
    kind = value.get("kind", "flow") if isinstance(value, dict) else getattr(value, "kind", "flow")
    return {"v": "ddpm", "epsilon": "ddpm", "sample": "ddpm", "edm": "edm"}.get(str(kind), "flow")


ObjectiveSection = Annotated[
    Annotated[FlowObjectiveSection, Tag("flow")]
    | Annotated[DDPMObjectiveSection, Tag("ddpm")]
    | Annotated[EDMObjectiveSection, Tag("edm")],
    Discriminator(_choose_kind),
]
parse_objective: Callable[[Any], ObjectiveSection] = TypeAdapter(ObjectiveSection).validate_python


def beta_range(section: DDPMObjectiveSection) -> tuple[float, float]:
    """First and last beta: the recipe's, or those that go with the schedule in published models."""
    start, end = _BETA_RANGE[section.betas]
    return (
        start if section.beta_start is None else section.beta_start,
        end if section.beta_end is None else section.beta_end,
    )
