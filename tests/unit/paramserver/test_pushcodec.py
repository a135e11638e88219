"""Compressed pushes: bytes are the formula's, what is sent and what is kept add up, and what is malformed is refused by name."""

import msgspec
import pytest
import torch

from shoal.compression.config import CompressionConfig
from shoal.core.compressrule import CompressRule
from shoal.core.errors import RequestError
from shoal.core.plan import Plan
from shoal.paramserver.config import ParamServerConfig, rule_problems
from shoal.paramserver.messages import Packed
from shoal.paramserver.pushcodec import PushCodec, PushCompressor
from shoal.paramserver.sharding import TensorSpec, cut_for
from shoal.paramserver.sparse import WrongGradient

MODEL = {
    "bias": TensorSpec((40,), "float32"),
    "matrix": TensorSpec((50, 40), "float32"),
    "small": TensorSpec((4, 5), "float32"),
    "wide": TensorSpec((30, 60), "float32"),
}
KINDS = ["fp16", "bf16", "fp8", "int8", "int4", "qsgd:4", "natural", "sign", "topk:0.05", "threshold:1.0", "randk:0.05"]


def make(kind, **config):
    shard_map = cut_for(MODEL, 2, config=ParamServerConfig(), optimizer="adamw")
    settings = CompressionConfig(min_elements=100, **config)
    codec = PushCodec(CompressRule.parse(kind), settings, model=MODEL, seed=3, num_shares=2)
    sizes = [shard.numel for shard in shard_map.shards]
    spans = [slice(sum(sizes[:place]), sum(sizes[: place + 1])) for place in range(len(sizes))]
    return codec, PushCompressor(codec, shard_map), shard_map, spans


def gradient(seed=0):
    return torch.randn(sum(spec.numel for spec in MODEL.values()), generator=torch.Generator().manual_seed(seed))


def decoded(codec, shard_map, sent):
    return torch.cat(
        [codec.unpack(own, packed, shard) for shard, (packed, own) in zip(shard_map.shards, sent, strict=True)]
    )


@pytest.mark.parametrize("kind", KINDS)
def test_bytes_are_those_of_the_formula_and_small_tensors_go_as_they_are(kind):
    codec, worker, shard_map, spans = make(kind)
    given = gradient()
    sent = worker.encode(given, spans, 0)
    for shard, (packed, payload) in zip(shard_map.shards, sent, strict=True):
        plain = sum(4 * piece.numel for piece, is_packed in codec.pieces(shard) if not is_packed)
        assert payload.numel() == sum(packed.sizes) + plain
        if kind.startswith("threshold"):
            assert payload.numel() < codec.num_bytes(shard)
        else:
            assert payload.numel() == codec.num_bytes(shard)
    found, place = decoded(codec, shard_map, sent), 0
    for shard in shard_map.shards:
        for piece, is_packed in codec.pieces(shard):
            assert is_packed == (piece.name in ("matrix", "wide"))
            own = slice(place + piece.offset, place + piece.offset + piece.numel)
            assert torch.equal(found[own], given[own]) != is_packed or kind == "fp16"
        place += shard.numel
    assert any(piece.start for shard in shard_map.shards for piece in shard.pieces), "a tensor is cut between shards"


@pytest.mark.parametrize("kind", ["topk:0.05", "threshold:1.0", "randk:0.05", "int4"])
def test_what_is_sent_and_what_is_kept_are_what_was_given(kind):
    codec, worker, shard_map, spans = make(kind)
    total, given = torch.zeros_like(gradient()), torch.zeros_like(gradient()).double()
    for step in range(5):
        total = total.double() + decoded(codec, shard_map, worker.encode(gradient(step), spans, 2 * step)).double()
        worker.settle(is_kept=True)
        given += gradient(step).double()
    # One more push of nothing, of everything: what was kept comes with it.
    kept = torch.zeros_like(given)
    place = 0
    for shard in shard_map.shards:
        for piece in shard.pieces:
            if piece.key in worker._residual:
                kept[place + piece.offset : place + piece.offset + piece.numel] = worker._residual[piece.key].double()
        place += shard.numel
    assert torch.allclose(total + kept, given, atol=1e-5) and float(kept.abs().max()) > 0.1


def test_a_push_that_is_not_kept_leaves_the_residual_as_it_was():
    _codec, worker, _shard_map, spans = make("int4")
    worker.encode(gradient(0), spans, 0)
    worker.settle(is_kept=True)
    first = worker.encode(gradient(1), spans, 2)
    worker.settle(is_kept=False)
    again = worker.encode(gradient(1), spans, 2)
    assert all(torch.equal(one[1], other[1]) for one, other in zip(first, again, strict=True))
    worker.settle(is_kept=True)
    after = worker.encode(gradient(1), spans, 2)
    assert not all(torch.equal(one[1], other[1]) for one, other in zip(first, after, strict=True))


