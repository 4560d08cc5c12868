"""Keys and shapes of full-size models."""

from __future__ import annotations

import copy
import dataclasses
from pathlib import Path

from frameloom.checkpoint.goldens import read_table
from frameloom.checkpoint.parity import run_case
from frameloom.models import manifest_parity

PATH = Path(__file__).parents[1] / "goldens" / "open-sora-plan" / "state_dict_manifest.json"
CASE = read_table(PATH, name="state_dict_manifest")


def test_every_model_of_the_list_has_the_published_keys_shapes_and_parameters() -> None:
    result = run_case(CASE, [manifest_parity])
    assert result.is_good, result
    assert len(result.outputs) == 2 * len(CASE.config) == 18


def test_a_missing_key_another_shape_and_another_count_are_found_out() -> None:
    name = "LatteT2V-XL/122"
    config = copy.deepcopy({name: CASE.config[name]})
    config[name]["keys"].popitem()
    config[name]["n_parameters"] += 1
    keys, count = run_case(dataclasses.replace(CASE, config=config), [manifest_parity]).outputs
    assert (keys.verdict, count.verdict) == ("above tolerance", "above tolerance")
    assert "missing" in keys.note
    other = copy.deepcopy({name: CASE.config[name]})
    other[name]["keys"]["scale_shift_table"] = [2, 1153]
    keys, count = run_case(dataclasses.replace(CASE, config=other), [manifest_parity]).outputs
    assert keys.verdict == "above tolerance" and count.verdict == "ok"


def test_a_model_without_a_family_is_an_error() -> None:
    case = dataclasses.replace(CASE, config={"Unheard-of": {"config": {}, "n_parameters": 1, "keys": {}}})
    result = run_case(case, [manifest_parity])
    assert result.failed and "Unheard-of" in result.note
