"""Arenas: lent until they come back, abandoned when nobody can know, never two payloads in one place, never a file left."""

import asyncio
import gc
import os
import subprocess
import sys

import numpy as np
import pytest

from shoal.comm.wire import arena
from shoal.comm.wire.arena import Arenas, Borrowed, identify_folder, sweep_arenas
from shoal.comm.wire.errors import Dropped
from shoal.comm.wire.message import Place
from shoal.core.errors import RequestError
from support.wire.operations import DEADLINE, Echo, Echoed, answer, nodes, noise, until

SIZE = 300_000


@pytest.fixture
def folder(tmp_path):
    tmp_path.chmod(0o700)
    return tmp_path


def put(arenas, payload, sequence, receiver="r"):
    return asyncio.run(arenas.put(memoryview(payload), sequence, receiver))


def files(folder):
    return sorted(path.name for path in folder.iterdir())


def test_a_place_comes_back_only_from_its_receiver(folder):
    arenas = Arenas(folder, "me")
    first = put(arenas, noise(SIZE), 1)
    assert first == Place("me-1.arena", 0, SIZE) and arenas.num_lent == 1
    assert not arenas.give_back(1, first.name, "stranger")
    assert not arenas.give_back(1, "me-2.arena", "r")
    assert not arenas.give_back(2, first.name, "r")
    second = put(arenas, noise(SIZE, 1), 2)
    assert second.name != first.name
    assert arenas.give_back(1, first.name, "r") and not arenas.give_back(1, first.name, "r")
    assert put(arenas, noise(SIZE, 2), 3).name == first.name
    arenas.close()
    assert files(folder) == []


def test_an_abandoned_arena_keeps_what_was_in_it_and_is_never_used_again(folder):
    arenas, borrowed = Arenas(folder, "me"), Borrowed(folder)
    place = put(arenas, noise(SIZE), 1)
    view = borrowed.view(place, "me", None)
    arenas.abandon(1)
    assert files(folder) == [] and put(arenas, noise(SIZE, 1), 2).name != place.name
    assert bytes(view) == noise(SIZE).tobytes()
    arenas.close()
    assert bytes(view) == noise(SIZE).tobytes()
    with pytest.raises(Dropped, match="No such file"):
        Borrowed(folder).view(place, "me", None)


def test_the_owner_hears_when_nothing_refers_to_a_payload(folder):
    arenas, borrowed, heard = Arenas(folder, "me"), Borrowed(folder), []
    view = borrowed.view(put(arenas, noise(SIZE), 1), "me", lambda: heard.append(1))
    array = np.frombuffer(view, np.uint8)[5:]
    del view
    gc.collect()
    assert heard == []
    del array
    gc.collect()
    assert heard == [1]
    arenas.close()


def test_memory_is_bounded_and_overdue_arenas_are_let_go(folder, monkeypatch):
    arenas = Arenas(folder, "me", max_bytes=3 << 20)
    places = [put(arenas, noise(1 << 20), number) for number in range(4)]
    assert places[3] is None and len(files(folder)) == 3
    monkeypatch.setattr(arena, "LENT_SECONDS", -1.0)
    assert put(arenas, noise(1 << 20), 4) is not None
    assert len(files(folder)) == 1
    arenas.give_back(4, "me-4.arena", "r")
    assert put(arenas, noise(3 << 20), 5) is not None
    assert len(files(folder)) == 1
    assert put(arenas, noise(100 << 10), 6) is not None or arenas.num_lent == 1
    arenas.close()
    assert files(folder) == []


