"""What ``[elastic]`` asks for and a plan cannot do."""

from typing import Any

import pytest

from shoal.core.config import validate
from shoal.core.errors import RequestError
from shoal.core.plan import Plan
from shoal.elastic import refusals
from shoal.elastic.config import GroupConfig
from shoal.elastic.refusals import check_group, group_problems


@pytest.fixture(autouse=True)
def _all_modes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(refusals, "EXECUTED", frozenset({"restart", "shrink"}))


def problems(plan: str = "dp=4", rate_rule: str = "none", **keys: Any) -> list[str]:
    config = GroupConfig(**{"mode": "shrink"} | keys)
    return list(group_problems(config, Plan.parse(plan), rate_rule=rate_rule))


def test_what_fits() -> None:
    assert problems(mode="restart") == [] and problems() == [] and problems(min_dp=4, max_dp=4, spares=2) == []
    assert problems(max_dp=8, batch="scale", rate_rule="linear") == []
    assert problems("dp=1", spares=1) == [] and problems(max_dp=3) == []


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"min_dp": 5}, "elastic.min_dp 5 is more than the plan's dp=4"),
        ({"min_dp": 3, "max_dp": 2}, "elastic.max_dp 2 is less than elastic.min_dp 3"),
        ({"max_dp": 1}, "nobody to go on with where one replica is present (dp=4, max_dp 1, spares 0)"),
        ({"max_dp": 8}, "elastic.max_dp 8 is more than the plan's dp=4, and with batch hold there are 4 shares"),
        ({"batch": "scale"}, "optim.scale is none"),
        ({"plan": "dp=1"}, "nobody to go on with where one replica is present (dp=1"),
        ({"plan": "ps=2 workers=2 update=bsp"}, "ps=2 has workers that come and go anyway"),
        ({"mode": "restart", "spares": 1}, "elastic.spares 1 is for elastic.mode shrink"),
        ({"mode": "restart", "min_dp": 2}, "elastic.min_dp 2 is for elastic.mode shrink"),
        ({"mode": "restart", "batch": "scale"}, "elastic.batch scale is for elastic.mode shrink"),
    ],
)
def test_what_does_not(keys: dict[str, Any], words: str) -> None:
    found = problems(**keys)
    assert len(found) == 1 and words in found[0], found
    rest = {key: value for key, value in keys.items() if key != "plan"}
    config = GroupConfig(**{"mode": "shrink"} | rest)
    with pytest.raises(RequestError, match="elastic"):
        check_group(config, Plan.parse(keys.get("plan", "dp=4")), rate_rule="none")


@pytest.mark.parametrize(
    "wrong", [{"mode": "grow"}, {"copies": 2}, {"copies": -1}, {"min_dp": 0}, {"straggler_factor": 1.0}]
)
def test_values_that_are_none_are_refused_with_their_key(wrong: dict[str, Any]) -> None:
    with pytest.raises(RequestError, match=next(iter(wrong))):
        validate(GroupConfig, wrong, origin="recipe.toml")


def test_a_mode_that_no_run_obeys_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(refusals, "EXECUTED", frozenset({"restart"}))
    assert "not executed yet" in problems()[0]
