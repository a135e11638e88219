"""Column and row layers: a linear layer with some of its outputs, and one with some of its inputs.

Ours rather than DTensor's ``parallelize_module``: that one dispatches every operation through Python (measured at 1.59 times the
step of DDP), pads and unpads uneven sizes, and gives every layer a collective of its own; ``benchmarks/tensor`` has both beside
each other. Here the parameters stay plain tensors, and layers that read the same input (query, key and value; gate and up) share
one crossing.

A layer keeps its identity, its names and its place; only its class changes. ``nn.Linear`` and Hugging Face's ``Conv1D``, whose
weight is (in, out), are known.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shoal.comm.channel import Channel
from shoal.core.errors import Refusal, RequestError
from shoal.costs.blocks import replace_stream
from shoal.parallel.tensor.crossing import copy_in, gather_sequence, scatter_sequence, sum_out
from shoal.parallel.tensor.sequence import Region, check_stream


class Entry:
    """How inputs enter the column layers of one parent module: once for each input, however many layers read it."""

    def __init__(self, path: str, *, channel: Channel, num_layers: int, region: Region | None) -> None:
        self.path = path
        self.channel = channel
        self.num_layers = num_layers
        self.region = region
        self.is_gathered_before = False
        """The parent's stream is gathered where it enters the parent, not where it enters a layer."""
        self._gathered: Tensor | None = None
        self._last: tuple[Tensor, int, bool] | None = None
        self._entered: Tensor | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> "Entry":
        return self

    def __call__(self, x: Tensor) -> Tensor:
        """The input of a column layer."""
        if x is self._gathered:
            return x
        if self.num_layers == 1:
            return self._cross(x)
        seen = (x, 0 if x.is_inference() else x._version, torch.is_grad_enabled())
        if self._last is None or self._last[0] is not x or self._last[1:] != seen[1:]:
            self._last, self._entered = seen, self._cross(x)
        assert self._entered is not None
        return self._entered

    def forget(self, *_: Any) -> None:
        """A hook of the parent, after its forward: an activation that stayed here would outlive its step."""
        self._last = self._entered = None

    def run(self, forward: Any, *args: Any, **kwargs: Any) -> Any:
        """The parent's forward with its stream gathered."""
        check_stream(args, kwargs)
        args, kwargs = replace_stream(args, kwargs, self._gather_before)
        try:
            return forward(*args, **kwargs)
        finally:
            self._gathered = None

    def _gather_before(self, x: Tensor) -> Tensor:
        assert self.region is not None
        if self.region.is_whole(x):
            return x
        self._gathered = self._gather(x, self.region)
        return self._gathered

    def _gather(self, x: Tensor, region: Region) -> Tensor:
        if not region.is_local(x):
            raise Refusal(
                f"the input of {self.path!r} is {tuple(x.shape)}, which has not {region.local_length} positions in dim "
                f"{region.dim} as the stream of its block; sp=true cannot follow it; leave sp out"
            )
        return gather_sequence(to_compute_type(x), self.channel, region.dim)

    def _cross(self, x: Tensor) -> Tensor:
        if self.region is None or self.region.is_whole(x):
            return copy_in(to_compute_type(x), self.channel)
        if self.is_gathered_before:
            # Its gradient would be summed here and again where the parent's input was gathered.
            raise Refusal(
                f"{self.path!r} changes its input before projecting it, or projects something that its block was not given; "
                f"sp=true cannot follow that; leave sp out"
            )
        return self._gather(x, self.region)


class ColumnLayer(nn.Module):
    """A linear layer with some of its outputs."""

    weight: nn.Parameter
    bias: nn.Parameter | None
    entry: Entry
    is_transposed: bool

    def forward(self, input: Tensor) -> Tensor:
        """This rank's outputs, from all inputs."""
        weight = self.weight.t() if self.is_transposed else self.weight
        return F.linear(self.entry(input), weight, self.bias)


