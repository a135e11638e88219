"""``overlap``: what crosses the wire while a worker computes, under every rule that has it, in a running job."""

from collections import Counter

import pytest

from shoal.paramserver.worker.client import Client
from shoal.serverrun.worker.connection import ServerConnection
from shoal.telemetry.eventlog import decode_events
from support.paramserver.run_in_process import recipe_of, run_inside

STEPS = 12
OVERLAP = ["paramserver.overlap=true", f"train.steps={STEPS}"]


@pytest.mark.parametrize("update", ["bsp", "ssp:0", "ssp:2", "async", "half:2,0.1"])
def test_every_rule_makes_its_steps_with_overlap(tmp_path, update):
    found = run_inside(tmp_path / "overlapped", f"ps=2 workers=2 update={update}", recipe_of(*OVERLAP))
    assert [step["step"] for step in found.steps] == list(range(1, STEPS + 1))
    assert sum(step["samples"] for step in found.steps) == STEPS * 16
    if update in ("bsp", "ssp:0"):
        plain = run_inside(tmp_path / "plain", "ps=2 workers=2 update=bsp", recipe_of(f"train.steps={STEPS}"))
        assert found.sha256 == plain.sha256


@pytest.mark.parametrize("update", ["ssp:2", "async"])
def test_weights_are_pulled_while_a_unit_is_computed(tmp_path, monkeypatch, update):
    """They were waited for before every work unit, whatever overlap said."""
    used, waited, pulled = Counter(), Counter(), Counter()
    use, pull, bring = ServerConnection.use, ServerConnection.pull, Client.pull

    def note_use(self, read):
        used[update] += 1
        use(self, read)

    def note_pull(self, need, bound=None):
        waited[update] += 1
        return pull(self, need, bound)

    async def note_all(self, need, bound=None):
        pulled[update] += 1
        return await bring(self, need, bound)

    monkeypatch.setattr(Client, "pull", note_all)
    monkeypatch.setattr(ServerConnection, "use", note_use)
    monkeypatch.setattr(ServerConnection, "pull", note_pull)
    found = run_inside(tmp_path / "one", f"ps=2 workers=1 update={update}", recipe_of(*OVERLAP))
    assert (waited[update], used[update]) == (1, STEPS - 1), (
        "the first work unit alone waits, however busy the machine is"
    )
    assert pulled[update] == STEPS, "the last gradient has no work unit after it that would read a pull"
    if update == "async":
        read = [one["read"] for one in updates_of(found.run_dir)]
        assert read == [[0], *([number] for number in range(STEPS - 1))], "pulled beside the work unit before"


def updates_of(run_dir):
    lines = [line for path in (run_dir / "events").glob("rank-*.jsonl") for line in path.read_bytes().splitlines()]
    updates = [event for event in decode_events(lines) if event["kind"] == "update"]
    return sorted(updates, key=lambda event: event["update"])
