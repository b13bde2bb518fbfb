"""Runs that survive: servers that go, pause and come back, long syncs, workers that hang or are
interrupted; and every prompt accounted for. The limits themselves are tested in test_rollout.py.

Run: pytest tests/test_asynchrony.py
"""

import asyncio
import contextlib
import os
import random
import signal
import time
import types

import numpy as np
import pytest
import requests
import soak
from aiohttp import web
from test_rollout import (
    FakeServer,
    Run,
    first_id,
    first_number,
    is_alive,
    prompts,
    started_worker,
    taken,
    until,
)

import load
import rollout
import sampler
from rollout import RolloutLoop
from tasks import Task

# --------------------------------------------------------------------- a server that comes and goes


class MortalServer(FakeServer):
    """One that is killed and started again."""

    async def _restart(self, away_s):
        """As after kill -9: connections break, nobody listens, then an empty server is there."""
        for connection in list(self.runner.server.connections):
            connection.transport.abort()
        self.paused = False
        await self.runner.cleanup()
        await asyncio.sleep(away_s)
        app = web.Application()
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/metrics", self._metrics)
        app.router.add_post("/inference/v1/generate", self._generate)
        self.runner = web.AppRunner(app)
        await self.runner.setup()
        await web.TCPSite(self.runner, "127.0.0.1", int(self.url.rpartition(":")[2])).start()

    def restart(self, away_s):
        return asyncio.run_coroutine_threadsafe(self._restart(away_s), self.loop)

    async def _end(self):
        for task in asyncio.all_tasks() - {asyncio.current_task()}:
            task.cancel()  # requests that hang
        await self.runner.cleanup()


@pytest.fixture
def server():
    server = MortalServer()
    yield server
    asyncio.run_coroutine_threadsafe(server._end(), server.loop).result(10)
    server.loop.call_soon_threadsafe(server.loop.stop)


def test_a_server_that_was_killed_and_comes_back_costs_nothing_but_time(server, monkeypatch):
    monkeypatch.setattr(sampler, "_FIRST_RETRY_S", 0.02)
    server.delay_s = 0.05
    run = Run(server, prompts(40), first_number, max_concurrent_rollouts=16)

    async def scenario():
        task = asyncio.create_task(run.loop.run())
        for n_before in (20, 60):
            await until(lambda n=n_before: len(run.samples) >= n)
            server.paused = True
            await until(lambda: server.in_flight == 16)
            await asyncio.wrap_future(server.restart(away_s=0.5))
        await task

    asyncio.run(scenario())
    groups = {sample.group_id for sample in run.samples}
    assert len(run.samples) == 160 and groups == set(range(40)) and not run.dropped
    # both times all 16 in flight broke off
    assert run.total("rollout/vllm_retry_count") >= 32
    assert run.total("rollout/failed_count") == run.total("rollout/restarted_count") == 0


def test_requests_in_flight_outlast_a_sync_and_are_back_at_the_cap_after_it(server):
    server.delay_s = 0.1
    server.versions = lambda n: [{"version": str(server.version), "start": 0, "end": n}]
    server.version = 0
    run = Run(server, prompts(2000), first_number, max_concurrent_rollouts=32, max_steps=9)

    async def scenario():
        task = asyncio.create_task(run.loop.run())
        for version in (1, 2, 3):
            await until(lambda: server.in_flight == 32)
            server.paused = True
            await asyncio.sleep(0.2)  # what had been answered is followed by new requests
            await until(lambda: server.in_flight == 32)
            n_before = len(server.requests)
            await asyncio.sleep(0.3)
            assert server.in_flight == 32  # all of them wait in the server,
            assert len(server.requests) == n_before  # the same ones
            server.version = run.shared[rollout.Slot.VERSION] = version
            server.paused = False
            await until(lambda n=n_before: len(server.requests) > n + 32)  # new ones are coming
            server.max_in_flight = 0
            await until(lambda: server.max_in_flight == 32, seconds=2)
        run.shared[rollout.Slot.STOP] = 1
        await task

    asyncio.run(scenario())
    assert run.total("rollout/vllm_retry_count") == 0
    versions = [int(sample.versions.max()) for sample in run.samples]
    assert set(versions) == {0, 1, 2, 3}


