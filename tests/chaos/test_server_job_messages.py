"""Messages that are lost, doubled, delayed, reordered and damaged, while members die: the same weights, bit for bit."""

import asyncio
import random

import pytest
import torch
from msgspec.structs import replace

from shoal.comm.wire import message as wire_header
from shoal.comm.wire.errors import Refused
from shoal.comm.wire.listener import Request
from shoal.core.errors import RequestError
from shoal.paramserver.messages import Commit, Pulled, Push
from shoal.paramserver.records import PushRecord
from shoal.paramserver.sharding import TensorSpec
from shoal.paramserver.worker.client import GradientRefused
from support.paramserver.job_in_process import (
    ATTEMPT_SECONDS,
    Faults,
    alone,
    gradient_of,
    install_faults,
    quicken,
    running_job,
)

STEPS, SHARES = 12, 2

KINDS = {
    "lost": {"lose": 0.02},
    "doubled": {"double": 0.15},
    "delayed and reordered": {"delay": 0.15},
    "damaged": {"corrupt": 0.02},
    "all of it": {"lose": 0.01, "double": 0.05, "delay": 0.05, "corrupt": 0.01},
}


@pytest.fixture
def folder(tmp_path_factory):
    # Short: the path of a socket has room for a hundred letters.
    return tmp_path_factory.mktemp("c")


@pytest.fixture(autouse=True)
def _quick(monkeypatch):
    quicken(monkeypatch)


def run(work):
    asyncio.run(work)


@pytest.mark.parametrize("kind", KINDS)
def test_faulty_messages_change_no_bit(folder, monkeypatch, kind):
    faults = Faults(seed=len(kind), **KINDS[kind])
    install_faults(monkeypatch, faults)

    async def work():
        async with running_job(folder, steps=STEPS, shares=SHARES) as job:
            assert torch.equal(await job.finish(), alone(steps=STEPS, shares=SHARES))

    run(work())
    assert set(faults.met) == set(KINDS[kind]), "the faults never struck"


@pytest.mark.parametrize("update", ["async", "ssp:2", "half:2,0.2"])
def test_every_rule_counts_each_unit_once(folder, monkeypatch, update):
    install_faults(monkeypatch, Faults(seed=3, **KINDS["all of it"]))

    async def work():
        async with running_job(folder, update=update, steps=STEPS, shares=3, workers=3) as job:
            await job.finish()  # checks the log

    run(work())


async def disturb(job, dice, *, kills):
    """Kill members at random moments and start others in their place."""
    for place in range(kills):
        await job.until_update(min(2 + 2 * place, job.steps - 3))
        name = dice.choice([name for name in job.members if not name.startswith("center") or len(job.members) > 5])
        await job.kill(name)
        role = name.partition("-")[0]
        start = {"server": job.start_server, "worker": job.start_worker, "center": job.start_center}[role]
        await start(name)


def seeds(quick, slow):
    return [*quick, *(pytest.param(seed, marks=pytest.mark.soak) for seed in slow)]


@pytest.mark.parametrize("seed", seeds(range(3), range(3, 60)))
def test_deaths_at_any_moment_change_no_bit(folder, seed):
    async def work():
        async with running_job(folder, steps=STEPS, shares=SHARES, centers=2) as job:
            await disturb(job, random.Random(seed), kills=4)
            assert torch.equal(await job.finish(), alone(steps=STEPS, shares=SHARES))

    run(work())


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(40))
def test_deaths_and_faulty_messages_change_no_bit(folder, monkeypatch, seed):
    install_faults(monkeypatch, Faults(seed=seed, **KINDS["all of it"]))

    async def work():
        async with running_job(folder, steps=STEPS, shares=SHARES, centers=2) as job:
            await disturb(job, random.Random(seed), kills=3)
            assert torch.equal(await job.finish(), alone(steps=STEPS, shares=SHARES))

    run(work())


@pytest.mark.parametrize("seed", seeds([0], range(1, 20)))
def test_two_backups_and_the_leader_dies_again_and_again(folder, seed):
    async def work():
        async with running_job(folder, steps=16, shares=SHARES, servers=3, backups=2) as job:
            for number in (2, 5, 8):
                await job.until_update(number + seed % 3)
                name = job.named(job.view().chains[0].primary)
                await job.kill(name)
                await job.start_server(name)
            await job.finish()

    run(work())


