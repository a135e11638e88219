"""What can happen in a run: one frozen dataclass per kind of event.

Every process of a run writes the same kinds, so one reader (a script, a display) understands all of them. An event is a
value: who writes it to disk, and when, is the business of ``telemetry``.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar


@dataclass(frozen=True, kw_only=True)
class Event:
    """Base of all events; ``kind`` is what a reader switches on."""

    kind: ClassVar[str] = "event"

    def as_dict(self) -> dict[str, Any]:
        """The event's own fields, with its kind first."""
        # Events are flat, so the instance's own dict will do; `asdict` would copy every value, at every step.
        return {"kind": self.kind, **self.__dict__}


@dataclass(frozen=True, kw_only=True)
class RunStarted(Event):
    """A rank begins training: a fresh start, a resume or a restart."""

    kind: ClassVar[str] = "run_started"
    plan: str
    world_size: int
    step: int
    """Steps already done; above zero after a resume."""
    generation: int
    """0 for the first start of this command, one more for each restart by the supervisor."""
    pid: int


@dataclass(frozen=True, kw_only=True)
class StepDone(Event):
    """One optimizer step, or one that was skipped."""

    kind: ClassVar[str] = "step"
    step: int
    """Steps done when this one ended; the first step is 1."""
    loss: float
    """Mean over the global batch, the same on every rank."""
    lr: float
    grad_norm: float | None
    """Norm of the whole gradient before clipping; None where nobody has the whole, as under parameter servers."""
    samples: int
    tokens: int
    seconds: float
    data_seconds: float
    """Part of ``seconds`` spent waiting for data."""
    skipped: bool = False
    loss_scale: float = 1.0
    wait_seconds: Mapping[str, float] = field(default_factory=dict)
    """Parts of ``seconds`` in which this rank waited for others, by the axis along which; ``pp`` for a neighbour's tensors."""
    phases: Mapping[str, float] = field(default_factory=dict)
    """``seconds`` by what this rank did, waits included; empty in files of earlier releases."""


@dataclass(frozen=True, kw_only=True)
class RoundDone(Event):
    """Islands have exchanged weights by the plan's ``sync``."""

    kind: ClassVar[str] = "round"
    step: int
    """Steps done when it was held."""
    round: int
    """Its number, from 0."""
    policy: str
    islands: int
    seconds: float
    """That the exchange and the outer step took on this rank; of a fragment that crossed during steps, what was waited for."""
    left_out: tuple[int, ...] = ()
    """Islands whose part was dropped because it was not finite; they go on from the agreed weights."""
    distance: float | None = None
    """How far islands were apart, where ``replicas.distance`` asks for it: see ``IslandsMeasured``."""


@dataclass(frozen=True, kw_only=True)
class DataCache(Event):
    """What a rank's cache of data has done since its last such event: where blocks came from, and what that cost."""

    kind: ClassVar[str] = "data_cache"
    memory_hits: int
    disk_hits: int
    fetches: int
    """Blocks that were in neither and came from the storage."""
    memory_bytes: int
    disk_bytes: int
    fetched_bytes: int
    fetch_seconds: float
    wait_seconds: float
    """Waited for other ranks of the host that were fetching the same block."""
    refused: int
    """Blocks that were torn or altered, on the disk or on their way, and were fetched again."""
    not_kept: int
    """Blocks that the disk had no room for, or refused."""


@dataclass(frozen=True, kw_only=True)
class IslandsMeasured(Event):
    """How far islands are apart, found at an evaluation, where the weights that stand for all of them are there anyway."""

    kind: ClassVar[str] = "islands"
    step: int
    distance: float
    """The root of the mean squared distance of their weights to their mean; of easgd, to the center."""


@dataclass(frozen=True, kw_only=True)
class UpdateApplied(Event):
    """One update of parameter servers, under the rules by which a step is not one update of all its shares alike.

    The tuples have one value for each gradient in it, in the order in which they were added.
    """

    kind: ClassVar[str] = "update"
    update: int
    """Counts from 0; the weights have this version before it."""
    step: int
    """Steps that were done before it."""
    lr: float
    """The schedule's rate of this update."""
    workers: tuple[str, ...]
    units: tuple[tuple[int, ...], ...] = ()
    """Which work units of the run: share ``p % workers`` of step ``p // workers``."""
    read: tuple[int, ...]
    """The version of the weights that each was computed with."""
    staleness: tuple[int, ...]
    """Updates between that and this one."""
    step_sizes: tuple[float, ...]
    """What each was multiplied by: the rate, times what being late, or being one of several, has left of it."""
    num_duplicates: int = 0
    """Under lbfgs: work units of the step's batches that were given to a second worker, because the first was slow."""


@dataclass(frozen=True, kw_only=True)
class Evaluated(Event):
    """A pass over a held-out split."""

    kind: ClassVar[str] = "evaluated"
    step: int
    split: str
    loss: float
    accuracy: float | None
    samples: int
    seconds: float
    metrics: Mapping[str, float] = field(default_factory=dict)
    """By name, where the recipe or a callback asks for some."""


