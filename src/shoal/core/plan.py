"""The plan: how a run is laid out, as one frozen value that prints and parses as one line.

The trainer obeys it, verify proves it and a checkpoint names it, so it is pure data and imports nothing heavy.
``dp=2 microbatches=4`` parses to a ``Plan``; ``str(plan)`` gives the same line back.
"""

import itertools
import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from shoal.core.axes import Axis
from shoal.core.codecrules import compress_problems
from shoal.core.compressrule import near_codec
from shoal.core.errors import RequestError, did_you_mean
from shoal.core.facts import ModelFacts, model_facts
from shoal.core.pipelines import (
    COMBINED,
    DEFAULT_SCHEDULE,
    SCHEDULES,
    is_row,
    parse_replicas,
    schedule_facts,
    unreadable_replicas,
    write_replicas,
)
from shoal.core.planrules import (
    island_problems,
    model_problems,
    plan_problems,
    server_problems,
)
from shoal.core.units import divisors

# What this version executes. A field that is not here is understood, printed and refused, never ignored.
EXECUTED = frozenset(
    {"dp", "tp", "sp", "cp", "cp_kind", "pp", "schedule", "chunks", "replicas", "zero", "recompute", "microbatches"}
    | {"ps", "workers", "update", "backup", "islands", "sync", "compress"}
)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """How a run is laid out. A field left out is 1, off, or derived."""

    islands: int = 1
    """Groups of replicas that agree by ``sync``; inside each, gradients are summed at every step."""
    dp: int | None = None
    """Replicas of the model, in each island; derived from the number of processes when left out."""
    tp: int = 1
    """Ranks that share each split matrix."""
    sp: bool = False
    """Sequence parallel between the tensor-parallel regions."""
    cp: int = 1
    """Ranks that share one sequence."""
    cp_kind: str = "ring"
    """How attention crosses them: ring or alltoall."""
    pp: int = 1
    """Pipeline ranks."""
    schedule: str | None = None
    """Name of the pipeline schedule, or a CSV file that holds one."""
    chunks: int | None = None
    """Stages per pipeline rank."""
    replicas: str | None = None
    """Pipeline ranks of every stage where some have several, which take turns at the microbatches: 2-1."""
    microbatches: int | None = None
    """Microbatches per replica and step; derived from ``train.micro_batch`` when left out."""
    ep: int = 1
    """Ranks that share the experts."""
    zero: int = 0
    """What is sharded along dp: 1 optimizer state, 2 gradients too, 3 weights too."""
    recompute: str = "none"
    """Activations recomputed in the backward pass: none, selective or full."""
    ps: int = 0
    """Parameter servers."""
    workers: int | None = None
    """Workers of the parameter servers."""
    update: str | None = None
    """Update rule of the parameter servers: bsp, ssp:s, async, half:K,w, downpour:n,m or lbfgs."""
    backup: int = 0
    """Backups of each parameter-server shard."""
    sync: str = "allreduce"
    """How replicas agree: allreduce, local:H, diloco:H, stream:H,F,T, slowmo:H, easgd:H, gossip:GRAPH or pushsum:GRAPH."""
    compress: str | None = None
    """Codec of what replicas or islands send each other: int8, int4, topk:R, powersgd:R and others, @S from step S on."""

    @classmethod
    def parse(cls, text: str) -> "Plan":
        """The plan that a line says.

        Raises:
            RequestError: a word is not ``key=value``, a key is unknown or repeated, or a value has the wrong type.
        """
        given: object = text
        if not isinstance(given, str):
            raise RequestError(f"a plan is read from its text, such as 'dp=2 zero=1', and was given {given!r}")
        # A value may hold a comma (half:3,10), so only one that ends a word or comes before a key is a mistake.
        if (spaced := re.sub(r"\s*,\s*(?=[a-z_]+=|$)", " ", text).strip()) != text.strip():
            raise RequestError(f"plan {text!r}: keys are separated by spaces, not by commas; write {spaced!r}")
        values: dict[str, Any] = {}
        for word in text.split():
            key, equals, value = word.partition("=")
            if not equals:
                raise RequestError(f"plan {text!r}: {word!r} is not key=value, such as dp=2")
            if key not in _TYPES:
                raise RequestError(f"plan {text!r}: unknown key {key!r}; {did_you_mean(key, _TYPES)}")
            if key in values:
                raise RequestError(f"plan {text!r}: {key!r} is given twice")
            values[key] = _parse_value(text, key, value)
        return cls(**values)

    def __str__(self) -> str:
        words = []
        for field in fields(self):
            value = getattr(self, field.name)
            # One microbatch goes without saying, but for a pipeline, which would choose a number of its own.
            is_plain = (field.name, value, self.pp) == ("microbatches", 1, 1)
            if value != field.default and not is_plain:
                words.append(f"{field.name}={str(value).lower() if isinstance(value, bool) else value}")
        return " ".join(words) or "dp=1"

    def as_dict(self) -> dict[str, Any]:
        """Every field by name, for ``plan.json``."""
        return asdict(self)

    def degree(self, axis: Axis) -> int:
        """Ranks along an axis; an underived ``dp`` counts as 1."""
        return int(getattr(self, axis.value) or 1)

    @property
    def ranks_per_replica(self) -> int:
        """Processes that hold one replica of the model."""
        return self.pp * self.cp * self.tp

    @property
    def world_size(self) -> int:
        """Processes that the plan needs; parameter servers and workers are counted, their centers are not."""
        if self.ps:
            return self.ps + (self.workers or 1) * self.ranks_per_replica
        return self.islands * self.degree(Axis.DATA) * self.ranks_per_replica

    @property
    def num_shares(self) -> int:
        """Parts that a step's batch is cut into: one for every replica, or for every worker of parameter servers."""
        return (self.workers or 1) if self.ps else self.islands * (self.dp or 1)

    @property
    def with_islands(self) -> "Plan":
        """The same plan with its islands named: a ``sync`` without ``islands`` makes every replica an island of its own."""
        if self.islands > 1 or self.sync == "allreduce" or self.ps or not self.dp or self.zero:
            return self
        return replace(self, islands=self.dp, dp=1)

    @property
    def stage_replicas(self) -> tuple[int, ...] | None:
        """Pipeline ranks of every stage; None where every rank has a stage of its own.

        Raises:
            RequestError: ``replicas`` is no row of numbers.
        """
        return None if self.replicas is None else parse_replicas(self.replicas)

    @property
    def num_stages(self) -> int:
        """Stages of the pipeline; those of a schedule in a file are what ``chunks`` says."""
        if self.replicas is not None:
            return len(parse_replicas(self.replicas))
        return self.pp * schedule_facts(self.schedule, self.chunks).chunks

    def problems(self, model: object | None = None, *, world_size: int | None = None) -> list[str]:
        """Every reason why this plan cannot run, each with its fix; empty when it can.

        Args:
            model: ``ModelFacts``, a ``ModuleAnalysis`` or an ``nn.Module`` where ``shoal.parallel.requirements`` is imported.
            world_size: the processes there are, when that is known.
        """
        wrong_values = list(self._value_problems())
        # A degree of 0 makes every question after this one meaningless.
        found = wrong_values or [
            *plan_problems(self),
            *server_problems(self),
            *island_problems(self),
            *compress_problems(self),
        ]
        facts = model_facts(model) if model is not None and not wrong_values else None
        if facts is not None:
            found += model_problems(self, facts)
        if world_size is not None and self.ps and self.world_size != world_size:
            each = f" x {self.ranks_per_replica} ranks each" if self.ranks_per_replica > 1 else ""
            found.append(
                f"{world_size} processes are not ps {self.ps} + workers {self.workers or 1}{each} = {self.world_size}; "
                f"start {self.world_size} processes, or change one of them"
            )
        elif world_size is not None and self.world_size != world_size:
            product = " x ".join(
                f"{axis.value} {self.degree(axis)}"
                for axis in (Axis.ISLAND, Axis.DATA, Axis.TENSOR, Axis.CONTEXT, Axis.PIPELINE)
                if axis is not Axis.ISLAND or self.islands > 1
            )
            found.append(
                f"{world_size} processes are not {product} = {self.world_size}; "
                f"start {self.world_size} processes, or change a degree of the plan"
            )
        return list(dict.fromkeys(found))

    def _value_problems(self) -> Iterator[str]:
        for key, low in _LOWEST.items():
            value = getattr(self, key)
            if value is not None and value < low:
                yield f"{key}={value} is below {low}; set {key} to {low} or more"
        for key, choices in _CHOICES.items():
            if getattr(self, key) not in choices:
                yield f"{key}={getattr(self, key)} is none of {', '.join(str(choice) for choice in choices)}"
        if self.replicas is not None and not is_row(self.replicas):
            yield unreadable_replicas(self.replicas)
        for field in fields(self):
            if field.name not in EXECUTED and getattr(self, field.name) != field.default:
                executed = [known.name for known in fields(self) if known.name in EXECUTED]
                yield (
                    f"{field.name}={getattr(self, field.name)} is not there yet: this version executes "
                    f"{', '.join(executed[:-1])} and {executed[-1]}; leave {field.name} out"
                )

    def check(self, model: object | None = None, world_size: int | None = None) -> None:
        """Refuse a plan that cannot run, before anything starts.

        Args:
            model: what the plan is for: ``ModelFacts``, a ``ModuleAnalysis`` or an ``nn.Module`` where
                ``shoal.parallel.requirements`` is imported.
            world_size: the processes there are, when that is known.

        Raises:
            RequestError: lists every problem with its fix, and the nearest plan that works.
        """
        problems = self.problems(model, world_size=world_size)
        if not problems:
            return
        lines = [f"plan {str(self)!r}: {problem}" for problem in problems]
        near = nearest_plan(self, model, world_size=world_size)
        if near is not None:
            lines.append(f"the nearest plan that works: {str(near)!r}")
        raise RequestError("\n".join(lines))


