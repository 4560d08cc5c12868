"""Python configurations are parsed: their values are those that Python would give, and no code is run."""

from __future__ import annotations

from pathlib import Path

import pytest

from frameloom.core.errors import ConfigError
from frameloom.interop.importers.python_config import parse_python_config, read_python_config


def test_values_are_those_of_python() -> None:
    text = '''"""A configuration."""
lr = 1e-5
size: int = 25 * 1024**3
model = dict(type="flux", depth=19, axes=(16, 56, 56), on=True, off=not True, none=None)
optim = dict(lr=lr, betas=[0.9, 0.999], eps=-1e-15)
bucket_config = {"256px": {1: (1.0, 45), **{n: (1.0, 12) for n in range(5, 14, 4)}}, "768px": {1: (0.5, 7 + 6)}}
copy = dict(**model, extra=optim["lr"])
frames = [n // 4 for n in range(4, 13, 4)] + [9]
nested = [[n for n in range(n + 1)] + [n] for n in range(3)]
'''
    found = parse_python_config(text, where="c.py")
    space: dict[str, object] = {}
    exec(text, space)  # the control: what Python itself makes of it
    for name in ("size", "frames", "nested"):
        assert found[name] == space[name]
    assert found["copy"] == {**space["copy"], "axes": [16, 56, 56]}  # type: ignore[dict-item]
    assert found["bucket_config"]["256px"] == {"1": [1.0, 45], "5": [1.0, 12], "9": [1.0, 12], "13": [1.0, 12]}
    assert found["bucket_config"]["768px"] == {"1": [0.5, 13]}


def test_variables_that_only_feed_others_are_no_settings() -> None:
    text = "lr = 1\noptim = dict(lr=lr)\nseed = 2"
    assert parse_python_config(text, where="c.py") == {"optim": {"lr": 1}, "seed": 2}
    assert parse_python_config(text, where="c.py", settings=("lr",)) == {"lr": 1, "optim": {"lr": 1}, "seed": 2}


@pytest.mark.parametrize(
    "line",
    [
        "import os",
        "x = open('a').read()",
        "x = __import__('os').system('true')",
        "x = [n for n in (1).__class__.__mro__]",
        "x = (lambda: 1)()",
        "x = f'{1}'",
        "print(1)",
        "def f(): pass",
        "for x in range(3): y = x",
        "x = unknown",
        "x.y = 1",
        "x = [1] * 10**9",
        "x = 9**9**9",
        "x = 'a' * 10**9",
        "x = [n for n in range(10**9)]",
        "x = [[m for m in range(9999)] for n in range(9999)]",
        "x = 1 / 0",
        "x = b'a'",
        "x = {}['a']",
        "x = dict([(1, 2)])",
        "x = **{}",
    ],
)
def test_code_is_refused_with_its_line(line: str) -> None:
    with pytest.raises(ConfigError, match=r"c\.py:2: "):
        parse_python_config(f"seed = 1\n{line}", where="c.py")


@pytest.mark.parametrize("line", ["a = a + a", "a = dict(x=a, y=a)", "b = 9.0**60 * 9.0**60"])
def test_values_that_grow_without_end_are_refused(line: str) -> None:
    text = "a = [1, 2, 3]\n" + "\n".join([line] * 60) + "\nc = [a]"
    with pytest.raises(ConfigError, match=r"too large|more than|nest"):
        parse_python_config(text, where="c.py")


def test_bases_are_merged_and_deleted(tmp_path: Path) -> None:
    (tmp_path / "image.py").write_text("optim = dict(lr=1, eps=2)\nbucket_config = {'256px': {1: (1.0, 50)}}\nseed = 1")
    (tmp_path / "sub").mkdir()
    stage = tmp_path / "sub" / "stage.py"
    stage.write_text(
        "_base_ = ['../image.py']\noptim = dict(lr=5)\nbucket_config = {'_delete_': True, '768px': {1: (1.0, 9)}}\n"
    )
    values = read_python_config(stage)
    assert values == {"optim": {"lr": 5, "eps": 2}, "bucket_config": {"768px": {"1": [1.0, 9]}}, "seed": 1}


def test_a_base_that_is_missing_or_goes_in_a_circle_is_told(tmp_path: Path) -> None:
    file = tmp_path / "a.py"
    file.write_text("_base_ = 'b.py'")
    with pytest.raises(ConfigError, match=r"the _base_ 'b\.py' does not exist"):
        read_python_config(file)
    file.write_text("_base_ = 3")
    with pytest.raises(ConfigError, match="_base_ is 3; expected a file"):
        read_python_config(file)
    file.write_text("_base_ = 'b.py'")
    (tmp_path / "b.py").write_text("_base_ = ['a.py']")
    with pytest.raises(ConfigError, match="in a circle"):
        read_python_config(file)
