"""Imports go down the rooms only, rooms on one row do not meet, and nobody dodges a cycle with an import inside a function."""

import ast
from collections.abc import Iterator, Mapping

import pytest

from architecture.rooms import ROW_OF, find_cycle, imported_names, imports_of_ours, place_in_room

LEVEL_FILES = 20


def layer_problems(module) -> Iterator[str]:
    for node, name in imports_of_ours(module):
        where = f"{module.path}:{node.lineno}: {module.name} imports {name}"
        parts = name.split(".")
        if len(parts) == 1:
            yield f"{where}, the package's own front door"
        elif module.room is None:
            yield f"{where}, but the package itself imports nothing"
        elif parts[1] not in ROW_OF:
            yield f"{where}, a room that has no row"
        elif parts[1] != module.room and ROW_OF[parts[1]] == ROW_OF[module.room]:
            yield f"{where}, a room on its own row"
        elif ROW_OF[parts[1]] > ROW_OF[module.room]:
            yield f"{where}, which is above it"


def cycles_in_rooms(modules) -> Iterator[str]:
    """Inside a room, sub-folders and the files beside them stand in an order too: no way of imports leads back."""
    edges: dict[str, set[str]] = {}
    for module in modules:
        if module.room is not None:
            mine = edges.setdefault(place_in_room(module.name), set())
            names = {
                place_in_room(name) for _, name in imports_of_ours(module) if name.startswith(f"shoal.{module.room}.")
            }
            mine |= names - {place_in_room(module.name)}
    if cycle := find_cycle(edges):
        yield f"imports go round: {' -> '.join([*cycle, cycle[0]])}"


def crowded_levels(modules) -> Iterator[str]:
    files: dict[str, int] = {}
    for module in modules:
        if module.path.name != "__init__.py":
            files[module.package] = files.get(module.package, 0) + 1
    for package, count in files.items():
        if count > LEVEL_FILES:
            yield f"{package} has {count} files on one level; sort them into sub-folders by subject (at most {LEVEL_FILES})"


def hidden_import_problems(module) -> Iterator[str]:
    if module.room == "cli":
        return
    for function in ast.walk(module.tree):
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            for node in ast.walk(function):
                for name in imported_names(node, module.package):
                    if name == "shoal" or name.startswith("shoal."):
                        yield f"{module.path}:{node.lineno}: imports {name} inside a function"


def missing_imports(script, names: Mapping[str, set[str]]) -> Iterator[str]:
    """What a script outside the package takes from modules of ours that do not have it."""
    for node in ast.walk(script.tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "shoal":
            for alias in node.names:
                is_module = f"{node.module}.{alias.name}" in names
                if not is_module and alias.name not in names.get(node.module, set()):
                    yield f"{script.path}:{node.lineno}: {node.module} has no {alias.name}"


def names_of(module) -> set[str]:
    """Everything that can be imported from a module of ours, and where a module makes names when it is asked, what it lists."""
    found = set()
    for node in ast.walk(module.tree):
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            found.add(node.name)
        if isinstance(node, ast.Import | ast.ImportFrom):
            found |= {(alias.asname or alias.name).split(".")[0] for alias in node.names}
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and module.name == "shoal":
            found.add(node.value)
    return found


def test_what_benchmarks_and_examples_import_is_there(modules, scripts, plant):
    names = {module.name: names_of(module) for module in modules}
    assert [problem for script in scripts for problem in missing_imports(script, names)] == []
    wrong = "from shoal import Plan, Missing\nfrom shoal.core import gone\nfrom shoal.core.plan import Plan, Missing"
    assert len(list(missing_imports(plant("examples.x", wrong), names))) == 3


def test_every_room_has_a_row(modules):
    rooms = {module.room for module in modules if module.room is not None}
    assert rooms <= set(ROW_OF), f"rooms without a row: {sorted(rooms - set(ROW_OF))}"


def test_imports_go_down(modules):
    assert [problem for module in modules for problem in layer_problems(module)] == []


def test_imports_go_down_inside_rooms(modules):
    assert list(cycles_in_rooms(modules)) == []


def test_no_level_of_a_room_is_crowded(modules):
    assert list(crowded_levels(modules)) == []


def test_a_cycle_between_sub_rooms_is_refused(plant):
    down = [
        plant("shoal.planner.search.search.best", "from shoal.planner.pricing.memory import fit"),
        plant("shoal.planner.pricing.memory", "from shoal.planner.pricing.job import Job"),
    ]
    assert list(cycles_in_rooms(down)) == []
    # No two files make a cycle here, and yet the two folders need each other.
    for text in ("from shoal.planner.search.search.best import Best", "from shoal.planner.search.search import best"):
        assert len(list(cycles_in_rooms([*down, plant("shoal.planner.pricing.time", text)]))) == 1
    top = plant("shoal.planner.pricing.job", "from shoal.planner import search")
    assert len(list(cycles_in_rooms([*down, top]))) == 1


def test_a_crowded_level_is_refused(plant):
    files = [plant(f"shoal.planner.pricing.file{number}", '"""A file."""') for number in range(LEVEL_FILES)]
    assert list(crowded_levels(files)) == []
    assert len(list(crowded_levels([*files, plant("shoal.planner.pricing.more", '"""A file."""')]))) == 1


def test_no_import_of_ours_inside_a_function(modules):
    assert [problem for module in modules for problem in hidden_import_problems(module)] == []


def test_schedules_know_no_torch(modules):
    found = [
        module.name
        for module in modules
        for node in ast.walk(module.tree)
        for name in imported_names(node, module.package)
        if module.room == "schedules" and name.split(".")[0] == "torch"
    ]
    assert found == []


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("shoal.core.x", "from shoal.comm.world import World"),
        ("shoal.core.x", "import shoal.cli.main"),
        ("shoal.comm.x", "from shoal.telemetry import board"),
        ("shoal.checkpoint.x", "from shoal import elastic"),
        ("shoal.checkpoint.x", "from ..elastic import supervisor"),
        ("shoal.data.x", "from .. import models"),
        ("shoal.trainer.x", "import shoal"),
        ("shoal.trainer.x", "from shoal import nowhere"),
        ("shoal.data.x", "import importlib\nimportlib.import_module('shoal.trainer.loop')"),
        (
            "shoal.models.x",
            "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from shoal.data.spec import DataSpec",
        ),
        ("shoal.elastic.x", "def f():\n    from shoal.trainer import loop"),
    ],
)
def test_a_wrong_import_is_refused(plant, name, text):
    assert len(list(layer_problems(plant(name, text)))) == 1


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("shoal.trainer.x", "from shoal.core.errors import RunError\nfrom shoal.parallel.data import replicate"),
        ("shoal.trainer.x", "from .state import State"),
        ("shoal.pipeline.x", "from shoal.checkpoint import reader\nimport torch, shoaling"),
        ("shoal.cli.main", "def f():\n    from shoal.trainer import loop"),
    ],
)
def test_a_right_import_is_not(plant, name, text):
    module = plant(name, text)
    assert [*layer_problems(module), *hidden_import_problems(module)] == []


@pytest.mark.parametrize(
    "text",
    ["def f():\n    from shoal.core import plan", "class A:\n    async def f(self):\n        import shoal.core.plan"],
)
def test_a_hidden_import_is_refused(plant, text):
    assert list(hidden_import_problems(plant("shoal.trainer.x", text)))
