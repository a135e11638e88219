"""Numbers as people read them: bytes, durations and counts, printed and parsed in one place."""

import math
import re
from fractions import Fraction

from shoal.core.errors import RequestError

_DURATION_SECONDS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_BYTES = {"": 1, "b": 1} | {
    prefix + ending: step**power
    for power, prefix in enumerate("kmgt", start=1)
    for ending, step in (("ib", 1024), ("b", 1000))
}


def format_bytes(num_bytes: float) -> str:
    """``1536`` -> ``1.5 KiB``."""
    value = float(num_bytes)
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if abs(value) < 1024 or unit == "TiB":
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    raise AssertionError("the loop returns at its last unit")


def format_duration(seconds: float) -> str:
    """``75`` -> ``1:15``; ``3675`` -> ``1:01:15``; under ten seconds with one decimal."""
    if seconds < 10:
        return f"{seconds:.1f}s"
    whole = round(seconds)
    hours, rest = divmod(whole, 3600)
    minutes, secs = divmod(rest, 60)
    return f"{hours}:{minutes:02d}:{secs:02d}" if hours else f"{minutes}:{secs:02d}"


def format_count(count: float) -> str:
    """``12345`` -> ``12.3k``; ``4200000`` -> ``4.20M``."""
    for limit, suffix in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(count) >= limit:
            return f"{count / limit:.3g}{suffix}"
    return f"{count:.0f}"


def parse_duration(text: str) -> float:
    """Seconds from ``90``, ``90s``, ``10m``, ``1h30m`` or ``2d``.

    Raises:
        RequestError: the text is not a duration.
    """
    stripped = text.strip().lower()
    if re.fullmatch(r"\d+(\.\d+)?", stripped):
        return float(stripped)
    parts = re.findall(r"(\d+(?:\.\d+)?)([smhd])", stripped)
    if not parts or "".join(number + unit for number, unit in parts) != stripped:
        raise RequestError(
            f"{text!r} is not a duration; write seconds, or numbers with s, m, h or d, such as 90s or 1h30m"
        )
    return sum(float(number) * _DURATION_SECONDS[unit] for number, unit in parts)


def parse_bytes(text: str) -> int:
    """Whole bytes from ``4096``, ``512 MiB``, ``1.5GiB`` or ``2 GB``; ``GiB`` is 1024 ** 3 and ``GB`` 1000 ** 3.

    Raises:
        RequestError: the text is not a number of bytes.
    """
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([a-z]*)", text.strip().lower(), re.ASCII)
    if found is None or found[2] not in _BYTES:
        raise RequestError(
            f"{text!r} is not a number of bytes; write a number with KiB, MiB, GiB or TiB, such as 2 GiB"
        )
    # As a fraction: floats do not hold every number of bytes.
    return int(Fraction(found[1]) * _BYTES[found[2]])


def parse_rate(text: str) -> int:
    """Whole bytes per second from ``10 GiB/s`` or ``125 MB/s``.

    Raises:
        RequestError: the text is not bytes per second.
    """
    amount, slash, unit = text.strip().rpartition("/")
    try:
        if (slash, unit.strip().lower()) != ("/", "s"):
            raise RequestError("no /s at its end")
        return parse_bytes(amount)
    except RequestError:
        raise RequestError(f"{text!r} is not bytes per second; write such as 10 GiB/s") from None


def divisors(number: int) -> list[int]:
    """The whole numbers that divide ``number``, smallest first."""
    low = [candidate for candidate in range(1, math.isqrt(number) + 1) if number % candidate == 0]
    return sorted({*low, *(number // candidate for candidate in low)})
