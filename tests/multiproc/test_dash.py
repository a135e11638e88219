"""``shoal dash`` beside runs: what strangers try gets nothing, and what happens is seen within moments."""

import contextlib
import http.client
import json
import os
import signal
import socket
import time

import psutil
import pytest

from support.dashboard.recorded import KINDS, recorded
from support.dashboard.serving import Listener, wait_for_dash
from support.dashboard.synthetic import make_run, step_line
from support.processes.command import TINY, Shoal, ranks_of, wait_for_step

MARKUP = "<script>alert(1)</script>"
SECRET = "the secret of somebody else"


def start(here, *arguments):
    return wait_for_dash(here.start("dash", *arguments, environment={"XDG_CACHE_HOME": str(here.folder / "cache")}))


@pytest.fixture(scope="module")
def hostile(tmp_path_factory):
    """A folder with everything that a stranger may put there, and a dashboard of it."""
    here = Shoal(tmp_path_factory.mktemp("hostile"))
    (here.folder / "secret.log").write_text(SECRET)
    (here.folder / "secret.jsonl").write_text(step_line(1, 0, t=1.0))
    runs = here.folder / "runs"
    run = make_run(runs / "<script>alert(1)<script>", steps=20, status=None)
    events = run / "events"
    with (events / "rank-000.jsonl").open("a") as file:
        file.write('{"t": 1.0, "kind": "warning", "message": "' + "x" * 10_000_000 + '"}\n')
        file.write('{"t": 1.0, "kind": "warning", "message": "\\u001b[31m' + MARKUP + '\\u001b]0;t\\u0007"}\n')
        file.write(
            '{"t": NaN, "kind": "step"}\n{"t": 1e400, "kind": "step"}\n' + "[" * 100_000 + '\n{"t": 1.0, "kind": "st'
        )
    os.mkfifo(events / "rank-001.jsonl")
    os.symlink(here.folder / "secret.jsonl", events / "rank-002.jsonl")
    os.symlink("/dev/zero", events / "rank-003.jsonl")
    os.symlink("/etc/passwd", run / "summary.json")
    (run / "logs").mkdir()
    (run / "logs" / "rank-000.log").write_text("\x1b[2Jhello\n" * 30_000)
    os.symlink(here.folder / "secret.log", run / "logs" / "rank-001.log")
    os.symlink(here.folder, runs / "out")
    (run / "live.json").write_text('{"status": "running", "ranks": [[]], "hang": ' + "[" * 1000)
    dash = start(here, "runs", "--port", 0)
    dash.enter()
    dash.wait_for_runs(lambda rows: rows and all(row["step"] == 20 for row in rows.values()), "the run")
    yield dash
    dash.end()
    here.end()


@pytest.fixture
def run_id(hostile):
    (row,) = hostile.runs().values()
    return row["id"]


@pytest.fixture(autouse=True)
def _alive_afterwards(request):
    yield
    if "hostile" in request.fixturenames:
        dash = request.getfixturevalue("hostile")
        assert dash.ask("/api/runs")[0] == 200


PATHS = ["/", "/api/runs", "/api/stream", "/page/app.js", "/nothing", "/api/run/x/curve"]


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("cookie", ["", "shoal-dash=x", "{name}=", "{name}=x", "{name}={key}x", "x{name}={key}"])
def test_without_the_key_nothing_is_answered(hostile, path, cookie):
    name, _, key = hostile.cookie.partition("=")
    given = {"cookie": cookie.format(name=name, key=key)} if cookie else {}
    status, headers, body = hostile.ask(path, headers=given, keyed=False)
    assert status == 401 and MARKUP.encode() not in body and len(body) < 200
    assert "set-cookie" not in headers


@pytest.mark.parametrize(
    "headers",
    [
        {"host": "evil.example"},
        {"host": "127.0.0.1.evil.example"},
        {"host": ""},
        {"host": "user@127.0.0.1"},
        {"host": "127.0.0.1/x"},
        {"origin": "http://evil.example"},
        {"origin": "null"},
        {"origin": "http://127.0.0.1:1"},
        {"sec-fetch-site": "cross-site"},
        {"sec-fetch-site": "same-site"},
    ],
    ids=str,
)
@pytest.mark.parametrize("path", ["/", "/api/runs", "/api/stream", "/enter?code=x"])
def test_foreign_hosts_and_origins_are_refused_even_with_the_key(hostile, path, headers):
    assert hostile.ask(path, headers=headers)[0] == 403


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "HEAD", "OPTIONS", "PATCH", "TRACE"])
def test_nothing_but_get_is_answered(hostile, method):
    assert hostile.ask("/api/runs", method=method)[0] == 405


