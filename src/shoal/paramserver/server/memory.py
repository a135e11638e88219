"""What servers and workers of a run would hold, without starting any: for the dry run.

Counted are tensors of the model's size that stay, or come with every step: activations depend on the input, and messages are
under way for a moment only.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from shoal.core.plan import Plan
from shoal.core.units import format_bytes
from shoal.core.updaterule import UpdateRule
from shoal.optim.build import num_state_bytes
from shoal.optim.config import OptimConfig
from shoal.paramserver.config import ParamServerConfig, pulls_ahead, unit_samples
from shoal.paramserver.lbfgs.algorithm import pair_names
from shoal.paramserver.lbfgs.line_search import GRADIENTS_HELD
from shoal.paramserver.server.shard import VERSIONS_REMEMBERED
from shoal.paramserver.sharding import ITEM_BYTES, Model, ShardMap, cut_for

Sizes = dict[str, int]
"""Bytes by what they are for: weights, gradients, optimizer and working."""


@dataclass(frozen=True, kw_only=True)
class RoleSizes:
    """Bytes of the fullest process of each role, and the shards in words."""

    server: Sizes
    worker: Sizes
    lines: list[str]

    @property
    def by_role(self) -> dict[str, Sizes]:
        """With totals."""
        roles = {"server": self.server, "worker": self.worker}
        return {role: {**sizes, "total": sum(sizes.values())} for role, sizes in roles.items()}


def sizes_with_servers(
    model: Model,
    plan: Plan,
    *,
    config: ParamServerConfig,
    optim: OptimConfig,
    global_batch: int,
    part: Mapping[str, int],
    fixed: int,
) -> RoleSizes:
    """What the roles of a plan would hold.

    Args:
        model: the trained parameters.
        plan: with servers, and every number filled in.
        config: ``[paramserver]``.
        optim: the optimizer.
        global_batch: samples of a step.
        part: bytes of the fullest rank of a worker that is a group, by what they are for; not read where it is none.
        fixed: bytes of what is saved and not trained.
    """
    rule = UpdateRule.parse(plan.update or "bsp").resolve(plan.num_shares)
    shard_map = cut_for(model, plan.ps, config=config, optimizer=optim.name)
    whole = sum(shard_map.num_bytes(number) for number in range(plan.ps))
    server = _server_sizes(shard_map, config, optim, plan, rule, whole=whole + fixed)
    worker = _worker_sizes(config, rule, whole=whole, fixed=fixed)
    if plan.ranks_per_replica > 1:
        # The first of a group has whole rows beside its part, whose gradients autograd keeps, and a message for each other rank.
        worker["weights"] += part["weights"]
        worker["gradients"] += part["gradients"] - whole
        worker["working"] += part["working"] + 2 * (plan.ranks_per_replica - 1) * part["weights"]
    return RoleSizes(server=server, worker=worker, lines=_describe(shard_map, config, plan, whole, global_batch))


def _server_sizes(
    shard_map: ShardMap, config: ParamServerConfig, optim: OptimConfig, plan: Plan, rule: UpdateRule, *, whole: int
) -> Sizes:
    """Of the fullest server, which keeps its own shard and those that it backs up, and the module that all were made of."""
    item = ITEM_BYTES[shard_map.dtype]
    shards = [shard_map.num_bytes(number) for number in range(plan.ps)]
    states = [num_state_bytes(optim, [piece.numel for piece in shard.pieces], item) for shard in shard_map.shards]
    found = []
    for number in range(plan.ps):
        held = _of_server(shards, number, plan.backup)
        if rule.kind == "lbfgs":
            # The gradient, the sum that it is made of, and a work unit of each worker that came before its turn; the pairs; and
            # within an iteration its start, its direction, the gradient it began with and those of the line search.
            num_held = GRADIENTS_HELD if config.lbfgs_search == "strong_wolfe" else 0
            sizes = {
                "weights": held,
                "gradients": held * (2 + plan.num_shares),
                "optimizer": held * len(pair_names(config.lbfgs_history)),
                "working": held * (3 + num_held),
            }
        else:
            # Pushes wait for their update, those of workers that are ahead too. Where weights are read while they change, they
            # change in other memory, and a late gradient is compensated from old versions.
            num_ahead = rule.staleness or 0
            is_read_beside = rule.staleness != 0
            num_old = VERSIONS_REMEMBERED if config.delay_compensation else 0
            sizes = {
                "weights": held,
                "gradients": held * plan.num_shares * (1 + num_ahead),
                "optimizer": _of_server(states, number, plan.backup),
                "working": held * num_old + (shards[number] if is_read_beside else 0),
            }
        found.append({**sizes, "weights": sizes["weights"] + whole})
    return max(found, key=lambda sizes: sum(sizes.values()))


def _worker_sizes(config: ParamServerConfig, rule: UpdateRule, *, whole: int, fixed: int) -> Sizes:
    """Of a worker of one process: a row of weights, one of gradients, and autograd's own."""
    weights, gradients = 1, 2
    if rule.kind == "downpour":
        # What was pulled, and a copy of it that waits for the next step; what is gathered, and beside these what is being pushed.
        weights, gradients = weights + 2, gradients + 1 + config.overlap
    elif rule.kind == "lbfgs":
        pass
    elif config.local_steps:
        # What was pulled, and where the steps led; their sum, the direction that more than one come to, and that of before.
        weights, gradients = weights + 2, gradients + 2 + (max(config.local_steps) > 1) + config.overlap
    elif pulls_ahead(config, rule):
        weights, gradients = weights + 1, gradients + 1
    elif config.overlap:
        gradients += 1
    return {"weights": weights * whole + fixed, "gradients": gradients * whole, "optimizer": 0, "working": 0}


def _describe(shard_map: ShardMap, config: ParamServerConfig, plan: Plan, whole: int, global_batch: int) -> list[str]:
    shards = [shard_map.num_bytes(number) for number in range(plan.ps)]
    each = f"each with the whole model of {format_bytes(whole)}"
    if plan.ranks_per_replica > 1:
        each = (
            f"each a group of {plan.ranks_per_replica} ranks, the first with whole weights and gradients of "
            f"{format_bytes(whole)} beside its part"
        )
    lines = [
        f"servers       {plan.ps}, with shards of {', '.join(format_bytes(size) for size in shards)}"
        + (f"; {len(shard_map.cut_names)} parameters lie on two or more" if shard_map.cut_names else ""),
        f"backups       {plan.backup} of each shard"
        + (
            "; what was acknowledged survives the death of a server"
            if plan.backup
            else "; a dead server means the checkpoint"
        ),
        f"workers       {plan.num_shares}, {each} ({whole // ITEM_BYTES[shard_map.dtype]} elements of {shard_map.dtype})",
    ]
    sizes = config.unit_sizes(plan.num_shares)
    if sizes is not None:
        samples = unit_samples(global_batch, sizes)
        lines.append(f"work units    of {', '.join(map(str, samples))} samples; activations are those of the largest")
    return lines


def _of_server(sizes: list[int], server: int, num_backups: int) -> int:
    """What a server has of something, by shard: its own and that of the shards before it."""
    return sum(sizes[(server - behind) % len(sizes)] for behind in range(num_backups + 1))
