"""Model card of an export: `frameloom.json` for programs, `README.md` for people.

The table carries the whole recipe, so `frameloom replay` can start the run again from an export alone.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from frameloom.builders.published import read_table
from frameloom.config.loading.render import render_yaml
from frameloom.config.schema.recipe import Recipe
from frameloom.core.errors import CheckpointError
from frameloom.core.text_files import read_records
from frameloom.core.version import VERSION
from frameloom.data.media.writing import CONTACT_SHEET

CARD, README = "frameloom.json", "README.md"
NOTE = "frameloom.card"  # the same table among the notes of a .safetensors file
FORMAT = 1
_PICTURES = (".png", ".jpg", ".gif")
_CLIPS = (*_PICTURES, ".mp4", ".webm")
_MOST_SAMPLES = 8


@dataclass(frozen=True)
class Card:
    """Where an export comes from. `how` are lines of Markdown that show how it is opened."""

    run: str
    recipe: Recipe
    step: int
    kind: str
    name: str
    form: str
    weights: str
    manifest: str
    versions: Mapping[str, str]
    metrics: Mapping[str, float]
    how: Sequence[str] = ()

    def table(self) -> dict[str, Any]:
        """Everything but the digests of files, which are known once these are written."""
        return {
            "format": FORMAT,
            "run": self.run,
            "step": self.step,
            "kind": self.kind,
            "name": self.name,
            "form": self.form,
            "weights": self.weights,
            "data": {"manifest": self.recipe.data.manifest, "fingerprint": self.manifest},
            "metrics": dict(self.metrics),
            "trained_with": dict(self.versions),
            "exported_with": {"frameloom": VERSION},
            "recipe": self.recipe.model_dump(mode="json"),
        }


def write_card(folder: Path, card: Card, *, files: Mapping[str, str], samples: Sequence[str]) -> None:
    """Both files; `files` are SHA-256 by name, `samples` names of pictures and clips below `folder`."""
    table = card.table() | {"files": dict(files), "samples": list(samples)}
    (folder / CARD).write_text(json.dumps(table, indent=2) + "\n", encoding="utf-8")
    (folder / README).write_text(_describe(card, files, samples), encoding="utf-8")


def read_card(path: Path) -> dict[str, Any]:
    """The table of an export's folder; CheckpointError for one that carries none."""
    table = read_table(path / CARD)
    if not table:
        raise CheckpointError(f"{path}: holds no {CARD}; name a folder that `frameloom export` wrote")
    return table


def read_metrics(file: Path, step: int) -> dict[str, float]:
    """The last value of each metric of a run, up to `step`."""
    found: dict[str, float] = {}
    for values in read_records(file):
        if values["step"] <= step:
            found |= {name: value for name, value in values.items() if "/" in name and isinstance(value, int | float)}
    return {name: found[name] for name in sorted(found)}


def collect_samples(source: Path, folder: Path) -> list[str]:
    """Copy the newest samples of a run into `folder`/samples; gives their names, the contact sheet first."""
    sheets = sorted(source.rglob(CONTACT_SHEET), key=lambda path: path.stat().st_mtime) if source.is_dir() else []
    place = sheets[-1].parent if sheets else source
    files = sorted(path for path in place.iterdir() if path.suffix in _CLIPS) if place.is_dir() else []
    files = sorted(files, key=lambda path: path.name != CONTACT_SHEET)[:_MOST_SAMPLES]
    if files:
        (folder / "samples").mkdir(exist_ok=True)
    for file in files:
        shutil.copyfile(file, folder / "samples" / file.name)
    return [f"samples/{file.name}" for file in files]


def _describe(card: Card, files: Mapping[str, str], samples: Sequence[str]) -> str:
    recipe = card.recipe
    library = "diffusers" if card.form in ("diffusers", "lora") else "frameloom"
    front = ["---", f"library_name: {library}", "tags:", "- frameloom", f"- {card.name}", "---", ""]
    what = {"vae": "autoencoder", "lora": "LoRA of the denoiser"}.get(card.kind, "denoiser")
    lines = [
        *front,
        f"# {card.run}",
        "",
        f"{what[:1].upper()}{what[1:]} `{card.name}`, step {card.step:,} of the run `{card.run}`, "
        f"{'averaged' if card.weights == 'ema' else 'last'} weights, written as {card.form}.",
    ]
    if card.how:
        lines += ["", "## Use", "", *card.how]
    if samples:
        lines += ["", "## Samples", "", *(_show(name) for name in samples)]
    lines += ["", "## Training", "", *_facts(card)]
    if card.metrics:
        lines += [
            "",
            "| metric | value |",
            "|---|---|",
            *(f"| {name} | {one:.6g} |" for name, one in card.metrics.items()),
        ]
    lines += [
        "",
        "## Files",
        "",
        "| file | SHA-256 |",
        "|---|---|",
        *(f"| {name} | `{one}` |" for name, one in files.items()),
    ]
    lines += ["", "## Recipe", "", "`frameloom replay` on this folder starts the same run again.", ""]
    return "\n".join([*lines, "```yaml", render_yaml(recipe).rstrip("\n"), "```", ""])


def _facts(card: Card) -> list[str]:
    recipe = card.recipe
    facts = {
        "task": recipe.task,
        "steps": card.step,
        "started from": recipe.model.weights or "fresh weights" if card.kind != "vae" else recipe.vae.weights,
        "data": recipe.data.manifest or f"{len(recipe.data.sources)} sources",
        "fingerprint of the data": f"`{card.manifest}`",
        "seed": recipe.seed,
        "trained with": ", ".join(f"{name} {version}" for name, version in card.versions.items()),
    }
    return [f"- {name}: {value}" for name, value in facts.items() if value not in (None, "", "``")]


def _show(name: str) -> str:
    shown = Path(name).stem
    return f"![{shown}]({name})" if Path(name).suffix in _PICTURES else f"- [{shown}]({name})"
