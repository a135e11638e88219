"""Collectives through shared memory and through gloo, on real processes, against what one process computes from the same tensors.

Every rank can make every other rank's tensors (they are drawn from the rank's number), so each checks its own results, bit for
bit, and returns the names of what was wrong. Processes start once for each number of ranks.
"""

import os
from pathlib import Path

import pytest
import torch

import shoal.comm.shared as shared_module
from shoal.comm.mesh import build_mesh
from shoal.comm.shared import SLOT_BYTES, SharedTransport
from shoal.comm.sharedmemory import CannotShare
from shoal.comm.torchgroup import TorchTransport
from shoal.core.axes import Axis
from shoal.core.errors import RunError
from shoal.core.plan import Plan
from shoal.testing.ranks import run_on_ranks

DTYPES = [
    torch.float32,
    torch.float64,
    torch.bfloat16,
    torch.float16,
    torch.int64,
    torch.int32,
    torch.uint8,
]
# Small slots, so that the edges between pieces are cheap to reach; the sizes of real runs are used once, at the end.
SMALL_SLOT, SMALL_WHOLE = 16 * 1024, 4 * 1024
SIZES = [1, 3, 65, 1023, 1024, 1025, 4095, 4096, 4097, 3 * 4096 + 77]


def draw(rank, count, dtype=torch.float32, salt=0):
    """A rank's tensor, the same on whichever rank it is made."""
    maker = torch.Generator().manual_seed(1000 * salt + rank)
    if dtype.is_floating_point:
        # Magnitudes far apart, so that another order of the sum gives other bits.
        return (torch.randn(count, generator=maker) * 10.0 ** torch.randint(-4, 4, (count,), generator=maker)).to(dtype)
    return torch.randint(0, 60, (count,), generator=maker).to(dtype)


def in_order(parts, combine=torch.add):
    total = parts[0].clone()
    for part in parts[1:]:
        total = combine(total, part)
    return total


def same(ours, theirs):
    return ours.dtype == theirs.dtype and torch.equal(ours, theirs)


def check_sums(channel, wrong):
    size, rank = channel.size, channel.rank
    for number, (dtype, count) in enumerate([(d, 1001) for d in DTYPES] + [(d, 20_003) for d in DTYPES]):
        parts = [draw(r, count, dtype, number) for r in range(size)]
        if not same(channel.all_reduce_(parts[rank].clone()), in_order(parts)):
            wrong.append(f"all_reduce {dtype} {count}")
        if not same(channel.all_reduce_max_(parts[rank].clone()), in_order(parts, torch.maximum)):
            wrong.append(f"all_reduce_max {dtype} {count}")
    for count in SIZES:
        parts = [draw(r, count) for r in range(size)]
        if not same(channel.all_reduce_(parts[rank].clone()), in_order(parts)):
            wrong.append(f"sum of {count}")
    scalar = channel.all_reduce_(torch.tensor(float(rank)))
    if scalar.shape != () or scalar != sum(range(size)):
        wrong.append("sum of a scalar")


def check_scatter_and_gather(channel, wrong, exact=True):
    size, rank = channel.size, channel.rank
    for base in SIZES:
        for counts in (
            [base] * size,
            [base + 5 * r for r in range(size)],
            [0] * (size - 1) + [base],
            [base] + [0] * (size - 1),
        ):
            ends = [sum(counts[: r + 1]) for r in range(size)]
            mine = slice(ends[rank] - counts[rank], ends[rank])
            wholes = [draw(r, sum(counts)) for r in range(size)]
            wanted = in_order(wholes)[mine]
            for alias in (False, True):
                whole = wholes[rank].clone()
                own = whole[mine] if alias else torch.empty(counts[rank])
                channel.reduce_scatter(whole, own, counts)
                if not (same(own, wanted) if exact else torch.allclose(own, wanted)):
                    wrong.append(f"reduce_scatter {counts} alias={alias}")
                parts = [draw(r, counts[r], salt=7) for r in range(size)]
                whole = torch.full((sum(counts),), -1.0)
                own = whole[mine].copy_(parts[rank]) if alias else parts[rank].clone()
                if not same(channel.all_gather(own, whole, counts), torch.cat(parts)):
                    wrong.append(f"all_gather {counts} alias={alias}")


def check_moves(channel, wrong):
    size, rank = channel.size, channel.rank
    for base in SIZES:
        # What r sends to s has its own size, zero for some.
        def count(r, s, base=base):
            return 0 if (r + s) % 3 == 2 else base + 3 * r + s

        sent = [draw(rank, count(rank, s), salt=s) for s in range(size)]
        received = [torch.full((count(r, rank),), -1.0) for r in range(size)]
        channel.all_to_all(sent, received)
        for r in range(size):
            if not same(received[r], draw(r, count(r, rank), salt=rank)):
                wrong.append(f"all_to_all of {base} from {r}")
        for by in {1, -1, size - 1}:
            incoming = torch.empty(base)
            channel.ring_shift(draw(rank, base), incoming, by=by)
            if not same(incoming, draw((rank - by) % size, base)):
                wrong.append(f"ring_shift of {base} by {by}")
        for source in range(size):
            if not same(channel.broadcast_(draw(rank, base), source), draw(source, base)):
                wrong.append(f"broadcast of {base} from {source}")


