"""Names of Stable Diffusion's image autoencoder: those of diffusers' folders and those of Stability's single files.

Files of older versions of diffusers call the attention's layers query, key, value and proj_attn. The decoder counts its
levels from the picture in single files, from the latent in folders.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from torch import Tensor

_RESNET = {name: name for name in ("norm1", "conv1", "norm2", "conv2")} | {"conv_shortcut": "nin_shortcut"}
_ATTENTION = {"group_norm": "norm", "to_q": "q", "to_k": "k", "to_v": "v", "to_out.0": "proj_out"}
_OLD_ATTENTION = {"query": "to_q", "key": "to_k", "value": "to_v", "proj_attn": "to_out.0"}


def _list_names() -> Iterator[tuple[str, str]]:
    """Layers in a folder and in a single file; # is a number, the first one after `up` that of a decoder's level."""
    yield from ((name, name) for name in ("quant_conv", "post_quant_conv"))
    for half, way in (("encoder", "down"), ("decoder", "up")):
        yield from ((f"{half}.{name}", f"{half}.{name}") for name in ("conv_in", "conv_out"))
        yield f"{half}.conv_norm_out", f"{half}.norm_out"
        yield f"{half}.{way}_blocks.#.{way}samplers.0.conv", f"{half}.{way}.#.{way}sample.conv"
        for folder, single in _RESNET.items():
            yield f"{half}.{way}_blocks.#.resnets.#.{folder}", f"{half}.{way}.#.block.#.{single}"
            yield f"{half}.mid_block.resnets.0.{folder}", f"{half}.mid.block_1.{single}"
            yield f"{half}.mid_block.resnets.1.{folder}", f"{half}.mid.block_2.{single}"
        for folder, single in _ATTENTION.items():
            yield f"{half}.mid_block.attentions.0.{folder}", f"{half}.mid.attn_1.{single}"


def _compile(name: str) -> re.Pattern[str]:
    return re.compile(re.escape(name).replace(r"\#", r"(\d+)") + r"\.(weight|bias)")


_TO_SINGLE = [(_compile(folder), single) for folder, single in _list_names()]
_TO_FOLDER = [(_compile(single), folder) for folder, single in _list_names()]


def to_single(key: str, num_levels: int = 4) -> str | None:
    """The name in a single file, without its prefix, for one in a folder, maybe an older one; None without a rule."""
    for old, new in _OLD_ATTENTION.items():
        key = key.replace(f".mid_block.attentions.0.{old}.", f".mid_block.attentions.0.{new}.")
    return _rename(key, _TO_SINGLE, num_levels)


def to_folder(key: str, num_levels: int = 4) -> str | None:
    """The name in a folder for a name in a single file, without its prefix; None for one that no rule covers."""
    return _rename(key, _TO_FOLDER, num_levels)


def _rename(key: str, table: list[tuple[re.Pattern[str], str]], num_levels: int) -> str | None:
    for pattern, target in table:
        if found := pattern.fullmatch(key):
            *numbers, kind = found.groups()
            if target.startswith("decoder.up") and numbers:
                numbers[0] = str(num_levels - 1 - int(numbers[0]))
            for number in numbers:
                target = target.replace("#", number, 1)
            return f"{target}.{kind}"
    return None


def tensor_to_folder(folder_key: str, tensor: Tensor) -> Tensor:
    """1x1 convolutions of the attention become linear layers."""
    is_projection = ".attentions." in folder_key and folder_key.endswith(".weight")
    return tensor[:, :, 0, 0] if is_projection and tensor.shape[2:] == (1, 1) else tensor


def tensor_to_single(single_key: str, tensor: Tensor) -> Tensor:
    is_projection = ".attn_" in single_key and single_key.endswith(".weight") and tensor.ndim == 2
    return tensor[:, :, None, None] if is_projection else tensor
