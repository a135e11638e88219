"""Calls between nodes of one process, over every kind of address: answers, refusals, deadlines, and what is counted."""

import asyncio

import numpy as np
import pytest
import torch

from shoal.comm.wire import arena, buffers, listener
from shoal.comm.wire import payloads as streams
from shoal.comm.wire.errors import Refused, WireClosed, WireTimeout
from shoal.comm.wire.message import BODY_BYTES
from shoal.comm.wire.node import Node, new_instance_id
from shoal.comm.wire.operations import Body, Op, Operations
from shoal.core.errors import RequestError, RunError
from support.wire.operations import DEADLINE, Echo, Echoed, Late, Sum, answer, as_tensor, make_node, nodes, noise, until

KINDS = ("inproc", "ipc", "tcp", "arena", "tcp-arena")


def options_for(kind, tmp_path) -> tuple[str, dict]:
    if kind.endswith("arena"):
        tmp_path.chmod(0o700)
        address = "tcp://127.0.0.1:0" if kind == "tcp-arena" else f"ipc://{tmp_path}/s.sock"
        return address, {"arena_dir": tmp_path}
    return {"inproc": f"inproc://{tmp_path.name}", "ipc": f"ipc://{tmp_path}/s.sock", "tcp": "tcp://127.0.0.1:0"}[
        kind
    ], {}


@pytest.fixture(params=KINDS)
def talk(request, tmp_path):
    """Runs a conversation between two nodes, with an address of each kind."""
    address, options = options_for(request.param, tmp_path)

    def run(work, handler=answer):
        async def conversation():
            async with nodes(2, **options) as (server, client):
                bound = await server.listen(address, handler)
                await work(server, client, client.connect(bound))

        asyncio.run(conversation())

    return run


@pytest.mark.parametrize("num_bytes", [0, 1, 70_000, 1 << 20, (1 << 20) + 1, 5_000_001])
def test_payloads_come_back_bit_for_bit(talk, num_bytes):
    async def work(server, client, peer):
        sent = noise(num_bytes)
        for into in (None, np.zeros_like(sent), None, np.zeros_like(sent)):
            found = await peer.call(Echo(num_bytes), payload=sent, deadline=DEADLINE, into=into)
            assert found.body == Echoed(num_bytes)
            assert np.array_equal(np.frombuffer(found.payload, np.uint8), sent)
            if into is not None:
                assert np.array_equal(into, sent)
        counters = server.counters
        assert counters["received"] == counters["accepted"] and counters.dropped == 0 == client.counters.dropped

    talk(work)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64])
def test_tensors_keep_their_dtype_and_shape(talk, dtype):
    async def handler(request):
        await request.answer(Echoed(0), payload=as_tensor(request).clone())

    async def work(server, client, peer):
        for shape in ((), (0, 3), (3, 5), (70, 1000)):
            sent = torch.randn(shape).to(dtype)
            found = as_tensor(await peer.call(Echo(0), payload=sent, deadline=DEADLINE))
            assert found.dtype == dtype and found.shape == sent.shape and torch.equal(found, sent)

    talk(work, handler)


def test_a_call_without_a_payload_has_none(talk):
    async def work(server, client, peer):
        assert (await peer.call(Echo(1), deadline=DEADLINE)).payload is None

    talk(work)


def test_many_calls_at_once_are_each_answered(talk):
    async def work(server, client, peer):
        async def one(number):
            payload = noise(3000 * number, number)
            found = await peer.call(Echo(number), payload=payload, deadline=DEADLINE)
            assert found.body.number == number and bytes(found.payload) == payload.tobytes()

        await asyncio.gather(*(one(number) for number in range(60)), *(one(700) for _ in range(4)))

    talk(work)


