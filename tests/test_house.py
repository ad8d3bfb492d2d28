"""The laws of the house. Each is first shown to catch a planted fault, then held against the whole source."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

from tests import house
from tests.house import Module

# In pieces, so that this file does not break its own law.
FORBIDDEN = [
    "/wo" + r"rk/",
    r"(\.\./|/)sha" + r"red/",
    "sha" + r"red/(design|measured|traces|prototypes)",
    "rehe" + r"arsal",
    "/op" + r"t/(pypi|wheels)",
    "/ro" + r"ot/",
    "/tm" + r"p/brief",
    r"(files\.)?pyth" + r"onhosted\.org",
    r"py" + r"pi\.org",
    r"deb\.deb" + r"ian\.org",
    r"registry\.np" + r"mjs",
    r"\b[Ii]ss" + r"ues? #?[1-9]\b",
]


@pytest.fixture(scope="module")
def known() -> dict[str, Module]:
    return house.modules()


def package(**files: str) -> dict[str, Module]:
    """A package of planted modules: `facts__mesh="..."` is partita.facts.mesh."""
    names = {"partita" + "." * bool(key) + key.replace("__", "."): text for key, text in files.items()}
    return {name: Module(name, text) for name, text in names.items()}


def test_a_planted_arrow_back_is_seen() -> None:
    planted = package(
        facts__mesh="def f():\n    from partita.plan import account",
        plan__account="from partita.facts.mesh import Mesh",
        strategies__ddp__predict="from partita.model.decoder import Decoder",
        strategies__ddp__apply="from partita.model.decoder import Decoder\nfrom partita.train import step",
        model__decoder="import torch\nfrom partita.strategies.ddp import predict",
        observe__record="from ..model import decoder",
        train__step="from partita.plan import account",
        attic__old="",
        cli="from partita.plan import account",
    )
    assert [line.split(" may")[0] for line in house.upward(planted)] == [
        "partita.facts.mesh:2 (facts) imports partita.plan.account (plan)",
        "partita.strategies.ddp.predict:1 (strategies) imports partita.model.decoder (model)",
        "partita.strategies.ddp.apply:2 (doors) imports partita.train.step (train)",
        "partita.model.decoder:2 (model) imports partita.strategies.ddp.predict (strategies)",
        "partita.observe.record:1 (observe) imports partita.model.decoder (model)",
        "partita.attic.old: nothing says what attic",
    ]


def test_imports_run_one_way(known: dict[str, Module]) -> None:
    assert len(known) > 10
    assert house.upward(known) == []


def test_rooms_do_not_read_one_another(known: dict[str, Module]) -> None:
    planted = package(
        strategies__ddp__predict="from partita.strategies.step import predict",
        strategies__step__predict="from partita.strategies.step import sizes\nfrom partita.strategies import order",
        strategies__step__sizes="",
        strategies__order="from partita.strategies.step import predict",
    )
    assert house.between_rooms(planted) == ["partita.strategies.ddp.predict:1 imports partita.strategies.step.predict"]
    assert house.between_rooms(known) == []


def test_no_circles(known: dict[str, Module]) -> None:
    planted = package(facts__a="from partita.facts.b import x", facts__b="from partita.facts import a")
    assert house.circles(planted) == [["partita.facts.a", "partita.facts.b", "partita.facts.a"]]
    assert house.circles(known) == []


def test_the_pure_part_never_names_torch(known: dict[str, Module]) -> None:
    planted = package(
        plan__clock="def f():\n    import torch",
        strategies__ddp__predict="from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from torch import Tensor",
        strategies__ddp__apply="import torch",
        facts__mesh="import torchlike",
    )
    assert house.heavy_in_pure(planted) == [
        "partita.plan.clock:2 imports torch",
        "partita.strategies.ddp.predict:3 imports torch.Tensor",
    ]
    assert house.heavy_in_pure(known) == []


def loads_with_heavy_blocked(names: list[str], folder: Path = house.SOURCE) -> subprocess.CompletedProcess[str]:
    """Imports the modules in a new process in which every heavy package is missing."""
    code = (
        "import importlib, sys\n"
        f"sys.modules.update(dict.fromkeys({house.HEAVY!r}))\n"
        f"sys.path.insert(0, {str(folder)!r})\n"
        "for name in sys.argv[1:]:\n"
        "    importlib.import_module(name)\n"
    )
    return subprocess.run([sys.executable, "-I", "-c", code, *names], capture_output=True, text=True)


def test_the_pure_part_and_the_command_line_load_without_torch(known: dict[str, Module], tmp_path: Path) -> None:
    (tmp_path / "planted.py").write_text("import numpy\n")
    assert loads_with_heavy_blocked(["planted"], tmp_path).returncode == 1
    light = {"partita.cli", "partita.commands.explain"}
    names = [name for name, module in known.items() if module.side in house.PURE or name in light]
    assert {"partita.facts.model", "partita.plan.account", "partita.strategies.order"} <= set(names)
    answer = loads_with_heavy_blocked(names)
    assert answer.returncode == 0, answer.stderr


def python_files() -> list[Path]:
    return [path for path in house.tracked() if path.suffix == ".py"]


def test_files_and_functions_are_short() -> None:
    body = "\n".join(f"    x = {number}" for number in range(60))
    assert house.long_functions("m", ast.parse(f"def f():\n{body}")) == ["m:1 f has 61 lines"]
    assert house.long_functions("m", ast.parse(f'def f():\n    """Two\n    lines."""\n{body[:-11]}')) == []
    files = python_files()
    assert len(files) > 10
    texts = {str(path.relative_to(house.ROOT)): path.read_text() for path in files}
    lengths = {name: len(text.splitlines()) for name, text in texts.items()}
    assert {name: lines for name, lines in lengths.items() if lines > house.LONGEST_FILE} == {}
    assert [line for name, text in texts.items() for line in house.long_functions(name, ast.parse(text))] == []


def test_no_state_of_the_whole_process(known: dict[str, Module]) -> None:
    planted = ast.parse(
        "SEEN = {}\nLIST: list = []\n"
        "def a():\n    global SEEN\n"
        "def b():\n    SEEN['x'] = 1\n    LIST.append(2)\n"
        "def c(SEEN):\n    SEEN['x'] = 1\n    LIST = []\n    LIST.append(2)\n"
    )
    assert house.changing_globals("m", planted) == ["m:4 global SEEN", "m:6 changes SEEN", "m:7 changes LIST"]
    assert [line for name, module in known.items() for line in house.changing_globals(name, module.tree)] == []


def test_files_speak_of_the_project_alone() -> None:
    assert house.words_in("a\nsee /wo" + "rk/main", FORBIDDEN) == ["2: /wo" + "rk/"]
    readable = {".md", ".py", ".toml", ".txt", ".json", ".jsonl", ".csv", ".sh", ""}
    found = {}
    for path in house.tracked():
        name = str(path.relative_to(house.ROOT))
        if path.suffix in readable and not name.startswith("examples/data/"):
            found[name] = house.words_in(path.read_text(encoding="utf-8"), FORBIDDEN)
    assert "README.md" in found
    assert {name: words for name, words in found.items() if words} == {}
