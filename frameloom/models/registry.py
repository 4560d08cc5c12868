"""Tables of denoiser families, autoencoders and text encoders by name; entries are imported at first use."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TypeVar

from frameloom.core.spelling import refuse_unknown
from frameloom.models.spec import DenoiserSpec, TextEncoderSpec, VAESpec, load_object

Spec = TypeVar("Spec", DenoiserSpec, VAESpec, TextEncoderSpec)


class Registry(Mapping[str, Spec]):
    """Specs by name, from a table of "package.module:name"."""

    def __init__(self, targets: Mapping[str, str]) -> None:
        self._targets = dict(targets)

    def __getitem__(self, name: str) -> Spec:
        spec: Spec = load_object(self._targets[name])
        return spec

    def __contains__(self, name: object) -> bool:
        return name in self._targets

    def __iter__(self) -> Iterator[str]:
        return iter(self._targets)

    def __len__(self) -> int:
        return len(self._targets)


DENOISERS: Registry[DenoiserSpec] = Registry(
    {
        "cogvideox_fun": "frameloom.models.denoisers.cogvideox_fun.config:SPEC",
        "latte": "frameloom.models.denoisers.latte.config:SPEC",
        "opensora2": "frameloom.models.denoisers.opensora2.config:SPEC",
        "opensora_plan": "frameloom.models.denoisers.opensora_plan.config:SPEC",
        "sdxl": "frameloom.models.denoisers.sdxl.config:SPEC",
    }
)
VAES: Registry[VAESpec] = Registry(
    {
        "wfvae": "frameloom.models.vaes.wfvae.config:SPEC",
        "causal": "frameloom.models.vaes.causal.config:SPEC",
        "kl": "frameloom.models.vaes.kl.config:SPEC",
        "cogvideox": "frameloom.models.vaes.cogvideox.config:SPEC",
        "hunyuan": "frameloom.models.vaes.hunyuan.config:SPEC",
        "dc_ae": "frameloom.models.vaes.dc_ae.config:SPEC",
    }
)
TEXT_ENCODERS: Registry[TextEncoderSpec] = Registry(
    {
        "minilm": "frameloom.models.text.config:MINILM",
        "t5": "frameloom.models.text.config:T5",
        "mt5": "frameloom.models.text.config:MT5",
        "clip_l": "frameloom.models.text.config:CLIP_L",
        "clip_bigg": "frameloom.models.text.config:CLIP_BIGG",
    }
)


def get_denoiser(name: str) -> DenoiserSpec:
    """The family called `name`; ConfigError with the nearest name when there is none."""
    refuse_unknown(name, DENOISERS, what="denoiser family")
    return DENOISERS[name]


def get_vae(name: str) -> VAESpec:
    refuse_unknown(name, VAES, what="autoencoder")
    return VAES[name]


def get_text_encoder(name: str) -> TextEncoderSpec:
    refuse_unknown(name, TEXT_ENCODERS, what="text encoder")
    return TEXT_ENCODERS[name]