def test_a_parked_request_is_answered_later_and_holds_nobody_up(talk):
    parked = []

    async def handler(request):
        if request.body.number == 0:
            parked.append(request)
        else:
            await answer(request)

    async def work(server, client, peer):
        payload = noise(200_000)
        waiting = asyncio.ensure_future(peer.call(Echo(0), payload=payload, deadline=DEADLINE))
        await until(lambda: parked)
        for number in (1, 2, 3):
            await peer.call(Echo(number), payload=noise(200_000, number), deadline=DEADLINE)
        [request] = parked
        assert not waiting.done() and request.is_open and 0 < request.remaining <= DEADLINE
        assert bytes(request.payload) == payload.tobytes()
        await request.answer(Echoed(9))
        assert (await waiting).body.number == 9 and not request.is_open
        with pytest.raises(AssertionError):
            await request.answer(Echoed(9))

    talk(work, handler)


def test_a_refusal_says_why(talk):
    async def handler(request):
        await request.refuse("nan", "the gradient of shard 3 holds NaN")

    async def work(server, client, peer):
        server.epoch = 5
        with pytest.raises(Refused, match="NaN") as caught:
            await peer.call(Late(), deadline=DEADLINE)
        assert caught.value.code == "nan" and caught.value.epoch == 5
        assert peer.address in str(caught.value) and "late" in str(caught.value)

    talk(work, handler)


def test_an_epoch_that_is_over_is_refused_and_a_newer_one_is_not(talk):
    async def work(server, client, peer):
        client.epoch, server.epoch = 3, 4
        with pytest.raises(Refused) as caught:
            await peer.call(Echo(1), deadline=DEADLINE)
        assert (caught.value.code, caught.value.epoch) == ("stale", 4) and server.counters["stale"] == 1
        assert (await peer.call(Late(), deadline=DEADLINE)).epoch == 4
        client.epoch = 5
        assert (await peer.call(Echo(2), deadline=DEADLINE)).body.number == 2

    talk(work)


def test_a_member_that_has_not_heard_of_the_epoch_yet_is_refused_as_one(talk):
    """While others join, every run had some, and called them stale: a word for what the dead and the evicted send."""

    async def work(server, client, peer):
        client.epoch, server.epoch, server.members = 3, 4, frozenset({client.instance_id})
        with pytest.raises(Refused) as caught:
            await peer.call(Echo(1), deadline=DEADLINE)
        assert caught.value.code == "behind"
        assert (server.counters["behind"], server.counters["stale"], server.counters.dropped) == (1, 0, 1)

    talk(work)


def test_silence_ends_at_the_deadline_and_names_who_was_silent(talk):
    async def handler(request):
        await asyncio.sleep(60)

    async def work(server, client, peer):
        for attempts in (1, 3):
            started = asyncio.get_running_loop().time()
            with pytest.raises(WireTimeout) as caught:
                await peer.call(Echo(1), deadline=0.3, attempts=attempts, payload=noise(100_000))
            took = asyncio.get_running_loop().time() - started
            assert 0.25 < took < 3 and peer.address in str(caught.value) and "echo" in str(caught.value)
            assert ("0.3 s" if attempts == 1 else "3 attempts in 0.3 s") in str(caught.value)
        assert server.counters["accepted"] >= 4

    talk(work, handler)


def test_an_answer_that_comes_too_late_is_counted_and_dropped(talk):
    async def work(server, client, peer):
        with pytest.raises(WireTimeout):
            await peer.call(Echo(1, seconds=0.2), deadline=0.1)
        await until(lambda: server.counters["expired"] == 1)
        assert (await peer.call(Echo(2), deadline=DEADLINE)).body.number == 2

    talk(work)


def test_a_closed_peer_fails_its_calls_at_once(talk):
    async def work(server, client, peer):
        waiting = [asyncio.ensure_future(peer.call(Echo(1, seconds=30), deadline=60)) for _ in range(3)]
        await until(lambda: server.counters["accepted"] == 3)
        await peer.close()
        for call in waiting:
            with pytest.raises(WireClosed):
                await asyncio.wait_for(call, 1)
        with pytest.raises(WireClosed):
            await peer.call(Echo(1), deadline=1)
        assert (await client.connect(peer.address).call(Echo(1), deadline=DEADLINE)).body.number == 1

    talk(work)


