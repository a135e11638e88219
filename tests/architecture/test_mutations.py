"""The list of mutations does not rot: each applies to the source as it is, and every promise has one or a reason."""

import re
import sys
from dataclasses import replace

import pytest

from support.processes.command import ROOT

sys.path.insert(0, str(ROOT / "tests" / "mutate"))
from mutations import MUTATIONS, WITHOUT
from promises import mutation_problems, promise_problems, read_promises

from run import TABLE, cells_of, table_rows

MENDED = "run `python tests/mutate/run.py --missing`, which tries what was not caught yet and writes each row once"


@pytest.fixture(scope="module")
def promises():
    found = read_promises((ROOT / "docs" / "guarantees.md").read_text())
    assert len(found) >= 35, "the tables were not found"
    return found


def test_every_promise_has_a_mutation_or_a_reason(promises):
    assert list(promise_problems(promises, MUTATIONS, WITHOUT)) == []


def test_every_mutation_applies_and_its_test_is_there():
    assert list(mutation_problems(ROOT, MUTATIONS)) == []


def test_the_table_has_these_mutations_each_once_and_counts_them():
    rows = table_rows()
    assert [cells for cells, _ in rows] == [cells_of(mutation) for mutation in MUTATIONS], MENDED
    caught = sum(verdict == "yes" for _, verdict in rows)
    # A merge keeps both sides' counts: the line must be there once, and true.
    counts = re.findall(r"^\d+ mutations, \d+ caught\.$", TABLE.read_text(), re.MULTILINE)
    assert counts == [f"{len(MUTATIONS)} mutations, {caught} caught."], MENDED


def test_a_promise_without_a_mutation_is_found(promises):
    (problem,) = promise_problems([*promises, "it flies"], MUTATIONS, WITHOUT)
    assert problem.endswith("it flies")


def test_a_promise_that_went_away_is_found(promises):
    gone = [promise for promise in promises if MUTATIONS[0].promise not in promise]
    (problem,) = promise_problems(gone, MUTATIONS, WITHOUT)
    assert "0 rows" in problem


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"old": "no such text"}, "0 times"),
        ({"old": "import"}, "times, not once"),
        ({"new": MUTATIONS[0].old}, "changes nothing"),
        ({"test": MUTATIONS[0].test.replace("::test", "::test_no")}, "there is no test"),
    ],
)
def test_a_mutation_that_does_not_fit_is_found(change, word):
    (problem,) = mutation_problems(ROOT, [replace(MUTATIONS[0], **change)])
    assert word in problem
