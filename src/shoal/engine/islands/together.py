"""Islands in a step: when their policy acts, how they hear of each other's wish to stop, and what is evaluated and saved of them.

Inside an island everything is as in a run without islands; this file is all that the engine knows of the others. Islands talk to
each other at rounds, and every few steps for the request to stop: a run stops at a step that all of them come to.
"""

import math
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from shoal.comm.channel import Channel
from shoal.comm.ordered import has_rank_order
from shoal.comm.trafficcounter import ExchangeMeter, Traffic, TrafficCounts, add_traffic
from shoal.compression.exchange import CompressedSum
from shoal.core.events import IslandsMeasured, RoundDone
from shoal.core.placement import Placement, place_whole
from shoal.core.syncrule import SyncRule
from shoal.engine.islands.unsent import Unsent
from shoal.engine.state import RankState
from shoal.engine.stop import StopRequest
from shoal.replicas.choco import CompressedGossip
from shoal.replicas.config import ReplicaConfig
from shoal.replicas.exchange import mean_over_islands_
from shoal.replicas.fragments import cut_fragments
from shoal.replicas.graphs import mixing
from shoal.replicas.intervals import Interval
from shoal.replicas.policy import Policy, StepEnd
from shoal.replicas.shards import WholeBlocks
from shoal.replicas.traffic import Sizes, step_traffic, summed_traffic, tells_stop

PREFIX = "islands/"
"""Of the names of what islands keep in a checkpoint."""

# Gossip without a codec keeps no copy of what neighbours know, and each island's weights differ by then.
_LACKING = {
    "gossip": (
        "the checkpoint is of sync=gossip without a codec, so no island knows what neighbours have heard of it: every island "
        "goes on from the mean of their weights, which all of them know"
    ),
    "stream": (
        "the checkpoint is of sync=stream with fragments of single parameters, and they are of whole layers now, to none of "
        "which belongs what was under way: every island goes on from the mean of their weights"
    ),
}
"""What to say of a checkpoint of the same policy and islands that lacks something, by policy."""


