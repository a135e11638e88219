"""The lock files are of the versions in constraints.txt, have hashes, and leave nothing out that this installation needs."""

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
ENTRY = re.compile(
    r"^(?P<name>[a-z0-9-]+)==(?P<version>\S+)(?P<hashes>( \\\n    --hash=sha256:[0-9a-f]{64})+)$", re.MULTILINE
)


def load_maker():
    spec = importlib.util.spec_from_file_location("locks_make", ROOT / "locks" / "make.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("file", ["run.txt", "test.txt"])
def test_a_lock_is_whole(file):
    maker = load_maker()
    text = (ROOT / "locks" / file).read_text()
    found = {entry["name"]: entry["version"] for entry in ENTRY.finditer(text)}
    assert ENTRY.sub("", text).strip().count("\n") == 0, "nothing but entries and one comment"
    pins = maker.read_pins(ROOT / "constraints.txt")
    assert found == {name: pins[name] for name in found}, "run `make lock`"
    assert set(found) == maker.closure(maker.LOCKS[file]), "run `make lock`"
    assert {"torch"} == maker.WITHOUT_HASH


def test_pip_refuses_a_file_whose_hash_is_another(tmp_path):
    wheel = tmp_path / "harmless-1.0-py3-none-any.whl"
    wheel.write_bytes(b"not what was locked")
    (tmp_path / "lock.txt").write_text(f"harmless==1.0 --hash=sha256:{'0' * 64}\n")
    pip = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--no-index",
        "--no-deps",
        "--require-hashes",
        "--disable-pip-version-check",
    ]
    done = subprocess.run(
        [
            *pip,
            "--find-links",
            str(tmp_path),
            "-d",
            str(tmp_path / "got"),
            "-c",
            str(ROOT / "constraints.txt"),
            "-r",
            "lock.txt",
        ],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 1 and "DO NOT MATCH THE HASHES" in done.stderr, done.stderr
