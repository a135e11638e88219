"""The store by which the processes of a launcher meet: what a stranger can do before all are there, and afterwards."""

import socket
from collections.abc import Iterator
from datetime import timedelta

import pytest
from torch.distributed import TCPStore

from shoal.comm import world
from shoal.comm.packetfilter import CAN_DROP
from shoal.core.place import Place

SOON = timedelta(seconds=20)


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


@pytest.fixture
def place(monkeypatch: pytest.MonkeyPatch) -> Iterator[Place]:
    monkeypatch.setattr(world, "_OPENED", [])
    monkeypatch.setattr(world, "_LISTENING", [])
    yield Place(
        rank=0, world_size=2, is_launched=True, launcher="slurm", address="127.0.0.1", port=_free_port(), local_size=1
    )
    world.seal_store()


def _stranger(place: Place) -> TCPStore:
    return TCPStore(place.address, place.port, 2, is_master=False, timeout=SOON, wait_for_workers=False)


def test_until_all_are_there_a_stranger_reads_and_changes_every_key(place: Place) -> None:
    """That is what torch's store is; the guide says so."""
    own = world.open_store(place, SOON)
    own.set("shoal/start", "ours")
    stranger = _stranger(place)
    assert stranger.get("shoal/start") == b"ours"
    stranger.set("shoal/start", "theirs")
    assert own.get("shoal/start") == b"theirs"


@pytest.mark.skipif(not CAN_DROP, reason="Linux only")
def test_once_all_are_there_nobody_else_gets_in_and_those_who_are_go_on(place: Place) -> None:
    own, other = world.open_store(place, SOON), world.connect_store(place, SOON)
    world.seal_store()
    with socket.socket() as stranger:
        stranger.settimeout(0.3)
        with pytest.raises(TimeoutError):
            stranger.connect((place.address, place.port))
    other.set("step", "1")
    assert own.get("step") == b"1"


def test_it_listens_at_the_launchers_address_only(place: Place) -> None:
    world.open_store(place, SOON)
    with socket.socket() as elsewhere, pytest.raises(ConnectionRefusedError):
        elsewhere.connect(("127.0.0.2", place.port))
