"""``shoal verify`` as a user runs it: real ranks, a certificate, and exit codes that programs can trust."""

import json
import time

import psutil
import pytest

from shoal.core.plan import Plan
from shoal.optim.config import OptimConfig
from shoal.trainer.config import load_recipe
from shoal.verify.mutants.catalogue import MUTANTS
from shoal.verify.proof import Prover
from shoal.verify.request import build_subject
from shoal.verify.session import try_mutant
from support.processes.command import ROOT, TINY

CAUGHT = (
    "all-reduce dropped",
    "norm over one shard only",
    "a redundant collective",
    "a weight that has no gradient but noise is updated by more than noise",
    "a weight that has no gradient but noise goes a whole step",
    "weights not stashed: the backward pass meets newer ones",
    "tied weight not summed over its stages",
)


@pytest.fixture(scope="module")
def recipe(tmp_path_factory):
    path = tmp_path_factory.mktemp("recipe") / "tiny.toml"
    path.write_text(TINY)
    return path


def test_plans_are_proved_and_certified(shoal, tiny, tmp_path):
    written, page = tmp_path / "certificate.json", tmp_path / "certificate.md"
    plans = ["--plan", "dp=2", "--plan", "dp=2 zero=3 microbatches=2", "--plan", "tp=2 sp=true"]
    done = shoal.run("verify", tiny, *plans, "--dtype", "float32", "--json", written, "--markdown", page, timeout=110)
    certificate = json.loads(written.read_text())
    data, sharded, split = certificate["plans"]
    assert [plan["plan"] for plan in certificate["plans"]] == [
        "dp=2",
        "dp=2 microbatches=2 zero=3",
        "dp=1 tp=2 sp=true",
    ]
    assert data["ok"] and data["bitwise"] and sharded["ok"] and sharded["bitwise"] and split["ok"]
    assert data["worst"]["grad"] == 0.0 < split["worst"]["grad"] < 1e-5
    assert all(plan["first_difference"] is None and plan["steps"] == 3 for plan in certificate["plans"])
    for plan in certificate["plans"]:
        assert plan["traffic"]["counted"] == plan["traffic"]["expected"] != {}
        predicted, measured = plan["sizes"]["predicted"], plan["sizes"]["measured"]
        assert all(predicted[what] == measured[what] > 0 for what in ("weights", "gradients", "optimizer"))
    assert sharded["sizes"]["measured"]["optimizer"] < data["sizes"]["measured"]["optimizer"]
    # Results on stdout, progress on stderr.
    assert "3 of 3 equal one process, 2 of them bit for bit" in done.stdout and "[1/3] dp=2" in done.stderr
    assert page.read_text().startswith("# Shoal certificate: proved")


def test_pipelines_are_proved_bit_for_bit(shoal, tiny, tmp_path):
    """Synchronous ones against one process, asynchronous ones against the papers' rule."""
    written = tmp_path / "certificate.json"
    plans = ["pp=2 schedule=zbv microbatches=4", "pp=2 schedule=pipedream-vsync microbatches=4"]
    options = [word for plan in plans for word in ("--plan", plan)]
    shoal.run("verify", tiny, *options, "--set", "optim.clip=0.5", "--json", written, timeout=110)
    for plan in json.loads(written.read_text())["plans"]:
        assert plan["ok"] and plan["bitwise"] and plan["worst"]["weight"] == plan["worst"]["optimizer"] == 0.0
        assert plan["traffic"]["counted"] == plan["traffic"]["expected"] and "pp send" in plan["traffic"]["counted"]
        assert plan["sizes"]["measured"] == plan["sizes"]["predicted"]


