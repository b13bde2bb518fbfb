"""The rollout worker against a small local server that speaks vLLM's answers.

Most tests run RolloutLoop in this process, with lists for the shared memory and the pipe; those of
the process itself (crash, kill, stop, environment) start a real worker.
"""

import asyncio
import collections
import concurrent.futures
import contextlib
import functools
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
import types
from pathlib import Path

import datasets
import numpy as np
import pytest
from aiohttp import web
from conftest import free_port

import chat
import load
import rollout
import sampler
import scoring
import tasks
from model import load_tokenizer
from rollout import RolloutLoop
from tasks import Task
from worker import RolloutWorker

EOS = 2
OPTIONS = dict(
    num_generations=4, max_completion_length=8, temperature=0.7, top_p=1.0, top_k=0, min_p=None,
    chat_template_kwargs=None, max_tool_calling_iterations=None, tool_timeout_s=5.0,
    log_completions=False, num_completions_to_print=None, logging_steps=1, weight_sync_steps=1,
    vllm_server_timeout=20.0, num_sampler_logprobs=2, max_staleness=4,
    score_centering=True, max_concurrent_rollouts=64, rollout_worker_timeout=20.0,
    rollout_timeout_s=None, num_train_epochs=1.0, max_steps=-1, seed=42, data_seed=None,
    train_sampling_strategy="sequential", loss="grpo", trust_remote_code=False,
    dump_rollouts=False, model_init_kwargs=None,
)  # fmt: skip


# --------------------------------------------------------------------------------- the server


class FakeServer:
    """vLLM's answers, from a thread. Fields may be set at any time; `requests` are what it got."""

    def __init__(self):
        self.requests, self.bad = [], collections.deque()  # bad: one item a request, None is good
        self.in_flight = self.max_in_flight = 0
        self.delay_s, self.paused = 0.0, False  # paused: as with mode=keep, what is there waits
        self.has_generate, self.metrics, self.max_model_len = True, None, 512
        self.reply = lambda i, prompt_ids: [100 + i, EOS]  # i counts requests after the probe
        self.versions = lambda n: [{"version": "default", "start": 0, "end": n}]
        self.url = f"http://127.0.0.1:{free_port()}"
        self.loop = asyncio.new_event_loop()
        started = threading.Event()
        threading.Thread(target=self._serve, args=(started,), daemon=True).start()
        assert started.wait(10)

    def _serve(self, started):
        asyncio.set_event_loop(self.loop)
        app = web.Application()
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/metrics", self._metrics)
        app.router.add_post("/inference/v1/generate", self._generate)
        app.router.add_post("/v1/completions", self._completions)
        self.runner = web.AppRunner(app)
        self.loop.run_until_complete(self.runner.setup())
        site = web.TCPSite(self.runner, "127.0.0.1", int(self.url.rpartition(":")[2]))
        self.loop.run_until_complete(site.start())
        started.set()
        self.loop.run_forever()

    async def _models(self, request):
        return web.json_response({"data": [{"id": "m", "max_model_len": self.max_model_len}]})

    async def _metrics(self, request):
        return web.Response(text=self.metrics or "", status=200 if self.metrics else 404)

    async def _sampled(self, body, prompt_ids, parameters):
        """Reply ids, or a Response that is none."""
        if parameters["max_tokens"] == 1:  # the worker's first request
            return [7]
        self.requests.append(body)
        i = len(self.requests) - 1
        self.in_flight += 1
        self.max_in_flight = max(self.max_in_flight, self.in_flight)
        try:
            bad = self.bad.popleft() if self.bad else None
            await asyncio.sleep(60.0 if bad == "hang" else self.delay_s)
            while self.paused:
                await asyncio.sleep(0.005)
        finally:
            self.in_flight -= 1
        if isinstance(bad, int):
            return web.json_response({"error": {"message": f"error {bad}"}}, status=bad)
        if bad == "garbage":
            return web.Response(text='{"choices": [{"token_ids": "?')
        return self.reply(i, prompt_ids)

    async def _generate(self, request):
        body = await request.json()
        if not self.has_generate:
            return web.json_response({"error": {"message": "needs --enable-scale-out"}}, status=403)
        parameters = body["sampling_params"]
        ids = await self._sampled(body, body["token_ids"], parameters)
        if isinstance(ids, web.Response):
            return ids
        k = parameters["logprobs"]
        content = []
        for i in ids:
            # The sampled token is the second most likely; the others are its neighbours.
            top = [entry(i, -0.5, 2), entry(i + 1, -0.4, 1)]
            top += [entry(i + rank, -float(rank), rank) for rank in range(3, k + 1)]
            content.append(entry(i, -0.5, 2) | {"top_logprobs": top[: max(k, 1)]})
        choice = {
            "token_ids": ids, "finish_reason": "stop", "logprobs": {"content": content},
            "weight_versions": self.versions(len(ids)), "sampling_mask": None,
        }  # fmt: skip
        return web.json_response({"choices": [choice]})

    async def _completions(self, request):
        body = await request.json()
        ids = await self._sampled(body, body["prompt"], body)
        if isinstance(ids, web.Response):
            return ids
        tops = [{f"token_id:{i}": -0.5, f"token_id:{i + 1}": -0.4} for i in ids]
        log_probs = {"token_logprobs": [-0.5] * len(ids), "top_logprobs": tops}
        choice = {"token_ids": ids, "finish_reason": "stop", "logprobs": log_probs, "text": "?"}
        return web.json_response({"choices": [choice]})


def entry(token_id, logprob, rank):
    return {"token_id": token_id, "logprob": logprob, "rank": rank}


async def until(condition, seconds=10):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"not within {seconds} s"
        await asyncio.sleep(0.002)


