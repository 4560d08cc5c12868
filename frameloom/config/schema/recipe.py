"""The recipe as a typed tree: its sections, and the keys about the run itself.

The modules beside this one hold the other sections. The order of the keys is that of `frameloom recipe show`. Nothing
here reads a file or imports a model; rules that span several keys are in `config/rules/check.py`.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from frameloom.config.schema.data import DataSection
from frameloom.config.schema.models import (
    AutoencoderSection,
    KnownSection,
    LoraSection,
    ModelSection,
    TextSection,
    VAESection,
)
from frameloom.config.schema.objective import FlowObjectiveSection, ObjectiveSection
from frameloom.config.schema.optim import OptimSection
from frameloom.config.schema.parallel import ParallelSection
from frameloom.config.schema.sampling import SampleSection, SamplesSection
from frameloom.config.schema.section import Count, ExpectedText, Section, Where
from frameloom.config.schema.training import DreamBoothSection, Interval, InversionSection, TrainSection

Name = Annotated[
    str,
    Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,79}$"),
    ExpectedText("1 to 80 letters, digits, '.', '_' or '-', the first a letter or a digit"),
]
TrackerName = Literal["jsonl", "tensorboard", "wandb", "trackio"]


class TrackingSection(Section):
    project: Name = Field(default="frameloom", description="the project that the run is shown in")
    name: str | None = Field(default=None, description="what the run is called there; null: as the recipe")
    tags: tuple[str, ...] = Field(default=(), examples=[["baseline"]], description="words to find the run by")
    offline: bool = Field(
        default=False, description="wandb: write to the run folder only, to be sent later with `wandb sync`"
    )


class RunSection(Section):
    folder: str = Field(default="runs", description="the run is written to <folder>/<name>")
    resume: Literal["latest", "never"] = Field(
        default="latest",
        description="latest: go on from the newest complete checkpoint; never: refuse a folder that was used",
    )
    trackers: tuple[TrackerName, ...] = Field(
        default=("jsonl", "tensorboard"),
        description="where metrics go besides the progress line; wandb and trackio need the extras of those names",
    )
    tracking: TrackingSection = Field(default=TrackingSection(), description="how wandb and trackio show the run")


class ValidationSection(Section):
    every: Interval = Field(
        default=500,
        description="steps between validations, or epochs, as in 1 epoch; the last step is always validated",
        examples=[500],
    )
    where: Where = Field(default={}, description="rows of the manifest used, never trained on; as in data.where")
    batches: Annotated[int, Field(ge=0)] = Field(
        default=4, description="micro-batches read each time, always the same ones; 0: none, only samples are drawn"
    )
    levels: Count = Field(
        default=8,
        description="noise levels that a denoiser is judged at on each clip, evenly from data to noise",
    )
    samples: SamplesSection | None = Field(
        default=None, description="clips from fixed prompts, to look at while the run goes on; null: none"
    )


class Recipe(Section):
    """A whole run."""

    name: Name = Field(description="the run's name and folder", examples=["my-run"])
    task: Literal["denoiser", "autoencoder"] = Field(description="what is trained", examples=["denoiser"])
    seed: Annotated[int, Field(ge=0, lt=2**63)] = Field(default=42, description="every random draw follows from it")
    run: RunSection = Field(default=RunSection(), description="where the run lives and how it resumes")
    model: ModelSection = Field(default=ModelSection(), description="the denoiser")
    lora: LoraSection | None = Field(
        default=None, description="train small adapters beside the frozen weights of model; null: train all weights"
    )
    inversion: InversionSection | None = Field(
        default=None, description="learn one new word for the text encoders, and nothing else (sdxl); null: no"
    )
    dreambooth: DreamBoothSection | None = Field(
        default=None, description="teach one thing from a few pictures, with lora or all weights (sdxl); null: no"
    )
    vae: VAESection = Field(
        default=VAESection(), description="the autoencoder: frozen for task denoiser, trained for autoencoder"
    )
    text: TextSection = Field(default=TextSection(), description="captions to numbers")
    data: DataSection = Field(description="clips and their order")
    known: KnownSection | None = Field(
        default=None, description="parts of a clip that an inpaint or image-to-video model is given; null: none"
    )
    objective: ObjectiveSection = Field(default=FlowObjectiveSection(), description="the denoiser's training target")
    autoencoder: AutoencoderSection = Field(default=AutoencoderSection(), description="the autoencoder's losses")
    optim: OptimSection = Field(default=OptimSection(), description="the optimizer")
    train: TrainSection = Field(description="the loop")
    parallel: ParallelSection = Field(
        default=ParallelSection(), description="how several processes share the run; one process ignores most of it"
    )
    validation: ValidationSection | None = Field(default=None, description="held-out clips and samples; null: none")
    sample: SampleSection = Field(default=SampleSection(), description="defaults of `frameloom sample` for this run")
