"""http1.py: an answer is the same however it arrives, and a broken one is an error.

Run: pytest tests/test_http1.py
"""

import asyncio
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import http1
from http1 import Answer, parse_answer

PLAIN = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\nContent-Length: 5\r\n\r\n12345"
CHUNKED = (
    b"HTTP/1.1 400 Bad Request\r\nTransfer-Encoding: chunked\r\nConnection: close\r\n\r\n"
    b"3;a=b\r\n123\r\nA\r\n4567890abc\r\n0\r\nTrailer: x\r\n\r\n"
)


@pytest.mark.parametrize(
    "received, answer",
    [
        (PLAIN, Answer(200, b"12345", True)),
        (CHUNKED, Answer(400, b"1234567890abc", False)),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n", Answer(200, b"", True)),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", Answer(200, b"", True)),
        (b"HTTP/1.1 204 No Content\r\n\r\n", Answer(204, b"", True)),
        (b"HTTP/1.0 200 OK\r\nContent-Length: 1\r\n\r\nx", Answer(200, b"x", False)),
    ],
)
def test_an_answer_is_whole_with_its_last_byte_and_not_before(received, answer):
    for n in range(len(received)):
        assert parse_answer(bytearray(received[:n])) is None
    assert parse_answer(bytearray(received)) == answer


def test_an_answer_without_a_length_ends_with_the_connection():
    received = bytearray(b"HTTP/1.1 200 OK\r\n\r\nabc")
    assert parse_answer(received) is None
    assert parse_answer(received, is_closed=True) == Answer(200, b"abc", False)


async def served(serve, use):
    """use(Client) with a server whose connections are handled by serve(reader, writer)."""
    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    client = http1.Client(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/base/")
    try:
        return await use(client)
    finally:
        await client.close()
        server.close()


async def read_request(reader):
    head = await reader.readuntil(b"\r\n\r\n")
    length = int(head.lower().partition(b"content-length:")[2].split()[0])
    return head, await reader.readexactly(length)


@given(st.binary(max_size=2000), st.lists(st.integers(1, 400), max_size=8))
@settings(max_examples=40, deadline=None)
def test_any_pieces_give_the_whole_body(body, sizes):
    async def serve(reader, writer):
        while True:
            head, got = await read_request(reader)
            assert head.startswith(b"POST /base/path HTTP/1.1\r\n") and got == body
            answer = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body)
            for size in [*sizes, len(answer)]:
                writer.write(answer[:size])
                answer = answer[size:]
                await writer.drain()
                await asyncio.sleep(0)

    async def use(client):
        for _ in range(2):  # the second on the same connection
            assert await client.request("POST", "/path", body, timeout_s=5) == (200, body)
            assert len(client._idle) == 1

    asyncio.run(served(serve, use))


@pytest.mark.parametrize(
    "answer, error, message",
    [
        (PLAIN[:-1], ConnectionResetError, "closed before a whole answer"),
        (b"", ConnectionResetError, "closed before a whole answer"),
        (b"SSH-2.0-x 1\r\n\r\n", ConnectionError, "not HTTP: it begins with b'SSH"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: x\r\n\r\n", ConnectionError, "not HTTP"),
    ],
)
def test_a_broken_answer_is_an_error_and_its_connection_is_not_used_again(answer, error, message):
    async def serve(reader, writer):
        await read_request(reader)
        writer.write(answer)
        writer.close()

    async def use(client):
        with pytest.raises(error, match=message):
            await client.request("GET", "/", timeout_s=5)
        assert client._idle == []

    asyncio.run(served(serve, use))


def test_a_request_that_ran_out_of_time_leaves_no_answer_to_the_next(monkeypatch):
    n_connections = 0

    async def serve(reader, writer):
        nonlocal n_connections
        n_connections += 1
        for wait_s in (0.0, 0.5):
            _, body = await read_request(reader)
            await asyncio.sleep(wait_s)
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body))

    async def use(client):
        assert await client.request("POST", "/", b"one", timeout_s=5) == (200, b"one")
        with pytest.raises(TimeoutError):
            await client.request("POST", "/", b"two", timeout_s=0.1)
        assert await client.request("POST", "/", b"three", timeout_s=5) == (200, b"three")
        assert n_connections == 2
        monkeypatch.setattr(http1, "KEEP_ALIVE_S", 0.0)  # too old to be trusted
        assert await client.request("POST", "/", b"four", timeout_s=5) == (200, b"four")
        assert n_connections == 3

    asyncio.run(served(serve, use))


def test_a_server_that_is_not_there_is_an_oserror():
    async def use(_):
        with pytest.raises(OSError):
            await http1.Client("http://127.0.0.1:9").request("GET", "/", timeout_s=5)

    start = time.monotonic()
    asyncio.run(served(lambda *_: None, use))
    assert time.monotonic() - start < 5
