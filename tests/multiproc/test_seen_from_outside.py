"""``shoal top``, ``report``, ``runs`` and ``export`` on runs that trained: what they say is what is in the events."""

import http.client
import json
import os
import re
import signal

import pytest

from shoal.dashboard.runs.run import Run
from shoal.dashboard.terminal.looking import Looker
from shoal.dashboard.views.ranks import ranks_answer
from support.dashboard.promtool import check_metrics
from support.processes.command import TINY, Shoal, ranks_of, read_events, read_summary, wait_for_step, wait_until
from unit.dashboard.test_exporters import Receiver, parse
from unit.dashboard.test_perfetto import overlaps, read_trace

KINDS = {"dp": "dp=2", "pp": "pp=2 microbatches=4", "ps": "ps=1 workers=3"}
SLOW = TINY.replace("global_batch = 8", "global_batch = 9").replace(
    TINY[TINY.index('name = "gpt"') : TINY.index("[data]")],
    'build = "support.models.paced:build_slow_worker"\nargs = { seconds = 0.04 }\n',
)
"""``worker-1`` takes longer than the others."""


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A folder with a run of every kind, one of which was killed, and a stranger's folder beside them."""
    folder = tmp_path_factory.mktemp("seen")
    (folder / "tiny.toml").write_text(TINY)
    (folder / "slow.toml").write_text(SLOW)
    shoal = Shoal(folder)
    try:
        started = [
            shoal.start(
                "train", "slow.toml" if name == "ps" else "tiny.toml", "--plan", plan, "--run-dir", f"runs/{name}"
            )
            for name, plan in KINDS.items()
        ]
        for process in started:
            _, stderr = process.communicate(timeout=90)
            assert process.returncode == 0, stderr
        long = ("--run-dir", "runs/killed", "--set", "train.steps=100000")
        process = shoal.start("train", "tiny.toml", "--plan", "dp=2", *long)
        wait_for_step(folder / "runs" / "killed", 4)
        os.kill(ranks_of(process)[1].pid, signal.SIGKILL)
        process.communicate(timeout=60)
        assert process.returncode == 1
    finally:
        shoal.end()
    (folder / "runs" / "notes").mkdir()
    (folder / "runs" / "notes" / "todo.txt").write_text("buy milk")
    return folder / "runs"


def steps_of(run, rank=0):
    return read_events(run, rank, "step")


def test_the_list_has_every_run_with_its_numbers(shoal, runs):
    done = shoal.run("runs", runs, "--json", "list.json")
    rows = {row["name"]: row for row in json.loads((shoal.folder / "list.json").read_text())["runs"]}
    assert set(rows) == {*KINDS, "killed"}
    for name in KINDS:
        assert rows[name]["status"] == "completed" and rows[name]["step"] == 8
        assert rows[name]["loss"] == steps_of(runs / name)[-1]["loss"]
        assert rows[name]["hash"] == read_summary(runs / name)["weights_sha256"]
    assert rows["killed"]["status"] == "failed" and rows["killed"]["culprit"]["rank"] == 1
    assert f"{rows['dp']['loss']:.4f}" in done.stdout and "notes" not in done.stdout
    first = shoal.run("runs", runs, "--filter", "status=failed").stdout
    assert "killed" in first and "pp=2" not in first
    by_loss = shoal.run("runs", runs, "--sort", "loss").stdout.splitlines()[1:]
    losses = [rows[line.split()[0]]["loss"] for line in by_loss]
    assert losses == sorted(losses)
    assert "is no column" in shoal.run("runs", runs, "--sort", "los", expect=2).stderr


