"""One fault after another, of every kind, and in the end the weights of the run that nothing happened to.

A slice of one plan here; under ``make soak`` all plans, for ``SHOAL_CHAOS_MINUTES`` (30). The history that it writes, to the file
``SHOAL_CHAOS_LOG`` if that is given, says what was done to whom after how many steps; ``SHOAL_CHAOS_HISTORY=FILE`` plays the
episodes of one again, and ``SHOAL_CHAOS_SEED`` draws others.
"""

import json
import os
import time
from itertools import islice
from pathlib import Path

import pytest

from chaos.mixed_faults import ON_RANKS, ON_SERVERS, RANKED, SERVED, Episode, Fault, Stage, draw_episodes, read_episodes

SEED = int(os.environ.get("SHOAL_CHAOS_SEED", "1"))


@pytest.mark.timeout(300)
def test_a_few_faults_change_no_bit(tmp_path):
    stage = Stage(tmp_path, tmp_path / "history.jsonl", steps=24, seconds=0.03)
    faults = (
        Fault(kind="kill rank", after=6, victim=1),
        Fault(kind="full disk", after=2, victim=0),
        Fault(kind="kill supervisor", after=3, victim=0),
    )
    stage.play([Episode(plan="dp=2 zero=3", faults=faults)])
    told = [json.loads(line) for line in stage.history.read_text().splitlines()]
    struck = [line for line in told if line["what"] == "fault"]
    assert [line["kind"] for line in struck] == [fault.kind for fault in faults]
    assert all(line["victim"] != "nobody" for line in struck), struck
    told_of = "".join(path.read_text() for path in tmp_path.glob("run-1/run/events/rank-*.jsonl"))
    assert "cannot write its shard" in told_of, "the full disk failed no save"
    assert list(read_episodes(stage.history))[-1].faults == faults, "it can be played again"


@pytest.mark.soak
@pytest.mark.timeout(4 * 3600)
def test_every_fault_under_every_plan_changes_no_bit(tmp_path, capsys):
    minutes = float(os.environ.get("SHOAL_CHAOS_MINUTES", "30"))
    history = Path(os.environ.get("SHOAL_CHAOS_LOG", tmp_path / "history.jsonl"))
    stage = Stage(tmp_path, history, steps=200, seconds=0.1)
    replayed = os.environ.get("SHOAL_CHAOS_HISTORY")
    drawn = draw_episodes(SEED, plans=(*RANKED, *SERVED), num_faults=4, apart=(20, 60))
    episodes = [one for one in read_episodes(Path(replayed)) if one.faults] if replayed else drawn
    goodput = stage.play(episodes, until=float("inf") if replayed else time.monotonic() + 60 * minutes)
    with capsys.disabled():
        print(f"\nseed {SEED}: goodput {goodput:.2f}; {history}")


def test_a_seed_gives_the_same_episodes_and_all_kinds_of_faults():
    def drawn(seed, number=40):
        found = draw_episodes(seed, plans=(*RANKED, *SERVED), num_faults=4, apart=(20, 60))
        return list(islice(found, number))

    assert drawn(1) == drawn(1) != drawn(2)
    for plans, kinds in ((RANKED, ON_RANKS), (SERVED, ON_SERVERS)):
        assert {fault.kind for one in drawn(1) if one.plan in plans for fault in one.faults} == set(kinds)