_TYPES: dict[str, type] = {
    field.name: bool if field.name == "sp" else str if "str" in str(field.type) else int for field in fields(Plan)
}
_LOWEST = {
    "islands": 1,
    "dp": 1,
    "tp": 1,
    "cp": 1,
    "pp": 1,
    "ep": 1,
    "chunks": 1,
    "microbatches": 1,
    "zero": 0,
    "ps": 0,
    "backup": 0,
}
_CHOICES: dict[str, tuple[object, ...]] = {
    "cp_kind": ("ring", "alltoall"),
    "zero": (0, 1, 2, 3),
    "recompute": ("none", "selective", "full"),
}


def _parse_value(text: str, key: str, value: str) -> Any:
    kind = _TYPES[key]
    if kind is bool:
        if value not in ("true", "false"):
            raise RequestError(f"plan {text!r}: {key} is true or false, not {value!r}")
        return value == "true"
    if kind is int:
        try:
            return int(value)
        except ValueError:
            raise RequestError(f"plan {text!r}: {key} is a whole number, not {value!r}") from None
    if not value:
        raise RequestError(f"plan {text!r}: {key} has no value")
    if key == "compress" and value == "none":
        return None
    return value


def nearest_plan(plan: Plan, model: object | None = None, *, world_size: int | None = None) -> Plan | None:
    """The plan that differs from this one in the fewest keys, by the least, and can run; None when there is none near.

    Args:
        plan: the plan that cannot run.
        model: as in ``Plan.check``.
        world_size: the processes there are; when that is not known, a plan for as many as ``plan`` asks for is preferred.
    """
    facts = model_facts(model) if model is not None else None
    unknown: dict[str, Any] = {field.name: field.default for field in fields(plan) if field.name not in EXECUTED}
    start = replace(plan, **unknown)  # What is not there yet has one neighbour only: without it.
    asked = world_size or max(1, start.world_size)
    for num_changed in range(len(_SEARCHED) + 1):
        # Any degree for a key that changes alone; for several together those that share out the processes, or it takes minutes.
        options = {
            key: _options(
                start, key, asked, any_degree=world_size is None and num_changed < 2, any_choice=num_changed < 3
            )
            for key in _SEARCHED
        }
        fits: list[tuple[int, int, int, Plan]] = []
        for keys in itertools.combinations(_SEARCHED, num_changed):
            for values in itertools.product(*(options[key] for key in keys)):
                near = replace(start, **dict(zip(keys, values, strict=True)))
                if _works(near, facts, world_size):
                    distance = sum(
                        _distance(getattr(start, key), value) for key, value in zip(keys, values, strict=True)
                    )
                    fits.append((abs(near.world_size - asked), distance, len(fits), near))
        if fits:
            return min(fits)[-1]
    return None


