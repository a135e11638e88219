"""Simulations of a step: the recipe's model traced, its plan priced on the cluster, played, and described or written to files."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shoal.comm.trafficcounter import TrafficCounts, add_traffic, traffic_rows
from shoal.core.errors import RequestError
from shoal.core.plan import Plan
from shoal.core.rundir import RunDir, replace_text
from shoal.core.syncrule import SyncRule
from shoal.costs.layers import ModelCosts
from shoal.planner.pricing.agreement import AgreementTimes, agree_parts, is_exact, price_agreement
from shoal.planner.pricing.cost import StepParts, price_parts
from shoal.planner.pricing.job import Job, count_stages
from shoal.planner.pricing.memory import price_memory, rank_kept_bytes
from shoal.planner.simulation.cells import RankBytes, StepBytes
from shoal.planner.simulation.conditions import Conditions, most_steps, split_islands, split_sites
from shoal.planner.simulation.goodput import Goodput, simulate_goodput
from shoal.planner.simulation.local_sgd import (
    LocalUpdates,
    PlayedRounds,
    Rounds,
    find_link,
    play_rounds,
    simulate_rounds,
)
from shoal.planner.simulation.report import (
    describe_goodput,
    describe_islands,
    describe_sites,
    describe_step,
    describe_steps,
)
from shoal.planner.simulation.result import SimulatedStep
from shoal.planner.simulation.run_directory import RunNumbers, write_run
from shoal.planner.simulation.step import schedule_for, simulate_step, step_times
from shoal.planner.simulation.trace import MOST_LANES, draw_step, num_lanes, write_trace
from shoal.trainer.config import RecipeLike, dump_recipe
from shoal.trainer.own_parts import OwnPartsHere
from shoal.tuning.agreement import agreement_of
from shoal.tuning.planned_model import check_experts, costs_for, facts_for
from shoal.tuning.planning import job_on
from shoal.tuning.simulation_request import (
    Asked,
    FailureOptions,
    SimulationOptions,
    SimulationRequest,
    check_simulation,
)

Array = NDArray[np.float64]
_DRAWN = 100
"""Steps that are played where they differ and nobody says how many."""


@dataclass(frozen=True, kw_only=True)
class Priced:
    """A step of one site in seconds and bytes."""

    parts: StepParts
    needed: StepBytes
    weight_bytes: float
    """Of the whole model, as sites exchange it."""
    tokens: float
    """Of one sample."""
    agreement: AgreementTimes | None = None
    """How replicas agree, where that is not by whole sums at every step."""
    counted: TrafficCounts = field(default_factory=dict)
    """What a rank moves for it in a cycle of steps, as its channels would count it."""
    kept_bytes: float = 0.0
    """State of a rank for it."""


def price_asked(asked: Asked) -> Priced:
    """Price the plan of one site.

    Raises:
        RequestError: the model cannot be traced, or does not allow the plan.
    """
    chain = costs_for(asked.recipe, asked.spec)
    _check_plan(asked, chain)
    cluster, plan = asked.site_cluster, asked.site_plan
    if plan.pp > 1:
        # A schedule has stages of its own number where the plan leaves that to it.
        grid = schedule_for(plan, plan.microbatches or 1).grid
        plan = replace(plan, chunks=grid.chunks)
    job = job_on(
        asked.recipe,
        chain,
        cluster,
        global_batch=asked.global_batch // asked.num_sites,
    )
    priced = Priced(
        parts=price_parts(job, plan),
        needed=_bytes(job, plan),
        weight_bytes=job.weight_bytes * job.chain.weights,
        tokens=job.chain.tokens,
    )
    return priced if is_exact(asked.plan) else _agree(asked, job, replace(asked.plan, chunks=plan.chunks), priced)


def _agree(asked: Asked, site: Job, plan: Plan, priced: Priced) -> Priced:
    """The same with what replicas take to agree: between islands in exchanges of their own, else inside the step."""
    whole = replace(site, cluster=asked.cluster, global_batch=asked.global_batch)
    alone = simulate_step(priced.parts, plan=asked.site_plan).step_seconds
    agreement = agreement_of(
        whole,
        plan,
        compression=asked.recipe.compression,
        sparse_bits=asked.recipe.replicas.sparse_bits,
        seed=asked.recipe.train.seed,
        step_seconds=alone,
    )
    assert agreement is not None, "the plan is not one that sums everything at every step"
    times = price_agreement(whole, plan, agreement)
    places = tuple(replace(place, other=place.other + agreement.kept_bytes) for place in priced.needed.places)
    return replace(
        priced,
        parts=priced.parts if plan.islands > 1 else agree_parts(priced.parts, plan, times, alone),
        needed=replace(priced.needed, places=places),
        agreement=times,
        counted=add_traffic(*agreement.cycle),
        kept_bytes=agreement.kept_bytes,
    )


def _check_plan(asked: Asked, chain: ModelCosts) -> None:
    """Hold a plan to what only looking at the model tells; that of shipped models was asked before."""
    plan = asked.plan
    check_experts(plan, chain)
    facts = facts_for(asked.recipe, asked.spec)
    replace(plan, ep=1).check(facts)
    # Blocks are counted above; of a module without any, every layer can be a stage.
    num_stages = plan.num_stages if plan.pp > 1 else 1
    if facts.num_units is None and not facts.num_blocks and num_stages > len(chain.layers):
        raise RequestError(
            f"plan {str(plan)!r} wants {num_stages} stages, and {chain.name} can be cut into {len(chain.layers)}; "
            f"lower pp or chunks"
        )


def _bytes(job: Job, plan: Plan) -> StepBytes:
    """States of every pipeline rank, and what one microbatch leaves behind in every stage."""
    chain = job.chain
    samples = job.global_batch / ((plan.dp or 1) * (plan.microbatches or 1))
    kept = [rank_kept_bytes(layer, job, plan, plan.recompute) for layer in chain.distinct]
    stages = count_stages(chain, plan.pp * (plan.chunks or 1))
    return StepBytes(
        places=tuple(
            RankBytes(
                weights=memory.weights,
                gradients=memory.gradients,
                optimizer=memory.optimizer,
                other=memory.working + memory.versions + memory.context_bytes,
            )
            for memory in price_memory(job, plan)
        ),
        activations=tuple(samples * sum(kept[layer] * count for layer, count in counted.items()) for counted in stages),
    )


@dataclass
class Simulation:
    """A step of one site, as it was played."""

    asked: Asked
    """The recipe, the cluster and the plan."""
    priced: Priced
    """What each action and transfer of the step costs."""
    simulated: SimulatedStep
    """The step as events, rank by rank."""
    seconds: Array
    """Of the steps that were played, in their order."""
    result: dict[str, Any]
    """What ``shoal simulate --json`` writes."""
    step_seconds: float
    """From one step to the next, averages between sites included."""
    rounds: PlayedRounds | None = None
    """Steps of all islands with their rounds."""

    @property
    def plan(self) -> Plan:
        """The plan that was played, everything derived."""
        return self.asked.plan

    @property
    def tokens_per_second(self) -> float:
        """Of the whole cluster; samples where a sample is one item."""
        return float(self.result["tokens_per_second"])

    @property
    def bubble(self) -> float:
        """Share of the ranks' time in which they are idle."""
        return float(self.result["bubble"])

    @property
    def fits(self) -> bool:
        """True where every rank has room for what it holds at its fullest."""
        return bool(self.result["fits"])

    def as_values(self) -> dict[str, Any]:
        """What ``shoal simulate --json`` writes."""
        return self.result


