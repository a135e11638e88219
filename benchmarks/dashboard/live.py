"""Beside a live run: how soon an event is heard and drawn, what following costs, and what it costs the run."""

import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

from clients import cpu_seconds, listen, wait_for
from opening import dashboard, serving
from writing import add_steps, make_live_run

RECIPE = Path(__file__).resolve().parents[2] / "recipes" / "tiny.toml"
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
_ARGUMENTS = ("--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking")
_EVERY_SECONDS = 0.2
"""Between two steps of a run that is followed."""
# Each value of the loss that is shown, by its step, when two frames have been drawn after it: it is on the screen then.
_WATCH = """() => {
    window.drawn = {};
    const look = () => {
        const step = document.querySelector('[data-curve=loss] .readout b')?.dataset.x;
        if (step && !(step in window.drawn)) {
            window.drawn[step] = 0;
            requestAnimationFrame(() => requestAnimationFrame(() => { window.drawn[step] = Date.now() / 1000; }));
        }
    };
    new MutationObserver(look).observe(document.body, { subtree: true, childList: true, attributes: true, characterData: true });
}"""


def _go_on(run: Path, ranks: int, first: int, seconds: float) -> dict[int, float]:
    """Five steps a second of every rank, and when each was in the files, by wall time."""
    written: dict[int, float] = {}
    begin = time.monotonic()
    for step in range(first, first + round(seconds / _EVERY_SECONDS)):
        add_steps(run, ranks, step)
        written[step] = time.time()
        time.sleep(max(0.0, begin + len(written) * _EVERY_SECONDS - time.monotonic()))
    return written


def _said(delays: list[float], written: int) -> dict[str, Any]:
    return {
        "steps": written,
        "seen": len(delays),
        "delay_p50_s": statistics.median(delays),
        "delay_p95_s": statistics.quantiles(delays, n=20)[-1],
        "delay_most_s": max(delays),
    }


def follow(folder: Path, cache: Path, *, ranks: int, steps: int, seconds: float) -> dict[str, Any]:
    """From an event in a file to a client of the stream, and what following costs, beside a run that is long already."""
    run = make_live_run(folder / "following" / "live", ranks, steps)
    with dashboard(run.parent, cache) as (dash, pid):
        wait_for(lambda: [row for row in dash.get("/api/runs")["runs"] if row["step"] == steps], 300)
        heard = listen(dash)
        wait_for(lambda: heard.ready, 30)
        begin, cpu = time.monotonic(), cpu_seconds(pid)
        written = _go_on(run, ranks, steps + 1, seconds)
        share = (cpu_seconds(pid) - cpu) / (time.monotonic() - begin)
        time.sleep(2)
        delays = [heard.at[step] - at for step, at in written.items() if step in heard.at]
        heard.close()
        cpu, begin = cpu_seconds(pid), time.monotonic()
        time.sleep(seconds / 2)
        idle = (cpu_seconds(pid) - cpu) / (time.monotonic() - begin)
    shutil.rmtree(run.parent)
    return {
        "ranks": ranks,
        "events_before": ranks * steps,
        **_said(delays, len(written)),
        "core_share": share,
        "core_share_idle": idle,
    }


