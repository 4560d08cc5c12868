"""Frameloom: one training system for open image and video diffusion models.

    import frameloom

    run = frameloom.train("my.yaml", {"train.steps": 200})
    model = run.load()
    model.sample("a red circle moves left", seed=1).save("circle.mp4")

Importing this package loads no torch; it is loaded by the first call that computes.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from frameloom.core.version import VERSION as __version__

if TYPE_CHECKING:
    from frameloom.api import Run as Run
    from frameloom.api import load as load
    from frameloom.api import load_recipe as load_recipe
    from frameloom.api import train as train
    from frameloom.config.schema.recipe import Recipe as Recipe
    from frameloom.sampling.outputs import Sample as Sample
    from frameloom.sampling.pipeline import Pipeline as Pipeline

_HOMES = {
    "Pipeline": "frameloom.sampling.pipeline",
    "Recipe": "frameloom.config.schema.recipe",
    "Run": "frameloom.api",
    "Sample": "frameloom.sampling.outputs",
    "load": "frameloom.api",
    "load_recipe": "frameloom.api",
    "train": "frameloom.api",
}
__all__ = ["Pipeline", "Recipe", "Run", "Sample", "__version__", "load", "load_recipe", "train"]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'frameloom' has no attribute '{name}'")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})
