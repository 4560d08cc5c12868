"""Event handlers of the Generate tab: models, queued jobs with their progress, earlier results."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from frameloom.core.errors import ConfigError, DataError, FrameloomError
from frameloom.studio.generate.history import Made, convert_clip, keep_upload, list_made, to_wish
from frameloom.studio.generate.models import ModelFacts, ModelIndex
from frameloom.studio.generate.queue import WAITING, OrderQueue, Ticket
from frameloom.studio.generate.requests import FORMATS, OUT, UPLOADS, Wish, check_wish, clean_prompt, drop_defaults
from frameloom.studio.server.context import StudioContext
from frameloom.studio.server.markup import badge, bar, button, player, problem_list, safe, status

_SHOWN = 24
_ENDED_SHOWN = 3
OWN_SIZE = "custom"


@dataclass(frozen=True)
class Form:
    """The fields of the page as they come: numbers may be missing, and files lie in the server's scratch folder."""

    model: str | None
    prompt: str | None
    negative: str | None
    seed: float | None
    num_samples: float | None
    steps: float | None
    guidance: float | None
    sampler: str | None
    frames: float | None
    width: float | None
    height: float | None
    ratio: str | None
    fps: float | None
    format: str | None
    head: str | None
    tail: str | None


class GenerateDesk:
    """Everything behind the place; one for all pages of a studio."""

    def __init__(self, context: StudioContext) -> None:
        self.context = context
        self.models = ModelIndex(context.root)
        self.queue = OrderQueue(context.root, context.scratch / "worker.log")
        self.folder = context.root / OUT
        self.downloads = context.root / "studio" / "downloads"

    def model_names(self) -> list[str]:
        return list(self.models.places())

    def order(self, form: Form) -> str:
        """Put an order into the queue; says so, or what is wrong with it."""
        try:
            wish, facts = self.read_form(form)
            ticket = self.queue.submit(wish, self._count_steps(wish, facts))
        except FrameloomError as error:
            return _tell(error)
        except (ValueError, OverflowError) as error:
            return problem_list([f"a number cannot be read ({error}); type it again"])
        command = f'<code class="rg-command" tabindex="0">{safe(wish.command())}</code>'
        return (
            status(f"Order {ticket.id} is in the queue.")
            + f'<details class="rg-more"><summary>The same from a terminal</summary>{command}</details>'
        )

    def read_form(self, form: Form) -> tuple[Wish, ModelFacts]:
        """The wish, checked; pictures are decoded and kept only when all the rest is right."""
        place = self.models.get(form.model or "")
        if place is None:
            raise ConfigError("Model: choose one from the list")
        facts = self.models.facts(place.name)
        is_own = form.ratio in (None, "", OWN_SIZE)
        wish = Wish(
            model=place.name,
            prompt=clean_prompt(form.prompt or ""),
            seed=_whole(form.seed, 0),
            num_samples=_whole(form.num_samples, 1),
            negative=clean_prompt(form.negative or ""),
            steps=_maybe(form.steps),
            guidance=None if form.guidance is None else float(form.guidance),
            sampler=form.sampler if form.sampler in facts.samplers else None,
            frames=_maybe(form.frames) if facts.makes_clips else None,
            height=_maybe(form.height) if is_own else None,
            width=_maybe(form.width) if is_own else None,
            ratio=None if is_own else form.ratio,
            fps=None if form.fps is None or not facts.makes_clips else float(form.fps),
            format=form.format if form.format in FORMATS else None,
        )
        wish = drop_defaults(wish, facts)
        check_wish(wish, place, facts, self.context.limits)
        head, tail = (form.head, form.tail) if facts.takes_image else (None, None)
        return replace(wish, head=self._keep(head), tail=self._keep(tail)), facts

    def _keep(self, path: str | None) -> str | None:
        """A picture that the page has put into the scratch folder."""
        if not path:
            return None
        file = Path(path).resolve()
        if not file.is_relative_to(self.context.scratch):
            raise DataError("Image: send it once more")
        return keep_upload(file, self.context.root, max_bytes=self.context.limits.upload_bytes)

    def _count_steps(self, wish: Wish, facts: ModelFacts) -> int:
        return (wish.steps or facts.settings.steps) * wish.num_samples

    def version(self) -> list[object]:
        """Changes when the queue or the folder does."""
        tickets = [(one.id, one.state, one.done_steps, one.asked_to_stop) for one in self.queue.tickets()]
        try:
            changed = self.folder.stat().st_mtime_ns
        except OSError:
            changed = 0
        return [tickets, changed]

    def draw_queue(self) -> str:
        """Orders that are made or wait, and the last ones that ended."""
        tickets = self.queue.tickets()
        shown = [one for one in tickets if one.is_open] + [one for one in tickets if not one.is_open][:_ENDED_SHOWN]
        if not shown:
            return '<p class="rg-empty">Nothing in the queue.</p>'
        rows = "".join(self._draw_ticket(ticket) for ticket in shown)
        return f'<div class="rg-scroll"><table class="rg-table rg-queue">{rows}</table></div>'

    def _draw_ticket(self, ticket: Ticket) -> str:
        progress = ""
        if ticket.is_open and ticket.state != WAITING:
            done = min(ticket.done_steps, ticket.total_steps)
            progress = f" <small>step {done} of {ticket.total_steps}</small>{bar(done, ticket.total_steps)}"
        message = f'<br><small class="rg-failed">{safe(ticket.message)}</small>' if ticket.message else ""
        label = "End now" if ticket.asked_to_stop else "Cancel"
        acts = button("cancel", ticket.id, label, hint=f"{label}: order {ticket.id}") if ticket.is_open else ""
        return (
            f'<tr data-ticket="{ticket.id}" data-state="{ticket.state}"><td class="rg-name">{safe(ticket.wish.prompt)}'
            f"<br><small>order {ticket.id} · seed {ticket.wish.seed} · {safe(ticket.wish.model)}</small></td>"
            f'<td>{badge(ticket.state)}{progress}{message}</td><td class="rg-acts">{acts}</td></tr>'
        )

    def cancel(self, key: str) -> str:
        return status(self.queue.cancel(int(key)) if key.isdecimal() else "no such order")

    def list_made(self) -> list[Made]:
        return list_made(self.folder, _SHOWN)

    def find_made(self, name: str) -> Made:
        """A file by a name that a page sent: one of those that are shown."""
        for made in list_made(self.folder):
            if made.path.name == name:
                return made
        raise DataError(f"{name[:80]}: no such file any more")

    def draw_history(self) -> str:
        made = self.list_made()
        if not made:
            return '<p class="rg-empty">What you make appears here, and stays: it is read from the files.</p>'
        return f'<div class="rg-clips rg-wide">{"".join(self._draw_made(one) for one in made)}</div>'

    def _draw_made(self, made: Made) -> str:
        name, own = made.path.name, made.path.suffix.lower().lstrip(".")
        acts = [button("use", name, "Use these settings", hint=f"Use the settings of {name}")]
        acts.append(_link(self.context, made.path))
        for form in FORMATS if made.is_clip else ():
            if form != own:
                acts.append(button("convert", f"{form}:{name}", form, hint=f"get {name} as {form}"))
        return (
            f'<div class="rg-clip" data-file="{safe(name)}">{player(self.context, made.path, made.prompt)}<div>'
            f'<p>{safe(made.prompt)}</p><small class="rg-soft">{safe(made.describe())}</small><br>'
            f"{''.join(acts)}</div></div>"
        )

    def convert(self, key: str) -> str:
        """Another format of a file; says where to get it."""
        form, _, name = key.partition(":")
        try:
            path = convert_clip(self.find_made(name), form, self.downloads)
        except FrameloomError as error:
            return _tell(error)
        return f'<p class="rg-note" role="status">Ready: {_link(self.context, path, path.name)}</p>'

    def read_settings(self, name: str) -> Wish:
        """The form of a file; pictures that are no longer there are left out."""
        wish = to_wish(self.find_made(name))
        return replace(wish, head=self._lend(wish.head), tail=self._lend(wish.tail))

    def _lend(self, name: str | None) -> str | None:
        """A copy of a kept picture in the scratch folder, which is all that the page may take files from."""
        if name is None or not name.startswith(f"{UPLOADS}/"):
            return None
        file = self.context.resolve(name, where="image")
        if not file.is_file():
            return None
        copy = self.context.scratch / "given" / file.name
        copy.parent.mkdir(exist_ok=True)
        shutil.copyfile(file, copy)
        return str(copy)


