"""What a recipe must know of the models to be checked before any of them is imported.

Names, sizes, strides, frame rules and what can be overridden. The models own these facts; a test holds that both agree.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class VAEFacts:
    """`strides` are pixels (frames, height, width) per latent cell; a causal one takes 1 + n * strides[0] frames, any
    other n * strides[0] or, for an image, 1."""

    strides: tuple[int, int, int]
    causal: bool
    sizes: tuple[str, ...]
    fields: Mapping[str, type]

    def accepts_frames(self, frames: int, patch: int = 1) -> bool:
        """Whether a clip has a latent, and one whose frames fill tokens of `patch` frames; an image always does."""
        if frames <= 1 or (frames - self.causal) % self.strides[0]:
            return frames == 1
        return ((frames - self.causal) // self.strides[0] + self.causal) % patch == 0

    def frame_rule(self, patch: int = 1) -> str:
        step = self.strides[0] * patch
        if not self.causal:
            return f"1 or a multiple of {step}"
        return f"{step}n+1" if patch == 1 else f"1 or {step}n+{step - self.strides[0] + 1}"


@dataclass(frozen=True)
class FamilyFacts:
    """`patch` is latent cells (frames, height, width) per token, and `patches` has it for sizes where it differs;
    `fields` are those of its architecture that a recipe may override, with their types (tuple: a list). `takes` are the
    conditions it can use besides the caption: `sizes` of pictures and their crops, `images` beside a clip, frames that
    are `known`, a `control` clip. `blocks` are the kinds of its repeated blocks. `heads` are the attention heads of a
    size, which limit parallel.sequence; none: the family's clips cannot be shared by processes."""

    patch: tuple[int, int, int]
    sizes: tuple[str, ...]
    fields: Mapping[str, type]
    blocks: tuple[str, ...]
    takes: tuple[str, ...] = ()
    patches: Mapping[str, tuple[int, int, int]] = field(default_factory=dict)
    heads: Mapping[str, int] = field(default_factory=dict)

    def heads_of(self, size: str, overrides: Mapping[str, Any]) -> int | None:
        given = overrides.get("num_heads", overrides.get("num_attention_heads"))
        return given if isinstance(given, int) and self.heads else self.heads.get(size)

    def patch_of(self, size: str, overrides: Mapping[str, Any]) -> tuple[int, int, int]:
        frames, height, width = self.patches.get(size, self.patch)
        across = overrides.get("patch_size")
        if isinstance(across, int):
            height = width = max(1, across)
        along = overrides.get("patch_size_t")
        return max(1, along) if isinstance(along, int) else frames, height, width


@dataclass(frozen=True)
class TextFacts:
    """`max_length` is the longest text, in tokens, that the encoder was trained for; one with a `window` reads longer
    ones in windows of that many tokens, two of which are its start and end, and its length is then
    (window - 2) * n + 2."""

    max_length: int
    window: int | None = None


