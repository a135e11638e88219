"""The pool of stage 3: contents are kept while they can be, and never handed to the wrong unit."""

from shoal.parallel.zero.pool import Pool


def test_a_unit_that_comes_back_finds_its_contents():
    pool = Pool([10, 10, 20])
    first, is_there = pool.take(0)
    assert not is_there
    pool.let_go(first)
    assert pool.take(0) == (first, True)


def test_another_unit_takes_the_place_and_the_contents_are_lost():
    pool = Pool([10, 10, 20])
    place, _ = pool.take(0)
    pool.let_go(place)
    assert pool.take(1) == (place, False)
    pool.let_go(place)
    assert pool.take(0) == (place, False)
    assert pool.sizes == [10]


def test_a_taken_buffer_is_never_given_away_and_sizes_do_not_mix():
    pool = Pool([10, 10, 20])
    places = [pool.take(unit)[0] for unit in range(3)]
    assert len(set(places)) == 3
    assert pool.sizes == [10, 10, 20]


def test_the_longest_unused_buffer_goes_first():
    pool = Pool([10] * 3)
    first, second = pool.take(0)[0], pool.take(1)[0]
    pool.let_go(second)
    pool.let_go(first)
    assert pool.take(2) == (second, False)
    assert pool.take(0) == (first, True)


def test_after_forgetting_everything_is_gathered_anew():
    pool = Pool([10, 10])
    place, _ = pool.take(0)
    pool.let_go(place)
    pool.forget()
    assert pool.take(0) == (place, False)
