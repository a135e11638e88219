"""The trainer and the server are killed at random moments, and an answer is that of a whole version every time.

A killed trainer goes on with ``--resume`` and publishes the next number; a killed server starts again and serves the newest.
"""

import http.client
import random
import time

import pytest

from shoal.data.store.writer import build_store
from support.processes.command import wait_until
from support.processes.serving import RECIPE, Published, ask, wait_for_address
from support.training.appends import rows


def ask_for_a_while(address, name, seconds):
    """Answers, until the time is up or the server is gone."""
    answers, until = [], time.monotonic() + seconds
    while time.monotonic() < until:
        row = [0.01 * len(answers), -0.3]
        try:
            status, content = ask(address, "POST", "/predict", {"rows": [{name: row}]})
        except (OSError, http.client.HTTPException):
            break
        assert status == 200, content
        answers.append((row, content))
    return answers


def kill_again_and_again(shoal, kills):
    build_store([rows(0, 60)], str(shoal.folder / "store"))
    recipe = shoal.folder / "run.toml"
    recipe.write_text(RECIPE.format(store=shoal.folder / "store", every=3))
    newest = shoal.folder / "run" / "published" / "newest"
    draw = random.Random(kills)
    words = ["train", recipe, "--follow", "--set", "checkpoint.every=10", "--run-dir", "run", "--resume=auto"]
    run, server, answers, name = None, None, [], None
    for number in range(kills):
        if run is None:
            before = newest.read_bytes() if newest.exists() else b""
            run = shoal.start(*words)
            wait_until(lambda was=before: newest.exists() and newest.read_bytes() != was, "the next version", 60)
        if server is None:
            server = shoal.start("serve", "run", "--port", 0)
            address = wait_for_address(server)
            name = ask(address, "GET", "/model")[1]["inputs"][0]["name"]
        answers += ask_for_a_while(address, name, draw.uniform(0.05, 0.5))
        assert ask(address, "GET", "/model")[1]["refused_versions"] == 0
        victim = (run, server)[number % 2]
        victim.kill()
        victim.communicate()
        run, server = (None, server) if victim is run else (run, None)
    for left in filter(None, (run, server)):
        left.kill()
        left.communicate()
    published = Published(shoal.folder / "run" / "published")
    assert len(answers) > kills
    for row, content in answers:
        assert (content["outputs"][0], content["weights_sha256"]) == published.predict(content["version"], row)


def test_two_kills(shoal):
    kill_again_and_again(shoal, 2)


@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_fifty_kills(shoal):
    kill_again_and_again(shoal, 50)