_WFVAE_FIELDS: dict[str, type] = {
    **dict.fromkeys(("latent_channels", "base_channels", "encoder_res_blocks", "decoder_res_blocks"), int),
    **dict.fromkeys(("encoder_flow_channels", "decoder_flow_channels", "connect_res_blocks"), int),
    **dict.fromkeys(("norm", "time_interpolation"), str),
    **dict.fromkeys(("attention", "level1_temporal", "level2_temporal"), bool),
    "dropout": float,
    **dict.fromkeys(("scale", "shift"), tuple),
}
_OPENSORA2_FIELDS: dict[str, type] = {
    **dict.fromkeys(("hidden_size", "num_heads", "depth", "depth_single_blocks", "theta", "patch_size"), int),
    "mlp_ratio": float,
    "axes_dim": tuple,
    "init": str,
    **dict.fromkeys(("qkv_bias", "guidance_embed", "cond_embed", "fused_qkv", "use_liger_rope"), bool),
    **dict.fromkeys(("normalize_vec", "absolute_positions"), bool),
}
_OPENSORA_PLAN_FIELDS: dict[str, type] = {
    **dict.fromkeys(("num_layers", "num_attention_heads", "attention_head_dim", "patch_size", "sparse_n"), int),
    **dict.fromkeys(("interpolation_scale_t", "interpolation_scale_h", "interpolation_scale_w", "norm_eps"), float),
    "dropout": float,
    **dict.fromkeys(("sparse1d", "inpaint", "attention_bias"), bool),
    "vae_scale_factor_t": int,
}
_LATTE_FIELDS: dict[str, type] = {
    **dict.fromkeys(("num_layers", "num_attention_heads", "attention_head_dim", "patch_size", "video_length"), int),
    "sample_size": tuple,
    **dict.fromkeys(("learn_sigma", "use_rope", "joint_temporal_positions", "attention_bias"), bool),
    "compress_kv_factor": int,
    **dict.fromkeys(("interpolation_scale_1d", "norm_eps", "dropout"), float),
}
_CAUSAL_FIELDS: dict[str, type] = {
    **dict.fromkeys(("hidden_size", "z_channels", "embed_dim", "num_res_blocks", "norm_groups"), int),
    "hidden_size_mult": tuple,
    **dict.fromkeys(("encoder_conv_in", "encoder_attention", "decoder_attention"), str),
    **dict.fromkeys(("encoder_resnet_blocks", "encoder_spatial_downsample", "encoder_temporal_downsample"), tuple),
    **dict.fromkeys(("decoder_resnet_blocks", "decoder_spatial_upsample", "decoder_temporal_upsample"), tuple),
    "use_quant_layer": bool,
    **dict.fromkeys(("scale", "shift"), tuple),
}
_COGVIDEOX_FUN_FIELDS: dict[str, type] = {
    **dict.fromkeys(("num_attention_heads", "num_layers", "attention_head_dim", "patch_size", "patch_size_t"), int),
    **dict.fromkeys(("time_embed_dim", "max_text_seq_length", "temporal_compression_ratio"), int),
    **dict.fromkeys(("sample_height", "sample_width", "sample_frames"), int),
    "condition": str,
    **dict.fromkeys(("mask_scale", "spatial_interpolation_scale", "temporal_interpolation_scale", "norm_eps"), float),
    "dropout": float,
    "freq_shift": int,
    **dict.fromkeys(("use_rotary_positional_embeddings", "use_learned_positional_embeddings"), bool),
    **dict.fromkeys(("add_noise_in_inpaint_model", "patch_bias", "attention_bias"), bool),
    **dict.fromkeys(("norm_elementwise_affine", "flip_sin_to_cos"), bool),
    "timestep_activation_fn": str,
}
_SDXL_FIELDS: dict[str, type] = {
    **dict.fromkeys(("model_channels", "num_res_blocks", "num_head_channels", "norm_groups", "size_embed_dim"), int),
    **dict.fromkeys(("channel_mult", "transformer_depth", "attention_resolutions"), tuple),
    "aesthetic": bool,
}
_KL_FIELDS: dict[str, type] = {
    **dict.fromkeys(("latent_channels", "base_channels", "num_res_blocks", "norm_groups"), int),
    **dict.fromkeys(("channel_mult", "scale", "shift"), tuple),
    "force_upcast": bool,
}
_COGVIDEOX_VAE_FIELDS: dict[str, type] = {
    **dict.fromkeys(("latent_channels", "layers_per_block", "norm_groups"), int),
    **dict.fromkeys(("encode_chunk_frames", "decode_chunk_latents", "tile_height_px", "tile_width_px"), int),
    **dict.fromkeys(("decode_first_alone", "tiling", "one_by_one"), bool),
    **dict.fromkeys(("tile_overlap_height", "tile_overlap_width", "norm_eps"), float),
    **dict.fromkeys(("block_channels", "scale", "shift"), tuple),
}
_HUNYUAN_FIELDS: dict[str, type] = {
    **dict.fromkeys(("latent_channels", "layers_per_block", "norm_groups", "tile_px", "tile_frames"), int),
    **dict.fromkeys(("attention", "spatial_tiling", "temporal_tiling", "one_by_one"), bool),
    "tile_overlap": float,
    **dict.fromkeys(("block_channels", "scale", "shift"), tuple),
}
_DC_AE_FIELDS: dict[str, type] = {
    **dict.fromkeys(("latent_channels", "tile_px", "tile_frames"), int),
    **dict.fromkeys(("widths", "encoder_depths", "decoder_depths", "attention", "halves_frames"), tuple),
    **dict.fromkeys(("spatial_tiling", "temporal_tiling", "one_by_one"), bool),
    "tile_overlap": float,
    **dict.fromkeys(("scale", "shift"), tuple),
}

