"""From a recipe and a cluster to plans: shapes and devices by numbers, what is taken from the recipe, and what is refused."""

from typing import get_args

import pytest

from shoal.core.errors import RequestError
from shoal.data.check import DataSummary
from shoal.engine.config import TrainConfig
from shoal.planner.hardware.devices import EXECUTED_PRECISIONS
from shoal.planner.search.per_layer import Half, half_of, possible_splits
from shoal.trainer.config import load_recipe
from shoal.tuning.planned_model import shape_facts
from shoal.tuning.planning import PlanRequest, build_job, plan_for
from support.planner.jobs import all_assignments

SHAPE = """
[planner.shape]
layers = 24
hidden = 2048
heads = 16
kv_heads = 8
vocab = 50257
sequence = 2048
gated = true
[planner.devices.mine]
peak_tflops = { bfloat16 = 200.0, float32 = 20.0 }
memory_gib = 48.0
memory_gb_per_s = 1000.0
link_gb_per_s = 32.0
"""


class NoOwnParts:
    """The recipes here name shipped parts only."""

    def measure_data(self, recipe) -> DataSummary:
        raise AssertionError

    def check_plan(self, recipe, plan) -> None:
        raise AssertionError


@pytest.fixture
def shaped(tiny):
    tiny.write_text(tiny.read_text() + SHAPE)
    return tiny


def ask(recipe, cluster="mine:2x8", **options):
    return plan_for(PlanRequest(recipe=recipe, cluster=cluster, **options), own=NoOwnParts())


# huggingface.co/deepseek-ai/DeepSeek-V3, inference/configs/config_671B.json, config_236B.json (V2) and config_16B.json (V2-Lite).
DEEPSEEK = {
    671.0: {
        "layers": 61, "hidden": 7168, "heads": 128, "vocab": 129280, "ffn": 18432, "experts": 256, "chosen_experts": 8,
        "expert_ffn": 2048, "shared_ffn": 2048, "dense_layers": 3, "query_rank": 1536,
    },
    235.7: {
        "layers": 60, "hidden": 5120, "heads": 128, "vocab": 102400, "ffn": 12288, "experts": 160, "chosen_experts": 6,
        "expert_ffn": 1536, "shared_ffn": 2 * 1536, "dense_layers": 1, "query_rank": 1536,
    },
    15.7: {
        "layers": 27, "hidden": 2048, "heads": 16, "vocab": 102400, "ffn": 10944, "experts": 64, "chosen_experts": 6,
        "expert_ffn": 1408, "shared_ffn": 2 * 1408, "dense_layers": 1,
    },
}  # fmt: skip


@pytest.mark.parametrize("billions", DEEPSEEK)
def test_deepseek_by_its_numbers_has_the_parameters_that_are_published(tiny, billions):
    """671B and 236B (arXiv:2412.19437 and 2405.04434, abstracts), and 15.7B (the latter, appendix B), without what predicts
    further tokens; the shape had no key for latent attention, shared experts and dense blocks."""
    keys = {**DEEPSEEK[billions], "kv_rank": 512, "head_size": 128, "sequence": 4096, "gated": "true"}
    tiny.write_text(
        tiny.read_text() + "[planner.shape]\n" + "".join(f"{key} = {value}\n" for key, value in keys.items())
    )
    job, facts = build_job(load_recipe(tiny, ()), "h800:256x8", own=NoOwnParts())
    assert job.chain.weights / 1e9 == pytest.approx(billions, abs=0.05)
    assert (
        job.chain.num_blocks == keys["layers"]
        and job.chain.experts == keys["experts"]
        and facts.heads == ((keys["heads"],) * 2,)
    )
    dense, routed = job.chain.layers[keys["dense_layers"]], job.chain.layers[keys["dense_layers"] + 1]
    assert dense.expert_weights == 0 < routed.expert_weights


