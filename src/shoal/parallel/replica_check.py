"""A check of real runs: what must be equal on several ranks is hashed and compared, and a difference stops the run by name.

Replicas that have silently drifted apart train on, and every checkpoint is one rank's opinion. A hash per tensor (xxh3, some 10
GB/s) and one gather of 24 bytes per tensor are cheap enough to look every hundred steps; torch's own
``_verify_param_shape_across_processes`` looks at shapes, once.
"""

from collections.abc import Iterable, Mapping, Sequence

import torch
import xxhash
from torch import Tensor

from shoal.comm.mesh import Mesh
from shoal.core.errors import RunError
from shoal.core.placement import Placement, place_whole

# A row of the table that ranks exchange: who it is, which part of it, what is in it. All three are 64-bit hashes.
_WIDTH = 3


def check_replicas(
    tensors: Mapping[str, Tensor],
    placements: Mapping[str, Placement],
    mesh: Mesh,
    *,
    step: int,
    names: Iterable[str] = (),
) -> None:
    """Compare every tensor with the other ranks that hold the same part of it. Every rank calls it, at the same step.

    Args:
        tensors: what this rank holds: weights, buffers and optimizer state.
        placements: where a tensor lies in its whole; one that is not here is whole.
        mesh: the ranks.
        step: for the message.
        names: tensors that other ranks may hold and this one does not, so that it too can say which one differs.

    Raises:
        RunError: on every rank alike; names the first tensor in the order of names, the ranks and the step.
    """
    if mesh.everyone.size == 1:
        return
    rows = torch.tensor(
        [
            [
                _signed(name.encode()),
                _signed(repr(placements.get(name, place_whole(tensor.shape))).encode()),
                _digest(tensor),
            ]
            for name, tensor in sorted(tensors.items())
        ],
        dtype=torch.int64,
    ).reshape(-1, _WIDTH)
    found = find_unequal(_exchange(rows, mesh))
    if not found:
        return
    known = {_signed(name.encode()): name for name in (*tensors, *names)}
    texts = sorted((known.get(key, "a tensor that this rank does not hold"), groups) for key, groups in found.items())
    name, groups = texts[0]
    sides = " and ".join(f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}" for ranks in groups)
    more = f" ({len(found)} tensors differ in all)" if len(found) > 1 else ""
    raise RunError(
        f"step {step}: {name!r} must be the same on all its replicas, and {sides} hold different values{more}; the run "
        "stops before it saves one of them: go on from the last checkpoint, and find out with `shoal verify` which technique "
        "lets them part"
    )


def find_unequal(tables: Sequence[Tensor]) -> dict[int, list[list[int]]]:
    """By hash of the name, the groups of ranks that hold the same part with different contents. Pure.

    Args:
        tables: one per rank, in their order; a row is the hash of the name, of the placement and of the contents.
    """
    held: dict[tuple[int, int], dict[int, list[int]]] = {}
    for rank, table in enumerate(tables):
        for key, place, content in table.tolist():
            held.setdefault((key, place), {}).setdefault(content, []).append(rank)
    return {key: list(groups.values()) for (key, _), groups in held.items() if len(groups) > 1}


def _exchange(rows: Tensor, mesh: Mesh) -> list[Tensor]:
    """Every rank's table; they may be of different lengths, because ZeRO leaves a rank without a row of some tensors."""
    channel = mesh.everyone
    counts = torch.zeros(channel.size, dtype=torch.int64)
    channel.all_gather(torch.tensor([len(rows)], dtype=torch.int64), counts, [1] * channel.size)
    sizes = [int(count) * _WIDTH for count in counts]
    whole = torch.empty(sum(sizes), dtype=torch.int64)
    channel.all_gather(rows.reshape(-1), whole, sizes)
    return [part.reshape(-1, _WIDTH) for part in torch.split(whole, sizes)]


def _digest(tensor: Tensor) -> int:
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return _signed(flat.view(torch.uint8).numpy().data if flat.numel() else b"")


def _signed(data: bytes | memoryview) -> int:
    """64 bits as torch can hold them."""
    return int(xxhash.xxh3_64_intdigest(data)) - (1 << 63)
