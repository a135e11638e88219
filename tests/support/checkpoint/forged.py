"""Small checkpoints for tests, made and read without torch, and forged ones with sums that agree."""

import json
import random
from pathlib import Path

import xxhash

from shoal.checkpoint.boxes import Box
from shoal.checkpoint.commit import write_checkpoint
from shoal.checkpoint.files import folder
from shoal.checkpoint.holdings import Cut
from shoal.checkpoint.manifest import decode
from shoal.checkpoint.shard import Blob, num_bytes, read_shard

CUTS = tuple(Cut(name="optimizer/a/cut", shape=(8, 6), box=Box((0, first), (8, 3))) for first in (0, 3))
"""One tensor of which each rank holds half of the columns."""
SHARES = (
    {"weights/a": ("F32", (300, 2)), "weights/empty": ("F32", (0, 3)), CUTS[0].key: ("F32", (8, 3))},
    {
        "optimizer/a/exp_avg": ("F32", (300,)),
        "optimizer/a/step": ("I64", ()),
        "rng/rank-001/torch": ("U8", (97,)),
        CUTS[1].key: ("F32", (8, 3)),
    },
)
"""What each of two ranks writes, by key."""


def two_ranks(seed):
    """The shares of two ranks, with other bytes for every seed."""
    draw = random.Random(seed)
    return [
        {
            name: Blob(dtype, shape, memoryview(draw.randbytes(num_bytes(dtype, shape))))
            for name, (dtype, shape) in share.items()
        }
        for share in SHARES
    ]


def make(root, step, *, seed=None, chunk_bytes=512):
    """A checkpoint of two ranks at ``step``; its folder."""
    chosen = step if seed is None else seed
    Path(root).parent.mkdir(parents=True, exist_ok=True)
    return write_checkpoint(
        Path(root),
        step=step,
        ranks=two_ranks(chosen),
        cuts=[[cut] for cut in CUTS],
        values={"seed": chosen, "loss": 1.5},
        plan="dp=2",
        chunk_bytes=chunk_bytes,
    )


def contents(path):
    """Everything a checkpoint holds, byte for byte, without its id."""
    manifest = decode((path / "manifest.json").read_bytes())
    layouts = manifest.layouts()
    found = {"step": manifest.step, "plan": manifest.plan, "values": dict(manifest.values)}
    with folder(path) as fd:
        for name, entry in manifest.files.items():
            slots = {slot.key: slot for slot in layouts[name].slots}
            read = read_shard(fd, name, entry, layouts[name], wanted=slots.keys(), check_all=True)
            found.update({key: (slots[key].dtype, slots[key].shape, bytes(data)) for key, data in read.items()})
    return found | {
        "pieces": {name: [piece.start for piece in entry.pieces] for name, entry in manifest.tensors.items()}
    }


def expected(step, *, seed=None):
    """What ``contents`` gives for ``make`` of the same arguments."""
    chosen = step if seed is None else seed
    found = {"step": step, "plan": "dp=2", "values": {"seed": chosen, "loss": 1.5}, "pieces": {}}
    cuts = {cut.key: cut for cut in CUTS}
    for share in two_ranks(chosen):
        found.update({key: (blob.dtype, blob.shape, bytes(blob.data)) for key, blob in share.items()})
        for key, blob in share.items():
            name, start = (cuts[key].name, cuts[key].box.start) if key in cuts else (key, (0,) * len(blob.shape))
            found["pieces"].setdefault(name, []).append(start)
    return found


def manifest_tree(path):
    return json.loads((path / "manifest.json").read_bytes())


def forge(path, tree=None, *, text=None):
    """Write a manifest as an attacker would: whatever it says, its own sum agrees."""
    data = text if text is not None else json.dumps({**tree, "sum": "0" * 16}).encode()
    assert data.startswith(b'{"sum": "' + b"0" * 16)
    (path / "manifest.json").write_bytes(data[:9] + xxhash.xxh3_64_hexdigest(data).encode() + data[25:])


def forge_shard(path, name, data):
    """Replace a shard and make the manifest's size and sums agree with it."""
    target = path / name
    target.unlink()
    target.write_bytes(data)
    tree = manifest_tree(path)
    chunk = tree["files"][name]["chunk_bytes"]
    sums = [xxhash.xxh3_64_hexdigest(data[start : start + chunk]) for start in range(0, len(data), chunk)]
    tree["files"][name] = {"size": len(data), "chunk_bytes": chunk, "xxh3": sums}
    forge(path, tree)
