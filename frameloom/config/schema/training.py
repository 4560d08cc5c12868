"""The section of the training loop, with its parts, and the sections of subject tuning (inversion, DreamBooth)."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from frameloom.config.schema.section import Count, ExpectedText, Precision, Section

Interval = Annotated[
    Count | Annotated[str, Field(pattern=r"^[1-9]\d* epochs?$")],
    ExpectedText("a whole number of steps of at least 1, or of epochs: 500, 1 epoch, 2 epochs"),
]
_AMOUNT = Field(pattern=r"^\d+(\.\d+)? ?[GM]i?B$")
Amount = Annotated[str, _AMOUNT, ExpectedText("an amount of memory: 25GB, 800MB")]
Memory = Annotated[
    Annotated[float, Field(gt=0, le=1)] | Annotated[str, _AMOUNT],
    ExpectedText("a share of the device's memory above 0 and up to 1, or an amount: 0.9, 30GB, 800MB"),
]
Choice = Annotated[bool | Literal["auto"], ExpectedText("true, false or auto")]
Compile = Annotated[
    bool | Literal["inductor", "aot_eager", "eager"],
    ExpectedText("true, false, or the name of a compiler: inductor, aot_eager or eager"),
]
Device = Annotated[str, Field(pattern=r"^(auto|cpu|cuda(:\d+)?)$"), ExpectedText("auto, cpu, cuda or cuda:N")]


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


class EMASection(Section):
    decay: Annotated[float, Field(ge=0, lt=1)] = Field(
        default=0.999, description="share kept of the average at each step"
    )
    warmup: bool = Field(default=True, description="average faster in the first steps")
    every: Count = Field(
        default=1, description="steps between updates, each then counting for as many; saves time with small models"
    )
    on_cpu: bool = Field(default=False, description="keep the average in host memory; each update copies the weights")


class TrainSection(Section):
    steps: Count | None = Field(
        default=None, description="optimizer steps of the whole run; null: see epochs", examples=[1000]
    )
    epochs: Count | None = Field(
        default=None, description="passes over the data instead, from which the number of steps follows"
    )
    accumulate: Count = Field(default=1, description="micro-batches per step")
    precision: Precision = Field(
        default="fp32", description="dtype of the forward pass; losses, norms and the optimizer stay fp32"
    )
    weights_precision: Precision = Field(
        default="fp32",
        description="dtype of the denoiser's weights; norms stay fp32, and so do copies for the optimizer",
    )
    loss_scale: LossScaleSection | None = Field(
        default=None,
        description="multiplies the loss so that small gradients survive; null: dynamic with fp16, none otherwise",
    )
    recompute: bool | RecomputeSection = Field(
        default=False,
        description="recompute blocks in the backward pass: less memory, more time; a section says which blocks",
    )
    compile: Compile = Field(
        default=False, description="compile each block as one graph: slow to start, faster afterwards; true: inductor"
    )
    ema: EMASection | None = Field(default=EMASection(), description="moving average of the weights; null: none")
    on_nonfinite: Literal["skip", "stop"] = Field(default="skip", description="a loss or gradient that is not finite")
    nonfinite_limit: Count = Field(default=3, description="stop after this many such steps in a row")
    log_every: Count = Field(default=10, description="steps between metrics")
    save_every: Interval = Field(
        default=500, description="steps between checkpoints; or epochs, as in 2 epochs", examples=[500]
    )
    async_save: bool = Field(
        default=False,
        description="write checkpoints in the background: a step waits only for a copy of the state in host memory",
    )
    checkpoint: Literal["auto", "whole", "sharded"] = Field(
        default="auto",
        description="saved by the first process (whole) or each its part (sharded); auto: sharded where state is split",
    )
    keep: Annotated[int, Field(ge=2)] = Field(
        default=2, description="complete checkpoints kept; the newest may be the damaged one"
    )
    device: Device = Field(default="auto", description="where the run computes; auto: a GPU if there is one")
    encoder_offload: bool = Field(
        default=False,
        description="weights of the autoencoder and the text encoders wait in host memory between uses; for a GPU",
    )
    gc_every: Count | None = Field(
        default=None,
        description="steps between collections of Python's garbage, in all processes alike; null: when Python likes",
    )
    max_device_memory: Memory | None = Field(
        default=None, description="the most that the run takes of a GPU: a share, or an amount as 30GB; null: all"
    )
    oom_split: bool = Field(
        default=True,
        description="a micro-batch that does not fit in memory runs in halves from then on, with the same result; "
        "false: it ends the run",
    )
    side_by_side: Choice = Field(
        default="auto",
        description="no effect any more: every micro-batch runs whole; accepted from older recipes",
    )
    preflight: Choice = Field(
        default="auto",
        description="run the largest batch of each bucket once before the first step; auto: on a GPU",
    )
    deterministic: bool = Field(
        default=False, description="only operations that give the same bits each time, which may be slower on a GPU"
    )
    profile: ProfileSection | None = Field(
        default=None, description="record some steps to a trace in the run's folder; null: no"
    )

    @property
    def num_steps(self) -> int:
        """Steps of the whole run; of a recipe in epochs they are known once its data is."""
        assert self.steps is not None
        return self.steps


def is_due(interval: int | str, step: int, epoch: int, position: int) -> bool:
    """Whether something is done after `step`; `epoch` and `position` are where the next step begins."""
    if isinstance(interval, str):
        return position == 0 and epoch % int(interval.split()[0]) == 0
    return step % interval == 0


Placeholder = Annotated[
    str, Field(pattern=r"^[^\s{}]{1,60}$"), ExpectedText("a word without spaces and braces, e.g. <cat-toy>")
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
