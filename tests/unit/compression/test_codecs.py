"""What every codec promises: its bytes, its bits under any cut between blocks, zeros, and that bad numbers do not arrive as good
ones."""

import itertools

import pytest
import torch

from shoal.compression.build import build_codec, has_residual
from shoal.compression.codec import CHUNK, nbytes, pack, unpack
from shoal.compression.config import CompressionConfig
from shoal.core.compressrule import CompressRule

WORDS = [
    "fp16",
    "bf16",
    "fp8",
    "int8",
    "int4",
    "int8:24",
    "topk:0.1",
    "randk:0.3",
    "sign",
    "qsgd:2",
    "qsgd:4",
    "qsgd:8",
    "natural",
]
BLOCKED = ["fp16", "bf16", "fp8", "int8", "int4", "sign", "qsgd:2", "qsgd:4", "natural", "randk:0.125"]
SIZES = [(1, 0), (7, 0), (128, 0), (1000, 0), (1000, 77), (5, 126), (3, 2**33 - 1), (CHUNK + 1029, 3)]


def codec_of(word, **settings):
    return build_codec(CompressRule.parse(word), CompressionConfig(**settings))


def values(numel, seed=0):
    return torch.randn(numel, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("word", WORDS)
@pytest.mark.parametrize(("numel", "offset"), SIZES)
def test_payload_is_the_formula_and_survives_the_wire(word, numel, offset):
    codec, flat = codec_of(word), values(numel)
    before = flat.clone()
    encoded = codec.encode(flat, key=5, offset=offset)
    assert torch.equal(flat, before)
    assert encoded.nbytes == nbytes(codec, numel, offset)
    assert tuple((t.dtype, t.numel()) for t in encoded.payload) == codec.fields(numel, offset)
    received = unpack(codec, pack(encoded), numel, key=5, offset=offset)
    decoded = codec.decode(encoded, numel)
    assert decoded.shape == (numel,) and decoded.dtype == torch.float32
    assert torch.equal(codec.decode(received, numel), decoded)


def test_bytes_by_hand():
    assert nbytes(codec_of("int8"), 1000) == 1000 + 4 * 8
    assert nbytes(codec_of("int4"), 1001) == 501 + 4 * 8
    assert nbytes(codec_of("int8"), 4, offset=126) == 4 + 4 * 2
    assert nbytes(codec_of("topk:0.01"), 1000) == 8 * 10
    assert nbytes(codec_of("randk:0.01"), 1000) == 4 * 10
    assert nbytes(codec_of("sign"), 2049) == 257 + 4 * 3
    assert nbytes(codec_of("natural"), 9) == 9 + 2
    assert nbytes(codec_of("qsgd:2"), 9) == 3 + 4


def test_a_buffer_of_another_size_is_refused():
    with pytest.raises(ValueError, match="1032 bytes of 1000 elements, and there are 1031"):
        unpack(codec_of("int8"), torch.zeros(1031, dtype=torch.uint8), 1000)


@pytest.mark.parametrize("bad", [values(8).double(), values(8).view(2, 4), values(8)[::2]])
def test_what_is_not_flat_float32_is_refused(bad):
    with pytest.raises(ValueError, match="flat, contiguous float32"):
        codec_of("int8").encode(bad)


@pytest.mark.parametrize("word", BLOCKED)
@pytest.mark.parametrize("rounding", ["nearest", "keyed"])
def test_a_cut_between_blocks_changes_no_bit(word, rounding):
    codec, numel = codec_of(word, round=rounding), 3 * CHUNK + 700
    flat = values(numel)
    whole = codec.decode(codec.encode(flat, key=9), numel)
    cuts = [0, 1024, 5 * 1024, 65 * 1024, numel]
    parts = [codec.decode(codec.encode(flat[a:b].clone(), key=9, offset=a), b - a) for a, b in itertools.pairwise(cuts)]
    assert torch.equal(torch.cat(parts), whole)


@pytest.mark.parametrize("word", ["natural", "threshold:0.5", "fp16", "bf16"])
def test_codecs_without_blocks_may_be_cut_anywhere(word):
    codec, flat = codec_of(word), values(1001)
    whole = codec.decode(codec.encode(flat, key=9), 1001)
    parts = [codec.decode(codec.encode(flat[a:b].clone(), key=9, offset=a), b - a) for a, b in ((0, 333), (333, 1001))]
    assert torch.equal(torch.cat(parts), whole)


@pytest.mark.parametrize("word", [*WORDS, "threshold:0.1"])
@pytest.mark.parametrize("rounding", ["nearest", "keyed"])
def test_zeros_stay_zeros(word, rounding):
    codec = codec_of(word, round=rounding)
    decoded = codec.decode(codec.encode(torch.zeros(300), key=1), 300)
    assert torch.equal(decoded, torch.zeros(300))


@pytest.mark.parametrize(
    "word", ["fp16", "bf16", "fp8", "int8", "int4", "sign", "qsgd:4", "natural", "topk:0.01", "threshold:9"]
)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("place", [0, 130, 1299])
def test_what_is_not_finite_does_not_become_finite(word, bad, place):
    codec, flat = codec_of(word), values(1300)
    flat[place] = bad
    decoded = codec.decode(codec.encode(flat, key=1), 1300)
    assert not decoded[place].isfinite()
    if word in ("fp8", "int8", "int4"):
        assert decoded[place].isnan()
        # The other blocks are as they were.
        assert int(decoded.isnan().sum()) == min(128, 1300 - place // 128 * 128)


@pytest.mark.parametrize("word", ["bf16", "fp8", "int8", "int4", "sign", "qsgd:4", "natural", "topk:0.01"])
def test_the_largest_and_the_least_floats_stay_finite(word):
    codec = codec_of(word)
    largest, tiny = torch.zeros(256), torch.full((256,), 2.0**-149)
    largest[3] = 3.0e38
    for flat in (largest, tiny):
        assert bool(codec.decode(codec.encode(flat, key=1), 256).isfinite().all())


@pytest.mark.parametrize("word", [*WORDS, "threshold:1"])
def test_nothing_is_sent_of_nothing(word):
    codec = codec_of(word)
    assert codec.decode(codec.encode(torch.empty(0)), 0).shape == (0,)


def test_residual_is_the_methods_unless_told():
    rules = {word: CompressRule.parse(word) for word in ("int8", "int4", "topk:0.1", "natural", "dgc:0.1", "sign")}
    default = {word: has_residual(rule, CompressionConfig()) for word, rule in rules.items()}
    assert default == {"int8": False, "int4": True, "topk:0.1": True, "natural": False, "dgc:0.1": False, "sign": True}
    assert has_residual(rules["int8"], CompressionConfig(residual=True))
    assert build_codec(CompressRule.parse("powersgd:2"), CompressionConfig()) is None
