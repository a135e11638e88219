"""The plan: how a run is laid out, as one frozen value that prints and parses as one line.

The planner emits it, the trainer obeys it, verify proves it and the dashboard shows it, so it is pure data and imports
nothing heavy. ``dp=2 microbatches=4`` parses to a ``Plan``; ``str(plan)`` gives the same line back.
"""

from dataclasses import asdict, dataclass, fields
from typing import Any

from shoal.core.axes import Axis
from shoal.core.errors import RequestError, did_you_mean

# What this version executes. A field that is not here is understood, printed and refused, never ignored.
EXECUTED = frozenset({"dp", "microbatches"})


@dataclass(frozen=True, kw_only=True)
class Plan:
    """How a run is laid out. A field left out is 1, off, or derived."""

    dp: int | None = None
    """Replicas of the model; derived from the number of processes when left out."""
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
    """Update rule of the parameter servers: bsp, ssp:s, async or half:K,w."""
    backup: int = 0
    """Backups of each parameter-server shard."""
    sync: str = "allreduce"
    """How replicas agree: allreduce, local:H, gossip."""
    compress: str | None = None
    """Compression of gradients between replicas."""

    @classmethod
    def parse(cls, text: str) -> "Plan":
        """The plan that a line says.

        Raises:
            RequestError: a word is not ``key=value``, a key is unknown or repeated, or a value has the wrong type.
        """
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
            if value != field.default and (field.name, value) != ("microbatches", 1):
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
        """Processes that the plan needs."""
        return self.degree(Axis.DATA) * self.ranks_per_replica

    def problems(self, *, world_size: int | None = None) -> list[str]:
        """Every reason why this plan cannot run, each with its fix; empty when it can."""
        found = [_range_problem(key, getattr(self, key), low) for key, low in _LOWEST.items()]
        found += [_choice_problem(key, getattr(self, key), choices) for key, choices in _CHOICES.items()]
        for field in fields(self):
            if field.name not in EXECUTED and getattr(self, field.name) != field.default:
                found.append(
                    f"{field.name}={getattr(self, field.name)} is not there yet: this version executes "
                    f"{' and '.join(sorted(EXECUTED))}; leave {field.name} out"
                )
        if world_size is not None and self.world_size != world_size:
            product = " x ".join(
                f"{axis.value} {self.degree(axis)}" for axis in (Axis.DATA, Axis.TENSOR, Axis.CONTEXT, Axis.PIPELINE)
            )
            found.append(
                f"{world_size} processes are not {product} = {self.world_size}; "
                f"start {self.world_size} processes, or change a degree of the plan"
            )
        return [problem for problem in found if problem is not None]

    def check(self, model: object | None = None, world_size: int | None = None) -> None:
        """Refuse a plan that cannot run, before anything starts.

        Args:
            model: the module to lay out; techniques that split a model ask it what divides.
            world_size: the processes there are, when that is known.

        Raises:
            RequestError: lists every problem with its fix.
        """
        problems = self.problems(world_size=world_size)
        if problems:
            raise RequestError("\n".join(f"plan {str(self)!r}: {problem}" for problem in problems))


_TYPES: dict[str, type] = {
    field.name: bool if field.name == "sp" else str if "str" in str(field.type) else int for field in fields(Plan)
}
_LOWEST = {"dp": 1, "tp": 1, "cp": 1, "pp": 1, "ep": 1, "chunks": 1, "microbatches": 1, "zero": 0, "ps": 0, "backup": 0}
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
    return value


def _range_problem(key: str, value: int | None, low: int) -> str | None:
    if value is None or value >= low:
        return None
    return f"{key}={value} is below {low}; set {key} to {low} or more"


def _choice_problem(key: str, value: object, choices: tuple[object, ...]) -> str | None:
    if value in choices:
        return None
    return f"{key}={value} is none of {', '.join(str(choice) for choice in choices)}"
