"""A process that dies, or whose disk fails, at any call of a save leaves exactly the old checkpoint or exactly the new one.

strace counts calls of one kind, so a point is (call, k): the process is killed on entering the k-th such call, before it
happens. All points together are all states between any two calls. What a kill cannot show, the order of fsyncs, is read from
the trace itself.
"""

import os
import re
import shutil
import subprocess
import sys
from collections import Counter
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

from shoal.checkpoint.commit import sweep
from shoal.checkpoint.whole import newest_whole, verify
from support.checkpoint.forged import contents, expected, make

pytestmark = pytest.mark.skipif(shutil.which("strace") is None, reason="strace is not installed")

TESTS = Path(__file__).resolve().parents[1]
CHANGES = ("mkdir", "openat", "writev", "write", "fsync", "rename", "unlink", "unlinkat", "rmdir")
"""Calls that change the disk, or open what will."""
SLICE = 11


@dataclass(frozen=True)
class Scene:
    """What is there before a save, what the save writes, and so the only two things that may be there after it."""

    name: str
    step: int
    seed: int
    torn: bool = False

    def set(self, root):
        make(root, 10)
        make(root, 20)
        if self.torn:
            (make(root, self.step, seed=5) / "rank-001.safetensors").unlink()

    @property
    def old(self):
        return expected(20)

    @property
    def new(self):
        return expected(self.step, seed=self.seed)


SCENES = (
    Scene("a new step", step=30, seed=3),
    Scene("the same step again", step=20, seed=4),
    Scene("over a torn one", step=30, seed=3, torn=True),
)
FIRST = (SCENES[0], *(pytest.param(scene, marks=pytest.mark.soak) for scene in SCENES[1:]))
"""One scene for every run, the others for the long one, which also strikes at every call."""


def run_save(root, scene, *strace):
    path = os.pathsep.join(filter(None, [str(TESTS), os.environ.get("PYTHONPATH")]))
    environment = {**os.environ, "PYTHONPATH": path, "PYTHONHASHSEED": "0", "PYTHONDONTWRITEBYTECODE": "1"}
    command = [
        "strace",
        "-f",
        *strace,
        sys.executable,
        str(TESTS / "chaos" / "save_once.py"),
        root,
        scene.step,
        scene.seed,
    ]
    return subprocess.run(
        [str(word) for word in command], env=environment, capture_output=True, text=True, timeout=60, check=False
    )


def trace(folder, scene):
    """The calls of a save that nothing disturbs, and how many of each kind came before it."""
    root = folder / "checkpoints"
    scene.set(root)
    done = run_save(root, scene, "-y", "-o", folder / "trace")
    assert done.returncode == 0, done.stderr
    lines = (folder / "trace").read_text().splitlines()
    begin = next(index for index, line in enumerate(lines) if "shoal-save-begins" in line)
    end = next(index for index, line in enumerate(lines) if "shoal-save-ends" in line)
    kinds = [match[1] if (match := re.match(r"\d+\s+(\w+)\(", line)) else "" for line in lines]
    return lines[begin + 1 : end], kinds[begin + 1 : end], Counter(kinds[: begin + 1])


@cache
def points(scene):
    """Every (call, k) of a save."""
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        _, kinds, before = trace(Path(folder), scene)
    found = []
    for kind in kinds:
        if kind:
            before[kind] += 1
            found.append((kind, before[kind]))
    return found