@pytest.fixture
def server():
    server = FakeServer()
    yield server

    async def end():
        for task in asyncio.all_tasks() - {asyncio.current_task()}:
            task.cancel()  # requests that hang
        await server.runner.cleanup()

    asyncio.run_coroutine_threadsafe(end(), server.loop).result(10)
    server.loop.call_soon_threadsafe(server.loop.stop)


# ------------------------------------------------------------------------- the loop in this process


class FakeTokenizer:
    """The prompt "7" is the ids 1, 7; a reply is its ids as text."""

    chat_template = "?"

    def apply_chat_template(self, messages, **kwargs):
        return [1, int(messages[-1]["content"])]

    def decode(self, ids, **options):
        return " ".join(str(i) for i in ids if i != EOS)


def prompts(n):
    return [{"prompt": [{"role": "user", "content": str(i)}], "answer": 10 * i} for i in range(n)]


def first_number(completions, **columns):
    """The first token id of the reply, less 100."""
    return [float(reply[-1]["content"].split()[0]) - 100 for reply in completions]


class Run:
    """RolloutLoop with its messages: samples, records by name, ids of dropped groups."""

    def __init__(
        self, server, rows, *funcs, loop=None, start_index=0, tokenizer=None, task=(), **options
    ):
        self.shared = [0] * len(rollout.Slot)
        self.shared[rollout.Slot.ALLOWANCE] = 10**9
        self.samples, self.records, self.dropped = [], collections.defaultdict(list), []
        self.stories, self.done = [], False
        options = OPTIONS | {"vllm_server_base_url": server.url} | options
        self.loop = (loop or RolloutLoop)(
            types.SimpleNamespace(**options),
            Task(rows, funcs, **dict(task)),
            tokenizer or FakeTokenizer(),
            model_name="m",
            eos_token_ids=[256, 257] if tokenizer else [EOS],
            start_index=start_index,
            shared=self.shared,
            send=self.take,
        )

    def take(self, message):
        sent = concurrent.futures.Future()
        sent.set_result(None)
        kind, *content = pickle.loads(pickle.dumps(message, protocol=5))
        if kind == "done":
            self.done = True
            return sent
        samples, records, dropped, stories = content
        self.samples += samples
        self.dropped += dropped
        self.stories += stories
        for name, value, weight in records:
            self.records[name].append((value, weight))
        return sent

    def to_the_end(self):
        try:
            asyncio.run(self.loop.run())
        except* Exception as group:
            error = group
            while isinstance(error, ExceptionGroup):
                error = error.exceptions[0]
            raise error from None
        assert self.done
        return self

    def total(self, name):
        return sum(value for value, _ in self.records[name])

    def mean(self, name):
        values, weights = zip(*self.records[name])
        return np.average(values, weights=weights)

    def row_indices(self):
        by_group = {sample.group_id: sample.row_index for sample in self.samples}
        return [by_group[i] for i in sorted(by_group)]


def test_every_prompt_once_an_epoch_in_an_order_fixed_by_the_seed(server):
    options = dict(num_generations=2, num_train_epochs=2, train_sampling_strategy="random")
    run = Run(server, prompts(5), first_number, **options).to_the_end()
    order = run.row_indices()
    assert len(order) == 10 and len(run.samples) == 20
    assert sorted(order[:5]) == sorted(order[5:]) == [0, 1, 2, 3, 4]
    assert order[:5] != order[5:]  # each epoch has a permutation of its own
    again = Run(server, prompts(5), first_number, start_index=3, **options).to_the_end()
    assert again.row_indices() == order[3:]  # a resumed run goes on in the same order
    other = Run(server, prompts(5), first_number, **options | {"data_seed": 1}).to_the_end()
    assert other.row_indices() != order
    in_order = Run(server, prompts(5), first_number, num_train_epochs=1.4).to_the_end()
    assert in_order.row_indices() == [0, 1, 2, 3, 4, 0, 1]  # 1.4 epochs of 5 prompts


class Stream:
    """A dataset that can be read from its beginning only."""

    def __iter__(self):
        return iter(prompts(3))


class EmptyLater(Stream):
    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        return iter(prompts(3)[: 3 if self.epoch == 0 else 0])


def test_streaming_dataset_is_read_once_an_epoch(server):
    run = Run(server, Stream(), first_number, num_train_epochs=2).to_the_end()
    assert run.row_indices() == [0, 1, 2, 0, 1, 2]
    with pytest.raises(RuntimeError, match="the dataset gave no rows in epoch 1"):
        Run(server, EmptyLater(), first_number, num_train_epochs=2).to_the_end()


def test_a_resumed_stream_starts_again_and_says_so(server, capsys):
    run = Run(server, Stream(), first_number, start_index=4).to_the_end()
    assert run.row_indices() == [0, 1, 2]
    assert {sample.group_id for sample in run.samples} == {4, 5, 6}
    assert "a streaming dataset starts again at its first row" in capsys.readouterr().err


def test_datasets_of_the_hub_library(server):
    rows = datasets.Dataset.from_list(prompts(3))
    tasks.check_task(Task(rows, (plus_answer,)))
    run = Run(server, rows, first_number, plus_answer).to_the_end()
    assert run.row_indices() == [0, 1, 2]
    stream = rows.to_iterable_dataset().shuffle(seed=0, buffer_size=3)
    tasks.check_task(Task(stream, (plus_answer,)))
    run = Run(server, stream, first_number, plus_answer, num_train_epochs=2).to_the_end()
    assert len(run.samples) == 24