def simulate(
    recipe: RecipeLike,
    cluster: str,
    plan: str | Plan | None = None,
    *,
    global_batch: int | None = None,
    devices: int | None = None,
    sites: int | None = None,
    overrides: Sequence[str] = (),
    svg: Path | None = None,
    trace: Path | None = None,
    run_dir: Path | None = None,
    expand: bool = False,
    options: SimulationOptions | None = None,
) -> Simulation:
    """Play a plan of a recipe on a cluster that need not be here, as ``shoal simulate`` does.

    Args:
        recipe: the path of a recipe, its tables as a dict, or a ``Recipe``.
        cluster: a device, nodes and devices of each, such as ``h100:4x8``.
        plan: the plan; the recipe's when left out.
        global_batch: samples of a step; the recipe's, or what the plan needs, when left out.
        devices: devices, in place of the cluster's.
        sites: sites that average seldom, with ``local_steps``.
        overrides: ``section.key=value`` for the recipe, as ``--set`` has them.
        svg: a file to draw the step in.
        trace: a file to write the step to for Perfetto.
        run_dir: a folder to write the events to that a run would.
        expand: every rank in the trace and the run, also where many are alike.
        options: what is slow, what fails, and how sites average; nothing of it when left out.

    Returns:
        The simulation: step time, bubble and memory; ``simulation.as_values()`` is what ``--json`` writes.

    Raises:
        RequestError: one message with the numbers and the fix.
    """
    given = options or SimulationOptions()
    changes = [*overrides, *([f"train.global_batch={global_batch}"] if global_batch is not None else [])]
    request = SimulationRequest(
        recipe=recipe,
        cluster=cluster,
        plan=None if plan is None else str(plan),
        num_devices=devices,
        overrides=tuple(changes),
        num_sites=sites,
        is_local=given.local_steps is not None,
    )
    asked = check_simulation(request, given, own=OwnPartsHere())
    return run_simulation(asked, given, svg=svg, trace=trace, run_dir=run_dir, expand=expand)


