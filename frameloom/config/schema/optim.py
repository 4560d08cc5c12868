"""The section of the optimizer: learning rate schedule, parameter groups, gradient clipping."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from frameloom.config.schema.section import Count, ExpectedText, Section, Share

OptimizerName = Literal["adamw", "adamw8bit", "came", "adafactor", "lion", "prodigy", "muon"]
ScheduleName = Literal["constant", "cosine", "cosine_with_restarts", "linear", "polynomial", "multi_step"]

# What each of them publishes. Adafactor's first is a momentum, which costs the memory that Adafactor saves.
OWN_BETAS: dict[str, tuple[float, ...]] = {
    "adamw": (0.9, 0.999),
    "adamw8bit": (0.9, 0.999),
    "came": (0.9, 0.999, 0.9999),
    "adafactor": (0.0, 0.999),
    "lion": (0.9, 0.99),
    "prodigy": (0.9, 0.999),
    "muon": (0.9, 0.95),
}

Betas = Annotated[
    tuple[Annotated[float, Field(ge=0, lt=1)], ...],
    Field(min_length=2, max_length=3),
    ExpectedText("a list of 2 numbers (came: 3), each of at least 0 and below 1"),
]
Patterns = Annotated[tuple[Annotated[str, Field(min_length=1)], ...], Field(min_length=1)]


class ScheduleSection(Section):
    name: ScheduleName = Field(default="constant", description="shape after the warm-up")
    warmup_steps: Annotated[int, Field(ge=0)] = Field(default=0, description="steps from start_share to the full rate")
    start_share: Share = Field(default=0.0, description="share of the rate that the warm-up starts from")
    idle_start: bool = Field(
        default=False, description="the first step has start_share itself (diffusers, MindSpore), not the next above it"
    )
    decay_steps: Count | None = Field(
        default=None, description="steps that the fall takes after the warm-up; null: all that are left of the run"
    )
    min_share: Share = Field(default=0.0, description="share of the rate left at the end of the fall (not constant)")
    num_cycles: Count = Field(default=1, description="waves of the fall (cosine_with_restarts)")
    power: Annotated[float, Field(gt=0)] = Field(
        default=1.0, description="exponent of the fall (polynomial); 1 is a straight line, MindSpore's default is 0.9"
    )
    milestones: tuple[Count, ...] = Field(
        default=(), examples=[[200, 400]], description="steps of the run at which the rate drops (multi_step)"
    )
    gamma: Annotated[float, Field(gt=0, le=1)] = Field(
        default=0.9, description="what each drop multiplies the rate by (multi_step)"
    )


class GroupSection(Section):
    match: str = Field(
        default="",
        examples=["img_in"],
        description="whole parts of a parameter's name, with * and ?, as in optim.trainable",
    )
    lr: Annotated[float, Field(ge=0)] | None = Field(default=None, description="their learning rate; null: optim.lr")
    weight_decay: Annotated[float, Field(ge=0)] | None = Field(
        default=None, description="their weight decay, where there is any (see decay_norms); null: optim.weight_decay"
    )


class ClipFadeSection(Section):
    """CogVideoX-Fun's rule: exact on its numbers."""

    ratio: Annotated[float, Field(gt=0)] = Field(
        default=5.0, description="clip_norm is this many times as large at the first step"
    )
    fade_steps: Annotated[int, Field(ge=0)] = Field(
        default=1000, description="steps until it has come down to clip_norm; from then on spikes are cut harder"
    )


class SpikeSection(Section):
    ratio: Annotated[float, Field(gt=1)] = Field(
        default=10.0, description="a gradient norm of more than this many medians is a spike"
    )
    window: Annotated[int, Field(ge=4)] = Field(
        default=100, description="the last steps whose median counts; the first quarter of as many is never skipped"
    )


class OptimSection(Section):
    name: OptimizerName = Field(default="adamw", description="the optimizer; adamw8bit needs the extra bitsandbytes")
    lr: Annotated[float, Field(gt=0)] = Field(default=1e-4, description="learning rate; prodigy finds its own: 1")
    betas: Betas = Field(
        default=(0.9, 0.999), description="decay of running mean and running square; left out: the optimizer's own"
    )
    eps: Annotated[float, Field(gt=0)] = Field(
        default=1e-8, description="added to the denominator (adamw, adamw8bit, prodigy, muon)"
    )
    weight_decay: Annotated[float, Field(ge=0)] = Field(default=0.01, description="decoupled weight decay")
    decay_norms: bool = Field(default=False, description="decay norms and biases too")
    scale_lr: bool = Field(default=False, description="multiply lr by samples per step: batch, accumulation, processes")
    trainable: Patterns | None = Field(
        default=None,
        examples=[["blocks.0", "*attn*"]],
        description="train only parameters with these parts in their names, whole ones or with * and ?; null: all",
    )
    frozen: tuple[Annotated[str, Field(min_length=1)], ...] = Field(
        default=(), examples=[["txt_in", "*norm*"]], description="do not train these, written like trainable"
    )
    groups: tuple[GroupSection, ...] = Field(
        default=(), description="parameters with a learning rate or weight decay of their own; the first match counts"
    )
    clip_norm: Annotated[float, Field(gt=0)] | None = Field(
        default=1.0, description="largest gradient norm; null: no clipping"
    )
    clip_fade: ClipFadeSection | None = Field(
        default=None, description="a wider limit in the first steps and a narrower one for spikes after them; null: no"
    )
    skip_spikes: SpikeSection | None = Field(
        default=None, description="leave out a step whose gradient norm is far above the usual; null: never"
    )
    offload: bool = Field(
        default=False,
        description="the optimizer's state rests in host memory and visits the GPU in parts at each step: slower steps",
    )
    schedule: ScheduleSection = Field(default=ScheduleSection(), description="learning rate over the steps")

    @model_validator(mode="after")
    def _fill_betas(self) -> Self:
        if "betas" not in self.model_fields_set:
            # The section is frozen for everyone else; here it is not complete yet.
            self.__dict__["betas"] = OWN_BETAS[self.name]
        return self
