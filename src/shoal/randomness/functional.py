"""Dropout that is no module: ``F.dropout`` and its kin, attention's ``dropout_p``, and whatever else a forward pass draws.

torch draws these from the generator of the process. Here a ``TorchFunctionMode`` puts keyed masks in their place, by the path of
the module that calls and the number of the call. A mode costs a microsecond or two per operation, which a small step feels, so
the first training forward runs under it to find out, and later ones only where the model does draw. A model of ``nn.Dropout``
modules pays two readings of the generator's state per forward, which notice a model that begins to draw later; of one that draws
what decides nothing, where these say nothing, every forward is looked at as the first is.
"""

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import lru_cache
from types import FunctionType
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode, resolve_name

from shoal.comm.channel import is_silent
from shoal.core.errors import Refusal, RunError
from shoal.randomness.keyed import WHOLE, Layout, attend, draw, multiply, read_shape, saturate, site_key
from shoal.randomness.unused import UnusedDraws


@dataclass(frozen=True, kw_only=True)
class FunctionalLayout:
    """What the functional draws of one module see of their tensors."""

    stream: Layout = WHOLE
    """For tensors of the stream: (batch, sequence, features), or what ``batch_dim`` says."""
    attention: Layout = WHOLE
    """For attention weights: (batch, heads, queries, keys), or (batch x heads, queries, keys)."""
    split_width: int | None = None
    """A last dim of this extent is split features, those of a column layer in the same module."""
    stream_width: int | None = None
    """Features of the stream there; where it equals ``split_width`` the two cannot be told apart."""
    split: Layout = WHOLE
    """For tensors of split features."""


@dataclass(frozen=True)
class _Kind:
    """A dropout function of torch: how it drops, and what its arguments are."""

    drop: Callable[..., Tensor]
    channels: bool = False
    unbatched_dims: int = 0
    """An input of so many dims is one sample's channels."""
    training: bool = True
    """Whether it drops when its argument ``training`` is left out."""
    inplace: bool = False


_KINDS: dict[Any, _Kind] = {
    F.dropout: _Kind(multiply),
    F.dropout1d: _Kind(multiply, channels=True, unbatched_dims=2),
    F.dropout2d: _Kind(multiply, channels=True),  # torch reads three dims as (N, C, L) here
    F.dropout3d: _Kind(multiply, channels=True, unbatched_dims=4),
    F.alpha_dropout: _Kind(saturate, training=False),
    F.feature_alpha_dropout: _Kind(saturate, channels=True, training=False),
    torch.dropout: _Kind(multiply),
    torch.dropout_: _Kind(multiply, inplace=True),
    torch.feature_dropout: _Kind(multiply, channels=True),
    torch.feature_dropout_: _Kind(multiply, channels=True, inplace=True),
    torch.alpha_dropout: _Kind(saturate),
    torch.alpha_dropout_: _Kind(saturate, inplace=True),
    torch.feature_alpha_dropout: _Kind(saturate, channels=True),
    torch.feature_alpha_dropout_: _Kind(saturate, channels=True, inplace=True),
}
# Beside whatever moves the generator: these also draw from a generator of the caller's, or of another device.
# fmt: off
_RECURRENT = {
    "lstm": "nn.LSTM(dropout=...)",
    "gru": "nn.GRU(dropout=...)",
    "rnn_tanh": "nn.RNN(dropout=...)",
    "rnn_relu": "nn.RNN(dropout=...)",
}
"""What draws in torch's recurrent functions is an argument of the layer."""
_RANDOM_NAMES = frozenset({
    "bernoulli", "bernoulli_", "binomial", "cauchy_", "exponential_", "geometric_", "gumbel_softmax", "log_normal_",
    "multinomial", "native_dropout", "normal", "normal_", "poisson", "rand", "rand_like", "randint",
    "randint_like", "randn", "randn_like", "random_", "randperm", "uniform_",
})
# fmt: on

_LATE = "a function that drew in a later forward pass than the first"


