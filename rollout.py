"""Rollouts: prompts in, scored training samples out. The loop that runs in the worker process.

    who                 owns                   reads                 writes            stops when
    trainer process     worker.RolloutWorker   deque of samples      version, limits   it says so
      reader thread     read end of the pipe   pipe, heartbeat       deque, records    pipe ends
    worker (spawned)    RolloutLoop            version, limits       heartbeat         stop flag
      dispatch          order of the prompts   the three limits      rollout tasks     data ends
      rollout tasks     one rollout each       vLLM                  score queue       it is made
      score task        rewards, advantages    score queue (<= 16)   sender thread     data ends
      report task       rates                  counters              records           worker ends
      load task         the cap on rollouts    GET /metrics          records           worker ends
      sender thread     write end of pipe      one message           pipe              worker ends
      reward threads    nothing                one group             its rewards       worker ends
      tool threads      nothing                one call              its result        worker ends
      parent watch      nothing                parent's process id   nothing           trainer gone

What bounds the samples on their way is admission, not the length of a queue: a new group starts
only while the tokens queued (sent, and not yet released by the trainer) and in progress are below
the trainer's allowance. So the deque holds at most that and one group more, and a sender never
waits for long. Three limits decide how many rollouts run: that one (staleness), LoadLimit (the
server's KV cache) and max_concurrent_rollouts.

Versions: 0 are the weights that the run starts from. The trainer announces a version only after
the server has acknowledged it; each token is labelled by the server's own account if it gives one.

The process around the loop is worker.py, what it learns from tasks.py. The parts of a rollout:
template.py (messages and ids), sampler.py (the server), tools.py, environments.py, chat.py (turns
to samples); a group's rewards and metrics: scoring.py; the server's load: load.py; which of several
servers is asked: router.py. Left out: evaluation (evaluate.py).
Test: pytest tests/test_rollout.py
"""

import asyncio
import contextlib
import copy
import enum
import math
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np

import chat
import dump
from environments import Environments, methods
from load import LoadLimit, parse_load
from prompts import prompts
from router import Stale, make_router
from sampler import RequestRefused, ServerLost
from scoring import (
    FinishedRollout,
    OpenGroup,
    RolloutGroup,
    as_text,
    call_reward,
    checked_rewards,
    environment_rewards,
    reward_name,
    reward_records,
    rollout_records,
    summed,
    trained_samples,
)
from template import ChatTemplate
from tools import ToolRunner, schema

EQUAL_REWARDS = 1e-6  # max - min: a std of float rewards that are all 0.1 is not exactly 0
STD_EPSILON = 1e-8  # the spec's, in the advantage's denominator
SCORE_QUEUE_SIZE = 16  # groups, as in the spec
TICK_S = 0.02  # how long the worker may overlook what the trainer wrote into shared memory
REPORT_S = 1.0  # between two reports of rates and counts
POLL_LOAD_S = 5.0  # between two looks at the server's /metrics, as in the spec


class Slot(enum.IntEnum):
    """Shared memory, one int64 each: what the trainer tells the worker, and its heartbeat."""

    VERSION = 0  # of the server's weights
    ALLOWANCE = enum.auto()  # tokens that may be queued and in progress
    RELEASED = enum.auto()  # tokens that have left the queue, since the start
    HUNGRY = enum.auto()  # 1: the trainer waits and the queue is empty
    STOP = enum.auto()  # 1: come to an end
    BEAT = enum.auto()  # counts up while the worker's event loop runs
    EVALUATIONS = enum.auto()  # asked for so far; only an evaluation's worker looks (evaluate.py)
    OLDEST = enum.auto()  # the oldest version that a request samples from


# ---------------------------------------------------------------------------- in the worker process


class _Stopped(Exception):
    """The trainer set the stop flag."""


