"""Write the lock files beside this: every package that ``make install`` fetches, with the hashes of all its files.

    .venv/bin/python locks/make.py          (or `make lock`, after a change of constraints.txt or pyproject.toml)

Versions are those of constraints.txt; which packages are needed is read from what is installed here, and the hashes from the
index that pip is set up to use, for all platforms at once. torch is not among them: which of its builds is installed, and what
that brings along, differs from machine to machine. `make install` takes it at its pinned version without a hash.
"""

import functools
import html
import json
import re
import subprocess
import sys
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import requires
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name, parse_sdist_filename, parse_wheel_filename

HERE = Path(__file__).resolve().parent
WITHOUT_HASH = frozenset({"torch"})
"""See above."""
BUILD = ("hatchling", "editables")
"""What builds the package itself: without them here, pip would fetch them at their newest."""
LOCKS = {"run.txt": ("shoal[tensorboard]", *BUILD), "test.txt": ("shoal[test]", *BUILD)}


def main() -> None:
    """Write all lock files."""
    pins = read_pins(HERE.parent / "constraints.txt")
    needed = {file: closure(roots) for file, roots in LOCKS.items()}
    names = sorted(set().union(*needed.values()))
    missing = [name for name in names if name not in pins]
    if missing:
        raise SystemExit(f"not pinned in constraints.txt: {', '.join(missing)}")
    index_url()
    with ThreadPoolExecutor(8) as pool:
        hashes = dict(zip(names, pool.map(lambda name: find_hashes(name, pins[name]), names), strict=True))
    for file, members in needed.items():
        lines = ["# Written by locks/make.py; do not edit. torch is installed without a hash: see there."]
        for name in sorted(members):
            lines.append(" \\\n    ".join([f"{name}=={pins[name]}", *(f"--hash=sha256:{one}" for one in hashes[name])]))
        (HERE / file).write_text("\n".join(lines) + "\n")
        print(f"{file}: {len(members)} packages")


def read_pins(path: Path) -> dict[str, str]:
    """Versions by name."""
    lines = [line for line in path.read_text().splitlines() if line and not line.startswith("#")]
    return {canonicalize_name(name): version for name, _, version in (line.partition("==") for line in lines)}


def closure(roots: tuple[str, ...]) -> set[str]:
    """Every package that these need here, without the first and those that have no hash."""
    found: set[str] = set()
    seen: set[str] = set()
    waiting = [Requirement(root) for root in roots]
    while waiting:
        wanted = waiting.pop()
        if str(wanted) in seen:
            continue
        seen.add(str(wanted))
        name = canonicalize_name(wanted.name)
        if name != "shoal":
            found.add(name)
        for text in requires(name) or []:
            further = Requirement(text)
            contexts = [{"extra": extra} for extra in ("", *wanted.extras)]
            if further.marker is None or any(further.marker.evaluate(context) for context in contexts):
                waiting.append(further)
    return found - WITHOUT_HASH


def find_hashes(name: str, version: str) -> list[str]:
    """The hashes of all files of one version."""
    accepted = "application/vnd.pypi.simple.v1+json, text/html;q=0.5"
    asked = urllib.request.Request(f"{index_url()}/{name}/", headers={"Accept": accepted})
    with urllib.request.urlopen(asked, timeout=60) as answer:
        text = answer.read().decode()
        is_json = "json" in answer.headers.get("Content-Type", "")
    if is_json:
        files = [(one["filename"], one["hashes"].get("sha256", "")) for one in json.loads(text)["files"]]
    else:
        links = re.findall(r'href="[^"#]*#sha256=([0-9a-f]{64})"[^>]*>([^<]+)</a>', text)
        files = [(html.unescape(file), digest) for digest, file in links]
    hashes = sorted({digest for file, digest in files if digest and is_of(file, version)})
    if not hashes:
        raise SystemExit(f"the index has no hash of {name} {version}")
    return hashes


def is_of(file: str, version: str) -> bool:
    """True when a file is one of this version."""
    try:
        found = parse_wheel_filename(file)[1] if file.endswith(".whl") else parse_sdist_filename(file)[1]
    except ValueError:
        return False
    return str(found) == version


@functools.cache
def index_url() -> str:
    """The index that pip uses; its own default where none is set."""
    asked = [sys.executable, "-m", "pip", "config", "get", "global.index-url"]
    done = subprocess.run(asked, capture_output=True, text=True, check=False)
    if done.returncode == 0:
        return done.stdout.strip().rstrip("/")
    from pip._internal.models.index import PyPI

    return PyPI.simple_url.rstrip("/")


if __name__ == "__main__":
    main()
