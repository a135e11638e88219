"""Ray: actors as ranks in a placement group, on the cluster of ``RAY_ADDRESS`` or on one made for the run.

An actor starts one rank, the same command as under every other launcher, and hands out what it prints. The rank is a process of
its own and not a thread of the actor: it has its own environment before torch is imported, it takes signals, and it dies with its
actor. How a rank ended is known by its actor; how an actor ended, by Ray, whose report becomes that of the rank.
"""

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shoal.core.clock import Deadline
from shoal.core.errors import EXIT_DONE, RequestError, RunError
from shoal.launch.blame import name_signal
from shoal.launch.clusters.attached import AttachedEnd
from shoal.launch.clusters.culprits import TaskEnd
from shoal.launch.clusters.job import Job
from shoal.launch.output import LineSplitter
from shoal.launch.process import Process, Streams, start_program, wait_readable
from shoal.launch.supervisor import KILL_SECONDS, SignalInbox

MISSING = "--on ray needs the package ray; run `pip install 'shoal[ray]'`"
ADDRESS = "RAY_ADDRESS"
"""The variable by which Ray's own programs find their cluster."""
_REPORT_SECONDS = 0.5
_LOOK_SECONDS = 0.25
_COLLECT_SECONDS = 10.0
"""How long other ranks may still say what they saw after one has failed."""
_READ_BYTES = 64 * 1024

Report = tuple[list[tuple[bool, str]], int | None]
"""Lines, each with whether it is of stderr, and the exit code of a rank that has ended."""


@dataclass(frozen=True, kw_only=True)
class RayRequest:
    """A run on Ray."""

    job: Job
    stop_grace: float
    start_seconds: float
    """How long the run waits for room in the cluster."""


def check_ray() -> None:
    """Refuse where Ray is not installed.

    Raises:
        RequestError: names the package.
    """
    try:
        import ray  # noqa: F401
    except ImportError as error:
        raise RequestError(MISSING) from error


def run_on_ray(request: RayRequest) -> AttachedEnd:
    """Run it to its end; nothing is left in the cluster, nor of a cluster that was made for it.

    Raises:
        RequestError: the cluster is too small.
        RunError: it cannot be reached, or had no room in time.
    """
    check_ray()
    with _connected(request.job), _reserved(request) as group, SignalInbox() as inbox:
        return _Ranks(request, group, inbox).run()


class RankActor:
    """One rank: started, read, asked to stop. All calls run in the actor's main thread, with which the rank dies."""

    def __init__(self) -> None:
        self._process: Process | None = None
        self._streams: dict[int, tuple[bool, LineSplitter]] = {}

    def where(self, address: str | None) -> tuple[str, str, int]:
        """The name of this actor's host, its address where none is given, and a port that is free there."""
        import ray

        address = address or str(ray.util.get_node_ip_address())
        with socket.create_server((address, 0)) as probe:
            return socket.gethostname(), address, int(probe.getsockname()[1])

    def start(self, arguments: Sequence[str], folder: str, variables: Mapping[str, str]) -> int:
        """Start ``shoal ARGUMENTS``; its process id."""
        # How many threads a rank has is the recipe's business; Ray counts one for each core that the actor asked for.
        kept = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
        environment = {**kept, **variables, "SHOAL_SUPERVISOR_PID": str(os.getpid()), "PYTHONUNBUFFERED": "1"}
        os.chdir(folder)
        readers, writers = zip(*(os.pipe() for _ in range(2)), strict=True)
        command = [sys.executable, "-m", "shoal.launch.child", "shoal", *arguments]
        try:
            streams = Streams(stdin=subprocess.DEVNULL, stdout=writers[0], stderr=writers[1])
            self._process = start_program(command, name="rank", environment=environment, streams=streams)
        finally:
            for writer in writers:
                os.close(writer)
        for number, reader in enumerate(readers):
            os.set_blocking(reader, False)
            self._streams[reader] = (number == 1, LineSplitter())
        return self._process.pid

    def report(self, seconds: float) -> Report:
        """What it has printed since, as soon as there is something, and how it ended, if it has."""
        assert self._process is not None
        wait_readable([*self._streams, self._process.descriptor], seconds)
        code = self._process.exit_code if self._process.reap() else None
        lines = [line for reader in list(self._streams) for line in self._take(reader)]
        return lines, code

    def _take(self, reader: int) -> Iterator[tuple[bool, str]]:
        is_error, splitter = self._streams[reader]
        while True:
            try:
                data = os.read(reader, _READ_BYTES)
            except BlockingIOError:
                return
            for line in splitter.feed(data) if data else splitter.finish():
                yield is_error, line.decode(errors="replace")
            if not data:
                os.close(reader)
                del self._streams[reader]
                return

    def stop(self, number: int) -> None:
        """Send the rank a signal."""
        if self._process is not None:
            self._process.send(number)