def form_values(wish: Wish, facts: ModelFacts) -> dict[str, Any]:
    """Values of the fields for a wish; what it does not say is the model's own."""
    own = facts.settings
    return {
        "prompt": wish.prompt,
        "negative": own.negative_prompt if wish.negative is None else wish.negative,
        "seed": wish.seed,
        "num_samples": wish.num_samples,
        "steps": wish.steps or own.steps,
        "guidance": own.guidance if wish.guidance is None else wish.guidance,
        "sampler": wish.sampler if wish.sampler in facts.samplers else own.sampler,
        "frames": wish.frames or own.frames,
        "width": wish.width or own.width,
        "height": wish.height or own.height,
        "ratio": wish.ratio or OWN_SIZE,
        "fps": wish.fps or own.fps,
        "format": wish.format or (own.format if own.format in FORMATS else FORMATS[0]),
        "head": wish.head,
        "tail": wish.tail,
    }


def _link(context: StudioContext, path: Path, label: str = "Download") -> str:
    url = safe(context.file_url(path))
    return f'<a class="rg-link" href="{url}" download="{safe(path.name)}">{safe(label)}</a>'


def _tell(error: FrameloomError) -> str:
    return problem_list(_lines(error))


def _lines(error: FrameloomError) -> Sequence[str]:
    return error.problems if isinstance(error, ConfigError) else str(error).splitlines()


def _whole(value: float | None, default: int) -> int:
    return default if value is None else int(value)


def _maybe(value: float | None) -> int | None:
    return None if value is None else int(value)
