"""A version as text and back, and manifests that were made to harm."""

import pytest

from shoal.data.store.errors import BrokenFile
from shoal.data.store.manifest import FileRef, Manifest, PartRef, dump_manifest, read_manifest
from shoal.data.store.sealed import seal, unseal
from support.data.tables import make_table

REF = FileRef(digest="ab" * 16, num_bytes=1000, num_rows=2)
PART = PartRef(blocks=(REF,), num_rows=20, num_blocks=2, num_bytes=5000, index=REF)
MANIFEST = Manifest(
    version=3, schema=make_table(1).schema, parts=(PART, PART), key="id", row_hashes=2**127 + 5, source={"topic/0": 17}
)


def test_a_version_comes_back():
    found = read_manifest(dump_manifest(MANIFEST), file="m", version=3)
    assert found.digest and found.num_rows == 40 and found.num_blocks == 4 and found.num_bytes == 10000
    assert (found.schema, found.parts, found.key, found.row_hashes, found.source) == (
        MANIFEST.schema,
        MANIFEST.parts,
        "id",
        2**127 + 5,
        {"topic/0": 17},
    )


def test_a_version_under_another_number_is_refused():
    with pytest.raises(BrokenFile, match="renamed"):
        read_manifest(dump_manifest(MANIFEST), file="m", version=4)


def forge(**changes):
    values, _ = unseal(dump_manifest(MANIFEST), file="m")
    return seal({**values, **changes})


@pytest.mark.parametrize(
    "changes",
    [
        {"format": "other"},
        {"format_version": 2},
        {"schema": []},
        {"schema": [{"name": "a", "kind": "O", "shape": []}]},
        {"schema": [{"name": "a", "kind": "<f4", "shape": [2**50, 2**50]}]},
        {"schema": [{"name": "a", "kind": "<f4", "shape": [-1]}]},
        {"schema": [{"name": "a", "kind": "text", "shape": [2]}]},
        {"schema": [{"name": "a", "kind": "<f4", "shape": []}] * 2},
        {"key": "other"},
        {"key": 3},
        {"rows": 41},
        {"row_hashes": "zz"},
        {"parts": 3},
        {"parts": [{"blocks": []}]},
        {"parts": [{"blocks": [["../../etc/passwd", 1, 1]], "rows": 1, "num_blocks": 1, "bytes": 1, "index": None}]},
        {"parts": [{"blocks": [["ab" * 16, 1, 5]], "rows": 40, "num_blocks": 1, "bytes": 1, "index": None}]},
        {"parts": [{"blocks": [["ab" * 16, 1, True]], "rows": 40, "num_blocks": 1, "bytes": 1, "index": None}]},
        {"parts": [{"blocks": [["ab" * 16, -1, 1]], "rows": 40, "num_blocks": 1, "bytes": 1, "index": None}]},
        {"source": 5},
    ],
    ids=str,
)
def test_a_forged_manifest_is_refused(changes):
    with pytest.raises(BrokenFile):
        read_manifest(forge(**changes), file="m", version=3)
