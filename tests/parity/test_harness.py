"""The harness: how cases are judged and shown, what the command says and how it ends, and the list of deviations."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from frameloom.core.errors import CheckpointError, ConfigError
from tests.parity.cases import ParityCase, ParityOutput, Runner, above_rounding, read_case
from tests.parity.deviations import Deviation, find_by_name, read_deviations
from tests.parity.harness import NO_MODEL, format_table, run_case, run_parity, summarize

ROOT = Path(__file__).parents[2]
GOLDENS = ROOT / "tests" / "goldens"
CASE = GOLDENS / "open-sora-plan" / "wfvae_888_variant.safetensors"


def is_doubling(case: ParityCase) -> bool:
    return case.config.get("kind") == "doubling"


def double(case: ParityCase) -> list[ParityOutput]:
    return [ParityOutput(name, 2 * case.inputs[name], tensor, 1e-6) for name, tensor in case.outputs.items()]


# For cases of kind `doubling`: every output is twice the input of its name.
DOUBLING = Runner(is_doubling, double)
# Speaks of the first output only.
FORGETFUL = Runner(is_doubling, lambda case: double(case)[:1])
# Compares nothing, by a listed deviation.
LEAVING = Runner(
    is_doubling,
    lambda case: [ParityOutput(name, None, tensor, 0.0, "why", "listed") for name, tensor in case.outputs.items()],
)


def write_case(path: Path, config: object, **tensors: torch.Tensor) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file(tensors, path, metadata={"config": json.dumps(config)})


def make_case(**outputs: torch.Tensor) -> ParityCase:
    """Doublings of ones."""
    inputs = {name: torch.ones_like(tensor) for name, tensor in outputs.items()}
    return ParityCase("case", {"kind": "doubling"}, {}, inputs, outputs)


def run_command(*arguments: str) -> subprocess.CompletedProcess[str]:
    """As a person does, from the root of the clone."""
    command = [sys.executable, "-m", "tests.parity", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=280)


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
    results = {result.name: result for result in run_parity(tmp_path, [DOUBLING])}
    assert results["a/good"].is_good
    assert results["b/bad"].outputs[0].verdict == "above tolerance"
    assert results["b/bad"].outputs[0].max_abs_error == 1.0
    assert results["broken"].failed
    assert "KeyError" in results["broken"].note
    assert (results["other"].status, results["other"].note) == ("unknown", NO_MODEL)
    assert not results["other"].is_good


def test_an_output_that_the_runner_forgets_is_not_silently_passed():
    case = make_case(x=torch.tensor([2.0]), y=torch.tensor([2.0]))
    assert run_case(case, [DOUBLING]).is_good
    forgotten = run_case(case, [FORGETFUL])
    assert [output.verdict for output in forgotten.outputs] == ["ok", "not compared"]
    assert not forgotten.is_good


@pytest.mark.parametrize("name", ["diffusers_compare_vae", "dcae_notes", "mmdit_equivalences"])
def test_files_that_only_inform_are_listed_as_information(tmp_path, name):
    (tmp_path / f"{name}.json").write_text('{"a": 1}')
    (tmp_path / "else.json").write_text('{"a": 1}')
    results = {result.name: result for result in run_parity(tmp_path, [])}
    assert results[name].status == "information" and results[name].is_good
    assert results["else"].status == "unknown"


def test_a_clip_that_no_table_names_is_unknown_and_one_that_is_named_is_not(tmp_path):
    (tmp_path / "README.md").write_text("about")
    (tmp_path / "table_notes.json").write_text(json.dumps({"rows": [{"path": "named.mp4"}]}))
    (tmp_path / "clips").mkdir()
    for name in ("named.mp4", "stray.mp4"):
        (tmp_path / "clips" / name).write_bytes(b"clip")
    results = {result.name: result.status for result in run_parity(tmp_path, [])}
    assert results == {"table_notes": "information", "clips/stray.mp4": "unknown"}


def test_deviations_are_shown_with_the_reason_of_the_list_and_excuse_nothing_else():
    case = make_case(x=torch.tensor([2.0]))
    listed = [Deviation("listed", ("case*",), (), "it is wrong there")]
    result = run_case(case, [LEAVING], listed)
    assert result.is_good
    assert (result.outputs[0].verdict, result.outputs[0].note) == ("deviation", "it is wrong there")
    assert "listed as deviations" in summarize([result])
    unlisted = run_case(case, [LEAVING], [Deviation("listed", ("other",), (), "elsewhere")])
    assert unlisted.failed and "has no entry 'listed'" in unlisted.note
    whole = run_case(case, [DOUBLING], [Deviation("all", ("case",), ("*",), "not at all")])
    assert (whole.status, whole.note, whole.is_good) == ("deviation", "not at all", True)
    # What was compared and is off is excused by nothing.
    off = run_case(make_case(x=torch.ones(1)), [DOUBLING], [Deviation("one", ("case",), ("x",), "reason")])
    assert off.outputs[0].verdict == "above tolerance"


def test_table_has_a_line_for_every_case_and_on_demand_for_every_output(tmp_path):
    one = torch.ones(2, 3)
    tensors = {"in.x": one, "out.x": 2 * one, "in.y": one.clone(), "out.y": 2 * one + 5e-7}
    write_case(tmp_path / "case.safetensors", {"kind": "doubling"}, **tensors)
    write_case(tmp_path / "else.safetensors", {"kind": "else"}, **{"in.x": one})
    results = list(run_parity(tmp_path, [DOUBLING]))
    lines = format_table(results)
    assert lines[1].split() == ["case", "4.77e-07", "1e-06", "ok:", "2", "outputs"]
    assert NO_MODEL in lines[2]
    assert lines[-1].startswith("2 cases, 2 outputs compared: 2 ok, 0 off")
    verbose = format_table(results, verbose=True)
    assert verbose[1].split() == ["case", "x", "2x3", "0.00e+00", "1e-06", "ok"]
    assert len(verbose) == len(lines) + 1


def test_unreadable_and_missing_folders_are_refused(tmp_path):
    with pytest.raises(CheckpointError, match="no such folder"):
        list(run_parity(tmp_path / "nowhere", []))
    with pytest.raises(CheckpointError, match="holds no"):
        list(run_parity(tmp_path, []))
    (tmp_path / "case.safetensors").write_bytes(b"not tensors at all")
    with pytest.raises(CheckpointError, match="cannot be read"):
        list(run_parity(tmp_path, []))
    write_case(tmp_path / "case.safetensors", [1, 2], x=torch.ones(1))
    with pytest.raises(CheckpointError, match="expected a JSON object"):
        list(run_parity(tmp_path, []))


@pytest.mark.parametrize(
    ("tolerance", "expected", "allowed"),
    [
        (1e-6, torch.tensor([0.5]), 1e-6),
        (1e-6, torch.tensor([1e3, 0.5]), 16 * 2**-23 * 1e3),
        (1e-6, torch.tensor([1e3], dtype=torch.float64), 1e-6),
        (1e-2, torch.tensor([1e3, float("inf")]), 1e-2),
        (1e-6, torch.tensor([1000]), 1e-6),
        (0.0, torch.tensor([1e3]), 0.0),
        (1e-6, torch.zeros(0), 1e-6),
    ],
)
def test_no_tolerance_is_below_the_rounding_of_the_largest_number(tolerance, expected, allowed):
    assert above_rounding(tolerance)("x", expected) == pytest.approx(allowed, rel=1e-12)


@pytest.mark.slow
def test_command_prints_json_for_a_folder_of_goldens():
    done = run_command(str(GOLDENS / "open-sora-v2"), "--json")
    assert done.returncode == 0, done.stdout + done.stderr
    cases = json.loads(done.stdout)["cases"]
    assert {case["status"] for case in cases} == {"compared", "information"}
    assert all(output["note"] for case in cases for output in case["outputs"] if output["verdict"] == "deviation")


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
    verdicts = {
        line.split()[0]: line.split()[3:5] for line in done.stdout.splitlines() if line[:5] in ("right", "wrong")
    }
    assert verdicts == {"right": ["ok:", "6"], "wrong": ["above", "tolerance:"]}


@pytest.mark.slow
def test_command_ends_with_2_on_unknown_and_broken_files_and_when_nothing_can_be_compared(tmp_path):
    (tmp_path / "some_notes.json").write_text("{}")
    nothing = run_command(str(tmp_path))
    assert (nothing.returncode, "nothing was compared" in nothing.stderr) == (2, True)
    write_case(tmp_path / "strange.safetensors", {"kind": "else"}, **{"in.x": torch.ones(1)})
    unknown = run_command(str(tmp_path))
    assert unknown.returncode == 2
    assert NO_MODEL in unknown.stdout
    assert "no runner knows these files: strange;" in unknown.stderr
    (tmp_path / "strange.safetensors").write_bytes(CASE.read_bytes()[:1000])
    broken = run_command(str(tmp_path))
    assert (broken.returncode, "cannot be read" in broken.stderr) == (2, True)
    assert "Traceback" not in nothing.stderr + unknown.stderr + broken.stderr


def test_every_entry_has_a_name_of_its_own_and_a_reason() -> None:
    entries = read_deviations()
    assert len({entry.name for entry in entries}) == len(entries) > 5
    assert all(len(entry.reason) > 40 and entry.cases for entry in entries)


def test_an_entry_for_files_that_are_not_there_does_no_harm(tmp_path: Path) -> None:
    path = tmp_path / "list.yaml"
    path.write_text('- name: absent\n  cases: ["nowhere_*"]\n  outputs: ["a*"]\n  reason: not to be found\n')
    (entry,) = read_deviations(path)
    assert not entry.covers_output("here", "a1")
    assert entry.covers_output("nowhere_1", "a1") and not entry.covers_output("nowhere_1", "b1")
    assert not entry.covers_case("nowhere_1")


@pytest.mark.parametrize(
    "text",
    [
        "name: x\n",
        "- name: x\n  cases: [a]\n",
        "- name: x\n  cases: [a]\n  reason: y\n  why: z\n",
        '- name: x\n  cases: [a]\n  reason: ""\n',
        "- name: x\n  cases: [1]\n  reason: y\n",
    ],
)
def test_a_list_with_a_mistake_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "list.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"list\.yaml"):
        read_deviations(path)


def test_a_name_counts_for_its_own_cases_only() -> None:
    entries = [Deviation("one", ("a*",), (), "because")]
    assert find_by_name(entries, "one", "a1").reason == "because"
    for name, kind in (("two", "a1"), ("one", "b1")):
        with pytest.raises(ConfigError, match="write its reason"):
            find_by_name(entries, name, kind)
