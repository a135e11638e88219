"""Every line of a log has its time in front, however it was written."""

import io

from shoal.telemetry.stamped import StampedStream


def test_lines_and_parts_of_lines() -> None:
    text = io.StringIO()
    stream = StampedStream(text, now=lambda: "t")
    print("one", "two", file=stream)
    print("three\nfour", end="", file=stream)
    print("...", file=stream)
    print(file=stream)
    assert stream.isatty() is False
    assert text.getvalue().split("\n") == ["t one two", "t three", "t four...", "t ", ""]
