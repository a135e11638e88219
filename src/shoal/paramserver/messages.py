"""Every message between the roles, typed. A message says what is wanted; who may ask is decided by epoch and view.

    worker -> server     Push, Pull                       a shard's gradient, a shard's weights
    worker -> server     Remember                         what a checkpoint has of the worker's residual
    worker -> update log       Take, Commit                     the next work unit; a push is whole
    server -> update log       Follow                           updates of the log, parked until there are more
    server -> server     Forward, Note, Fetch             a backup's copy of a push, of an input of the update log, of everything
    under lbfgs          Draw, Part, Run, Mirror,         a work unit of the batch, its gradient, a program on a shard, a backup's
                         Recall, Advance, Settle          copy of these, what a coordinator remembers, a step, its end everywhere
    anyone -> center     Join, Watch, Leave, Dead, Synced, Failed, Ballot, Halt
    candidate -> candidate   Greet, Over                  is it the same run; it has ended

Bodies are small; tensors travel as payload, flat, in the shard's order (``sharding.py``). Times are seconds.
"""

import msgspec

from shoal.comm.wire.operations import Op, Operations
from shoal.elastic.view import Role, View
from shoal.paramserver.programs import Operation
from shoal.paramserver.records import PushRecord, Update, WorkUnit

MAX_PAYLOAD = 64 << 30
MAX_TEXTS = 1 << 30


class Message(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag=True):
    """The body of a message."""


class Done(Message, frozen=True):
    """What was asked for is done."""


class Packed(Message, frozen=True):
    """What a compressed payload is made of (``pushcodec.py``)."""

    codec: str
    """As the plan writes it; a server takes none but its own."""
    unit: int
    """The first work unit of the push, by which random choices were drawn."""
    sizes: tuple[int, ...]
    """Bytes of every compressed piece of the shard, in its order."""
    keeper: int | None = None
    """The place of the worker whose residual follows in the payload; None: there is none."""


class Push(Message, frozen=True):
    """A push's gradient of one shard. Asked again it changes nothing: a push is known by sender and number."""

    shard: int
    number: int
    version: int
    """The version of this shard that it was computed from."""
    rows: tuple[tuple[str, int], ...] = ()
    """Tensors of which the payload has only so many rows (``sparse.py``); empty: it is the whole slice."""
    packed: Packed | None = None
    """How the payload is compressed; None: it is not."""


class Pull(Message, frozen=True):
    """A shard's weights, of at least a version."""

    shard: int
    need: int
    have: int = -1
    """The version that the asker has; where there is no newer one, the answer has no payload."""


class Pulled(Message, frozen=True):
    """Weights."""

    version: int
    is_new: bool = True


class Remember(Message, frozen=True):
    """What the checkpoint that the run goes on from has of the residual of a worker, by its place among the workers."""

    shard: int
    index: int


class Remembered(Message, frozen=True):
    """The residual of the shard's compressed pieces is the payload; without one there is nothing."""

    has_residual: bool


class Take(Message, frozen=True):
    """The next work unit, parked until there is one that may be begun."""

    held: tuple[int, ...]
    """Work units that the worker knows it has; one that the update log gave it and that is not here was lost on its way."""


class Taken(Message, frozen=True):
    """A work unit, or the end: nothing is left, or the run is to stop."""

    unit: WorkUnit | None
    ask_again: bool = False
    """Nothing may be begun yet."""
    must_commit: bool = False
    """There is nothing more before the worker commits what it holds."""
    reason: str = ""
    """What is waited for."""


class Commit(Message, frozen=True):
    """All shards have acknowledged their part of a push."""

    push: PushRecord


class Committed(Message, frozen=True):
    """It is in the log, or will be when its update closes; or it is not used, and why."""

    is_kept: bool
    reason: str
    closed: int
    """Updates in the log now."""


class Follow(Message, frozen=True):
    """Updates from a number on; parked until there is one."""

    since: int


class Followed(Message, frozen=True):
    """Updates of the log, in order."""

    updates: tuple[Update, ...]
    gone: dict[str, tuple[int, ...]] = {}
    """By departed worker: its pushes that are still to come in an update; its others may be thrown away."""
    is_final: bool = False
    """These were the last."""
    cuts: dict[int, str] = {}
    """By version, where checkpoints are to be written: the update log as it was then, as JSON."""
    began: int | None = None
    """The version that this history began with, where the log leader was there; who began elsewhere read another checkpoint."""
    last: str = ""
    """With ``is_final``: the update log as it is in the end. Not among the cuts: one server hears of the last update and of the
    end in one answer and another in two, and a checkpoint is written by all of them or by none."""


