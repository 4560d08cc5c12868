"""Packages that are measured beside ours; they come with the extra `bench` and are imported when they are needed."""

from __future__ import annotations

from importlib import import_module
from typing import Any

# import name -> name for pip
PACKAGES = {
    "accelerate": "accelerate",
    "cv2": "opencv-python-headless",
    "decord": "decord",
    "diffusers": "diffusers",
    "pandas": "pandas",
    "torchdata": "torchdata",
}


class MissingPeer(Exception):
    """What a comparison is made with is not installed."""


def load_peer(module: str) -> Any:
    """The module, or MissingPeer with the package that brings it."""
    try:
        return import_module(module)
    except ImportError as error:
        package = PACKAGES[module.partition(".")[0]]
        raise MissingPeer(f"{package} is not installed; pip install 'frameloom[bench]'") from error
