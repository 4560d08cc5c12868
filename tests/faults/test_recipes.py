"""Slips in recipes, dangerous calls in the source, and secrets of the environment."""

from __future__ import annotations

import ast
import copy
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

import frameloom
from frameloom.config.loading.recipe import recipe_from_dict
from frameloom.config.loading.schema_tree import walk
from frameloom.core.errors import ConfigError

# Row 36: One slip in any key of a recipe is refused, in all of them at once, by name, and before torch is imported.
# Mistakes of other kinds, each with its message, are in tests/config/test_mistakes.py.

START: dict[str, Any] = {
    "name": "tiny",
    "task": "denoiser",
    "vae": {"weights": "w"},
    "data": {"manifest": "m", "buckets": {"64px": {"9": [1.0, 4]}}, "where": {"split": "train"}},
    "text": {"encoders": [{"name": "minilm"}]},
    "train": {"steps": 100, "ema": {}},
    "optim": {"schedule": {}},
    "validation": {"where": {"split": "val"}},
}


def edits(word: str) -> Iterator[str]:
    """Every word one slip away: two neighbours swapped, a letter dropped, doubled, or in the other case."""
    for i in range(len(word)):
        yield word[:i] + word[i + 1 :]
        yield word[: i + 1] + word[i:]
        yield word[:i] + word[i].swapcase() + word[i + 1 :]
        if i + 1 < len(word):
            yield word[:i] + word[i + 1] + word[i] + word[i + 2 :]


def test_36_one_slip_in_any_key_is_refused_and_the_right_key_named(tally) -> None:
    recipe_from_dict(START)
    num_slips = num_named = 0
    unnamed = []
    for key in walk():
        for wrong in {*edits(key.path[-1])} - {key.path[-1], ""}:
            value = copy.deepcopy(START)
            section: Any = value
            for part in key.path[:-1]:
                section = section[0] if isinstance(section, list) else section.setdefault(part, {})
            section[wrong] = section.pop(key.path[-1], None)
            tally.inject()
            with pytest.raises(ConfigError) as caught:
                recipe_from_dict(value)
            num_slips += 1
            if any(f"'{wrong}'; did you mean '{key.path[-1]}'?" in problem for problem in caught.value.problems):
                num_named += 1
            else:
                unnamed.append(f"{key.dotted} as {wrong}: {caught.value}")
    assert num_slips > 1500
    assert num_named >= 0.95 * num_slips, unnamed


def test_36_a_value_of_another_type_is_refused_for_every_key(tally) -> None:
    """A table where a value belongs, and a list where a section belongs."""
    num_wrong = 0
    for key in walk():
        value = copy.deepcopy(START)
        section: Any = value
        for part in key.path[:-1]:
            section = section[0] if isinstance(section, list) else section.setdefault(part, {})
        section[key.path[-1]] = {"no such key": [{"deeper": object.__name__}]}
        try:
            recipe_from_dict(value)
        except ConfigError as error:
            assert any(key.path[-1] in problem for problem in error.problems), key.dotted
            num_wrong += 1
            tally.inject()
            continue
        # Free tables (filters, configurations of encoders) may hold anything.
        assert key.path[-1] in ("where", "overrides", "options", "config", "tags", "settings"), key.dotted
    assert num_wrong > 100


def test_36_all_problems_come_at_once_and_without_torch(tmp_path: Path, tally) -> None:
    value = copy.deepcopy(START)
    value["optim"]["leraning_rate"] = 1e-4
    value["train"]["steps"] = "many"
    value["data"]["workers"] = -1
    path = tmp_path / "my.yaml"
    path.write_text(yaml.safe_dump(value))
    code = (
        "import json, sys\n"
        "from frameloom.cli.main import main\n"
        "try:\n    main(sys.argv[1:])\n"
        "except SystemExit as stop:\n"
        "    print(json.dumps([stop.code, 'torch' in sys.modules]))\n"
    )
    tally.inject(3)
    done = subprocess.run([sys.executable, "-c", code, "train", str(path)], capture_output=True, text=True, timeout=120)
    assert json.loads(done.stdout.splitlines()[-1]) == [2, False], done.stderr
    for words in ("leraning_rate", "train.steps", "data.workers"):
        assert words in done.stderr


def test_36_an_ignored_slip_would_train_with_another_value() -> None:
    """The control: what a reader does that passes over keys it does not know."""
    meant = recipe_from_dict({**START, "optim": {"lr": 3e-3}})
    ignored = recipe_from_dict({**START, "optim": {}})
    assert meant.optim.lr == 3e-3 != ignored.optim.lr


# Row 37: No dangerous call in the source, and no secret of the environment in what a run writes.

ROOT = Path(frameloom.__file__).parent
BANNED_TEXT = ("weights_only=False", "pickle.load", "shell=True", "trust_remote_code=True", "extractall(", "os.system(")
SECRET = "hunter2-0f6b1c"


def find_dangers(text: str, name: str) -> list[str]:
    found = [f"{name}: {word}" for word in BANNED_TEXT if word in text]
    for node in ast.walk(ast.parse(text)):
        if not isinstance(node, ast.Call):
            continue
        called = ast.unparse(node.func)
        if called in ("eval", "exec", "compile", "__import__"):
            found.append(f"{name}:{node.lineno}: {called}")
        if called == "av.open":
            is_writing = any(isinstance(arg, ast.Constant) and arg.value == "w" for arg in node.args)
            if not is_writing and not any(word.arg == "options" for word in node.keywords):
                found.append(f"{name}:{node.lineno}: av.open without an allow-list")
    return found


def test_37_no_source_opens_pickles_or_runs_text(tally) -> None:
    files = sorted(ROOT.rglob("*.py"))
    assert len(files) > 100
    tally.inject(len(files))
    wrong = [danger for path in files for danger in find_dangers(path.read_text(), str(path.relative_to(ROOT)))]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(
    "line",
    [
        "torch.load(path, weights_only=False)",
        "pickle.load(file)",
        "eval(text)",
        "exec(text)",
        "subprocess.run(text, shell=True)",
        "AutoModel.from_pretrained(name, trust_remote_code=True)",
        "archive.extractall(folder)",
        "av.open(path)",
    ],
)
def test_37_each_danger_would_be_found(line: str) -> None:
    """The control."""
    assert find_dangers(f"def read(path):\n    return {line}\n", "a.py")


def test_37_a_secret_of_the_environment_is_in_no_file_of_a_run(warm, world, tally) -> None:
    names = ("WANDB_API_KEY", "HF_TOKEN", "AWS_SECRET_ACCESS_KEY")
    tally.inject(len(names))
    recipe = str(world.write_recipe())
    child = warm.expect(warm.command("train", recipe, "--train.steps", "2", env=dict.fromkeys(names, SECRET)))
    # The control: the process did have it.
    warm.run("tests.faults.test_recipes:tell", str(world.folder / "told"), env={names[0]: SECRET})
    assert (world.folder / "told").read_text() == SECRET
    (world.folder / "told").unlink()
    files = [path for path in world.folder.rglob("*") if path.is_file()]
    assert len(files) > 8
    assert [path for path in files if SECRET.encode() in path.read_bytes()] == [] and SECRET not in child


def tell(path: str) -> None:
    Path(path).write_text(os.environ["WANDB_API_KEY"])
