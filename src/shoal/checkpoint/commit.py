"""How a save becomes a checkpoint, step by step, and what each step leaves behind when the process dies after it.

::

    1  mkdir  .tmp-step-N-<id>            leftover, swept at the next start
    2  write and fsync every shard        leftover
    3  write and fsync manifest.json      leftover: a complete one, but nobody voted for it
    4  fsync the folder                   leftover
    5  rename step-N to .replaced-...     only if something has that name; found there, and put back by the sweep
    6  rename .tmp-... to step-N          committed
    7  fsync the parent                   committed, and durable
    8  delete .replaced-...               leftover

So at every moment the newest whole checkpoint is exactly the old one or exactly the new one. The votes between the ranks stand
between 2 and 3 and after 7 (``attempt.py``). No torch.

What saves that died have left is removed at the next start (``sweep``), before anything is read or written. Only names that Shoal
gives are touched. The caller makes sure that no other process is saving into the folder: the run directory is held by one run at
a time.
"""

import contextlib
import os
import shutil
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shoal.checkpoint.files import (
    MANIFEST,
    Beside,
    NotWhole,
    beside_name,
    draw_id,
    new_file,
    parse_beside,
    shard_name,
    step_name,
    sync_folder,
)
from shoal.checkpoint.holdings import Cut
from shoal.checkpoint.manifest import MAX_BYTES, Manifest, Part, Piece, TensorEntry, decode, encode, merge, whole_tensor
from shoal.checkpoint.shard import CHUNK_BYTES, Blob, FileEntry, write_shard


@dataclass(frozen=True, kw_only=True)
class Draft:
    """A checkpoint on its way: the folder it is written in and the one it is to become."""

    root: Path
    step: int
    id: str

    @property
    def folder(self) -> Path:
        """Where the files are written."""
        return self.root / beside_name(Beside.DRAFT, self.step, self.id)

    @property
    def final(self) -> Path:
        """What it is called once it is committed."""
        return self.root / step_name(self.step)

    @property
    def replaced(self) -> Path:
        """Where an older folder of the same name goes."""
        return self.root / beside_name(Beside.REPLACED, self.step, self.id)


def begin(root: Path, step: int) -> Draft:
    """Make the folder that a save is written in.

    Raises:
        OSError: the disk refused.
    """
    _make_root(root)
    draft = Draft(root=root, step=step, id=draw_id())
    draft.folder.mkdir()
    return draft


def join(draft: Draft) -> None:
    """Make the folder of a save that another process began in another folder; ranks that share this one may all call it.

    Raises:
        OSError: the disk refused.
    """
    _make_root(draft.root)
    draft.folder.mkdir(exist_ok=True)


def _make_root(root: Path) -> None:
    if not root.is_dir():
        # Not its parents: a run directory that was removed is not made again, with nothing in it but this.
        root.mkdir(exist_ok=True)
        # The names of the folder and of the run that holds it: without them a power cut would take the first checkpoint along.
        sync_folder(root.parent)
        sync_folder(root.parent.parent)


def write_part(
    draft: Draft,
    rank: int,
    blobs: Mapping[str, Blob],
    *,
    cuts: Iterable[Cut] = (),
    chunk_bytes: int = CHUNK_BYTES,
) -> Part:
    """Write one rank's shard.

    Args:
        draft: the save it belongs to.
        rank: who writes.
        blobs: what to write, by key.
        cuts: of which tensors the blobs are pieces; a blob under any other key is the whole tensor of that name.
        chunk_bytes: of the sums.

    Raises:
        OSError: the disk refused; the unfinished file is gone.
    """
    file = shard_name(rank)
    entry = write_shard(draft.folder / file, blobs, chunk_bytes=chunk_bytes)
    return describe_part(file, entry, blobs, cuts)


def describe_part(file: str, entry: FileEntry, blobs: Mapping[str, Blob], cuts: Iterable[Cut]) -> Part:
    """What a manifest says of a shard that holds ``blobs``, of which some are the pieces ``cuts``."""
    pieces: dict[str, list[Cut]] = {}
    keys = set()
    for cut in cuts:
        pieces.setdefault(cut.name, []).append(cut)
        keys.add(cut.key)
    tensors = {key: whole_tensor(file, key, blob.dtype, blob.shape) for key, blob in blobs.items() if key not in keys}
    for name, of_name in pieces.items():
        assert name not in tensors, f"{name} is given whole and in pieces"
        ordered = sorted(of_name, key=lambda cut: cut.box)
        tensors[name] = TensorEntry(
            dtype=blobs[ordered[0].key].dtype,
            shape=ordered[0].shape,
            pieces=tuple(Piece(file=file, key=cut.key, start=cut.box.start, shape=cut.box.shape) for cut in ordered),
        )
    return Part(file=file, entry=entry, tensors=tensors)


def commit(draft: Draft, manifest: Manifest) -> None:
    """Turn a draft whose shards are all written into a checkpoint.

    Raises:
        OSError: the disk refused; the name is as it was before.
        ValueError: a value is not JSON, or there is too much of them.
    """
    prepare(draft, manifest)
    take_name(draft)
    drop_replaced(draft)


