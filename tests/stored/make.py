"""Makes what lies in `world/`, `reference/` and `recipes/` beside this file. It is kept to show what they are.

    python -m tests.stored.make OUT

It ran once, with Frameloom 0.1.0 at commit d417556 and torch 2.13.0+cpu, and what it wrote into OUT was put here. Never
run it to make a test pass: these files are the past, and the tests ask whether the present still reads them.

world/      a folder that commands run in; all of its paths are relative, so a copy works anywhere
    *.yaml              the recipes of the runs
    clips/              Moving Shapes, 16 files, and their manifest
    models/vae          the model folder that the uninterrupted run of vae.yaml exported
    models/denoiser     that of denoiser.yaml: averaged weights
    cache/              the latent and text caches of cached.yaml
    stopped/            runs of vae.yaml, denoiser.yaml and lora.yaml, killed between the steps 3 and 6 of 8
reference/  what the same code gave
    machine.json        where the numbers come from (machine.py)
    <run>/              uninterrupted runs: metrics.jsonl, and in tensors.json digests of the last checkpoint
    lora-export/        the last weights of lora.yaml, as `frameloom export --to lora` wrote them
    samples*/           frames that the exports gave
recipes/    `frameloom recipe show` of every shipped recipe, without the comments
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import yaml
from PIL import Image

from tests.stored.machine import ROOT, SETTINGS, describe_machine, run_frameloom
from tests.stored.tensors import digest_tensors

HERE = Path(__file__).parent
RECIPES = ("vae", "denoiser", "lora", "cached")
STOPPED = ("vae", "denoiser", "lora")
FIRST_SAVE, SECOND_SAVE, LAST = "step-00000003", "step-00000006", "step-00000008"
# Also what the tests ask the exports for.
SAMPLE = ("--recipe", "denoiser.yaml", "--prompt", "a red circle", "--format", "png", "--seed", "3")


def run(*words: object, cwd: Path) -> str:
    done = run_frameloom(*words, cwd=cwd)
    assert done.returncode == 0, done.stderr
    return done.stdout


def make(out: Path) -> None:
    world, reference = out / "world", out / "reference"
    world.mkdir(parents=True)
    reference.mkdir()
    for name in RECIPES:
        shutil.copy(HERE / "world" / f"{name}.yaml", world)
    run("data", "shapes", "clips", "--count", 16, "--seed", 5, "--workers", 1, cwd=world)
    for name in STOPPED:
        run("train", f"{name}.yaml", "--run.folder", "whole", cwd=world)
        if name != "lora":
            shutil.copytree(world / "whole" / name / "export", world / "models" / name)
        keep_reference(world / "whole" / name, reference / name, LAST)
        stop_on_the_way(world, name)
    run("export", "whole/lora", "--to", "lora", "exported", cwd=world)
    shutil.copytree(world / "exported", reference / "lora-export")
    run("data", "cache", "cached.yaml", cwd=world)
    run("train", "cached.yaml", cwd=world)
    keep_reference(world / "made" / "cached", reference / "cached", "step-00000004")
    run("sample", "models/denoiser", *SAMPLE, "--out", reference / "samples", cwd=world)
    lora = ("--lora", reference / "lora-export" / "pytorch_lora_weights.safetensors")
    run("sample", "models/denoiser", *SAMPLE, *lora, "--out", reference / "samples-lora", cwd=world)
    for folder in ("samples", "samples-lora"):
        keep_pixels(reference / folder)
    for folder in ("whole", "made", "exported"):
        shutil.rmtree(world / folder)
    (reference / "machine.json").write_text(json.dumps(describe_machine(), indent=1) + "\n")
    keep_recipes(out / "recipes")


def keep_reference(run_folder: Path, folder: Path, step: str) -> None:
    folder.mkdir()
    shutil.copy(run_folder / "metrics.jsonl", folder)
    digests = digest_tensors(run_folder / "checkpoints" / step)
    (folder / "tensors.json").write_text(json.dumps(digests, indent=1) + "\n")


def keep_pixels(folder: Path) -> None:
    """Frames alone: what is said in them and beside them names places of this machine."""
    for path in [path for path in folder.iterdir() if path.is_file()]:
        path.unlink()
    for path in folder.glob("*/*.png"):
        Image.fromarray(np.asarray(Image.open(path))).save(path)


def stop_on_the_way(world: Path, name: str) -> None:
    """Start a run and kill it after its save at step 3, before that at step 6; again until the moment was met."""
    folder = world / "stopped" / name
    checkpoints = folder / "checkpoints"
    while True:
        shutil.rmtree(folder, ignore_errors=True)
        command = [sys.executable, "-m", "frameloom", "train", f"{name}.yaml"]
        environment = {**os.environ, **SETTINGS, "PYTHONPATH": str(ROOT)}
        process = subprocess.Popen(command, cwd=world, env=environment)
        while process.poll() is None and not (checkpoints / FIRST_SAVE).is_dir():
            time.sleep(0.0005)
        process.send_signal(signal.SIGKILL)
        process.wait()
        if (checkpoints / FIRST_SAVE).is_dir() and not (checkpoints / SECOND_SAVE).exists():
            break
    for path in checkpoints.iterdir():
        if path.name != FIRST_SAVE:
            shutil.rmtree(path)


def keep_recipes(folder: Path) -> None:
    for line in run("recipe", "list", cwd=HERE).splitlines():
        name = line.split()[0]
        path = folder / f"{name}.yaml"
        path.parent.mkdir(parents=True, exist_ok=True)
        text = run("recipe", "show", name, cwd=HERE)
        lines = [re.sub(r"(^| ) *# .*", "", line) for line in text.splitlines()]
        path.write_text("".join(f"{line}\n" for line in lines if line))
        assert yaml.safe_load(path.read_text()) == yaml.safe_load(text)


if __name__ == "__main__":
    make(Path(sys.argv[1]).resolve())
