"""Tensor parallelism: matrices cut over the ranks of ``tp``, along their outputs (column) or their inputs (row).

A column layer gives each rank some of the outputs, whatever lies between works on those alone, and a row layer adds up what
became of them: one sum forward and one backward for each such pair (Shoeybi et al., arXiv 1909.08053, section 3). Attention is
such a pair, split by heads; an embedding and the output layer are split by the vocabulary.

This file acts on a ``ModuleAnalysis`` and decides nothing: it cuts parameters, changes the classes of layers in place, and says
where each slice lies. Not torch's ``parallelize_module``: ``layers.py`` says why, ``benchmarks/tensor`` has the measurement.
"""

import functools
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import nn

from shoal.comm.channel import Channel
from shoal.comm.full_tensor import take_local
from shoal.comm.mesh import Mesh
from shoal.core.axes import Axis
from shoal.core.errors import RequestError
from shoal.core.placement import Patch, Placement, Shape
from shoal.parallel.analysis.structure import Heads, ModuleAnalysis, Split, SplitKind
from shoal.parallel.tensor.layers import Entry, is_transposed, make_column, make_row
from shoal.parallel.tensor.multihead import check_multihead, leave_fast_path, make_multihead
from shoal.parallel.tensor.sequence import Region, apply_sequence_parallel, attention_columns, find_region, parent_of
from shoal.parallel.tensor.vocabulary import apply_split_embedding, place_rows


@dataclass(frozen=True, kw_only=True)
class TensorLayout:
    """What tensor parallelism made of a model."""

    placements: Mapping[str, Placement] = field(default_factory=dict)
    """Where each cut parameter lies in its whole, by its first name; other parameters are whole."""
    partial: frozenset[str] = frozenset()
    """Parameters whose gradients are those of this rank's positions only and must be summed over ``tp``."""
    splits_logits: bool = False
    """The model's output is this rank's slice of the scores."""
    vocab: int | None = None
    """How many scores there are in all, without padding, where they are split."""
    notes: tuple[str, ...] = ()
    """What was asked for and left undone, and why."""


def apply_tensor_parallel(
    model: nn.Module, *, analysis: ModuleAnalysis, mesh: Mesh, sequence_parallel: bool
) -> TensorLayout:
    """Split a whole model over the ranks of ``tp``, in place.

    Args:
        model: the plain model, the same on every rank; on the meta device too.
        analysis: what was found in it.
        mesh: where this rank stands.
        sequence_parallel: cut the sequence between split layers as well.

    Raises:
        RequestError: ``tp`` does not divide what it must; the message has both numbers.
    """
    channel = mesh.channel(Axis.TENSOR)
    if channel.size == 1:
        return TensorLayout()
    if not analysis.splits and not analysis.attentions:
        raise RequestError(
            f"found nothing in {type(model).__name__} that tp={channel.size} could split; leave tp out, or name layers in "
            f"parallel.split"
        )
    regions: dict[str, Region] = {}
    notes: list[str] = []
    if sequence_parallel:
        regions, notes = apply_sequence_parallel(model, analysis=analysis, channel=channel)
        if not regions:
            reasons = "; ".join(notes) or "no row of blocks was found"
            raise RequestError(f"sp=true, but no sequence can be cut: {reasons}; leave sp out")
    cutter = _Cutter(model, channel)
    for heads in analysis.attentions:
        _split_attention(model, heads, cutter, find_region(regions, heads.path))
    for split in _own_splits(analysis):
        _cut_layer(cutter, split)
    _change_layers(model, analysis, channel, regions)
    leave_fast_path(model)
    logits = [split.path for split in analysis.splits if split.kind is SplitKind.LOGITS]
    return TensorLayout(
        placements=cutter.placements,
        partial=_partial_names(model, analysis, regions, cutter.placements),
        splits_logits=bool(logits),
        vocab=cutter.whole_shape(f"{logits[0]}.weight")[0] if logits else None,
        notes=tuple(notes),
    )


