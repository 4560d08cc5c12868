"""Moves and merges modules of the package by a table, and rewrites every import of them.

    python tools/codemod.py tools/moves.txt --plan     the order of imports and cycles that the table would give
    python tools/codemod.py tools/moves.txt --apply    write the new tree

A line of the table is `new.module "Docstring of a merged module": old.a old.b old.c:Name,OTHER`. A module that no line names stays.
`old.a:_name=other` in a line `rename:` renames a top-level name first. Names are relative to the package.
"""

from __future__ import annotations

import ast
import builtins
import collections
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

PACKAGE = "frameloom"
ROOT = Path.cwd()
OTHERS = [p for d in ("tests", "benchmarks", "docs", "tools") for p in sorted((ROOT / d).rglob("*.py")) if "codemod" not in p.name]
DEF = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@dataclass
class Segment:
    names: list[str]
    text: str
    node: ast.stmt
    module: str
    kind: str = "code"


@dataclass
class Module:
    name: str
    path: Path
    text: str
    tree: ast.Module
    doc: str = ""
    future: bool = False
    imports: dict[str, tuple] = field(default_factory=dict)  # alias -> ("module", mod) | ("from", mod, name)
    typing_only: set[str] = field(default_factory=set)
    segments: list[Segment] = field(default_factory=list)
    defined: dict[str, Segment] = field(default_factory=dict)
    exported: list[str] | None = None


def targets(node: ast.stmt) -> list[str]:
    if isinstance(node, DEF):
        return [node.name]
    if isinstance(node, ast.Assign):
        return [n.id for t in node.targets for n in ast.walk(t) if isinstance(n, ast.Name)]
    if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
        return [node.target.id]
    found = []
    if isinstance(node, (ast.If, ast.Try, ast.For, ast.With)):
        for n in ast.walk(node):
            if isinstance(n, DEF + (ast.Assign, ast.AnnAssign)):
                found += targets(n)
            if isinstance(n, (ast.Import, ast.ImportFrom)):
                found += [a.asname or a.name.split(".")[0] for a in n.names]
    return found


def read_imports(module: Module, node: ast.stmt, typing_only: bool) -> None:
    if isinstance(node, ast.Import):
        for a in node.names:
            alias = a.asname or a.name.split(".")[0]
            module.imports.setdefault(alias, ("module", a.name, a.asname))
            if not a.asname and "." in a.name:
                module.imports.setdefault("dotted " + a.name, ("module", a.name, None))
            if typing_only:
                module.typing_only.add(alias)
    elif isinstance(node, ast.ImportFrom):
        if node.module == "__future__":
            module.future = True
            return
        for a in node.names:
            alias = a.asname or a.name
            module.imports[alias] = ("from", node.module, a.name)
            if typing_only:
                module.typing_only.add(alias)


def read_module(path: Path) -> Module:
    text = path.read_text()
    tree = ast.parse(text)
    module = Module(module_name(path), path, text, tree, ast.get_docstring(tree, clean=True) or "")
    lines = text.split("\n")
    end = 0
    body = tree.body
    if module.doc:
        end = body[0].end_lineno
        body = body[1:]
    for node in body:
        begin = min([node.lineno] + [d.lineno for d in getattr(node, "decorator_list", [])])
        chunk = "\n".join(lines[end : node.end_lineno])
        end = node.end_lineno
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            read_imports(module, node, False)
            remark = re.search(r"  #.*$", lines[node.end_lineno - 1])
            if remark and isinstance(node, ast.Import):
                REMARKS[ast.unparse(node)] = remark.group(0)
            lead = "\n".join(l for l in chunk.split("\n") if l.strip().startswith("#"))
            if lead:
                print(f"note: comment before an import in {module.name}: {lead[:90]}")
            continue
        if isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING") and not node.orelse:
            rest = []
            for sub in node.body:
                if isinstance(sub, (ast.Import, ast.ImportFrom)):
                    read_imports(module, sub, True)
                else:
                    rest.append(sub)
            if not rest:
                continue
        names = targets(node)
        if names == ["__all__"]:
            module.exported = [ast.literal_eval(e) for e in getattr(node.value, "elts", [])]
            segment = Segment(names, chunk, node, module.name, "all")
        else:
            segment = Segment(names, chunk, node, module.name)
        module.segments.append(segment)
        for name in names:
            if name not in module.defined:
                module.defined[name] = segment
    tail = "\n".join(lines[end:])
    if tail.strip() and module.segments:
        module.segments[-1].text += "\n" + tail
    return module


