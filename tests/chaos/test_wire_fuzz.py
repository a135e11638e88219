"""A listener under a storm of wrong messages, beside valid traffic: none accepted, none uncounted, no memory, nobody disturbed.

Every wrong message is made from a seed, so a failure can be had again. The listener is a process of its own: a crash of it would
be seen, and its memory is its own.
"""

import asyncio
import itertools
import os
import random
import socket

import pytest
import zmq

from shoal.comm.wire.errors import DROPPED
from shoal.comm.wire.message import TAKEN, pack_chunk
from shoal.comm.wire.operations import Taken
from support.wire.forged_messages import Forger
from support.wire.node_process import server
from support.wire.operations import DEADLINE, OPERATIONS, Count, Echo, Sum, nodes, noise, raw_dealer

EPOCH = 5
SENDER = "f" * 16
GROWTH_BYTES = 24 << 20
"""What a storm may cost in memory: what the allocator keeps, not what a leak of one message in a hundred would be."""
_NO_ECHO = [None, 5, "x", [], ["1", 0.0], [1, 0.0, 2], [1.5], {"number": 1}, [2**70 % 2**64, "s"]]


class Storm(Forger):
    """Wrong requests."""

    def __init__(self, seed: int, arenas) -> None:
        super().__init__(seed, arenas, sender=SENDER, wrong_bodies=_NO_ECHO)
        self.sequences = itertools.count()
        self.seeds = [self.pack(sequence=next(self.sequences)) for _ in range(50)]
        """Valid messages, sent once in the beginning, and replayed and damaged afterwards."""
        self.kinds = [
            self.random_bytes,
            self.flipped,
            self.flipped_chunk,
            self.replayed,
            self.old_epoch,
            self.other_version,
            self.too_many_frames,
            self.too_few_frames,
            self.unknown_operation,
            self.shape_bomb,
            self.length_bomb,
            self.wrong_dtype,
            self.wrong_length,
            self.wrong_body,
            self.place_outside,
            self.stray_chunk,
            self.broken_stream,
            self.false_note,
        ]

    def fields(self):
        return {
            "epoch": EPOCH,
            "sequence": 10**9 + next(self.sequences),
            "answers": -1,
            "key": "k",
            "deadline": 1.0,
        }

    def body(self):
        return OPERATIONS.encode(Echo(1))

    def messages(self, kind):
        made = kind()
        return made if isinstance(made[0], list) else [made]

    def flipped(self):
        if self.source.random() < 0.5:
            return self.damage(self.source.choice(self.seeds))
        return self.damage(self.pack(payload=self.source.randbytes(40), dtype="uint8", shape=(40,)))

    def replayed(self):
        return self.source.choice(self.seeds)

    def old_epoch(self):
        return self.pack(epoch=self.source.randrange(EPOCH))

    def unknown_operation(self):
        return self.pack(operation=self.source.choice(["", "Echo", "!refused", "rm", "push" * 16]))

    def stray_chunk(self):
        return [bytes(frame) for frame in pack_chunk(self.source.getrandbits(63), 0, memoryview(b"stray"))]

    def false_note(self):
        return self.pack(
            body=OPERATIONS.encode(Taken()),
            operation=TAKEN,
            answers=self.source.randrange(100),
            key=f"{SENDER}-1.arena",
        )


async def blow(storm, dealer, num):
    """Send ``num`` wrong messages; answers are read and thrown away."""
    sent = 0
    while sent < num:
        for frames in storm.messages(storm.source.choice(storm.kinds)):
            await send(dealer, frames)
            sent += 1
        if sent % 50 == 0:
            drain(dealer)
            await asyncio.sleep(0)
    return sent


async def send(dealer, frames):
    while True:
        try:
            return dealer.send_multipart(frames, zmq.NOBLOCK)
        except zmq.Again:
            drain(dealer)
            await asyncio.sleep(0.001)


def drain(dealer):
    while dealer.poll(0):
        dealer.recv_multipart()


async def talk(peer, is_over):
    """Valid calls of every kind, until it is over; each must be answered rightly."""
    num = 0
    messages = 0
    while not is_over(messages):
        payload = noise((0, 5, 70_000, 300_000)[num % 4], num)
        found = await peer.call(Echo(num), payload=payload, deadline=DEADLINE)
        assert found.body.number == num and bytes(found.payload) == payload.tobytes()
        total = await peer.call(Sum(), payload=payload, deadline=DEADLINE)
        assert total.body.total == int(payload.sum(dtype="int64"))
        del found, total
        num += 1
        messages += 2
    return messages


async def settle(peer, num_expected):
    """What the server has counted once everything has arrived, and how often it was asked."""
    for asked in range(1, 2000):
        found = (await peer.call(Count(), deadline=DEADLINE)).body
        if found.counts["received"] >= num_expected + asked:
            return found, asked
        await asyncio.sleep(0.005)
    raise AssertionError(f"{found.counts} and {num_expected} messages")


