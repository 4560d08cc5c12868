"""The commands `sample` (videos and pictures from prompts) and `refine` (longer prompts from short ones)."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from frameloom.config.loading.schema_tree import field_kind
from frameloom.config.schema.sampling import MEDIA, SampleRequest, SampleSection
from frameloom.core.paths import check_output_folder

# Fields of a request that have a flag, by group of the help; every other one is set with dots: --sample.keep pixels.
_FLAGS = {
    "Video": ("frames", "ratio", "fps", "format"),
    "Sampling": ("steps", "guidance", "negative_prompt", "sampler"),
    "Given pictures and videos": (*MEDIA, "strength"),
    "Model": ("weights",),
}
_SHORT = {"negative_prompt": "negative"}
# A reproduced file carries everything else itself.
_BESIDE_LIKE = ("run", "like", "out", "sequence")


def _add_request_flags(command: Callable[..., None]) -> Callable[..., None]:
    """A flag for each field of `_FLAGS` in place of the function's `**fields`, with the type and help of the field."""
    own = [part for part in inspect.signature(command, eval_str=True).parameters.values()]
    added = []
    for group, names in _FLAGS.items():
        for name in names:
            field = SampleRequest.model_fields[name]
            kind = next((kind for kind in (int, float, Path) if field_kind(field).accepts(kind)), str)
            flag = f"--{_SHORT.get(name, name).replace('_', '-')}"
            option = typer.Option(flag, help=field.description, rich_help_panel=group)
            hint = Annotated[kind | None, option]  # type: ignore[valid-type]
            added.append(inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=hint))
    command.__signature__ = inspect.Signature([*own[:-1], *added])  # type: ignore[attr-defined]
    command.__annotations__ |= {part.name: part.annotation for part in added}
    return command


@_add_request_flags
def sample(
    context: typer.Context,
    run: Annotated[
        Path | None,
        typer.Argument(help="a run, an exported model folder, a recipe, or published weights"),
    ] = None,
    prompt: Annotated[list[str] | None, typer.Option(help="what to show; may be given several times")] = None,
    prompts: Annotated[
        Path | None, typer.Option(help="a file: one prompt per line, or .csv or .jsonl with settings for each row")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="folder for the files; default: RUN/samples")] = None,
    seed: Annotated[int, typer.Option(help="seed of the first video; each further one counts up")] = 0,
    num: Annotated[int, typer.Option(min=1, help="samples of each prompt")] = 1,
    refine: Annotated[Path | None, typer.Option(help="refine prompts with the language model in this folder")] = None,
    refine_command: Annotated[str | None, typer.Option(help="refine prompts with this command")] = None,
    batch: Annotated[int, typer.Option(min=1, help="videos made at once; more may change their last bits")] = 1,
    sequence: Annotated[int, typer.Option(min=1, help="processes that make each video together, under torchrun")] = 1,
    again: Annotated[bool, typer.Option("--again", help="make files that exist once more")] = False,
    like: Annotated[Path | None, typer.Option(help="make this file again, to the bit")] = None,
    size: Annotated[str | None, typer.Option(help="WIDTHxHEIGHT in pixels", rich_help_panel="Video")] = None,
    image_model: Annotated[
        str | None,
        typer.Option(
            help="make the first frame with this model, then the video from it; self: with RUN",
            rich_help_panel="Given pictures and videos",
        ),
    ] = None,
    lora: Annotated[
        list[str] | None, typer.Option(help="PATH or PATH:SCALE; may be given several times", rich_help_panel="Model")
    ] = None,
    step: Annotated[
        int | None, typer.Option(help="checkpoint of a run; default: the newest", rich_help_panel="Model")
    ] = None,
    family: Annotated[str | None, typer.Option(help="family of published weights", rich_help_panel="Model")] = None,
    recipe: Annotated[
        str | None, typer.Option(help="recipe that describes published weights", rich_help_panel="Model")
    ] = None,
    **fields: Any,
) -> None:
    """Write a file for each prompt, `samples.jsonl` and a contact sheet; other settings follow with dots.

    Under torchrun the processes share the prompts, in groups of --sequence. An interrupted call
    resumes.

    Example: frameloom sample runs/demo/denoiser --prompt "a red circle moves left slowly over a gray background"

    Example: frameloom sample runs/i2v --image first.png --prompt "the boat leaves" --guidance 5 --sample.frames 17

    Example: frameloom sample models/CogVideoX-2b --family cogvideox_fun --prompts prompts.csv --out samples

    Example: frameloom sample --like samples/a-boat-seed3.mp4 --out again
    """
    if like is not None:
        from frameloom.sampling.reproduce import reproduce

        _refuse_beside_like(context, like)
        if out is not None:
            check_output_folder(out, "--out")
        _show(reproduce(like, out or like.parent, model=run, sequence=sequence), None)
        return
    if run is None:
        raise typer.BadParameter(
            "name a run, a model folder, a recipe or weights; or a file with --like", param_hint="RUN"
        )
    from frameloom.sampling.request import read_requests

    given = {name: value for name, value in fields.items() if value is not None}
    given |= _read_size(size)
    settings = {name: given.pop(name) for name in tuple(given) if name in SampleSection.model_fields}
    if lora:
        settings["lora"] = _read_loras(lora)
    requests = read_requests(prompt or [], prompts, given)
    folder = out or (run / "samples" if run.is_dir() else Path("samples"))
    check_output_folder(folder, "--out")
    from frameloom.api import load
    from frameloom.sampling.batch import run_job
    from frameloom.sampling.refine import build_refiner

    overrides = [f"--sample.{name}={value}" for name, value in settings.items()]
    paths = run_job(
        lambda: load(run, [*overrides, *context.args], step=step, family=family, recipe=recipe),
        requests,
        folder,
        seed=seed,
        num=num,
        refiner=build_refiner(refine, refine_command) if refine or refine_command else None,
        image_model=image_model,
        batch_size=batch,
        again=again,
        sequence=sequence,
        report=print,
    )
    _show(paths, folder)