MODULES: dict[str, Module] = {}
DEST: dict[str, str] = {}  # old module -> new module
SYMBOL: dict[tuple[str, str], str] = {}  # (old module, name) -> new module
SOURCES: dict[str, list[str]] = collections.OrderedDict()
DOCS: dict[str, str] = {}
RENAMES: dict[tuple[str, str], str] = {}
PROBLEMS: list[str] = []


def full(name: str) -> str:
    return PACKAGE if name in ("", ".") else f"{PACKAGE}.{name}"


def read_table(path: Path) -> None:
    buffer = ""
    for raw in path.read_text().split("\n"):
        line = raw.split("#")[0].rstrip()
        if not line.strip():
            continue
        buffer = buffer + " " + line.strip() if raw.startswith((" ", "\t")) else line
        pending.append((buffer, raw)) if False else None
        LINES.append((raw.startswith((" ", "\t")), line.strip()))
    joined: list[str] = []
    for continued, line in LINES:
        if continued:
            joined[-1] += " " + line
        else:
            joined.append(line)
    for line in joined:
        match = re.fullmatch(r'([\w.]+)\s*("(.*?)")?\s*:\s*(.*)', line)
        if not match:
            raise SystemExit(f"cannot read: {line}")
        new, _, doc, olds = match.groups()
        if new == "rename":
            for item in olds.split():
                place, other = item.split("=")
                old, name = place.split(":")
                RENAMES[full(old), name] = other
            continue
        new = full(new)
        if doc:
            DOCS[new] = doc
        for item in olds.split():
            old, _, names = item.partition(":")
            old = full(old)
            if old not in MODULES:
                print(f"note: no module {old} (for {new})")
                continue
            SOURCES.setdefault(new, [])
            if old not in SOURCES[new]:
                SOURCES[new].append(old)
            if names:
                for name in names.split(","):
                    if name not in MODULES[old].defined:
                        PROBLEMS.append(f"{old} defines no {name}")
                    SYMBOL[old, name] = new
            else:
                if old in DEST:
                    PROBLEMS.append(f"{old} is named twice")
                DEST[old] = new


REMARKS: dict[str, str] = {}
LINES: list[tuple[bool, str]] = []
pending: list = []


def dest_of(module: str, name: str | None = None) -> str:
    if name is not None and (module, name) in SYMBOL:
        return SYMBOL[module, name]
    return DEST.get(module, module)


def resolve(module: str, name: str) -> tuple[str, str] | None:
    """The module that defines `name` as seen in `module`; (module, None) for a submodule; None outside."""
    seen = set()
    while True:
        if (module, name) in seen:
            return None
        seen.add((module, name))
        if module not in MODULES:
            return None
        source = MODULES[module]
        if name in source.defined:
            return module, name
        if name in source.imports:
            entry = source.imports[name]
            if entry[0] == "from" and entry[1] and entry[1].startswith(PACKAGE):
                sub = f"{entry[1]}.{entry[2]}"
                if sub in MODULES and not (entry[1] in MODULES and entry[2] in MODULES[entry[1]].defined):
                    return sub, ""
                module, name = entry[1], entry[2]
                continue
            return module, name  # an outside name that this module passes on
        if f"{module}.{name}" in MODULES:
            return f"{module}.{name}", ""
        return None


