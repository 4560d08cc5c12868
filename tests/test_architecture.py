"""Who may import whom, and what may never stand in the source."""

import ast
from pathlib import Path

ROOT = Path(__file__).parents[1] / "frameloom"
LAYERS = [
    ["core"],
    ["distributed"],
    ["models", "diffusion"],
    ["config"],
    ["data", "checkpoint"],
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


def test_packages_of_models_import_nothing_by_themselves():
    """Whoever asks for the spec of a family would pay for what its package imports."""
    packages = [*(ROOT / "models").rglob("__init__.py")]
    folders = {path.parent for path in (ROOT / "models").rglob("*.py")}
    assert {path.parent for path in packages} == folders
    # The kernels' package builds them, which no spec asks for.
    assert [str(path) for path in packages if path.stat().st_size and path.parent.name != "native"] == []
