"""WebDataset shards, and tar files that want more than to be read."""

import io
import tarfile

import pytest

from shoal.core.errors import RequestError
from shoal.data.formats.opening import open_data
from shoal.data.formats.options import ReadOptions
from shoal.data.table import concat_tables


def write(path, members):
    with tarfile.open(path, "w") as tar:
        for info, content in members:
            if isinstance(info, str):
                info = tarfile.TarInfo(info)
                info.size = len(content)
            tar.addfile(info, io.BytesIO(content))


def read(path, **options):
    return concat_tables(list(open_data(str(path), options=ReadOptions(**options)).tables()))


def test_members_of_one_name_are_one_row(tmp_path):
    write(tmp_path / "s.tar", [("a/1.png", b"\x01"), ("a/1.cls", b"7"), ("a/2.png", b"\x02\x03"), ("a/2.cls", b"8\n")])
    table = read(tmp_path / "s.tar")
    assert [table["__key__"].value(row) for row in range(2)] == ["a/1", "a/2"]
    assert table["cls"].values.tolist() == [7, 8] and table["png"].value(1) == b"\x02\x03"


def special(name, kind, target=""):
    info = tarfile.TarInfo(name)
    info.type, info.linkname = kind, target
    return info, b""


@pytest.mark.parametrize(
    ("member", "said"),
    [
        (("../../etc/1.cls", b"1"), "leaves the folder"),
        (("/etc/1.cls", b"1"), "leaves the folder"),
        (special("1.cls", tarfile.SYMTYPE, "/etc/passwd"), "no plain file"),
        (special("1.cls", tarfile.LNKTYPE, "/etc/passwd"), "no plain file"),
        (special("1.cls", tarfile.CHRTYPE), "no plain file"),
        (special("1.cls", tarfile.FIFOTYPE), "no plain file"),
        (("1.bin", b"x" * 5000), "a value has at most"),
        (("noextension", b"1"), "has no extension"),
    ],
)
def test_what_is_no_row_is_refused(tmp_path, member, said):
    write(tmp_path / "s.tar", [member])
    with pytest.raises(RequestError, match=said):
        read(tmp_path / "s.tar", value_bytes=4096)


def test_a_giant_header_is_refused_within_bounded_memory(tmp_path):
    info = tarfile.TarInfo("1.cls")
    info.pax_headers = {"comment": "x" * (3 << 20)}
    with tarfile.open(tmp_path / "s.tar", "w", format=tarfile.PAX_FORMAT) as tar:
        tar.addfile(info)
    with pytest.raises(RequestError, match="a header says"):
        read(tmp_path / "s.tar", value_bytes=1 << 16)


def test_a_torn_shard_is_refused(tmp_path):
    write(tmp_path / "s.tar", [("1.bin", b"x" * 3000)])
    (tmp_path / "s.tar").write_bytes((tmp_path / "s.tar").read_bytes()[:2000])
    with pytest.raises(RequestError, match=r"s\.tar"):
        read(tmp_path / "s.tar")
