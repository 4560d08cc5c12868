"""Clips that two processes make together are those of one: every video family, with guidance; real processes, gloo."""

from __future__ import annotations

import fcntl
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import yaml
from safetensors.torch import load_file

from frameloom.builders.denoiser import build_denoiser
from frameloom.builders.text import build_text
from frameloom.builders.vae import build_vae
from frameloom.config.loading.recipe import load_recipe, resolve
from frameloom.core.errors import ConfigError
from frameloom.distributed.ranks import Ranks
from frameloom.sampling.batch import LOG, join_ranks, run_job
from frameloom.sampling.load import load_model
from frameloom.sampling.outputs import read_frames
from tests.conftest import World
from tests.models.text.tiny import make_t5
from tests.ports import free_ports
from tests.sampling.conftest import DDPM, SAMPLE, Files, Load, write_shaken
from tests.sampling.sequence_worker import PROMPT, ROWS, SEED, SHORT, make_latent, make_latents

FAMILIES = ("latte", "opensora_plan", "cogvideox_fun", "opensora2")
TOLERANCE = 1e-5
SPLIT = ("--parallel.encoders", "tensor", "--parallel.tensor", "2")
pytestmark = pytest.mark.timeout(900)


@pytest.fixture(scope="module")
def made(
    model_folders: dict[str, Path], files: Files, shared_world: Path, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """A folder with what two processes made; they are started once, also where tests run in several workers."""
    root = tmp_path_factory.getbasetemp()
    out = (root.parent if "PYTEST_XDIST_WORKER" in os.environ else root) / "clips of two processes"
    out.mkdir(exist_ok=True)
    with (out / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (out / "done").exists():
            folder = write_t5_model(shared_world, out / "with t5")
            folders = {name: str(model_folders[name]) for name in FAMILIES}
            more = {"t5": str(folder), "split": SPLIT, "sdxl": str(model_folders["sdxl"])}
            job = {"out": str(out), "ports": free_ports(2), "folders": folders, "picture": str(files.picture), **more}
            (out / "job.json").write_text(json.dumps(job))
            run_two(out / "job.json")
            (out / "done").touch()
    return out


def write_t5_model(shared_world: Path, root: Path) -> Path:
    """A latte that listens to a T5 of two heads."""
    root.mkdir()
    encoder = {"name": "t5", "path": str(make_t5(root / "t5")), "max_length": 16, "precision": "fp32"}
    model = {"_delete_": True, "family": "latte"}
    file = World(shared_world, root).write_recipe(
        model=model, objective=DDPM, sample=SAMPLE, text={"encoders": [encoder]}
    )
    recipe = load_recipe(file)
    vae, text = build_vae(recipe.vae, seed=0).model, build_text(recipe.text, recipe.model)
    denoiser = build_denoiser(recipe.model, latent_channels=vae.latent_channels, text=text, seed=1)
    write_shaken(denoiser, root / "model")
    (root / "model" / "recipe.yaml").write_text(yaml.safe_dump(resolve(file)))
    return root / "model"


def run_two(job: Path) -> None:
    command = [sys.executable, "-W", "ignore::FutureWarning", "-m", "tests.sampling.sequence_worker", str(job)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    started = []
    for rank in range(2):
        with (job.parent / f"log-{rank}").open("w") as log:
            words = [*command, str(rank)]
            started.append(
                subprocess.Popen(words, cwd=Path(__file__).parents[2], env=environment, stdout=log, stderr=log)
            )
    try:
        codes = [process.wait(timeout=700) for process in started]
    finally:
        for process in started:
            process.kill()
            process.wait()
    assert codes == [0, 0], (job.parent / "log-0").read_text()[-3000:] + (job.parent / "log-1").read_text()[-3000:]


@pytest.mark.parametrize("family", FAMILIES)
def test_two_processes_make_the_clip_of_one(made: Path, load: Load, files: Files, family: str) -> None:
    sampler = load(family)
    alone = make_latents(sampler, files.picture)
    parts = [load_file(made / f"{family}-{rank}.safetensors") for rank in range(2)]
    names = {"text", "image"} & alone.keys()
    assert ("image" in names) == (family != "latte")
    for name in names:
        size = float(alone[name].abs().max())
        assert all(float((part[name] - alone[name]).abs().max()) < TOLERANCE * size for part in parts)
    other = make_latent(sampler, sampler.request(PROMPT, SEED + 1))
    assert float((other - alone["text"]).abs().max()) > 0.1


@pytest.mark.parametrize("family", FAMILIES)
def test_processes_skip_the_same_blocks_as_one(made: Path, load: Load, files: Files, family: str) -> None:
    alone = make_latents(load(family), files.picture)
    parts = [load_file(made / f"{family}-{rank}.safetensors") for rank in range(2)]
    calls, skipped = alone["skipped"].tolist()
    assert 0 < skipped < calls
    for part in parts:
        assert part["skipped"].tolist() == [calls, skipped]
        assert float((part["skipping"] - alone["skipping"]).abs().max()) < TOLERANCE * float(
            alone["skipping"].abs().max()
        )


def test_a_group_may_split_its_text_encoder(made: Path) -> None:
    alone = load_model(made / "with t5" / "model")
    whole = alone.text.encoders[0].load()
    assert whole is not None
    num_weights = sum(weight.numel() for weight in whole.parameters())
    latent = make_latent(alone, alone.request(PROMPT, SEED))
    for rank in range(2):
        part = load_file(made / f"t5-{rank}.safetensors")
        assert float((part["text"] - latent).abs().max()) < TOLERANCE * float(latent.abs().max())
        assert 0.5 <= int(part["held"]) / num_weights < 0.53
    other = make_latent(alone, alone.request("a boat", SEED))
    assert float((other - latent).abs().max()) > 1e-3, "the model does not listen to its prompt"


def test_a_group_writes_each_file_once(made: Path, model_folders: dict[str, Path], tmp_path: Path) -> None:
    paths = [json.loads((made / f"paths-{rank}").read_text()) for rank in range(2)]
    assert paths[0] == paths[1] and len(paths[0]) == len(ROWS)
    names = [json.loads(line)["file"] for line in (made / "together" / LOG).read_text().splitlines()]
    assert names == [Path(path).name for path in paths[0]]
    assert not list((made / "together").glob("samples-rank*"))
    alone = run_job(lambda: load_model(model_folders["latte"], SHORT), ROWS, tmp_path)
    for ours, theirs in zip(paths[0], alone, strict=True):
        difference = read_frames(Path(ours)).astype(int) - read_frames(theirs).astype(int)
        assert np.abs(difference).mean() < 0.1, "more than what a codec makes of a last bit"
    assert np.abs(read_frames(Path(paths[0][0])).astype(int) - read_frames(alone[1]).astype(int)).mean() > 1


def test_a_model_that_cannot_be_divided_says_so(made: Path) -> None:
    for rank in range(2):
        found = (made / f"refused-{rank}").read_text()
        assert found == "--sequence is 2, but the tokens of sdxl cannot be divided over ranks; set it to 1"


@pytest.mark.parametrize(
    ("num_ranks", "sequence", "message"),
    [
        (
            1,
            2,
            "--sequence 2: 2 processes make a clip together, but this is one; start them: torchrun --nproc-per-node",
        ),
        (3, 2, "--sequence 2: 3 processes / 2 leaves a group of 1; start 2 or 4 processes, or choose a divisor of 3"),
        (2, 4, "--sequence 4: 2 processes / 4 leaves a group of 2; start 4 processes"),
    ],
)
def test_processes_that_do_not_make_whole_groups_are_refused(num_ranks: int, sequence: int, message: str) -> None:
    with pytest.raises(ConfigError) as error, join_ranks(Ranks(0, num_ranks), sequence=sequence):
        pass
    assert str(error.value).startswith(message)
