"""Reads the source as trees, so that `test_house.py` can hold it to the laws of the house. Imports nothing of partita.

A *side* is where a module stands: an area of the package (facts, plan, model, ...), with the strategies split into the
doors that predict ("strategies") and those that touch torch ("doors").
"""

from __future__ import annotations

import ast
import re
import subprocess
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SOURCE = ROOT / "src"

LONGEST_FILE = 500
LONGEST_FUNCTION = 60
# Slow to import, or not there at all for who only plans.
HEAVY = ("torch", "numpy", "transformers", "tokenizers", "safetensors", "huggingface_hub", "pyarrow", "gguf", "psutil")
HEAVY += ("plotly",)

# Who may import whom; every side may import itself. A side that is not here has no law yet: give it one.
BELOW: Mapping[str, frozenset[str]] = {
    "facts": frozenset(),
    "strategies": frozenset({"facts"}),
    "dispatch": frozenset({"facts"}),
    "plan": frozenset({"facts", "strategies", "dispatch"}),
    "simulate": frozenset({"facts", "strategies", "dispatch", "plan"}),
    "report": frozenset({"facts", "strategies", "dispatch", "plan", "simulate"}),
    "model": frozenset({"facts"}),
    "observe": frozenset({"facts"}),
    "doors": frozenset({"facts", "strategies", "model", "observe"}),
    "train": frozenset({"facts", "strategies", "dispatch", "plan", "simulate", "model", "observe", "doors"}),
    "serve": frozenset({"facts", "strategies", "dispatch", "plan", "simulate", "model", "observe", "doors"}),
    "prove": frozenset(
        {"facts", "strategies", "dispatch", "plan", "simulate", "report", "model", "observe", "doors", "train", "serve"}
    ),
}
PURE = frozenset({"facts", "strategies", "dispatch", "plan", "simulate", "report"})


@dataclass(frozen=True)
class Import:
    """`target` is a module name as far as it can be told: `from partita.facts import mesh` gives partita.facts.mesh."""

    target: str
    line: int
    only_types: bool  # under TYPE_CHECKING


@dataclass(frozen=True)
class Module:
    """One file of the package, by its dotted name."""

    name: str
    text: str

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.text)

    @cached_property
    def imports(self) -> list[Import]:
        return list(_imports(self.tree, self.name, False))

    @property
    def side(self) -> str:
        """The module's area; "root" is the package's own __init__, "cli" everything that stands on top."""
        parts = self.name.split(".")
        if len(parts) == 1:
            return "root"
        if parts[1] in ("cli", "commands") or parts[1].startswith("_"):
            return "cli"
        if parts[1] == "strategies" and self._touches_torch():
            return "doors"
        return parts[1]

    @property
    def room(self) -> str | None:
        """The strategy's name for a module inside a room's folder."""
        parts = self.name.split(".")
        return parts[2] if parts[1:2] == ["strategies"] and len(parts) > 3 else None

    def _touches_torch(self) -> bool:
        """A room's story and its predicting door are pure by law, whatever they import."""
        last = self.name.split(".")[-1]
        if last in ("predict", "order", "strategies") or "schedules" in self.name.split("."):
            return False
        return last in ("apply", "parallelize") or any(_top(each.target) == "torch" for each in self.imports)


def modules(folder: Path = SOURCE) -> dict[str, Module]:
    """Every module below `folder` by name."""
    found = {}
    for path in sorted(folder.rglob("*.py")):
        parts = list(path.relative_to(folder).with_suffix("").parts)
        if parts[-1] == "__init__":
            parts.pop()
        name = ".".join(parts)
        found[name] = Module(name, path.read_text())
    return found


def _top(name: str) -> str:
    return name.split(".")[0]


def _imports(node: ast.AST, name: str, only_types: bool) -> Iterator[Import]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import):
            for alias in child.names:
                yield Import(alias.name, child.lineno, only_types)
        elif isinstance(child, ast.ImportFrom):
            base = child.module or ""
            if child.level:
                base = ".".join([*name.split(".")[: -child.level], *filter(None, [child.module])])
            for alias in child.names:
                yield Import(f"{base}.{alias.name}", child.lineno, only_types)
        elif isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
            yield from _imports(ast.Module(child.body, []), name, True)
            yield from _imports(ast.Module(child.orelse, []), name, only_types)
        else:
            yield from _imports(child, name, only_types)


def resolve(target: str, known: Mapping[str, Module]) -> Module | None:
    """The module of the package that an import means: partita.facts.mesh.Mesh is in partita.facts.mesh."""
    while target:
        if target in known:
            return known[target]
        target = target.rpartition(".")[0]
    return None


def upward(known: Mapping[str, Module]) -> list[str]:
    """Imports that the house does not allow, and sides that have no law."""
    wrong = []
    for module in known.values():
        if module.side not in BELOW and module.side not in ("cli", "root"):
            wrong.append(
                f"{module.name}: nothing says what {module.side} may import; add it to BELOW in tests/house.py"
            )
            continue
        for each in module.imports:
            target = resolve(each.target, known)
            if target is None or target.side in ("root", module.side) or module.side == "cli":
                continue
            if target.side not in BELOW.get(module.side, frozenset()):
                wrong.append(f"{module.name}:{each.line} ({module.side}) imports {target.name} ({target.side})")
    return wrong


