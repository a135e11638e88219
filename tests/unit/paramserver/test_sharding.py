"""Shards cover a model exactly once, are even, and begin where an optimizer kernel and a checkpoint allow it."""

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.core.errors import RequestError
from shoal.optim import flat
from shoal.paramserver import sharding as cutting
from shoal.paramserver.sharding import (
    Shard,
    TensorSpec,
    check_cover,
    cut_model,
    digest_model,
)

shapes = st.lists(st.integers(0, 40), max_size=3).map(tuple)
models = st.dictionaries(st.text("abc.", min_size=1, max_size=4), shapes, min_size=1, max_size=6).map(
    lambda found: {name: TensorSpec(shape, "float32") for name, shape in found.items()}
)


def model_of(**sizes) -> dict[str, TensorSpec]:
    return {name: TensorSpec(shape, "float32") for name, shape in sizes.items()}


def test_the_multiple_is_that_of_the_optimizers():
    assert cutting.CUT_MULTIPLE == flat.CUT_MULTIPLE


@given(model=models, num_shards=st.integers(1, 5), data=st.data())
def test_every_map_covers_its_model_once_at_legal_places(model, num_shards, data):
    hot = data.draw(st.frozensets(st.sampled_from(sorted(model)), max_size=2))
    try:
        found = cut_model(model, num_shards, hot=hot)
    except RequestError:
        return
    check_cover(found, model)
    for shard in found.shards:
        assert shard.pieces
        for piece in shard.pieces:
            row = math.prod(model[piece.name].shape[1:])
            assert piece.start % row == 0 and piece.start % 16 == 0
            assert piece.name not in hot or shard.number == 0


@given(model=models, num_shards=st.integers(1, 5))
def test_every_shard_is_within_a_cuttable_row_of_its_even_share(model, num_shards):
    try:
        found = cut_model(model, num_shards)
    except RequestError:
        return
    unit = max(min(spec.numel, math.lcm(max(1, math.prod(spec.shape[1:])), 16)) for spec in model.values())
    size = sum(spec.numel for spec in model.values())
    if size < num_shards * unit:
        return  # then an even share is smaller than what cannot be cut
    for shard in found.shards:
        assert abs(shard.numel - size / num_shards) <= unit


def test_a_transformers_shards_differ_by_less_than_a_hundredth():
    model = model_of(
        embed=(5000, 64), **{f"block{i}": (256, 64) for i in range(8)}, **{f"bias{i}": (64,) for i in range(8)}
    )
    for num_shards in (2, 3, 4, 7):
        sizes = [shard.numel for shard in cut_model(model, num_shards).shards]
        assert max(sizes) - min(sizes) <= 0.01 * sum(sizes) / num_shards + 64


def test_hot_parameters_lie_on_the_first_shard_and_the_rest_is_even():
    model = model_of(a=(100, 16), hot=(100, 16), z=(100, 16))
    found = cut_model(model, 3, hot=frozenset({"hot"}))
    assert [piece.name for piece in found.shards[0].pieces] == ["hot"]
    large = cut_model(model_of(a=(10, 16), hot=(100, 16), z=(10, 16)), 3, hot=frozenset({"hot"}))
    assert [[piece.name for piece in shard.pieces] for shard in large.shards] == [["hot"], ["a"], ["z"]]


def test_every_shard_gets_something_beside_a_row_that_cannot_be_cut():
    found = cut_model(model_of(big=(1, 100000), a=(16,), b=(16,)), 3)
    assert [[piece.name for piece in shard.pieces] for shard in found.shards] == [["a"], ["b"], ["big"]]


@pytest.mark.parametrize(
    ("model", "num_shards", "settings", "words"),
    [
        (model_of(a=(3, 5)), 2, {}, "2 shards are asked for, and the model can be cut into 1; set ps=1 or less"),
        (model_of(a=(64,)), 2, {"optimizer": "lamb"}, "can be cut into 1, because lamb needs whole tensors"),
        (model_of(a=(64,), b=(3,)), 3, {"hot": frozenset("a")}, "cut into 2 with the hot parameters together"),
        (model_of(embed=(64,)), 1, {"hot": frozenset({"embad"})}, "did you mean 'embed'?"),
        (model_of(a=(0,)), 1, {}, "no trained parameter"),
        (
            {"a": TensorSpec((2,), "float32"), "b": TensorSpec((2,), "float64")},
            1,
            {},
            "this model has 2: 'a' in float32, 'b' in",
        ),
        ({"a": TensorSpec((2,), "float16")}, 1, {}, "'a' is float16"),
    ],
)
def test_a_model_that_cannot_be_cut_says_why(model, num_shards, settings, words):
    with pytest.raises(RequestError) as caught:
        cut_model(model, num_shards, **settings)
    assert words in str(caught.value)


def test_a_map_that_does_not_cover_the_model_is_refused_by_name():
    model = model_of(a=(64, 2), b=(32,))
    found = cut_model(model, 2)
    first, second = found.shards

    def refused(changed, against=model) -> str:
        with pytest.raises(RequestError) as caught:
            check_cover(changed, against)
        return str(caught.value)

    assert "1 parameters are on no shard ('c')" in refused(found, model | model_of(c=(3,)))
    assert "1 are not in the model ('b')" in refused(found, {"a": model["a"]})
    (piece,) = first.pieces
    short = replace(first, pieces=(replace(piece, stop=piece.stop - 2),))
    assert "elements 78 to 80 are on no shard" in refused(replace(found, shards=(short, second)))
    twice = Shard(number=2, pieces=first.pieces)
    assert "held twice" in refused(replace(found, shards=(first, second, twice)))
    assert "next free one" in refused(
        replace(found, shards=(replace(first, pieces=(replace(piece, offset=3),)), second))
    )
    assert "shard 1 in place 0" in refused(replace(found, shards=(second, first)))
    turned = model_of(a=(2, 64), b=(32,))
    assert digest_model(model) in refused(found, turned) and digest_model(turned) in refused(found, turned)


def test_norm_optimizers_need_whole_tensors():
    model = model_of(a=(640,), b=(32,))
    assert cut_model(model, 2, optimizer="lars").cut_names == ()
    assert cut_model(model, 2).cut_names == ("a",)
