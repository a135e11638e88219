"""A function named in a recipe: found, or refused with the line that is wrong."""

from pathlib import Path

import pytest

from shoal.core.errors import RequestError
from shoal.core.functions import bind_arguments, load_function, takes_argument


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty current folder, with the import path as a console script has it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend("/nowhere")  # Restores sys.path afterwards.
    return tmp_path


def test_a_function_of_the_current_folder_is_found(folder: Path) -> None:
    (folder / "own_found.py").write_text("def build(width):\n    return width + 1\n")
    assert load_function("own_found:build")(2) == 3


@pytest.mark.parametrize("text", ["build", "a.b", "a:", ":f", "a:b:c", "a b:c", "../a:b", "a..b:c"])
def test_another_form_is_refused(text: str) -> None:
    with pytest.raises(RequestError, match=r"is not package\.module:function"):
        load_function(text)


def test_a_missing_module_is_named_with_the_folder(folder: Path) -> None:
    with pytest.raises(RequestError) as raised:
        load_function("own_missing.part:build", key="model.build")
    assert "model.build = 'own_missing.part:build'" in str(raised.value)
    assert "no module 'own_missing'" in str(raised.value)
    assert str(folder) in str(raised.value)


@pytest.mark.parametrize(
    ("name", "text", "line", "message"),
    [
        ("own_import", "x = 1\nimport not_there\n", 2, "No module named 'not_there'"),
        ("own_name", "x = 1\n\ny = undefined\n", 3, "NameError: name 'undefined' is not defined"),
        ("own_syntax", "x = 1\ndef build(:\n", 2, "SyntaxError"),
        ("own_raises", "def f():\n    raise OSError('disk')\nf()\n", 2, "OSError: disk"),
    ],
)
def test_an_error_while_importing_is_told_with_its_line(
    folder: Path, name: str, text: str, line: int, message: str
) -> None:
    (folder / f"{name}.py").write_text(text)
    with pytest.raises(RequestError) as raised:
        load_function(f"{name}:build")
    assert f"{name}.py, line {line}: " in str(raised.value)
    assert message in str(raised.value)
    assert "\n" not in str(raised.value)


def test_a_missing_function_offers_the_nearest(folder: Path) -> None:
    (folder / "own_nearest.py").write_text("def build():\n    pass\nsize = 3\n")
    with pytest.raises(RequestError, match="has no 'biuld'; did you mean 'build'"):
        load_function("own_nearest:biuld")
    with pytest.raises(RequestError, match="'size' is a int, not a function"):
        load_function("own_nearest:size")


def test_arguments_are_checked_without_a_call() -> None:
    def build(width: int, depth: int = 1) -> None:
        raise AssertionError("called")

    bind_arguments(build, {"width": 1}, key="model.build")
    with pytest.raises(RequestError, match=r"model.build: missing a required argument: 'width'; .*\(width: int, depth"):
        bind_arguments(build, {}, key="model.build")
    assert takes_argument(build, "depth")
    assert not takes_argument(build, "spec")
