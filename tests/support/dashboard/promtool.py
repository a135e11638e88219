"""Prometheus' own checker of metrics: ``promtool`` on the path, or where ``make tools`` unpacks it."""

import json
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

UNPACKED = Path(__file__).resolve().parents[3] / ".venv" / "promtool" / "usr" / "bin" / "promtool"


def check_metrics(text: str) -> None:
    """Fail with what promtool says of an answer to a scrape; skip where there is no promtool."""
    done = _run("check", "metrics", text=text)
    assert done.returncode == 0 and not done.stdout and not done.stderr, done.stdout + done.stderr


def check_rules(queries: Sequence[str]) -> None:
    """Fail with what promtool says of queries, which it reads as rules; skip where there is no promtool."""
    rules = [{"record": f"query_{place}", "expr": query} for place, query in enumerate(queries)]
    done = _run("check", "rules", "/dev/stdin", text=json.dumps({"groups": [{"name": "queries", "rules": rules}]}))
    assert done.returncode == 0, done.stdout + done.stderr


def _run(*arguments: str, text: str) -> subprocess.CompletedProcess:
    found = shutil.which("promtool") or (str(UNPACKED) if UNPACKED.is_file() else None)
    if found is None:
        pytest.skip("promtool is not there; `make tools` unpacks it out of Debian's package prometheus")
    command = [found, *arguments]
    return subprocess.run(command, input=text, capture_output=True, text=True, timeout=60, check=False)