@contextlib.contextmanager
def _connected(job: Job) -> Iterator[None]:
    """Connect to the cluster, or make one on this machine whose files go with it."""
    import ray

    if os.environ.get(ADDRESS):
        try:
            ray.init(log_to_driver=False, configure_logging=False)
        except (ConnectionError, RuntimeError, ValueError) as error:
            raise RunError(f"cannot connect to Ray at {ADDRESS}={os.environ[ADDRESS]}: {error}") from error
        try:
            yield
        finally:
            ray.shutdown()
        return
    if job.nodes > 1:
        raise RequestError(
            f"--nodes {job.nodes}: a Ray of this machine alone has 1 node; set {ADDRESS} to a cluster's, such as "
            f"{ADDRESS}=10.0.0.1:6379, or leave out --nodes"
        )
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    # A short path: sockets lie below it, and their names are limited.
    folder = Path(tempfile.mkdtemp(prefix="shoal-ray-"))
    try:
        ray.init(
            address="local",
            num_cpus=job.num_processes,
            include_dashboard=False,
            log_to_driver=False,
            configure_logging=False,
            _node_ip_address="127.0.0.1",
            _temp_dir=str(folder),
        )
        yield
    finally:
        ray.shutdown()
        shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def _reserved(request: RayRequest) -> Iterator[Any]:
    """Room for the run: a bundle for each node, on nodes of their own."""
    import ray
    from ray.util.placement_group import placement_group, remove_placement_group

    job = request.job
    alive = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    gpus = job.per_node if sum(one.get("GPU", 0) >= job.per_node for one in alive) >= job.nodes else 0
    large = sum(one.get("CPU", 0) >= job.per_node for one in alive)
    if large < job.nodes:
        raise RequestError(
            f"the run needs {job.nodes} node(s) of {job.per_node} CPU(s), and Ray's cluster has {large} of {len(alive)} node(s) "
            "with so many; change --nodes and --per-node, or add nodes"
        )
    bundle = {"CPU": float(job.per_node), **({"GPU": float(gpus)} if gpus else {})}
    group = placement_group([bundle] * job.nodes, strategy="STRICT_SPREAD" if job.nodes > 1 else "PACK")
    try:
        if not group.wait(request.start_seconds):
            raise RunError(
                f"Ray had no room for {job.nodes} node(s) of {bundle} within {request.start_seconds:g} s "
                f"(elastic.start_deadline): free are {ray.available_resources()}"
            )
        yield group
    finally:
        remove_placement_group(group)