@pytest.mark.parametrize(
    "path",
    [
        "/page/../server/start.py", "/page/..%2fserver%2fstart.py", "/page/%2e%2e/server/start.py", "/..%2f..%2fetc%2fpasswd",
        "/page//etc/passwd", "/page/app.js%00", "/page/\\..\\start.py", "/%00", "/api/run/../../etc/passwd",
        "/api/run/%2e%2e/log",
        "/page/", "/page", "//page/app.js", "/api/run/{id}/../{id}", "/api/run/{id}/nothing", "/api/run/{id}/log/x",
        "/api/run/{id}/log?name=../../../secret", "/api/run/{id}/log?name=..%2f..%2f..%2fsecret", "/api/run/{id}/log?name=%00",
        "/api/run/{id}/log?name=/etc/passwd", "/api/run/{id}/curve?name=../x", "/api/run/{id}/curve?name=loss&x=../y",
    ],
)  # fmt: skip
def test_ways_out_lead_nowhere(hostile, run_id, path):
    status, _, body = hostile.ask(path.format(id=run_id))
    assert status == 404 and SECRET.encode() not in body and b"root:" not in body


@pytest.mark.parametrize(
    "query",
    [
        "points=x", "points=1e400", "points=nan", "from=inf", "to=x", "rank=x", "points=" + "9" * 400, "from=1&from=x",
        "a=1&" * 80, "name=%ff",
    ],
)  # fmt: skip
def test_queries_that_are_none_are_one_message(hostile, run_id, query):
    status, _, body = hostile.ask(f"/api/run/{run_id}/curve?{query}")
    assert status == 400 and "error" in json.loads(body)


@pytest.mark.parametrize("query", ["points=-5", "points=1e18", "from=1e308&to=-1e308", "points=0", "rank=99999999999"])
def test_numbers_of_any_size_are_answered(hostile, run_id, query):
    assert hostile.ask(f"/api/run/{run_id}/curve?{query}")[0] in (200, 404)


def test_links_out_of_the_folder_are_skipped_and_said(hostile, run_id):
    header = hostile.get(f"/api/run/{run_id}")
    skipped = {one["name"]: one["reason"] for one in header["skipped"]}
    assert {"events/rank-001.jsonl", "events/rank-002.jsonl", "events/rank-003.jsonl", "summary.json"} <= set(skipped)
    assert "FIFO" in skipped["events/rank-001.jsonl"] and "leads out" in skipped["summary.json"]
    assert any(one["name"] == "out" for one in hostile.get("/api/runs")["skipped"])
    log = hostile.get(f"/api/run/{run_id}/log?name=rank-001")
    assert log["text"] == "" and "leads out" in log["error"]
    assert header["long_lines"] == 1 and header["broken_lines"] == 3
    assert header["summary"] is None


def test_markup_and_escape_codes_are_only_text(hostile, run_id):
    (name,) = hostile.runs()
    assert name.startswith("<script>")
    _, headers, body = hostile.ask(f"/api/run/{run_id}/story")
    assert headers["content-type"] == "application/json" and headers["x-content-type-options"] == "nosniff"
    assert "default-src 'self'" in headers["content-security-policy"] and headers["cache-control"] == "no-store"
    texts = [item["text"] for item in json.loads(body)["items"]]
    assert MARKUP in texts
    log = hostile.get(f"/api/run/{run_id}/log?name=rank-000")
    assert "\x1b" not in log["text"] and log["to"] - log["from"] <= 65536 and log["size"] == 300_000


def test_every_view_answers_in_200_kilobytes(hostile, run_id):
    for view in ("", "/curve", "/ranks", "/timeline", "/agreement", "/story", "/log?name=rank-000"):
        status, _, body = hostile.ask(f"/api/run/{run_id}{view}")
        assert status == 200 and len(body) < 200_000, view


def test_idle_connections_keep_nobody_out(hostile):
    with contextlib.ExitStack() as stack:
        for number in range(200):
            idle = stack.enter_context(socket.create_connection((hostile.host, hostile.port), timeout=10))
            if number % 2:
                idle.sendall(b"GET / HTTP/1.1\r\nhost: 127.0.0.1\r\n")
        begin = time.monotonic()
        assert hostile.ask("/api/runs")[0] == 200
        assert time.monotonic() - begin < 10


@pytest.mark.parametrize(
    "request_line", [b"\x00\x01\x02\r\n\r\n", b"GET / HTTP/1.1\r\n" + b"a: b\r\n" * 4000 + b"\r\n", b"GET /\r\n\r\n"]
)
def test_what_is_no_request_is_refused(hostile, request_line):
    with socket.create_connection((hostile.host, hostile.port), timeout=10) as client:
        client.sendall(request_line)
        answer = http.client.HTTPResponse(client)
        answer.begin()
        assert answer.status in (400, 431)