def test_sample_holds_the_sampled_ids_their_numbers_and_the_version_of_each_token(server):
    server.reply = lambda i, prompt_ids: [100 + i, 50, EOS]
    server.versions = lambda n: [  # a sync fell into the reply
        {"version": "3", "start": 0, "end": 1}, {"version": "4", "start": 1, "end": n}
    ]  # fmt: skip
    run = Run(server, prompts(1), first_number).to_the_end()
    sample = min(run.samples, key=lambda sample: sample.input_ids[2])
    assert sample.input_ids.tolist() == [1, 0, 100, 50, EOS]
    assert sample.trained.tolist() == [False, False, True, True, True]
    assert sample.sampler_log_probs.tolist() == [0, 0, -0.5, -0.5, -0.5]
    assert sample.versions.tolist() == [-1, -1, 3, 4, 4]
    assert sample.top_ids.tolist() == [[101, 100], [51, 50], [3, 2]]  # by rank
    assert abs(time.time() - sample.created_at) < 60


@pytest.mark.parametrize("has_generate", [True, False])
def test_every_sampling_parameter_is_sent_and_every_seed_is_new(server, has_generate):
    server.has_generate = has_generate
    run = Run(server, prompts(2), first_number)
    run.shared[rollout.Slot.VERSION] = 6
    run.to_the_end()
    bodies = [body["sampling_params"] if has_generate else body for body in server.requests]
    expected = dict(
        max_tokens=8, min_tokens=0, temperature=0.7, top_p=1.0, top_k=0, min_p=0.0, n=1,
        repetition_penalty=1.0, presence_penalty=0.0, frequency_penalty=0.0, ignore_eos=False,
        stop_token_ids=[EOS], logprobs=3 if has_generate else 2,
    )  # fmt: skip
    for body in bodies:
        assert {name: body[name] for name in expected} == expected
    assert len({body["seed"] for body in bodies}) == len(bodies) == 8
    assert all(sample.versions.max() == 6 for sample in run.samples)  # known at dispatch
    assert len(run.samples) == 8 and run.samples[0].top_ids.shape == (2, 2)


class OwnPrompts(RolloutLoop):
    """Each rollout of a group gets a prompt of its own, changed in place."""

    async def setup(self):
        self.n = 0

    async def generate_one(self, prompt, tools, group_id=0):
        prompt[0]["content"] = str(50 + self.n)
        self.n += 1
        return await super().generate_one(prompt, tools, group_id)


def test_each_rollout_is_sampled_from_the_prompt_that_it_was_given(server):
    run = Run(server, prompts(1), first_number, loop=OwnPrompts).to_the_end()
    assert sorted(sample.input_ids[1] for sample in run.samples) == [50, 51, 52, 53]


def test_no_head_when_not_wanted(server):
    run = Run(server, prompts(1), first_number, score_centering=False)
    run.to_the_end()
    assert run.samples[0].top_ids.shape == (2, 0)


# ------------------------------------------------------------------------ rewards and advantages


def by_first_id(run):
    return sorted(run.samples, key=lambda sample: sample.input_ids[2])


def one_of_each(completions, **columns):
    """1, 0, 0, None for the replies 100, 101, 102, 103."""
    ids = [int(reply[-1]["content"].split()[0]) for reply in completions]
    return [{100: 1.0, 101: 0.0, 102: 0, 103: None}[i] for i in ids]


def test_unscored_rollout_is_left_out_and_changes_nothing_for_the_others(server):
    run = Run(server, prompts(1), one_of_each).to_the_end()
    # mean 1/3, population std sqrt(2)/3 = 0.4714: (2/3)/0.4714 = 1.4142, (-1/3)/0.4714 = -0.7071
    samples = by_first_id(run)
    assert [sample.input_ids[2] for sample in samples] == [100, 101, 102]
    np.testing.assert_allclose(
        [s.advantage for s in samples], [1.4142, -0.7071, -0.7071], atol=1e-4
    )
    assert run.total("rewards/one_of_each/unscored_count") == 1


@pytest.mark.parametrize(
    "name, expected",
    [
        ("grpo", [2**0.5, -(2**0.5) / 2, -(2**0.5) / 2, 0]),  # (2/3, -1/3, -1/3) / (sqrt(2) / 3)
        ("dr_grpo", [2 / 3, -1 / 3, -1 / 3, 0]),  # not divided
    ],
)
def test_advantages_worked_by_hand(name, expected):
    loop = types.SimpleNamespace(config=types.SimpleNamespace(loss=name))
    group = types.SimpleNamespace(rewards=np.array([1.0, 0.0, 0.0, np.nan]))
    np.testing.assert_allclose(RolloutLoop.compute_advantages(loop, group), expected, atol=1e-6)


def plus_answer(answer, prompts, completion_ids, **columns):
    assert len(answer) == len(prompts) == len(completion_ids) == 4
    return np.array(answer)


AT_ONCE = threading.Barrier(2)


async def offset_that_waits(completions, offset, **columns):
    await asyncio.to_thread(AT_ONCE.wait, 10)
    await asyncio.sleep(0.4)
    return [offset] * len(completions)


def none_that_waits(completions, **columns):
    AT_ONCE.wait(10)
    return [float("nan")] * len(completions)


class Scorer:
    async def __call__(self, completions, **columns):
        return [0.5] * len(completions)


def test_rewards_of_all_kinds_of_functions_are_summed_and_run_at_once(server):
    funcs = first_number, plus_answer, functools.partial(offset_that_waits, offset=3)
    run = Run(server, prompts(2)[1:], *funcs, none_that_waits, Scorer()).to_the_end()
    # reply i: i + answer 10 + offset 3 + 0.5; NaN everywhere does not count
    assert [s.metrics["reward_kept"] for s in by_first_id(run)] == [13.5, 14.5, 15.5, 16.5]
    assert run.mean("rollout/score_s") > 0.4
    assert run.mean("rewards/offset_that_waits/mean") == 3
    assert "rewards/none_that_waits/mean" not in run.records


