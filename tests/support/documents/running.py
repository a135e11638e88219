"""A page of the documents, run from its first block to its last in one folder, as somebody would who types it."""

import json
import shutil
import tomllib
from pathlib import Path

from shoal.core.config import validate
from shoal.trainer.config import Recipe, load_recipe
from support.documents.blocks import Block, missing_lines, read_blocks, read_commands
from support.documents.shell import Shell
from support.processes.command import ROOT


def run_page(page: Path, folder: Path, *, long: bool, timeout: float = 100.0) -> dict[str, int]:
    """Run the blocks of a page; with ``long`` also those that `make soak` is for. How many of each kind there were.

    The folder has ``recipes`` and ``examples`` in it, as a clone has.
    """
    work, scratch = folder / "work", folder / "scratch"
    scratch.mkdir(mode=0o700)
    for name in ("recipes", "examples"):
        shutil.copytree(ROOT / name, work / name)
    counts = {"run": 0, "long": 0, "not run": 0, "text": 0}
    shell = Shell(work, scratch)
    try:
        for block in read_blocks(page):
            if block.language == "text":
                counts["text"] += 1
            elif not block.is_run:
                counts["not run"] += 1
            elif block.is_long and not long:
                counts["long"] += 1
            else:
                counts["run"] += 1
                run_block(block, shell, f"{page.relative_to(ROOT)}:{block.line}", timeout=timeout)
    finally:
        shell.close()
    return counts


def run_block(block: Block, shell: Shell, where: str, *, timeout: float) -> None:
    """Do what a block is for: write the file that it is, check it as a recipe, run it."""
    if block.file:
        path = shell.folder / block.file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(block.text)
    if block.language == "json":
        json.loads(block.text)
    elif block.language == "toml":
        check_toml(block, shell.folder)
    elif block.language == "python" and not block.file:
        path = shell.folder / f"block_{block.line}.py"
        path.write_text(block.text)
        _run_commands(block, [(f"python {path.name}", ())], shell, where, timeout)
    elif block.language in ("sh", "console"):
        _run_commands(block, [(part.text, part.shown) for part in read_commands(block)], shell, where, timeout)


def _run_commands(block: Block, commands, shell: Shell, where: str, timeout: float) -> None:
    results = shell.run([text for text, _ in commands], timeout=timeout)
    for number, (text, shown) in enumerate(commands):
        expected = int(block.notes.get("exit", 0)) if number == len(commands) - 1 else 0
        assert number < len(results), f"{where}: the shell ended before {text!r}: {results}"
        code, printed = results[number]
        assert code == expected, f"{where}: exit {code}, not {expected}, of {text!r}\n{printed}"
        missing = missing_lines(shown, printed, exact="exact" in block.notes)
        assert not missing, f"{where}: {text!r} does not print {missing}, but\n{printed}"


BASE = {"data": {"source": "stdlib"}, "train": {"steps": 1}}


def check_toml(block: Block, folder: Path) -> None:
    """A whole recipe is read as one; a part of one is put in the place of the same sections of a recipe that is right."""
    if block.file:
        load_recipe(folder / block.file)
        return
    given = tomllib.loads(block.text)
    merged = {**BASE, **given}
    if not {"name", "build"} & set(merged.get("model", {})):
        merged["model"] = {"name": "gpt", **merged.get("model", {})}
    if not {"steps", "epochs", "tokens"} & set(merged["train"]):
        merged["train"] = {**merged["train"], "steps": 1}
    validate(Recipe, merged, origin="a block of a page")