def test_a_code_lets_one_browser_in_and_the_cookie_is_for_it_alone(shoal, tmp_path):
    dash = start(shoal, make_run(tmp_path / "runs" / "one", steps=3).parent, "--port", 0)
    headers = dash.enter()
    assert {"HttpOnly", "SameSite=Strict", "Path=/"} <= {part.strip() for part in headers["set-cookie"].split(";")}
    assert headers["location"] == "/"
    assert dash.ask(f"/enter?code={dash.code}", keyed=False)[0] == 401
    assert dash.ask("/api/runs")[0] == 200
    # Another browser gets a code of its own, which is printed.
    line = dash.process.stdout.readline()
    assert "for another one" in line and dash.code not in line
    key = tmp_path / "cache" / "shoal" / "dashboard" / "session.key"
    assert key.stat().st_mode & 0o077 == 0
    dash.end()


def test_a_token_lets_programs_in(shoal, tmp_path):
    token = tmp_path / "token"
    token.write_text("0123456789abcdef-token\n")
    token.chmod(0o600)
    dash = start(shoal, make_run(tmp_path / "runs" / "one", steps=3).parent, "--port", 0, "--token-file", token)
    assert dash.ask("/api/runs", headers={"authorization": "Bearer 0123456789abcdef-token"})[0] == 200
    assert dash.ask("/api/runs", headers={"authorization": "Bearer 0123456789abcdef-tokem"})[0] == 401
    dash.end()
    refused = shoal.run("dash", "runs", "--host", "0.0.0.0", "--port", 0, expect=2)
    assert "--token-file" in refused.stderr


def test_a_port_in_use_gives_way_to_the_next(shoal, tmp_path):
    make_run(tmp_path / "runs" / "one", steps=3)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        dash = start(shoal, "runs", "--port", port)
        assert dash.port != port and f"port {port} is in use" in dash.said[0]
        dash.end()


def test_a_folder_without_runs_waits_for_them(shoal, tmp_path):
    dash = start(shoal, "runs", "--port", 0)
    assert "there is no run in runs yet" in dash.said[0]
    dash.enter()
    assert dash.runs() == {}
    make_run(tmp_path / "runs" / "later", steps=3)
    assert dash.wait_for_runs(bool, "the run that came")["later"]["step"] == 3
    dash.end()


def test_a_file_is_no_folder_of_runs(shoal, tmp_path):
    (tmp_path / "file").write_text("x")
    assert "is a file" in shoal.run("dash", "file", "--port", 0, expect=2).stderr


def test_a_new_step_is_heard_at_once_and_a_client_goes_on_by_its_id(shoal, tmp_path):
    run = make_run(tmp_path / "runs" / "one", steps=3, status=None, begin=time.time() - 1)
    dash = start(shoal, "runs", "--port", 0)
    dash.enter()
    dash.wait_for_runs(lambda rows: "one" in rows and rows["one"]["step"] == 3, "the run")

    def add(step):
        with (run / "events" / "rank-000.jsonl").open("a") as file:
            file.write(step_line(step, 0, t=time.time(), loss=step / 8))

    client = Listener(dash)
    assert client.status == 200
    seconds, numbers = [], []
    for step in range(4, 8):
        begin = time.monotonic()
        add(step)
        number, _, content = client.wait_for(lambda kind, content, step=step: kind == "run" and content["step"] == step)
        seconds.append(time.monotonic() - begin)
        numbers.append(number)
        assert content["curves"]["loss"] == [[step, step / 8]]
    assert sorted(seconds)[1] < 1.5, seconds
    client.close()
    # What was missed, and nothing else.
    again = Listener(dash, since=numbers[1])
    kinds = [again.wait_for(lambda kind, content: kind == "run") for _ in range(2)]
    assert [number for number, _, _ in kinds] == numbers[2:]
    again.close()
    # A server that was started again knows the browser, and says that there is more to fetch.
    dash.end()
    other = start(shoal, "runs", "--port", dash.port)
    other.cookie = dash.cookie
    assert other.port == dash.port and other.ask("/api/runs")[0] == 200
    client = Listener(other, since=numbers[-1])
    assert next(iter(client.messages()))[1:] == ("hello", {"reset": True})
    other.wait_for_runs(lambda rows: "one" in rows, "the run")
    add(8)
    client.wait_for(lambda kind, content: kind == "run" and content["step"] == 8)
    client.close()
    other.end()