def test_a_head_may_be_of_another_size_than_its_share(shaped):
    """Qwen3-32B has 64 heads of 128 features beside a hidden size of 5,120."""
    job, _ = build_job(load_recipe(shaped, ("planner.shape.head_size=256",)), "mine:8", own=NoOwnParts())
    usual, _ = build_job(load_recipe(shaped, ()), "mine:8", own=NoOwnParts())
    # 16 query heads and 8 key-value heads of 128 features more, each with a matrix; of the first, one more for the output.
    assert job.chain.weights - usual.chain.weights == 24 * 2048 * 128 * (16 + 2 * 8 + 16)
    odd = ("planner.shape.heads=15", "planner.shape.kv_heads=5")
    assert build_job(load_recipe(shaped, (*odd, "planner.shape.head_size=128")), "mine:8", own=NoOwnParts())
    with pytest.raises(
        RequestError, match="15 heads do not divide hidden 2048; give a number of heads that does, or head_size"
    ):
        build_job(load_recipe(shaped, odd), "mine:8", own=NoOwnParts())


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ("dense_layers=3",),
            "dense_layers is 3, beside experts of which there are 1; give experts, or leave dense_layers out",
        ),
        (("shared_ffn=64",), "shared_ffn is 64, beside experts of which there are 1"),
        (
            ("experts=4", "dense_layers=24"),
            "dense_layers is 24 of 24 layers, and none is left for the experts; give 23 or fewer",
        ),
        (("query_rank=64",), "query_rank is 64 and kv_rank 0: .*; give kv_rank, or leave query_rank out"),
        (("kv_rank=64",), "kv_rank is 64 and kv_heads 8: .* each of the 16 heads .*; leave kv_heads out"),
        (("head_size=0",), r"planner.shape.head_size: .* greater than or equal to 1 \(found 0\)"),
        (("kv_rank=-1",), r"planner.shape.kv_rank: .* greater than or equal to 0 \(found -1\)"),
    ],
)
def test_numbers_of_a_shape_that_do_not_go_together_are_refused(shaped, overrides, message):
    with pytest.raises(RequestError, match=message):
        load_recipe(shaped, tuple(f"planner.shape.{change}" for change in overrides))


def test_a_shape_and_a_device_by_numbers(shaped):
    answer = ask(shaped, global_batch=64, overrides=("train.precision=bfloat16",))
    assert answer.job.cluster.device.flops("bfloat16") == 2e14 and answer.job.global_batch == 64
    ffn, heads = 3 * 2048 * 8192, 2048 * (2048 + 2 * 1024) + 2048 * 2048
    assert answer.job.chain.weights == 24 * (ffn + heads + 2 * 2048) + 2 * 50304 * 2048 + 2048
    assert answer.found.ranked and answer.reasons and answer.why_not == () and answer.choices is None
    facts = shape_facts(load_recipe(shaped, ()).planner.shape)
    for one in answer.found.ranked:
        assert one.plan.problems(facts, world_size=16) == [] and one.fits


def test_the_recipes_own_module_is_traced(tiny):
    answer = ask(tiny, "h100:8")
    assert answer.job.chain.num_blocks == 2 and answer.job.chain.heads == 4 and answer.job.chain.kv_heads == 2
    assert answer.job.global_batch == 8 and all(one.plan.world_size == 8 for one in answer.found.ranked)


def test_shoal_keeps_weights_in_float32_and_its_optimizers_state(tiny):
    recipe = load_recipe(tiny, ("train.precision=bfloat16",))
    job, facts = build_job(recipe, "h100:8", own=NoOwnParts())
    assert job.weight_bytes == 4 and job.state_bytes == pytest.approx(8, abs=0.01) and facts.heads == ((4, 2),)
    others = ("planner.software=megatron", "train.precision=bfloat16")
    other, _ = build_job(load_recipe(tiny, others), "h100:8", own=NoOwnParts())
    assert other.weight_bytes == 2 and other.state_bytes is None and other.stack.software.name == "megatron"


def test_other_software_in_float32_has_wide_weights_and_no_wide_copy_of_them(tiny):
    """Before, weights were 2 bytes whatever the precision: 14 bytes a weight with Adam's 12, where they are 4 + 8."""
    job, _ = build_job(load_recipe(tiny, ("planner.software=megatron",)), "h100:8", own=NoOwnParts())
    assert (job.precision, job.weight_bytes, job.optimizer_bytes) == ("float32", 4.0, 8.0)


