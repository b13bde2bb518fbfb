"""As much of an HTTP/1.1 client as the rollout worker needs: requests whole, answers whole, many at
once, each connection used again. RFC 9112; no redirects, cookies, compression or proxies.

Why not a library: a rollout is one request, and on one core aiohttp takes 280 us for it, this file
80; parsing an answer of 256 tokens takes 110 (bench/rollout.py). error_message() is for both
clients, this and server.py's.

Test: pytest tests/test_http1.py
"""

import asyncio
import json
import ssl
import time
from typing import NamedTuple
from urllib.parse import urlsplit

# uvicorn closes an idle connection after 5 s; reusing one that it is just closing costs a retry.
KEEP_ALIVE_S = 3.0


class Answer(NamedTuple):
    status: int
    body: bytes
    keep: bool  # the connection may be used again


def parse_answer(received: bytearray, is_closed: bool = False) -> Answer | None:
    """The answer that `received` begins with, None while it is not whole. ValueError if it is none.

    is_closed: nothing more will come, so that an answer without a length ends here.
    """
    end = received.find(b"\r\n\r\n")
    if end < 0:
        return None
    first, *lines = bytes(received[:end]).split(b"\r\n")
    version, status = first.split(b" ", 2)[:2]
    if not version.startswith(b"HTTP/1."):
        raise ValueError(f"it begins with {first[:40]!r}")
    headers = {}
    for line in lines:
        name, _, value = line.partition(b":")
        headers[name.strip().lower()] = value.strip().lower()
    begin, status = end + 4, int(status)
    keep = version == b"HTTP/1.1" and headers.get(b"connection") != b"close"
    if status in (204, 304):
        return Answer(status, b"", keep)
    if b"transfer-encoding" in headers:
        body = _dechunked(received, begin)
        return None if body is None else Answer(status, body, keep)
    if b"content-length" in headers:
        n = int(headers[b"content-length"])
        if len(received) < begin + n:
            return None
        # The view saves a copy: an answer with nine log-probs a token has 600 bytes a token.
        return Answer(status, bytes(memoryview(received)[begin : begin + n]), keep)
    return Answer(status, bytes(received[begin:]), False) if is_closed else None


def _dechunked(received: bytearray, at: int) -> bytes | None:
    """The body whose chunks begin at `at`, None while its end is missing."""
    parts = []
    while (line := received.find(b"\r\n", at)) >= 0:
        n = int(received[at:line].partition(b";")[0], 16)
        if n == 0:  # the chunks end; trailers are not read, an empty line follows them
            return b"".join(parts) if received.find(b"\r\n\r\n", line - 2) >= 0 else None
        parts.append(bytes(received[line + 2 : line + 2 + n]))
        at = line + 2 + n + 2
    return None


class _Connection(asyncio.BufferedProtocol):
    """One request at a time. What arrives comes through a buffer that all connections share."""

    def __init__(self, buffer: memoryview):
        self.buffer, self.received, self.answer, self.used_at = buffer, bytearray(), None, 0.0

    async def ask(self, request: bytes) -> Answer:
        self.answer = asyncio.get_running_loop().create_future()
        self.transport.write(request)
        return await self.answer

    def connection_made(self, transport):
        self.transport = transport

    def get_buffer(self, size_hint):
        return self.buffer

    def buffer_updated(self, n):
        self.received += self.buffer[:n]
        self._look(is_closed=False)

    def connection_lost(self, error):
        self._look(is_closed=True)
        if self.answer is not None and not self.answer.done():
            self.answer.set_exception(
                error or ConnectionResetError("the connection was closed before a whole answer")
            )

    def _look(self, is_closed):
        if self.answer is None or self.answer.done():
            self.transport.abort()  # nobody asked: what it says cannot be trusted
            return
        try:
            answer = parse_answer(self.received, is_closed)
        except ValueError as error:
            self.answer.set_exception(ConnectionError(f"the answer is not HTTP: {error}"))
            self.transport.abort()
            return
        if answer is not None:
            self.received = bytearray()
            self.answer.set_result(answer)


class Client:
    """Requests to one server. Create it anywhere; the rest on one event loop."""

    def __init__(self, url: str):
        parts = urlsplit(url)
        self._host, self._path = parts.hostname, parts.path.rstrip("/")
        self._ssl = ssl.create_default_context() if parts.scheme == "https" else None
        self._port = parts.port or (443 if self._ssl else 80)
        self._name = parts.netloc.rpartition("@")[2]
        self._idle: list[_Connection] = []  # the one used last is the last
        self._buffer = memoryview(bytearray(2**18))

    async def request(
        self, method: str, path: str, body: bytes = b"", *, timeout_s: float
    ) -> tuple[int, bytes]:
        """(status, body). TimeoutError after timeout_s; OSError if the connection cannot be made or
        breaks. A JSON body if there is one."""
        head = (
            f"{method} {self._path}{path} HTTP/1.1\r\nHost: {self._name}\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        connection = None
        try:
            async with asyncio.timeout(timeout_s):
                connection = self._used_before() or await self._open()
                answer = await connection.ask(head.encode() + body)
        except BaseException:
            if connection is not None:
                connection.transport.abort()
            raise
        if answer.keep:
            connection.used_at = time.monotonic()
            self._idle.append(connection)
        else:
            connection.transport.close()
        return answer.status, answer.body

    async def close(self) -> None:
        """Close what is idle. A request in progress closes its own when it is cancelled."""
        while self._idle:
            self._idle.pop().transport.abort()

    def _used_before(self) -> _Connection | None:
        while self._idle:
            connection = self._idle.pop()
            if not connection.transport.is_closing():
                if time.monotonic() - connection.used_at < KEEP_ALIVE_S:
                    return connection
                connection.transport.abort()
        return None

    async def _open(self) -> _Connection:
        loop = asyncio.get_running_loop()
        _, connection = await loop.create_connection(
            lambda: _Connection(self._buffer), self._host, self._port, ssl=self._ssl
        )
        return connection


def error_message(answer: bytes) -> str:
    """vLLM's own words: {"error": str}, {"error": {"message": str}}, {"detail": ...} or text."""
    try:
        body = json.loads(answer)
        message = body.get("error") or body.get("detail") or body
        return str(message.get("message", message) if isinstance(message, dict) else message)
    except (ValueError, AttributeError):
        return answer.decode(errors="replace").strip()[:500] or "without a word"
