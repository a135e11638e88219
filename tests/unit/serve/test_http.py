import pytest

from shoal.serve.http import HttpError, body_length, parse_head


def test_a_head_is_read():
    head = b"POST /predict?x=1 HTTP/1.1\r\nHost: a\r\nContent-Length: 12\r\nX: a:b \r\n\r\n"
    assert parse_head(head) == ("POST", "/predict", "x=1", {"host": "a", "content-length": "12", "x": "a:b"})
    assert parse_head(b"GET / HTTP/1.0\r\n\r\n").headers == {"connection": "close"}


@pytest.mark.parametrize(
    "head",
    [
        b"\r\n\r\n", b"GET /\r\n\r\n", b"GET / HTTP/2\r\n\r\n", b"GET http://a/ HTTP/1.1\r\n\r\n", b"G\x00T / HTTP/1.1\r\n\r\n",
        b"GET / HTTP/1.1\r\nno header\r\n\r\n", b"GET / HTTP/1.1\r\n folded: a\r\n\r\n", b"GET / HTTP/1.1\r\nname : a\r\n\r\n",
        b"POST / HTTP/1.1\r\ncontent-length: 1\r\nContent-Length: 2\r\n\r\n", b"GET /\xff HTTP/1.1\r\n\r\n",
    ],
)  # fmt: skip
def test_what_is_no_head_is_refused(head):
    with pytest.raises(HttpError) as refused:
        parse_head(head)
    assert refused.value.status == 400


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"content-length": "-1"}, 400),
        ({"content-length": "1e3"}, 400),
        ({"content-length": "²"}, 400),
        ({"content-length": "9" * 30}, 400),
        ({"content-length": "101"}, 413),
        ({"transfer-encoding": "chunked"}, 501),
    ],
)
def test_a_length_is_checked_before_it_is_believed(headers, status):
    assert body_length({"content-length": "100"}, 100) == 100 and body_length({}, 100) == 0
    with pytest.raises(HttpError) as refused:
        body_length(headers, 100)
    assert refused.value.status == status
