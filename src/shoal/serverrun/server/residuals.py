"""What workers have not sent yet, in the checkpoints of a run with parameter servers, by the names of every other run.

    compression/method/<kind>/<workers>              as in ``engine/compression/saved.py``
    compression/residual/<worker>/<parameter>        by the worker's place

The same number of workers go on to the bit; of another number the first takes the sum.
"""

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from shoal.checkpoint.reader import read_local
from shoal.checkpoint.whole import glance
from shoal.core.placement import Placement, place_whole
from shoal.engine.compression.saved import PREFIX, method_of, saved_method
from shoal.paramserver.pushcodec import PushCodec
from shoal.paramserver.server.kept import share_out
from shoal.paramserver.server.shard import ShardState


def held_residuals(
    state: ShardState, saved_names: Mapping[str, str], step: int
) -> tuple[dict[str, Tensor], dict[str, Placement], list[int]]:
    """A shard's part of every worker's residual by checkpoint name, where it lies, and the workers that have told nothing of it.

    Nothing of a step after which workers do not tell it: the end of a run that was stopped between two checkpoints.
    """
    codec, kept = state.codec, state.kept
    if codec is None or kept is None or not codec.is_saved_after(step):
        return {}, {}, []
    tensors: dict[str, Tensor] = {}
    placements: dict[str, Placement] = {}
    found = kept.current()
    workers, number = codec.num_shares, state.shard.number
    for index in range(workers):
        flat = found.get(index)
        flat = torch.zeros(kept.numel) if flat is None else flat
        for name, rows, place in _pieces(state, codec, flat):
            key = f"{PREFIX}residual/{index}/{saved_names[name]}#{number}"
            tensors[key], placements[key] = rows, place
    if number == 0:
        key = f"{PREFIX}method/{method_of(codec.rule)}/{workers}"
        tensors[key] = torch.tensor(workers)
        placements[key] = place_whole(())
    is_due = codec.is_on((step - 1) * codec.num_shares) and kept.numel > 0
    return tensors, placements, [index for index in range(workers) if is_due and index not in found]


def load_residuals(state: ShardState, path: Path, saved_names: Mapping[str, str], *, expect: str | None) -> str | None:
    """Give a shard what a checkpoint has of its workers' residuals; what to tell the user of it."""
    codec, kept = state.codec, state.kept
    saved = set(glance(path).tensors)
    method = saved_method(saved)
    if codec is None or kept is None:
        return (
            None
            if method is None
            else f"what compress={method[0]} had not sent yet is dropped: this run does not keep it"
        )
    if method is None:
        return f"the checkpoint has no residuals of compress={codec.rule}: workers begin with nothing kept"
    if method[0] != method_of(codec.rule):
        return (
            f"the checkpoint is of compress={method[0]}, and this plan has compress={codec.rule}: "
            "what was not sent yet is dropped"
        )
    places = {name: place for name, _, place in _pieces(state, codec, torch.zeros(kept.numel))}
    wanted = {
        f"{PREFIX}residual/{index}/{saved_names[name]}": place
        for index in range(method[1])
        for name, place in places.items()
    }
    loaded = read_local(path, {key: place for key, place in wanted.items() if key in saved}, expect=expect)
    by_worker = {
        index: torch.cat(
            [
                loaded.get(f"{PREFIX}residual/{index}/{saved_names[name]}", torch.zeros(place.local_shape)).reshape(-1)
                for name, place in places.items()
            ]
        )
        for index in range(method[1])
        if places
    }
    shared = share_out(by_worker, saved_workers=method[1], workers=codec.num_shares)
    kept.begin(shared)
    if method[1] == codec.num_shares:
        return None
    return (
        f"the checkpoint's residuals are of {method[1]} replicas, here are {codec.num_shares}: worker 0 takes their sum"
    )


def _pieces(state: ShardState, codec: PushCodec, flat: Tensor) -> list[tuple[str, Tensor, Placement]]:
    """The slices of a flat residual as rows of their parameters, each with where it lies in the whole."""
    places, start = state.placements(), 0
    found = []
    for piece, is_packed in codec.pieces(state.shard):
        if is_packed:
            rows = flat[start : start + piece.numel].view(-1, *state.model[piece.name].shape[1:])
            found.append((piece.name, rows, places[piece.name]))
            start += piece.numel
    return found
