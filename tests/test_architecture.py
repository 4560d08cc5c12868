"""Which package may import which, and that no modules import each other in a circle."""

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1] / "frameloom"
ORDER = [
    ["core"],
    ["weights", "distributed"],
    ["models", "diffusion"],
    ["checkpoint"],
    ["config"],
    ["data"],
    ["builders"],
    ["sampling"],
    ["interop", "evaluate"],
    ["training"],
    ["planner"],
    ["demo", "studio"],
    ["cli"],
]
LEVEL = {name: level for level, row in enumerate(ORDER) for name in row}


def name_of(path: Path) -> str:
    parts = path.relative_to(ROOT.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


TREES = {name_of(path): ast.parse(path.read_text()) for path in sorted(ROOT.rglob("*.py"))}


def list_imports(tree: ast.Module) -> Iterator[str]:
    """What is imported while the code runs, inside functions too; not what only type checkers read."""
    for_types = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        for inner in ast.walk(node)
    }
    for node in ast.walk(tree):
        if id(node) in for_types:
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            for alias in node.names:
                whole = f"{node.module}.{alias.name}"
                yield whole if whole in TREES else str(node.module)


GRAPH = {name: {other for other in list_imports(tree) if other in TREES} - {name} for name, tree in TREES.items()}


def package_of(module: str) -> str:
    return module.split(".")[1] if "." in module else ""


def find_cycles(graph: dict[str, set[str]]) -> list[list[str]]:
    """Strongly connected modules (Tarjan), more than one at a time."""
    number: dict[str, int] = {}
    lowest: dict[str, int] = {}
    stack: list[str] = []
    cycles: list[list[str]] = []

    def visit(module: str) -> None:
        number[module] = lowest[module] = len(number)
        stack.append(module)
        for other in sorted(graph[module]):
            if other not in number:
                visit(other)
            if other in stack:
                lowest[module] = min(lowest[module], lowest[other])
        if lowest[module] == number[module]:
            part = stack[stack.index(module) :]
            del stack[-len(part) :]
            if len(part) > 1:
                cycles.append(sorted(part))

    for module in graph:
        if module not in number:
            visit(module)
    return cycles


def test_imports_point_downward():
    wrong = [
        f"{module} imports {other}"
        for module, others in GRAPH.items()
        for other in sorted(others)
        if package_of(module) in LEVEL
        and package_of(other) in LEVEL
        and package_of(module) != package_of(other)
        and LEVEL[package_of(other)] >= LEVEL[package_of(module)]
    ]
    assert not wrong, "\n".join(wrong)


def test_no_modules_import_each_other():
    assert find_cycles({"a": {"b"}, "b": {"c"}, "c": {"b"}}) == [["b", "c"]]
    cycles = find_cycles(GRAPH)
    assert not cycles, "\n".join(" <-> ".join(cycle) for cycle in cycles)


def test_every_package_has_a_place_in_the_order():
    assert {path.parent.name for path in ROOT.glob("*/__init__.py")} == set(LEVEL)


def test_packages_are_empty():
    """A package that imports its modules would load torch for whoever reads a spec or a recipe."""
    full = [path for path in ROOT.rglob("__init__.py") if path.parent != ROOT and path.stat().st_size]
    assert not full, full


def test_the_package_imports_nothing_that_lives_beside_it():
    wrong = [
        f"{module} imports {other}"
        for module, tree in TREES.items()
        for other in list_imports(tree)
        if other.split(".")[0] in ("benchmarks", "docs", "tests")
    ]
    assert not wrong, "\n".join(wrong)


def test_no_family_imports_another_family():
    wrong = []
    for module, others in GRAPH.items():
        for shelf in ("frameloom.models.denoisers.", "frameloom.models.vaes."):
            if not module.startswith(shelf):
                continue
            own = module.removeprefix(shelf).split(".")[0]
            for other in others:
                name = other.removeprefix(shelf).split(".")[0]
                is_family = (ROOT / "models" / shelf.split(".")[2] / name).is_dir()
                if other.startswith(shelf) and is_family and name != own:
                    wrong.append(f"{module} imports {other}")
    assert not wrong, "\n".join(wrong)
