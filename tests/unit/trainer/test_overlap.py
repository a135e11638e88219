"""``overlap``: what crosses the wire while a worker computes, under every rule that has it, in a running crew."""

import threading
from collections import Counter

import pytest

from crew_inside import recipe_of, run_inside
from shoal.paramserver.client import Client
from shoal.trainer.servers.portion import ShareRunner
from shoal.trainer.servers.workline import Line

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
def test_weights_are_pulled_while_a_portion_is_computed(tmp_path, monkeypatch, update):
    """They were waited for before every portion, whatever overlap said."""
    computing, used, beside = Counter(), Counter(), Counter()
    run, use, pull = ShareRunner.run, Line.use, Client.pull
    lock = threading.Lock()

    def compute(self, *given, **more):
        with lock:
            computing["now"] += 1
        threading.Event().wait(0.03)
        found = run(self, *given, **more)
        with lock:
            computing["now"] -= 1
        return found

    def note_use(self, read):
        used[update] += 1
        use(self, read)

    async def note_pull(self, need, bound=None):
        beside["computing" if computing["now"] else "idle"] += 1
        return await pull(self, need, bound)

    monkeypatch.setattr(ShareRunner, "run", compute)
    monkeypatch.setattr(Line, "use", note_use)
    monkeypatch.setattr(Client, "pull", note_pull)
    run_inside(tmp_path / "one", f"ps=2 workers=1 update={update}", recipe_of(*OVERLAP))
    assert used[update] >= STEPS // 2, "portions that waited for no weights"
    assert beside["computing"] >= STEPS // 2, beside
