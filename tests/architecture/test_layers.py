"""Imports go down the rooms only, rooms on one row do not meet, and nobody dodges a cycle with an import inside a function."""

import ast
from collections.abc import Iterator

import pytest

# The rows of the design, lowest first. A room that is not here has no place yet: give it one before it is built.
ROWS = (
    ("core",),
    ("comm", "schedules", "telemetry"),
    ("data", "models", "randomness", "compression", "optim", "costs"),
    ("parallel", "launch", "elastic", "checkpoint", "sparsity"),
    ("pipeline", "paramserver", "replicas", "planner", "doctor"),
    ("engine",),
    ("trainer", "library"),
    ("serverrun", "controller", "serve"),
    ("dashboard", "verify", "tuning", "testing"),
    ("cli",),
    # `python -m shoal`: a door to the command line, no room of its own.
    ("__main__",),
)
ROW_OF = {room: row for row, rooms in enumerate(ROWS) for room in rooms}


def imported_names(node: ast.AST, package: str) -> list[str]:
    """The modules that an import statement, or a call of ``import_module`` with a written name, asks for."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom):
        base = node.module or ""
        if node.level:
            parts = package.split(".")
            base = ".".join([*parts[: len(parts) - node.level + 1], *([node.module] if node.module else [])])
        return [f"{base}.{alias.name}" for alias in node.names] if base == "shoal" else [base]
    if isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
        function = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        if function in ("import_module", "__import__") and isinstance(node.args[0].value, str):
            return [node.args[0].value]
    return []


def ours(node: ast.AST, package: str) -> list[str]:
    return [name for name in imported_names(node, package) if name == "shoal" or name.startswith("shoal.")]


def layer_problems(module) -> Iterator[str]:
    for node in ast.walk(module.tree):
        for name in ours(node, module.package):
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


def hidden_import_problems(module) -> Iterator[str]:
    if module.room == "cli":
        return
    for function in ast.walk(module.tree):
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            for node in ast.walk(function):
                for name in ours(node, module.package):
                    yield f"{module.path}:{node.lineno}: imports {name} inside a function"


def test_every_room_has_a_row(modules):
    rooms = {module.room for module in modules if module.room is not None}
    assert rooms <= set(ROW_OF), f"rooms without a row: {sorted(rooms - set(ROW_OF))}"


def test_imports_go_down(modules):
    assert [problem for module in modules for problem in layer_problems(module)] == []


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
