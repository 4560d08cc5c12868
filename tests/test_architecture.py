"""Who may import whom, and what may never stand in the source."""

import ast
from collections.abc import Collection
from pathlib import Path

ROOT = Path(__file__).parents[1] / "frameloom"
LAYERS = [
    ["core"],
    ["distributed"],
    ["config"],
    ["data", "models", "diffusion", "checkpoint"],
    ["generate", "evaluate"],
    ["train"],
    ["plan"],
    ["studio"],
    ["cli"],
]
LEVEL = {name: level for level, row in enumerate(LAYERS) for name in row}


def all_imports(path: Path) -> set[str]:
    nodes = list(ast.walk(ast.parse(path.read_text())))
    names = {node.module or "" for node in nodes if isinstance(node, ast.ImportFrom) and node.level == 0}
    return names | {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}


def imported_modules(path: Path) -> set[str]:
    return {name for name in all_imports(path) if name.startswith("frameloom.")}


def sources(package: str) -> list[Path]:
    return sorted((ROOT / package).rglob("*.py"))


def test_imports_point_downward():
    wrong = [
        f"{path.relative_to(ROOT)} imports {name}"
        for package in LEVEL
        for path in sources(package)
        for name in imported_modules(path)
        if (other := name.split(".")[1]) != package and LEVEL[other] >= LEVEL[package]
    ]
    assert not wrong, "\n".join(wrong)


def test_the_package_imports_nothing_that_lives_beside_it():
    beside = {"benchmarks", "docs", "tests"}
    found = {path: {name.split(".")[0] for name in all_imports(path)} for path in sorted(ROOT.rglob("*.py"))}
    wrong = [f"{path.relative_to(ROOT)} imports {name}" for path, names in found.items() for name in names & beside]
    assert not wrong, "\n".join(wrong)
    assert beside & {name.split(".")[0] for name in all_imports(ROOT.parent / "benchmarks" / "cluster.py")}


def test_distributed_imports_only_core():
    """It moves tensors and objects; what they mean is known above."""
    wrong = [
        f"{path.relative_to(ROOT)} imports {name}"
        for path in sources("distributed")
        for name in imported_modules(path)
        if name.split(".")[1] not in ("core", "distributed")
    ]
    assert sources("distributed") and not wrong, "\n".join(wrong)


def test_every_package_has_a_place_in_the_layers():
    packages = {path.parent.name for path in ROOT.glob("*/__init__.py")}
    assert packages - {"recipes"} <= set(LEVEL)


def test_no_family_imports_another_family():
    wrong = []
    for shelf in ("denoisers", "vaes"):
        for folder in (path for path in (ROOT / "models" / shelf).iterdir() if path.is_dir()):
            for path in folder.rglob("*.py"):
                for name in imported_modules(path):
                    parts = name.split(".")
                    is_sibling = parts[:3] == ["frameloom", "models", shelf] and len(parts) > 3
                    if is_sibling and (ROOT / "models" / shelf / parts[3]).is_dir() and parts[3] != folder.name:
                        wrong.append(f"{path.relative_to(ROOT)} imports {name}")
    assert not wrong, "\n".join(wrong)


def test_what_recipes_know_of_the_models_is_what_the_models_say():
    import torch

    from frameloom.config.facts import FAMILIES as FAMILY_FACTS
    from frameloom.config.facts import VAES as VAE_FACTS
    from frameloom.models.denoisers import FAMILIES, get_family
    from frameloom.models.vaes import VAES
    from frameloom.train.recompute import group_blocks

    assert set(FAMILY_FACTS) == set(FAMILIES) and set(VAE_FACTS) == set(VAES)
    for name, facts in FAMILY_FACTS.items():
        family = get_family(name)
        assert set(facts.sizes) == set(family.sizes)
        assert all(facts.patch_of(size, {}) == family.patch(config) for size, config in family.sizes.items())
        derived = {"in_channels", "context_in_dim", "vec_in_dim"}  # follow from the autoencoder and the text encoders
        assert facts.fields == types_of(family.sizes["tiny"], without=derived)
        with torch.device("meta"):
            model = family.build(family.sizes["tiny"])
        assert facts.blocks == tuple(group_blocks(model, family.blocks(model)))
    for name, facts in VAE_FACTS.items():
        assert set(facts.sizes) == set(VAES[name].sizes)
        assert all(facts.strides == config.strides for config in VAES[name].sizes.values())
        assert facts.fields == types_of(VAES[name].sizes["tiny"])


def types_of(config: object, without: Collection[str] = ()) -> dict[str, type]:
    return {name: type(value) for name, value in vars(config).items() if name not in without}
