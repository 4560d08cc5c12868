"""Many requests sampled into one folder: shared among ranks, each file written when it is done, none made twice.

Neighbouring ranks may form groups that make one clip together (`sequence`); then the groups share the requests.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import timedelta
from pathlib import Path

import torch

from frameloom.config.schema.sampling import SampleRequest
from frameloom.core.errors import ConfigError, PeerFailed
from frameloom.core.files import digest_file, digest_value, write_text
from frameloom.core.progress import ProgressBar
from frameloom.data.loading.loader import log as worker_log
from frameloom.data.media.transforms import psnr_db, to_signed_range
from frameloom.distributed.context import Collective, process_group
from frameloom.distributed.ranks import Ranks, read_ranks
from frameloom.distributed.sequence_parallel import ALONE, SequenceGroup, divide_ranks
from frameloom.models.denoisers.base import use_sequence_group
from frameloom.models.text.base import TextEncoder
from frameloom.models.text.tensor_parallel import TensorEncoder, can_split, find_group
from frameloom.sampling.block_cache import CacheCount
from frameloom.sampling.conditions import read_given
from frameloom.sampling.load import load_model
from frameloom.sampling.outputs import ASIDE, describe_sample, free_path, read_frames, write_sheet
from frameloom.sampling.pipeline import (
    Offload,
    Pipeline,
    check_requests,
    decode,
    draw_noise,
    encode_given,
    encode_prompts,
    generate,
    solve,
    split_batches,
)
from frameloom.sampling.refine import Refiner, refine_prompts

LOG = "samples.jsonl"
FIRST_FRAMES = "first-frames"
SELF = "self"
_OF_RANK = "samples-rank*.jsonl"
_MAX_SHOWN = 24
# One rank may take hours longer than another; torchrun notices a dead process, not a timeout.
_PATIENCE = timedelta(days=7)
_OPTION = "--sequence"


def run_job(
    open_model: Callable[[], Pipeline],
    requests: Sequence[SampleRequest],
    out: Path,
    *,
    seed: int = 0,
    num: int = 1,
    refiner: Refiner | None = None,
    image_model: str | None = None,
    batch_size: int = 1,
    again: bool = False,
    sequence: int = 1,
    report: Callable[[str], object] = lambda text: None,
    on_step: Callable[[int], object] = lambda count: None,
) -> list[Path]:
    """`frameloom sample`: `num` files for each request into `out`, on every process, with a contact sheet and a log.

    Requests say only what their row sets. `image_model` makes the first frames ("self": the model does so itself), and
    `sequence` processes make each clip together. `report` gets results worth reading, on the first process alone.
    """
    with join_ranks(read_ranks(), sequence=sequence) as group:
        report = report if group.ranks.is_first else lambda text: None
        if refiner is not None:
            # By the first process, for all: a refiner that draws would give each another text.
            texts: list[str] | None = None
            if group.ranks.is_first:
                texts = refine_prompts(refiner, [request.prompt for request in requests], seed=seed)
                for text in texts:
                    report(f"refined: {text}")
            refined: list[str] = group.context.broadcast(texts)
            requests = [
                request.model_copy(update={"prompt": text}) for request, text in zip(requests, refined, strict=True)
            ]
        pipeline = divide_clips(open_model(), group.sequence)
        whole = expand_requests(pipeline, requests, seed=seed, num=num)
        if image_model is not None:
            if any(request.image is not None or request.video is not None for request in whole):
                raise ConfigError(
                    "--image-model: makes the first frame, but --image or --video gives one; leave one out"
                )
            check_requests(pipeline, [request.model_copy(update={"image": out}) for request in whole])
            maker = pipeline if image_model == SELF else load_model(image_model)
            whole = make_first_frames(maker, whole, out, group)
        check_requests(pipeline, whole)
        if whole[0].cache_threshold and group.ranks.by_groups(sequence).is_first:
            report(measure_cache(pipeline, whole[0]))
        paths = sample_many(pipeline, whole, out, group, batch_size=batch_size, again=again, on_step=on_step)
        return list(dict.fromkeys(paths))


def expand_requests(
    pipeline: Pipeline, requests: Sequence[SampleRequest], *, seed: int = 0, num: int = 1
) -> list[SampleRequest]:
    """`num` complete requests of each, with seeds that count up from `seed` or from the request's own."""
    expanded = []
    for number, request in enumerate(requests):
        first = request.seed if "seed" in request.model_fields_set else seed + number * num
        complete = pipeline.complete(request)
        expanded += [complete.model_copy(update={"seed": first + sample}) for sample in range(num)]
    return expanded


