"""Text as bytes: which files belong to a corpus, which split each is in, and their bytes as one array. No torch.

Which files and how large is decided from names and sizes alone, so the command line knows the number of samples without reading a
byte. A split is by file, because neighbouring windows of one file in training and validation would make the validation easy.
"""

import os
import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from shoal.core.errors import RequestError, RunError
from shoal.core.seeding import derive_key
from shoal.data.config import StdlibConfig, TextConfig
from shoal.data.order import split_positions

VOCAB = 256
"""A token is a byte."""
FILE_END = 0
"""The byte after every file."""

_NOT_STDLIB = {"site-packages", "dist-packages", "__pycache__"}


@dataclass(frozen=True, kw_only=True)
class CorpusFile:
    """A file by its name within the corpus, which decides its split on every machine alike."""

    name: str
    path: Path
    size: int

    @property
    def num_tokens(self) -> int:
        """Its bytes and the end mark."""
        return self.size + 1


@dataclass(frozen=True, kw_only=True)
class SplitFiles:
    """What one split reads: its files, and of their concatenation the tokens from ``start`` to ``stop``."""

    files: tuple[CorpusFile, ...]
    start: int
    stop: int

    @property
    def num_tokens(self) -> int:
        """Tokens of the split."""
        return self.stop - self.start


@dataclass(frozen=True, kw_only=True)
class Corpus:
    """The files of every split."""

    train: SplitFiles
    validation: SplitFiles
    test: SplitFiles

    @property
    def num_files(self) -> int:
        """Files of the whole corpus."""
        return len({file.name for split in (self.train, self.validation, self.test) for file in split.files})


def find_corpus(config: StdlibConfig | TextConfig) -> Corpus:
    """The files of a corpus, split by name; by position where a split by file would leave one without a sequence.

    Raises:
        RequestError: the path is missing, no file matches, or the text is too short for one sequence per split.
    """
    files = _stdlib_files(config.limit_bytes) if isinstance(config, StdlibConfig) else _text_files(config)
    needed = config.sequence + 1
    by_file = _split_by_file(files, config.validation, config.test)
    wanted = [True, config.validation > 0, config.test > 0]
    if len(files) >= 3 and all(split.num_tokens >= needed for split, want in zip(by_file, wanted, strict=True) if want):
        train, validation, test = by_file
    else:
        total = sum(file.num_tokens for file in files)
        parts = split_positions(total, config.validation, config.test, needed=needed, what="bytes")
        train, validation, test = (SplitFiles(files=files, start=part.start, stop=part.stop) for part in parts)
    return Corpus(train=train, validation=validation, test=test)


def read_split(split: SplitFiles) -> NDArray[np.uint8]:
    """The tokens of a split: its files one after another, each ended by byte 0.

    Raises:
        RunError: a file changed its size since it was listed, so the samples would not be the ones that were announced.
    """
    tokens: NDArray[np.uint8] = np.zeros(sum(file.num_tokens for file in split.files), dtype=np.uint8)
    target = tokens.data
    start = 0
    for file in split.files:
        with file.path.open("rb", buffering=0) as opened:
            num_read = _read_all(opened.fileno(), target[start : start + file.size])
            if num_read < file.size or opened.read(1):
                raise RunError(
                    f"{file.path} was {file.size} bytes when it was listed and is not now; leave the corpus alone in a run"
                )
        start += file.num_tokens
    return tokens[split.start : split.stop]


def _read_all(descriptor: int, target: memoryview) -> int:
    done = 0
    while done < len(target):
        count = os.readv(descriptor, [target[done:]])
        if count == 0:
            break
        done += count
    return done


def _split_by_file(files: Sequence[CorpusFile], validation: float, test: float) -> list[SplitFiles]:
    chosen: tuple[list[CorpusFile], ...] = ([], [], [])
    for file in files:
        place = derive_key("split", file.name) / 2**64
        chosen[1 if place < validation else 2 if place < validation + test else 0].append(file)
    return [SplitFiles(files=tuple(part), start=0, stop=sum(file.num_tokens for file in part)) for part in chosen]


