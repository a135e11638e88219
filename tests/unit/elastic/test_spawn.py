"""The environment of a rank, and the socket that the store is served on."""

import io
from pathlib import Path

from shoal.elastic.launch import LaunchRequest
from shoal.elastic.spawn import open_store_socket, rank_environment
from shoal.telemetry.progress import Display, PlainDisplay


def request(display: Display, **env: str) -> LaunchRequest:
    return LaunchRequest(argv=["x"], num_ranks=4, run_dir=Path("run"), run_id="id", display=display, threads=3, env=env)


def environment(rank: int, **env: str) -> dict[str, str]:
    made = request(PlainDisplay(io.StringIO()), **env)
    return rank_environment(made, rank=rank, generation=2, port=1234, board_fd=5, store_fd=6)


def test_environment() -> None:
    values = environment(1)
    assert (values["RANK"], values["WORLD_SIZE"], values["MASTER_PORT"], values["OMP_NUM_THREADS"]) == (
        "1",
        "4",
        "1234",
        "3",
    )
    assert values["SHOAL_GENERATION"] == values["TORCHELASTIC_RESTART_COUNT"] == "2"
    assert values["SHOAL_BOARD_FD"] == "5"
    assert environment(0)["SHOAL_STORE_FD"] == "6"
    assert "SHOAL_STORE_FD" not in values


def test_extras_win() -> None:
    assert environment(1, OMP_NUM_THREADS="7")["OMP_NUM_THREADS"] == "7"


def test_socket_is_on_loopback() -> None:
    with open_store_socket() as first, open_store_socket() as second:
        assert first.getsockname()[0] == "127.0.0.1"
        assert first.getsockname()[1] != second.getsockname()[1]
        assert not first.get_inheritable()
