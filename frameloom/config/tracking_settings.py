"""The recipe's keys of trackers that keep runs by project and name."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from frameloom.config.section import Section, Words

TrackerName = Literal["jsonl", "tensorboard", "wandb", "trackio"]
ProjectName = Annotated[
    str,
    Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,79}$"),
    Words("1 to 80 letters, digits, '.', '_' or '-', the first a letter or a digit"),
]


class TrackingSection(Section):
    project: ProjectName = Field(default="frameloom", description="the project that the run is shown in")
    name: str | None = Field(default=None, description="what the run is called there; null: as the recipe")
    tags: tuple[str, ...] = Field(default=(), examples=[["baseline"]], description="words to find the run by")
    offline: bool = Field(
        default=False, description="wandb: write to the run folder only, to be sent later with `wandb sync`"
    )