def always_a_tenth(completions, **columns):
    return [0.1 * 3 if i % 2 else 0.3 for i in range(len(completions))]  # 1 ulp apart


def only_the_first(completions, **columns):
    return [1.0, None, None, None]


def nothing(completions, **columns):
    return [None] * len(completions)


@pytest.mark.parametrize(
    "func, reward, dropped_at",
    [(always_a_tenth, 0.3, 0.3), (only_the_first, 1, 1), (nothing, None, None)],
)
def test_group_without_a_signal_is_dropped_and_counted_toward_the_epoch(
    server, func, reward, dropped_at
):
    run = Run(server, prompts(3), func).to_the_end()
    assert run.samples == [] and sorted(run.dropped) == [0, 1, 2]
    assert run.mean("frac_reward_zero_std") == 1
    for name, value in (("reward", reward), ("reward_dropped", dropped_at)):
        assert (name in run.records) == (value is not None)
        if value is not None:
            assert run.mean(name) == pytest.approx(value)


@pytest.mark.parametrize(
    "values, error, message",
    [
        ([1.0], ValueError, "reward f returned 1 values for 2 completions"),
        ([1.0, float("inf")], ValueError, "reward f returned inf"),
        ([1.0, "0.5"], TypeError, "reward f returned '0.5', which is not a number"),
        (0.5, TypeError, "reward f returned 0.5: it must return a list"),
        ("ab", TypeError, "reward f returned 'ab': it must return a list"),
    ],
)
def test_bad_reward_is_refused_by_name_and_value(values, error, message):
    with pytest.raises(error, match=message):
        scoring.checked_rewards("f", values, 2)


def test_numpy_and_boolean_rewards_are_numbers():
    values = [np.float32(0.5), np.int64(1), True, np.array(2.0), None, float("nan")]
    rewards = scoring.checked_rewards("f", values, 6)
    np.testing.assert_array_equal(rewards, [0.5, 1, 1, 2, np.nan, np.nan])


def broken(completions, **columns):
    raise KeyError("ground_truth")


async def endless(completions, **columns):
    await asyncio.sleep(60)


def test_failing_or_endless_reward_ends_the_run_by_name(server):
    with pytest.raises(RuntimeError, match="reward broken raised KeyError: 'ground_truth'; row 0"):
        Run(server, prompts(1), broken).to_the_end()
    with pytest.raises(RuntimeError, match="reward endless has not returned within 0.5 s"):
        Run(server, prompts(1), endless, rollout_timeout_s=0.5).to_the_end()


# --------------------------------------------------------------------------------- metrics


def test_metrics_of_a_group_worked_by_hand(server):
    replies = [[100, EOS], [100, EOS], [101, 7, 8], [103, EOS]]  # the third is cut off
    server.reply = lambda i, prompt_ids: replies[i]
    run = Run(server, prompts(1), one_of_each).to_the_end()  # rewards 1, 1, 0, None
    expected = {
        "completions/mean_length": (9 / 4, 4),
        "completions/min_length": (2, 1),
        "completions/max_length": (3, 1),
        "completions/mean_terminated_length": (2, 3),
        "completions/min_terminated_length": (2, 1),
        "completions/max_terminated_length": (2, 1),
        "completions/clipped_ratio": (1 / 4, 4),
        "completions/duplicate_frac": (1 / 4, 4),
        "reward": (2 / 3, 3),
        "reward_min": (0, 1),
        "reward_max": (1, 1),
        "rewards/one_of_each/mean": (2 / 3, 3),
        "frac_reward_zero_std": (0, 1),
        "rollout/turns_mean": (1, 4),
        "rollout/turns_max": (1, 1),
        "rollout/samples_per_rollout": (1, 4),
        "rollout/score_queue_size": (0, 1),
    }
    for name, record in expected.items():
        assert run.records[name][0] == pytest.approx(record), name
    assert "reward_dropped" not in run.records and "rollout/fork_frac" not in run.records
    for sample, reward in zip(by_first_id(run), [1, 1, 0]):
        assert sample.metrics == pytest.approx(
            {
                "reward_kept": reward,
                "reward_group_std": 2**0.5 / 3,
                "rewards/one_of_each/group_std": 2**0.5 / 3,
            }
        )


class TwoTurns(RolloutLoop):
    """A second turn that continues the first, or that drops its reply, by turns."""

    async def setup(self):
        self.n = 0

    async def generate_one(self, prompt, tools, group_id=0):
        first = await self.generate_one_turn([1, 5])
        n = self.n = self.n + 1
        history = [1, 5, *first.output_ids] if n % 2 else [1]
        second = await self.generate_one_turn([*history, 6])
        return chat.Rollout([], first.output_ids, [first, second], reward=float(n))


def test_turns_of_a_custom_loop_are_reconciled_and_counted(server):
    run = Run(server, prompts(1), loop=TwoTurns).to_the_end()
    # two of four rollouts fork: they keep 1 of the 4 held tokens, so 3 drift
    assert len(run.samples) == 6
    assert run.mean("rollout/samples_per_rollout") == 1.5
    assert run.mean("rollout/turns_mean") == 2
    assert run.mean("rollout/fork_frac") == 0.5
    assert run.mean("rollout/drift_tokens_mean") == 1.5
    assert run.total("rollout/drift_tokens_max") == 3
    assert run.mean("completions/mean_length") == 4
    rewards = collections.Counter(sample.metrics["reward_kept"] for sample in run.samples)
    assert sorted(rewards.values()) == [1, 1, 2, 2]  # every sample has its rollout's reward


