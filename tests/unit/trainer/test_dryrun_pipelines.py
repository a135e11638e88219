"""A dry run of a pipeline says where the model is cut and what the fullest rank will hold; names are counted by hand."""

import pytest

from shoal.core.errors import RequestError
from shoal.schedules.catalogue import make_schedule
from shoal.schedules.csv_file import write_csv
from shoal.trainer.build import build_parts
from shoal.trainer.dryrun import dry_run_result
from shoal.trainer.own_parts import OwnPartsHere
from shoal.trainer.request import TrainRequest, prepare

RECIPE = """
[model]
name = "{name}"
{rest}
[data]
source = "synthetic"
kind = "{kind}"
samples = 64
features = [8, 8]
sequence = 8
vocab = 33
[train]
steps = 2
global_batch = 8
"""
GPT = RECIPE.format(name="gpt", rest="layers = 4\nhidden = 16\nheads = 2", kind="tokens")
CNN = RECIPE.format(name="cnn", rest="", kind="classes")


def dry_run(folder, recipe, plan, *overrides):
    (folder / "recipe.toml").write_text(recipe)
    request = TrainRequest(recipe=folder / "recipe.toml", plan=plan, overrides=tuple(overrides), run_dir=folder / "run")
    prepared = prepare(request, own=OwnPartsHere())
    model, _, _ = build_parts(prepared.recipe)
    return dry_run_result(prepared), model


def held(model, *prefixes):
    """Bytes of what begins with one of these, parameters and saved buffers; a tied weight once."""
    found = {id(v): v for name, v in model.state_dict(keep_vars=True).items() if name.startswith(prefixes)}
    return sum(value.nbytes for value in found.values())


def test_the_fullest_rank_is_the_one_whose_stages_weigh_most(tmp_path):
    result, model = dry_run(tmp_path, GPT, "pp=2")
    assert result.plan == "dp=1 pp=2 schedule=1f1b microbatches=4" and result.world_size == 2
    assert [line for line in result.found if line.startswith("pp:")] == [
        "pp: stage 0 on pipeline rank 0: embedding to blocks.1",
        "pp: stage 1 on pipeline rank 1: blocks.2 to head",
    ]
    parts = [held(model, "embedding", "blocks.0", "blocks.1"), held(model, "blocks.2", "blocks.3", "norm", "head")]
    assert result.bytes_per_rank["weights"] == result.bytes_per_rank["gradients"] == max(parts)
    assert max(parts) > min(parts) and sum(parts) == held(model, "")
    assert 2 * max(parts) <= result.bytes_per_rank["optimizer"] < 2 * held(model, "")


def test_stages_of_the_users_own_choice_are_counted(tmp_path):
    result, model = dry_run(tmp_path, GPT, "pp=2", 'pipeline.stages=["blocks.3"]')
    assert result.bytes_per_rank["weights"] == held(model, "embedding", "blocks.0", "blocks.1", "blocks.2")


def test_both_directions_are_held_by_both_ranks(tmp_path):
    result, model = dry_run(tmp_path, GPT, "pp=2 schedule=chimera")
    assert result.bytes_per_rank["weights"] == held(model, "")


def test_every_rank_of_a_stage_holds_it_whole_and_has_as_many_times_the_work(tmp_path):
    result, model = dry_run(tmp_path, GPT, "pp=4 replicas=3-1")
    assert result.plan == "dp=1 pp=4 schedule=1f1b replicas=3-1 microbatches=8" and result.world_size == 4
    assert [line for line in result.found if line.startswith("pp:")] == [
        "pp: stage 0 on pipeline ranks 0, 1 and 2: embedding to blocks.2",
        "pp: stage 1 on pipeline rank 3: blocks.3 to head",
    ]
    assert result.bytes_per_rank["weights"] == held(model, "embedding", "blocks.0", "blocks.1", "blocks.2")


