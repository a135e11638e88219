"""Which techniques can be combined, with each other and with a model: pure functions over numbers that return what is wrong.

``Plan.check()`` asks them, the table of combinations in the documentation is printed from them, and ``verify --all`` proves
what they allow. Every sentence has both numbers and the fix.
"""

import math
from collections.abc import Iterator
from typing import Protocol

from shoal.core.errors import RequestError, did_you_mean
from shoal.core.facts import ModelFacts
from shoal.core.pipelines import (
    SCHEDULES,
    is_file,
    is_row,
    parse_replicas,
    replica_problems,
    schedule_facts,
    unreadable_replicas,
)
from shoal.core.syncrule import SyncRule
from shoal.core.units import divisors
from shoal.core.updaterule import UpdateRule


class PlanKeys(Protocol):
    """What the rules read of a plan (``core/plan.py`` has the value, and imports this file)."""

    @property
    def islands(self) -> int:
        """Groups of replicas that agree by ``sync``."""

    @property
    def sync(self) -> str:
        """How they agree."""

    @property
    def dp(self) -> int | None:
        """Replicas; None when not derived yet."""

    @property
    def tp(self) -> int:
        """Ranks that share each split matrix."""

    @property
    def sp(self) -> bool:
        """Sequence parallel."""

    @property
    def cp(self) -> int:
        """Ranks that share one sequence."""

    @property
    def cp_kind(self) -> str:
        """ring or alltoall."""

    @property
    def pp(self) -> int:
        """Pipeline ranks."""

    @property
    def schedule(self) -> str | None:
        """Name of the pipeline schedule."""

    @property
    def chunks(self) -> int | None:
        """Stages per pipeline rank."""

    @property
    def replicas(self) -> str | None:
        """Pipeline ranks of every stage where some have several."""

    @property
    def num_stages(self) -> int:
        """Stages of the pipeline."""

    @property
    def zero(self) -> int:
        """What is sharded along dp."""

    @property
    def recompute(self) -> str:
        """none, selective or full."""

    @property
    def ep(self) -> int:
        """Ranks that share the experts."""

    @property
    def compress(self) -> str | None:
        """The codec of sums over replicas."""

    @property
    def ps(self) -> int:
        """Parameter servers."""

    @property
    def workers(self) -> int | None:
        """Workers; None when not derived yet."""

    @property
    def update(self) -> str | None:
        """The update rule's line."""

    @property
    def backup(self) -> int:
        """Backups of each shard."""


def plan_problems(plan: PlanKeys) -> Iterator[str]:
    """What is wrong with a combination whatever the model."""
    if plan.sp and plan.tp == 1:
        yield "sp=true shares the sequence over the tp ranks, and tp is 1; set tp to 2 or more, or leave sp out"
    if plan.cp_kind != "ring" and plan.cp == 1:
        yield f"cp_kind={plan.cp_kind} says how attention crosses the cp ranks, and cp is 1; set cp to 2, or leave cp_kind out"
    if plan.zero and plan.dp == 1:
        yield f"zero={plan.zero} has nothing to shard along dp=1; set dp to 2 or more, or leave zero out"
    yield from _pipeline_problems(plan)


def _pipeline_problems(plan: PlanKeys) -> Iterator[str]:
    if plan.pp == 1:
        for key in ("schedule", "chunks", "replicas"):
            if getattr(plan, key) is not None:
                yield f"{key}={getattr(plan, key)} is of a pipeline, and pp is 1; set pp to 2 or more, or leave {key} out"
        return
    name = plan.schedule
    if name is not None and name not in SCHEDULES and not is_file(name):
        yield f"schedule={name} is neither a schedule nor a file that ends in .csv; {did_you_mean(name.lower(), SCHEDULES)}"
        return
    facts = schedule_facts(name)
    if plan.chunks is not None and not facts.takes_chunks and plan.chunks != facts.chunks:
        yield (
            f"schedule={name or 'the default, 1f1b,'} has {facts.chunks} stage(s) per rank, and chunks={plan.chunks} are asked "
            f"for; leave chunks out, or use schedule=interleaved"
        )
    if plan.replicas is not None:
        yield from _replica_problems(plan, plan.replicas)
    if facts.is_asynchronous:
        yield from _asynchronous_problems(plan)


def _replica_problems(plan: PlanKeys, text: str) -> Iterator[str]:
    if not is_row(text):
        yield unreadable_replicas(text)
        return
    facts = schedule_facts(plan.schedule)
    if facts.takes_replicas:
        yield from replica_problems(parse_replicas(text), plan.pp)
        if (plan.chunks or 1) > 1:
            yield f"replicas={text} gives every rank one stage, and chunks={plan.chunks} are asked for; leave one of them out"
        return
    takers = ", ".join(name for name, other in SCHEDULES.items() if other.takes_replicas)
    why = "weights change after every microbatch, which only one of the ranks of a stage has seen"
    if not facts.is_asynchronous:
        why = "it says which of its ranks does which stage by a rule of its own"
    yield f"replicas={text} does not go with schedule={plan.schedule}: {why}; leave replicas out, or use one of {takers}"


