"""A job without room in a SLURM cluster."""

from dataclasses import replace
from pathlib import Path

import pytest

from shoal.core.errors import RequestError
from shoal.launch.clusters.job import Job
from shoal.launch.clusters.partitions import check_room, find_problem, read_partitions

SAID = "short*|2|4\nshort*|6|16\nlong|1|64+\n"
"""As ``sinfo --noheader --format=%P|%D|%c`` of SLURM 22.05 writes it."""
JOB = Job(name="x", arguments=("train",), nodes=8, per_node=16, folder=Path("/x"), environment={})


def test_partitions_are_read_over_their_kinds_of_nodes() -> None:
    short, long = read_partitions(SAID)
    assert (short.name, short.nodes, short.cores, short.is_default) == ("short", 8, 16, True)
    assert (long.name, long.nodes, long.cores, long.is_default) == ("long", 1, 64, False)


@pytest.mark.parametrize(
    ("job", "wanted", "words"),
    [
        (JOB, "", ""),
        (replace(JOB, nodes=1, per_node=64), "long", ""),
        (replace(JOB, nodes=9), "", "needs 9 node(s), and partition short has 8"),
        (replace(JOB, nodes=2), "long", "needs 2 node(s), and partition long has 1"),
        (replace(JOB, per_node=17), "", "needs 17 processes on each node, and the nodes of partition short have 16"),
        (JOB, "none", "the cluster has no partition 'none'; it has short (8 node(s) of up to 16 core(s)), long"),
    ],
)
def test_what_has_no_room_is_told_with_both_numbers(job: Job, wanted: str, words: str) -> None:
    found = find_problem(read_partitions(SAID), job, wanted=wanted)
    assert words in found and bool(words) == bool(found)


def test_where_nobody_knows_nothing_is_refused(tmp_path: Path) -> None:
    assert find_problem([], JOB) == ""
    check_room(JOB, {"PATH": str(tmp_path)})


def test_an_allocation_that_is_too_small_is_named() -> None:
    with pytest.raises(RequestError, match=r"needs 8 node\(s\), and this allocation \(job 7\) has 2"):
        check_room(JOB, {"SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "2"})