@dataclass(frozen=True, kw_only=True)
class Logged(Event):
    """Numbers that a script logged by itself (``run.log``)."""

    kind: ClassVar[str] = "log"
    step: int
    """Steps done then."""
    values: Mapping[str, float]


@dataclass(frozen=True, kw_only=True)
class CheckpointSaved(Event):
    """A checkpoint was committed: every rank voted for it and it has its final name."""

    kind: ClassVar[str] = "checkpoint_saved"
    step: int
    path: str
    num_bytes: int
    stall_seconds: float
    """How long the training loop stood still for it."""
    write_seconds: float


@dataclass(frozen=True, kw_only=True)
class CheckpointFailed(Event):
    """A save failed on some rank and therefore on all; training goes on and older checkpoints are untouched."""

    kind: ClassVar[str] = "checkpoint_failed"
    step: int
    reason: str


@dataclass(frozen=True, kw_only=True)
class CheckpointRefused(Event):
    """A checkpoint on disk was not whole and was passed over."""

    kind: ClassVar[str] = "checkpoint_refused"
    path: str
    reason: str


@dataclass(frozen=True, kw_only=True)
class MemoryMeasured(Event):
    """Where a rank's memory is."""

    kind: ClassVar[str] = "memory"
    step: int
    weights_bytes: int
    gradient_bytes: int
    optimizer_bytes: int
    other_bytes: int
    """Resident memory that is none of the three: activations, buffers, the interpreter, libraries."""
    rss_bytes: int
    peak_rss_bytes: int


@dataclass(frozen=True, kw_only=True)
class EpochReceipt(Event):
    """An epoch is over: whether the run trained on every sample once."""

    kind: ClassVar[str] = "epoch_receipt"
    epoch: int
    rows: int
    """Samples that were trained on."""
    ok: bool | None
    """None where nobody can say; ``reason`` says why."""
    sum: str = ""
    """Of the hashes of their numbers, modulo 2^128, in hexadecimal digits."""
    expected_rows: int | None = None
    expected: str = ""
    replayed: int = 0
    """Samples that came again, besides each sample once (``data.replay``); ``rows`` has them too."""
    reason: str = ""


@dataclass(frozen=True, kw_only=True)
class DataGrew(Event):
    """The run took up a newer version of its data."""

    kind: ClassVar[str] = "data_grew"
    epoch: int
    """The first that reads it."""
    version: int
    samples: int
    """Of the training split."""
    added: int
    """Since the version before."""


@dataclass(frozen=True, kw_only=True)
class Published(Event):
    """A version of the model was published for whoever predicts with it."""

    kind: ClassVar[str] = "published"
    step: int
    version: int
    loss: float
    """On the held-back window."""
    last_loss: float | None
    """Of the version before, on the same window; None where there is none."""
    weights_sha256: str
    data_version: int
    seconds: float
    """That it took, from the look at the window to the pointer."""


@dataclass(frozen=True, kw_only=True)
class RefreshRefused(Event):
    """The model was not published: the version before stays the newest."""

    kind: ClassVar[str] = "refresh_refused"
    step: int
    loss: float
    last_loss: float | None
    limit: float | None
    """What the loss may be at most; None where it only has to be finite."""
    reason: str


@dataclass(frozen=True, kw_only=True)
class DriftMeasured(Event):
    """How far recent training samples are from those of the first window, and recent losses from those of the last version."""

    kind: ClassVar[str] = "drift"
    step: int
    samples: int
    """In the recent window."""
    stability: float
    """The largest population stability index of an input; above 0.25 is commonly called a shift."""
    where: str
    """The input that has it."""
    loss_shift: float
    """The mean of recent losses less that before the last published version, in standard deviations of those."""


@dataclass(frozen=True, kw_only=True)
class ReaderSlow(Event):
    """One rank's loading takes much longer than that of the others, which wait for it."""

    kind: ClassVar[str] = "reader_slow"
    slow_rank: int
    load_seconds: float
    """That its loading took since all ranks counted together last."""
    usual_seconds: float
    """The other ranks', in the middle."""
    steps: int
    source: str
    """What is read: an address, or the kind of source."""


@dataclass(frozen=True, kw_only=True)
class NonFinite(Event):
    """A loss or gradient was NaN or infinite."""

    kind: ClassVar[str] = "non_finite"
    step: int
    culprit_rank: int
    what: str
    """The parameter's name, or ``loss``."""
    action: str
    """stop or skip."""


@dataclass(frozen=True, kw_only=True)
class LossSpiked(Event):
    """A step was left out because its loss had jumped."""

    kind: ClassVar[str] = "loss_spiked"
    step: int
    loss: float
    limit: float
    """What it was not to exceed."""


