"""The section of each bucket policy. Keys are named as in the trainer that a policy comes from.

Every key has a default, so that a policy can be chosen by its name alone.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from frameloom.config.schema.section import Count, ExpectedText, Section, Share

Positive = Annotated[float, Field(gt=0)]
Size = Annotated[tuple[Count, Count], ExpectedText("[height, width] in pixels")]

# SDXL's sizes as [height, width]; three stand there twice, which doubled their chance in the original.
SDXL_SIZES: tuple[tuple[int, int], ...] = (
    *((512, 512), (768, 768), (704, 1344), (704, 1408), (768, 1280), (768, 1344), (832, 1152), (832, 1216)),
    *((896, 1088), (896, 1152), (960, 1024), (960, 1088), (1024, 960), (1024, 1024), (1088, 896), (1088, 960)),
    *((1152, 832), (1152, 896), (1216, 832), (1280, 768), (1344, 704), (1344, 768), (1408, 704), (1472, 704)),
    *((1472, 704), (1536, 640), (1600, 640), (1600, 640), (1664, 576), (1728, 576), (1728, 576)),
)


class RatioTokensSection(Section):
    """CogVideoX-Fun's buckets: a table of aspect ratios, and sizes and lengths under one number of tokens."""

    video_sample_size: Count = Field(
        default=512, description="side in pixels of a square video; other ratios have about this area"
    )
    image_sample_size: Count = Field(default=512, description="the same for images; also the largest size of videos")
    token_sample_size: Count = Field(
        default=512, description="a clip holds at most video_sample_n_frames * token_sample_size ^ 2 pixels"
    )
    video_sample_n_frames: Count = Field(default=17, description="the most frames of a clip")
    video_sample_stride: Count = Field(default=4, description="every how many frames of the file one is taken")
    train_batch_size: Count = Field(default=16, description="clips per micro-batch, before short ones are filled up")
    random_hw_adapt: bool = Field(default=False, description="draw the size of each clip anew in each epoch")
    training_with_video_token_length: bool = Field(
        default=False, description="larger sizes get fewer frames, and batches of small clips hold 2 or 4 times as many"
    )
    random_frame_crop: bool = Field(default=False, description="one clip in ten is cut to a shorter, random length")
    random_ratio_crop: bool = Field(default=False, description="draw the aspect ratio instead of taking the nearest")
    keep_all_node_same_token_length: bool = Field(
        default=False, description="draw a number of tokens for each clip and shorten it to that"
    )
    as_published: bool = Field(
        default=False,
        description="as the original: lengths may exceed the tokens, tiny clips may get any size",
    )


class GroupedSection(Section):
    """Open-Sora-Plan's buckets: one size, or each clip's own size under a limit; lengths follow the clip."""

    num_frames: Count = Field(default=93, description="the most frames of a clip")
    batch: Count = Field(default=1, description="clips per micro-batch")
    force_resolution: bool = Field(default=False, description="all clips get max_height x max_width")
    max_height: Count = Field(default=352, description="height in pixels (force_resolution)")
    max_width: Count = Field(default=640, description="width in pixels (force_resolution)")
    max_hxw: Count = Field(default=236544, description="the most pixels of a frame; larger clips are scaled down")
    min_hxw: Count | None = Field(default=None, description="the fewest pixels of a frame; null: a quarter of max_hxw")
    hw_stride: Count = Field(default=32, description="sides are cut to a multiple of this many pixels")
    ratio_limits: tuple[Positive, Positive] = Field(
        default=(0.5, 2.0), description="smallest and largest height / width (relative to the forced one)"
    )
    train_fps: Positive = Field(default=24.0, description="clips are thinned, or frames repeated, to this rate")
    speed_factor: Annotated[float, Field(ge=1)] = Field(
        default=1.0, description="longer clips are sped up by at most this factor"
    )
    too_long_factor: Positive = Field(
        default=5.0, description="drop clips longer than this many times num_frames at train_fps"
    )
    drop_short_ratio: Share = Field(default=0.0, description="share of clips shorter than num_frames that is dropped")
    sp_size: Count = Field(default=1, description="latent frames are a multiple of this (sequence parallel)")
    min_frames: Count | None = Field(
        default=None, description="drop videos that would be shorter; null: 1, as published 29"
    )
    min_group: Annotated[int, Field(ge=0)] | None = Field(
        default=None, description="leave out shapes of fewer clips; null: 0, as published 4 batches"
    )
    as_published: bool = Field(
        default=False,
        description="as the original: min_frames 29, rare shapes left out, the last window of a clip never used",
    )


class MultiAspectSection(Section):
    """SDXL's list of sizes; each clip goes to the size nearest to its own shape."""

    sizes: Annotated[tuple[Size, ...], Field(min_length=1)] = Field(
        default=SDXL_SIZES, description="[height, width] of each size; one that stands here twice counts twice"
    )
    frames: Count = Field(default=1, description="frames of a clip; 1 also takes single frames of videos")
    batch: Count = Field(default=1, description="clips per micro-batch")
    as_published: bool = Field(
        default=False, description="as the original: draw one of the sizes, whatever the shape of the clip"
    )


class FixedSection(Section):
    """One size and one length for all clips."""

    height: Count = Field(default=256, description="height in pixels")
    width: Count = Field(default=256, description="width in pixels")
    frames: Count = Field(default=17, description="frames of a clip; shorter videos are not used")
    batch: Count = Field(default=1, description="clips per micro-batch")
    image_batch: Count | None = Field(default=None, description="images per micro-batch; null: images are not used")


class TokenBudgetSection(Section):
    """The grid of `data.buckets`, with batch sizes that follow from a number of tokens."""

    tokens: Count = Field(
        default=16384,
        description="tokens of a micro-batch; the batch sizes in data.buckets become upper limits, and the least is 1",
    )
    attention: Count | None = Field(
        default=None,
        description="tokens of a clip at which attention takes as long as everything else, as `frameloom plan` finds "
        "it: micro-batches of a step then are alike in time; null: alike in tokens",
    )
