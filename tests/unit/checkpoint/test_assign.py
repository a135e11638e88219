"""Which rank writes which tensor."""

from hypothesis import given
from hypothesis import strategies as st

from shoal.checkpoint.assign import assign

SIZES = st.dictionaries(st.text(min_size=1, max_size=5), st.integers(0, 10**9), max_size=60)


@given(SIZES, st.integers(1, 9))
def test_every_tensor_has_one_rank_and_the_load_is_balanced(sizes, num_ranks):
    owners = assign(sizes, num_ranks)
    assert owners.keys() == sizes.keys() and set(owners.values()) <= set(range(num_ranks))
    loads = [sum(size for name, size in sizes.items() if owners[name] == rank) for rank in range(num_ranks)]
    # No rank is ahead of another by more than its last, smallest tensor.
    assert max(loads) - min(loads) <= max(sizes.values(), default=0)
    fair = max(sum(sizes.values()) / num_ranks, max(sizes.values(), default=0))
    assert max(loads) <= 2 * fair


@given(SIZES, st.integers(1, 9), st.randoms())
def test_the_order_of_the_mapping_does_not_matter(sizes, num_ranks, random):
    names = list(sizes)
    random.shuffle(names)
    assert assign({name: sizes[name] for name in names}, num_ranks) == assign(sizes, num_ranks)


def test_an_example():
    assert assign({"a": 5, "b": 4, "c": 3, "d": 3}, 2) == {"a": 0, "b": 1, "c": 1, "d": 0}
