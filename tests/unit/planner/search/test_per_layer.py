"""A split for every layer: dynamic programming against all assignments, and a chain where a mixture wins."""

from dataclasses import replace

import pytest

from shoal.costs.layers import Layer, LayerKind, ModelCosts, Op, OpKind, SavedBytes, TensorSplit
from shoal.planner.pricing.memory import CONTEXT_BYTES
from shoal.planner.search.per_layer import (
    ActivationLayout,
    Half,
    Split,
    choose_splits,
    half_of,
    is_uneven,
    possible_splits,
    redistribute,
)
from support.planner.jobs import all_assignments, job_of, shape_of


def convolution(name: str, *, rows: float = 4096.0, channels: float = 128.0) -> Layer:
    """Few weights and large activations: samples are what to split."""
    return Layer(
        name=name, kind=LayerKind.OTHER, num_pairs=1, pair_bytes=rows * channels * 2,
        ops=(Op(kind=OpKind.MATMUL, rows=rows, inner=9 * channels, outer=channels, cut=TensorSplit.COLUMNS),),
        split_weights=9 * channels**2, output_bytes=rows * channels * 2,
    )  # fmt: skip


def dense(name: str, *, width: float = 16384.0) -> Layer:
    """Many weights and one row: parameters are what to split."""
    return Layer(
        name=name, kind=LayerKind.OTHER, num_pairs=1, pair_bytes=width * 2,
        ops=(Op(kind=OpKind.MATMUL, rows=1, inner=width, outer=width, cut=TensorSplit.COLUMNS),),
        split_weights=width**2, output_bytes=width * 2,
    )  # fmt: skip


def job_for(*layers: Layer, batch: int = 64, cluster: str = "a100:4"):
    return replace(job_of(cluster=cluster, global_batch=batch), chain=ModelCosts(name="mixed", layers=layers))


def first_half(name: str, *, inner: float = 8192.0, outer: float = 16384.0) -> Layer:
    """A dense layer whose columns are cut: what it puts out is shared out by features."""
    return Layer(
        name=name, kind=LayerKind.OTHER,
        ops=(Op(kind=OpKind.MATMUL, rows=1, inner=inner, outer=outer, cut=TensorSplit.COLUMNS),),
        split_weights=inner * outer, kept=SavedBytes(whole=inner * 2, boundary=inner * 2), output_bytes=outer * 2,
    )  # fmt: skip


def between(name: str, *, width: float = 16384.0) -> Layer:
    """Each feature by itself."""
    op = Op(kind=OpKind.MEMORY, num_bytes=4 * width, cut=TensorSplit.ALL)
    return Layer(name=name, kind=LayerKind.OTHER, ops=(op,), output_bytes=width * 2)


def second_half(name: str, *, inner: float = 16384.0, outer: float = 1024.0) -> Layer:
    """A dense layer whose rows are cut: it sums up."""
    return Layer(
        name=name, kind=LayerKind.OTHER, num_pairs=1, pair_bytes=outer * 2,
        ops=(Op(kind=OpKind.MATMUL, rows=1, inner=inner, outer=outer, cut=TensorSplit.ROWS),),
        split_weights=inner * outer, output_bytes=outer * 2,
    )  # fmt: skip


def image(name: str, *, rows: float = 65536.0, height: int = 256) -> Layer:
    """A convolution of a large image, whose rows can be shared out."""
    return replace(convolution(name, rows=rows), num_pairs=0, split_weights=0.0, whole_weights=9 * 128.0**2,
                   ops=(Op(kind=OpKind.MATMUL, rows=rows, inner=9 * 128.0, outer=128.0),),
                   image_rows=height, halo_bytes=2 * height * 128 * 2)  # fmt: skip


CHAINS = {
    "alexnet": (convolution("a"), convolution("b"), dense("c"), dense("d")),
    "hourglass": (dense("a"), convolution("b"), dense("c"), convolution("d", rows=65536), dense("e", width=1024)),
    "alike": (dense("a"), dense("b"), dense("c")),
    # The two halves of a pair are links of their own, as in a traced module without blocks.
    "halves": (
        replace(convolution("a", rows=65536), output_bytes=16384.0),
        first_half("b"),
        between("c"),
        second_half("d"),
    ),
    "images": (image("a"), image("b", rows=16384, height=128), dense("c", width=1024)),
    # What the first layer would rather have is not worth the way from there to the second.
    "reluctant": (replace(dense("a", width=4096), output_bytes=5e7), convolution("b", rows=65536), dense("c")),
}


@pytest.mark.parametrize("name", CHAINS)
@pytest.mark.parametrize("cluster", ["a100:2", "a100-80gb-pcie:2", "x86-server:2x1"])
def test_it_equals_the_best_of_all_assignments(name, cluster):
    job = job_for(*CHAINS[name], cluster=cluster)
    assignments = list(all_assignments(job))
    found = choose_splits(job)
    assert found.seconds == pytest.approx(min(seconds for _, seconds, _ in assignments))
    uniform = min(seconds for splits, seconds, _ in assignments if len(set(splits)) == 1)
    assert found.uniform_seconds == pytest.approx(uniform) and found.seconds <= uniform * (1 + 1e-12)
    assert any(
        splits == list(found.splits) and seconds == pytest.approx(found.seconds) for splits, seconds, _ in assignments
    )


