"""Messages: what their headers say, mixed kinds on one endpoint, and a rank that is gone."""

import os
import time
from pathlib import Path

import pytest
import torch

from shoal.comm.channel import PeerLost
from shoal.comm.trafficcounter import TrafficCounter
from shoal.pipeline.p2p import _DTYPES, Endpoint, PointToPoint, TensorMeta, message_problem, read_header, write_header
from shoal.testing.ranks import run_on_ranks


@pytest.mark.parametrize("dtype", _DTYPES, ids=str)
def test_a_header_says_shape_and_type(dtype):
    tensor = torch.zeros(3, 0, 5, dtype=dtype)
    assert read_header(write_header([tensor])) == (TensorMeta((3, 0, 5), dtype, False),)


def test_a_header_of_several_tensors():
    tensors = [
        torch.zeros((), dtype=torch.bool),
        torch.zeros(7, 1, 2, 3, requires_grad=True),
        torch.zeros(1, 4, dtype=torch.bfloat16, requires_grad=True),
    ]
    assert read_header(write_header(tensors)) == (
        TensorMeta((), torch.bool, False),
        TensorMeta((7, 1, 2, 3), torch.float32, True),
        TensorMeta((1, 4), torch.bfloat16, True),
    )
    assert read_header(write_header([])) == ()


def test_a_header_holds_seven_tensors_of_six_dims_and_not_eight():
    tensor = torch.zeros(1, 2, 1, 2, 1, 2)
    assert len(read_header(write_header([tensor] * 7))) == 7
    with pytest.raises(AssertionError, match=r"8 tensors, whose shapes and types take 73 numbers, .* header has 64"):
        write_header([tensor] * 8)


def test_the_fullest_parcel_that_is_no_problem_is_the_fullest_that_can_be_written():
    fullest = [torch.zeros(1, 1, 1)] * 10 + [torch.zeros(())]
    assert message_problem(fullest) is None and len(read_header(write_header(fullest))) == 11
    assert message_problem([*fullest[:-1], torch.zeros(1)]) is not None
    assert message_problem([torch.zeros(1, dtype=torch.int16)]) == (
        f"a tensor of torch.int16, which is not one of the {len(_DTYPES)} types that are sent"
    )


LAYOUTS = [
    lambda: torch.arange(24.0).view(2, 3, 4),
    lambda: torch.arange(24.0).view(2, 3, 4).transpose(1, 2),
    lambda: torch.arange(24.0).view(4, 3, 2).permute(2, 0, 1),
    lambda: torch.arange(120.0).view(1, 5, 4, 6).to(memory_format=torch.channels_last),
    lambda: torch.arange(24.0).view(2, 3, 4).mT[:, :2],
    lambda: torch.arange(3.0).expand(4, 3),
    lambda: torch.tensor(2.0),
]


@pytest.mark.parametrize("make", LAYOUTS)
def test_a_header_says_in_which_order_dims_lie_in_memory(make):
    """A transposed activation arrived as a plain one, and kernels added it up in another order: an MLP-Mixer under pp=2 had
    gradients that were 8e-8 off."""
    tensor = make()
    (part,) = read_header(write_header([tensor.requires_grad_()]))
    memory, empty = part.empty(torch.device("cpu"))
    assert part.has_gradient and empty.shape == tensor.shape and memory.is_contiguous()
    dense = tensor.contiguous() if 0 in tensor.stride() else tensor
    order = sorted(range(tensor.ndim), key=lambda dim: -dense.stride(dim))
    assert sorted(range(tensor.ndim), key=lambda dim: -empty.stride(dim)) == order


def swap_layouts(world):
    """Messages of one kind whose tensors lie in memory in every way; the receiver was told of the first alone."""
    p2p, endpoint = open_p2p(world), Endpoint(1 - world.rank, 0)
    whole = torch.arange(24.0).view(2, 3, 4)
    sent = [whole.mT.contiguous().mT, whole, whole.permute(2, 0, 1).contiguous().permute(1, 2, 0)]
    if world.rank == 0:
        for tensor in sent:
            p2p.send([tensor], endpoint, "any")
        p2p.flush()
        return True
    got = [p2p.expect(endpoint, "any").open()[0][0] for _ in sent]
    return all(torch.equal(tensor, whole) and tensor.stride() == sent[0].stride() for tensor in got)


def test_a_parcel_is_laid_out_as_the_first_of_its_kind():
    assert run_on_ranks(swap_layouts, 2, deadline_seconds=30.0) == [True, True]


EXPANDED = [
    lambda: torch.arange(6.0).view(2, 1, 3).expand(2, 4, 3),
    lambda: torch.arange(3.0).expand(4, 3),
    lambda: torch.tensor(2.0).expand(2, 3),
    lambda: torch.arange(6.0).view(3, 2).mT[:, None].expand(2, 4, 3),
    lambda: torch.arange(6.0).view(3, 2).mT[:, :, None].expand(2, 3, 4),
]