def test_errors_of_a_handler_are_told(talk):
    async def handler(request):
        raise RunError("the disk is full") if request.body.number else ValueError("a mistake")

    async def work(server, client, peer):
        shown = []
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: shown.append(context["exception"]))
        with pytest.raises(Refused, match="the disk is full"):
            await peer.call(Echo(1), deadline=DEADLINE)
        assert shown == []
        with pytest.raises(Refused, match="ValueError"):
            await peer.call(Echo(0), deadline=DEADLINE)
        assert [str(error) for error in shown] == ["a mistake"] and server.counters["failed"] == 2

    talk(work, handler)


def test_a_payload_above_the_operation_s_limit_is_refused(talk):
    async def work(server, client, peer):
        with pytest.raises(Refused) as caught:
            await peer.call(Late(), payload=b"x", deadline=DEADLINE)
        assert caught.value.code == "oversized" and server.counters["oversized"] == 1

    talk(work)


def test_a_buffer_of_another_length_is_not_written(talk):
    async def work(server, client, peer):
        into = np.zeros(10, np.uint8)
        with pytest.raises(WireTimeout):
            await peer.call(Echo(1), payload=noise(11), deadline=0.2, into=into)
        assert not into.any() and client.counters["payload"] == 1

    talk(work)


def test_the_memory_of_an_answer_may_be_changed_when_it_was_given(talk):
    """Inside its message it was not copied: what was changed too soon was dropped there as damaged, and nobody was told."""
    weights = np.zeros(900_000, np.uint8)

    async def handler(request):
        await request.answer(Echoed(0), payload=weights)
        weights[:] += 1

    async def work(server, client, peer):
        for number in range(60):
            found = await peer.call(Echo(0), deadline=DEADLINE)
            seen = np.frombuffer(found.payload, np.uint8)
            assert (seen == number).all()
            del found, seen

    talk(work, handler)


def test_the_loop_runs_on_while_a_big_payload_crosses(talk, monkeypatch):
    """In bytes that are copied in one turn of the loop, not in seconds: others use this machine too."""
    copied = [0]

    def count(source, target):
        copied[-1] += source.nbytes
        real(source, target)

    real = buffers.copy
    for module in (buffers, arena, streams):
        monkeypatch.setattr(module, "copy", count)

    async def work(server, client, peer):
        payload = noise(48 << 20)
        await peer.call(Sum(), payload=payload[:100_000], deadline=DEADLINE)
        copied[:] = [0]
        call = asyncio.ensure_future(peer.call(Echo(0), payload=payload, deadline=60, into=np.empty_like(payload)))
        while not call.done():
            await asyncio.sleep(0)
            copied.append(0)
        assert sum(copied) >= 2 * payload.nbytes and max(copied) <= payload.nbytes / 2

    talk(work)


def test_nothing_is_written_to_the_memory_of_a_call_that_has_ended(tmp_path):
    data = noise(64 << 20)

    async def handler(request):
        await request.answer(Echoed(1), payload=data)

    async def work():
        async with nodes(2) as (server, client):
            peer = client.connect(await server.listen("tcp://127.0.0.1:0", handler))
            into = np.zeros(data.size, np.uint8)
            waiting = asyncio.ensure_future(peer.call(Echo(1), deadline=DEADLINE, into=into))
            await until(lambda: any(stream.num_arrived for stream in peer._streams._streams.values()))
            waiting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waiting
            into[:] = 7
            # The rest of the first answer comes before the second one, over the same connection.
            whole = await peer.call(Echo(1), deadline=DEADLINE)
            assert (into == 7).all() and np.array_equal(np.frombuffer(whole.payload, np.uint8), data)

    asyncio.run(work())


def test_nothing_waits_for_a_dead_process_and_reaches_its_successor(tmp_path):
    async def work():
        async with nodes(2) as (server, client):
            address = f"ipc://{tmp_path}/s.sock"
            peer = client.connect(address)
            for _ in range(5):
                with pytest.raises(WireTimeout, match="did not answer late"):
                    await peer.call(Late(), deadline=0.03)
            await server.listen(address, answer)
            await peer.call(Late(), deadline=DEADLINE)
            assert server.counters["received"] == 1

    asyncio.run(work())