def test_metrics_are_those_of_the_events_and_promtool_takes_them(shoal, runs):
    text = shoal.run("export", runs, "--once").stdout
    check_metrics(text)
    values = parse(text)
    for name in (*KINDS, "killed"):
        steps = steps_of(runs / name)
        assert values[f'shoal_steps_total{{run="{name}"}}'] == len(steps)
        assert values[f'shoal_train_loss{{run="{name}"}}'] == steps[-1]["loss"]
        assert values[f'shoal_tokens_total{{run="{name}"}}'] == sum(step["tokens"] for step in steps)
        total = values[f'shoal_step_duration_seconds_sum{{run="{name}"}}']
        assert total == pytest.approx(sum(step["seconds"] for step in steps), rel=1e-12)
        within = values[f'shoal_step_duration_seconds_bucket{{run="{name}",le="0.1"}}']
        assert within == sum(step["seconds"] <= 0.1 for step in steps)
    of_pp = steps_of(runs / "pp", 1)
    for phase in ("forward", "backward", "optimizer"):
        wanted = sum(step["phases"][phase] for step in of_pp)
        assert values[f'shoal_busy_seconds_total{{run="pp",rank="1",phase="{phase}"}}'] == pytest.approx(
            wanted, rel=1e-5
        )
    waited = sum(step["wait_seconds"]["pp"] for step in of_pp)
    assert values['shoal_wait_seconds_total{run="pp",rank="1",axis="pp"}'] == pytest.approx(waited, rel=1e-5)
    for axis in ("workers", "servers"):
        waited = sum(work["wait_seconds"][axis] for work in read_events(runs / "ps", 2, "work"))
        assert values[f'shoal_wait_seconds_total{{run="ps",rank="2",axis="{axis}"}}'] == pytest.approx(waited, rel=1e-5)
    calls, num_bytes, _ = read_events(runs / "dp", 0, "axis_traffic")[-1]["rows"]["replicas all_reduce"]
    assert values['shoal_comm_calls_total{run="dp",rank="0",axis="replicas",op="all_reduce"}'] == calls
    assert values['shoal_comm_bytes_total{run="dp",rank="0",axis="replicas",op="all_reduce"}'] == num_bytes
    memory = read_events(runs / "dp", 1, "memory")[-1]
    assert values['shoal_memory_bytes{run="dp",rank="1",part="weights"}'] == memory["weights_bytes"]
    assert values['shoal_events_total{run="killed",event="rank_failed"}'] == 1
    assert values['shoal_run_running{run="killed"}'] == 0


def test_a_slow_worker_is_ranked_first_and_the_others_wait_for_it(runs):
    run = Run(runs / "ps").look_once()
    answer = ranks_answer(run, bins=8)
    # Rank 0 is the server.
    assert answer["ranks"] == [1, 2, 3] and answer["scores"][0]["rank"] == 2
    assert answer["scores"][0]["score"] > 1.3
    row = dict(zip(answer["waits"], zip(*answer["wait_seconds"], strict=True), strict=True))
    assert row["workers"][1] < min(row["workers"][0], row["workers"][2])
    assert run.curve("busy_seconds", 2) is not None and run.curve("loss", 2) is None
    for rank in answer["ranks"]:
        for work in read_events(runs / "ps", rank, "work"):
            assert sum(work["phases"].values()) == pytest.approx(work["seconds"], abs=1e-4)
            assert {"take", "pull", "data", "forward", "backward"} <= set(work["phases"]) and work["samples"] == 3
    shares = [work["step"] for rank in answer["ranks"] for work in read_events(runs / "ps", rank, "work")]
    assert sorted(shares) == sorted(3 * list(range(1, 9)))


def scrape(address, path="/metrics", headers=None, method="GET"):
    connection = http.client.HTTPConnection(*address, timeout=30)
    try:
        connection.request(method, path, headers=headers or {})
        answer = connection.getresponse()
        return answer.status, answer.getheader("content-type"), answer.read().decode()
    finally:
        connection.close()


def wait_for_endpoint(process):
    line = process.stderr.readline()
    found = re.search(r"at http://([0-9.]+):([0-9]+)/metrics", line)
    assert found, line + process.stderr.read()
    return found[1], int(found[2])


def test_an_endpoint_answers_this_machine_and_nobody_who_was_sent_by_a_page(shoal, runs):
    process = shoal.start("export", runs, "--prometheus", 0, "--json", "end.json")
    address = wait_for_endpoint(process)
    assert address[0] == "127.0.0.1"
    status, kind, text = scrape(address)
    assert status == 200 and kind.startswith("text/plain; version=0.0.4")
    assert parse(text)['shoal_steps_total{run="dp"}'] == 8
    assert scrape(address, headers={"host": "evil.example"})[0] == 403
    assert scrape(address, headers={"host": f"localhost:{address[1]}"})[0] == 200
    assert scrape(address, "/etc/passwd")[0] == 404 and scrape(address, method="POST")[0] == 405
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=30)
    assert process.returncode == 0
    assert json.loads((shoal.folder / "end.json").read_text()) == {"runs": 4, "scrapes": 2, "refused": 3}


def test_an_endpoint_for_others_wants_the_token(shoal, runs):
    refused = shoal.run("export", runs, "--prometheus", 0, "--host", "0.0.0.0", expect=2)
    assert "--token-file" in refused.stderr
    token = shoal.folder / "token"
    token.write_text("a secret of many letters\n")
    token.chmod(0o600)
    process = shoal.start("export", runs, "--prometheus", 0, "--token-file", token)
    address = wait_for_endpoint(process)
    assert scrape(address)[0] == 401
    assert scrape(address, headers={"authorization": "Bearer a secret of many letterz"})[0] == 401
    assert scrape(address, headers={"authorization": "Bearer a secret of many letters"})[0] == 200
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=30)
    assert process.returncode == 0


