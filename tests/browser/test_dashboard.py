"""The dashboard in a real browser: what it shows is what the event files say, whatever one presses, and nothing else happens."""

import csv
import io
import json
import shutil
import signal

import pytest

from support.dashboard.browser import ARGUMENTS, CHROMIUM, WHY_NOT, Dash, Watched
from support.dashboard.live import HELD, HELD_LIVE, LIVE
from support.dashboard.synthetic import make_run, step_line
from support.processes.command import ranks_of, read_events, wait_for_step

playwright = pytest.importorskip("playwright.sync_api", reason=WHY_NOT)
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason=WHY_NOT)

MARKUP = "<img src=x onerror=alert(1)><script>alert(2)</script>"
BEGIN = 1_790_000_000.0


@pytest.fixture(scope="module")
def browser():
    with playwright.sync_playwright() as started:
        browser = started.chromium.launch(executable_path=CHROMIUM, args=ARGUMENTS)
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Runs of many kinds, made up: their numbers are known to the last digit."""
    folder = tmp_path_factory.mktemp("dashboard") / "runs"
    make_run(folder / "plain", ranks=2, steps=120)
    make_run(folder / "slow", ranks=4, steps=120, slow=(2, 1.3), seed=1)
    make_run(folder / "spike", steps=4000, spike_at=3217, seed=2)
    make_run(folder / "other", ranks=2, steps=120, seed=3)
    change_losses(folder / "other", from_step=57)
    make_run(folder / MARKUP.replace("/", "\u2215"), steps=20)
    make_run(folder / "strange", steps=20, status=None)
    strange = {
        "t": 1,
        "status": "running",
        "pid": "1; rm -rf ~",
        "host": {"a": 1},
        "ranks": "none",
        "hang": {"rank": MARKUP},
    }
    (folder / "strange" / "live.json").write_text(json.dumps(strange))
    make_failed(folder / "failed")
    make_pipeline(folder / "pipeline")
    return folder


def change_losses(run, from_step):
    """Another loss from a step on, on every rank."""
    for path in (run / "events").iterdir():
        events = [json.loads(line) for line in path.read_text().splitlines()]
        for event in events:
            if event["kind"] == "step" and event["step"] >= from_step:
                event["loss"] += 1e-7
        path.write_text("".join(json.dumps(event) + "\n" for event in events))


def make_failed(run):
    """A run that a rank ended, with a loss that was not finite, a checkpoint, and a line that is torn."""
    make_run(run, ranks=2, steps=40, status="failed")
    path = run / "events" / "rank-000.jsonl"
    t = BEGIN + 5
    extra = [
        step_line(41, 0, t=t, loss="nan"),
        json.dumps({"t": t, "rank": 0, "kind": "warning", "message": MARKUP}) + "\n",
        json.dumps({"t": t, "rank": 0, "kind": "checkpoint_saved", "step": 30, "path": "step-30", "num_bytes": 4096,
                    "stall_seconds": 0.01, "write_seconds": 0.02}) + "\n",
        '{"t": 1790000005, "rank": 0, "kind": "st\n',
        step_line(42, 0, t=t + 1, loss=0.5),
    ]  # fmt: skip
    path.write_text(path.read_text() + "".join(extra))
    failed = {"t": t + 2, "rank": -1, "kind": "rank_failed", "culprit_rank": 1, "step": 42, "phase": "backward",
              "cause": f"killed by SIGKILL {MARKUP}", "generation": 0, "restarting": False, "host": "node-7"}  # fmt: skip
    (run / "events" / "supervisor.jsonl").write_text(json.dumps(failed) + "\n")
    (run / "logs").mkdir()
    lines = [f"line {number} of {MARKUP}" for number in range(400)]
    (run / "logs" / "rank-000.log").write_text("\n".join([*lines, "\x1b[31mthe needle\x1b[0m", "the end"]) + "\n")


CELLS = (
    [("0F0", 0.0, 0.010), ("0F1", 0.010, 0.011), ("0B0", 0.035, 0.020), ("0B1", 0.060, 0.021)],
    [
        ("1F0", 0.012, 0.010),
        ("1B0", 0.022, 0.012),
        ("1F1", 0.034, 0.011),
        ("1B1", 0.045, 0.014),
    ],
)


def make_pipeline(run):
    """Two stages, and the spans of step 100."""
    more = {"dp": 1, "pp": 2, "microbatches": 2, "schedule": "1f1b", "plan": "dp=1 pp=2 schedule=1f1b microbatches=2"}
    make_run(run, ranks=2, steps=120, more=more)
    for rank, cells in enumerate(CELLS):
        spans = [["cell", name, start, seconds, 1000 + rank] for name, start, seconds in cells]
        spans.append(["comm", "pp send", 0.021 + rank * 0.03, 0.004, 65536])
        event = {"t": BEGIN + 10.05, "rank": rank, "kind": "spans", "step": 100, "begin": BEGIN + 10, "spans": spans}
        placed = {"t": BEGIN, "rank": rank, "kind": "placed", "host": f"host-{rank}", "device": "cpu", "local_rank": 0,
                  "coordinates": {"pp": rank}, "threads": 1, "pid": 7}  # fmt: skip
        traffic = {"t": BEGIN + 11, "rank": rank, "kind": "axis_traffic", "step": 120,
                   "rows": {"pp send": [240, 15728640 + rank, 0.96]}}  # fmt: skip
        path = run / "events" / f"rank-{rank:03d}.jsonl"
        path.write_text(path.read_text() + "".join(json.dumps(one) + "\n" for one in (event, placed, traffic)))


@pytest.fixture(scope="module")
def watched(browser, folder, tmp_path_factory):
    watched = Watched(browser)
    watched.enter(Dash(folder, tmp_path_factory.mktemp("cache")))
    watched.ids = {
        row["name"]: row["id"] for row in watched.page.evaluate("fetch('api/runs').then((a) => a.json())")["runs"]
    }
    yield watched
    watched.end()
    assert watched.dash.end() == 0


@pytest.fixture
def page(watched):
    """The page on the list of all runs; nothing may have gone wrong when the test is over."""
    watched.page.set_viewport_size({"width": 1440, "height": 900})
    watched.open("/")
    watched.page.evaluate("() => { localStorage.clear(); }")
    watched.page.reload()
    watched.page.wait_for_selector("tbody tr")
    yield watched.page
    watched.check()


def chart_table(page, title):
    """The table behind a chart, as rows of texts."""
    card = page.locator(f'[data-curve="{title}"]')
    card.locator("summary").click()
    card.get_by_role("button", name="Table").click()
    return [row.split("\t") for row in card.locator("tbody tr").all_inner_texts()]


def test_the_list_has_every_run_with_the_numbers_of_its_events(page, watched, folder):
    assert page.title() == "Shoal"
    names = watched.texts("tbody .c-name a")
    assert sorted(names) == sorted(path.name for path in folder.iterdir())
    assert page.locator("main img, main script").count() == 0, "a name was taken for markup"
    row = page.locator("tbody tr", has=page.get_by_role("link", name="plain", exact=True))
    last = read_events(folder / "plain", kind="step")[-1]
    assert float(row.locator(".c-loss span").get_attribute("title")) == last["loss"]
    assert row.locator(".c-step").inner_text().split()[0] == "120"
    assert row.locator(".c-status").inner_text().strip().endswith("completed")
    assert row.locator("svg.spark polyline").count() == 1
    failed = page.locator("tbody tr", has=page.get_by_role("link", name="failed", exact=True))
    assert failed.locator(".culprit").inner_text().startswith("Rank 1 · node-7 · backward killed by SIGKILL <img")


def test_it_is_searched_sorted_and_filtered(page, watched):
    page.keyboard.press("/")
    page.keyboard.type("pp=2")
    assert watched.texts("tbody .c-name a") == ["pipeline"]
    page.keyboard.press("Control+a")
    page.keyboard.press("Delete")
    page.keyboard.press("Escape")
    page.locator('[data-status="failed"]').click()
    assert watched.texts("tbody .c-name a") == ["failed"]
    page.locator('[data-status=""]').click()
    for ascending in (True, False):
        page.get_by_role("button", name="Run", exact=True).click()
        names = watched.texts("tbody .c-name a")
        assert names == sorted(names, key=str.lower, reverse=not ascending) and len(names) == 8
    page.get_by_label("Kind of run").select_option("servers")
    assert "No run matches" in page.locator("main").inner_text()


def test_keys_lead_everywhere(page, watched):
    page.get_by_role("button", name="Run", exact=True).click()
    names = watched.texts("tbody .c-name a")
    page.locator("main").focus()
    for key, place in (("j", 0), ("j", 1), ("ArrowDown", 2), ("k", 1)):
        page.keyboard.press(key)
        assert page.evaluate("document.activeElement.querySelector('.c-name a').textContent") == names[place]
    page.keyboard.press("x")
    page.keyboard.press("j")
    page.keyboard.press("x")
    page.wait_for_selector(".overlay [data-curve=loss] .readout b")
    page.keyboard.press("c")
    page.wait_for_selector(".compare h1")
    page.keyboard.press("Escape")
    page.wait_for_selector("tbody tr")
    page.keyboard.press("?")
    assert page.locator("dialog[open] kbd").count() > 10
    page.keyboard.press("Escape")
    assert page.locator("dialog[open]").count() == 0
    page.locator("main").focus()
    page.keyboard.press("j")
    page.keyboard.press("Enter")
    page.wait_for_selector(".runhead h1")
    for number, tab in enumerate(("curves", "timeline", "ranks", "agreement", "story"), start=1):
        page.keyboard.press(str(number))
        page.wait_for_selector(f'#tab-{tab}[aria-selected="true"]')


def test_curves_are_the_events_and_a_spike_is_seen_at_every_zoom(page, watched, folder):
    watched.open(f"/run/{watched.ids['spike']}/curves")
    page.wait_for_selector("[data-curve=loss] .readout b")
    steps = {event["step"]: event["loss"] for event in read_events(folder / "spike", kind="step")}
    # 4000 steps on some hundred places: the extremes are kept.
    rows = chart_table(page, "loss")
    assert 300 < len(rows) < 1600 and max(float(row[4]) for row in rows) == 1000.0
    plot = page.locator("[data-curve=loss] .plot")
    box = plot.bounding_box()
    # The spike is at 3217 of 4000: a drag around it asks for this range again.
    at = lambda step: box["x"] + 60 + (step - 1) / 3999 * (box["width"] - 70)  # noqa: E731
    page.mouse.move(at(3150), box["y"] + 60)
    page.mouse.down()
    page.mouse.move(at(3290), box["y"] + 60, steps=3)
    with page.expect_response(lambda answer: "name=loss" in answer.url and "from=" in answer.url):
        page.mouse.up()
    page.wait_for_selector("#zoom-all")
    page.wait_for_function("() => document.querySelectorAll('[data-curve=loss] tbody tr').length < 200")
    cells = page.locator("[data-curve=loss] tbody tr").all_inner_texts()
    shown = {int(words[0].replace(",", "")): float(words[2]) for words in (row.split("\t") for row in cells)}
    assert 3217 in shown and shown == {step: steps[step] for step in shown}
    # With the keyboard, every digit of a value: the arrows go from point to point.
    plot.focus()
    page.keyboard.press("Home")
    page.keyboard.press("ArrowLeft")
    value = page.locator("[data-curve=loss] .readout b").first
    assert float(value.get_attribute("data-value")) == steps[int(value.get_attribute("data-x"))]
    page.keyboard.press("0")
    page.wait_for_function("() => !document.querySelector('#zoom-all')")


def test_charts_are_smoothed_and_saved(page, watched, folder):
    watched.open(f"/run/{watched.ids['failed']}/curves")
    page.wait_for_selector("[data-curve=loss] .readout b")
    page.locator("#smooth").fill("0.9")
    page.locator("#log").check()
    assert "≈" in page.locator("[data-curve=loss] .readout").inner_text()
    card = page.locator("[data-curve=loss]")

    def saved(kind):
        card.locator("summary").click()
        with page.expect_download() as download:
            card.get_by_role("button", name=kind, exact=True).click()
        assert download.value.suggested_filename == f"failed-loss.{kind.lower()}"
        return download.value.path().read_bytes()

    rows = list(csv.DictReader(io.StringIO(saved("CSV").decode())))
    known = {event["step"]: event["loss"] for event in read_events(folder / "failed", kind="step")}
    assert [int(row["step"]) for row in rows] == sorted(known)
    for row in rows:
        if row["step"] == "41":
            assert (row["mean"], row["not_finite"]) == ("", "1")
        else:
            assert float(row["mean"]) == known[int(row["step"])]
    assert saved("PNG")[:8] == b"\x89PNG\r\n\x1a\n"
    drawing = saved("SVG").decode()
    assert drawing.count("<path") == 3 and "failed</text>" in drawing, "extremes, the raw line, the smoothed one"
    page.get_by_role("button", name="Time", exact=True).click()
    page.wait_for_function("() => location.hash.includes('x=time')")
    # Seconds since the start, not a clock of 1970.
    page.wait_for_function("() => Number(document.querySelector('[data-curve=loss] .readout b').dataset.x) < 10")
    shown = [row[0] for row in chart_table(page, "loss")]
    assert (shown[0], shown[9], shown[-1]) == ("100 ms", "1 s", "6 s")


def test_a_cell_of_the_timeline_is_the_span_of_the_events(page, watched):
    watched.open(f"/run/{watched.ids['pipeline']}/timeline")
    page.wait_for_selector(".gantt canvas")
    titles = watched.texts(".timeline .cardhead h2")
    assert titles[:2] == ["Executed", "Planned"]
    executed = page.locator(".timeline .card", has=page.get_by_role("heading", name="Executed"))
    executed.locator("summary").click()
    executed.locator("tbody tr").first.wait_for()
    rows = [row.split("\t") for row in executed.locator("tbody tr").all_inner_texts()]
    assert {(row[0], row[1]) for row in rows} == {
        (str(rank), name) for rank, cells in enumerate(CELLS) for name, _, _ in cells
    } | {("0", "pp send"), ("1", "pp send")}
    canvas = executed.locator("canvas")
    box = canvas.bounding_box()
    # 1B0 on rank 1: from 22 to 34 ms of 81.
    canvas.click(position={"x": 58 + (0.028 / 0.081) * (box["width"] - 66), "y": 34 + 12})
    assert page.locator(".details h2").inner_text() == "1B0"
    details = {
        key: page.locator(f'[data-detail="{key}"] dd').inner_text()
        for key in ("stage", "microbatch", "took", "begin", "bytes")
    }
    assert details == {"stage": "1", "microbatch": "0", "took": "12 ms", "begin": "22 ms", "bytes": "1001 B (1,001 B)"}
    page.locator(".gantt").first.focus()
    page.keyboard.press("ArrowRight")
    assert page.locator(".details h2").inner_text() == "1F1"


def test_the_slow_rank_is_first_and_the_heat_map_is_its_busy_time(page, watched, folder):
    watched.open(f"/run/{watched.ids['slow']}/ranks")
    page.wait_for_selector("[data-table=scores] tbody tr")
    first = page.locator("[data-table=scores] tbody tr").first
    assert first.inner_text().split()[:2] == ["▲", "2"]
    assert 1.2 < float(first.locator("[data-value]").get_attribute("data-value")) < 1.4
    page.locator(".heat").focus()
    for key in ("ArrowRight", "ArrowDown", "ArrowDown"):
        page.keyboard.press(key)
    where = page.locator(".heathead .at").inner_text()
    assert where.startswith("Rank 2 · step")
    shown = float(page.locator(".heathead b").get_attribute("data-value"))
    numbers = [int(word.replace(",", "")) for word in where.split() if word.replace(",", "").isdigit()][1:]
    steps = [
        event
        for event in read_events(folder / "slow", rank=2, kind="step")
        if numbers[0] <= event["step"] <= numbers[-1]
    ]
    busy = [event["seconds"] - sum(event["wait_seconds"].values()) - event["data_seconds"] for event in steps]
    assert shown == pytest.approx(sum(busy) / len(busy), rel=1e-3)


def test_the_mesh_and_the_traffic_are_those_of_the_events(page, watched):
    watched.open(f"/run/{watched.ids['pipeline']}/ranks")
    page.wait_for_selector("[data-table=traffic] tbody tr")
    assert watched.texts(".host h3") == ["host-0", "host-1"]
    shown = page.locator("[data-table=traffic] [data-value]").first.get_attribute("data-value")
    assert int(shown) in (15728640, 15728641, 2 * 15728640 + 1)


def test_the_story_and_the_logs_are_searched(page, watched):
    watched.open(f"/run/{watched.ids['failed']}/story")
    page.wait_for_selector(".events li[data-kind=rank_failed]")
    assert page.locator(".blame").inner_text().startswith("Rank 1 on node-7, in backward:")
    assert page.locator(".warn").inner_text().endswith("skipped: 1.")
    assert MARKUP in page.locator(".events").inner_text() and page.locator("main img, main script").count() == 0
    page.get_by_role("button", name="Errors").click()
    page.wait_for_function("() => !document.querySelector('.events li.info')")
    page.get_by_role("button", name="All", exact=True).click()
    page.get_by_placeholder("Search events").fill("checkpoint")
    page.wait_for_function("() => document.querySelectorAll('.events li').length === 1")
    log = page.locator(".log")
    assert log.inner_text().rstrip().endswith("the end") and "\x1b" not in log.inner_text()
    page.get_by_placeholder("Search the log").fill("needle")
    page.wait_for_selector(".log mark")
    assert watched.texts(".log mark") == ["needle"]


def test_what_a_strange_file_says_is_no_command(page, watched):
    for tab in ("curves", "timeline", "ranks", "agreement", "story"):
        watched.open(f"/run/{watched.ids['strange']}/{tab}")
        page.wait_for_selector(f'#tab-{tab}[aria-selected="true"]')
    page.locator(".commands summary").click()
    assert watched.texts(".commands code") == ["shoal top strange"]
    assert page.locator("main img, main script").count() == 0


def test_two_runs_are_compared_to_the_first_step_that_differs(page, watched, folder):
    watched.open(f"/compare?ids={watched.ids['plain']},{watched.ids['other']}")
    page.wait_for_selector(".verdict")
    assert "step 57" in page.locator(".verdict b").inner_text()
    values = [float(one.get_attribute("data-value")) for one in page.locator(".verdict [data-value]").all()]
    assert values == [read_events(folder / name, kind="step")[56]["loss"] for name in ("plain", "other")]
    page.wait_for_function("() => document.querySelectorAll('[data-curve=loss] .readout b').length === 2")


def test_the_language_and_the_colours_are_kept(page, watched):
    page.locator("#language").click()
    page.wait_for_function("() => document.documentElement.lang === 'zh-CN'")
    assert "运行" in page.locator("h1").inner_text()
    before = page.evaluate("getComputedStyle(document.body).backgroundColor")
    page.keyboard.press("t")
    page.keyboard.press("t")
    page.reload()
    page.wait_for_selector("tbody tr")
    assert page.evaluate("[document.documentElement.lang, document.documentElement.dataset.theme]") == ["zh-CN", "dark"]
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") != before
    for name in ("plain", "pipeline", "failed"):
        for tab in ("curves", "timeline", "ranks", "agreement", "story"):
            watched.open(f"/run/{watched.ids[name]}/{tab}")
            page.wait_for_selector(f'#tab-{tab}[aria-selected="true"]')


def test_nothing_is_wider_than_a_telephone(page, watched):
    page.set_viewport_size({"width": 390, "height": 800})
    views = ["/", f"/compare?ids={watched.ids['plain']},{watched.ids['slow']}"]
    views += [f"/run/{watched.ids['failed']}/{tab}" for tab in ("curves", "timeline", "ranks", "agreement", "story")]
    for view in [*views, f"/run/{watched.ids['pipeline']}/timeline", f"/run/{watched.ids['slow']}/ranks"]:
        watched.open(view)
        assert page.evaluate("document.documentElement.scrollWidth") <= 390, view


@pytest.fixture
def own(browser, tmp_path):
    """A browser's page of its own on a dashboard of its own, of a folder in which there is one run."""
    make_run(tmp_path / "runs" / "old", steps=10)
    watched = Watched(browser)
    watched.enter(Dash(tmp_path / "runs", tmp_path / "cache"))
    yield watched
    watched.end()
    assert watched.dash.end() == 0


