"""Shell scripts are read as a shell would, as far as that goes without running anything."""

from __future__ import annotations

from pathlib import Path

import pytest

from frameloom.config.imports.launch import find_launches
from frameloom.config.imports.shell import find_unset, parse_script
from frameloom.core.errors import ConfigError


def words(text: str) -> list[tuple[str, ...]]:
    return [command.words for command in parse_script(text, where="x.sh")]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a b\nc", [("a", "b"), ("c",)]),
        ("a \\\n  b \\\n", [("a", "b")]),
        ("a b # c\n# d\ne#f", [("a", "b"), ("e#f",)]),
        ("a; b && c || d | e &", [("a",), ("b",), ("c",), ("d",), ("e",)]),
        ("a > log 2>&1 < in b", [("a", "b")]),
        ("a 'b  c' \"d 'e'\" f\\ g", [("a", "b  c", "d 'e'", "f g")]),
        ('a "b\\"c" --x="y z"', [("a", 'b"c', "--x=y z")]),
        ("X=1\nexport Y=2 Z='3 4'\na $X ${Y} \"$Z\" '$X'", [("a", "1", "2", "3 4", "$X")]),
        ("X=1 Y=$X a $Y", [("a", "1")]),
        ("a ${X:-5} ${X-6}", [("a", "5", "6")]),
        ("a $X $(b c) `d e`", [("a", "$X", "$(b c)", "`d e`")]),
        ("if true; then a b; fi", [("true",), ("a", "b"), ("fi",)]),
        ("a \\\n ...\n --b 1 \\\n", [("a", "...", "--b", "1")]),
        ("a \\\r\n b\r\n", [("a", "b")]),
        ("", []),
    ],
)
def test_words_are_those_of_a_shell(text: str, expected: list[tuple[str, ...]]) -> None:
    assert words(text) == expected


def test_a_quote_that_is_never_closed_is_told_with_its_line() -> None:
    with pytest.raises(ConfigError, match=r"x\.sh:2: a quote is opened here and never closed"):
        parse_script("a\nb 'c\nd", where="x.sh")


def test_what_only_a_shell_could_fill_in_is_found() -> None:
    assert find_unset(["a", "b$C"]) == "$C"
    assert find_unset(["$(d e)"]) == "$(d e)"
    assert find_unset(["a", "5"]) is None


def test_nothing_in_a_script_is_run(tmp_path: Path) -> None:
    target = tmp_path / "made"
    parse_script(f"touch {target}\nX=$(touch {target})\n`touch {target}`\necho $X", where="x.sh")
    assert not target.exists()


@pytest.mark.parametrize(
    ("line", "launcher", "script", "options"),
    [
        ("python train.py --a 1", "python", "train.py", {}),
        ("/usr/bin/python3 -u x/train.py --a 1", "python", "x/train.py", {"u": ()}),
        ("python -m opensora.train --a 1", "python", "opensora/train.py", {}),
        ("accelerate launch --mixed_precision='bf16' s/train.py --a 1", "accelerate", "s/train.py", None),
        ("torchrun --nproc_per_node 8 s/train.py --a 1", "torchrun", "s/train.py", {"nproc_per_node": ("8",)}),
        ("colossalai run --hostfile h s/train.py --a 1", "colossalai", "s/train.py", {"hostfile": ("h",)}),
        ("deepspeed --num_gpus=2 train.py --a 1", "deepspeed", "train.py", {"num_gpus": ("2",)}),
        ("msrun --bind_core=True train.py --a 1", "msrun", "train.py", {"bind_core": ("True",)}),
        ("--a 1", "", "", {}),
    ],
)
def test_launchers_are_taken_off(line: str, launcher: str, script: str, options: dict[str, tuple[str, ...]]) -> None:
    (launch,) = find_launches(parse_script(line, where="x.sh"))
    assert (launch.launcher, launch.script, launch.arguments) == (launcher, script, {"a": ("1",)})
    assert launch.options == (options if options is not None else {"mixed_precision": ("bf16",)})


def test_other_commands_are_no_launches() -> None:
    assert find_launches(parse_script("cd x\npip install y\necho --a", where="x.sh")) == []


def test_flags_take_the_words_behind_them() -> None:
    (launch,) = find_launches(parse_script("python a.py c.py --x --y -1 2e-5 --z-w=3 --y 4", where="x.sh"))
    assert launch.positional == ("c.py",)
    assert launch.arguments == {"x": (), "y": ("4",), "z_w": ("3",)}