def new_name(module: str, name: str) -> str:
    return RENAMES.get((module, name), name)


def import_line(owner: str, name: str, alias: str) -> str:
    name = new_name(owner, name)
    return f"from {dest_of(owner, MODULES and name and name)} import {name}"


def rewritten(module: str, name: str, alias: str, here: str | None) -> str | None:
    """The import statement for what `from module import name as alias` gave; None when it is in the same file now."""
    found = resolve(module, name)
    if found is None:
        PROBLEMS.append(f"cannot resolve {module}.{name}")
        return f"from {dest_of(module)} import {name}" + (f" as {alias}" if alias != name else "")
    owner, what = found
    if what == "":
        target = dest_of(owner)
        if target == here:
            PROBLEMS.append(f"{here}: a module imports itself as {alias}")
        if target.rpartition(".")[0] == "":
            return f"import {target}"
        parent, _, leaf = target.rpartition(".")
        return f"from {parent} import {leaf}" + (f" as {alias}" if alias != leaf else "")
    target = dest_of(owner, what)
    fresh = new_name(owner, what)
    if what not in MODULES[owner].defined:  # passed on from outside
        entry = MODULES[owner].imports[what]
        if entry[0] == "from":
            return f"from {entry[1]} import {entry[2]}" + (f" as {alias}" if alias != entry[2] else "")
        return f"import {entry[1]}" + (f" as {alias}" if entry[2] else "")
    if target == here:
        if alias != fresh:
            PROBLEMS.append(f"{here}: {what} of {owner} is known as {alias} but now stands in the same file")
        return None
    return f"from {target} import {fresh}" + (f" as {alias}" if alias != fresh else "")


STRING = re.compile(r"\bfrom\b")


def rewrite_nested(text: str, here: str | None, module: Module | None) -> str:
    """Imports of ours inside functions, in this text of one segment or a whole file."""
    tree = ast.parse(text if text.strip() else "")
    lines = text.split("\n")
    edits = []
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.level == 0 and node.module and (node.module + ".").startswith(PACKAGE + "."):
            statements = []
            for a in node.names:
                line = rewritten(node.module, a.name, a.asname or a.name, here)
                if line:
                    statements.append(line)
            edits.append((node.lineno, node.end_lineno, node.col_offset, statements, lines[node.end_lineno - 1][node.end_col_offset :]))
        elif isinstance(node, ast.Import):
            for a in node.names:
                if a.name.startswith(PACKAGE + ".") :
                    target = dest_of(a.name)
                    if target != a.name:
                        if not a.asname:
                            PROBLEMS.append(f"{here}: import {a.name}")
                        edits.append((node.lineno, node.end_lineno, node.col_offset, [f"import {target}" + (f" as {a.asname}" if a.asname else "")], ""))
    for begin, end, col, statements, rest in sorted(edits, reverse=True):
        indent = " " * col
        fresh = [indent + s for s in statements]
        if rest.strip():
            if fresh:
                fresh[-1] += rest
        lines[begin - 1 : end] = fresh
    return "\n".join(lines)


def rename_in(text: str, module: str) -> str:
    names = {old: new for (m, old), new in RENAMES.items() if m == module}
    if not names:
        return text
    return re.sub(r"(?<![\w.\"'])(" + "|".join(map(re.escape, names)) + r")(?![\w\"'])(?!\s*=[^=])", lambda m: names[m.group(1)], text) if False else re.sub(
        r"(?<![\w.])(" + "|".join(map(re.escape, names)) + r")\b", lambda m: names[m.group(1)], text
    )


def loaded(node: ast.AST) -> set[str]:
    found = set()
    for n in ast.walk(node):
        if isinstance(n, ast.Name):
            found.add(n.id)
        elif isinstance(n, ast.Constant) and isinstance(n.value, str) and re.fullmatch(r"[A-Za-z_][\w\[\], |.]*", n.value) and len(n.value) < 120:
            # Names in quoted annotations and casts.
            found |= {"?" + w for w in re.findall(r"[A-Za-z_]\w*", n.value)}
    return found