def test_the_server_comes_back_and_the_page_goes_on(own, tmp_path):
    page = own.page
    page.wait_for_selector(".link.open")
    own.check()
    assert own.dash.end() == 0
    page.wait_for_selector(".link.away")
    assert "Not connected" in page.locator(".link").inner_text()
    make_run(tmp_path / "runs" / "meanwhile", steps=10)
    port = own.dash.port
    own.dash = Dash(tmp_path / "runs", tmp_path / "cache", port)
    assert own.dash.port == port
    page.wait_for_selector(".link.open")
    page.wait_for_selector("tbody >> text=meanwhile")
    own.check(
        allowed=["ERR_CONNECTION_REFUSED", "ERR_INCOMPLETE_CHUNKED", "ERR_CONNECTION_RESET", "ERR_EMPTY_RESPONSE"]
    )
    shutil.rmtree(tmp_path / "runs" / "meanwhile")
    page.wait_for_function("() => document.querySelectorAll('tbody tr').length === 1")


def test_a_live_run_is_followed_to_its_end(own, shoal, tmp_path):
    (tmp_path / "held.py").write_text(HELD)
    (tmp_path / "live.toml").write_text(HELD_LIVE)
    page = own.page
    process = shoal.start("train", "live.toml", "--run-dir", "runs/live")
    page.wait_for_selector("tbody >> text=live", timeout=60_000)
    page.evaluate("() => { window.isSame = true; }")
    page.get_by_role("link", name="live", exact=True).click()
    page.wait_for_selector("[data-curve=loss] .readout b", timeout=60_000)
    # What is shown grows by itself.
    shown = "() => Number(document.querySelector('[data-fact=step] dd').textContent.split('/')[0].replaceAll(',', ''))"
    first = page.evaluate(shown)
    assert first < 200
    (tmp_path / "go").touch()
    page.wait_for_function(f"(first) => ({shown})() > first", arg=first, timeout=60_000)
    assert process.wait(120) == 0, process.stderr.read()
    page.wait_for_selector(".title .completed", timeout=30_000)
    last = read_events(tmp_path / "runs" / "live", kind="step")[-1]
    assert last["step"] == 200
    page.wait_for_function(f"() => ({shown})() === 200")
    page.wait_for_function("(x) => document.querySelector('[data-curve=loss] .readout b').dataset.x === x", arg="200")
    value = page.locator("[data-curve=loss] .readout b").first.get_attribute("data-value")
    assert float(value) == last["loss"]
    assert page.evaluate("window.isSame"), "it was loaded again"
    own.check()


@pytest.mark.soak
def test_a_rank_that_stops_is_named_and_one_that_is_killed_too(own, shoal, tmp_path):
    (tmp_path / "live.toml").write_text(LIVE)
    page = own.page
    process = shoal.start("train", "live.toml", "--run-dir", "runs/live", "--set", "train.steps=100000")
    wait_for_step(tmp_path / "runs" / "live", 5)
    page.get_by_role("link", name="live", exact=True).click()
    page.wait_for_selector(".title .running")
    rank = ranks_of(process)[1]
    rank.send_signal(signal.SIGSTOP)
    page.wait_for_selector(".blame >> text=/[Rr]ank 1/", timeout=60_000)
    page.locator(".commands summary").click()
    assert f"kill -TERM {process.pid}" in page.locator(".commands").inner_text()
    rank.send_signal(signal.SIGCONT)
    rank.kill()
    page.wait_for_selector(".title .failed", timeout=60_000)
    page.wait_for_selector(".blame >> text=/Rank 1 .*SIGKILL/")
    process.communicate(timeout=60)
    page.keyboard.press("Escape")
    row = page.locator("tbody tr", has=page.get_by_role("link", name="live", exact=True))
    assert "SIGKILL" in row.locator(".culprit").inner_text()
    own.check()