@dataclass(kw_only=True, eq=False)
class Islands:
    """One rank's part in bringing islands together."""

    rule: SyncRule
    config: ReplicaConfig
    policy: Policy
    channel: Channel
    """The ranks of equal coordinates, one in each island."""
    inside: Channel
    """The ranks of this island."""
    weights: Mapping[str, Tensor]
    """What this rank updates, by parameter name: live."""
    placements: Mapping[str, Placement]
    buffers: Mapping[str, Tensor]
    """Running statistics of batch norm by the names that checkpoints have for them: live."""
    saved_names: Mapping[str, str]
    """What checkpoints call each parameter."""
    seed: int
    stop: StopRequest
    device: torch.device
    publish: Callable[[], None]
    """Brings weights to where forward passes read them."""
    forget: Callable[[], None]
    """Puts this rank's optimizer back to its beginning."""
    sums: CompressedSum | None = None
    """Adds changes up compressed; None where they go as they are."""
    shards: WholeBlocks | None = None
    """Makes whole blocks of changes that ZeRO has cut."""
    goes_on: bool = False
    """An island whose step is not finite leaves it out, and comes to rounds all the same."""
    report: list[RoundDone | IslandsMeasured] = field(default_factory=list)
    """Rounds since somebody asked, oldest first."""
    meter: ExchangeMeter = field(default_factory=ExchangeMeter, init=False)
    """What islands have sent each other in steps: no evaluation and no save."""
    last_distance: float | None = field(default=None, init=False)
    """How far islands were apart when that was measured last."""
    interval: Interval = field(init=False)
    unsent: Unsent | None = field(init=False)
    """What compressed sums keep in a checkpoint; None where nothing is compressed."""
    _is_measured: bool = field(default=False, init=False)
    """The last step has measured the distance."""
    _since: Tensor = field(default_factory=lambda: torch.zeros((), dtype=torch.int64))
    """Steps since the last round."""
    _rounds: Tensor = field(default_factory=lambda: torch.zeros((), dtype=torch.int64))
    """Rounds so far: the number of the next one."""
    _taken: Tensor = field(default_factory=lambda: torch.zeros((), dtype=torch.int64))
    """Steps so far, where a script takes them and nobody numbers them."""
    _said: str | None = None
    """What to tell of a checkpoint that is being loaded."""
    _last_round: float = field(default_factory=time.monotonic)

    def __post_init__(self) -> None:
        self.unsent = None if self.sums is None else Unsent(sums=self.sums, saved_names=self.saved_names)
        self.interval = Interval(self.rule, self.config)

    def take_report(self) -> list[RoundDone | IslandsMeasured]:
        """Rounds and measurements since this was asked last."""
        told, self.report = self.report, []
        return told

    @property
    def num_rounds(self) -> int:
        """Rounds since the beginning of the run; of ``stream``, those of its fragments."""
        return int(self._rounds)

    @property
    def was_round(self) -> bool:
        """A round was held after the last step."""
        return int(self._since) == 0

    def sums_gradients(self, step: int) -> bool:
        """True while all islands still sum their gradients at every step (post-local)."""
        return step < self.rule.start

    def average_gradients(self, gradients: Sequence[Tensor]) -> None:
        """The mean of the islands' gradients, in place."""
        with self._measuring_bytes():
            mean_over_islands_(gradients, self.channel)

    @property
    def next_step(self) -> int:
        """The number of the step that a script takes next."""
        return int(self._taken)

    def before_update(self) -> None:
        """The optimizer is about to step."""
        self.policy.before_update()

    def after_update(self, step: int, *, lr: float, samples: int) -> None:
        """The optimizer has stepped: hold a round where one is due, and hear whether anybody wants to stop.

        Args:
            step: its number, from 0.
            lr: its rate.
            samples: that this island learnt from in it.
        """
        with self._measuring_bytes():
            self._after_update(step, lr=lr, samples=samples)
        self.meter.add_dense(sum(weight.nbytes for weight in self.weights.values()), self.channel.size)

    def _measuring_bytes(self) -> AbstractContextManager[None]:
        return self.meter.measuring(
            self.channel.traffic,
            self.channel.axis,
            self.channel.size,
            leaves_out_own=self.rule.graph is not None,
        )

    def _after_update(self, step: int, *, lr: float, samples: int) -> None:
        self._taken.fill_(step + 1)
        if self.sums_gradients(step):
            if step + 1 == self.rule.start:
                self.policy.restart()
            self._tell_stop(step, is_round=False)
            return
        self._since += 1
        is_round = self._is_due(step, lr)
        distance = self._measure_before(is_round=is_round)
        started = time.perf_counter()
        self.policy.after_update(StepEnd(step=step, lr=lr, is_round=is_round, samples=samples))
        if is_round:
            self._since.zero_()
            self._last_round = time.monotonic()
        if self.channel.rank in self.policy.left_out:
            # What made the weights useless is in the optimizer's state too.
            self.forget()
        if is_round and self.rule.graph is not None and self._wants_distance():
            distance = self.distance()
        if is_round:
            self.report.append(
                RoundDone(
                    step=step + 1,
                    round=int(self._rounds),
                    policy=str(self.rule),
                    islands=self.channel.size,
                    seconds=time.perf_counter() - started,
                    left_out=self.policy.left_out,
                    distance=distance,
                )
            )
            self._rounds += 1
        self._tell_stop(step, is_round=is_round)

    def close(self) -> None:
        """Wait for what is under way between islands."""
        self.policy.close()

    def end_step(self) -> None:
        """After a round buffers are the islands' mean, as weights are."""
        if self.was_round and self.policy.is_agreed and self.buffers:
            mean_over_islands_(list(self.buffers.values()), self.channel)

    def _is_due(self, step: int, lr: float) -> bool:
        if self.rule.seconds is not None:
            return self._clock_says_so()
        return self.interval.is_due(step, lr=lr, since=int(self._since))

    def _wants_distance(self) -> bool:
        return self.config.distance > 0 and int(self._rounds) % self.config.distance == 0

    def _measure_before(self, *, is_round: bool) -> float | None:
        """How far islands have gone apart before a round brings them together; of gossip that is asked after it."""
        self._is_measured = is_round and self._wants_distance()
        return self.distance() if self._is_measured and self.rule.graph is None else None

    def _clock_says_so(self) -> bool:
        """The first rank of the run looks at its clock, and all obey at this very step."""
        assert self.rule.seconds is not None
        is_first = self.channel.rank == 0 and self.inside.rank == 0
        is_late = is_first and time.monotonic() - self._last_round >= self.rule.seconds
        told = torch.tensor([float(is_late)], device=self.device)
        self.inside.all_reduce_max_(told)
        self.channel.all_reduce_max_(told)
        return bool(told.item())

    def _tell_stop(self, step: int, *, is_round: bool) -> None:
        """Whether any island was asked to stop: known to all at the same step."""
        if tells_stop(self.rule, step, is_round=is_round):
            told = torch.tensor([float(self.stop.is_pending)], device=self.device)
            self.stop.agree(any_rank=float(self.channel.all_reduce_max_(told)) > 0)

    def forecast_traffic(self, step: int, *, is_round: bool) -> TrafficCounts:
        """What this rank sends to other islands in step number ``step``; asked after it."""
        graph = None
        if self.rule.graph is not None and is_round:
            graph = mixing(
                self.rule.graph,
                self.channel.size,
                int(self._rounds) - 1,
                seed=self.seed,
                is_directed=self.rule.kind == "pushsum",
            )
        items = {name: weight.numel() for name, weight in self.weights.items()}
        size = next((weight.element_size() for weight in self.weights.values()), 4)
        found = step_traffic(
            self.rule,
            step,
            Sizes(
                elements=items,
                item_bytes=size,
                fragments=cut_fragments(self.saved_names, self.rule.fragments),
                islands=self.channel.size,
                inside=self.inside.size,
                sparse_bits=self.config.sparse_bits,
                message_bytes=self.policy.message_bytes(step) if isinstance(self.policy, CompressedGossip) else None,
            ),
            is_round=is_round,
            has_order=self._has_order,
            place=self.channel.rank,
            matrix=graph,
            sums=self.sums,
            shards=self.shards,
        )
        return found if not self._is_measured else add_traffic(found, self._measuring(items, size))

    def _measuring(self, items: Mapping[str, int], size: int) -> TrafficCounts:
        """What measuring the distance costs."""
        number = Traffic(calls=1, num_bytes=8)
        told = {(self.channel.axis, "all_reduce"): number}
        inside = {(self.inside.axis, "all_reduce"): number} if self.inside.size > 1 else {}
        if self.rule.kind == "easgd":
            return add_traffic(told, inside)
        summed = summed_traffic(list(items.values()), size, has_order=self._has_order)
        return add_traffic(told, inside, summed)

    @property
    def _has_order(self) -> bool:
        """The channel adds in the order of ranks by itself."""
        return has_rank_order(self.channel)

    # --- evaluation

    @contextmanager
    @torch.no_grad()
    def consensus(self, step: int) -> Iterator[None]:
        """Inside, the model's weights are those that stand for all islands; afterwards this island's own, bit for bit.

        Args:
            step: steps that were taken before.
        """
        if self.policy.is_agreed:
            yield
            return
        own = {name: weight.clone() for name, weight in self.weights.items()}
        kept = [buffer.clone() for buffer in self.buffers.values()]
        mean = self.policy.consensus()
        self.report.append(IslandsMeasured(step=step, distance=self._distance_to(mean)))
        self._put(mean)
        mean_over_islands_(list(self.buffers.values()), self.channel)
        try:
            yield
        finally:
            self._put(own)
            for buffer, before in zip(self.buffers.values(), kept, strict=True):
                buffer.copy_(before)

    def _put(self, other: Mapping[str, Tensor]) -> None:
        for name, weight in self.weights.items():
            weight.copy_(other[name])
        self.publish()

    @torch.no_grad()
    def distance(self) -> float:
        """How far islands are apart: the root of the mean squared distance of their weights to their mean (easgd: the center).

        It costs an exchange of the size of the model. All ranks call it together.
        """
        if self.rule.kind == "easgd":
            return self._distance_to(self.policy.consensus())
        mean = {name: weight.clone() for name, weight in self.weights.items()}
        mean_over_islands_(list(mean.values()), self.channel)
        return self._distance_to(mean)

    def _distance_to(self, mean: Mapping[str, Tensor]) -> float:
        squares = sum(
            (float((weight.double() - mean[name].double()).square().sum()) for name, weight in self.weights.items()),
            0.0,
        )
        told = torch.tensor([squares], dtype=torch.float64, device=self.device)
        self.channel.all_reduce_(told)
        self.inside.all_reduce_(told)
        self.last_distance = math.sqrt(float(told) / self.channel.size)
        return self.last_distance

    def agreed_weights(self) -> dict[str, Tensor]:
        """The weights and statistics that stand for all islands, as copies, by the names that checkpoints have for them."""
        buffers = {name: buffer.clone() for name, buffer in self.buffers.items()}
        if not self.policy.is_agreed:
            mean_over_islands_(list(buffers.values()), self.channel)
        return {**{self.saved_names[name]: one for name, one in self.policy.consensus().items()}, **buffers}

    # --- checkpoints

    def to_save(self, own: RankState) -> RankState:
        """What a checkpoint keeps: the mean of all islands under the usual names, which any plan can go on from, and beside it
        what each island needs to go on exactly. All ranks call it together."""
        tensors, placements = dict(own.tensors), dict(own.placements)
        mine = f"{PREFIX}{self.rule.kind}/{self.channel.size}/{self.channel.rank}/"
        agreed = self.policy.consensus()
        by_parameter = {self.saved_names[name]: name for name in self.weights}
        averaged: list[Tensor] = []
        for key, tensor in own.tensors.items():
            section, _, name = key.partition("/")
            if section == "weights" and name in by_parameter:
                tensors[key] = agreed[by_parameter[name]]
                if not self.policy.is_agreed:
                    tensors[mine + key], placements[mine + key] = tensor, own.placements[key]
            elif section == "optimizer" or (name in self.buffers and not self.policy.is_agreed):
                tensors[mine + key], placements[mine + key] = tensor, own.placements[key]
                if tensor.ndim > 0 and tensor.is_floating_point():
                    tensors[key] = tensor.clone()
                    averaged.append(tensors[key])
        mean_over_islands_(averaged, self.channel)
        extra, placed = self._policy_tensors()
        unsent = {} if self.unsent is None else self.unsent.named(self._prefix, is_read=False)
        extra |= {key: one for key, (one, _) in unsent.items()}
        placed |= {key: place for key, (_, place) in unsent.items()}
        return replace(own, tensors={**tensors, **extra}, placements={**placements, **placed})

    def to_load(self, own: RankState, saved: Collection[str]) -> tuple[RankState, bool]:
        """The live tensors to be written, by the names that a checkpoint has for them; and whether it is one of this policy.

        A checkpoint of another policy or number of islands, or of none, is taken up by its mean.
        """
        known = set(saved)
        extra, placed = self._policy_tensors()
        mine = f"{PREFIX}{self.rule.kind}/{self.channel.size}/{self.channel.rank}/"
        unsent = {} if self.unsent is None else self.unsent.named(self._prefix, is_read=True)
        lengths = {f"{self._prefix}shared/{what}" for what in self.interval.numbers()}
        if not lengths <= known:
            # Saved with rounds of another kind of length: these go on from where the round is.
            self.interval.restart()
            extra = {key: one for key, one in extra.items() if key not in lengths}
            placed = {key: place for key, place in placed.items() if key not in lengths}
        if any(key not in known for key in extra):
            if f"{self._prefix}shared/round" in known:
                self._said = _LACKING.get(self.rule.kind)
            return self._fold_unsent(own, known), False
        if self.unsent is not None and not unsent.keys() <= known:
            # Saved with another codec, or none: what islands agreed on stays, and this codec begins anew.
            self.unsent.sums.reset()
            rule = self.unsent.sums.rule
            self._said = f"the checkpoint is of islands without compress={rule}: nothing is left of what was not sent"
            unsent = {}
        tensors: dict[str, Tensor] = {**extra, **{key: one for key, (one, _) in unsent.items()}}
        placements: dict[str, Placement] = {**placed, **{key: place for key, (_, place) in unsent.items()}}
        for key, tensor in own.tensors.items():
            name = mine + key if mine + key in known else key
            tensors[name], placements[name] = tensor, own.placements[key]
        return replace(own, tensors=tensors, placements=placements), True

    def _fold_unsent(self, own: RankState, saved: Collection[str]) -> RankState:
        """The live tensors, with what islands of another number or policy have not sent."""
        if self.unsent is None:
            return own
        found = self.unsent.fold(saved, self._prefix)
        return replace(
            own,
            tensors={**own.tensors, **{key: one for key, (one, _) in found.items()}},
            placements={**own.placements, **{key: place for key, (_, place) in found.items()}},
        )

    @property
    def _prefix(self) -> str:
        """Of what this policy keeps in a checkpoint, for this number of islands."""
        return f"{PREFIX}{self.rule.kind}/{self.channel.size}/"

    def went_on(self, *, is_same: bool) -> str | None:
        """A checkpoint was loaded: of this policy, or of another, whose mean alone was taken; returns what to say of that."""
        if is_same:
            self.policy.loaded(after_round=self.was_round)
            said, self._said = self._said, None
            return said
        self.policy.restart()
        self.interval.restart()
        left = None if self.unsent is None else self.unsent.loaded()
        self._since.zero_()
        self._rounds.zero_()
        self._taken.zero_()
        said, self._said = self._said, None
        said = said or (
            f"the checkpoint is not one of {self.channel.size} islands with sync={self.rule.kind}: every island goes on from "
            "the weights that it was saved with, which of islands are their mean"
        )
        return said if left is None else f"{said}; {left}"

    def _policy_tensors(self) -> tuple[dict[str, Tensor], dict[str, Placement]]:
        state = self.policy.state()
        prefix = self._prefix
        tensors: dict[str, Tensor] = {}
        placements: dict[str, Placement] = {}
        for where, groups in (("shared", state.shared), (str(self.channel.rank), state.own)):
            for what, by_name in groups.items():
                for name, tensor in by_name.items():
                    key = f"{prefix}{where}/{what}/{self.saved_names[name]}"
                    tensors[key], placements[key] = tensor, self.placements[name]
        numbers = {f"{self.channel.rank}/{what}": number for what, number in state.own_numbers.items()}
        shared = {"since": self._since, "round": self._rounds, "taken": self._taken, **self.interval.numbers()}
        numbers |= {f"shared/{what}": number for what, number in shared.items()}
        for what, number in numbers.items():
            tensors[prefix + what], placements[prefix + what] = number, place_whole(number.shape)
        return tensors, placements

    def num_state_bytes(self) -> int:
        """Bytes of the policy's copies: agreed weights, momentum, what is in flight or not sent yet."""
        state = self.policy.state()
        groups = (*state.shared.values(), *state.own.values())
        return sum(tensor.nbytes for named in groups for tensor in named.values())
