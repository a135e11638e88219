"""``shoal serve`` beside real runs: every answer is that of the version that it names, and no client or altered file stops it."""

import hashlib
import json
import os
import shutil
import signal
import socket
import threading
import time

import pytest

from shoal.checkpoint.published.version import encode_pointer
from shoal.data.store.writer import append_store, build_store
from shoal.serverrun.publishing import CheckpointPublisher
from shoal.telemetry.eventlog import EventLog
from shoal.trainer.build import load_run
from support.processes.command import TINY, Shoal, read_events, read_summary, wait_until
from support.processes.serving import RECIPE, Published, ask, wait_for_address
from support.training.appends import rows

ROWS = [[0.1 * place, -0.2 * place] for place in range(24)]


def write_recipe(folder, *, every, store="store"):
    build_store([rows(0, 60)], str(folder / store))
    path = folder / "run.toml"
    path.write_text(RECIPE.format(store=folder / store, every=every))
    return path


def end(process):
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=30)
    assert process.returncode == 0


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run with three versions, and a server of it."""
    here = Shoal(tmp_path_factory.mktemp("serve"))
    here.run("train", write_recipe(here.folder, every=4), "--plan", "dp=2", "--run-dir", "run")
    process = here.start("serve", "run", "--port", 0, "--max-wait", 20)
    yield here, process, wait_for_address(process)
    here.end()


def test_answers_are_those_of_the_version_bit_for_bit_whoever_else_asks(trained):
    here, _, address = trained
    published = Published(here.folder / "run" / "published")
    assert ask(address, "GET", "/health")[1]["version"] == 3
    model = ask(address, "GET", "/model")[1]
    assert model["weights_sha256"] == read_summary(here.folder / "run")["weights_sha256"]
    (field,) = model["inputs"]
    name = field["name"]
    assert (field["dtype"], field["shape"], field["below"]) == ("float32", [2], None)
    answers = {}

    def client(start):
        for size in (1, 3, 8):
            chosen = [ROWS[(start + place) % len(ROWS)] for place in range(size)]
            status, content = ask(address, "POST", "/predict", {"inputs": {name: chosen}})
            answers[start, size] = status, chosen, content

    threads = [threading.Thread(target=client, args=(start,)) for start in range(6)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    assert len(answers) == 18
    for status, chosen, content in answers.values():
        assert status == 200 and content["version"] == 3
        for row, scores in zip(chosen, content["outputs"], strict=True):
            assert (scores, content["weights_sha256"]) == published.predict(3, row)
    after = ask(address, "GET", "/model")[1]
    assert after["batch"] == 8 and after["rows"] - model["rows"] == 72
    assert after["passes"] - model["passes"] < 18, "requests that came together had a pass together"


def test_bad_requests_get_one_message_and_an_answer_each(trained):
    _, _, address = trained
    name = ask(address, "GET", "/model")[1]["inputs"][0]["name"]
    for body, word in [
        (b'{"rows": [{"%s": [NaN, 1]}]}' % name.encode(), "NaN"),
        (b'{"rows": [{"%s": [1]}]}' % name.encode(), "list of 1"),
        (b"{", "JSON"),
        (b"[" * 10_000, "JSON"),
    ]:
        status, content = ask(address, "POST", "/predict", body=body)
        assert status == 400 and word in content["error"]
    assert ask(address, "POST", "/predict", body=b"x" * (1 << 21))[0] == 413
    assert ask(address, "POST", "/predict", {"rows": []}, headers={"content-type": "text/plain"})[0] == 415
    assert ask(address, "GET", "/predict")[0] == 405 and ask(address, "GET", "/etc/passwd")[0] == 404
    assert ask(address, "GET", "/health")[0] == 200


def test_idle_and_slow_clients_do_not_keep_others_out(trained):
    _, _, address = trained
    strangers = [socket.create_connection(address) for _ in range(200)]
    slow = [socket.create_connection(address) for _ in range(100)]
    long = socket.create_connection(address)
    try:
        for one in slow:
            one.sendall(b"POST /predict HTTP/1.1\r\ncontent-le")
        with pytest.raises(OSError):  # An answer of 431 and a reset, whichever is seen first.
            for _ in range(160):
                long.sendall(b"x" * 65536)
            while long.recv(65536):
                pass
            raise ConnectionResetError("it was closed")
        started = time.monotonic()
        assert ask(address, "GET", "/health")[0] == 200
        assert time.monotonic() - started < 10
    finally:
        for one in (*strangers, *slow, long):
            one.close()


def test_a_version_that_is_altered_is_refused_and_the_one_before_goes_on(trained):
    here, _, address = trained
    root = here.folder / "run" / "published"
    before = (root / "newest").read_bytes()
    shutil.copytree(root / "version-00000003", root / "version-00000009")
    weights = root / "version-00000009" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    refused = ask(address, "GET", "/model")[1]["refused_versions"]
    pointer = json.loads(before)
    (root / "newest.new").write_bytes(encode_pointer(9, pointer["sha256"]))
    os.replace(root / "newest.new", root / "newest")
    wait_until(lambda: ask(address, "GET", "/model")[1]["refused_versions"] == refused + 1, "it is refused")
    assert ask(address, "GET", "/health")[1]["version"] == 3
    (root / "newest").write_bytes(b"{")
    wait_until(lambda: ask(address, "GET", "/model")[1]["refused_versions"] == refused + 2, "the pointer is refused")
    assert ask(address, "GET", "/health")[1]["version"] == 3
    # The one after is whole, and is served within a second or what the machine makes of it.
    shutil.rmtree(root / "version-00000009")
    (root / "newest.new").write_bytes(encode_pointer(2, _sum(root / "version-00000002" / "version.json")))
    os.replace(root / "newest.new", root / "newest")
    wait_until(lambda: ask(address, "GET", "/health")[1]["version"] == 2, "the next whole version is served")


def _sum(path):
    return hashlib.sha256(path.read_bytes()).hexdigest()


def test_sigterm_answers_what_was_asked_and_ends(trained):
    here, _, _ = trained
    process = here.start("serve", "run", "--port", 0, "--max-wait", 2000)
    address = wait_for_address(process)
    name = ask(address, "GET", "/model")[1]["inputs"][0]["name"]
    found = []
    thread = threading.Thread(
        target=lambda: found.append(ask(address, "POST", "/predict", {"rows": [{name: ROWS[0]}]}))
    )
    thread.start()
    # It waits two seconds for others.
    wait_until(lambda: ask(address, "GET", "/model")[1]["waiting"] == 1, "the request waits")
    process.send_signal(signal.SIGTERM)
    thread.join()
    process.communicate(timeout=30)
    assert process.returncode == 0 and found[0][0] == 200


def test_other_machines_need_a_token(trained, tmp_path):
    here, _, _ = trained
    assert "give --token-file" in here.run("serve", "run", "--host", "0.0.0.0", expect=2).stderr
    secret = tmp_path / "token"
    secret.write_text("s" * 20)
    secret.chmod(0o644)
    assert "chmod 600" in here.run("serve", "run", "--token-file", secret, expect=2).stderr
    secret.chmod(0o600)
    process = here.start("serve", "run", "--port", 0, "--token-file", secret)
    address = wait_for_address(process)
    assert ask(address, "GET", "/health")[0] == 401
    assert ask(address, "GET", "/health", headers={"authorization": "Bearer " + "s" * 19})[0] == 401
    assert ask(address, "GET", "/health", headers={"authorization": "Bearer " + "s" * 20})[0] == 200
    end(process)


def test_a_run_that_has_published_nothing_is_served_from_its_checkpoint(trained):
    here, _, _ = trained
    recipe = here.folder / "run.toml"
    here.run("train", recipe, "--run-dir", "bare", "--set", "publish.every_steps=", "--set", "train.steps=2")
    process = here.start("serve", "bare", "--port", 0)
    line = process.stdout.readline()
    assert "its newest whole checkpoint (step 2), for it has published nothing" in line
    end(process)
    assert "no whole model to serve" in here.run("serve", here.folder, expect=1).stderr


@pytest.mark.soak
def test_a_run_with_parameter_servers_publishes_its_checkpoints(trained):
    here, _, _ = trained
    plan, recipe = ["--plan", "ps=1 workers=2 update=async"], here.folder / "run.toml"
    changes = ["--set", "checkpoint.every=4", "--set", "train.steps=400", "--set", "publish.every_steps=40"]
    here.run("train", recipe, *plan, "--run-dir", "servers", *changes)
    summary, events = read_summary(here.folder / "servers"), published_events(here.folder / "servers")
    assert summary["publish"] == {"published": len(events), "refused": 0} and len(events) >= 1
    assert [one["version"] for one in events] == list(range(1, len(events) + 1))
    steps = [one["step"] for one in events]
    assert steps == sorted(set(steps)) and steps[-1] == 400
    assert events[-1]["weights_sha256"] == summary["weights_sha256"], "the last one is judged when the roles are gone"
    process = here.start("serve", "servers", "--port", 0)
    address = wait_for_address(process)
    model = ask(address, "GET", "/model")[1]
    assert (model["source"], model["step"], model["version"]) == ("published", 400, len(events))
    status, said = ask(address, "POST", "/predict", {"rows": [{model["inputs"][0]["name"]: ROWS[0]}]})
    published = Published(here.folder / "servers" / "published")
    assert status == 200 and (said["outputs"][0], said["weights_sha256"]) == published.predict(len(events), ROWS[0])
    end(process)
    # A checkpoint that is worse than the bound allows is not published.
    run, log = load_run(here.folder / "servers"), EventLog(here.folder / "servers", 9)
    for weight in run.model.parameters():
        weight.data.mul_(-50)
    CheckpointPublisher(here.folder / "servers", log).refresh(run)
    log.close()
    (refused,) = read_events(here.folder / "servers", 9)
    assert refused["kind"] == "refresh_refused" and refused["loss"] > refused["limit"]
    assert len(published_events(here.folder / "servers")) == len(events)


def published_events(run):
    lines = [line for file in sorted((run / "events").glob("*.jsonl")) for line in file.read_text().splitlines()]
    return sorted((one for one in map(json.loads, lines) if one["kind"] == "published"), key=lambda one: one["t"])


def test_a_refresh_that_is_worse_is_not_published(trained):
    here, _, _ = trained
    changes = ["--set", "publish.bound=1", "--set", "optim.lr=0.5", "--set", "publish.every_steps=1"]
    here.run("train", here.folder / "run.toml", "--plan", "dp=2", "--run-dir", "worse", *changes)
    events = read_events(here.folder / "worse", 0)
    refused = [one for one in events if one["kind"] == "refresh_refused"]
    assert refused and all(one["loss"] > one["limit"] == one["last_loss"] for one in refused)
    last = None
    for one in events:
        if one["kind"] == "published":
            assert last is None or one["loss"] <= last
            last = one["loss"]
        elif one["kind"] == "refresh_refused":
            assert one["last_loss"] == last
    summary = read_summary(here.folder / "worse")["publish"]
    assert summary["refused"] == len(refused) and summary["published"] + summary["refused"] == 12


def test_a_run_without_end_an_appender_a_server_and_clients(shoal):
    recipe = write_recipe(shoal.folder, every=20)
    run = shoal.start("train", recipe, "--follow", "--plan", "dp=2", "--run-dir", "run")
    newest = shoal.folder / "run" / "published" / "newest"
    wait_until(newest.exists, "the first version", 60)
    address = wait_for_address(shoal.start("serve", "run", "--port", 0))
    name = ask(address, "GET", "/model")[1]["inputs"][0]["name"]
    answers = []
    append_store([rows(60, 90)], str(shoal.folder / "store"))
    until = time.monotonic() + 60
    while len({content["version"] for _, content in answers}) < 4 or not read_events(
        shoal.folder / "run", 0, "data_grew"
    ):
        assert time.monotonic() < until, "four versions and the appended rows"
        row = ROWS[len(answers) % len(ROWS)]
        status, content = ask(address, "POST", "/predict", {"rows": [{name: row}]})
        assert status == 200
        answers.append((row, content))
    run.send_signal(signal.SIGTERM)
    run.communicate(timeout=60)
    assert run.returncode == 143
    assert read_summary(shoal.folder / "run")["publish"]["drift"]["where"]
    published = Published(shoal.folder / "run" / "published")
    for row, content in answers:
        assert (content["outputs"][0], content["weights_sha256"]) == published.predict(content["version"], row)
    versions = [content["version"] for _, content in answers]
    assert versions == sorted(versions), "an older version never comes back"


@pytest.mark.soak
@pytest.mark.parametrize(
    "plan",
    [
        "dp=2 zero=1",
        "dp=2 zero=3",
        "tp=2",
        "tp=2 sp=true",
        "cp=2",
        "pp=2",
        "pp=2 schedule=pipedream",
        "dp=2 islands=2 sync=local:2",
    ],
)
def test_the_last_version_has_the_weights_of_the_run_under_every_plan(shoal, plan):
    recipe = shoal.folder / "tiny.toml"
    recipe.write_text(TINY.replace("dropout = 0.1", "dropout = 0.0") + "\n[publish]\nevery_steps = 4\nwindow = 64\n")
    shoal.run("train", recipe, "--plan", plan, "--run-dir", "run")
    version = json.loads((shoal.folder / "run" / "published" / "version-00000002" / "version.json").read_text())
    assert version["step"] == 8 and version["weights_sha256"] == read_summary(shoal.folder / "run")["weights_sha256"]
    assert [one["name"] for one in version["inputs"]] == ["tokens_BL"]
