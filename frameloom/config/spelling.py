"""Nearest spellings: from a word that is wrong to the one that was meant."""

from __future__ import annotations

import sys
from collections.abc import Iterable

# Names that other trainers use, and where the idea lives here.
SYNONYMS = {
    "learning_rate": "optim.lr",
    "optimizer": "optim",
    "lr_scheduler": "optim.schedule.name",
    "lr_warmup_steps": "optim.schedule.warmup_steps",
    "scheduler": "optim.schedule.name",
    "adam_eps": "optim.eps",
    "adam_epsilon": "optim.eps",
    "adam_betas": "optim.betas",
    "optim_eps": "optim.eps",
    "adam_weight_decay": "optim.weight_decay",
    "group_strategy": "optim.decay_norms",
    "use_came": "optim.name",
    "use_8bit_adam": "optim.name",
    "trainable_modules": "optim.trainable",
    "trainable_modules_low_learning_rate": "optim.groups",
    "initial_grad_norm_ratio": "optim.clip_fade.ratio",
    "abnormal_norm_clip_start": "optim.clip_fade.fade_steps",
    "start_learning_rate": "optim.lr",
    "base_learning_rate": "optim.lr",
    "end_learning_rate": "optim.schedule.min_share",
    "lr_decay_steps": "optim.schedule.decay_steps",
    "lr_num_cycles": "optim.schedule.num_cycles",
    "lr_power": "optim.schedule.power",
    "max_grad_norm": "optim.clip_norm",
    "grad_clip": "optim.clip_norm",
    "gradient_clipping": "optim.clip_norm",
    "max_steps": "train.steps",
    "num_steps": "train.steps",
    "max_train_steps": "train.steps",
    "gradient_accumulation_steps": "train.accumulate",
    "accumulation_steps": "train.accumulate",
    "mixed_precision": "train.precision",
    "dtype": "train.precision",
    "gradient_checkpointing": "train.recompute",
    "grad_checkpoint": "train.recompute",
    "use_recompute": "train.recompute",
    "num_no_recompute": "train.recompute.skip",
    "grad_ckpt_settings": "train.recompute.blocks",
    "grad_ckpt_setting": "train.recompute.blocks",
    "grad_ckpt_buffer_size": "train.recompute.offload",
    "torch_compile": "train.compile",
    "ema_decay": "train.ema.decay",
    "use_ema": "train.ema",
    "num_train_epochs": "train.epochs",
    "num_epochs": "train.epochs",
    "loss_scaler_type": "train.loss_scale.mode",
    "init_loss_scale": "train.loss_scale.initial",
    "initial_scale": "train.loss_scale.initial",
    "loss_scale_factor": "train.loss_scale.factor",
    "scale_window": "train.loss_scale.window",
    "param_fp16": "train.weights_precision",
    "vae_precision": "vae.precision",
    "vae_fp32": "vae.precision",
    "disable_first_stage_amp": "vae.precision",
    "vae_keep_gn_fp32": "vae.fp32_norms",
    "text_encoder_precision": "text.encoders.0.precision",
    "val_interval": "validation.every",
    "ckpt_save_interval": "train.save_every",
    "log_interval": "train.log_every",
    "checkpointing_steps": "train.save_every",
    "ckpt_every": "train.save_every",
    "checkpoint_every": "train.save_every",
    "batch_size": "data.buckets",
    "train_batch_size": "data.buckets",
    "bucket_config": "data.buckets",
    "dataset": "data",
    "num_workers": "data.workers",
    "num_bad": "data.bad_limit",
    "output_dir": "run.folder",
    "outputs": "run.folder",
    "random_seed": "seed",
    "guidance_scale": "sample.guidance",
    "cfg_scale": "sample.guidance",
    "num_inference_steps": "sample.steps",
    "num_frames": "sample.frames",
    "text_encoder": "text.encoders",
    "caption_dropout": "text.dropout",
    "snr_gamma": "objective.min_snr_gamma",
    "loss": "objective.kind",
    "prediction_type": "objective.kind",
}

_MAX_WORD = 64


def distance(one: str, other: str, *, limit: int = sys.maxsize) -> int:
    """Edits between two words: insert, delete, replace, or swap two neighbours; beyond `limit`, any number above it."""
    if abs(len(one) - len(other)) > limit:
        return limit + 1
    before: list[int] = []
    row = list(range(len(other) + 1))
    for i, left in enumerate(one, 1):
        older, before, row = before, row, [i]
        for j, right in enumerate(other, 1):
            cost = min(before[j] + 1, row[j - 1] + 1, before[j - 1] + (left != right))
            if i > 1 and j > 1 and left == other[j - 2] and one[i - 2] == right:
                cost = min(cost, older[j - 2] + 1)
            row.append(cost)
        # What follows is built on these two rows and never falls below both.
        if min(row) > limit and min(before) > limit:
            return limit + 1
    return row[-1]


def nearest(word: str, candidates: Iterable[str]) -> str | None:
    """The candidate that `word` is most likely a slip of, or None when nothing is close."""
    if len(word) > _MAX_WORD:
        return None
    plain = _fold(word)
    limit = max(1, len(plain) // 3)
    scored = [(distance(plain, _fold(candidate), limit=limit), candidate) for candidate in candidates]
    close = [(score, candidate[:1] != word[:1], candidate) for score, candidate in scored if score <= limit]
    return min(close)[2] if close else None


def share_words(word: str, candidates: Iterable[str]) -> str | None:
    """The only candidate that begins alike (maxlen, max_length) or is a part of the word (num_steps, steps)."""
    start, parts = _fold(word).replace("_", ""), _fold(word).split("_")
    alike = [
        name for name in candidates if name in parts or (len(start) > 2 and name.replace("_", "").startswith(start))
    ]
    return alike[0] if len(alike) == 1 else None


def suggest(word: str, candidates: Iterable[str], *, kind: str) -> str:
    """`did you mean 'x'?`, or the whole list when nothing is close."""
    known = list(candidates)
    near = nearest(word, known)
    return f"did you mean '{near}'?" if near else f"known {kind}: {', '.join(known)}"


def _fold(word: str) -> str:
    return word.casefold().replace("-", "_")
