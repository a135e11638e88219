"""One flipped bit anywhere in a checkpoint is found, and the older checkpoint is used instead: 1,000 of 1,000."""

import numpy as np
import pytest

from shoal.checkpoint.files import NotWhole
from shoal.checkpoint.reader import read
from shoal.checkpoint.whole import newest_whole, verify
from support.checkpoint.forged import contents, expected, make

NUM_FLIPS = 1000


def flip(path, bit):
    with path.open("r+b") as file:
        file.seek(bit // 8)
        byte = file.read(1)[0]
        file.seek(bit // 8)
        file.write(bytes([byte ^ (1 << bit % 8)]))


def test_a_thousand_flips_are_a_thousand_found(tmp_path):
    older, newer = make(tmp_path, 10), make(tmp_path, 20)
    files = sorted(newer.iterdir())
    assert [path.name for path in files] == ["manifest.json", "rank-000.safetensors", "rank-001.safetensors"]
    sizes = [path.stat().st_size * 8 for path in files]
    draw = np.random.default_rng(2)
    by_file = dict.fromkeys(path.name for path in files) | {path.name: 0 for path in files}
    for number in range(NUM_FLIPS):
        # The file first, then the bit: a small manifest gets as many flips as a large shard.
        which = int(draw.integers(len(files)))
        bit = int(draw.integers(sizes[which]))
        flip(files[which], bit)
        found = newest_whole(tmp_path)
        assert found.path == older, f"flip {number}, bit {bit} of {files[which].name} was not seen"
        [(refused, reason)] = found.refused
        assert refused == newer and files[which].name in reason
        if number % 10 == 0:
            with pytest.raises(NotWhole, match="not whole"):
                read(newer)
        flip(files[which], bit)
        by_file[files[which].name] += 1
    assert min(by_file.values()) > NUM_FLIPS / 5
    # The flips were undone one by one; that the checkpoint is whole again shows that each refusal was for its flip.
    assert verify(newer) == [] and contents(newest_whole(tmp_path).path) == expected(20)


@pytest.mark.parametrize("name", ["manifest.json", "rank-000.safetensors", "rank-001.safetensors"])
def test_every_truncation_is_found(tmp_path, name):
    older, newer = make(tmp_path, 10), make(tmp_path, 20)
    data = (newer / name).read_bytes()
    for length in {0, 1, 7, 8, 9, len(data) // 2, len(data) - 1}:
        (newer / name).write_bytes(data[:length])
        found = newest_whole(tmp_path)
        assert found.path == older and name in found.refused[0][1]
    (newer / name).write_bytes(data + b"\0")
    assert newest_whole(tmp_path).path == older


def test_missing_swapped_and_foreign_files_are_found(tmp_path):
    older, newer = make(tmp_path, 10), make(tmp_path, 20)
    first, second = newer / "rank-000.safetensors", newer / "rank-001.safetensors"
    saved = first.read_bytes(), second.read_bytes()

    first.unlink()
    assert "rank-000.safetensors is missing" in newest_whole(tmp_path).refused[0][1]

    first.write_bytes(saved[1])
    second.write_bytes(saved[0])
    assert len(verify(newer)) == 2

    # The same shard of another save: right size, right header, other bytes.
    first.write_bytes((older / first.name).read_bytes())
    second.write_bytes(saved[1])
    assert first.stat().st_size == len(saved[0])
    assert len(verify(newer)) == 1 and "the manifest says" in verify(newer)[0]

    first.write_bytes(saved[0])
    assert verify(newer) == []


def test_a_folder_under_another_steps_name_is_refused(tmp_path):
    make(tmp_path, 10).rename(tmp_path / "step-00000099")
    assert verify(tmp_path / "step-00000099") == ["manifest.json is of step 10, the folder of step 99"]
