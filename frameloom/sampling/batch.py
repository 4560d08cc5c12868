"""Many requests sampled into one folder: shared among ranks, each file written when it is done, none made twice.

Neighbouring ranks may form groups that make one clip together (`sequence`); then the groups share the requests.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from datetime import timedelta
from pathlib import Path

import torch

from frameloom.builders.vae import check_frames
from frameloom.config.schema.sampling import SampleSection
from frameloom.core.errors import ConfigError, PeerFailed
from frameloom.core.files import digest_file, digest_value, write_text
from frameloom.core.progress import ProgressBar
from frameloom.data.loading.loader import log as worker_log
from frameloom.data.media.writing import CONTACT_SHEET, contact_sheet, write_image
from frameloom.diffusion.samplers import check_sampler
from frameloom.distributed.context import Collective, process_group
from frameloom.distributed.ranks import Ranks
from frameloom.distributed.sequence_parallel import ALONE, SequenceGroup, divide_ranks
from frameloom.models.denoisers.building import use_sequence_group
from frameloom.models.text.base import TextEncoder
from frameloom.models.text.tensor_parallel import TensorEncoder, can_split, find_group
from frameloom.sampling.conditions import name_mode, no_input
from frameloom.sampling.outputs import PLACES, describe_result, free_path, read_frames, write_clip
from frameloom.sampling.pipeline import Placement, Sampler, generate, split_batches
from frameloom.sampling.request import Request

LEDGER = "samples.jsonl"
FIRST_FRAMES = "first-frames"
_OF_RANK = "samples-rank*.jsonl"
_MAX_SHOWN = 24
# A share may take hours longer than another; a process that dies is noticed by torchrun, not by a timeout.
_PATIENCE = timedelta(days=7)
_OPTION = "--sequence"


def sample_many(
    sampler: Sampler,
    requests: Sequence[Request],
    out: Path,
    group: RankGroup,
    *,
    batch_size: int = 1,
    again: bool = False,
    on_step: Callable[[int], object] = lambda count: None,
) -> list[Path]:
    """Files of all requests, in order, with `samples.jsonl` and a contact sheet; those that are there are kept.

    Batches are cut from the whole list, so that neither the number of processes nor what was done before changes which
    requests are made together. The groups that the sampler's `sequence` makes of processes share the batches, and the
    first process of a group writes. `again` makes all of them once more, beside the earlier files. `on_step` is told
    how many videos moved a step; an error that it raises ends the call, and files that are done by then stay.
    """
    check_requests(sampler, requests)
    ledger = Ledger(out, rank=group.ranks.rank)
    jobs = _plan(sampler, requests, out, ledger, again=again)
    # Names are chosen by what is in the folder, so nobody writes before all have looked.
    group.context.barrier()
    share = group.ranks.by_groups(sampler.sequence.degree).share(list(_split(sampler, jobs, batch_size)))
    total = sum(len(batch) * batch[0].settings.steps for batch in share)
    with ProgressBar("sampling", total, is_shown=group.ranks.is_first) as bar:

        def advance(count: int, note: str = "") -> None:
            bar.advance(count, note)
            on_step(count)

        for batch in share:
            if all(job.is_done for job in batch):
                advance(len(batch) * batch[0].settings.steps, note="done before")
                continue
            results = generate(sampler, [job.request for job in batch], batch_size=batch_size, on_step=advance)
            # Others of a group have made the clip, too, and have no result.
            for job, result in zip(batch if results else [], results, strict=True):
                if not job.is_done:
                    write_clip(job.path, result.frames_FHWC, job.settings, job.about)
                    ledger.add(_enter(job, out))
    group.context.barrier()
    if group.ranks.is_first:
        ledger.settle(job.key for job in jobs)
        _write_sheet(jobs, out)
    paths = {job.key: job.path for job in jobs}
    return [paths[_find_key(sampler, request)] for request in requests]


def make_first_frames(
    sampler: Sampler, requests: Sequence[Request], out: Path, group: RankGroup, *, settings: SampleSection | None = None
) -> list[Request]:
    """The requests with a picture of the same prompt and seed as their first frame: text to image to video."""
    chosen = (settings or sampler.settings).model_copy(update={"frames": 1, "strength": None})
    pictures = [replace(request, settings=chosen) for request in requests]
    paths = sample_many(sampler, pictures, out / FIRST_FRAMES, group)
    group.context.barrier()
    return [replace(request, head=path) for request, path in zip(requests, paths, strict=True)]


def check_requests(sampler: Sampler, requests: Sequence[Request]) -> None:
    """ConfigError for the first request that this model cannot make, before anything is made."""
    patch = sampler.denoiser.family.patch(sampler.denoiser.config)
    for settings in dict.fromkeys(request.settings or sampler.settings for request in requests):
        check_sampler(settings.sampler, sampler.objective)
        check_frames(sampler.vae, settings.frames)
        for name, stride, cells in (
            ("height", sampler.vae.strides[1], patch[1]),
            ("width", sampler.vae.strides[2], patch[2]),
        ):
            side: int = getattr(settings, name)
            if side % (stride * cells):
                raise ConfigError(f"--{name} {side}: this model makes multiples of {stride * cells} pixels")
    takes = sampler.denoiser.family.beside(sampler.denoiser.config)
    for request in requests:
        mode = name_mode(request, request.settings or sampler.settings)
        if takes == "none" and mode in ("image", "continue", "inpaint"):
            raise no_input(sampler.denoiser.family.name)


@dataclass(frozen=True)
class _PlannedFile:
    """A request with its settings, what is written into its file, the file, and whether it is there already."""

    request: Request
    settings: SampleSection
    about: dict[str, str]
    path: Path
    is_done: bool
    key: str


def _plan(
    sampler: Sampler, requests: Sequence[Request], out: Path, ledger: Ledger, *, again: bool
) -> list[_PlannedFile]:
    """A job for each request; those that are the same in all that matters are one."""
    jobs: dict[str, _PlannedFile] = {}
    taken: set[str] = set()
    for request in requests:
        settings = request.settings or sampler.settings
        whole, key = replace(request, settings=settings), _find_key(sampler, request)
        if key in jobs:
            continue
        done = None if again else ledger.find_done(key)
        suffix = "png" if settings.frames == 1 else settings.format
        path = out / done.file if done is not None else free_path(out, whole, suffix, frozenset(taken))
        taken.add(path.name)
        about = describe_result(sampler.origin, whole, settings)
        jobs[key] = _PlannedFile(whole, settings, about, path, done is not None, key)
    return list(jobs.values())


def _find_key(sampler: Sampler, request: Request) -> str:
    """A digest of what the frames follow from, and of a name that was given; where files lie does not matter."""
    about = describe_result(sampler.origin, request, request.settings or sampler.settings)
    return digest_value({name: value for name, value in about.items() if name not in PLACES})


def _split(sampler: Sampler, jobs: Sequence[_PlannedFile], batch_size: int) -> Iterator[list[_PlannedFile]]:
    left = iter(jobs)
    for part, _ in split_batches(sampler, [job.request for job in jobs], batch_size):
        yield [next(left) for _ in part]


def _enter(job: _PlannedFile, out: Path) -> Entry:
    file = job.path.relative_to(out).as_posix()
    return Entry(file, job.request.prompt, job.request.seed, job.key, digest_clip(job.path))


def _write_sheet(jobs: Sequence[_PlannedFile], out: Path) -> None:
    """Read back from the files, so that it is the same however they were made."""
    shown = jobs[:_MAX_SHOWN]
    labels = [f"{job.request.prompt} (seed {job.request.seed})" for job in shown]
    write_image(out / CONTACT_SHEET, contact_sheet([list(read_frames(job.path)) for job in shown], labels))


@dataclass(frozen=True)
class Entry:
    """A finished file: `key` is the digest of all that it was made from, `sha256` that of its content."""

    file: str
    prompt: str
    seed: int
    key: str
    sha256: str


class Ledger:
    """Entries by key. Each process appends to a file of its own; `settle` joins them when all are done."""

    def __init__(self, out: Path, *, rank: int = 0) -> None:
        self.out = out
        self._own = out / (LEDGER if rank == 0 else f"samples-rank{rank}.jsonl")
        self.entries: dict[str, Entry] = {}
        for file in (out / LEDGER, *sorted(out.glob(_OF_RANK))):
            self.entries |= {entry.key: entry for entry in _read(file)}

    def find_done(self, key: str) -> Entry | None:
        """The entry of a request whose file is there and unchanged."""
        entry = self.entries.get(key)
        if entry is None or not (self.out / entry.file).exists():
            return None
        return entry if digest_clip(self.out / entry.file) == entry.sha256 else None

    def add(self, entry: Entry) -> None:
        self.entries[entry.key] = entry
        self.out.mkdir(parents=True, exist_ok=True)
        with self._own.open("a", encoding="utf-8") as file:
            file.write(_write([entry]))
            file.flush()
            os.fsync(file.fileno())

    def settle(self, order: Iterable[str]) -> None:
        """One file for all processes: earlier entries, then those of this call in its order."""
        for file in sorted(self.out.glob(_OF_RANK)):
            self.entries |= {entry.key: entry for entry in _read(file)}
        last = list(dict.fromkeys(key for key in order if key in self.entries))
        kept = [key for key in self.entries if key not in set(last)]
        write_text(self.out / LEDGER, _write(self.entries[key] for key in (*kept, *last)))
        for file in self.out.glob(_OF_RANK):
            file.unlink()


def digest_clip(path: Path) -> str:
    """Of a file, or of a folder of frames."""
    if path.is_file():
        return digest_file(path)
    return digest_value({file.name: digest_file(file) for file in path.iterdir()})


def _write(entries: Iterable[Entry]) -> str:
    return "".join(json.dumps(asdict(entry)) + "\n" for entry in entries)


def _read(file: Path) -> Iterable[Entry]:
    """All whole lines; one that a killed process left half-written counts as not there."""
    if not file.is_file():
        return
    for line in file.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            yield Entry(**json.loads(line))
        except (ValueError, TypeError):
            continue


@dataclass(frozen=True)
class RankGroup:
    """Which rank this is, how it reaches the others, and which of them make a clip with it; alone by default."""

    ranks: Ranks = field(default_factory=Ranks)
    context: Collective = field(default_factory=Collective)
    sequence: SequenceGroup = ALONE


@contextmanager
def join_ranks(ranks: Ranks, *, sequence: int = 1) -> Iterator[RankGroup]:
    """All processes of this call, in groups of `sequence`; ConfigError when they cannot be divided so."""
    try:
        check_groups(ranks.num_ranks, sequence)
    except ConfigError as error:
        if ranks.local_rank == 0:
            raise
        # All processes of a host find the same; one of them tells it.
        raise PeerFailed(error.exit_code) from error
    if ranks.num_ranks == 1:
        yield RankGroup(ranks)
        return
    on_gpu = sequence > 1 and torch.cuda.is_available()
    with process_group(ranks, on_gpu=on_gpu, timeout=_PATIENCE, keep_warnings=[worker_log]) as context:
        yield RankGroup(ranks, context, divide_ranks(sequence))


def check_groups(num_ranks: int, sequence: int) -> None:
    """ConfigError with the arithmetic when so many processes do not make whole groups."""
    if num_ranks == 1 and sequence > 1:
        raise ConfigError(
            f"--sequence {sequence}: {sequence} processes make a clip together, but this is one; start them: "
            f"torchrun --nproc-per-node {sequence} -m frameloom sample ..."
        )
    if num_ranks % sequence:
        below = num_ranks // sequence * sequence
        fitting = f"{below} or {below + sequence}" if below else str(sequence)
        raise ConfigError(
            f"--sequence {sequence}: {num_ranks} processes / {sequence} leaves a group of {num_ranks % sequence}; "
            f"start {fitting} processes, or choose a divisor of {num_ranks}"
        )


def divide_clips(sampler: Sampler, group: SequenceGroup) -> Sampler:
    """The sampler of one process of `group`; ConfigError when its model's heads cannot be shared by so many."""
    if group.degree == 1:
        return sampler
    use_sequence_group(sampler.denoiser.family, sampler.denoiser.model, group, key=_OPTION)
    if not sampler.splits_text:
        return replace(sampler, sequence=group)

    def split(encoder: TextEncoder) -> TextEncoder:
        return TensorEncoder(encoder, find_group(group.name), key=_OPTION) if can_split(encoder) else encoder

    text, placement = sampler.text.with_each(split), sampler.placement
    if placement is not None:
        placement = Placement({**placement.parts, "text": text}, placement.device, offload=placement.offload)
    return replace(sampler, sequence=group, text=text, placement=placement)