def build(new: str) -> tuple[str, set[str]]:
    segments: list[Segment] = []
    olds = SOURCES[new]
    for old in order_sources(new, olds):
        for segment in MODULES[old].segments:
            if segment.kind == "all":
                continue
            place = dest_of(old, segment.names[0]) if segment.names else DEST.get(old, old)
            if place == new:
                segments.append(segment)
    taken: dict[str, Segment] = {}
    kept: list[Segment] = []
    for s in segments:
        clash = [n for n in s.names if n in taken and taken[n].module != s.module]
        if clash:
            if all(same(taken[n], s) for n in clash):
                continue
            for n in clash:
                fresh = new_name(s.module, n)
                if fresh == n and new_name(taken[n].module, n) == n:
                    PROBLEMS.append(f"{new}: {n} is in {taken[n].module.removeprefix('frameloom.')} and {s.module.removeprefix('frameloom.')}")
        for n in s.names:
            taken.setdefault(n, s)
        kept.append(s)
    names_here = {new_name(s.module, n): s for s in kept for n in s.names}
    statements: dict[str, None] = {}
    typing: dict[str, None] = {}
    aliases: dict[str, str] = {}
    texts = []
    deps: set[str] = set()
    for s in kept:
        source = MODULES[s.module]
        for name in sorted(loaded(s.node)):
            quoted = name.startswith("?")
            name = name.lstrip("?")
            line = None
            if name in source.defined:
                place = dest_of(s.module, name)
                if place != new:
                    line = f"from {place} import {new_name(s.module, name)}"
            elif name in source.imports:
                entry = source.imports[name]
                if entry[0] == "module":
                    if entry[1].startswith(PACKAGE):
                        target = dest_of(entry[1])
                        line = f"import {target}" + (f" as {entry[2]}" if entry[2] else "")
                    else:
                        line = f"import {entry[1]}" + (f" as {entry[2]}" if entry[2] else "")
                        for key, other in source.imports.items():
                            if key.startswith("dotted " + name + "."):
                                if not quoted:
                                    statements[f"import {other[1]}"] = None
                elif entry[1] and (entry[1] + ".").startswith(PACKAGE + "."):
                    line = rewritten(entry[1], entry[2], name, new)
                else:
                    line = f"from {entry[1]} import {entry[2]}" + (f" as {name}" if name != entry[2] else "")
                if line and name in names_here and names_here[name].module != s.module and line:
                    PROBLEMS.append(f"{new}: {s.module} imports {name}, which {names_here[name].module} defines")
                if line and aliases.setdefault(name, line) != line:
                    PROBLEMS.append(f"{new}: {name} is imported in two ways: {aliases[name]} / {line}")
            elif not quoted and name in names_here and names_here[name].module != s.module and hasattr(builtins, name):
                PROBLEMS.append(f"{new}: {s.module} uses the builtin {name}, which {names_here[name].module} defines")
            if line:
                if quoted and name not in source.typing_only and name not in source.imports and name not in source.defined:
                    continue
                (typing if name in source.typing_only or quoted and False else statements)[line] = None
        texts.append(bare_files(rewrite_nested(rename_in(s.text, s.module), new, source), s.module, new))
    for line in list(typing):
        if line in statements:
            del typing[line]
    doc = make_doc(new, olds)
    parts = []
    if doc:
        parts.append(f'"""{doc}"""' if "\\" not in doc else f'r"""{doc}"""')
    if any(MODULES[o].future for o in olds):
        parts.append("from __future__ import annotations")
    if typing and not any("TYPE_CHECKING" in l for l in statements):
        statements["from typing import TYPE_CHECKING"] = None
    if statements:
        parts.append("\n".join(line + REMARKS.get(line, "") for line in sorted(statements)))
    if typing:
        parts.append("if TYPE_CHECKING:\n" + "\n".join("    " + l for l in typing))
    if len(olds) == 1 and MODULES[olds[0]].exported is not None and len(kept) == len([s for s in MODULES[olds[0]].segments if s.kind != "all"]):
        names = [n for n in MODULES[olds[0]].exported if n in MODULES[olds[0]].defined]
        if names:
            parts.append("__all__ = [" + ", ".join(f'"{n}"' for n in names) + "]")
    body = "\n".join(texts).strip("\n")
    out = "\n\n".join(parts) + "\n\n\n" + body + "\n"
    return out, deps


