"""The processes that write and read checkpoints together, and what they say to each other."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch.distributed as dist

from frameloom.core.errors import CheckpointError, FrameloomError

__all__ = ["Crew", "GroupCrew", "name_error"]

Word = TypeVar("Word")


class Crew:
    """One process alone; `GroupCrew` overrides what several do otherwise. All make the same calls in the same order."""

    rank = 0
    size = 1

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    def gather(self, word: Word) -> list[Word]:
        """The words of all, in order of rank, on the first; on the others nothing."""
        return [word]

    def share(self, word: Any) -> Any:
        """What the first process says; the word of the others does not count."""
        return word

    def scatter(self, words: Sequence[Word] | None) -> Word:
        """The word that the first process has for each."""
        assert words is not None
        return words[0]

    def ask_first(self, work: Callable[[], Word]) -> Word:
        """What the first process finds, on all; an error there is raised by all."""
        found: tuple[Any, str | None] = (None, None)
        own: BaseException | None = None
        if self.is_first:
            try:
                found = (work(), None)
            except BaseException as error:
                own, found = error, (None, name_error(error))
        answer, problem = self.share(found)
        if own is not None:
            raise own
        if problem is not None:
            raise CheckpointError(problem)
        word: Word = answer
        return word


class GroupCrew(Crew):
    """All processes of a run, over a group of their own.

    The group is used for nothing else, so a thread that writes a checkpoint may speak here while the step of training
    speaks elsewhere. It must work on host memory (gloo).
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)

    def gather(self, word: Word) -> list[Word]:
        words: list[Any] | None = [None] * self.size if self.is_first else None
        dist.gather_object(word, words, dst=0, group=self._group)
        return words or []

    def share(self, word: Any) -> Any:
        words = [word if self.is_first else None]
        dist.broadcast_object_list(words, src=0, group=self._group)
        return words[0]

    def scatter(self, words: Sequence[Word] | None) -> Word:
        found: list[Any] = [None]
        dist.scatter_object_list(found, list(words) if words is not None else None, src=0, group=self._group)
        word: Word = found[0]
        return word


def name_error(error: BaseException) -> str:
    """An error as another process can tell it; ours speak for themselves."""
    if isinstance(error, (FrameloomError, OSError)):
        return str(error)
    return f"{type(error).__name__}: {error}"