def _refuse_beside_like(context: typer.Context, like: Path) -> None:
    """A flag that is ignored in silence lets a user think that it worked."""
    given = []
    for parameter in context.command.params:
        source = context.get_parameter_source(parameter.name or "")
        if parameter.name not in _BESIDE_LIKE and source is not None and source.name == "COMMANDLINE":
            given.append(parameter.opts[0])
    given += [word.partition("=")[0] for word in context.args if word.startswith("--")]
    if given:
        raise typer.BadParameter(
            f"{like} is made again with the settings that it carries; leave {', '.join(given)} out, or sample without "
            "--like",
            param_hint="--like",
        )


def _show(paths: list[Path], folder: Path | None) -> None:
    from frameloom.data.media.writing import CONTACT_SHEET
    from frameloom.distributed.ranks import read_ranks

    if read_ranks().is_first:
        for path in paths:
            print(path)
        if folder is not None:
            print(folder / CONTACT_SHEET)


def _read_size(text: str | None) -> dict[str, int]:
    if text is None:
        return {}
    width, cross, height = text.lower().partition("x")
    if not (cross and width.isdecimal() and height.isdecimal()):
        raise typer.BadParameter(f"'{text}' is not a size; write WIDTHxHEIGHT, as in 640x352", param_hint="--size")
    return {"height": int(height), "width": int(width)}


def _read_loras(words: list[str]) -> str:
    """PATH or PATH:SCALE, as the recipe has them."""
    found = []
    for word in words:
        path, colon, scale = word.rpartition(":")
        try:
            found.append({"path": path, "scale": float(scale)} if colon else {"path": word})
        except ValueError:
            found.append({"path": word})
    return json.dumps(found)


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
    from frameloom.sampling.request import read_prompts

    texts = read_prompts(prompt or [], prompts)
    from frameloom.sampling.refine import build_refiner, refine_prompts

    for text in refine_prompts(build_refiner(model, command, max_new_tokens=max_tokens), texts, seed=seed):
        print(text)