def make_first_frames(
    pipeline: Pipeline, requests: Sequence[SampleRequest], out: Path, group: RankGroup
) -> list[SampleRequest]:
    """The requests with a picture of the same prompt and seed as their first frame: text to image to video."""
    settings = {**dict(pipeline.settings), "frames": 1, "strength": None, "last_image": None}
    pictures = [request.model_copy(update=settings) for request in requests]
    paths = sample_many(pipeline, pictures, out / FIRST_FRAMES, group)
    group.context.barrier()
    return [request.model_copy(update={"image": path}) for request, path in zip(requests, paths, strict=True)]


def measure_cache(pipeline: Pipeline, request: SampleRequest) -> str:
    """What a request gains and loses by its `cache_threshold`, in a sentence: it is made with and without."""
    given = [read_given(request, pipeline.vae)]
    text, noise = encode_prompts(pipeline, [request]), draw_noise(pipeline, [request])
    prepared = encode_given(pipeline, [request], given)
    count, latents, seconds = CacheCount(), [], []
    for threshold in (0.0, request.cache_threshold):
        started = time.perf_counter()
        chosen = request.model_copy(update={"cache_threshold": threshold})
        latents.append(solve(pipeline, [chosen], text, noise, prepared, count=count))
        seconds.append(time.perf_counter() - started)
    error = float((latents[1] - latents[0]).norm() / latents[0].norm().clamp_min(1e-12))
    clips_FHWC = [torch.from_numpy(decode(pipeline, latent)[0]) for latent in latents]
    psnr = float(psnr_db(*(to_signed_range(clip.permute(3, 0, 1, 2)[None]) for clip in clips_FHWC)))
    return (
        f"cache_threshold {request.cache_threshold:g}, measured on the first prompt: "
        f"{count.skipped / max(count.calls, 1):.0%} of all blocks "
        f"skipped, {seconds[1]:.2f} s instead of {seconds[0]:.2f} s ({seconds[0] / max(seconds[1], 1e-9):.2f}x), "
        f"latents off by {error:.2%}, frames {psnr:.1f} dB"
    )


def sample_many(
    pipeline: Pipeline,
    requests: Sequence[SampleRequest],
    out: Path,
    group: RankGroup,
    *,
    batch_size: int = 1,
    again: bool = False,
    on_step: Callable[[int], object] = lambda count: None,
) -> list[Path]:
    """Files of all requests, in order, with `samples.jsonl` and a contact sheet; files that exist already are kept.

    Batches are cut from the whole list, so that neither the number of processes nor what was done before changes which
    requests are made together. The groups of processes share the batches, and the first process of a group writes.
    `again` makes all of them once more, beside the earlier files. `on_step` gets how many videos moved a step; an error
    that it raises ends the call, and files that are done by then stay.
    """
    check_requests(pipeline, requests)
    log = SampleLog(out, rank=group.ranks.rank)
    # Requests that agree in the name and in all that the frames follow from are one file; where files lie is left out.
    described = [describe_sample(pipeline.origin, request) for request in requests]
    keys = [digest_value({name: one[name] for name in one if name not in ASIDE}) for one in described]
    unique = dict(zip(keys, requests, strict=True))
    done = {} if again else {key: path for key in unique if (path := log.find_done(key)) is not None}
    paths: dict[str, Path] = {}
    for key, request in unique.items():
        paths[key] = done.get(key) or free_path(out, request, frozenset(path.name for path in paths.values()))
    # Names depend on the files in the folder, so no rank writes before all have listed it.
    group.context.barrier()
    left = iter(unique)
    batches = [{next(left): one for one in part} for part in split_batches(list(unique.values()), batch_size)]
    share = group.ranks.by_groups(pipeline.sequence.degree).share(batches)
    total = sum(request.steps for batch in share for request in batch.values())
    with ProgressBar("sampling", total, is_shown=group.ranks.is_first) as bar:

        def advance(count: int, note: str = "") -> None:
            bar.advance(count, note)
            on_step(count)

        for batch in share:
            if batch.keys() <= done.keys():
                advance(sum(request.steps for request in batch.values()), note="done before")
                continue
            samples = generate(pipeline, list(batch.values()), batch_size=batch_size, on_step=advance)
            # Others of a group have made the clip, too, and have no sample.
            for key, sample in zip(batch if samples else [], samples, strict=True):
                if key not in done:
                    sample.save(paths[key])
                    log.add(key, paths[key], sample.request)
    group.context.barrier()
    if group.ranks.is_first:
        log.join(list(unique))
        # Read back from the files, so that it is the same however they were made.
        write_sheet([(unique[key], read_frames(paths[key])) for key in list(unique)[:_MAX_SHOWN]], out)
    return [paths[key] for key in keys]


