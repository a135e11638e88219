"""What is compared: ways in which four replicas agree, each a plan and settings of the recipe."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

SHORT, LONG = 300, 1000
DENSE, ALONE = "dense", "one replica alone"
RESIDUAL = {"compression.residual": True}
SAME_BACK = {"compression.back": "same"}
PAPER = {"replicas.outer_momentum": 0.9}
"""The DiLoCo paper's, for rounds of hundreds of steps; the default of stream."""
HALF = {"replicas.outer_momentum": 0.5}
"""The default of diloco."""


@dataclass(frozen=True, kw_only=True)
class Contender:
    """One row of the table."""

    plan: str = "dp=4"
    settings: Mapping[str, Any] = field(default_factory=dict)
    """What differs from the recipe."""
    steps: tuple[int, ...] = (SHORT,)
    """How long it is trained: each is a run of its own, because the rate falls over the whole of it."""
    over_dense: float | None = None
    """At ``SHORT`` steps: by how much its loss may be above the dense one."""
    closes: float | None = None
    """At ``LONG`` steps: the share of the gap from one replica to dense that it closes at least."""

    def bar(self, steps: int) -> float | None:
        """What is promised of it after so many steps; None for nothing."""
        return {SHORT: self.over_dense, LONG: self.closes}[steps]


CONTENDERS = {
    DENSE: Contender(steps=(SHORT, LONG)),
    ALONE: Contender(plan="dp=1", settings={"train.global_batch": 4}, steps=(SHORT, LONG)),
    "fp16": Contender(plan="dp=4 compress=fp16"),
    "int8": Contender(plan="dp=4 compress=int8", over_dense=0.002),
    "int4 with residual": Contender(plan="dp=4 compress=int4", settings=RESIDUAL, over_dense=0.01),
    "the same, int4 back": Contender(plan="dp=4 compress=int4", settings={**RESIDUAL, **SAME_BACK}, over_dense=0.01),
    "int4 back, no residual": Contender(
        plan="dp=4 compress=int4", settings={"compression.residual": False, **SAME_BACK}
    ),
    "int4 with residual, dense back": Contender(
        plan="dp=4 compress=int4", settings={**RESIDUAL, "compression.both_ways": False}, over_dense=0.01
    ),
    "powersgd:4": Contender(plan="dp=4 compress=powersgd:4@30", over_dense=0.06),
    "powersgd:4 from step 100": Contender(plan="dp=4 compress=powersgd:4@100", over_dense=0.06),
    "powersgd:8": Contender(plan="dp=4 compress=powersgd:8@30", over_dense=0.06),
    "powersgd:1": Contender(plan="dp=4 compress=powersgd:1@30"),
    "topk:0.01": Contender(plan="dp=4 compress=topk:0.01"),
    "topk:0.01 from step 30": Contender(plan="dp=4 compress=topk:0.01@30"),
    "sign": Contender(plan="dp=4 compress=sign"),
    "local:10": Contender(plan="dp=4 sync=local:10"),
    "local:20": Contender(plan="dp=4 sync=local:20", steps=(SHORT, LONG)),
    "diloco:20": Contender(plan="dp=4 sync=diloco:20", steps=(SHORT, LONG), closes=0.4),
    "the same, changes in int4": Contender(
        plan="dp=4 sync=diloco:20 compress=int4", settings=SAME_BACK, steps=(SHORT, LONG)
    ),
    "diloco:20, outer momentum 0.9": Contender(plan="dp=4 sync=diloco:20", settings=PAPER, steps=(SHORT, LONG)),
    "stream:20,4,2": Contender(plan="dp=4 sync=stream:20,4,2", steps=(SHORT, LONG)),
    "stream:20,4,2, outer momentum 0.5": Contender(plan="dp=4 sync=stream:20,4,2", settings=HALF, steps=(SHORT, LONG)),
    "slowmo:20": Contender(plan="dp=4 sync=slowmo:20"),
    "gossip:exponential": Contender(plan="dp=4 sync=gossip:exponential", steps=(SHORT, LONG)),
    "gossip:ring": Contender(plan="dp=4 sync=gossip:ring"),
}

PLAIN = (DENSE, ALONE, "int4 with residual", "powersgd:4", "diloco:20", "diloco:20, outer momentum 0.9")
"""Those that the plain model is trained with, too."""
