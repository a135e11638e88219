"""A gradient that only the ranks lost was "refused", with the advice to allow unused parameters, and so no failure of the proof.

`shoal verify --all` does not count what is refused. A parameter that has no gradient in one process either is the model's doing,
and the advice is right; one that one process has a gradient of was lost by the plan, whatever lost it.
"""

import pytest

from shoal.core.config import validate
from shoal.core.plan import Plan
from shoal.trainer.config import Recipe
from shoal.verify.proof import Prover
from shoal.verify.request import build_subject
from support.processes.command import ROOT

TABLES = {
    "data": {"source": "synthetic", "kind": "classes", "samples": 32, "features": [8], "classes": 4},
    "train": {"steps": 2, "global_batch": 8},
}


@pytest.fixture(autouse=True)
def own_parts(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(ROOT / "tests"))


@pytest.mark.parametrize(
    ("lost", "status"), [("in ranks", "crashed"), pytest.param("everywhere", "refused", marks=pytest.mark.soak)]
)
def test_a_gradient_that_ranks_alone_lack_is_their_failure(lost, status):
    model = {"build": "support.models.custom_parts:build_loser", "args": {"everywhere": lost == "everywhere"}}
    recipe = validate(Recipe, {**TABLES, "model": model}, origin="test")
    subject = build_subject(recipe)
    with Prover(steps=1) as prover:
        found = [prover.prove(subject, Plan.parse(text), "float32") for text in ("dp=2", "dp=2 zero=3")]
        alone = prover.prove(subject, Plan.parse("dp=1"), "float32")
    assert [result.status for result in found] == [status] * 2 and alone.status == "proven"
    assert all("parameter 'scale' got no gradient in this step" in result.reason for result in found)