def test_not_a_number_is_refused_counted_and_told(folder):
    async def work():
        async with running_job(folder, steps=STEPS, shares=SHARES, workers=1) as job:
            await job.until_update(3)
            await job.kill("worker-0")
            version = await job.until_level()
            before = [replica.state.weights.clone() for server in job.servers() for replica in server.replicas.values()]

            def poisoned(weights, step, share):
                gradient = gradient_of(weights, step, share)
                gradient[1] = float("nan")
                return gradient

            member = await job.start_worker("worker-9", compute=poisoned)
            with pytest.raises(GradientRefused, match=r"NaN or infinity in the gradient of '.*'"):
                await asyncio.wait_for(asyncio.shield(member.tasks[0]), 60)
            assert sum(server.num_not_finite for server in job.servers()) == 1
            assert await job.until_level() == version
            after = [replica.state.weights for server in job.servers() for replica in server.replicas.values()]
            assert all(torch.equal(*pair) for pair in zip(before, after, strict=True))
            await job.members.pop("worker-9").kill()
            # Its work unit is done by another, and the result is what it would have been.
            await job.start_worker("worker-1")
            assert torch.equal(await job.finish(), alone(steps=STEPS, shares=SHARES))

    run(work())


def test_a_worker_with_another_model_is_named_at_the_door(folder):
    async def work():
        async with running_job(folder, steps=STEPS, shares=SHARES) as job:
            await job.until_update(1)
            other = {**job.model, "0.weight": TensorSpec((9, 7), "float32")}
            member = await job.start_worker("worker-7", model=other)
            with pytest.raises(RequestError, match=r"worker-7 .*'0.weight' is \[9, 6\] .* and \[9, 7\]"):
                await asyncio.wait_for(asyncio.shield(member.tasks[0]), 60)
            await job.members.pop("worker-7").kill()
            assert torch.equal(await job.finish(), alone(steps=STEPS, shares=SHARES))

    run(work())


def test_an_old_protocol_is_told_which_release_to_run(folder, monkeypatch):
    async def work():
        async with running_job(folder, steps=200, shares=SHARES) as job:
            await job.until_update(1)
            member = await job.start_worker("worker-7")
            original = member.node._header

            def old(*arguments, **options):
                made = original(*arguments, **options)
                fields = {name: getattr(made, name) for name in made.__struct_fields__}
                return wire_header.Header(**{**fields, "version": 0})

            monkeypatch.setattr(member.node, "_header", old)
            with pytest.raises(RequestError, match="speaks version 0 of the protocol, this process 1; run one release"):
                await asyncio.wait_for(asyncio.shield(member.tasks[0]), 60)
            await job.members.pop("worker-7").kill()
            job.check()

    run(work())


def test_what_comes_with_an_old_epoch_is_refused(folder):
    async def work():
        async with running_job(folder, steps=200, shares=SHARES) as job:
            await job.until_update(2)
            view = job.view()
            stranger = job.make_node()
            stranger.epoch = view.epoch - 1
            peer = stranger.connect(view.member(view.chains[0].primary).address)
            gradient = torch.zeros(job.shard_map.shards[0].numel)
            with pytest.raises(Refused) as caught:
                await peer.call(Push(shard=0, number=0, version=2), payload=gradient, deadline=2.0)
            assert caught.value.code == "stale"
            # The right epoch does not make a member of it, nor does an epoch that nobody has yet.
            for ahead, code in ((0, "stranger"), (5, "epoch")):
                stranger.epoch = job.view().epoch + ahead  # The one of now: a member that joins late makes another.
                for _ in range(50):
                    with pytest.raises(Refused) as caught:
                        await peer.call(Push(shard=0, number=0, version=2), payload=gradient, deadline=2.0)
                    if caught.value.code == code or ahead:
                        break  # Else this server has not heard of the newest epoch yet.
                assert caught.value.code == code
            await stranger.close()
            job.check()

    run(work())


async def view_with(member):
    """The view that a member is in: the others may have made updates before it joined."""
    async with asyncio.timeout(30):
        while member.contact is None or (view := member.contact.view) is None or not view.find(member.node.instance_id):
            await asyncio.sleep(0.01)
    return view


def test_a_gradient_of_another_length_or_type_is_refused(folder):
    async def work():
        async with running_job(folder, steps=200, shares=SHARES) as job:
            await job.until_update(2)
            member = job.members["worker-0"]
            view = await view_with(member)
            peer = member.node.connect(view.member(view.chains[0].primary).address)
            numel = job.shard_map.shards[0].numel
            # The last has the length of a right one, and other numbers.
            wrong = (
                torch.zeros(3),
                torch.zeros(numel, dtype=torch.float64),
                b"abc",
                torch.ones(numel, dtype=torch.int32),
            )
            for payload in wrong:
                with pytest.raises(Refused) as caught:
                    await peer.call(Push(shard=0, number=10**6, version=2), payload=payload, deadline=2.0)
                assert caught.value.code == "shape"
            job.check()

    run(work())


