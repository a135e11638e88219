"""How soon an append is seen by another process, by the clock: from the moment that rows are there until it sees their version.

``append``: a process appends rows to a store, this one looks at its newest version every 5 ms. ``follow``: a file is renamed into
a folder that ``shoal data follow`` watches; and ``message``: a message is sent to a topic that it reads, on librdkafka's own
brokers, where confluent-kafka is installed.
"""

import importlib.util
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from shoal.data.store.reader import newest_version
from shoal.data.store.writer import append_store, build_store
from shoal.data.table import Table, number_column

ROWS, APPENDS, LOOK_S = 1000, 20, 0.005
_FOLLOW = [sys.executable, "-c", "from shoal.cli.main import main; main()", "data", "follow"]
_APPEND = """
import sys, time
import numpy as np
from shoal.data.store.writer import append_store
from shoal.data.table import Table, number_column
for line in sys.stdin:
    numbers = np.arange(int(line))
    start = time.time()
    append_store([Table.of([number_column("id", numbers)])], sys.argv[1])
    print(start, flush=True)
"""


def measure_appends() -> dict[str, object]:
    """Seconds until a version is seen, of each way."""
    found = {"append": _append(), "follow": _follow_folder()}
    if importlib.util.find_spec("confluent_kafka") is not None:
        found["message"] = _follow_topic()
    for name, seconds in found.items():
        print(f"{name:8} median {statistics.median(seconds):.3f} s, longest {max(seconds):.3f} s of {len(seconds)}")
    return {"seconds": found, "rows": ROWS, "load": os.getloadavg()[0]}


def _wait(store: str, version: int) -> float:
    limit = time.monotonic() + 60
    while (newest_version(store) or 0) < version:
        if time.monotonic() > limit:
            raise TimeoutError(f"version {version} of {store} was not seen in 60 s")
        time.sleep(LOOK_S)
    return time.time()


def _append() -> list[float]:
    with tempfile.TemporaryDirectory() as folder:
        store = f"{folder}/store"
        build_store([Table.of([number_column("id", np.arange(ROWS))])], store)
        append_store([Table.of([number_column("id", np.arange(1))])], store)
        process = subprocess.Popen(
            [sys.executable, "-c", _APPEND, store], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        seconds = []
        with process:
            assert process.stdin is not None and process.stdout is not None
            for number in range(APPENDS):
                process.stdin.write(f"{ROWS}\n")
                process.stdin.flush()
                seen = _wait(store, number + 3)
                seconds.append(seen - float(process.stdout.readline()))
            process.stdin.close()
    return seconds


def _followed(source: str, arrive: Callable[[int], None]) -> list[float]:
    with tempfile.TemporaryDirectory() as folder:
        store = f"{folder}/store"
        process = subprocess.Popen([*_FOLLOW, source, store], stdout=subprocess.DEVNULL)
        try:
            seconds = []
            for number in range(APPENDS + 1):
                start = time.time()
                arrive(number)
                seconds.append(_wait(store, number + 1) - start)
        finally:
            process.terminate()
            process.wait(30)
    return seconds[1:]  # The first waits for the command to start.


def _follow_folder() -> list[float]:
    with tempfile.TemporaryDirectory() as folder:

        def arrive(number: int) -> None:
            beside = Path(folder) / f".{number}.jsonl"
            beside.write_text("".join(json.dumps({"id": row}) + "\n" for row in range(ROWS)))
            beside.rename(Path(folder) / f"{number}.jsonl")

        return _followed(folder, arrive)


def _follow_topic() -> list[float]:
    import confluent_kafka

    producer = confluent_kafka.Producer({"test.mock.num.brokers": 1, "bootstrap.servers": "mock"})
    (broker,) = producer.list_topics(timeout=10).brokers.values()

    def arrive(number: int) -> None:
        producer.produce("rows", value=json.dumps({"id": number}).encode())
        producer.flush(20)

    arrive(-1)
    return _followed(f"kafka://{broker.host}:{broker.port}/rows", lambda number: arrive(number) if number else None)