def test_the_best_in_every_faster_precision_stands_beside_the_recipes_own(shaped):
    """Before, only the recipe's own precision was ever priced."""
    answer = ask(shaped, "h100:2x8", global_batch=64)
    assert {one.precision for one in answer.found.ranked} == {"float32"}
    assert [one.precision for one in answer.others] == ["bfloat16"], "shoal does not compute in float8"
    assert answer.others[0].seconds < answer.found.ranked[0].seconds
    narrow = ask(
        shaped, "h100:2x8", global_batch=64, overrides=("planner.software=megatron-core", "train.precision=bfloat16")
    )
    assert [one.precision for one in narrow.others] == ["float8"] and narrow.others[0].not_executed == ("float8",)


def test_precisions_that_are_asked_for_are_ranked_together(shaped):
    options = {"global_batch": 64, "top": 8, "overrides": ("planner.software=megatron-core",)}
    answer = ask(shaped, "h100:2x8", precisions=("bfloat16", "float8"), **options)
    assert answer.others == () and len(answer.found.ranked) == 8
    assert answer.found.ranked[0].precision == "float8" and answer.job.precision == "float32"
    assert answer.found.runnable is not None or any(not one.not_executed for one in answer.found.ranked)
    by_recipe = ask(
        shaped, "h100:2x8", **{**options, "overrides": (*options["overrides"], 'planner.precisions=["float8"]')}
    )
    assert {one.precision for one in by_recipe.found.ranked} == {"float8"}
    assert by_recipe.found.runnable is None


@pytest.mark.parametrize(
    ("cluster", "precision", "message"),
    [
        ("h100:8", "float9", "there is no precision 'float9'; did you mean 'float"),
        ("v100:8", "bfloat16", "no plan computes in bfloat16 here: v100-32gb has .*; leave bfloat16 out"),
        ("h100:8", "float8", "shoal does not compute in it, and megatron-core, .* do: set planner.software"),
    ],
)
def test_a_precision_that_is_not_there_is_refused(shaped, cluster, precision, message):
    with pytest.raises(RequestError, match=message):
        ask(shaped, cluster, precisions=(precision,))


def test_the_precisions_that_are_executed_are_those_of_train():
    assert set(EXECUTED_PRECISIONS) == set(get_args(TrainConfig.model_fields["precision"].annotation))


@pytest.mark.soak
def test_a_plan_with_experts_is_marked_and_one_that_runs_is_found(shaped):
    """Before, a ranking of plans with ep could be all there was, and `shoal train` refused each of them."""
    overrides = ("planner.shape.experts=16", "planner.shape.chosen_experts=2", "train.precision=bfloat16")
    answer = ask(shaped, "h100:4x8", global_batch=64, top=1, overrides=overrides)
    best = answer.found.ranked[0]
    assert best.plan.ep > 1 and best.not_executed == (f"ep={best.plan.ep}",)
    assert best.as_dict()["executable"] is False and best.as_dict()["not_executed"] == [f"ep={best.plan.ep}"]
    assert answer.found.runnable.plan.ep == 1 and answer.found.runnable.as_dict()["executable"] is True
    assert answer.found.runnable.seconds >= best.seconds


ALEX = """
from torch import nn

def build(spec):
    return nn.Sequential(
        nn.Conv2d(3, 64, 3, padding=1), nn.MaxPool2d(4),
        nn.Conv2d(64, 256, 3, padding=1), nn.MaxPool2d(4),
        nn.Flatten(), nn.Linear(256 * 64, 16384), nn.ReLU(), nn.Linear(16384, 1000),
    )
"""
ALEX_RECIPE = """
[model]
build = "alex_net:build"
[data]
source = "synthetic"
kind = "classes"
samples = 16
features = [3, 128, 128]
classes = 1000
[train]
steps = 1
global_batch = 256
precision = "bfloat16"
"""


