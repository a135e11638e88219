"""What is sent as it happens, and what somebody who was away gets."""

import asyncio
import json

import pytest

from shoal.dashboard.runs.folder import RunFolder
from shoal.dashboard.server.updates import Changes, TooMany, Updates
from support.dashboard.synthetic import make_run, started_line, step_line


async def heard(updates, since, count):
    chunks = updates.listen(since)
    found = []
    async for chunk in chunks:
        fields = dict(line.split(": ", 1) for line in chunk.decode().splitlines() if ": " in line)
        if "data" in fields:
            found.append((int(fields["id"]), fields["event"], json.loads(fields["data"])))
        if len(found) == count:
            break
    await chunks.aclose()
    return found


def test_a_client_that_comes_back_gets_what_it_missed():
    async def run():
        updates = Updates(1000.0)
        updates.publish([("run", {"n": number}) for number in range(5)])
        first, *missed = await heard(updates, 1_000_002, 3)
        assert first[1:] == ("hello", {"reset": False})
        assert missed == [(1_000_003, "run", {"n": 3}), (1_000_004, "run", {"n": 4})]
        assert updates.num_clients == 0

    asyncio.run(run())


@pytest.mark.parametrize("since", [5, 999_990, 1_000_400])
def test_a_client_of_another_server_or_of_long_ago_is_told_to_fetch_all(since):
    async def run():
        updates = Updates(1000.0)
        updates.publish([("run", {"n": number, "text": "x" * 20_000}) for number in range(300)])
        assert (await heard(updates, since, 1))[0][1:] == ("hello", {"reset": True})

    asyncio.run(run())


def test_listeners_are_bounded_and_slow_ones_are_let_go():
    async def run():
        updates = Updates(1000.0)
        slow = updates.listen(None)
        updates.publish([("run", {"n": number}) for number in range(400)])
        assert updates.num_clients == 0
        numbers = [int(chunk.split()[1]) async for chunk in slow if chunk.startswith(b"id: ")]
        # Nothing is left out before it is let go, so that what it missed is what comes after.
        assert len(numbers) > 100 and numbers == list(range(numbers[0], numbers[0] + len(numbers)))
        hello, *missed = await heard(updates, numbers[-1], 3)
        assert hello[2] == {"reset": False}
        assert [number for number, _, _ in missed] == [numbers[-1] + 1, numbers[-1] + 2]
        kept = [updates.listen(None) for _ in range(64)]
        with pytest.raises(TooMany):
            updates.listen(None)
        updates.close()
        for chunks in kept:
            assert len([chunk async for chunk in chunks]) == 2

    asyncio.run(run())


def test_only_what_changed_is_said(tmp_path):
    for name in ("one", "two"):
        make_run(tmp_path / name, steps=3, status=None)
    folder = RunFolder(tmp_path)
    changes = Changes(folder)
    folder.look(all_runs=True)
    now = 1_790_000_001.0
    (first,) = changes.look(now)
    assert first[0] == "runs" and len(first[1]["runs"]) == 2
    assert changes.look(now) == []
    events = tmp_path / "one" / "events" / "rank-000.jsonl"
    with events.open("a") as file:
        file.write(step_line(4, 0, t=now, loss=0.5))
    folder.look(all_runs=True)
    rows, points = changes.look(now)
    assert [row["name"] for row in rows[1]["runs"]] == ["one"]
    assert points[0] == "run" and points[1]["step"] == 4 and points[1]["curves"]["loss"] == [[4, 0.5]]
    with events.open("a") as file:
        file.write(started_line(0, t=now, step=1, generation=1) + step_line(2, 0, t=now, loss=7.0))
    folder.look(all_runs=True)
    # From step 2 on the curve is another one: the points begin there.
    assert changes.look(now)[-1][1]["curves"]["loss"] == [[2, 7.0]]


def test_a_run_that_goes_is_said(tmp_path):
    run = make_run(tmp_path / "runs" / "one", steps=3)
    folder = RunFolder(tmp_path / "runs")
    changes = Changes(folder)
    folder.look(all_runs=True)
    changes.look()
    (known,) = changes.rows
    run.rename(tmp_path / "elsewhere")
    folder.look(all_runs=True)
    assert changes.look() == [("gone", {"id": known})] and changes.rows == {}
