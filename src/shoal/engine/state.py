"""The tensors that change while a run trains, on one rank, and their form in a checkpoint.

Weights, buffers and optimizer state have placements, which say where a rank's part lies in the whole. The global random states
of a process have none: Shoal itself draws nothing from them (dropout and order are keyed); they are for what the user's own
code draws. The small rest of a run's state is ``Progress``. A run that loads all of it takes the very step that it would have
taken.
"""

import hashlib
import random
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from shoal.comm.full_tensor import gather_whole, is_spokesman
from shoal.comm.mesh import Mesh
from shoal.core.axes import Axis
from shoal.core.errors import RunError
from shoal.core.placement import Placement, place_whole
from shoal.core.seeding import derive_key
from shoal.optim.build import export_state
from shoal.parallel.apply import ModelLayout
from shoal.parallel.data import Reduction


def named_weights(model: nn.Module) -> dict[str, torch.Tensor]:
    """Parameters and saved buffers by name, in the order of names; a tied tensor appears once, under its first name."""
    seen: dict[int, str] = {}
    found: dict[str, torch.Tensor] = {}
    for name, tensor in sorted(model.state_dict(keep_vars=True).items()):
        if id(tensor) not in seen:
            seen[id(tensor)] = name
            found[name] = tensor.detach()
    return found


@dataclass(frozen=True, kw_only=True)
class RankState:
    """What one rank holds of a run's state, by checkpoint name, and where it lies in the whole."""

    tensors: dict[str, torch.Tensor]
    placements: dict[str, Placement]
    all_weights: frozenset[str]
    """Checkpoint names of every weight of the model, held by this rank or not."""
    has_updates: bool
    """This rank's optimizer updates something; under ZeRO a small model may leave a rank without a row."""


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One saved tensor of a whole model, as tensor parallelism left it on this rank."""

    parameter: str | None
    """The parameter's own name, which for a tied one is its first; None for a buffer."""
    names: tuple[str, ...]
    """What ``state_dict`` calls it, in the order of names: several where modules share it."""
    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    is_trained: bool


Outline = Mapping[str, Entry]
"""Every saved tensor of a whole model by name, in the order of names. A rank of a pipeline keeps some of them."""


def draw_outline(model: nn.Module) -> Outline:
    """The outline of a model; to be drawn before a pipeline lets go of what belongs to other ranks."""
    names = {parameter: name for name, parameter in model.named_parameters()}
    shared: dict[int, list[str]] = {}
    for name, tensor in sorted(model.state_dict(keep_vars=True).items()):
        shared.setdefault(id(tensor), []).append(name)
    return {
        saved_name: Entry(
            parameter=name,
            names=tuple(shared[id(tensor)]),
            shape=tuple(tensor.shape),
            dtype=tensor.dtype,
            device=tensor.device,
            is_trained=tensor.requires_grad,
        )
        for saved_name, (name, tensor) in _saved_names(model, names).items()
    }


def export_rank_state(
    model: nn.Module, optimizer: torch.optim.Optimizer, reduction: Reduction, layout: ModelLayout, outline: Outline
) -> RankState:
    """This rank's part of weights, buffers and optimizer state; the live tensors, not copies.

    A rank that updates only some rows of a parameter holds those rows, whatever else of it is in memory.
    """
    names = {parameter: name for name, parameter in model.named_parameters()}
    tensors: dict[str, torch.Tensor] = {}
    placements: dict[str, Placement] = {}
    saved = _saved_names(model, names)
    for saved_name, (name, tensor) in saved.items():
        if name is not None and tensor.requires_grad:
            if name not in reduction.updated:
                continue
            tensor, placement = reduction.updated[name], reduction.placements[name]
        else:
            placement = layout.placements.get(name or "", place_whole(tensor.shape))
        tensors[f"weights/{saved_name}"] = tensor.detach()
        placements[f"weights/{saved_name}"] = placement
    owned = {parameter: name for name, parameter in reduction.updated.items()}
    for path, tensor in export_state(optimizer, owned).items():
        name = path.rpartition("/")[0]
        has_rows = tensor.shape == reduction.updated[name].shape and tensor.ndim > 0
        tensors[f"optimizer/{path}"] = tensor
        placements[f"optimizer/{path}"] = reduction.placements[name] if has_rows else place_whole(tensor.shape)
    return RankState(
        tensors=tensors,
        placements=placements,
        all_weights=frozenset(f"weights/{name}" for name in outline),
        has_updates=bool(reduction.updated),
    )


@dataclass(frozen=True, kw_only=True)
class Shard:
    """What a rank holds of one tensor."""

    tensor: torch.Tensor
    """The live one: writing to it changes the model."""
    placement: Placement
    """Where it lies in the whole."""


