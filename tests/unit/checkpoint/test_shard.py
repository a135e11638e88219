"""One safetensors file, written and read chunk by chunk."""

import os

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load, load_file

from shoal.checkpoint.files import NotWhole, folder
from shoal.checkpoint.shard import Blob, lay_out, read_shard, write_shard
from support.checkpoint.forged import two_ranks

TENSORS = st.dictionaries(
    st.text(st.characters(codec="utf-8", exclude_categories=("C",)), min_size=1, max_size=8).filter(
        lambda name: name != "__metadata__"
    ),
    st.tuples(
        st.sampled_from(["F64", "F32", "BF16", "BOOL", "I64"]), st.lists(st.integers(0, 7), max_size=3).map(tuple)
    ),
    max_size=8,
)
ITEM = {"F64": 8, "F32": 4, "BF16": 2, "BOOL": 1, "I64": 8}


def some_bytes(dtype, shape, seed):
    count = ITEM[dtype] * int(torch.tensor(shape, dtype=torch.int64).prod()) if shape else ITEM[dtype]
    return bytes((seed + index) % (2 if dtype == "BOOL" else 251) for index in range(count))


@settings(max_examples=60, deadline=None)
@given(TENSORS, st.sampled_from([512, 520, 4096]))
def test_what_is_written_is_what_safetensors_and_we_read(tmp_path_factory, tensors, chunk_bytes):
    path = tmp_path_factory.mktemp("shard") / "rank-000.safetensors"
    data = {name: some_bytes(dtype, shape, number) for number, (name, (dtype, shape)) in enumerate(tensors.items())}
    blobs = {name: Blob(dtype, shape, memoryview(data[name])) for name, (dtype, shape) in tensors.items()}
    entry = write_shard(path, blobs, chunk_bytes=chunk_bytes)
    assert entry.size == path.stat().st_size and len(entry.sums) == -(-entry.size // chunk_bytes)

    theirs = load(path.read_bytes())
    assert {name: tuple(tensor.shape) for name, tensor in theirs.items()} == {
        name: shape for name, (_, shape) in tensors.items()
    }
    for name, tensor in theirs.items():
        assert tensor.reshape(-1).view(torch.uint8).numpy().tobytes() == data[name]
    with folder(path.parent) as fd:
        layout = lay_out(tensors)
        assert read_shard(fd, path.name, entry, layout, wanted=set(tensors), check_all=True) == data
        for name in tensors:
            assert read_shard(fd, path.name, entry, layout, wanted={name}, check_all=False) == {name: data[name]}


def test_wide_types_come_first_so_that_every_tensor_is_aligned():
    layout = lay_out({"b": ("BOOL", (3,)), "d": ("F64", (2,)), "h": ("BF16", (5,)), "f": ("F32", (1,))})
    assert [slot.key for slot in layout.slots] == ["d", "f", "h", "b"]
    assert all(slot.start % ITEM[slot.dtype] == 0 for slot in layout.slots) and len(layout.header) % 8 == 0


def test_many_small_tensors_go_out_in_few_calls_and_arrive_whole(tmp_path):
    # More tensors than the kernel takes buffers in one call.
    blobs = {f"t{index:05d}": Blob("U8", (3,), memoryview(bytes([index % 256] * 3))) for index in range(3000)}
    write_shard(tmp_path / "s", blobs)
    read = load_file(tmp_path / "s")
    assert all(read[name].numpy().tobytes() == blob.data.tobytes() for name, blob in blobs.items())


def test_a_file_that_exists_is_never_written_over(tmp_path):
    (tmp_path / "s").write_text("mine")
    (tmp_path / "link").symlink_to(tmp_path / "target")
    for name in ("s", "link"):
        with pytest.raises(FileExistsError):
            write_shard(tmp_path / name, two_ranks(1)[0])
    assert (tmp_path / "s").read_text() == "mine" and not (tmp_path / "target").exists()


def test_a_write_that_fails_leaves_no_file(tmp_path):
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    import signal

    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1024, hard))
    try:
        with pytest.raises(OSError, match="File too large"):
            write_shard(tmp_path / "s", two_ranks(1)[0], chunk_bytes=512)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, handler)
    assert os.listdir(tmp_path) == []


def test_only_chunks_that_hold_what_is_wanted_are_read(tmp_path):
    blobs = {"a": Blob("U8", (2000,), memoryview(b"a" * 2000)), "b": Blob("U8", (2000,), memoryview(b"b" * 2000))}
    path = tmp_path / "s"
    entry = write_shard(path, blobs, chunk_bytes=512)
    layout = lay_out({name: (blob.dtype, blob.shape) for name, blob in blobs.items()})
    with path.open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"x")
    with folder(tmp_path) as fd:
        assert read_shard(fd, "s", entry, layout, wanted={"a"}, check_all=False) == {"a": b"a" * 2000}
        for wanted, check_all in (({"b"}, False), ({"a"}, True), (set(), True)):
            with pytest.raises(NotWhole, match="have the sum"):
                read_shard(fd, "s", entry, layout, wanted=wanted, check_all=check_all)
