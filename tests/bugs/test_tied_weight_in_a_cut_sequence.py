"""A proof of a tied weight under `sp` and `pp` failed although nothing was wrong.

Under `sp` and `cp` the bytes that cross between stages are taken as counted, and the count has the sums of shared weights in it;
these were then added once more, so `shoal verify` said that a collective was of another size. Stages of several ranks, which sum
all their weights so, could not be proved with `sp` and `cp` at all.
"""

import pytest

from shoal.core.plan import Plan
from shoal.verify.proof import Prover
from shoal.verify.request import build_subject
from support.pipeline.trainer_runs import recipe_of


@pytest.mark.soak
def test_sums_of_shared_weights_are_expected_once():
    subject = build_subject(recipe_of("gpt", {"model": {"tied": True}}))
    with Prover(steps=2) as prover:
        proved = prover.prove(subject, Plan.parse("dp=1 tp=2 sp=true pp=2 microbatches=4"), "float32")
    assert proved.ok and proved.prediction.ok, (proved.reason, proved.prediction)
    assert proved.traffic["counted"] == proved.traffic["expected"] and "pp send" in proved.traffic["counted"]
