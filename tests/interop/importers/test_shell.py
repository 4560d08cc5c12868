"""Shell scripts are read as a shell would, as far as that goes without running anything."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from frameloom.core.errors import ConfigError
from frameloom.interop.importers.shell import explain_unset, find_launches, find_unset, parse_script


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


@pytest.mark.parametrize(
    "line",
    [
        'W=a/b/ D=x.tar.gz; show ${W%/} ${W%b/} ${W%z} ${D%.*} ${D%%.*} ${D#*.} ${D##*.} ${D#x} "${W##*/}"',
        'X=1; show ${X:-5} ${Y:-5} ${Y-6} ${Y:-$X} ${Y:-${Z:-$X}} ${Y:-"q"} ${X:+on} ${Y:+off} ${X:?must} ${1:-a}',
        'E=; show ${E:-5} "${E-6}" ${E:+off} $E "$E" --a=$E',
        ': "${D:=x y}"; show $D ${D:=z} "$D"',
        "M=' --a 1  --b=2 '; show $M \"$M\" '$M' x$M-y --c=$M",
        'M=\'a b\'; N=$M; export O=$N; show "$N" "$O" $O',
        "HOME=/h; A=~/x; show ~/d $A --b=~/d '~/e' a~",
    ],
)
def test_variables_become_the_words_that_a_shell_makes_of_them(line: str) -> None:
    show = 'show() { printf \'%s\\n\' "$#" "$@"; }; '
    shell = subprocess.run(["bash", "-c", show + line], capture_output=True, text=True, check=True)
    (found,) = [command[1:] for command in words(line) if command[0] == "show"]
    assert [str(len(found)), *found] == shell.stdout.splitlines()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("${A}", "is not set"),
        ("${A:?say it}", "is not set"),
        ("${A%/}", "is not set"),
        ("$1", "is not set"),
        ("${A[0]}", "is not read"),
        ("${A[@]}", "is not read"),
        ("${#A}", "is not read"),
        ("${!A}", "is not read"),
        ("${A:0:2}", "is not read"),
        ("${A/x/y}", "is not read"),
        ("${A,,}", "is not read"),
        ("${A%[a-z]*}", "is not read"),
        ("$((1 + 2))", "is not read"),
        ("$(dirname $(pwd))", "is not read"),
    ],
)
@pytest.mark.parametrize("quote", ["", '"'])
def test_an_expansion_that_stays_is_found_whole_and_explained(text: str, message: str, quote: str) -> None:
    ((_, word),) = words(f"a {quote}{text}{quote}")
    assert find_unset([word]) == text
    assert text in explain_unset(text) and message in explain_unset(text)


@pytest.mark.parametrize(
    "text", ["${A", '"${B:-"b"}"', "${B:-'b c'}", '${B:-"b c"}', "${A:+$(b)}", "$'a\\n'", "~/b", "C=~/b"]
)
def test_expansions_in_other_forms_are_found_too(text: str) -> None:
    assert find_unset(word for command in words(f"A=1\na {text}\n") for word in command)


@pytest.mark.parametrize("text", ["${A%-*}", "${A##*-}", "${A:+c}", "${A:-c}"])
def test_a_value_with_an_unset_part_is_not_cut(text: str) -> None:
    assert words(f"A=a-$B\nshow {text}") == [("show", "a-$B")]


def test_a_value_that_doubles_without_end_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"x\.sh:\d+: a value of"):
        parse_script("A=aaaa\n" + 'A="$A$A"\n' * 60, where="x.sh")


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
        ("srun -N 2 --label torchrun --nnodes 2 s/train.py --a 1", "torchrun", "s/train.py", {"nnodes": ("2",)}),
        ("env -u B A=b torchrun --nnodes 2 s/train.py --a 1", "torchrun", "s/train.py", {"nnodes": ("2",)}),
        ("python -u -m torch.distributed.run --nnodes 2 t.py --a 1", "torchrun", "t.py", {"nnodes": ("2",)}),
        ("python3 -m torch.distributed.launch --nnodes=2 -m b.t --a 1", "torchrun", "b/t.py", {"nnodes": ("2",)}),
        ("nohup python -m accelerate.commands.launch t.py --a 1", "accelerate", "t.py", {}),
        (
            "A=0 time -p accelerate launch --config_file deepspeed t.py --a 1 &",
            "accelerate",
            "t.py",
            {"config_file": ("deepspeed",)},
        ),
        ("mpirun -n 8 python t.py --a 1", "mpirun", "t.py", {"n": ("8", "python")}),
        ("srun python t.py --a 1", "python", "t.py", {}),
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