def run_simulation(
    asked: Asked,
    options: SimulationOptions,
    *,
    svg: Path | None = None,
    trace: Path | None = None,
    run_dir: Path | None = None,
    expand: bool = False,
) -> Simulation:
    """Play a request that was checked, and write the files that are asked for."""
    conditions, failing, seed = options.conditions, options.failing, options.seed
    played = play(asked, conditions, num_steps=options.steps)
    if options.local_steps is not None:
        played.result["wide_area"] = average_sites(
            played, conditions, period=options.local_steps, wan=options.wan, compression=options.compression
        )
    elif asked.plan.islands > 1:
        played.result["wide_area"] = agree_islands(played, conditions, num_steps=options.steps)
    if failing is not None:
        played.result["goodput"] = play_failures(played, failing, seed=seed)
    write_files(played, svg=svg, trace=trace, run_dir=run_dir, expand=expand, failing=failing, seed=seed)
    return played


def play(asked: Asked, conditions: Conditions, *, num_steps: int | None) -> Simulation:
    """Play steps of one site, and describe them as the result of ``shoal simulate``."""
    own = _split(conditions, asked)[0] if asked.num_sites > 1 else conditions
    priced = price_asked(asked)
    plan = asked.site_plan
    simulated = simulate_step(priced.parts, plan=plan, conditions=own, needed=priced.needed)
    most = most_steps(plan, asked.plan.microbatches or 1, conditions, num_sites=asked.num_sites)
    count = num_steps or (min(_DRAWN, most) if conditions.varies else 1)
    seconds = step_times(priced.parts, simulated.order.schedule, plan=plan, conditions=own, num_steps=count)
    tokens = asked.global_batch * priced.tokens
    result = {
        "cluster": asked.cluster.device.name,
        "devices": asked.plan.world_size,
        "global_batch": asked.global_batch,
        "micro_batch": asked.micro_batch,
        "device_memory_bytes": asked.cluster.device.memory_bytes,
        **describe_step(simulated, seconds, tokens=tokens),
        "plan": str(asked.plan),
        "site_plan": str(plan) if asked.num_sites > 1 else None,
        "world_size": asked.plan.world_size,
        "conditions": {
            "slow": [str(each) for each in conditions.slow],
            "jitter": conditions.jitter,
            "link_jitter": conditions.link_jitter,
            "seed": conditions.seed,
        },
        "fits": _fits(simulated, asked),
        "remarks": [*([] if asked.derived is None else [asked.derived]), *asked.warnings],
        "goodput": None,
        "wide_area": None,
        "equals_one_process": is_exact(asked.plan),
        "agreed": _describe_agreement(priced),
    }
    return Simulation(asked, priced, simulated, seconds, result, float(seconds.mean()))