def test_a_plan_that_cannot_run_is_refused_before_anything_starts_and_the_others_are_proved(shoal, tiny, tmp_path):
    written = tmp_path / "certificate.json"
    done = shoal.run("verify", tiny, "--plan", "dp=2", "--plan", "tp=3", "--json", written, expect=2)
    assert "error: plan 'dp=1 tp=3'" in done.stderr and "heads" in done.stderr
    assert done.stderr.index("refused dp=1 tp=3") < done.stderr.index("[1/1] dp=2 in float32")
    found = json.loads(written.read_text())
    assert not found["ok"]
    assert [(one["plan"], one["status"]) for one in found["plans"]] == [("dp=2", "proven"), ("dp=1 tp=3", "refused")]
    alone = tmp_path / "alone.json"
    done = shoal.run("verify", tiny, "--plan", "tp=3", "--json", alone, expect=2)
    assert "[1/" not in done.stderr and not alone.exists()


PARTS = {"PYTHONPATH": str(ROOT / "tests")}
STRANGE = """
plan = "dp=1"
[model]
build = "support.models.custom_parts:build_strange"
args = { keeps_more = true, breaks = true }
[data]
source = "synthetic"
kind = "classes"
samples = 32
[train]
steps = 4
global_batch = 8
"""


def test_every_plan_has_its_row(shoal, tmp_path):
    """A plan that was refused on the way ended the proof of all, with no table and no JSON; and a plan whose every bit was one
    process's was said to differ where the prediction of its activations was off."""
    recipe, written, page = tmp_path / "strange.toml", tmp_path / "certificate.json", tmp_path / "certificate.md"
    recipe.write_text(STRANGE)
    plans = ["pp=2 schedule=zbv microbatches=4", "dp=2", "dp=1"]
    options = [word for plan in plans for word in ("--plan", plan)]
    done = shoal.run("verify", recipe, *options, "--json", written, "--markdown", page, expect=1, environment=PARTS)
    certificate = json.loads(written.read_text())
    found = {plan["plan"]: plan for plan in certificate["plans"]}
    proven, refused, crashed = (found[text] for text in ("dp=1", "dp=1 pp=2 schedule=zbv microbatches=4", "dp=2"))
    assert proven["status"] == "proven" and proven["ok"] and proven["bitwise"] and not proven["prediction"]["ok"]
    [off] = proven["prediction"]["off"]
    assert off["what"] == "bytes of activations" and off["counted"] > off["predicted"] and off["percent"] > 5
    assert refused["status"] == "refused" and "wants 4 stages" in refused["reason"]
    assert refused["first_difference"] is None
    assert crashed["status"] == "crashed" and "cannot do with two processes" in crashed["reason"]
    assert "custom_parts.py" in crashed["traceback"] and "Traceback" not in done.stderr + done.stdout
    assert not certificate["ok"] and not certificate["predictions_ok"] and certificate["pending"] == []
    counted = "1 of 2 equal one process, 1 of them bit for bit; 1 with a prediction that is off; 1 refused"
    assert counted in done.stdout and counted in page.read_text() and "CRASHED" in done.stdout


def test_an_interruption_keeps_the_proofs_that_are_finished(shoal, tiny, tmp_path):
    written = tmp_path / "certificate.json"
    process = shoal.start("verify", tiny, "--plan", "dp=1", "--plan", "dp=2", "--json", written)
    for line in process.stderr:
        if "[2/2]" in line:
            process.terminate()
            break
    out, _ = process.communicate(timeout=60)
    certificate = json.loads(written.read_text())
    assert process.returncode == 143 and [plan["status"] for plan in certificate["plans"]] == ["proven"]
    assert certificate["pending"] == ["dp=2 in float32"] and not certificate["ok"]
    assert "1 of 1 equal one process" in out and "1 not tried yet" in out


@pytest.mark.soak
def test_a_recipe_in_bfloat16_is_proved_in_bfloat16(shoal, tiny, tmp_path):
    """It was proved in float32, and nobody was told."""
    written, plans = tmp_path / "certificate.json", ["--plan", "dp=2", "--plan", "tp=2"]
    shoal.run("verify", tiny, *plans, "--set", "train.precision=bfloat16", "--json", written, timeout=110)
    found = json.loads(written.read_text())["plans"]
    assert [(plan["plan"], plan["dtype"]) for plan in found] == [
        ("dp=2", "bfloat16"),
        ("dp=1 tp=2", "bfloat16"),
        ("dp=1 tp=2", "float64"),
    ]
    assert found[0]["bitwise"] and 1e-5 < found[1]["worst"]["grad"] < found[1]["tolerance"]


