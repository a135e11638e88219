"""Cuts of tables, their proofs, and what cannot be cut."""

import numpy as np
import pytest

from shoal.core.config import validate
from shoal.core.errors import RequestError, RunError
from shoal.data.partition.certificate import certify
from shoal.data.partition.config import CutConfig
from shoal.data.partition.cut import cut_table
from shoal.data.partition.keys import add_digests, digest_rows, group_rows
from shoal.data.table import Table, number_column, text_column

ROWS = 200


@pytest.fixture
def table():
    draws = np.random.default_rng(0)
    return Table.of(
        [
            number_column("when", np.arange(ROWS).astype("<M8[D]")),
            number_column("user", draws.integers(0, 30, ROWS)),
            text_column("label", [f"class {number}" for number in draws.integers(0, 3, ROWS)]),
        ]
    )


def cut(table, **settings):
    return cut_table(table, CutConfig(**settings), validation=0.1, test=0.1, where="a.csv")


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"by": "hash"},
        {"by": "hash", "key": "user"},
        {"by": "time", "key": "when", "gap": "3d"},
        {"by": "user", "key": "user"},
        {"by": "label", "key": "label"},
    ],
    ids=str,
)
def test_every_row_is_on_one_side(table, settings):
    found = cut(table, **settings)
    proof = found.certificate
    assert sum(side.rows for side in proof.sides) + proof.left_out == ROWS
    assert add_digests([*(side.digest for side in proof.sides), proof.left_out_digest]) == digest_rows(np.arange(ROWS))
    assert any("every row once" in line for line in proof.lines())
    again = cut(table, **settings)
    assert all((again.rows[name] == rows).all() for name, rows in found.rows.items())


def test_a_gap_of_days_is_kept(table):
    rows = cut(table, by="time", key="when", gap="3d").rows
    when = table["when"].values
    assert when[rows["train"]].max() + np.timedelta64(3, "D") <= when[rows["validation"]].min()


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"by": "user", "key": "usr"}, "no column 'usr' to cut by; did you mean 'user'"),
        ({"by": "time", "key": "label"}, 'is text, and by = "time" needs times'),
        ({"by": "time", "key": "when", "gap": "900d"}, "split is empty"),
        ({"by": "time", "key": "user"}, r'row \d+: user goes back from \d+ to \d+ .*backwards = "sort"'),
    ],
)
def test_what_cannot_be_cut(table, settings, said):
    with pytest.raises(RequestError, match=said):
        cut(table, **settings)


def test_clocks_that_go_back_may_be_sorted(table):
    rows = cut(table, by="time", key="user", backwards="sort").rows
    assert table["user"].values[rows["train"]].max() < table["user"].values[rows["test"]].min()


def test_a_missing_key_is_named():
    column = number_column("user", np.arange(9), np.arange(9) != 4)
    with pytest.raises(RequestError, match="row 5 has no 'user'"):
        cut(Table.of([column]), by="user", key="user")


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"by": "user"}, "needs key"),
        ({"key": "x"}, "looks at no column"),
        ({"by": "time", "key": "x", "gap": "3 fortnights"}, "is no duration"),
        ({"by": "user", "key": "x", "gap": 3}, "gap is for by"),
    ],
)
def test_wrong_keys(settings, said):
    with pytest.raises(RequestError, match=said):
        validate(CutConfig, settings, origin="a.toml")


def test_a_cut_that_leaks_is_not_certified(table):
    groups = group_rows(table["user"], where="a.csv")
    good = cut(table, by="user", key="user").rows
    rest = np.zeros(0, np.int64)
    told = {"by": "user", "total": ROWS, "shares": (0.8, 0.1, 0.1), "groups": groups}
    certify(good, rest, **told)
    moved = good | {"train": good["train"][1:], "test": np.append(good["test"], good["train"][0])}
    with pytest.raises(RunError, match="on two sides"):
        certify(moved, rest, **told)
    with pytest.raises(RunError, match="on 0 sides"):
        certify(good | {"train": good["train"][1:]}, rest, **told)
    with pytest.raises(RunError, match="on 2 sides"):
        certify(good | {"test": np.append(good["test"], good["train"][0])}, rest, **told)
    late = {"train": np.arange(100, 200), "validation": rest, "test": np.arange(100)}
    with pytest.raises(RunError, match="must be earlier"):
        certify(late, rest, by="time", total=ROWS, shares=(0.5, 0, 0.5), times=table["when"].values)
