"""Checkpoints made to do harm: they run nothing, lead nowhere, take no memory and are refused within a second.

One kind takes longer: a manifest crowded with pieces that agree with each other is looked through piece by piece, as an honest
one of that size is. Its time grows with the number of pieces and no faster, and the number is bounded.

The attacker is taken to know the format: every sum that could be made to agree does agree.
"""

import json
import os
import pickle
import subprocess
import sys
import time
from pathlib import Path

import pytest
from safetensors.torch import load_file

from shoal.checkpoint.files import NotWhole
from shoal.checkpoint.manifest import MAX_PIECES, decode
from shoal.checkpoint.reader import read
from shoal.checkpoint.shard import lay_out
from shoal.checkpoint.whole import newest_whole, verify
from support.checkpoint.forged import SHARES, forge, forge_shard, make, manifest_tree
from support.processes.instruction_count import instructions

SHARD = "rank-000.safetensors"
TESTS = Path(__file__).resolve().parents[1]
CANARY = "canary"


class Bomb:
    """Makes a file when it is unpickled."""

    def __init__(self, path):
        self.path = str(path)

    def __reduce__(self):
        return (open, (self.path, "w"))


def edit(path, **changes):
    forge(path, {**manifest_tree(path), **changes})


def edit_tensor(path, name="weights/a", **changes):
    tree = manifest_tree(path)
    tree["tensors"][name].update(changes)
    forge(path, tree)


def edit_piece(path, name="weights/a", **changes):
    tree = manifest_tree(path)
    tree["tensors"][name]["pieces"][0].update(changes)
    forge(path, tree)


def edit_cut(path, *changes):
    """Change the two pieces of the tensor that is cut by columns; None takes one away."""
    tree = manifest_tree(path)
    pieces = [
        piece | change for piece, change in zip(cut_of(tree)["pieces"], changes, strict=True) if change is not None
    ]
    cut_of(tree)["pieces"] = pieces
    forge(path, tree)


def cut_of(tree):
    return tree["tensors"]["optimizer/a/cut"]


def rename_file(path, new):
    """Point the manifest at another file, with the size and sums of a real one."""
    tree = manifest_tree(path)
    tree["files"][new] = tree["files"].pop(SHARD)
    for tensor in tree["tensors"].values():
        for piece in tensor["pieces"]:
            piece["file"] = new if piece["file"] == SHARD else piece["file"]
    forge(path, tree)


def header_of(data):
    length = int.from_bytes(data[:8], "little")
    return json.loads(data[8 : 8 + length]), data[8 + length :]


def with_header(header, data):
    text = header if isinstance(header, bytes) else json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text + data


def pickle_for_shard(path):
    forge_shard(path, SHARD, pickle.dumps(Bomb(path.parent / CANARY)))


def pickle_for_manifest(path):
    (path / "manifest.json").write_bytes(pickle.dumps(Bomb(path.parent / CANARY)))


def pickle_inside_manifest(path):
    edit(path, values={"rng": pickle.dumps(Bomb(path.parent / CANARY), protocol=0).decode()}, version="pickle")


def climbing_name(path):
    (path.parent / SHARD).write_bytes((path / SHARD).read_bytes())
    rename_file(path, f"../{SHARD}")


def absolute_name(path):
    rename_file(path, str(path / SHARD))


def linked_shard(path):
    (path / SHARD).rename(path.parent / "elsewhere")
    (path / SHARD).symlink_to(path.parent / "elsewhere")


def linked_manifest(path):
    (path / "manifest.json").rename(path.parent / "elsewhere.json")
    (path / "manifest.json").symlink_to(path.parent / "elsewhere.json")


def linked_folder(path):
    path.rename(path.parent / "elsewhere")
    path.symlink_to(path.parent / "elsewhere")


def pipe_for_shard(path):
    (path / SHARD).unlink()
    os.mkfifo(path / SHARD)


def pipe_for_manifest(path):
    (path / "manifest.json").unlink()
    os.mkfifo(path / "manifest.json")


