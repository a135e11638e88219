"""Weights that a model starts from: a Shoal checkpoint, a safetensors file, or a Hugging Face folder, read by slices.

``match`` decides, from names and shapes alone, which tensor of the files goes where; ``SourceOfWeights.read`` then gives each
rank its own part of each, cut as its placement says. So a rank reads what it holds, under every plan, and the decision itself
needs no bytes: the check before a run makes it too.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path

import torch
from torch import Tensor, nn

from shoal.checkpoint.files import MANIFEST, NotWhole, folder
from shoal.checkpoint.foreign import ForeignWeights, is_foreign, read_foreign
from shoal.checkpoint.manifest import TensorEntry
from shoal.checkpoint.reader import fill_from, read_local
from shoal.checkpoint.shard import ITEM_BYTES
from shoal.checkpoint.whole import locate, read_manifest
from shoal.core.errors import RequestError
from shoal.core.placement import Placement, Shape, place_whole

WEIGHTS = "weights/"
"""Prefix of the names of weights in a checkpoint."""
_TOGETHER = 256 * 2**20
"""Bytes of a checkpoint's tensors that are read in one pass: each has its own chunks to check."""
_MAX_NAMED = 5
# What peft puts around and into the names of the module that it adapts.
_ADAPTED, _BASE, _ADAPTER = "base_model.model.", ".base_layer.", ".lora_"


@dataclass(frozen=True, kw_only=True)
class Selection:
    """How the names of files become those of a model, and which of them count."""

    strict: bool = True
    """Every tensor of the model must be in the files, and every tensor of the files in the model."""
    prefix: str = ""
    """Names in the files begin with it, and it is taken off; what does not begin with it is left alone."""
    rename: Mapping[str, str] = field(default_factory=dict)
    """Beginnings of names in the files, after the prefix, to what the model has in their place."""
    only: tuple[str, ...] = ()
    """Patterns of the model's names to load; all when empty."""
    skip: tuple[str, ...] = ()
    """Patterns of the model's names that are left as they are."""

    def rename_one(self, name: str) -> str | None:
        """What the model calls a tensor of the files; None for one that is left alone."""
        if not name.startswith(self.prefix):
            return None
        name = name.removeprefix(self.prefix)
        for old in sorted(self.rename, key=len, reverse=True):
            if name == old or not old or name.startswith(old if old.endswith(".") else f"{old}."):
                return self.rename[old] + name.removeprefix(old)
        return name

    def wants(self, name: str) -> bool:
        """Whether a tensor of the model is to be loaded."""
        chosen = not self.only or any(fnmatchcase(name, pattern) for pattern in self.only)
        return chosen and not any(fnmatchcase(name, pattern) for pattern in self.skip)


@dataclass(frozen=True, kw_only=True)
class LoadedWeights:
    """Which tensors were loaded, and which names did not match."""

    loaded: Mapping[str, str]
    """Names in the files by names of the model."""
    missing: tuple[str, ...]
    """Of the model, and not in the files."""
    unexpected: tuple[str, ...]
    """Of the files, and not in the model; as the model would call them."""


Wanted = Mapping[tuple[str, ...], Shape]
"""The tensors of a model: all names of each, the first one in front, and its whole shape."""


