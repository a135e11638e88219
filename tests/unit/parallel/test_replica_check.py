"""The watch: what must be equal is compared by hash, and every rank names the tensor that is not."""

import pytest
import torch

from shoal.comm.mesh import build_mesh
from shoal.core.errors import RunError
from shoal.core.placement import place_whole
from shoal.core.plan import Plan
from shoal.parallel.replica_check import check_replicas, find_unequal
from shoal.testing.ranks import run_on_ranks


def test_only_the_same_part_is_compared():
    tables = [
        torch.tensor([[1, 10, 5], [2, 20, 6]]),
        torch.tensor([[1, 11, 7], [2, 20, 6]]),
        torch.tensor([[2, 20, 9]]),
    ]
    assert find_unequal(tables) == {2: [[0, 1], [2]]}


def look(world, tensors, placements, mesh, names):
    try:
        check_replicas(tensors, placements, mesh, step=7, names=names)
    except RunError as error:
        return str(error)
    return ""


def watch(world):
    """dp=2 tp=2: rank = 2 dp + tp. ``split`` is cut over tp, ``norm`` is whole everywhere, ``own`` is on dp 0 only."""
    mesh = build_mesh(world, Plan.parse("dp=2 tp=2"))
    dp, tp = divmod(world.rank, 2)
    split = torch.arange(8.0).reshape(4, 2)[2 * tp : 2 * tp + 2]
    placements = {"split": place_whole((4, 2)).rows(2 * tp, 2 * tp + 2)}
    tensors = {"split": split, "norm": torch.ones(3), "count": torch.tensor(5)}
    if dp == 0:
        tensors["own"] = torch.zeros(2, dtype=torch.bfloat16)
    found = {"equal": look(world, tensors, placements, mesh, ["own"])}
    drifted = {**tensors, "norm": torch.ones(3) + (1e-6 if world.rank == 2 else 0)}
    found["norm"] = look(world, drifted, placements, mesh, ["own"])
    drifted = {**tensors, "split": split + (1 if world.rank == 3 else 0), "count": torch.tensor(5 + (world.rank == 3))}
    found["split"] = look(world, drifted, placements, mesh, ["own"])
    own = {"own": torch.full((2,), float(tp), dtype=torch.bfloat16)} if dp == 0 else {}
    drifted = {**tensors, **own}
    found["own"] = look(world, drifted, placements, mesh, ["own"])
    return found


@pytest.fixture(scope="module")
def found():
    return run_on_ranks(watch, 4)


def test_equal_replicas_pass(found):
    assert [ranks["equal"] for ranks in found] == [""] * 4


def test_every_rank_names_the_tensor_the_ranks_and_the_step(found):
    texts = {ranks["norm"] for ranks in found}
    assert len(texts) == 1
    text = texts.pop()
    assert "step 7: 'norm'" in text and "ranks 0, 1, 3 and rank 2 hold different values" in text


def test_a_shard_is_compared_with_its_copies_only(found):
    for ranks in found:
        assert "'count'" in ranks["split"] and "ranks 0, 1, 2 and rank 3" in ranks["split"]
        assert "2 tensors differ" in ranks["split"]


def test_a_rank_that_does_not_hold_the_tensor_says_its_name_too(found):
    assert all("'own'" in ranks["own"] and "rank 0 and rank 1" in ranks["own"] for ranks in found)
