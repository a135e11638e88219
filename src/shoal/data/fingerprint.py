"""What the data is, in a few lines of text: two processes that have the same fingerprint read the same samples.

Ranks that disagree on the length of the data read some samples twice and others never, and nothing else shows it. Of arrays and
token files everything is hashed (of very large ones, blocks all over them); of the user's own data a few samples that a pure
function chooses, and of a test split only their number, because training does not read it. Samples that are not the same each
time they are read, because something random is done to them, say nothing, and so do those that take too long to read: only
their number is compared then.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
import xxhash

from shoal.core.clock import Deadline
from shoal.core.functions import call_own
from shoal.data.batchform import Node, flat_targets, leaf_paths
from shoal.data.order import permute
from shoal.data.source import Items, Source, Splits, Streamed
from shoal.telemetry.memory import is_out_of_memory
from shoal.telemetry.rngstate import keeping_draws, random_states

READS = 3
"""How often a sample is read to see whether it stays the same."""
_SECONDS_PER_READ = 1.0
"""Every rank reads at every start: what takes longer holds them all up."""
_SAMPLES = {"train": 4, "validation": 2, "test": 0}
_KEYS = ("labels", "samples", "form", "contents")


@runtime_checkable
class Hashed(Protocol):
    """A source that can say more of itself than by some samples."""

    def digest(self) -> str:
        """A hash of all its samples."""


@runtime_checkable
class Labelled(Protocol):
    """A source whose targets are ids of labels."""

    @property
    def vocabulary(self) -> str:
        """The column and its labels in a few words, with their digest; empty where there are none."""


@dataclass(frozen=True, kw_only=True)
class SplitPrint:
    """The fingerprint of one split."""

    samples: int
    form: str = ""
    """Shapes and types of a sample; empty where samples are not always the same, and where there is none."""
    contents: str = ""
    """A hash; empty where samples are not always the same."""
    labels: str = ""
    """The vocabulary of labels; empty where there is none."""


@dataclass(frozen=True, kw_only=True)
class Fingerprint:
    """The fingerprint of the data, by split."""

    splits: Mapping[str, SplitPrint]

    def as_values(self) -> dict[str, dict[str, Any]]:
        """JSON, for a checkpoint or another process."""
        return {
            name: {key: getattr(split, key) for key in _KEYS if key != "labels" or split.labels}
            for name, split in self.splits.items()
        }

    @classmethod
    def from_values(cls, values: Any) -> "Fingerprint":
        """Back from JSON.

        Raises:
            ValueError: it is none.
        """
        try:
            # Checkpoints of data without labels, and those from before they were told, have none.
            splits = {
                str(name): SplitPrint(**{key: split[key] if key != "labels" else split.get(key, "") for key in _KEYS})
                for name, split in values.items()
            }
        except (AttributeError, KeyError, TypeError) as error:
            raise ValueError(f"{values!r} is no fingerprint of data") from error
        return cls(splits=splits)

    def as_settings(self) -> dict[str, str]:
        """As text by name, the plainest first, without what says nothing."""
        return {
            f"the {_NAMES[key]} of the {name} split": str(value)
            for name, split in self.as_values().items()
            for key, value in split.items()
            if value != ""
        }


_NAMES = {
    "labels": "vocabulary of labels",
    "samples": "number of samples",
    "form": "form of a sample",
    "contents": "hash",
}


def take_fingerprint(data: Splits, *, reads: int = READS, seconds: float | None = None) -> Fingerprint:
    """The fingerprint of the data as this process has it; no global generator is moved.

    Args:
        data: its splits.
        reads: how often each chosen sample of the user's own data is read; those after the first one only while there is time.
        seconds: how long samples of the user's own are read; a few when left out, more of them for more reads.

    Raises:
        RequestError: a sample cannot be read.
    """
    limit = Deadline(seconds=_SECONDS_PER_READ * reads if seconds is None else seconds)
    with keeping_draws():
        return Fingerprint(splits={name: _print_split(getattr(data, name), name, reads, limit) for name in _SAMPLES})


def list_differences(ours: Fingerprint, theirs: Fingerprint, *, here: str, there: str) -> list[str]:
    """In what two fingerprints differ, both sides named; what one of them does not say is no difference."""
    return [sentence for _, sentence in _differences(ours, theirs, here=here, there=there)]


def differ_in_contents_only(ours: Fingerprint, theirs: Fingerprint) -> bool:
    """True where numbers and forms are the same and the samples are not."""
    kinds = {kind for kind, _ in _differences(ours, theirs, here="", there="")}
    return kinds == {"contents"}


def _differences(ours: Fingerprint, theirs: Fingerprint, *, here: str, there: str) -> Iterator[tuple[str, str]]:
    # In one order on every rank: all of them tell the same.
    for name in dict.fromkeys((*ours.splits, *theirs.splits)):
        nothing = SplitPrint(samples=0)
        own, other = ours.splits.get(name, nothing), theirs.splits.get(name, nothing)
        if own.labels and other.labels and own.labels != other.labels:
            yield (
                "labels",
                f"the {name} split has the vocabulary of labels {own.labels} {here}, and {other.labels} {there}",
            )
        elif own.samples != other.samples:
            yield "samples", f"the {name} split has {own.samples} samples {here} and {other.samples} {there}"
        elif own.form and other.form and own.form != other.form:
            yield "form", f"a sample of the {name} split has {own.form} {here} and {other.form} {there}"
        elif own.contents and other.contents and own.contents != other.contents:
            yield (
                "contents",
                f"the {own.samples} samples of the {name} split are not the same {here} and {there}",
            )


def chosen_ids(num_samples: int, wanted: int) -> list[int]:
    """The samples that are looked at: the first, the last, and some between that depend on the number only."""
    some = permute(0, 0, num_samples, np.arange(min(wanted, num_samples), dtype=np.int64)).tolist()
    return sorted({0, num_samples - 1, *some[: max(0, wanted - 2)]})


def _print_split(source: Source | None, name: str, reads: int, limit: Deadline) -> SplitPrint:
    num_samples = len(source) if source is not None else 0
    if source is None or num_samples == 0:
        return SplitPrint(samples=0)
    if isinstance(source, Hashed):
        form, _ = _look(source.collate([0]))
        labels = source.vocabulary if isinstance(source, Labelled) else ""
        return SplitPrint(samples=num_samples, form=form, contents=source.digest(), labels=labels)
    number_only = SplitPrint(samples=num_samples)
    if not _SAMPLES[name]:
        return number_only
    # A stream is read from the front, and only its first sample is surely there.
    first, *others = [0] if isinstance(source, Streamed) else chosen_ids(num_samples, _SAMPLES[name])
    seen: dict[int, tuple[str, str]] = {}
    before = random_states()
    for place, number in enumerate([first] * reads + others * reads):
        if limit.is_over:
            if place < reads + len(others):
                return number_only
            break
        found = _read(source, number, name)
        if seen.setdefault(number, found) != found or before != random_states():
            return number_only
    digest = xxhash.xxh3_64("".join(contents for _, contents in seen.values()).encode())
    return SplitPrint(samples=num_samples, form=seen[first][0], contents=digest.hexdigest())


def _read(source: Source, number: int, name: str) -> tuple[str, str]:
    what = f"reading sample {number} of the {name} split"
    return _look(call_own(lambda: source.collate([number]), what=what, is_excused=is_out_of_memory))


def _look(items: Items) -> tuple[str, str]:
    """The form of a sample, and a hash of it."""
    digest = xxhash.xxh3_64()
    shown = []
    targets = flat_targets(items.targets)
    for tensor in (*items.inputs, *targets):
        shown.append(f"{tuple(tensor.shape[1:])} {str(tensor.dtype).removeprefix('torch.')}")
        flat = tensor.detach().cpu().contiguous().reshape(-1)
        digest.update(shown[-1].encode())
        digest.update(flat.view(torch.uint8).numpy().data if flat.numel() else b"")
    inputs, wanted = shown[: len(items.inputs)], shown[len(items.inputs) :]
    if items.form is not None:
        # Other keys are other data, whatever their tensors.
        digest.update(
            repr([name for node in (items.form.inputs, items.form.targets) for name in _names(node)]).encode()
        )
        inputs = [f"{name} {form}" for (name, _), form in zip(leaf_paths(items.form.inputs), inputs, strict=True)]
    said = f"{'inputs' if len(inputs) > 1 else 'input'} {', '.join(inputs)}"
    if wanted:
        said += f" and target{'s' if len(wanted) > 1 else ''} {', '.join(wanted)}"
    return said, digest.hexdigest()


def _names(node: Node | None) -> list[str]:
    return [] if node is None else [path for path, _ in leaf_paths(node)]
