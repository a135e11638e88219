"""What a proof runs, in plain values that cross to other processes as JSON.

The reference process must not import ``parallel/``, and the whole recipe knows that room's section; so what decides the numbers
is cut out of the recipe here, and the reference reads the sections it needs with the schemas of their own rooms.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from shoal.optim.config import PrecisionName

FLAT_BOUNDS = {"float64": 1e-12, "float32": 1e-5}
"""How far a flat pass over the whole batch may be from a gradient that is added in a plan's tree."""
COARSE_FLAT_BOUND = 0.1
"""In any other precision."""
NOISE_EPS = 10
"""A gradient below this many eps of the whole gradient's norm is noise."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """Model, data, optimizer and the numbers that decide every bit of a run, whatever its plan."""

    model: Mapping[str, Any]
    data: Mapping[str, Any]
    optim: Mapping[str, Any]
    seed: int
    global_batch: int
    precision: PrecisionName
    batch_norm: str
    total_steps: int
    """Length of the whole run: schedules of the learning rate depend on it."""
    steps: int
    """Steps to run and compare."""
    joins_batch: bool = False
    """The loss is over the global batch: the samples of all replicas run as one."""
    needs_every_gradient: bool = False
    """A plan over replicas cannot run where one of them leaves a parameter without a gradient, and no setting allows it."""


@dataclass(frozen=True, kw_only=True)
class Tree:
    """The order in which one step's gradients are added.

    Microbatches in order; of a replica one partial sum per direction or per rank that takes turns and, where stages share a
    weight, per stage, added in this order; then replicas in the order of ranks.
    """

    replicas: int
    microbatches: int
    """Per replica and step; a short batch leaves the last ones empty."""
    directions: int = 1
    """2 for bidirectional pipelines: the first half of the microbatches, the longer one, and the rest have a sum each."""
    users: Mapping[str, Sequence[int]] = field(default_factory=dict)
    """Of a weight that several stages use, by its first name: these stages."""
    uses: Mapping[str, Sequence[Sequence[str]]] = field(default_factory=dict)
    """The names that units of each of these stages have it by; a stage that reads it outside of every unit has none."""
    places: Sequence[str] = ()
    """Where there are such weights: the modules at whose calls the second and later stages begin."""
    units: Sequence[str] = ()
    """Where there are such weights: the modules whose calls stages are made of."""
    turns: Mapping[str, Sequence[int]] = field(default_factory=dict)
    """Of a weight whose stage has several ranks, by its first name: how many, for each stage that uses it. Of R ranks, number m
    mod R has microbatch m of a step."""
    islands: int = 1
    """Groups of ``replicas`` replicas that agree by ``sync``; the rest of the tree is of each."""
    sync: str = "allreduce"
    settings: Mapping[str, Any] = field(default_factory=dict)
    """The recipe's ``[replicas]``, where there are islands."""
    compress: str | None = None
    """How gradients go between replicas, or changes of weights between islands."""
    compression: Mapping[str, Any] = field(default_factory=dict)
    """The recipe's ``[compression]``, where sums or weights go compressed."""
    keeps_shards: bool = False
    """Where something is compressed: each replica keeps a shard of the sum (ZeRO), so nothing goes back compressed."""
    delay: str | None = None
    """Name of an asynchronous schedule, whose weights change while microbatches are under way."""
    stages: Sequence[Sequence[str]] = ()
    """Where there is a delay: the parameters of each stage."""


@dataclass(frozen=True, kw_only=True)
class UpdateLog:
    """What parameter servers recorded of a run: every update, and what went into it (``servers/rules.py`` has the meaning)."""

    tree: Tree
    """The order in which the gradient of a share is added; its replicas are the shares that a step's batch is cut into."""
    adds_to_steps: bool
    """A gradient is its share of the mean over the step; else it is the mean over its own samples."""
    total_updates: int
    """Of the whole run, as the learning rate counts them."""
    takes_own_steps: bool
    """A worker goes a step of plain descent by each of its gradients, until it reads the servers' weights again."""
    own_rates: Sequence[float]
    """Rate of these steps, by worker, the last for all further ones; empty: the run's, by step."""
    pieces: Sequence[tuple[str, int, int, int]]
    """Every slice of a parameter: its name, first and last element, and the shard that holds it; shard after shard."""
    updates: Sequence[Mapping[str, Any]]

    @classmethod
    def from_values(cls, values: Mapping[str, Any]) -> "UpdateLog":
        """Back from ``asdict`` and JSON."""
        return cls(**{**values, "tree": Tree(**values["tree"])})