def _works(plan: Plan, facts: ModelFacts | None, world_size: int | None) -> bool:
    """Whether ``plan.problems`` is empty; asked for thousands of plans, so the cheapest questions come first."""
    if world_size is not None and plan.world_size != world_size:
        return False
    rules = itertools.chain(
        plan_problems(plan),
        server_problems(plan),
        island_problems(plan),
        compress_problems(plan),
        model_problems(plan, facts) if facts is not None else (),
    )
    # A degree of 0 makes the rules meaningless, and there are none of 0 among the options.
    is_whole = all(getattr(plan, key) != 0 for key in ("dp", "tp", "cp", "pp"))
    return is_whole and next(rules, None) is None and not plan.problems(facts, world_size=world_size)


def all_plans(num_processes: int, facts: object | None = None) -> list[Plan]:
    """The plans over exactly this many processes that ``check`` allows, in a stable order: plain ones first.

    Every combination without a pipeline. With one, every schedule by itself and with dp, and those of ``COMBINED`` with every
    other technique: what a technique does to a stage does not depend on the order in which stages run. Of replicated stages the
    first alone, by the default schedule: which stage it is makes no difference to the sums.
    """
    found = []
    for tp, cp, pp in itertools.product(divisors(num_processes), repeat=3):
        if num_processes % (tp * cp * pp):
            continue
        dp = num_processes // (tp * cp * pp)
        schedules = list(SCHEDULES) if pp > 1 else [None]
        for sp, cp_kind, zero, recompute, schedule in itertools.product(
            (False, True), ("ring", "alltoall"), (0, 1, 2, 3), ("none", "selective", "full"), schedules
        ):
            is_plain = (tp, sp, cp, zero, recompute) == (1, False, 1, 0, "none")
            if pp > 1 and schedule not in COMBINED and not is_plain:
                continue
            plan = Plan(
                dp=dp, tp=tp, sp=sp, cp=cp, cp_kind=cp_kind, pp=pp, schedule=schedule, zero=zero, recompute=recompute
            )
            found.append(plan)
            if is_plain and pp > 2 and schedule == DEFAULT_SCHEDULE:
                found.append(replace(plan, replicas=write_replicas([2] + [1] * (pp - 2))))
    return [plan for plan in found if not plan.problems(facts, world_size=num_processes)]


