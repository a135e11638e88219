"""Dropout whose bits belong to the sample, not to the process that drops.

torch's dropout advances one generator per process, so another number of replicas, another microbatch size or a recomputed forward
draws other bits. Here a mask is a pure function of (seed, module path, call within the microbatch, step, global sample): Philox
is counter based (Salmon et al., SC 2011), so each of these is a word of its key or of its counter and nothing is drawn in order.
It is also cheaper: 16 bits per element from numpy's Philox take about a third of the time of torch's bernoulli on CPU.

    key = apply_keyed_dropout(model, seed)
    for step, microbatch in ...:
        key.begin(step, microbatch.sample_ids)
        model(*microbatch.inputs)
"""

import math
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from shoal.core.errors import RunError
from shoal.core.seeding import derive_key

# The sample that a mask is keyed with when the rows of a tensor are not samples, so one mask serves all of them.
_NO_SAMPLE = -1
# torch's alpha dropout sets a dropped unit to the value a SELU saturates at (arXiv 1706.02515, section 3).
_SELU_LIMIT = -1.7580993408473766
_local = threading.local()


class DropoutKey:
    """Says to every dropout of one model which step and which samples come next."""

    def __init__(self, modules: Sequence["_Keyed"]) -> None:
        self._modules = tuple(modules)

    def begin(self, step: int, sample_ids: NDArray[np.int64] | Sequence[int]) -> None:
        """Announce a microbatch; must come before each training forward.

        Args:
            step: the optimizer step that this microbatch belongs to.
            sample_ids: the global dataset ids of its samples, in the order of dim 0.
        """
        draws = torch.empty(len(sample_ids) + 1, dtype=torch.int64)
        view = draws.numpy()
        view[0] = step
        view[1:] = sample_ids
        for module in self._modules:
            module.rewind(draws, 0)

    def odd_shapes(self) -> dict[str, tuple[int, ...]]:
        """By module path, a shape whose first dim was not the batch: which sample an element belongs to could only be guessed."""
        return {module.path: module.odd_shape for module in self._modules if module.odd_shape is not None}

    def recompute_contexts(self) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        """For ``torch.utils.checkpoint(..., context_fn=key.recompute_contexts)``: the recomputed region draws the same bits.

        Without it a recomputed forward is recognised too, as long as each dropout is called once per microbatch; and with it the
        recompute may come after another microbatch has begun, as it does in a pipeline.
        """
        remembered = [(module.draws, module.call) for module in self._modules]
        return nullcontext(), self._replay(remembered)

    @contextmanager
    def _replay(self, remembered: Sequence[tuple[Tensor | None, int]]) -> Iterator[None]:
        before = [(module.draws, module.call) for module in self._modules]
        for module, (draws, call) in zip(self._modules, remembered, strict=True):
            module.rewind(draws, call, is_replaying=True)
        try:
            yield
        finally:
            for module, (draws, call) in zip(self._modules, before, strict=True):
                module.rewind(draws, call)


def apply_keyed_dropout(model: nn.Module, seed: int) -> DropoutKey:
    """Make every ``nn.Dropout``, ``Dropout1d/2d/3d``, ``AlphaDropout`` and ``FeatureAlphaDropout`` of a model draw by key.

    The modules keep their identity, their names and their place; only their class changes. Evaluation and p=0 draw nothing. A
    subclass with a forward of its own is left alone. Apply it to the plain model: a wrapper (DDP, torch.compile) puts a prefix
    before the paths, and the paths are part of the key.
    """
    keyed: list[_Keyed] = []
    for path, module in model.named_modules():
        kind = next((kind for kind in _KEYED if type(module).forward is kind.forward), None)
        if kind is not None:
            module.__class__ = _KEYED[kind]
        if not isinstance(module, _Keyed):
            continue
        # Signed, because torch has no unsigned 64-bit arithmetic; the bits are the same.
        site = np.array([derive_key("dropout", seed, path)], dtype=np.uint64).view(np.int64)
        module.__dict__.update(path=path, site=torch.from_numpy(site), draws=None, call=0, is_replaying=False)
        keyed.append(module)
    return DropoutKey(keyed)