# --------------------------------------------------------------------------------- the three limits


def test_never_more_rollouts_in_flight_than_allowed_and_the_cap_is_used(server):
    server.delay_s = 0.2
    Run(server, prompts(6), first_number, max_concurrent_rollouts=6).to_the_end()
    assert server.max_in_flight == 6
    assert len(server.requests) == 24


def slow_number(completions, **columns):
    time.sleep(0.1)
    return first_number(completions)


def test_generation_waits_while_the_scoring_queue_is_full(server, monkeypatch):
    monkeypatch.setattr(rollout, "SCORE_QUEUE_SIZE", 1)
    run = Run(server, prompts(6), slow_number, max_concurrent_rollouts=4).to_the_end()
    assert len(run.samples) == 24
    assert max(run.records["rollout/score_block_s"])[0] > 0.01
    assert run.mean("rollout/score_wait_s") > 0.01
    run = Run(server, prompts(2), first_number).to_the_end()
    assert "rollout/score_block_s" not in run.records


def test_server_load_limit_follows_the_spec():
    limit = load.LoadLimit(ceiling=64, cap=40)
    limit.update(usage=0.5, waiting=0, in_flight=40)
    assert limit.cap == 40  # a raise takes a cap's worth of finished rollouts
    limit.finished = 40
    limit.update(usage=0.5, waiting=1, in_flight=40)
    limit.update(usage=0.7, waiting=0, in_flight=40)
    assert limit.cap == 40  # requests wait, or between the thresholds
    limit.update(usage=0.5, waiting=0, in_flight=40)
    assert (limit.cap, limit.finished) == (50, 0)
    limit.finished = 50
    limit.update(usage=0.1, waiting=0, in_flight=50)
    assert limit.cap == 63
    limit.finished = 63
    limit.update(usage=0.1, waiting=0, in_flight=50)
    assert limit.cap == 64  # the ceiling
    limit.update(usage=0.9, waiting=5, in_flight=60)
    assert limit.cap == 44  # 64 * 0.7 = 44.8
    limit.update(usage=0.9, waiting=5, in_flight=60)
    assert limit.cap == 44  # running requests go on: the cut has not taken effect yet
    limit.update(usage=0.9, waiting=5, in_flight=44)
    assert limit.cap == 30


METRICS = """
# TYPE vllm:kv_cache_usage_perc gauge
vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.25
vllm:kv_cache_usage_perc{engine="1",model_name="m"} 0.5
vllm:num_requests_running{engine="0",model_name="m"} 3.0
vllm:num_requests_running{engine="1",model_name="m"} 4.0
vllm:num_requests_waiting{engine="0",model_name="m"} 1.0
vllm:num_requests_waiting_by_reason{engine="0",model_name="m",reason="capacity"} 9.0
vllm:num_preemptions_total{engine="0",model_name="m"} 2.0
vllm:cache_config_info{block_size="128",engine="0",kv_cache_size_tokens="512"} 1.0
vllm:cache_config_info{block_size="128",engine="1",kv_cache_size_tokens="1024"} 1.0
"""


def test_load_of_all_engines_is_read():
    seen = load.parse_load(METRICS)
    assert seen == load.ServerLoad(0.5, 7.0, 1.0, 2.0, 1536.0)
    assert load.parse_load("nothing of vLLM's\n") is None


def test_limit_starts_at_what_fits_into_the_kv_cache(server, monkeypatch):
    monkeypatch.setattr(rollout, "POLL_LOAD_S", 0.05)
    monkeypatch.setattr(rollout, "REPORT_S", 0.05)
    server.metrics, server.delay_s = METRICS, 0.2  # 1536 tokens of max_model_len 512: 3 requests
    run = Run(server, prompts(2), first_number).to_the_end()
    assert run.records["rollout/concurrency_cap"][0] == (3, 1)
    assert server.max_in_flight == 3  # it would be raised by one waiting request only
    assert run.mean("rollout/vllm_kv_cache_usage_frac") == 0.5
    assert run.mean("rollout/vllm_running_requests") == 7
    assert run.total("rollout/vllm_preemption_count") == 0  # those before our start are not ours
    server.metrics = None
    run = Run(server, prompts(1), first_number, max_concurrent_rollouts=5).to_the_end()
    assert run.loop.load_limit.cap == 5  # no /metrics: the ceiling


async def stands_still_at(run, n_samples):
    """Wait for so many samples, and for a moment more in which there must be no others."""
    await until(lambda: len(run.samples) >= n_samples)
    await asyncio.sleep(0.25)
    assert len(run.samples) == n_samples


def test_generation_stays_within_the_trainers_allowance(server):
    run = Run(server, prompts(40), first_number)
    # 2 tokens of prompt for all 4 rollouts of a group, rounded up to 1 for each, and 2 of their own
    run.shared[rollout.Slot.ALLOWANCE] = 40  # so a group is 12

    async def scenario():
        task = asyncio.create_task(run.loop.run())
        await stands_still_at(run, 16)  # 12, 24 and 36 are below 40, 48 is not: four groups
        run.shared[rollout.Slot.RELEASED] = 24  # two groups were taken: 24 are left, two start
        await stands_still_at(run, 24)
        run.shared[rollout.Slot.ALLOWANCE] = 10**6
        await task

    asyncio.run(scenario())
    assert len(run.samples) == 160
    assert 0.2 < max(run.records["rollout/backpressure_s"])[0] < 5


