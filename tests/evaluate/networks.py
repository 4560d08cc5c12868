"""Real vision networks of a few thousand weights as folders on disk."""

from __future__ import annotations

from pathlib import Path

from transformers import (
    CLIPConfig,
    CLIPImageProcessorPil,
    CLIPModel,
    VideoMAEConfig,
    VideoMAEImageProcessorPil,
    VideoMAEModel,
    ViTConfig,
    ViTModel,
)

from tests.models.text import tiny

SIDE_PX = 16
_VISION = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}


def make_clip(folder: Path, *, seed: int = 0) -> Path:
    """Both halves, tokenizer and image settings."""
    text = tiny.clip_config(width=16).to_dict()
    vision = {**_VISION, "image_size": SIDE_PX, "patch_size": 4, "initializer_range": 0.3}
    config = CLIPConfig(text_config=text, vision_config=vision, projection_dim=20)
    tiny.save(tiny.draw(lambda: CLIPModel(config), seed), folder)
    tiny.write_clip_words(folder, pad=tiny.END)
    _write_processor(folder)
    return folder


def make_vit(folder: Path, *, seed: int = 0, with_pooler: bool = False) -> Path:
    config = ViTConfig(**_VISION, image_size=SIDE_PX, patch_size=4, initializer_range=0.3)
    tiny.save(tiny.draw(lambda: ViTModel(config, add_pooling_layer=with_pooler), seed), folder)
    _write_processor(folder)
    return folder


def make_videomae(folder: Path, *, seed: int = 0, num_frames: int = 4) -> Path:
    more = {"image_size": SIDE_PX, "patch_size": 8, "num_frames": num_frames, "initializer_range": 0.3}
    tiny.save(tiny.draw(lambda: VideoMAEModel(VideoMAEConfig(**_VISION, **more)), seed), folder)
    crop = {"height": SIDE_PX, "width": SIDE_PX}
    VideoMAEImageProcessorPil(size={"shortest_edge": SIDE_PX}, crop_size=crop).save_pretrained(folder)
    return folder


def _write_processor(folder: Path) -> None:
    crop = {"height": SIDE_PX, "width": SIDE_PX}
    CLIPImageProcessorPil(size={"shortest_edge": SIDE_PX}, crop_size=crop).save_pretrained(folder)