def _asynchronous_problems(plan: PlanKeys) -> Iterator[str]:
    """Weights change while microbatches are under way, so every version must be whole on its rank."""
    if plan.zero:
        yield (
            f"zero={plan.zero} does not go with schedule={plan.schedule}: it keeps several versions of its weights, and a "
            f"version that is sharded would be gathered for every microbatch; leave zero out, or use schedule=1f1b"
        )
    if plan.tp > 1:
        yield (
            f"tp={plan.tp} does not go with schedule={plan.schedule}: a stage's norm would be of its part of the weights, and "
            f"sums over tp would come between its updates; leave tp out, or use schedule=1f1b"
        )


def sequence_multiple(plan: PlanKeys) -> int:
    """The number that must divide a sequence under this plan.

    A ring deals each rank two chunks, an early and a late one, so that causal attention is the same work for all; the all-to-all
    form deals one. Sequence parallelism cuts what a context-parallel rank has once more.
    """
    chunks = 1 if plan.cp == 1 else 2 * plan.cp if plan.cp_kind == "ring" else plan.cp
    return chunks * (plan.tp if plan.sp else 1)


def model_problems(plan: PlanKeys, facts: ModelFacts) -> Iterator[str]:
    """What is wrong with a plan for this model."""
    if plan.tp > 1:
        yield from _tensor_problems(plan, facts)
    if plan.sp and plan.tp > 1:
        yield from _cut_sequence_problems("sp", f"sp=true with tp={plan.tp}", facts)
    if plan.cp > 1:
        yield from _cut_sequence_problems("cp", f"cp={plan.cp}", facts)
        yield from _context_problems(plan, facts)
    if facts.sequence is not None and facts.has_sequence and facts.sequence % sequence_multiple(plan):
        yield _length_problem(plan, facts.sequence)
    if plan.recompute != "none" and facts.num_blocks == 0:
        yield (
            f"recompute={plan.recompute} works by blocks, and {facts.name} has no row of blocks of one kind; "
            f"leave recompute out, or name the blocks in parallel.blocks"
        )
    if plan.pp > 1:
        yield from _stage_problems(plan, facts)
    if plan.ps and facts.keeps_statistics:
        yield (
            f"ps={plan.ps} does not go with {facts.name}: its batch norm keeps running statistics, which parameter servers do "
            f"not hold; use dp in the place of ps and workers, or a norm without them such as GroupNorm"
        )


def _stage_problems(plan: PlanKeys, facts: ModelFacts) -> Iterator[str]:
    schedule, num_stages = schedule_facts(plan.schedule, plan.chunks), plan.num_stages
    if plan.replicas is not None:
        yield from _replicated_stage_problems(plan, facts)
    elif 0 < facts.num_blocks < plan.pp:
        yield (
            f"pp={plan.pp} ranks are more than the {facts.num_blocks} blocks of {facts.name}: some would have nothing to do; "
            f"lower pp to {facts.num_blocks}, or give the model more blocks"
        )
    elif facts.num_units is not None and num_stages > facts.num_units:
        each = f" of {schedule.chunks} stages each" if schedule.chunks > 1 else ""
        yield (
            f"pp={plan.pp} ranks{each} want {num_stages} stages, and {facts.name} can be cut into {facts.num_units}; "
            f"lower pp to {max(1, facts.num_units // schedule.chunks)}, or give the model more blocks"
        )
    if schedule.is_asynchronous and facts.tied_ends:
        yield (
            f"schedule={plan.schedule} updates each stage by itself, and {facts.tied_ends!r} is held by the first and the last "
            f"of {num_stages}, which would drift apart; untie it, or use schedule=1f1b"
        )
    if schedule.is_bidirectional and facts.has_batch_norm:
        yield (
            f"schedule={plan.schedule} has two ranks for each stage, and the batch norm of {facts.name} would take its running "
            f"statistics on both; use schedule=1f1b"
        )


def _replicated_stage_problems(plan: PlanKeys, facts: ModelFacts) -> Iterator[str]:
    most = facts.num_blocks or facts.num_units
    if most is not None and plan.num_stages > most:
        parts = "blocks" if facts.num_blocks else "parts that it can be cut into"
        yield (
            f"replicas={plan.replicas} are {plan.num_stages} stages, more than the {most} {parts} of {facts.name}: some would "
            f"have nothing to do; name {most} stages or fewer, or give the model more blocks"
        )
    if facts.has_batch_norm:
        yield (
            f"replicas={plan.replicas} has several ranks for a stage, and the batch norm of {facts.name} would take its running "
            f"statistics on each over some of the microbatches; leave replicas out"
        )


