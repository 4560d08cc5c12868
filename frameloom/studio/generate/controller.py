"""Event handlers of the Generate tab: models, queued jobs with their progress, earlier results."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from frameloom.config.schema.sampling import SampleRequest
from frameloom.core.errors import ConfigError, DataError
from frameloom.core.files import digest_file
from frameloom.data.media.writing import CONTACT_SHEET
from frameloom.sampling.request import complete_request
from frameloom.studio.generate.models import StudioModel, find_models
from frameloom.studio.generate.queue import WAITING, JobQueue
from frameloom.studio.generate.requests import (
    FIELDS,
    FORMATS,
    OUT,
    OWN_SIZE,
    UPLOADS,
    check_values,
    format_command,
    keep_upload,
    read_form,
)
from frameloom.studio.runs.samples import SavedSample, read_sample
from frameloom.studio.server.context import Listing, StudioContext
from frameloom.studio.server.markup import badge, bar, button, link, note, player, safe

_SHOWN = 24
_ENDED_SHOWN = 3
_SUFFIXES = (".mp4", ".webm", ".gif", ".png")
_MAX_LISTED = 200


def list_samples(folder: Path, most: int = _MAX_LISTED) -> list[SavedSample]:
    """The newest first; files without metadata of a sample are left out."""
    found = []
    try:
        with os.scandir(folder) as entries:
            for entry in entries:
                is_media = entry.name.lower().endswith(_SUFFIXES) and entry.name != CONTACT_SHEET
                if is_media and not entry.name.startswith(".") and entry.is_file(follow_symlinks=False):
                    found.append((entry.stat(follow_symlinks=False).st_mtime_ns, entry.name))
    except OSError:
        return []
    samples = [read_sample(folder / name) for _, name in sorted(found, reverse=True)[:most]]
    return [sample for sample in samples if sample.about]


def convert_clip(sample: SavedSample, form: str, folder: Path) -> Path:
    """The clip in another container, cached in `folder`; the file itself if it has that format."""
    from frameloom.sampling.outputs import read_frames, write_frames

    if form not in FORMATS:
        raise DataError(f"{form[:20]}: no such format; choose {', '.join(FORMATS)}")
    if sample.path.suffix.lower() in (f".{form}", ".png"):
        return sample.path
    target = folder / f"{sample.path.stem}-{digest_file(sample.path)[:8]}.{form}"
    if not target.is_file():
        folder.mkdir(parents=True, exist_ok=True)
        about = {**sample.about, "sample.format": form}
        write_frames(target, read_frames(sample.path), float(about.get("sample.fps", "8")), about)
    return target


class GenerateController:
    """Everything behind the tab; one for all pages of a studio."""

    def __init__(self, context: StudioContext) -> None:
        self.context = context
        self.models = Listing(lambda: find_models(context.root))
        self.queue = JobQueue(context.root, context.scratch / "worker.log")
        self.folder = context.root / OUT
        self.downloads = context.root / "studio" / "downloads"

    def submit(self, name: str | None, values: Mapping[str, Any]) -> str:
        """Queue a job; the answer has the equivalent command."""
        request, num = self.read_form(name, values)
        model = self.models.all()[name or ""]
        job = self.queue.submit(model.name, request, num, num * complete_request(request, model.settings).steps)
        command = f'<code class="rg-command" tabindex="0">{safe(format_command(model.name, request, num))}</code>'
        return (
            note(f"Queued as job {job.id}.", kind="status")
            + f'<details class="rg-more"><summary>The same as a command</summary>{command}</details>'
        )

    def read_form(self, name: str | None, values: Mapping[str, Any]) -> tuple[SampleRequest, int]:
        """The checked request and how many samples of it; pictures are decoded and kept when all the rest is right."""
        model = self.models.all().get(name or "")
        if model is None:
            raise ConfigError("Model: choose one from the list")
        given = read_form(values, model)
        num = given.pop("num", 1)
        pictures = {key: given.pop(key) for key in ("image", "last_image") if key in given}
        request = check_values({**given, "num": num}, model, self.context.limits)
        kept: dict[str, Any] = {}
        for key, path in pictures.items():
            # The page has put it into the scratch folder.
            file = Path(path).resolve()
            if not file.is_relative_to(self.context.scratch):
                raise DataError("Image: send it once more")
            kept[key] = Path(keep_upload(file, self.context.root, max_bytes=self.context.limits.upload_bytes))
        return request.model_copy(update=kept), int(num)

    def version(self) -> list[object]:
        """Changes when the queue or the folder does."""
        jobs = [(one.id, one.state, one.done_steps, one.is_stopping) for one in self.queue.jobs()]
        try:
            changed = self.folder.stat().st_mtime_ns
        except OSError:
            changed = 0
        return [jobs, changed]

    def draw_queue(self) -> str:
        """Jobs that run or wait, and the last ones that ended."""
        jobs = self.queue.jobs()
        shown = [one for one in jobs if one.is_open] + [one for one in jobs if not one.is_open][:_ENDED_SHOWN]
        if not shown:
            return '<p class="rg-empty">Nothing in the queue.</p>'
        rows = []
        for job in shown:
            num_ahead = sum(one.is_open and one.id < job.id for one in jobs)
            progress = ""
            if job.is_open and job.state != WAITING:
                done = min(job.done_steps, job.total_steps)
                progress = f" <small>step {done} of {job.total_steps}</small>{bar(done, job.total_steps)}"
            message = f'<br><small class="rg-failed">{safe(job.message)}</small>' if job.message else ""
            label = "End now" if job.is_stopping else "Cancel"
            acts = button("cancel", job.id, label, hint=f"{label}: job {job.id}") if job.is_open else ""
            state = badge(job.state, f"queued ({num_ahead} ahead)" if job.state == WAITING else "")
            rows.append(
                f'<tr data-job="{job.id}" data-state="{job.state}"><td class="rg-name">{safe(job.request.prompt)}'
                f"<br><small>job {job.id} · seed {job.request.seed} · {safe(job.model)}</small></td>"
                f'<td>{state}{progress}{message}</td><td class="rg-acts">{acts}</td></tr>'
            )
        return f'<div class="rg-scroll"><table class="rg-table rg-queue">{"".join(rows)}</table></div>'

    def find_sample(self, name: str) -> SavedSample:
        """A file by a name that a page sent: one of those that are shown."""
        for sample in list_samples(self.folder):
            if sample.path.name == name:
                return sample
        raise DataError(f"{name[:80]}: no such file; it was moved or deleted")

    def draw_history(self) -> str:
        samples = list_samples(self.folder, _SHOWN)
        if not samples:
            return '<p class="rg-empty">No samples yet; they appear here and stay.</p>'
        cards = []
        for sample in samples:
            name, own, prompt = sample.path.name, sample.path.suffix.lower().lstrip("."), sample.about["prompt"]
            acts = [button("use", name, "Use these settings", hint=f"Use the settings of {name}")]
            acts.append(link(self.context, sample.path))
            for form in FORMATS if sample.is_clip else ():
                if form != own:
                    acts.append(button("convert", f"{form}:{name}", form, hint=f"get {name} as {form}"))
            cards.append(
                f'<div class="rg-clip" data-file="{safe(name)}">{player(self.context, sample.path, prompt)}<div>'
                f'<p>{safe(prompt)}</p><small class="rg-soft">{safe(sample.describe())}</small><br>'
                f"{''.join(acts)}</div></div>"
            )
        return f'<div class="rg-clips rg-wide">{"".join(cards)}</div>'

    def convert(self, key: str) -> str:
        """Another format of a file, with a link to it."""
        form, _, name = key.partition(":")
        path = convert_clip(self.find_sample(name), form, self.downloads)
        return f'<p class="rg-note" role="status">Ready: {link(self.context, path, path.name)}</p>'

    def read_settings(self, name: str) -> tuple[StudioModel, dict[str, Any]]:
        """The model of a file, and the form as it was; pictures that no longer exist are left out."""
        from frameloom.sampling.outputs import read_request

        about = self.find_sample(name).about
        request = read_request(about, where=name)
        model = self.models.all().get(about.get("model", ""))
        if model is None:
            raise DataError(f"its model {about.get('model')} is no longer in this folder; choose another")
        values = form_values(request, model)
        for key in ("image", "last_image"):
            path, values[key] = getattr(request, key), None
            if path is None or not path.as_posix().startswith(f"{UPLOADS}/"):
                continue
            file = self.context.resolve(path.as_posix(), where="image")
            if file.is_file():
                # The page may only take files from the scratch folder.
                copy = self.context.scratch / "given" / file.name
                copy.parent.mkdir(exist_ok=True)
                shutil.copyfile(file, copy)
                values[key] = str(copy)
        return model, values


def form_values(request: SampleRequest, model: StudioModel) -> dict[str, Any]:
    """Values of the form's fields for a request; what it does not say is the model's own."""
    whole = complete_request(request, model.settings)
    values: dict[str, Any] = {name: getattr(whole, name) for name in FIELDS if name != "num"}
    return {
        **values,
        "num": 1,
        "sampler": whole.sampler if whole.sampler in model.samplers else model.settings.sampler,
        "ratio": whole.ratio or OWN_SIZE,
        "format": whole.format if whole.format in FORMATS else FORMATS[0],
    }
