"""The parts of a step that ranks must agree on: a replica without samples, the piggybacked scalars, the request to stop."""

import os
import signal

import numpy as np
import pytest
import torch
from torch import nn

from shoal.comm.mesh import pretend_mesh
from shoal.core.plan import Plan
from shoal.data.loading.loader import Microbatch, StepBatch
from shoal.data.order import Position
from shoal.engine.batches.empty import Filler, zero_of_parameters, zero_through_layers
from shoal.engine.piggyback import StepScalars
from shoal.engine.stop import StopRequest


def microbatch(weight: float) -> Microbatch:
    return Microbatch(inputs=(), targets=torch.zeros(1), sample_ids=np.zeros(1, dtype=np.int64), weight=weight)


def batch(count: int, num_samples: int) -> StepBatch:
    own = tuple(microbatch(1.0) for _ in range(count))
    return StepBatch(
        microbatches=own, num_samples=num_samples, position=Position(), total_weight=None, local_weight=float(count)
    )


@pytest.mark.parametrize(("is_pipeline", "samples", "expected"), [(True, 2, 4), (False, 2, 2), (False, 9, 4)])
def test_a_replica_is_filled_up_to_what_its_peers_run(is_pipeline, samples, expected):
    filler = Filler(microbatch=microbatch(0.0), num_microbatches=4, is_pipeline=is_pipeline)
    assert [one.weight for one in filler.fill(batch(1, samples))] == [1.0] + [0.0] * (expected - 1)


def test_where_only_the_sum_of_gradients_waits_nothing_is_filled_up():
    assert Filler(num_microbatches=4).fill(batch(0, 2)) == ()


def test_zeros_are_exact_where_a_weight_is_not_finite():
    layer = nn.Linear(2, 2)
    with torch.no_grad():
        layer.weight[0, 0] = torch.nan
    loss = zero_of_parameters(layer)
    loss.backward()
    assert float(loss.detach()) == 0.0 and all(bool((one.grad == 0).all()) for one in layer.parameters())
    assert zero_through_layers({"scores": torch.ones(2)}) is None


@pytest.mark.parametrize("asks", [False, True])
def test_piggybacked_scalars_are_what_a_reduction_of_their_own_gives(asks):
    stops = StopRequest(), StopRequest()
    for stop in stops:
        if asks:
            stop.request("enough")
    how = {"mesh": pretend_mesh(Plan(dp=1)), "dtype": torch.float32, "device": torch.device("cpu")}
    carried, alone = (StepScalars(stop, **how) for stop in stops)
    objective = nn.Linear(1, 1)
    carried.piggyback_on(objective)
    loss = objective(torch.ones(1)).sum()
    attached = carried.attach(loss)
    (attached * 8.0).backward()
    assert torch.equal(attached, loss)
    assert carried.reduce((0.0,), scale=8.0) == alone.reduce((loss.detach(),), scale=8.0) == float(loss.detach())
    assert [stop.agreed for stop in stops] == (["enough"] * 2 if asks else [None] * 2)


def test_a_request_of_another_rank_is_agreed_on_without_its_reason():
    stop = StopRequest()
    stop.agree(any_rank=False)
    assert stop.agreed is None
    stop.agree(any_rank=True)
    assert (stop.agreed, stop.is_requested) == ("signal", False)


def test_a_signal_asks_to_stop():
    before, stop = signal.getsignal(signal.SIGUSR2), StopRequest()
    try:
        stop.listen([signal.SIGUSR2])
        os.kill(os.getpid(), signal.SIGUSR2)
        assert (stop.reason, stop.signal_number) == ("SIGUSR2", signal.SIGUSR2)
    finally:
        signal.signal(signal.SIGUSR2, before)