def test_random_choices_belong_to_the_work_unit_and_the_slice():
    _codec, worker, _, spans = make("randk:0.05")
    first, same, other = (worker.encode(gradient(), spans, unit) for unit in (4, 4, 5))
    assert all(torch.equal(one[1], two[1]) for one, two in zip(first, same, strict=True))
    assert not all(torch.equal(one[1], two[1]) for one, two in zip(first, other, strict=True))


def test_steps_before_the_first_compressed_one_go_as_they_are():
    _, worker, _, spans = make("int8@3")
    assert worker.encode(gradient(), spans, 5) is None and worker.encode(gradient(), spans, 6) is not None


def spoil(packed, payload, **changes):
    return msgspec.structs.replace(packed, **changes), payload


@pytest.mark.parametrize("kind", ["int8", "topk:0.05", "threshold:1.0"])
def test_what_is_malformed_is_refused_before_anything_is_decoded(kind):
    codec, worker, shard_map, spans = make(kind)
    shard = shard_map.shards[0]
    packed, payload = worker.encode(gradient(), spans, 0)[0]
    cases = {
        "this run has compress": spoil(packed, payload, codec="int4"),
        "compressed tensors came": spoil(packed, payload, sizes=(*packed.sizes, 8)),
        "bytes": spoil(packed, payload, sizes=tuple(size + 3 for size in packed.sizes)),
        "bytes are due": spoil(packed, payload[:-4]),
    }
    cases["is"] = spoil(packed, payload, sizes=tuple(-8 for _ in packed.sizes))
    cases["came"] = spoil(packed, payload, sizes=tuple(1 << 60 for _ in packed.sizes))
    for words, (header, own) in cases.items():
        with pytest.raises(WrongGradient, match=words):
            codec.unpack(own, header, shard)
    assert codec.unpack(payload, packed, shard).shape == (shard.numel,)


@pytest.mark.parametrize("wrong", [-1, 10**6])
def test_a_place_that_is_not_in_the_slice_is_refused(wrong):
    codec, worker, shard_map, spans = make("topk:0.05")
    for shard, (packed, payload) in zip(shard_map.shards, worker.encode(gradient(), spans, 0), strict=True):
        start = 0
        for piece, is_packed in codec.pieces(shard):
            if is_packed:
                half = packed.sizes[0] // 2
                spoilt = payload.clone()
                spoilt[start + half : start + half + 4] = torch.tensor([wrong], dtype=torch.int32).view(torch.uint8)
                with pytest.raises(WrongGradient, match="must increase within"):
                    codec.unpack(spoilt, packed, shard)
                break
            start += 4 * piece.numel


@pytest.mark.parametrize(
    ("plan", "words"),
    [
        ("ps=2 workers=2 compress=powersgd:2", ["powersgd:2", "pushes one at a time", "compress=int8"]),
        ("ps=2 workers=2 compress=dgc:0.01", ["dgc:0.01", "its momentum"]),
        ("ps=2 workers=2 compress=onebit@5", ["onebit@5", "momentum"]),
        ("ps=2 workers=2 update=lbfgs compress=int8", ["update=lbfgs", "line search"]),
        ("ps=2 workers=2 tp=2 compress=int8", ["tp=2"]),
    ],
)
def test_plans_that_cannot_push_compressed_are_refused(plan, words):
    with pytest.raises(RequestError) as refusal:
        Plan.parse(plan).check()
    assert all(word in str(refusal.value) for word in words), refusal.value
    Plan.parse("ps=2 workers=2 compress=int8").check()


def test_rows_that_are_counted_are_not_compressed():
    plan = Plan.parse("ps=2 workers=2 update=ssp:2 compress=int8")
    config = ParamServerConfig(hot="measured", cache_staleness=1)
    found = "\n".join(
        rule_problems(config, plan, global_batch=8, micro_batch=None, precision="float32", weight_decay=0.0)
    )
    assert "paramserver.hot measured" in found and "compress=int8" in found


def test_the_header_is_a_message_of_known_types():
    text = msgspec.json.encode(Packed(codec="int8", unit=3, sizes=(1, 2)))
    assert msgspec.json.decode(text, type=Packed).sizes == (1, 2)
    with pytest.raises(msgspec.ValidationError):
        msgspec.json.decode(text.replace(b"[1,2]", b'["1",2]'), type=Packed)
