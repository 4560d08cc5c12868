"""Settings of the loop, and of teaching a model one subject: lengths, loss scale, recompute, profiles, trackers."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from frameloom.config.schema.section import Count, Section, Words

Interval = Annotated[
    Count | Annotated[str, Field(pattern=r"^[1-9]\d* epochs?$")],
    Words("a whole number of steps of at least 1, or of epochs: 500, 1 epoch, 2 epochs"),
]
_AMOUNT = Field(pattern=r"^\d+(\.\d+)? ?[GM]B$")
Amount = Annotated[str, _AMOUNT, Words("an amount of memory: 25GB, 800MB")]
Memory = Annotated[
    Annotated[float, Field(gt=0, le=1)] | Annotated[str, _AMOUNT],
    Words("a share of the device's memory above 0 and up to 1, or an amount: 0.9, 30GB, 800MB"),
]
Precision = Literal["fp32", "bf16", "fp16"]
Choice = Annotated[bool | Literal["auto"], Words("true, false or auto")]


class LossScaleSection(Section):
    mode: Literal["dynamic", "static"] = Field(
        default="dynamic",
        description="dynamic: smaller after an overflow, larger after many steps without; static: fixed",
    )
    initial: Annotated[float, Field(gt=0)] = Field(
        default=65536, description="the scale of the first step (static: of all steps); powers of 2 round nothing"
    )
    factor: Annotated[float, Field(gt=1)] = Field(
        default=2, description="what a dynamic scale is multiplied or divided by"
    )
    window: Count = Field(default=2000, description="steps in a row without overflow after which a dynamic scale grows")
    minimum: Annotated[float, Field(gt=0)] = Field(
        default=1, description="a dynamic scale does not fall below; an overflow there counts as not finite"
    )


class ProfileSection(Section):
    start: Count = Field(default=5, description="the first step recorded; the steps before warm things up")
    steps: Annotated[int, Field(ge=1, le=100)] = Field(
        default=3, description="steps recorded; each may write several megabytes"
    )
    memory: bool = Field(default=True, description="record what is allocated, too")


def interval_epochs(interval: int | str) -> int | None:
    """The epochs of an interval; None for one in steps."""
    return int(interval.split()[0]) if isinstance(interval, str) else None


def is_due(interval: int | str, *, step: int, epoch: int, position: int) -> bool:
    """Whether something is done after `step`; `epoch` and `position` are where the next step begins."""
    epochs = interval_epochs(interval)
    if epochs is None:
        return step % int(interval) == 0
    return position == 0 and epoch % epochs == 0


def memory_bytes(amount: str) -> int:
    """30GB to bytes; as memory is sold, a gigabyte is 2^30 bytes."""
    return int(float(amount[:-2]) * {"G": 2**30, "M": 2**20}[amount[-2]])


Compile = Annotated[
    bool | Literal["inductor", "aot_eager", "eager"],
    Words("true, false, or the name of a compiler: inductor, aot_eager or eager"),
]


class RecomputeSection(Section):
    skip: Annotated[int, Field(ge=0)] = Field(
        default=0, description="the last blocks of each kind that keep their activations (num_no_recompute)"
    )
    blocks: dict[str, Annotated[int, Field(ge=0)]] = Field(
        default={},
        description="how many blocks of a kind, from the first on, as in {double_blocks: 8}; other kinds: all",
        examples=[{"double_blocks": 8}],
    )
    every: Count = Field(default=1, description="of these blocks only each k-th, the first among them")
    offload: bool = Field(default=False, description="what blocks are given waits in host memory; needs a GPU")
    buffer: Amount | None = Field(
        default=None,
        description="the most pinned host memory for that; null: no limit (grad_ckpt_buffer_size, in two-byte numbers)",
        examples=["25GB"],
    )


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