@pytest.mark.parametrize("kind", KINDS)
def test_every_view_of_recorded_runs(kind, shoal, tmp_path_factory):
    path = recorded(kind, tmp_path_factory)
    before = {file: file.stat().st_mtime_ns for file in path.rglob("*")}
    dash = start(shoal, path, "--port", 0)
    dash.enter()
    (row,) = dash.wait_for_runs(lambda rows: any(row["step"] for row in rows.values()), "the run").values()
    header = dash.get(f"/api/run/{row['id']}")
    answers = {view: dash.get(f"/api/run/{row['id']}/{view}") for view in ("ranks", "timeline", "agreement", "story")}
    for curve in header["curves"]:
        found = dash.get(f"/api/run/{row['id']}/curve?name={curve['name']}")
        assert len(found["x"]) == len(found["mean"]) and found["x"] == sorted(found["x"])
    assert header["broken_lines"] == 0 and header["unknown_kinds"] == {} and header["skipped"] == []
    events = [json.loads(line) for line in (path / "events" / "rank-000.jsonl").read_text().splitlines()]
    steps = [event for event in events if event["kind"] == "step"]
    loss = dash.get(f"/api/run/{row['id']}/curve?name=loss")
    assert (loss["x"], loss["mean"]) == ([event["step"] for event in steps], [event["loss"] for event in steps])
    assert dash.get(f"/api/run/{row['id']}/log?name=rank-000")["text"] == (path / "logs" / "rank-000.log").read_text()
    if kind == "failed":
        assert row["status"] == "failed" and row["culprit"]["rank"] == 1 and "SIGKILL" in row["culprit"]["cause"]
        assert answers["story"]["items"][0]["kind"] == "culprit"
    else:
        assert row["status"] == "completed" and row["culprit"] is None
        assert row["hash"] == json.loads((path / "summary.json").read_text()).get("weights_sha256")
    if kind in ("dp", "pipeline", "islands"):
        assert answers["ranks"]["ranks"] == [0, 1] and [one["rank"] for one in answers["timeline"]["executed"]] == [
            0,
            1,
        ]
        waits = [sum(event["wait_seconds"].values()) for event in steps]
        shown = dash.get(f"/api/run/{row['id']}/ranks?bins=400")
        assert shown["wait"][0] == pytest.approx(waits, rel=1e-3, abs=1e-6)
    if kind == "dp":
        memory = answers["ranks"]["memory"]
        for part in ("gradients", "optimizer"):
            assert [one["predicted"][part] for one in memory] == [one["measured"][part] for one in memory] != [0, 0]
        of_dp = [row for row in answers["ranks"]["traffic"] if row["axis"] == "dp"]
        assert len(of_dp) == 3 and all(row["bytes"] == row["forecast_bytes"] > 0 for row in of_dp)
    if kind == "pipeline":
        timeline = answers["timeline"]
        cells = [span[1] for span in timeline["executed"][1]["spans"] if span[0] == "cell"]
        assert cells == [cell for cell in timeline["planned"][1] if cell]
        assert 0 < timeline["bubble"]["measured"] < 1 and 0 < timeline["bubble"]["predicted"] < 1
    if kind == "servers":
        assert row["kind"] == "servers"
        late = answers["agreement"]["staleness"]["workers"]
        updates = [event for event in events if event["kind"] == "update"]
        assert sum(worker["gradients"] for worker in late) == sum(len(event["workers"]) for event in updates)
    if kind == "islands":
        assert answers["agreement"]["rounds"]["count"] == 4
    if kind == "script":
        assert dash.get(f"/api/run/{row['id']}/curve?name=log:mine")["exact"]
    assert {file: file.stat().st_mtime_ns for file in path.rglob("*")} == before, "a run directory was written to"
    dash.end()


def test_a_stopped_rank_and_then_a_killed_one_are_named_live(shoal, tmp_path):
    recipe = tmp_path / "long.toml"
    recipe.write_text(TINY.replace("steps = 8", "steps = 1000000"))
    dash = start(shoal, "runs", "--port", 0)
    dash.enter()
    train = shoal.start("train", recipe, "--plan", "dp=2", "--run-dir", "runs/live")
    wait_for_step(tmp_path / "runs" / "live", 5)
    dash.wait_for_runs(lambda rows: rows.get("live", {}).get("status") == "running", "the run")
    rank = ranks_of(train)[1]
    rank.send_signal(signal.SIGSTOP)
    begin = time.monotonic()
    # Rank 0 stands still in a collective then, and is silent in nobody's eyes: its heartbeat goes on.
    silent = dash.wait_for_runs(lambda rows: rows["live"]["status"] == "silent", "the rank that was stopped")["live"]
    assert silent["culprit"]["rank"] == 1 and silent["culprit"]["phase"]
    assert time.monotonic() - begin < 10
    with contextlib.suppress(psutil.NoSuchProcess):
        rank.send_signal(signal.SIGKILL)
    train.communicate(timeout=60)
    failed = dash.wait_for_runs(lambda rows: rows["live"]["status"] == "failed", "the failure")["live"]
    assert failed["culprit"]["rank"] == 1 and "SIGKILL" in failed["culprit"]["cause"]
    dash.end()
