"""A command that fails is started again, so often and no more; one that ends in order is not."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from shoal.serverrun.again import run_again

COUNTING = """
import os, signal, sys
with open(sys.argv[1], "a") as file:
    file.write(sys.argv[2])
number = len(open(sys.argv[1]).read())
if sys.argv[3] == "killed" and number < 3:
    os.kill(os.getpid(), signal.SIGKILL)
sys.exit(0 if sys.argv[3] == "killed" else int(sys.argv[3]))
"""


@pytest.mark.parametrize(
    ("how", "restarts", "starts", "code", "told"),
    [
        ("killed", 5, "abb", 0, 2),
        ("killed", 1, "ab", 137, 1),
        ("1", 2, "abb", 1, 2),
        ("2", 5, "a", 2, 0),
        ("0", 5, "a", 0, 0),
        ("143", 5, "a", 143, 0),
    ],
)
def test_starts(tmp_path: Path, how: str, restarts: int, starts: str, code: int, told: int) -> None:
    file, lines = tmp_path / "starts", list[str]()
    first, later = ([sys.executable, "-c", COUNTING, str(file), letter, how] for letter in "ab")
    assert run_again(first, later, name="this server", restarts=restarts, tell=lines.append) == code
    assert file.read_text() == starts
    assert len(lines) == told
    if lines:
        assert lines[-1].endswith(f"{restarts - told} restarts left")


def test_a_signal_goes_to_the_command_and_ends_it_for_good(tmp_path: Path) -> None:
    child = "import signal, sys; signal.signal(15, lambda *_: sys.exit(7)); print('up', flush=True); signal.pause()"
    parent = (
        "import sys\nfrom shoal.serverrun.again import run_again\n"
        f"words = [sys.executable, '-c', {child!r}]\n"
        "sys.exit(run_again(words, words, name='it', restarts=9, tell=print))"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen([sys.executable, "-c", parent], stdout=subprocess.PIPE, env=environment) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"up\n"
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 7
        assert process.stdout.read() == b"", "it is not started again"
