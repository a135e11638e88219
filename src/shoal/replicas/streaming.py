"""Streaming DiLoCo: fragments of the model have rounds of their own, and what is sent is applied some steps later.

Fragment p of F is the layers number p, p + F, p + 2F, ... (``fragments.py``). Its change is
summed after the steps at which ``(step + 1 - p H / F) mod H`` is 0, and applied T steps later by DiLoCo's outer step; then an
island mixes ``t = f + a (t - f)``, which keeps a share of what it did meanwhile (Douillard et al. 2025, arXiv 2501.18512,
equations 2 and 3). With one fragment, no delay and a = 0 this is DiLoCo, bit for bit.

Where there is a delay the exchange goes on beside the T steps (``flight.py``), and the step that applies it waits for what is
left of it. The outer step is taken on the exchange's thread, as soon as the sum is there: it needs nothing that an island does
meanwhile, so that the step which applies a fragment only mixes. A checkpoint waits too, and keeps what the outer step gave:
whether a fragment was still under way changes no bit.
"""

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from shoal.comm.trafficcounter import TrafficCounts
from shoal.core.syncrule import SyncRule
from shoal.replicas.averaging import mean_weights, step_nesterov_
from shoal.replicas.config import ReplicaConfig
from shoal.replicas.exchange import LEFT_OUT, Bucket, MeanChange, Membership, chunks
from shoal.replicas.flight import Flight
from shoal.replicas.fragments import count_layers, cut_fragments
from shoal.replicas.policy import Island, PolicyState, StepEnd


