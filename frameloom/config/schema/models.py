"""Sections of the models: denoiser, LoRA, autoencoder and its losses, text encoders, given frames."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from frameloom.config.schema.section import Count, Precision, Section, Share


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
        default="fp32", description="dtype of a frozen autoencoder; its latents are fp32 in any case"
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
        default=None, description="dtype of the encoder; its states are fp32 in any case"
    )
    train: bool = Field(
        default=False, description="train it with the denoiser, in fp32 (is_trainable); captions are then not cached"
    )
    lr: Annotated[float, Field(ge=0)] | None = Field(
        default=None, description="its learning rate where it trains; null: optim.lr"
    )


class CaptionNoteSection(Section):
    fps: bool = Field(default=True, description="the frame rate that is trained on: 24 FPS; images have none")
    motion: str | None = Field(
        default="score_vmafmotion",
        description="column of the manifest with the motion score (5 motion score), said of rows that have one; "
        "null: never",
    )
    in_sampling: Literal["as_trained", "sentences"] = Field(
        default="as_trained",
        description="how a prompt gets rate and motion: as in training, or as published (24 FPS. 4 motion score.)",
    )
    motion_in_sampling: Annotated[int, Field(ge=0)] | None = Field(
        default=4, description="motion score of a prompt where sample.motion_score is null; null: none"
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
    update: Literal["alternate", "both"] = Field(
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
