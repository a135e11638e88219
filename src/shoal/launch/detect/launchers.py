"""What each launcher tells the processes that it starts, as pure functions from an environment to a ``Place``.

    launcher    its sign                            where rank 0 is
    supervisor  SHOAL_STORE                         ranks meet in a file
    torchrun    RANK and WORLD_SIZE                 MASTER_ADDR, MASTER_PORT
    tf_config   TF_CONFIG                           cluster.ps[0], else chief[0], else worker[0]
    openmpi     OMPI_COMM_WORLD_RANK                nobody says: MASTER_ADDR, or one host
    mpich       PMI_RANK and PMI_SIZE               the same
    slurm       SLURM_STEP_ID and SLURM_PROCID      first host of SLURM_STEP_NODELIST
    indexed     JOB_COMPLETION_INDEX or             MASTER_ADDR, beside WORLD_SIZE in the job's file
                WORKER_INDEX
    kubeflow    PET_NNODES                          PET_MASTER_ADDR, PET_MASTER_PORT

A batch script of SLURM has ``SLURM_PROCID=0`` too and is no rank; only a step has ``SLURM_STEP_ID``. A step of one task is a
shell or a job of one host, where ranks may be started: it counts as nobody's rank. Launchers that are known by
their sign and start one process per host, where ranks are still to be started, are refused by name: a process that took itself
for the only one would train the whole run on every host.
"""

import json
import zlib
from collections.abc import Callable, Mapping
from typing import Any

from shoal.core.errors import RequestError
from shoal.core.place import Place
from shoal.launch.detect.hostlist import expand_counts, expand_hosts

Environment = Mapping[str, str]

LOOPBACK_ADDRESS = "127.0.0.1"
"""Where rank 0 is when nobody says it and all ranks are on one host."""
_FIRST_PORT, _NUM_PORTS = 20000, 10000
"""Ports for ranks whose launcher names none: below those that Linux gives to outgoing connections."""


def read_torchrun(environment: Environment) -> Place | None:
    """torchrun, and everything that keeps its contract."""
    if "RANK" not in environment:
        return None
    try:
        rank, size = int(environment["RANK"]), int(environment["WORLD_SIZE"])
    except (KeyError, ValueError) as error:
        raise RequestError(
            f"the launcher set RANK={environment['RANK']} but not a whole WORLD_SIZE beside it: {error}; set both, or "
            "unset RANK to run alone"
        ) from error
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    return _checked(
        Place(
            rank=rank,
            world_size=size,
            local_rank=_number(environment, "LOCAL_RANK", rank),
            local_size=_number(environment, "LOCAL_WORLD_SIZE", None),
            generation=_number(environment, "TORCHELASTIC_RESTART_COUNT", 0),
            is_launched=True,
            store=environment.get("SHOAL_STORE", ""),
            launcher="supervisor" if "SHOAL_STORE" in environment else "torchrun",
            address=environment.get("MASTER_ADDR", ""),
            port=_number(environment, "MASTER_PORT", 0),
            evidence=_evidence(environment, *names),
        ),
        "RANK",
        "WORLD_SIZE",
    )


def read_tf_config(environment: Environment) -> Place | None:
    """``TF_CONFIG``: the chief is rank 0 and workers follow; without a chief worker 0 is the first.

    Where the cluster has parameter servers, those are the first ranks, and a chief is the first worker.
    """
    if "TF_CONFIG" not in environment:
        return None
    try:
        config = json.loads(environment["TF_CONFIG"])
        cluster: dict[str, list[str]] = config["cluster"]
        kind, index = str(config["task"]["type"]), int(config["task"]["index"])
        order = ("ps", "chief", "master", "worker")
        where = [str(one) for name in order for one in cluster.get(name, [])]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise RequestError(
            f"TF_CONFIG is not a cluster with a task: {error!r}; it should read "
            '{"cluster": {"worker": ["a:2222", "b:2222"]}, "task": {"type": "worker", "index": 0}}'
        ) from error
    if kind == "evaluator":
        raise RequestError(
            f"TF_CONFIG makes this process {kind} {index}, which is no rank; evaluate a run with `shoal eval`"
        )
    members = cluster.get(kind, [])
    if kind not in order or not 0 <= index < len(members):
        raise RequestError(f"TF_CONFIG makes this process {kind} {index} of a cluster with {len(members)} of that kind")
    address, _, port = where[0].rpartition(":")
    if not address or not port.isdigit():
        raise RequestError(f"TF_CONFIG: the first rank is at {where[0]!r}, which is not host:port")
    hosts = [one.rpartition(":")[0] for one in where]
    rank = index + sum(len(cluster.get(name, [])) for name in order[: order.index(kind)])
    return Place(
        rank=rank,
        world_size=len(where),
        local_rank=hosts[:rank].count(hosts[rank]),
        local_size=hosts.count(hosts[rank]),
        is_launched=True,
        launcher="tf_config",
        hosts=tuple(dict.fromkeys(hosts)),
        address=address,
        port=int(port),
        num_servers=len(cluster.get("ps", [])),
        evidence=_evidence(environment, "TF_CONFIG"),
    )


