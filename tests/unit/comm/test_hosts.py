"""On which hosts the ranks of an axis are, and what is said where a host's neighbours are far away."""

import itertools

import pytest

from shoal.comm.hosts import has_two_levels, number_hosts, ranks_by_host, warn_of_crossings
from shoal.comm.mesh import GRID, INSIDE, rank_groups


def _warning(hosts: tuple[int, ...], **given: int) -> str:
    degrees = {axis: given.get(axis.value, 1) for axis in GRID}
    assert len(hosts) == len(list(itertools.product(*(range(degrees[axis]) for axis in GRID))))
    found = warn_of_crossings({axis: rank_groups(degrees, (axis,)) for axis in INSIDE}, degrees, hosts)
    assert len(found) <= 1
    return found[0] if found else ""


def test_ranks_that_are_numbered_host_by_host_have_tp_and_cp_inside() -> None:
    for hosts in ((0, 0, 1, 1), (0, 0, 0, 0)):
        for plan in ({"dp": 2, "tp": 2}, {"dp": 2, "cp": 2}, {"pp": 2, "tp": 2}):
            assert _warning(hosts, **plan) == ""
    assert _warning((0, 1, 0, 1), dp=4) == "", "replicas may be anywhere"
    assert _warning((0, 1, 0, 1), dp=2, pp=2) == ""


@pytest.mark.parametrize(
    ("plan", "words"),
    [({"dp": 2, "tp": 2}, "tp"), ({"dp": 2, "cp": 2}, "cp"), ({"tp": 2, "cp": 2}, "tp and cp")],
)
def test_ranks_that_are_dealt_to_hosts_in_turn_have_them_between(plan: dict[str, int], words: str) -> None:
    hosts = (0, 1, 0, 1) if "dp" in plan else (0, 1, 1, 0)
    said = _warning(hosts, **plan)
    assert said.startswith(f"{words} crosses between hosts, inside every layer (rank 0 on host 0, rank 1 on host 1")
    fix = "number the ranks host by host (SLURM: --distribution=block, Open MPI: --map-by slot, MPICH: -ppn 2)"
    assert (fix in said) == ("dp" in plan), said


def test_a_host_that_has_no_room_for_all_of_tp_needs_another_plan() -> None:
    assert "tp * cp = 4 does not divide the 2 ranks of a host; choose a plan" in _warning((0, 0, 1, 1), tp=4)


def test_hosts_are_numbered_by_their_first_ranks() -> None:
    assert number_hosts([70, 7, 70, 9]) == (0, 1, 0, 2)
    assert ranks_by_host([0, 1, 3], [0, 1, 1, 0]) == [[0, 3], [1]]
    assert has_two_levels([0, 1, 2, 3], [0, 0, 1, 1]) and not has_two_levels([0, 1, 2, 3], [0, 1, 0, 1])
    assert not has_two_levels([0, 1, 2], [0, 0, 1]) and not has_two_levels([0, 1], [0, 0])
