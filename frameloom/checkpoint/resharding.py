"""Sharded tensors in checkpoints: who writes which piece, and reading any part of a tensor whoever wrote it.

A piece is a box of a whole tensor: rows 32 to 63 of a weight, or all of it. What several processes hold alike is
written by one of them, chosen so that all write about as many bytes.

`state.json` says where the pieces of a tensor are. Its `placement` has, for each group that lies in several files,
`{"shape": [64, 32], "parts": [[1, [0, 0], [32, 32]], [2, [32, 0], [32, 32]]]}` by name: the number of the file, where
the piece begins in the whole tensor, and its size. A group in one file, `model.safetensors`, has no entry.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeGuard

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor, nn

from frameloom.core.errors import CheckpointError
from frameloom.weights.files import name_shards
from frameloom.weights.lazy_tensors import LazyTensors, PendingTensor
from frameloom.weights.safetensors_file import open_safetensors

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


Box = tuple[tuple[int, ...], tuple[int, ...]]
"""(offset, size) along each dim"""


@dataclass(frozen=True)
class Piece:
    """A box of a tensor of `shape`, on one process."""

    shape: tuple[int, ...]
    offset: tuple[int, ...]
    size: tuple[int, ...]
    itemsize: int

    @property
    def num_bytes(self) -> int:
        return math.prod(self.size) * self.itemsize

    @property
    def box(self) -> Box:
        return self.offset, self.size


Layout = dict[str, dict[str, Piece]]
"""group -> name -> what a process holds of it"""


def is_split(tensor: Tensor) -> TypeGuard[DTensor]:
    """Plain tensors are recognised first: importing DTensor takes a second, and most commands never have one."""
    if type(tensor) in (Tensor, nn.Parameter):
        return False
    from torch.distributed.tensor import DTensor

    return isinstance(tensor, DTensor)


def is_simple(tensor: Tensor) -> bool:
    """Whether a process holds one box of it; strided splits of several axes are scattered rows."""
    if not is_split(tensor):
        return True
    from torch.distributed.tensor import Replicate, Shard

    return all(type(placement) in (Shard, Replicate) for placement in tensor.placements)


def local_piece(tensor: Tensor) -> Piece:
    shape, itemsize = tuple(tensor.shape), tensor.dtype.itemsize
    if not is_split(tensor):
        return Piece(shape, (0,) * len(shape), shape, itemsize)
    (chunk,) = tensor.__create_chunk_list__()  # type: ignore[no-untyped-call]
    return Piece(shape, tuple(chunk.offsets), tuple(chunk.sizes), itemsize)


def local_layout(tensors: Mapping[str, Mapping[str, Tensor]]) -> Layout:
    """All that this process holds; of a tensor with fewer rows than processes that may be nothing."""
    found = {group: {name: local_piece(value) for name, value in named.items()} for group, named in tensors.items()}
    return {
        group: {name: piece for name, piece in named.items() if piece.num_bytes or piece.size == piece.shape}
        for group, named in found.items()
    }


@torch.no_grad()
def take_local(tensor: Tensor) -> Tensor:
    """The numbers of this process, not copied."""
    found = tensor.detach()
    return found.to_local() if is_split(found) else found


@dataclass(frozen=True)
class FilePlan:
    """`files[rank][file]` are the (group, name) that a process writes into a file.

    `placement[group][name]` says where the pieces of a tensor are; a group in one file needs none.
    """

    files: list[dict[str, list[tuple[str, str]]]]
    placement: dict[str, dict[str, Any]] = field(default_factory=dict)
    num_bytes: int = 0


def plan_files(layouts: Sequence[Layout]) -> FilePlan:
    """One file for each group and each process that writes something of it; `layouts` are those of all processes."""
    writers = _choose_writers(layouts)
    files: list[dict[str, list[tuple[str, str]]]] = [{} for _ in layouts]
    placement: dict[str, dict[str, Any]] = {}
    for group in sorted({group for layout in layouts for group in layout}):
        ranks = sorted({rank for (kind, _, _), rank in writers.items() if kind == group})
        # A group without tensors still gets a file: its presence records how the run was set up.
        names = name_shards(group, max(len(ranks), 1))
        numbers = {rank: number for number, rank in enumerate(ranks)} or {0: 0}
        for rank, number in numbers.items():
            files[rank][names[number]] = []
        for (kind, name, box), rank in writers.items():
            if kind != group:
                continue
            files[rank][names[numbers[rank]]].append((group, name))
            if len(names) > 1:
                entry = placement.setdefault(group, {}).setdefault(name, {"parts": []})
                entry["shape"] = list(layouts[rank][group][name].shape)
                entry["parts"].append([numbers[rank] + 1, list(box[0]), list(box[1])])
    for named in placement.values():
        for entry in named.values():
            entry["parts"].sort()
    num_bytes = sum(layouts[rank][group][name].num_bytes for (group, name, _), rank in writers.items())
    return FilePlan(files, placement, num_bytes)


def _choose_writers(layouts: Sequence[Layout]) -> dict[tuple[str, str, Box], int]:
    """The process that writes each piece: its only holder; of several, the one with least to write so far."""
    holders: dict[tuple[str, str, Box], list[int]] = {}
    for rank, layout in enumerate(layouts):
        for group, named in layout.items():
            for name, piece in named.items():
                holders.setdefault((group, name, piece.box), []).append(rank)
    sizes = {key: layouts[ranks[0]][key[0]][key[1]].num_bytes for key, ranks in holders.items()}
    loads = [0] * len(layouts)
    writers: dict[tuple[str, str, Box], int] = {}
    # What can only go to one place goes first, then the largest: the small ones even out the rest.
    for key in sorted(holders, key=lambda key: (len(holders[key]) > 1, -sizes[key], key)):
        writers[key] = min(holders[key], key=lambda rank: (loads[rank], rank))
        loads[writers[key]] += sizes[key]
    return dict(sorted(writers.items()))


def list_groups(state: Mapping[str, Any]) -> set[str]:
    """model, ema, optimizer and so on: the groups of tensors that a checkpoint has."""
    placement = state.get("placement", {})
    numbered = {name for group in placement for name in _files_of(group, state)}
    return {*placement, *(Path(name).stem for name in state["files"] if name not in numbered)}


def _files_of(group: str, state: Mapping[str, Any]) -> list[str]:
    """The files of a group in the order of their numbers."""
    placement = state.get("placement", {}).get(group)
    if placement is None:
        return name_shards(group, 1)
    return name_shards(group, max(part[0] for entry in placement.values() for part in entry["parts"]))


class StoredTensors(ExitStack):
    """Reads tensors of a folder whose digests were checked; files are opened once, and closed with the block."""

    def __init__(self, folder: Path, state: Mapping[str, Any]) -> None:
        super().__init__()
        self._folder = folder
        self._placement: Mapping[str, Any] = state.get("placement", {})
        self._files = {group: _files_of(group, state) for group in sorted(list_groups(state))}
        self._open: dict[str, Any] = {}

    def shapes(self) -> dict[str, dict[str, tuple[int, ...]]]:
        """Of all tensors, by group and name."""
        found: dict[str, dict[str, tuple[int, ...]]] = {}
        for group, files in self._files.items():
            if group in self._placement:
                found[group] = {name: tuple(entry["shape"]) for name, entry in self._placement[group].items()}
            else:
                file = self._file(files[0])
                found[group] = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
        return found

    def read(self, group: str, name: str, box: Box | None = None) -> Tensor:
        """A tensor, or a box of it, put together from the pieces that it lies in."""
        if group not in self._placement:
            return self._cut(self._files[group][0], name, box)
        entry = self._placement[group][name]
        offset, size = box or ((0,) * len(entry["shape"]), tuple(entry["shape"]))
        parts = []
        for number, start, length in entry["parts"]:
            low = [max(a, b) for a, b in zip(offset, start, strict=True)]
            high = [min(a + n, b + m) for a, n, b, m in zip(offset, size, start, length, strict=True)]
            if all(a < b for a, b in zip(low, high, strict=True)):
                within = tuple(a - b for a, b in zip(low, start, strict=True))
                extent = tuple(b - a for a, b in zip(low, high, strict=True))
                part = self._cut(self._files[group][number - 1], name, (within, extent))
                parts.append((tuple(a - b for a, b in zip(low, offset, strict=True)), part))
        return self._join(group, name, size, parts)

    def read_all(self) -> dict[str, dict[str, Tensor]]:
        """Every tensor, whole."""
        found: dict[str, dict[str, Tensor]] = {}
        for group, files in self._files.items():
            if group in self._placement:
                found[group] = {name: self.read(group, name) for name in self._placement[group]}
            else:
                found[group] = load_file(self._folder / files[0])
        return found

    def defer(self, group: str) -> LazyTensors:
        """The tensors of a group, each read at its access; needs no `with` block."""
        headers = [open_safetensors(self._folder / file) for file in self._files[group]]
        if group not in self._placement:
            return headers[0]

        def read_once(name: str) -> Tensor:
            with self:
                return self.read(group, name).clone()

        pending = {}
        for name, entry in self._placement[group].items():
            dtype = headers[entry["parts"][0][0] - 1].pending[name].dtype
            pending[name] = PendingTensor(dtype, tuple(entry["shape"]), partial(read_once, name))
        return LazyTensors(pending)

    def _join(
        self, group: str, name: str, size: tuple[int, ...], parts: Sequence[tuple[tuple[int, ...], Tensor]]
    ) -> Tensor:
        if sum(part.numel() for _, part in parts) != torch.Size(size).numel():
            raise CheckpointError(
                f"{self._folder}: the pieces of {group} '{name}' do not make up the whole; use another checkpoint"
            )
        if not parts:
            number = self._placement[group][name]["parts"][0][0]
            return torch.empty(size, dtype=self._cut(self._files[group][number - 1], name, None).dtype)
        if len(parts) == 1:
            return parts[0][1]
        whole = torch.empty(size, dtype=parts[0][1].dtype)
        for start, part in parts:
            whole[tuple(slice(a, a + n) for a, n in zip(start, part.shape, strict=True))] = part
        return whole

    def _cut(self, file: str, name: str, box: Box | None) -> Tensor:
        try:
            found = self._file(file).get_slice(name)
            if box is None or not box[0] or list(box[1]) == found.get_shape():
                return self._file(file).get_tensor(name)  # type: ignore[no-any-return]
            return found[tuple(slice(a, a + n) for a, n in zip(*box, strict=True))]  # type: ignore[no-any-return]
        except SafetensorError as error:
            raise CheckpointError(f"{self._folder / file}: '{name}' cannot be read ({error})") from error

    def _file(self, name: str) -> Any:
        if not self._open:
            self.callback(self._open.clear)
        if name not in self._open:
            try:
                self._open[name] = self.enter_context(safe_open(self._folder / name, framework="pt"))
            except (SafetensorError, OSError) as error:
                raise CheckpointError(f"{self._folder / name}: cannot be opened ({error})") from error
        return self._open[name]


def read_own(
    stored: StoredTensors, own: Mapping[str, Mapping[str, Tensor]], known: Collection[tuple[str, str]]
) -> dict[str, dict[str, Tensor]]:
    """What this process needs of a checkpoint, cut as its `own` tensors are; nothing else is read.

    `known` are all names that some process has; of those a process reads only its own. A tensor that is unknown to all,
    or does not fit, is read whole by all: loading it then raises the right error.
    """
    found: dict[str, dict[str, Tensor]] = {}
    for kind, shapes in stored.shapes().items():
        found[kind] = {}
        for name, shape in shapes.items():
            mine = own.get(kind, {}).get(name)
            if mine is None and (kind, name) in known:
                continue
            if mine is None or not is_split(mine) or tuple(mine.shape) != shape:
                found[kind][name] = stored.read(kind, name)
                continue
            from torch.distributed.tensor import DTensor, distribute_tensor  # takes a second, which most commands save

            mesh, placements = mine.device_mesh, mine.placements
            if not is_simple(mine):
                whole = stored.read(kind, name).to(mine.device)
                found[kind][name] = distribute_tensor(whole, mesh, placements, src_data_rank=None)
                continue
            part = stored.read(kind, name, local_piece(mine).box).to(mine.device)
            found[kind][name] = DTensor.from_local(
                part, mesh, placements, run_check=False, shape=mine.shape, stride=mine.stride()
            )
    return found
