"""An appender that dies, or whose disk fails, at any system call leaves the old version or the new; trying again makes the new.

strace counts calls of one kind, so a point is (call, k): the process is killed on entering the k-th such call, before it happens.
A build that is killed again and again ends in the files of one that was not.
"""

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from shoal.data.store.blockwriter import BlockOptions
from shoal.data.store.checks.unreferenced import delete_unreferenced
from shoal.data.store.checks.whole import verify_store
from shoal.data.store.folder import open_folder
from shoal.data.store.reader import open_store
from shoal.data.store.writer import BuildOptions, build_store
from shoal.data.table import concat_tables
from support.data.tables import assert_same, make_table

TESTS = Path(__file__).resolve().parents[1]
CHANGES = ("mkdir", "openat", "write", "fsync", "link", "unlink", "rename")
SLICE = 3
needs_strace = pytest.mark.skipif(shutil.which("strace") is None, reason="strace is not installed")
OPTIONS = BuildOptions(block=BlockOptions(target_bytes=1 << 14), key="id")


def environment():
    path = os.pathsep.join(filter(None, [str(TESTS), os.environ.get("PYTHONPATH")]))
    return {
        **os.environ,
        "PYTHONPATH": path,
        "PYTHONHASHSEED": "0",
        "PYTHONDONTWRITEBYTECODE": "1",
        "OMP_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
    }


def append(store, *strace):
    script = str(TESTS / "chaos" / "append_once.py")
    command = ["strace", "-f", *strace, sys.executable, script, store, 300]
    return subprocess.run(
        [str(word) for word in command], env=environment(), capture_output=True, text=True, timeout=60, check=False
    )


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    folder = tmp_path_factory.mktemp("store") / "original"
    build_store([make_table(300)], str(folder), options=OPTIONS, offsets={"log": 300})
    return folder


@pytest.fixture(scope="module")
def points(original, tmp_path_factory):
    """Every (call, k) of an append that nothing disturbs."""
    folder = tmp_path_factory.mktemp("trace")
    shutil.copytree(original, folder / "store")
    done = append(folder / "store", "-o", folder / "trace")
    assert done.returncode == 0, done.stderr
    lines = (folder / "trace").read_text().splitlines()
    begin = next(index for index, line in enumerate(lines) if "shoal-append-begins" in line)
    end = next(index for index, line in enumerate(lines) if "shoal-append-ends" in line)
    kinds = [match[1] if (match := re.match(r"\d+\s+(\w+)\(", line)) else "" for line in lines]
    before = Counter(kinds[: begin + 1])
    found = []
    for kind in kinds[begin + 1 : end]:
        if kind:
            before[kind] += 1
            found.append((kind, before[kind]))
    return found


def chosen(points):
    """The last links (blocks, lists, the version itself), and a spread over the other calls that change something."""
    links = [point for point in points if point[0] == "link"]
    rest = [point for point in points if point[0] in CHANGES and point[0] != "link"]
    return [*links[-2:], *rest[:: max(1, len(rest) // SLICE)], rest[-1]]


def check(store):
    """The old version or the new one, whole; then the same append again, which is in the store once."""
    folder = open_folder(str(store))
    version = folder.newest_version()
    assert version in (1, 2) and verify_store(folder) == []
    rows = 300 * version
    reader = open_store(str(store))
    assert_same(reader.read(np.arange(rows)), make_whole(version))
    again = subprocess.run(
        [sys.executable, str(TESTS / "chaos" / "append_once.py"), str(store), "300"],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert again.returncode == 0, again.stderr
    delete_unreferenced(folder, older_s=0)
    assert folder.newest_version() == 2 and verify_store(folder) == []
    assert_same(open_store(str(store)).read(np.arange(600)), make_whole(2))
    return version == 2


def make_whole(version):
    return concat_tables([make_table(300, first=300 * number) for number in range(version)])


def strike(folder, original, kind, k, how):
    shutil.copytree(original, folder)
    done = append(folder, "-o", os.devnull, "-e", f"trace={kind}", "-e", f"inject={kind}:{how}:when={k}")
    if how == "signal=KILL":
        assert done.returncode in (-9, 137), f"{kind} {k}: it was not killed: {done.returncode} {done.stderr}"
    return check(folder)


@needs_strace
def test_a_killed_append_leaves_the_old_version_or_the_new(tmp_path, original, points):
    outcomes = [strike(tmp_path / f"{kind}-{k}", original, kind, k, "signal=KILL") for kind, k in chosen(points)]
    # A sweep that only ever saw one side of the commit would prove nothing about it.
    assert len(outcomes) >= SLICE and set(outcomes) == {False, True}


@needs_strace
@pytest.mark.soak
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("how", ["signal=KILL", "error=EIO", "error=ENOSPC"])
def test_an_append_struck_at_every_call_leaves_the_old_version_or_the_new(tmp_path, original, points, how):
    outcomes = []
    struck = points if how == "signal=KILL" else [point for point in points if point[0] in CHANGES]
    for kind, k in struck:
        outcomes.append(strike(tmp_path / "store", original, kind, k, how))
        shutil.rmtree(tmp_path / "store")
    assert len(outcomes) >= 30 and set(outcomes) == {False, True}


BUILD = """
import sys
from pathlib import Path
from shoal.data.store.blockwriter import BlockOptions
from shoal.data.store.building.units import Unit
from shoal.data.store.writer import BuildOptions, build_store
from shoal.data.table import concat_tables
from support.data.tables import make_table

def units():
    return [Unit(name=f"u{n}", open=lambda n=n: [make_table(300, first=300 * n)]) for n in range(12)]

build_store(
    units(), sys.argv[1], schema=make_table(1).schema,
    options=BuildOptions(block=BlockOptions(target_bytes=1 << 14), key="id", workers=int(sys.argv[2])),
    on_done=lambda done: print(done, flush=True),
)
"""


def files_of(folder):
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def build(store, workers, kill_after=None):
    """True where it came to its end; killed with its processes after so many units otherwise."""
    process = subprocess.Popen(
        [sys.executable, "-c", BUILD, str(store), str(workers)],
        env=environment(),
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    with process:
        for line in process.stdout:
            if kill_after is not None and int(line) >= kill_after:
                os.kill(process.pid, signal.SIGKILL)
                process.wait(timeout=30)
                return False
    assert process.returncode == 0
    return True


def test_a_build_that_is_killed_again_and_again_ends_in_the_same_files(tmp_path):
    assert build(tmp_path / "once", 1)
    assert not build(tmp_path / "often", 2, kill_after=3)
    assert open_folder(str(tmp_path / "often")).newest_version() is None
    assert not build(tmp_path / "often", 3, kill_after=8)
    assert build(tmp_path / "often", 2)
    limit = time.monotonic() + 30
    while _processes_of(tmp_path / "often") and time.monotonic() < limit:
        time.sleep(0.05)
    delete_unreferenced(open_folder(str(tmp_path / "often")), older_s=0)
    assert files_of(tmp_path / "often") == files_of(tmp_path / "once")


def _processes_of(store):
    """Processes of a killed build that are still ending."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                if str(store).encode() in (entry / "cmdline").read_bytes():
                    found.append(entry.name)
            except OSError:
                continue
    return found
