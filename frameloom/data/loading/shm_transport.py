"""Shared-memory transport of objects with large tensors between processes, without a copy on the receiving side.

The sender writes everything into an anonymous file in memory and passes its descriptor through a socket; the receiver
maps it. The message itself is 16 bytes, so the death of one side cannot leave the other in the middle of one, and when
the last tensor or process is gone the kernel frees the memory.
"""

from __future__ import annotations

import io
import mmap
import os
import pickle
import socket
import struct
import tempfile
from typing import Any

import torch
from torch import Tensor

_ALIGN_BYTES = 64
_HEAD = struct.Struct("<QQ")  # bytes of the pickle, bytes of everything


def send_object(sender: socket.socket, item: Any) -> None:
    text = io.BytesIO()
    pickler = _Pickler(text)
    pickler.dump(item)
    start = _align(text.tell())
    total = max(start + pickler.num_bytes, 1)
    # A file without a name; in memory where the system can.
    if hasattr(os, "memfd_create"):
        descriptor = os.memfd_create("frameloom-batch")
    else:
        with tempfile.TemporaryFile() as file:
            descriptor = os.dup(file.fileno())
    os.truncate(descriptor, total)
    try:
        with mmap.mmap(descriptor, total) as memory:
            memory[: text.tell()] = text.getvalue()
            for offset, tensor in pickler.tensors:
                flat = tensor.reshape(-1).view(torch.uint8).numpy()
                memory[start + offset : start + offset + flat.nbytes] = flat.data
        socket.send_fds(sender, [_HEAD.pack(text.tell(), total)], [descriptor])
    finally:
        os.close(descriptor)


def receive_object(receiver: socket.socket) -> Any:
    """EOFError when the sender is gone. The tensors can be written to."""
    head, descriptors, _, _ = socket.recv_fds(receiver, _HEAD.size, 1)
    try:
        if len(head) < _HEAD.size or not descriptors:
            raise EOFError("the other side has closed the connection")
        num_text_bytes, total = _HEAD.unpack(head)
        # Unlike mmap, torch keeps no descriptor open for as long as the memory is mapped.
        memory = torch.from_file(f"/dev/fd/{descriptors[0]}", shared=True, size=total, dtype=torch.uint8)
    finally:
        for descriptor in descriptors:
            os.close(descriptor)
    return _Unpickler(memory, num_text_bytes).load()


class _Pickler(pickle.Pickler):
    """Keeps tensors aside and leaves a note of where they will lie."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, protocol=5)
        self.tensors: list[tuple[int, Tensor]] = []
        self.num_bytes = 0

    def persistent_id(self, item: Any) -> tuple[int, str, tuple[int, ...]] | None:
        if not isinstance(item, Tensor):
            return None
        tensor = item.detach().cpu().contiguous()
        offset = self.num_bytes
        self.tensors.append((offset, tensor))
        self.num_bytes = _align(offset + tensor.nbytes)
        return offset, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape)


class _Unpickler(pickle.Unpickler):
    def __init__(self, memory: Tensor, num_text_bytes: int) -> None:
        super().__init__(io.BytesIO(memory[:num_text_bytes].numpy().tobytes()))
        self._tensors = memory[_align(num_text_bytes) :]

    def persistent_load(self, note: tuple[int, str, tuple[int, ...]]) -> Tensor:
        offset, name, shape = note
        dtype: torch.dtype = getattr(torch, name)
        num_bytes = torch.Size(shape).numel() * dtype.itemsize
        return self._tensors[offset : offset + num_bytes].view(dtype).reshape(shape)


def _align(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGN_BYTES) * _ALIGN_BYTES