def same(a: Segment, b: Segment) -> bool:
    return ast.dump(a.node) == ast.dump(b.node)


def needed_at_import(node: ast.AST) -> set[str]:
    """Names that must exist when this statement runs: not what functions use when they are called, nor annotations."""
    found: set[str] = set()
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
        for part in [*getattr(node, "decorator_list", []), *node.args.defaults, *filter(None, node.args.kw_defaults)]:
            found |= needed_at_import(part)
        return found
    if isinstance(node, ast.AnnAssign):
        return needed_at_import(node.value) if node.value is not None else set()
    if isinstance(node, ast.Name):
        return {node.id}
    for child in ast.iter_child_nodes(node):
        found |= needed_at_import(child)
    return found


def order_sources(new: str, olds: list[str]) -> list[str]:
    """Sources after those that they need while they are imported, otherwise as the table has them."""
    need: dict[str, set[str]] = {o: set() for o in olds}
    for o in olds:
        module = MODULES[o]
        eager = set().union(*(needed_at_import(s.node) for s in module.segments)) if module.segments else set()
        if any("BaseModel" in ast.unparse(s.node) or "Section" in ast.unparse(s.node) for s in module.segments if isinstance(s.node, ast.ClassDef)) or not module.future:
            eager = set().union(*(loaded(s.node) for s in module.segments))
        for name in eager:
            entry = module.imports.get(name)
            if entry and entry[0] == "from" and (entry[1] or "").startswith(PACKAGE):
                found = resolve(entry[1], entry[2])
                if found and found[0] in olds and found[0] != o:
                    need[o].add(found[0])
    out: list[str] = []
    def visit(o: str, trail: tuple) -> None:
        if o in out or o in trail:
            return
        for n in olds:
            if n in need[o]:
                visit(n, (*trail, o))
        out.append(o)
    for o in olds:
        visit(o, ())
    return out


def bare_files(text: str, old: str, new: str) -> str:
    """`x.py` as modules of one folder name each other."""
    folder = old.rpartition(".")[0]
    def swap(match: re.Match) -> str:
        other = f"{folder}.{match.group(1)}"
        if other not in MODULES or DEST.get(other, other) == other:
            return match.group(0)
        target = DEST[other]
        if target.rpartition(".")[0] == new.rpartition(".")[0]:
            return target.rpartition(".")[2] + ".py"
        return target.removeprefix(PACKAGE + ".").replace(".", "/") + ".py"
    return re.sub(r"(?<![\w/.])(\w+)\.py\b", swap, text)


