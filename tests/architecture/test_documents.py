"""Documents are checked like code: the README's tree is the disk, links lead somewhere, and the changelog names numerics."""

import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

import shoal
from architecture.picture import draw
from architecture.rooms import room_imports

DOCUMENTS = (
    "README.md",
    "ARCHITECTURE.md",
    "CONTRIBUTING.md",
    "STYLE.md",
    "CHANGELOG.md",
    "LICENSE",
    "docs/guarantees.md",
)
# `name  what it is`, drawn with plain indentation or with the lines that `tree` draws.
TREE_LINE = re.compile(r"^(?P<lead>[ │├└─|`-]*)(?P<name>[\w.][\w./-]*)(?:\s{1,}(?P<text>\S.*))?$")
LINK = re.compile(r"\[[^\]]*\]\(\s*<?([^)\s>]+)>?(?:\s+\"[^\"]*\")?\s*\)")
MODULE = re.compile(r"\bshoal(?:\.[a-z_]+)+")
FENCE = re.compile(r"^```.*?^```\s*?$", re.MULTILINE | re.DOTALL)


def kept_files(root: Path) -> list[Path]:
    """Every file that is kept in git or would be: what a clone holds."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=True, timeout=30)
    return [Path(name) for name in done.stdout.split("\0") if name and (root / name).is_file()]


def read_tree(text: str) -> dict[str, str]:
    """The paths that the README's tree names, with their lines; the tree is the fenced block that has ``src/shoal/`` in it."""
    blocks = [block for block in FENCE.findall(text) if re.search(r"^[ │├└─|`-]*src/", block, re.MULTILINE)]
    assert len(blocks) == 1, (
        f"the README has {len(blocks)} fenced blocks with src/ at the start of a line, not one tree"
    )
    found: dict[str, str] = {}
    above: list[tuple[int, str]] = []
    for line in blocks[0].splitlines()[1:-1]:
        match = TREE_LINE.match(line)
        if match is None:
            continue
        depth = len(match["lead"])
        above = [entry for entry in above if entry[0] < depth]
        path = "/".join([*(name.strip("/") for _, name in above), match["name"].strip("/")])
        found[path] = (match["text"] or "").strip(" #")
        if match["name"].endswith("/"):
            above.append((depth, match["name"]))
    return found


def expected_folders(files: list[Path]) -> set[str]:
    """Top-level folders that are not hidden, and every folder of the package."""
    folders = {parent.as_posix() for file in files for parent in file.parents if parent != Path(".")}
    top = {folder for folder in folders if "/" not in folder and not folder.startswith(".")}
    return {folder for folder in top if folder != "src"} | {
        folder for folder in folders if folder.startswith("src/shoal")
    }


def tree_problems(tree: dict[str, str], files: list[Path]) -> Iterator[str]:
    folders = {parent.as_posix() for file in files for parent in file.parents}
    on_disk = folders | {file.as_posix() for file in files}
    for folder in sorted(expected_folders(files) - set(tree)):
        yield f"{folder}/ is on the disk and not in the README's tree"
    for path in sorted(set(tree) - on_disk):
        yield f"{path} is in the README's tree and not on the disk"
    for path, text in tree.items():
        # src/ holds nothing but the package, whose own line follows.
        if path in folders and not text and path != "src":
            yield f"{path}/ has no line in the README's tree that says what it is"


def slug(heading: str) -> str:
    """The anchor that a heading gets where Markdown is shown."""
    words = re.sub(r"[^\w\- ]", "", re.sub(r"[`*]", "", heading).strip().lower())
    return words.replace(" ", "-")


def anchors_of(headings: list[str]) -> set[str]:
    """The anchors of a page; of headings that are alike the second has the number 1, and so on."""
    slugs = [slug(heading) for heading in headings]
    return {f"{one}-{before}" if (before := slugs[:place].count(one)) else one for place, one in enumerate(slugs)}


def link_problems(root: Path, document: Path) -> Iterator[str]:
    text = (root / document).read_text()
    for target in LINK.findall(FENCE.sub("", text)):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = target.partition("#")
        place = (root / document).parent / path if path else root / document
        if not place.exists():
            yield f"{document}: {target} leads nowhere"
        elif anchor and place.suffix == ".md":
            headings = re.findall(r"^#+\s+(.+?)\s*$", FENCE.sub("", place.read_text()), re.MULTILINE)
            if anchor not in anchors_of(headings):
                yield f"{document}: {target} leads to no heading"


def unreleased_headings(changelog: str) -> list[str]:
    match = re.search(r"^## \[?Unreleased\]?.*?$(.*?)(?=^## |\Z)", changelog, re.MULTILINE | re.DOTALL)
    return re.findall(r"^### (.+?)\s*$", match[1], re.MULTILINE) if match else []


def module_problems(text: str, names: set[str]) -> Iterator[str]:
    """Modules that a text names, as ``shoal.room.file`` or with one thing inside, and that are not there."""
    for name in MODULE.findall(text):
        if name not in names and name.rpartition(".")[0] not in names - {"shoal"}:
            yield name