@pytest.mark.parametrize("share", [0.999, 0.9, 0.7, 0.6])
def test_it_equals_the_best_of_all_assignments_that_fit(share):
    """Before, memory was not asked: the fastest split was told though no device could hold it."""
    layers = [
        dense("a", width=2048),
        dense("b", width=4096),
        convolution("c", rows=64, channels=512),
        dense("d", width=3072),
    ]
    job = job_for(*layers, batch=8192, cluster="a100-80gb-pcie:2")
    free = choose_splits(job)
    limit = share * free.num_bytes
    device = replace(job.cluster.device, memory_bytes=CONTEXT_BYTES + limit)
    found = choose_splits(replace(job, cluster=replace(job.cluster, device=device)))
    best = min(seconds for _, seconds, held in all_assignments(job) if held <= limit)
    assert found.seconds == pytest.approx(best) and best > free.seconds and found.num_bytes <= limit


def test_unlike_layers_want_unlike_splits():
    """One weird trick (Krizhevsky 2014, arXiv:1404.5997): samples for convolutions, parameters for dense layers."""
    found = choose_splits(job_for(*CHAINS["alexnet"]))
    assert [str(split) for split in found.splits] == ["sample 4", "sample 4", "parameter 4", "parameter 4"]
    assert found.seconds < 0.9 * found.uniform_seconds
    assert [(first, end) for _, first, end in found.runs()] == [(0, 2), (2, 4)]


def test_positions_are_split_where_there_are_keys_and_values():
    job = job_of(shape_of(sequence=32768), cluster="h100:8", global_batch=1)
    block, head = job.chain.layers[1], job.chain.layers[-1]
    assert Split(1, 1, 8) in possible_splits(job, block, 8) and Split(1, 1, 8) not in possible_splits(job, head, 8)
    assert Split(1, 8) in possible_splits(job, block, 8) and str(Split(1, 2, 4)) == "parameter 2 x attribute 4"


def test_heads_and_key_value_heads_must_be_divided():
    job = job_of(shape_of(kv_heads=2), cluster="h100:8", global_batch=64)
    assert {split.parameters for split in possible_splits(job, job.chain.layers[1], 8)} == {1, 2}


def test_the_halves_of_a_pair_are_split_together():
    """Before, only the half with the sum could be split by parameters, and the half with most of the weights could not."""
    job = job_for(*CHAINS["halves"], cluster="a100-80gb-pcie:4")
    assert [half_of(layer) for layer in job.chain.layers] == [Half.BOTH, Half.FIRST, Half.BETWEEN, Half.SECOND]
    found = choose_splits(job)
    assert [str(split) for split in found.splits] == ["sample 4", "parameter 4", "parameter 4", "parameter 4"]
    assert found.seconds < 0.9 * found.uniform_seconds


def test_shards_are_gathered_where_the_next_layer_wants_them_whole():
    job = job_for(*CHAINS["halves"])
    split = Split(1, 4)
    whole, shards = ActivationLayout(split, False), ActivationLayout(split, True)
    assert redistribute(job, 1e6, shards, shards) == 0 == redistribute(job, 1e6, whole, whole)
    assert redistribute(job, 1e6, shards, whole) == redistribute(job, 1e6, whole, shards) > 0
    assert redistribute(job, 1e6, whole, ActivationLayout(Split(4, 1), False)) > 0


def test_rows_of_an_image_are_an_attribute():
    """One large image cannot be shared out by samples; its rows can."""
    job = job_for(*CHAINS["images"], batch=1, cluster="h100:4")
    assert Split(1, 1, 4) in possible_splits(job, job.chain.layers[0], 4)
    assert not any(split.positions > 1 for split in possible_splits(job, job.chain.layers[2], 4))
    found = choose_splits(job)
    assert str(found.splits[0]) == "attribute 4" and found.seconds < found.uniform_seconds
    assert possible_splits(job, replace(job.chain.layers[0], image_rows=27), 4)[-1].positions == 1


def test_a_layer_may_be_left_to_a_part_of_the_devices():
    """The operator dim: where talking costs more than computing alone, the others are idle."""
    job = job_for(dense("a", width=64), dense("b", width=64), batch=4, cluster="x86-server:4x1")
    found = choose_splits(job)
    assert {split.num_devices for split in found.splits} == {1}
    assert str(found.splits[0]) == "operator on 1 of 4 devices, one device"


def test_two_kinds_of_layer_in_turn_are_uneven():
    """Before, more than half of the layers had to be of different sizes, so a hybrid was never looked at."""
    block = job_of().chain.layers[1]
    other = replace(block, split_weights=block.split_weights * 2)
    assert is_uneven(ModelCosts(name="hybrid", layers=(block, other) * 12)) and not is_uneven(job_of().chain)


def test_where_nothing_fits_there_is_no_answer():
    job = job_for(*CHAINS["alexnet"])
    device = replace(job.cluster.device, memory_bytes=CONTEXT_BYTES + 1e6)
    assert choose_splits(replace(job, cluster=replace(job.cluster, device=device))) is None
