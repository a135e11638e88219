"""What happened in words: every kind has a sentence, the culprit comes first, and broken events break nothing."""

import dataclasses
import json
import string
import time

import pytest

from shoal.dashboard.runs.run import Run
from shoal.dashboard.views.sentences import FINDERS, SENTENCES, SILENT
from shoal.dashboard.views.story import story_answer, story_items
from shoal.telemetry.eventlog import KNOWN_KINDS
from support.dashboard.synthetic import make_run

NOW = 1_790_000_100.0


def add(path, *events, name="rank-000"):
    with (path / "events" / f"{name}.jsonl").open("a") as file:
        file.writelines(json.dumps({"t": 1_790_000_050.0, "rank": 0, **event}) + "\n" for event in events)


def test_every_kind_is_told_or_shown_by_another_view():
    assert set(KNOWN_KINDS) - set(FINDERS) - SILENT == set()


def example_of(kind):
    """An event of a kind with a value of its type in every field."""
    made = {"int": 3, "float": 0.5, "str": "word", "bool": True, "list[str]": ["a"]}
    event = {"kind": kind}
    for field in dataclasses.fields(KNOWN_KINDS[kind]):
        name = field.type if isinstance(field.type, str) else getattr(field.type, "__name__", str(field.type))
        event[field.name] = made.get(
            name, {"a": 1.0} if "Mapping" in str(field.type) else [1] if "tuple" in str(field.type) else 2
        )
    return event


@pytest.mark.parametrize("kind", sorted(set(FINDERS)))
def test_every_kind_has_a_sentence_with_all_its_values(tmp_path, kind):
    path = make_run(tmp_path / "one", steps=1)
    add(path, example_of(kind))
    found = [item for item in story_items(Run(path).look_once(), NOW) if item["kind"] == kind]
    assert found, kind
    for item in found:
        key, values = item["words"]
        wanted = {name for _, name, _, _ in string.Formatter().parse(SENTENCES[key][1]) if name}
        assert wanted <= set(values), (key, wanted - set(values))
        assert "None" not in item["text"] and "{" not in item["text"]


@pytest.mark.parametrize("kind", sorted(set(FINDERS)))
@pytest.mark.parametrize("value", [None, [], {}, "x" * 5000, -1, 1e308, True, ["<b>"]], ids=repr)
def test_fields_of_any_type_break_nothing(tmp_path, kind, value):
    fields = {key: value for key in example_of(kind) if key != "kind"}
    event = {**fields, "kind": kind, "t": 1.0, "rank": 0, "source": "rank-000"}
    if (found := FINDERS[kind](event)) is not None:
        assert found[0] in SENTENCES and len(json.dumps(found[1])) < 20_000


def test_the_culprit_and_what_it_said_come_first(tmp_path):
    path = make_run(tmp_path / "one", ranks=2, steps=5, status="failed")
    failed = {
        "kind": "rank_failed",
        "culprit_rank": 1,
        "step": 5,
        "phase": "backward",
        "cause": "killed by signal 9 (SIGKILL)",
    }
    add(path, {**failed, "generation": 0, "restarting": False, "host": "node-7", "rank": None}, name="supervisor")
    (path / "errors").mkdir()
    for rank, is_victim in ((0, True), (1, False)):
        report = {
            "rank": rank,
            "step": 5,
            "phase": "backward",
            "type": "ValueError",
            "message": f"of {rank}",
            "traceback": "Traceback",
        }
        (path / "errors" / f"rank-{rank:03d}.json").write_text(
            json.dumps({**report, "peer_failure": is_victim, "time": 1.0, "exit": "run"})
        )
    items = story_items(Run(path).look_once(), NOW)
    assert items[0]["text"] == "Rank 1 on node-7 failed in phase backward: killed by signal 9 (SIGKILL)"
    assert [item["kind"] for item in items[:4]] == ["culprit", "report", "report", "advice"]
    assert items[1]["rank"] == 1 and items[1]["traceback"] == "Traceback" and items[2]["level"] == "warning"
    assert "--resume" in items[3]["text"]