class _Ranks:
    """The ranks, each in an actor of its own."""

    def __init__(self, request: RayRequest, group: Any, inbox: SignalInbox) -> None:
        self._request = request
        self._group = group
        self._inbox = inbox
        self._actors: list[Any] = []
        self._hosts: list[str] = []
        self._ends: list[TaskEnd] = []
        self._codes: dict[int, int] = {}
        self._stop_signal: int | None = None
        self._was_forced = False
        self._deadline: Deadline | None = None

    def run(self) -> AttachedEnd:
        """Start them and stay until all have ended."""
        import ray

        try:
            self._start()
            waiting = {actor.report.remote(_REPORT_SECONDS): rank for rank, actor in enumerate(self._actors)}
            while waiting:
                ready, _ = ray.wait(list(waiting), num_returns=1, timeout=_LOOK_SECONDS)
                for reference in ready:
                    rank = waiting.pop(reference)
                    if self._take(rank, reference):
                        waiting[self._actors[rank].report.remote(_REPORT_SECONDS)] = rank
                self._take_signals()
                if self._deadline is not None and self._deadline.is_over:
                    self._kill()
        finally:
            self._kill()
        worst = next((code for code in self._codes.values() if code != EXIT_DONE), EXIT_DONE)
        return AttachedEnd(
            exit_code=1 if self._ends and worst == EXIT_DONE else worst,
            stop_signal=self._stop_signal,
            was_forced=self._was_forced,
            ends=tuple(self._ends),
        )

    def _start(self) -> None:
        import ray
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        job = self._request.job
        has_gpus = any("GPU" in bundle for bundle in self._group.bundle_specs)
        for rank in range(job.num_processes):
            actor = ray.remote(RankActor).options(
                num_cpus=1,
                num_gpus=1 if has_gpus else 0,
                max_restarts=0,
                # Ranks choose their device by their number on the node, so they have to see all of them.
                runtime_env={"env_vars": {"RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1"}} if has_gpus else None,
                scheduling_strategy=PlacementGroupSchedulingStrategy(
                    placement_group=self._group, placement_group_bundle_index=rank // job.per_node
                ),
            )
            self._actors.append(actor.remote())
        seconds = self._request.start_seconds
        # A Ray that was made for the run is on this machine, and nothing of it is for others.
        alone = None if os.environ.get(ADDRESS) else "127.0.0.1"
        found = self._get([actor.where.remote(alone) for actor in self._actors], seconds, "start the actors")
        self._hosts = [host for host, _, _ in found]
        _, address, port = found[0]
        common = {
            **job.environment,
            "WORLD_SIZE": str(job.num_processes),
            "LOCAL_WORLD_SIZE": str(job.per_node),
            "MASTER_ADDR": address,
            "MASTER_PORT": str(port),
        }
        starts = []
        for rank, actor in enumerate(self._actors):
            own = {"WORKER_INDEX": str(rank // job.per_node), "LOCAL_RANK": str(rank % job.per_node)}
            starts.append(actor.start.remote(list(job.arguments), str(job.folder), {**common, **own}))
        self._get(starts, seconds, "start the ranks")

    def _get(self, references: list[Any], seconds: float, what: str) -> list[Any]:
        import ray

        try:
            return list(ray.get(references, timeout=seconds))
        except ray.exceptions.GetTimeoutError as error:
            raise RunError(f"Ray did not {what} within {seconds:g} s (elastic.start_deadline)") from error
        except ray.exceptions.RayError as error:
            raise RunError(f"Ray could not {what}: {shorten(str(error))}") from error

    def _take(self, rank: int, reference: Any) -> bool:
        """Show what a rank printed and note how it ended; False when there is nothing more to hear of it."""
        import ray

        try:
            lines, code = ray.get(reference)
        except ray.exceptions.RayError as error:
            if self._deadline is None:
                said = f"Ray says: {shorten(str(error))}"
                self._ends.append(TaskEnd(rank=rank, host=self._hosts[rank], exit_code=None, cause=said))
            self._give(_COLLECT_SECONDS)
            return False
        for is_error, line in lines:
            # Who reads it may have gone, as after `| head`; the run goes on.
            with contextlib.suppress(OSError, ValueError):
                print(line, file=sys.stderr if is_error else sys.stdout, flush=True)
        if code is None:
            return True
        self._codes[rank] = code
        if code != EXIT_DONE:
            self._ends.append(TaskEnd(rank=rank, host=self._hosts[rank], exit_code=code))
            if not self._request.job.survives_deaths:
                self._give(_COLLECT_SECONDS)
        return False

    def _take_signals(self) -> None:
        for number in self._inbox.take():
            if self._stop_signal is None:
                self._stop_signal = number
                grace = self._request.stop_grace
                print(
                    f"{name_signal(number)}: ending the run with a checkpoint, for at most {grace:g} s; another Ctrl-C stops "
                    "at once",
                    file=sys.stderr,
                    flush=True,
                )
                self._give(grace)
                for actor in self._actors:
                    actor.stop.remote(int(signal.SIGTERM))
            elif number == signal.SIGINT:
                self._was_forced = True
                self._kill()

    def _give(self, seconds: float) -> None:
        if self._deadline is None:
            self._deadline = Deadline(seconds=seconds)

    def _kill(self) -> None:
        """End the actors, and with them their ranks."""
        import ray

        for actor in self._actors:
            ray.kill(actor)
        self._deadline = Deadline(seconds=KILL_SECONDS)


def shorten(text: str) -> str:
    """Ray's report of a death as one line: what happened, without its advice on Ray."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    kept = [line for line in lines if not line.startswith(("class_name:", "actor_id:", "pid:", "namespace:", "ip:"))]
    return " ".join(kept).partition(" Some common causes")[0][:600] or "no reason"