class RolloutLoop:
    """Generates and scores rollouts, in the worker process. Subclass it to change a step.

    Each prompt goes through `filter_prompt`, then once a rollout through `generate_one` (it calls
    `generate_one_turn`), then the reward functions, then `compute_advantages`. `self.config` has
    every option of the run and of the task, `self.tokenizer` the model's tokenizer. A task file
    names its subclass as `rollout_loop`; create clients in `setup`, not in `__init__`.
    """

    # ---- hooks

    def filter_prompt(self, row_index: int, row: dict, epoch: int) -> bool:
        """Whether to generate for this prompt. A rejected one counts as consumed."""
        return True

    async def generate_one(self, prompt: list[dict], tools: list, group_id: int = 0):
        """One rollout (chat.Rollout) for a prompt: turns, until the model calls no tool.

        The calls of a turn run in the order in which the model wrote them. A conversation also ends
        when it calls again after max_tool_calling_iterations turns that did, and when its next turn
        would not fit the server's context.
        """
        schemas, by_name = [schema(tool) for tool in tools], {tool.__name__: tool for tool in tools}
        prompt_ids = self._first_ids(prompt, schemas)
        completion, turns, n_calls, n_failed = [], [], 0, 0
        limit, out_of_turns = self.config.max_tool_calling_iterations, False
        while True:
            turn = await self.generate_one_turn(list(prompt_ids))
            turns.append(turn)
            message, calls = self.template.reply(turn.output_ids, turn.prompt_ids, schemas)
            completion.append(message)
            if calls:
                self.record("tools/parallel_calls_mean", len(calls))
            out_of_turns = bool(calls) and limit is not None and len(turns) > limit
            if not calls or out_of_turns:
                break
            answers = [await self.tool_runner.answer(call, by_name) for call in calls]
            messages = [*prompt, *completion]
            prompt_ids = self._next_ids(turn, messages, answers, schemas)
            if not self._fits(prompt_ids):
                answers = [self.tool_runner.too_long(*answer) for answer in answers]
                prompt_ids = self._next_ids(turn, messages, answers, schemas)
            completion += [message for message, _ in answers]
            n_calls += len(calls)
            n_failed += sum(failed for _, failed in answers)
            if not self._fits(prompt_ids):
                self.record("tools/context_exhausted_count", 1)
                break
        if self.tool_names:
            self.record("tools/loop_exhausted_frac", out_of_turns)
        return chat.Rollout(
            completion=completion,
            completion_ids=[i for turn in turns for i in turn.output_ids],
            turns=turns,
            tool_call_count=n_calls,
            tool_failure_count=n_failed,
        )

    async def generate_one_turn(self, prompt_ids: list[int]) -> chat.TurnRecord:
        """Sample one reply with the run's sampling settings."""
        return await self.sampler.sample(prompt_ids, self.version)

    def compute_advantages(self, group: RolloutGroup) -> np.ndarray:
        """A = (r - mean) / (std + 1e-8) with the population std over the scored; 0 if unscored.
        Dr. GRPO does not divide."""
        scored = ~np.isnan(group.rewards)
        advantages = np.zeros(len(group.rewards))
        if scored.any():
            rewards = group.rewards[scored]
            scale = 1.0 if self.config.loss == "dr_grpo" else rewards.std() + STD_EPSILON
            advantages[scored] = (rewards - rewards.mean()) / scale
        return advantages

    async def setup(self) -> None:
        """Create what the other hooks need; on the event loop, before the first prompt."""

    async def close(self) -> None:
        """Release what `setup` created; also after a failure."""

    # ---- machinery

    def __init__(
        self,
        config,
        task,
        tokenizer,
        *,
        model_name,
        eos_token_ids,
        start_index,
        shared,
        send,
        used=frozenset(),
        adapter_name=None,
    ):
        self.config, self.task, self.tokenizer = config, task, tokenizer
        self.eos_token_ids = frozenset(eos_token_ids)
        self.start_index, self.used = start_index, used  # the first prompt; those to leave out
        self.rollout_timeout_s = config.rollout_timeout_s or config.vllm_server_timeout
        self.sampler = make_router(
            config,
            lambda: self.version,
            model_name=model_name,
            eos_token_ids=eos_token_ids,
            start_index=start_index,
            adapter_name=adapter_name,
        )
        self.load_limit = LoadLimit(config.max_concurrent_rollouts, config.max_concurrent_rollouts)
        self.records = []  # (name, value, weight) since the last message to the trainer
        self.stories = []  # dump.stories since then
        self.template = ChatTemplate(tokenizer, config.chat_template_kwargs)
        self.tool_runner = ToolRunner(
            max_concurrent=config.max_concurrent_rollouts,
            timeout_s=config.tool_timeout_s,
            record=self.record,
        )
        self.environments = Environments(task.environment_factory, task.tools, self.tool_runner)
        self.tool_names = []  # of all rollouts; known after _learn_tools()
        self.in_flight = 0  # rollouts that hold a slot
        self._threads = ThreadPoolExecutor(len(task.reward_funcs) + 1, "rewards")
        self._shared, self._send = shared, send
        self._rendered = None, []  # the last (prompt, schemas) and its ids: rendering takes 0.5 ms
        self._open_groups = 0  # started and neither sent nor dropped
        self._open_rollouts = 0  # ... their rollouts that have not been generated yet
        self._tokens_to_score = 0  # ... the tokens of those that have
        self._mean_tokens = None  # running mean of the tokens of a rollout
        self._sent_tokens = 0
        self._failed_in_a_row = 0
        self._lag_s = 0.0  # longest time that the event loop overslept since the last report
        self._shown_version = -math.inf  # of the weights when completions were last printed

    @property
    def version(self) -> int:
        """The newest weights that the server is known to have."""
        return self._shared[Slot.VERSION]

    def record(self, name: str, value, weight=1) -> None:
        """Log a value. metrics.py averages by weight, or sums or takes extremes: see METRICS.md."""
        self.records.append((name, float(value), float(weight)))

    async def run(self) -> None:
        """Until there are no more prompts, the trainer says stop, or something fails."""
        self._moved = asyncio.Event()  # something ended: look at the limits again
        self._to_score = asyncio.Queue(SCORE_QUEUE_SIZE)
        is_set_up = False
        try:
            async with asyncio.TaskGroup() as self._tasks:  # the first exception ends all of them
                beside = [self._tasks.create_task(self._beat())]
                await self.sampler.start()
                await self._look_at_load()
                await self._learn_tools()
                is_set_up, self._reported = True, (time.monotonic(), 0, 0)
                await self.setup()
                for work in (self._report(), self._follow_load(), self._score_groups()):
                    beside.append(self._tasks.create_task(work))
                await self._dispatch()
                await self._wait_while(lambda: self._open_groups > 0)
                for task in beside:
                    task.cancel()
            self._record_rates()
            await self._ship()
            await asyncio.wrap_future(self._send(("done",)))
        except* _Stopped:
            pass
        finally:
            if is_set_up:
                await self.close()
            await self.sampler.close()

    async def _learn_tools(self) -> None:
        """Before the first rollout: what the model is told of tools, and how it calls them."""
        try:
            async with asyncio.timeout(self.rollout_timeout_s) as limit:
                schemas = await self.environments.prepare()
        except TimeoutError as error:
            if not limit.expired():
                raise
            raise RuntimeError(
                f"environment_factory made no environment within {self.rollout_timeout_s:g} s "
                "(rollout_timeout_s)"
            ) from error
        schemas = [schema(tool) for tool in self.task.tools] + schemas
        if self.sampler.max_model_len:  # a token is seldom longer than eight characters
            self.tool_runner.max_result_chars = 8 * self.sampler.max_model_len
        self.tool_names = [one["function"]["name"] for one in schemas]
        if not schemas:
            return
        kwargs = self.config.chat_template_kwargs
        try:
            self.template = ChatTemplate(self.tokenizer, kwargs, self.eos_token_ids, schemas)
        except ValueError as error:
            if type(self).generate_one is RolloutLoop.generate_one:
                raise
            _warn(f"{error}; generate_one of {type(self).__name__} must do without")
        else:
            _say(self.template.notes)

    def _first_ids(self, prompt, schemas) -> list[int]:
        if self._rendered[0] != (prompt, schemas):  # a group's rollouts start one after another
            ids = self.template.ids(prompt, schemas)
            self._rendered = (copy.deepcopy(prompt), schemas), ids
        return self._rendered[1]

    def _next_ids(self, turn, messages, answers, schemas) -> list[int]:
        """The prompt of the turn after `turn` (the end of `messages`) and its calls' answers."""
        results = [message for message, _ in answers]
        held = [*turn.prompt_ids, *turn.output_ids]
        ids = self.template.continuation(held, results, schemas)
        return self.template.ids([*messages, *results], schemas) if ids is None else ids

    def _fits(self, prompt_ids) -> bool:
        longest = self.sampler.max_model_len or math.inf
        # With a candidate set the server cuts a reply short that does not fit; else it refuses.
        room = 1 if self.sampler.truncated else self.config.max_completion_length
        return len(prompt_ids) + room <= longest

    async def _in_thread(self, func, *args):
        return await asyncio.get_running_loop().run_in_executor(self._threads, func, *args)

    async def _ship(self, samples=(), dropped=()) -> None:
        """Send samples, ids of groups that have none, and the records so far to the trainer."""
        self._sent_tokens += self._own_tokens(samples)
        records, self.records = self.records, []
        stories, self.stories = self.stories, []
        message = "data", list(samples), records, list(dropped), stories
        await asyncio.wrap_future(self._send(message))

    def _own_tokens(self, samples) -> int:
        return sum(sample.own_tokens(self.config.num_generations) for sample in samples)

    async def _wait_while(self, holds, metric: str | None = None) -> None:
        """Until `holds()` is false; looked at when something ends, and every TICK_S."""
        start = time.monotonic()
        while holds():
            self._moved.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(TICK_S):  # wait_for of 3.11 can lose a cancellation
                    await self._moved.wait()
        waited_s = time.monotonic() - start
        if metric and waited_s > 0.001:
            self.record(metric, waited_s)

    # ---- prompts to groups, within the three limits

    def _prompts(self):
        return prompts(self.task.rows, self.config, self.start_index, self.used, _warn)

    async def _dispatch(self) -> None:
        """Start the rollouts of every prompt. Returns when the last has been started."""
        to_come = self._prompts()
        epoch, is_whole, n_admitted = None, False, 0
        while True:
            await self._wait_while(self._to_score.full, "rollout/score_block_s")
            held_back = "rollout/backpressure_s" if self._mean_tokens is not None else None
            await self._wait_while(self._is_too_far_ahead, held_back)
            prompt = await self._in_thread(next, to_come, None)
            if prompt is None or prompt.epoch != epoch:
                if is_whole and not n_admitted:
                    raise RuntimeError(
                        f"filter_prompt rejected every prompt of epoch {epoch}: nothing would ever "
                        "be trained again; let it admit some"
                    )
                if prompt is None:
                    return
                epoch, is_whole, n_admitted = prompt.epoch, prompt.opens_epoch, 0
            self.task.check_row(prompt.row, f"row {prompt.row_index} of the dataset")
            if not self.filter_prompt(prompt.row_index, prompt.row, epoch):
                self.record("rollout/filtered_count", 1)
                await self._ship(dropped=[prompt.group_id])
                continue
            n_admitted += 1
            n = self.config.num_generations
            group = OpenGroup(prompt.group_id, prompt.row_index, prompt.row, self.version, n)
            self._open_groups += 1
            self._open_rollouts += n
            for _ in range(n):
                await self._wait_while(lambda: self.in_flight >= self.load_limit.cap)
                self.in_flight += 1
                self._tasks.create_task(self._run_rollout(group))

    def _is_too_far_ahead(self) -> bool:
        """The staleness limit: tokens queued and in progress against the trainer's allowance."""
        if self._open_groups == 0 and self._shared[Slot.HUNGRY]:
            return False  # the trainer waits with nothing to take: whatever the counts say, go on
        if self._mean_tokens is None:
            return self._open_groups > 0  # how long a rollout gets is not known yet
        queued = self._sent_tokens - self._shared[Slot.RELEASED]
        in_progress = self._open_rollouts * self._mean_tokens + self._tokens_to_score
        return queued + in_progress >= self._shared[Slot.ALLOWANCE]

    # ---- rollouts

    async def _run_rollout(self, group: OpenGroup) -> None:
        start = time.monotonic()
        finished = await self._generate(group)
        self.in_flight -= 1
        self.load_limit.finished += 1
        self._open_rollouts -= 1
        self._moved.set()
        if finished is not None:
            finished.seconds = time.monotonic() - start
            group.finished.append(finished)
            n_tokens = self._own_tokens(finished.samples)
            group.tokens += n_tokens
            self._tokens_to_score += n_tokens
        group.n_open -= 1
        if group.n_open:
            return
        if group.finished:
            mean, old = group.tokens / len(group.finished), self._mean_tokens
            self._mean_tokens = mean if old is None else old + 0.1 * (mean - old)
        group.queued_at = time.monotonic()
        await self._to_score.put(group)

    async def _generate(self, group: OpenGroup) -> FinishedRollout | None:
        """A rollout of the group, or None if it failed twice. Some failures end the run."""
        failures = 0
        while True:
            self.sampler.pin()
            try:
                async with asyncio.timeout(self.rollout_timeout_s) as limit:
                    finished = await self._generate_in_environment(group)
                self._failed_in_a_row = 0
                return finished
            except (RequestRefused, ServerLost):
                raise
            except Stale:
                self.record("sample/dropped_stale_count", 1)
                return None
            except Exception as error:
                if isinstance(error, TimeoutError) and self.sampler.down_since is not None:
                    # Not a try: the server is away, for which the sampler has a limit of its own.
                    await asyncio.sleep(TICK_S)
                    continue
                what = f"of row {group.row_index}: {type(error).__name__}: {error}"
                if limit.expired():
                    what += f"longer than {self.rollout_timeout_s:g} s (rollout_timeout_s)"
                failures += 1
                self._failed_in_a_row += 1
                n_at_once = max(self.load_limit.cap, self.config.num_generations)
                if self._failed_in_a_row >= 2 * n_at_once:  # nothing works any more
                    raise RuntimeError(
                        f"{self._failed_in_a_row} rollouts in a row failed; the last one, {what}"
                    ) from error
                if failures == 2:
                    self.record("rollout/failed_count", 1)
                    _warn(f"left out after its second try, a rollout {what}")
                    return None
                self.record("rollout/restarted_count", 1)

    async def _generate_in_environment(self, group: OpenGroup) -> FinishedRollout:
        """A rollout with what belongs to it before and after: its environment's reset() and reward.
        An environment whose rollout failed is not used again."""
        row, environment, tools, reward = group.row, None, list(self.task.tools), None
        prompt = row.get("prompt")
        if self.environments.factories:
            where = f"row {group.row_index} of the dataset"
            environment, prompt = await self.environments.open(row, where)
            tools += methods(environment)
        try:
            rollout = await self.generate_one(prompt, tools, group.group_id)
        except Stale:  # stopped for its age, which is no failure of the environment
            if environment is not None:
                self.environments.close(environment, row)
            raise
        if not isinstance(rollout, chat.Rollout):
            raise TypeError(f"generate_one returned {rollout!r:.80}, not a Rollout")
        if environment is not None:
            reward = await self.environments.reward(environment)
            self.environments.close(environment, row)
        samples, drifts = chat.samples_from_turns(rollout.turns, version=group.version)
        return FinishedRollout(rollout, samples, drifts, prompt, reward)

    # ---- groups to scored samples

    async def _score_groups(self) -> None:
        """One group at a time: reward functions need not be safe to call twice at once."""
        while True:
            self.record("rollout/score_queue_size", self._to_score.qsize())
            group = await self._to_score.get()
            self._moved.set()
            start = time.monotonic()
            self.record("rollout/score_wait_s", start - group.queued_at)
            if group.finished:
                self.records += rollout_records(
                    group.finished, self.eos_token_ids, bool(self.tool_names)
                )
            samples = await self._score(group.closed())
            self.record("rollout/score_s", time.monotonic() - start)
            await self._ship(samples, [] if samples else [group.group_id])
            self._tokens_to_score -= group.tokens
            self._open_groups -= 1
            self._moved.set()

    async def _score(self, group: RolloutGroup) -> list[chat.Sample]:
        """The samples to train on, none if the group teaches nothing. Records its rewards."""
        n, funcs = len(group.prompts), self.task.reward_funcs
        if n == 0:  # all of its rollouts failed
            self.record("frac_reward_zero_std", 1)
            return []
        calls = [call_reward(f, group, self._in_thread, self.rollout_timeout_s) for f in funcs]
        given = await asyncio.gather(*calls)
        own = checked_rewards("Rollout.reward", group.rollout_rewards, n)
        named = list(zip(map(reward_name, funcs), given))
        named += environment_rewards(group)
        group.rewards = summed([*(rewards for _, rewards in named), own])
        advantages = np.asarray(self.compute_advantages(group), dtype=np.float64)
        if advantages.shape != (n,) or not np.isfinite(advantages).all():
            raise ValueError(f"compute_advantages returned {advantages}, not {n} finite numbers")
        scored = group.rewards[~np.isnan(group.rewards)]
        is_kept = len(scored) >= 2 and np.ptp(scored) > EQUAL_REWARDS
        self.records += reward_records(group.rewards, named, is_kept)
        self._show(group, advantages)
        if self.config.dump_rollouts:
            sources = {**dict(named), "rollout": own}
            self.stories += dump.stories(group, sources, advantages, is_kept, self.tool_names)
        return trained_samples(group, advantages, named) if is_kept else []

    def _show(self, group: RolloutGroup, advantages) -> None:
        """log_completions: the first group of about every logging_steps steps, in the log."""
        every = self.config.logging_steps / self.config.weight_sync_steps
        if not self.config.log_completions or self.version < self._shown_version + every:
            return
        self._shown_version = self.version
        for told in as_text(group, advantages, self.config.num_completions_to_print):
            _say(told)

    # ---- what runs beside

    async def _beat(self) -> None:
        """Heartbeat and stop flag. It waits for nothing else."""
        while not self._shared[Slot.STOP]:
            self._shared[Slot.BEAT] += 1
            self._shared[Slot.OLDEST] = self.sampler.stop_stale()
            slept_at = time.monotonic()
            await asyncio.sleep(0.1)
            self._lag_s = max(self._lag_s, time.monotonic() - slept_at - 0.1)
        raise _Stopped

    async def _report(self) -> None:
        while True:
            await asyncio.sleep(REPORT_S)
            self._record_rates()
            await self._ship()

    def _record_rates(self) -> None:
        """Rates and counts since the last time."""
        before, sampler = self._reported, self.sampler
        now = self._reported = time.monotonic(), sampler.generated_tokens, sampler.retry_count
        seconds, n_tokens, n_retries = np.subtract(now, before)
        self.record("rollout/generated_tokens_per_s", n_tokens / seconds, seconds)
        self.record("rollout/vllm_retry_count", n_retries)
        self.record("rollout/event_loop_lag_max_s", self._lag_s)
        self._lag_s = 0.0
        self.record("rollout/concurrency", self.in_flight)
        self.record("rollout/concurrency_cap", self.load_limit.cap)

    async def _follow_load(self) -> None:
        while True:
            await asyncio.sleep(POLL_LOAD_S)
            await self._look_at_load()

    async def _look_at_load(self) -> None:
        text = await self.sampler.read("/metrics")
        load = parse_load(text) if text else None
        if load is None:  # no such endpoint, or away for a moment: the limit stays what it is
            return
        self.records += self.load_limit.follow(load, self.in_flight, self.sampler.max_model_len)
        self._moved.set()


def _say(text: str) -> None:
    print(f"rollout worker: {text}", flush=True)


def _warn(text: str) -> None:
    print(f"rollout worker: {text}", file=sys.stderr, flush=True)