class FunctionalDraws:
    """The functional draws of one model."""

    def __init__(self, model: nn.Module, seed: int) -> None:
        self.model = model
        self.seed = seed
        self.layouts: dict[str, FunctionalLayout] = {}
        self.tail: Layout | None = None
        """For tensors outside every narrowed module, once the last block has run."""
        self.is_in_tail = False
        self.foreign: dict[str, None] = {}
        self.draws_unused = False
        """It draws numbers from torch's generator that decide nothing."""
        self._unused = UnusedDraws()
        self.odd_shapes: dict[str, tuple[int, ...]] = {}
        self.off: frozenset[str] = frozenset()
        """Paths of modules whose functional dropouts drop nothing for now."""
        self._draws: Tensor | None = None
        self._calls: dict[str, int] = {}
        self._paths: list[str] = []
        self._sites: dict[str, Tensor] = {}
        self._hooks: list[Any] = []
        # Their paths now, which are part of the key: later some of them may be on other ranks, and a module that several share
        # would get the path of another one of them.
        self._modules = list(model.named_modules())
        self._mode = _Mode(self)
        self._is_needed = False
        self._is_scanned = False
        self._is_scanning = False
        self._scans_on = False
        """Every pass is looked at, not the first alone."""
        self._is_late = False
        """In the pass that is running a dropout that is new has begun late."""
        self._is_active = False
        self._is_replaying = False
        self._watches = True
        self._is_compiled = False
        self._is_multi_head = False

    def begin(self, draws: Tensor) -> None:
        """The next microbatch: its step and its samples."""
        self._draws, self._calls, self.is_in_tail = draws, {}, False

    def drawing(self) -> AbstractContextManager[None]:
        """Surrounds one training forward."""
        if not self._is_scanned or self._scans_on:
            return self._scanning()
        return self._needing() if self._is_needed else self._watching()

    def scanning(self) -> AbstractContextManager[None]:
        """Inside ``drawing``: looks at a part of the model that no forward has come to yet."""
        self._is_late = False
        return nullcontext() if self._is_active or self._is_needed else self._scanning()

    @contextmanager
    def apart(self) -> Iterator[dict[str, int]]:
        """Inside, calls are not counted but in what this gives, when it is over."""
        before, found = self._calls, dict[str, int]()
        self._calls = dict(before)
        try:
            yield found
        finally:
            found.update({path: num - before.get(path, 0) for path, num in self._calls.items()})
            self._calls = before

    def skip(self, calls: Mapping[str, int]) -> None:
        """Count calls that are made elsewhere."""
        for path, num in calls.items():
            self._calls[path] = self._calls.get(path, 0) + num

    def remember(self) -> Callable[[], AbstractContextManager[None]]:
        """For a region that is computed again later: a way back to where it begins."""
        if not self._is_active:
            return nullcontext
        state = (self._draws, dict(self._calls), list(self._paths), self.is_in_tail)
        return lambda: self._replay(state)

    @contextmanager
    def _replay(self, state: tuple[Tensor | None, dict[str, int], list[str], bool]) -> Iterator[None]:
        before = (self._draws, self._calls, self._paths, self.is_in_tail, self._is_active, self._is_replaying)
        draws, calls, paths, is_in_tail = state
        self._draws, self._calls, self._paths, self.is_in_tail = draws, dict(calls), list(paths), is_in_tail
        self._is_active = self._is_replaying = True
        try:
            with self._mode:
                yield
        finally:
            self._draws, self._calls, self._paths, self.is_in_tail, self._is_active, self._is_replaying = before

    @contextmanager
    def _under_mode(self) -> Iterator[None]:
        self._paths, self._is_active = [], True
        try:
            with self._mode:
                yield
        finally:
            self._is_active = False

    @contextmanager
    def _needing(self) -> Iterator[None]:
        # Keyed masks do not move the generator, so what moves it is something else here too.
        with self._watching(), self._under_mode():
            yield

    @contextmanager
    def _scanning(self) -> Iterator[None]:
        """The first forward: under the mode, to find out whether the model needs it."""
        self._add_hooks()
        self._is_late = self._scans_on and not self._is_needed
        with ExitStack() as stack:
            self._is_compiled = any(module._compiled_call_impl is not None for module in self.model.modules())
            if self._is_compiled:
                # A mode is not for a compiled graph: look at the plain one, once.
                stack.enter_context(torch.compiler.set_stance("force_eager"))
            before = (random.getstate(), _numpy_state())
            stack.enter_context(self._under_mode())
            self._is_scanning = True
            stack.callback(setattr, self, "_is_scanning", False)
            yield
        if self._is_late and self._is_needed:
            self.foreign[_LATE] = None
        if random.getstate() != before[0]:
            self.foreign["Python's random in the forward pass"] = None
        if _numpy_state() != before[1]:
            self.foreign["numpy.random in the forward pass"] = None
        self.foreign |= dict.fromkeys(self._unused.left())
        # Its generator moves in every pass from now on, so that says no more whether something else draws: what is drawn does.
        self.draws_unused = self._unused.found > 0
        self._watches = self._watches and not self.draws_unused
        # Looking costs a few microseconds for every operation, and is over once there is something to tell.
        self._scans_on = self.draws_unused and not self._is_compiled and not self.foreign
        self._is_scanned = True
        if not (self._is_needed or self._scans_on):
            self._remove_hooks()

    @contextmanager
    def _watching(self) -> Iterator[None]:
        """A forward that should not draw: 5 microseconds to see whether it did."""
        before = torch.get_rng_state() if self._watches else None
        yield
        if before is not None and not self.foreign and not torch.equal(before, torch.get_rng_state()):
            # Late: this forward's bits were torch's own. Look again at the next one, and no more if that shows nothing.
            self.foreign[_LATE] = None
            self._is_scanned = self._watches = False

    @property
    def may_draw_otherwise(self) -> bool:
        """True until the first forward has shown that nothing foreign is drawn, and after it has shown that something is."""
        return not self._is_scanned or bool(self.foreign)

    def _add_hooks(self) -> None:
        if self._hooks:
            return
        for path, module in self._modules:
            self._hooks.append(module.register_forward_pre_hook(self._entering(path), prepend=True))
            self._hooks.append(module.register_forward_hook(self._leaving, always_call=True))

    def _remove_hooks(self) -> None:
        while self._hooks:
            self._hooks.pop().remove()

    def _entering(self, path: str) -> Callable[[nn.Module, Any], None]:
        def enter(module: nn.Module, inputs: Any) -> None:
            if not self._is_active and self._is_needed and _is_recomputing():
                # The caller's own checkpoint(), without our contexts: this module is computed again, so under the mode again.
                self._paths, self._is_active = [], True
                self._mode.__enter__()  # type: ignore[no-untyped-call]
                self._paths.append("<recompute>")
            if self._is_active:
                self._paths.append(path)

        return enter

    def _leaving(self, module: nn.Module, inputs: Any, output: Any) -> None:
        if self._is_active and self._paths:
            self._paths.pop()
            if self._paths == ["<recompute>"]:
                self._paths, self._is_active = [], False
                self._mode.__exit__(None, None, None)  # type: ignore[no-untyped-call]

    def call(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What the mode does with one call of torch."""
        kind = _KINDS.get(function)
        if kind is not None:
            return self._dropout(kind, function, *args, **kwargs)
        if function is F.scaled_dot_product_attention:
            return self._attention(*args, **kwargs)
        if function is F.multi_head_attention_forward:
            return self._multi_head(function, args, kwargs)
        if not self._is_scanning or is_silent():
            # In silence code is asked for its shapes: without data there are no states of generators to compare.
            return function(*args, **kwargs)
        before = torch.get_rng_state()
        result = function(*args, **kwargs)
        name = _name(function)
        self.foreign |= dict.fromkeys(self._unused.use(name, args, kwargs, result))
        if name in _RANDOM_NAMES or not torch.equal(before, torch.get_rng_state()):
            what = f"{_RECURRENT.get(name, _full_name(function))} in {self._where()}"
            if name not in _RANDOM_NAMES or not self._unused.add(result, what, name, kwargs):
                self.foreign[what] = None
        return result

    def _multi_head(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        before, self._is_multi_head = self._is_multi_head, True
        try:
            with self._mode:
                return opened(function)(*args, **kwargs)
        finally:
            self._is_multi_head = before

    def _dropout(
        self,
        kind: _Kind,
        function: Any,
        input: Tensor,
        p: float = 0.5,
        training: bool | None = None,
        inplace: bool = False,
        train: bool | None = None,
    ) -> Tensor:
        is_training = next((flag for flag in (training, train) if flag is not None), kind.training)
        call = self._count(self._path)
        if not is_training or p == 0.0 or self._path in self.off:
            return input
        if not 0.0 <= p <= 1.0:
            raise Refusal(f"{_full_name(function)} in {self._where()}: p is {p}; a probability is between 0 and 1")
        if self._defers_to_torch(function):
            extra: tuple[Any, ...] = (input, p, True)
            result: Tensor = function(*extra, inplace) if function in _WITH_INPLACE else function(*extra)
            return result
        self._is_needed = True
        x = input.unsqueeze(0) if kind.unbatched_dims == input.ndim else input
        result = kind.drop(
            x, _Drawing(self, call, is_attention=False), p=p, channels=kind.channels, inplace=inplace or kind.inplace
        )
        return result.squeeze(0) if x is not input else result

    def _attention(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        call = self._count(self._path)
        dropout_p = 0.0 if self._path in self.off else dropout_p
        options: dict[str, Any] = {"attn_mask": attn_mask, "is_causal": is_causal}
        options |= {"dropout_p": dropout_p, "scale": scale, "enable_gqa": enable_gqa}
        if dropout_p == 0.0 or self._defers_to_torch(F.scaled_dot_product_attention):
            return F.scaled_dot_product_attention(query, key, value, **options)
        self._is_needed = True
        return attend(query, key, value, _Drawing(self, call, is_attention=True), **options)

    def _defers_to_torch(self, function: Any) -> bool:
        """A compiled model's functions cannot be replaced: they count as foreign."""
        if not self._is_compiled:
            return False
        self.foreign[f"{_full_name(function)} in {self._where()} (compiled; nn.Dropout can be keyed)"] = None
        return True

    def _count(self, path: str) -> int:
        call = self._calls.get(path, 0)
        if _is_recomputing() and not self._is_replaying:
            # As a module does it: told apart only where it was called once.
            if call > 1:
                raise Refusal(
                    f"{self._where()} dropped {call} times and is recomputed, so which call this is cannot be told; give "
                    f"checkpoint() context_fn=key.recompute_contexts, or use nn.Dropout modules"
                )
            return 0
        # Calls that draw nothing count too, so that p=0 in one place shifts no other place's bits.
        self._calls[path] = call + 1
        return call

    def mask(self, like: Tensor, call: int, *, p: float, scale: float, channels: bool, is_attention: bool) -> Tensor:
        """The mask of one call."""
        path = self._path
        if self._draws is None:
            raise RunError(f"{self._where()} dropped in training before begin(step, sample_ids) of its DropoutKey")
        if path not in self._sites:
            self._sites[path] = site_key(self.seed, path)
        num_samples = len(self._draws) - 1
        layout, is_attention = self._layout(path, like, num_samples, is_attention or self._is_multi_head)
        site = self._sites[path]
        if is_attention and like.ndim == 3 and num_samples and like.shape[0] % num_samples == 0:
            # (batch x heads, queries, keys): the same bits as with a dim for the heads.
            by_head = like.reshape(num_samples, -1, *like.shape[1:])
            mask = draw(by_head, self._draws, site, call, p=p, scale=scale, channels=channels, layout=layout)
            return mask.flatten(0, 1)
        if read_shape(like.shape, num_samples, layout.batch_dim).is_guess:
            self.odd_shapes[path] = tuple(like.shape)
        return draw(like, self._draws, site, call, p=p, scale=scale, channels=channels, layout=layout)

    def _layout(self, path: str, like: Tensor, num_samples: int, is_attention: bool) -> tuple[Layout, bool]:
        found = _nearest(self.layouts, path)
        is_known, is_attention = is_attention, is_attention or like.ndim == 4
        if found is not None and is_attention and not is_known and found.stream.windows and not found.attention.windows:
            raise Refusal(
                f"F.dropout in {self._where()} sees a tensor of shape {tuple(like.shape)} where the sequence is cut and no "
                f"attention is split: which part of the mask it needs cannot be told; use an nn.Dropout module there, or a plan "
                f"without sp and cp"
            )
        if found is None:
            tail = self.tail if self.is_in_tail and self.tail is not None and not is_attention else WHOLE
            return tail, is_attention
        is_rows = like.ndim == 3 and num_samples not in (0, *like.shape[:2]) and like.shape[0] % num_samples == 0
        if is_attention or (is_rows and found.attention.windows):
            return found.attention, True
        if found.split_width is None or like.shape[-1] != found.split_width:
            return found.stream, False
        if found.split_width == found.stream_width:
            raise Refusal(
                f"F.dropout in {self._where()} sees {found.split_width} features, and so many are both this rank's share of a "
                f"split layer and the stream's: which of the two it drops cannot be told; use an nn.Dropout module there"
            )
        return found.split, False

    @property
    def _path(self) -> str:
        return self._paths[-1] if self._paths else ""

    def _where(self) -> str:
        return f"module {self._path!r}" if self._path else "the model itself"


@dataclass(frozen=True)
class _Drawing:
    """Draws the mask of one functional call."""

    owner: FunctionalDraws
    call: int
    is_attention: bool

    def __call__(self, like: Tensor, *, p: float, scale: float, channels: bool) -> Tensor:
        return self.owner.mask(like, self.call, p=p, scale=scale, channels=channels, is_attention=self.is_attention)


class _Mode(TorchFunctionMode):
    """Hands every call of torch to the draws of a model."""

    def __init__(self, owner: FunctionalDraws) -> None:
        super().__init__()
        self.owner = owner

    def __torch_function__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        return self.owner.call(func, args, dict(kwargs or {}))


@lru_cache(maxsize=16)
def opened(function: Callable[..., Any]) -> Callable[..., Any]:
    """One of torch's Python functions, so that a mode also sees the calls inside it.

    Such a function asks first whether a mode is active and hands itself over whole; entered again under the mode it would do so
    for ever. The copy has the same code and believes that none is: enter your mode around it.
    """
    assert isinstance(function, FunctionType)
    names = ("has_torch_function", "has_torch_function_unary", "has_torch_function_variadic")
    believes = dict.fromkeys(names, lambda *_: False)
    copy = FunctionType(function.__code__, function.__globals__ | believes, function.__name__, function.__defaults__)
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy


_WITH_INPLACE = (F.dropout, F.dropout1d, F.dropout2d, F.dropout3d, F.alpha_dropout, F.feature_alpha_dropout)


def _nearest(layouts: Mapping[str, FunctionalLayout], path: str) -> FunctionalLayout | None:
    """The layout of a module, or of the nearest module around it that has one."""
    while path:
        if path in layouts:
            return layouts[path]
        path = path.rpartition(".")[0]
    return layouts.get("")


def _is_recomputing() -> bool:
    """Inside a backward pass a forward is a recompute."""
    return torch._C._current_graph_task_id() != -1


def _numpy_state() -> tuple[bytes, int]:
    state: Any = np.random.get_state(legacy=False)
    return state["state"]["key"].tobytes(), int(state["state"]["pos"])


def _name(function: Any) -> str:
    return str(getattr(function, "__name__", function))


def _full_name(function: Any) -> str:
    return str(resolve_name(function) or _name(function))
