"""The section of the data: manifests, transforms, caches, and the choice of a bucket policy."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from frameloom.config.schema.buckets import (
    FixedSection,
    GroupedSection,
    MultiAspectSection,
    RatioTokensSection,
    TokenBudgetSection,
)
from frameloom.config.schema.section import Count, ExpectedText, Section, Share, Where

Cell = Annotated[
    tuple[Share | tuple[Share, Share], Count],
    ExpectedText("[probability, batch size], the probability a number from 0 to 1 or a pair of them"),
]


class CacheSection(Section):
    latents: str | None = Field(default=None, description="folder of the latent cache; null: encode while training")
    text: str | None = Field(default=None, description="folder of the text cache; null: encode while training")
    precision: Literal["fp32", "fp16", "bf16"] = Field(default="fp32", description="dtype of cached tensors")
    store: Literal["moments", "sample"] = Field(
        default="moments",
        description="moments: mean and deviation, noise is drawn while training; sample: half the size, noise fixed",
    )
    on_demand: bool = Field(
        default=False, description="encode what is missing while training and add it to the cache, instead of refusing"
    )
    batch: Count = Field(
        default=1, description="samples encoded at once; above 1, their last bits may depend on their neighbours"
    )
    group: Count = Field(default=1024, description="samples committed together: what a killed `data cache` may lose")
    check_files: bool = Field(
        default=True, description="compare size and time of every source file when a latent cache is opened"
    )
    external: Literal["open_sora_plan", "sdxl", "open_sora2"] | None = Field(
        default=None, description="read a cache that another system wrote, as it is"
    )
    external_folders: tuple[str, ...] = Field(
        default=(),
        description="open_sora_plan: one or two folders of embeddings; sdxl: the cache folder; open_sora2: none",
    )
    external_name: str | None = Field(
        default=None,
        description="embedding names from the manifest's columns, as {stem}-part-{part}; null: open_sora_plan's own",
    )


class TransformSection(Section):
    name: Literal["resize", "center_crop", "random_crop", "rescale"] = Field(
        default="resize", description="the step; rescale stands for bytes to [-1, 1], which always comes last"
    )
    fit: Literal["cover", "short_side", "stretch", "area"] | None = Field(
        default=None,
        description="resize to cover the bucket (null), to its short side, to its very size, or to max_area pixels",
    )
    rounding: Literal["nearest", "down", "up", "even"] | None = Field(
        default=None,
        description="resize: of the side that follows, nearest (null), down or up; "
        "center_crop: of the offset, down (null) or even",
    )
    max_area: Count | None = Field(default=None, description="the most pixels of a frame (fit area)")


class SourceSection(Section):
    path: str = Field(
        default="", description="a manifest, table, list or folder, as in data.manifest", examples=["clips.parquet"]
    )
    root: str | None = Field(default=None, description="folder that its paths start from; null: the one it lies in")
    weight: Annotated[float, Field(gt=0)] | None = Field(
        default=None, description="its part of an epoch relative to the others' weights; null: as many as it has rows"
    )
    repeat: Annotated[float, Field(gt=0)] = Field(
        default=1, description="how often each row comes in an epoch; 0.5: one half and in the next epoch the other"
    )
    where: Where = Field(default={}, description="keep only these rows of it, as in data.where")


class DataSection(Section):
    manifest: str | None = Field(
        default=None,
        description="the clips: a manifest, another system's table or list, or a folder; null: see sources",
        examples=["clips.parquet"],
    )
    sources: tuple[SourceSection, ...] = Field(
        default=(), description="several of them instead, each with its root and its share of an epoch"
    )
    root: str | None = Field(
        default=None, description="folder that the manifest's paths start from; null: the one it lies in"
    )
    where: Where = Field(
        default={},
        description='keep rows whose columns have these values, or a filter: "frames >= 9 and height >= 480"',
    )
    policy: Literal["grid", "token_budget", "ratio_tokens", "grouped", "multi_aspect", "fixed"] = Field(
        default="grid",
        description="how clips are assigned to buckets; the section of the same name below has the keys of a policy",
    )
    buckets: Annotated[dict[str, Annotated[dict[Count, Cell], Field(min_length=1)]], Field(min_length=1)] | None = (
        Field(
            default=None,
            examples=[{"64px": {"9": [1.0, 8]}}],
            description="resolution: {frames: [probability, batch]}; a clip that is not kept falls to the next smaller "
            "(grid, token_budget)",
        )
    )
    token_budget: TokenBudgetSection | None = Field(
        default=None, description="a grid whose batch sizes follow from a number of tokens"
    )
    ratio_tokens: RatioTokensSection | None = Field(
        default=None, description="CogVideoX-Fun: ratio tables, sizes and lengths under one number of tokens"
    )
    grouped: GroupedSection | None = Field(
        default=None, description="Open-Sora-Plan: one size, or each clip's own size under a limit"
    )
    multi_aspect: MultiAspectSection | None = Field(
        default=None, description="SDXL: a list of sizes, the nearest in shape"
    )
    fixed: FixedSection | None = Field(default=None, description="one size and one length")
    fps_max: Annotated[float, Field(gt=0)] = Field(
        default=24, description="faster clips are thinned to at most this rate"
    )
    frame_start: Literal["first", "center", "random"] = Field(
        default="random", description="which part of a longer clip is read"
    )
    transforms: tuple[TransformSection, ...] = Field(
        default=(TransformSection(name="resize"), TransformSection(name="center_crop")),
        min_length=1,
        description="how a picture gets to its bucket's size: resize and a crop, or center_crop and resize to stretch",
    )
    caption_choice: Literal["first", "random"] = Field(
        default="random", description="of a clip with several captions, the first, or another one each time"
    )
    use_image_num: Annotated[int, Field(ge=0)] = Field(
        default=0, description="images trained on beside every video (joint training, family latte)"
    )
    use_img_from_vid: bool = Field(
        default=False, description="take these images from the video's own frames instead of the set's images"
    )
    control: bool = Field(
        default=False,
        description="read the control clip of each row too (manifest column control), for control models",
    )
    flip: Share = Field(default=0.0, description="share of clips mirrored left to right")
    decoder: Literal["pyav", "torchcodec"] = Field(
        default="pyav", description="the video decoder; torchcodec needs the extra of that name"
    )
    cost_group: Count = Field(
        default=64,
        description="neighbouring micro-batches that cost about the same; ranks that divide it never wait for another",
    )
    drop_last: bool = Field(
        default=False, description="drop clips that cannot fill a batch instead of using a smaller one"
    )
    workers: Annotated[int, Field(ge=0)] = Field(
        default=2, description="decoding processes; 0 decodes in the training process"
    )
    timeout_s: Annotated[float, Field(gt=0)] = Field(
        default=60,
        description="a worker that has one clip open for longer is replaced; a clip that does this twice is left out",
    )
    bad_limit: Share = Field(default=0.01, description="stop when more than this share of the clips read is unreadable")
    cache: CacheSection = Field(default=CacheSection(), description="encoded once, read many times")