@pytest.fixture
def alex(tmp_path, monkeypatch):
    (tmp_path / "alex_net.py").write_text(ALEX)
    monkeypatch.syspath_prepend(tmp_path)
    path = tmp_path / "alex.toml"
    path.write_text(ALEX_RECIPE)
    return path


def test_unlike_layers_of_a_real_module_get_splits_of_their_own(alex):
    """Samples for convolutions, parameters for both dense layers (Krizhevsky 2014, arXiv:1404.5997), on a traced module.

    Before, the first dense layer, which has most of the weights, could not be split by parameters: a pair over two links was no
    pair for the first of them.
    """
    answer = ask(alex, "a100-80gb-pcie:2")
    choices, layers = answer.choices, answer.job.chain.layers
    found = {layer.name: split for layer, split in zip(layers, choices.splits, strict=True)}
    assert str(found["0"]) == str(found["2"]) == "sample 2"
    assert str(found["5"]) == str(found["7"]) == "parameter 2", "both halves of the pair"
    assignments = list(all_assignments(answer.job))
    uniform = [seconds for splits, seconds, _ in assignments if len(set(splits)) == 1]
    assert len(uniform) >= 3 and choices.seconds < 0.9 * min(uniform), "faster than every split that is one for all"
    assert choices.uniform_seconds == pytest.approx(min(uniform))
    assert choices.seconds == pytest.approx(min(seconds for _, seconds, _ in assignments))
    assert list(choices.splits) in [
        splits for splits, seconds, _ in assignments if seconds < choices.seconds * 1.000001
    ]


def test_rows_of_a_real_modules_images_can_be_shared_out(alex):
    job, _ = build_job(load_recipe(alex, ()), "a100:2", own=NoOwnParts())
    rows = {layer.name: layer.image_rows for layer in job.chain.layers}
    halo = {layer.name: layer.halo_bytes for layer in job.chain.layers}
    assert rows == {"0": 128, "1": 32, "2": 32, "3": 8, "4": 0, "5": 0, "6": 0, "7": 0}
    # Two rows of 128 and of 32 columns, of 3 and of 64 channels, in 16 bit; windows that do not overlap need none.
    assert (halo["0"], halo["2"], halo["1"]) == (2 * 128 * 3 * 2, 2 * 32 * 64 * 2, 0)
    assert "attribute 2" in {str(split) for split in possible_splits(job, job.chain.layers[0], 2)}


def test_layers_that_are_not_alike_are_looked_at_in_the_shipped_cnn_too(tiny):
    tiny.write_text("[model]\nname = 'cnn'\n[data]\nsource = 'digits'\n[train]\nsteps = 1\nglobal_batch = 64\n")
    answer = ask(tiny, "h100:4")
    assert answer.choices is not None and len(answer.choices.splits) == len(answer.job.chain.layers)
    halves = {layer.name: half_of(layer) for layer in answer.job.chain.layers}
    assert (halves["linear1"], halves["linear2"]) == (Half.FIRST, Half.SECOND)