class ReplicatePush(Message, frozen=True):
    """A push on its way to the backup."""

    worker: str
    push: Push


class ReplicateCommand(Message, frozen=True):
    """An input of the update log on its way to the backup: numbered, because their order is what both must share."""

    place: int
    text: bytes
    """The input (``log/commands.py``)."""


class Fetch(Message, frozen=True):
    """Everything of a shard, for a new backup."""

    shard: int


class Fetched(Message, frozen=True):
    """The payload is the update log's state, then JSON that says how to read the rest, then every tensor of the shard's state."""

    update_log_bytes: int
    """0 but for shard 0."""
    text_bytes: int


class Join(Message, frozen=True):
    """A member introduces itself, at its start and to every new center."""

    name: str
    role: Role
    address: str
    model: dict[str, tuple[tuple[int, ...], str]]
    """Shape and type of every trained parameter: who differs from the servers is not let in."""
    view: View | None = None
    """The newest view that it has, for a center that was just elected."""
    started: float = 0.0
    """When it began, by its machine's clock: of two of one origin that have one name the later one is meant."""
    origin: str = ""
    """The process (``view.Member``)."""
    settings: dict[str, str] = {}
    """What its recipe says of everything that all must agree on, as text by key."""
    data: dict[str, str] = {}
    """The data as it has it, in numbers and hashes by name; what it cannot say of it is not among them."""
    run: str = ""
    """The run that it belongs to; empty where it has not been in one yet."""


class Joined(Message, frozen=True):
    """Welcome."""

    run: str = ""
    """The run that this is, to be told to every later center: another run's may answer at the same address."""


class Watch(Message, frozen=True):
    """A sign of life; answered when there is a newer view than the asker's, or after a moment."""

    epoch: int
    version: int = -1
    """How far a server is."""
    halt: str = ""
    """What the asker knows of a halt; it is told only what is new."""


class Watched(Message, frozen=True):
    """The newest view."""

    view: View | None
    halt: str = ""
    """Why the run is to stop; empty while it is not."""
    stopped: str = ""
    """Why somebody stopped the run before its end; it stays when the run has finished with that."""


class Leave(Message, frozen=True):
    """A member goes, in order."""

    reason: str


class Dead(Message, frozen=True):
    """Whoever started a process saw it die."""

    member: str
    reason: str


class Synced(Message, frozen=True):
    """A new backup has everything."""

    shard: int
    order: int
    """The epoch under which it was ordered."""


class Failed(Message, frozen=True):
    """The primary says that another replica of its shard does not take what it is sent."""

    shard: int
    server: str
    epoch: int
    """Of the view in which that was so."""
    reason: str


class Ballot(Message, frozen=True):
    """A server's vote in a save; answered with everyone's when all have come. The payload is what it tells the others."""

    voters: str
    """Tells this vote from one of other servers, or of another time, on the same step."""
    step: int
    phase: int
    rank: int
    world_size: int
    problem: str | None


class Ballots(Message, frozen=True):
    """What every server said, by rank, one after the other in the payload; or why the save failed."""

    lengths: tuple[int, ...]
    problem: str | None = None
    void: str | None = None
    """Why there is no result: those who were to vote are not the primaries any more."""


FINISHED = "finished"
"""The reason of the last halt: the last checkpoint is written, and nobody need wait for anything any more."""


class Halt(Message, frozen=True):
    """The run is to stop after what is under way."""

    reason: str


class Greet(Message, frozen=True):
    """A candidate that has just started asks another whether they are of one run."""

    name: str
    settings: dict[str, str]


class Greeted(Message, frozen=True):
    """They are, or what differs."""

    difference: str = ""


class Over(Message, frozen=True):
    """The center tells the other candidates that the run has ended and they may go."""

    halt: str
    """Why it was stopped; empty when it was finished."""


class Ask(Message, frozen=True):
    """Where the run is, for whoever draws it."""


class Told(Message, frozen=True):
    """Where the run is."""

    view: View | None
    versions: tuple[tuple[str, int], ...]


