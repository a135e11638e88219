"""The certificate: the contract's keys, and a page that says the same."""

import json

from shoal.verify.certificate import Certificate, MutantResult, notes_of
from shoal.verify.compare.judge import Difference
from shoal.verify.result import Off, PlanResult, Prediction, settle

WORST = {"loss": 0.0, "grad": 0.0, "norm": 1e-7, "optimizer": 0.0, "weight": 0.0, "buffer": 0.0}


def plan_result(ok=True, **changes):
    difference = (
        None if ok else Difference(kind="grad", step=2, tensor="a", error=1.0, allowed=0.0, pattern="a factor of 2")
    )
    values = {
        "plan": "dp=2",
        "dtype": "float32",
        "steps": 3,
        "status": "proven" if ok else "differs",
        "bitwise": ok,
        "worst": WORST,
        "first_difference": difference,
        "tolerance": 0.0,
        "reason": "every bit" if ok else str(difference),
        "prediction": Prediction(is_made=True),
        "traffic": {"expected": {"dp all_reduce": [1, 8]}, "counted": {"dp all_reduce": [1, 8]}},
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


OFF = Prediction(is_made=True, off=(Off(what="bytes of activations", predicted=1000, counted=1080, where="rank 0"),))


def test_numbers_and_predictions_are_two_verdicts():
    """An LSTM under dp=2 was said to differ: every bit was one process's, and the prediction of its activations was off."""
    certificate = Certificate(plans=(plan_result(prediction=OFF), plan_result()))
    assert certificate.ok and certificate.unpredicted == [certificate.plans[0]]
    values = json.loads(json.dumps(certificate.as_values()))
    assert values["ok"] and not values["predictions_ok"]
    assert values["plans"][0]["ok"] and values["plans"][0]["status"] == "proven"
    off = {"what": "bytes of activations", "predicted": 1000, "counted": 1080, "percent": 8.0, "where": "rank 0"}
    assert values["plans"][0]["prediction"] == {"ok": False, "off": [off], "missing": {}}
    assert values["plans"][1]["prediction"] == {"ok": True, "off": [], "missing": {}}
    page = certificate.as_markdown()
    assert "| dp=2 | float32 | bitwise | off by 8% |" in page and "prediction off: bytes of activations, rank 0" in page
    assert "2 of 2 equal one process, 2 of them bit for bit; 1 with a prediction that is off" in page


def refused_result():
    return plan_result(ok=False, status="refused", reason="no heads", first_difference=None, worst={})


def test_a_plan_that_was_named_must_be_proved_and_one_of_all_may_be_refused():
    assert not Certificate(plans=(plan_result(), refused_result())).ok
    assert Certificate(plans=(plan_result(), refused_result()), takes_all=True).ok
    assert not Certificate(plans=(refused_result(),), takes_all=True).ok, "nothing was proved"
    assert not Certificate(plans=(plan_result(), plan_result(ok=False)), takes_all=True).ok
    crash = plan_result(ok=False, status="crashed", traceback="Traceback ...")
    assert not Certificate(plans=(plan_result(), crash), takes_all=True).ok
    values = Certificate(plans=(refused_result(), crash)).as_values()["plans"]
    assert [(one["status"], one["reason"][:8]) for one in values] == [("refused", "no heads"), ("crashed", "step 2, ")]
    assert values[1]["traceback"] == "Traceback ..."


def test_what_is_not_finished_is_not_proved():
    certificate = Certificate(plans=(plan_result(),), pending=("tp=2 in float32",))
    assert not certificate.ok and certificate.as_values()["pending"] == ["tp=2 in float32"]
    assert "certificate: not finished" in certificate.as_markdown() and "1 not tried yet" in certificate.summary()


def test_float64_decides_where_the_optimizer_amplifies_rounding():
    low = plan_result(ok=False, is_amplified=True)
    high, wrong = plan_result(dtype="float64", tolerance=1e-12), plan_result(ok=False, dtype="float64")
    decided, same = settle([low, high])
    assert decided.ok and decided.decided_by == "float64" and same == high
    assert "off by 1" in decided.reason and "within 1e-12" in decided.reason
    page = Certificate(plans=(decided, same)).as_markdown()
    assert "| dp=2 | float32 | by float64 |" in page and "certificate: proved" in page
    assert [one.ok for one in settle([low, wrong])] == [False, False]
    # A difference that rounding cannot make is not up to float64.
    assert [one.ok for one in settle([plan_result(ok=False), high])] == [False, True]
    (alone,) = settle([low])
    assert not alone.ok and "float64 decides" in alone.reason
    other = plan_result(dtype="float64", plan="dp=1 tp=2")
    assert not settle([low, other])[0].ok


def test_the_page_says_what_failed_and_where():
    page = Certificate(plans=(plan_result(), plan_result(ok=False)), recipe="tiny.toml").as_markdown()
    assert page.startswith("# Shoal certificate: NOT proved")
    assert "1 of 2 equal one process" in page
    assert "step 2, grad of a: off by 1, allowed 0: a factor of 2" in page
    assert "| dp=2 | float32 | bitwise | holds |" in page and "98 (100 predicted)" in page


def test_it_says_of_how_many_steps_and_of_what_recipe_it_speaks():
    certificate = Certificate(plans=(plan_result(),), recipe="tiny.toml", settings=("model.tied=true",), steps=3)
    assert (
        "recipe `tiny.toml` with `model.tied=true`" in certificate.as_markdown()
        and ", 3 steps" in certificate.as_markdown()
    )
    assert certificate.as_values()["settings"] == ["model.tied=true"] and certificate.as_values()["steps"] == 3


def test_a_plan_that_did_not_run_has_a_row_too():
    failed = plan_result(
        ok=False, status="crashed", worst={}, traffic={}, sizes={}, reason="rank 1: died", prediction=Prediction()
    )
    page = Certificate(plans=(failed,)).as_markdown()
    assert "| dp=2 | float32 | CRASHED | - |" in page and "rank 1: died" in page


def test_a_plan_that_did_not_run_has_the_keys_of_the_contract():
    (plan,) = Certificate(plans=(plan_result(ok=False, worst={}),)).as_values()["plans"]
    assert plan["worst"] == dict.fromkeys(WORST)


def test_what_was_not_predicted_is_said_with_its_reason():
    """A prediction of activations that raised, our own bugs included, was a line on a rank's stderr, and the row held."""
    half = Prediction(is_made=True, missing={"activations": "RuntimeError: looks at values\nand more"})
    certificate = Certificate(plans=(plan_result(prediction=half), plan_result()))
    assert certificate.ok and certificate.half_predicted == [certificate.plans[0]] and not certificate.unpredicted
    assert notes_of(certificate.plans[0]) == ["not predicted: bytes of activations: RuntimeError: looks at values"]
    assert notes_of(certificate.plans[1]) == []
