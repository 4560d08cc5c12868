"""The recipe's keys of teaching a model one thing from a few pictures: textual inversion and DreamBooth."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from frameloom.config.schema.section import Count, Section, Words

Placeholder = Annotated[
    str, Field(pattern=r"^[^\s{}]{1,60}$"), Words("a word without spaces and braces, e.g. <cat-toy>")
]


class InversionSection(Section):
    placeholder: Placeholder = Field(default="<thing>", description="the new word, to be used in prompts")
    num_vectors: Count = Field(default=1, description="vectors that it has in each text encoder")
    initializer: str | None = Field(
        default=None, description="a known word that the vectors start from; null: small random numbers"
    )
    templates: Literal["object", "style", "face", "captions"] = Field(
        default="object", description="what a picture is called while training; captions: its own, with the word in it"
    )
    template_file: str | None = Field(
        default=None, description="a text file of templates instead, one per line, with {} for the word"
    )
    weights: str | None = Field(
        default=None, description="start from this file of vectors, or from the folder of an inversion run"
    )


class DreamBoothSection(Section):
    instance_prompt: str = Field(
        default="", description="what all pictures of data are called", examples=["a photo of sks dog"]
    )
    class_prompt: str | None = Field(
        default=None,
        description="what pictures of others of its kind are called, which the model shall not unlearn; null: none",
        examples=["a photo of a dog"],
    )
    class_folder: str | None = Field(
        default=None, description="folder of such pictures; as many as it lacks are made by the model itself"
    )
    num_class_images: Count = Field(default=50, description="pictures that the folder must hold")
    prior_weight: Annotated[float, Field(ge=0)] = Field(
        default=1.0, description="weight of the loss on them beside that on the pictures of data (prior_loss_weight)"
    )