def swap_expanded(world):
    """Expanded tensors, and after each one of its kind that is not."""
    p2p, endpoint = open_p2p(world), Endpoint(1 - world.rank, 0)
    sent = [tensor for make in EXPANDED for tensor in (make(), torch.arange(float(make().numel())).view(make().shape))]
    if world.rank == 0:
        for place, tensor in enumerate(sent):
            p2p.send([tensor], endpoint, place // 2)
        p2p.flush()
        return True
    got = [p2p.expect(endpoint, place // 2).open()[0][0] for place in range(len(sent))]
    assert all(torch.equal(one, other) for one, other in zip(got, sent, strict=True))
    return [tensor.stride() for tensor in got[::2]] == [tensor.stride() for tensor in sent[::2]]


def test_an_expanded_tensor_arrives_expanded_and_another_of_its_kind_whole():
    """The gradient of a sum arrived as a plain tensor, and the stage before added it up in another order: 3e-6 off."""
    assert run_on_ranks(swap_expanded, 2, deadline_seconds=30.0) == [True, True]


def open_p2p(world, deadline_seconds=20.0):
    return PointToPoint(world.group, traffic=TrafficCounter(), device=world.device, deadline_seconds=deadline_seconds)


# Kinds in the order in which they are sent: "short" is met only when three "long" ones are under way already.
KINDS = ["long", "long", "short", "long", "short", "long", "pair", "short", "pair", "long"]


def message(number, kind):
    shapes = {"long": [(4, 3)], "short": [(1, 3)], "pair": [(2, 2), (5,)]}[kind]
    return [torch.full(shape, float(number + 10 * place)) for place, shape in enumerate(shapes)]


def exchange(world, ahead):
    """Rank 0 sends and rank 1 receives, on two endpoints; True when everything arrived as it was sent."""
    p2p = open_p2p(world)
    endpoints = [Endpoint(1 - world.rank, tag) for tag in (0, 1)]
    if world.rank == 0:
        for number, kind in enumerate(KINDS):
            for endpoint in endpoints:
                tensors = message(number + 100 * endpoint.tag, kind)
                p2p.send([tensors[0].requires_grad_(), *tensors[1:]], endpoint, kind)
        p2p.flush()
        return True
    waiting, is_right = [], True
    todo = list(enumerate(KINDS))
    while todo or waiting:
        while todo and len(waiting) <= ahead:
            number, kind = todo.pop(0)
            waiting.append((number, kind, [(endpoint, p2p.expect(endpoint, kind)) for endpoint in endpoints]))
        number, kind, messages = waiting.pop(0)
        for endpoint, expected in messages:
            tensors, meta = expected.open()
            sent = message(number + 100 * endpoint.tag, kind)
            is_right &= len(tensors) == len(sent) and all(map(torch.equal, tensors, sent))
            is_right &= [part.has_gradient for part in meta] == [True] + [False] * (len(sent) - 1)
    return is_right


def exchange_all(world):
    return [exchange(world, ahead) for ahead in (0, 1, 2, 9)]


def test_kinds_in_mixed_order_on_one_lane_arrive_as_they_were_sent():
    """However many are expected ahead, though the meta of the second kind becomes known later than the first's."""
    assert run_on_ranks(exchange_all, 2, deadline_seconds=30.0) == [[True] * 4] * 2


AHEAD = 40
"""Messages that each rank sends before it receives one; with large tensors, so that none fits into a socket's buffer."""


def run_ahead(world):
    p2p, endpoint = open_p2p(world, deadline_seconds=5.0), Endpoint(1 - world.rank, 0)
    for number in range(AHEAD):
        p2p.send([torch.full((1 << 16,), float(number))], endpoint, "any")
    right = all(bool((p2p.expect(endpoint, "any").open()[0][0] == number).all()) for number in range(AHEAD))
    p2p.flush()
    return right


def test_ranks_that_are_ahead_of_each_other_do_not_wait_for_their_sends():
    """A breadth-first schedule has both ranks ahead; sends that were waited for made each wait for the other's receive."""
    assert run_on_ranks(run_ahead, 2, deadline_seconds=30.0) == [True, True]


def leave_at_once(world, result):
    """As a rank that dies does: without a goodbye, so that the ranks' barrier at the end is not reached either."""
    torch.save(result, Path(os.environ["SHOAL_TEST_FOLDER"]) / f"result-{world.rank}.pt")
    os._exit(0)


def time_the_loss(p2p, endpoint):
    started = time.monotonic()
    try:
        p2p.expect(endpoint, "any").open()
    except PeerLost as error:
        return [time.monotonic() - started, list(error.ranks), str(error)]
    return None


def die_while_the_other_waits(world, is_known):
    p2p = open_p2p(world)
    endpoint = Endpoint(1 - world.rank, 3)
    if world.rank == 1:
        if is_known:
            p2p.send([torch.ones(2)], endpoint, "any")
            p2p.flush()
        time.sleep(0.5)
        leave_at_once(world, None)
    if is_known:
        p2p.expect(endpoint, "any").open()
    leave_at_once(world, time_the_loss(p2p, endpoint))


@pytest.mark.parametrize("is_known", [False, True], ids=["before its first message", "after it"])
def test_a_rank_that_dies_while_the_other_waits_is_named_within_seconds(is_known):
    """Long before the deadline of 20 s."""
    (seconds, ranks, text), _ = run_on_ranks(die_while_the_other_waits, 2, is_known, deadline_seconds=30.0)
    assert seconds < 3.0
    assert ranks == [1] and text.startswith("rank 1 was lost")


def stay_silent(world, deadline):
    p2p = open_p2p(world, deadline_seconds=deadline)
    if world.rank == 1:
        time.sleep(3 * deadline)
        leave_at_once(world, None)
    leave_at_once(world, time_the_loss(p2p, Endpoint(1, 0)))


def test_a_rank_that_is_silent_is_named_when_the_deadline_has_passed():
    (seconds, ranks, text), _ = run_on_ranks(stay_silent, 2, 0.5, deadline_seconds=30.0)
    assert 0.4 < seconds < 1.5
    assert ranks == [1] and "silent for 0.5 s" in text
