"""``live.json`` while real ranks run: one that is stopped is silent within two seconds, with its phase, and the end is told."""

import json
import os
import signal
import threading
import time
from dataclasses import replace
from pathlib import Path

from shoal.core.clock import Deadline
from shoal.core.rundir import RunDir
from shoal.launch.group.livefile import LiveFile
from shoal.launch.hosts.generation import supervise_hosts
from shoal.launch.ranks import supervise
from support.processes.remote_shell import make_fleet
from support.processes.supervised_ranks import Recorder, make_request
from support.processes.supervised_ranks import nothing_left as nothing_left

BODY = """
rank_status.publish({"loss": 1.5})
rank_status.enter("backward" if rank == 1 else "wait: gradients of the other ranks", 5)
until(lambda: (run_dir / "over").exists())
"""


def read(folder: Path) -> dict:
    try:
        return json.loads(RunDir(folder).live.read_text())
    except FileNotFoundError:
        return {"ranks": []}


def test_a_stopped_rank_is_silent_with_its_phase_within_two_seconds(tmp_path: Path) -> None:
    folder, found = tmp_path / "run", {}

    def watch() -> None:
        limit = Deadline(seconds=30)
        while [rank["step"] for rank in read(folder)["ranks"]] != [5, 5]:
            limit.check("both ranks at work")
            time.sleep(0.01)
        before = found["before"] = read(folder)
        victim = before["ranks"][1]["pid"]
        os.kill(victim, signal.SIGSTOP)
        stopped = time.monotonic()
        while read(folder)["ranks"][1]["state"] != "silent" and not limit.is_over:
            time.sleep(0.01)
        found["seconds"], found["during"] = time.monotonic() - stopped, read(folder)
        os.kill(victim, signal.SIGCONT)
        while read(folder)["ranks"][1]["state"] != "running" and not limit.is_over:
            time.sleep(0.01)
        found["after"] = read(folder)
        (folder / "over").touch()

    watcher = threading.Thread(target=watch)
    request = replace(make_request(tmp_path, BODY, Recorder()), live=LiveFile(folder, plan="dp=2", seconds=1.0))
    folder.mkdir()
    watcher.start()
    outcome = supervise(request)
    watcher.join()
    assert outcome.exit_code == 0
    assert found["before"]["status"] == "running" and found["before"]["hang"] is None
    assert found["before"]["ranks"][1]["metrics"] == {"loss": 1.5} and found["before"]["ranks"][0]["rss_bytes"] > 1e6
    assert found["seconds"] < 2.0
    stopped = found["during"]["ranks"][1]
    assert (stopped["phase"], stopped["step"], found["during"]["ranks"][0]["state"]) == ("backward", 5, "running")
    hang = found["during"]["hang"]
    assert (hang["rank"], hang["phase"]) == (1, "backward") and hang["seconds"] > 0.75
    assert found["after"]["hang"] is None
    ended = read(folder)
    assert (ended["status"], [rank["state"] for rank in ended["ranks"]]) == ("ended", ["ended", "ended"])


def test_a_stopped_rank_of_another_host_is_silent_in_the_file_of_the_first(tmp_path: Path) -> None:
    folder, found = tmp_path / "run", {}
    folder.mkdir()

    def watch() -> None:
        limit = Deadline(seconds=40)
        while [rank["step"] for rank in read(folder)["ranks"]] != [5, 5]:
            limit.check("both ranks at work")
            time.sleep(0.01)
        os.kill(read(folder)["ranks"][1]["pid"], signal.SIGSTOP)
        while read(folder)["ranks"][1]["state"] != "silent" and not limit.is_over:
            time.sleep(0.01)
        found["during"] = read(folder)
        os.kill(found["during"]["ranks"][1]["pid"], signal.SIGCONT)
        (folder / "over").touch()

    live = LiveFile(folder, plan="dp=2", seconds=0.5)
    request = replace(make_request(tmp_path, BODY, Recorder()), live=live)
    watcher = threading.Thread(target=watch)
    watcher.start()
    outcome = supervise_hosts(request, make_fleet(tmp_path, {"127.0.0.1": 1, "localhost": 1}))
    watcher.join()
    assert outcome.exit_code == 0
    stopped = found["during"]["ranks"][1]
    assert (stopped["host"], stopped["phase"], stopped["state"]) == ("localhost", "backward", "silent")
    assert found["during"]["ranks"][0]["host"] == "127.0.0.1" and found["during"]["hang"]["rank"] == 1
    assert [rank["state"] for rank in read(folder)["ranks"]] == ["ended", "ended"] and read(folder)["status"] == "ended"


def test_a_folder_that_is_gone_does_not_end_the_run(tmp_path: Path) -> None:
    (tmp_path / "live").mkdir()
    body = "until(lambda: not (run_dir.parent / 'live').exists())\ntime.sleep(0.5)"
    live = LiveFile(tmp_path / "live", plan="dp=2", seconds=0.2)
    request = replace(make_request(tmp_path, body, Recorder()), live=live)

    def take_away() -> None:
        limit = Deadline(seconds=30)
        while not RunDir(tmp_path / "live").live.exists():
            limit.check("a first text")
            time.sleep(0.01)
        while (tmp_path / "live").exists():
            RunDir(tmp_path / "live").live.unlink(missing_ok=True)
            try:
                (tmp_path / "live").rmdir()
            except OSError:
                limit.check("the end of the folder")

    thief = threading.Thread(target=take_away)
    thief.start()
    assert supervise(request).exit_code == 0
    thief.join()
    assert not (tmp_path / "live").exists()
