"""What the planner predicts beside what the published systems report: step times and batches found by trying.

    python docs/tools/published_figures.py      writes the table between the marks of docs/planning.md

Reported figures hold what a plan leaves out (reading, the start of each kernel, a slow framework), so they are a check
of its order of magnitude and of its proportions, not of its digits; `remark` says where the rest goes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Literal

from frameloom.config.loading.recipe import load_recipe
from frameloom.core.errors import DataError
from frameloom.core.files import write_text
from frameloom.planner.devices import DEVICES
from frameloom.planner.estimate import BucketPlan, Measured, RunPlan, measure_recipe, plan_run

PAGE = Path(__file__).parents[1] / "planning.md"
BEGIN, END = "<!-- published -->", "<!-- /published -->"


@dataclass(frozen=True)
class Figure:
    """`value` is seconds of a step with `batch` clips on each device, or the largest batch that was found to fit."""

    system: str
    recipe: str
    overrides: tuple[str, ...]
    device: str
    num_devices: int
    frames: int
    resolution: str
    kind: Literal["seconds", "batch"]
    value: float
    batch: float
    remark: str


_OPENSORA2 = "Open-Sora 2.0 (report, tables 4 and 5)"
_PLAN = "Open-Sora-Plan 1.3 (table of the MindSpore port)"
_SDXL = "SDXL (table of the MindSpore port)"
_SP4 = ("--parallel.sequence", "4")
_BATCH_REMARK = (
    "with zero 2 our devices hold all weights in fp32 and their casts, 50 GiB; the published trainer holds them in "
    "bf16, 24 GB, and splits the fp32 ones, which is the room of the larger batches. With parallel.zero 3 most "
    "of them fit here"
)
_TIME_REMARK = (
    "the most expensive aspect ratio; 1.8 of 7.7 s are Hunyuan's encoder and T5, and 0.26 s of sending hide behind the "
    "passes. Nothing was fitted to this figure, but such an agreement has luck in it: reading and the start of kernels "
    "are not in the prediction, so the true share of the device's rate is a little above 45%"
)

FIGURES = (
    *(
        Figure(_OPENSORA2, "opensora2/stage1", (), "h200", 8, frames, "256px", "batch", batch, batch, remark)
        for frames, batch, remark in (
            (33, 12, _BATCH_REMARK),
            (65, 6, "as above"),
            (97, 4, "as above"),
            (129, 3, "as above"),
        )
    ),
    *(
        Figure(_OPENSORA2, "opensora2/stage1", (), "h200", 8, frames, "256px", "seconds", 7.5, batch, remark)
        for frames, batch, remark in (
            (33, 12, _TIME_REMARK),
            (129, 3, "as above"),
        )
    ),
    Figure(
        *(_OPENSORA2, "opensora2/stage2", _SP4, "h200", 8, 129, "768px", "seconds", 48.0, 2),
        "each of the four GPUs that share a clip encodes all of it in tiles, 12 of 39 s; exchanging heads takes 0.4 "
        "s. 9 s stay unexplained; that convolutions reach less than 45% of the rate would be enough",
    ),
    Figure(
        *(_PLAN, "opensora_plan/stage1-sparse", (), "910b", 8, 1, "", "seconds", 4.37, 4),
        "WFVAE and mT5-XXL are in the prediction, 0.16 of 0.44 s, and explain little. 256 tokens a picture keep no "
        "accelerator busy, and PyNative mode starts each kernel by itself; no arithmetic explains the factor of ten",
    ),
    Figure(
        *(_PLAN, "opensora_plan/stage3", (), "910b", 8, 93, "", "seconds", 10.30, 1),
        "WFVAE on 93 frames and mT5-XXL are in the prediction, 0.6 of 6.1 s. 4 s stay unexplained; PyNative mode is a "
        "guess",
    ),
    Figure(
        *(_SDXL, "sdxl/finetune", ("--train.recompute", "false"), "910b", 1, 1, "", "seconds", 0.72, 1),
        "the autoencoder and both text encoders are in the prediction, in fp32 as in the recipe, 0.16 of 0.37 s. The "
        "published run has weights in fp32 and no fused attention, which the prediction takes for fused",
    ),
    Figure(
        *(_SDXL, "sdxl/finetune", ("--train.recompute", "false"), "910b", 8, 1, "", "seconds", 1.07, 4),
        "the best of the table: fp16 weights, fused attention, data sinking. The prediction is too long: the recipe "
        "has its frozen parts in fp32, which a 910B computes at a quarter of its fp16 rate, 0.66 of the 1.6 s",
    ),
)


@dataclass(frozen=True)
class Checked:
    figure: Figure
    predicted: float

    @property
    def ratio(self) -> float:
        """Published over predicted."""
        return self.figure.value / self.predicted


def check_figures(figures: Iterable[Figure] = FIGURES) -> list[Checked]:
    return [Checked(figure, predict(figure)) for figure in figures]


def predict(figure: Figure) -> float:
    """What the planner says of the most expensive shape of the figure's resolution and length."""
    plan = _plan(figure.recipe, figure.overrides, figure.device, figure.num_devices)
    item = _find_bucket(plan, figure)
    if figure.kind == "batch":
        return float(item.largest_batch)
    # Devices wait for each other's weights as long for any batch.
    return (item.seconds - item.wait_seconds) / item.bucket.batch_size * figure.batch + item.wait_seconds