def make_doc(new: str, olds: list[str]) -> str:
    primary = MODULES[olds[0]].doc
    if len(olds) == 1 and new not in DOCS:
        return bare_files(primary, olds[0], new)
    head, _, rest = primary.partition("\n\n")
    head = DOCS.get(new, " ".join(head.split("\n")))
    paragraphs = [bare_files(p, olds[0], new) for p in rest.split("\n\n") if p.strip() and DEST.get(olds[0]) == new]
    for old in olds[1:]:
        if DEST.get(old, old) != new:
            continue
        _, _, more = MODULES[old].doc.partition("\n\n")
        paragraphs += [bare_files(p, old, new) for p in more.split("\n\n") if p.strip()]
    letters: dict[str, str] = {}
    kept = []
    for p in paragraphs:
        match = re.match(r"Shape letters:\s*(.*)", p, re.S)
        if match:
            whole = " ".join(match.group(1).split())
            sentence, _, after = whole.partition(". ")
            for item in sentence.rstrip(".").split(","):
                key = item.strip().split(" ")[0]
                letters.setdefault(key, item.strip())
            if after:
                kept.append(after)
        elif p not in kept:
            kept.append(p)
    if letters:
        import textwrap
        kept.insert(0, "\n".join(textwrap.wrap("Shape letters: " + ", ".join(letters.values()) + ".", 118)))
    text = head
    if kept:
        text += "\n\n" + "\n\n".join(kept) + "\n"
    return text


def dest_graph() -> dict[str, set[str]]:
    graph: dict[str, set[str]] = collections.defaultdict(set)
    why: dict[tuple[str, str], list[str]] = collections.defaultdict(list)
    for old, module in MODULES.items():
        for s in module.segments:
            here = dest_of(old, s.names[0]) if s.names else dest_of(old)
            graph[here]
            for name in loaded(s.node):
                bare = name.lstrip("?")
                if bare in module.typing_only:
                    continue
                if bare in module.defined:
                    there = dest_of(old, bare)
                elif bare in module.imports and module.imports[bare][0] == "from" and (module.imports[bare][1] or "").startswith(PACKAGE):
                    found = resolve(module.imports[bare][1], module.imports[bare][2])
                    if not found:
                        continue
                    there = dest_of(found[0], found[1] or None)
                else:
                    continue
                if there != here and not name.startswith("?"):
                    graph[here].add(there)
                    why[here, there].append(f"{old.removeprefix('frameloom.')}:{(s.names or ['?'])[0]} uses {bare}")
            for n in ast.walk(s.node):
                if isinstance(n, ast.ImportFrom) and n.module and (n.module + ".").startswith(PACKAGE + "."):
                    for a in n.names:
                        found = resolve(n.module, a.name)
                        if found:
                            there = dest_of(found[0], found[1] or None)
                            if there != here:
                                graph[here].add(there)
                                why[here, there].append(f"{old.removeprefix('frameloom.')}:{(s.names or ['?'])[0]} imports {a.name}")
    graph_why.update(why)
    return graph


graph_why: dict = {}
ORDER = [["core"], ["weights", "distributed"], ["models", "diffusion"], ["checkpoint"], ["config"], ["data"], ["builders"], ["sampling"],
         ["interop", "evaluate"], ["training"], ["planner"], ["demo", "studio"], ["cli"]]
LEVEL = {n: i for i, row in enumerate(ORDER) for n in row}


def components(graph):
    index, low, stack, on, out, counter = {}, {}, [], set(), [], [0]
    sys.setrecursionlimit(9999)
    def go(v):
        index[v] = low[v] = counter[0]; counter[0] += 1; stack.append(v); on.add(v)
        for w in graph.get(v, ()):
            if w not in index:
                go(w); low[v] = min(low[v], low[w])
            elif w in on:
                low[v] = min(low[v], index[w])
        if low[v] == index[v]:
            c = []
            while True:
                w = stack.pop(); on.discard(w); c.append(w)
                if w == v: break
            out.append(c)
    for v in list(graph):
        if v not in index: go(v)
    return [c for c in out if len(c) > 1]


