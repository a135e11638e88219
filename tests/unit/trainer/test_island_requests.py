"""What a wrong request for islands gets before a process starts: one message with the numbers and the fix."""

import pytest

from shoal.core.errors import RequestError
from shoal.trainer.own_parts import OwnPartsHere
from shoal.trainer.request import TrainRequest, prepare
from support.processes.command import TINY

CASES = (
    # plan, settings, words of the message
    ("dp=2 sync=dilco:3", (), "unknown policy 'dilco'; did you mean 'diloco'"),
    ("dp=2 sync=diloco:0", (), "H is 0, below 1; set it to 1 or more"),
    ("dp=2 sync=local:-2", (), "H is -2, below 1"),
    ("dp=2 sync=gossip:rnig", (), "did you mean 'ring'"),
    ("dp=2 sync=gossip:GRAPH", (), "is of 3 islands, and the plan has 2; give a graph of 2"),
    ("dp=4 sync=gossip:APART", (), "is not connected: island(s) 2, 3 are not reached from island 0"),
    ("dp=2 sync=pushsum:none.json", (), "none.json cannot be read"),
    (
        "dp=2 sync=stream:64,64,0",
        (),
        "64 fragments of whole layers, and 5 of its layers have trained parameters; use 5",
    ),
    ("ps=1 workers=2 sync=diloco:3", (), "servers have them here; leave sync out"),
    ("islands=2 dp=1", (), "sync is allreduce, under which there are none; set sync"),
    ("dp=1 sync=diloco:3", (), "between islands, and there is one"),
    ("dp=3 sync=gossip:exponential", ("train.global_batch=6",), "power of two, and there are 3"),
    ("dp=2 zero=1 sync=local:3", (), "zero=1 shares state along dp"),
    (
        "dp=2 sync=diloco:3",
        ("replicas.interval=qsr",),
        "rounds of sync=local:H, and here sync=diloco:3; use sync=local:3",
    ),
    ("dp=2 sync=local:2s", ("replicas.interval=adacomm", "eval.every=2"), "here sync=local:2s"),
    ("dp=2 sync=local:2", ("replicas.interval=adacomm", "eval.every=0"), "eval.every is 0: there would be none"),
    ("dp=2 sync=gossip:ring", ("replicas.weigh=samples",), "replicas.weigh samples is for the mean of local, diloco"),
    ("dp=2 sync=gossip:ring", ("train.nonfinite=skip",), "an island hears its neighbours only"),
    ("dp=2 sync=local:3", ("train.spike=3",), "train.spike 3 leaves out steps on all ranks together"),
    ("dp=2 sync=local:3", ("train.precision=float16",), "use bfloat16"),
    ("dp=2 sync=local:3", ("train.nonfinite=skip", "train.rollback_after=2"), "leave rollback_after out"),
    ("dp=2 sync=local:3", ("replicas.weight=samples",), "weigh"),
)


@pytest.mark.parametrize(("plan", "settings", "words"), CASES)
def test_a_wrong_request_for_islands_is_refused_before_a_process_starts(tmp_path, plan, settings, words):
    recipe = tmp_path / "tiny.toml"
    recipe.write_text(TINY)
    (tmp_path / "graph.json").write_text('{"islands": 3, "edges": [[0, 1], [1, 2]]}')
    (tmp_path / "apart.json").write_text('{"islands": 4, "edges": [[0, 1], [2, 3]]}')
    plan = plan.replace("GRAPH", str(tmp_path / "graph.json")).replace("APART", str(tmp_path / "apart.json"))
    request = TrainRequest(recipe=recipe, plan=plan, overrides=settings, run_dir=tmp_path / "run")
    with pytest.raises(RequestError) as refusal:
        prepare(request, own=OwnPartsHere())
    assert words in str(refusal.value)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("plan", "words"),
    [
        ("dp=2 sync=diloco:100", "first round after step 100, and the run has 8 steps: islands never agree"),
        ("dp=2 sync=local:2@50", "begins after the 8 steps: islands sum their gradients all the time"),
        ("dp=2 sync=diloco:4", None),
        ("dp=2 sync=local:1s", None),
        ("dp=2 compress=topk:0.1", "about as good as one replica alone"),
        ("dp=2 compress=powersgd:1", "hardly better than one replica alone"),
        ("dp=2 compress=topk:1", None),
        ("dp=2 sync=gossip:ring", None),
        ("dp=4 sync=gossip:ring", "sends 2 models from each of 4 islands at every step, and a dense sum 1.5"),
        ("dp=2 sync=gossip:ring compress=topk:0.1", None),
    ],
)
def test_rounds_that_never_come_and_codecs_that_cost_more_are_told(tmp_path, plan, words):
    recipe = tmp_path / "tiny.toml"
    recipe.write_text(TINY)
    found = prepare(TrainRequest(recipe=recipe, plan=plan, run_dir=tmp_path / "run"), own=OwnPartsHere()).warnings
    assert [words in one for one in found] == [True] if words else not found


@pytest.mark.parametrize(
    ("plan", "settings", "words"),
    [
        ("dp=2 sync=diloco:4", ("replicas.mixing=0.1",), "replicas.mixing: no effect with sync=diloco:4"),
        (
            "dp=2 sync=local:4",
            ("replicas.outer_lr=0.5", "replicas.pull=0.2"),
            "replicas.outer_lr, replicas.pull: no effect",
        ),
        ("dp=2 sync=local:4", ("replicas.interval_scale=0.1",), "replicas.interval_scale: no effect"),
        ("dp=2", ("replicas.distance=2",), "replicas.distance: no effect with sync=allreduce"),
        ("dp=2 sync=gossip:ring", ("replicas.gossip_rate=0.3",), "replicas.gossip_rate: no effect"),
        ("dp=2 sync=gossip:ring compress=int8", ("replicas.gossip_rate=0.3",), None),
        ("dp=2 sync=stream:4,2,1", ("replicas.mixing=0.1", "replicas.outer_lr=0.5"), None),
        ("dp=2 sync=local:4", ("replicas.interval_scale=0.1", "replicas.interval=qsr"), None),
        (
            "dp=2 compress=int8",
            ("compression.warmup=3",),
            "compression.warmup: no effect with the plan 'dp=2 compress=int8'",
        ),
        (
            "dp=2 compress=powersgd:2",
            ("compression.round=keyed", "compression.block=64"),
            "compression.round, compression.block",
        ),
        ("dp=2 zero=1 compress=int4", ("compression.back=same",), "compression.back: no effect"),
        ("dp=2 sync=diloco:4 compress=int4", ("compression.back=same", "compression.block=64"), None),
        ("dp=2 compress=fp16", ("compression.back=int8", "compression.block=64"), None),
        ("dp=2 compress=fp16", ("compression.block=64",), "compression.block: no effect"),
        ("dp=2 compress=powersgd:2", ("compression.min_rate=3", "compression.residual=false"), None),
    ],
)
def test_settings_that_nobody_looks_at_are_told(tmp_path, plan, settings, words):
    recipe = tmp_path / "tiny.toml"
    recipe.write_text(TINY)
    request = TrainRequest(recipe=recipe, plan=plan, overrides=settings, run_dir=tmp_path / "run")
    found = prepare(request, own=OwnPartsHere()).warnings
    assert [words in one for one in found] == [True] if words else not found
