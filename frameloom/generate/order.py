"""A whole call of `frameloom sample`: prompts refined, first frames made, requests checked, files written."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from frameloom.config.sampling_settings import SampleSection
from frameloom.core.errors import ConfigError
from frameloom.core.ranks import read_ranks
from frameloom.generate.cache_report import measure_cache
from frameloom.generate.clip_groups import divide_clips
from frameloom.generate.load import Source, open_sampler
from frameloom.generate.many import check_requests, make_first_frames, sample_many
from frameloom.generate.pipeline import Request, Sampler
from frameloom.generate.prompts import Row, check_media, expand_rows
from frameloom.generate.rank_group import RankGroup, join_ranks
from frameloom.generate.refine import build_refiner, refine_prompts
from frameloom.generate.repeat import read_repeat

SELF = "self"
_RATIO = re.compile(r"(\d+(?:\.\d+)?):(\d+(?:\.\d+)?)")


@dataclass(frozen=True)
class Order:
    """What to sample. `image_model` makes the first frames ("self": the model does so itself).

    So many processes as `sequence` says make each clip together.
    """

    source: Source
    rows: Sequence[Row]
    out: Path
    first_seed: int = 0
    num_samples: int = 1
    media: Mapping[str, Path] = field(default_factory=dict)
    ratio: str | None = None
    refiner: Path | None = None
    refiner_command: str | None = None
    image_model: str | None = None
    batch_size: int = 1
    again: bool = False
    sequence: int = 1


def fill_order(
    order: Order,
    *,
    tell: Callable[[str], object],
    open_model: Callable[[Source], Sampler] = open_sampler,
    on_step: Callable[[int], object] = lambda count: None,
) -> list[Path]:
    """The files of an order, on every process; `tell` is told results worth reading, by the first process alone.

    `open_model` may give a model that it has kept; `on_step` is that of `sample_many`.
    """
    check_media(order.rows, order.media)
    with join_ranks(read_ranks(), sequence=order.sequence) as group:
        say = tell if group.ranks.is_first else _say_nothing
        rows = _refine(order, group, say)
        sampler = divide_clips(open_model(order.source), group.sequence)
        settings = sampler.settings if order.ratio is None else fit_ratio(sampler, order.ratio)
        requests = expand_rows(
            rows, settings, first_seed=order.first_seed, num_samples=order.num_samples, media=order.media
        )
        if order.image_model is not None:
            requests = _add_first_frames(order, sampler, requests, group)
        check_requests(sampler, requests)
        if settings.cache_threshold and group.ranks.by_groups(order.sequence).is_first:
            say(measure_cache(sampler, requests[0]).describe())
        paths = sample_many(
            sampler, requests, order.out, group, batch_size=order.batch_size, again=order.again, on_step=on_step
        )
        return list(dict.fromkeys(paths))


def repeat_file(file: Path, out: Path, *, model: Path | None = None, sequence: int = 1) -> list[Path]:
    """Make a file again that says how it was made; to the bit, on the same machine and with as many threads.

    With another number of processes to a clip than it was made with, up to the last bits.
    """
    repeat = read_repeat(file, model=model)
    sampler = open_sampler(repeat.source)
    repeat.check(sampler)
    sampler = replace(sampler, origin={**sampler.origin, **_identity(repeat.about)})
    with join_ranks(read_ranks(), sequence=sequence) as group:
        sampler = divide_clips(sampler, group.sequence)
        return sample_many(sampler, [repeat.request], out, group, again=True)


def _identity(about: Mapping[str, str]) -> dict[str, str]:
    """The words for the model as the file has them, so that the new file is equal as a whole."""
    return {name: about[name] for name in ("model", "overrides") if name in about}


def fit_ratio(sampler: Sampler, ratio: str) -> SampleSection:
    """Settings with sides in this ratio, width to height, and about as many pixels as before."""
    match = _RATIO.fullmatch(ratio)
    if match is None or not float(match[1]) or not float(match[2]):
        raise ConfigError(f"--ratio {ratio}: not a ratio; write width:height, as in 16:9")
    patch = sampler.denoiser.family.patch(sampler.denoiser.config)
    steps = [stride * cells for stride, cells in zip(sampler.vae.strides[1:], patch[1:], strict=True)]
    area, wide = sampler.settings.height * sampler.settings.width, float(match[1]) / float(match[2])
    sides = ((area / wide) ** 0.5, (area * wide) ** 0.5)
    height, width = (max(step, round(side / step) * step) for side, step in zip(sides, steps, strict=True))
    return sampler.settings.model_copy(update={"height": height, "width": width})


def _refine(order: Order, group: RankGroup, say: Callable[[str], object]) -> list[Row]:
    """By the first process, for all: a refiner that draws would tell each another text."""
    rows = list(order.rows)
    if order.refiner is None and order.refiner_command is None:
        return rows
    texts: list[str] | None = None
    if group.ranks.is_first:
        refiner = build_refiner(order.refiner, order.refiner_command)
        texts = refine_prompts(refiner, [row.prompt for row in rows], seed=order.first_seed)
        for text in texts:
            say(f"refined: {text}")
    refined: list[str] = group.context.broadcast(texts)
    return [replace(row, prompt=text) for row, text in zip(rows, refined, strict=True)]


def _add_first_frames(order: Order, sampler: Sampler, requests: Sequence[Request], group: RankGroup) -> list[Request]:
    if any(request.head is not None or request.video is not None for request in requests):
        raise ConfigError("--image-model: makes the first frame, but --image or --video gives one; leave one out")
    check_requests(sampler, [replace(request, head=order.out) for request in requests])
    if order.image_model == SELF:
        return make_first_frames(sampler, requests, order.out, group)
    assert order.image_model is not None
    return make_first_frames(open_sampler(Source(Path(order.image_model))), requests, order.out, group)


def _say_nothing(text: str) -> None:
    """Other processes than the first."""
