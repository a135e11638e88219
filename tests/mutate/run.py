"""``make mutate``: break the source, one line at a time, and see the test that is named for it fail.

Every mutation of ``mutations.py`` is applied to a copy of the tree, never to the tree itself. Its test must pass there before,
and fail, not merely end, with the mutation. The table in ``tests/README.md`` says what came of each. With words as arguments,
only the mutations whose promise, file or name has one of them are tried, and only their rows are written anew.
"""

import argparse
import os
import queue
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

from mutations import MUTATIONS, WITHOUT
from promises import Mutation, mutation_problems, promise_problems, read_promises

ROOT = Path(__file__).resolve().parents[2]
TABLE = ROOT / "tests" / "README.md"
BEGIN, END = "<!-- made by `make mutate`: begin -->", "<!-- made by `make mutate`: end -->"
HEAD = "| promise | broken | test that must fail | caught |\n|---|---|---|---|\n"
_FAILED, _NOTHING = 1, -2
"""What pytest exits with when tests failed, which it does for other reasons too; other codes say that none was run."""


def copy_tree(target: Path) -> None:
    """What git has or would take."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    names = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\0")
    for name in filter(None, names):
        if (ROOT / name).is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(ROOT / name, target / name)


def run_tests(tree: Path, nodes: Sequence[str], seconds: float) -> tuple[int, str]:
    """The exit code of pytest in a tree, and the end of what it said; -1 when it took too long."""
    environment = {**os.environ, "PYTHONPATH": str(tree / "src"), "OMP_NUM_THREADS": "1"}
    # Short, because sockets lie in it, and of this run alone: the folder that sessions share is swept by whoever ends.
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-rN", "--tb=short"]
    command += [f"--basetemp={tree}-t", *nodes]
    try:
        done = subprocess.run(
            command, cwd=tree, env=environment, capture_output=True, text=True, timeout=seconds, check=False
        )
    except subprocess.TimeoutExpired:
        return -1, ""
    lines = done.stdout.splitlines() or [""]
    errors = [line for line in lines if line.startswith("E ")]
    if done.returncode == _FAILED and not re.search(r"\b[1-9]\d* (failed|error)", lines[-1]):
        return _NOTHING, lines[-1][:150]
    return done.returncode, (errors or lines[-1:])[0][:150]


def write(path: Path, text: str) -> None:
    """Compiled files are told from their source by time and length, and two mutations may agree in both."""
    path.write_text(text)
    for compiled in (path.parent / "__pycache__").glob(f"{path.stem}.*.pyc"):
        compiled.unlink()


def passes(tree: Path, mutation: Mutation) -> bool:
    """Whether the test passes without the mutation; asked twice, because a machine that does other things misses deadlines."""
    for _ in range(2):
        code, said = run_tests(tree, [mutation.test], 60.0 + 30 * mutation.seconds)
        if code == 0:
            return True
        print(f"{mutation.test} exits with {code} without a mutation: {said}", flush=True)
    return False


def try_mutation(tree: Path, mutation: Mutation) -> str:
    """What came of it, for the table."""
    path = tree / mutation.file
    before = path.read_text()
    write(path, before.replace(mutation.old, mutation.new))
    started = time.monotonic()
    try:
        code, said = run_tests(tree, [mutation.test], 60.0 + 30 * mutation.seconds)
    finally:
        write(path, before)
    took = time.monotonic() - started
    verdict = {_FAILED: "yes", 0: "**survived**", -1: "**no end**"}.get(code, f"**exit {code}**")
    print(f"{verdict:12} {took:6.1f} s  {mutation.file}: {mutation.what}\n{'':22}{said}", flush=True)
    return verdict


def chosen(words: Sequence[str], *, missing: bool) -> list[Mutation]:
    """The mutations that are asked for, the long ones first."""
    kept = read_table() if missing else {}
    found = [
        one for one in MUTATIONS if not words or any(word in f"{one.promise} {one.file} {one.what}" for word in words)
    ]
    found = [one for one in found if kept.get(cells_of(one)) != "yes"]
    return sorted(found, key=lambda mutation: -mutation.seconds)


def work_off(mutations: Sequence[Mutation], jobs: int) -> dict[Mutation, str]:
    """Try all of them, some at a time, each worker in a tree of its own."""
    waiting: queue.SimpleQueue[Mutation] = queue.SimpleQueue()
    for mutation in mutations:
        waiting.put(mutation)
    results: dict[Mutation, str] = {}
    passing: dict[str, bool] = {}

    def work(tree: Path) -> None:
        while True:
            try:
                mutation = waiting.get_nowait()
            except queue.Empty:
                return
            node = mutation.test
            if node not in passing:
                passing[node] = passes(tree, mutation)
            results[mutation] = try_mutation(tree, mutation) if passing[node] else "**its test fails without it**"

    with tempfile.TemporaryDirectory(prefix="shoal-mutate-") as name:
        trees = [Path(name) / str(number) for number in range(jobs)]
        for tree in trees:
            copy_tree(tree)
        threads = [threading.Thread(target=work, args=(tree,)) for tree in trees]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    return results


def row_of(mutation: Mutation, verdict: str) -> str:
    """A line of the table; its first three cells are known without running anything."""
    where = f"`{mutation.file.removeprefix('src/shoal/')}`: {mutation.what}"
    return f"| {mutation.promise} | {where} | `{mutation.test.removeprefix('tests/')}` | {verdict} |"


def cells_of(mutation: Mutation) -> str:
    return row_of(mutation, "").rsplit("|", 2)[0]


def table_rows() -> list[tuple[str, str]]:
    """The rows of the table as they stand: what says which mutation it is, and what came of that."""
    table = TABLE.read_text().split(BEGIN)[1].split(END)[0].partition(HEAD)[2]
    rows = [line.rsplit("|", 2) for line in table.splitlines() if line.startswith("| ")]
    return [(cells, verdict.strip()) for cells, verdict, _ in rows]


def read_table() -> dict[str, str]:
    """What the table says came of each mutation; of a row that a merge has doubled, the one that was caught."""
    found: dict[str, str] = {}
    for cells, verdict in table_rows():
        if found.get(cells) != "yes":
            found[cells] = verdict
    return found


def write_table(results: dict[Mutation, str]) -> None:
    """Rewrite the table; a mutation that was not tried keeps what its row said, if the row is still the same."""
    kept = read_table()
    rows = [row_of(one, results.get(one, kept.get(cells_of(one), "not run"))) for one in MUTATIONS]
    num_caught = sum(row.endswith("| yes |") for row in rows)
    reasons = "".join(f"- *{promise}*: {reason}\n" for promise, reason in WITHOUT.items())
    without = f"\nRows of the guarantees without a mutation:\n\n{reasons}" if reasons else ""
    head, rest = TABLE.read_text().split(BEGIN)
    body = f"{BEGIN}\n\n{len(rows)} mutations, {num_caught} caught.\n\n{HEAD}" + "\n".join(rows) + f"\n{without}\n{END}"
    TABLE.write_text(head + body + rest.split(END)[1])


def main(arguments: Iterable[str] | None = None) -> int:
    """Exit code 0 when every mutation that was tried was caught."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("words", nargs="*", help="try only mutations whose promise, file or name has one of these")
    parser.add_argument(
        "--missing",
        action="store_true",
        help="only those of which the table does not say that they were caught; with none of them, each row once",
    )
    parser.add_argument("--jobs", type=int, default=2, help="how many at a time")
    given = parser.parse_args(arguments)
    promises = read_promises((ROOT / "docs" / "guarantees.md").read_text())
    problems = [*promise_problems(promises, MUTATIONS, WITHOUT), *mutation_problems(ROOT, MUTATIONS)]
    if problems:
        print("\n".join(problems), file=sys.stderr)
        return 2
    mutations = chosen(given.words, missing=given.missing)
    if not mutations and given.missing and not given.words:
        write_table({})
        print(f"all {len(MUTATIONS)} have been caught; see {TABLE}")
        return 0
    if not mutations:
        print("there is no such mutation", file=sys.stderr)
        return 2
    results = work_off(mutations, given.jobs)
    write_table(results)
    print(f"{sum(verdict == 'yes' for verdict in results.values())} of {len(results)} caught; see {TABLE}")
    return int(any(verdict != "yes" for verdict in results.values()))


if __name__ == "__main__":
    sys.exit(main())
