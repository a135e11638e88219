import numpy as np
import pytest

from shoal.core.errors import RequestError
from shoal.data.table import Table, concat_tables, number_column, text_column


def words():
    return Table.of(
        [
            text_column("word", ["a", None, "", "ähm", "bcd"]),
            number_column(
                "count", np.arange(10, dtype=np.int32).reshape(5, 2), np.array([True, True, False, True, True])
            ),
        ]
    )


def rows(table):
    return [
        tuple(
            value.tolist() if isinstance(value, np.ndarray) else value for value in (c.value(i) for c in table.columns)
        )
        for i in range(len(table))
    ]


def test_values_are_what_was_given_and_missing_ones_are_none():
    assert rows(words()) == [("a", [0, 1]), (None, [2, 3]), ("", None), ("ähm", [6, 7]), ("bcd", [8, 9])]


def test_taken_and_sliced_rows_are_those_of_the_whole():
    table = words()
    order = np.array([4, 0, 0, 2, 1])
    assert rows(table.take(order)) == [rows(table)[i] for i in order]
    assert rows(table.slice(1, 4)) == rows(table)[1:4]
    assert rows(table.slice(1, 4).take(np.array([2, 0]))) == [rows(table)[3], rows(table)[1]]
    assert rows(concat_tables([table.slice(0, 2), table.slice(2, 2), table.slice(2, 5)])) == rows(table)


def test_replaced_columns_keep_their_place_and_new_ones_come_last():
    table = words().replace({"word": number_column("word", np.zeros(5)), "more": number_column("more", np.ones(5))})
    assert table.schema.names == ("word", "count", "more")


def test_a_column_that_is_not_there_is_refused_with_the_nearest_name():
    with pytest.raises(RequestError, match=r"no column 'wrod'.*word"):
        words()["wrod"]