@dataclass(frozen=True, kw_only=True)
class RolledBack(Event):
    """Steps in a row were left out, and the run went back to a checkpoint with a lower rate."""

    kind: ClassVar[str] = "rolled_back"
    step: int
    to_step: int
    rate_factor: float
    """What the learning rate is multiplied by from there on."""


@dataclass(frozen=True, kw_only=True)
class RateAdapted(Event):
    """What ``optim.adapt`` has measured, and what it makes of the learning rate."""

    kind: ClassVar[str] = "adapted"
    step: int
    rule: str
    rate_factor: float
    """What the rate of the next step is multiplied by."""
    noise_scale: float | None = None
    """The gradient noise scale, in samples; None where it is not measured, or not known yet."""
    batch: int | None = None
    """Samples of the next step; None in runs that were recorded before it could change."""
    progress: float | None = None
    """Under adascale: steps of the base batch that the steps so far are worth."""


@dataclass(frozen=True, kw_only=True)
class Warned(Event):
    """Something the user should know and the run survives."""

    kind: ClassVar[str] = "warning"
    message: str


@dataclass(frozen=True, kw_only=True)
class RankFailed(Event):
    """The supervisor's verdict on why a generation ended."""

    kind: ClassVar[str] = "rank_failed"
    culprit_rank: int
    step: int
    phase: str
    cause: str
    generation: int
    restarting: bool
    host: str = ""
    """Of that rank, where there are several."""


@dataclass(frozen=True, kw_only=True)
class ViewChanged(Event):
    """Who takes part in an elastic run from now on."""

    kind: ClassVar[str] = "view"
    epoch: int
    replicas: int
    """Those that are present."""
    logical: int
    """Those whose shares of the global batch they compute."""
    members: list[str]
    hosts: list[str]
    cause: str
    retry: bool = False
    """Nobody came or went: a step is done again."""


@dataclass(frozen=True, kw_only=True)
class StragglerFound(Event):
    """A rank of an elastic run is busy for longer than the others."""

    kind: ClassVar[str] = "straggler"
    member: str
    host: str
    factor: float
    """How many times as long as the median of the others."""
    reason: str
    """What takes the difference: compute or data."""
    seconds: float
    """How much longer that is, per step."""
    is_left_out: bool
    """The run goes on without its replica, where enough are left."""


@dataclass(frozen=True, kw_only=True)
class Resumed(Event):
    """Under a new view all ranks have the state of the same step again."""

    kind: ClassVar[str] = "resumed"
    step: int
    """Steps done; the next one is done, or done again, by those present."""
    epoch: int
    seconds: float
    """From the moment at which this rank noticed; 0 for a newcomer."""
    source: str
    """Where the state came from: own, a peer, copies or checkpoint."""
    redone: int = 0
    """Steps that had been applied and are lost."""


@dataclass(frozen=True, kw_only=True)
class GradientRefused(Event):
    """A parameter server did not take a gradient, because of NaN or infinity in it: no weight has met it, its worker was told."""

    kind: ClassVar[str] = "gradient_refused"
    step: int
    """Steps that were done then."""
    worker: str
    push: str = ""
    """Names the gradient: a worker's push is refused by every server that has a part of it which is not finite."""
    reason: str


@dataclass(frozen=True, kw_only=True)
class WorkerHung(Event):
    """A worker of parameter servers did not come out of a work unit, and has ended its process for it."""

    kind: ClassVar[str] = "hung"
    worker: str
    step: int
    """Of the work unit."""
    seconds: float
    """That it had taken by then, without time in which the process did not run."""
    usual_seconds: float
    """Mean of this worker's work units."""


@dataclass(frozen=True, kw_only=True)
class WentBack(Event):
    """No copy of a shard was left: every parameter server went back to the newest checkpoint, and the run goes on from there."""

    kind: ClassVar[str] = "went_back"
    step: int
    """Of that checkpoint; 0 where there was none."""
    died: tuple[str, ...]
    """The servers that had died since every shard last had all its copies."""
    history: int
    """How often that has happened in this run, from 1."""


@dataclass(frozen=True, kw_only=True)
class WorkerTraffic(Event):
    """A worker of parameter servers leaves the wire: the gradients that it sent, and the weights that it got."""

    kind: ClassVar[str] = "traffic"
    pushed_bytes: int
    pulled_bytes: int
    residual_bytes: int = 0
    """Of what it has not sent, for checkpoints."""


@dataclass(frozen=True, kw_only=True)
class MessagesDropped(Event):
    """Messages to a process of parameter servers that it dropped, since its start; the newest word of a process counts."""

    kind: ClassVar[str] = "messages_dropped"
    process: str
    instance_id: str = ""
    """Which start of it; releases before this one wrote it under another name."""
    counts: Mapping[str, int]
    """By reason (``comm/wire/errors.py``): malformed, stale (of an old epoch), duplicate, late, and so on."""


@dataclass(frozen=True, kw_only=True)
class RunEnded(Event):
    """A rank leaves training in an orderly way."""

    kind: ClassVar[str] = "run_ended"
    status: str
    step: int
    seconds: float
