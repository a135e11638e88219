"""Many write an MLP with one dropout module: behind its first layer, whose features ``tp`` splits, and behind its second, whose
output every rank holds whole. What was found in the trace said of the module, not of its calls, that its features are split:
behind the second layer every rank drew a part of another mask for the same tensor, and the loss was 3% off."""

import pytest

from families.catalogue import Family
from families.sweep import TESTS, prove


@pytest.mark.soak
@pytest.mark.timeout(240)
def test_every_call_draws_its_own_part_of_the_mask(monkeypatch):
    monkeypatch.chdir(TESTS)
    monkeypatch.setenv("PYTHONPATH", str(TESTS))
    family = Family("blocks", "plain:blocks", "next_tokens")
    for _, plan, rows in prove([(family, plan) for plan in ("tp=2", "tp=2 sp=true", "cp=2")], steps=1):
        assert {row["status"] for row in rows} == {"proven"}, (plan, rows)