def _stdlib_files(limit_bytes: int | None) -> tuple[CorpusFile, ...]:
    root = Path(sysconfig.get_path("stdlib"))
    files = [file for file in _walk(root) if file.name.endswith(".py")]
    if not files:
        raise RequestError(
            f"this interpreter has no library source in {root}; set data.source to text and data.path to a folder"
        )
    if limit_bytes is None:
        return tuple(files)
    kept: list[CorpusFile] = []
    left = limit_bytes
    # In the order of hashes: in the order of names a small limit would see nothing but the first few packages.
    for file in sorted(files, key=lambda file: derive_key("limit", file.name)):
        if file.num_tokens <= left:
            kept.append(file)
            left -= file.num_tokens
    if not kept:
        smallest = min(file.num_tokens for file in files)
        raise RequestError(
            f"limit_bytes {limit_bytes} is below the smallest file, {smallest} bytes; raise data.limit_bytes"
        )
    return tuple(sorted(kept, key=lambda file: file.name))


def _walk(root: Path) -> list[CorpusFile]:
    found = []
    for folder, folders, names in os.walk(root):
        folders[:] = [name for name in folders if name not in _NOT_STDLIB]
        for name in names:
            path = Path(folder, name)
            if name.endswith(".py") and path.is_file():
                found.append(_listed(path, root))
    return sorted((file for file in found if file.size), key=lambda file: file.name)


def _text_files(config: TextConfig) -> tuple[CorpusFile, ...]:
    root = Path(config.path).expanduser()
    if not root.exists():
        raise RequestError(f"data.path: there is no {root.absolute()}; give a folder of text files, or one file")
    if root.is_file():
        found = [_listed(root, root.parent)]
    else:
        try:
            paths = [path for path in root.glob(config.pattern) if path.is_file()]
        except (ValueError, NotImplementedError) as error:
            raise RequestError(
                f"data.pattern {config.pattern!r} is no pattern: {error}; use one such as **/*.txt"
            ) from error
        found = [_listed(path, root) for path in paths]
        found = [file for file in found if not any(part.startswith(".") for part in Path(file.name).parts)]
    if not found:
        raise RequestError(
            f"0 files in {root.absolute()} match data.pattern {config.pattern!r}; change the pattern or the path"
        )
    files = [file for file in found if file.size]
    if not files:
        raise RequestError(f"{len(found)} files in {root.absolute()} match and hold 0 bytes; the corpus is empty")
    return tuple(sorted(files, key=lambda file: file.name))


def _listed(path: Path, root: Path) -> CorpusFile:
    return CorpusFile(name=path.relative_to(root).as_posix(), path=path, size=path.stat().st_size)


_CHUNK = 1 << 22


def bigram_entropy(tokens: NDArray[np.uint8], vocab: int = 256) -> float:
    """H(next | this) of the text's own pair counts, in nats per token; 0 for a text without a pair."""
    counts: NDArray[np.int64] = np.zeros(vocab * vocab, dtype=np.int64)
    # In chunks, because the pair numbers take eight times the memory of the text.
    for start in range(0, len(tokens) - 1, _CHUNK):
        chunk = tokens[start : start + _CHUNK + 1].astype(np.int64)
        counts += np.bincount(chunk[:-1] * vocab + chunk[1:], minlength=vocab * vocab)
    total = int(counts.sum())
    if total == 0:
        return 0.0
    pairs = counts[counts > 0].astype(np.float64)
    firsts = counts.reshape(vocab, vocab).sum(axis=1)
    firsts = firsts[firsts > 0].astype(np.float64)
    return float((np.sum(firsts * np.log(firsts)) - np.sum(pairs * np.log(pairs))) / total)