def test_more_requests_than_can_be_worked_on_are_refused(talk, monkeypatch):
    monkeypatch.setattr(listener, "_RUNNING", 2)
    go_on = asyncio.Event()

    async def handler(request):
        if request.body.number == 0:
            await go_on.wait()
        await answer(request)

    async def work(server, client, peer):
        slow = [asyncio.ensure_future(peer.call(Echo(0), deadline=DEADLINE)) for _ in range(2)]
        await until(lambda: server.counters["accepted"] == 2)
        with pytest.raises(Refused) as caught:
            await peer.call(Echo(1), deadline=DEADLINE)
        assert caught.value.code == "busy" and server.counters["busy"] == 1
        go_on.set()
        await asyncio.gather(*slow)
        for _ in range(5):
            await peer.call(Echo(1), deadline=DEADLINE)

    talk(work, handler)


def test_tcp_beyond_loopback_needs_keys():
    async def work():
        async with nodes(1) as [node]:
            for address in ("tcp://0.0.0.0:0", "tcp://*:0", "tcp://10.1.2.3:5"):
                with pytest.raises(RequestError, match="no keys"):
                    await node.listen(address, answer)
                with pytest.raises(RequestError, match="no keys"):
                    node.connect(address)

    asyncio.run(work())


def test_a_taken_address_is_refused_by_name():
    async def work():
        async with nodes(2) as (first, second):
            address = await first.listen("tcp://127.0.0.1:0", answer)
            with pytest.raises(RequestError, match=address):
                await second.listen(address, answer)

    asyncio.run(work())


def test_nothing_is_left_of_a_closed_node(tmp_path):
    tmp_path.chmod(0o700)

    async def work():
        server, client = make_node(arena_dir=tmp_path), make_node(arena_dir=tmp_path)
        bound = await server.listen(f"ipc://{tmp_path}/s.sock", answer)
        assert (tmp_path / "s.sock").stat().st_mode & 0o777 == 0o600
        for _ in range(3):
            kept = await client.connect(bound).call(Echo(1), payload=noise(300_000), deadline=DEADLINE)
        assert list(tmp_path.glob("*.arena"))
        await client.close()
        await server.close()
        await server.close()
        assert list(tmp_path.iterdir()) == []
        # What was received is still there.
        assert bytes(kept.payload) == noise(300_000).tobytes()

    asyncio.run(work())


def test_a_successor_on_the_same_path_keeps_its_socket(tmp_path):
    async def work():
        async with nodes(3) as (old, new, client):
            address = await old.listen(f"ipc://{tmp_path}/s.sock", answer)
            await new.listen(address, answer)
            await old.close()
            assert (await client.connect(address).call(Echo(4), deadline=DEADLINE)).body.number == 4

    asyncio.run(work())


def test_a_body_that_is_too_long_is_refused_where_it_is_sent_and_the_connection_stays():
    """A frame above the limit ends the connection; whoever sent it would take the other side for dead, and try again for ever."""

    class Text(Body, frozen=True):
        text: str

    class Words(Body, frozen=True):
        num_letters: int

    table = Operations({"text": Op(Text, Text, max_payload=0), "words": Op(Words, Text, max_payload=0)})

    async def answer_words(request):
        match request.body:
            case Words(num_letters=number):
                await request.answer(Text("x" * number))
            case Text(text=text):
                await request.answer(Text(text))

    async def work():
        client, server = (Node(instance_id=new_instance_id(), operations=table) for _ in range(2))
        try:
            peer = client.connect(await server.listen("tcp://127.0.0.1:0", answer_words))
            for request in (Text("x" * BODY_BYTES), Words(BODY_BYTES)):
                with pytest.raises(Refused, match=rf"oversized.*a body of \d+ bytes; the limit is {BODY_BYTES}"):
                    await peer.call(request, deadline=DEADLINE)
            assert (await peer.call(Text("fine"), deadline=DEADLINE)).body == Text("fine")
            assert server.counters["failed"] == 1 and server.counters.dropped == 0
        finally:
            await client.close()
            await server.close()

    asyncio.run(work())
