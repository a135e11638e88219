"""A pipeline that was stopped goes on as if it had not been: with old versions of weights, and under another plan too."""

import pytest

from shoal.checkpoint.reader import read
from shoal.testing.ranks import run_on_ranks
from support.pipeline.trainer_runs import train_alone, train_on_ranks

PP, ALONE = "pp=2 microbatches=4", "dp=1 microbatches=4"
ASYNCHRONOUS = ("pipedream", "pipedream-2bw")


def job(plan, steps, folder, name, *, kind="gpt", resume=False, **options):
    settings = {"train": {"steps": steps, "watch_every": 0}, "checkpoint": {"every": options.pop("every", 0)}}
    # The rate must not depend on where a run was told to end.
    settings["optim"] = {"schedule": "constant"}
    return {
        "kind": kind,
        "plan": plan,
        "settings": settings,
        "run_dir": str(folder / name),
        "resume": resume,
        **options,
    }


def stopped_and_alone(schedule, folder, kind="gpt"):
    """Stopped after 3 steps and gone on with; and left alone, with windows of other lengths."""
    plan = f"{PP} schedule={schedule}"
    return {
        f"{schedule} stopped": job(plan, 3, folder, schedule, kind=kind),
        f"{schedule} resumed": job(plan, 7, folder, schedule, kind=kind, resume=True),
        f"{schedule} alone": job(plan, 7, folder, f"{schedule} alone", kind=kind, every=4),
    }


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def found(folder):
    jobs = {}
    for schedule in ASYNCHRONOUS:
        jobs |= stopped_and_alone(schedule, folder)
    return on_two_ranks(jobs)


@pytest.fixture(scope="module")
def moved(folder):
    """Runs that were saved under one plan and go on under another."""
    train_alone(job(ALONE, 3, folder, "from one process"))
    jobs = {
        "from one process": job(PP, 7, folder, "from one process", resume=True),
        "to one process": job(f"{PP} schedule=zb-h1", 3, folder, "to one process"),
        "first": job(f"{PP} schedule=pipedream", 3, folder, "others"),
        "other": job(f"{PP} schedule=pipedream-2bw", 5, folder, "others", resume=True),
        "other again": job(f"{PP} schedule=pipedream-2bw", 6, folder, "others", resume=True),
        "synchronous": job(PP, 8, folder, "others", resume=True),
    }
    return on_two_ranks(jobs)


def on_two_ranks(jobs):
    first, second = run_on_ranks(train_on_ranks, 2, jobs, deadline_seconds=110.0)
    assert first == second, "ranks disagree"
    return first


@pytest.mark.parametrize("schedule", ASYNCHRONOUS)
def test_a_run_that_was_stopped_ends_as_one_that_was_not(found, schedule):
    assert_goes_on(found, schedule)


@pytest.mark.soak
@pytest.mark.parametrize(("schedule", "kind"), [("pipedream-vsync", "gpt"), ("zbv", "gpt"), ("pipedream", "cnn")])
def test_more_runs_that_were_stopped_end_as_those_that_were_not(schedule, kind, tmp_path):
    """Running statistics too, which are of every microbatch once wherever windows end."""
    found, _ = run_on_ranks(train_on_ranks, 2, stopped_and_alone(schedule, tmp_path, kind=kind), deadline_seconds=110.0)
    assert_goes_on(found, schedule)


def assert_goes_on(found, schedule):
    resumed, alone = found[f"{schedule} resumed"], found[f"{schedule} alone"]
    assert resumed["step"] == alone["step"] == 7 and len(resumed["losses"]) == 4
    assert resumed["losses"] == alone["losses"][3:]
    assert resumed["sha"] == alone["sha"]


@pytest.mark.parametrize("schedule", ASYNCHRONOUS)
def test_a_checkpoint_keeps_the_versions_that_are_still_to_be_used(found, folder, schedule):
    names = read(folder / schedule / "checkpoints" / "step-00000003").manifest.tensors
    kept = {name.split("/")[1] for name in names if name.startswith("versions/")}
    assert kept == {"1"}, "of two stages, one version behind the newest"
    assert found[f"{schedule} resumed"]["stream"][1] == 0, "the history goes on"


@pytest.mark.soak
def test_one_process_and_a_pipeline_take_each_other_up(moved, folder):
    alone = train_alone(job(ALONE, 7, folder, "alone"))
    taken_up = train_alone(job(ALONE, 7, folder, "to one process", resume=True))
    assert moved["from one process"]["sha"] == taken_up["sha"] == alone["sha"]
    assert moved["from one process"]["losses"] == taken_up["losses"] == alone["losses"][3:]


def test_another_asynchronous_schedule_begins_a_new_history_and_trains_on(moved):
    assert moved["first"]["stream"][1] == 0
    name, start = moved["other"]["stream"]
    assert name.startswith("pipedream-2bw") and start == 3 and moved["other"]["step"] == 5
    assert moved["other again"]["stream"] == [name, 3] and moved["other again"]["step"] == 6
    assert moved["synchronous"]["stream"] == ["", 0] and moved["synchronous"]["step"] == 8


@pytest.mark.soak
def test_two_ranks_become_four(tmp_path):
    plan = "pp=4 microbatches=4"
    run_on_ranks(train_on_ranks, 2, {"first": job(PP, 3, tmp_path, "moved")})
    moved = run_on_ranks(train_on_ranks, 4, {"rest": job(plan, 7, tmp_path, "moved", resume=True)})[3]["rest"]
    assert moved["sha"] == train_alone(job(ALONE, 7, tmp_path, "alone"))["sha"]