def test_a_sync_longer_than_the_heartbeats_limit_is_no_alarm(server, tokenizer_folder):
    task = Task(prompts(500), (first_id,))
    options = dict(rollout_worker_timeout=1.0, max_concurrent_rollouts=16)
    with started_worker(server, tokenizer_folder, task, **options) as worker:
        taken(worker, 32)
        server.paused = True
        deadline = time.monotonic() + 2.5
        while time.monotonic() < deadline:
            worker.check()
            time.sleep(0.05)
        server.paused = False
        taken(worker, 32)
        time.sleep(2.5)  # the trainer compiles, or writes a checkpoint, and asks for nothing
        worker.check()
        taken(worker, 32)


# -------------------------------------------------------------------------------- the worker's life


def hanging(completions, **columns):
    time.sleep(60)


@pytest.mark.parametrize("reward", [hanging, first_id])
def test_the_worker_ends_when_told_whatever_it_waits_for(server, tokenizer_folder, reward):
    if reward is first_id:
        server.bad.extend(["hang"] * 1000)
    with started_worker(server, tokenizer_folder, Task(prompts(9), (reward,))) as worker:
        deadline = time.monotonic() + 60
        while len(server.requests) < 4:
            worker.check()
            assert time.monotonic() < deadline
            time.sleep(0.05)
        time.sleep(0.3)
        worker.stop()
        assert worker._process.exitcode == 0  # by itself: by force it would be -9
        worker.check()


class Blocks(RolloutLoop):
    async def generate_one(self, prompt, tools, group_id=0):
        time.sleep(60)


def test_a_hook_that_blocks_the_event_loop_is_named_and_ended_by_force(server, tokenizer_folder):
    task = Task(prompts(9), (first_id,), rollout_loop=Blocks)
    with started_worker(server, tokenizer_folder, task, rollout_worker_timeout=1.0) as worker:
        with pytest.raises(RuntimeError, match="a hook of the rollout loop blocks its event loop"):
            deadline = time.monotonic() + 60
            while time.monotonic() < deadline:
                worker.check()
                time.sleep(0.05)
        worker.stop(timeout=0.5)
        assert worker._process.exitcode == -signal.SIGKILL
        assert not is_alive(worker._process.pid)


def test_an_interrupt_from_the_terminal_is_left_to_the_trainer(server, tokenizer_folder):
    with started_worker(server, tokenizer_folder, Task(prompts(500), (first_id,))) as worker:
        taken(worker, 8)
        os.kill(worker._process.pid, signal.SIGINT)
        taken(worker, 200)
        os.kill(worker._process.pid, signal.SIGTERM)
        with pytest.raises(RuntimeError, match=r"died \(exit code -15, SIGTERM\)"):
            while True:
                worker.get(5.0)


# ----------------------------------------------------------------------- every prompt accounted for


class Unlucky(RolloutLoop):
    """One rollout in ten raises, one prompt in seven is not admitted."""

    def filter_prompt(self, row_index, row, epoch):
        return row_index % 7 != 3

    async def generate_one(self, prompt, tools, group_id=0):
        if random.random() < 0.1:
            raise ConnectionResetError("the judge is away")
        return await super().generate_one(prompt, tools, group_id)


def sometimes_equal(completions, answer, **columns):
    """Rows 0, 5, 10, ... get equal rewards."""
    return [0.0 if answer[0] % 50 == 0 else float(i) for i in range(len(completions))]


def test_every_prompt_is_sent_or_dropped_for_a_counted_reason(server, monkeypatch):
    monkeypatch.setattr(sampler, "_FIRST_RETRY_S", 0.002)
    random.seed(0)
    server.bad.extend(random.choices([None, 500, 503, "garbage"], [80, 10, 5, 5], k=2000))
    run = Run(server, prompts(210), sometimes_equal, loop=Unlucky, num_train_epochs=2).to_the_end()
    sent = {sample.group_id for sample in run.samples}
    assert len(run.dropped) == len(set(run.dropped))
    assert sent | set(run.dropped) == set(range(420)) and not sent & set(run.dropped)
    filtered = run.total("rollout/filtered_count")
    assert filtered == 2 * 30
    dropped = sum(value * weight for value, weight in run.records["frac_reward_zero_std"])
    assert len(run.dropped) == filtered + dropped
    assert dropped >= 2 * 36  # 42 rows with equal rewards, 6 of which are not admitted
    # rollouts: all there, but those that failed twice, in groups that were sent or dropped
    n_rollouts = sum(weight for _, weight in run.records["completions/clipped_ratio"])
    assert n_rollouts + run.total("rollout/failed_count") == 4 * (420 - filtered)


