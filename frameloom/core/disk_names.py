"""Names that are on disk, or that numbers and caches follow from: a format, whatever a class or a module is called.

Another spelling of any of these makes other random numbers, a checkpoint that is not resumed, a cache that is not
found or a file that is not read. So a rename in the code leaves them alone; `tests/core/test_disk_names.py` compares
this list with the code and with files of an earlier version. A new name is added here and to the code together; one
that is here is never given another meaning.
"""

from __future__ import annotations

# Purposes of keyed random streams (`core/random.py`). A `*` stands for what is filled in: a number, a family, a word.

TRAINING_PURPOSES = (
    "noise",  # of a sample's latent
    "latent",  # the draw from an autoencoder's moments
    "timestep",  # the noise level of a sample
    "timestep strata",  # the order of strata within a group of samples
    "noise offset",
    "input perturbation",
    "caption dropout",
    "caption dropout *",  # by text encoder
    "control",  # noise on a control clip
    "known",  # masks, and the frames that are given
    "empty condition",  # whether an empty condition is kept (CogVideoX-Fun)
    "condition noise",
    "condition sigma",
    "model dropout",  # seeds of the masks of a sample
    "image mixing",  # whether a batch of clips counts as images (autoencoders)
    "discriminator dropout *",  # by what is judged, the next three
    "autoencoder",
    "clips",
    "reconstructions",
)
WEIGHT_PURPOSES = (
    "vae weights",
    "denoiser weights",
    "* weights",  # by family, where nobody gives a generator
    "discriminator weights",
    "discriminator",  # where nobody gives a generator
    "lora weights",
    "new word",  # the vectors of textual inversion, by encoder
    "opensora_plan mask input",
)
ORDER_PURPOSES = (
    "bucket",
    "order",  # of the rows of a bucket
    "run",  # of micro-batches of like cost
    "run place",
    "mixed run",
    "replacement",  # rows that stand in for unreadable ones
    "share",  # which rows of a source come once more
    "joint image *",  # images beside a clip, by attempt
    "pair",  # the class picture beside a subject's
)
READING_PURPOSES = (
    "joint *",  # the four below, for an image beside a clip
    "crop_top",
    "crop_left",
    "flip",
    "frame_start",
    "caption",  # which of a row's captions
    "cached latent",  # noise that is stored with a sample
)
SAMPLING_PURPOSES = (
    "sample",  # initial noise
    "sampler noise",  # noise within the walk
    "reconstruct",
    "refine",  # of a prompt
)
DATA_PURPOSES = (
    "scan shard",  # which process scans a file
    "scan audit",  # which files are read in full
    "report thumbnails",
    "latent statistics",
    "bootstrap",  # of intervals around a mean
    "shapes-plan",  # Moving Shapes: what a set holds
    "shapes-clip",
    "shapes-held-out/*",
    "shapes-prompts",
    "shapes-prompts/*",
    "shapes-prompts-speed/*",
    "shapes-first-frame",
    "calibrate",  # what a device is timed on; no result follows from it
)
PURPOSES = (
    *TRAINING_PURPOSES,
    *WEIGHT_PURPOSES,
    *ORDER_PURPOSES,
    *READING_PURPOSES,
    *SAMPLING_PURPOSES,
    *DATA_PURPOSES,
)

# Checkpoints: a group of tensors is a file, `<group>.safetensors` or `<group>-00001-of-0000N.safetensors`.

TENSOR_GROUPS = (
    "model",  # all weights, or the adapters or vectors that train
    "ema",
    "optimizer",  # `<parameter>.<name>`, with the optimizer's own names
    "master",  # fp32 copies of weights in half precision
    "discriminator",
    "discriminator_optimizer",
    "beside",  # what trains with the model and is no part of it: log-variance, text encoders
    "text_scaling",  # the scale of a set's captions
)
STATE_KEYS = (
    *("step", "epoch", "position", "nonfinite"),
    *("halved", "loss_scale", "spikes"),  # of a step; the last two are null where they are off
    "discriminator",  # the three above, of its own steps
    "manifest",  # fingerprint of the rows
    *("kind", "name", "architecture", "versions"),
    *("lora", "inversion"),  # where these train
    *("files", "placement", "format", "seal"),  # digests by file; pieces of tensors, where several ranks write
)
STATE_PARTS = {
    "loss_scale": ("scale", "clean_steps", "num_overflows"),
    "spikes": ("num_spikes", "norms"),
    "lora": ("rank", "alpha", "base", "weights"),
    "inversion": ("placeholder", "num_vectors", "base"),
    "versions": ("frameloom", "torch", "python"),
}
PLACEMENT_KEYS = ("shape", "parts")