def shards_of(own: RankState, outline: Outline) -> dict[str, Shard]:
    """A rank's weights and saved buffers by the names of torch's ``state_dict``; a shared one under each of its names."""
    found: dict[str, Shard] = {}
    for saved_name, entry in outline.items():
        key = f"weights/{saved_name}"
        if key in own.tensors:
            found |= dict.fromkeys(entry.names, Shard(tensor=own.tensors[key], placement=own.placements[key]))
    return dict(sorted(found.items()))


def _saved_names(model: nn.Module, names: Mapping[nn.Parameter, str]) -> dict[str, tuple[str | None, torch.Tensor]]:
    """By checkpoint name in order: the parameter's own name (None for a buffer) and the tensor."""
    found: dict[str, tuple[str | None, torch.Tensor]] = {}
    seen: set[int] = set()
    for saved_name, tensor in sorted(model.state_dict(keep_vars=True).items()):
        if id(tensor) not in seen:
            seen.add(id(tensor))
            found[saved_name] = (names.get(tensor) if isinstance(tensor, nn.Parameter) else None, tensor)
    return found


def refuse_other_state(own: RankState, saved_names: Iterable[str], *, origin: str) -> None:
    """Refuse a checkpoint that holds more than this run: the state of another model or another optimizer.

    Raises:
        RunError: names the first tensor that is missing or left over.
    """
    saved = set(saved_names)
    weights = {name for name in saved if name.startswith("weights/")}
    for name in sorted(weights ^ own.all_weights):
        side = "the model has no such tensor" if name in weights else "the checkpoint has no such tensor"
        raise RunError(
            f"{origin} does not fit the model: {name.removeprefix('weights/')!r}: {side}; resume with the model of the save"
        )
    if not own.has_updates:
        return  # It cannot know which state its optimizer would have; the ranks that have rows do.
    own_keys = {name.rpartition("/")[2] for name in own.tensors if name.startswith("optimizer/")}
    for name in sorted(name for name in saved if name.startswith("optimizer/")):
        if name.rpartition("/")[2] not in own_keys:
            raise RunError(
                f"{origin} does not fit the optimizer: it holds {name!r}, which this optimizer does not have; "
                "resume with the optimizer of the save"
            )


@torch.no_grad()
def load_rank_state(own: RankState, tensors: Mapping[str, torch.Tensor], *, origin: str) -> None:
    """Copy a checkpoint's tensors, already cut to this rank's part, into the live ones.

    Raises:
        RunError: names the first tensor of another shape or type.
    """
    for name, target in own.tensors.items():
        saved = tensors[name]
        if saved.shape != target.shape or saved.dtype != target.dtype:
            raise RunError(
                f"{origin} does not fit: {name!r} is {saved.dtype} {tuple(saved.shape)} there, and this run needs "
                f"{target.dtype} {tuple(target.shape)}; resume with the model, optimizer and precision it was saved with"
            )
    for name, target in own.tensors.items():
        target.copy_(tensors[name])


def whole_weights(
    outline: Outline,
    own: RankState,
    *,
    layout: ModelLayout,
    mesh: Mesh,
    is_sharded: bool,
    is_first_owner: Callable[[str], bool],
) -> Iterator[tuple[str, torch.Tensor]]:
    """Every weight of the whole model by its name, put together from what the ranks hold. All ranks go through it together.

    Args:
        outline: of the whole model.
        own: what this rank holds.
        layout: what is cut along ``tp``.
        mesh: the ranks.
        is_sharded: what is trained is cut along ``dp``.
        is_first_owner: True for a saved tensor that this rank speaks for among those along ``pp``.
    """
    for saved_name, entry in outline.items():
        key = f"weights/{saved_name}"
        split = layout.placements.get(entry.parameter) if entry.parameter is not None else None
        is_cut = is_sharded and entry.is_trained
        if split is None and not is_cut and not mesh.has(Axis.PIPELINE):
            yield saved_name, own.tensors[key]
            continue
        whole_shape = split.whole_shape if split is not None else entry.shape
        nothing = Placement(whole_shape=whole_shape, local_shape=(0,), patches=())
        speaks = (
            key in own.tensors
            and is_spokesman(mesh, is_split=split is not None, is_sharded=is_cut)
            and is_first_owner(saved_name)
        )
        local = own.tensors[key] if speaks else None
        placement = own.placements[key] if speaks else nothing
        yield saved_name, gather_whole(local, placement, dtype=entry.dtype, device=entry.device, mesh=mesh)


