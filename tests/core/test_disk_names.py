"""The list of names on disk equals what the code uses, and what files of an earlier version hold.

Modules and classes move and are renamed; names on disk do not. Functions are found by their bare names, wherever they
are: where one of those is renamed, its line in `PURPOSE_AT` follows.
"""

from __future__ import annotations

import ast
import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
import torch
from safetensors import safe_open

import frameloom
from frameloom.config.schema.buckets import FixedSection, MultiAspectSection
from frameloom.config.schema.data import CacheSection, DataSection, TransformSection
from frameloom.core.disk_names import (
    ARCHITECTURE_FIELDS,
    CACHE_FILE_KEYS,
    CACHE_PLACE_COLUMNS,
    CACHE_TENSORS,
    CARD_KEYS,
    FINGERPRINT_KINDS,
    FINGERPRINT_POLICIES,
    LATENT_CACHE_COLUMNS,
    LATENT_FINGERPRINT_KEYS,
    MODEL_FOLDER_KEYS,
    MODEL_KINDS,
    PURPOSES,
    READ_SETTINGS,
    SAFETENSORS_NOTES,
    STATE_KEYS,
    STATE_PARTS,
    TENSOR_GROUPS,
    TEXT_CACHE_COLUMNS,
    TEXT_FINGERPRINT_KEYS,
    TEXT_OPTIONS,
)
from frameloom.core.random import bits_at, key, numpy_stream, stream, uniform_at
from frameloom.data.buckets.fixed import Fixed, MultiAspect
from frameloom.data.cache.folder import name_fingerprint
from frameloom.data.cache.keys import latent_fingerprint
from frameloom.data.media.transforms import RandomCrop, parse_transforms
from frameloom.models.registry import DENOISERS, VAES
from frameloom.models.text.base import TextOptions

PACKAGE = Path(frameloom.__file__).parent
WORLD = Path(__file__).parents[1] / "stored" / "world"
LORA_EXPORT = WORLD.parent / "reference" / "lora-export"

# Where a purpose stands among the arguments of a call, by the bare name of the function.
STREAMS = {"key": 1, "stream": 1, "numpy_stream": 1, "draw_normal": 1, "draw_uniform": 1, "draw_seeds": 1, "draw_at": 1}
# Methods and local functions that hand a purpose on; others may have their names, so only texts count as purposes.
HANDED_ON = {"uniform_B": 0, "normal": 0, "judge": 2, "draw": 0}
PURPOSE_AT = {**STREAMS, **HANDED_ON}
# Functions that give a purpose to one of STREAMS which they were given themselves.
WRAPPERS = {
    "stream",
    "numpy_stream",
    "draw_normal",
    "draw_uniform",
    "draw_seeds",
    "draw_at",
    "uniform_B",
    "normal",
    "draw",
}
# Benchmarks, and the purposes of simulations: nothing that a user has follows from their numbers. The list itself is no
# use of a name.
OUTSIDE, SIMULATED = {"bench", "disk_names.py"}, "cluster "

# First numbers of some streams.
KEY = 6367885995216197575
NORMAL = [-0.21230965852737427, 1.1648038625717163, 0.2905708849430084]
INTEGERS = [688224743, 338425587, 238185577]
BITS = [3880810081638013654, 18191564861714299863]
UNIFORM = [0.21037913607577907, 0.9861667071990804]


def parse_package() -> Iterator[ast.Module]:
    paths = [path for path in sorted(PACKAGE.rglob("*.py")) if not OUTSIDE & {*path.relative_to(PACKAGE).parts}]
    assert len(paths) > 100
    return (ast.parse(path.read_text(encoding="utf-8")) for path in paths)


def find_purposes(tree: ast.Module) -> tuple[set[str], set[str]]:
    """The purposes of a module, with `*` for what is filled in; and functions whose purposes cannot be told."""
    constants = {
        target.id: node.value.value
        for node in tree.body
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    found: set[str] = set()
    unknown: set[str] = set()

    def visit(node: ast.AST, function: str) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.Call):
                look_at(child, function)
            visit(child, child.name if isinstance(child, ast.FunctionDef) else function)

    def look_at(call: ast.Call, function: str) -> None:
        name = bare_name(call.func)
        purpose = next((word.value for word in call.keywords if word.arg == "purpose"), None)
        if purpose is not None and name not in PURPOSE_AT:
            # It is put before other purposes.
            found.add(f"{spell(purpose, constants)}*")
            return
        place = PURPOSE_AT.get(name)
        if place is None or (purpose is None and len(call.args) <= place):
            return
        text = spell(call.args[place] if purpose is None else purpose, constants)
        if text is not None:
            found.add(text)
        elif name in STREAMS and function not in WRAPPERS:
            unknown.add(f"{function}: {ast.unparse(call)}")

    visit(tree, "")
    return found, unknown


def bare_name(function: ast.expr) -> str:
    if isinstance(function, ast.Attribute):
        return function.attr
    return function.id if isinstance(function, ast.Name) else ""