def place_cut(shape: Shape, *, dim: int, parts: int, degree: int, rank: int) -> Placement:
    """Where a rank's share of every part of ``dim`` lies; ``parts`` equal parts are cut each by itself."""
    part = shape[dim] // parts
    share = part // degree
    local_shape = (*shape[:dim], parts * share, *shape[dim + 1 :])
    patch_shape = (*shape[:dim], share, *shape[dim + 1 :])

    def start(offset: int) -> Shape:
        return tuple(offset if index == dim else 0 for index in range(len(shape)))

    patches = tuple(
        Patch(local_start=start(number * share), whole_start=start(number * part + rank * share), shape=patch_shape)
        for number in range(parts)
    )
    return Placement(whole_shape=tuple(shape), local_shape=local_shape, patches=patches)


class _Cutter:
    """Cuts parameters in place, each once: a tied one belongs to several layers and is one tensor."""

    def __init__(self, model: nn.Module, channel: Channel) -> None:
        self.model = model
        self.channel = channel
        self.placements: dict[str, Placement] = {}
        self._names = {id(parameter): name for name, parameter in model.named_parameters()}

    def whole_shape(self, name: str) -> Shape:
        """The shape that a parameter had, by any of its names."""
        return self.placements[self._names[id(self.model.get_parameter(name))]].whole_shape

    def cut(self, module: nn.Module, path: str, name: str, dim: int, parts: int = 1) -> None:
        """Cut a layer's parameter evenly, if it has it.

        Raises:
            RequestError: the ranks do not divide it.
        """
        parameter = getattr(module, name)
        if parameter is None:
            return
        size, degree = self._shape(parameter)[dim], self.channel.size
        if size % (parts * degree):
            counted = f"{size} features" if parts == 1 else f"{parts} parts of {size // parts} features"
            raise RequestError(
                f"layer {path!r} has {counted}, which tp={degree} does not divide; use a tp that does, another width, or "
                f'keep the layer whole: parallel.split = {{"{path}" = "none"}}'
            )
        placement = place_cut(self._shape(parameter), dim=dim, parts=parts, degree=degree, rank=self.channel.rank)
        self._place(parameter, path, placement)

    def cut_rows(self, module: nn.Module, path: str, name: str) -> None:
        """Cut a layer's parameter along the vocabulary, padded, if it has it."""
        parameter = getattr(module, name)
        if parameter is not None:
            placement = place_rows(self._shape(parameter), degree=self.channel.size, rank=self.channel.rank)
            self._place(parameter, path, placement)

    def _shape(self, parameter: nn.Parameter) -> Shape:
        done = self.placements.get(self._names[id(parameter)])
        return tuple(parameter.shape) if done is None else done.whole_shape

    def _place(self, parameter: nn.Parameter, path: str, placement: Placement) -> None:
        name = self._names[id(parameter)]
        done = self.placements.get(name)
        if done is None:
            # The parameter stays the same object, so another holder of it (a tied layer) holds the local one now.
            parameter.data = take_local(parameter.data, placement)
            parameter.grad = None
            self.placements[name] = placement
        elif done != placement:
            raise RequestError(
                f"the weight of {path!r} is tied to {name!r}, which is cut in another way; cut both alike in parallel.split, "
                f'or keep both whole with "none"'
            )


def _own_splits(analysis: ModuleAnalysis) -> list[Split]:
    """The splits that are layers of their own, not a piece of ``nn.MultiheadAttention``."""
    inside = tuple(f"{heads.path}." for heads in analysis.attentions if heads.is_torch)
    return [split for split in analysis.splits if not (inside and split.path.startswith(inside))]


