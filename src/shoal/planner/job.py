"""What is planned: a model, a batch, a precision, on a cluster with a software: what every part of the planner takes."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from shoal.costs.chain import Chain, LayerKind
from shoal.planner.hardware import Cluster
from shoal.planner.stacks import Stack


@dataclass(frozen=True, kw_only=True)
class Job:
    """One training job, before it has a plan."""

    chain: Chain
    cluster: Cluster
    stack: Stack
    global_batch: int
    """Samples of a step, over all replicas."""
    precision: str = "bfloat16"
    """Compute type: float32, bfloat16, float16, float8 or float4."""
    weight_bytes: float = 2.0
    """Of a weight as it is kept and gathered."""
    state_bytes: float | None = None
    """Of the optimizer for a weight; what the software's Adam keeps when left out."""


def spread_blocks(num_blocks: int, num_stages: int) -> tuple[int, ...]:
    """Blocks of every stage: as even as can be, and fewer at the two ends, which have the embedding and the output layer too."""
    low, more = divmod(num_blocks, num_stages)
    counts = [low] * num_stages
    # From the middle outwards.
    order = sorted(range(num_stages), key=lambda stage: abs(2 * stage - (num_stages - 1)))
    for stage in order[:more]:
        counts[stage] += 1
    return tuple(counts)


def cut_stages(chain: Chain, num_stages: int) -> tuple[tuple[int, int], ...]:
    """First layer and end of every stage: blocks spread evenly, what stands before and after them at the ends."""
    blocks = [at for at, layer in enumerate(chain.layers) if layer.kind is LayerKind.BLOCK] or list(
        range(len(chain.layers))
    )
    at = blocks[0]
    cuts = []
    for stage, count in enumerate(spread_blocks(blocks[-1] + 1 - at, num_stages)):
        begin = 0 if stage == 0 else at
        at += count
        cuts.append((begin, len(chain.layers) if stage == num_stages - 1 else at))
    return tuple(cuts)


def count_layers(chain: Chain, cut: tuple[int, int]) -> Mapping[int, int]:
    """Layers of a stage: how many of each of ``chain.distinct``."""
    return Counter(chain.numbers[cut[0] : cut[1]])
