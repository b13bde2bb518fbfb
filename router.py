"""Which server a request goes to, and from which adapter a rollout samples.

    Router       what the rollout loop samples from: one Sampler a server
    make_router  ... made of the options of a run
    Stale        a rollout's adapter is more than max_staleness syncs old: it is dropped and counted

With several servers the least loaded is asked; one that does not answer is left out, and its
requests go to another. It is let in again when it answers under the version that the trainer has
announced: a server that was restarted says "default", one that missed a sync an older number. With
one server nothing of this happens; its Sampler waits for it.

With adapters every rollout samples from the adapter that was the newest when it began, all of its
turns, and is stopped when that is too old (adapters.py).

Test: pytest tests/test_router.py
"""

import asyncio
import contextlib
import contextvars
import time
from collections import Counter
from collections.abc import Callable

import msgspec
import numpy as np

from chat import TurnRecord
from sampler import Sampler, ServerLost

ATTEMPTS = 2  # of a request at one server of several
LOOK_S = 1.0  # between two looks at which servers are current

_pinned: contextvars.ContextVar[int] = contextvars.ContextVar("version that a rollout began with")


class Stale(Exception):
    """The rollout's adapter is gone, or about to be."""


class Router:
    """Several Samplers as one. `version()` is the newest that the trainer has announced."""

    def __init__(self, samplers: list[Sampler], version: Callable[[], int], max_staleness: int):
        self.samplers, self.version, self.max_staleness = samplers, version, max_staleness
        self.adapters = samplers[0].adapter is not None
        self.load = Counter()  # requests in flight
        self.moved_count = 0  # requests sent again to another server
        self.out: dict[Sampler, str] = {}  # left out, and why
        self._running: dict[asyncio.Task, int] = {}  # requests to adapters: version
        self._stopped: set[asyncio.Task] = set()
        self._watch: asyncio.Task | None = None
        if len(samplers) > 1:
            for sampler in samplers:
                sampler.max_attempts = ATTEMPTS

    async def start(self) -> None:
        """As Sampler.start(), for each."""
        await asyncio.gather(*(sampler.start() for sampler in self.samplers))
        if len(self.samplers) > 1:
            self._watch = asyncio.create_task(self._look())

    async def close(self) -> None:
        if self._watch:
            self._watch.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._watch
        await asyncio.gather(*(sampler.close() for sampler in self.samplers))

    # ---- what the loop reads

    @property
    def max_model_len(self) -> int | None:
        lengths = [sampler.max_model_len for sampler in self.samplers]
        return None if None in lengths else min(lengths)

    @property
    def truncated(self) -> bool:
        return self.samplers[0].truncated

    @property
    def generated_tokens(self) -> int:
        return sum(sampler.generated_tokens for sampler in self.samplers)

    @property
    def retry_count(self) -> int:
        return self.moved_count + sum(sampler.retry_count for sampler in self.samplers)

    @property
    def down_since(self) -> float | None:
        """None while one server answers."""
        times = [sampler.down_since for sampler in self.samplers]
        return None if None in times else min(times)

    async def read(self, path: str) -> str | None:
        """The texts of all servers that answer, one after another."""
        texts = await asyncio.gather(*(sampler.read(path) for sampler in self.samplers))
        return "\n".join(text for text in texts if text) or None

    # ---- sampling

    def pin(self) -> None:
        """A rollout begins, in this task: with adapters it keeps to the present version."""
        _pinned.set(self.version())

    async def sample(self, prompt_ids, version: int = 0) -> TurnRecord:
        if not self.adapters:
            return await self._sample(prompt_ids, version)
        version = _pinned.get(version)
        if version < self.version() - self.max_staleness:
            raise Stale
        task = asyncio.create_task(self._sample(prompt_ids, version))
        self._running[task] = version
        try:
            return await task
        except asyncio.CancelledError:
            if task in self._stopped:
                raise Stale from None
            raise
        finally:
            del self._running[task]
            self._stopped.discard(task)

    def stop_stale(self) -> int:
        """Stop requests to adapters that are too old; -> the oldest version that is sampled."""
        for task, version in self._running.items():
            if version < self.version() - self.max_staleness and task not in self._stopped:
                self._stopped.add(task)
                task.cancel()
        return min(self._running.values(), default=self.version())

    async def _sample(self, prompt_ids, version) -> TurnRecord:
        start = time.monotonic()
        while True:
            sampler = await self._least_loaded()
            self.load[sampler] += 1
            try:
                return await sampler.sample(prompt_ids, version)
            except ServerLost as error:
                if len(self.samplers) == 1:
                    raise
                self.out[sampler] = str(error)
                if time.monotonic() - start > sampler.timeout_s:  # they answer others: it is this
                    raise TimeoutError(f"no server answered a request; {error}") from error
                self.moved_count += 1
            finally:
                self.load[sampler] -= 1

    async def _least_loaded(self) -> Sampler:
        start = time.monotonic()
        while True:
            present = [sampler for sampler in self.samplers if sampler not in self.out]
            if present:
                return min(present, key=self.load.__getitem__)
            if time.monotonic() - start > self.samplers[0].timeout_s:
                raise ServerLost(
                    f"none of the vLLM servers answers: {'; '.join(self.out.values())}"
                )
            await asyncio.sleep(0.1)

    async def _look(self) -> None:
        """Every second: which servers have the weights that they should have?"""
        while True:
            await asyncio.sleep(LOOK_S)
            await asyncio.gather(*map(self._look_at, self.samplers))

    async def _look_at(self, sampler) -> None:
        announced = self.version()  # before the server is asked: it may be ahead, never behind
        path = "/v1/models" if self.adapters else "/weight_info"
        text = await sampler.read(path)
        if text is None:  # also a server without that path: it is let in when a request is answered
            self.out.setdefault(sampler, f"{sampler.url} does not answer {path}")
        elif self.adapters:
            names = {entry["id"] for entry in msgspec.json.decode(text)["data"]}
            self._let(sampler, sampler.model_name(announced) in names)
        else:
            has = str(msgspec.json.decode(text)["weight_version"])
            self._let(sampler, has.isdecimal() and int(has) >= announced)

    def _let(self, sampler, is_current):
        if is_current:
            self.out.pop(sampler, None)
        else:
            self.out.setdefault(sampler, f"{sampler.url} has not got the newest weights")


def make_router(config, version, *, model_name, eos_token_ids, start_index, adapter_name) -> Router:
    """The Router over the servers of a run; config is the worker's, version() as in Router."""
    centered = config.score_centering and config.loss == "grpo"
    samplers = [
        Sampler(
            url,
            model_name,
            max_tokens=config.max_completion_length,
            temperature=config.temperature,
            top_p=config.top_p,
            top_k=config.top_k,
            min_p=config.min_p,
            num_logprobs=config.num_sampler_logprobs if centered else 0,
            eos_token_ids=eos_token_ids,
            timeout_s=config.vllm_server_timeout,
            # A resumed run starts elsewhere: it must not draw the first replies again.
            seed=int(np.random.SeedSequence([config.seed, start_index, i]).generate_state(1)[0]),
            adapter=adapter_name,
        )
        for i, url in enumerate(config.vllm_server_base_url.split(","))
    ]
    return Router(samplers, version, config.max_staleness)
