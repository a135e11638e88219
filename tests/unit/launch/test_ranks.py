"""The environment of a rank, and the file that the ranks meet in."""

import io
import os
from pathlib import Path

from shoal.comm.store.file import StoreFile
from shoal.launch.group.request import LaunchRequest
from shoal.telemetry.display import Display, PlainDisplay
from shoal.telemetry.statusboard import StatusBoard


def request(display: Display, **env: str) -> LaunchRequest:
    return LaunchRequest(argv=["x"], num_ranks=4, run_dir=Path("run"), run_id="id", display=display, threads=3, env=env)


def environment(rank: int, **env: str) -> dict[str, str]:
    made = request(PlainDisplay(io.StringIO()), **env)
    store, board = StoreFile(), StatusBoard.create(4)
    try:
        command = made.command(rank, generation=2, board=board, store=store)
        assert command.environment["SHOAL_STORE"] == store.path and command.environment["SHOAL_BOARD_FD"] == str(
            board.fd
        )
        return {**made.environment, **command.environment}
    finally:
        store.close()
        board.close()


def test_environment() -> None:
    values = environment(1)
    assert (values["RANK"], values["WORLD_SIZE"], values["OMP_NUM_THREADS"]) == ("1", "4", "3")
    assert values["SHOAL_GENERATION"] == values["TORCHELASTIC_RESTART_COUNT"] == "2"
    assert values["SHOAL_SUPERVISOR_PID"] == str(os.getpid())


def test_descriptors_of_another_supervisor_are_not_handed_on(monkeypatch) -> None:
    monkeypatch.setenv("SHOAL_SOMETHING_FD", "5")
    assert "SHOAL_SOMETHING_FD" not in environment(0)


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
