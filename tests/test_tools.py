"""tools.py: calls that go well and calls that go wrong in every way, and what is counted."""

import asyncio
import collections
import functools
import json
import threading
import time

import pytest

import tools
from parsing import Call


def add(a: int, b: int = 0) -> int:
    """Adds.

    Args:
        a: The first.
        b: The second.
    """
    return a + b


async def slow_add(a: int) -> int:
    """Adds 1 later.

    Args:
        a: The number.
    """
    await asyncio.sleep(0.01)
    return a + 1


def anything(what: str):
    """Does what it is told.

    Args:
        what: One of the following.
    """
    if what == "raise":
        raise KeyError("no such key")
    if what == "exit":
        raise SystemExit(3)
    if what == "stop":
        raise StopIteration
    if what == "cancel":
        raise asyncio.CancelledError
    if what == "time out":
        raise TimeoutError("the database is away")
    if what == "unspeakable":
        raise Unspeakable
    if what == "large":
        return "x" * 10_000_000
    if what == "cyclic":
        cycle = []
        cycle.append(cycle)
        return cycle
    return {"none": None, "list": [1, "\u2211"], "object": object}[what]


class Unspeakable(Exception):
    def __str__(self):
        raise RuntimeError("no words")


async def async_anything(what: str):
    """The same, async.

    Args:
        what: The same.
    """
    return anything(what)


RELEASE = threading.Event()


def endless() -> None:
    """Returns when the test is over."""
    RELEASE.wait(60)


async def async_endless() -> None:
    """Ignores that it is cancelled."""
    while not RELEASE.is_set():
        try:
            await asyncio.sleep(0.05)
        except asyncio.CancelledError:
            pass


TOOLS = {tool.__name__: tool for tool in
         (add, slow_add, anything, async_anything, endless, async_endless)}  # fmt: skip


def answers(*calls, timeout_s=5.0, max_concurrent=4, one_after_another=True):
    """([(content, failed) of each call], {metric: values}, seconds)."""
    records = collections.defaultdict(list)

    async def run():
        runner = tools.ToolRunner(
            max_concurrent=max_concurrent,
            timeout_s=timeout_s,
            record=lambda name, value: records[name].append(float(value)),
        )
        start = time.monotonic()
        if one_after_another:
            found = [await runner.answer(call, TOOLS) for call in calls]
        else:
            found = await asyncio.gather(*(runner.answer(call, TOOLS) for call in calls))
        seconds = time.monotonic() - start
        RELEASE.set()
        await asyncio.sleep(0.1)
        return [(message["content"], failed) for message, failed in found], seconds

    RELEASE.clear()
    found, seconds = asyncio.run(run())
    return found, records, seconds


def test_results_are_text_or_json_and_every_call_is_timed():
    one, none = {"what": "list"}, {"what": "none"}
    calls = [Call("add", {"a": 1, "b": 2}), Call("slow_add", {"a": 1}), Call("anything", one)]
    calls += [Call("anything", none), Call("async_anything", one)]
    found, records, _ = answers(*calls)
    assert found == [(text, False) for text in ("3", "2", '[1, "\u2211"]', "null", '[1, "\u2211"]')]
    assert len(records["tools/latency_s"]) == 5 and records["tools/add/call_count"] == [1]
    assert records["tools/anything/failure_count"] == [0, 0]
    assert len(records["tools/anything/latency_s"]) == 2


@pytest.mark.parametrize("name", ["anything", "async_anything"])
@pytest.mark.parametrize(
    "what, error",
    [
        ("raise", "KeyError: 'no such key'"),
        ("exit", "RuntimeError: SystemExit: 3"),
        ("stop", "RuntimeError: "),
        ("cancel", "RuntimeError: "),
        ("time out", "TimeoutError: the database is away"),
        ("unspeakable", "Unspeakable"),
        ("cyclic", "ValueError: Circular reference detected"),
        ("large", "the result has 10000000 characters, which do not fit the context"),
    ],
)
def test_whatever_a_tool_does_the_model_reads_an_error(name, what, error):
    ((content, failed),), records, _ = answers(Call(name, {"what": what}))
    assert failed and json.loads(content)["error"].startswith(error)
    assert records[f"tools/{name}/failure_count"] == [1]
    assert "tools/timeout_count" not in records  # also not if the tool itself says so


def test_calls_that_cannot_be_made_are_answered_and_counted():
    calls = [
        Call("ad", {"a": 1}),
        Call("add", {"x": 1}),
        Call("add", {}),
        Call("", error="no JSON"),
    ]
    found, records, _ = answers(*calls)
    errors = [json.loads(content)["error"] for content, failed in found if failed]
    assert errors[0].startswith("there is no tool 'ad'; there are add, anything")
    assert errors[1:3] == [
        "TypeError: missing a required argument: 'a'",
        "TypeError: missing a required argument: 'a'",
    ]
    assert errors[3] == "no JSON"
    assert records["tools/unknown_name_count"] == records["tools/malformed_count"] == [1]
    assert records["tools/add/failure_count"] == [1, 1] and "tools/ad/call_count" not in records


@pytest.mark.parametrize("name", ["endless", "async_endless"])
def test_call_that_never_returns_is_given_up(name):
    ((content, failed),), records, seconds = answers(Call(name), timeout_s=0.2)
    assert failed and json.loads(content)["error"] == "no result within 0.2 s"
    assert 0.2 <= seconds < 5
    assert records["tools/timeout_count"] == records[f"tools/{name}/failure_count"] == [1]
    assert records["tools/abandoned_count"] == ([1] if name == "endless" else [])


def test_threads_that_are_lost_are_replaced_and_block_nobody():
    # 6 calls that never return on 2 places: without new threads the last would wait for ever
    calls = [Call("endless")] * 6 + [Call("add", {"a": 1})]
    found, records, _ = answers(*calls, timeout_s=0.1, max_concurrent=2)
    assert [failed for _, failed in found] == [True] * 6 + [False]
    assert records["tools/abandoned_count"] == [1] * 6


def test_a_place_is_waited_for_outside_of_the_time_limit():
    calls = [Call("endless")] * 3  # one place: the third waits 0.4 s, and has its own 0.2 s then
    found, _, seconds = answers(*calls, timeout_s=0.2, max_concurrent=1, one_after_another=False)
    assert all(failed for _, failed in found) and seconds >= 0.6


def test_threads_are_used_again():
    names = []

    async def run():
        threads = tools.Threads(4, lambda *record: None)
        for _ in range(5):
            names.append(await threads.run(threading.get_ident))

    asyncio.run(run())
    assert len(set(names)) == 1


class Holder:
    def method(self, a: int) -> int:
        """A method.

        Args:
            a: Something.
        """

    def bare(self, a):
        """No hints."""


def test_schema_comes_from_hints_and_docstring_and_says_what_is_missing():
    function = tools.schema(add)["function"]
    assert function["name"] == "add" and function["parameters"]["required"] == ["a"]
    assert tools.schema(Holder().method) is tools.schema(Holder().method)
    assert tools.schema(Holder().method)["function"]["parameters"]["required"] == ["a"]
    with pytest.raises(ValueError, match="the tool bare cannot be described .* type hint"):
        tools.schema(Holder().bare)
    with pytest.raises(ValueError, match="the tool local cannot be described .* no docstring"):

        def local(a: int):
            pass

        tools.schema(local)
    for nameless in (functools.partial(add, b=1), lambda: 0):
        with pytest.raises(ValueError, match="has no name to call it by"):
            tools.schema(nameless)
