"""A real SDXL pipeline of a few hundred thousand weights, as diffusers saves it."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import torch
from diffusers import AutoencoderKL, EulerDiscreteScheduler, StableDiffusionXLPipeline, UNet2DConditionModel
from transformers import CLIPTextModel, CLIPTextModelWithProjection, CLIPTokenizer

from frameloom.core.random import stream
from frameloom.models.denoisers.sdxl.config import SDXLConfig
from frameloom.models.denoisers.sdxl.weights import describe_scheduler, describe_unet, describe_vae
from frameloom.models.text.transformers_folder import quiet_transformers
from frameloom.models.vaes.kl.config import SIZES
from tests.models.text import tiny

# Widths of the two encoders of `tiny.make_sdxl`: 16 and 24 side by side; the second one projects to 28.
UNET = {
    "in_channels": 4,
    "context_in_dim": 40,
    "vec_in_dim": 28,
    "model_channels": 16,
    "channel_mult": [1, 2],
    "transformer_depth": [1, 1],
    "attention_resolutions": [2],
    "num_res_blocks": 1,
    "num_head_channels": 16,
    "norm_groups": 4,
    "size_embed_dim": 8,
}
OVERRIDES = {name: value for name, value in UNET.items() if not name.endswith(("in_channels", "in_dim"))}
VAE = "tiny"


def awake(model: Any, seed: int) -> Any:
    """Every weight drawn, so that none can be mistaken for another."""
    generator = stream(seed, "pipeline weights")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=generator))
    return model.eval()


def make_pipeline(folder: Path) -> Path:
    """A pipeline folder: UNet, autoencoder, two text encoders with tokenizers, scheduler."""
    texts = tiny.make_sdxl(folder.with_name(f"{folder.name}-texts"))
    with torch.random.fork_rng(devices=[]), quiet_transformers():
        torch.manual_seed(0)
        unet = awake(UNet2DConditionModel.from_config(describe_unet(SDXLConfig(**UNET)) | {"sample_size": 8}), 1)
        vae = awake(AutoencoderKL.from_config(describe_vae(SIZES[VAE])), 2)
        pipeline = StableDiffusionXLPipeline(
            unet=unet,
            vae=vae,
            text_encoder=CLIPTextModel.from_pretrained(texts / "text_encoder"),
            text_encoder_2=CLIPTextModelWithProjection.from_pretrained(texts / "text_encoder_2"),
            tokenizer=CLIPTokenizer.from_pretrained(texts / "tokenizer", model_max_length=tiny.POSITIONS),
            tokenizer_2=CLIPTokenizer.from_pretrained(texts / "tokenizer_2", model_max_length=tiny.POSITIONS),
            scheduler=EulerDiscreteScheduler.from_config(describe_scheduler()),
            add_watermarker=False,
        )
        pipeline.save_pretrained(folder)
    return folder


def load_pipeline(folder: Path) -> StableDiffusionXLPipeline:
    with quiet_transformers():
        loaded = StableDiffusionXLPipeline.from_pretrained(folder, local_files_only=True, add_watermarker=False)
    loaded.set_progress_bar_config(disable=True)
    return loaded


def picture(pipeline: StableDiffusionXLPipeline, prompt: str = "a red circle") -> torch.Tensor:
    noise = torch.randn(1, 4, 8, 8, generator=stream(0, "picture"))
    with torch.no_grad(), warnings.catch_warnings():
        # diffusers' scheduler hands torch tensors to numpy in a way that the installed numpy has deprecated
        warnings.filterwarnings("ignore", message="__array__ implementation", category=DeprecationWarning)
        made = pipeline(prompt, latents=noise, num_inference_steps=2, height=64, width=64, output_type="pt")
    return made.images
