"""Folders and files that the user may not read: they are named, tried again, and keep nobody else from being followed.

Tests may run as root, who may read everything, so what is looked at here is looked at by a child that gave its rights away.
"""

import json
import os
import shutil
import subprocess
import tempfile
import threading
import traceback
from pathlib import Path

import pytest

from shoal.dashboard.runs.folder import RunFolder
from shoal.dashboard.runs.run import Run
from shoal.dashboard.server.start import Follower
from shoal.dashboard.server.updates import Changes
from shoal.dashboard.views.overview import runs_answer
from support.dashboard.synthetic import make_run, step_line

NOBODY = 65534


@pytest.fixture
def folder():
    """A folder that everybody may look into, which pytest's own are not."""
    made = Path(tempfile.mkdtemp(prefix="shoal-unreadable-"))
    made.chmod(0o755)
    yield made
    subprocess.run(["chmod", "-R", "u+rwx", made], check=True)
    shutil.rmtree(made)


def as_nobody(work):
    """What ``work`` returns in a child without rights."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            if os.geteuid() == 0:
                os.seteuid(NOBODY)
            found = json.dumps(work()).encode()
            os.write(writing, found)
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        found = pipe.read()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    return json.loads(found)


def change(path, mode):
    """Give rights, or take them, as the one whose files they are."""
    user = os.geteuid()
    os.seteuid(os.getuid())
    path.chmod(mode)
    os.seteuid(user)


def test_what_may_not_be_read_is_named_and_the_rest_is_shown(folder):
    closed = ("a-closed", "b/closed", "c/listed/run", "d-events", "e-file", "f-logs")
    for name in (*closed, "z-open"):
        make_run(folder / name, steps=3)
    (folder / "f-logs" / "errors").mkdir()
    shut = [
        folder / "a-closed", folder / "b" / "closed", folder / "c" / "listed", folder / "d-events" / "events",
        folder / "e-file" / "summary.json", folder / "f-logs" / "errors",
    ]  # fmt: skip
    modes = {path: path.stat().st_mode for path in shut}
    for path in shut:
        path.chmod(0o604 if path.name == "listed" else 0)

    def look():
        runs = RunFolder(folder)
        changes = Changes(runs)
        runs.look(all_runs=True)
        changes.look()
        first = runs_answer(runs, changes.rows, 1_790_000_000.0)
        for path, mode in modes.items():
            change(path, mode)
        runs.look(all_runs=True)
        changes.look()
        opened = runs_answer(runs, changes.rows, 1_790_000_000.0)
        for path in shut:
            change(path, 0)
        change(folder, 0)
        runs.look(all_runs=True)
        changes.look()
        return first, opened, runs_answer(runs, changes.rows, 1_790_000_000.0)

    first, opened, shut_again = as_nobody(look)
    has_curve = {row["name"]: bool(row["spark"]) for row in first["runs"]}
    assert has_curve == {"d-events": False, "e-file": True, "f-logs": True, "z-open": True}
    skipped = {one["name"]: one["reason"] for one in first["skipped"]}
    assert set(skipped) == {
        "a-closed",
        "b/closed",
        "c/listed",
        "d-events/events",
        "e-file/summary.json",
        "f-logs/errors",
    }
    assert set(skipped.values()) == {"Permission denied"}
    # Whoever is let in later sees all of it, and what was read stays where the door is closed again.
    every = {*closed, "z-open"}
    assert {row["name"] for row in opened["runs"] if row["spark"]} == every and opened["skipped"] == []
    assert {row["name"] for row in shut_again["runs"] if row["spark"]} == every
    assert {one["reason"] for one in shut_again["skipped"]} == {"Permission denied"}


def test_a_live_run_is_followed_beside_a_folder_that_is_closed(folder):
    make_run(folder / "closed", steps=3)
    events = make_run(folder / "open", steps=3, status=None) / "events" / "rank-000.jsonl"
    (folder / "closed").chmod(0)
    events.chmod(0o666)

    def follow():
        runs = RunFolder(folder)
        changes = Changes(runs)
        heard = threading.Event()
        told = []

        def tell(messages):
            told.append(messages)
            if len(told) == 1:
                raise OSError(5, "Input/output error")
            heard.set()

        follower = Follower(runs, changes, tell)
        follower.start()
        troubles = []
        for step in range(4, 400):
            with events.open("a") as file:
                file.write(step_line(step, 0, t=1_790_000_000.0 + step))
            troubles.append(runs.trouble)
            if heard.wait(0.1):
                break
        assert heard.is_set() and any("Input/output error" in one for one in troubles)
        follower.stop()
        return [row["name"] for row in changes.rows.values()]

    assert as_nobody(follow) == ["open"]


def test_a_file_that_is_refused_for_a_while_is_read_again_from_its_beginning(tmp_path):
    run = Run(make_run(tmp_path / "one", steps=3)).look_once()
    events = run.path / "events" / "rank-000.jsonl"
    events.rename(tmp_path / "kept")
    os.mkfifo(events)
    assert "FIFO" in run.look_once().skipped["events/rank-000.jsonl"] and run.lead() is None
    os.replace(tmp_path / "kept", events)
    assert run.look_once().skipped == {} and run.curve("loss").axes["step"].tolist() == [1, 2, 3]


def test_the_size_of_what_a_link_leads_to_is_nobodys_business(tmp_path):
    run = make_run(tmp_path / "one", steps=1)
    (tmp_path / "secret").write_text("x" * 77)
    (run / "logs").mkdir()
    (run / "logs" / "rank-000.log").write_text("four")
    os.symlink(tmp_path / "secret", run / "logs" / "rank-001.log")
    found = Run(run).look_once()
    assert (found.size_of("logs", "rank-000.log"), found.size_of("logs", "rank-001.log")) == (4, None)