def test_a_commit_without_its_gradients_is_not_a_way_in(folder):
    """A worker that commits a work unit which is not in its hands is refused, and nothing of it is in any update."""

    async def work():
        async with running_job(folder, steps=200, shares=SHARES) as job:
            await job.until_update(2)
            member = job.members["worker-0"]
            view = await view_with(member)
            peer = member.node.connect(view.member(view.chains[0].primary).address)
            made_up = PushRecord(
                worker=member.node.instance_id,
                number=10**6,
                units=(399,),
                samples=1,
                weight=1.0,
                loss=0.0,
                version=1,
            )
            with pytest.raises(Refused, match=r"unfit.*work unit 399 is not in this worker's hands"):
                await peer.call(Commit(push=made_up), deadline=2.0)
            of_another = replace(made_up, worker=job.members["worker-1"].node.instance_id)
            with pytest.raises(Refused, match=r"stranger.* commits what .* is said to have done"):
                await peer.call(Commit(push=of_another), deadline=2.0)
            await job.until_update(max(job.updates) + 2)
            entries = [entry.identity for made in job.updates.values() for entry in made.entries]
            assert made_up.identity not in entries

    run(work())


def test_while_there_is_no_center_training_goes_on(folder):
    async def work():
        async with running_job(folder, steps=60, shares=SHARES) as job:
            await job.until_update(3)
            await job.kill("center-0", tell=False)
            await job.until_update(max(job.updates) + 10)
            # And the death of a member is made good as soon as there is one again.
            await job.kill("server-1", tell=False)
            dead = [member.id for member in job.view().servers if member.name == "server-1"]
            await job.start_center("center-1")
            await job.tell_dead(dead[0])
            await job.start_server("server-1")
            assert torch.equal(await job.finish(), alone(steps=60, shares=SHARES))

    run(work())


def test_calls_to_a_dead_server_end_with_the_next_view(folder, monkeypatch):
    """Not with their deadline: the time between a death and the next update is the view's time, not a timeout."""

    async def work():
        async with running_job(folder, steps=40, shares=SHARES) as job:
            for member in list(job.members.values()):
                if member.client is not None:
                    member.client._attempt = 30.0
            await job.until_update(3)
            name = job.named(job.view().chains[1].primary)
            loop = asyncio.get_running_loop()
            started = loop.time()
            await job.kill(name)
            await job.until_update(max(job.updates) + 2)
            assert loop.time() - started < 5.0
            assert ATTEMPT_SECONDS < 5.0
            await job.start_server(name)
            assert torch.equal(await job.finish(), alone(steps=40, shares=SHARES))

    run(work())


def test_a_reader_that_stops_in_the_middle_holds_no_update_up(folder, monkeypatch):
    """Its answer was sent under the lock that an update needs: one worker on a slow link held the shard up for everyone."""
    answer, stalled, kept = Request.answer, [], []

    async def stall(self, body, payload=None):
        if isinstance(body, Pulled) and payload is not None and not stalled:
            stalled.append(payload.clone())
            await job.until_update(8)
            # Judged at the end: what is raised in here is the server's to answer for, and the worker would only ask again.
            kept.append(torch.equal(payload, stalled[0]))
        await answer(self, body, payload)

    monkeypatch.setattr(Request, "answer", stall)

    async def work():
        nonlocal job
        async with running_job(folder, update="async", steps=STEPS, shares=SHARES) as job:
            async with asyncio.timeout(20):
                await job.until_update(8)
            await job.finish()

    job = None
    run(work())
    assert kept == [True], "the weights of another version are sent"


def test_who_waits_long_for_another_worker_is_told_for_whom(folder):
    """A worker whose computation hangs still gives signs of life, and holds everyone up: its name must be somewhere."""

    class HangsError(Exception):
        pass

    def hang(weights, step, share):
        raise HangsError

    async def work():
        async with running_job(folder, steps=10_000, shares=SHARES) as job:
            await job.until_update(1)
            told = []
            for name in ("worker-0", "worker-1"):
                # The first update may be one worker's alone.
                while (client := job.members[name].client) is None:
                    await asyncio.sleep(0.01)
                client._deadline, client._tell = 1.5, told.append
            hanging = await job.start_worker("worker-2", compute=hang)
            async with asyncio.timeout(60):
                while not told:
                    await asyncio.sleep(0.01)
            assert isinstance(hanging.tasks[0].exception(), HangsError)
            hanging.tasks.clear()
            assert told[0].startswith("nothing to do for 1.5 s: waiting for update ")
            assert "worker-2 is at it" in told[0], told

    run(work())
