"""How replicas and servers agree: who was there when, queues and what was sent, as the events say it."""

import json

import pytest

from shoal.dashboard.runs.run import Run
from shoal.dashboard.views.agreement import agreement_answer
from support.dashboard.synthetic import make_run

BEGIN = 1_790_000_000.0


@pytest.fixture
def answer_of(tmp_path):
    """The answer of a run of three ranks with further events, each with its rank and seconds since the run began."""

    def answer(*events, plan=None):
        path = make_run(tmp_path / "run", ranks=3, steps=50, more=plan)
        for rank, seconds, event in events:
            with (path / "events" / f"rank-{rank:03d}.jsonl").open("a") as file:
                file.write(json.dumps({"t": BEGIN + seconds, "rank": rank, **event}) + "\n")
        return agreement_answer(Run(path).look_once())

    return answer


def view(epoch, members, cause):
    return {
        "kind": "view",
        "epoch": epoch,
        "replicas": 2,
        "logical": 2,
        "members": members,
        "hosts": [],
        "cause": cause,
    }


def placed(name):
    return {
        "kind": "placed",
        "host": "h",
        "device": "cpu",
        "local_rank": 0,
        "coordinates": {},
        "threads": 1,
        "pid": 1,
        "name": name,
    }


def test_a_run_without_any_of_it_says_so(answer_of):
    assert {name for name, found in answer_of().items() if found is not None} == set()


def test_members_come_go_and_come_back_and_centers_are_elected(answer_of):
    answer = answer_of(
        (0, 0.5, placed("center-0")), (1, 0.5, placed("center-1")),
        (0, 1.0, view(2, ["server-0", "worker-0"], "the first view")),
        (0, 2.0, view(3, ["server-0", "worker-0", "worker-1"], "worker-1 joined")),
        (1, 3.0, view(4, ["server-0", "worker-0"], "worker-1 left: no sign of life")),
        (1, 4.0, view(5, ["server-0", "worker-0", "worker-1"], "worker-1 joined")),
        (2, 4.5, {"kind": "hung", "worker": "worker-0", "step": 3, "seconds": 9.0, "usual_seconds": 1.0}),
    )  # fmt: skip
    found = answer["presence"]
    assert (found["begin"], found["end"]) == (1.0, pytest.approx(5.0))
    rows = {row["label"]: [tuple(span[:4]) for span in row["spans"]] for row in found["rows"]}
    assert rows["center"] == [("data", "center-0", 1.0, 2.0), ("data", "center-1", 3.0, 2.0)]
    assert [name for _, name, _, _ in rows["epoch"]] == [
        "2: the first view", "3: worker-1 joined", "4: worker-1 left: no sign of life", "5: worker-1 joined"
    ]  # fmt: skip
    assert rows["server-0"] == [("data", "server-0", 1.0, 4.0)]
    assert rows["worker-1"] == [
        ("data", "worker-1", 2.0, 1.0),
        ("wait", "worker-1 left: no sign of life", 3.0, 1.0),
        ("data", "worker-1", 4.0, 1.0),
    ]
    assert [(name, start) for _, name, start, _ in rows["events"]] == [("hung worker-0", 4.5)]


def test_a_generation_ends_with_its_culprit_and_another_begins(answer_of):
    failed = {
        "kind": "rank_failed",
        "culprit_rank": 1,
        "step": 20,
        "phase": "forward",
        "cause": "killed",
        "generation": 0,
    }
    started = {"kind": "run_started", "plan": "dp=3", "world_size": 3, "step": 18, "generation": 1, "pid": 2}
    answer = answer_of((0, 2.0, {**failed, "restarting": True}), (0, 3.5, started))
    (row,) = answer["presence"]["rows"]
    assert row["label"] == "ranks"
    assert [tuple(span[:4]) for span in row["spans"]] == [
        ("data", "generation 0", 0.0, 2.0),
        ("wait", "rank 1: killed", 2.0, 1.5),
    ]


def test_queues_are_those_of_whoever_led_the_log(answer_of):
    queues = {"kind": "queues", "todo": 1, "in_hand": 2, "waiting": 0, "unapplied": 0}
    answer = answer_of((1, 3.0, {**queues, "step": 9, "waiting": 4}), (0, 1.0, {**queues, "step": 3}))
    assert answer["queues"] == {
        "time": [1.0, 3.0], "todo": [1, 1], "in_hand": [2, 2], "waiting": [0, 4], "unapplied": [0, 0]
    }  # fmt: skip


def test_the_ratio_is_dense_over_sent_and_totals_are_of_all_processes(answer_of):
    def exchange(step, sent, dense, norm):
        return {"kind": "exchange", "step": step, "sent_bytes": sent, "dense_bytes": dense, "residual_norm": norm}

    events = [
        (0, 1.0, exchange(10, 0, 0, None)),
        (0, 2.0, exchange(20, 100, 400, 0.5)),
        (1, 2.0, exchange(20, 300, 400, 0.25)),
    ]
    answer = answer_of(*events, plan={"compress": "int8"})
    assert answer["exchange"] == {"step": [10, 20], "ratio": [None, 4.0], "residual_norm": [None, 0.5]}
    assert answer["compression"] == {
        "codec": "int8", "sent_bytes": 400, "dense_bytes": 800, "residual_bytes": None
    }  # fmt: skip
