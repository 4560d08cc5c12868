from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import frameloom
from frameloom.config.loading import recipe as load
from frameloom.config.loading.recipe import (
    find_recipe,
    load_recipe,
    load_with_locations,
    recipe_from_dict,
    resolve,
    shipped_recipes,
)
from frameloom.core.errors import ConfigError

Writer = Callable[[str, str], Path]


def test_a_file_becomes_a_typed_recipe(recipe_file: Path) -> None:
    recipe = load_recipe(recipe_file)
    assert recipe.optim.lr == 1e-4
    assert recipe.data.buckets["64px"] == {1: (1.0, 8), 9: ((0.5, 0.75), 4)}
    assert recipe.sample.steps == 30  # a default


def test_bases_merge_in_order_and_the_file_wins(recipe_file: Path, write: Writer) -> None:
    write("fast.yaml", "optim: {lr: 1e-3, eps: 1e-6}\ntrain: {log_every: 1}\n")
    child = write("sub/child.yaml", "_base_: [../tiny.yaml, ../fast]\nname: child\ntrain: {steps: 7}\n")
    recipe = load_recipe(child)
    assert (recipe.name, recipe.optim.lr, recipe.optim.eps) == ("child", 1e-3, 1e-6)
    assert (recipe.train.steps, recipe.train.log_every) == (7, 1)
    turned = write("sub/turned.yaml", "_base_: [../fast.yaml, ../tiny.yaml]\n")
    assert load_recipe(turned).optim.lr == 1e-4


def test_mappings_merge_and_delete_replaces(recipe_file: Path, write: Writer) -> None:
    merged = load_recipe(write("a.yaml", "_base_: tiny\ndata: {buckets: {128px: {1: [1.0, 2]}}}\n"))
    assert set(merged.data.buckets) == {"64px", "128px"}
    replaced = load_recipe(write("b.yaml", "_base_: tiny\ndata: {buckets: {_delete_: true, 128px: {1: [1.0, 2]}}}\n"))
    assert set(replaced.data.buckets) == {"128px"}
    assert replaced.data.manifest == "clips.parquet"


def test_null_and_lists_replace_what_was_inherited(write: Writer, recipe_file: Path) -> None:
    write("mid.yaml", "_base_: tiny\nrun: {trackers: [tensorboard]}\nvalidation: {where: {split: val}, every: 3}\n")
    assert load_recipe(recipe_file.with_name("mid.yaml")).run.trackers == ("tensorboard",)
    recipe = load_recipe(
        write("end.yaml", "_base_: mid\nrun: {trackers: [jsonl]}\nvalidation: null\ntrain: {ema: null}\n")
    )
    assert recipe.run.trackers == ("jsonl",)
    assert recipe.validation is None
    assert recipe.train.ema is None


def test_places_follow_inheritance_and_overrides(recipe_file: Path, write: Writer) -> None:
    child = write("child.yaml", "_base_: tiny\noptim:\n  eps: 1e-6\n")
    _, locations = load_with_locations(child, ["--train.steps", "9"])
    assert locations["optim", "lr"].endswith("tiny.yaml:11")
    assert locations["optim", "eps"].endswith("child.yaml:3")
    assert locations["train", "steps"] == "--train.steps"


def test_a_mistake_in_a_base_names_the_base(recipe_file: Path, write: Writer) -> None:
    write("bad.yaml", "_base_: tiny\noptim:\n  lrr: 1\n")
    with pytest.raises(ConfigError, match=r"bad\.yaml:3: optim has no key 'lrr'; did you mean 'lr'\?"):
        load_recipe(write("child.yaml", "_base_: bad\nname: child\n"))


def test_messages_name_files_as_the_person_wrote_them(
    recipe_file: Path, write: Writer, monkeypatch: pytest.MonkeyPatch
) -> None:
    write("runs/child.yaml", "_base_: ../bad.yaml\n")
    write("bad.yaml", "_base_: tiny\nlr: 3\n")
    monkeypatch.chdir(recipe_file.parent)
    with pytest.raises(ConfigError) as caught:
        load_recipe("runs/child.yaml")
    assert caught.value.problems == ["bad.yaml:2: the recipe has no key 'lr'; 'lr' belongs to optim: optim.lr"]


def test_a_circle_prints_the_chain(write: Writer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    for name, base in (("a", "b"), ("b", "c"), ("c", "a")):
        write(f"{name}.yaml", f"_base_: {base}.yaml\n")
    with pytest.raises(ConfigError, match=r"a\.yaml -> b\.yaml -> c\.yaml -> a\.yaml"):
        load_recipe("a.yaml")


def test_the_same_base_twice_is_no_circle(recipe_file: Path, write: Writer) -> None:
    write("left.yaml", "_base_: tiny\n")
    write("right.yaml", "_base_: tiny\noptim: {lr: 1e-3}\n")
    assert load_recipe(write("both.yaml", "_base_: [left, right]\n")).optim.lr == 1e-3


def test_endless_inheritance_is_refused(write: Writer) -> None:
    for depth in range(12):
        write(f"n{depth}.yaml", f"_base_: [n{depth + 1}, n{depth + 1}]\n")
    write("n12.yaml", "name: end\n")
    with pytest.raises(ConfigError, match="more than 100 files"):
        load_recipe(write("top.yaml", "_base_: n0\n"))


def test_shipped_recipes_are_found_by_name(
    recipe_file: Path, write: Writer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    write("shipped/shapes/demo.yaml", recipe_file.read_text())
    write("shipped/shapes/more.yaml", "_base_: shapes/demo\nname: more\n")
    monkeypatch.setattr(load, "SHIPPED", tmp_path / "shipped")
    assert shipped_recipes() == [("shapes/demo", "A denoiser for tests"), ("shapes/more", "")]
    assert find_recipe("shapes/demo") == find_recipe("shapes/demo.yaml")
    assert load_recipe("shapes/more").name == "more"
    assert load_recipe(write("mine.yaml", "_base_: shapes/demo.yaml\nname: mine\n")).name == "mine"
    with pytest.raises(ConfigError, match="did you mean the shipped 'shapes/demo'"):
        load_recipe("shapes/dmeo")
    with pytest.raises(ConfigError, match="no such file and no shipped recipe"):
        find_recipe("../shipped/shapes/demo")


def test_every_shipped_recipe_is_right() -> None:
    for name, title in shipped_recipes():
        assert title, f"{name} needs a first comment line"
        load_recipe(name)


def test_resolve_fills_in_no_defaults(recipe_file: Path) -> None:
    value = resolve(recipe_file, ["--optim.lr", "1e-5"])
    assert value["optim"] == {"lr": 1e-5}
    assert "sample" not in value


def test_plain_data_is_checked_like_a_file(recipe_file: Path) -> None:
    value = resolve(recipe_file)
    assert recipe_from_dict(value) == load_recipe(recipe_file)
    with pytest.raises(ConfigError, match="run 7: the recipe has no key 'nmae'"):
        recipe_from_dict({**value, "nmae": 1}, name="run 7")


def test_loading_imports_no_heavy_package(recipe_file: Path) -> None:
    code = (
        "import sys\n"
        "from frameloom.config.loading import render\n"
        "from frameloom.config.loading.recipe import load_recipe\n"
        f"render.render_yaml(load_recipe({str(recipe_file)!r}))\n"
        "heavy = {'torch', 'numpy', 'transformers', 'diffusers', 'polars', 'av', 'rich'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    root = Path(frameloom.__file__).parent.parent
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