_NAMED = 4
"""Sizes that a message names one by one."""


def _tensor_problems(plan: PlanKeys, facts: ModelFacts) -> Iterator[str]:
    if facts.num_pairs == 0:
        why = f" ({facts.note})" if facts.note else ""
        yield (
            f"tp={plan.tp} has nothing to split: no pair of linear layers with only elementwise or head-wise work between them "
            f"was found in {facts.name}{why}; use dp={plan.tp} in its place, or name the layers in parallel.split"
        )
    shared: list[tuple[int, str]] = []
    for heads, kv_heads in facts.heads:
        shared.append((heads, f"the {heads} heads"))
        if kv_heads != heads:
            shared.append((kv_heads, f"the {kv_heads} key-value heads"))
    shared += [(width.size, f"the {width.size} features of {width.name}") for width in facts.widths]
    uneven = list(dict.fromkeys(name for size, name in shared if size % plan.tp))
    if uneven:
        # One list of degrees: what divides the heads alone would be refused for the features next.
        fits = _allowed("tp", math.gcd(*(size for size, _ in shared)))
        more = f" and {len(uneven) - _NAMED} more" if len(uneven) > _NAMED else ""
        yield f"tp={plan.tp} does not divide {', nor '.join(uneven[:_NAMED])}{more}; {fits}"


def _allowed(key: str, number: int) -> str:
    fits = divisors(number)
    shown = ", ".join(str(fit) for fit in (fits if len(fits) <= 8 else [*fits[:7], fits[-1]]))
    return f"set {key} to one of {shown}" if len(fits) > 1 else f"leave {key} out"


def _cut_sequence_problems(key: str, cause: str, facts: ModelFacts) -> Iterator[str]:
    """What sequence and context parallelism have in common: there is a sequence, and it can be cut."""
    obstacle = facts.obstacle_sp if key == "sp" else facts.obstacle_cp
    if not facts.has_sequence:
        yield f"{cause} shares a sequence, and no row of blocks in {facts.name} has one; leave {key} out"
        return
    if obstacle:
        yield f"{cause} cannot cut the sequence of {facts.name}: {obstacle}; leave {key} out"
    if facts.has_batch_norm:
        yield f"{cause} would take batch norm's statistics over a part of the sequence; leave {key} out"


