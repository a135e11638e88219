import pytest

from shoal.core.errors import RequestError
from shoal.core.plan import Plan
from shoal.trainer.online.config import PublishConfig, check_publish

STEPS = PublishConfig(every_steps=10)


@pytest.mark.parametrize(
    ("config", "plan", "validation", "message"),
    [
        (STEPS, "ps=1 workers=2 update=async", 100, "parameter servers have not.*newest whole checkpoint"),
        (PublishConfig(every_minutes=1), "pp=2 schedule=pipedream", 100, "set publish.every_steps"),
        (STEPS, "dp=2", 0, "the validation split has 0; set data.validation"),
    ],
)
def test_what_cannot_publish_is_refused_with_the_fix(config, plan, validation, message):
    with pytest.raises(RequestError, match=message):
        check_publish(config, Plan.parse(plan), num_validation=validation)
    check_publish(PublishConfig(), Plan.parse(plan), num_validation=validation)


def test_one_clock_says_when():
    with pytest.raises(ValueError, match="both say when to publish"):
        PublishConfig(every_steps=1, every_minutes=1)
