"""That every host runs the same script: its file is read anew on each, and another one would train something else silently."""

import hashlib
import socket
from collections.abc import Mapping
from pathlib import Path

from shoal.core.errors import RequestError

DIGEST_VARIABLE = "SHOAL_SCRIPT_DIGEST"
"""What the script is where the command was started; set where ranks run on other hosts too."""


def digest_of(script: Path) -> str:
    """A digest of a script.

    Raises:
        RequestError: it cannot be read; names the host.
    """
    try:
        return hashlib.sha256(script.read_bytes()).hexdigest()[:16]
    except OSError as error:
        raise RequestError(
            f"the script {script} cannot be read on host {socket.gethostname()} ({error.strerror}); put it at the same path on "
            "every host"
        ) from error


def check_script(script: Path, environment: Mapping[str, str]) -> None:
    """Refuse a script that is not the one that the command was started with.

    Raises:
        RequestError: names this host and the file.
    """
    wanted = environment.get(DIGEST_VARIABLE)
    if wanted is None:
        return
    found = digest_of(script)
    if found != wanted:
        raise RequestError(
            f"the script {script} on host {socket.gethostname()} ({found}) is not the one that the command was started with "
            f"({wanted}); put the same file on every host"
        )
