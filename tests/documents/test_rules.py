"""Rules of documents: every block has a language, few are not run and each says why, and the translation is of this README."""

import re

import pytest

from support.documents.blocks import LANGUAGES, Block, Command, missing_lines, read_blocks, read_commands
from support.documents.running import check_toml
from support.documents.shell import Shell
from support.processes.command import ROOT

PAGES = [ROOT / "README.md", *(page for page in (ROOT / "docs").rglob("*.md") if page.parent.name != "design")]
GENERATED = {"docs/api.md"}  # Signatures, written by docs/make_api.py.
NOT_RUN = {
    "README.md": 1,
    "docs/guides/clusters.md": 2,
    "docs/guides/dashboard.md": 3,
    "docs/guides/data.md": 2,
    "docs/guides/hosts.md": 1,
    "docs/guides/online.md": 1,
    "docs/guides/parameter_server_clusters.md": 1,
    "docs/guides/planner.md": 1,
    "docs/tutorial/01-first-run.md": 1,
    "docs/tutorial/10-cluster.md": 4,
}
"""Blocks that cannot run where the tests run; the comment above each says why."""


def blocks_by_page():
    found = {page.relative_to(ROOT).as_posix(): read_blocks(page) for page in PAGES}
    return {name: blocks for name, blocks in found.items() if name not in GENERATED}


def test_every_block_says_what_it_is():
    found = blocks_by_page()
    wrong = [
        f"{name}:{block.line}" for name, blocks in found.items() for block in blocks if block.language not in LANGUAGES
    ]
    assert wrong == []
    # A fence that is not read as a block would not be run.
    fences = {name: (ROOT / name).read_text().count("```") for name in found}
    assert {name: count for name, count in fences.items() if count != 2 * len(found[name])} == {}


def test_few_blocks_are_not_run_and_each_has_a_reason():
    counts = {}
    for name, blocks in blocks_by_page().items():
        left_out = [block for block in blocks if "not run" in block.notes]
        assert all(len(block.notes["not run"]) > 10 for block in left_out), name
        assert all(len(block.notes["soak"]) > 5 for block in blocks if block.is_long), name
        if left_out:
            counts[name] = len(left_out)
    assert counts == {name: count for name, count in NOT_RUN.items() if count}


def test_the_translation_has_the_commands_and_the_code_of_the_readme():
    original, translated = (read_blocks(ROOT / name) for name in ("README.md", "README.zh.md"))
    # The tree is described in the README alone, which a test holds against the disk.
    original = [block for block in original if block.language != "text"]
    assert [(block.language, block.notes, _code(block)) for block in original] == [
        (block.language, block.notes, _code(block)) for block in translated
    ]


def test_the_translation_names_the_same_commands_and_pages():
    """What both READMEs have in any language: the commands of the table, and where links lead."""
    for pattern in (r"^\| (`[^|]*(?:\\\|[^|]*)*) \|", r"\]\(([^)]+)\)"):
        original, translated = (_found(pattern, name) for name in ("README.md", "README.zh.md"))
        assert original == translated, pattern


def _found(pattern: str, name: str) -> list[str]:
    """What a README's text has of a pattern, sorted, without its blocks, its tree and the links between the two."""
    text = re.sub(r"^```.*?^```", "", (ROOT / name).read_text(), flags=re.DOTALL | re.MULTILINE)
    found = re.findall(pattern, text, re.MULTILINE)
    own = ("README.md", "README.zh.md", "README.md#the-tree")
    return sorted(one.replace("、", ", ").replace("`, `", " ") for one in found if one not in own)


def test_the_port_that_is_shown_is_the_one_in_the_examples():
    blocks = {block.file: block.text for block in read_blocks(ROOT / "docs" / "coming-from.md") if block.file}
    assert set(blocks) == {"port_before.py", "port_after.py"}
    for name, text in blocks.items():
        assert (ROOT / "examples" / name).read_text().endswith(text.partition("\n")[2])
    before, after = (
        [line.strip() for line in blocks[f"port_{name}.py"].splitlines() if line] for name in ("before", "after")
    )
    page = (ROOT / "docs" / "coming-from.md").read_text()
    table = page.partition("| before | after |\n|---|---|\n")[2].partition("\n\n")[0]
    rows = [[cell.strip(" `") for cell in row.strip("|").split(" |")] for row in table.splitlines()]
    assert [row[0] for row in rows if row[0]] == [line for line in before[1:] if line not in after]
    assert [row[1] for row in rows if row[1]] == [line for line in after[1:] if line not in before]


def _code(block: Block) -> list[str]:
    """The lines without comments, which are translated."""
    lines = [line.split("  #")[0].split(" # ")[0].rstrip() for line in block.text.splitlines()]
    return [line for line in lines if not line.startswith("#")]


def make_block(text, language="console", **notes):
    return Block(1, language, text, notes)


def test_a_page_is_read(tmp_path):
    (tmp_path / "page.md").write_text(
        "Text\n\n<!-- soak: it is slow -->\n<!-- exit: 2 -->\n```console\n$ shoal a \\\n  --b\nout\n$ c\n```\n"
        "\n```python\n# x.py\n```\n"
    )
    first, second = read_blocks(tmp_path / "page.md")
    assert (first.line, first.notes, first.is_long) == (5, {"soak": "it is slow", "exit": "2"}, True)
    assert read_commands(first) == [Command("shoal a \\\n  --b", ("out",)), Command("c")]
    assert (second.language, second.file, second.is_run) == ("python", "x.py", True)


def test_what_is_printed_is_compared():
    printed = "loss   2.7763660550117493\nweights  sha256 1850dd26235a4cd8...\nplan dp=2\n"
    assert missing_lines(("loss 2.5", "...", "weights sha256 d46569df861a7304..."), printed, exact=False) == []
    assert missing_lines(("loss 2.5",), printed, exact=True) == ["loss 2.5"]
    assert missing_lines(("plan ...", "loss 2.5"), printed, exact=False) == ["loss 2.5"]
    assert missing_lines(("plans",), printed, exact=False) == ["plans"]


def test_a_wrong_key_in_a_part_of_a_recipe_is_found(tmp_path):
    check_toml(make_block("[optim]\nlr = 1e-3\n", "toml"), tmp_path)
    with pytest.raises(Exception, match="did you mean 'lr'"):
        check_toml(make_block("[optim]\nlrr = 1e-3\n", "toml"), tmp_path)


def test_a_shell_runs_commands_with_their_codes_and_folders(tmp_path):
    (tmp_path / "work").mkdir()
    (tmp_path / "scratch").mkdir()
    (tmp_path / "work" / "script.py").write_text("import sys\nprint(sys.argv[1:])\nsys.exit(3)\n")
    shell = Shell(tmp_path / "work", tmp_path / "scratch")
    try:
        found = shell.run(["python script.py a 'b c'", "mkdir in; cd in; echo $((1 + 1)) | cat"], timeout=30)
        assert found == [(3, "['a', 'b c']\n"), (0, "2\n")]
        assert shell.run(["pwd"], timeout=30) == [(0, f"{tmp_path}/work/in\n")]
        assert shell.run(["false\ntrue"], timeout=30) == [(1, "")]
    finally:
        shell.close()
