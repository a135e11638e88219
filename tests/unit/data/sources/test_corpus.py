"""Text as bytes: which files, which split, which bytes."""

import builtins
import io
import math
import os
from collections import Counter
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from shoal.core.errors import RequestError, RunError
from shoal.data.config import StdlibConfig, TextConfig
from shoal.data.sources import corpus as bigram
from shoal.data.sources.corpus import bigram_entropy, find_corpus, read_split


def _write(folder: Path, texts: dict[str, str]) -> Path:
    for name, text in texts.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder


def _many(folder: Path) -> Path:
    return _write(folder, {f"part{i % 3}/file{i:03d}.txt": f"{i:03d} " * 50 for i in range(200)})


def test_the_splits_are_whole_files_each_once(tmp_path: Path) -> None:
    corpus = find_corpus(TextConfig(path=str(_many(tmp_path)), sequence=16, validation=0.2, test=0.1))
    names = [[file.name for file in split.files] for split in (corpus.train, corpus.validation, corpus.test)]
    assert sorted(name for part in names for name in part) == sorted(
        path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*.txt")
    )
    assert 20 < len(names[1]) < 60 and 8 < len(names[2]) < 36
    assert corpus.num_files == 200


def test_a_split_is_its_files_each_ended_by_byte_zero(tmp_path: Path) -> None:
    corpus = find_corpus(TextConfig(path=str(_many(tmp_path)), sequence=16))
    expected = b"".join(file.path.read_bytes() + b"\0" for file in corpus.validation.files)
    assert read_split(corpus.validation).tobytes() == expected
    assert corpus.validation.num_tokens == len(expected)


def test_where_the_folder_is_does_not_change_the_split(tmp_path: Path) -> None:
    one = find_corpus(TextConfig(path=str(_many(tmp_path / "a")), sequence=16))
    two = find_corpus(TextConfig(path=str(_many(tmp_path / "b" / "c")), sequence=16))
    assert [file.name for file in one.test.files] == [file.name for file in two.test.files]


def test_few_files_are_split_by_position(tmp_path: Path) -> None:
    _write(tmp_path, {"a": "x" * 999, "b": "y" * 999})
    corpus = find_corpus(TextConfig(path=str(tmp_path), sequence=9, validation=0.1, test=0.1))
    whole = b"x" * 999 + b"\0" + b"y" * 999 + b"\0"
    parts = [read_split(split).tobytes() for split in (corpus.train, corpus.validation, corpus.test)]
    assert b"".join(parts) == whole
    assert [len(part) for part in parts] == [1600, 200, 200]


def test_one_file_is_a_corpus(tmp_path: Path) -> None:
    _write(tmp_path, {"a.txt": "x" * 99})
    corpus = find_corpus(TextConfig(path=str(tmp_path / "a.txt"), sequence=4))
    assert corpus.num_files == 1


def test_the_pattern_chooses_and_hidden_and_empty_files_are_left_out(tmp_path: Path) -> None:
    _write(tmp_path, {"a.txt": "x" * 99, "b.bin": "y" * 99, "c/d.txt": "z" * 99, ".git/e.txt": "h" * 99, "f.txt": ""})
    corpus = find_corpus(TextConfig(path=str(tmp_path), pattern="**/*.txt", sequence=4))
    assert [file.name for file in corpus.train.files] == ["a.txt", "c/d.txt"]


@pytest.mark.parametrize(
    ("texts", "config", "message"),
    [
        ({}, {"path": "missing"}, "there is no .*missing"),
        ({"a.bin": "x"}, {"pattern": "*.txt"}, "0 files in .* match data.pattern '\\*.txt'"),
        ({"a": "", "b": ""}, {}, "2 files in .* hold 0 bytes; the corpus is empty"),
        ({"a": "x" * 20}, {"sequence": 32}, "has 21 bytes and one sequence of 32 needs 33: .* lower data.sequence"),
        ({"a": "x"}, {"pattern": "/etc/*"}, "is no pattern"),
    ],
)
def test_what_is_wrong_is_refused(
    tmp_path: Path, texts: dict[str, str], config: dict[str, object], message: str
) -> None:
    _write(tmp_path, texts)
    values = {"path": ".", **config}
    values["path"] = str(tmp_path / str(values["path"]))
    with pytest.raises(RequestError, match=message):
        find_corpus(TextConfig.model_validate(values))


def test_a_file_that_changed_since_it_was_listed_is_noticed(tmp_path: Path) -> None:
    _write(tmp_path, {"a": "x" * 99})
    split = find_corpus(TextConfig(path=str(tmp_path), sequence=4)).train
    for text in ("x" * 98, "x" * 100):
        (tmp_path / "a").write_text(text)
        with pytest.raises(RunError, match="was 99 bytes when it was listed"):
            read_split(split)


def test_the_standard_library_is_found_unread_and_large_without_installed_packages(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("a file was opened; its size is enough to list it")

    for where in (builtins, io, os):
        monkeypatch.setattr(where, "open", refuse)
    corpus = find_corpus(StdlibConfig())
    monkeypatch.undo()
    splits = (corpus.train, corpus.validation, corpus.test)
    assert sum(split.num_tokens for split in splits) > 8_000_000
    names = [file.name for split in splits for file in split.files]
    assert "os.py" in names
    assert not [name for name in names if "site-packages" in name or not name.endswith(".py")]


def test_a_limit_is_kept_with_whole_files_from_everywhere() -> None:
    corpus = find_corpus(StdlibConfig(limit_bytes=300_000, sequence=32))
    splits = (corpus.train, corpus.validation, corpus.test)
    total = sum(split.num_tokens for split in splits)
    assert 290_000 < total <= 300_000
    assert len({file.name[0] for split in splits for file in split.files}) > 5
    with pytest.raises(RequestError, match="limit_bytes 1 is below the smallest file"):
        find_corpus(StdlibConfig(limit_bytes=1))


def test_large_reads_that_come_in_pieces_are_put_together(tmp_path: Path) -> None:
    path = tmp_path / "big"
    content = os.urandom(3_000_001)
    path.write_bytes(content)
    split = find_corpus(TextConfig(path=str(path), sequence=64, validation=0, test=0)).train
    assert read_split(split).tobytes() == content + b"\0"


def _by_hand(tokens: list[int]) -> float:
    pairs, firsts = Counter(pairwise(tokens)), Counter(tokens[:-1])
    return -sum(n * math.log(n / firsts[first]) for (first, _), n in pairs.items()) / (len(tokens) - 1)


def test_it_is_the_formula() -> None:
    tokens = np.random.default_rng(0).integers(0, 5, size=1000).astype(np.uint8)
    assert bigram_entropy(tokens) == pytest.approx(_by_hand(tokens.tolist()))


def test_chunks_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = np.random.default_rng(0).integers(0, 9, size=1000).astype(np.uint8)
    whole = bigram_entropy(tokens)
    monkeypatch.setattr(bigram, "_CHUNK", 7)
    assert bigram_entropy(tokens) == pytest.approx(whole, abs=1e-12)


def test_what_is_certain_has_none_and_what_is_even_has_all() -> None:
    assert bigram_entropy(np.tile(np.array([1, 2, 3], dtype=np.uint8), 50)) == 0.0
    assert bigram_entropy(np.zeros(1, dtype=np.uint8)) == 0.0
    even = np.random.default_rng(0).integers(0, 4, size=200_000).astype(np.uint8)
    assert bigram_entropy(even) == pytest.approx(math.log(4), abs=1e-3)
