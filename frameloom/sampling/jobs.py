"""A sampling job from prompts to files, as `frameloom sample` runs it, and the exact repeat of a finished file."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError

from frameloom.config.schema.sampling import SampleSection
from frameloom.core.errors import CheckpointError, ConfigError, DataError
from frameloom.core.files import digest_file
from frameloom.data.media.transforms import psnr_db, to_signed_range
from frameloom.distributed.ranks import read_ranks
from frameloom.sampling.batch import RankGroup, check_requests, divide_clips, join_ranks, make_first_frames, sample_many
from frameloom.sampling.block_cache import CacheCount
from frameloom.sampling.conditions import read_given
from frameloom.sampling.load import Source, open_sampler
from frameloom.sampling.outputs import read_about
from frameloom.sampling.pipeline import Sampler, decode, draw_noise, encode_prompts, prepare_batch, solve
from frameloom.sampling.refine import build_refiner, refine_prompts
from frameloom.sampling.request import MEDIA, Request, Row, check_media, expand_rows

SELF = "self"
_RATIO = re.compile(r"(\d+(?:\.\d+)?):(\d+(?:\.\d+)?)")
_PREFIX = "sample."
# Equal in both, or the result would be another one.
_IDENTITY = ("recipe", "weights")


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


@dataclass(frozen=True)
class CacheReport:
    """`latent_error` is the distance of the latents relative to their size; `psnr` that of the frames, in dB."""

    threshold: float
    share_skipped: float
    seconds: float
    seconds_without: float
    latent_error: float
    psnr: float

    def describe(self) -> str:
        gain = self.seconds_without / max(self.seconds, 1e-9)
        return (
            f"cache_threshold {self.threshold:g}, measured on the first prompt: {self.share_skipped:.0%} of all blocks "
            f"skipped, {self.seconds:.2f} s instead of {self.seconds_without:.2f} s ({gain:.2f}x), latents off by "
            f"{self.latent_error:.2%}, frames {self.psnr:.1f} dB"
        )


def measure_cache(sampler: Sampler, request: Request) -> CacheReport:
    """Make a request twice, with and without its `cache_threshold`."""
    settings = request.settings or sampler.settings
    given = [read_given(request, settings, stride=sampler.vae.strides[0], causal=sampler.vae.causal)]
    text = encode_prompts(sampler, [request.prompt], settings)
    noise = draw_noise(sampler, [request], settings)
    prepared = prepare_batch(sampler, [request], given, settings)
    count, found = CacheCount(), []
    for chosen in (settings.model_copy(update={"cache_threshold": 0.0}), settings):
        started = time.perf_counter()
        latent = solve(sampler, text, noise, prepared, [request.seed], chosen, count=count)
        found.append((latent, time.perf_counter() - started))
    (exact, seconds_without), (cached, seconds) = found
    error = float((cached - exact).norm() / exact.norm().clamp_min(1e-12))
    clips_FHWC = [torch.from_numpy(decode(sampler, latent)[0]) for latent in (exact, cached)]
    psnr = float(psnr_db(*(to_signed_range(clip.permute(3, 0, 1, 2)[None]) for clip in clips_FHWC)))
    return CacheReport(settings.cache_threshold, count.share, seconds, seconds_without, error, psnr)


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


@dataclass(frozen=True)
class Repeat:
    """What a file was made from; `check` refuses a model that is not the same."""

    file: Path
    source: Source
    request: Request
    about: dict[str, str]

    def check(self, sampler: Sampler) -> None:
        different = [name for name in _IDENTITY if self.about.get(name) != sampler.origin.get(name)]
        if different:
            raise CheckpointError(
                f"{self.file}: was made with another model: {' and '.join(different)} of {self.source.path} are not "
                "the same any more; name the model that it was made with, or sample with its prompt and seed"
            )


def read_repeat(file: Path, *, model: Path | None = None) -> Repeat:
    """The request and the model of a file; `model` is where the model lies now, if it was moved."""
    about = read_about(file)
    settings = _read_settings(file, about)
    if "model" not in about and model is None:
        raise DataError(f"{file}: does not say its model; name the run in front: frameloom sample RUN --like {file}")
    try:
        overrides = json.loads(about.get("overrides", "[]"))
        seed, step = int(about["seed"]), about.get("step")
        source = Source(
            model or Path(about["model"]),
            (*overrides, *_of_model(settings)),
            step=None if step is None else int(step),
            family=about.get("family"),
            recipe=about.get("recipe_name"),
        )
    except (ValueError, TypeError) as error:
        raise DataError(f"{file}: says how it was made in a form that is not known ({error})") from error
    media: dict[str, Any] = {name: Path(about[name]) for name in MEDIA if name in about}
    for name, path in media.items():
        if not path.is_file() or digest_file(path) != about.get(f"{name}.sha256"):
            raise DataError(
                f"{file}: was made with {path} as its {name}, which is not there or has changed; bring it back"
            )
    request = Request(about["prompt"], seed, **media, settings=settings, name=about.get("name"))
    return Repeat(file, source, request, about)


def _read_settings(file: Path, about: dict[str, str]) -> SampleSection:
    """Settings that the file does not have, because it is older than them, have their defaults."""
    found = {}
    for name, key in SampleSection.model_fields.items():
        text = about.get(_PREFIX + name)
        if text is not None:
            is_text = isinstance(key.default, str) or (key.default is None and not _is_json(text))
            found[name] = text if is_text else json.loads(text)
    try:
        return SampleSection.model_validate(found)
    except ValidationError as error:
        raise DataError(f"{file}: its settings are not known here ({error.errors()[0]['msg']})") from error


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except ValueError:
        return False
    return True


def _of_model(settings: SampleSection) -> list[str]:
    """Settings that a model is loaded with."""
    words = []
    for name in ("weights", "lora_scale", "lora_merge", "precision", "tile_px", "offload"):
        value = getattr(settings, name)
        words += [f"--sample.{name}", value if isinstance(value, str) else json.dumps(value)]
    if settings.lora is not None:
        loras = settings.lora
        text = loras if isinstance(loras, str) else json.dumps([one.model_dump() for one in loras])
        words += ["--sample.lora", text]
    return words