async def storm_and_traffic(seed, arenas, address, num):
    storm = Storm(seed, arenas)
    (arenas / f"{SENDER}-1.arena").write_bytes(b"x" * (1 << 20))
    (arenas / f"{SENDER}-1.arena").chmod(0o600)
    async with nodes(2) as (client, watcher), raw_dealer(address) as dealer:
        client.epoch = EPOCH
        peer, watch = client.connect(address), watcher.connect(address)
        for frames in storm.seeds:
            await send(dealer, frames)
        num_warm = await blow(storm, dealer, num // 10)
        before, num_asked = await settle(watch, len(storm.seeds) + num_warm)
        is_over = False
        # The storm blows for as long as it takes that valid calls have gone through the midst of it.
        traffic = asyncio.ensure_future(talk(peer, lambda num_done: is_over and num_done > 4))
        num_wrong = num_warm + await blow(storm, dealer, num)
        is_over = True
        while not traffic.done():
            num_wrong += await blow(storm, dealer, 50)
        num_valid = await traffic
        num_all = len(storm.seeds) + num_wrong + num_valid
        after, again = await settle(watch, num_all + num_asked)
        return before, after, num_wrong, len(storm.seeds) + num_valid + num_asked + again, num_valid


def check(before, after, num_wrong, num_right, num_valid):
    counts = after.counts
    # The question that is being answered is accepted already.
    assert counts["received"] == num_wrong + num_right
    assert counts["accepted"] == num_right
    assert sum(counts.get(reason, 0) for reason in DROPPED) == num_wrong
    expected = (
        "frames",
        "malformed",
        "version",
        "unknown",
        "oversized",
        "payload",
        "place",
        "corrupt",
        "stale",
        "duplicate",
    )
    assert all(counts.get(reason, 0) > 0 for reason in (*expected, "incomplete"))
    assert after.num_streams == 0 and num_valid > 4
    assert after.resident_bytes - before.resident_bytes < GROWTH_BYTES


def run_storm(seed, tmp_path, kind, num):
    tmp_path.chmod(0o700)
    address = f"ipc://{tmp_path}/s.sock" if kind == "ipc" else "tcp://127.0.0.1:0"
    with server(address, arenas=tmp_path, epoch=EPOCH) as (process, bound):
        found = asyncio.run(storm_and_traffic(seed, tmp_path, bound, num))
        assert process.poll() is None
    check(*found)
    return found


@pytest.mark.parametrize(("seed", "kind"), [(1, "ipc"), (2, "tcp")])
def test_a_storm_of_wrong_messages(seed, kind, tmp_path):
    run_storm(seed, tmp_path, kind, 10_000)


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_a_storm_of_a_million(tmp_path, capsys):
    before, after, num_wrong, num_right, num_valid = run_storm(3, tmp_path, "ipc", 1_000_000)
    with capsys.disabled():
        grown = (after.resident_bytes - before.resident_bytes) / 2**20
        print(
            f"\n{num_wrong} wrong, {num_valid} valid beside them, {num_right} accepted, {grown:+.1f} MB: {after.counts}"
        )


def test_a_frame_above_the_limit_ends_its_connection_and_no_other(tmp_path):
    tmp_path.chmod(0o700)

    async def work(address):
        async with nodes(1) as [client]:
            client.epoch = EPOCH
            peer = client.connect(address)
            before = (await peer.call(Count(), deadline=DEADLINE)).body
            for _ in range(5):
                async with raw_dealer(address) as dealer:
                    monitor = dealer.get_monitor_socket(zmq.EVENT_DISCONNECTED)
                    dealer.send_multipart([b"x" * (64 << 20)])
                    assert monitor.poll(5000), "the connection goes on"
                    dealer.disable_monitor()
                    monitor.close()
                    found = await peer.call(Echo(7), payload=noise(5000), deadline=DEADLINE)
                    assert bytes(found.payload) == noise(5000).tobytes()
            after = (await peer.call(Count(), deadline=DEADLINE)).body
            assert after.counts["received"] == after.counts["accepted"] == 7
            assert after.resident_bytes - before.resident_bytes < GROWTH_BYTES

    with server("tcp://127.0.0.1:0", epoch=EPOCH) as (process, bound):
        asyncio.run(work(bound))
        assert process.poll() is None


def test_bytes_that_are_not_even_of_the_transport(tmp_path):
    """Straight to the port: garbage, half a greeting, and a greeting with garbage behind it."""
    greeting = b"\xff" + b"\0" * 8 + b"\x7f\x03\x00NULL" + b"\0" * 48
    source = random.Random(4)

    async def work(address):
        host, _, port = address.removeprefix("tcp://").partition(":")
        async with nodes(1) as [client]:
            client.epoch = EPOCH
            peer = client.connect(address)
            await peer.call(Count(), deadline=DEADLINE)
            for number in range(150):
                with socket.create_connection((host, int(port)), timeout=2) as plain:
                    begin = greeting[: source.choice([0, 11, 40, 64])]
                    try:
                        plain.sendall(begin + source.randbytes(source.randint(1, 5000)))
                    except OSError:
                        pass  # It has hung up already.
                if number % 10 == 0:
                    assert (await peer.call(Echo(number), deadline=DEADLINE)).body.number == number
            after = (await peer.call(Count(), deadline=DEADLINE)).body
            # The transport takes some of it for frames of its first version.
            assert after.counts["accepted"] == 1 + 15 + 1
            assert after.counts["received"] == 17 + sum(after.counts.get(reason, 0) for reason in DROPPED)

    with server("tcp://127.0.0.1:0", epoch=EPOCH) as (process, bound):
        asyncio.run(work(bound))
        assert process.poll() is None


def test_the_checks_can_fail(tmp_path, monkeypatch):
    """A storm that holds one message more than it says is noticed."""
    tmp_path.chmod(0o700)
    assert os.listdir(tmp_path) == []
    with server(f"ipc://{tmp_path}/s.sock", arenas=tmp_path, epoch=EPOCH) as (_, bound):
        before, after, num_wrong, num_right, num_valid = asyncio.run(storm_and_traffic(5, tmp_path, bound, 2000))
    check(before, after, num_wrong, num_right, num_valid)
    for wrong in ((num_wrong + 1, num_right), (num_wrong, num_right + 1), (num_wrong - 1, num_right + 1)):
        with pytest.raises(AssertionError):
            check(before, after, *wrong, num_valid)