def match(wanted: Wanted, given: Mapping[str, Shape], selection: Selection, *, origin: str) -> LoadedWeights:
    """Which tensor of the files goes where.

    A tensor that several modules share is found by any of its names. What peft adapts is found by its own name too, and the
    adapters themselves need not be in the files.

    Raises:
        RequestError: shapes differ, nothing matches, two tensors of the files get one name, or names did not match and
            ``strict`` is set. One message names them all.
    """
    renamed: dict[str, str] = {}
    for name in sorted(given):
        own = selection.rename_one(name)
        if own in renamed and own is not None:
            raise RequestError(f"weights {origin}: {name!r} and {renamed[own]!r} would both be loaded as {own!r}")
        if own is not None:
            renamed[own] = name
    loaded: dict[str, str] = {}
    missing, used, others = [], set(), []
    for names, shape in wanted.items():
        aliases = [*names, *(plain for name in names if (plain := _plain(name)) != name)]
        found = next((alias for alias in aliases if alias in renamed), None)
        # The other names of a shared tensor are of the model too.
        used.update(aliases)
        if not selection.wants(names[0]):
            continue
        if found is None:
            missing.extend([names[0]] if _ADAPTER not in names[0] else [])
        elif given[renamed[found]] != shape:
            others.append(f"{names[0]!r} is {list(given[renamed[found]])} there and {list(shape)} in the model")
        else:
            loaded[names[0]] = renamed[found]
    # With ``only`` a part is loaded, and the rest of the files is not expected to fit.
    unexpected = sorted(name for name in renamed if name not in used and selection.wants(name))
    if others:
        raise RequestError(
            f"weights {origin} have other shapes: {_some(others)}; leave such tensors as they are with skip, or load another file"
        )
    if not loaded or (selection.strict and (missing or unexpected)):
        raise RequestError(_explain(missing, unexpected, sorted(renamed), selection, origin=origin))
    return LoadedWeights(loaded=loaded, missing=tuple(missing), unexpected=tuple(unexpected))


def _plain(name: str) -> str:
    """What a tensor was called before peft adapted its module."""
    return name.removeprefix(_ADAPTED).replace(_BASE, ".")


def _explain(
    missing: Sequence[str], unexpected: Sequence[str], given: Sequence[str], selection: Selection, *, origin: str
) -> str:
    parts = []
    if missing:
        parts.append(f"{len(missing)} tensors of the model are not in them ({_some([repr(name) for name in missing])})")
    if unexpected:
        parts.append(f"{len(unexpected)} of theirs are not in the model ({_some([repr(name) for name in unexpected])})")
    hint = (
        "" if not selection.strict else "; strict=false loads what fits, skip leaves names out, and rename changes them"
    )
    for name in missing:
        longer = next((other for other in given if other.endswith(f".{name}")), None)
        if longer is not None:
            hint = f"; did you mean prefix {selection.prefix + longer.removesuffix(name)!r}?"
            break
        shorter = next((other for other in given if name.endswith(f".{other}")), None)
        if shorter is not None:
            hint = f"; did you mean rename {{'': {name.removesuffix(shorter)!r}}}?"
            break
    return f"weights {origin} do not fit the model: {' and '.join(parts) or 'no name of them matches'}{hint}"


def _some(named: Sequence[str]) -> str:
    left = len(named) - _MAX_NAMED
    return ", ".join(named[:_MAX_NAMED]) + (f" and {left} more" if left > 0 else "")


class SourceOfWeights:
    """Files of weights that were found and whose headers were checked."""

    def __init__(self, path: Path, tensors: Mapping[str, TensorEntry], foreign: ForeignWeights | None) -> None:
        self.path = path
        self._foreign = foreign
        self._tensors = tensors

    @property
    def shapes(self) -> dict[str, Shape]:
        """Whole shapes, by the names of the files."""
        return {name: entry.shape for name, entry in self._tensors.items()}

    def read(self, placements: Mapping[str, Placement]) -> Iterator[tuple[str, Tensor]]:
        """The parts of tensors that placements name, by the names of the files, a few at a time.

        Raises:
            NotWhole: bytes are missing, or a checkpoint's are not those that were written.
        """
        if self._foreign is not None:
            for name, placement in placements.items():
                yield from fill_from(self._tensors, {name: placement}, self._foreign.read_spans).items()
            return
        for together in self._in_passes(placements):
            found = read_local(self.path, {f"{WEIGHTS}{name}": placement for name, placement in together.items()})
            yield from ((name.removeprefix(WEIGHTS), tensor) for name, tensor in found.items())

    def _in_passes(self, placements: Mapping[str, Placement]) -> Iterator[dict[str, Placement]]:
        """The placements in the order in which their tensors lie in the files, so much at a time."""
        order = sorted(placements, key=lambda name: (self._tensors[name].pieces[0].file, name))
        together: dict[str, Placement] = {}
        size = 0
        for name in order:
            numel = torch.Size(placements[name].local_shape).numel()
            own = numel * ITEM_BYTES[self._tensors[name].dtype]
            if together and size + own > _TOGETHER:
                yield together
                together, size = {}, 0
            together[name] = placements[name]
            size += own
        if together:
            yield together