def test_one_group_at_a_time_until_the_first_shows_the_length(server):
    run, answered, reply = Run(server, prompts(6), first_number), [], server.reply

    def pause_again_after_four(i, prompt_ids):
        answered.append(i)
        server.paused = len(answered) == 4
        return reply(i, prompt_ids)

    server.paused, server.reply = True, pause_again_after_four

    async def scenario():
        task = asyncio.create_task(run.loop.run())
        await until(lambda: server.in_flight == 4)
        await asyncio.sleep(0.2)
        assert len(server.requests) == 4
        server.paused = False
        await until(lambda: server.in_flight == 20)  # the other five groups together
        server.paused = False
        await task

    asyncio.run(scenario())
    assert server.max_in_flight == 20
    assert len(run.samples) == len(server.requests) == 24


def test_waiting_trainer_with_nothing_to_take_always_gets_a_group(server):
    run = Run(server, prompts(3), first_number)
    run.shared[rollout.Slot.ALLOWANCE] = 1  # and nothing is ever released

    async def scenario():
        task = asyncio.create_task(run.loop.run())
        await stands_still_at(run, 4)
        run.shared[rollout.Slot.HUNGRY] = 1
        await task

    asyncio.run(scenario())
    assert len(run.samples) == 12


# --------------------------------------------------------------------------------- failures


def test_server_errors_are_retried_and_counted(server, monkeypatch):
    monkeypatch.setattr(sampler, "_FIRST_RETRY_S", 0.01)
    server.bad.extend([500, "garbage", 503, 500, 429])
    server.delay_s = 0.05
    run = Run(server, prompts(2), first_number).to_the_end()
    assert len(run.samples) == 8
    assert run.total("rollout/vllm_retry_count") == 5
    assert len(server.requests) == 8 + 5
    tokens = sum(rate * seconds for rate, seconds in run.records["rollout/generated_tokens_per_s"])
    assert tokens == pytest.approx(16)


def test_lost_server_ends_the_run_within_its_time(server):
    server.bad.extend([500] * 1000)
    start = time.monotonic()
    with pytest.raises(sampler.ServerLost, match=r"has answered no request .* HTTP 500: error 500"):
        Run(server, prompts(2), first_number, vllm_server_timeout=0.8).to_the_end()
    assert time.monotonic() - start < 3


def test_absent_server_is_named():
    nowhere = types.SimpleNamespace(url=f"http://127.0.0.1:{free_port()}")
    with pytest.raises(
        sampler.ServerLost, match=f"no vLLM server answered at {nowhere.url} within"
    ):
        Run(nowhere, prompts(1), first_number, vllm_server_timeout=0.4).to_the_end()


def test_refused_request_ends_the_run_with_the_servers_words(server):
    server.bad.append(400)
    with pytest.raises(sampler.RequestRefused, match=r"refused .*\(HTTP 400\): error 400"):
        Run(server, prompts(1), first_number).to_the_end()


def test_reply_that_could_not_fit_is_refused_with_the_remedy(server):
    server.max_model_len = 9  # the prompt has 2 tokens, the reply may have 8
    with pytest.raises(
        sampler.RequestRefused, match="exceed the server's max_model_len 9: lower max_c"
    ):
        Run(server, prompts(1), first_number).to_the_end()


@pytest.mark.filterwarnings("ignore:the server returns no candidate sets")
def test_reply_that_could_not_fit_is_left_to_the_server_with_top_k(server):
    server.max_model_len = 9
    run = Run(server, prompts(1), first_number, top_k=4).to_the_end()
    assert run.samples  # generated, and not refused


def test_server_without_candidate_sets_is_named_with_its_flags(server):
    def client():
        return sampler.Sampler(server.url, "m", max_tokens=4, top_k=4, timeout_s=5)

    with pytest.warns(UserWarning, match="ratio is biased: start it with --return-sampling-mask"):
        asyncio.run(started(client()))
    server.has_generate = False
    with pytest.raises(ValueError, match="with top_k .* restart it with --enable-scale-out"):
        asyncio.run(started(client()))


def test_a_server_of_another_model_is_refused(server):
    other = sampler.Sampler(server.url, "other", max_tokens=4, timeout_s=5)
    with pytest.raises(ValueError, match=r"serves \['m'\], not 'other'"):
        asyncio.run(started(other))


async def started(client):
    try:
        await client.start()
    finally:
        await client.close()


class SometimesBroken(RolloutLoop):
    """Its rollouts number 1 and 2 fail; number 3, the second try of 1, fails too."""

    async def setup(self):
        self.n = 0

    async def generate_one(self, prompt, tools, group_id=0):
        self.n += 1
        n = self.n
        if n in (1, 3):
            raise KeyError("no such key")
        if n == 2:
            await asyncio.sleep(60)  # outlives rollout_timeout_s; its second try is good
        return await super().generate_one(prompt, tools, group_id)


def test_failed_rollout_is_retried_once_then_left_out_and_its_group_goes_on(server, capsys):
    class Loop(SometimesBroken):
        async def generate_one(self, prompt, tools, group_id=0):
            await asyncio.sleep(0)
            return await super().generate_one(prompt, tools, group_id)

    options = dict(rollout_timeout_s=0.5, max_concurrent_rollouts=2)
    run = Run(server, prompts(2), first_number, loop=Loop, **options).to_the_end()
    assert run.total("rollout/restarted_count") == 2
    assert run.total("rollout/failed_count") == 1
    sizes = collections.Counter(sample.group_id for sample in run.samples)
    assert sizes == {0: 3, 1: 4}
    warning = "left out after its second try, a rollout of row 0: KeyError: 'no such key'"
    assert warning in capsys.readouterr().err


class AlwaysBroken(RolloutLoop):
    async def generate_one(self, prompt, tools, group_id=0):
        raise KeyError("no such key")


