import pytest

from shoal.core.errors import RequestError
from shoal.trainer.online.follow import follow_overrides

STORE = {"data": {"source": "store", "path": "s"}, "train": {"epochs": 2}}


def test_a_recipe_loses_its_end_and_gets_a_clock():
    assert follow_overrides(STORE) == [
        "train.epochs=",
        "train.steps=1000000000",
        "data.follow=true",
        "publish.every_minutes=5",
    ]
    changes = follow_overrides({**STORE, "train": {"steps": 3}, "publish": {"every_steps": 7}})
    assert changes == ["train.steps=1000000000", "data.follow=true"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"data": {"source": "stdlib"}}, "'stdlib'.*shoal data build"),
        ({"data": {"build": "a:b"}}, "shoal data build"),
        ({"optim": {"schedule": "cosine"}}, "cosine goes by the length of the run"),
    ],
)
def test_what_cannot_go_on_for_ever_is_refused_by_name(change, message):
    with pytest.raises(RequestError, match=message):
        follow_overrides({**STORE, **change})