def _fits(simulated: SimulatedStep, asked: Asked) -> bool:
    """Whether every rank has room for what it holds at its fullest."""
    peaks = [simulated.peak_bytes(place) or 0.0 for place in range(simulated.num_places)]
    return max(peaks) <= asked.cluster.device.memory_bytes


def _split(conditions: Conditions, asked: Asked) -> tuple[Conditions, ...]:
    """The conditions of each site, or island."""
    if asked.plan.islands > 1:
        return split_islands(conditions, asked.plan)
    return split_sites(conditions, asked.plan, asked.num_sites)


def _describe_agreement(priced: Priced) -> dict[str, Any] | None:
    """What a rank moves and keeps so that replicas agree; None where they sum everything at every step."""
    times = priced.agreement
    if times is None:
        return None
    return {
        "cycle_steps": len(times.sent),
        "counted": traffic_rows(priced.counted),
        "bytes_per_step": times.bytes_per_step,
        "codec_seconds": times.codec_seconds,
        "state_bytes": priced.kept_bytes,
    }


def agree_islands(played: Simulation, conditions: Conditions, *, num_steps: int | None) -> dict[str, Any]:
    """Let islands agree by the plan's ``sync``; the steps of ``played`` are then as long as they are with the rounds."""
    asked, times = played.asked, played.priced.agreement
    assert times is not None, "islands agree somehow"
    rule = SyncRule.parse(asked.plan.sync)
    rounds = Rounds(
        num_sites=asked.num_sites,
        meets=tuple(sent > 0 for sent in times.sent),
        exchange=times.exchange,
        work=tuple(codec + update for codec, update in zip(times.codec, times.update, strict=True)),
        sent=times.sent,
        delay=times.delay,
        told=times.told,
    )
    wanted = max(rounds.length, num_steps or len(played.seconds))
    count = -(-wanted // rounds.length) * rounds.length
    found = play_rounds(
        _site_steps(played, conditions, count),
        rounds,
        period=rule.period if rule.seconds is None else rounds.length,
        link_jitter=conditions.link_jitter,
        seed=conditions.seed,
    )
    tokens, alone = played.result["tokens_per_step"], played.step_seconds
    played.rounds, played.seconds = found, found.seconds
    played.step_seconds = float(found.seconds.mean())
    played.result.update(
        step_seconds=played.step_seconds,
        tokens_per_second=tokens / played.step_seconds,
        steps=describe_steps(found.seconds),
    )
    return describe_islands(rounds, found.pace, policy=str(rule), step_seconds=alone, tokens=tokens)


def _site_steps(played: Simulation, conditions: Conditions, count: int) -> Array:
    """Seconds of every site's steps, by (site, step)."""
    asked, schedule = played.asked, played.simulated.order.schedule
    known: dict[Any, Array] = {}
    rows = []
    for site in _split(conditions, asked):
        # Sites without draws of their own that are slow in the same places are alike.
        key = site.slow if not site.varies else site
        if key not in known:
            known[key] = step_times(
                played.priced.parts, schedule, plan=asked.site_plan, conditions=site, num_steps=count
            )
        rows.append(known[key])
    return np.array(rows)


def average_sites(
    played: Simulation, conditions: Conditions, *, period: int, wan: str, compression: float
) -> dict[str, Any]:
    """Let sites average every ``period`` steps; the step of ``played`` is then as long as it is with the averages."""
    asked, link = played.asked, find_link(wan)
    updates = LocalUpdates(
        period=period,
        num_sites=asked.num_sites,
        num_bytes=played.priced.weight_bytes,
        bandwidth=link.bandwidth,
        latency=link.latency,
        compression=compression,
    )
    steps = _site_steps(played, conditions, max(period, len(played.seconds)))
    pace = simulate_rounds(steps, updates, link_jitter=conditions.link_jitter, seed=conditions.seed)
    tokens = played.result["tokens_per_step"]
    found = describe_sites(updates, pace, step_seconds=played.step_seconds, tokens=tokens)
    played.step_seconds = 1.0 / pace.steps_per_second
    return found


def _run_with_failures(played: Simulation, failing: FailureOptions, *, num_steps: int, seed: int) -> Goodput:
    num_devices = played.asked.plan.world_size
    return simulate_goodput(
        failing.of(num_devices),
        step_seconds=played.step_seconds,
        interval_steps=failing.steps_between(played.step_seconds, num_devices),
        num_steps=num_steps,
        seed=seed,
    )


def play_failures(played: Simulation, failing: FailureOptions, *, seed: int) -> dict[str, Any]:
    """Let devices fail over days of work, and describe the goodput."""
    num_steps = max(1, round(failing.days * 86_400.0 / played.step_seconds))
    run = _run_with_failures(played, failing, num_steps=num_steps, seed=seed)
    failures = failing.of(played.asked.plan.world_size)
    return {"days": failing.days, **describe_goodput(failures, run, step_seconds=played.step_seconds)}


def write_files(
    played: Simulation,
    *,
    svg: Path | None,
    trace: Path | None,
    run_dir: Path | None,
    expand: bool,
    failing: FailureOptions | None,
    seed: int,
) -> None:
    """Write the files that the user asks for, and name them in the result.

    Raises:
        RequestError: a run directory cannot show sites that average seldom.
    """
    files: dict[str, str] = {}
    lanes = num_lanes(played.simulated, expand=expand)
    cut = [name for name, path in (("the picture", svg), ("the trace", None if expand else trace)) if path is not None]
    if cut and lanes > MOST_LANES:
        what = "ranks" if expand else "groups of ranks"
        verb = "show" if len(cut) > 1 else "shows"
        played.result["remarks"].append(
            f"{' and '.join(cut)} {verb} {MOST_LANES} of {lanes} {what}, the slowest replica's first"
        )
    if svg is not None:
        svg.write_text(draw_step(played.simulated, expand=expand))
        files["svg"] = str(svg)
    if trace is not None:
        write_trace(trace, played.simulated, expand=expand)
        files["trace"] = str(trace)
    if run_dir is not None:
        _write_run(played, run_dir, expand=expand, failing=failing, seed=seed)
        files["run_dir"] = str(run_dir)
    played.result["files"] = files


def _write_run(played: Simulation, run_dir: Path, *, expand: bool, failing: FailureOptions | None, seed: int) -> None:
    asked, seconds = played.asked, played.seconds
    rounds = played.rounds
    if asked.num_sites > 1 and rounds is None:
        raise RequestError("--run-dir writes runs that plans name: write sync=local:H in the plan, or leave it out")
    goodput = None
    if failing is not None:
        # Failures fall on steps of one length: the mean of those that were played.
        seconds = np.full(len(seconds), played.step_seconds)
        goodput = _run_with_failures(played, failing, num_steps=len(seconds), seed=seed)
    numbers = RunNumbers(
        samples=asked.global_batch,
        tokens=round(played.result["tokens_per_step"]),
        weight_bytes=played.priced.weight_bytes,
        checkpoint_every=0 if failing is None else asked.recipe.checkpoint.every,
        checkpoint_seconds=0.0 if failing is None else failing.checkpoint,
        memory_every=asked.recipe.telemetry.memory_every,
        spans_every=asked.recipe.telemetry.spans_every,
        plan=asked.plan,
        rounds={}
        if rounds is None
        else {int(at) + 1: float(rounds.waited[at]) for at in np.flatnonzero(rounds.has_round)},
    )
    write_run(run_dir, played.simulated, seconds, numbers=numbers, goodput=goodput, expand=expand)
    replace_text(RunDir(run_dir).recipe, dump_recipe(asked.recipe))
