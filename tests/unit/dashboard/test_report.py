"""The report: a card whose numbers are those of the files, and a page that stays small, closed and harmless."""

import json
import re
from html.parser import HTMLParser

import pytest

from shoal.dashboard.report.card import build_card
from shoal.dashboard.report.gather import gather
from shoal.dashboard.report.page import MOST_BYTES, build_page, cell_kind, timeline_rows
from shoal.dashboard.report.words import card_lines
from shoal.dashboard.runs.run import Run
from support.dashboard.synthetic import make_run

HOSTILE = "<script>alert(1)</script><img src=x onerror=alert(2)>\"'&\x1b[2J"
VOID = {"meta", "br", "img", "link"}


class Strict(HTMLParser):
    """Tags that close in order, and which tags and attributes there are."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.tags, self.attributes, self.open = set(), set(), []
        self.feed(text)
        self.close()
        assert self.open == [], self.open

    def handle_starttag(self, tag, attrs):
        self.tags.add(tag)
        self.attributes |= {name for name, _ in attrs}
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.add(tag)
        self.attributes |= {name for name, _ in attrs}

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def check_page(page: str) -> Strict:
    """Whatever was put in: nothing that runs, nothing that is loaded, not too large."""
    assert len(page.encode()) <= MOST_BYTES
    found = Strict(page)
    assert found.tags <= {
        *("html", "head", "meta", "title", "style", "body", "main", "section", "figure", "footer"),
        *("h1", "h2", "h3", "p", "pre", "table", "tr", "th", "td", "ol", "li", "span", "b", "time"),
        *("svg", "g", "path", "rect", "circle", "text"),
    }
    assert not {
        name for name in found.attributes if name.startswith("on") or name in ("src", "href", "style", "srcset")
    }
    assert not re.search(r"url\(|@import|javascript:", page) and "default-src 'none'" in page
    assert "\x1b" not in page
    return found


def test_a_page_has_its_parts_and_shows_a_spike(tmp_path):
    folder = make_run(tmp_path / "run", ranks=3, steps=2000, spike_at=777, slow=(1, 1.3))
    parts = gather(folder)
    page = build_page(parts)
    check_page(page)
    for heading in ("Curves", "Ranks", "Story", "Recipe"):
        assert f"<h2>{heading}</h2>" in page
    (loss,) = [one for one in parts.curves if one.title == "Loss"]
    assert max(value for value in loss.lines[0].high if value is not None) == 1000.0
    assert "prefers-color-scheme:dark" in page


def test_whatever_a_run_holds_the_page_stays_harmless_and_small(tmp_path):
    folder = make_run(tmp_path / "run<b>", ranks=2, steps=300)
    (folder / "recipe.toml").write_text(f'name = "{HOSTILE}"\n' * 20_000)
    plan = json.loads((folder / "plan.json").read_text())
    (folder / "plan.json").write_text(json.dumps({**plan, "plan": HOSTILE * 1000}))
    with (folder / "events" / "rank-000.jsonl").open("a") as file:
        for number in range(5000):
            event = {"t": 1_790_000_000.0 + number, "rank": 0, "kind": "warning", "message": HOSTILE + "&" * 900}
            file.write(json.dumps(event) + "\n")
        for step in (20, 40):
            spans = [[HOSTILE, HOSTILE, at / 1000, 0.001, 0] for at in range(5000)]
            event = {
                "t": 1_790_000_003.0,
                "rank": 0,
                "kind": "spans",
                "step": step,
                "begin": 1_790_000_002.0,
                "spans": spans,
            }
            file.write(json.dumps(event) + "\n")
        file.write("not an event\n" + '{"t": "x"}\n')
    page = build_page(gather(folder))
    found = check_page(page)
    assert "script" not in found.tags and "alert(1)" in page
    assert "are left out" in page


def test_a_run_of_many_ranks_fits(tmp_path):
    folder = make_run(tmp_path / "run", ranks=128, steps=60)
    page = build_page(gather(folder))
    check_page(page)
    assert "slowest of 128 ranks" in page


@pytest.mark.parametrize("missing", ["events", "plan.json", "summary.json", "recipe.toml"])
def test_what_is_missing_is_left_out(tmp_path, missing):
    folder = make_run(tmp_path / "run", ranks=2, steps=20)
    path = folder / missing
    path.rename(tmp_path / "away")
    parts = gather(folder)
    check_page(build_page(parts))
    assert card_lines(parts.card)


def test_the_card_names_failures_restarts_receipts_and_proofs(tmp_path):
    folder = make_run(tmp_path / "run", ranks=1, steps=20, status="failed")
    failed = {
        "culprit_rank": 3,
        "step": 12,
        "phase": "backward",
        "cause": "killed",
        "generation": 0,
        "restarting": True,
    }
    receipts = [{"epoch": 0, "rows": 5, "ok": True}, {"epoch": 1, "rows": 4, "ok": False, "reason": "one is missing"}]
    with (folder / "events" / "rank-000.jsonl").open("a") as file:
        for receipt in receipts:
            file.write(json.dumps({"t": 1_790_000_002.0, "rank": 0, "kind": "epoch_receipt", **receipt}) + "\n")
        started = {"plan": "dp=1", "world_size": 1, "step": 10, "generation": 2, "pid": 1}
        file.write(json.dumps({"t": 1_790_000_002.5, "rank": 0, "kind": "run_started", **started}) + "\n")
        saved = {"step": 10, "path": "p", "num_bytes": 2048, "stall_seconds": 0.5, "write_seconds": 1.0}
        for _ in range(2):
            file.write(json.dumps({"t": 1_790_000_001.0, "rank": 0, "kind": "checkpoint_saved", **saved}) + "\n")
    supervisor = {"t": 1_790_000_002.1, "rank": None, "kind": "rank_failed", "host": "node7", **failed}
    last = {**supervisor, "t": 1_790_000_003.0, "culprit_rank": 0, "restarting": False}
    (folder / "events" / "supervisor.jsonl").write_text(json.dumps(supervisor) + "\n" + json.dumps(last) + "\n")
    certificate = {"ok": True, "plans": [{"plan": "dp=2", "ok": True}], "mutants": [{"name": "m", "caught": True}]}
    (folder / "proof.json").write_text(json.dumps(certificate))
    card = gather(folder).card
    assert card["restarts"]["count"] == 2 and card["restarts"]["failures"][0]["rank"] == 3
    assert card["checkpoints"]["saved"] == 1 and card["checkpoints"]["stall_seconds"] == 0.5
    text = "\n".join(f"{name}: {value}" for name, value in card_lines(card))
    assert "failure: rank 3 on node7 at step 12 in backward: killed" in text
    assert "receipt: epoch 1: WRONG one is missing" in text and "receipts: 1 epochs" in text
    assert "proof: ok: dp=2, 1 of 1 mutants caught (proof.json)" in text


def test_measured_stands_beside_forecast(tmp_path):
    folder = make_run(tmp_path / "run", ranks=1, steps=20)
    event = {"t": 1_790_000_000.0, "rank": 0, "kind": "forecast", "source": "layout", "step_seconds": 0.08}
    with (folder / "events" / "rank-000.jsonl").open("a") as file:
        file.write(json.dumps(event) + "\n")
    parts = gather(folder)
    speed = parts.card["speed"]
    assert speed["predicted_step_seconds"] == 0.08 and speed["slower_than_predicted"] == pytest.approx(0.25)
    ranks = {
        "memory": [{"rank": 0, "measured": {"weights": 2048.0}, "predicted": {"weights": 1024}}],
        "traffic": [
            {"axis": "dp", "operation": "all_reduce", "calls": 4, "bytes": 4096, "seconds": 0.5, "forecast_bytes": 8192}
        ],
        "scores": [{"rank": 0, "score": 1.0, "against_own": 1.1}, {"rank": 1, "score": 1.5, "against_own": None}],
    }
    timeline = {"bubble": {"measured": 0.25, "planned": 0.2, "predicted": None}}
    row = {**parts.card, "step": 20, "tokens_per_s": 1.0, "loss": 1.0}
    card = build_card(Run(folder).look_once(), row, ranks, timeline, [])
    text = "\n".join(f"{name}: {value}" for name, value in card_lines(card))
    assert "weights 2.0 KiB (forecast 1.0 KiB)" in text and "4.0 KiB (forecast 8.0 KiB)" in text
    assert "bubble: measured 25.0%, planned 20.0%" in text and "step forecast: 80 ms; measured +25%" in text
    assert text.index("busiest rank: 1: 1.50") < text.index("busiest rank: 0: 1.00")


def test_cells_and_what_crosses_have_rows_of_their_own():
    spans = [["phase", "forward", 0.0, 1.0, 0], ["cell", "2F0", 0.0, 0.5, 0], ["comm", "pp send", 0.5, 0.1, 7]]
    rows = {row.label: row.boxes for row in timeline_rows({"rank": 3, "spans": spans}, "")}
    assert set(rows) == {"rank 3", "rank 3 cells", "rank 3 comm"}
    assert rows["rank 3 cells"][0].kind == "forward" and cell_kind("0B1") == "backward" and cell_kind("?") == "other"
