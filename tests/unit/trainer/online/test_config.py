import pytest

from shoal.core.errors import RequestError
from shoal.core.plan import Plan
from shoal.trainer.online.config import PublishConfig, check_publish

STEPS = PublishConfig(every_steps=10)


@pytest.mark.parametrize(
    ("config", "plan", "validation", "message"),
    [
        (STEPS, "ps=1 workers=2 update=async", 100, "it is checkpoints that are published, and checkpoint.every is 0"),
        (PublishConfig(every_minutes=1), "pp=2 schedule=pipedream", 100, "set publish.every_steps"),
        (STEPS, "dp=2", 0, "the validation split has 0; set data.validation"),
    ],
)
def test_what_cannot_publish_is_refused_with_the_fix(config, plan, validation, message):
    with pytest.raises(RequestError, match=message):
        check_publish(config, Plan.parse(plan), num_validation=validation, saves_every=0)
    check_publish(PublishConfig(), Plan.parse(plan), num_validation=validation, saves_every=0)


def test_one_clock_says_when():
    with pytest.raises(ValueError, match="both say when to publish"):
        PublishConfig(every_steps=1, every_minutes=1)


def test_checkpoints_of_servers_are_published():
    check_publish(STEPS, Plan.parse("ps=1 workers=2 update=async"), num_validation=10, saves_every=5)