class SampleLog:
    """The finished files of a folder, by key: file, prompt, seed, and the digest of its content.

    Each process appends to a file of its own; `join` makes them one when all are done.
    """

    def __init__(self, out: Path, *, rank: int = 0) -> None:
        self.out = out
        self._own = out / (LOG if rank == 0 else f"samples-rank{rank}.jsonl")
        self.entries: dict[str, dict[str, object]] = {}
        self._read(out / LOG, *sorted(out.glob(_OF_RANK)))

    def find_done(self, key: str) -> Path | None:
        """The file of a request if it exists and is unchanged."""
        entry = self.entries.get(key)
        path = self.out / str(entry["file"]) if entry else None
        is_same = entry and path and path.exists() and digest_clip(path) == entry["sha256"]
        return path if is_same else None

    def add(self, key: str, path: Path, request: SampleRequest) -> None:
        name, digest = path.relative_to(self.out).as_posix(), digest_clip(path)
        entry = {"file": name, "prompt": request.prompt, "seed": request.seed, "key": key, "sha256": digest}
        self.entries[key] = entry
        with self._own.open("a", encoding="utf-8") as file:
            file.write(json.dumps(entry) + "\n")
            file.flush()
            os.fsync(file.fileno())

    def join(self, order: Sequence[str]) -> None:
        """One file for all processes: earlier entries, then those of this call in its order."""
        self._read(*sorted(self.out.glob(_OF_RANK)))
        last = [key for key in order if key in self.entries]
        kept = [key for key in self.entries if key not in set(last)]
        write_text(self.out / LOG, "".join(json.dumps(self.entries[key]) + "\n" for key in (*kept, *last)))
        for file in self.out.glob(_OF_RANK):
            file.unlink()

    def _read(self, *files: Path) -> None:
        """All whole lines; one that a killed process left half-written does not count."""
        for file in files:
            for line in file.read_text(encoding="utf-8", errors="replace").splitlines() if file.is_file() else ():
                try:
                    entry = json.loads(line)
                except ValueError:
                    continue
                if isinstance(entry, dict) and {"file", "key", "sha256"} <= entry.keys():
                    self.entries[entry["key"]] = entry


def digest_clip(path: Path) -> str:
    """Of a file, or of a folder of frames."""
    if path.is_file():
        return digest_file(path)
    return digest_value({file.name: digest_file(file) for file in path.iterdir()})


@dataclass(frozen=True)
class RankGroup:
    """Which rank this is, how it reaches the others, and which of them make a clip with it; alone by default."""

    ranks: Ranks = field(default_factory=Ranks)
    context: Collective = field(default_factory=Collective)
    sequence: SequenceGroup = ALONE


@contextmanager
def join_ranks(ranks: Ranks, *, sequence: int = 1) -> Iterator[RankGroup]:
    """All processes of this call, in groups of `sequence`; ConfigError when they do not make whole groups."""
    rest, problem = ranks.num_ranks % sequence, ""
    if ranks.num_ranks == 1 and sequence > 1:
        problem = (
            f"{sequence} processes make a clip together, but this is one; start them: torchrun --nproc-per-node "
            f"{sequence} -m frameloom sample ..."
        )
    elif rest:
        below = ranks.num_ranks - rest
        problem = (
            f"{ranks.num_ranks} processes / {sequence} leaves a group of {rest}; start "
            f"{f'{below} or ' if below else ''}{below + sequence} processes, or choose a divisor of {ranks.num_ranks}"
        )
    if problem:
        error = ConfigError(f"--sequence {sequence}: {problem}")
        # All processes of a host find the same; one of them reports it.
        raise error if ranks.local_rank == 0 else PeerFailed(error.exit_code)
    if ranks.num_ranks == 1:
        yield RankGroup(ranks)
        return
    on_gpu = sequence > 1 and torch.cuda.is_available()
    with process_group(ranks, on_gpu=on_gpu, timeout=_PATIENCE, keep_warnings=[worker_log]) as context:
        yield RankGroup(ranks, context, divide_ranks(sequence))


def divide_clips(pipeline: Pipeline, group: SequenceGroup) -> Pipeline:
    """The model in one process of `group`; ConfigError when its heads cannot be shared by so many."""
    if group.degree == 1:
        return pipeline
    use_sequence_group(pipeline.denoiser.family, pipeline.denoiser.model, group, key=_OPTION)
    if not pipeline.splits_text:
        return replace(pipeline, sequence=group)

    def split(encoder: TextEncoder) -> TextEncoder:
        return TensorEncoder(encoder, find_group(group.name), key=_OPTION) if can_split(encoder) else encoder

    text, offload = pipeline.text.with_each(split), pipeline.offload
    if offload is not None:
        offload = Offload({**offload.parts, "text": text}, offload.device)
    return replace(pipeline, sequence=group, text=text, offload=offload)
