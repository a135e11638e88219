"""Keyed dropout: where its bits come from, which of them a rank with a part of a tensor needs, and what is done with a mask.

torch's dropout advances one generator per process. Here every bit has an address: Philox is counter based (Salmon et al., SC
2011), so (seed and module path, call) are its key, (step, global sample) two words of its counter, and the place within the
sample is the rest of the counter. A rank whose tensor is a part of what one process would see says so with ``Window``s, and jumps
to its own bits where they lie together; where they do not, it draws more and selects, whichever is cheaper. It is also cheaper
than torch: 16 bits per element from numpy's Philox take about a third of the time of torch's bernoulli on CPU.

``attend`` is ``F.scaled_dot_product_attention`` with dropout, written out: torch's own draws its mask inside the kernel, from the
generator of the process, so neither another plan nor a recompute could draw it again.
"""

import itertools
import math
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from shoal.core.errors import Refusal
from shoal.core.seeding import derive_key

# The sample that a mask is keyed with when no dim of a tensor is the batch, so one mask serves all of it.
_NO_SAMPLE = -1
# Moving the generator takes as long as drawing so many elements; it decides between jumping and selecting, never a bit.
_JUMP_ELEMENTS = 2000
# 64-bit words that one value of Philox's counter gives.
_BLOCK_WORDS = 4
_local = threading.local()


@dataclass(frozen=True)
class Window:
    """What a rank sees of one dim: equal chunks of the whole dim, one after another.

    ``Window(1, (0, 3), 4)``: dim 1 here is the first and the last quarter of what one process sees.
    """

    dim: int
    """Dim of the tensor as it is called with; negative from the end. Rows that hold several samples' parts count as two dims."""
    chunks: tuple[int, ...]
    """Numbers of the chunks, in the order in which they lie here."""
    of: int
    """Chunks of the whole dim."""


@dataclass(frozen=True, kw_only=True)
class Layout:
    """What a dropout sees of a tensor, as plain numbers that an operator of torch can take."""

    batch_dim: int | None = None
    """The dim that is the batch, where it is known; else it is read off the shape."""
    windows: tuple[Window, ...] = ()

    @property
    def numbers(self) -> list[int]:
        """``dim, of, number of chunks, chunks...`` for each window."""
        return [n for w in self.windows for n in (w.dim, w.of, len(w.chunks), *w.chunks)]


WHOLE = Layout()


def site_key(seed: int, path: str) -> Tensor:
    """The key of one module, as a tensor of one number. Signed, for torch has no unsigned 64-bit arithmetic; same bits."""
    key = np.array([derive_key("dropout", seed, path)], dtype=np.uint64).view(np.int64)
    return torch.from_numpy(key)


@dataclass(frozen=True)
class _Reading:
    """How a shape is read: ``rows`` samples along ``batch_dim`` of ``shape``."""

    shape: tuple[int, ...]
    """With a dim of its own for the parts of a sample, where several rows belong to one."""
    batch_dim: int | None
    is_guess: bool