def test_a_full_disk_is_no_error(folder, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    arenas = Arenas(folder, "me")
    monkeypatch.setattr(os, "posix_fallocate", full)
    assert put(arenas, noise(SIZE), 1) is None
    assert files(folder) == [] and arenas.num_lent == 0


def test_a_cancelled_call_leaves_no_file(folder):
    async def work():
        arenas = Arenas(folder, "me")
        task = asyncio.ensure_future(arenas.put(memoryview(noise(40 << 20)), 1, "r"))
        await asyncio.sleep(0)
        assert len(files(folder)) == 1
        task.cancel()
        await asyncio.wait({task})
        assert files(folder) == [] and arenas.num_lent == 0

    asyncio.run(work())


@pytest.mark.parametrize(
    "place",
    [
        Place("../me-1.arena", 0, 10),
        Place("/etc/passwd", 0, 10),
        Place("me-1", 0, 10),
        Place("me-1.arena\n", 0, 10),
        Place("other-1.arena", 0, 10),
        Place("me-9.arena", 0, 10),
        Place("me-1.arena", 0, (1 << 20) + 1),
        Place("me-1.arena", 1 << 20, 1),
        Place("me-1.arena", 2**62, 2**62),
        Place("me-2.arena", 0, 10),
        Place("me-3.arena", 0, 10),
        Place("me-4.arena", 0, 10),
        Place("me-5.arena", 0, 10),
    ],
    ids=str,
)
def test_a_place_outside_is_refused(folder, place):
    arenas, borrowed = Arenas(folder, "me"), Borrowed(folder)
    put(arenas, noise(1 << 20), 1)
    other = Arenas(folder, "other")
    put(other, noise(1 << 20), 1)
    (folder / "me-2.arena").symlink_to(folder / "me-1.arena")
    (folder / "me-3.arena").mkdir()
    (folder / "me-4.arena").write_bytes(b"x" * 100)
    (folder / "me-4.arena").chmod(0o644)
    os.mkfifo(folder / "me-5.arena", 0o600)
    for _ in range(2):
        with pytest.raises(Dropped) as caught:
            borrowed.view(place, "me", None)
        assert caught.value.reason == "place"
        # The second time the arena is mapped already.
        assert borrowed.view(Place("me-1.arena", 0, 10), "me", None).nbytes == 10
    arenas.close()
    other.close()


def test_a_folder_that_others_can_write_to_is_refused(folder):
    assert identify_folder(folder) == identify_folder(folder / ".")
    folder.chmod(0o777)
    for wrong in (folder, folder / "missing", __file__):
        with pytest.raises(RequestError):
            identify_folder(folder.__class__(wrong))


def test_what_a_dead_process_left_is_swept_and_nothing_else(folder):
    arenas = Arenas(folder, "living")
    put(arenas, noise(SIZE), 1)
    code = (
        "import asyncio, os, sys; from pathlib import Path; from shoal.comm.wire.arena import Arenas\n"
        "asyncio.run(Arenas(Path(sys.argv[1]), 'dead').put(memoryview(bytes(100000)), 1, 'r'))\n"
        "Path(sys.argv[1], 'dead-2.arena.making').touch(); os.kill(os.getpid(), 9)"
    )
    subprocess.run([sys.executable, "-c", code, str(folder)], check=False, timeout=30)
    (folder / "s.sock").touch()
    assert files(folder) == ["dead-1.arena", "dead-2.arena.making", "living-1.arena", "s.sock"]
    assert sweep_arenas(folder) == ["dead-1.arena"]
    os.utime(folder / "dead-2.arena.making", (0, 0))
    assert sweep_arenas(folder) == ["dead-2.arena.making"]
    assert files(folder) == ["living-1.arena", "s.sock"] and sweep_arenas(folder / "missing") == []
    arenas.close()


def test_a_payload_that_is_kept_is_never_overwritten(folder):
    """A server stores what is pushed without a copy; the client pushes on."""
    kept = []

    async def handler(request):
        kept.append(request.payload)
        await request.answer(Echoed(request.body.number))

    async def work():
        async with nodes(2, arena_dir=folder) as (server, client):
            peer = client.connect(await server.listen(f"ipc://{folder}/s.sock", handler))
            for number in range(8):
                await peer.call(Echo(number), payload=noise(SIZE, number), deadline=DEADLINE)
            assert [bytes(view) for view in kept] == [noise(SIZE, number).tobytes() for number in range(8)]
            # The first crossed inside its message: until then nobody knew that the other sees the folder.
            assert len(list(folder.glob("*.arena"))) == 7
            kept.clear()
            await until(lambda: client.payloads._arenas.num_lent == 0)
            for number in range(8):
                await peer.call(Echo(number), payload=noise(SIZE, number), deadline=DEADLINE)
            assert len(list(folder.glob("*.arena"))) == 8

    asyncio.run(work())
    assert bytes(kept[-1]) == noise(SIZE, 7).tobytes()


def test_a_peer_that_sees_another_folder_gets_its_payloads_in_messages(folder, tmp_path_factory):
    other = tmp_path_factory.mktemp("other")
    other.chmod(0o700)

    async def work():
        async with nodes(1, arena_dir=folder) as [server], nodes(1, arena_dir=other) as [client], nodes(1) as [none]:
            address = await server.listen(f"ipc://{folder}/s.sock", answer)
            for node in (client, none):
                for _ in range(3):
                    found = await node.connect(address).call(Echo(1), payload=noise(SIZE), deadline=DEADLINE)
                    assert bytes(found.payload) == noise(SIZE).tobytes()
            assert not list(folder.glob("*.arena")) and not list(other.glob("*.arena"))

    asyncio.run(work())


def test_a_successor_without_the_folder_is_reached_by_the_next_attempt(folder):
    async def work():
        async with nodes(2, arena_dir=folder) as (old, client), nodes(1) as [new]:
            address = await old.listen(f"ipc://{folder}/s.sock", answer)
            peer = client.connect(address)
            for _ in range(2):
                await peer.call(Echo(1), payload=noise(SIZE), deadline=DEADLINE)
            assert list(folder.glob("*.arena"))
            await new.listen(address, answer)
            await old.close()
            found = await peer.call(Echo(2), payload=noise(SIZE), deadline=DEADLINE, attempts=3)
            assert found.body.number == 2 and bytes(found.payload) == noise(SIZE).tobytes()

    asyncio.run(work())
