"""The commands `sample` (videos and pictures from prompts) and `refine` (longer prompts from short ones)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from frameloom.core.paths import check_output_folder

# What a repeated file does not say itself; all else would make another one.
_BESIDE_LIKE = ("run", "like", "out", "sequence")


def sample(
    context: typer.Context,
    run: Annotated[
        Path | None,
        typer.Argument(help="a run folder, an exported model folder, a recipe, or published weights with --family"),
    ] = None,
    prompt: Annotated[list[str] | None, typer.Option(help="what to show; may be given several times")] = None,
    prompts: Annotated[
        Path | None, typer.Option(help="a file: one prompt per line, or .csv or .jsonl with settings for each row")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="folder for the files; default: RUN/samples")] = None,
    seed: Annotated[int, typer.Option(help="seed of the first video; each further one counts up")] = 0,
    num: Annotated[int, typer.Option(min=1, help="samples of each prompt")] = 1,
    steps: Annotated[int | None, typer.Option(help="solver steps")] = None,
    guidance: Annotated[float | None, typer.Option(help="classifier-free guidance scale; 1 switches it off")] = None,
    negative: Annotated[str | None, typer.Option(help="what guidance leads away from")] = None,
    sampler: Annotated[str | None, typer.Option(help="default, euler, heun, ddim, dpmpp_2m, unipc, ...")] = None,
    frames: Annotated[int | None, typer.Option(help="frames of a video; 1: a picture")] = None,
    size: Annotated[str | None, typer.Option(help="WIDTHxHEIGHT in pixels")] = None,
    ratio: Annotated[str | None, typer.Option(help="width:height at the usual number of pixels, as 16:9")] = None,
    fps: Annotated[float | None, typer.Option(help="frame rate of the file")] = None,
    image: Annotated[Path | None, typer.Option(help="a picture to start from: the first frame")] = None,
    last_image: Annotated[Path | None, typer.Option(help="a picture to end with: the last frame")] = None,
    video: Annotated[Path | None, typer.Option(help="a video to go on with, or to change")] = None,
    mask: Annotated[Path | None, typer.Option(help="a picture or video: white parts of --video are made anew")] = None,
    control: Annotated[Path | None, typer.Option(help="a video that a control model follows")] = None,
    strength: Annotated[float | None, typer.Option(help="how much --video is changed, above 0 to 1")] = None,
    image_model: Annotated[
        str | None, typer.Option(help="make the first frame with this model, then the video from it; self: with RUN")
    ] = None,
    format: Annotated[str | None, typer.Option(help="mp4, webm, gif, or png for a folder of frames")] = None,
    weights: Annotated[str | None, typer.Option(help="ema (averaged) or raw (last)")] = None,
    lora: Annotated[list[str] | None, typer.Option(help="PATH or PATH:SCALE; may be given several times")] = None,
    refine: Annotated[Path | None, typer.Option(help="refine prompts with the language model in this folder")] = None,
    refine_command: Annotated[str | None, typer.Option(help="refine prompts with this command")] = None,
    step: Annotated[int | None, typer.Option(help="the checkpoint of this step of a run; default: the newest")] = None,
    family: Annotated[str | None, typer.Option(help="the family of published weights")] = None,
    recipe: Annotated[str | None, typer.Option(help="the recipe that describes published weights")] = None,
    batch: Annotated[int, typer.Option(min=1, help="videos made at once; more may change their last bits")] = 1,
    sequence: Annotated[int, typer.Option(min=1, help="processes that make each video together, under torchrun")] = 1,
    again: Annotated[bool, typer.Option("--again", help="make files once more that are there already")] = False,
    like: Annotated[Path | None, typer.Option(help="repeat this file, to the bit")] = None,
) -> None:
    """Write a file for each prompt, `samples.jsonl` and a contact sheet; other settings follow with dots.

    Under torchrun the prompts are shared out, between groups of --sequence processes. A call that was stopped goes on
    where it was.

    Example: frameloom sample runs/demo/denoiser --prompt "a red circle moves left slowly over a gray background"

    Example: frameloom sample runs/i2v --image first.png --prompt "the boat leaves" --guidance 5 --sample.frames 17

    Example: frameloom sample models/CogVideoX-2b --family cogvideox_fun --prompts prompts.csv --out samples

    Example: frameloom sample --like samples/a-boat-seed3.mp4 --out again
    """
    from frameloom.sampling.request import read_rows

    if like is not None:
        from frameloom.sampling.jobs import repeat_file

        _refuse_beside_like(context, like)
        if out is not None:
            check_output_folder(out, "--out")
        _show(repeat_file(like, out or like.parent, model=run, sequence=sequence), None)
        return
    if run is None:
        raise typer.BadParameter(
            "name a run, a model folder, a recipe or weights; or a file with --like", param_hint="RUN"
        )
    rows = read_rows(prompt or [], prompts)
    height_width = _read_size(size)
    flags = {
        **{"steps": steps, "guidance": guidance, "weights": weights, "sampler": sampler, "frames": frames, "fps": fps},
        **{
            "strength": strength,
            "format": format,
            "negative_prompt": None if negative is None else json.dumps(negative),
        },
        **{"height": height_width[0], "width": height_width[1], "lora": _read_loras(lora)},
    }
    chosen = [part for name, value in flags.items() if value is not None for part in (f"--sample.{name}", str(value))]
    media = {"head": image, "tail": last_image, "video": video, "mask": mask, "control": control}
    from frameloom.sampling.jobs import Order, fill_order
    from frameloom.sampling.load import Source

    folder = out or (run / "samples" if run.is_dir() else Path("samples"))
    check_output_folder(folder, "--out")
    order = Order(
        source=Source(run, (*chosen, *context.args), step=step, family=family, recipe=recipe),
        rows=rows,
        out=folder,
        first_seed=seed,
        num_samples=num,
        media={name: path for name, path in media.items() if path is not None},
        ratio=ratio,
        refiner=refine,
        refiner_command=refine_command,
        image_model=image_model,
        batch_size=batch,
        again=again,
        sequence=sequence,
    )
    _show(fill_order(order, tell=print), folder)


def _refuse_beside_like(context: typer.Context, like: Path) -> None:
    """A flag that is passed over in silence lets a person think that it worked."""
    given = []
    for parameter in context.command.params:
        source = context.get_parameter_source(parameter.name or "")
        if parameter.name not in _BESIDE_LIKE and source is not None and source.name == "COMMANDLINE":
            given.append(parameter.opts[0])
    given += [word.partition("=")[0] for word in context.args if word.startswith("--")]
    if given:
        raise typer.BadParameter(
            f"{like} is repeated with the settings that it carries; leave {', '.join(given)} out, or sample without "
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


def _read_size(text: str | None) -> tuple[int | None, int | None]:
    """Height and width of WIDTHxHEIGHT."""
    if text is None:
        return None, None
    width, cross, height = text.lower().partition("x")
    if not (cross and width.isdecimal() and height.isdecimal()):
        raise typer.BadParameter(f"'{text}' is not a size; write WIDTHxHEIGHT, as in 640x352", param_hint="--size")
    return int(height), int(width)


def _read_loras(words: list[str] | None) -> str | None:
    """PATH or PATH:SCALE, as the recipe has them."""
    if not words:
        return None
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
