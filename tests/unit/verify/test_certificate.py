"""The certificate: the contract's keys, and a page that says the same."""

import json

from shoal.verify.certificate import Certificate, MutantResult
from shoal.verify.judge import Difference
from shoal.verify.result import PlanResult

WORST = {"loss": 0.0, "grad": 0.0, "norm": 1e-7, "optimizer": 0.0, "weight": 0.0, "buffer": 0.0}


def plan_result(ok=True, **changes):
    difference = (
        None if ok else Difference(kind="grad", step=2, tensor="a", error=1.0, allowed=0.0, pattern="a factor of 2")
    )
    values = {
        "plan": "dp=2",
        "dtype": "float32",
        "steps": 3,
        "ok": ok,
        "bitwise": ok,
        "worst": WORST,
        "first_difference": difference,
        "tolerance": 0.0,
        "reason": "every bit",
        "traffic": {"expected": {"dp sum": [1, 8]}, "counted": {"dp sum": [1, 8]}},
        "sizes": {"predicted": {"weights": 4, "activations": 100}, "measured": {"weights": 4, "activations": 98}},
    }
    return PlanResult(**{**values, **changes})


def mutant_result(**changes):
    values = {
        "name": "all-reduce dropped",
        "plan": "dp=2",
        "dtype": "float32",
        "caught": True,
        "by": "grad",
        "expected": "grad",
        "control_ok": True,
    }
    return MutantResult(**{**values, **changes})


def test_the_keys_of_the_contract():
    values = json.loads(
        json.dumps(Certificate(plans=(plan_result(), plan_result(ok=False)), mutants=(mutant_result(),)).as_values())
    )
    first, second = values["plans"]
    assert {"plan", "ok", "bitwise", "dtype", "steps", "worst", "first_difference"} <= first.keys()
    assert {"loss", "grad", "norm", "weight", "optimizer"} <= first["worst"].keys()
    assert first["first_difference"] is None and second["first_difference"]["tensor"] == "a"
    assert {"name", "caught", "by"} <= values["mutants"][0].keys()
    assert {"torch", "shoal", "python"} <= values["versions"].keys()
    assert {"seeds", "model_sha256", "recipe_sha256", "wall_s"} <= values.keys()


def test_one_failure_is_enough():
    assert Certificate(plans=(plan_result(),)).ok
    assert not Certificate(plans=(plan_result(), plan_result(ok=False))).ok
    assert not Certificate(mutants=(mutant_result(caught=False),)).ok
    assert not Certificate(mutants=(mutant_result(control_ok=False),)).ok


def test_the_page_says_what_failed_and_where():
    page = Certificate(plans=(plan_result(), plan_result(ok=False)), recipe="tiny.toml").as_markdown()
    assert page.startswith("# Shoal certificate: NOT proved")
    assert "1 of 2 plans equal one process" in page
    assert "step 2, grad of a: off by 1, allowed 0: a factor of 2" in page
    assert "| dp=2 | float32 | bitwise |" in page and "98 (100 predicted)" in page


def test_it_says_of_how_many_steps_and_of_what_recipe_it_speaks():
    certificate = Certificate(plans=(plan_result(),), recipe="tiny.toml", settings=("model.tied=true",), steps=3)
    assert (
        "recipe `tiny.toml` with `model.tied=true`" in certificate.as_markdown()
        and ", 3 steps" in certificate.as_markdown()
    )
    assert certificate.as_values()["settings"] == ["model.tied=true"] and certificate.as_values()["steps"] == 3


def test_a_plan_that_did_not_run_has_a_row_too():
    failed = plan_result(
        ok=False, worst={}, traffic={}, sizes={}, first_difference=Difference(kind="run", pattern="rank 1: died")
    )
    page = Certificate(plans=(failed,)).as_markdown()
    assert "run: rank 1: died" in page


def test_a_plan_that_did_not_run_has_the_keys_of_the_contract():
    (plan,) = Certificate(plans=(plan_result(ok=False, worst={}),)).as_values()["plans"]
    assert plan["worst"] == dict.fromkeys(WORST)
