"""Whatever a rank prints becomes lines, in bounded memory, safe to show."""

from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from shoal.launch.output import MAX_LINE_BYTES, LineSplitter, Log, RankStream, clean


@given(st.lists(st.binary(max_size=40)))
def test_lines_do_not_depend_on_how_bytes_arrive(chunks: list[bytes]) -> None:
    splitter = LineSplitter()
    lines = [line for chunk in chunks for line in splitter.feed(chunk)] + splitter.finish()
    whole = b"".join(chunks)
    assert lines == (whole.removesuffix(b"\n").split(b"\n") if whole else [])


def test_endless_line_is_cut_and_held_memory_is_bounded() -> None:
    splitter = LineSplitter()
    lines = []
    for _ in range(100):
        lines += splitter.feed(b"x" * 10_000)
        assert splitter._held <= MAX_LINE_BYTES
    lines += splitter.finish()
    assert max(map(len, lines)) <= MAX_LINE_BYTES
    assert b"".join(lines) == b"x" * 1_000_000
    assert max(map(len, splitter.feed(b"y" * 1_000_000 + b"\n"))) == MAX_LINE_BYTES


def test_clean() -> None:
    assert clean(b"plain \xc3\xa9\tx") == "plain é\tx"
    assert clean(b"\xff\x00\x07") == "\\xff\\x00\\x07"
    assert clean(b" 10%\r 50%\r100%\r") == "100%"
    assert clean(b"\x1b[1;31mred\x1b[0m \x1b]0;title\x07end\x1b[2J") == "red end"
    assert clean(b"\x1b") == "\\x1b"
    assert len(clean(b"x" * 60_000)) < 4200


@given(st.binary(max_size=200))
def test_clean_never_leaves_a_control_character(line: bytes) -> None:
    assert all(character == "\t" or character >= " " for character in clean(line).replace("\n", ""))


def test_stream_prefixes_logs_and_remembers(tmp_path: Path) -> None:
    log = Log(tmp_path / "logs/rank-001.log")
    stream = RankStream(log, prefix="[rank 1] ")
    assert stream.feed(b"one\ntw") == "[rank 1] one"
    assert stream.feed(b"") is None
    assert stream.feed(b"o\n\xff") == "[rank 1] two"
    assert stream.finish() == "[rank 1] \\xff"
    assert stream.finish() is None
    assert stream.tail == "one\ntwo\n\\xff"
    stream.expect_stacks()
    assert stream.tail == ""
    log.close()
    assert log.path.read_bytes() == b"one\ntwo\n\xff\n"


def test_log_on_a_full_disk_ends_and_says_why(tmp_path: Path) -> None:
    (tmp_path / "full.log").symlink_to("/dev/full")
    log = Log(tmp_path / "full.log")
    log.write([b"x"])
    assert "No space left" in log.problem
    log.write([b"y"])
    log.close()