def plan() -> None:
    graph = dest_graph()
    bad = collections.defaultdict(list)
    for here, theres in graph.items():
        for there in theres:
            a, b = (here.split(".") + [""])[1], (there.split(".") + [""])[1]
            if a in LEVEL and b in LEVEL and a != b and LEVEL[b] >= LEVEL[a]:
                bad[a, b].append((here, there))
            elif a and a not in LEVEL and a not in ("recipes", "__main__"):
                bad["unplaced", a].append((here, there))
    for key, rows in sorted(bad.items()):
        print("==", *key, len(rows))
        for here, there in sorted(set(rows))[:60]:
            print("   ", here.removeprefix("frameloom."), "->", there.removeprefix("frameloom."), " | ", "; ".join(dict.fromkeys(graph_why[here, there]))[:230])
    for c in components(graph):
        print("CYCLE", [x.removeprefix("frameloom.") for x in c])
        for a in c:
            for b in graph[a] & set(c):
                print("      ", a.removeprefix("frameloom."), "->", b.removeprefix("frameloom."), "|", "; ".join(graph_why[a, b])[:160])
    sizes = collections.Counter()
    for old, module in MODULES.items():
        for s in module.segments:
            sizes[dest_of(old, s.names[0]) if s.names else dest_of(old)] += s.text.count("\n") + 1
    folders = collections.Counter()
    for new in sizes:
        folders[new.rpartition(".")[0]] += 1
    print(len(sizes), "modules with code,", len(folders), "folders")
    for name, count in sorted(folders.items()):
        print(f"  {name.removeprefix('frameloom.')}: {count}" + ("  <<<" if count > 13 else ""))
    print("large:", [(n.removeprefix("frameloom."), c) for n, c in sizes.most_common(25)])
    print("small:", [(n.removeprefix("frameloom."), c) for n, c in sorted(sizes.items(), key=lambda x: x[1]) if c < 60])


def rewrite_strings(text: str) -> str:
    def swap(match: re.Match) -> str:
        whole = match.group(0)
        parts = whole.split(".")
        for length in range(len(parts), 1, -1):
            module = ".".join(parts[:length])
            if module in MODULES:
                rest = parts[length:]
                if not rest:
                    return dest_of(module)
                found = module if rest[0] in MODULES[module].defined else None
                target = dest_of(module, rest[0]) if found else dest_of(module)
                return ".".join([target, *rest])
        return whole
    def swap_colon(match: re.Match) -> str:
        module, name = match.group(1), match.group(2)
        if module in MODULES:
            found = resolve(module, name)
            return f"{dest_of(*found) if found and found[1] else dest_of(module)}:{name}"
        return match.group(0)
    both = rf"\b({PACKAGE}(?:\.\w+)+):([A-Za-z_]\w*)|\b{PACKAGE}(?:\.[A-Za-z_]\w*)+"
    return re.sub(both, lambda m: swap_colon(m) if m.group(2) else swap(m), text)


def rewrite_from(match: re.Match) -> str:
    module, names = match.group(1), [n.strip() for n in match.group(2).split(",")]
    if module not in MODULES:
        return match.group(0)
    places: dict[str, list[str]] = {}
    for n in names:
        line = rewritten(module, n, n, None)
        found = re.fullmatch(r"from (\S+) import (.*)", line or "")
        if not found:
            PROBLEMS.append(f"string: {match.group(0)}")
            return match.group(0)
        places.setdefault(found.group(1), []).append(found.group(2))
    return "; ".join(f"from {p} import {', '.join(n)}" for p, n in places.items())


def rewrite_tokens(text: str) -> str:
    """Names of modules in string literals and comments of a Python file."""
    import io, tokenize
    lines = text.split("\n")
    edits = []
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type in (tokenize.STRING, tokenize.COMMENT) and PACKAGE + "." in token.string or (token.type in (tokenize.STRING, tokenize.COMMENT) and ".py" in token.string):
            fresh = re.sub(rf"from ({PACKAGE}(?:\.\w+)*) import ((?:\w+)(?:, \w+)*)", lambda m: "\0" + rewrite_from(m).replace(PACKAGE + ".", "\1"), token.string)
            fresh = rewrite_paths(rewrite_strings(fresh)).replace("\0", "").replace("\1", PACKAGE + ".")
            if fresh != token.string:
                edits.append((token.start, token.end, fresh))
    for (r0, c0), (r1, c1), fresh in reversed(edits):
        before, after = lines[r0 - 1][:c0], lines[r1 - 1][c1:]
        lines[r0 - 1 : r1] = (before + fresh + after).split("\n")
    return "\n".join(lines)


