"""That all ranks read the same data, and that it stays the same: at the start, before every checkpoint, and when a run goes on.

Which samples come when is a function of their number, so ranks that count differently read some twice and others never, and
nothing else would ever show it.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from shoal.checkpoint.whole import committed_names, glance
from shoal.comm.world import World
from shoal.core.errors import AgreedError, RunError, ShoalError
from shoal.data.fingerprint import Fingerprint, differ_in_contents_only, list_differences, take_fingerprint
from shoal.data.source import Splits

_MORE_READS = 16
"""Something random that rarely does anything looks like nothing random when a sample is read a few times."""
DATA = "data"
"""The key under which a checkpoint's values have the fingerprint."""
_FIX = (
    "give every process the same data: the same files, in the same order (sort what a folder lists), made from a fixed seed, "
    "and the whole of it, not a part by rank: Shoal deals the samples out"
)
_UNSAVED = (
    "no checkpoint was written of what was trained since; put the file back as it was and use --resume, or start anew"
)


class SameData:
    """The data of a run, as all ranks found it at the start; they make it together.

    Args:
        world: the ranks.
        data: as this rank has it.

    Raises:
        AgreedError: ranks have other data than the first; says which, and in what. All ranks raise it.
    """

    def __init__(self, world: World, data: Splits) -> None:
        self.fingerprint = _agree(world, data)
        self._data = data
        self._file = data.file
        self._was_replaced = False

    def check_file(self, warn: Callable[[str], None]) -> None:
        """See that what samples are read from is still what it was.

        Args:
            warn: told of a file that others have put in its place, which this run does not read.

        Raises:
            RunError: it was written to, or a file of a store was deleted.
        """
        if self._data.watched is not None and (damage := self._data.watched.find_damage()) is not None:
            raise RunError(f"{damage}; {_UNSAVED}")
        if self._file is None or self._was_replaced:
            return
        change, file = self._file.find_change(), self._file
        if change == "same":
            return
        if change == "replaced":
            self._was_replaced = True
            warn(
                f"{file.path} is gone or another file now; this run goes on with the one that it opened, --resume would not"
            )
            return
        if change == "shorter":
            # Before anything is read of it: reading a memory map behind the end of its file kills the process.
            raise RunError(
                f"{file.path} had {file.needed_bytes} bytes when it was opened and is shorter now; {_UNSAVED}"
            )
        seen = file.observe(file.path)
        found = take_fingerprint(self._data)
        changes = list_differences(self.fingerprint, found, here="when it was opened", there="now")
        if changes:
            raise RunError(f"{file.path} was written to while this run reads it: {changes[0]}; {_UNSAVED}")
        self._file = replace(seen, needed_bytes=file.needed_bytes)


def data_values(fingerprint: Fingerprint) -> dict[str, Any]:
    """What a checkpoint's values say of the data."""
    return {"train_samples": fingerprint.splits["train"].samples, DATA: fingerprint.as_values()}


def refuse_other_data(values: Mapping[str, Any], now: Fingerprint, *, accepted: bool) -> str | None:
    """Compare the data of a checkpoint with that of now.

    Args:
        values: of the checkpoint.
        now: the data's fingerprint.
        accepted: the user means to go on with other data.

    Returns:
        What is different, where that is accepted, or where it is not what is trained on.

    Raises:
        AgreedError: it is other data: starting again would find the same.
        RunError: the checkpoint says nothing of it that makes sense.
    """
    here, there = "in the checkpoint", "now"
    saved = values.get(DATA)
    if saved is None:
        # One that was written before there were fingerprints has a number of samples.
        count = values.get("train_samples")
        own = now.splits["train"].samples
        changes = [f"the train split has {count} samples {here} and {own} {there}"] if count != own else []
        others = changes
    else:
        try:
            before = Fingerprint.from_values(saved)
            changes = list_differences(_training(before), _training(now), here=here, there=there)
            others = list_differences(before, now, here=here, there=there)
        except ValueError as error:
            raise RunError(str(error)) from error
    if not changes:
        return (
            f"{'; '.join(others)}; losses of evaluations before and after this are of different data"
            if others
            else None
        )
    told = "; ".join(others)
    if accepted:
        return f"{told}; going on because of checkpoint.other_data: some samples of this epoch come again, and some do not come"
    too = len(others) > len(changes)
    raise AgreedError(
        f"it was trained on other data: {'; '.join(changes)}{', and other splits differ too' if too else ''}; use the same data, "
        "or set checkpoint.other_data=true to go on with this"
    )


def refuse_other_data_early(checkpoints: Path, data: Splits) -> None:
    """Compare the data of the newest checkpoint with that of now, before any process starts.

    What cannot be known here is left to the ranks: a checkpoint that is not whole, and data that only a rank can read.

    Args:
        checkpoints: the folder that has them.
        data: as this process has it.

    Raises:
        AgreedError: it is other data.
    """
    for _, path in committed_names(checkpoints):
        try:
            values, now = glance(path).values, take_fingerprint(data, reads=_MORE_READS)
        except (OSError, ShoalError):
            continue
        try:
            refuse_other_data(values, now, accepted=False)
        except AgreedError as error:
            raise AgreedError(f"cannot go on from {path}: {error}") from None
        except RunError:
            continue
        return


def _training(found: Fingerprint) -> Fingerprint:
    """What a fingerprint says of what is trained on."""
    return Fingerprint(splits={name: split for name, split in found.splits.items() if name == "train"})


def _agree(world: World, data: Splits) -> Fingerprint:
    own = take_fingerprint(data)
    everyone = _gather(world, own)
    if any(differ_in_contents_only(everyone[0], other) for other in everyone):
        own = take_fingerprint(data, reads=_MORE_READS)
        everyone = _gather(world, own)
    for rank, other in enumerate(everyone):
        changes = list_differences(everyone[0], other, here="on rank 0", there=f"on rank {rank}")
        if changes:
            raise AgreedError(f"the ranks have different data: {'; '.join(changes)}; {_FIX}")
    # Where one rank saw something random and another did not, what is left out is left out of all.
    return min(everyone, key=lambda found: sum(bool(split.contents) for split in found.splits.values()))


def _gather(world: World, own: Fingerprint) -> list[Fingerprint]:
    """Every rank's, in the order of ranks."""
    return [Fingerprint.from_values(json.loads(text)) for text in gather_texts(world, json.dumps(own.as_values()))]


def gather_texts(world: World, own: str) -> list[str]:
    """Every rank's text, in the order of ranks."""
    text = own.encode()
    sizes = [int(size) for size in world.all_gather(torch.tensor([len(text)], device=world.device))]
    padded = torch.zeros(max(sizes), dtype=torch.uint8)
    padded[: len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8) if text else padded[:0]
    rows = world.all_gather(padded.to(world.device))
    return [bytes(row[:size].tolist()).decode() for row, size in zip(rows, sizes, strict=True)]
