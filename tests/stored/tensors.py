"""What a checkpoint folder holds, read with nothing but the safetensors library."""

from __future__ import annotations

import hashlib
from pathlib import Path

import torch
from safetensors.torch import load_file


def read_tensors(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors below `<group>/<name>`."""
    return {
        f"{path.stem}/{name}": tensor
        for path in sorted(folder.glob("*.safetensors"))
        for name, tensor in sorted(load_file(path).items())
    }


def digest_tensors(folder: Path) -> dict[str, str]:
    """For each group of tensors the SHA-256 of its names, types, shapes and bits."""
    digests: dict[str, hashlib._Hash] = {}
    for name, tensor in read_tensors(folder).items():
        digest = digests.setdefault(name.partition("/")[0], hashlib.sha256())
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        digest.update(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return {group: digest.hexdigest() for group, digest in digests.items()}
