"""No dangerous call in the source, and no secret of the environment in what a run writes."""

from __future__ import annotations

import ast
import os
from pathlib import Path

import pytest

import frameloom

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


def test_no_source_opens_pickles_or_runs_text(tally) -> None:
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
def test_each_danger_would_be_found(line: str) -> None:
    """The control."""
    assert find_dangers(f"def read(path):\n    return {line}\n", "a.py")


def test_a_secret_of_the_environment_is_in_no_file_of_a_run(warm, world, tally) -> None:
    names = ("WANDB_API_KEY", "HF_TOKEN", "AWS_SECRET_ACCESS_KEY")
    tally.inject(len(names))
    recipe = str(world.write_recipe())
    child = warm.command("train", recipe, "--train.steps", "2", env=dict.fromkeys(names, SECRET))
    assert warm.wait(child) == 0, child.output
    # The control: the process did have it.
    warm.run("tests.faults.test_37_source_and_secrets:tell", str(world.folder / "told"), env={names[0]: SECRET})
    assert (world.folder / "told").read_text() == SECRET
    (world.folder / "told").unlink()
    files = [path for path in world.folder.rglob("*") if path.is_file()]
    assert len(files) > 8
    assert [path for path in files if SECRET.encode() in path.read_bytes()] == [] and SECRET not in child.output


def tell(path: str) -> None:
    Path(path).write_text(os.environ["WANDB_API_KEY"])