class Streaming:
    """Rounds of fragments. ``order`` names all parameters of the model, so that ranks with parts of it agree on fragments."""

    def __init__(self, island: Island, rule: SyncRule, config: ReplicaConfig, order: Sequence[str]) -> None:
        self._island, self._rule, self._config = island, rule, config
        self._fragments = [
            [name for name in island.weights if name in fragment] for fragment in cut_fragments(order, rule.fragments)
        ]
        self._layers = torch.tensor(count_layers(order))
        """That fragments are cut from. Checkpoints from before fragments were of layers have none: what was under way in them
        belongs to no fragment."""
        self._agreed = island.copy_weights()
        # Filled, so that no step waits for pages of memory that nobody has touched before.
        self._momentum = {name: torch.zeros_like(weight).fill_(0.0) for name, weight in island.weights.items()}
        self._change = {name: torch.zeros_like(weight).fill_(0.0) for name, weight in island.weights.items()}
        """This island's change, and once it has arrived the mean of all of them: each fragment's last."""
        self._told = torch.ones(rule.fragments, island.count, dtype=torch.float64)
        """The share of each island in the last round of each fragment."""
        self._room = Bucket()
        self._samples = torch.zeros(rule.fragments, dtype=torch.int64)
        """Since each fragment was applied."""
        self._flights: dict[int, tuple[Flight, MeanChange]] = {}
        """Exchanges that were started and not waited for yet, by fragment."""
        self._arrived: dict[int, TrafficCounts] = {}
        """What crossed for a fragment that has arrived and was not applied yet."""
        self.left_out: tuple[int, ...] = ()
        """See ``Policy``."""
        self.is_agreed = True
        """See ``Policy``: only where one fragment is the whole model and nothing is kept of an island's own."""

    def before_update(self) -> None:
        """See ``Policy``. Bad news of an exchange are told at the next step, not when it is applied."""
        for flight, _ in self._flights.values():
            flight.check()

    @torch.no_grad()
    def after_update(self, end: StepEnd) -> bool:
        """See ``Policy``. Which fragment is due follows from the step alone."""
        self.is_agreed, self.left_out = False, ()
        self._samples += end.samples
        sent, applied = self._rule.fragments_sent(end.step), self._rule.fragments_applied(end.step)
        for fragment in range(self._rule.fragments):
            if fragment in sent:
                self._send(fragment, end.step)
            if fragment in applied:
                self._land(fragment)
                self._count(fragment)
                self._apply(fragment)
                self.is_agreed = self._agrees_at_rounds
        return bool(applied)

    def _send(self, fragment: int, step: int) -> None:
        names = self._fragments[fragment]
        changes = {name: self._change[name] for name in names}
        for name, change in changes.items():
            torch.sub(self._agreed[name], self._island.weights[name], out=change)
        by_samples = self._config.weigh == "samples"
        share = float(self._samples[fragment]) if by_samples else 1.0
        sent = self._island.widen(changes)
        channel = self._island.background or self._island.channel
        mean = MeanChange(
            channel,
            share=share if self._island.is_finite(changes.values()) else LEFT_OUT,
            by_samples=by_samples,
            step=step,
            sums=self._island.sums,
            room=self._room,
        )
        if self._island.background is None:
            for _ in self._exchange(mean, sent, changes):
                pass
            self._note(fragment, mean.members)
            return
        # One at a time: the delay is shorter than the time between two fragments, so the one before has been applied.
        assert not self._flights, "a fragment is applied before the next one is sent"
        flight = Flight(
            lambda: self._exchange(mean, sent, changes),
            channel,
            what=f"fragment {fragment} of the round that was sent after step {step + 1}",
            rank=self._island.rank,
            deadline_seconds=self._island.deadline_seconds,
        )
        self._flights[fragment] = (flight, mean)

    def _exchange(self, mean: MeanChange, sent: Mapping[str, Tensor], changes: Mapping[str, Tensor]) -> Iterator[None]:
        """The messages of one fragment, and then its outer step; on a thread where there is a delay."""
        yield from mean.messages(sent)
        self._island.narrow_(sent, changes)
        momentum = self._config.outer_momentum_of(self._rule.kind)
        for name, change in changes.items():
            for parts in chunks(self._agreed[name], self._momentum[name], change):
                step_nesterov_(*parts, share=momentum, rate=self._config.outer_lr)

    def _land(self, fragment: int) -> None:
        """Wait for a fragment that is under way; nothing where none is, as after a resume."""
        if fragment in self._flights:
            flight, mean = self._flights.pop(fragment)
            flight.wait()
            self._arrived[fragment] = flight.counts
            self._note(fragment, mean.members)

    def _count(self, fragment: int) -> None:
        """What crossed is counted in the step that applies it, whenever it came."""
        self._island.channel.traffic.add(self._arrived.pop(fragment, {}))

    def _note(self, fragment: int, members: Membership) -> None:
        self._told[fragment] = torch.tensor(members.shares, dtype=torch.float64)

    def _apply(self, fragment: int) -> None:
        self.left_out = Membership(self._told[fragment].tolist()).left_out
        self._samples[fragment] = 0
        mixing = 0.0 if self._island.number in self.left_out else self._config.mixing
        for name in self._fragments[fragment]:
            for agreed, weight in chunks(self._agreed[name], self._island.weights[name]):
                if mixing == 0:
                    weight.copy_(agreed)
                else:
                    weight.sub_(agreed).mul_(mixing).add_(agreed)

    @torch.no_grad()
    def restart(self) -> None:
        """See ``Policy``."""
        self.close()
        self._arrived.clear()
        self._told.fill_(1.0)
        self._samples.zero_()
        for name, weight in self._island.weights.items():
            self._agreed[name].copy_(weight)
            self._momentum[name].zero_()
            self._change[name].zero_()
        self.is_agreed = True

    def loaded(self, *, after_round: bool) -> None:
        """See ``Policy``."""
        self.is_agreed = after_round and self._agrees_at_rounds

    @property
    def _agrees_at_rounds(self) -> bool:
        return self._rule.fragments == 1 and self._rule.delay == 0 and self._config.mixing == 0

    def consensus(self) -> dict[str, Tensor]:
        """See ``Policy``: the mean of the islands' weights."""
        return mean_weights(self._island, is_agreed=self.is_agreed)

    def state(self) -> PolicyState:
        """See ``Policy``."""
        self.close()
        shared = {"agreed": self._agreed, "momentum": self._momentum, "change": self._change}
        numbers = {"told": self._told, "samples": self._samples, "layers": self._layers}
        return PolicyState(shared=shared, own={}, own_numbers=numbers)

    def close(self) -> None:
        """See ``Policy``."""
        for fragment in list(self._flights):
            self._land(fragment)