def chosen(scene):
    """Every rename, and a spread over the other calls that change something, other ones for each scene."""
    candidates = [point for point in points(scene) if point[0] in CHANGES]
    renames = [point for point in candidates if point[0] == "rename"]
    rest = [point for point in candidates if point[0] != "rename"]
    return renames + rest[SCENES.index(scene) :: max(1, len(rest) // SLICE)]


def committed(root):
    return [path for path in sorted(root.iterdir()) if path.name.startswith("step-")]


def check(root, scene, *, must_be=None):
    """The newest whole checkpoint is the old or the new one, before and after the sweep, which leaves only whole ones."""
    before = contents(newest_whole(root).path)
    assert before in ([scene.old, scene.new] if must_be is None else [must_be])
    sweep(root)
    found = newest_whole(root)
    assert contents(found.path) == before
    torn = [path for path in committed(root) if verify(path)]
    assert torn == ([root / f"step-{scene.step:08d}"] if scene.torn and before == scene.old else [])
    assert not [path.name for path in root.iterdir() if path.name.startswith(".")]
    return before == scene.new


def kill_at(folder, scene, kind, k):
    root = folder / "checkpoints"
    scene.set(root)
    done = run_save(root, scene, "-o", os.devnull, "-e", f"trace={kind}", "-e", f"inject={kind}:signal=KILL:when={k}")
    assert done.returncode in (-9, 137), f"{kind} {k}: the save was not killed: {done.returncode} {done.stderr}"
    committed = check(root, scene)
    # The next save over whatever was left must work as if nothing had been.
    make(root, 40)
    assert contents(newest_whole(root).path) == expected(40)
    return committed


def fail_at(folder, scene, kind, k):
    root = folder / "checkpoints"
    scene.set(root)
    done = run_save(root, scene, "-o", os.devnull, "-e", f"trace={kind}", "-e", f"inject={kind}:error=EIO:when={k}")
    assert done.returncode in (0, 1), f"{kind} {k}: {done.returncode} {done.stderr}"
    return done, root


@pytest.mark.parametrize("scene", FIRST, ids=lambda scene: scene.name)
def test_a_kill_leaves_the_old_or_the_new(tmp_path, scene):
    outcomes = [kill_at(tmp_path / f"{kind}-{k}", scene, kind, k) for kind, k in chosen(scene)]
    assert len(outcomes) >= SLICE
    # A sweep that only ever saw one side of the commit would prove nothing about it.
    assert set(outcomes) == {False, True}


@pytest.mark.soak
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("scene", SCENES, ids=lambda scene: scene.name)
def test_a_kill_at_every_call_leaves_the_old_or_the_new(tmp_path, scene):
    every = points(scene)
    outcomes = []
    for kind, k in every:
        outcomes.append(kill_at(tmp_path / "point", scene, kind, k))
        shutil.rmtree(tmp_path / "point")
    # About 110 calls in each scene, 340 in all; fewer would mean that the trace was not read.
    assert len(outcomes) >= 90 and set(outcomes) == {False, True}


@pytest.mark.parametrize("scene", FIRST, ids=lambda scene: scene.name)
def test_a_failing_call_leaves_the_old_or_the_new_and_says_which(tmp_path, scene):
    for kind, k in chosen(scene):
        check_failure(tmp_path / f"{kind}-{k}", scene, kind, k)


@pytest.mark.soak
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("scene", SCENES, ids=lambda scene: scene.name)
def test_every_failing_call_leaves_the_old_or_the_new_and_says_which(tmp_path, scene):
    for kind, k in points(scene):
        if kind in CHANGES:
            check_failure(tmp_path / "point", scene, kind, k)
            shutil.rmtree(tmp_path / "point")


def check_failure(folder, scene, kind, k):
    done, root = fail_at(folder, scene, kind, k)
    if done.returncode == 0:
        check(root, scene, must_be=scene.new)
    elif "in expire" in done.stderr:
        # The save was over; what could not be deleted is only still there.
        check(root, scene, must_be=scene.new)
    else:
        assert "OSError" in done.stderr, done.stderr
        check(root, scene, must_be=scene.old)


def test_files_are_durable_before_the_name_and_the_name_before_anything_is_deleted(tmp_path):
    scene = SCENES[0]
    lines, kinds, _ = trace(tmp_path, scene)
    events = []
    for line, kind in zip(lines, kinds, strict=True):
        if kind == "fsync":
            events.append("sync " + re.search(r"<(.+)>", line)[1].rsplit("/", 1)[-1].split("-step")[0])
        elif kind == "rename":
            names = re.findall(r'"([^"]+)"', line)
            events.append("rename " + " to ".join(name.rsplit("/", 1)[-1].split("-step")[0] for name in names))
        elif kind in ("unlinkat", "unlink", "rmdir"):
            events.append("delete")
    assert [event for event in events if event != "delete"] == [
        "sync rank-000.safetensors",
        "sync rank-001.safetensors",
        "sync manifest.json",
        "sync .tmp",
        "rename .tmp to step-00000030",
        "sync checkpoints",
        "rename step-00000010 to .expired",
        "rename step-00000020 to .expired",
    ]
    assert events.index("delete") > events.index("sync checkpoints")