def read_shape(shape: Sequence[int], num_samples: int, batch_dim: int | None) -> _Reading:
    """Which dim of a shape is the batch.

    A dim 0 as long as the batch is the batch; else a dim 1 as long as it (sequence first); else a dim 0 that is a multiple holds
    several rows of each sample, as after ``flatten(0, 1)``; else no dim is. What can be read in two ways is a guess.
    """
    shape = tuple(shape)
    if not shape or not num_samples:
        return _Reading(shape, None, True)
    if batch_dim is not None and batch_dim < len(shape) and shape[batch_dim] == num_samples:
        return _Reading(shape, batch_dim, False)
    if shape[0] == num_samples:
        return _Reading(shape, 0, False)
    is_multiple = shape[0] % num_samples == 0
    if len(shape) > 2 and shape[1] == num_samples:
        return _Reading(shape, 1, is_multiple and num_samples > 1)
    if is_multiple:
        return _Reading((num_samples, shape[0] // num_samples, *shape[1:]), 0, True)
    return _Reading(shape, None, True)


def draw_mask(
    like: Tensor,
    draws: Tensor,
    site: Tensor,
    call: int,
    p: float,
    scale: float,
    channels: bool,
    batch_dim: int | None = None,
    windows: list[int] | None = None,
) -> Tensor:
    """A mask for ``like``: 0 where it is dropped, ``scale`` elsewhere.

    Args:
        like: gives shape, dtype and device.
        draws: the step, then the global sample ids along the batch.
        site: the key of the module, one number.
        call: how many times the module was called in this microbatch before.
        p: probability of a zero.
        scale: the value that keeps.
        channels: one draw per (sample, channel) instead of one per element.
        batch_dim: the dim that is the batch, where it is known.
        windows: ``Layout.numbers``, where ``like`` is a part of what one process sees.
    """
    shape = like.shape[:2] + (1,) * (like.ndim - 2) if channels else like.shape
    step, *samples = draws.tolist()
    reading = read_shape(shape, len(samples), batch_dim)
    if reading.batch_dim is None:
        samples = [_NO_SAMPLE]
    bits = _word_bits(p)
    place = _place(reading, tuple(windows or ()), shrunk_from=2 if channels else None)
    drawn = place.draw(samples, bits=bits, key=(int(site), call), step=step)
    kept = drawn >= min(round(p * 2**bits), 2**bits - 1)
    wide = np.float64 if like.dtype == torch.float64 else np.float32
    mask = np.multiply(kept, wide(scale), dtype=wide).reshape(len(samples), *place.local)
    if reading.batch_dim:
        mask = np.ascontiguousarray(np.moveaxis(mask, 0, reading.batch_dim))
    return torch.from_numpy(mask.reshape(shape)).to(device=like.device, dtype=like.dtype)


# Opaque to torch.compile, and pure: all it draws from comes in as arguments, so a compiled or recomputed graph may run it again.
_mask_op: Callable[..., Tensor] = torch.library.custom_op(
    "shoal::draw_dropout_mask", draw_mask, mutates_args=(), device_types=None
)


@_mask_op.register_fake  # type: ignore[attr-defined,untyped-decorator]
def _fake_mask(
    like: Tensor,
    draws: Tensor,
    site: Tensor,
    call: int,
    p: float,
    scale: float,
    channels: bool,
    batch_dim: int | None = None,
    windows: list[int] | None = None,
) -> Tensor:
    return like.new_empty(like.shape[:2] + (1,) * (like.ndim - 2) if channels else like.shape)


def draw(
    like: Tensor, draws: Tensor, site: Tensor, call: int, *, p: float, scale: float, channels: bool, layout: Layout
) -> Tensor:
    """``draw_mask`` through the operator where a graph is being traced, directly where not."""
    function = _mask_op if torch.compiler.is_compiling() else draw_mask
    # Tensors without data, whose bytes are predicted: on the meta device, or fake ones that pose as another device's.
    if like.device.type == "meta" or hasattr(like, "fake_mode"):
        return like.new_empty(like.shape[:2] + (1,) * (like.ndim - 2) if channels else like.shape)
    # Detached: a mask is no function of the values, and the operator has no gradient.
    windows = layout.numbers if layout.windows else None
    return function(like.detach(), draws, site, call, p, scale, channels, layout.batch_dim, windows)


def _word_bits(p: float) -> int:
    """Bits per element: 16 are enough unless ``p`` is so near 0 or 1 that they would round it by more than a thousandth."""
    is_close = abs(round(p * 2**16) / 2**16 - p) <= 1e-3 * min(p, 1 - p)
    return 16 if is_close else 32


@dataclass(frozen=True)
class _Place:
    """Which elements of a whole sample a rank needs: ranges of the stream to draw, and what to select from them."""

    local: tuple[int, ...]
    """Shape of a sample here."""
    drawn: tuple[int, ...]
    """Shape of what the ranges give together; ``local`` where nothing is selected."""
    ranges: tuple[tuple[int, int], ...]
    """First element and number of elements, in the stream of the whole sample."""
    selects: tuple[tuple[int, tuple[int, ...], int], ...]
    """Dim, chunks and number of chunks to select after drawing."""

    def draw(self, samples: Sequence[int], *, bits: int, key: tuple[int, int], step: int) -> NDArray[Any]:
        """Random words, one per element, (samples, elements of ``local``)."""
        kind = np.uint16 if bits == 16 else np.uint32
        generator = _Generator.of_thread()
        if not self.selects and self.ranges == ((0, math.prod(self.local)),):
            # Each sample starts at a word of its own, so its bits do not depend on how many others are beside it.
            size = math.prod(self.local)
            words: NDArray[np.uint64] = np.empty((len(samples), -(-size * bits // 64)), dtype=np.uint64)
            for row, sample in zip(words, samples, strict=True):
                generator.fill(row, key=key, counter=(0, step, sample))
            return words.view(kind)[:, :size]
        found: NDArray[Any] = np.empty((len(samples), math.prod(self.drawn)), dtype=kind)
        for row, sample in zip(found, samples, strict=True):
            self._draw_ranges(row, generator, bits=bits, key=key, step=step, sample=sample)
        found = found.reshape(len(samples), *self.drawn)
        for dim, chunks, of in self.selects:
            split = found.reshape(*found.shape[: dim + 1], of, found.shape[dim + 1] // of, *found.shape[dim + 2 :])
            chosen = split.take(chunks, axis=dim + 1)
            found = chosen.reshape(*found.shape[: dim + 1], -1, *found.shape[dim + 2 :])
        return found.reshape(len(samples), -1)

    def _draw_ranges(
        self, row: NDArray[Any], generator: "_Generator", *, bits: int, key: tuple[int, int], step: int, sample: int
    ) -> None:
        per_block = _BLOCK_WORDS * 64 // bits
        filled = 0
        for first, size in self.ranges:
            block, skipped = divmod(first, per_block)
            words: NDArray[np.uint64] = np.empty(-(-(skipped + size) * bits // 64), dtype=np.uint64)
            generator.fill(words, key=key, counter=(block, step, sample))
            row[filled : filled + size] = words.view(row.dtype)[skipped : skipped + size]
            filled += size


@lru_cache(maxsize=1024)
def _place(reading: _Reading, numbers: tuple[int, ...], shrunk_from: int | None) -> _Place:
    """The cheapest way to a rank's bits: some windows by jumping, the rest by selecting."""
    shape = reading.shape
    windows = _per_sample(_decode(numbers), reading, shrunk_from)
    dims = list(shape)
    if reading.batch_dim is not None:
        del dims[reading.batch_dim]
    local, whole = tuple(dims), list(dims)
    for window in windows:
        if local[window.dim] % len(window.chunks):
            raise Refusal(
                f"dropout: dim {window.dim} of a sample is {local[window.dim]} long and should be {len(window.chunks)} equal "
                f"chunks of {window.of}; make the whole dim a multiple of {window.of}"
            )
        whole[window.dim] = local[window.dim] // len(window.chunks) * window.of
    ways = [_way(local, tuple(whole), windows, num_jumped) for num_jumped in range(len(windows) + 1)]
    return min(ways, key=lambda way: len(way.ranges) * _JUMP_ELEMENTS + math.prod(way.drawn))


def _decode(numbers: tuple[int, ...]) -> list[Window]:
    windows, rest = [], list(numbers)
    while rest:
        dim, of, count = rest[:3]
        windows.append(Window(dim, tuple(rest[3 : 3 + count]), of))
        rest = rest[3 + count :]
    return windows


def _per_sample(windows: Sequence[Window], reading: _Reading, shrunk_from: int | None) -> list[Window]:
    """The windows along the dims of one sample, in their order."""
    found = []
    for window in windows:
        dim = window.dim + len(reading.shape) if window.dim < 0 else window.dim
        if shrunk_from is not None and dim >= shrunk_from:
            continue  # One draw serves this whole dim.
        if not 0 <= dim < len(reading.shape) or dim == reading.batch_dim:
            raise Refusal(
                f"dropout: a tensor of shape {reading.shape} should be a part along dim {window.dim}, which is "
                f"{'its batch' if dim == reading.batch_dim else 'not there'}; use nn.Dropout on (batch, sequence, features), "
                f"or a plan without sp and cp"
            )
        if reading.batch_dim is not None and dim > reading.batch_dim:
            dim -= 1
        found.append(Window(dim, window.chunks, window.of))
    return sorted(found, key=lambda window: window.dim)


def _way(local: tuple[int, ...], whole: tuple[int, ...], windows: Sequence[Window], num_jumped: int) -> _Place:
    """Jump to the chunks of the first ``num_jumped`` windows, select those of the others."""
    selects = tuple((window.dim, window.chunks, window.of) for window in windows[num_jumped:])
    if num_jumped == 0:
        return _Place(local, whole, ((0, math.prod(whole)),), selects)
    last = windows[num_jumped - 1]
    strides = [math.prod(whole[dim + 1 :]) for dim in range(len(whole))]
    by_dim = {window.dim: window for window in windows[:num_jumped]}
    outer = [_indices(whole[dim], by_dim.get(dim)) for dim in range(last.dim)]
    if math.prod(map(len, outer)) * len(last.chunks) > math.prod(whole) // _JUMP_ELEMENTS + 1:
        # Far more jumps than the whole sample costs: not worth listing.
        return _Place(local, whole, ((0, math.prod(whole)),), tuple((w.dim, w.chunks, w.of) for w in windows))
    length = whole[last.dim] // last.of
    groups = _neighbours(last.chunks)
    ranges = tuple(
        (
            sum(index * stride for index, stride in zip(place, strides, strict=False))
            + first * length * strides[last.dim],
            count * length * strides[last.dim],
        )
        for place in itertools.product(*outer)
        for first, count in groups
    )
    drawn = local[: last.dim + 1] + whole[last.dim + 1 :]
    return _Place(local, drawn, ranges, selects)


def _indices(extent: int, window: Window | None) -> list[int]:
    if window is None:
        return list(range(extent))
    length = extent // window.of
    return [chunk * length + index for chunk in window.chunks for index in range(length)]


def _neighbours(chunks: Sequence[int]) -> list[tuple[int, int]]:
    """Runs of consecutive numbers: (first, how many)."""
    runs: list[tuple[int, int]] = []
    for chunk in chunks:
        if runs and chunk == sum(runs[-1]):
            runs[-1] = (runs[-1][0], runs[-1][1] + 1)
        else:
            runs.append((chunk, 1))
    return runs


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

    def fill(self, row: NDArray[np.uint64], *, key: tuple[int, int], counter: tuple[int, int, int]) -> None:
        """Fill a row from the block ``counter[0]`` of the stream that the key and the rest of the counter name."""
        words = self._state["state"]
        words["key"].view(np.int64)[:] = key
        # Word 0 counts the blocks of the stream; the others name it.
        words["counter"].view(np.int64)[:] = (*counter, 0)
        self._state["buffer_pos"] = 4
        self._philox.state = self._state
        row[:] = self._philox.random_raw(row.size)


# torch's alpha dropout sets a dropped unit to the value a SELU saturates at (arXiv 1706.02515, section 3).
_SELU_LIMIT = -1.7580993408473766
_HALF = (torch.bfloat16, torch.float16)


class Draw(Protocol):
    """Draws the mask of one call."""

    def __call__(self, like: Tensor, *, p: float, scale: float, channels: bool) -> Tensor:
        """0 where ``like`` is dropped, ``scale`` elsewhere."""


def multiply(x: Tensor, draw: Draw, *, p: float, channels: bool = False, inplace: bool = False) -> Tensor:
    """Zero with probability p and scale the rest by 1 / (1 - p)."""
    if p == 1.0:
        result = x * 0.0
    elif x.dtype in _HALF:
        # The scale is no half-precision number: in the mask it would be rounded, and every activation with it.
        result = x * draw(x, p=p, scale=1.0, channels=channels) * (1.0 / (1.0 - p))
    else:
        result = x * draw(x, p=p, scale=1.0 / (1.0 - p), channels=channels)
    return x.copy_(result) if inplace else result


def saturate(x: Tensor, draw: Draw, *, p: float, channels: bool = False, inplace: bool = False) -> Tensor:
    """Drop to the saturation of SELU with probability p, and keep mean and variance."""
    kept = 1.0 - p
    slope = 1.0 / math.sqrt(kept * (1.0 + p * _SELU_LIMIT**2)) if kept else 0.0
    mask = draw(x, p=p, scale=1.0, channels=channels) if kept else torch.zeros_like(x)
    result = slope * (x * mask + _SELU_LIMIT * (1.0 - mask) - _SELU_LIMIT * p)
    return x.copy_(result) if inplace else result


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    draw: Draw,
    *,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Attention with dropout on its weights, by the formula in torch's documentation of ``scaled_dot_product_attention``.

    Half-precision inputs are computed in float32 and the result is rounded once, as torch's kernels do.
    """
    if is_causal and attn_mask is not None:
        raise Refusal("attention has is_causal=True and an attn_mask; give one of the two")
    query, key, value = (_autocast(tensor) for tensor in (query, key, value))
    dtype = query.dtype
    wide = torch.float32 if dtype in _HALF else dtype
    with torch.autocast(query.device.type, enabled=False):
        query, key, value = query.to(wide), key.to(wide), value.to(wide)
        if enable_gqa:
            key = key.repeat_interleave(query.shape[-3] // key.shape[-3], dim=-3)
            value = value.repeat_interleave(query.shape[-3] // value.shape[-3], dim=-3)
        factor = 1.0 / math.sqrt(query.shape[-1]) if scale is None else scale
        scores = (query * factor) @ key.transpose(-2, -1)
        if is_causal:
            attn_mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
        if attn_mask is not None and attn_mask.dtype == torch.bool:
            scores = scores.masked_fill(attn_mask.logical_not(), float("-inf"))
        elif attn_mask is not None:
            scores = scores + attn_mask.to(wide)
        # The safe one gives zeros to a row that may see nothing, as torch's attention does; softmax gives NaN.
        weights: Any = torch.ops.aten._safe_softmax.default(scores, -1)
        return (multiply(weights, draw, p=dropout_p) @ value).to(dtype)


def _autocast(x: Tensor) -> Tensor:
    """What autocast does to an argument of attention."""
    kind = x.device.type
    if x.dtype == torch.float32 and kind != "meta" and torch.is_autocast_enabled(kind):
        return x.to(torch.get_autocast_dtype(kind))
    return x