VAES = {
    "wfvae": VAEFacts(strides=(4, 8, 8), causal=True, sizes=("tiny", "8ch", "16ch"), fields=_WFVAE_FIELDS),
    "causal": VAEFacts(strides=(4, 8, 8), causal=True, sizes=("tiny", "v1.0", "v1.1", "v1.2"), fields=_CAUSAL_FIELDS),
    "kl": VAEFacts(strides=(1, 8, 8), causal=False, sizes=("tiny", "sdxl", "playground-2.5"), fields=_KL_FIELDS),
    "cogvideox": VAEFacts(strides=(4, 8, 8), causal=True, sizes=("tiny", "2b", "5b"), fields=_COGVIDEOX_VAE_FIELDS),
    "hunyuan": VAEFacts(
        strides=(4, 8, 8), causal=True, sizes=("tiny", "opensora2", "hunyuanvideo"), fields=_HUNYUAN_FIELDS
    ),
    "dc_ae": VAEFacts(strides=(4, 32, 32), causal=False, sizes=("tiny", "f32t4c128"), fields=_DC_AE_FIELDS),
}
# Video autoencoders that can start from the weights of an image autoencoder.
INFLATING_VAES = ("causal",)
FAMILIES = {
    "cogvideox_fun": FamilyFacts(
        patch=(1, 2, 2),
        patches={"5b-1.5": (2, 2, 2), "5b-1.5-inpaint": (2, 2, 2)},
        sizes=(
            *("tiny", "2b", "2b-inpaint", "2b-control", "5b", "5b-inpaint", "5b-1.1-inpaint", "5b-control"),
            *("5b-1.5", "5b-1.5-inpaint"),
        ),
        fields=_COGVIDEOX_FUN_FIELDS,
        heads={
            "tiny": 4,
            **dict.fromkeys(("2b", "2b-inpaint", "2b-control"), 30),
            **dict.fromkeys(("5b", "5b-inpaint", "5b-1.1-inpaint", "5b-control", "5b-1.5", "5b-1.5-inpaint"), 48),
        },
        blocks=("transformer_blocks",),
        takes=("known", "control"),
    ),
    "latte": FamilyFacts(
        patch=(1, 2, 2),
        sizes=("tiny", "xl", "xl-221", "xl-513", "xl-d64"),
        fields=_LATTE_FIELDS,
        heads={"tiny": 4, "xl": 16, "xl-221": 16, "xl-513": 16, "xl-d64": 18},
        blocks=("transformer_blocks", "temporal_transformer_blocks"),
        takes=("images",),
    ),
    "opensora2": FamilyFacts(
        patch=(1, 2, 2),
        patches={"11b-dcae": (1, 1, 1)},
        sizes=("tiny", "small", "11b", "11b-dcae", "flux-dev"),
        fields=_OPENSORA2_FIELDS,
        heads={"tiny": 4, "small": 4, "11b": 24, "11b-dcae": 24, "flux-dev": 24},
        blocks=("double_blocks", "single_blocks"),
        takes=("known",),
    ),
    "opensora_plan": FamilyFacts(
        patch=(1, 2, 2),
        sizes=("tiny", "tiny-inpaint", "2b", "2b-inpaint"),
        fields=_OPENSORA_PLAN_FIELDS,
        heads={"tiny": 4, "tiny-inpaint": 4, "2b": 24, "2b-inpaint": 24},
        blocks=("transformer_blocks",),
        takes=("known",),
    ),
    "sdxl": FamilyFacts(
        patch=(1, 1, 1),
        sizes=("tiny", "base", "refiner"),
        fields=_SDXL_FIELDS,
        blocks=("resnets", "transformer_blocks"),
        takes=("sizes", "log_sigma"),
    ),
}
TEXT_ENCODERS = {
    "minilm": TextFacts(max_length=512),
    "t5": TextFacts(max_length=512),
    "mt5": TextFacts(max_length=1024),
    "clip_l": TextFacts(max_length=602, window=77),
    "clip_bigg": TextFacts(max_length=602, window=77),
}
# Those that an installed package brings; the others are read from a folder.
PACKAGED_ENCODERS = ("minilm",)
# Kinds of what is given to inpaint models, by law: of clips, of single images.
KNOWN_KINDS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "ends": (
        ("t2v", "i2v_head", "i2v_tail", "i2v_loop", "v2v_head", "v2v_tail", "v2v_head_easy", "v2v_tail_easy"),
        ("t2v",),
    ),
    "frames": (("all", "head", "ends", "continuation", "none", "scattered frames"), ("all", "none")),
    "regions": (
        ("rectangle", "all", "head", "ends", "moment", "pixels", "blocks", "ellipse", "disc", "scattered frames"),
        ("rectangle", "all"),
    ),
}
