"""Scripts of how many replicas are present."""

import pytest

from shoal.core.errors import RequestError
from shoal.verify.elastic.script import parse_script


def test_replicas_die_one_by_one_and_come_together():
    script = parse_script("4,3,1,4", dp=4)
    assert [death.present for death in script.deaths] == [4, 3, 2]
    assert len({(death.step, death.point) for death in script.deaths}) == 3, "each in another step, at another point"
    assert [count for _, count in script.arrivals] == [4]
    assert script.num_early_deaths == 3 and script.steps > script.arrivals[0][0]
    assert all(death.place < death.present for death in script.deaths)


@pytest.mark.parametrize("text", ["4,5", "0", "4", "4,0", "3,2", "4,x", "", "4,,3", "4,-1"])
def test_what_is_no_script_is_refused(text):
    with pytest.raises(RequestError, match="beginning with the plan's dp=4 and none above it, such as 4,3"):
        parse_script(text, dp=4)
