"""What ``shoal tune`` says before it tries anything."""

import pytest

from shoal.core.errors import RequestError
from shoal.trainer.config import load_recipe
from shoal.tuning.tune import tune


@pytest.mark.parametrize(
    ("plan", "told"),
    [
        ("dp=2 sync=local:5", ["the recipe's own plan, dp=2 sync=local:5, is left out: sync=local:5 changes what is computed"]),
        ("dp=2 compress=int8", ["the recipe's own plan, dp=2 compress=int8, is left out: compress=int8 changes"]),
        ("ps=1 workers=2", ["the recipe's own plan, ps=1 workers=2, is left out: parameter servers change what is computed"]),
        ("pp=2 schedule=pipedream", ["the recipe's own plan, pp=2 schedule=pipedream, is left out: schedule=pipedream changes"]),
        ("dp=2", []),
        ("auto", []),
    ],
)  # fmt: skip
def test_a_plan_that_is_never_tried_is_said_to_be_left_out(tiny, tmp_path, plan, told):
    """A recipe with parameter servers was tuned without a word of its own plan."""
    said = []
    recipe = load_recipe(tiny, (f"plan={plan}",))
    with pytest.raises(RequestError, match="no such file"):
        tune(recipe, num_processes=2, top=1, steps=2, machine=tmp_path / "absent.json", log=said.append)
    assert len(said) == len(told) and all(line.startswith(start) for line, start in zip(said, told, strict=True)), said
