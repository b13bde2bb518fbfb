"""Tools: what the model is told of a function, and its calls, which stop nothing else.

A tool is a Python function, sync or async, with type hints and a Google-style docstring, or a
public method of an environment. A call that fails in whatever way (a name that does not exist,
arguments that cannot be read or do not fit, an exception, a result that is too long, none within
`timeout_s`) becomes an error that the model sees, and a counter; it never ends a rollout.

Sync functions run in threads. One that does not return is abandoned: its place is free again, the
thread is a daemon, and it serves again should it ever come back. The pool has as many places as
rollouts may run at once, so tools that share state must be thread-safe.

Test: pytest tests/test_tools.py
"""

import asyncio
import contextlib
import functools
import inspect
import json
import queue
import threading
import time

import parsing


def is_async(func) -> bool:
    """Whether calling `func` gives a coroutine; also for partials and objects with __call__."""
    while isinstance(func, functools.partial):
        func = func.func
    if isinstance(func, type):  # makes an instance, which may be callable and async
        return False
    return inspect.iscoroutinefunction(func) or inspect.iscoroutinefunction(
        getattr(func, "__call__", None)  # noqa: B004 - an instance with `async def __call__`
    )


def schema(tool) -> dict:
    """What chat templates are given of a tool: its JSON schema (transformers' get_json_schema).

    ValueError names what is missing in its hints or docstring.
    """
    return _schema(getattr(tool, "__func__", tool))  # a method: once for all instances


@functools.cache
def _schema(function) -> dict:
    from transformers.utils import get_json_schema  # here: it costs a second

    name = getattr(function, "__name__", None)
    if name is None or name == "<lambda>":
        raise ValueError(
            f"the tool {function!r} has no name to call it by: write it as a function, "
            "with type hints and a docstring"
        )
    try:
        return get_json_schema(function)
    except Exception as error:  # transformers raises several of its own
        raise ValueError(
            f"the tool {name} cannot be described to the model: {error}; give every argument a "
            "type hint and a line in the docstring's Args section"
        ) from error


class OutOfTime(TimeoutError):
    """A call took longer than its limit; unlike a TimeoutError that the function itself raised."""


class Threads:
    """Threads for functions that may block, `n` calls at a time; more wait. For one event loop."""

    def __init__(self, n: int, record):
        self._places, self._record = asyncio.Semaphore(n), record
        self._idle: list[queue.SimpleQueue] = []  # inboxes of threads without a call

    async def run(self, func, timeout_s: float | None = None):
        """func(), or OutOfTime. Giving up, also by a cancellation, abandons the thread."""
        async with self._places:
            loop = asyncio.get_running_loop()
            inbox = self._idle.pop() if self._idle else self._start()
            outcome = loop.create_future()
            inbox.put((func, loop, outcome))
            try:
                async with asyncio.timeout(timeout_s):
                    result, error = await outcome
            except BaseException as stopped:  # TimeoutError or CancelledError
                self._record("tools/abandoned_count", 1)
                if isinstance(stopped, TimeoutError):
                    raise OutOfTime from stopped
                raise
        if error is not None:
            raise error
        return result

    def _start(self) -> queue.SimpleQueue:
        inbox = queue.SimpleQueue()
        threading.Thread(target=self._work, args=(inbox,), daemon=True, name="tool").start()
        return inbox

    def _work(self, inbox) -> None:
        while True:
            func, loop, outcome = inbox.get()
            try:
                found = func(), None
            except Exception as error:
                found = None, error
            except BaseException as error:  # SystemExit, CancelledError: not from a tool
                found = None, RuntimeError(f"{type(error).__name__}: {error}")
            with contextlib.suppress(RuntimeError):  # the loop has ended
                loop.call_soon_threadsafe(self._returned, inbox, outcome, found)
            del func, outcome, found  # the next call may be long in coming

    def _returned(self, inbox, outcome, found) -> None:
        self._idle.append(inbox)
        if not outcome.done():  # not abandoned
            outcome.set_result(found)


