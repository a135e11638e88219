"""A pipeline through the real trainer ends with the weights of one process, whatever its schedule, types and batches."""

import pytest

from shoal.schedules.catalogue import make_schedule
from shoal.schedules.csv_file import write_csv
from shoal.testing.ranks import run_on_ranks
from support.pipeline.trainer_runs import train_alone, train_on_ranks

# Ten samples to train on: the second batch of an epoch has 2, fewer than there are microbatches.
SHORT = {"data": {"samples": 11, "validation": 0.1, "test": 0.0}, "train": {"epochs": 2}}
OWN_FILE = "a file of the user's own"
# (kind, settings, schedule); what is compared is one process with the same microbatches.
CASES = {
    "1f1b": ("gpt", {}, "1f1b"),
    "zbv": ("gpt", {}, "zbv"),
    OWN_FILE: ("gpt", {}, None),
    "batch norm": ("cnn", {}, "interleaved"),
    "a short last batch": ("gpt", SHORT, "1f1b"),
    "a short last batch and batch norm": ("cnn", SHORT, "1f1b"),
    "float16 and lamb": ("gpt", {"train": {"precision": "float16"}, "optim": {"name": "lamb"}}, "zb-h1"),
}
MORE = {
    "interleaved": ("gpt", {}, "interleaved"),
    "zbv and batch norm": ("cnn", {}, "zbv"),
    "bfloat16": ("gpt", {"train": {"precision": "bfloat16"}}, "1f1b"),
    "float16": ("gpt", {"train": {"precision": "float16"}}, "1f1b"),
    "lamb": ("gpt", {"optim": {"name": "lamb"}}, "1f1b"),
    "lars": ("gpt", {"optim": {"name": "lars"}}, "1f1b"),
}
TIED = {"tied": ("gpt", {"model": {"tied": True}}, "1f1b")}


def run_cases(cases, folder, others=None):
    """What two ranks found, by name; both found the same."""
    path = folder / "own.csv"
    path.write_text(write_csv(make_schedule("zb-h1", ranks=2, microbatches=4)))
    jobs = {
        name: {"kind": kind, "settings": settings, "plan": f"pp=2 schedule={schedule or path} microbatches=4"}
        for name, (kind, settings, schedule) in cases.items()
    }
    first, second = run_on_ranks(train_on_ranks, 2, {**jobs, **(others or {})}, deadline_seconds=110.0)
    assert first == second, "ranks disagree"
    return first


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    others = {
        "chimera": {"kind": "gpt", "plan": "pp=2 schedule=chimera microbatches=4"},
        "two replicas": {"kind": "gpt", "plan": "dp=2 microbatches=2"},
    }
    return run_cases(CASES | TIED, tmp_path_factory.mktemp("schedules"), others)


@pytest.fixture(scope="module")
def found_more(tmp_path_factory):
    return run_cases(MORE, tmp_path_factory.mktemp("more"))


def assert_equals_one_process(result, kind, settings, plan="dp=1 microbatches=4"):
    alone = train_alone({"kind": kind, "settings": settings, "plan": plan})
    assert alone["validation"] is not None and len(set(alone["losses"])) > 1
    assert result == alone


@pytest.mark.parametrize("case", CASES)
def test_the_end_is_that_of_one_process(found, case):
    """Weights, running statistics, every loss and norm, and the validation loss, bit for bit."""
    kind, settings, _ = CASES[case]
    assert_equals_one_process(found[case], kind, settings)


@pytest.mark.soak
@pytest.mark.parametrize("case", MORE)
def test_the_end_of_more_runs_is_that_of_one_process(found_more, case):
    kind, settings, _ = MORE[case]
    assert_equals_one_process(found_more[case], kind, settings)


def test_tied_weights_are_trained_by_both_ends(found):
    """Each end adds its own microbatches, and then both are added: another order than in one process, and nothing else."""
    kind, settings, _ = TIED["tied"]
    alone = train_alone({"kind": kind, "settings": settings, "plan": "dp=1 microbatches=4"})
    assert found["tied"]["losses"] == pytest.approx(alone["losses"], rel=1e-5)


def test_two_directions_are_two_replicas(found):
    """Chimera adds each direction by itself and then both, which is the tree of dp=2.

    Not so the validation: replicas share its samples out, directions do not, and another number of rows in a product may be
    another last bit, on some processors and not on others.
    """
    chimera, replicas = dict(found["chimera"]), dict(found["two replicas"])
    assert chimera.pop("validation") == pytest.approx(replicas.pop("validation"), rel=1e-6)
    assert chimera == replicas
    assert found["chimera"]["sha"] != found["1f1b"]["sha"], "another tree has other bits, or this compares nothing"


@pytest.mark.soak
@pytest.mark.parametrize("kind", ["gpt", "cnn"])
def test_replicas_of_pipelines_end_as_replicas_do_when_a_batch_is_short(kind, tmp_path):
    settings = {**SHORT, "train": {"epochs": 2, "batch_norm": "sync"}} if kind == "cnn" else SHORT
    job = {"kind": kind, "settings": settings}
    run = {**job, "plan": "dp=2 pp=2 microbatches=2"}
    pipelines = run_on_ranks(train_on_ranks, 4, {"run": run}, deadline_seconds=110.0)
    replicas = run_on_ranks(train_on_ranks, 2, {"run": {**job, "plan": "dp=2 microbatches=2"}})
    assert all(one == replicas[0] for one in pipelines)