def pixels(
    runs: Path, folder: Path, cache: Path, *, ranks: int, steps: int, seconds: float, times: int
) -> dict[str, Any] | None:
    """In Chromium: the first paint of a folder, its whole table, and from an event in a file to its pixel; None without one."""
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        return None
    if CHROMIUM is None:
        return None
    count = len(list(runs.iterdir()))
    run = make_live_run(folder / "drawn" / "live", ranks, steps)
    paints, tables = [], []
    with sync_playwright() as started:
        browser = started.chromium.launch(executable_path=CHROMIUM, args=list(_ARGUMENTS))
        with serving(runs, cache) as (address, _):
            context = browser.new_context(viewport={"width": 1440, "height": 900})
            page = context.new_page()
            page.goto(f"{address.base}{address.entrance}")
            page.wait_for_selector("tbody tr", timeout=300_000)
            page.wait_for_function(
                "(count) => document.querySelector('main')?.innerText.includes(String(count))",
                arg=count,
                timeout=300_000,
            )
            for _ in range(times):
                # A page of its own without its cache of files, as a browser that comes for the first time has none.
                fresh = browser.new_context(viewport={"width": 1440, "height": 900})
                fresh.add_cookies(context.cookies())
                other = fresh.new_page()
                other.goto(address.base)
                other.wait_for_selector("tbody tr")
                tables.append(other.evaluate("performance.now()") / 1000)
                entry = other.evaluate("performance.getEntriesByName('first-contentful-paint')[0]?.startTime")
                paints.append(entry / 1000)
                fresh.close()
            context.close()
        with serving(run.parent, cache) as (address, _):
            page = browser.new_context(viewport={"width": 1440, "height": 900}).new_page()
            page.goto(f"{address.base}{address.entrance}")
            page.wait_for_selector("tbody tr", timeout=60_000)
            page.locator("tbody tr a").first.click()
            page.wait_for_selector("[data-curve=loss] .readout b", timeout=60_000)
            page.evaluate(_WATCH)
            written = _go_on(run, ranks, steps + 1, seconds)
            page.wait_for_timeout(2500)
            drawn = {int(step.replace(",", "")): at for step, at in page.evaluate("window.drawn").items() if at}
        browser.close()
    shutil.rmtree(run.parent)
    firsts = {step: _first_after(drawn, step) for step in written}
    delays = [first - written[step] for step, first in firsts.items() if first is not None]
    return {
        "runs": count,
        "loads": times,
        "first_paint_p50_s": statistics.median(paints),
        "first_paint_most_s": max(paints),
        "table_p50_s": statistics.median(tables),
        "ranks": ranks,
        **_said(delays, len(written)),
    }


def _first_after(drawn: dict[int, float], step: int) -> float | None:
    """When a step, or a later one that came with it, was on the screen."""
    return min((at for one, at in drawn.items() if one >= step), default=None)


def effect(folder: Path, cache: Path, *, windows: int, seconds: float) -> dict[str, Any]:
    """Steps of one real run while a dashboard with a client looks on and while that dashboard stands still, in turns."""
    runs = folder / "watched"
    sets = ["--set", "train.steps=1000000", "--set", "telemetry.tensorboard=false", "--set", "checkpoint.every=0"]
    command = [sys.executable, "-m", "shoal", "train", str(RECIPE), "--plan", "dp=1", "--run-dir", str(runs / "run")]
    train = subprocess.Popen([*command, *sets], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    events = runs / "run" / "events" / "rank-000.jsonl"
    marks: list[tuple[float, bool]] = []
    try:
        wait_for(lambda: events.exists() and events.stat().st_size > 20_000, 120)
        with dashboard(runs, cache) as (dash, pid):
            wait_for(lambda: [row for row in dash.get("/api/runs")["runs"] if row["step"]], 60)
            heard = listen(dash)
            for window in range(2 * windows):
                is_looking = window % 2 == 0
                os.kill(pid, signal.SIGCONT if is_looking else signal.SIGSTOP)
                marks.append((time.time(), is_looking))
                time.sleep(seconds)
            marks.append((time.time(), False))
            os.kill(pid, signal.SIGCONT)
            heard.close()
    finally:
        train.terminate()
        train.wait(timeout=60)
    lines = map(json.loads, events.read_text().splitlines())
    steps = [event for event in lines if event["kind"] == "step"]
    medians: dict[bool, list[float]] = {True: [], False: []}
    for (start, is_looking), (end, _) in pairwise(marks):
        inside = [event["seconds"] for event in steps if start + 0.5 < event["t"] < end]
        medians[is_looking].append(statistics.median(inside))
    pairs = [one / other - 1 for one, other in zip(medians[True], medians[False], strict=True)]
    return {
        "windows": windows,
        "step_ms_looked_at": 1000 * statistics.median(medians[True]),
        "step_ms_alone": 1000 * statistics.median(medians[False]),
        "longer": statistics.median(pairs),
        "longer_quartiles": statistics.quantiles(pairs, n=4),
    }
