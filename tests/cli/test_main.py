"""The command line as a person meets it: help, unknown commands, flags, README's commands, and the wheel."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest

from tests.faults.warm import run_frameloom

ROOT = Path(__file__).parents[2]
HEAVY = ("torch", "transformers", "polars", "pyarrow", "pydantic", "av")


def run(*arguments: str, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "frameloom", *arguments], capture_output=True, text=True, cwd=cwd, timeout=120
    )


def test_help_names_every_command_and_imports_nothing_heavy():
    script = f"""
import sys
from frameloom.cli.main import main
try:
    main(["--help"])
except SystemExit:
    pass
print([name for name in {HEAVY!r} if name in sys.modules])
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert done.stdout.strip().endswith("[]"), done.stdout + done.stderr
    for command in ("demo", "train", "sample", "data", "recipe"):
        assert re.search(rf"^\s+{command}\b", done.stdout, re.MULTILINE)


@pytest.mark.parametrize(
    "words",
    [
        ["demo"],
        ["train"],
        ["launch"],
        ["sample"],
        ["refine"],
        ["convert"],
        ["export"],
        ["replay"],
        ["objective"],
    ]
    + [["data", name] for name in ("shapes", "scan", "check", "verify", "report", "shard", "cache", "ledger", "score")]
    + [["vae", name] for name in ("reconstruct", "stats")]
    + [["eval"], ["compare"]]
    + [["recipe", name] for name in ("check", "show", "list", "schema", "reference")],
)
def test_every_command_has_help_with_an_example(words):
    done = run(*words, "--help")
    assert done.returncode == 0 and f"frameloom {' '.join(words)}" in done.stdout


def test_a_mistyped_command_answers_with_the_nearest():
    done = run("trian")
    assert done.returncode == 2 and "train" in done.stderr and "Traceback" not in done.stderr


RESUME = {"--accept-recipe-change", "--accept-data-change", "--data-position"}
FLAGS = {
    "train": RESUME,
    "launch": RESUME
    | {
        *("--nproc", "--hostfile", "--slurm", "--hours", "--sbatch", "--port", "--restarts", "--out", "--dry-run"),
    },
    "sample": {
        *("--prompt", "--prompts", "--out", "--seed", "--num", "--steps", "--guidance", "--negative", "--sampler"),
        *("--frames", "--size", "--ratio", "--fps", "--image", "--last-image", "--video", "--mask", "--strength"),
        "--control",
        *("--image-model", "--format", "--weights", "--lora", "--refine", "--refine-command", "--step", "--family"),
        *("--recipe", "--batch", "--sequence", "--again", "--like"),
    },
    "refine": {"--prompts", "--model", "--command", "--seed", "--max-tokens"},
    "demo": {"--folder", "--long"},
    "convert": {
        *("--to", "--shard-size", "--dtype", "--section", "--strip-prefix", "--family", "--size", "--layout"),
        *("--config", "--copy-tied", "--force"),
    },
    "export": {"--to", "--weights", "--step", "--dtype", "--shard-size", "--prompt", "--seed", "--force"},
    "replay": {"--out", "--name", "--start"},
}


@pytest.mark.parametrize("command", FLAGS)
def test_real_flags_are_few_and_known(command):
    """Everything else is a key of the recipe."""
    found = set(re.findall(r"^\s+(--[a-z-]+)(?=\s)", run(command, "--help").stdout, re.MULTILINE))
    assert found - {"--help"} == FLAGS[command]


def test_a_person_s_mistake_gets_one_message_and_ours_a_traceback(tmp_path):
    done = run("train", str(tmp_path / "missing.yaml"))
    assert done.returncode == 2 and "missing.yaml" in done.stderr and "Traceback" not in done.stderr
    assert "Traceback" in run("--debug", "train", str(tmp_path / "missing.yaml")).stderr


def test_a_place_that_cannot_be_written_gets_one_message(tmp_path):
    script = tmp_path / "train.sh"
    script.write_text("torchrun train.py configs/diffusion/train/stage1.py --dataset.data-path clips.csv")
    (tmp_path / "file").touch()
    done = run("import", str(script), "-o", str(tmp_path / "file" / "my.yaml"))
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert f"{tmp_path / 'file'}: File exists; there is a file of this name; choose another place" in done.stderr


def test_the_shipped_recipes_are_right():
    listed = run_frameloom("recipe", "list").stdout
    for path in sorted((ROOT / "frameloom" / "recipes").rglob("*.yaml")):
        name = path.relative_to(ROOT / "frameloom" / "recipes").with_suffix("").as_posix()
        assert name in listed
        done = run_frameloom("recipe", "check", name, "--skip-files")
        assert done.returncode == 0, done.stderr


def test_readme_names_commands_that_exist():
    """Every line that starts with `frameloom …` is a command that answers to --help."""
    text = "\n".join(path.read_text() for path in [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))])
    lines = re.findall(r"^(?: {4}\$? ?)?(frameloom .*)", text, re.MULTILINE)
    words = {tuple(line.split()[1:3]) for line in lines}
    assert words
    for command in words:
        is_group = command[0] in ("data", "recipe")
        done = run_frameloom(*(command if is_group else command[:1]), "--help")
        assert done.returncode == 0, f"{command}: {done.stderr}"


def test_readme_links_lead_somewhere():
    for page in [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]:
        for target in re.findall(r"\]\((?!https?:)([^)#]+)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name}: {target}"


@pytest.mark.slow
def test_a_wheel_carries_the_recipes_and_runs_outside_the_repository(tmp_path):
    shutil.rmtree(ROOT / "build", ignore_errors=True)  # as `make wheel` does: old modules in it would be copied
    build = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(tmp_path / "dist"), str(ROOT)]
    done = subprocess.run(build, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stdout + done.stderr
    wheel = next((tmp_path / "dist").glob("*.whl"))
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    folders = {name.partition("/")[0] for name in names}
    assert {name for name in folders if not name.endswith(".dist-info")} == {"frameloom"}
    modules = {path.relative_to(ROOT).as_posix() for path in (ROOT / "frameloom").rglob("*.py")}
    assert {name for name in names if name.endswith(".py")} == modules
    # The packages that the wheel needs are those of this environment; only the project itself is installed anew.
    venv.create(tmp_path / "venv", with_pip=True, system_site_packages=False)
    python = tmp_path / "venv" / "bin" / "python"
    install = [str(python), "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", str(wheel)]
    assert subprocess.run(install, capture_output=True, text=True, timeout=200).returncode == 0
    site = next(path for path in map(Path, sys.path) if path.name == "site-packages" and (path / "torch").is_dir())
    environment = {**os.environ, "PYTHONPATH": str(site)}
    script = "import frameloom; print(frameloom.__file__)"
    bare = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    where = subprocess.run(
        [str(python), "-c", script], capture_output=True, text=True, cwd=tmp_path, env=bare, timeout=60
    )
    assert str(tmp_path / "venv") in where.stdout
    command = [str(python), "-m", "frameloom", "recipe", "show", "shapes/demo"]
    shown = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=environment, timeout=60)
    assert shown.returncode == 0 and "opensora2" in shown.stdout, shown.stderr


def test_the_json_schema_is_json():
    assert json.loads(run("recipe", "schema").stdout)["properties"]["optim"]
