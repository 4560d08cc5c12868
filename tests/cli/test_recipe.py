"""The recipe commands and the frame around all commands, run as a person would run them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import frameloom
from frameloom.cli.lazy import split_overrides
from frameloom.cli.main import COMMANDS, hoist_flags
from frameloom.config.loading.recipe import load_recipe

ROOT = Path(frameloom.__file__).parent.parent
RECIPE = """\
# A denoiser for tests
name: tiny
task: denoiser
vae: {weights: vae.safetensors}
data:
  manifest: clips.parquet
  buckets: {64px: {9: [1.0, 4]}}
train: {steps: 100}
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "my.yaml").write_text(RECIPE)
    return tmp_path


def start(words: list[str], folder: Path, *, python: tuple[str, ...] = ("-m", "frameloom")) -> subprocess.Popen[str]:
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{folder}", "COLUMNS": "100"}
    command = [sys.executable, *python, *words]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, cwd=folder, env=environment, stdout=pipe, stderr=pipe, text=True)


def run(words: list[str], folder: Path, *, python: tuple[str, ...] = ("-m", "frameloom")) -> tuple[int, str, str]:
    process = start(words, folder, python=python)
    out, err = process.communicate(timeout=60)
    return process.returncode, out, err


def test_check_says_ok_in_one_line(folder: Path) -> None:
    assert run(["recipe", "check", "my.yaml", "--skip-files"], folder) == (
        0,
        "ok: tiny trains denoiser opensora2/tiny for 100 steps on 1 bucket(s)\n",
        "",
    )


def test_check_looks_for_files(folder: Path) -> None:
    code, out, err = run(["recipe", "check", "my.yaml"], folder)
    assert (code, out) == (2, "")
    assert err.startswith("my.yaml:6: data.manifest is 'clips.parquet', which does not exist; expected a file;")
    (folder / "clips.parquet").touch()
    (folder / "vae.safetensors").touch()
    assert run(["recipe", "check", "my.yaml"], folder)[0] == 0


@pytest.mark.parametrize("key", ["data.where", "validation.where"])
def test_check_reads_filters(folder: Path, key: str) -> None:
    both = ["--data.where", "split == 'train'", "--validation.where", "split == 'val' and frames > 1"]
    command = ["recipe", "check", "my.yaml", "--skip-files", *both]
    assert run(command, folder)[0] == 0
    code, _, err = run([*command, f"--{key}", "split = 'test'"], folder)
    assert code == 2
    assert err.startswith(f"{key}: filter \"split = 'test'\", character 7: '=' cannot be read; write == to compare")


@pytest.mark.parametrize(
    "words",
    [
        ["my.yaml", "--optim.lr", "-1", "--lr=3"],
        ["--optim.lr", "-1", "my.yaml", "--lr", "3"],
        ["--skip-files", "--optim.lr=-1", "--lr=3", "my.yaml"],
    ],
)
def test_overrides_may_stand_anywhere_and_mistakes_come_without_a_traceback(folder: Path, words: list[str]) -> None:
    assert run(["recipe", "check", *words], folder) == (
        2,
        "",
        "--lr: the recipe has no key 'lr'; 'lr' belongs to optim: optim.lr\n"
        "--optim.lr: optim.lr is -1; expected a number above 0; e.g. lr: 1e-4\n",
    )


def test_debug_shows_the_traceback(folder: Path) -> None:
    code, _, err = run(["recipe", "check", "none.yaml", "--debug"], folder)
    assert code == 2
    assert "Traceback" in err
    assert "none.yaml: no such file and no shipped recipe of that name" in err.splitlines()[-1]


def test_show_prints_a_recipe_that_reads_back_equal(folder: Path) -> None:
    words = ["--train.steps", "7", "--data.buckets.128px.1", "[1.0, 45]"]
    code, out, err = run(["recipe", "show", "my.yaml", *words], folder)
    assert (code, err) == (0, "")
    (folder / "again.yaml").write_text(out)
    assert load_recipe(folder / "again.yaml") == load_recipe(folder / "my.yaml", words)
    assert load_recipe(folder / "again.yaml") != load_recipe(folder / "my.yaml")


def test_schema_is_json_and_reference_is_markdown(folder: Path) -> None:
    code, out, _ = run(["recipe", "schema"], folder)
    assert code == 0
    assert "optim" in json.loads(out)["properties"]
    code, out, _ = run(["recipe", "reference"], folder)
    assert code == 0
    assert out.startswith("# The recipe\n")
    assert "| `lr` | a number above 0 | `1e-4` | learning rate;" in out


def test_list_shows_names_and_titles(folder: Path) -> None:
    code, out, err = run(["recipe", "list"], folder)
    assert (code, err) == (0, "")
    shipped = [path for path in (ROOT / "frameloom" / "recipes").rglob("*.yaml")]
    assert len(out.splitlines()) == len(shipped)
    assert all(path.relative_to(ROOT / "frameloom" / "recipes").with_suffix("").as_posix() in out for path in shipped)