def _context_problems(plan: PlanKeys, facts: ModelFacts) -> Iterator[str]:
    if facts.has_sequence and not facts.has_attention and not facts.obstacle_cp:
        yield f"cp={plan.cp} shares attention over a sequence, and {facts.name} has no attention; leave cp out"
    if facts.attention_dropout > 0:
        yield (
            f"cp={plan.cp} cannot draw the dropout of {facts.attention_dropout} inside attention as one process does; "
            f"set the attention's dropout to 0 (dropout outside attention is fine), or leave cp out"
        )
    if plan.cp_kind == "alltoall":
        for heads, _ in facts.heads:
            if heads % plan.tp == 0:
                yield from _exchange_problems(plan, heads // plan.tp)


def _exchange_problems(plan: PlanKeys, heads: int) -> Iterator[str]:
    # Key-value heads need not divide: the exchange repeats them.
    if heads % plan.cp:
        each = f" on each of the {plan.tp} tp ranks" if plan.tp > 1 else ""
        yield (
            f"cp_kind=alltoall deals the {heads} heads{each} out over cp={plan.cp}, which does not divide them; "
            f"use cp_kind=ring, or {_allowed('cp', heads)}"
        )


def _length_problem(plan: PlanKeys, sequence: int) -> str:
    multiple = sequence_multiple(plan)
    parts = []
    if plan.cp > 1:
        parts.append(f"2 x cp {plan.cp}" if plan.cp_kind == "ring" else f"cp {plan.cp}")
    if plan.sp:
        parts.append(f"tp {plan.tp}")
    lengths = [size for size in (sequence - sequence % multiple, sequence - sequence % multiple + multiple) if size]
    return (
        f"the sequence of {sequence} is not a multiple of {' x '.join(parts)} = {multiple}; "
        f"set the sequence to {' or '.join(str(size) for size in lengths)}, or change {'cp' if plan.cp > 1 else 'tp'}"
    )


def server_problems(plan: PlanKeys) -> Iterator[str]:
    """What is wrong with the servers, workers, update rule and backups of a plan."""
    if plan.ps == 0:
        for key in ("workers", "update"):
            if getattr(plan, key) is not None:
                yield f"{key}={getattr(plan, key)} is of parameter servers, and ps is 0; set ps to 1 or more, or leave {key} out"
        if plan.backup:
            yield f"backup={plan.backup} is of parameter servers, and ps is 0; set ps to 2 or more, or leave backup out"
        return
    if plan.backup > 1:
        yield f"backup={plan.backup} is not there yet: a shard has one backup or none; set backup to 1"
    elif plan.backup >= plan.ps:
        yield (
            f"backup={plan.backup} needs {plan.backup + 1} servers, and ps is {plan.ps}: a backup beside its primary would die "
            f"with it; set ps to {plan.backup + 1} or more, or backup to {plan.ps - 1}"
        )
    if plan.workers is not None and plan.workers < 1:
        yield f"workers={plan.workers} is below 1; set workers to 1 or more"
    yield from _grid_problems(plan)
    try:
        rule = UpdateRule.parse(plan.update or "bsp")
    except RequestError as error:
        yield str(error)
        return
    if rule.kind == "half" and plan.workers is not None and rule.quorum is not None and rule.quorum > plan.workers:
        yield (
            f"update={plan.update} closes an update at {rule.quorum} arrivals, and there are {plan.workers} workers; "
            f"lower it to {plan.workers}"
        )


def island_problems(plan: PlanKeys) -> Iterator[str]:
    """What is wrong with the islands of a plan and the rule by which they agree."""
    try:
        rule = SyncRule.parse(plan.sync)
    except RequestError as error:
        yield str(error)
        return
    if not rule.is_island_rule:
        if plan.islands > 1:
            total = plan.islands * (plan.dp or 1)
            yield (
                f"islands={plan.islands} agree by sync, and sync is allreduce, under which there are none; set sync, such as "
                f"sync=diloco:50, or write dp={total} in place of islands={plan.islands} dp={plan.dp or 1}"
            )
        return
    replicas = plan.islands if plan.islands > 1 else plan.dp
    if plan.ps:
        yield (
            f"sync={plan.sync} is for replicas that hold all weights, and ps={plan.ps} servers have them here; leave sync out, "
            f"and say how workers agree by update, or leave ps out"
        )
    elif replicas == 1:
        yield f"sync={plan.sync} is between islands, and there is one; set islands or dp to 2 or more, or leave sync out"
    elif plan.islands == 1 and plan.zero and plan.dp is not None:
        # As few islands as divide the replicas with two or more in each, so that the processes are the same.
        count = next((one for one in divisors(plan.dp) if 1 < one < plan.dp), None)
        inside = f"write islands={count} dp={plan.dp // count} to shard inside islands, or " if count else ""
        yield (
            f"zero={plan.zero} shares state along dp, and sync={plan.sync} without islands makes each of the dp={plan.dp} "
            f"replicas an island of its own; {inside}leave zero out"
        )
    if plan.pp > 1 and schedule_facts(plan.schedule).is_asynchronous:
        yield (
            f"schedule={plan.schedule} does not go with sync={plan.sync}: its stages update weights by themselves, at different "
            f"times; use schedule=1f1b"
        )
    cut = {"zero": plan.zero, "tp": plan.tp if plan.tp > 1 else 0}
    for key, degree in cut.items() if rule.kind == "sparse" else ():
        if degree:
            yield (
                f"sync={plan.sync} cuts whole parameters into chunks, and {key}={degree} gives ranks parts of them, whose chunks "
                f"would be others; leave {key} out, or use sync=diloco:{rule.period}"
            )
    if replicas is not None and rule.kind == "gossip" and rule.graph == "exponential" and replicas & (replicas - 1):
        yield (
            f"sync={plan.sync} halves the distance to the mean at every round only where the islands are a power of two, and "
            f"there are {replicas}; use sync=pushsum:exponential or sync=gossip:ring"
        )


def _grid_problems(plan: PlanKeys) -> Iterator[str]:
    """A worker is a group of ranks that computes one gradient; replicas, and whoever updates weights, are the servers' affair."""
    if plan.dp is not None and plan.dp > 1:
        yield f"dp={plan.dp} does not go with ps={plan.ps}: its replicas are the workers; set workers={plan.dp} and leave dp out"
    if plan.zero:
        yield f"zero={plan.zero} does not go with ps={plan.ps}: the servers have the optimizer state already; leave zero out"
    if plan.pp > 1 and schedule_facts(plan.schedule).is_asynchronous:
        yield (
            f"schedule={plan.schedule} does not go with ps={plan.ps}: its stages update weights by themselves, and here the "
            f"servers do; use schedule=1f1b"
        )
