"""Programs on one shard: what they do, that they are done once, and that a wrong one does nothing."""

import math

import pytest
import torch

from shoal.core.errors import RequestError
from shoal.paramserver.lbfgs.vectors import ShardVectors, sum_rows
from shoal.paramserver.programs import (
    Program,
    axpy,
    copy,
    dot,
    drop,
    has,
    largest,
    merge_measures,
    scale,
    total,
)


def program(*operations) -> Program:
    return Program(operations=operations)


def test_a_program_runs_in_order_and_answers_what_it_measures():
    weights = torch.tensor([1.0, -2.0, 3.0])
    shard = ShardVectors(weights)
    answer = shard.run(
        0,
        program(
            copy("weights", "a"), scale("a", 2.0), axpy(-1.0, "weights", "a"), dot("a", "weights"), total("a"),
            largest("a"), has("a"), drop("a"), has("a"), scale("weights", 0.5),
        ),
    )  # fmt: skip
    assert answer == (14.0, 6.0, 3.0, 1.0, 0.0)
    assert weights.tolist() == [0.5, -1.0, 1.5], "the live weights are changed in their place"
    assert shard.names == {"weights"}


def test_a_program_that_comes_twice_is_run_once():
    shard = ShardVectors(torch.ones(3))
    step = program(axpy(1.0, "weights", "weights"), total("weights"))
    assert shard.run(0, step) == shard.run(0, step) == (6.0,)
    assert shard.run(1, step) == (12.0,)
    for number in (0, 3):
        with pytest.raises(RequestError, match=f"program {number} is out of turn: this shard has run 1"):
            shard.run(number, step)
    shard.expect(0)
    assert shard.run(0, step) == (24.0,)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (dot("weights", "wieghts"), "did you mean 'weights'"),
        (scale("nothing", 1.0), "'nothing' that is not there"),
        (axpy(1.0, "weights", "b"), "'b' that is not there"),
        (copy("b", "c"), "'b' that is not there"),
        (scale("weights", math.nan), "by nan"),
        (axpy(math.inf, "weights", "weights"), "by inf"),
        (drop("weights"), "would drop the weights"),
    ],
)
def test_a_wrong_program_does_nothing(wrong, message):
    shard = ShardVectors(torch.ones(3))
    with pytest.raises(RequestError, match=message):
        shard.run(0, program(scale("weights", 3.0), copy("weights", "a"), wrong))
    assert shard["weights"].tolist() == [1.0] * 3 and shard.names == {"weights"} and shard.number == -1


def test_a_vector_dropped_in_a_program_cannot_be_read_later_in_it():
    shard = ShardVectors(torch.ones(3))
    with pytest.raises(RequestError, match="'a' that is not there"):
        shard.run(0, program(copy("weights", "a"), drop("a"), total("a")))


def test_a_vector_of_another_shape_or_type_is_refused():
    shard = ShardVectors(torch.ones(3))
    for wrong in (torch.ones(4), torch.ones(3, dtype=torch.float64)):
        with pytest.raises(RequestError, match="is not of this shard"):
            shard.put("gradient", wrong)


def test_a_snapshot_makes_a_replica():
    first = ShardVectors(torch.arange(4.0))
    first.run(0, program(copy("weights", "a"), scale("a", 3.0), total("a")))
    second = ShardVectors(torch.zeros(4))
    second.run(0, program(copy("weights", "left")))
    second.restore(*first.snapshot())
    assert second.names == first.names
    again = program(axpy(2.0, "a", "weights"), total("weights"))
    assert second.run(0, again) == (18.0,), "the last answer belongs to the state"
    assert first.run(1, again) == second.run(1, again)
    assert torch.equal(first["weights"], second["weights"])


def test_the_numbers_of_shards_become_one():
    asked = program(dot("a", "b"), largest("a"), has("a"), total("a"), scale("a", 1.0))
    assert merge_measures(asked, [(1.0, 2.0, 1.0, 3.0), (-4.0, 1.0, 0.0, 3.0)]) == (-3.0, 2.0, 0.0, 6.0)
    assert math.isnan(merge_measures(program(largest("a")), [(1.0,), (math.nan,)])[0])
    assert math.isnan(merge_measures(program(dot("a", "b")), [(math.inf,), (-math.inf,)])[0])
    with pytest.raises(RequestError, match="shard 1 answered 2 numbers"):
        merge_measures(asked, [(1.0, 2.0, 1.0, 3.0), (1.0, 2.0)])


@pytest.mark.parametrize("size", [0, 1, 4095, 4096, 4097, 1_100_003])
def test_sums_are_those_of_float64(size):
    a = torch.randn(size, generator=torch.Generator().manual_seed(1))
    b = torch.randn(size, generator=torch.Generator().manual_seed(2))
    assert sum_rows(a, b) == pytest.approx(float(a.double() @ b.double()), abs=1e-9)
    assert sum_rows(a) == pytest.approx(float(a.double().abs().sum()), rel=1e-12)


def test_sums_do_not_depend_on_threads():
    before = torch.get_num_threads()
    a = torch.randn(1_100_003, generator=torch.Generator().manual_seed(1))
    found = set()
    try:
        for num_threads in (1, 2, 3):
            torch.set_num_threads(num_threads)
            found.add((sum_rows(a, a), sum_rows(a), sum_rows(a[:1_048_577]), sum_rows(a[:60_001])))
    finally:
        torch.set_num_threads(before)
    assert len(found) == 1
