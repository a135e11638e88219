"""Ranks on several hosts end in the bits of one host and send less between them than an exchange of all ranks with all.

The hosts here are named by hand (``world.hosts``): ranks of different ones do not share memory, whatever the machine. Real hosts,
which are network namespaces, are in ``test_namespaces.py``.
"""

import threading

import pytest
import torch
import torch.distributed as dist

import shoal.comm.twolevel as twolevel
from shoal.comm.mesh import build_mesh, inner_transport
from shoal.comm.shared import SharedTransport
from shoal.core.axes import Axis
from shoal.core.errors import RunError
from shoal.core.plan import Plan
from shoal.data.build import build_splits
from shoal.data.config import SyntheticConfig
from shoal.engine.config import TrainConfig
from shoal.engine.sizes import RankPreview
from shoal.models.build import build_model
from shoal.models.config import GptConfig
from shoal.models.losses import build_loss
from shoal.optim.config import OptimConfig
from shoal.parallel.state_bytes import measure_state_bytes
from shoal.testing.ranks import run_on_ranks
from shoal.trainer.loop import Trainer

PLANS = ["dp=4", "dp=4 zero=1", "dp=4 zero=2", "dp=4 zero=3"]
ONE, TWO, CYCLIC = [0, 0, 0, 0], [0, 0, 1, 1], [0, 1, 0, 1]
STEPS = 3
COUNT = 40_000
"""Elements of a tensor: several chunks of what is sent at a time here."""


def train(world, plan, hosts):
    """The hash of the weights after a few steps, and predicted and measured bytes of the buffers that units pass through."""
    world.hosts = tuple(hosts)
    config = GptConfig(layers=2, hidden=32, heads=2)
    data = build_splits(SyntheticConfig(sequence=8, samples=64), 1)
    torch.manual_seed(1)
    trainer = Trainer(
        build_model(config, data.spec),
        data,
        loss=build_loss(config, data.spec),
        train=TrainConfig(steps=STEPS, global_batch=8, seed=1),
        optim=OptimConfig(name="adamw", lr=1e-2),
        plan=Plan.parse(plan),
        world=world,
    )
    plain = build_model(config, data.spec)
    for _ in trainer.training_steps():
        pass
    found, engine = trainer.hash_weights(), trainer.engine
    preview = RankPreview.build(
        plain, analysis=engine.analysis, plan=trainer.plan, rank=world.rank, precision=engine.precision
    )
    overlaps = trainer.mesh.channel(Axis.DATA).overlaps
    predicted = preview.state_bytes(trainer.settings.optim, overlaps=overlaps).working
    measured = measure_state_bytes(trainer.model, engine.reduction, engine.optimizer).working
    engine.close()
    return found, predicted, measured


def draw(rank):
    maker = torch.Generator().manual_seed(rank)
    # Magnitudes far apart, so that another order of the sum gives other bits.
    return torch.randn(COUNT, generator=maker) * 10.0 ** torch.randint(-4, 4, (COUNT,), generator=maker)


def in_order(parts):
    total = parts[0].clone()
    for part in parts[1:]:
        total += part
    return total


def crossing_bytes(mesh, hosts, operation):
    """What this rank sends to ranks of other hosts in an operation."""
    sent, real = [0], dist.isend

    def counted(tensor, peer, **others):
        sent[0] += tensor.nbytes if hosts[peer] != hosts[dist.get_rank()] else 0
        return real(tensor, peer, **others)

    dist.isend = counted
    try:
        operation(mesh.replicas)
    finally:
        dist.isend = real
    return sent[0]


