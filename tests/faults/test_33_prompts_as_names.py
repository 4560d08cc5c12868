"""Any prompt becomes one file inside the output folder, with a short plain name, and replaces none; logs stay clean."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from frameloom.config.schema.sampling import SampleRequest
from frameloom.core.logging import get_logger, set_up_logging
from frameloom.core.paths import clean_name
from frameloom.data.media.writing import read_metadata
from frameloom.sampling.load import load_model
from frameloom.sampling.outputs import free_path, write_samples
from frameloom.sampling.pipeline import generate
from frameloom.training.train import train

PROMPTS = [
    *(
        "../../x",
        "a\0b",
        "",
        "\n",
        "a" * 400,
        "🎈" * 60,
        "-rf",
        "CON",
        "nul.txt",
        "$(id)",
        "`id`",
        "<script>",
        "a/b\\c",
    ),
    *("\x1b[31mred\x07", "..", ".", "~", "C:\\x", "%2e%2e/x", "a b", "é" * 200, "\u202egnp.exe", ".hidden", "*?"),
]


def check(folder: Path, prompt: str) -> None:
    """Three files for the same prompt: all different, all inside, none of them hidden or long."""
    seen = set()
    for _ in range(3):
        path = free_path(folder, SampleRequest(prompt=prompt, seed=3))
        assert path.parent == folder and path.resolve().parent == folder.resolve()
        name = path.name
        assert len(name.encode()) <= 120 and name.isascii() and name.isprintable() and os.sep not in name
        assert not name.startswith((".", "-")) and name.partition("-seed")[0].lower() not in ("con", "nul", "aux")
        assert not path.exists()
        path.write_bytes(b"x")
        seen.add(path)
    assert len(seen) == 3
    for path in seen:
        path.unlink()


@pytest.mark.parametrize("prompt", PROMPTS, ids=ascii)
def test_a_wicked_prompt_becomes_a_plain_name(tmp_path, tally, prompt):
    tally.inject()
    check(tmp_path, prompt)


@settings(
    max_examples=500, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(prompt=st.text(max_size=300))
def test_generated_prompts_become_plain_names(tmp_path, tally, prompt):
    tally.inject()
    check(tmp_path, prompt)


def test_a_prompt_taken_as_a_name_would_leave_the_folder(tmp_path):
    """The control."""
    escaped = (tmp_path / "out" / "../../x").resolve()
    assert not escaped.is_relative_to(tmp_path / "out")
    assert clean_name("../../x") == "x"


def test_samples_of_wicked_prompts_are_written_and_carry_the_prompt(world, tally):
    run = train(world.recipe("--train.steps", "1"))
    sampler = load_model(run, ["--sample.steps", "1"])
    prompts = ["../../x", "\x1b[31mred", "x" * 400, ""]
    out = world.folder / "deep" / "out"
    tally.inject(len(prompts))
    results = generate(sampler, [sampler.request(prompt, 3) for prompt in prompts])
    for _ in range(2):
        write_samples(results, out)
    files = [path for path in world.folder.rglob("*seed3*") if path.is_file()]
    assert len(files) == 2 * len(prompts) and {path.parent for path in files} == {out}
    assert {read_metadata(path)["prompt"] for path in files} >= {"../../x", "x" * 400}


def test_control_characters_do_not_reach_a_log(capsys, tally):
    tally.inject()
    set_up_logging()
    get_logger("frameloom.faults").warning("prompt %s", "\x1b[31mred\x07\x9b2J")
    text = capsys.readouterr().err
    assert (
        "red" in text and not any(ord(letter) < 32 and letter not in "\n\t" for letter in text) and "\x9b" not in text
    )
    assert logging.getLogger("frameloom").handlers
