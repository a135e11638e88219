"""Jobs for tests of the planner: transformers by their numbers on clusters by their names, with constants that are round."""

import itertools
from collections.abc import Iterator
from dataclasses import replace

from shoal.costs.transformer import TransformerShape, transformer_costs
from shoal.planner.hardware.presets import build_cluster
from shoal.planner.hardware.software import SOFTWARE, Constants, Stack
from shoal.planner.pricing.cost import StepParts
from shoal.planner.pricing.job import Job
from shoal.planner.search.per_layer import ActivationLayout, Split, price_splits, redistribute

PLAIN = TransformerShape(
    layers=8, hidden=1024, heads=16, vocab=51200, sequence=1024, fused_attention=True, dropout=False, tied=False
)
ROUND = Constants(matmul=0.5, memory=0.5, launch=1e-9, link=0.5, network=0.5, sync=1e-12)
"""Constants that are not fitted: what is tested is what is made of them."""


def shape_of(**numbers: object) -> TransformerShape:
    """The plain shape with other numbers."""
    return replace(PLAIN, **numbers)


def job_of(
    shape: TransformerShape = PLAIN,
    *,
    cluster: str = "a100-80gb:2x8",
    global_batch: int = 64,
    software: str = "megatron",
    constants: Constants = ROUND,
    **rest: object,
) -> Job:
    """A job of a shape."""
    return Job(
        chain=transformer_costs(shape),
        cluster=build_cluster(cluster),
        stack=Stack(software=SOFTWARE[software], constants=constants, is_fitted=True),
        global_batch=global_batch,
        **rest,
    )


def whole(parts: StepParts) -> float:
    return sum(stage.forward + stage.backward for stage in parts.stages)


def all_assignments(job: Job) -> Iterator[tuple[list[Split], float, float]]:
    """Every assignment of ways to layers: its splits, seconds and bytes."""
    layers = job.chain.layers
    known: dict[tuple[float, ActivationLayout, ActivationLayout], float] = {}

    def move(num_bytes: float, old: ActivationLayout, new: ActivationLayout) -> float:
        if (num_bytes, old, new) not in known:
            known[num_bytes, old, new] = redistribute(job, num_bytes, old, new)
        return known[num_bytes, old, new]

    for ways in itertools.product(*(price_splits(job, layer, job.cluster.num_devices) for layer in layers)):
        seconds = sum(way.seconds for way in ways)
        for layer, (old, new) in zip(layers, itertools.pairwise(ways), strict=False):
            old_lying, new_lying = (
                ActivationLayout(old.split, old.gives_shards),
                ActivationLayout(new.split, new.takes_shards),
            )
            seconds += move(layer.output_bytes, old_lying, new_lying)
        last = ways[-1]
        if last.gives_shards:
            seconds += move(
                layers[-1].output_bytes, ActivationLayout(last.split, True), ActivationLayout(last.split, False)
            )
        yield [way.split for way in ways], seconds, sum(way.num_bytes for way in ways)