def test_what_all_ranks_say_is_said_once_and_a_second_start_again(tmp_path):
    path = make_run(tmp_path / "one", ranks=4, steps=2)
    saved = {"kind": "checkpoint_saved", "step": 2, "path": "x", "num_bytes": 10, "stall_seconds": 0.01}
    for rank in range(4):
        add(path, {**saved, "write_seconds": 0.1 * rank, "rank": rank}, name=f"rank-{rank:03d}")
    started = {"kind": "run_started", "plan": "dp=4", "world_size": 4, "step": 2, "generation": 1, "pid": 1}
    for rank in range(4):
        add(path, {**started, "rank": rank}, name=f"rank-{rank:03d}")
    kinds = [item["words"][0] for item in story_items(Run(path).look_once(), NOW)]
    assert kinds.count("checkpoint_saved") == 1 and kinds.count("run_started") == 1 and kinds.count("run_resumed") == 1


def test_what_happened_twice_is_told_twice(tmp_path):
    """A restart at step 0 within the minute, two splits at one step, two views without a step, and a second `shoal train`."""
    path = make_run(tmp_path / "one", ranks=2, steps=1)
    started = {"kind": "run_started", "plan": "dp=2", "world_size": 2, "step": 0, "pid": 1}
    view = {"kind": "view", "replicas": 1, "logical": 2, "members": [], "hosts": []}
    evaluated = {"kind": "evaluated", "step": 1, "loss": 1.0, "accuracy": None, "samples": 4, "seconds": 0.1}
    for rank in range(2):
        # Their clocks differ by a second, so what they say is mixed.
        said = [
            {**started, "generation": 1, "t": NOW},
            {**evaluated, "split": "validation", "t": NOW + 0.1},
            {**evaluated, "split": "test", "t": NOW + 0.2},
            {**view, "epoch": 1, "cause": "left", "t": NOW + 0.3},
            {**view, "epoch": 2, "cause": "joined", "t": NOW + 0.4},
            {**started, "generation": 0, "t": NOW + 0.5},
            {**started, "generation": 0, "t": NOW + 0.6},
            {"kind": "warning", "message": "again", "t": NOW + 0.7},
            {"kind": "warning", "message": "again", "t": NOW + 0.8},
            {"kind": "warning", "message": "again", "t": NOW + 500},
        ]
        add(path, *({**event, "t": event["t"] + rank, "rank": rank} for event in said), name=f"rank-{rank:03d}")
    found = [item["words"] for item in story_items(Run(path).look_once(), NOW)]
    keys = [key for key, _ in found]
    assert keys.count("run_resumed") == 1 and keys.count("run_started") == 3, "of make_run, and two by hand"
    assert [values["split"] for key, values in found if key == "evaluated"] == ["validation", "test"]
    assert [values["epoch"] for key, values in found if key == "view"] == ["1", "2"]
    assert keys.count("warning") == 3


def test_pages_search_and_levels(tmp_path):
    path = make_run(tmp_path / "one", steps=1)
    add(path, *({"kind": "warning", "message": f"number {n}"} for n in range(900)))
    run = Run(path).look_once()
    seen, after = [], 0
    while after is not None:
        answer = story_answer(run, NOW, after=after, level="warning")
        seen += [item["text"] for item in answer["items"]]
        after = answer["next"]
    assert seen == [f"number {n}" for n in range(900)]
    assert story_answer(run, NOW, search="NUMBER 89", level="error")["items"] == []
    assert len(story_answer(run, NOW, search="NUMBER 89")["items"]) == 11


def test_markup_and_escape_codes_are_text(tmp_path):
    path = make_run(tmp_path / "one", steps=1)
    add(path, {"kind": "warning", "message": "\x1b[31m<script>alert(1)</script>\x1b]0;title\x07\u202e\x00"})
    (item,) = [item for item in story_items(Run(path).look_once(), NOW) if item["kind"] == "warning"]
    assert item["text"] == "<script>alert(1)</script>"


def test_certificates_are_told(tmp_path):
    path = make_run(tmp_path / "one", steps=1)
    plan = {"plan": "dp=2", "ok": False, "status": "differs"}
    (path / "proof.json").write_text(json.dumps({"ok": False, "plans": [plan, {**plan, "ok": True}], "mutants": []}))
    (item,) = [item for item in story_items(Run(path).look_once(), time.time()) if item["kind"] == "certificate"]
    assert item["level"] == "error" and "1 of 2 plans" in item["text"]
