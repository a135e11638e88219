"""Which part of its mask every dropout draws under a plan, so that all ranks together draw what one process does.

Under ``sp`` and ``cp`` a rank holds some positions of the sequence, under ``tp`` some features or heads. Each is a ``Window``::

    outside split layers      cp positions, cut again over tp under sp      (batch, here, features)
    between column and row    cp positions, this rank's features            (batch, here, here)
    attention weights         this rank's heads                             (batch, here, queries, keys)
    before the first stack    everything
    after the last stack      cp positions, where the tail keeps them

It acts on plain values: the analysis says where a dropout lies, the mesh where the rank stands.
"""

from collections import defaultdict
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from shoal.comm.mesh import Mesh
from shoal.core.axes import Axis
from shoal.core.errors import RequestError
from shoal.core.plan import Plan
from shoal.parallel.analysis.structure import Heads, ModuleAnalysis, SplitKind, Stack
from shoal.parallel.context.positions import Positions
from shoal.parallel.tensor.sequence import is_cut
from shoal.randomness.dropout import DropoutKey
from shoal.randomness.keyed import Window


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where a rank stands, as far as masks care."""

    tp: int
    tp_rank: int
    positions: Positions | None
    """The positions of a context-parallel rank."""
    cuts_sequence: bool
    """Sequence parallel."""

    def stream(self, dim: int, *, is_cut: bool) -> tuple[Window, ...]:
        """What a rank sees of the sequence; ``is_cut`` where sequence parallelism cuts it once more."""
        chunks, of = ((0,), 1) if self.positions is None else (self.positions.chunks, self.positions.num_chunks)
        if is_cut and self.cuts_sequence:
            chunks, of = cut_again(chunks, of, rank=self.tp_rank, degree=self.tp)
        return () if of == 1 else (Window(dim, chunks, of),)

    def share(self, dim: int) -> tuple[Window, ...]:
        """What a rank sees of split features or heads."""
        return () if self.tp == 1 else (Window(dim, (self.tp_rank,), self.tp),)


def cut_again(chunks: tuple[int, ...], of: int, *, rank: int, degree: int) -> tuple[tuple[int, ...], int]:
    """Chunks laid end to end and cut into ``degree`` equal slices: those of slice ``rank``, in finer chunks."""
    finer = [chunk * degree + part for chunk in chunks for part in range(degree)]
    own = len(chunks)
    return tuple(finer[rank * own : (rank + 1) * own]), of * degree


def narrow_dropouts(key: DropoutKey, *, analysis: ModuleAnalysis, mesh: Mesh, plan: Plan) -> None:
    """Tell every dropout of a model which part of its tensor this rank sees. After the layers are split, under every plan."""
    place = place_of(mesh, plan)
    for stack in analysis.stacks:
        _narrow_stack(key, stack, analysis, place)
    for path, dim in analysis.split_dropouts.items():
        _narrow_split(key, path, dim, analysis, place)
    _narrow_tail(key, analysis, place)


def place_of(mesh: Mesh, plan: Plan) -> Place:
    """Where this rank stands."""
    positions = None
    if mesh.has(Axis.CONTEXT):
        positions = Positions(kind=plan.cp_kind, rank=mesh.coordinate(Axis.CONTEXT), degree=mesh.degree(Axis.CONTEXT))
    return Place(
        tp=mesh.degree(Axis.TENSOR),
        tp_rank=mesh.coordinate(Axis.TENSOR),
        positions=positions,
        cuts_sequence=plan.sp and mesh.has(Axis.TENSOR),
    )


def _narrow_stack(key: DropoutKey, stack: Stack, analysis: ModuleAnalysis, place: Place) -> None:
    dim = stack.sequence_dim
    batch_dim = _batch_dim(dim)
    windows = () if dim is None else place.stream(dim, is_cut=is_cut(analysis, stack))
    for path in key.module_paths:
        if _is_inside(path, stack.blocks) and path not in analysis.split_dropouts:
            key.narrow(path, windows, batch_dim=batch_dim)
    if not windows and place.tp == 1 and batch_dim is None:
        return  # Functional draws see whole tensors, whose batch comes first.
    functional: dict[str, dict[str, Any]] = {path: {} for path in stack.blocks if path not in key.module_paths}
    # Inside split layers the sequence is whole again, but for cp.
    inside = () if dim is None else place.stream(dim, is_cut=False)
    for path, (width, stream_width) in _column_widths(key, stack, analysis, place).items():
        options: dict[str, Any] = {
            "split_width": width,
            "stream_width": stream_width,
            "split": inside + place.share(-1),
        }
        functional.setdefault(path, {}).update(options)
    for heads in analysis.attentions:
        if _is_inside(heads.path, stack.blocks):
            functional.setdefault(heads.path, {})["attention"] = place.share(1) if _is_split(heads, analysis) else ()
    for path, more in functional.items():
        key.narrow(path, windows, batch_dim=batch_dim, **more)


def _narrow_split(key: DropoutKey, path: str, dim: int, analysis: ModuleAnalysis, place: Place) -> None:
    """A dropout between a column and a row layer, or on the weights of a split attention.

    Raises:
        RequestError: it is a function in a module whose layers do not tell which of its tensors are split.
    """
    stack = _stack_of(path, analysis)
    if path not in key.module_paths and any(_is_inside(split.path, (path,)) for split in analysis.splits):
        # A function beside the layers themselves: the width of what it sees decides, call by call.
        is_attention = any(heads.path == path for heads in analysis.attentions)
        if (
            place.tp > 1
            and not is_attention
            and (stack is None or path not in _column_widths(key, stack, analysis, place))
        ):
            raise RequestError(
                f"tp={place.tp}: module {path!r} calls F.dropout on split features, and its layers have more than one width, so "
                f"which part of the mask each call needs cannot be told; use nn.Dropout modules there, or tp=1"
            )
        return
    sequence_dim = None if stack is None else stack.sequence_dim
    if sequence_dim is None or dim == 1:
        # Attention weights (batch, heads, queries, keys), which cp refuses; or features without a sequence.
        key.narrow(path, place.share(dim), batch_dim=0)
        if calls := analysis.dropout_calls.get(path):
            key.narrow_calls(path, [place.share(dim) if is_split else () for is_split in calls])
        return
    windows = place.stream(sequence_dim, is_cut=False) + place.share(dim)
    key.narrow(path, windows, batch_dim=_batch_dim(sequence_dim))
    if stack is not None and (calls := analysis.dropout_calls.get(path)):
        whole = place.stream(sequence_dim, is_cut=is_cut(analysis, stack))
        key.narrow_calls(path, [windows if is_split else whole for is_split in calls])


def _is_split(heads: Heads, analysis: ModuleAnalysis) -> bool:
    return heads.is_torch or any(_is_inside(split.path, (heads.path,)) for split in analysis.splits)


def _column_widths(key: DropoutKey, stack: Stack, analysis: ModuleAnalysis, place: Place) -> dict[str, tuple[int, int]]:
    """Modules with a column layer of their own, outside attention: how many features a rank has, and how many the stream."""
    widths: dict[str, set[tuple[int, int]]] = defaultdict(set)
    attentions = tuple(heads.path for heads in analysis.attentions)
    for split in analysis.splits:
        is_ours = _is_inside(split.path, stack.blocks) and not _is_inside(split.path, attentions)
        if split.kind is not SplitKind.COLUMN or split.parts > 1 or not is_ours or place.tp == 1:
            continue
        layer = key.model.get_submodule(split.path)
        shape = layer.get_parameter("weight").shape
        # Hugging Face's Conv1D keeps its matrix the other way round.
        out, into = reversed(shape) if hasattr(layer, "nf") else shape
        widths[split.path.rpartition(".")[0]].add((int(out), int(into)))
    return {path: next(iter(found)) for path, found in widths.items() if len(found) == 1}


def _narrow_tail(key: DropoutKey, analysis: ModuleAnalysis, place: Place) -> None:
    """Dropouts after the last stack see a context-parallel rank's positions, where the tail keeps them."""
    stacks = [stack for stack in analysis.stacks if stack.sequence_dim is not None]
    if place.positions is None or not analysis.tail_is_pointwise or not stacks:
        return
    last = stacks[-1]
    assert last.sequence_dim is not None
    inside = [block for stack in analysis.stacks for block in stack.blocks]
    key.narrow_after(
        last.blocks[-1],
        inside,
        place.stream(last.sequence_dim, is_cut=False),
        batch_dim=_batch_dim(last.sequence_dim),
    )


def _batch_dim(sequence_dim: int | None) -> int | None:
    """Known only where the sequence comes first; else dim 0, or what the shape says."""
    return 1 if sequence_dim == 0 else None


def _stack_of(path: str, analysis: ModuleAnalysis) -> Stack | None:
    return next((stack for stack in analysis.stacks if _is_inside(path, stack.blocks)), None)


def _is_inside(path: str, parents: Collection[str]) -> bool:
    return any(path == parent or path.startswith(f"{parent}.") for parent in parents)
