"""The section of the autoencoder's losses: reconstruction, the pull on its latents, LPIPS and a discriminator."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from frameloom.config.schema.section import Count, Section, Share

Weight = Annotated[float, Field(ge=0)]


class LpipsSection(Section):
    weights: str | None = Field(
        default=None,
        examples=["models/lpips_vgg.safetensors"],
        description="VGG16 with the published linear heads in one .safetensors file; not part of this package",
    )
    heads: str | None = Field(
        default=None, description="the linear heads, where weights is a plain VGG16 (torchvision's keys)"
    )
    weight: Weight = Field(default=1.0, description="its part in the loss; 0: only validation measures it")
    channels: Count = Field(default=64, description="width of the network's first layers; 64 as published")


class DiscriminatorSection(Section):
    kind: Literal["3d", "2d"] = Field(
        default="3d", description="judges patches of clips, or of single frames (as in Stable Diffusion's autoencoder)"
    )
    channels: Count = Field(default=64, description="width of its first layer")
    num_layers: Count = Field(
        default=4, description="its layers with a norm: 4 in Open-Sora-Plan 1.3, 5 in Open-Sora 2"
    )
    dropout: Annotated[float, Field(ge=0, lt=1)] = Field(default=0.0, description="behind each of these layers")
    weights: str | None = Field(
        default=None,
        description="start from this file, e.g. discriminator.safetensors of a checkpoint; null: fresh weights",
    )
    start: Annotated[int, Field(ge=0)] = Field(
        default=0, description="steps of the autoencoder alone before the discriminator has a say"
    )
    weight: Weight = Field(default=0.5, description="its part in the autoencoder's loss")
    adaptive: bool = Field(
        default=True, description="balance its gradient with that of the reconstruction at the decoder's last layer"
    )
    loss: Literal["hinge", "vanilla"] = Field(default="hinge", description="its own loss")
    turns: Literal["alternate", "both"] = Field(
        default="alternate", description="from start on, every second step is its own; or both train at each step"
    )
    lr: Annotated[float, Field(gt=0)] | None = Field(
        default=None, description="its learning rate, which follows optim.schedule; null: optim.lr"
    )
    weight_decay: Weight = Field(default=0.01, description="its weight decay; other settings are those of optim")
    clip_norm: Annotated[float, Field(gt=0)] | None = Field(
        default=1.0, description="largest norm of its gradient; null: no clipping"
    )


class AutoencoderSection(Section):
    reconstruction: Literal["l1", "l2"] = Field(default="l1", description="pixel error")
    kl_weight: Weight = Field(default=1e-6, description="pull of the latents to a unit normal")
    wavelet_weight: Weight = Field(default=0.1, description="agreement of encoder and decoder sub-bands")
    logvar: float = Field(
        default=0.0, description="log-variance of the pixels: the reconstruction counts exp(-logvar) times"
    )
    learn_logvar: bool = Field(default=False, description="train logvar along, from that value on")
    lpips: LpipsSection | None = Field(
        default=None, description="perceptual distance, in the loss and in validation; null: none"
    )
    discriminator: DiscriminatorSection | None = Field(
        default=None, description="a second network that learns to tell reconstructions from clips; null: none"
    )
    train_only: Literal["encoder", "decoder"] | None = Field(
        default=None, description="freeze the other half, so that latents stay what they are (decoder); null: train all"
    )
    image_share: Share = Field(
        default=0.0, description="share of micro-batches of which only the first frames are used, as images"
    )
