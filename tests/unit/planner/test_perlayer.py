"""A split for every layer: dynamic programming against all assignments, and a chain where a mixture wins."""

import itertools
from dataclasses import replace

import pytest

from planner_cases import job_of, shape_of
from shoal.costs.chain import Chain, Cut, Layer, LayerKind, Op, OpKind
from shoal.planner.perlayer import Split, _seconds, choose_splits, possible_splits, redistribute


def convolution(name: str, *, rows: float = 4096.0, channels: float = 128.0) -> Layer:
    """Few weights and large activations: samples are what to split."""
    return Layer(
        name=name, kind=LayerKind.OTHER, num_pairs=1, pair_bytes=rows * channels * 2,
        ops=(Op(kind=OpKind.MATMUL, rows=rows, inner=9 * channels, outer=channels, cut=Cut.COLUMNS),),
        split_weights=9 * channels**2, output_bytes=rows * channels * 2,
    )  # fmt: skip


def dense(name: str, *, width: float = 16384.0) -> Layer:
    """Many weights and one row: parameters are what to split."""
    return Layer(
        name=name, kind=LayerKind.OTHER, num_pairs=1, pair_bytes=width * 2,
        ops=(Op(kind=OpKind.MATMUL, rows=1, inner=width, outer=width, cut=Cut.COLUMNS),),
        split_weights=width**2, output_bytes=width * 2,
    )  # fmt: skip


def job_for(*layers: Layer, batch: int = 64, cluster: str = "a100:4"):
    return replace(job_of(cluster=cluster, global_batch=batch), chain=Chain(name="mixed", layers=layers))


def seconds_of(job, splits) -> float:
    layers = job.chain.layers
    own = sum(_seconds(job, layer, split) for layer, split in zip(layers, splits, strict=True))
    moves = zip(layers, itertools.pairwise(splits), strict=False)
    return own + sum(redistribute(job, layer.output_bytes, old, new) for layer, (old, new) in moves)


CHAINS = {
    "alexnet": (convolution("a"), convolution("b"), dense("c"), dense("d")),
    "hourglass": (dense("a"), convolution("b"), dense("c"), convolution("d", rows=65536), dense("e", width=1024)),
    "alike": (dense("a"), dense("b"), dense("c")),
    # What the first layer would rather have is not worth the way from there to the second.
    "reluctant": (replace(dense("a", width=4096), output_bytes=5e7), convolution("b", rows=65536), dense("c")),
}


@pytest.mark.parametrize("name", CHAINS)
@pytest.mark.parametrize("cluster", ["a100:4", "a100-80gb-pcie:4", "x86-server:4x2"])
def test_it_equals_the_best_of_all_assignments(name, cluster):
    job = job_for(*CHAINS[name], cluster=cluster)
    options = [possible_splits(job, layer, job.cluster.num_devices) for layer in job.chain.layers]
    assignments = list(itertools.product(*options))
    best = min(seconds_of(job, splits) for splits in assignments)
    found = choose_splits(job)
    assert found.seconds == pytest.approx(best) and seconds_of(job, found.splits) == pytest.approx(best)
    uniform = min(seconds_of(job, splits) for splits in assignments if len(set(splits)) == 1)
    assert found.uniform_seconds == pytest.approx(uniform) and found.seconds <= uniform * (1 + 1e-12)


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


def test_where_no_split_is_possible_there_is_no_answer():
    """Four samples do not share out eight devices, and the output layer has no pair to split."""
    assert choose_splits(job_of(cluster="h100:8", global_batch=4)) is None
    assert choose_splits(job_of(cluster="h100:8", global_batch=8)) is not None
