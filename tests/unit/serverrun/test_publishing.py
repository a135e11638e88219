"""Which checkpoints of a run with parameter servers are judged for publication."""

from dataclasses import replace

import pytest

from shoal.serverrun.publishing import is_due
from shoal.trainer.online.config import PublishConfig
from support.checkpoint.versions import describe

STEPS, MINUTES = PublishConfig(every_steps=10), PublishConfig(every_minutes=2)
LAST = replace(describe(20), published=1000.0)


@pytest.mark.parametrize(
    ("config", "step", "last", "judged", "now", "due"),
    [
        (STEPS, 8, None, -1, 0.0, False),
        (STEPS, 12, None, -1, 0.0, True),
        (STEPS, 12, None, 12, 0.0, False),
        (STEPS, 18, None, 12, 0.0, False),
        (STEPS, 24, None, 12, 0.0, True),
        (STEPS, 20, LAST, -1, 0.0, False),
        (STEPS, 28, LAST, -1, 0.0, False),
        (STEPS, 30, LAST, -1, 0.0, True),
        (MINUTES, 1, None, -1, 0.0, True),
        (MINUTES, 21, LAST, -1, 1119.0, False),
        (MINUTES, 21, LAST, -1, 1120.0, True),
        (MINUTES, 20, LAST, -1, 9999.0, False),
    ],
)
def test_when_a_checkpoint_is_judged(config, step, last, judged, now, due):
    assert is_due(config, step, last, judged=judged, now=now) is due
