"""Dropout whose bits belong to the sample, not to the process that drops.

torch's dropout advances one generator per process, so another number of replicas, another microbatch size, a recomputed forward
or a rank that sees a part of a tensor draws other bits. Here a mask is a pure function of (seed, module path, call within the
microbatch, step, global sample); ``draws.py`` draws it, ``functional.py`` does the same for ``F.dropout`` and ``dropout_p``.

    key = apply_keyed_dropout(model, seed)
    for step, microbatch in ...:
        key.begin(step, microbatch.sample_ids)
        with key.drawing():
            model(*microbatch.inputs)
"""

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from shoal.core.errors import Refusal, RunError
from shoal.randomness.functional import FunctionalDraws, FunctionalLayout
from shoal.randomness.keyed import WHOLE, Layout, Window, draw, draw_mask, multiply, read_shape, saturate, site_key

__all__ = ["Calls", "DropoutKey", "KeyedDropout", "Layout", "Window", "apply_keyed_dropout", "draw_mask"]


@dataclass
class Calls:
    """How often each dropout was called."""

    modules: dict["_Keyed", int] = field(default_factory=dict)
    functional: dict[str, int] = field(default_factory=dict)
    """By the path of the module that calls."""


class DropoutKey:
    """Says to every dropout of one model which step and which samples come next, and which part of a tensor each sees."""

    def __init__(self, modules: Sequence["_Keyed"], functional: FunctionalDraws) -> None:
        self._modules = tuple(modules)
        self._by_path = {module.path: module for module in modules}
        self._functional = functional
        self._tail: tuple[tuple[_Keyed, ...], Layout] | None = None
        self._tail_hook: RemovableHandle | None = None

    @property
    def model(self) -> nn.Module:
        """The model whose dropouts these are."""
        return self._functional.model

    @property
    def module_paths(self) -> tuple[str, ...]:
        """Paths of the keyed dropout modules, in the order of modules."""
        return tuple(self._by_path)

    def begin(self, step: int, sample_ids: NDArray[np.int64] | Sequence[int]) -> None:
        """Announce a microbatch; must come before each training forward.

        Args:
            step: the optimizer step that this microbatch belongs to.
            sample_ids: the global dataset ids of its samples, in the order of the batch.
        """
        draws = torch.empty(len(sample_ids) + 1, dtype=torch.int64)
        view = draws.numpy()
        view[0] = step
        view[1:] = sample_ids
        for module in self._modules:
            module.rewind(draws, 0)
        self._functional.begin(draws)
        if self._tail is not None:
            for module in self._tail[0]:
                module.__dict__["layout"] = module.__dict__["own_layout"]

    def drawing(self) -> AbstractContextManager[None]:
        """Surrounds each training forward, so that functional draws are keyed too.

        The first forward finds out whether the model draws functionally; if not, later ones cost nothing to speak of.
        """
        return self._functional.drawing()

    def narrow(
        self,
        path: str,
        windows: Sequence[Window],
        *,
        batch_dim: int | None = None,
        attention: Sequence[Window] = (),
        split_width: int | None = None,
        stream_width: int | None = None,
        split: Sequence[Window] = (),
    ) -> None:
        """Say that a dropout sees only a part of the tensor that one process would see; it draws that part of the mask.

        Args:
            path: a dropout module, or a module whose functional draws are meant, with those of the modules in it.
            windows: which part, along each dim that is cut.
            batch_dim: the dim that is the batch, where it is not to be read off the shape.
            attention: for a module's functional draws on attention weights (batch, heads, queries, keys).
            split_width: extent of a last dim that shows a functional draw on split features.
            stream_width: extent of the stream's features, which must differ from it.
            split: for those draws on split features.

        Raises:
            RunError: the model has no such module.
        """
        module = self._by_path.get(path)
        layout = Layout(batch_dim=batch_dim, windows=tuple(windows))
        if module is not None:
            if batch_dim is None:
                layout = Layout(batch_dim=module.layout.batch_dim, windows=layout.windows)
            module.__dict__.update(layout=layout, own_layout=layout)
            return
        if path and path not in dict(self.model.named_modules()):
            raise RunError(f"no module {path!r} whose dropout could be narrowed; name a path of named_modules()")
        self._functional.layouts[path] = FunctionalLayout(
            stream=layout,
            attention=Layout(windows=tuple(attention)),
            split_width=split_width,
            stream_width=stream_width,
            split=Layout(batch_dim=batch_dim, windows=tuple(split)),
        )

    def narrow_calls(self, path: str, windows: Sequence[Sequence[Window]]) -> None:
        """Say what a dropout module sees that is called several times in a forward pass, call by call."""
        module = self._by_path[path]
        batch_dim = module.layout.batch_dim
        module.__dict__["layouts"] = tuple(Layout(batch_dim=batch_dim, windows=tuple(own)) for own in windows)

    def narrow_after(
        self, last: str, inside: Sequence[str], windows: Sequence[Window], *, batch_dim: int | None
    ) -> None:
        """Say what dropouts see that run after module ``last``, except those in the modules ``inside``.

        The same dropouts see whole tensors before it: which comes first is known only when the model runs.
        """
        prefixes = tuple(f"{path}." for path in inside)
        layout = Layout(batch_dim=batch_dim, windows=tuple(windows))
        outside = tuple(m for m in self._modules if not m.path.startswith(prefixes) and m.path not in inside)
        self._tail = (outside, layout)
        self._functional.tail = layout
        if self._tail_hook is not None:
            self._tail_hook.remove()

        def enter_tail(module: nn.Module, inputs: object, output: object) -> None:
            self._functional.is_in_tail = True
            for dropout in outside:
                dropout.__dict__["layout"] = layout

        self._tail_hook = self.model.get_submodule(last).register_forward_hook(enter_tail)

    def odd_shapes(self) -> dict[str, tuple[int, ...]]:
        """By module path, a shape whose batch could only be guessed: which sample an element belongs to is not sure."""
        odd = {module.path: module.odd_shape for module in self._modules if module.odd_shape is not None}
        return self._functional.odd_shapes | odd

    @contextmanager
    def turned_off(self, paths: Collection[str]) -> Iterator[None]:
        """Inside, the dropouts of these paths, as ``odd_shapes`` has them, drop nothing."""
        modules = [(module, module.p) for module in self._modules if module.path in paths]
        self._functional.off = frozenset(paths)
        try:
            for module, _ in modules:
                module.p = 0.0
            yield
        finally:
            self._functional.off = frozenset()
            for module, p in modules:
                module.p = p

    def foreign_draws(self) -> list[str]:
        """What the first forward under ``drawing()`` drew beside dropout: each function, and the module that called it.

        Such numbers depend on the process that draws them, so they differ from plan to plan.
        """
        return list(self._functional.foreign)

    @property
    def draws_unused(self) -> bool:
        """True when the first forward drew numbers from torch's generator that decided nothing."""
        return self._functional.draws_unused

    @property
    def may_draw_otherwise(self) -> bool:
        """True while the model is not known to draw from nothing but its keys."""
        return self._functional.may_draw_otherwise

    def scanning(self) -> AbstractContextManager[None]:
        """Inside ``drawing()``, where a part of the model first runs: finds out whether it draws functionally."""
        return self._functional.scanning()

    @contextmanager
    def apart(self) -> Iterator["Calls"]:
        """Inside, the model is asked about something: its calls are not counted but in what this gives, when it is over."""
        before, found = [module.call for module in self._modules], Calls()
        try:
            with self._functional.apart() as found.functional:
                yield found
        finally:
            for module, call in zip(self._modules, before, strict=True):
                if module.call != call:
                    found.modules[module], module.__dict__["call"] = module.call - call, call

    def skip(self, calls: "Calls") -> None:
        """Count calls that another process makes: whoever comes after them in the microbatch draws as if they were made here."""
        for module, num in calls.modules.items():
            module.__dict__["call"] = module.call + num
        self._functional.skip(calls.functional)

    def recompute_contexts(self) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        """For ``torch.utils.checkpoint(..., context_fn=key.recompute_contexts)``: the recomputed region draws the same bits.

        Without it a recomputed forward is recognised too, as long as each dropout is called once per microbatch; and with it the
        recompute may come after another microbatch has begun, as it does in a pipeline.
        """
        remembered = [(module.draws, module.call) for module in self._modules]
        return nullcontext(), self._replay(remembered, self._functional.remember())

    @contextmanager
    def _replay(
        self,
        remembered: Sequence[tuple[Tensor | None, int]],
        replay_functional: Callable[[], AbstractContextManager[object]],
    ) -> Iterator[None]:
        before = [(module.draws, module.call) for module in self._modules]
        for module, (draws, call) in zip(self._modules, remembered, strict=True):
            module.rewind(draws, call, is_replaying=True)
        try:
            with replay_functional():
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
    batch_second = _batch_second(model)
    for path, module in model.named_modules():
        kind = next((kind for kind in _KEYED if type(module).forward is kind.forward), None)
        if kind is not None:
            module.__class__ = _KEYED[kind]
        if not isinstance(module, _Keyed):
            continue
        layout = Layout(batch_dim=1) if module in batch_second else WHOLE
        state = {"path": path, "site": site_key(seed, path), "draws": None, "call": 0, "is_replaying": False}
        module.__dict__.update(state, layout=layout, own_layout=layout)
        keyed.append(module)
    return DropoutKey(keyed, FunctionalDraws(model, seed))