def _split_attention(model: nn.Module, heads: Heads, cutter: _Cutter, region: Region | None) -> None:
    degree = cutter.channel.size
    for count, what in ((heads.num_heads, "heads"), (heads.num_kv_heads, "key-value heads")):
        if count % degree:
            divisors = ", ".join(str(number) for number in range(1, count + 1) if count % number == 0)
            raise RequestError(
                f"attention {heads.path!r} has {count} {what}, which tp={degree} does not divide; use tp in {divisors}"
            )
    module = model.get_submodule(heads.path)
    for name, whole in heads.divided.items():
        if whole % degree:
            raise RequestError(f"{heads.path}.{name} is {whole}, which tp={degree} does not divide; use a tp that does")
        setattr(module, name, whole // degree)
    if heads.is_torch:
        check_multihead(module, heads.path)
        out = module.get_submodule("out_proj")
        cutter.cut(module, heads.path, "in_proj_weight", 0, parts=3)
        cutter.cut(module, heads.path, "in_proj_bias", 0, parts=3)
        cutter.cut(out, f"{heads.path}.out_proj", "weight", 1)
        make_multihead(module, cutter.channel, region)


def _cut_layer(cutter: _Cutter, split: Split) -> None:
    module = cutter.model.get_submodule(split.path)
    if split.kind in (SplitKind.VOCABULARY, SplitKind.LOGITS):
        cutter.cut_rows(module, split.path, "weight")
        if split.kind is SplitKind.LOGITS:
            cutter.cut_rows(module, split.path, "bias")
        return
    is_turned = is_transposed(module, split.path)
    if split.kind is SplitKind.COLUMN:
        cutter.cut(module, split.path, "weight", int(is_turned), split.parts)
        cutter.cut(module, split.path, "bias", 0, split.parts)
    else:
        cutter.cut(module, split.path, "weight", int(not is_turned), split.parts)


def _change_layers(model: nn.Module, analysis: ModuleAnalysis, channel: Channel, regions: Mapping[str, Region]) -> None:
    """Change the classes of the layers; their parameters are cut by now."""
    splits = _own_splits(analysis)
    columns = Counter(parent_of(split.path) for split in splits if split.kind is SplitKind.COLUMN)
    entries = {
        parent: Entry(parent, channel=channel, num_layers=count, region=find_region(regions, parent))
        for parent, count in columns.items()
    }
    for parent, entry in entries.items():
        if entry.num_layers > 1:
            model.get_submodule(parent).register_forward_hook(entry.forget, always_call=True)
    for parent in {parent_of(path) for path in attention_columns(analysis)}:
        if find_region(regions, parent) is not None:
            # An attention reads its input's shape before it makes heads of the projections: it must see the whole length.
            module = model.get_submodule(parent)
            entries[parent].is_gathered_before = True
            module.forward = functools.partial(entries[parent].run, module.forward)
    for split in splits:
        module = model.get_submodule(split.path)
        if split.kind is SplitKind.COLUMN:
            make_column(module, split.path, entries[parent_of(split.path)])
        elif split.kind is SplitKind.ROW:
            make_row(module, split.path, channel, find_region(regions, split.path))
        elif split.kind is SplitKind.VOCABULARY:
            apply_split_embedding(module, split.path, channel)
        else:
            make_column(module, split.path, Entry(split.path, channel=channel, num_layers=1, region=None))


def _partial_names(
    model: nn.Module, analysis: ModuleAnalysis, regions: Mapping[str, Region], placements: Mapping[str, Placement]
) -> frozenset[str]:
    """The whole parameters inside a cut sequence: each rank's gradient is that of its own positions."""
    if not regions:
        return frozenset()
    for names in analysis.tied:
        inside = [name for name in names if find_region(regions, name) is not None]
        if inside and len(inside) != len(names) and names[0] not in placements:
            raise RequestError(
                f"{' and '.join(names)} are one parameter, used inside and outside of a cut sequence, so that its gradient is "
                f"partial in one place and whole in the other; leave sp out"
            )
    return frozenset(
        name
        for name, _ in model.named_parameters()
        if name not in placements and find_region(regions, name) is not None
    )
