"""The public surface: what is exported is what docs/api.md and the types list, and every name has its description."""

import importlib.util
import inspect
import re
import subprocess
import sys

import pytest

import shoal


@pytest.fixture(scope="module")
def maker(root):
    """docs/make_api.py as a module."""
    spec = importlib.util.spec_from_file_location("make_api", root / "docs" / "make_api.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_page_lists_exactly_what_is_exported(root):
    listed = re.findall(r"^### shoal\.(\w+)$", (root / "docs" / "api.md").read_text(), re.MULTILINE)
    assert sorted(listed) == shoal.__all__ == sorted(shoal._HOMES)


def test_the_page_and_the_types_are_current(maker):
    assert maker.PAGE.read_text() == maker.make_page(), "run `python docs/make_api.py`"
    assert maker.STUB.read_text() == maker.make_stub(), "run `python docs/make_api.py`"


def test_every_name_is_documented(maker):
    for name in shoal.__all__:
        thing = getattr(importlib.import_module(shoal._HOMES[name]), name)
        assert inspect.getdoc(thing), name
        if inspect.isclass(thing):
            bare = [member for member, value in maker._public(thing) if not inspect.getdoc(value)]
            bare += [field for field, (_, text) in dict(maker._fields(thing)).items() if not text]
            assert not bare, (name, bare)
        else:
            text = inspect.getdoc(thing)
            arguments = [one for one in inspect.signature(thing).parameters if not one.startswith("_")]
            assert all(f"{one}:" in text for one in arguments) or len(arguments) < 2, (name, arguments)


def test_an_export_without_a_description_is_seen(maker, monkeypatch):
    monkeypatch.setitem(shoal._SUBJECTS["Errors"], "FinalError", "shoal.core.errors")
    assert maker.PAGE.read_text() != maker.make_page()


def test_the_package_says_that_it_has_types(root):
    assert (root / "src" / "shoal" / "py.typed").exists()


def test_a_room_that_is_imported_does_not_hide_its_function():
    """``shoal.verify`` is a room and a function."""
    line = (
        "import shoal, shoal.verify.exclusive, sys; assert callable(shoal.verify); assert 'torch' not in sys.modules\n"
        "try:\n    shoal.verify('nowhere.toml')\nexcept shoal.RequestError as error:\n    print(error)"
    )
    done = subprocess.run([sys.executable, "-c", line], capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout.strip() == "no such file: nowhere.toml", done.stderr