@pytest.mark.parametrize(
    ("words", "answer"),
    [
        (["trian"], "frameloom has no command 'trian'; did you mean 'train'?"),
        (["recipe", "chekc"], "frameloom recipe has no command 'chekc'; did you mean 'check'?"),
        (["banana"], "known commands: demo, train"),
        (["recipe", "check"], "Missing argument 'RECIPE'"),
        (["recipe", "check", "my.yaml", "other.yaml"], "unexpected extra argument"),
        (["recipe", "check", "my.yaml", "--skip-flies"], "no such flag: --skip-flies; did you mean --skip-files?"),
        (["recipe", "list", "--all"], "No such option"),
        (["recipe", "check", "my.yaml", "--log-level", "loud"], "--log-level"),
    ],
)
def test_a_wrong_command_line_is_told_what_is_right(folder: Path, words: list[str], answer: str) -> None:
    code, out, err = run(words, folder)
    assert (code, out) == (2, "")
    assert answer in err
    assert "Traceback" not in err


def test_control_characters_do_not_reach_the_terminal(folder: Path) -> None:
    _, _, err = run(["recipe", "check", "a\x1b[31mb.yaml"], folder)
    assert "a?[31mb.yaml: no such file" in err


def test_version(folder: Path) -> None:
    assert run(["--version"], folder) == (0, f"frameloom {frameloom.__version__}\n", "")


def test_help_lists_every_command_and_imports_none(folder: Path) -> None:
    code = (
        "import sys, contextlib\n"
        "from frameloom.cli.main import main\n"
        "with contextlib.suppress(SystemExit): main(sys.argv[1:])\n"
        "heavy = {'torch', 'transformers', 'polars', 'yaml', 'numpy', 'av'}\n"
        "heavy |= {'pydantic', 'rich'} if len(sys.argv) == 2 else set()\n"
        "heavy &= set(sys.modules)\n"
        "commands = [name for name in sys.modules if name.startswith('frameloom.cli.')]\n"
        "assert not heavy, heavy\n"
        "assert sorted(commands) == ['frameloom.cli.lazy', 'frameloom.cli.main'], commands\n"
    )
    for words in (["--help"], ["recipe", "--help"], ["data", "--help"]):
        status, out, err = run(words, folder, python=("-c", code))
        assert status == 0, err
        assert "Example:" in out
        names = COMMANDS if len(words) == 1 else COMMANDS[words[0]].commands
        assert all(f"\n  {name} " in out for name in names)


@pytest.mark.parametrize(
    "words",
    [
        *(["recipe", "check", "shapes/demo"], ["recipe", "check", "opensora2/stage1", "--skip-files"]),
        *(["recipe", "show", "shapes/demo"], ["recipe", "list"], ["--help"]),
    ],
    ids=" ".join,
)
def test_commands_about_recipes_load_no_model_code(folder: Path, words: list[str]) -> None:
    code = (
        "import sys\n"
        "from frameloom.cli.main import main\n"
        "try:\n    main(sys.argv[1:])\n"
        "except SystemExit as stop:\n    code = stop.code or 0\n"
        "heavy = {'torch', 'diffusers', 'transformers', 'numpy', 'safetensors'} & set(sys.modules)\n"
        "specs = 'frameloom.models.denoisers.opensora2.config' in sys.modules\n"
        "print('', code, sorted(heavy), specs, sep='|')\n"
    )
    _, out, err = run(words, folder, python=("-c", code))
    *_, status, heavy, has_specs = out.splitlines()[-1].split("|")
    assert heavy == "[]", err
    # Nobody made the data of the demo in this folder; the other recipe's files are not looked for.
    assert status == ("2" if words[1:] == ["check", "shapes/demo"] else "0"), err
    # Both recipes are of this family: they were checked against its spec.
    assert has_specs == str(words[1:2] in (["check"], ["show"]))


@pytest.mark.parametrize("command", COMMANDS["recipe"].commands)
def test_every_recipe_command_has_help_with_an_example(folder: Path, command: str) -> None:
    code, out, _ = run(["recipe", command, "--help"], folder)
    assert code == 0
    assert f"frameloom recipe {command}" in out.partition("Example:")[2]


def test_an_interrupt_ends_with_one_line_and_130(folder: Path) -> None:
    (folder / "waiting.py").write_text(
        # Short sleeps: a signal that comes just before a long one would be seen at its end.
        '"""Wait."""\nimport time\n\n\ndef wait() -> None:\n    print("ready", flush=True)\n'
        "    for _ in range(600):\n        time.sleep(0.1)\n"
    )
    code = (
        # Children of a shell that runs in the background ignore interrupts.
        "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "from frameloom.cli import main\n"
        "main.COMMANDS['wait'] = main.Entry('wait', target='waiting:wait')\n"
        "main.main(['wait'])\n"
    )
    process = start([], folder, python=("-c", code))
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=30)
    assert (process.returncode, err) == (130, "interrupted\n")


def test_words_are_split_into_flags_and_overrides() -> None:
    flags = {"--prompt": 1, "--fast": 0, "-o": 1}
    words = ["run", "--prompt", "--odd", "--a.b", "-3", "--fast", "--c=4", "-o", "out", "--d", "-o", "x", "--", "--e"]
    assert split_overrides(words, flags) == (
        ["run", "--prompt", "--odd", "--fast", "-o", "out", "-o", "x", "--", "--e"],
        ["--a.b", "-3", "--c=4", "--d"],
    )


def test_flags_of_all_commands_move_to_the_front() -> None:
    words = ["recipe", "check", "x", "--debug", "--log-level", "error", "--a", "1", "--", "--debug"]
    assert hoist_flags(words) == [
        "--debug",
        "--log-level",
        "error",
        "recipe",
        "check",
        "x",
        "--a",
        "1",
        "--",
        "--debug",
    ]
    assert hoist_flags(["--log-level=error", "x"]) == ["--log-level=error", "x"]