class AlwaysSlow(RolloutLoop):
    async def generate_one(self, prompt, tools, group_id=0):
        await asyncio.sleep(60)


def test_rollouts_that_all_fail_end_the_run(server):
    few = dict(max_concurrent_rollouts=3)  # so 2 * num_generations = 8 failures are enough
    with pytest.raises(
        RuntimeError, match="8 rollouts in a row failed; .* KeyError: 'no such key'"
    ):
        Run(server, prompts(99), first_number, loop=AlwaysBroken, **few).to_the_end()
    few["rollout_timeout_s"] = 0.1
    with pytest.raises(RuntimeError, match=r"TimeoutError: longer than 0.1 s \(rollout_timeout_s"):
        Run(server, prompts(99), first_number, loop=AlwaysSlow, **few).to_the_end()


class Odd(RolloutLoop):
    closed = False

    def filter_prompt(self, row_index, row, epoch):
        return row_index % 2 == 1 and row["answer"] == 10 * row_index

    async def close(self):
        type(self).closed = True


class EvenEpochs(RolloutLoop):
    def filter_prompt(self, row_index, row, epoch):
        return epoch != 1


def test_filtered_prompts_count_as_consumed_and_an_empty_epoch_raises(server):
    run = Run(server, prompts(5), first_number, loop=Odd).to_the_end()
    assert run.row_indices() == [1, 3] and run.dropped == [0, 2, 4] and Odd.closed
    assert run.total("rollout/filtered_count") == 3
    Odd.closed = False
    with pytest.raises(RuntimeError, match="reward broken raised"):
        Run(server, prompts(5), broken, loop=Odd).to_the_end()
    assert Odd.closed  # also after a failure
    with pytest.raises(RuntimeError, match="filter_prompt rejected every prompt of epoch 1"):
        Run(server, prompts(3), first_number, loop=EvenEpochs, max_steps=9).to_the_end()


# ---------------------------------------------------------------------------------- tasks


def local_function():
    def inside(completions, **columns):
        return [0.0] * len(completions)

    return inside


IMAGES = [{"prompt": [{"role": "user", "content": [{"type": "image"}]}]}]


@pytest.mark.parametrize(
    "task, error, message",
    [
        (Task([], (broken,)), ValueError, "the dataset has no rows"),
        (Task([{"question": "?"}], (broken,)), ValueError, "row 0 has no column 'prompt'"),
        (Task([{"prompt": "2+2?"}], (broken,)), ValueError, "prompt is not conversational"),
        (Task(IMAGES, (broken,)), ValueError, "images are not supported"),
        (Task([{**prompts(1)[0], "prompts": 1}], (broken,)), ValueError, "column 'prompts'"),
        (Task(iter(prompts(1)), (broken,)), TypeError, "cannot be read once an epoch"),
        (Task(prompts(1)), ValueError, "has no reward: define reward_funcs"),
        (Task(prompts(1), ("Qwen/RM",)), TypeError, "'Qwen/RM' is not callable; reward models"),
        (
            Task(prompts(1), (lambda **_: [0],)),
            TypeError,
            "<lambda> cannot be sent .* module-level",
        ),
        (Task(prompts(1), (local_function(),)), TypeError, "inside cannot be sent"),
        (Task(prompts(1), (broken,), rollout_loop=dict), ValueError, "a subclass of RolloutLoop"),
    ],
)
def test_unusable_task_is_refused_before_anything_starts(task, error, message):
    with pytest.raises(error, match=message):
        tasks.check_task(task)


def test_usable_tasks_pass():
    tasks.check_task(Task(Stream(), (functools.partial(offset_that_waits, offset=1), Scorer())))
    tasks.check_task(Task(prompts(1), rollout_loop=TwoTurns))  # which gives the reward itself


TASK_FILE = """
import os
from dataclasses import dataclass

config_overrides = {"temperature": 0.5}

@dataclass(frozen=True)
class Options:
    n: int = 3

def dataset(options):
    return [{"prompt": [{"role": "user", "content": str(i)}]} for i in range(options.n)]

def by_token(prompts, completions, completion_ids, **columns):
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "" and "RANK" not in os.environ
    assert "TORCHELASTIC_RUN_ID" not in os.environ and os.environ["KEPT"] == "1"
    return [float(ids[0] % 3) for ids in completion_ids]

reward_funcs = by_token
"""


def test_task_file_is_loaded_by_path_with_its_options(tmp_path):
    path = tmp_path / "tokens.py"
    path.write_text(TASK_FILE)
    task = tasks.load_task(str(path), {"n": 5})
    assert (task.name, task.options.n, len(task.rows)) == ("tokens", 5, 5)
    assert task.config_overrides == {"temperature": 0.5} and len(task.reward_funcs) == 1
    tasks.check_task(task, ["seed"])
    with pytest.raises(ValueError, match=r"task tokens: rename \['n'\], which are options of the"):
        tasks.check_task(task, ["n", "seed"])
    with pytest.raises(ValueError, match="no task file .*: give a path, or one of"):
        tasks.load_task("no_such_task")


# ------------------------------------------------------------------------------ the real process


def first_id(completion_ids, **columns):
    return [float(ids[0]) for ids in completion_ids]


@contextlib.contextmanager
def started_worker(server, folder, task, eos_token_ids=(EOS,), **options):
    worker = RolloutWorker(
        OPTIONS | {"vllm_server_base_url": server.url} | options,
        task,
        model_path=folder,
        model_name=getattr(server, "name", "m"),
        eos_token_ids=eos_token_ids,
    )
    worker.set_allowance(10**6)
    worker.start()
    try:
        yield worker
    finally:
        worker.stop()