def spell(node: ast.expr, constants: dict[str, str]) -> str | None:
    """A text, or a pattern of it; None for what holds no text at all."""
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else None
    if isinstance(node, ast.Name):
        return constants.get(node.id)
    if isinstance(node, ast.FormattedValue):
        return spell(node.value, constants)
    if isinstance(node, ast.JoinedStr):
        parts = [spell(part, constants) for part in node.values]
    elif isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        parts = [spell(node.left, constants), spell(node.right, constants)]
    else:
        return None
    return None if all(part is None for part in parts) else "".join("*" if part is None else part for part in parts)


def test_every_purpose_of_a_random_stream_is_listed_and_used():
    found: set[str] = set()
    for tree in parse_package():
        purposes, unknown = find_purposes(tree)
        assert not unknown, "add the function to WRAPPERS, and what it is given to PURPOSE_AT"
        found |= {purpose for purpose in purposes if not purpose.startswith(SIMULATED)}
    listed = PURPOSES
    assert len(set(listed)) == len(listed)
    assert found - set(listed) == set(), "add these to frameloom/core/disk_names.py"
    assert set(listed) - found == set(), "listed, but used nowhere: was one renamed?"


def test_purposes_are_found_however_they_are_given():
    """The control: a collector that finds nothing new would let every rename pass."""
    code = """
_NAME = "judge"
def a(): stream(0, "one"); random.key(seed, purpose="two"); draws.normal("three", shape); torch.normal(mean, 1.0)
def b(): numpy_stream(seed, f"{_NAME} {x} four"); key(0, "five/" + x); reader.read(purpose="six ")
def c(purpose): return stream(0, purpose)
"""
    found, unknown = find_purposes(ast.parse(code))
    assert found == {"one", "two", "three", "judge * four", "five/*", "six *"}
    assert unknown == {"c: stream(0, purpose)"}


def test_the_numbers_of_a_key_are_those_of_ever():
    assert key(7, "noise", 1, 2) == KEY
    assert torch.randn(3, generator=stream(0, "noise", 1)).tolist() == NORMAL
    assert numpy_stream(0, "order").integers(1 << 30, size=3).tolist() == INTEGERS
    assert bits_at(key(0, "bucket", 0), np.arange(2)).tolist() == BITS
    assert uniform_at(key(0, "bucket", 0), np.arange(2)).tolist() == UNIFORM


def find_state_keys() -> set[str]:
    """Keys that functions called `state` and `snapshot` write, and those that are read from a `state`."""
    found: set[str] = set()
    for tree in parse_package():
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef) and node.name in ("state", "snapshot"):
                keys = [one for part in ast.walk(node) if isinstance(part, ast.Dict) for one in part.keys]
            elif isinstance(node, ast.Subscript) and named(node.value) == "state":
                keys = [node.slice]
            elif isinstance(node, ast.Call) and is_get_of(node, "state"):
                keys = [node.args[0]]
            else:
                continue
            found |= {one.value for one in keys if isinstance(one, ast.Constant) and isinstance(one.value, str)}
    return found


def named(node: ast.expr) -> str:
    return bare_name(node)


def is_get_of(call: ast.Call, name: str) -> bool:
    return isinstance(call.func, ast.Attribute) and call.func.attr == "get" and named(call.func.value) == name


def test_every_key_of_a_checkpoints_state_is_listed_and_used():
    # Of torch's optimizers, and of objects on their way to another process.
    others = {"exp_avg", "exp_avg_sq", "rows", "file", "inline", "spill"}
    # `snapshot` puts the groups beside the state, and `parts` is also a key of such an object.
    listed = {*STATE_KEYS, *(name for part in STATE_PARTS.values() for name in part)}
    found = find_state_keys() - others - {"model", "parts"}
    assert found - listed == set()
    # Written below another name: by the save itself, and through a constant.
    assert listed - found == {"seal", "discriminator", "frameloom", "torch", "python"}


@pytest.mark.parametrize("name", ["denoiser", "lora", "vae"])
def test_a_stored_checkpoint_holds_nothing_that_is_not_listed(name: str):
    (folder,) = (WORLD / "stopped" / name / "checkpoints").iterdir()
    state = json.loads((folder / "state.json").read_text())
    assert set(state) <= set(STATE_KEYS)
    optional = {"discriminator", "lora", "inversion", "placement"}
    assert set(STATE_KEYS) - optional <= set(state)
    for part in {"lora", "versions"} & set(state):
        assert set(state[part]) == set(STATE_PARTS[part])
    groups = {path.stem for path in folder.glob("*.safetensors")}
    assert {"model", "optimizer"} <= groups <= set(TENSOR_GROUPS)
    assert ("discriminator" in groups) == (name == "vae") and ("ema" in groups) == (name != "lora")
    if name != "lora":
        assert set(state["architecture"]) == set(ARCHITECTURE_FIELDS[f"{state['kind']} {state['name']}"])


