"""The list of runs: filtered, ordered, with what has no value last; and what a hostile name becomes."""

import pytest

from shoal.core.errors import RequestError
from shoal.dashboard.terminal.comparing import compare, lines_of
from shoal.dashboard.terminal.listing import COLUMNS, cells_of, choose_rows, list_folder
from support.dashboard.synthetic import make_run

NOW = 1000.0


def row(name: str, **changed: object) -> dict:
    empty = dict.fromkeys(
        (
            "status",
            "plan",
            "step",
            "total_steps",
            "loss",
            "validation_loss",
            "tokens_per_s",
            "step_seconds",
            "memory_bytes",
        )
    )
    return {"name": name, "kind": "training", "hash": None, "updated": 500.0, "started": None, **empty, **changed}


ROWS = [
    row("a", loss=2.0, status="failed", updated=900.0),
    row("b", loss=None, status="completed", plan="pp=2", updated=100.0),
    row("c", loss=1.0, status="completed", hash="abcdef", updated=None),
]


def names(**asked: object) -> str:
    return "".join(
        one["name"] for one in choose_rows(ROWS, **{"filter_text": None, "sort": "age", "top": None, **asked})
    )


def test_rows_are_ordered_and_what_has_no_value_is_last():
    assert names(sort="loss") == "cab" and names(sort="-loss") == "acb"
    assert names(sort="age") == "abc" and names(sort="-age") == "bac", "the youngest first"
    assert names(sort="loss", top=1) == "c"


def test_a_filter_looks_in_all_or_in_one_field():
    assert names(filter_text="FAILED") == "a" and names(filter_text="pp=2") == "b" and names(filter_text="abcd") == "c"
    assert names(filter_text="plan=pp") == "b" and names(filter_text="status=completed") == "bc"
    assert names(filter_text="name=pp") == ""


def test_a_misspelt_column_gets_the_nearest():
    with pytest.raises(RequestError, match="did you mean 'loss'"):
        names(sort="los")


def test_cells_are_as_many_as_columns_and_plain():
    for one in (*ROWS, row("\x1b[2J<b>", plan="a\nb", status="x\x07")):
        cells = cells_of(one, NOW)
        assert len(cells) == len(COLUMNS) and all(cell.isprintable() for cell in cells)


def test_two_runs_are_compared_to_the_step_at_which_they_part(tmp_path):
    first = make_run(tmp_path / "first", ranks=1, steps=50)
    second = make_run(tmp_path / "second", ranks=1, steps=40, spike_at=17, more={"tp": 2})
    (second / "recipe.toml").write_text('plan = "dp=2"\n[train]\nseed = 2\n')
    found = compare(first, second)
    lines = list(lines_of(found))
    losses = [6.0 / 17**0.5, 1000.0]
    assert found["first_difference"] == {"step": 17, "what": "loss", "values": pytest.approx(losses)}
    assert any(line.startswith("first difference: loss of step 17: ") for line in lines)
    assert [line.split() for line in lines if line.startswith("  train.seed")] == [["train.seed", "1", "|", "2"]]
    assert [line.split() for line in lines if line.startswith("  tp ")] == [["tp", "1", "|", "2"]]
    alike = list(lines_of(compare(first, make_run(tmp_path / "third", ranks=1, steps=30))))
    assert "no difference in the 30 steps that both have" in alike


def test_links_out_of_the_folder_are_named_and_not_read(tmp_path):
    make_run(tmp_path / "outside", steps=3)
    make_run(tmp_path / "runs" / "inside", steps=3)
    (tmp_path / "runs" / "link").symlink_to(tmp_path / "outside")
    found = list_folder(tmp_path / "runs")
    assert [one["name"] for one in found["runs"]] == ["inside"]
    assert [one["name"] for one in found["skipped"]] == ["link"]
    with pytest.raises(RequestError, match="is not there"):
        list_folder(tmp_path / "missing")
