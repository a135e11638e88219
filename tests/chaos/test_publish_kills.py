"""A run that is killed at any system call while it publishes leaves a pointer to a whole version, the old one or the new.

A point is (call, k): the process is killed on entering the k-th such call, before it happens (see ``test_store_kills.py``).
"""

import os
import re
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from shoal.checkpoint.published.versions import clear_drafts, open_version, read_pointer
from support.checkpoint.versions import publish_one

TESTS = Path(__file__).resolve().parents[1]
CHANGES = ("mkdir", "openat", "write", "writev", "fsync", "rename", "unlink", "rmdir", "unlinkat", "close")
pytestmark = pytest.mark.skipif(shutil.which("strace") is None, reason="strace is not installed")


def publish_under(root, *strace):
    path = os.pathsep.join(filter(None, [str(TESTS), os.environ.get("PYTHONPATH")]))
    environment = {**os.environ, "PYTHONPATH": path, "PYTHONHASHSEED": "0", "PYTHONDONTWRITEBYTECODE": "1"}
    command = ["strace", "-f", *strace, sys.executable, TESTS / "chaos" / "publish_once.py", root, 3]
    return subprocess.run(
        [str(word) for word in command], env=environment, capture_output=True, text=True, timeout=60, check=False
    )


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    root = tmp_path_factory.mktemp("original") / "published"
    publish_one(root, 1, keep=2)
    publish_one(root, 2, keep=2)
    return root


@pytest.fixture(scope="module")
def points(original, tmp_path_factory):
    """Every (call, k) that changes something, of a publication that nothing disturbs."""
    folder = tmp_path_factory.mktemp("trace")
    shutil.copytree(original, folder / "published")
    done = publish_under(folder / "published", "-o", folder / "trace")
    assert done.returncode == 0, done.stderr
    lines = (folder / "trace").read_text().splitlines()
    begin = next(index for index, line in enumerate(lines) if "shoal-publish-begins" in line)
    end = next(index for index, line in enumerate(lines) if "shoal-publish-ends" in line)
    kinds = [match[1] if (match := re.match(r"\d+\s+(\w+)\(", line)) else "" for line in lines]
    before, found = Counter(kinds[: begin + 1]), []
    for kind in kinds[begin + 1 : end]:
        before[kind] += 1
        if kind in CHANGES:
            found.append((kind, before[kind]))
    return found


def check(original, folder, points):
    seen = set()
    for number, (call, count) in enumerate(points):
        root = folder / f"{number}"
        shutil.copytree(original, root)
        done = publish_under(root, "-o", "/dev/null", "-e", f"inject={call}:signal=KILL:when={count}")
        assert done.returncode != 0, f"{call} {count} did not come"
        newest, sha256 = read_pointer(root)
        opened = open_version(root, newest, expect=sha256)
        assert opened.version.step == newest and opened.recipe == f"step = {newest}\n".encode()
        seen.add(newest)
        clear_drafts(root)
        again = publish_one(root, 9)
        assert open_version(root, again.number).version.step == 9 and again.number > newest
        shutil.rmtree(root)
    return seen


def test_a_kill_around_each_rename_leaves_the_old_version_or_the_new(original, points, tmp_path):
    # The version gets its name, the pointer is replaced, and what has expired is set aside.
    renames = [place for place, (call, _) in enumerate(points) if call == "rename"]
    around = [points[place] for rename in renames for place in (rename, rename + 1)]
    assert check(original, tmp_path, around) == {2, 3}


@pytest.mark.soak
@pytest.mark.timeout(900)
def test_a_kill_at_any_call_leaves_the_old_version_or_the_new(original, points, tmp_path):
    assert check(original, tmp_path, points) == {2, 3}
