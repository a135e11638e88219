"""Wholes from pieces: every element from a rank that holds it, holes seen, copies compared."""

import json

import pytest
import torch

from shoal.core.placement import place_whole
from shoal.verify.compare.assemble import assemble_step
from shoal.verify.reference.recording import Recorder, Recording, placement_values, read_placement

WHOLE = torch.arange(24.0).reshape(8, 3)


def record(folder, locals_by_rank, placements, numbers=None):
    recordings = []
    for rank, (tensors, table) in enumerate(zip(locals_by_rank, placements, strict=True)):
        recorder = Recorder(folder, f"rank-{rank:03d}")
        loss, norm = (numbers or [(1.0, 2.0)] * len(locals_by_rank))[rank]
        recorder.add(loss=loss, norm=norm, skipped=False, tensors=tensors)
        recorder.close(placements={name: placement_values(place) for name, place in table.items()})
        recordings.append(Recording.open(folder, f"rank-{rank:03d}"))
    return recordings


def halves():
    whole = place_whole(WHOLE.shape)
    return [{"a": whole.rows(0, 5)}, {"a": whole.rows(5, 8)}]


def test_placements_survive_json():
    place = place_whole((4, 3)).rows(1, 3)
    assert read_placement(json.loads(json.dumps(placement_values(place)))) == place


def test_a_whole_is_put_together(tmp_path):
    tensors = [
        {"grad/a": WHOLE[:5], "optimizer/a/m": WHOLE[:5] * 2, "optimizer/a/step": torch.tensor(3.0)},
        {"grad/a": WHOLE[5:], "optimizer/a/m": WHOLE[5:] * 2, "optimizer/a/step": torch.tensor(3.0)},
    ]
    found = assemble_step(record(tmp_path, tensors, halves()), 0)
    assert torch.equal(found.step.tensors["grad/a"], WHOLE)
    assert torch.equal(found.step.tensors["optimizer/a/m"], WHOLE * 2)
    assert found.step.tensors["optimizer/a/step"] == 3.0
    assert found.disagreeing == {}


def test_a_hole_is_not_a_value(tmp_path):
    whole = place_whole(WHOLE.shape)
    tensors = [{"grad/a": WHOLE[:5]}, {"grad/a": WHOLE[6:]}]
    found = assemble_step(record(tmp_path, tensors, [{"a": whole.rows(0, 5)}, {"a": whole.rows(6, 8)}]), 0)
    assert bool(found.step.tensors["grad/a"][5].isnan().all())


@pytest.mark.parametrize("key", ["grad/a", "weight/a", "buffer/a", "optimizer/a/step"])
def test_a_copy_that_differs_is_seen(tmp_path, key):
    other = WHOLE.clone()
    other[7, 2] += 1e-6
    tensors = [{key: WHOLE}, {key: other}, {key: WHOLE}]
    found = assemble_step(record(tmp_path, tensors, [{"a": place_whole(WHOLE.shape)}] * 3), 0)
    assert found.disagreeing == {key: (1,)}


def test_ranks_must_agree_on_the_numbers(tmp_path):
    recordings = record(tmp_path, [{}, {}], [{}, {}], numbers=[(1.0, 2.0), (1.0, 2.5)])
    assert assemble_step(recordings, 0).disagreeing == {"norm": (1,)}
