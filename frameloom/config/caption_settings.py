"""The recipe's keys of what is said about a clip behind its caption."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from frameloom.config.section import Section


class CaptionNoteSection(Section):
    fps: bool = Field(default=True, description="the frame rate that is trained on: 24 FPS; images have none")
    motion: str | None = Field(
        default="score_vmafmotion",
        description="column of the manifest with the motion score (5 motion score), said of rows that have one; "
        "null: never",
    )
    in_sampling: Literal["as_trained", "sentences"] = Field(
        default="as_trained",
        description="how a prompt gets rate and motion: as in training, or as published (24 FPS. 4 motion score.)",
    )
    motion_in_sampling: Annotated[int, Field(ge=0)] | None = Field(
        default=4, description="motion score of a prompt where sample.motion_score is null; null: none"
    )
