"""A stop request that comes before a new process can listen is held back by the fork server, and heard once it listens."""

import subprocess
import sys

import pytest

# The state of a rank right after its fork: SIGTERM is blocked, and one has come.
BEFORE = "import os, signal; signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM}); os.kill(os.getpid(), signal.SIGTERM); "
LISTENER = """
import signal
LISTENS_BY_ITSELF = {listens}
def main():
    heard = []
    signal.signal(signal.SIGTERM, lambda number, frame: heard.append(number))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {{signal.SIGTERM}})
    raise SystemExit(7 if heard else 0)
"""


@pytest.mark.parametrize(("listens", "code"), [(True, 7), (False, -15)])
def test_a_signal_that_came_too_early_waits_for_those_who_listen_by_themselves(tmp_path, listens, code):
    (tmp_path / "listener.py").write_text(LISTENER.format(listens=listens))
    program = BEFORE + "from shoal.launch.child import run_to_end; run_to_end('listener', [])"
    done = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, timeout=60, check=False)
    assert done.returncode == code


def test_a_rank_listens_before_it_does_anything_else(tmp_path):
    """``hear_stop_signals`` hears what was held back; ranks say that they listen by themselves."""
    program = BEFORE + (
        "from shoal.trainer.worker import LISTENS_BY_ITSELF, hear_stop_signals; "
        "stop = hear_stop_signals(listen_to_ctrl_c=False); "
        "raise SystemExit(not (LISTENS_BY_ITSELF and stop.reason == 'SIGTERM'))"
    )
    assert subprocess.run([sys.executable, "-c", program], cwd=tmp_path, timeout=60, check=False).returncode == 0