def read_openmpi(environment: Environment) -> Place | None:
    """Open MPI's ``mpirun``."""
    return _read_mpi(
        environment,
        "openmpi",
        rank="OMPI_COMM_WORLD_RANK",
        size="OMPI_COMM_WORLD_SIZE",
        local=("OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"),
        job=("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid"),
        fix="mpirun -x MASTER_ADDR=HOST -x MASTER_PORT=29500 ...",
    )


def read_mpich(environment: Environment) -> Place | None:
    """MPICH's hydra, Intel MPI and others that speak PMI."""
    is_sruns = "SLURM_STEP_ID" in environment and "MPI_LOCALRANKID" not in environment
    if "PMI_SIZE" not in environment or is_sruns:
        return None  # srun speaks PMI to its own tasks, and says more of them in its own variables.
    return _read_mpi(
        environment,
        "mpich",
        rank="PMI_RANK",
        size="PMI_SIZE",
        local=("MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
        job=("PMI_JOBID", "HYDRA_JOBID"),
        fix="mpirun -genv MASTER_ADDR HOST -genv MASTER_PORT 29500 ...",
    )


def read_slurm(environment: Environment) -> Place | None:
    """A step of SLURM, started by ``srun``."""
    if "SLURM_STEP_ID" not in environment:
        return None
    if "SLURM_PROCID" not in environment:
        raise RequestError("SLURM set SLURM_STEP_ID but no SLURM_PROCID: this process is in a step and no task of it")
    rank = _number(environment, "SLURM_PROCID", 0)
    size = _number(environment, "SLURM_STEP_NUM_TASKS", _number(environment, "SLURM_NTASKS", 1))
    if size == 1:
        return None
    hosts = expand_hosts(environment.get("SLURM_STEP_NODELIST", environment.get("SLURM_JOB_NODELIST", "localhost")))
    node, local_size = _number(environment, "SLURM_NODEID", 0), None
    if "SLURM_STEP_TASKS_PER_NODE" in environment:
        counts = expand_counts(environment["SLURM_STEP_TASKS_PER_NODE"])
        if len(counts) != len(hosts) or sum(counts) != size or not 0 <= node < len(counts):
            raise RequestError(
                f"SLURM's step has {size} tasks on {len(hosts)} hosts, and SLURM_STEP_TASKS_PER_NODE="
                f"{environment['SLURM_STEP_TASKS_PER_NODE']} says {sum(counts)} on {len(counts)}"
            )
        local_size = counts[node]
    job = f"{environment.get('SLURM_JOB_ID', '')}.{environment['SLURM_STEP_ID']}"
    is_one_host = len(hosts) == 1
    names = (
        "SLURM_STEP_ID",
        "SLURM_PROCID",
        "SLURM_STEP_NUM_TASKS",
        "SLURM_LOCALID",
        "SLURM_STEP_NODELIST",
        "MASTER_ADDR",
    )
    return _checked(
        Place(
            rank=rank,
            world_size=size,
            local_rank=_number(environment, "SLURM_LOCALID", rank),
            local_size=local_size,
            generation=_number(environment, "SLURM_RESTART_COUNT", 0),
            is_launched=True,
            launcher="slurm",
            hosts=tuple(hosts),
            address=environment.get("MASTER_ADDR") or (LOOPBACK_ADDRESS if is_one_host else hosts[0]),
            port=_number(environment, "MASTER_PORT", 0) or _port_of(job),
            evidence=_evidence(environment, *names),
        ),
        "SLURM_PROCID",
        "SLURM_STEP_NUM_TASKS",
    )


def read_indexed(environment: Environment) -> Place | None:
    """A pod of an indexed job of Kubernetes, or a worker with an index, whose job says the size and where index 0 is.

    With ``LOCAL_WORLD_SIZE`` the index is that of a node with so many ranks, each of which has its ``LOCAL_RANK``.
    """
    sign = next((one for one in ("JOB_COMPLETION_INDEX", "WORKER_INDEX") if one in environment), None)
    if sign is None or "WORLD_SIZE" not in environment or "MASTER_ADDR" not in environment:
        return None
    index, per_node = _number(environment, sign, 0), _number(environment, "LOCAL_WORLD_SIZE", 1)
    if per_node > 1 and "LOCAL_RANK" not in environment:
        raise RequestError(
            f"{sign}={index} makes this process a node with {per_node} ranks (LOCAL_WORLD_SIZE), which are not started yet; "
            f"start them with `shoal train ... --per-node {per_node}`"
        )
    local_rank = _number(environment, "LOCAL_RANK", 0)
    names = (sign, "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    return _checked(
        Place(
            rank=index * per_node + local_rank,
            world_size=_number(environment, "WORLD_SIZE", 0),
            local_rank=local_rank,
            local_size=per_node,
            is_launched=True,
            launcher="indexed",
            address=environment["MASTER_ADDR"],
            port=_number(environment, "MASTER_PORT", 0) or _FIRST_PORT,
            evidence=_evidence(environment, *names),
        ),
        sign,
        "WORLD_SIZE",
    )


def read_kubeflow(environment: Environment) -> Place | None:
    """A node of a training job of Kubeflow (v2), which is told what torchrun reads from ``PET_*``.

    The number that it has is the node's, each of whose ranks has its ``LOCAL_RANK``; ``shoal train --per-node M`` starts them.
    """
    if "PET_NNODES" not in environment:
        return None
    nodes, per_node = environment["PET_NNODES"], environment.get("PET_NPROC_PER_NODE", "1")
    if ":" in nodes and nodes.partition(":")[0] != nodes.partition(":")[2]:
        raise RequestError(
            f"PET_NNODES={nodes}: the number of nodes has to be fixed; write numNodes alone, without an elastic policy"
        )
    if not per_node.isdigit():
        raise RequestError(
            f"PET_NPROC_PER_NODE={per_node}: write the number of processes of a node into the job's file; {per_node!r} would be "
            "another one on each kind of node"
        )
    # What ``--per-node`` has started knows better.
    local_size = _number(environment, "LOCAL_WORLD_SIZE", int(per_node))
    if local_size > 1 and "LOCAL_RANK" not in environment:
        raise RequestError(
            f"PET_NODE_RANK={environment.get('PET_NODE_RANK', '')} makes this process a node with {local_size} ranks "
            f"(PET_NPROC_PER_NODE), which are not started yet; start them with `shoal train ... --per-node {local_size}`"
        )
    if "PET_NODE_RANK" not in environment or "PET_MASTER_ADDR" not in environment:
        raise RequestError(
            f"PET_NNODES={nodes} without PET_NODE_RANK and PET_MASTER_ADDR: this is no node of Kubeflow's trainer; unset "
            "PET_NNODES to train alone"
        )
    names = ("PET_NNODES", "PET_NPROC_PER_NODE", "PET_NODE_RANK", "LOCAL_RANK", "PET_MASTER_ADDR", "PET_MASTER_PORT")
    node, local_rank = _number(environment, "PET_NODE_RANK", 0), _number(environment, "LOCAL_RANK", 0)
    return _checked(
        Place(
            rank=node * local_size + local_rank,
            world_size=_number({"PET_NNODES": nodes.partition(":")[0]}, "PET_NNODES", 0) * local_size,
            local_rank=local_rank,
            local_size=local_size,
            is_launched=True,
            launcher="kubeflow",
            address=environment["PET_MASTER_ADDR"],
            port=_number(environment, "PET_MASTER_PORT", 0) or _FIRST_PORT,
            evidence=_evidence(environment, *names),
        ),
        "PET_NODE_RANK",
        "PET_NNODES",
    )


READERS: Mapping[str, Callable[[Environment], Place | None]] = {
    "torchrun": read_torchrun,
    "tf_config": read_tf_config,
    "openmpi": read_openmpi,
    "mpich": read_mpich,
    "slurm": read_slurm,
    "kubeflow": read_kubeflow,
    "indexed": read_indexed,
}
"""By the name of the launcher, the most trusted first."""


def refuse_others(environment: Environment) -> None:
    """Refuse launchers that are there and whose processes are no ranks yet.

    Raises:
        RequestError: names the launcher, its variables and what to start instead.
    """
    for sign, (name, fix) in _NOT_RANKS.items():
        is_sruns = sign.startswith("PMI") and "SLURM_STEP_ID" in environment
        if sign in environment and not is_sruns:
            raise RequestError(
                f"{name} started this process ({sign}={environment[sign]}) and did not say which rank it is; {fix}, or "
                f"unset {sign} to train alone"
            )
    tasks = _number(environment, "SLURM_NTASKS", 1)
    if "SLURM_JOB_ID" in environment and "SLURM_PROCID" in environment and tasks > 1:
        raise RequestError(
            f"this is the script of SLURM job {environment['SLURM_JOB_ID']} and not one of its {tasks} tasks; write "
            "`srun shoal train ...` in it, or ask for one task"
        )


_TORCHRUN = "start the ranks with torchrun --nnodes --nproc-per-node --rdzv-endpoint"
_NOT_RANKS = {
    "JSM_NAMESPACE_RANK": ("LSF's jsrun", "set RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT from its variables"),
    "PALS_RANKID": ("PALS", "set RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT from its variables"),
    "SKYPILOT_NODE_RANK": ("SkyPilot", _TORCHRUN),
    "JOB_COMPLETION_INDEX": (
        "an indexed job of Kubernetes",
        "write WORLD_SIZE, MASTER_ADDR and MASTER_PORT into its file",
    ),
    "WORKER_INDEX": ("a launcher", "set WORLD_SIZE, MASTER_ADDR and MASTER_PORT beside it"),
    "PMI_RANK": ("a launcher that speaks PMI", "it set no PMI_SIZE: set RANK and WORLD_SIZE"),
    "PMIX_RANK": ("a launcher that speaks PMIx", "set RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT beside it"),
}
"""By a variable that each of them sets: its name, and what to do."""


def _read_mpi(
    environment: Environment,
    launcher: str,
    *,
    rank: str,
    size: str,
    local: tuple[str, str],
    job: tuple[str, ...],
    fix: str,
) -> Place | None:
    """MPI tells everything but where rank 0 is: on one host that is here, elsewhere somebody has to say it."""
    if rank not in environment:
        return None
    number, total = _number(environment, rank, 0), _number(environment, size, 0)
    local_size = _number(environment, local[1], None)
    address = environment.get("MASTER_ADDR", "")
    if not address and local_size != total:
        raise RequestError(
            f"{launcher} runs {total} processes, {local_size} of them on this host, and does not say where rank 0 is: "
            f"{fix}, with the host of rank 0"
        )
    name = next((environment[one] for one in job if one in environment), "")
    return _checked(
        Place(
            rank=number,
            world_size=total,
            local_rank=_number(environment, local[0], number),
            local_size=local_size,
            is_launched=True,
            launcher=launcher,
            address=address or LOOPBACK_ADDRESS,
            port=_number(environment, "MASTER_PORT", 0) or _port_of(name),
            evidence=_evidence(environment, rank, size, *local, "MASTER_ADDR", "MASTER_PORT"),
        ),
        rank,
        size,
    )


def _checked(place: Place, rank: str, size: str) -> Place:
    if not 0 <= place.rank < place.world_size:
        raise RequestError(f"the launcher gave {rank}={place.rank} of {size}={place.world_size}")
    if place.local_size is not None and not 0 <= place.local_rank < place.local_size <= place.world_size:
        raise RequestError(
            f"the launcher gave local rank {place.local_rank} of {place.local_size} on this host, of "
            f"{place.world_size} in all"
        )
    return place


def _number(environment: Environment, name: str, other: Any) -> Any:
    """A variable as a whole number; ``other`` where it is not set."""
    if name not in environment:
        return other
    try:
        return int(environment[name])
    except ValueError as error:
        raise RequestError(f"the launcher set {name}={environment[name]!r}, which is no whole number") from error


def _evidence(environment: Environment, *names: str) -> tuple[str, ...]:
    return tuple(f"{name}={environment[name]}" for name in names if name in environment)


def _port_of(job: str) -> int:
    """A port that all processes of a job come to, and other jobs rarely."""
    return _FIRST_PORT + zlib.crc32(job.encode()) % _NUM_PORTS
