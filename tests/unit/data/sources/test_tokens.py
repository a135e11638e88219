"""Token files: mapped, or refused with their numbers."""

from pathlib import Path

import numpy as np
import pytest

from shoal.core.errors import RequestError
from shoal.data.config import TokensConfig
from shoal.data.sources import tokens
from shoal.data.sources.tokens import open_tokens


def _open(path: Path, **values: object) -> tokens.TokenFile:
    return open_tokens(TokensConfig.model_validate({"path": str(path), **values}))


@pytest.mark.parametrize("dtype", ["uint8", "uint16", "int32", "int64"])
def test_npy_and_raw_files_hold_the_same_ids(tmp_path: Path, dtype: str) -> None:
    ids = np.arange(200).astype(dtype)
    np.save(tmp_path / "a.npy", ids)
    ids.tofile(tmp_path / "a.bin")
    for file in (_open(tmp_path / "a.npy"), _open(tmp_path / "a.bin", dtype=dtype)):
        assert file.ids.tolist() == ids.tolist()
        assert file.vocab == 200


def test_the_vocabulary_may_be_larger_than_what_is_in_the_file(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.arange(10))
    assert _open(tmp_path / "a.npy", vocab=50).vocab == 50


def _torn(path: Path) -> None:
    np.save(path, np.arange(1000))
    path.write_bytes(path.read_bytes()[:-8])


@pytest.mark.parametrize(
    ("name", "make", "values", "message"),
    [
        ("a.npy", lambda path: None, {}, "does not exist"),
        ("a.npy", lambda path: path.mkdir(), {}, "is a folder"),
        ("a.npy", lambda path: path.write_bytes(b"not numpy at all"), {}, "is not a whole .npy file"),
        ("a.npy", lambda path: path.write_bytes(b""), {}, "is not a whole .npy file"),
        ("a.npy", _torn, {}, "is not a whole .npy file"),
        ("a.npy", lambda path: np.save(path, np.zeros((3, 4), dtype=int)), {}, r"holds int64 of the shape \(3, 4\)"),
        ("a.npy", lambda path: np.save(path, np.zeros(3)), {}, "holds float64"),
        ("a.npy", lambda path: np.save(path, np.array([1, "a"], dtype=object)), {}, "is not a whole .npy file"),
        ("a.npy", lambda path: np.save(path, np.zeros(0, dtype=int)), {}, "holds 0 token ids"),
        (
            "a.npy",
            lambda path: np.save(path, np.array([3, 9, 70])),
            {"vocab": 64},
            "the id 70 and data.vocab is 64; .* 71",
        ),
        ("a.npy", lambda path: np.save(path, np.array([3, -2])), {"vocab": 64}, "holds the id -2"),
        ("a.bin", lambda path: path.write_bytes(b"abc"), {}, "has 3 bytes, which is no multiple of 2 bytes per uint16"),
        ("a.bin", lambda path: path.write_bytes(b""), {}, "holds 0 token ids"),
    ],
)
def test_what_is_wrong_is_refused(
    tmp_path: Path, name: str, make: object, values: dict[str, int], message: str
) -> None:
    make(tmp_path / name)  # type: ignore[operator]
    with pytest.raises(RequestError, match=message):
        _open(tmp_path / name, **values)


def test_a_pickle_in_a_token_file_is_not_run(tmp_path: Path) -> None:
    marker = tmp_path / "ran"

    class Evil:
        def __reduce__(self) -> object:
            return (Path.touch, (marker,))

    np.save(tmp_path / "a.npy", np.array([Evil()], dtype=object), allow_pickle=True)
    with pytest.raises(RequestError):
        _open(tmp_path / "a.npy")
    assert not marker.exists()


def test_a_file_too_large_to_scan_needs_its_vocabulary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokens, "SCANNED_BYTES", 100)
    np.save(tmp_path / "a.npy", np.arange(500))
    with pytest.raises(RequestError, match=r"3\.9 KiB, too much .*limit is 100 B.*set data\.vocab"):
        _open(tmp_path / "a.npy")
    assert _open(tmp_path / "a.npy", vocab=500).vocab == 500
