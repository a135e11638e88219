"""The environment of a rank, and the file that the ranks meet in."""

import io
import os
from pathlib import Path

from shoal.launch.launch import LaunchRequest
from shoal.launch.spawn import StoreFile, rank_environment
from shoal.telemetry.progress import Display, PlainDisplay


def request(display: Display, **env: str) -> LaunchRequest:
    return LaunchRequest(argv=["x"], num_ranks=4, run_dir=Path("run"), run_id="id", display=display, threads=3, env=env)


def environment(rank: int, **env: str) -> dict[str, str]:
    made = request(PlainDisplay(io.StringIO()), **env)
    return rank_environment(made, rank=rank, generation=2, board_fd=5, store="/proc/self/fd/6")


def test_environment() -> None:
    values = environment(1)
    assert (values["RANK"], values["WORLD_SIZE"], values["OMP_NUM_THREADS"]) == ("1", "4", "3")
    assert values["SHOAL_GENERATION"] == values["TORCHELASTIC_RESTART_COUNT"] == "2"
    assert values["SHOAL_BOARD_FD"] == "5"
    assert values["SHOAL_STORE"] == environment(0)["SHOAL_STORE"] == "/proc/self/fd/6"


def test_extras_win() -> None:
    assert environment(1, OMP_NUM_THREADS="7")["OMP_NUM_THREADS"] == "7"


def test_ranks_meet_in_a_file_of_their_own_that_has_no_name() -> None:
    first, second = StoreFile(), StoreFile()
    try:
        assert os.stat(first.path).st_ino != os.stat(second.path).st_ino
        assert os.stat(first.path).st_nlink == 0
        assert not any(os.get_inheritable(descriptor) for descriptor in first.descriptors)
    finally:
        first.close()
        second.close()
    first.close()
    assert not os.path.exists(first.path)
