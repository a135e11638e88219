"""Graphs of gossip: weights that keep the mean, drawn alike everywhere, and files that are refused with the reason."""

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.core.errors import RequestError
from shoal.replicas.graphs import mixing

SQUARE = [[0, 1], [1, 2], [2, 3], [3, 0]]


def matrix(graph, count, number=0, *, seed=1, is_directed=False):
    return np.array(mixing(str(graph), count, number, seed=seed, is_directed=is_directed))


@given(st.sampled_from(("ring", "random", "complete")), st.integers(2, 9), st.integers(0, 20), st.integers(0, 5))
def test_gossip_keeps_the_mean(graph, count, number, seed):
    found = matrix(graph, count, number, seed=seed)
    assert np.allclose(found.sum(0), 1, atol=1e-15) and np.allclose(found.sum(1), 1, atol=1e-15) and (found >= 0).all()
    assert (found.diagonal() > 0).all()


@given(st.sampled_from(("ring", "random", "exponential")), st.integers(2, 9), st.integers(0, 20), st.integers(0, 5))
def test_push_sum_loses_nothing(graph, count, number, seed):
    found = matrix(graph, count, number, seed=seed, is_directed=True)
    assert np.allclose(found.sum(0), 1, atol=1e-15) and (found.diagonal() > 0).all()


@pytest.mark.parametrize("count", [2, 4, 8, 16])
def test_the_one_peer_exponential_graph_is_the_exact_mean_after_log_rounds(count):
    rounds = count.bit_length() - 1
    product = np.eye(count)
    for number in range(rounds):
        product = matrix("exponential", count, number) @ product
    assert (product == 1 / count).all()


def test_random_pairs_change_from_round_to_round_and_push_sum_is_not_always_balanced():
    drawn = {matrix("random", 6, number).tobytes() for number in range(8)}
    assert len(drawn) > 4
    rows = [matrix("random", 4, number, is_directed=True).sum(1) for number in range(8)]
    assert any(not np.allclose(row, 1) for row in rows)


@pytest.mark.parametrize("is_directed", [False, True])
def test_a_file_gives_a_graph(tmp_path, is_directed):
    path = tmp_path / "graph.json"
    path.write_text(json.dumps({"islands": 4, "edges": [*SQUARE, [0, 2]]}))
    found = matrix(path, 4, is_directed=is_directed)
    assert np.allclose(found.sum(0), 1) and (is_directed or np.allclose(found.sum(1), 1))
    assert found[2, 0] > 0 and (found[1, 3] == 0) and (found[0, 2] == 0) == is_directed
    if not is_directed:
        assert found[0, 1] == 1 / 4 and found[0, 3] == 1 / 4 and found[0, 0] == 1 / 4 and found[1, 1] == 1 / 2


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (json.dumps({"islands": 3, "edges": SQUARE[:2]}), "is of 3 islands, and the plan has 4"),
        (json.dumps({"islands": 4, "edges": SQUARE[:2]}), "not connected: island(s) 3"),
        (json.dumps({"islands": 4, "edges": [[0, 4]]}), "edge [0, 4] is not between"),
        (json.dumps({"islands": 4, "edges": [[1, 1]]}), "edge [1, 1] is not between"),
        ("[1]", "must be of the form"),
        ("{", "it is no JSON"),
        (json.dumps({"islands": 4, "edge": SQUARE}), "has a key 'edge'; did you mean 'edges'?"),
        (json.dumps({"islands": 4}), "it has no 'edges'; add it"),
        (json.dumps({"islands": "4", "edges": SQUARE}), 'its islands are "4"; give their number'),
        (json.dumps({"islands": 4, "edges": 3}), "its edges are 3; give a list of pairs"),
        (
            json.dumps({"islands": 4, "edges": [[0, 1], [1, 2, 3]]}),
            "it has the edge [1, 2, 3]; give the numbers of two islands",
        ),
        (json.dumps({"islands": 4, "edges": [[0, "1"]]}), 'it has the edge [0, "1"]; give'),
    ],
)
def test_a_file_that_is_no_graph_of_this_run_is_refused(tmp_path, text, words):
    path = tmp_path / "graph.json"
    path.write_text(text)
    with pytest.raises(RequestError) as refusal:
        matrix(path, 4)
    assert words in str(refusal.value)
    with pytest.raises(RequestError, match="cannot be read"):
        matrix(tmp_path / "none.json", 4)


def test_a_one_way_street_is_no_graph_of_push_sum(tmp_path):
    path = tmp_path / "graph.json"
    path.write_text(json.dumps({"islands": 3, "edges": [[0, 1], [1, 2]]}))
    with pytest.raises(RequestError, match="do not reach island 0"):
        matrix(path, 3, is_directed=True)
