"""Which versions are installed, and which of them are too old or known to be bad.

Versions come from package metadata: importing torch to ask for its version would take two seconds, and may be what does not work.
"""

import platform
import re
import sys
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, requires, version

from shoal.doctor.check import Check, judge

LOWEST_PYTHON = (3, 11)


@dataclass(frozen=True, kw_only=True)
class KnownBad:
    """Versions of a package that must not be used, and why."""

    package: str
    why: str
    below: str | None = None
    exactly: tuple[str, ...] = ()

    def matches(self, package: str, installed: str) -> bool:
        """True when this installed version is one of them."""
        if package != self.package:
            return False
        too_old = self.below is not None and release(installed) < release(self.below)
        return too_old or installed in self.exactly


KNOWN_BAD = (
    KnownBad(
        package="torch", below="2.6", why="CVE-2025-32434: torch.load(weights_only=True) runs code; take 2.13 or newer"
    ),
    KnownBad(
        package="torch", below="2.10", why="CVE-2026-24747: a crafted weights file corrupts memory; take 2.13 or newer"
    ),
    KnownBad(
        package="lightning",
        exactly=("2.6.2", "2.6.3"),
        why="GHSA-w37p-236h-pfx3: this release stole credentials on import; remove it and change your credentials",
    ),
)


def check_python() -> Check:
    """The interpreter."""
    found = platform.python_version()
    too_old = sys.version_info < LOWEST_PYTHON
    lowest = ".".join(str(part) for part in LOWEST_PYTHON)
    return judge(
        "python",
        f"{found} ({sys.executable})",
        values={"version": found, "executable": sys.executable},
        wrong=f"{found} is below {lowest}; make the environment with a newer python3" if too_old else None,
    )


def check_packages(package: str = "shoal") -> list[Check]:
    """One check for the package itself, for each of its requirements, and for each other installed package that is known bad."""
    lowest = requirements(requires(package) or [])
    names = [package, *sorted(lowest, key=lambda name: (name != "torch", name.lower()))]
    extra = sorted({bad.package for bad in KNOWN_BAD} - set(names))
    return [check_package(name, installed_version(name), lowest.get(name)) for name in names] + [
        check
        for name in extra
        if (check := check_package(name, installed_version(name), None)).advice and installed_version(name)
    ]


def check_package(name: str, installed: str | None, lowest: str | None) -> Check:
    """Judge one package by the version that is installed; pure, so that versions nobody has here can be tested."""
    if installed is None:
        wrong = f"{name} is missing; run `make install`, or pip install '{name}{f'>={lowest}' if lowest else ''}'"
        return judge(name, "not installed", values={"version": None}, wrong=wrong)
    problems = [bad.why for bad in KNOWN_BAD if bad.matches(name, installed)]
    if lowest is not None and release(installed) < release(lowest):
        problems.append(f"{installed} is below {lowest}; pip install '{name}>={lowest}'")
    return judge(name, installed, values={"version": installed}, wrong="; ".join(problems) or None)


def installed_version(package: str) -> str | None:
    """The version that package metadata names, or None when the package is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def requirements(lines: list[str]) -> dict[str, str]:
    """The lowest version of each requirement that is not an extra: ``torch>=2.13`` gives ``{"torch": "2.13"}``."""
    found = {}
    for line in lines:
        match = re.fullmatch(r"([A-Za-z0-9._-]+)\s*>=\s*([0-9.]+)", line)
        if match is not None:
            found[match[1]] = match[2]
    return found


def release(text: str) -> tuple[int, ...]:
    """The numbers of a version without what follows them, and without trailing zeros: ``2.13.0+cpu`` gives ``(2, 13)``."""
    match = re.match(r"\d+(?:\.\d+)*", text)
    numbers = [int(part) for part in match[0].split(".")] if match else []
    while numbers and numbers[-1] == 0:
        numbers.pop()
    return tuple(numbers)
