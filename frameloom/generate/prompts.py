"""Prompts from the command line or a file, and the files made from them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from frameloom.core.errors import DataError
from frameloom.core.progress import ProgressBar

if TYPE_CHECKING:
    from frameloom.generate.pipeline import Sampler

_MAX_PROMPT_CHARACTERS = 10_000


def read_prompts(given: Sequence[str], file: Path | None) -> list[str]:
    """Prompts of the command line, then the lines of `file`; empty lines are skipped, none at all is an error."""
    prompts = list(given)
    if file is not None:
        try:
            lines = file.read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise DataError(
                f"{file}: cannot be read as text ({error}); give a UTF-8 file, one prompt per line"
            ) from error
        prompts += [line.strip() for line in lines if line.strip()]
    if not prompts:
        raise DataError('no prompt given; add --prompt "…" or --prompts FILE')
    for prompt in prompts:
        if len(prompt) > _MAX_PROMPT_CHARACTERS:
            raise DataError(
                f"prompt '{prompt[:40]}…' has {len(prompt):,} characters; the limit is {_MAX_PROMPT_CHARACTERS:,}"
            )
    return prompts


def sample_to_files(sampler: Sampler, prompts: Sequence[str], *, first_seed: int, out: Path) -> list[Path]:
    """One file per prompt with seeds counting up from `first_seed`, and a contact sheet, with a progress bar."""
    from frameloom.generate.pipeline import Request, generate, write_results

    requests = [Request(prompt, first_seed + index) for index, prompt in enumerate(prompts)]
    with ProgressBar("sampling", len(requests) * sampler.settings.steps) as bar:
        results = generate(sampler, requests, on_step=bar.advance)
    return write_results(sampler, results, out)