def folder_for_shard(path):
    (path / SHARD).unlink()
    (path / SHARD).mkdir()


def giant_header(path):
    _, data = header_of((path / SHARD).read_bytes())
    forge_shard(path, SHARD, (100 * 2**30).to_bytes(8, "little") + b"{}" + data)


def long_header(path):
    _, data = header_of((path / SHARD).read_bytes())
    forge_shard(path, SHARD, with_header(b"{" + b" " * 2**24 + b"}", data))


def overlapping_tensors(path):
    header, data = header_of((path / SHARD).read_bytes())
    header["weights/empty"] = {"dtype": "F32", "shape": [1, 3], "data_offsets": [0, 12]}
    forge_shard(path, SHARD, with_header(header, data))


def tensors_in_one_place(path):
    tree = manifest_tree(path)
    tree["tensors"]["weights/b"] = tree["tensors"]["weights/a"]
    forge(path, tree)


def repeated_header_key(path):
    header, data = header_of((path / SHARD).read_bytes())
    text = json.dumps(header, separators=(",", ":"))
    forge_shard(path, SHARD, with_header((text[:-1] + "," + text[1:]).encode(), data))


def repeated_manifest_key(path):
    text = (path / "manifest.json").read_bytes().decode()
    forge(path, text=('{"sum": "' + "0" * 16 + text[25:-1] + ', "step": 20}').encode())


def deep_nesting(path):
    forge(path, text=b'{"sum": "' + b"0" * 16 + b'", "values": ' + b"[" * 10**6 + b"]" * 10**6 + b"}")


def deep_values(path):
    forge(path, text=deep_text(path))


def deep_text(path):
    tree = manifest_tree(path)
    tree["values"] = "@"
    text = json.dumps({**tree, "sum": "0" * 16})
    return text.replace('"@"', '{"a": ' * 900 + "1" + "}" * 900).encode()


def huge_manifest(path):
    with (path / "manifest.json").open("r+b") as file:
        file.truncate(50 * 2**30)


def crowded_manifest(path):
    forge(path, text=b'{"sum": "' + b"0" * 16 + b'", "values": [' + b"{}," * (8 * 2**20) + b"{}]}")


def crowded_within_the_limit(path):
    forge(path, text=b'{"sum": "' + b"0" * 16 + b'", "values": [' + b"{}," * 490_000 + b"{}]}")


def long_number(path):
    forge(path, text=b'{"sum": "' + b"0" * 16 + b'", "step": ' + b"9" * (8 * 2**20) + b"}")


def huge_shape(path):
    edit_tensor(path, shape=[2**40, 2**40])
    edit_piece(path, shape=[2**40, 2**40])


def huge_file_size(path):
    tree = manifest_tree(path)
    tree["files"][SHARD]["size"] = 2**50
    forge(path, tree)


