"""The base class of all sections of the recipe, and types of keys that several of them use."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field


@dataclass(frozen=True)
class ExpectedText:
    """What a value must be, in plain words, where the type alone does not say it."""

    text: str


Share = Annotated[float, Field(ge=0, le=1)]
Count = Annotated[int, Field(ge=1)]
Precision = Literal["fp32", "bf16", "fp16"]
Where = Annotated[
    dict[str, str | int | float | bool] | str,
    ExpectedText('columns with their values, {split: train}, or a filter in quotes, "frames >= 9 and height >= 480"'),
]


class Section(BaseModel):
    """A part of the recipe: frozen, and an unknown key is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)