def between_rooms(known: Mapping[str, Module]) -> list[str]:
    """Imports of one strategy's room by another's, and of what sorts the rooms by a room that predicts."""
    wrong = []
    for module in known.values():
        for each in module.imports:
            target = resolve(each.target, known)
            if target and module.room and target.room and module.room != target.room:
                wrong.append(f"{module.name}:{each.line} imports {target.name}")
    return wrong


def heavy_in_pure(known: Mapping[str, Module]) -> list[str]:
    """Imports of torch anywhere in the pure sides, inside functions too. The others may load late, torch never."""
    return [
        f"{module.name}:{each.line} imports {each.target}"
        for module in known.values()
        if module.side in PURE
        for each in module.imports
        if _top(each.target) == "torch"
    ]


def circles(known: Mapping[str, Module]) -> list[list[str]]:
    """Circles among modules, counting what is imported when a module is loaded; each is given once."""
    arrows = {name: _loaded_with(module, known) for name, module in known.items()}
    done: set[str] = set()
    found: list[list[str]] = []

    def visit(name: str, path: list[str]) -> None:
        if name in path:
            found.append([*path[path.index(name) :], name])
            return
        if name in done:
            return
        for target in sorted(arrows[name]):
            visit(target, [*path, name])
        done.add(name)

    for name in arrows:
        visit(name, [])
    return found


def _loaded_with(module: Module, known: Mapping[str, Module]) -> set[str]:
    top = ast.Module([n for n in module.tree.body if not isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)], [])
    targets = (resolve(i.target, known) for i in _imports(top, module.name, False) if not i.only_types)
    return {target.name for target in targets if target and target.name != module.name}


def long_functions(name: str, tree: ast.Module) -> list[str]:
    """Functions of more than LONGEST_FUNCTION lines, their docstrings not counted."""
    wrong = []
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            lines = _span(node)
            if ast.get_docstring(node) is not None:
                lines -= _span(node.body[0])
            if lines > LONGEST_FUNCTION:
                wrong.append(f"{name}:{node.lineno} {node.name} has {lines} lines")
    return wrong


def _span(node: ast.stmt) -> int:
    return (node.end_lineno or node.lineno) - node.lineno + 1


CHANGERS = frozenset(
    {"append", "extend", "insert", "remove", "pop", "popitem", "clear", "update", "setdefault", "add", "discard"}
    | {"appendleft", "popleft", "sort", "reverse"}
)


def changing_globals(name: str, tree: ast.Module) -> list[str]:
    """State of the whole process: `global`, and names of the module that a function changes in place."""
    names = {
        target.id
        for node in tree.body
        if isinstance(node, ast.Assign | ast.AnnAssign)
        for target in (node.targets if isinstance(node, ast.Assign) else [node.target])
        if isinstance(target, ast.Name)
    }
    wrong = []
    for function in ast.walk(tree):
        if not isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        outer = names - _bound(function)
        for node in ast.walk(function):
            if isinstance(node, ast.Global):
                wrong.append(f"{name}:{node.lineno} global {', '.join(node.names)}")
            elif (changed := _changed(node)) in outer:
                wrong.append(f"{name}:{getattr(node, 'lineno', 0)} changes {changed}")
    return sorted(set(wrong))


def _bound(function: ast.FunctionDef | ast.AsyncFunctionDef) -> set[str]:
    """Names that are the function's own: arguments and whatever it assigns."""
    arguments = {node.arg for node in ast.walk(function) if isinstance(node, ast.arg)}
    stored = {n.id for n in ast.walk(function) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
    return arguments | stored


def _changed(node: ast.AST) -> str | None:
    """The plain name that this node changes in place, if it does."""
    value: ast.expr | None = None
    if isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store | ast.Del):
        value = node.value
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in CHANGERS:
        value = node.func.value
    return value.id if isinstance(value, ast.Name) else None


def tracked() -> list[Path]:
    """Files that git tracks, or where there is no git all text files of the project's folders."""
    try:
        listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
        return [path for name in listed.split("\0") if name and (path := ROOT / name).is_file()]
    except (OSError, subprocess.CalledProcessError):
        folders = ("src", "tests", "docs", "examples", "scripts", "bench")
        inner = [path for folder in folders for path in (ROOT / folder).rglob("*") if path.is_file()]
        return [path for path in [*inner, ROOT / "README.md", ROOT / "Makefile"] if "__pycache__" not in path.parts]


def words_in(text: str, forbidden: Iterable[str]) -> list[str]:
    """`line: word` for every forbidden pattern found."""
    pattern = re.compile("|".join(forbidden))
    found = []
    for number, line in enumerate(text.splitlines(), 1):
        found += [f"{number}: {match.group()}" for match in pattern.finditer(line)]
    return found
