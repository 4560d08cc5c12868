"""Samples from fixed prompts while a denoiser trains: the same noise each time, so that steps can be compared.

Sampling leaves no trace in the run: it draws only from streams of its own, and weights and modes are put back.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from frameloom.checkpoint.reader import step_folder
from frameloom.config.schema.recipe import Recipe
from frameloom.config.schema.sampling import SampleRequest, SampleSection, SamplesSection
from frameloom.core.files import replace_folder
from frameloom.data.media.writing import CONTACT_SHEET
from frameloom.sampling.outputs import Sample, write_samples
from frameloom.sampling.pipeline import CaptionNote, Pipeline, generate
from frameloom.sampling.request import read_prompts
from frameloom.training.logging.trackers import Media, Tracker, log_resource_errors
from frameloom.training.optim.ema import EMA
from frameloom.training.task import Task
from frameloom.training.tasks.denoiser import DenoiserTask


@dataclass(frozen=True)
class TrainingSamples:
    """What is drawn, when, and where to; `is_compiled` says that the model's blocks are."""

    task: DenoiserTask
    requests: tuple[SampleRequest, ...]
    section: SamplesSection
    settings: SampleSection
    run_name: str
    folder: Path
    note: CaptionNote | None = None
    is_compiled: bool = False

    def draw(self, step: int, ema: EMA | None, trackers: Sequence[Tracker]) -> None:
        """Write `samples/step-…/`, all files or none, replacing those of an earlier start, and log them."""
        with log_resource_errors(f"step {step}: no samples"):
            results, folder = self.generate(step, ema), step_folder(self.folder, step)
            with replace_folder(folder) as temporary:
                names = [path.name for path in write_samples(results, temporary)]
            # By number, not by step, so that a tracker shows the samples of one prompt in a row.
            media = [Media("samples/contact-sheet", folder / CONTACT_SHEET)]
            for number, (result, name) in enumerate(zip(results, names, strict=True)):
                frames, fps = result.frames, self.settings.fps if len(result.frames) > 1 else None
                caption = f"{result.request.prompt} (seed {result.request.seed})"
                media.append(Media(f"samples/{number}", folder / name, frames, fps, caption))
            for tracker in trackers:
                tracker.log_media(step, media)

    def generate(self, step: int, ema: EMA | None) -> list[Sample]:
        with ExitStack() as stack:
            stack.enter_context(evaluating(self.task.denoiser.model))
            if ema is not None and self.settings.weights != "raw":
                stack.enter_context(ema.applied(self.task.model))
            if self.is_compiled:
                # Other shapes would add graphs, and could turn those of training into ones for any shape.
                stack.enter_context(torch.compiler.set_stance("force_eager"))
            task, origin = self.task, {"run": self.run_name, "step": str(step)}
            model = (task.denoiser, task.vae, task.text, task.scaling, task.objective)
            pipeline = Pipeline(*model, self.settings, origin, task.device, self.note)
            return generate(pipeline, self.requests, batch_size=self.section.batch)


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Every module in evaluation mode inside the block, and in its own mode again after it."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode


def build_samples(recipe: Recipe, task: Task, folder: Path) -> TrainingSamples | None:
    """What `validation.samples` asks for, written below `folder`; prompts are read before the first step."""
    section = recipe.validation.samples if recipe.validation else None
    if section is None:
        return None
    assert isinstance(task, DenoiserTask)
    prompts = read_prompts(section.prompts, Path(section.prompts_file) if section.prompts_file else None)
    images: list[Path | None] = [Path(image) for image in section.images] or [None] * len(prompts)
    pairs = enumerate(zip(prompts, images, strict=True))
    given = section.model_dump(include={"steps", "guidance", "frames", "height", "width"}, exclude_none=True)
    # Adapters stand beside the layers here, at full strength; others are not added to a model that trains.
    settings = recipe.sample.model_copy(update={**given, "lora": None, "lora_scale": 1.0})
    return TrainingSamples(
        task=task,
        requests=tuple(
            SampleRequest(**dict(settings), prompt=prompt, seed=section.seed + number, image=image)
            for number, (prompt, image) in pairs
        ),
        section=section,
        settings=settings,
        run_name=recipe.name,
        folder=folder,
        note=None if recipe.text.note is None else CaptionNote(recipe.text.note, recipe.data.fps_max),
        is_compiled=bool(recipe.train.compile),
    )