@pytest.mark.parametrize("name", DOCUMENTS)
def test_the_document_is_there(root, name):
    assert (root / name).is_file() and (root / name).stat().st_size > 200


def test_the_readme_tree_is_the_disk(root):
    assert list(tree_problems(read_tree((root / "README.md").read_text()), kept_files(root))) == []


def test_links_lead_somewhere(root):
    documents = [file for file in kept_files(root) if file.suffix == ".md"]
    assert len(documents) >= 4
    assert [problem for document in documents for problem in link_problems(root, document)] == []


def test_modules_that_documents_name_are_there(root, modules):
    """The user looks for processes by the names of their modules."""
    names = {module.name for module in modules}
    packages = {module.package for module in modules if module.path.name == "__init__.py"}
    exported = {f"shoal.{name}" for name in shoal.__all__}
    documents = [root / "README.md", root / "docs" / "guarantees.md", *(root / "docs" / "guides").glob("*.md")]
    found = {
        str(document): list(module_problems(document.read_text(), names - packages | exported | {"shoal"}))
        for document in documents
    }
    assert {document: problems for document, problems in found.items() if problems} == {}


def test_a_module_that_is_not_there_is_found():
    names = {"shoal", "shoal.core.plan"}
    assert list(module_problems("`shoal.core.plan`, shoal.core.plan.parse, `shoal.core.(plan|axes)`", names)) == [
        "shoal.core"
    ]


def test_the_changelog_names_numerics(root):
    assert "Numerics" in unreleased_headings((root / "CHANGELOG.md").read_text())


GOOD_TREE = """
# Title

```
make demo
```

```
recipes/        complete runs
src/shoal/      the package
  core/         words and values
  cli/          the commands
tests/
  unit/         mirrors src
Makefile        the commands
```
"""
GOOD_FILES = [
    Path(name)
    for name in (
        "Makefile",
        ".ci/run",
        "recipes/a.toml",
        "src/shoal/core/a.py",
        "src/shoal/cli/a.py",
        "tests/unit/a.py",
    )
]


def test_the_tree_is_read():
    tree = read_tree(GOOD_TREE.replace("tests/\n", "tests/          the tests\n"))
    assert tree["src/shoal/core"] == "words and values"
    assert set(tree) == {"recipes", "src/shoal", "src/shoal/core", "src/shoal/cli", "tests", "tests/unit", "Makefile"}
    assert list(tree_problems(tree, GOOD_FILES)) == []


def test_a_tree_with_drawn_lines_is_read_too():
    text = (
        "```\n├── src/shoal/  the package\n│   ├── core/   words\n│   └── cli/    commands\n└── tests/      tests\n```"
    )
    assert set(read_tree(text)) == {"src/shoal", "src/shoal/core", "src/shoal/cli", "tests"}


@pytest.mark.parametrize(
    ("old", "new", "problem"),
    [
        ("  cli/          the commands\n", "", "src/shoal/cli/ is on the disk"),
        ("recipes/        complete runs\n", "", "recipes/ is on the disk"),
        ("  core/         words and values\n", "  core/\n", "src/shoal/core/ has no line"),
        (
            "  core/         words and values\n",
            "  core/    words\n  comm/    wires\n",
            "src/shoal/comm is in the README's tree",
        ),
        ("Makefile        the", "Mokefile        the", "Mokefile is in the README's tree"),
    ],
)
def test_a_tree_that_is_not_the_disk_is_refused(old, new, problem):
    text = GOOD_TREE.replace("tests/\n", "tests/          the tests\n")
    assert old in text
    problems = list(tree_problems(read_tree(text.replace(old, new)), GOOD_FILES))
    assert len(problems) == 1 and problems[0].startswith(problem)


def test_a_broken_link_is_found(tmp_path):
    (tmp_path / "there.md").write_text("# A heading, with `code`\n")
    text = "[a](there.md) [b](gone.md) [c](there.md#a-heading-with-code) [d](there.md#no) [e](https://x.org/y) [f](#none)\n"
    (tmp_path / "page.md").write_text(text)
    found = list(link_problems(tmp_path, Path("page.md")))
    assert [problem.split()[1] for problem in found] == ["gone.md", "there.md#no", "#none"]


def test_a_changelog_without_numerics_is_refused():
    assert unreleased_headings("# C\n## Unreleased\n### Added\n## 1.0\n### Numerics\n") == ["Added"]
    assert unreleased_headings("# C\n## [Unreleased]\n### Added\n- x\n### Numerics\n- none\n") == ["Added", "Numerics"]


def test_the_picture_of_the_rooms_is_of_this_source(root, modules):
    drawn = draw(room_imports(modules))
    assert (root / "docs" / "rooms.svg").read_text() == drawn, "draw it again: python tests/architecture/picture.py"
    fewer = {room: below - {"core"} for room, below in room_imports(modules).items()}
    assert draw(fewer) != drawn