def prepare(draft: Draft, manifest: Manifest) -> None:
    """Write the manifest of a draft, durably: all that a checkpoint needs but its name.

    Raises:
        OSError: the disk refused.
        ValueError: a value is not JSON, or there is too much of them.
    """
    data = encode_checked(manifest)
    with new_file(draft.folder / MANIFEST) as fd:
        view = memoryview(data)
        while view:
            view = view[os.write(fd, view) :]
    sync_folder(draft.folder)


def encode_checked(manifest: Manifest) -> bytes:
    """The bytes of a manifest that every reader will accept.

    Raises:
        ValueError: a value is not JSON, or there is too much of them.
    """
    data = encode(manifest)
    if len(data) > MAX_BYTES:
        raise ValueError(
            f"the manifest would have {len(data)} bytes, more than {MAX_BYTES}; save less in its values, or fewer pieces"
        )
    try:
        decode(data)
    except NotWhole as error:
        # What no reader would accept must not count as saved: retention would then remove the ones that can be read.
        raise ValueError(f"the manifest could not be read back: {error}") from error
    return data


def take_name(draft: Draft) -> None:
    """Give a prepared draft the name of its step; what had it before stands beside it until ``drop_replaced``.

    Raises:
        OSError: the disk refused; the name is as it was before.
    """
    try:
        # A folder that already has the name (a torn one, or the same step saved again) is never written into.
        if os.path.lexists(draft.final):
            os.rename(draft.final, draft.replaced)
        os.rename(draft.folder, draft.final)
        sync_folder(draft.root)
    except OSError:
        undo(draft)
        raise


def drop_replaced(draft: Draft) -> None:
    """Delete what had the name before."""
    if os.path.lexists(draft.replaced):
        remove(draft.replaced)


def undo(draft: Draft) -> None:
    """Give the names back that ``take_name`` took; what cannot be undone now is put right by the sweep."""
    with contextlib.suppress(OSError):
        if not os.path.lexists(draft.folder) and os.path.lexists(draft.final):
            os.rename(draft.final, draft.folder)
        if os.path.lexists(draft.replaced):
            os.rename(draft.replaced, draft.final)


def abandon(draft: Draft) -> None:
    """Remove what a failed save wrote; what cannot be removed is swept at the next start."""
    remove(draft.folder)


def remove(path: Path) -> None:
    """Delete a folder, or a link to one, as far as the disk allows."""
    if path.is_symlink() or path.is_file():
        with contextlib.suppress(OSError):
            path.unlink()
        return
    shutil.rmtree(path, ignore_errors=True)


def write_checkpoint(
    root: Path,
    *,
    step: int,
    ranks: Sequence[Mapping[str, Blob]],
    values: Mapping[str, Any],
    cuts: Sequence[Iterable[Cut]] | None = None,
    plan: str = "dp=1",
    chunk_bytes: int = CHUNK_BYTES,
) -> Path:
    """Write a whole checkpoint from one process: one shard for each mapping in ``ranks``, whose pieces ``cuts`` names.

    Raises:
        OSError: the disk refused; nothing is left of it.
        ValueError: a value is not JSON, or some of a tensor is missing.
        NotWhole: two ranks have the same elements.
    """
    draft = begin(root, step)
    try:
        parts = [
            write_part(draft, rank, blobs, cuts=cuts[rank] if cuts else (), chunk_bytes=chunk_bytes)
            for rank, blobs in enumerate(ranks)
        ]
        commit(draft, merge(parts, id=draft.id, step=step, plan=plan, values=values))
    except (OSError, ValueError, NotWhole):
        abandon(draft)
        raise
    return draft.final


def is_leftover(name: str) -> bool:
    """True for a name that a dead save leaves; not for what was set aside on purpose, which is whole."""
    beside = parse_beside(name)
    return beside is not None and beside.kind is not Beside.ASIDE


def prepared_drafts(root: Path) -> list[Draft]:
    """The drafts of dead saves that need nothing but their name: the manifest, which is written last, is there."""
    names = sorted(os.listdir(root)) if root.is_dir() else []
    besides = (parse_beside(name) for name in names if os.path.lexists(root / name / MANIFEST))
    return [
        Draft(root=root, step=beside.step, id=beside.id)
        for beside in besides
        if beside is not None and beside.kind is Beside.DRAFT
    ]


def sweep(root: Path, *, finish: Collection[str] = ()) -> list[str]:
    """Remove leftovers and put back what a dead save had set aside; one line for each thing done.

    Args:
        root: the folder of checkpoints.
        finish: ids of saves that have their name in another folder, where each host keeps its own part: all folders were
            prepared before the first took the name, so this one takes it too.
    """
    if not root.is_dir():
        return []
    done = []
    for draft in prepared_drafts(root):
        if draft.id in finish:
            take_name(draft)
            done.append(f"finished {draft.final.name}, which the other folders have")
    for name in sorted(os.listdir(root)):
        beside = parse_beside(name)
        if beside is None or not is_leftover(name):
            continue
        final = root / step_name(beside.step)
        if beside.kind is Beside.REPLACED and not os.path.lexists(final):
            # The save died after it moved the older folder away and before it took the name: the older one is the checkpoint.
            os.rename(root / name, final)
            done.append(f"put back {final.name}, which a dead save had set aside")
        else:
            remove(root / name)
            done.append(f"removed {name}, left by a dead save")
    return done