# The keys that the search may change, the one given up first in front; each change costs the same.
_SEARCHED = ("compress", "recompute", "zero", "cp_kind", "sp", "chunks", "replicas", "schedule", "tp", "cp", "dp", "pp")
_LARGEST_DEGREE = 64
_LARGEST_WORLD = 2**20


def _options(plan: Plan, key: str, asked: int, *, any_degree: bool, any_choice: bool) -> list[Any]:
    current = getattr(plan, key)
    if not any_choice and (key == "sp" or key in _CHOICES):
        # Where much is wrong, what is too much is left out; nothing is put in.
        default = getattr(Plan(), key)
        return [] if current == default else [default]
    if key == "sp":
        return [not current]
    if key == "compress" and current is not None and (codec := near_codec(current)) is not None:
        return [codec, None]
    if key in ("schedule", "chunks", "replicas", "compress"):
        return [] if current is None else [None]
    if key in _CHOICES:
        return [choice for choice in _CHOICES[key] if choice != current]
    if not any_degree:
        return [degree for degree in divisors(min(asked, _LARGEST_WORLD)) if degree != current]
    highest = min(_LARGEST_DEGREE, max(2 * (current or 1), plan.world_size))
    return [degree for degree in range(1, highest + 1) if degree != current]


def _distance(old: Any, new: Any) -> int:
    are_numbers = all(isinstance(value, int) and not isinstance(value, bool) for value in (old, new))
    return abs(old - new) if are_numbers else 1
