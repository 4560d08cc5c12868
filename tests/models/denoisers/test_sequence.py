"""Clips whose tokens lie on several processes: every family, against one process. The processes are real, on gloo."""

from __future__ import annotations

import fcntl
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from frameloom.core.errors import ConfigError
from frameloom.distributed.sequence_parallel import SequenceGroup, exchanged_bytes
from frameloom.models.denoisers.base import check_degree, use_sequence_group
from frameloom.models.registry import DENOISERS, get_denoiser
from tests.models.denoisers.sequence_cases import BATCH, CASES, MEASURED, TEXT_TOKENS

NUM_RANKS = 4
DEGREES = ("2", "4")
TIMEOUT_S = 500
# Four processes on a busy machine wait for each other at every message.
pytestmark = pytest.mark.timeout(600)
Found = dict[str, Any]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[Found]:
    """What each of four processes found; they are started once, also where tests run in several workers."""
    run_id = os.environ.get("PYTEST_XDIST_TESTRUNUID")
    folder = tmp_path_factory.mktemp("sequence")
    if run_id is not None:
        folder = tmp_path_factory.getbasetemp().parent / f"sequence-{run_id}"
        folder.mkdir(exist_ok=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        results = [folder / f"found-{rank}.json" for rank in range(NUM_RANKS)]
        if not all(path.exists() for path in results):
            run_processes(folder)
    return [json.loads(path.read_text()) for path in results]


def run_processes(folder: Path) -> None:
    command = [sys.executable, "-W", "error", "-m", "tests.models.denoisers.sequence_worker"]
    root = Path(__file__).parents[3]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    (folder / "store").unlink(missing_ok=True)
    processes = []
    for rank in range(NUM_RANKS):
        with (folder / f"log-{rank}").open("w") as log:
            words = [*command, str(rank), str(NUM_RANKS), str(folder)]
            processes.append(subprocess.Popen(words, cwd=root, env=environment, stdout=log, stderr=log))
    try:
        codes = [process.wait(timeout=TIMEOUT_S) for process in processes]
    finally:
        for process in processes:
            process.kill()
    logs = [(folder / f"log-{rank}").read_text()[-2000:] for rank in range(NUM_RANKS)]
    assert codes == [0] * NUM_RANKS, "\n\n".join(logs)


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_a_shared_clip_gives_the_prediction_and_the_gradients_of_one_process(found: list[Found], name: str) -> None:
    for own in found:
        for degree in DEGREES:
            result = own["cases"][name][degree]
            assert result["prediction"] < 1e-6
            assert result["gradients"] < 1e-6
            assert result["own"] > 0.01  # before they are joined, the gradients of a process are something else


@pytest.mark.slow
@pytest.mark.parametrize("family", ["latte", "opensora_plan", "cogvideox_fun", "opensora2"])
def test_mistakes_are_caught(found: list[Found], family: str) -> None:
    for rank, own in enumerate(found):
        result = own["mistakes"][family]
        assert result["unscaled"] == pytest.approx(0.5)  # every gradient is half of what it should be
        assert result["scale"] == pytest.approx(0.5)
        # Ranks that see different clips do not give the prediction of one: of the first, on the first.
        assert result["other"] > 0.1, rank
        assert result["undone"]


@pytest.mark.slow
def test_the_mean_over_all_ranks_is_the_mean_over_the_clips(found: list[Found]) -> None:
    for own in found:
        assert own["mixed"]["gradients"] < 1e-6
        assert own["mixed"]["one_clip"] > 0.1


@pytest.mark.slow
def test_a_sampled_clip_is_that_of_one_process_and_on_all_ranks(found: list[Found]) -> None:
    for own in found:
        assert own["sample"]["error"] < 1e-6 < 0.1 < own["sample"]["moved"]
    assert len({own["sample"]["numbers"] for own in found}) == 1


@pytest.mark.slow
def test_recomputed_compiled_and_rounded_blocks_share_clips_too(found: list[Found]) -> None:
    for own in found:
        assert max(own["recomputed"].values()) < 1e-6
        # bf16 has eight bits: its own rounding is of this size.
        assert max(own["half"].values()) < 0.03
    for own in found[:2]:
        assert max(own["compiled"].values()) < 1e-6


@pytest.mark.slow
@pytest.mark.parametrize("name", MEASURED)
def test_what_is_sent_is_what_the_formula_says(found: list[Found], name: str) -> None:
    case = CASES[name]
    for degree in DEGREES:
        exchanges = case.family.model.exchanges(case.configure(), case.latent_FHW, TEXT_TOKENS, int(degree))
        expected = sum(exchange.sent_bytes(int(degree), batch=BATCH, number_bytes=8) for exchange in exchanges)
        for own in found:
            result = own["traffic"][name][degree]
            # Forward and backward.
            assert result["sent"]["all_to_all"] == 2 * expected > 0
            assert result["messages"]["all_to_all"] == 4 * len(exchanges)
            assert result["messages"]["all_gather"] == 1


def test_the_bytes_of_a_layer_follow_the_written_formula() -> None:
    tokens, width = 1200, 96
    for degree in (2, 3, 4):
        assert exchanged_bytes(tokens, width, degree) == 2 * 4 * tokens * width * (degree - 1) // degree**2
    assert exchanged_bytes(tokens, width, 1) == 0
    # What divides badly is filled up; fewer keys are less to send.
    assert exchanged_bytes(1197, width, 4) == exchanged_bytes(1200, width, 4)
    assert exchanged_bytes(tokens, width, 4, num_keys=tokens // 4) < exchanged_bytes(tokens, width, 4)


@pytest.mark.parametrize("family_name", ["latte", "opensora_plan", "cogvideox_fun", "opensora2"])
def test_heads_that_do_not_divide_are_refused(family_name: str) -> None:
    case = CASES[family_name]
    with torch.device("meta"):
        model = case.family.build(case.configure())
    message = rf"parallel.sequence is 3, but this {family_name} has 4 attention heads.*one of 1, 2, 4"
    with pytest.raises(ConfigError, match=message):
        use_sequence_group(case.family, model, SequenceGroup(0, 3))
    use_sequence_group(case.family, model, SequenceGroup(0, 2))
    shared = [module for module in model.modules() if getattr(module, "sequence", None) == SequenceGroup(0, 2)]
    assert model in shared and len(shared) > len(model.blocks()) / 2


def test_a_family_without_tokens_to_share_is_refused() -> None:
    family = get_denoiser("sdxl")
    with pytest.raises(ConfigError, match="the tokens of sdxl cannot be divided over ranks; set it to 1"):
        check_degree(family, family.sizes["tiny"], 2)
    check_degree(family, family.sizes["tiny"], 1)


def test_recipes_know_the_heads_of_all_sizes() -> None:
    for name, family in DENOISERS.items():
        heads = {size: family.heads_of(size, {}) for size in family.sizes}
        if family.sizes["tiny"].heads is None:
            assert set(heads.values()) == {None}
            continue
        assert heads == {size: config.heads for size, config in family.sizes.items()}
        config = CASES[name].configure()
        overrides = {field: value for field, value in vars(config).items() if field in family.fields}
        assert family.heads_of("tiny", overrides) == config.heads
        named = next(field for field in family.fields if field in ("num_heads", "num_attention_heads"))
        assert family.heads_of("tiny", {named: 7}) == 7 != heads["tiny"]
        assert family.heads_of("of no size", overrides) is None


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({}, None),
        ({"parallel": {"sequence": 3}}, r"sequence is 3, but opensora2 tiny has 2 attention heads.*write one of 1, 2"),
        ({"parallel": {"sequence": 2}}, None),
        (
            {
                **{"parallel": {"sequence": 2}, "model": {"_delete_": True, "family": "sdxl"}},
                **{"objective": {"kind": "epsilon"}, "data": {"buckets": {"_delete_": True, "64px": {"1": [1.0, 4]}}}},
            },
            "the tokens of sdxl cannot be divided over processes; write 1",
        ),
    ],
)
def test_a_recipe_with_too_many_processes_for_a_clip_is_refused(
    world, sections: dict[str, Any], message: str | None
) -> None:
    if message is None:
        world.recipe(**sections)
        return
    with pytest.raises(ConfigError, match=message):
        world.recipe(**sections)
