"""The commands that start several processes."""

from __future__ import annotations

import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from frameloom.checkpoint.reader import list_steps
from frameloom.core.errors import ConfigError
from frameloom.training.launch import Host, Job, Slurm, host_commands, read_hostfile, single_command, slurm_script
from frameloom.training.run.folder import RunFolder
from tests.faults.warm import run_frameloom

STARTER = "frameloom.training.launch"
JOB = Job("my run.yaml", ["--parallel.zero", "2", "--data.where", "fps > 8; rm x"], nproc=4)


def test_one_box_is_torchrun_or_plain():
    words = single_command(JOB)
    assert words[:5] == [sys.executable, "-m", STARTER, "--standalone", "--nproc-per-node=4"]
    assert words[5:] == ["-m", "frameloom", "train", "my run.yaml", *JOB.overrides]
    assert single_command(Job("r.yaml")) == [sys.executable, "-m", "frameloom", "train", "r.yaml"]


def test_every_host_gets_its_number_and_the_address_of_the_first(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    lines = host_commands(JOB, [Host("node1", 8), Host("node2", 8)])
    assert [host for host, _ in lines] == ["node1", "node2"]
    for number, (_, line) in enumerate(lines):
        words = shlex.split(line)
        assert words[:3] == ["cd", str(tmp_path), "&&"]
        assert {"--nnodes=2", "--nproc-per-node=8", f"--node-rank={number}", "--master-addr=node1"} <= set(words)
        assert words[-5:] == ["my run.yaml", *JOB.overrides], "a word was torn apart by the shell's rules"


def test_a_hostfile_is_read_with_slots_and_comments(tmp_path):
    path = tmp_path / "hosts"
    path.write_text("# the cluster\nnode1 slots=8  # fast\n\n10.0.0.2\n")
    assert read_hostfile(path) == [Host("node1", 8), Host("10.0.0.2")]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "names no host"),
        ("node1 slots=x\n", "hosts:1: 'node1 slots=x' is not a host"),
        ("node1\nnode1\n", "names node1 2 times"),
        ("node1 slots=0\n", "slots=0"),
        ("-oProxyCommand=x\n", "is not a host"),
        ("node1;reboot\n", "is not a host"),
    ],
)
def test_a_wrong_hostfile_is_told(tmp_path, text, message):
    path = tmp_path / "hosts"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message):
        read_hostfile(path)


def test_hosts_must_have_equally_many_slots():
    with pytest.raises(ConfigError, match="have 4, 8 slots"):
        host_commands(JOB, [Host("a", 8), Host("b", 4)])


def test_the_slurm_script_is_a_shell_script_that_quotes_what_it_is_given(tmp_path, monkeypatch):
    """Run by a real shell, with stand-ins for Slurm's two commands."""
    monkeypatch.chdir(tmp_path)
    script = slurm_script(JOB, Slurm(2, hours=1.5, options=("--partition=gpu",)), name="my-run")
    asked = [line for line in script.splitlines() if line.startswith("#SBATCH")]
    assert {"#SBATCH --nodes=2", "#SBATCH --time=01:30:00", "#SBATCH --partition=gpu"} <= set(asked)
    assert "#SBATCH --gpus-per-node=4" in asked and "#SBATCH --signal=TERM@120" in asked
    stand_ins = 'scontrol() { printf "n1\\nn2\\n"; }; srun() { printf "%s\\n" "$@"; }; '
    environment = {
        "SLURM_JOB_NUM_NODES": "2",
        "SLURM_JOB_ID": "77",
        "SLURM_JOB_NODELIST": "n[1-2]",
        "PATH": "/usr/bin:/bin",
    }
    done = subprocess.run(
        ["bash", "-c", stand_ins + script], capture_output=True, text=True, env=environment, cwd=tmp_path, timeout=60
    )
    words = done.stdout.splitlines()
    assert {"--nnodes=2", "--rdzv-endpoint=n1:29500", "--rdzv-id=77"} <= set(words), done.stderr
    assert words[-5:] == ["my run.yaml", *JOB.overrides]


def test_a_wrong_option_of_slurm_is_told():
    with pytest.raises(ConfigError, match="begins with --"):
        slurm_script(JOB, Slurm(1, options=("partition=gpu",)), name="x")


def test_the_command_prints_what_it_would_start_and_refuses_impossible_numbers(world, tmp_path: Path):
    recipe = str(world.write_recipe())

    def launch(*words: str) -> subprocess.CompletedProcess[str]:
        return run_frameloom("launch", recipe, "--dry-run", *words, timeout=250)

    done = launch("--nproc", "4", "--parallel.zero", "3")
    assert done.returncode == 0 and "--nproc-per-node=4" in done.stdout and "--parallel.zero 3" in done.stdout
    refused = launch("--nproc", "3", "--parallel.sequence", "2")
    assert refused.returncode == 2 and "does not divide 3 processes" in refused.stderr
    hosts = tmp_path / "hosts"
    hosts.write_text("a slots=2\nb slots=2\n")
    done = launch("--hostfile", str(hosts))
    assert done.returncode == 0 and [line.partition(":")[0] for line in done.stdout.splitlines()] == ["a", "b"]


@pytest.mark.parametrize("words", [("--hours", "nan"), ("--hours", "0"), ("--out", "x"), ("--sbatch=--partition=gpu",)])
def test_options_that_mean_nothing_are_refused(world, words: tuple[str, ...]):
    done = run_frameloom("launch", str(world.write_recipe()), "--dry-run", *words, timeout=250)
    assert done.returncode == 2 and words[0].partition("=")[0] in done.stderr and "Traceback" not in done.stderr


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_to_the_command_saves_and_leaves_no_process(world, number: signal.Signals):
    recipe = str(world.write_recipe())
    command = [sys.executable, "-m", "frameloom", "launch", recipe, "--nproc", "2", "--train.steps", "3000"]
    process = subprocess.Popen(
        [*command, "--train.save_every", "3000"],
        stderr=subprocess.PIPE,
        text=True,
        # A shell in the background has its commands ignore interrupts.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    metrics = world.folder / "run" / "metrics.jsonl"
    while process.poll() is None and not (metrics.is_file() and metrics.stat().st_size):
        time.sleep(0.05)
    process.send_signal(number)
    _, said = process.communicate(timeout=120)
    assert process.returncode == 128 + number, said
    assert "saved step" in said and "Traceback" not in said and "death signal" not in said
    assert list_steps(world.folder / "run" / "checkpoints")[-1] > 0
    with RunFolder(world.folder / "run").locked():
        pass  # nobody holds it


def test_what_goes_wrong_in_started_processes_is_told_once(world):
    """Two real processes under torchrun: one message, no trace, the exit code of the mistake."""
    recipe = str(world.write_recipe())
    (world.folder / "run" / "checkpoints").mkdir(parents=True)
    command = [sys.executable, "-m", "frameloom", "launch", recipe, "--nproc", "2", "--run.resume", "never"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280)
    assert done.returncode == 2, done.stderr
    assert done.stderr.count("holds a run already") == 1 and "Traceback" not in done.stderr
    assert len(done.stderr.splitlines()) == 1, done.stderr
