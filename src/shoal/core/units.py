"""Numbers as people read them: bytes, durations and counts, printed and parsed in one place."""

import re

from shoal.core.errors import RequestError

_DURATION_SECONDS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}


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