def draw_mask(like: Tensor, draws: Tensor, site: Tensor, call: int, p: float, scale: float, channels: bool) -> Tensor:
    """A mask for ``like``: 0 where it is dropped, ``scale`` elsewhere.

    Args:
        like: gives shape, dtype and device.
        draws: the step, then the global sample ids of dim 0.
        site: the key of the module, one number.
        call: how many times the module was called in this microbatch before.
        p: probability of a zero.
        scale: the value that keeps.
        channels: one draw per (sample, channel) instead of one per element.
    """
    shape = like.shape[:2] + (1,) * (like.ndim - 2) if channels else like.shape
    size = math.prod(shape)
    step, *samples = draws.tolist()
    if not samples or shape[0] % len(samples):
        samples = [_NO_SAMPLE]
    bits = _word_bits(p)
    per_sample = size // len(samples)
    # Each sample starts at a word of its own, so its bits do not depend on how many others are beside it.
    words = -(-per_sample * bits // 64)
    rows: NDArray[np.uint64] = np.empty((len(samples), words), dtype=np.uint64)
    generator = _Generator.of_thread()
    site_key = int(site)
    for row, sample in zip(rows, samples, strict=True):
        generator.fill(row, key=(site_key, call), counter=(step, sample))
    drawn: NDArray[Any] = rows.view(np.uint16 if bits == 16 else np.uint32)[:, :per_sample]
    kept = drawn >= min(round(p * 2**bits), 2**bits - 1)
    wide = np.float64 if like.dtype == torch.float64 else np.float32
    mask = np.multiply(kept, wide(scale), dtype=wide).reshape(shape)
    return torch.from_numpy(mask).to(device=like.device, dtype=like.dtype)


def _word_bits(p: float) -> int:
    """Bits per element: 16 are enough unless ``p`` is so near 0 or 1 that they would round it by more than a thousandth."""
    is_close = abs(round(p * 2**16) / 2**16 - p) <= 1e-3 * min(p, 1 - p)
    return 16 if is_close else 32


class _Generator:
    """One Philox per thread, moved to any key and counter; making a new one costs six times as much."""

    def __init__(self) -> None:
        self._philox = np.random.Philox(key=0)
        self._state: Any = self._philox.state

    @classmethod
    def of_thread(cls) -> "_Generator":
        if not hasattr(_local, "generator"):
            _local.generator = cls()
        found: _Generator = _local.generator
        return found

    def fill(self, row: NDArray[np.uint64], *, key: tuple[int, int], counter: tuple[int, int]) -> None:
        words = self._state["state"]
        words["key"].view(np.int64)[:] = key
        # Word 0 counts the blocks of the stream; the others name it.
        words["counter"].view(np.int64)[:] = (0, counter[0], counter[1], 0)
        self._state["buffer_pos"] = 4
        self._philox.state = self._state
        row[:] = self._philox.random_raw(row.size)


# Opaque to torch.compile, and pure: all it draws from comes in as arguments, so a compiled or recomputed graph may run it again.
_mask_op: Callable[..., Tensor] = torch.library.custom_op(
    "shoal::draw_dropout_mask", draw_mask, mutates_args=(), device_types=None
)


@_mask_op.register_fake  # type: ignore[attr-defined,untyped-decorator]
def _fake_mask(like: Tensor, draws: Tensor, site: Tensor, call: int, p: float, scale: float, channels: bool) -> Tensor:
    return like.new_empty(like.shape[:2] + (1,) * (like.ndim - 2) if channels else like.shape)


class _Keyed(nn.Module):
    """What a keyed dropout has beside its torch class. Its state is in ``__dict__``: no buffer, nothing in a checkpoint."""

    p: float
    inplace: bool
    path: str
    site: Tensor
    draws: Tensor | None
    call: int
    is_replaying: bool
    odd_shape: tuple[int, ...] | None = None

    def rewind(self, draws: Tensor | None, call: int, *, is_replaying: bool = False) -> None:
        """Set what comes next; past ``nn.Module.__setattr__``, which is slow and would look for parameters."""
        self.__dict__.update(draws=draws, call=call, is_replaying=is_replaying)

    def _mask(self, x: Tensor, *, scale: float, channels: bool) -> Tensor:
        draws = self.draws
        if draws is None:
            raise RunError(
                f"dropout {self.path!r} was called in training before begin(step, sample_ids) of its DropoutKey"
            )
        call = self._count_call()
        is_compiling = torch.compiler.is_compiling()
        if not is_compiling and x.shape[0] != len(draws) - 1:
            self.__dict__["odd_shape"] = tuple(x.shape)
        draw = _mask_op if is_compiling else draw_mask
        # Detached: a mask is no function of the values, and the operator has no gradient.
        return draw(x.detach(), draws, self.site, call, self.p, scale, channels)

    def _count_call(self) -> int:
        call = self.call
        if not torch.compiler.is_compiling() and not self.is_replaying and torch._C._current_graph_task_id() != -1:
            # Inside a backward pass a forward is a recompute: it must draw again what the first one drew.
            if call > 1:
                raise RunError(
                    f"dropout {self.path!r} was called {call} times and is recomputed, so which call this is cannot be told; "
                    f"give checkpoint() context_fn=key.recompute_contexts, or each call a dropout of its own"
                )
            return 0
        self.call = call + 1
        return call

    def _multiply(self, x: Tensor, *, channels: bool) -> Tensor:
        if not self.training or self.p == 0.0:
            return x
        if self.p == 1.0:
            result = x * 0.0
        elif x.dtype in (torch.bfloat16, torch.float16):
            # The scale is no half-precision number: in the mask it would be rounded, and every activation with it.
            result = x * self._mask(x, scale=1.0, channels=channels) * (1.0 / (1.0 - self.p))
        else:
            result = x * self._mask(x, scale=1.0 / (1.0 - self.p), channels=channels)
        return x.copy_(result) if self.inplace else result

    def _saturate(self, x: Tensor, *, channels: bool) -> Tensor:
        if not self.training or self.p == 0.0:
            return x
        kept = 1.0 - self.p
        slope = 1.0 / math.sqrt(kept * (1.0 + self.p * _SELU_LIMIT**2)) if kept else 0.0
        mask = self._mask(x, scale=1.0, channels=channels) if kept else torch.zeros_like(x)
        result = slope * (x * mask + _SELU_LIMIT * (1.0 - mask) - _SELU_LIMIT * self.p)
        return x.copy_(result) if self.inplace else result


class KeyedDropout(_Keyed, nn.Dropout):
    """``nn.Dropout`` that draws by key."""

    def forward(self, input: Tensor) -> Tensor:
        """Zero elements with probability p, scale the rest by 1 / (1 - p)."""
        return self._multiply(input, channels=False)


def _spatial(torch_class: type[nn.Module], batched_dims: int) -> type[_Keyed]:
    """``Dropout1d/2d/3d`` by key: a whole channel at once. An input without a batch is one sample's channels."""

    def forward(self: _Keyed, input: Tensor) -> Tensor:
        if input.ndim == batched_dims - 1:
            return self._multiply(input.unsqueeze(0), channels=True).squeeze(0)
        return self._multiply(input, channels=True)

    return type(
        f"Keyed{torch_class.__name__}", (_Keyed, torch_class), {"forward": forward, "__doc__": torch_class.__doc__}
    )


class KeyedAlphaDropout(_Keyed, nn.AlphaDropout):
    """``nn.AlphaDropout`` that draws by key."""

    def forward(self, input: Tensor) -> Tensor:
        """Drop to the saturation of SELU and keep mean and variance."""
        return self._saturate(input, channels=False)


class KeyedFeatureAlphaDropout(_Keyed, nn.FeatureAlphaDropout):
    """``nn.FeatureAlphaDropout`` that draws by key."""

    def forward(self, input: Tensor) -> Tensor:
        """Drop whole channels to the saturation of SELU."""
        return self._saturate(input, channels=True)


_KEYED: dict[type[nn.Module], type[_Keyed]] = {
    nn.Dropout: KeyedDropout,
    nn.Dropout1d: _spatial(nn.Dropout1d, 3),
    nn.Dropout2d: _spatial(nn.Dropout2d, 4),
    nn.Dropout3d: _spatial(nn.Dropout3d, 5),
    nn.AlphaDropout: KeyedAlphaDropout,
    nn.FeatureAlphaDropout: KeyedFeatureAlphaDropout,
}