def test_staleness_by_token_counts_every_trained_token():
    import feed

    def sample(versions):
        versions = np.array([-1, *versions], dtype=np.int32)
        arrays = dict(input_ids=np.zeros(len(versions)), trained=versions >= 0, versions=versions)
        return types.SimpleNamespace(**arrays, metrics={})

    # at version 5: three tokens 2, 1, 1 updates old and one 0: mean (2 + 1 + 1 + 0) / 4
    records = feed.sample_records([sample([3, 4, 4]), sample([5])], version=5)
    records = {name: (value, weight) for name, value, weight in records}
    assert records["sample/token_staleness_mean"] == (1.0, 4)
    assert records["sample/staleness_mean"] == (1.0, 2)  # of the oldest tokens: (2 + 0) / 2


# -------------------------------------------------------------------------- against a real server


def sampler_of(tiny_server, **options):
    return sampler.Sampler(tiny_server.url, tiny_server.name, timeout_s=30, **options)


async def sampled(client, prompt):
    try:
        await client.start()
        return await client.sample(prompt)
    finally:
        await client.close()


@pytest.mark.server
def test_a_real_server_that_cannot_serve_the_run_is_refused_by_name(tiny_server):
    with pytest.raises(
        sampler.RequestRefused, match="lower num_sampler_logprobs, .* --max-logprobs"
    ):
        asyncio.run(sampled(sampler_of(tiny_server, max_tokens=4, num_logprobs=40), [5, 6]))
    with pytest.raises(
        sampler.RequestRefused, match="600 tokens .* max_model_len 512: lower max_com"
    ):
        asyncio.run(sampled(sampler_of(tiny_server, max_tokens=4), [5] * 600))
    with pytest.raises(ValueError, match=r"serves \[.*\], not 'another'"):
        asyncio.run(sampled(sampler.Sampler(tiny_server.url, "another", max_tokens=4), [5, 6]))


@contextlib.contextmanager
def paused(url):
    requests.post(url + "/pause", params={"mode": "keep"}, timeout=30).raise_for_status()
    try:
        yield
    finally:
        requests.post(url + "/resume", timeout=30).raise_for_status()


def announce(url, version):
    """As at the end of a sync."""
    new = {"new_version": str(version)}
    requests.post(url + "/update_weight_version", json=new, timeout=30).raise_for_status()


def running(url):
    now = load.parse_load(requests.get(url + "/metrics", timeout=5).text)
    return now.running + now.waiting


@pytest.mark.server
def test_syncs_in_mid_generation_label_every_token_and_cost_no_slot(tiny_server, tokenizer_folder):
    task = Task(prompts(500), (first_id,))
    options = dict(max_concurrent_rollouts=8, max_completion_length=160, num_sampler_logprobs=8)
    by_version = []
    announce(tiny_server.url, 10)
    with started_worker(tiny_server, tokenizer_folder, task, **options) as worker:
        by_version += taken(worker, 8)
        for version in (11, 12, 13):
            with paused(tiny_server.url):
                announce(tiny_server.url, version)
            worker.set_version(version)
            asyncio.run(until(lambda: running(tiny_server.url) == 8, seconds=2))
            while by_version[-1].versions.max() != version:  # older ones still lie in the queues
                assert not worker.finished
                by_version += taken(worker, 1)
            by_version += taken(worker, 16)
    spans = 0
    for sample in by_version:
        versions = sample.versions[sample.trained]
        assert (np.diff(versions) >= 0).all()
        spans += len(set(versions.tolist())) > 1
    assert spans >= 3  # of 8 in flight at each sync, some had begun before it
    assert {11, 12, 13} <= {int(sample.versions.max()) for sample in by_version}


@pytest.mark.server
def test_a_short_soak_leaves_nothing_unaccounted(tiny_server, tmp_path):
    assert asyncio.run(soak.soak(tmp_path, tiny_server, minutes=0.3, kill=False)) == []


@pytest.mark.server
def test_a_killed_run_resumes_without_losing_or_repeating_a_prompt(tiny_server, tmp_path):
    assert soak.kills(tmp_path, tiny_server, n_kills=1, n_prompts=100) == []
