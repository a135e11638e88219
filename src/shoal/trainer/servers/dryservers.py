"""What servers and workers of a run would hold, without starting any: for the dry run."""

from collections.abc import Mapping

from shoal.core.units import format_bytes
from shoal.optim.build import num_state_bytes
from shoal.optim.config import OptimConfig
from shoal.paramserver.config import ParamServerConfig
from shoal.paramserver.cutting import ITEM_BYTES, Model
from shoal.trainer.servers.hot import cut_for


def sizes_with_servers(
    model: Model,
    *,
    num_servers: int,
    num_backups: int,
    num_workers: int,
    ranks_per_worker: int,
    part: Mapping[str, int],
    optim: OptimConfig,
    config: ParamServerConfig,
) -> tuple[dict[str, int], list[str]]:
    """Bytes that the fullest process keeps, by what they are for; and the shards in words.

    Args:
        model: the trained parameters.
        num_servers: servers.
        num_backups: of each shard.
        num_workers: workers.
        ranks_per_worker: processes of each.
        part: bytes of the fullest rank of a worker that is a group, by what they are for; not read where it is none.
        optim: the optimizer.
        config: how the model is cut.
    """
    shard_map = cut_for(model, num_servers, config=config, optimizer=optim.name)
    shards = [shard_map.num_bytes(number) for number in range(num_servers)]
    item = ITEM_BYTES[shard_map.dtype]
    states = [num_state_bytes(optim, [piece.numel for piece in shard.pieces], item) for shard in shard_map.shards]
    # A server keeps its own shard and those that it backs up, each with its state; a push waits there for its round.
    held = [_of_server(shards, number, num_backups) for number in range(num_servers)]
    state = [_of_server(states, number, num_backups) for number in range(num_servers)]
    whole = sum(shards)
    server = {"weights": max(held), "gradients": max(held) * num_workers, "optimizer": max(state), "working": 0}
    worker = {"weights": whole, "gradients": 2 * whole, "optimizer": 0, "working": 0}
    each = f"each with the whole model of {format_bytes(whole)}"
    if ranks_per_worker > 1:
        # The first of a group has whole weights and gradients beside its part, and a message for each of the others.
        worker["weights"] += part["weights"]
        worker["gradients"] += part["gradients"]
        worker["working"] = part["working"] + 2 * (ranks_per_worker - 1) * part["weights"]
        each = (
            f"each a group of {ranks_per_worker} ranks, the first with whole weights and gradients of {format_bytes(whole)} "
            f"beside its part"
        )
    fullest = max((server, worker), key=lambda sizes: sum(sizes.values()))
    lines = [
        f"servers       {num_servers}, with shards of {', '.join(format_bytes(size) for size in shards)}"
        + (f"; {len(shard_map.cut_names)} parameters lie on two or more" if shard_map.cut_names else ""),
        f"backups       {num_backups} of each shard"
        + (
            "; what was acknowledged survives the death of a server"
            if num_backups
            else "; a dead server means the checkpoint"
        ),
        f"workers       {num_workers}, {each} ({whole // item} elements of {shard_map.dtype})",
    ]
    return {**fullest, "total": sum(fullest.values())}, lines


def _of_server(sizes: list[int], server: int, num_backups: int) -> int:
    """What a server has of something, by shard: its own and that of the shards before it."""
    return sum(sizes[(server - behind) % len(sizes)] for behind in range(num_backups + 1))
