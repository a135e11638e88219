"""Another user of the machine: what he can connect to and open of a run on one host, which is nothing.

Story: the ranks met in a TCP store on loopback, where any user could list, delete and fill keys, and gloo's ports stayed open for
as long as the run lived.
"""

import contextlib
import os
import pwd
import re
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from support.processes.command import TINY, Shoal, wait_for_step

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
_TRY = """
import os, socket, sys
reached = []
for target in sys.argv[1:]:
    kind, _, where = target.partition(":")
    try:
        if kind == "tcp":
            host, _, port = where.rpartition(":")
            socket.create_connection((host, int(port)), timeout=0.3).close()
        elif kind == "unix":
            socket.socket(socket.AF_UNIX).connect(where)
        else:
            os.close(os.open(where, os.O_RDONLY))
        reached.append(target)
    except OSError:
        pass
print("\\n".join(reached))
"""


def family(pid: int) -> list[psutil.Process]:
    first = psutil.Process(pid)
    return [first, *first.children(recursive=True)]


def listening(processes: list[psutil.Process]) -> set[str]:
    found = set()
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            for one in process.net_connections("tcp"):
                if one.status == psutil.CONN_LISTEN:
                    found.add(f"tcp:{one.laddr.ip}:{one.laddr.port}")
            for one in process.net_connections("unix"):
                if one.laddr:
                    found.add(f"unix:{one.laddr}")
    return found


def opened(processes: list[psutil.Process]) -> set[str]:
    """Every file in memory that a process of the run has open or mapped, by every way that leads to it."""
    found = set()
    for process in processes:
        for folder in ("fd", "map_files"):
            with contextlib.suppress(OSError):
                for entry in Path(f"/proc/{process.pid}/{folder}").iterdir():
                    target = os.readlink(entry)
                    if re.match(r"/memfd:|/dev/shm/", target):
                        found.add(f"file:{entry}")
                        found.add(f"file:{target}")
    return found


def reached_by_nobody(targets: set[str]) -> list[str]:
    nobody = pwd.getpwnam("nobody")
    done = subprocess.run(
        ["/usr/bin/env", "python3", "-c", _TRY, *sorted(targets)],
        user=nobody.pw_uid,
        group=nobody.pw_gid,
        extra_groups=[],
        capture_output=True,
        text=True,
        timeout=60,
        cwd="/",
        check=True,
    )
    return done.stdout.split()


@contextlib.contextmanager
def open_to_all() -> Iterator[set[str]]:
    """A port and a file that everybody may use: what is reached shows that the trial can reach anything."""
    path = Path("/dev/shm") / f"shoal-test-{os.getpid()}"
    with socket.create_server(("127.0.0.1", 0)) as door:
        path.write_text("")
        path.chmod(0o644)
        try:
            yield {f"tcp:127.0.0.1:{door.getsockname()[1]}", f"file:{path}"}
        finally:
            path.unlink()


def assert_nothing_reached(processes: list[psutil.Process]) -> None:
    ports, files = listening(processes), opened(processes)
    with open_to_all() as control:
        assert set(reached_by_nobody(ports | files | control)) == control


@pytest.mark.parametrize("plan", ["dp=2", "ps=1 workers=1 tp=2"])
def test_no_other_user_reaches_anything_of_a_run(tmp_path: Path, plan: str) -> None:
    shoal = Shoal(tmp_path)
    (tmp_path / "tiny.toml").write_text(TINY.replace("steps = 8", "steps = 100000"))
    process = shoal.start("train", "tiny.toml", "--plan", plan, "--run-dir", "run")
    try:
        wait_for_step(tmp_path / "run", 2)
        assert_nothing_reached(family(process.pid))
    finally:
        shoal.end()
