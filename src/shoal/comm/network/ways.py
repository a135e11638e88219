"""Whether the hosts of a run reach each other, tried before gloo connects: gloo waits for minutes for a host behind a firewall
that drops what it does not expect, and then names no host.

The first rank of each host listens for a moment at a port that the system chooses, as gloo does, and tries those of the others.
What listens gives nobody a byte.
"""

import contextlib
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

from torch._C._distributed_c10d import Store  # torch types this name only there

from shoal.core.errors import RunError
from shoal.core.place import Place

_MOST = 32
"""Hosts that one tries, those that follow it: all pairs of a small run, and of a large one enough to find who is cut off."""
_SECONDS = 10.0
_ACCEPT_SECONDS = 0.1


def spans_hosts(place: Place) -> bool:
    """Whether ranks may be on several hosts."""
    return place.world_size > 1 and place.local_size != place.world_size


def check_ways(place: Place, store: Store, address: str, *, seconds: float = _SECONDS) -> None:
    """See that this host reaches the others. All ranks call it together; only the first of each host waits.

    Args:
        place: of this process.
        store: where ranks tell each other where they listen.
        address: of this host, on the interface by which ranks talk; empty where it is not known.
        seconds: how long a host may take to answer.

    Raises:
        RunError: names the hosts that do not answer.
    """
    with contextlib.ExitStack() as stack:
        told = ""
        if place.local_rank == 0 and address:
            port = stack.enter_context(_listening(address))
            told = f"{address} {port} {socket.gethostname()}"
        store.set(f"way/{place.rank}", told)
        if not told:
            return
        others = _others(place, store)
        with ThreadPoolExecutor(max(1, len(others))) as pool:
            problems = list(pool.map(lambda other: _try(other[0], other[1], seconds), others))
    found = [
        f"{name} ({there}): {problem}" for (there, _, name), problem in zip(others, problems, strict=True) if problem
    ]
    if found:
        raise RunError(
            f"host {socket.gethostname()} ({address}) does not reach {' and '.join(found)}; ranks connect to each other at ports "
            "that the system chooses: open those between the hosts, or have ranks use another network (--network, or "
            "GLOO_SOCKET_IFNAME under another launcher); `shoal doctor --hosts` tries every pair"
        )


def _others(place: Place, store: Store) -> list[tuple[str, int, str]]:
    """Where the first ranks of the hosts behind this one listen."""
    found: list[tuple[str, int, str]] = []
    for away in range(1, place.world_size):
        told = store.get(f"way/{(place.rank + away) % place.world_size}").decode()
        if told:
            address, port, name = told.split(" ", 2)
            found.append((address, int(port), name))
        if len(found) == _MOST:
            break
    return found


def _try(address: str, port: int, seconds: float) -> str:
    """What is wrong with the way to a host; empty for nothing."""
    try:
        socket.create_connection((address, port), timeout=seconds).close()
    except ConnectionError:
        # Somebody is there: it has tried all others, and listens no more.
        return ""
    except TimeoutError:
        return f"no answer within {seconds:g} s"
    except OSError as error:
        return error.strerror or str(error)
    return ""


@contextlib.contextmanager
def _listening(address: str) -> Iterator[int]:
    """Take connections at a port, and close each at once."""
    is_over = threading.Event()
    with socket.create_server((address, 0), backlog=128) as listener:
        listener.settimeout(_ACCEPT_SECONDS)

        def serve() -> None:
            while not is_over.is_set():
                with contextlib.suppress(OSError):
                    listener.accept()[0].close()

        thread = threading.Thread(target=serve, name="ways", daemon=True)
        thread.start()
        try:
            yield listener.getsockname()[1]
        finally:
            is_over.set()
            thread.join()
