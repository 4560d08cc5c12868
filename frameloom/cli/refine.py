"""Make a short prompt long: with a language model in a folder, or with a command."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def refine(
    prompt: Annotated[list[str] | None, typer.Argument(help="what to refine; may be several")] = None,
    prompts: Annotated[Path | None, typer.Option(help="a file with one prompt per line, .csv or .jsonl")] = None,
    model: Annotated[
        Path | None, typer.Option(help="folder of a causal language model, such as prompt_refiner/")
    ] = None,
    command: Annotated[str | None, typer.Option(help="a program that reads the prompt and writes the new one")] = None,
    seed: Annotated[int, typer.Option(help="seed of the first prompt, for models that draw words")] = 0,
    max_tokens: Annotated[int, typer.Option(min=1, help="longest answer of the model, in tokens")] = 512,
) -> None:
    """Print each prompt refined, one per line.

    Example: frameloom refine "a cat by the sea" --model models/prompt_refiner

    Example: frameloom refine --prompts prompts.txt --command "my-refiner --short" > refined.txt
    """
    from frameloom.generate.prompts import read_prompts

    texts = read_prompts(prompt or [], prompts)
    from frameloom.generate.refine import build_refiner, refine_prompts

    for text in refine_prompts(build_refiner(model, command, max_new_tokens=max_tokens), texts, seed=seed):
        print(text)
