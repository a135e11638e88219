"""``shoal data follow`` that is killed at any moment while files arrive: every row is in the store once, in whole versions."""

import json
import os
import random
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

from shoal.data.store.checks.whole import verify_store
from shoal.data.store.folder import open_folder
from shoal.data.store.reader import open_store

ROWS = 50
START = [sys.executable, "-c", "from shoal.cli.main import main; main()", "data", "follow"]


def start(folder, *more):
    command = [*START, str(folder / "in"), str(folder / "store"), "--every", "0.05", *map(str, more)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def arrive(folder, number):
    lines = "".join(json.dumps({"id": number * ROWS + row, "x": row / 4}) + "\n" for row in range(ROWS))
    (folder / "in" / f".{number}.jsonl").write_text(lines)
    os.replace(folder / "in" / f".{number}.jsonl", folder / "in" / f"{number}.jsonl")


def kill_again_and_again(folder, kills, seed):
    choose = random.Random(seed)
    (folder / "in").mkdir()
    arrived, killed_after, store = 0, [], open_folder(str(folder / "store"))
    for _ in range(kills):
        process = start(folder)
        before = store.newest_version() or 0
        for _ in range(3):
            arrive(folder, arrived)
            arrived += 1
        # Until it has made a version, or is about to: whichever moment comes.
        until = time.monotonic() + 30
        wanted = choose.randrange(2)
        while (store.newest_version() or 0) < before + wanted and time.monotonic() < until:
            time.sleep(0.002)
        time.sleep(choose.uniform(0, 0.05 if wanted else 1.5))
        os.kill(process.pid, signal.SIGKILL)
        process.communicate(timeout=30)
        killed_after.append((store.newest_version() or 0) - before)
    process = start(folder, "--until-idle", 1, "--json", folder / "said.json")
    _, error = process.communicate(timeout=60)
    assert process.returncode == 0, error
    assert verify_store(store) == []
    ids = open_store(str(folder / "store")).read(np.arange(arrived * ROWS))["id"].values
    assert len(open_store(str(folder / "store"))) == arrived * ROWS, "no row twice"
    assert np.array_equal(np.sort(ids), np.arange(arrived * ROWS)), "no row lost"
    return killed_after


def test_a_watcher_that_is_killed_takes_in_every_row_once(tmp_path):
    kill_again_and_again(tmp_path, kills=3, seed=1)


@pytest.mark.soak
@pytest.mark.timeout(1200)
def test_a_hundred_kills_of_a_watcher(tmp_path):
    versions = kill_again_and_again(tmp_path, kills=100, seed=2)
    assert set(versions) >= {0, 1}, "some were killed before they had made a version, and some after"


def test_sigterm_ends_it_with_what_was_taken_in(tmp_path):
    (tmp_path / "in").mkdir()
    arrive(tmp_path, 0)
    process = start(tmp_path, "--json", tmp_path / "said.json")
    assert f"version 1, {ROWS} rows" in process.stdout.readline()
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=30)
    assert process.returncode == 0
    assert json.loads((tmp_path / "said.json").read_text())["rows"] == ROWS