def test_why_not_takes_what_is_left_open_from_the_best(shaped):
    answer = ask(shaped, global_batch=64, why_not="tp=4 pp=2")
    assert answer.asked.plan.dp == 2 and answer.asked.plan.schedule == "1f1b" and answer.asked.plan.microbatches
    assert answer.asked.seconds >= answer.found.ranked[0].seconds * 0.999
    assert any("slower" in line for line in answer.why_not)
    looped = ask(shaped, global_batch=64, why_not="pp=4 schedule=zbv")
    assert looped.asked.plan.chunks == 2 and looped.asked.by_schedule


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        (
            "tp=3",
            "3 ranks a replica do not divide 16 devices; the nearest plan that works on 16 devices is 'dp=8 tp=2'",
        ),
        ("tp=3 pp=5", "15 ranks a replica do not divide 16 devices; choose tp, cp and pp whose product divides 16"),
        ("dp=3", "is for 3 devices, and the cluster has 16; leave dp out"),
        ("dp=16 pp=2", "is for 32 devices, and the cluster has 16"),
        ("tp", "'tp' is not key=value"),
        ("tq=2", "unknown key 'tq'"),
        ("tp=two", "tp is a whole number"),
        ("ps=1 workers=15", "parameter servers .ps=1. are not priced; give a plan with dp"),
        ("pp=4 schedule=zigzag", "schedule=zigzag is neither a schedule nor a file"),
        ("dp=16 recompute=some", "recompute=some is none of none, selective, full"),
        ("dp=16 zero=7", "zero=7 is none of 0, 1, 2, 3"),
        ("tp=0", "tp=0 is below 1; set tp to 1 or more"),
        ("dp=0", "dp=0 is below 1"),
        ("pp=2 microbatches=0", "microbatches=0 is below 1"),
    ],
)
def test_a_why_not_that_is_no_plan_for_these_devices_is_refused(shaped, plan, message):
    with pytest.raises(RequestError, match=message):
        ask(shaped, global_batch=16, why_not=plan)


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        ("tp=16", "tp=16 does not divide the 8 key-value heads"),
        ("pp=16 schedule=zbv", "want 32 stages"),
    ],
)
def test_a_why_not_that_breaks_a_rule_of_the_model_is_answered_with_the_rule(shaped, plan, message):
    answer = ask(shaped, global_batch=16, why_not=plan)
    assert answer.asked is None and message in " ".join(answer.why_not)


def test_a_why_not_that_the_model_refuses_gets_the_nearest_plan_for_these_devices_and_this_batch(shaped):
    """Each number that tp does not divide had a line and a list of its own, and what was in one was refused by the other."""
    heads = ("planner.shape.kv_heads=4",)
    answer = ask(shaped, "h100:4x8", global_batch=64, why_not="tp=32", overrides=heads)
    assert answer.why_not == (
        "dp=1 tp=32 microbatches=32: tp=32 does not divide the 16 heads, nor the 4 key-value heads; set tp to one of 1, 2, 4",
        "the nearest plan that works on 32 devices is 'dp=8 tp=4'",
    )
    with pytest.raises(
        RequestError,
        match=r"dp=32 does not divide the global batch of 48; give --global-batch 64, or the .*'dp=16 tp=2'",
    ):
        ask(shaped, "h100:4x8", global_batch=48, why_not="dp=32")


def test_what_does_not_fit_in_several_precisions_is_told_of_the_one_that_needs_least(shaped):
    """The first precision's model was named beside the memory of another's plan."""
    said = set()
    for precisions in (("float32", "bfloat16"), ("bfloat16", "float32")):
        with pytest.raises(RequestError) as refused:
            ask(shaped, precisions=precisions, overrides=("planner.shape.hidden=16384",))
        said.add(str(refused.value))
    (message,) = said
    assert "a transformer of 24 x 16384 in bfloat16 does not fit on 16 x mine" in message


def test_plans_for_other_software_say_why_no_command_runs_them(tiny):
    answer = ask(tiny, "h100:8", overrides=("planner.software=megatron",))
    assert any("no command runs these: they are priced as megatron runs them" in line for line in answer.warnings)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"top": 0}, "--top is 0; give 1 or more"),
        ({"global_batch": 0}, "the global batch is 0; give 1 to 1000000"),
        ({"cluster": "mein:8"}, "there is no device 'mein'"),
        ({"overrides": ("planner.software=megatrom",)}, "planner.software is 'megatrom'; did you mean 'megatron'"),
        ({"overrides": ("planner.shape.layerz=3",)}, "layerz"),
        ({"overrides": ("planner.shape.layers=0",)}, "layers"),
        ({"overrides": ("train.precision=float64",)}, "mine has no peak for float64"),
        (
            {"overrides": ("planner.shape.hidden=16384",)},
            r"GiB a device and 46.0 are free, [\d.]+ too few; it fits on \d+",
        ),
    ],
)
def test_what_cannot_be_planned_is_one_message(shaped, options, message):
    with pytest.raises(RequestError, match=message):
        ask(shaped, **options)
