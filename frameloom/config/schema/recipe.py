"""The recipe: every key, its type, its meaning and its default. The order here is the order of `recipe show`.

Nothing in this file reads a file or imports a model; rules that span several keys are in `config/rules/check.py`.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from frameloom.config.schema.autoencoder import AutoencoderSection
from frameloom.config.schema.data import CaptionNoteSection, DataSection
from frameloom.config.schema.objective import ObjectiveSection
from frameloom.config.schema.optim import OptimSection
from frameloom.config.schema.parallel import ParallelSection
from frameloom.config.schema.sampling import SampleSection, SamplesSection
from frameloom.config.schema.section import Count, Section, Share, Where, Words
from frameloom.config.schema.training import (
    Choice,
    Compile,
    DreamBoothSection,
    Interval,
    InversionSection,
    LossScaleSection,
    Memory,
    Precision,
    ProfileSection,
    RecomputeSection,
    TrackerName,
    TrackingSection,
)

RunName = Annotated[
    str,
    Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,79}$"),
    Words("1 to 80 letters, digits, '.', '_' or '-', the first a letter or a digit"),
]
Device = Annotated[str, Field(pattern=r"^(auto|cpu|cuda(:\d+)?)$"), Words("auto, cpu, cuda or cuda:N")]


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


class ModelSection(Section):
    family: str = Field(default="opensora2", description="the denoiser's family")
    size: str = Field(default="tiny", description="a named size of the family")
    overrides: dict[str, Any] = Field(default={}, description="architecture fields that differ from the named size")
    weights: str | None = Field(
        default=None,
        description="start from this file, model folder, run, or checkpoint of a run; null: fresh weights",
    )


class LoraSection(Section):
    rank: Count = Field(default=16, description="width of an adapter")
    alpha: Annotated[float, Field(gt=0)] | None = Field(
        default=None, description="what an adapter adds is multiplied by alpha / rank; null: as rank, so by 1"
    )
    targets: Annotated[tuple[str, ...], Field(min_length=1)] | None = Field(
        default=None,
        examples=[["to_q", "attn2.*"]],
        description="linear layers with an adapter: ends of their names, with * and ?; null: the family's own choice",
    )
    dropout: Share = Field(default=0.0, description="only 0: it would draw numbers that a resumed run cannot repeat")
    weights: str | None = Field(
        default=None, description="start from this LoRA: a file, or the folder of a LoRA run; null: fresh adapters"
    )


class VAESection(Section):
    name: str = Field(default="wfvae", description="the autoencoder")
    size: str = Field(
        default="tiny", description="a named size of the autoencoder; ignored when weights bring their own"
    )
    overrides: dict[str, Any] = Field(default={}, description="architecture fields that differ from the named size")
    weights: str | None = Field(default=None, description="a model folder, a run folder or a file; null: fresh weights")
    precision: Precision = Field(
        default="fp32", description="number format of a frozen autoencoder; its latents are fp32 in any case"
    )
    fp32_norms: bool = Field(default=False, description="compute its norm layers in fp32 all the same")
    mini_batch: Count | None = Field(
        default=None, description="clips that a frozen autoencoder encodes or decodes at once; null: all of a batch"
    )
    inflate: bool = Field(
        default=False, description="weights are those of an image autoencoder, which a video one starts from (causal)"
    )


class TextEncoderSection(Section):
    name: str = Field(default="minilm", description="the text encoder")
    max_length: Count = Field(default=16, description="captions are padded or cut to this many tokens")
    path: str | None = Field(
        default=None,
        description="folder, or SDXL single file (clip_l, clip_bigg); null: the installed package with it (minilm)",
    )
    tokenizer: str | None = Field(
        default=None, description="folder of the tokenizer of a single file; null: tokenizer/, tokenizer_2/ beside it"
    )
    padding: Literal["attend", "mask"] | None = Field(
        default=None, description="pads are tokens like any other, or left out; null, here and below: the encoder's own"
    )
    pad: Literal["end", "zero", "tokenizer"] | None = Field(
        default=None, description="the token that fills up: end of text, id 0, or the tokenizer's own"
    )
    layer: Literal["last", "penultimate"] | None = Field(
        default=None, description="token states after the last block and its norm, or before the last block"
    )
    pooled: Literal["none", "pooler", "projected"] | None = Field(
        default=None, description="one vector for the caption: none, the end token's state, or its projection"
    )
    null: Literal["encode", "zeros"] | None = Field(
        default=None, description="states of the empty caption: encoded like others, or zeros"
    )
    cleaning: Literal["off", "once", "twice", "list"] | None = Field(
        default=None, description="clean captions as Open-Sora-Plan does"
    )
    keep_chinese: bool | None = Field(default=None, description="cleaning leaves Chinese characters in")
    precision: Literal["fp32", "bf16", "fp16"] | None = Field(
        default=None, description="number format of the encoder; its states are fp32 in any case"
    )
    train: bool = Field(
        default=False, description="train it with the denoiser, in fp32 (is_trainable); captions are then not cached"
    )
    lr: Annotated[float, Field(ge=0)] | None = Field(
        default=None, description="its learning rate where it trains; null: optim.lr"
    )


class TextSection(Section):
    encoders: tuple[TextEncoderSection, ...] = Field(
        default=(TextEncoderSection(),),
        min_length=1,
        description="token states come from the first (sdxl: from all), the pooled vector from the last that has one",
    )
    rescale: bool = Field(
        default=False,
        description="bring the set's captions to one scale before the denoiser sees them; helps small fresh models",
    )
    dropout: Share = Field(default=0.1, description="share of captions replaced by the empty one, for guidance")
    independent_dropout: bool = Field(
        default=False, description="drop the part of each text encoder by a draw of its own (Open-Sora 2.0)"
    )
    note: CaptionNoteSection | None = Field(
        default=None,
        description="facts of a clip behind its caption, in training, in text caches and in sampling (Open-Sora 2.0); "
        "null: none",
    )


class KnownSection(Section):
    law: Literal["ends", "frames", "regions"] = Field(
        default="ends",
        description="what is given to an inpaint model: ends of clips (Open-Sora 2.0), whole frames (Open-Sora-Plan), "
        "or regions and frames (CogVideoX-Fun)",
    )
    shares: dict[str, Annotated[float, Field(ge=0)]] = Field(
        default={},
        description="how often each kind of the law comes, e.g. {t2v: 1, i2v_head: 5}; empty: the published shares",
    )
    image_shares: dict[str, Annotated[float, Field(ge=0)]] = Field(
        default={}, description="the same for single images; empty: the published shares"
    )
    known_share: tuple[Share, Share] = Field(
        default=(0.0, 1.0),
        description="with law frames: least and largest share of frames that continuations and scattered frames give",
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
        default="fp32", description="number format of the forward pass; losses, norms and the optimizer stay fp32"
    )
    weights_precision: Precision = Field(
        default="fp32",
        description="number format of the denoiser's weights; norms stay fp32, and so do copies for the optimizer",
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
    park_encoders: bool = Field(
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
    halve: bool = Field(
        default=True,
        description="a micro-batch that does not fit in memory runs in halves from then on, with the same result; "
        "false: it ends the run",
    )
    side_by_side: Choice = Field(
        default="auto",
        description="no effect any more: every micro-batch runs whole; accepted from older recipes",
    )
    rehearse: Choice = Field(
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

    name: RunName = Field(description="the run's name and folder", examples=["my-run"])
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
    objective: ObjectiveSection = Field(default=ObjectiveSection(), description="the denoiser's training target")
    autoencoder: AutoencoderSection = Field(default=AutoencoderSection(), description="the autoencoder's losses")
    optim: OptimSection = Field(default=OptimSection(), description="the optimizer")
    train: TrainSection = Field(description="the loop")
    parallel: ParallelSection = Field(
        default=ParallelSection(), description="how several processes share the run; one process ignores most of it"
    )
    validation: ValidationSection | None = Field(default=None, description="held-out clips and samples; null: none")
    sample: SampleSection = Field(default=SampleSection(), description="defaults of `frameloom sample` for this run")