def test_a_collector_gets_what_is_in_the_events_again_and_again(shoal, runs):
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http", reason="needs shoal[otel]")
    receiver = Receiver()
    try:
        process = shoal.start("export", runs, "--otlp", receiver.url, "--every", 0.2, "--json", "end.json")
        wait_until(lambda: len(receiver.received) >= 2, "two requests", 60)
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=30)
        assert process.returncode == 0
        once = shoal.run("export", runs / "dp", "--otlp", receiver.url, "--once")
        assert once.stdout == ""
    finally:
        receiver.close()
    assert json.loads((shoal.folder / "end.json").read_text())["sent"] == len(receiver.received) - 1
    for request in (receiver.received[0], receiver.received[-1]):
        (of_resource,) = request.resource_metrics
        metrics = {metric.name: metric for metric in of_resource.scope_metrics[0].metrics}
        losses = {
            point.attributes[0].value.string_value: point for point in metrics["shoal.train.loss"].gauge.data_points
        }
        assert losses["dp"].as_double == steps_of(runs / "dp")[-1]["loss"]
    refused = shoal.run("export", runs, "--otlp", receiver.url, "--once", expect=1)
    assert "does not take the metrics" in refused.stderr


def test_a_trace_has_every_step_of_the_events(shoal, runs):
    for name in (*KINDS, "killed"):
        shoal.run("export", runs / name, "--perfetto", f"{name}.json")
        events = read_trace(shoal.folder / f"{name}.json")
        assert overlaps(events) == []
        for rank in range(2):
            told = steps_of(runs / name, rank) or read_events(runs / name, rank, "work")
            wanted = [step["seconds"] for step in told]
            assert wanted
            drawn = [one for one in events if one["ph"] == "X" and one["pid"] == 2 + 2 * rank and one["cat"] == "steps"]
            assert len(drawn) == len(wanted)
            for one, seconds in zip(drawn, wanted, strict=True):
                # A step may have begun by the clock before the one before it was written down.
                assert one["dur"] == pytest.approx(seconds * 1e6, rel=0.05, abs=2000)
    happened = [one["name"] for one in events if one["ph"] == "i"]
    assert "rank failed" in happened


def test_a_report_says_what_the_events_say_and_its_page_asks_nobody(shoal, runs):
    done = shoal.run("report", runs / "dp", "--html", "dp.html", "--json", "card.json")
    card = json.loads((shoal.folder / "card.json").read_text())
    steps, summary = steps_of(runs / "dp"), read_summary(runs / "dp")
    assert card["result"]["weights_sha256"] == summary["weights_sha256"] in done.stdout
    ordered = sorted(step["seconds"] for step in steps)
    assert card["speed"]["median_seconds"] == pytest.approx((ordered[3] + ordered[4]) / 2)
    assert card["speed"]["slowest_steps"][0]["seconds"] == ordered[-1]
    assert card["checkpoints"]["saved"] == len(
        {event["step"] for event in read_events(runs / "dp", 0, "checkpoint_saved")}
    )
    page = (shoal.folder / "dp.html").read_text()
    assert len(page) < 500_000 and "<script" not in page and "Curves" in page
    assert not re.findall(r"""(?:src|href|action)\s*=|url\(|@import|https?://(?!www\.w3\.org)""", page)


def test_a_report_of_a_killed_run_names_the_culprit(shoal, runs):
    text = shoal.run("report", runs / "killed").stdout
    assert re.search(r"culprit +rank 1 .*SIGKILL", text) and "killed: failed after" in text


@pytest.mark.parametrize("name", [*KINDS, "killed"])
def test_top_shows_a_run_that_is_over_once_and_ends(shoal, runs, name):
    done = shoal.run("top", runs / name, "--json", "top.json")
    found = json.loads((shoal.folder / "top.json").read_text())
    assert found["loss"] == steps_of(runs / name)[-1]["loss"] and f"run={name}" in done.stdout
    if name == "killed":
        assert "state=DIED" in done.stdout and "SIGKILL" in done.stdout


