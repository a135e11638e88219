"""Plans whose codec does not go with the rest: refused with the reason, both values and a plan that works."""

import pytest

from shoal.compression.config import CompressionConfig
from shoal.core.errors import RequestError
from shoal.core.plan import Plan, nearest_plan
from shoal.engine.compression.settings import compression_settings
from shoal.engine.config import TrainConfig
from shoal.optim.config import OptimConfig


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("dp=2 compress=int9", ["unknown codec 'int9'", "int8"]),
        ("dp=2 compress=powersgd", ["takes 1 number", "powersgd:4"]),
        ("dp=2 tp=2 compress=int8", ["compress=int8 does not go with tp=2", "works: 'dp=2 tp=2'"]),
        ("dp=2 cp=2 compress=int8", ["compress=int8 does not go with cp=2", "works: 'dp=2 cp=2'"]),
        ("dp=2 pp=2 schedule=pipedream compress=int8", ["schedule=pipedream", "use schedule=1f1b"]),
        ("ps=1 workers=2 compress=powersgd:2", ["does not go with ps=1"]),
        ("dp=1 compress=int8", ["dp=1 has one"]),
        ("dp=2 compress=onebit", ["at step 0 there is none", "onebit@100"]),
        ("islands=2 dp=2 zero=1 sync=diloco:3 compress=powersgd:2", ["a rule for whole tensors", "compress=int4"]),
        ("islands=2 dp=2 zero=2 sync=local:3 compress=topk:0.1", ["zero=2 inside", "or leave zero out"]),
        ("islands=2 dp=2 zero=1 sync=gossip:ring compress=int8", ["messages are of whole tensors", "sync=diloco:50"]),
        ("dp=2 zero=1 compress=onebit@5", ["does not go with zero=1", "compress=int8"]),
    ],
)
def test_a_plan_that_cannot_be_compressed_is_refused(text, words):
    with pytest.raises(RequestError) as refusal:
        Plan.parse(text).check()
    for word in words:
        assert word in str(refusal.value), str(refusal.value)


def test_none_is_left_out():
    assert Plan.parse("dp=2 compress=none") == Plan.parse("dp=2")
    Plan.parse("dp=2 zero=3 microbatches=2 compress=int4:64@10").check(world_size=2)
    Plan.parse("dp=2 pp=2 compress=powersgd:4").check(world_size=4)
    Plan.parse("islands=2 dp=2 zero=3 sync=diloco:3 compress=int8").check(world_size=4)


@pytest.mark.parametrize(
    ("text", "precision", "optim", "words"),
    [
        ("dp=2 compress=int4", "float16", {}, "keeps what it has not sent"),
        ("dp=2 compress=int8", "float64", {}, "train.precision is float64"),
        (
            "dp=2 compress=dgc:0.01",
            "float32",
            {"name": "momentum"},
            "has a momentum of its own (compression.momentum 0.9)",
        ),
        ("dp=2 pp=2 compress=dgc:0.01", "float32", {"name": "sgd", "clip": 1.0}, "optim.clip 1, and with pp=2"),
        ("dp=2 compress=onebit@5", "float32", {"name": "sgd"}, "optim.name is sgd"),
    ],
)
def test_settings_that_a_codec_cannot_work_with_are_refused(text, precision, optim, words):
    train = TrainConfig(steps=1, global_batch=4, precision=precision)
    (problem,) = compression_settings(train, OptimConfig(**optim), CompressionConfig(), Plan.parse(text))
    assert words in problem


def test_settings_that_go_together_are_allowed():
    train = TrainConfig(steps=1, global_batch=4, precision="float16")
    assert not compression_settings(train, OptimConfig(), CompressionConfig(), Plan.parse("dp=2 compress=int8"))
    unkept = CompressionConfig(residual=False)
    assert not compression_settings(train, OptimConfig(), unkept, Plan.parse("dp=2 compress=int4"))
    plain = TrainConfig(steps=1, global_batch=4)
    sgd = OptimConfig(name="sgd", clip=1.0)
    assert not compression_settings(plain, sgd, CompressionConfig(), Plan.parse("dp=2 compress=dgc:0.01"))


@pytest.mark.parametrize(
    ("text", "near"),
    [
        ("dp=2 compress=int9", "dp=2 compress=int8"),
        ("dp=2 compress=int9@30", "dp=2 compress=int8@30"),
        ("dp=2 compress=4bit@30", "dp=2 compress=int4@30"),
        ("dp=2 compress=topk:5", "dp=2 compress=topk:0.01"),
        ("dp=2 compress=toppk:0.1", "dp=2 compress=topk:0.1"),
        ("dp=2 tp=2 compress=int8", "dp=2 tp=2"),
        ("dp=2 compress=zzzzzz", "dp=2"),
    ],
)
def test_the_nearest_plan_keeps_a_codec_that_was_only_misspelt(text, near):
    assert str(nearest_plan(Plan.parse(text))) == near