# Files of a run's folder and their keys.

RUN_FILES = {
    "bad_clips.jsonl": ("row", "path", "reason", "epoch", "ordinal", "fatal"),
    "halved/rank-*.json": ("step", "most"),
    "restarts.json": ("step", "restarts"),
    "samples.jsonl": ("file", "prompt", "seed", "key", "sha256"),
    "trackers.json": (),  # names of trackers
    "versions.json": ("frameloom", "torch", "python"),
}

# Model folders (`config.json`) and what exports say of themselves.

MODEL_FOLDER_KEYS = ("kind", "name", "config", "sha256")
MODEL_KINDS = ("denoiser", "vae", "lora", "inversion")
CARD_KEYS = (
    *("format", "run", "step", "kind", "name", "form", "weights", "data", "metrics"),
    *("trained_with", "exported_with", "recipe", "files", "samples"),
)
SAFETENSORS_NOTES = (
    "format",
    "lora_adapter_metadata",  # as diffusers has it
    "placeholder",  # of a learnt word
    "frameloom.card",
    "frameloom.unkept",  # what a layout has no place for
)
# `config` in a model folder, `architecture` in a checkpoint; also part of digests and of caches' fingerprints.
ARCHITECTURE_FIELDS = {
    "denoiser cogvideox_fun": (
        "flip_sin_to_cos",
        "freq_shift",
        "dropout",
        "timestep_activation_fn",
        "norm_elementwise_affine",
        "num_attention_heads",
        "num_layers",
        "attention_head_dim",
        "in_channels",
        "condition",
        "mask_scale",
        "add_noise_in_inpaint_model",
        "patch_size",
        "patch_size_t",
        "patch_bias",
        "time_embed_dim",
        "context_in_dim",
        "max_text_seq_length",
        "sample_height",
        "sample_width",
        "sample_frames",
        "temporal_compression_ratio",
        "use_rotary_positional_embeddings",
        "use_learned_positional_embeddings",
        "spatial_interpolation_scale",
        "temporal_interpolation_scale",
        "attention_bias",
        "norm_eps",
    ),
    "denoiser latte": (
        "attention_bias",
        "norm_eps",
        "dropout",
        "in_channels",
        "context_in_dim",
        "num_layers",
        "num_attention_heads",
        "attention_head_dim",
        "patch_size",
        "sample_size",
        "video_length",
        "learn_sigma",
        "use_rope",
        "compress_kv_factor",
        "interpolation_scale_1d",
        "joint_temporal_positions",
    ),
    "denoiser opensora2": (
        "in_channels",
        "vec_in_dim",
        "context_in_dim",
        "hidden_size",
        "num_heads",
        "depth",
        "depth_single_blocks",
        "axes_dim",
        "mlp_ratio",
        "theta",
        "qkv_bias",
        "guidance_embed",
        "cond_embed",
        "fused_qkv",
        "use_liger_rope",
        "patch_size",
        "normalize_vec",
        "absolute_positions",
        "init",
    ),
    "denoiser opensora_plan": (
        "attention_bias",
        "dropout",
        "in_channels",
        "context_in_dim",
        "num_layers",
        "num_attention_heads",
        "attention_head_dim",
        "patch_size",
        "sparse1d",
        "sparse_n",
        "interpolation_scale_t",
        "interpolation_scale_h",
        "interpolation_scale_w",
        "norm_eps",
        "inpaint",
        "vae_scale_factor_t",
    ),
    "denoiser sdxl": (
        "in_channels",
        "context_in_dim",
        "vec_in_dim",
        "model_channels",
        "channel_mult",
        "transformer_depth",
        "attention_resolutions",
        "num_res_blocks",
        "num_head_channels",
        "norm_groups",
        "size_embed_dim",
        "aesthetic",
    ),
    "vae wfvae": (
        "latent_channels",
        "base_channels",
        "encoder_res_blocks",
        "decoder_res_blocks",
        "encoder_flow_channels",
        "decoder_flow_channels",
        "connect_res_blocks",
        "norm",
        "time_interpolation",
        "attention",
        "dropout",
        "level1_temporal",
        "level2_temporal",
        "scale",
        "shift",
    ),
    "vae causal": (
        "hidden_size",
        "hidden_size_mult",
        "z_channels",
        "embed_dim",
        "num_res_blocks",
        "encoder_conv_in",
        "encoder_attention",
        "encoder_resnet_blocks",
        "encoder_spatial_downsample",
        "encoder_temporal_downsample",
        "decoder_attention",
        "decoder_resnet_blocks",
        "decoder_spatial_upsample",
        "decoder_temporal_upsample",
        "use_quant_layer",
        "norm_groups",
        "scale",
        "shift",
    ),
    "vae kl": (
        "latent_channels",
        "base_channels",
        "channel_mult",
        "num_res_blocks",
        "norm_groups",
        "scale",
        "shift",
        "force_upcast",
    ),
    "vae cogvideox": (
        "norm_eps",
        "latent_channels",
        "block_channels",
        "layers_per_block",
        "norm_groups",
        "encode_chunk_frames",
        "decode_chunk_latents",
        "decode_first_alone",
        "tiling",
        "tile_height_px",
        "tile_width_px",
        "tile_overlap_height",
        "tile_overlap_width",
        "one_by_one",
        "scale",
        "shift",
    ),
    "vae hunyuan": (
        "latent_channels",
        "block_channels",
        "layers_per_block",
        "norm_groups",
        "attention",
        "spatial_tiling",
        "temporal_tiling",
        "tile_px",
        "tile_frames",
        "tile_overlap",
        "one_by_one",
        "scale",
        "shift",
    ),
    "vae dc_ae": (
        "latent_channels",
        "widths",
        "encoder_depths",
        "decoder_depths",
        "attention",
        "halves_frames",
        "spatial_tiling",
        "temporal_tiling",
        "tile_px",
        "tile_frames",
        "tile_overlap",
        "one_by_one",
        "scale",
        "shift",
    ),
}

