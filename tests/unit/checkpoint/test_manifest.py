"""The manifest: what it says, and that it believes nothing. Hostile ones are in tests/chaos."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.checkpoint.files import NotWhole, draw_id
from shoal.checkpoint.manifest import Manifest, Part, decode, decode_part, encode, encode_part, merge, whole_tensor
from shoal.checkpoint.shard import FileEntry, lay_out
from shoal.checkpoint.strictjson import pack, unpack
from support.checkpoint.forged import forge, make, manifest_tree

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text().filter(lambda key: key != "$float"), inner),
    max_leaves=20,
)


def entry(size, chunk_bytes=512):
    return FileEntry(size=size, chunk_bytes=chunk_bytes, sums=("0123456789abcdef",) * -(-size // chunk_bytes))


def part(rank, **shapes):
    file = f"rank-{rank:03d}.safetensors"
    tensors = {name: whole_tensor(file, name, "F32", shape) for name, shape in shapes.items()}
    return Part(
        file=file, entry=entry(lay_out({name: ("F32", shape) for name, shape in shapes.items()}).size), tensors=tensors
    )


def manifest(values=None, **changes):
    merged = merge([part(0, a=(2, 3)), part(1, b=())], id=draw_id(), step=7, plan="dp=2", values=values or {})
    return Manifest(**{**vars(merged), **changes})


@given(st.dictionaries(st.text().filter(lambda key: key != "$float"), VALUES, max_size=4))
def test_a_manifest_survives_its_bytes_with_every_value(values):
    first = manifest(values)
    second = decode(encode(first))
    assert repr(dict(second.values)) == repr(dict(first.values))
    assert vars(second) | {"values": None} == vars(first) | {"values": None}


def test_numbers_that_json_does_not_have_are_plain_json_in_the_file():
    data = encode(manifest({"best": math.inf, "loss": math.nan, "low": -math.inf}))
    assert b"Infinity" not in data and b"NaN" not in data
    values = decode(data).values
    assert values["best"] == math.inf and math.isnan(values["loss"]) and values["low"] == -math.inf


@pytest.mark.parametrize("value", [{1: 2}, {"a": object()}, {"$float": "inf"}, {"a": {3}}, {"a": b"x"}])
def test_what_json_cannot_hold_is_refused(value):
    with pytest.raises(ValueError):
        pack(value)


def test_a_packed_value_shares_nothing():
    value = {"list": [1, (2, 3)]}
    copy = unpack(pack(value))
    value["list"].append(4)
    assert copy == {"list": [1, [2, 3]]}


def test_a_part_survives_its_bytes():
    assert decode_part(encode_part(part(3, a=(2,), b=(0, 4)))) == part(3, a=(2,), b=(0, 4))
    for bad in (b"", b"[]", b"{}", b'{"file": "../x", "entry": {}, "tensors": {}}'):
        with pytest.raises(NotWhole, match="a rank's part"):
            decode_part(bad)


def test_two_ranks_that_wrote_one_tensor_are_named():
    with pytest.raises(NotWhole, match=r"rank-001.safetensors and rank-000.safetensors both hold the tensor 'a'"):
        merge([part(0, a=(2,)), part(1, a=(2,))], id=draw_id(), step=1, plan="dp=2", values={})


def test_any_single_byte_that_changes_is_seen():
    data = bytearray(encode(manifest({"x": 1})))
    for index in range(len(data)):
        data[index] ^= 0x20
        with pytest.raises(NotWhole):
            decode(bytes(data))
        data[index] ^= 0x20
    decode(bytes(data))


def pieces(*spans, shape, cut=0):
    """A tensor in pieces along ``cut``: each span is (start, extent)."""
    made = []
    for index, (start, extent) in enumerate(spans):
        made.append(
            {
                "file": "rank-000.safetensors",
                "key": f"piece{index}",
                "start": [start if dim == cut else 0 for dim in range(len(shape))],
                "shape": [extent if dim == cut else size for dim, size in enumerate(shape)],
            }
        )
    return {"dtype": "F32", "shape": list(shape), "pieces": made}


def forge_pieces(tmp_path, tensor):
    """A checkpoint whose only tensor is in pieces; sizes agree, so that only the pieces can be wrong."""
    path = make(tmp_path, 1)
    tree = manifest_tree(path)
    content = {piece["key"]: ("F32", tuple(piece["shape"])) for piece in tensor["pieces"]}
    size = lay_out(content).size
    tree["files"] = {"rank-000.safetensors": {"size": size, "chunk_bytes": 512, "xxh3": ["0" * 16] * -(-size // 512)}}
    tree["tensors"] = {"a": tensor}
    forge(path, tree)
    return (path / "manifest.json").read_bytes()


@pytest.mark.parametrize("cut", [0, 1])
def test_pieces_side_by_side_are_a_tensor(tmp_path, cut):
    assert len(decode(forge_pieces(tmp_path, pieces((0, 2), (2, 4), shape=(6, 6), cut=cut))).tensors["a"].pieces) == 2


@pytest.mark.parametrize(
    "spans",
    [[(0, 2), (3, 3)], [(0, 3), (2, 4)], [(0, 2), (2, 3)], [(2, 4), (0, 2)], [(0, 4), (4, 4)], [(1, 6)]],
    ids=str,
)
def test_gaps_overlaps_and_wrong_order_are_refused(tmp_path, spans):
    with pytest.raises(NotWhole, match="pieces of 'a'"):
        decode(forge_pieces(tmp_path, pieces(*spans, shape=(6, 6))))