async def _run_async(func, timeout_s: float | None):
    """await func(), or OutOfTime; a coroutine that ignores its cancellation is left alone."""

    async def guarded():
        try:
            return await func()
        except (SystemExit, KeyboardInterrupt) as error:  # would end the event loop
            raise RuntimeError(f"{type(error).__name__}: {error}") from error

    task = asyncio.ensure_future(guarded())
    try:
        done, _ = await asyncio.wait([task], timeout=timeout_s)
    finally:
        task.cancel()
    if not done:
        raise OutOfTime
    if task.cancelled():  # by itself: we are not
        raise RuntimeError("it was cancelled")
    return task.result()


class ToolRunner:
    """Runs the calls of all rollouts of one event loop and records what became of them."""

    def __init__(self, *, max_concurrent: int, timeout_s: float, record):
        self.timeout_s, self.record = timeout_s, record
        self.max_result_chars = 100_000  # that are tokenized; see RolloutLoop._learn_tools
        self.threads = Threads(max_concurrent, record)
        self.out_of_time: set[int] = set()  # id() of environments in which a call may go on

    async def call(self, func, timeout_s: float | None = None):
        """func(), in a thread unless it is async."""
        if is_async(func):
            return await _run_async(func, timeout_s)
        result = await self.threads.run(func, timeout_s)
        if inspect.isawaitable(result):  # a plain function may wrap an async one
            return await _run_async(lambda: result, timeout_s)
        return result

    async def answer(self, call: parsing.Call, tools: dict) -> tuple[dict, bool]:
        """(the tool message that answers one call, whether the call failed)."""
        result, error = None, call.error
        if error is not None:
            self.record("tools/malformed_count", 1)
        elif call.name not in tools:
            self.record("tools/unknown_name_count", 1)
            error = f"there is no tool {call.name!r:.80}; there are {', '.join(sorted(tools))}"
        else:
            result, error = await self._run(tools[call.name], call)
        text = result if error is None else json.dumps({"error": error}, ensure_ascii=False)
        message = {"role": "tool", "name": call.name, "tool_call_id": call.id, "content": text}
        return message, error is not None

    def too_long(self, message: dict, failed: bool) -> tuple[dict, bool]:
        """What `answer` gave, as an error: the conversation has no room for the result."""
        if failed:
            return message, True
        self.record(f"tools/{message['name']}/failure_count", 1)
        error = json.dumps({"error": "the result does not fit the context"})
        return message | {"content": error}, True

    async def _run(self, tool, call) -> tuple[str | None, str | None]:
        """(result, None) or (None, error) of a call of an existing tool, with its records."""
        result = error = None
        start = time.monotonic()
        try:
            inspect.signature(tool).bind(**call.arguments)
            if is_async(tool):
                run = functools.partial(tool, **call.arguments)
            else:
                run = functools.partial(_text_of_call, tool, call.arguments)
            result = _text(await self.call(run, self.timeout_s))
            if len(result) > self.max_result_chars:
                error = f"the result has {len(result)} characters, which do not fit the context"
        except OutOfTime:
            error = f"no result within {self.timeout_s:g} s"
            self.record("tools/timeout_count", 1)
            self.out_of_time.add(id(getattr(tool, "__self__", None)))
        except Exception as raised:
            error = _described(raised)
        seconds = time.monotonic() - start
        self.record("tools/latency_s", seconds)
        self.record(f"tools/{call.name}/latency_s", seconds)
        self.record(f"tools/{call.name}/call_count", 1)
        self.record(f"tools/{call.name}/failure_count", error is not None)
        return result, error


def _text_of_call(tool, arguments):
    value = tool(**arguments)
    return value if inspect.isawaitable(value) else _text(value)  # in the thread: it may be large


def _text(value) -> str:
    """A result as the model reads it: text as it is, anything else as JSON."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)


def _described(error: Exception) -> str:
    try:
        return f"{type(error).__name__}: {error}"[:2000]
    except Exception:  # its __str__ is broken
        return type(error).__name__