def test_groups_that_code_reads_are_listed():
    """All of a checkpoint's groups are asked for by name somewhere; other tensors are asked for by dotted names."""
    texts = {
        node.value
        for tree in parse_package()
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    }
    # Made of another one.
    assert set(TENSOR_GROUPS) - texts == {"discriminator_optimizer"}
    found = {
        str(node.slice.value)
        for tree in parse_package()
        for node in ast.walk(tree)
        if isinstance(node, ast.Subscript) and named(node.value) == "tensors" and isinstance(node.slice, ast.Constant)
    }
    assert {name for name in found if "." not in name and not name.isdigit()} <= set(TENSOR_GROUPS)


def test_fields_of_every_architecture_are_listed():
    kinds = {"denoiser": dict(DENOISERS), "vae": VAES}
    found = {
        f"{kind} {name}": tuple(field.name for field in dataclasses.fields(family.sizes["tiny"]))
        for kind, families in kinds.items()
        for name, family in families.items()
    }
    assert {name: sorted(fields) for name, fields in found.items()} == {
        name: sorted(fields) for name, fields in ARCHITECTURE_FIELDS.items()
    }


@pytest.mark.parametrize("folder", [WORLD / "models" / "vae", WORLD / "models" / "denoiser", LORA_EXPORT], ids=str)
def test_a_stored_model_folder_has_the_listed_keys(folder: Path):
    content = json.loads((folder / "config.json").read_text())
    assert set(content) == set(MODEL_FOLDER_KEYS)
    assert content["kind"] in MODEL_KINDS
    if folder == LORA_EXPORT:
        assert set(json.loads((folder / "frameloom.json").read_text())) == set(CARD_KEYS)
        with safe_open(folder / "pytorch_lora_weights.safetensors", "pt") as file:
            assert set(file.metadata()) <= set(SAFETENSORS_NOTES)


def test_stored_caches_have_the_listed_names():
    tables = {"latents": LATENT_CACHE_COLUMNS, "text": TEXT_CACHE_COLUMNS}
    keys = {"latents": LATENT_FINGERPRINT_KEYS, "text": TEXT_FINGERPRINT_KEYS}
    tensors: set[str] = set()
    for name, columns in tables.items():
        folder = WORLD / "cache" / name
        assert set(json.loads((folder / "cache.json").read_text())) == set(CACHE_FILE_KEYS)
        (index,) = folder.glob("index-*.parquet")
        found = set(pl.read_parquet(index).columns)
        assert found - {"number"} == {*columns, *CACHE_PLACE_COLUMNS} - {"number"}
        (fingerprint,) = (folder / "made-by").glob("*.json")
        told = json.loads(fingerprint.read_text())
        assert set(told) | {"note"} == set(keys[name]) | {"note"}
        assert name_fingerprint(told) == fingerprint.stem
        (shard,) = (folder / "shards").glob("*.safetensors")
        with safe_open(shard, "pt") as file:
            names = file.keys()
        tensors |= {part for name in names for part in name.split("/")[1:]}
    assert tensors - {"starts", "full"} == set(CACHE_TENSORS) - {"sample"}


def told_by(policy: Any, transforms: tuple[Any, ...]) -> dict[str, Any]:
    cache = CacheSection(precision="fp16", store="sample")
    data = DataSection(frame_start="first", transforms=transforms, cache=cache)
    return latent_fingerprint(policy, data, encoder={"name": "x"}, seed=3)


def test_a_fingerprint_is_the_same_whatever_classes_are_called():
    """The digests are those of 0.1.0, when they were made with names of classes."""
    fixed = Fixed(FixedSection(height=32, width=32, frames=5, batch=4), fps_max=24)
    several = MultiAspect(MultiAspectSection(), fps_max=24)
    plain = (TransformSection(name="resize"), TransformSection(name="center_crop"))
    other = (
        TransformSection(name="center_crop", rounding="even"),
        TransformSection(name="resize", fit="stretch"),
        TransformSection(name="rescale"),
    )
    found = {
        (policy.geometry()["policy"], parse_transforms(steps)[0].disk_name): name_fingerprint(told_by(policy, steps))
        for policy in (fixed, several)
        for steps in (plain, other)
    }
    assert found == {
        ("Fixed", "Resize"): "3d22689b58e28cda",
        ("Fixed", "CenterCrop"): "7fa464575c93af60",
        ("MultiAspect", "Resize"): "7c6b17179f89a4c8",
        ("MultiAspect", "CenterCrop"): "c235c6950f2fba4d",
    }
    read = told_by(fixed, other)["transforms"]
    assert set(read) == {*READ_SETTINGS, "policy"}
    for part in (*read["transforms"], *told_by(fixed, plain)["transforms"]["transforms"], read["policy"]["frame_rule"]):
        assert {name for name in part if name != "is"} == set(FINGERPRINT_KINDS[part["is"]])
    assert RandomCrop().disk_name in FINGERPRINT_KINDS
    assert {fixed.geometry()["policy"], several.geometry()["policy"]} < set(FINGERPRINT_POLICIES)


def test_options_of_text_encoders_are_listed():
    assert tuple(field.name for field in dataclasses.fields(TextOptions)) == TEXT_OPTIONS
