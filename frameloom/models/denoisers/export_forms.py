"""Export forms of a denoiser family: published key layouts and config.json, and its class in diffusers.

A family's `weights.py` has an `EXPORT` record of this kind, which its spec links to.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from frameloom.core.errors import ConfigError

Describe = Callable[[Any], Mapping[str, Any]]


@dataclass(frozen=True)
class ExportForms:
    """Layouts are names that the family's `export_original` takes, empty where it takes none.

    describe_original   config -> the original system's config.json; an empty one where that system has none
    describe_diffusers  config -> diffusers' config.json with its `_class_name`; ConfigError for an architecture that
                        diffusers cannot hold. None: diffusers has no such model
    part                folder of the denoiser in a pipeline
    pipeline            config -> class of the pipeline that the denoiser belongs to, "" for none
    join_parts          (config, tensors by part) -> one table of all parts of a pipeline, for families whose original
                        system keeps them in one file; None for others
    """

    original_layout: str = ""
    describe_original: Describe = lambda config: {}
    diffusers_layout: str = ""
    describe_diffusers: Describe | None = None
    part: str = "transformer"
    pipeline: Callable[[Any], str] = lambda config: ""
    join_parts: Callable[[Any, Mapping[Any, Mapping[str, Tensor]]], Mapping[str, Tensor]] | None = None


def refuse_differences(family: str, kind: str, config: Any, needed: Mapping[str, Any]) -> None:
    """ConfigError that names every field of `config` which the class `kind` of diffusers has no switch for."""
    wrong = [
        f"{name} is {getattr(config, name)!r}, it has {value!r}"
        for name, value in needed.items()
        if getattr(config, name) != value
    ]
    if wrong:
        raise ConfigError(
            f"{family}: diffusers' {kind} cannot hold this model ({'; '.join(wrong)}); export it with --to original"
        )


def as_json(value: Mapping[str, Any]) -> dict[str, Any]:
    """Lists for tuples, as a file would give it back."""
    content: dict[str, Any] = json.loads(json.dumps(dict(value)))
    return content
