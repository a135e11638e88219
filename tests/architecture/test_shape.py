"""Budgets and names: files and functions stay small, every module says what it is, and none is named after nothing."""

import ast
import re
from collections.abc import Iterator

import pytest

FILE_LINES = 500
FUNCTION_LINES = 80
EXAMPLE_LINES = 80
NO_SUBJECT = re.compile(r"(^|_)(utils?|helpers?|common|base|misc)(_|$)")


def budget_problems(module) -> Iterator[str]:
    num_lines = len(module.text.splitlines())
    if num_lines > FILE_LINES:
        yield f"{module.path}: {num_lines} lines, the cap is {FILE_LINES}"
    for node in ast.walk(module.tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            length = node.end_lineno - node.lineno + 1
            if length > FUNCTION_LINES:
                yield f"{module.path}:{node.lineno}: {node.name} has {length} lines, the cap is {FUNCTION_LINES}"


def word_problems(module) -> Iterator[str]:
    if not ast.get_docstring(module.tree):
        yield f"{module.path}: has no docstring that says what it is and why it exists"
    # The package itself lists its public names, found when they are first used; a room's has nothing to add to its files.
    if module.path.name == "__init__.py" and module.name != "shoal" and len(module.tree.body) > 1:
        yield f"{module.path}: holds more than a docstring"
    for part in module.name.split("."):
        if NO_SUBJECT.search(part):
            yield f"{module.path}: {part!r} says nothing of what is in it"


def order_problems(module) -> Iterator[str]:
    for node in module.tree.body[:-1]:
        if isinstance(node, ast.If) and "__name__" in ast.unparse(node.test):
            yield f"{module.path}:{node.lineno}: runs before the rest of the module is defined"


def test_files_and_functions_are_small(modules):
    assert [problem for module in modules for problem in budget_problems(module)] == []


def test_modules_say_what_they_are(modules):
    assert [problem for module in modules for problem in word_problems(module)] == []


def test_a_program_begins_when_all_of_its_module_is_defined(modules):
    """What stands below the ``__main__`` line is missing in an interpreter of its own, and there only: a fork has imported it."""
    assert [problem for module in modules for problem in order_problems(module)] == []


def test_every_folder_of_the_source_is_a_package(root):
    folders = [path for path in (root / "src" / "shoal").rglob("*") if path.is_dir() and path.name != "__pycache__"]
    # A folder that only held compiled files of a deleted room is not source.
    assert [str(path) for path in folders if any(path.glob("*.py")) and not (path / "__init__.py").exists()] == []


def test_examples_are_short(root):
    lengths = {str(path): len(path.read_text().splitlines()) for path in (root / "examples").glob("*.py")}
    assert {path: length for path, length in lengths.items() if length > EXAMPLE_LINES} == {}


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("shoal.core.long", '"""Long."""\n' + "x = 1\n" * FILE_LINES),
        ("shoal.core.long", '"""Long."""\ndef f():\n' + "    x = 1\n" * FUNCTION_LINES),
        ("shoal.core.long", '"""Long."""\nclass A:\n    async def f(self):\n' + "        x = 1\n" * FUNCTION_LINES),
    ],
)
def test_a_budget_overrun_is_refused(plant, name, text):
    assert len(list(budget_problems(plant(name, text)))) == 1


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("shoal.core.plan", "x = 1"),
        ("shoal.core.plan", '""""""'),
        ("shoal.core.utils", '"""Odds and ends."""'),
        ("shoal.core.text_helpers", '"""Odds and ends."""'),
        ("shoal.common.plan", '"""Odds and ends."""'),
        ("shoal.core.base", '"""Odds and ends."""'),
        ("shoal.core.__init__", '"""Core."""\nfrom shoal.core.plan import Plan'),
    ],
)
def test_a_nameless_module_is_refused(plant, name, text):
    assert len(list(word_problems(plant(name, text)))) == 1


def test_a_program_that_begins_too_early_is_refused(plant):
    text = '"""Runs."""\nif __name__ == "__main__":\n    main()\ndef later():\n    pass'
    assert len(list(order_problems(plant("shoal.core.run", text)))) == 1


def test_names_that_only_contain_such_a_word_are_fine(plant):
    assert list(word_problems(plant("shoal.core.baseline", '"""Baselines."""'))) == []