# Caches.

LATENT_CACHE_COLUMNS = (
    *("path", "facts", "frames", "height", "width"),
    *("source_bytes", "source_time_ns", "source_sha256", "reason"),
)
TEXT_CACHE_COLUMNS = ("key",)
CACHE_PLACE_COLUMNS = ("made_by", "stack", "slot", "crc", "number", "shard", "shard_bytes", "group")
CACHE_FILE_KEYS = ("format", "kind")
CACHE_TENSORS = (
    *("mean", "std", "sample"),  # of a latent, below `<frames>x<height>x<width>/`
    *("tokens_BKD", "pooled_BD", "mask_BK"),  # of a caption, below `text/`
)
# Keys of the fingerprints in `made-by/`, whose digest names what a sample was made from.
LATENT_FINGERPRINT_KEYS = ("kind", "transforms", "encoder", "dtype", "store")
TEXT_FINGERPRINT_KEYS = ("kind", "encoder", "dtype", "note")
# `is` tells settings apart that have equal fields. These were names of classes once.
FINGERPRINT_KINDS = {
    "Resize": ("fit", "rounding", "max_area"),
    "CenterCrop": ("rounding",),
    "RandomCrop": (),
    "Rescale": (),
    "FrameRule": ("stride", "fps", "speed", "skip_last_start"),
}
FINGERPRINT_POLICIES = ("Fixed", "MultiAspect", "ratio_tokens", "grouped")
READ_SETTINGS = ("frame_start", "transforms", "decoder", "use_image_num", "use_img_from_vid", "control")
# Options of a text encoder in its digest.
TEXT_OPTIONS = ("padding", "pad", "layer", "pooled", "null", "cleaning", "keep_chinese", "precision")
