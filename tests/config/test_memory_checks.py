"""Keys that save memory and exclude each other are refused before anything is loaded."""

from __future__ import annotations

from typing import Any

import pytest

from frameloom.core.errors import ConfigError


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (("--optim.name", "prodigy", "--optim.lr", "1"), "optim.name is prodigy, whose rate follows from the state"),
        (("--optim.name", "adamw8bit"), "optim.name is adamw8bit, whose state is small"),
        (("--parallel.zero", "3"), "parallel.zero is 3, which splits the state over processes already"),
    ],
)
def test_offload_of_state_is_refused_where_it_cannot_be(world: Any, words: tuple[str, ...], text: str) -> None:
    with pytest.raises(ConfigError) as found:
        world.recipe("--optim.offload", "true", *words)
    assert f"optim.offload is true, but {text}" in str(found.value)
    world.recipe("--optim.offload", "true", "--parallel.zero", "1")


def test_a_key_spelled_wrongly_is_told_the_right_one(world: Any) -> None:
    with pytest.raises(ConfigError, match=r"train\.rehearse"):
        world.recipe("--train.rehearsal", "true")