class RowLayer(nn.Module):
    """A linear layer with some of its inputs; the bias is added once, after the sum."""

    weight: nn.Parameter
    bias: nn.Parameter | None
    channel: Channel
    region: Region | None
    is_transposed: bool

    def forward(self, input: Tensor) -> Tensor:
        """All outputs, from this rank's inputs and every other's."""
        partial = F.linear(input, self.weight.t() if self.is_transposed else self.weight)
        output = leave_split(partial, self.channel, self.region)
        # In the output's type, as autocast would: a float32 bias would make a float32 stream of it.
        return output if self.bias is None else output + self.bias.to(output.dtype)


def leave_split(partial: Tensor, channel: Channel, region: Region | None) -> Tensor:
    """Partial sums as the stream: added up, and cut where the sequence is."""
    if region is None:
        return sum_out(partial, channel)
    if partial.ndim <= region.dim or partial.shape[region.dim] != region.whole_length:
        raise Refusal(
            f"the output of a row layer is {tuple(partial.shape)}, which has not {region.whole_length} positions in dim "
            f"{region.dim}; sp=true cannot follow this block; leave sp out"
        )
    return scatter_sequence(partial, channel, region.dim)


def to_compute_type(x: Tensor) -> Tensor:
    """What autocast would make of the input of a matrix product, before it crosses: half the bytes, and one cast for all."""
    kind = x.device.type
    if kind in ("cpu", "cuda") and x.dtype == torch.float32 and torch.is_autocast_enabled(kind):
        return x.to(torch.get_autocast_dtype(kind))
    return x


def is_transposed(module: nn.Module, path: str) -> bool:
    """True for a ``Conv1D``, whose weight is (in, out); False for an ``nn.Linear``.

    Raises:
        RequestError: it is neither.
    """
    # Told by its looks: transformers is an optional package.
    if type(module).__name__ == "Conv1D" and hasattr(module, "nf"):
        return True
    if type(module).forward is nn.Linear.forward:
        return False
    raise RequestError(
        f"{path!r} is a {type(module).__name__}, which cannot be split; only nn.Linear and Conv1D can: "
        f'keep it whole with parallel.split = {{"{path}" = "none"}}'
    )


def make_column(module: nn.Module, path: str, entry: Entry) -> None:
    """Make a linear layer, whose parameters were cut along its outputs, a column layer."""
    is_turned = is_transposed(module, path)
    _count(module, is_turned, inputs=False)
    module.__class__ = _mixed(ColumnLayer, type(module))
    # Past nn.Module.__setattr__: no parameter, no buffer, nothing in a checkpoint.
    module.__dict__.update(entry=entry, is_transposed=is_turned)


def make_row(module: nn.Module, path: str, channel: Channel, region: Region | None) -> None:
    """Make a linear layer, whose weight was cut along its inputs, a row layer."""
    is_turned = is_transposed(module, path)
    _count(module, is_turned, inputs=True)
    module.__class__ = _mixed(RowLayer, type(module))
    module.__dict__.update(channel=channel, region=region, is_transposed=is_turned)


def _count(module: nn.Module, is_turned: bool, *, inputs: bool) -> None:
    """Let the layer's own numbers be those of its local weight."""
    weight = module.get_parameter("weight")
    local = weight.shape[0 if inputs == is_turned else 1]
    names = ("nx", "nf") if is_turned else ("in_features", "out_features")
    module.__dict__[names[0] if inputs else names[1]] = local


_MIXED: dict[tuple[type[nn.Module], type[nn.Module]], type[nn.Module]] = {}


def _mixed(mixin: type[nn.Module], kind: type[nn.Module]) -> type[nn.Module]:
    """A class that is a subclass of the layer's own, so that ``isinstance`` still holds."""
    if (mixin, kind) not in _MIXED:
        name = f"{mixin.__name__.removesuffix('Layer')}{kind.__name__}"
        _MIXED[mixin, kind] = type(name, (mixin, kind), {"__doc__": mixin.__doc__})
    return _MIXED[mixin, kind]