def hash_weights_of(weights: Iterable[tuple[str, torch.Tensor]]) -> str:
    """SHA-256 over weights in the order in which they come, each as its little-endian bytes."""
    digest = hashlib.sha256()
    for _, tensor in weights:
        digest.update(_bytes_of(tensor))
    return digest.hexdigest()


def hash_weights(model: nn.Module) -> str:
    """SHA-256 over the weights of a whole model in the order of their names."""
    return hash_weights_of(named_weights(model).items())


def _bytes_of(tensor: torch.Tensor) -> Any:
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().data if flat.numel() else b""


def import_weights(model: nn.Module, tensors: Mapping[str, torch.Tensor], *, origin: str) -> None:
    """Copy a checkpoint's weights into a model.

    Raises:
        RunError: names the first tensor that is missing, left over or of another shape.
    """
    wanted = named_weights(model)
    given = {name.removeprefix("weights/"): tensor for name, tensor in tensors.items() if name.startswith("weights/")}
    for name in sorted(wanted.keys() ^ given.keys()):
        side = "the model has no such tensor" if name in given else "the checkpoint has no such tensor"
        raise RunError(f"{origin} does not fit the model: {name!r}: {side}")
    for name, tensor in wanted.items():
        if tensor.shape != given[name].shape:
            raise RunError(
                f"{origin} does not fit the model: {name!r} is {tuple(given[name].shape)}, not {tuple(tensor.shape)}"
            )
        tensor.copy_(given[name])


# Words in the state of a Mersenne Twister.
_TABLE = 624


def seed_process(seed: int, *, rank: int) -> None:
    """Give this rank its own streams; ranks must differ, or augmentation would repeat across replicas."""
    key = derive_key(seed, "process", rank)
    torch.manual_seed(key)
    random.seed(key)
    np.random.seed(key % 2**32)


def seed_for_build(seed: int) -> None:
    """Give every rank the same streams: initial weights are what one process would build."""
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)


def export_random_state(rank: int) -> dict[str, torch.Tensor]:
    """The states of torch, Python and numpy, by checkpoint name."""
    _, python_words, python_gauss = random.getstate()
    numpy_state = np.random.get_state(legacy=False)
    assert isinstance(numpy_state, dict), "legacy=False gives a dict"
    words, position = numpy_state["state"]["key"], numpy_state["state"]["pos"]
    tails = {
        "python_tail": [float(python_gauss is not None), python_gauss or 0.0],
        "numpy_tail": [float(position), float(numpy_state["has_gauss"]), float(numpy_state["gauss"])],
    }
    prefix = f"rng/rank-{rank:03d}"
    states = {
        f"{prefix}/torch": torch.get_rng_state(),
        f"{prefix}/python": torch.tensor(python_words, dtype=torch.int64),
        f"{prefix}/numpy": torch.from_numpy(words.astype(np.int64)),
        **{f"{prefix}/{name}": torch.tensor(tail, dtype=torch.float64) for name, tail in tails.items()},
    }
    if torch.cuda.is_available():
        states[f"{prefix}/cuda"] = torch.cuda.get_rng_state()
    return states


def import_random_state(states: Mapping[str, torch.Tensor], rank: int) -> bool:
    """Put back what ``export_random_state`` took; False when the checkpoint has nothing for this rank.

    Raises:
        RunError: a state is not one: numpy would believe a position outside its table, and read memory that is not its own.
    """
    prefix = f"rng/rank-{rank:03d}"
    if f"{prefix}/torch" not in states:
        return False
    try:
        python_words, numpy_words = states[f"{prefix}/python"].tolist(), states[f"{prefix}/numpy"].tolist()
        has_python_gauss, python_gauss = states[f"{prefix}/python_tail"].tolist()
        position, has_gauss, gauss = states[f"{prefix}/numpy_tail"].tolist()
        if len(numpy_words) != _TABLE or not 0 <= position <= _TABLE or has_gauss not in (0, 1):
            raise ValueError(f"{len(numpy_words)} words at position {position}")
        torch.set_rng_state(states[f"{prefix}/torch"])
        random.setstate((3, tuple(python_words), python_gauss if has_python_gauss else None))
        words = np.array(numpy_words, dtype=np.uint32)
        np.random.set_state(("MT19937", words, int(position), int(has_gauss), gauss))
        if f"{prefix}/cuda" in states and torch.cuda.is_available():
            torch.cuda.set_rng_state(states[f"{prefix}/cuda"])
    except (KeyError, TypeError, ValueError, OverflowError, RuntimeError) as error:
        raise RunError(f"the random state of rank {rank} is not one: {error}") from error
    return True