def taken(worker, n=None, seconds=60):
    """n samples, or all of them."""
    samples, deadline = [], time.monotonic() + seconds
    while len(samples) != n and not worker.finished:
        assert time.monotonic() < deadline, f"{len(samples)} samples in {seconds} s"
        sample = worker.get(0.2)
        if sample is not None:
            samples.append(sample)
            worker.release(sample.own_tokens(4))
    return samples


def is_alive(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return "Z" not in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def test_worker_delivers_every_group_and_ends_by_itself(
    server, tokenizer_folder, tmp_path, monkeypatch
):
    for name in ("RANK", "TORCHELASTIC_RUN_ID", "KEPT"):
        monkeypatch.setenv(name, "1")
    path = tmp_path / "tokens.py"
    path.write_text(TASK_FILE)
    task = tasks.load_task(str(path), {"n": 6})
    with started_worker(server, tokenizer_folder, task, max_completion_length=4) as worker:
        worker.set_version(5)
        samples = taken(worker)
        assert os.environ["RANK"] == "1" and "CUDA_VISIBLE_DEVICES" not in os.environ
        assert {sample.group_id for sample in samples} == set(range(6))
        assert len(samples) == 24 and worker.drain_ended() == ([], [])
        assert {int(sample.versions.max()) for sample in samples} == {5}
        assert all(sample.input_ids.flags.writeable for sample in samples)
        names = {name for name, _, _ in worker.drain_records()}
        assert {"reward", "rollout/duration_s", "rewards/by_token/mean"} <= names
        assert worker.drain_records() == [] and worker.get(0.1) is None
        worker.check()  # an orderly end is no failure
        pid = worker._process.pid
    assert not is_alive(pid)
    worker.stop()  # again: nothing happens


def test_the_tokenizer_is_of_the_models_revision(monkeypatch):
    asked, found = [], types.SimpleNamespace(chat_template="?", pad_token="?")
    monkeypatch.setattr(
        "transformers.AutoTokenizer.from_pretrained",
        lambda path, **options: asked.append((path, options)) or found,
    )
    for init, revision in ((None, "main"), ({"revision": "v2"}, "v2"), ({"dtype": "auto"}, "main")):
        config = types.SimpleNamespace(**OPTIONS | {"model_init_kwargs": init})
        assert load_tokenizer(config, "org/model") is found
        expected = {"revision": revision, "trust_remote_code": False}
        assert asked.pop() == ("org/model", expected)


def test_crash_of_the_reward_reaches_the_trainer_with_its_traceback(server, tokenizer_folder):
    task = Task(prompts(2), (broken,))
    with started_worker(server, tokenizer_folder, task) as worker:
        with pytest.raises(RuntimeError, match="reward broken raised KeyError") as caught:
            taken(worker)
        assert 'raise KeyError("ground_truth")' in str(caught.value)
        assert "test_rollout.py" in str(caught.value)
        with pytest.raises(RuntimeError, match="the rollout worker failed"):
            worker.check()
        pid = worker._process.pid
        worker.stop()
        assert not is_alive(pid)


def test_stopped_worker_is_noticed_by_its_heartbeat_and_a_killed_one_at_once(
    server, tokenizer_folder
):
    task = Task(prompts(3), (first_id,))
    options = dict(rollout_worker_timeout=2.0, max_steps=1)
    with started_worker(server, tokenizer_folder, task, **options) as worker:
        taken(worker, 4)
        pid = worker._process.pid
        os.kill(pid, signal.SIGSTOP)
        time.sleep(0.5)
        worker.check()
        time.sleep(2.7)
        with pytest.raises(RuntimeError, match=r"no heartbeat .* \d s \(rollout_worker_timeout 2"):
            worker.check()
        os.kill(pid, signal.SIGCONT)
        time.sleep(1.0)
        worker.check()  # it goes on
        server.bad.extend(["hang"] * 100)
        os.kill(pid, signal.SIGKILL)
        start = time.monotonic()
        with pytest.raises(RuntimeError, match=r"died \(exit code -9, SIGKILL\)"):
            while time.monotonic() < start + 10:
                worker._samples.clear()
                worker.get(5.0)
        assert time.monotonic() - start < 3
        start = time.monotonic()
        worker.stop()
        assert time.monotonic() - start < 1


TRAINER = """
import sys, time
sys.path.insert(0, {root!r})
import tasks
from worker import RolloutWorker

def reward(completions, **columns):
    return [0.0] * len(completions)

if __name__ == "__main__":
    task = tasks.Task({rows!r}, (reward,))
    worker = RolloutWorker(
        {options!r}, task, model_path="nowhere", model_name="m", eos_token_ids=[2])
    if {told}:
        worker.start()
    print(worker._handle.process.pid, flush=True)
    time.sleep({seconds})
"""


@pytest.mark.parametrize("told, killed", [(True, True), (False, True), (False, False)])
def test_worker_does_not_outlive_a_trainer_that_is_killed_or_ends_early(tmp_path, told, killed):
    script = tmp_path / "trainer.py"
    root = str(Path(rollout.__file__).parent)
    options = dict(root=root, rows=prompts(1), options=OPTIONS, told=told)
    script.write_text(TRAINER.format(seconds=60 if killed else 0, **options))
    trainer = subprocess.Popen([sys.executable, script], stdout=subprocess.PIPE, text=True)
    pid = int(trainer.stdout.readline())
    if killed:
        os.kill(trainer.pid, signal.SIGKILL)
    assert trainer.wait(20) == (-signal.SIGKILL if killed else 0)
    deadline = time.monotonic() + 60
    while is_alive(pid):
        assert time.monotonic() < deadline, "the worker is still there after 60 s"
        time.sleep(0.05)
