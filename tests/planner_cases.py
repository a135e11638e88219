"""Jobs for tests of the planner: transformers by their numbers on clusters by their names, with constants that are round."""

from dataclasses import replace

from shoal.costs.transformer import TransformerShape, transformer_chain
from shoal.planner.job import Job
from shoal.planner.presets import build_cluster
from shoal.planner.stacks import SOFTWARE, Constants, Stack

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
        chain=transformer_chain(shape),
        cluster=build_cluster(cluster),
        stack=Stack(software=SOFTWARE[software], constants=constants, is_fitted=True),
        global_batch=global_batch,
        **rest,
    )
