"""Models and inputs that several processes share a clip of: every way in which the families differ."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from frameloom.core.random import stream
from frameloom.models.denoisers.base import Conditions
from frameloom.models.registry import get_denoiser
from frameloom.models.spec import DenoiserSpec
from frameloom.models.text.base import TextStates

NUM_HEADS = 4
LATENT_CHANNELS, TEXT_WIDTH, POOLED_WIDTH = 4, 24, 12
BATCH, TEXT_TOKENS = 2, 5
# Names of the other inputs, drawn for the cases that ask for them.
BESIDE, IMAGES, DROPOUT = "beside", "images", "dropout"


@dataclass(frozen=True)
class Case:
    """`given` are conditions besides noise, level and text; `images` follow the clip along its frames."""

    family_name: str
    latent_FHW: tuple[int, int, int]
    overrides: dict[str, Any] = field(default_factory=dict)
    given: tuple[str, ...] = ()

    @property
    def family(self) -> DenoiserSpec:
        return get_denoiser(self.family_name)

    def configure(self) -> Any:
        return self.family.configure(
            "tiny",
            latent_channels=LATENT_CHANNELS,
            text_width=TEXT_WIDTH,
            pooled_width=POOLED_WIDTH,
            overrides=SMALL[self.family_name] | self.overrides,
        )

    def build(self) -> nn.Module:
        """In double precision and shaken, so that every weight has a say and the order of a sum has none."""
        model = self.family.build(self.configure(), generator=stream(0, "sequence weights")).double()
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.add_(0.1 * torch.randn(parameter.shape, generator=stream(0, "sequence shake", len(name))))
        return model

    def draw_inputs(self, seed: int = 0) -> tuple[Tensor, Tensor, TextStates, Conditions]:
        generator = stream(seed, "sequence inputs")

        def draw(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator, dtype=torch.float64)

        noisy = draw(BATCH, LATENT_CHANNELS, *self.latent_FHW)
        text = TextStates(draw(BATCH, TEXT_TOKENS, TEXT_WIDTH), _mask(BATCH), draw(BATCH, POOLED_WIDTH))
        beside = draw(BATCH, self._cond_channels(), *self.latent_FHW) if BESIDE in self.given else None
        images = None
        if IMAGES in self.given:
            count = 2 * BATCH
            images = TextStates(draw(count, TEXT_TOKENS, TEXT_WIDTH), _mask(count), draw(count, POOLED_WIDTH))
        seeds = torch.arange(BATCH) + seed if DROPOUT in self.given else None
        found = {"cond_latents": beside, "dropout_seeds": seeds}
        if images is not None:
            found |= {"image_text": images.tokens_BKD, "image_text_mask": images.mask_BK}
        given = {name: value for name, value in found.items() if value is not None}
        return noisy, torch.tensor([0.25, 0.8], dtype=torch.float64), text, given

    def _cond_channels(self) -> int:
        config = self.configure()
        return 1 + LATENT_CHANNELS if self.family_name == "opensora2" else int(config.cond_channels)


def _mask(batch: int) -> Tensor:
    """Captions of three, four and five tokens."""
    return torch.arange(TEXT_TOKENS) < (3 + torch.arange(batch) % 3)[:, None]


SMALL: dict[str, dict[str, Any]] = {
    "latte": {"num_layers": 2, "num_attention_heads": NUM_HEADS, "attention_head_dim": 8},
    "opensora_plan": {"num_layers": 4, "num_attention_heads": NUM_HEADS, "attention_head_dim": 6, "sparse_n": 2},
    "cogvideox_fun": {
        **{"num_layers": 2, "num_attention_heads": NUM_HEADS, "attention_head_dim": 16, "time_embed_dim": 16},
    },
    "opensora2": {
        **{"hidden_size": 32, "num_heads": NUM_HEADS, "axes_dim": [2, 2, 4], "depth": 1, "depth_single_blocks": 2},
    },
}

# Numbers of tokens that neither two nor four divide, unless a name says otherwise.
CASES: dict[str, Case] = {
    "latte": Case("latte", (3, 6, 10)),
    "latte of an even length": Case("latte", (3, 8, 8)),
    "latte, rotary": Case("latte", (3, 6, 10), {"use_rope": True, "learn_sigma": True}),
    "latte with images beside": Case("latte", (5, 6, 10), given=(IMAGES,)),
    "latte, joined keys": Case("latte", (3, 10, 6), {"compress_kv_factor": 2}),
    "latte, joined keys of images": Case("latte", (4, 14, 10), {"compress_kv_factor": 2}, (IMAGES,)),
    "latte of one image": Case("latte", (1, 6, 6)),
    "opensora_plan": Case("opensora_plan", (3, 6, 10)),
    "opensora_plan of an even length": Case("opensora_plan", (2, 8, 8)),
    "opensora_plan, runs of three": Case("opensora_plan", (3, 6, 10), {"sparse_n": 3}),
    "opensora_plan with dropout": Case("opensora_plan", (3, 6, 10), {"dropout": 0.2}, (DROPOUT,)),
    "opensora_plan, inpaint": Case("opensora_plan", (3, 6, 6), {"inpaint": True, "sparse1d": False}, (BESIDE,)),
    "cogvideox_fun": Case("cogvideox_fun", (3, 6, 8)),
    "cogvideox_fun, sinusoids": Case(
        "cogvideox_fun",
        (3, 6, 6),
        {"use_rotary_positional_embeddings": False, "max_text_seq_length": 5, "condition": "inpaint"},
        (BESIDE,),
    ),
    "cogvideox_fun, table": Case(
        "cogvideox_fun", (2, 6, 8), {"use_learned_positional_embeddings": True, "max_text_seq_length": TEXT_TOKENS}
    ),
    "cogvideox_fun with dropout": Case("cogvideox_fun", (3, 6, 8), {"dropout": 0.2}, (DROPOUT,)),
    "cogvideox_fun, two frames a token": Case("cogvideox_fun", (4, 6, 6), {"patch_size_t": 2}),
    "opensora2": Case("opensora2", (3, 6, 8)),
    "opensora2 of an even length": Case("opensora2", (3, 2, 2)),
    "opensora2, released layout": Case(
        "opensora2", (3, 6, 8), {"fused_qkv": False, "use_liger_rope": True, "cond_embed": True}, (BESIDE,)
    ),
    "opensora2, more text than video": Case("opensora2", (1, 2, 4)),
}
# Those whose messages are counted.
MEASURED = (
    *("latte", "latte with images beside", "latte, joined keys", "opensora_plan", "opensora_plan of an even length"),
    *("cogvideox_fun", "opensora2"),
)
