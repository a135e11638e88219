"""The secret that clients of a server have to give where others than this machine's users can ask."""

import ipaddress
import stat
from pathlib import Path

from shoal.core.errors import RequestError

_LEAST_TOKEN = 16


def read_token(host: str, token_file: Path | None) -> str | None:
    """The token that clients have to give; None on loopback without one.

    Raises:
        RequestError: the server would be open to others without a token, or the file is no secret.
    """
    if token_file is None:
        if not is_loopback(host):
            raise RequestError(
                f"--host {host} lets other machines ask, and none has shown a key; give --token-file FILE with a secret "
                f"of at least {_LEAST_TOKEN} characters, or leave --host out"
            )
        return None
    try:
        mode, token = token_file.stat().st_mode, token_file.read_text(errors="replace").strip()
    except OSError as error:
        raise RequestError(f"--token-file {token_file} cannot be read: {error.strerror}") from error
    if stat.S_IMODE(mode) & 0o077:
        raise RequestError(f"--token-file {token_file} can be read by others; chmod 600 it")
    if len(token) < _LEAST_TOKEN or not token.isascii() or not token.isprintable():
        raise RequestError(
            f"--token-file {token_file} has a token of {len(token)} characters; give {_LEAST_TOKEN} or more, printable"
        )
    return token


def is_loopback(host: str) -> bool:
    """True for an address at which only this machine listens."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