class Run(Message, frozen=True):
    """A program on one shard. Asked again it is answered again, and not run: it is known by its number."""

    shard: int
    number: int
    operations: tuple[Operation, ...] = ()
    is_first: bool = False
    """A new coordinator's first: whatever the shard has run before, this comes next."""
    begins: tuple[int, int] | None = None
    """After it, gradients of this evaluation, in so many work units, are taken."""
    collects: bool = False
    """Before it, their sum becomes the gradient."""


class Ran(Message, frozen=True):
    """What a program measured."""

    measures: tuple[float, ...]


class Part(Message, frozen=True):
    """The payload is one shard of the gradient of one work unit of a batch."""

    shard: int
    evaluation: int
    unit: int
    loss: float = 0.0
    """Of the work unit. One that is not finite says that the line search went too far, and then its gradient may be anything."""
    is_finite: bool = True
    """Of the whole gradient: no shard takes its part of one that another refuses."""


class ReplicateProgram(Message, frozen=True):
    """What a primary did, on its way to the backup."""

    done: Run | Part


class Recall(Message, frozen=True):
    """What the coordinator before remembered."""


class Recalled(Message, frozen=True):
    """What it remembered."""

    memory: str
    """JSON (``lbfgs.Memory``); empty when there was none."""
    closed: int
    """Steps that are done."""
    steps: int
    """Of the run."""


class Advance(Message, frozen=True):
    """A step is done by programs on all shards."""

    number: int
    loss: float
    samples: int
    memory: str
    num_duplicates: int = 0
    """Work units of its batches that a second worker was given too."""


class Settle(Message, frozen=True):
    """Answered when a shard's primary has this version.

    It has then also copied what a checkpoint of the version before needs, which the iteration after this one would overwrite.
    """

    shard: int
    version: int


class Draw(Message, frozen=True):
    """A worker is free: the next work unit of a batch."""

    num_samples: int
    """Of the training split, as this worker has it."""
    done: tuple[int, int, float] | None = None
    """What it did last: evaluation, work unit and loss; every shard has the gradient."""


class Drawn(Message, frozen=True):
    """A work unit of a batch; or none for now, or none any more."""

    evaluation: int = -1
    unit: int = -1
    step: int = 0
    """Whose samples, in the order of the run."""
    start: int = 0
    stop: int = 0
    is_over: bool = False


OPERATIONS = Operations(
    {
        "push": Op(Push, Done, max_payload=MAX_PAYLOAD),
        "pull": Op(Pull, Pulled, max_payload=MAX_PAYLOAD, fenced=False),
        "remember": Op(Remember, Remembered, max_payload=MAX_PAYLOAD),
        "take": Op(Take, Taken, max_payload=0),
        "commit": Op(Commit, Committed, max_payload=0),
        "follow": Op(Follow, Followed, max_payload=0, fenced=False),
        "replicate_push": Op(ReplicatePush, Done, max_payload=MAX_PAYLOAD),
        "replicate_command": Op(ReplicateCommand, Done, max_payload=0),
        "fetch": Op(Fetch, Fetched, max_payload=MAX_PAYLOAD, fenced=False),
        "join": Op(Join, Joined, max_payload=0, fenced=False),
        "watch": Op(Watch, Watched, max_payload=0, fenced=False),
        "leave": Op(Leave, Done, max_payload=0, fenced=False),
        "dead": Op(Dead, Done, max_payload=0, fenced=False),
        "synced": Op(Synced, Done, max_payload=0, fenced=False),
        "failed": Op(Failed, Done, max_payload=0, fenced=False),
        "ballot": Op(Ballot, Ballots, max_payload=MAX_TEXTS, fenced=False),
        "halt": Op(Halt, Done, max_payload=0, fenced=False),
        "greet": Op(Greet, Greeted, max_payload=0, fenced=False),
        "over": Op(Over, Done, max_payload=0, fenced=False),
        "ask": Op(Ask, Told, max_payload=0, fenced=False),
        "run": Op(Run, Ran, max_payload=0),
        "part": Op(Part, Done, max_payload=MAX_PAYLOAD),
        "replicate_program": Op(ReplicateProgram, Done, max_payload=MAX_PAYLOAD),
        "recall": Op(Recall, Recalled, max_payload=0),
        "advance": Op(Advance, Done, max_payload=0),
        "settle": Op(Settle, Done, max_payload=0),
        "draw": Op(Draw, Drawn, max_payload=0, fenced=False),
    }
)