@pytest.mark.parametrize(("name", "replicas"), [("1f1b", (1, 2)), ("chimera", None)])
def test_a_file_with_several_ranks_for_a_stage_and_running_statistics_is_refused(tmp_path, name, replicas):
    ranks = sum(replicas or (1, 1))
    path = tmp_path / "own.csv"
    path.write_text(write_csv(make_schedule(name, ranks=ranks, microbatches=4, replicas=replicas)))
    with pytest.raises(RequestError, match=r"own has several ranks for a stage, and the batch norm of 'norm1'"):
        dry_run(tmp_path, CNN, f"pp={ranks} schedule={path} microbatches=4")
    dry_run(tmp_path, GPT, f"pp={ranks} schedule={path} microbatches=4")


@pytest.mark.parametrize(
    ("network", "said"),
    [
        ("1 TiB/s", "one stage on all 4 ranks is fastest"),
        ("60 MiB/s", "no stage is worth a second rank"),
        ("1 MiB/s", "replicas=3-1 is fastest"),
    ],
)
def test_a_dry_run_says_which_stages_are_worth_several_ranks_and_the_plan_can_say_it_too(tmp_path, network, said):
    result, _ = dry_run(tmp_path, GPT, "pp=4", f"pipeline.network={network}")
    (line,) = [line for line in result.found if line.startswith("pp: over")]
    assert line.startswith(f"pp: over {network} {said}, ") and "ms per microbatch by estimated cost" in line
    if "replicas" in said:
        text, place = line.split()[4], line.split()[-2]
        result, _ = dry_run(tmp_path, GPT, f"pp=4 {text}", f'pipeline.stages=["{place}"]')
        assert result.found[-1].startswith(f"pp: stage 1 on pipeline rank 3: {place} to")


@pytest.mark.parametrize("network", ["fast", "10 GiB", "0 GiB/s", "10 furlongs/s"])
def test_a_network_that_is_none_is_refused(tmp_path, network):
    with pytest.raises(RequestError, match=r"pipeline\.network"):
        dry_run(tmp_path, GPT, "pp=4", f"pipeline.network={network}")


def test_too_few_microbatches_for_the_turns_are_refused_before_anything_starts(tmp_path):
    with pytest.raises(RequestError, match="stage 0 has 3 ranks that take turns, and 2 microbatches are too few"):
        dry_run(tmp_path, GPT, "pp=4 replicas=3-1 microbatches=2")


def test_a_tied_weight_is_at_both_ends(tmp_path):
    result, model = dry_run(tmp_path, GPT, "pp=2", "model.tied=true")
    assert result.bytes_per_rank["weights"] == held(model, "blocks.2", "blocks.3", "norm", "head")


def test_running_statistics_are_where_their_stage_is(tmp_path):
    result, model = dry_run(tmp_path, CNN, "pp=2", 'pipeline.stages=["linear1"]')
    parts = [held(model, "conv", "norm"), held(model, "linear")]
    assert result.bytes_per_rank["weights"] == max(parts) < held(model, "")


@pytest.mark.parametrize(("schedule", "copies"), [("pipedream", (2, 1)), ("pipedream-2bw", (2, 2))])
def test_versions_are_counted(tmp_path, schedule, copies):
    """The weights, which the optimizer writes to, and a copy for every version that a pass may read."""
    result, model = dry_run(tmp_path, GPT, f"pp=2 schedule={schedule} microbatches=4")
    parts = [held(model, "embedding", "blocks.0", "blocks.1"), held(model, "blocks.2", "blocks.3", "norm", "head")]
    weights = [(1 + number) * part for number, part in zip(copies, parts, strict=True)]
    # Gradients and two moments beside them.
    totals = [weight + 3 * part for weight, part in zip(weights, parts, strict=True)]
    assert result.bytes_per_rank["weights"] == weights[totals.index(max(totals))]


def test_shards_are_of_the_stages(tmp_path):
    whole, _ = dry_run(tmp_path, GPT, "dp=2 pp=2")
    sharded, _ = dry_run(tmp_path, GPT, "dp=2 pp=2 zero=1")
    assert sharded.bytes_per_rank["weights"] < 1.1 * whole.bytes_per_rank["weights"]
    assert sharded.bytes_per_rank["optimizer"] < 0.6 * whole.bytes_per_rank["optimizer"]
