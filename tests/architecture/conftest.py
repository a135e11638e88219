"""The source of Shoal, parsed once for all checks of its shape."""

import ast
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Module:
    path: Path
    name: str
    text: str
    tree: ast.Module

    @property
    def room(self) -> str | None:
        parts = self.name.split(".")
        return parts[1] if len(parts) > 1 else None

    @property
    def package(self) -> str:
        return self.name if self.path.name == "__init__.py" else self.name.rpartition(".")[0]


def parse_module(path: Path, name: str, text: str) -> Module:
    return Module(path=path, name=name, text=text, tree=ast.parse(text, filename=str(path)))


def read_modules(source: Path) -> list[Module]:
    modules = []
    for path in sorted((source / "shoal").rglob("*.py")):
        parts = path.relative_to(source).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        modules.append(parse_module(path, name, path.read_text()))
    return modules


@pytest.fixture(scope="session")
def root() -> Path:
    return ROOT


@pytest.fixture(scope="session")
def modules() -> list[Module]:
    found = read_modules(ROOT / "src")
    assert len(found) > 10, "the source was not found, so nothing would be checked"
    return found


@pytest.fixture(scope="session")
def scripts() -> list[Module]:
    """The benchmarks and the examples, which stand outside the package and use it."""
    paths = [path for folder in ("benchmarks", "examples") for path in sorted((ROOT / folder).rglob("*.py"))]
    assert len(paths) > 10, "they were not found, so nothing would be checked"
    return [
        parse_module(path, ".".join(path.relative_to(ROOT).with_suffix("").parts), path.read_text()) for path in paths
    ]


@pytest.fixture(scope="session")
def plant():
    """A module that is not on disk: what each check must refuse is written out in its test."""

    def make(name: str, text: str) -> Module:
        return parse_module(Path(*name.split(".")).with_suffix(".py"), name, text)

    return make
