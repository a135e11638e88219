"""Versions of weights: the runtime's rule against the one read from schedules, and how many sets it keeps."""

import pytest
import torch
from torch import nn

from shoal.pipeline.versions import VersionRule, Versions
from shoal.schedules.catalogue import make_schedule
from shoal.schedules.schedule import Kind
from shoal.schedules.versions import versions_used

FAMILIES = ["pipedream", "pipedream-vsync", "pipedream-2bw"]
STEPS = 3


def schedules(name):
    for ranks in range(1, 7):
        # 2BW needs as many microbatches as ranks; the catalogue refuses fewer.
        for microbatches in range(ranks if name == "pipedream-2bw" else 1, 13):
            yield make_schedule(name, ranks=ranks, microbatches=microbatches, steps=STEPS)


def rule_of(schedule):
    return VersionRule(updates=schedule.updates, num_stages=schedule.grid.num_stages, accumulate=schedule.accumulate)


@pytest.mark.parametrize("name", FAMILIES)
def test_the_rule_agrees_with_the_schedules(name):
    for schedule in schedules(name):
        rule = rule_of(schedule)
        for (stage, microbatch), version in versions_used(schedule).items():
            assert rule.used(stage, microbatch) == version, (schedule.grid, stage, microbatch)


def walk(schedule, rank, *, first=0, versions=None):
    """One rank's row with a weight that counts its updates; every pass sees the version that the rule names."""
    weight = nn.Parameter(torch.zeros(()))
    versions = versions or Versions({"weight": weight}, rule_of(schedule), stage=rank)
    weight, rule = versions.parameters["weight"], versions.rule
    most = len(versions.sets)
    kept_by = {}
    for action in schedule.actions(rank):
        microbatch = first + action.microbatch
        if action.kind is Kind.FORWARD:
            # The last stage of a stashing pipeline computes with its parameters.
            kept_by[microbatch] = (versions.use(microbatch) or versions.parameters)["weight"]
            assert kept_by[microbatch].item() == rule.used(rank, microbatch)
        else:
            kept_by.pop(microbatch).sum().backward()
            if rule.ends_version(microbatch):
                versions.take_gradients(microbatch)
                assert weight.grad.item() == rule.accumulate
                versions.before_update(microbatch)
                with torch.no_grad():
                    weight += 1
                weight.grad = None
                versions.after_update(microbatch)
        most = max(most, len(versions.sets))
        assert all(tensors["weight"].item() == version for version, tensors in versions.sets.items())
    return versions, most


@pytest.mark.parametrize("name", FAMILIES)
def test_no_stage_keeps_more_sets_than_its_family_promises(name):
    reached = set()
    for schedule in schedules(name):
        for rank, bound in enumerate(schedule.version_bound):
            _, most = walk(schedule, rank)
            assert most <= bound, (schedule.grid, rank)
            reached.add(most == bound)
    # The bound is no idle one.
    assert True in reached


@pytest.mark.parametrize("name", FAMILIES)
def test_superseded_sets_are_gone(name):
    for ranks in (1, 2, 4):
        schedule = make_schedule(name, ranks=ranks, microbatches=4, steps=STEPS)
        for rank in range(ranks):
            versions, _ = walk(schedule, rank)
            coming = {versions.rule.used(rank, schedule.grid.num_microbatches + later) for later in range(4 * ranks)}
            assert set(versions.sets) <= coming
            assert min(versions.sets, default=versions.newest) >= versions.newest - (
                ranks - 1 if "2bw" not in name else 1
            )


@pytest.mark.parametrize("name", FAMILIES)
def test_a_pause_changes_no_version(name):
    """Drained after five microbatches' worth of steps and filled again: the walk itself checks every version that is used."""
    for ranks in (1, 2, 4):
        window = make_schedule(name, ranks=ranks, microbatches=4, steps=2)
        for rank in range(ranks):
            versions, _ = walk(window, rank)
            newest = versions.newest
            versions, most = walk(window, rank, first=8, versions=versions)
            assert versions.newest == 2 * newest and most <= window.version_bound[rank] + 1


def test_a_set_is_a_copy_that_the_optimizer_does_not_write_to():
    weight = nn.Parameter(torch.ones(3))
    rule = VersionRule(updates=make_schedule("pipedream", ranks=2, microbatches=2).updates, num_stages=2)
    versions = Versions({"w": weight}, rule, stage=0)
    used = versions.use(0)["w"]
    with torch.no_grad():
        weight.mul_(5)
    assert torch.equal(used, torch.ones(3)) and used.requires_grad and used.is_leaf
