"""What commands answer, as functions: the same values for a path, a dict and a ``Recipe``, and the same refusals."""

import tomllib
from pathlib import Path

import pytest

import shoal

ROOT = Path(__file__).resolve().parents[3]
TINY = ROOT / "recipes" / "tiny.toml"


def forms():
    return [str(TINY), tomllib.loads(TINY.read_text()), shoal.load_recipe(TINY)]


def test_plans_are_the_same_for_every_form_of_a_recipe():
    answers = [shoal.plan(recipe, "h100:1x4", top=2) for recipe in forms()]
    assert len({str(answer.best) for answer in answers}) == 1
    values = [answer.as_values() for answer in answers]
    assert [one["plan"] for one in values[0]["plans"]] == [one["plan"] for one in values[1]["plans"]]
    # A command that runs it needs a file.
    assert values[0]["plans"][0]["command"].startswith(f"shoal train {TINY} --plan")
    assert values[1]["plans"][0]["command"] is None


def test_a_simulation_takes_its_options_as_one_value():
    slow = shoal.SimulationOptions(straggler=["0:2"])
    alone, slowed = (shoal.simulate(TINY, "h100:1x2", shoal.Plan(dp=2), options=options) for options in (None, slow))
    assert slowed.step_seconds > alone.step_seconds and alone.fits and str(alone.plan) == "dp=2"
    assert alone.as_values()["step_seconds"] == pytest.approx(alone.step_seconds)


def test_a_run_is_loaded_with_its_weights():
    run = shoal.load_run(str(ROOT / "tests" / "golden" / "checkpoints" / "zero"))
    assert run.step == 2 and run.plan.zero and not run.model.training
    assert run.summary is None and run.checkpoint.name == "step-00000002"


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda recipe: shoal.plan(recipe, "h1000:1x4"), "h1000"),
        (lambda recipe: shoal.simulate(recipe, "h100:1x2", "dp=4"), "needs 4 devices"),
        (lambda recipe: shoal.verify(recipe, ["dq=2"]), "unknown key 'dq'"),
        (lambda recipe: shoal.verify(recipe, ["dp=2"], all_plans=True), "one of --plan, --all and --mutants"),
        (
            lambda recipe: shoal.plan({**recipe, "trian": {}}, "h100:1x4"),
            "the recipe given in code: unknown key 'trian'",
        ),
        (lambda recipe: shoal.load_run("nowhere"), "not a run directory"),
    ],
)
def test_a_wrong_request_is_one_error(call, message):
    with pytest.raises(shoal.RequestError, match=message) as caught:
        call(tomllib.loads(TINY.read_text()))
    assert isinstance(caught.value, shoal.ShoalError)