def test_one_question_at_a_time(shoal, tiny):
    assert "one of --plan, --all and --mutants" in shoal.run("verify", tiny, "--all", "--mutants", expect=2).stderr


def test_planted_bugs_are_caught_and_a_failure_does_not_end_the_session(recipe):
    """Each by the comparison that should see it, in processes that are kept; then a crash, then a proof by fresh ranks."""
    own = load_recipe(recipe)
    subject = build_subject(own)
    with Prover(steps=2) as prover:
        controls = {}
        for name in CAUGHT:
            found = try_mutant(prover, MUTANTS[name], own, controls)
            assert found.caught and found.control_ok, found
        broken = prover.prove(subject, Plan.parse("dp=2"), "float32", mutant="no such mutant")
        assert broken.status == "crashed" and "no such mutant" in broken.traceback
        assert prover.prove(subject, Plan.parse("dp=2"), "float32").ok


NORMALISING = [
    ("NAdam", {}, "float32"),
    ("RAdam", {}, "float32"),
    ("Adamax", {}, "float32"),
    ("Adagrad", {}, "float32"),
    ("Adam", {"amsgrad": True}, "float32"),
    ("AdamW", {}, "float32"),
    ("Rprop", {}, "float32"),
    ("RMSprop", {"momentum": 0.9}, "float64"),
]


@pytest.mark.soak
@pytest.mark.timeout(240)
def test_classes_that_divide_by_a_gradients_size_are_proved_where_sums_are_split(recipe):
    """RMSprop was said to differ, by elements whose gradient is noise."""
    own = load_recipe(recipe)
    with Prover(steps=3) as prover:
        for name, args, precision in NORMALISING:
            optim = OptimConfig(name=f"torch.optim.{name}", args=args, lr=1e-3)
            subject = build_subject(own.model_copy(update={"optim": optim}))
            found = prover.prove(subject, Plan.parse("dp=1 tp=2"), precision)
            assert found.ok, (name, found.first_difference)


def test_a_killed_command_leaves_no_rank_behind(shoal, tiny):
    process = shoal.start("verify", tiny, "--plan", "dp=2")
    deadline = time.monotonic() + 60
    children = []
    while not children and time.monotonic() < deadline:
        children = psutil.Process(process.pid).children()
        time.sleep(0.05)
    assert children, "no process was started"
    process.kill()
    process.communicate()
    _, alive = psutil.wait_procs(children, timeout=10)
    assert alive == []


@pytest.mark.soak
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("num_processes", [2, 3, 4])
def test_every_plan_that_fits_is_proved(shoal, tmp_path, num_processes):
    written = tmp_path / "certificate.json"
    recipe = ROOT / "recipes" / "tiny.toml"
    # Twelve samples: a batch that three replicas can share too.
    batch = ("--set", "train.global_batch=12")
    shoal.run("verify", recipe, "--all", "--nproc", num_processes, *batch, "--json", written, timeout=2900)
    plans = json.loads(written.read_text())["plans"]
    refused = [plan["plan"] for plan in plans if plan["status"] == "refused"]
    assert [plan["plan"] for plan in plans if not plan["ok"] and plan["plan"] not in refused] == []
    # Both directions of these need an even number of ranks.
    odd = ["dp=1 pp=3 schedule=chimera", "dp=1 pp=3 schedule=dualpipe"]
    assert refused == (odd if num_processes == 3 else [])


@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_every_planted_bug_is_caught(shoal, tmp_path):
    written = tmp_path / "certificate.json"
    shoal.run("verify", ROOT / "recipes" / "tiny.toml", "--mutants", "--json", written, timeout=1700)
    mutants = json.loads(written.read_text())["mutants"]
    assert len(mutants) >= 12 and all(mutant["caught"] for mutant in mutants)