def _batch_second(model: nn.Module) -> set[nn.Module]:
    """Dropouts beside attention of torch's that has the sequence first: their batch is dim 1, whatever its length."""
    found: set[nn.Module] = set()
    for module in model.modules():
        children = list(module.children())
        if any(isinstance(child, nn.MultiheadAttention) and not child.batch_first for child in children):
            found.update(children)
    return found


class _Keyed(nn.Module):
    """What a keyed dropout has beside its torch class. Its state is in ``__dict__``: no buffer, nothing in a checkpoint."""

    p: float
    inplace: bool
    path: str
    site: Tensor
    draws: Tensor | None
    call: int
    is_replaying: bool
    layout: Layout
    layouts: tuple[Layout, ...] = ()
    """By the number of the call, where calls see different parts; empty where ``layout`` is for all."""
    odd_shape: tuple[int, ...] | None = None

    def rewind(self, draws: Tensor | None, call: int, *, is_replaying: bool = False) -> None:
        """Set what comes next; past ``nn.Module.__setattr__``, which is slow and would look for parameters."""
        self.__dict__.update(draws=draws, call=call, is_replaying=is_replaying)

    def _mask(self, like: Tensor, *, p: float, scale: float, channels: bool) -> Tensor:
        draws = self.draws
        if draws is None:
            raise RunError(
                f"dropout {self.path!r} was called in training before begin(step, sample_ids) of its DropoutKey"
            )
        call = self._count_call()
        layout = self.layouts[call % len(self.layouts)] if self.layouts else self.layout
        if not torch.compiler.is_compiling() and like.shape[0] != len(draws) - 1:
            self._inspect(like, len(draws) - 1)
        return draw(like, draws, self.site, call, p=p, scale=scale, channels=channels, layout=layout)

    def _inspect(self, like: Tensor, num_samples: int) -> None:
        if read_shape(like.shape, num_samples, self.layout.batch_dim).is_guess:
            self.__dict__["odd_shape"] = tuple(like.shape)

    def _count_call(self) -> int:
        call = self.call
        if not torch.compiler.is_compiling() and not self.is_replaying and torch._C._current_graph_task_id() != -1:
            # Inside a backward pass a forward is a recompute: it must draw again what the first one drew.
            if call > 1:
                raise Refusal(
                    f"dropout {self.path!r} was called {call} times and is recomputed, so which call this is cannot be told; "
                    f"give checkpoint() context_fn=key.recompute_contexts, or each call a dropout of its own"
                )
            return 0
        self.call = call + 1
        return call

    def _multiply(self, x: Tensor, *, channels: bool) -> Tensor:
        if not self.training or self.p == 0.0:
            return x
        return multiply(x, self._mask, p=self.p, channels=channels, inplace=self.inplace)

    def _saturate(self, x: Tensor, *, channels: bool) -> Tensor:
        if not self.training or self.p == 0.0:
            return x
        return saturate(x, self._mask, p=self.p, channels=channels, inplace=self.inplace)


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
