"""Tensors in, the same tensors out, of every type; and pieces joined."""

import pytest
import torch
from safetensors.torch import load_file

from shoal.checkpoint.commit import begin, commit, write_checkpoint, write_part
from shoal.checkpoint.files import NotWhole
from shoal.checkpoint.manifest import Manifest, Piece, TensorEntry
from shoal.checkpoint.pieces import as_blob, dtype_name, from_bytes
from shoal.checkpoint.reader import read
from shoal.checkpoint.shard import ITEM_BYTES
from shoal.core.errors import RequestError

torch.set_num_threads(1)

TYPES = [
    torch.bool, torch.uint8, torch.int8, torch.int16, torch.uint16, torch.int32, torch.uint32, torch.int64, torch.uint64,
    torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.float8_e4m3fn, torch.float8_e5m2, torch.complex64,
]  # fmt: skip


def bits(tensor):
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def some(dtype, shape):
    draw = torch.randint(0, 2 if dtype is torch.bool else 120, (*shape, dtype.itemsize), dtype=torch.uint8)
    return draw.reshape(-1).view(dtype).reshape(shape)


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_every_type_and_shape_survives_bit_for_bit(tmp_path, dtype):
    tensors = {"many": some(dtype, (3, 5)), "one": some(dtype, ()), "none": torch.empty((0, 4), dtype=dtype)}
    path = write_checkpoint(
        tmp_path, step=1, ranks=[{name: as_blob(tensor) for name, tensor in tensors.items()}], values={}
    )
    loaded = read(path).tensors
    for name, tensor in tensors.items():
        assert loaded[name].dtype == dtype and loaded[name].shape == tensor.shape
        assert torch.equal(bits(loaded[name]), bits(tensor))
    theirs = load_file(path / "rank-000.safetensors")
    assert torch.equal(bits(theirs["many"]), bits(tensors["many"]))


def test_every_name_of_a_type_is_known_on_both_sides():
    assert {dtype_name(dtype) for dtype in TYPES} == set(ITEM_BYTES)
    assert all(ITEM_BYTES[dtype_name(dtype)] == dtype.itemsize for dtype in TYPES)
    with pytest.raises(ValueError, match="complex128"):
        dtype_name(torch.complex128)


def test_what_is_read_can_be_written_to(tmp_path):
    tensor = from_bytes(bytearray(b"\0" * 8), "F32", (2,))
    tensor += 1
    assert tensor.tolist() == [1.0, 1.0]


def test_only_what_is_wanted_is_loaded_and_what_is_used_is_checked(tmp_path):
    shares = [{"weights/a": as_blob(torch.ones(3000))}, {"optimizer/a": as_blob(torch.ones(3000))}]
    path = write_checkpoint(tmp_path, step=1, ranks=shares, values={"x": [1]}, chunk_bytes=4096)
    (path / "rank-001.safetensors").unlink()
    checkpoint = read(path, wanted=lambda name: name.startswith("weights/"))
    assert list(checkpoint.tensors) == ["weights/a"] and checkpoint.values == {"x": [1]} and checkpoint.step == 1
    with pytest.raises(NotWhole, match=r"step-00000001 is not whole: rank-001.safetensors is missing"):
        read(path)
    with pytest.raises(RequestError, match="no such checkpoint"):
        read(tmp_path / "nowhere")


@pytest.mark.parametrize("cut", [0, 1])
def test_pieces_of_several_files_become_one_tensor(tmp_path, cut):
    whole = torch.arange(24.0).reshape(4, 6)
    sizes = [1, whole.shape[cut] - 1]
    draft = begin(tmp_path, 1)
    parts, pieces, start = [], [], 0
    for rank, piece in enumerate(whole.split(sizes, dim=cut)):
        parts.append(write_part(draft, rank, {"a": as_blob(piece.contiguous())}))
        where = tuple(start if dim == cut else 0 for dim in range(2))
        pieces.append(Piece(file=parts[-1].file, key="a", start=where, shape=tuple(piece.shape)))
        start += piece.shape[cut]
    manifest = Manifest(
        id=draft.id,
        step=1,
        world_size=2,
        plan="dp=2",
        tensors={"a": TensorEntry(dtype="F32", shape=(4, 6), pieces=tuple(pieces))},
        files={part.file: part.entry for part in parts},
        values={},
    )
    commit(draft, manifest)
    assert torch.equal(read(draft.final).tensors["a"], whole)
