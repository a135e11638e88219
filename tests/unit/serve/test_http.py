import asyncio
import gzip
import json

import pytest

from shoal.serve.http import HttpError, HttpServer, Limits, Response, accepts_gzip, body_length, parse_head, parse_query


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


def test_a_query_is_read_and_bounded():
    assert parse_query("") == {}
    assert parse_query("a=1&b=%2F+x&c=&a=2") == {"a": "2", "b": "/ x", "c": ""}
    for text in ("&".join("a=1" for _ in range(65)), "a=%ff"):
        with pytest.raises(HttpError) as refused:
            parse_query(text)
        assert refused.value.status == 400


@pytest.mark.parametrize(
    ("said", "packs"),
    [
        ("gzip", True),
        ("br, gzip;q=0.5", True),
        ("gzip;q=0", False),
        ("", False),
        ("identity", False),
        ("x-gzip", False),
    ],
)
def test_answers_are_packed_for_those_who_can_unpack(said, packs):
    assert accepts_gzip({"accept-encoding": said}) is packs


def talk(answer, *, asks, reads=None):
    """What a server sends for a request, and whatever ``reads`` makes of the connection."""

    async def run():
        server = HttpServer(answer, Limits())
        host, port = await server.listen("127.0.0.1", 0)
        reader, writer = await asyncio.open_connection(host, port)
        writer.write(asks)
        found = await (reads(reader, writer) if reads else reader.read())
        writer.close()
        await server.drain(5)
        return found

    return asyncio.run(asyncio.wait_for(run(), 20))


def test_bytes_have_their_type_and_are_packed_where_asked_for():
    async def answer(request):
        assert request.query == {"a": "1"}
        return Response(status=200, body=b"x" * 5000, content_type="text/plain", headers={"x-own": "y"})

    asks = b"GET /f?a=1 HTTP/1.1\r\nhost: a\r\nconnection: close\r\naccept-encoding: gzip\r\n\r\n"
    head, _, body = talk(answer, asks=asks).partition(b"\r\n\r\n")
    assert b"content-type: text/plain" in head and b"content-encoding: gzip" in head and b"x-own: y" in head
    assert gzip.decompress(body) == b"x" * 5000


def test_json_is_not_packed_unasked():
    async def answer(_):
        return Response(status=200, content={"a": "x" * 5000})

    _, _, body = talk(answer, asks=b"GET / HTTP/1.1\r\nconnection: close\r\n\r\n").partition(b"\r\n\r\n")
    assert json.loads(body) == {"a": "x" * 5000}


def test_an_answer_without_an_end_is_sent_as_it_comes_and_ends_when_nobody_hears_it():
    ended = asyncio.Event()

    async def chunks():
        try:
            number = 0
            while True:
                number += 1
                yield b"%d\n" % number
                await asyncio.sleep(0 if number < 3 else 3600)
        finally:
            ended.set()

    async def answer(_):
        return Response(status=200, chunks=chunks(), content_type="text/event-stream")

    async def reads(reader, writer):
        head = await reader.readuntil(b"\r\n\r\n")
        lines = [await reader.readline() for _ in range(3)]
        writer.close()
        await asyncio.wait_for(ended.wait(), 10)
        return head, lines

    head, lines = talk(answer, asks=b"GET / HTTP/1.1\r\nhost: a\r\n\r\n", reads=reads)
    assert b"content-length" not in head and b"connection: close" in head and lines == [b"1\n", b"2\n", b"3\n"]
