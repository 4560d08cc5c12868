import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from frameloom.checkpoint.parity import NO_MODEL, format_table, judge, read_case, run_parity, to_json
from frameloom.core.errors import CheckpointError
from frameloom.core.parity import ParityCase, ParityOutput

GOLDENS = Path(__file__).parents[1] / "goldens"
CASE = GOLDENS / "open-sora-plan" / "wfvae_888_variant.safetensors"


class Doubling:
    """A runner for cases of kind `doubling`: every output is twice the input of its name."""

    def matches(self, case: ParityCase) -> bool:
        return case.config.get("kind") == "doubling"

    def run(self, case: ParityCase) -> list[ParityOutput]:
        return [ParityOutput(name, 2 * case.inputs[name], tensor, 1e-6) for name, tensor in case.outputs.items()]


def write_case(path: Path, config: object, **tensors: torch.Tensor) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file(tensors, path, metadata={"config": json.dumps(config)})


def run_command(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "frameloom", "parity", *arguments],
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        check=False,
    )


def test_prefixes_go_and_weights_become_float32(tmp_path):
    tensors = {
        "weights.a.b": torch.ones(2).half(),
        "weights.n": torch.tensor(3),
        "in.x": torch.zeros(1),
        "out.y": torch.ones(1),
    }
    write_case(tmp_path / "case.safetensors", {"kind": "doubling"}, **tensors)
    case = read_case(tmp_path / "case.safetensors", name="case")
    assert case.weights["a.b"].dtype == torch.float32
    assert case.weights["n"].dtype == torch.int64
    assert (set(case.inputs), set(case.outputs), case.config) == ({"x"}, {"y"}, {"kind": "doubling"})


def test_cases_in_subfolders_are_judged_one_by_one(tmp_path):
    one, two = torch.ones(1), 2 * torch.ones(1)
    write_case(tmp_path / "a" / "good.safetensors", {"kind": "doubling"}, **{"in.x": one, "out.x": two})
    write_case(tmp_path / "b" / "bad.safetensors", {"kind": "doubling"}, **{"in.x": one, "out.x": one.clone()})
    write_case(tmp_path / "broken.safetensors", {"kind": "doubling"}, **{"out.x": one})
    write_case(tmp_path / "other.safetensors", {"kind": "else"}, **{"in.x": one})
    results = {result.name: result for result in run_parity(tmp_path, [Doubling()])}
    assert results["a/good"].is_good
    assert results["b/bad"].outputs[0].verdict == "above tolerance"
    assert results["b/bad"].outputs[0].max_abs_error == 1.0
    assert results["broken"].failed
    assert "KeyError" in results["broken"].note
    assert results["other"].note == NO_MODEL
    assert results["other"].is_good


@pytest.mark.parametrize(
    ("ours", "verdict"),
    [
        (torch.tensor([1.0, 2.0]), "ok"),
        (torch.tensor([1.0, 2.1]), "above tolerance"),
        (torch.tensor([1.0, float("nan")]), "above tolerance"),
        (torch.tensor([1.0]), "wrong shape"),
        (None, "not compared"),
    ],
)
def test_verdicts(ours, verdict):
    result = judge(ParityOutput("x", ours, torch.tensor([1.0, 2.0]), 1e-3, "why"))
    assert result.verdict == verdict
    json.dumps(to_json([]), allow_nan=False)


def test_table_has_a_line_for_every_output(tmp_path):
    one = torch.ones(2, 3)
    write_case(tmp_path / "case.safetensors", {"kind": "doubling"}, **{"in.x": one, "out.x": 2 * one})
    write_case(tmp_path / "else.safetensors", {"kind": "else"}, **{"in.x": one})
    lines = format_table(run_parity(tmp_path, [Doubling()]))
    assert lines[1].split() == ["case", "x", "2x3", "0.00e+00", "1e-06", "ok"]
    assert NO_MODEL in lines[2]
    assert lines[-1].startswith("2 cases: 1 outputs ok, 0 off")


def test_unreadable_and_missing_folders_are_refused(tmp_path):
    with pytest.raises(CheckpointError, match="no such folder"):
        run_parity(tmp_path / "nowhere", [])
    with pytest.raises(CheckpointError, match="holds no"):
        run_parity(tmp_path, [])
    (tmp_path / "case.safetensors").write_bytes(b"not tensors at all")
    with pytest.raises(CheckpointError, match="cannot be read"):
        run_parity(tmp_path, [])
    write_case(tmp_path / "case.safetensors", [1, 2], x=torch.ones(1))
    with pytest.raises(CheckpointError, match="expected a JSON object"):
        run_parity(tmp_path, [])


@pytest.mark.slow
def test_command_passes_on_the_goldens():
    done = run_command(str(GOLDENS), "--json")
    assert done.returncode == 0, done.stdout + done.stderr
    cases = {case["name"]: case for case in json.loads(done.stdout)["cases"]}
    known = [name for name, case in cases.items() if case["outputs"]]
    assert {"open-sora-plan/wfvae_layernorm", "open-sora-plan/haar_wavelets", "open-sora-v2/mmdit_v2_released"} <= set(
        known
    )
    assert all(output["verdict"] in ("ok", "not compared") for name in known for output in cases[name]["outputs"])


@pytest.mark.slow
def test_command_fails_on_a_changed_weight_and_shows_the_error(tmp_path):
    with safe_open(CASE, framework="pt") as file:
        metadata = file.metadata()
    tensors = load_file(CASE)
    tensors["weights.decoder.conv_out.bias"][0] += 0.01
    save_file(tensors, tmp_path / "wrong.safetensors", metadata=metadata)
    shutil.copy(CASE, tmp_path / "right.safetensors")
    done = run_command(str(tmp_path))
    assert done.returncode == 1, done.stdout + done.stderr
    lines = [line.split() for line in done.stdout.splitlines() if "recon_mode" in line]
    verdicts = {name: {" ".join(line[5:]) for line in lines if line[0] == name} for name in ("right", "wrong")}
    assert verdicts == {"right": {"ok"}, "wrong": {"above tolerance"}}


@pytest.mark.slow
def test_command_ends_with_2_when_nothing_can_be_compared(tmp_path):
    write_case(tmp_path / "case.safetensors", {"kind": "else"}, **{"in.x": torch.ones(1)})
    unknown = run_command(str(tmp_path))
    assert unknown.returncode == 2
    assert NO_MODEL in unknown.stdout
    assert "nothing was compared" in unknown.stderr
    assert "Traceback" not in unknown.stderr


@pytest.mark.slow
def test_command_ends_with_2_on_a_broken_file(tmp_path):
    (tmp_path / "case.safetensors").write_bytes(CASE.read_bytes()[:1000])
    broken = run_command(str(tmp_path))
    assert (broken.returncode, "cannot be read" in broken.stderr) == (2, True)
    assert "Traceback" not in broken.stderr
