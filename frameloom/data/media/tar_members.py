"""Media files inside tars, read in place: a slice of the tar that reads and seeks like a file."""

from __future__ import annotations

import io
import os
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from frameloom.core.errors import DataError
from frameloom.core.paths import safe_join

if TYPE_CHECKING:
    from typing_extensions import Buffer


class Member(NamedTuple):
    """A media file inside a tar."""

    tar: Path
    name: str
    offset: int
    num_bytes: int

    @property
    def suffix(self) -> str:
        return Path(self.name).suffix

    def __str__(self) -> str:
        return f"{self.tar}: {self.name}"


# Between the path of a tar and the name of a file inside it, in lists of files.
MEMBER_MARK = "!"


def find_media(root: Path, path: str, member: tuple[str, int, int] | None) -> Path | Member:
    """The file that a path of a list means; `member` is (name, first byte, number of bytes) inside a tar."""
    if member is None:
        return safe_join(root, path, where=path)
    name, offset, num_bytes = member
    return Member(safe_join(root, path.removesuffix(MEMBER_MARK + name), where=path), name, offset, num_bytes)


class MemberFile(io.RawIOBase):
    """A slice of a file that reads and seeks like a file."""

    def __init__(self, member: Member) -> None:
        super().__init__()
        self.name = member.name
        self._offset, self._size, self._position = member.offset, member.num_bytes, 0
        self._descriptor = os.open(member.tar, os.O_RDONLY)
        size = os.fstat(self._descriptor).st_size
        if member.offset < 0 or member.num_bytes < 1 or member.offset + member.num_bytes > size:
            self.close()
            raise DataError(
                f"{member.tar}: '{member.name}' is said to be bytes {member.offset} to "
                f"{member.offset + member.num_bytes} of {size}; the tar was changed: read its index again"
            )

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET, /) -> int:
        start = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self._size}[whence]
        if start + offset < 0:
            raise OSError(f"{self.name}: cannot seek before the start")
        self._position = start + offset
        return self._position

    def readinto(self, buffer: Buffer, /) -> int:
        view = memoryview(buffer).cast("B")
        wanted = max(0, min(len(view), self._size - self._position))
        found = os.preadv(self._descriptor, [view[:wanted]], self._offset + self._position) if wanted else 0
        self._position += found
        return found

    def close(self) -> None:
        if not self.closed:
            os.close(self._descriptor)
        super().close()


def open_bytes(media: Path | Member) -> io.BufferedReader:
    """A file, or a part of a tar, as bytes; close it."""
    return io.BufferedReader(MemberFile(media)) if isinstance(media, Member) else media.open("rb")


def count_bytes(media: Path | Member) -> int:
    return media.num_bytes if isinstance(media, Member) else media.stat().st_size