def test_top_follows_a_run_under_way_until_somebody_has_seen_enough(shoal, tiny):
    train = shoal.start("train", tiny, "--plan", "dp=2", "--run-dir", "run", "--set", "train.steps=100000")
    wait_for_step(shoal.folder / "run", 4)
    once = shoal.run("top", "run", "--once", "--json", "once.json")
    found = json.loads((shoal.folder / "once.json").read_text())
    assert "status=running" in once.stdout and [line["rank"] for line in found["ranks"]] == [0, 1]
    assert found["step"] in {step["step"] for step in steps_of(shoal.folder / "run")}
    follow = shoal.start("top", "run", "--every", 0.1, "--json", "last.json")
    for _ in range(2):
        # It goes on by itself, where something changes.
        while not follow.stdout.readline().startswith("run="):
            assert follow.poll() is None
    follow.send_signal(signal.SIGINT)
    follow.communicate(timeout=30)
    assert follow.returncode == 130
    assert json.loads((shoal.folder / "last.json").read_text())["step"] >= found["step"]
    train.send_signal(signal.SIGINT)
    train.communicate(timeout=60)
    assert "status=interrupted" in shoal.run("top", "run").stdout


def test_top_marks_a_rank_that_stopped_and_one_that_died(shoal, tiny):
    long = ("--set", "train.steps=100000", "--set", "elastic.heartbeat_deadline=120")
    train = shoal.start("train", tiny, "--plan", "dp=2", "--run-dir", "run", *long)
    wait_for_step(shoal.folder / "run", 4)
    ranks = ranks_of(train)
    os.kill(ranks[1].pid, signal.SIGSTOP)
    looker = Looker(shoal.folder / "run")

    def marked():
        found = {line.rank: line for line in looker.take().ranks}
        return found if found[1].state in ("silent", "hanging") else None

    found = wait_until(marked, "a mark on the rank that stopped", 60)
    assert found[0].state == "running" and found[0].heartbeat_age < found[1].heartbeat_age
    assert found[1].step >= 4 and found[1].phase
    once = shoal.run("top", "run", "--once").stdout
    assert re.search(r"warning: rank 1 hangs .*in \S+", once) and re.search(r"rank=1 .*state=(SILENT|HANGING)", once)
    os.kill(ranks[1].pid, signal.SIGKILL)
    train.communicate(timeout=60)
    after = shoal.run("top", "run").stdout
    assert "status=failed" in after and re.search(r"rank=1 .*state=DIED", after) and "SIGKILL" in after


def test_two_runs_are_told_apart_by_the_first_step_that_differs(shoal, runs):
    done = shoal.run("runs", "compare", runs / "dp", runs / "pp", "--json", "compare.json")
    found = json.loads((shoal.folder / "compare.json").read_text())["first_difference"]
    fields = {"loss": "loss", "grad_norm": "gradient norm", "lr": "learning rate", "samples": "samples"}
    steps = zip(steps_of(runs / "dp"), steps_of(runs / "pp"), strict=True)
    parts = ((a["step"], fields[name], [a[name], b[name]]) for a, b in steps for name in fields if a[name] != b[name])
    assert (found["step"], found["what"], found["values"]) == next(parts)
    assert "first difference: " in done.stdout and "microbatches" in done.stdout
    alike = shoal.run("runs", "compare", runs / "dp", runs / "killed").stdout
    assert re.search(r"no difference in the \d+ steps that both have", alike) and "train.steps" in alike
    assert "same run" in shoal.run("runs", "compare", runs / "dp", runs / "dp", expect=2).stderr


def test_prune_shows_first_and_takes_only_what_is_over(shoal, tiny, runs):
    mine = shoal.folder / "mine"
    mine.mkdir()
    for name in ("old", "older"):
        shoal.run("train", tiny, "--run-dir", mine / name, "--set", "train.steps=1")
    (mine / "link").symlink_to(runs / "dp")
    (mine / "notes").mkdir()
    train = shoal.start("train", tiny, "--plan", "dp=2", "--run-dir", mine / "going", "--set", "train.steps=100000")
    wait_for_step(mine / "going", 2)
    assert "every run" in shoal.run("runs", "prune", mine, expect=2).stderr
    shown = shoal.run("runs", "prune", mine, "--keep", 0, "--json", "dry.json")
    dry = {row["run"]: row for row in json.loads((shoal.folder / "dry.json").read_text())["runs"]}
    assert {name: row["outcome"] for name, row in dry.items()} == {"old": "goes", "older": "goes", "going": "stays"}
    assert dry["old"]["bytes"] > 10_000 and "--yes does it" in shown.stderr
    assert (mine / "old").is_dir()
    shoal.run("runs", "prune", mine, "--keep", 0, "--yes")
    assert sorted(path.name for path in mine.iterdir()) == ["going", "link", "notes"]
    assert (runs / "dp" / "recipe.toml").is_file(), "a link leads to what stays"
    assert train.poll() is None
    train.send_signal(signal.SIGINT)
    train.communicate(timeout=60)