def sparse_giant(path):
    """A file of 50 GiB that takes no disk, with everything right but the sums: what is only declared may take no memory."""
    shape = [50 * 2**30 // 8, 2]
    edit_tensor(path, shape=shape)
    edit_piece(path, shape=shape)
    layout = lay_out({**SHARES[0], "weights/a": ("F32", tuple(shape))})
    with (path / SHARD).open("wb") as file:
        file.write(layout.header)
        file.truncate(layout.size)
    tree = manifest_tree(path)
    chunk = 64 * 2**20
    tree["files"][SHARD] = {"size": layout.size, "chunk_bytes": chunk, "xxh3": ["0" * 16] * -(-layout.size // chunk)}
    forge(path, tree)


def many_pieces(count, num_dims):
    """One tensor in ``count`` pieces of one element each."""

    def forge_many(path):
        tree = manifest_tree(path)
        rest = [0] * (num_dims - 1)
        pieces = [
            {"file": SHARD, "key": f"p{index}", "start": [index, *rest], "shape": [1] * num_dims}
            for index in range(count)
        ]
        tree["tensors"] = {"a": {"dtype": "U8", "shape": [count] + [1] * (num_dims - 1), "pieces": pieces}}
        forge(path, tree)

    return forge_many


def too_many_pieces(path):
    many_pieces(MAX_PIECES + 1, 1)(path)


def pieces_in_too_many_dims(path):
    """Each piece has 2**32 corners: a check that walked over them would never end."""
    tree = manifest_tree(path)
    pieces = [{"file": SHARD, "key": f"p{end}", "start": [end] * 32, "shape": [1] * 32} for end in (0, 1)]
    pieces[1]["shape"] = [2**61 - 1] + [1] * 31
    tree["tensors"] = {"a": {"dtype": "U8", "shape": [2**16] + [2] * 31, "pieces": pieces}}
    forge(path, tree)


def corners_without_end(path):
    """Two pieces with the right number of elements, cut along all of 32 dims."""
    tree = manifest_tree(path)
    pieces = [{"file": SHARD, "key": f"p{end}", "start": [end] * 32, "shape": [1] * 32} for end in (0, 1)]
    tree["tensors"] = {"a": {"dtype": "U8", "shape": [2] + [1] * 31, "pieces": pieces}}
    forge(path, tree)


def huge_piece(path):
    edit_cut(path, {"shape": [8, 2**61]}, {})


HOSTILE = [
    pickle_for_shard, pickle_for_manifest, pickle_inside_manifest,
    climbing_name, absolute_name, linked_shard, linked_manifest, linked_folder,
    pipe_for_shard, pipe_for_manifest, folder_for_shard,
    giant_header, long_header, overlapping_tensors, tensors_in_one_place, repeated_header_key, repeated_manifest_key,
    deep_nesting, deep_values, huge_manifest, crowded_manifest, crowded_within_the_limit, long_number,
    huge_shape, huge_file_size, sparse_giant,
    too_many_pieces, pieces_in_too_many_dims, corners_without_end, huge_piece,
]  # fmt: skip

FIELDS = {
    "a negative dim": lambda path: edit_tensor(path, shape=[-300, -2]),
    "a dim that is a fraction": lambda path: edit_tensor(path, shape=[300.5, 2]),
    "a dim that is true": lambda path: edit_tensor(path, shape=[True, 2]),
    "another shape": lambda path: edit_tensor(path, shape=[2, 300]),
    "an unknown type": lambda path: edit_tensor(path, dtype="OBJECT"),
    "another type": lambda path: edit_tensor(path, dtype="I32"),
    "no pieces": lambda path: edit_tensor(path, pieces=[]),
    "a piece elsewhere": lambda path: edit_piece(path, start=[1, 0]),
    "pieces that overlap": lambda path: edit_cut(path, {}, {"start": [0, 2]}),
    "pieces that overlap and reach too far": lambda path: edit_cut(path, {"shape": [8, 4]}, {}),
    "a piece twice": lambda path: edit_cut(path, {}, {"start": [0, 0]}),
    "a piece too few": lambda path: edit_cut(path, {}, None),
    "a piece beyond the tensor": lambda path: edit_cut(path, {}, {"start": [0, 4]}),
    "a piece far beyond the tensor": lambda path: edit_cut(path, {}, {"start": [2**61, 3]}),
    "a piece before the tensor": lambda path: edit_cut(path, {"start": [0, -3]}, {}),
    "a piece with a dim too many": lambda path: edit_cut(path, {}, {"start": [0, 3, 0], "shape": [8, 3, 1]}),
    "a piece turned on its side": lambda path: edit_cut(path, {}, {"shape": [3, 8]}),
    "a piece without elements": lambda path: edit_cut(path, {"shape": [8, 6]}, {"shape": [0, 3]}),
    "pieces in another order": lambda path: edit_cut(path, {"start": [0, 3]}, {"start": [0, 0]}),
    "a piece in another's place": lambda path: edit_cut(path, {}, {"key": "optimizer/a/exp_avg"}),
    "pieces of another file": lambda path: edit_cut(path, {}, {"file": SHARD}),
    "a piece in no file": lambda path: edit_piece(path, file="rank-009.safetensors"),
    "a piece under another key": lambda path: edit_piece(path, key="weights/z"),
    "a name for the header's own field": lambda path: edit_piece(path, key="__metadata__"),
    "a step that is text": lambda path: edit(path, step="20"),
    "a newer version": lambda path: edit(path, version=2),
    "another format": lambda path: edit(path, format="zip"),
    "an id that is a path": lambda path: edit(path, id="../../etc/passwd"),
    "values that are a list": lambda path: edit(path, values=[1]),
    "a number that has no name": lambda path: edit(path, values={"x": {"$float": "__import__"}}),
    "a field too many": lambda path: edit(path, run="code"),
}


def refuse(path, root):
    """The checkpoint is refused by every reader, by name, and the older one is used; the seconds of the slower reader.

    Seconds of this process: on a crowded machine others take their share of the wall's. A reader that waits for something runs
    into the time limit of the test.
    """
    started = time.process_time()
    found = newest_whole(root)
    seconds = time.process_time() - started
    with pytest.raises(NotWhole):
        read(path)
    seconds = max(seconds, time.process_time() - started - seconds)
    assert found.path == root / "step-00000010"
    [(refused, reason)] = found.refused
    assert refused == path and reason and len(reason) < 1000
    assert not (root / CANARY).exists()
    return seconds


@pytest.fixture(scope="module")
def canary_works(tmp_path_factory):
    """The bomb does go off where something unpickles it; a canary that could not sing would prove nothing."""
    path = tmp_path_factory.mktemp("canary") / CANARY
    pickle.loads(pickle.dumps(Bomb(path))).close()
    assert path.exists()


@pytest.mark.parametrize("attack", HOSTILE, ids=lambda attack: attack.__name__.replace("_", " "))
def test_a_hostile_checkpoint_is_refused(tmp_path, attack, canary_works):
    make(tmp_path, 10)
    path = make(tmp_path, 20)
    attack(path)
    assert refuse(path, tmp_path) < 1.0


@pytest.mark.parametrize("field", FIELDS)
def test_a_manifest_that_does_not_agree_with_itself_is_refused(tmp_path, field):
    make(tmp_path, 10)
    path = make(tmp_path, 20)
    FIELDS[field](path)
    assert refuse(path, tmp_path) < 1.0


def work_to_refuse(root, count):
    path = make(root / str(count), 20)
    many_pieces(count, 2)(path)
    data = (path / "manifest.json").read_bytes()

    def refuse_it():
        with pytest.raises(NotWhole, match="its tensors need"):
            decode(data)

    return instructions(refuse_it)


def test_a_crowd_of_pieces_that_agree_takes_work_in_proportion(tmp_path):
    """Sixteen times the pieces would take 256 times the work if each were compared with each."""
    assert work_to_refuse(tmp_path, 2**11) < 17 * work_to_refuse(tmp_path, 2**7)


def test_the_forger_of_these_tests_can_make_a_whole_one(tmp_path):
    path = make(tmp_path, 20)
    edit(path, plan="dp=4", values={"x": 1})
    forge_shard(path, SHARD, (path / SHARD).read_bytes())
    assert verify(path) == [] and read(path).values == {"x": 1}
    assert load_file(path / SHARD)


MEASURE = """
import resource, sys
from pathlib import Path
from shoal.checkpoint.shard import lay_out
from shoal.checkpoint.whole import verify
make_whole = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
for path in sys.argv[1:]:
    assert verify(Path(path)), path
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - make_whole)
"""


def test_all_of_them_together_take_little_memory(tmp_path):
    paths = []
    for attack in HOSTILE:
        path = make(tmp_path / attack.__name__, 20)
        attack(path)
        paths.append(str(path))
    done = subprocess.run(
        [sys.executable, "-c", MEASURE, *paths], capture_output=True, text=True, timeout=60, check=True
    )
    # The largest honest cost is parsing half a million empty objects, which is within the limit on values.
    assert int(done.stdout) * 1024 < 200 * 2**20
