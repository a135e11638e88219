"""``shoal train --find-rate``: a table and a suggested rate for a recipe, from processes of any plan, and nothing is left."""

import json

import pytest


def test_a_recipe_is_searched_on_two_ranks_and_nothing_is_trained(shoal, tiny, tmp_path):
    said = shoal.run("train", tiny, "--plan", "dp=2 zero=1", "--find-rate", "--json", "found.json")
    found = json.loads((tmp_path / "found.json").read_text())
    rates, losses = found["rates"], found["losses"]
    assert rates[0] == pytest.approx(1e-6) and len(rates) == len(losses) > 50 and min(losses) < 0.9 * losses[0]
    assert found["plan"].startswith("dp=2 zero=1") and 1e-4 < found["suggestion"] <= 1.0
    assert f"suggested: optim.lr = {found['suggestion']:.3g}" in said.stdout and "1e-06" in said.stdout
    assert not (tmp_path / "runs").exists()


def test_what_cannot_be_searched_is_refused(shoal, tiny, tmp_path):
    refused = shoal.run("train", tiny, "--find-rate", "--resume", "--run-dir", "run", expect=2)
    assert "leave --resume and --dry-run out" in refused.stderr
    refused = shoal.run("train", tiny, "--find-rate", "--plan", "dp=2 sync=local:2", expect=2)
    assert "such as --plan dp=2" in refused.stderr
    refused = shoal.run("train", tiny, "--find-rate", "--plan", "ps=1 workers=2", expect=2)
    assert "update together" in refused.stderr
