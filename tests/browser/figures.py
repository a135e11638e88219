"""Draws the pictures of docs/guides/dashboard.md: `.venv/bin/python tests/browser/figures.py [FOLDER]`, two minutes.

All runs are real but the one with the slow rank, whose numbers are made up. Those that FOLDER has are not made again.
"""

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests"))
from playwright.sync_api import sync_playwright  # noqa: E402

from support.dashboard.browser import ARGUMENTS, CHROMIUM, Dash, Watched  # noqa: E402
from support.dashboard.synthetic import make_run  # noqa: E402

RECIPE = """
[model]
name = "gpt"
layers = 4
hidden = 48
heads = 4
kv_heads = 2
[data]
source = "stdlib"
sequence = 32
[train]
steps = 120
global_batch = 16
threads = 1
[optim]
name = "adamw"
lr = 2e-3
schedule = "cosine"
[eval]
every = 20
samples = 64
[checkpoint]
every = 50
[telemetry]
tensorboard = false
spans_every = 20
memory_every = 5
"""
RUNS = {
    "gpt-zero1": ["dp=2 zero=1"],
    "gpt-dropout": ["dp=2 zero=1", "model.dropout=0.1"],
    "pipeline-1f1b": ["pp=2 schedule=1f1b microbatches=8"],
    "pipeline-gpipe": ["pp=2 schedule=gpipe microbatches=8"],
    "tensor-parallel": ["tp=2"],
    "servers-ssp": ["ps=2 workers=2 update=ssp:2"],
    "islands": ["islands=2 sync=local"],
    "killed-at-60": ["dp=2"],
}


def main():
    """Make the runs, then the pictures."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(sys.argv[1] if len(sys.argv) > 1 else temporary).resolve()
        runs = folder / "runs"
        runs.mkdir(parents=True, exist_ok=True)
        (folder / "gpt.toml").write_text(RECIPE)
        for name, (plan, *settings) in RUNS.items():
            if not (runs / name).exists():
                train(folder, name, plan, settings)
        if not (runs / "eight-ranks").exists():
            make_slow(runs / "eight-ranks")
        take(runs, Path(temporary) / "cache")


def train(folder, name, plan, settings):
    """One run, and what is done to it."""
    words = [sys.executable, "-m", "shoal", "train", "gpt.toml", "--plan", plan, "--run-dir", f"runs/{name}"]
    for setting in settings:
        words += ["--set", setting]
    process = subprocess.Popen(words, cwd=folder, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    if name == "killed-at-60":
        find_rank(process, folder / "runs" / name, 1, step=60).kill()
    print(name, process.wait())


def find_rank(process, run, rank, step):
    """The process of a rank, once it has done so many steps."""
    path = run / "events" / f"rank-{rank:03d}.jsonl"
    while process.poll() is None:
        events = [json.loads(line) for line in path.read_text().splitlines()[:-1]] if path.exists() else []
        if any(event["kind"] == "step" and event["step"] >= step for event in events):
            return psutil.Process(next(event["pid"] for event in events if event["kind"] == "placed"))
        time.sleep(0.05)
    raise SystemExit(f"{run} ended before step {step}")


def make_slow(run):
    """Made-up numbers of eight ranks on two hosts, of which one is 35% busier from step 90 on."""
    make_run(run, ranks=8, steps=240, slow=(5, 1.35))
    with tempfile.TemporaryDirectory() as other:
        make_run(Path(other) / "even", ranks=8, steps=240)
        for rank in range(8):
            path = run / "events" / f"rank-{rank:03d}.jsonl"
            slow, even = (one.read_text().splitlines() for one in (path, Path(other) / "even" / "events" / path.name))
            part = 60_000_000 * (8 + rank % 3)
            events = [
                {"kind": "placed", "host": f"node-{rank // 4}", "device": f"cuda:{rank % 4}", "local_rank": rank % 4,
                 "coordinates": {"dp": rank}, "threads": 1, "pid": 100 + rank},
                {"kind": "memory", "step": 240, "weights_bytes": part, "gradient_bytes": part, "optimizer_bytes": 2 * part,
                 "other_bytes": 900_000_000, "rss_bytes": 4 * part + 900_000_000, "peak_rss_bytes": 4 * part + 990_000_000},
                {"kind": "axis_traffic", "step": 240, "rows": {"dp all_reduce": [240, 240 * 4 * part, 21.5]}},
            ]  # fmt: skip
            lines = [json.dumps({"t": 1_790_000_024.5, "rank": rank, **event}) for event in events]
            path.write_text("\n".join([*even[:90], *slow[90:], *lines]) + "\n")


def take(runs, cache):
    """The four pictures."""
    dash = Dash(runs, cache)
    with sync_playwright() as started:
        browser = started.chromium.launch(executable_path=CHROMIUM, args=ARGUMENTS)
        cookies = []
        for scheme, pictures in PICTURES.items():
            watched = Watched(browser, color_scheme=scheme)
            watched.context.add_cookies(cookies)
            if cookies:
                dash.entrance = dash.base
            watched.enter(dash)
            cookies = watched.context.cookies()
            rows = watched.page.evaluate("fetch('api/runs').then((answer) => answer.json())")["runs"]
            ids = {row["name"]: row["id"] for row in rows}
            for picture, (place, ready) in pictures.items():
                watched.page.set_viewport_size({"width": 1280, "height": 760})
                watched.open(place.format(**{name.replace("-", "_"): one for name, one in ids.items()}))
                watched.page.wait_for_selector(ready)
                DONE.get(picture, lambda page: None)(watched.page)
                watched.page.wait_for_timeout(600)
                watched.page.screenshot(path=ROOT / "docs" / "figures" / f"dashboard-{picture}.png")
            watched.check()
            watched.end()
        browser.close()
    dash.end()


def select_two(page):
    """Two runs over each other in the list."""
    for name in ("gpt-zero1", "gpt-dropout"):
        page.get_by_label(f"Select {name}", exact=True).check()
    page.wait_for_selector(".overlay [data-curve=loss] .readout b")


def click_cell(page):
    """A cell in the middle of the step."""
    page.locator(".gantt").first.focus()
    for _ in range(30):
        page.keyboard.press("ArrowRight")
        if page.locator("[data-detail=microbatch]").count() and "B" in page.locator(".details h2").inner_text():
            break


PICTURES = {
    "light": {
        "overview": ("/", "tbody tr"),
        "timeline": ("/run/{pipeline_1f1b}/timeline", ".gantt canvas"),
    },
    "dark": {
        "ranks": ("/run/{eight_ranks}/ranks", "[data-table=scores]"),
        "compare": ("/compare?ids={gpt_zero1},{gpt_dropout}", "[data-curve=loss] .readout b"),
    },
}
DONE = {"overview": select_two, "timeline": click_cell}

if __name__ == "__main__":
    main()
