"""Model card of an export: `frameloom.json` for programs, `README.md` for people.

The table carries the whole recipe, so `frameloom replay` can start the run again from an export alone.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from frameloom.builders.published import read_table
from frameloom.config.loading.render import render_yaml
from frameloom.config.schema.recipe import Recipe
from frameloom.core.errors import CheckpointError
from frameloom.core.text_files import read_records
from frameloom.data.media.writing import CONTACT_SHEET

CARD, README = "frameloom.json", "README.md"
NOTE = "frameloom.card"  # the same table among the notes of a .safetensors file
FORMAT = 1
_PICTURES = (".png", ".jpg", ".gif")
_CLIPS = (*_PICTURES, ".mp4", ".webm")
_MOST_SAMPLES = 8


def write_card(folder: Path, card: Mapping[str, Any], recipe: Recipe, how: Sequence[str]) -> None:
    """Both files; `how` are lines of Markdown that show how the export is opened."""
    (folder / CARD).write_text(json.dumps(card, indent=2) + "\n", encoding="utf-8")
    (folder / README).write_text(_render(card, recipe, how), encoding="utf-8")


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
    newest = sheets[-1].parent if sheets else source
    files = sorted(path for path in newest.iterdir() if path.suffix in _CLIPS) if newest.is_dir() else []
    files = sorted(files, key=lambda path: path.name != CONTACT_SHEET)[:_MOST_SAMPLES]
    if files:
        (folder / "samples").mkdir(exist_ok=True)
    for file in files:
        shutil.copyfile(file, folder / "samples" / file.name)
    return [f"samples/{file.name}" for file in files]


def _render(card: Mapping[str, Any], recipe: Recipe, how: Sequence[str]) -> str:
    library = "diffusers" if card["form"] in ("diffusers", "lora") else "frameloom"
    what = {"vae": "Autoencoder", "lora": "LoRA of the denoiser"}.get(card["kind"], "Denoiser")
    facts = {
        "task": recipe.task,
        "steps": card["step"],
        "started from": recipe.vae.weights if card["kind"] == "vae" else recipe.model.weights or "fresh weights",
        "data": recipe.data.manifest or f"{len(recipe.data.sources)} sources",
        "fingerprint of the data": f"`{card['data']['fingerprint']}`",
        "seed": recipe.seed,
        "trained with": ", ".join(f"{name} {version}" for name, version in card["trained_with"].items()),
    }
    samples = [
        f"![{Path(name).stem}]({name})" if name.endswith(_PICTURES) else f"- [{Path(name).stem}]({name})"
        for name in card["samples"]
    ]
    metrics = [f"| {name} | {one:.6g} |" for name, one in card["metrics"].items()]
    lines = [
        *("---", f"library_name: {library}", "tags:", "- frameloom", f"- {card['name']}", "---", ""),
        *(f"# {card['run']}", ""),
        f"{what} `{card['name']}`, step {card['step']:,} of the run `{card['run']}`, "
        f"{'averaged' if card['weights'] == 'ema' else 'last'} weights, written as {card['form']}.",
        *(["", "## Use", "", *how] if how else ()),
        *(["", "## Samples", "", *samples] if samples else ()),
        *("", "## Training", ""),
        *(f"- {name}: {value}" for name, value in facts.items() if value not in (None, "", "``")),
        *(["", "| metric | value |", "|---|---|", *metrics] if metrics else ()),
        *("", "## Files", "", "| file | SHA-256 |", "|---|---|"),
        *(f"| {name} | `{one}` |" for name, one in card["files"].items()),
        *("", "## Recipe", "", "`frameloom replay` on this folder starts the same run again.", ""),
    ]
    return "\n".join([*lines, "```yaml", render_yaml(recipe).rstrip("\n"), "```", ""])
