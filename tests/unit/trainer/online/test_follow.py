import numpy as np
import pytest

from shoal.core.errors import RequestError
from shoal.core.plan import Plan
from shoal.data.config import StoreConfig
from shoal.data.store.folder import open_folder
from shoal.data.store.selection import RowSelection
from shoal.data.store.splits import Split, write_split
from shoal.data.store.writer import build_store
from shoal.data.table import Table, number_column
from shoal.trainer.online.follow import check_follow, follow_overrides, follow_warnings

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


def test_lbfgs_takes_up_no_versions():
    data = StoreConfig(path="clicks", follow=True)
    with pytest.raises(RequestError, match=r"no newer version of a store is taken up.*such as update=async"):
        check_follow(data, Plan.parse("ps=1 workers=2 update=lbfgs"))
    check_follow(data, Plan.parse("ps=1 workers=2 update=async"))
    check_follow(data, Plan.parse("dp=2"))
    check_follow(data.model_copy(update={"follow": False}), Plan.parse("ps=1 workers=2 update=lbfgs"))


def test_a_split_by_time_that_new_rows_are_trained_behind_is_told(tmp_path):
    store = str(tmp_path / "store")
    build_store([Table.of([number_column("x", np.arange(10))])], store)
    for name in ("time", "user"):
        parts = {"train": RowSelection.of_range(range(8)), "test": RowSelection.of_range(range(8, 10))}
        write_split(open_folder(store), Split(name=name, version=1, num_rows=10, parts=parts, about={"by": name}))
    data = StoreConfig(path=store, split="time", follow=True)
    (told,) = follow_warnings(data)
    assert "'time' was cut by time" in told and "trained on" in told
    for change in ({"split": "user"}, {"follow": False}, {"split": None}):
        assert follow_warnings(data.model_copy(update=change)) == ()
