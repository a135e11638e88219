"""Where the processes of a run on several machines meet: a list of candidates for the center that all of them have, and keys.

    tcp://10.0.0.1:7000#KEY,tcp://10.0.0.2:7000#KEY,tcp://10.0.0.3:7000#KEY

``#KEY`` is the public key of who listens there; it can be left out where all processes have the same key file. tcp needs keys on
loopback too, because every user of the machine can connect there; without keys there is ipc. No torch here.
"""

from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

from shoal.comm.wire.addresses import Address, parse_address
from shoal.comm.wire.keys import Keys, load_keys
from shoal.core.errors import RequestError
from shoal.elastic.election.etcd import EtcdAccess, check_access

_LEAST_VOTERS = 3
_ANYWHERE = ("0.0.0.0", "*")


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """How one process of a run on several machines meets the others."""

    centers: tuple[str, ...]
    """The addresses of the candidates; the same list, in the same order, for every process."""
    listen: str = ""
    """Where this process listens; a worker does not."""
    keys: Keys | None = None
    etcd: str = ""
    """Where the candidates hold their election: ``https://HOST:2379/KEY``; empty: among themselves."""
    etcd_access: EtcdAccess = field(default_factory=EtcdAccess)
    search_seconds: float = 120.0
    """Seconds that a process looks for its first center."""

    @property
    def index(self) -> int:
        """This candidate's place in the list."""
        return find_candidate(self.centers, self.listen)

    @property
    def names(self) -> tuple[str, ...]:
        """Of the candidates."""
        return tuple(f"center-{index}" for index in range(len(self.centers)))


def read_cluster(
    *,
    centers: str,
    listen: str = "",
    keys: Path | None = None,
    allow: Path | None = None,
    etcd: str = "",
    etcd_access: EtcdAccess | None = None,
    search_seconds: float = 120.0,
) -> Cluster:
    """What the command line says of a cluster, checked.

    Args:
        centers: addresses with commas between them.
        listen: where this process listens; empty for a worker.
        keys: the key file of this process.
        allow: a file or folder of public keys of those whom this process lets in; its own key alone when left out.
        etcd: see ``Cluster``; of a candidate.
        etcd_access: what etcd wants to see.
        search_seconds: see ``Cluster``.

    Raises:
        RequestError: no candidates, an address that is none, tcp without keys, a key that others can read.
    """
    if keys is None and allow is not None:
        raise RequestError(f"--allow {allow} needs a key of this process too; add --keys FILE (`shoal keys new FILE`)")
    own = load_keys(keys, allowed=allow) if keys is not None else None
    addresses = tuple(part.strip() for part in centers.split(",") if part.strip())
    for address in addresses:
        _check_reachable(address, own, option="--centers")
    _check_count(addresses)
    if listen:
        _check_listening(listen, own)
    return Cluster(
        centers=addresses,
        listen=listen,
        keys=own,
        etcd=etcd,
        etcd_access=etcd_access or EtcdAccess(),
        search_seconds=search_seconds,
    )


def check_candidate(cluster: Cluster) -> None:
    """Check that a candidate is one of those that the others are told of, and that they can hold an election.

    Raises:
        RequestError: it is not, or they are told of another key; or two of them have no etcd to decide between them.
    """
    if len(cluster.centers) == _LEAST_VOTERS - 1 and not cluster.etcd:
        raise RequestError(
            f"--centers has 2 candidates, and neither could tell a dead other from a cut line: a majority needs {_LEAST_VOTERS}; "
            "add one, elect by --etcd, or name one alone, which nobody replaces when it dies"
        )
    if cluster.etcd:
        check_access(cluster.etcd, cluster.etcd_access)
    if cluster.etcd and not urlsplit(cluster.etcd).path.strip("/"):
        raise RequestError(
            f"--etcd {cluster.etcd} names no key; write https://HOST:2379/KEY, with another KEY for each run"
        )
    listed = cluster.centers[cluster.index]
    key = parse_address(listed, has_keys=True).key
    own = cluster.keys.public_hex if cluster.keys is not None else None
    if key is not None and key != own:
        raise RequestError(
            f"--centers has the key {key[:16]}... behind {cluster.listen}, and the key of this process is "
            f"{own[:16] + '...' if own else 'none'}; the others would not get through to it"
        )


def find_candidate(centers: tuple[str, ...], listen: str) -> int:
    """The place of an address in the list of candidates.

    Raises:
        RequestError: it is not there.
    """
    endpoints = [_endpoint(address) for address in centers]
    if _endpoint(listen) not in endpoints:
        raise RequestError(
            f"--centers does not contain --listen {listen.partition('#')[0]}: it has {', '.join(endpoints)}; the list is the "
            "same for every process, and a candidate is in it"
        )
    return endpoints.index(_endpoint(listen))


def _check_count(addresses: tuple[str, ...]) -> None:
    if not addresses:
        raise RequestError("--centers is empty; write the address of one candidate, or of three or more")
    endpoints = [_endpoint(address) for address in addresses]
    if len(set(endpoints)) != len(endpoints):
        raise RequestError(f"--centers names an address twice: {', '.join(endpoints)}")


def _check_reachable(address: str, keys: Keys | None, *, option: str) -> Address:
    try:
        parsed = parse_address(address, has_keys=keys is not None)
    except RequestError as error:
        raise RequestError(f"{option}: {error}") from error
    if parsed.kind == "inproc":
        raise RequestError(f"{option}: {address} is inside one process; use tcp or ipc")
    host = parsed.endpoint.removeprefix("tcp://").rpartition(":")[0]
    if parsed.kind == "tcp" and host in _ANYWHERE:
        raise RequestError(f"{option}: {address} is no address that others can reach; name this machine's own")
    if parsed.key is not None and keys is None:
        raise RequestError(
            f"{option}: {address.partition('#')[0]} has a key, and this process has none; add --keys FILE (`shoal keys new FILE`)"
        )
    if parsed.kind == "tcp" and keys is None:
        raise RequestError(
            f"{option}: {address} needs a key: every user of this machine can connect there, and could stop the run; add --keys "
            "FILE (`shoal keys new FILE`), or use ipc:///path/to.sock, which only this user can open"
        )
    if option == "--centers" and parsed.kind == "tcp" and parsed.endpoint.endswith(":0"):
        raise RequestError(f"{option}: {address} has no port; all processes must know it beforehand")
    return parsed


def _check_listening(listen: str, keys: Keys | None) -> None:
    parsed = _check_reachable(listen, keys, option="--listen")
    if parsed.key is not None:
        raise RequestError(
            f"--listen {listen} has a key; the key of this process is in --keys, so leave out what follows #"
        )


def _endpoint(address: str) -> str:
    return parse_address(address, has_keys=True).endpoint