@lru_cache(maxsize=4)
def _measure(recipe: str, overrides: tuple[str, ...]) -> Measured:
    return measure_recipe(load_recipe(recipe, list(overrides)))


def _plan(recipe: str, overrides: tuple[str, ...], device: str, num_devices: int) -> RunPlan:
    loaded, measured = load_recipe(recipe, list(overrides)), _measure(recipe, overrides)
    return plan_run(loaded, DEVICES[device], num_devices, with_data=False, measured=measured)


def _find_bucket(plan: RunPlan, figure: Figure) -> BucketPlan:
    fitting = [
        item
        for item in plan.buckets
        if item.bucket.frames == figure.frames and figure.resolution in ("", item.bucket.resolution)
    ]
    if not fitting:
        raise DataError(f"{figure.recipe}: it has no bucket of {figure.frames} frames of {figure.resolution or 'any'}")
    return max(fitting, key=lambda item: item.total / item.bucket.batch_size)


def render(checked: Sequence[Checked]) -> str:
    """A table in Markdown; remarks below it, each once."""
    lines = [
        "| system | recipe, device | clip | | published | predicted | published / predicted |",
        "|---|---|---|---|--:|--:|--:|",
    ]
    for one in checked:
        figure = one.figure
        clip = f"{figure.frames} frames {figure.resolution}".replace("1 frames", "picture").strip()
        what = "largest batch" if figure.kind == "batch" else f"seconds of a step of {figure.batch:g}"
        lines.append(
            f"| {figure.system} | `{figure.recipe}`, {figure.num_devices} x {figure.device} | {clip} | {what} | "
            f"{figure.value:g} | {one.predicted:.3g} | {one.ratio:.2f} |"
        )
    remarks = [
        f"- {one.figure.recipe}, {one.figure.frames} frames, {one.figure.kind}: {one.figure.remark}."
        for one in checked
        if not one.figure.remark.startswith("as above")
    ]
    return "\n".join([*lines, "", *remarks])


def write_table(page: Path, checked: Sequence[Checked]) -> None:
    text = page.read_text()
    if text.count(BEGIN) != 1 or text.count(END) != 1:
        raise DataError(f"{page}: it should have the lines {BEGIN} and {END} once each, between which the table goes")
    before, after = text[: text.index(BEGIN) + len(BEGIN)], text[text.index(END) :]
    write_text(page, f"{before}\n\n{render(checked)}\n\n{after}")


if __name__ == "__main__":
    write_table(PAGE, check_figures())