def new_path(module: str) -> Path:
    return ROOT / (module.replace(".", "/") + ".py")


def apply() -> None:
    outputs = {new: build(new)[0] for new in SOURCES}
    others: dict[Path, str] = {}
    for module in MODULES.values():
        if module.name not in DEST and not any(m == module.name for m, _ in SYMBOL):
            others[module.path] = rewrite_nested(module.text, module.name, module)
    for path in OTHERS:
        others[path] = rewrite_nested(path.read_text(), None, None)
    if PROBLEMS:
        print("\n".join(sorted(set(PROBLEMS))))
        if "--force" not in sys.argv:
            raise SystemExit(f"{len(set(PROBLEMS))} problems; nothing written")
    leftovers = [m for (m, _) in SYMBOL if m not in DEST]
    for m in sorted(set(leftovers)):
        if m not in SOURCES:
            SOURCES[m] = [m]; DEST[m] = m
            outputs[m] = build(m)[0]
    written = set()
    moved = {}
    for new, text in outputs.items():
        path = new_path(new)
        primary = MODULES[SOURCES[new][0]].path
        path.parent.mkdir(parents=True, exist_ok=True)
        if path != primary and not path.exists() and primary not in moved and DEST.get(SOURCES[new][0]) == new:
            subprocess.run(["git", "mv", "-k", str(primary), str(path)], check=True)
            moved[primary] = path
        path.write_text(rewrite_tokens(text))
        written.add(path)
        for folder in path.relative_to(ROOT).parents:
            if folder.parts and folder.parts[0] == PACKAGE and not (ROOT / folder / "__init__.py").exists():
                (ROOT / folder / "__init__.py").write_text("")
    for old in DEST:
        path = MODULES[old].path
        if path not in written and path.exists():
            if path.name == "__init__.py":
                path.write_text("")
            else:
                path.unlink()
    for path, text in others.items():
        if path.exists():
            text = rewrite_tokens(text)
            path.write_text(text)
    for pattern in ("*.toml", "Makefile", "docs/**/*.md", "README.md", "CONTRIBUTING.md", "frameloom/**/*.yaml", "frameloom/**/*.md", "tests/**/*.txt"):
        for path in ROOT.glob(pattern):
            if path.name == "CHANGELOG.md":
                continue
            text = path.read_text()
            fresh = rewrite_paths(rewrite_strings(text))
            if fresh != text:
                path.write_text(fresh)


def rewrite_paths(text: str) -> str:
    table = {}
    for old, new in DEST.items():
        if old == new:
            continue
        a = str(MODULES[old].path.relative_to(ROOT))
        b = new.replace(".", "/") + ".py"
        table[a] = b
        table[a.removeprefix(PACKAGE + "/")] = b.removeprefix(PACKAGE + "/")
    keys = sorted((k for k in table if "/" in k), key=len, reverse=True)
    if not keys:
        return text
    return re.sub(r"(?<![\w/])(" + "|".join(map(re.escape, keys)) + r")\b", lambda m: table[m.group(1)], text)


def main() -> None:
    for path in sorted((ROOT / PACKAGE).rglob("*.py")):
        module = read_module(path)
        MODULES[module.name] = module
    read_table(Path(sys.argv[1]))
    for new in list(SOURCES):
        if new in MODULES and new not in DEST and new not in SOURCES[new]:
            # The new module exists already and keeps what it has.
            SOURCES[new].insert(0, new)
            DEST[new] = new
    if "--plan" in sys.argv:
        if PROBLEMS:
            print("\n".join(PROBLEMS))
        plan()
    elif "--apply" in sys.argv:
        apply()


if __name__ == "__main__":
    main()