def reduce_scatter(channel):
    channel.reduce_scatter(torch.ones(COUNT), torch.empty(COUNT // 4), [COUNT // 4] * 4)


def all_gather(channel):
    channel.all_gather(torch.ones(COUNT // 4), torch.empty(COUNT), [COUNT // 4] * 4)


def all_reduce(channel):
    channel.all_reduce_(torch.ones(COUNT))


def look(world):
    """All that is looked at on four ranks, which start once."""
    twolevel.CHUNK_BYTES = 4096
    trained = [[train(world, plan, hosts) for hosts in (ONE, TWO)] for plan in PLANS]
    found = {
        "hashes": [[one[0] for one in of] for of in trained],
        "working": [[one[1:] for one in of] for of in trained],
    }
    wanted, terms = in_order([draw(rank) for rank in range(4)]), draw(world.rank)
    for name, hosts in (("two levels", TWO), ("all with all", CYCLIC)):
        world.hosts = tuple(hosts)
        mesh = build_mesh(world, Plan(dp=4))
        found[name] = type(inner_transport(mesh.replicas)).__name__
        found[f"{name}: bytes"] = [
            crossing_bytes(mesh, hosts, operation) for operation in (all_reduce, all_gather, reduce_scatter)
        ]
        found[f"{name}: same"] = bool(torch.equal(mesh.replicas.all_reduce_(terms.clone()), wanted))
        # Started together, the second waits for the first, and an operation that is waited for at once waits for both.
        first, second = terms.clone(), terms.clone() * 2
        handles = [mesh.replicas.start_all_reduce_(tensor) for tensor in (first, second)]
        third = mesh.replicas.all_reduce_(terms.clone())
        for handle in handles:
            handle.wait()
        doubled = in_order([2 * draw(rank) for rank in range(4)])
        found[f"{name}: started"] = all(
            torch.equal(*pair) for pair in ((first, wanted), (second, doubled), (third, wanted))
        )
        found[f"{name}: bug"] = bool(torch.equal(with_bug(mesh, terms.clone()), wanted))
        mesh.close()
        found[f"{name}: closed"] = closed_message(mesh)
    found["threads"] = [one.name for one in threading.enumerate() if one.name.startswith("shoal dp")]
    return found


def with_bug(mesh, tensor):
    """A sum in which what came from the host before is added last and not first."""
    real = SharedTransport.reduce_parts

    def wrong(self, parts, own, carry):
        kept = None if carry is None else carry.clone()
        real(self, parts, own, None)
        if kept is not None:
            own += kept

    SharedTransport.reduce_parts = wrong
    try:
        return mesh.replicas.all_reduce_(tensor)
    finally:
        SharedTransport.reduce_parts = real


def closed_message(mesh):
    try:
        mesh.replicas.all_reduce_(torch.ones(3))
    except RunError as error:
        return str(error)
    return ""


@pytest.fixture(scope="module")
def ranks():
    return run_on_ranks(look, 4, deadline_seconds=100.0)


def test_weights_do_not_depend_on_how_many_hosts_the_ranks_are_on(ranks):
    for number, plan in enumerate(PLANS):
        hashes = {found for rank in ranks for found in rank["hashes"][number]}
        assert len(hashes) == 1, f"{plan} on one host and on two: {hashes}"


def test_buffers_of_units_on_their_way_between_hosts_are_predicted(ranks):
    for rank in ranks:
        for predicted, measured in (pair for plan in rank["working"] for pair in plan):
            assert predicted == measured
        for number in (2, 3):
            (near, _), (far, _) = rank["working"][number]
            assert far > near, f"{PLANS[number]}: nothing more is under way between hosts"


def test_sums_run_in_the_order_of_ranks(ranks):
    for rank in ranks:
        assert rank["two levels"] == "TwoLevelTransport" and rank["all with all"] == "TorchTransport"
        assert rank["two levels: same"] and rank["all with all: same"]
        assert rank["two levels: started"] and rank["all with all: started"]
        assert not rank["two levels: bug"], "another order was not seen"
        assert rank["all with all: bug"], "the bug was planted in two levels only"


def test_two_levels_send_less_than_all_with_all(ranks):
    num_bytes = 4 * COUNT
    near = [sum(sent) for sent in zip(*(rank["two levels: bytes"] for rank in ranks), strict=True)]
    far = [sum(sent) for sent in zip(*(rank["all with all: bytes"] for rank in ranks), strict=True)]
    assert near == [2 * num_bytes, num_bytes, num_bytes * 3 // 2]
    # A gather of four ranks goes round a ring with two crossings, a reduction goes from each rank to two of another host.
    assert far == [num_bytes * 7 // 2, num_bytes * 3 // 2, 2 * num_bytes]


def test_a_closed_mesh_is_refused_and_leaves_no_thread(ranks):
    for rank in ranks:
        assert "closed" in rank["two levels: closed"] and "closed" in rank["all with all: closed"]
        assert rank["threads"] == []