def check_all(world):
    shared_module.SLOT_BYTES, shared_module.WHOLE_BYTES = SMALL_SLOT, SMALL_WHOLE
    mesh = build_mesh(world, Plan(dp=world.size))
    channel, wrong = mesh.replicas, []
    if not isinstance(channel.transport, SharedTransport) or channel.transport is not mesh.channel(Axis.DATA).transport:
        wrong.append("one shared transport for dp and replicas")
    check_sums(channel, wrong)
    check_scatter_and_gather(channel, wrong)
    check_moves(channel, wrong)
    shared_module.SLOT_BYTES = SLOT_BYTES
    real = build_mesh(world, Plan(dp=world.size))
    count = 2 * SLOT_BYTES // 4 + 1
    if not same(
        real.replicas.all_reduce_(draw(world.rank, count)), in_order([draw(r, count) for r in range(world.size)])
    ):
        wrong.append("sum with real slots")
    real.close()
    shared_module.SLOT_BYTES = SMALL_SLOT
    weight = torch.nn.Parameter(draw(world.rank, 10))
    kept = (weight * weight).sum()
    channel.broadcast_(weight)
    kept.backward()  # a new version of a saved tensor would be refused here
    before = set(os.listdir("/proc/self/fd"))
    for _ in range(3):
        build_mesh(world, Plan(dp=world.size)).close()
    if set(os.listdir("/proc/self/fd")) != before:
        wrong.append("descriptors left open by a closed mesh")
    mesh.close()
    mesh.close()
    if "shoal-group" in Path("/proc/self/maps").read_text():
        wrong.append("memory left mapped by a closed mesh")
    try:
        channel.all_reduce_(torch.zeros(1))
        wrong.append("a closed mesh was used")
    except RunError as error:
        if "closed" not in str(error):
            wrong.append(str(error))
    return wrong


@pytest.mark.parametrize("num_ranks", [2, 3, 4])
def test_every_operation_equals_one_process(num_ranks):
    assert run_on_ranks(check_all, num_ranks, deadline_seconds=100.0) == [[]] * num_ranks


def check_torch(world):
    mesh = build_mesh(world, Plan(dp=world.size), shared=False)
    wrong = [] if isinstance(mesh.replicas.transport, TorchTransport) else ["not torch's"]
    check_scatter_and_gather(mesh.replicas, wrong, exact=False)
    check_moves(mesh.replicas, wrong)
    return wrong


def test_torchs_groups_do_the_same():
    assert run_on_ranks(check_torch, 2) == [[], []]


def check_mesh_of_four(world):
    mesh = build_mesh(world, Plan(dp=2, tp=2))
    wrong = []
    for name, channel, ranks in [
        ("tp", mesh.channel(Axis.TENSOR), [world.rank // 2 * 2, world.rank // 2 * 2 + 1]),
        ("dp", mesh.channel(Axis.DATA), [world.rank % 2, world.rank % 2 + 2]),
        ("replicas", mesh.replicas, [world.rank % 2, world.rank % 2 + 2]),
        ("everyone", mesh.everyone, [0, 1, 2, 3]),
    ]:
        for count in (5, 50_000):
            if not same(channel.all_reduce_(draw(world.rank, count)), in_order([draw(r, count) for r in ranks])):
                wrong.append(f"{name} {count}")
    for name in ("tp", "dp", "everyone"):
        # torch types neither; without this a group of some ranks would wait for torch's half an hour.
        waits = mesh.group(name)._get_backend(torch.device("cpu")).options._timeout.total_seconds()
        if waits != world.deadline_seconds:
            wrong.append(f"{name} waits {waits} s")
    mesh.close()
    return wrong


def test_axes_of_a_mesh_do_not_mix():
    assert run_on_ranks(check_mesh_of_four, 4) == [[]] * 4


def fall_back(world):
    """One rank cannot open the memory: all of them must find out."""
    if world.rank == 1:

        def refuse(*_, **__):
            raise CannotShare("as if on another host")

        shared_module.open_memory = refuse
    before = set(os.listdir("/proc/self/fd"))
    mesh = build_mesh(world, Plan(dp=world.size))
    left = set(os.listdir("/proc/self/fd")) - before
    total = mesh.replicas.all_reduce_(torch.ones(3))
    return [type(mesh.replicas.transport).__name__, total, len(left)]


def test_all_ranks_fall_back_together():
    for name, total, num_left in run_on_ranks(fall_back, 3):
        assert name == "TorchTransport" and total.tolist() == [3.0] * 3 and num_left == 0


def diverge(world, mine, theirs):
    mesh = build_mesh(world, Plan(dp=world.size))
    operation, count = mine if world.rank == 0 else theirs
    try:
        getattr(mesh.replicas, operation)(torch.ones(count))
    except RunError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("theirs", [["all_reduce_max_", 5], ["all_reduce_", 6]])
def test_ranks_that_do_different_things_are_told(theirs):
    for message in run_on_ranks(diverge, 2, ["all_reduce_", 5], theirs):
        assert "'all_reduce' of 20 bytes" in message and "same order" in message


def name_files(world):
    mesh = build_mesh(world, Plan(dp=world.size))
    mesh.replicas.all_reduce_(torch.ones(5))
    mapped = [line.split(maxsplit=5)[-1] for line in Path("/proc/self/maps").read_text().splitlines()]
    return [path for path in mapped if "shoal" in path.rpartition("/")[2] and not path.endswith((".so", ".py"))]


@pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="memory without a name is Linux's")
def test_shared_memory_has_no_name_that_could_be_left_behind():
    for mapped in run_on_ranks(name_files, 2):
        assert mapped and all(path.startswith("/memfd:") and path.endswith("(deleted)") for path in mapped), mapped
