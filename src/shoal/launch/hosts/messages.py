"""What the coordinator of a run and the agents of its hosts say to each other, over the remote shell that the first opened.

An agent says ``Hello`` by itself; everything that it is to know comes to it on its standard input, so that no key, path or recipe
is ever on a command line or in an environment that others can read. Each ``Ping`` is answered, which is the heartbeat of both
sides.
"""

import msgspec

from shoal.comm.store.messages import Answer, Ask
from shoal.launch.blame import GenerationEnd, RankEnd

PROTOCOL = 3
"""Raised with every change of a message."""
MAGIC = f"shoal-agent-{PROTOCOL}-c0ffee\n".encode()
"""What an agent writes first: a login script may have printed before it."""


class _Message(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag=True):
    """A message; its type goes with it."""


class Interface(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A network interface with an IPv4 address."""

    name: str
    address: str


class Hello(_Message, frozen=True):
    """An agent is there."""

    hostname: str
    python: str
    shoal: str
    torch: str
    code: str
    """A digest of the package's source files."""
    cores: int
    interfaces: tuple[Interface, ...] = ()
    shell_address: str = ""
    """Its own address on which the remote shell came in, where that says so."""


class Enter(_Message, frozen=True):
    """The coordinator has a run directory, and asks what it looks like from there."""

    run_dir: str
    token_file: str
    lease_seconds: float
    texts: dict[str, str] = {}
    """Files of the run directory by name, for a host that does not share it and makes one of its own."""
    mode: int = 0o700
    """Rights of a run directory that is made."""


class Entered(_Message, frozen=True):
    """What an agent found."""

    token: str = ""
    """What the file says; empty where there is none, and the host has a run directory of its own."""
    problem: str = ""
    """Why it has none that can be used."""


class Start(_Message, frozen=True):
    """Start the ranks of this host: ``launch/ranks.py``'s request."""

    generation: int
    argv: tuple[str, ...]
    module: str
    arguments: tuple[str, ...]
    shared: tuple[str, ...]
    num_ranks: int
    ranks: tuple[int, ...]
    run_dir: str
    run_id: str
    config: str
    """``ProcessConfig`` as JSON."""
    last_step: int
    threads: int
    env: dict[str, str]
    members: tuple[str, ...] = ()
    """In a run that goes on when ranks die: what the process in each of these slots is called, empty where there is none yet."""


class Publish(_Message, frozen=True):
    """Show the ranks of this host a view (``launch/group/control.py``)."""

    generation: int
    epoch: int
    text: str


class StartMember(_Message, frozen=True):
    """Start a process in the slot of one that ended."""

    generation: int
    slot: int
    member: str


class EndMember(_Message, frozen=True):
    """End a process that is no member any more, if it runs."""

    generation: int
    slot: int
    member: str
    reason: str


class Over(_Message, frozen=True):
    """The run has done all there was to do: nobody is started any more."""

    generation: int


class Order(_Message, frozen=True):
    """A signal or an order for the ranks of a generation (``launch/supervisor.py``)."""

    generation: int
    number: int


class Ping(_Message, frozen=True):
    """The coordinator lives."""

    sent: float
    heard: float = -1.0
    """The ``clock`` of the newest pong that came: from then on the host's lease counts. Below 0 when none came yet."""


class Pong(_Message, frozen=True):
    """The agent lives."""

    sent: float
    """That of the ping."""
    now: float
    """The agent's wall clock."""
    clock: float = -1.0
    """The agent's clock that never jumps."""


class Reading(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """What a rank last wrote on the status board of its host."""

    rank: int
    pid: int
    age: float
    """Seconds since its last heartbeat; below 0 when there was none."""
    step: int
    phase: str
    phase_count: int
    metrics: str
    """As JSON."""
    final_status: str
    stop_signal: int


class Status(_Message, frozen=True):
    """Where ranks are."""

    generation: int
    readings: tuple[Reading, ...]


class Output(_Message, frozen=True):
    """Lines that ranks or their supervisor have printed."""

    text: str
    is_stdout: bool = False


class Ended(_Message, frozen=True):
    """A rank has ended, and this is sent at once."""

    generation: int
    end: RankEnd


class Said(_Message, frozen=True):
    """What a member of an elastic run has said on the control board of its host."""

    generation: int
    member: str
    is_ready: bool
    failed: int
    """The newest epoch under which it saw a collective fail."""
    suspect: int = -1
    """The slot that it could not reach then; below 0 where it cannot tell."""


class Paced(_Message, frozen=True):
    """What kept the members of this host busy so far: steps, seconds of computing, seconds of waiting for data."""

    generation: int
    paces: dict[str, tuple[int, float, float]]


class Lost(_Message, frozen=True):
    """A member has ended before the run was done, and the others may go on."""

    generation: int
    member: str
    cause: str


class GenerationEnded(_Message, frozen=True):
    """No rank of this host is left."""

    generation: int
    end: GenerationEnd


class Failed(_Message, frozen=True):
    """The agent could not do what it was asked."""

    text: str
    is_request: bool = False


class Listen(_Message, frozen=True):
    """Let other hosts try the way to this one, for so long."""

    address: str
    token: str
    seconds: float


class Listening(_Message, frozen=True):
    """Where others may try."""

    port: int = 0
    problem: str = ""


class Probe(_Message, frozen=True):
    """Try the way to a host that listens."""

    address: str
    port: int
    token: str
    seconds: float


class Probed(_Message, frozen=True):
    """What the way to it is like."""

    round_trip: float = 0.0
    bytes_per_second: float = 0.0
    problem: str = ""


class Bye(_Message, frozen=True):
    """There is nothing more to do."""


ToGroup = Publish | StartMember | EndMember | Over
"""What is for the ranks of an elastic run."""
ToAgent = Enter | Start | Order | Ping | Answer | Listen | Probe | Bye | Publish | StartMember | EndMember | Over
ToCoordinator = (
    Hello
    | Entered
    | Pong
    | Status
    | Output
    | Ended
    | Said
    | Paced
    | Lost
    | GenerationEnded
    | Failed
    | Ask
    | Listening
    | Probed
)