def open_weights(path: Path) -> SourceOfWeights:
    """Find weights: a checkpoint, a run directory (its newest whole checkpoint), a safetensors file or a Hugging Face folder.

    Raises:
        RequestError: there is nothing of the kind.
        NotWhole: a file is not what it must be; names it.
    """
    path = path.expanduser()
    if not path.exists():
        raise RequestError(f"there are no weights at {path}: no such file or folder")
    is_checkpoint = path.is_dir() and (path / MANIFEST).exists()
    if not is_checkpoint and (is_foreign(path) or not path.is_dir() or not _may_be_run(path)):
        foreign = read_foreign(path)
        return SourceOfWeights(path, foreign.tensors, foreign)
    path = locate(path)
    try:
        with folder(path) as folder_fd:
            manifest = read_manifest(folder_fd, path)
    except NotWhole as error:
        raise NotWhole(f"checkpoint {path} is not whole: {error}") from error
    tensors = {
        name.removeprefix(WEIGHTS): entry for name, entry in manifest.tensors.items() if name.startswith(WEIGHTS)
    }
    return SourceOfWeights(path, tensors, None)


def _may_be_run(path: Path) -> bool:
    """True for a run directory or a folder of checkpoints."""
    return (path / "checkpoints").is_dir() or any(one.name.startswith("step-") for one in path.iterdir())


def wanted_of(model: nn.Module) -> Wanted:
    """The saved tensors of a plain module."""
    return {names: tuple(tensor.shape) for names, tensor in _saved(model)}


def load_module(model: nn.Module, path: Path, selection: Selection) -> LoadedWeights:
    """Copy weights into a plain module, which holds its tensors whole; its types and devices stay as they are.

    Raises:
        RequestError: they do not fit; see ``match``.
        NotWhole: a file is not what it must be.
    """
    source = open_weights(path)
    decided = match(wanted_of(model), source.shapes, selection, origin=str(path))
    targets = {names[0]: tensor for names, tensor in _saved(model)}
    placements = {name: place_whole(targets[name].shape) for name in decided.loaded}
    copy_weights(source, decided, targets, placements)
    return decided


@torch.no_grad()
def copy_weights(
    source: SourceOfWeights,
    decided: LoadedWeights,
    targets: Mapping[str, Tensor],
    placements: Mapping[str, Placement],
) -> None:
    """Fill local tensors, by the names of the model, from what was matched; those that are not among the targets are not read.

    Raises:
        RequestError: numbers would be loaded into a tensor of another kind, such as fractions into whole numbers.
    """
    of_file: dict[str, list[str]] = {}
    for name, given in decided.loaded.items():
        if name in targets:
            of_file.setdefault(given, []).append(name)
    # One tensor of a file goes into one of the model, so its placement is that one's.
    for given, tensor in source.read({given: placements[names[0]] for given, names in of_file.items()}):
        for name in of_file[given]:
            target = targets[name]
            if target.is_floating_point() != tensor.is_floating_point():
                raise RequestError(
                    f"weights {source.path}: {given!r} is {tensor.dtype}, and the model has {target.dtype}; name it in skip"
                )
            target.copy_(tensor)


def _saved(model: nn.Module) -> list[tuple[tuple[str, ...], Tensor]]:
    """All names of each saved tensor of a module, and the tensor, in the order of first names."""
    names: dict[int, list[str]] = {}
    tensors: dict[int, Tensor] = {}
    for name, tensor in sorted(model.state_dict(keep_vars=True).items()):
        if isinstance(tensor, Tensor):
            names.setdefault(id(tensor), []).append(name)
            tensors[id(tensor)] = tensor
    return [(tuple(names[key]), tensor.detach()) for key, tensor in tensors.items()]


def patterns(value: str | Collection[str]) -> tuple[str, ...]:
    """One pattern or several, as several."""
    return (value,) if isinstance(value, str) else tuple(value)
