"""Evaluation during a run: pass@1, pass@k, reward and length on held-out prompts (--eval_env).

    trainer     Evaluation: starts one after a sync, lets the next sync wait for its end, reads it
    its worker  a second rollout process whose loop (loop_for) goes through the held-out prompts
                once for every start, and sends no sample

So an evaluation is made as rollouts are: the same prompts in, the same hooks, tools and sampling
settings, num_generations rollouts a prompt. All of its requests are answered by the weights that
the server held at its start, since no sync comes in between; each token's version proves it. Its
rollouts are in RUN/eval.jsonl (dump.py) if --dump_rollouts is on.

    pass@1 = share of rollouts that pass;  pass@k = share of prompts of which one of k rollouts does

Left out: other sampling settings than the run's; more rollouts a prompt than num_generations.
Test: pytest tests/test_evaluate.py
"""

import itertools
import time
from dataclasses import asdict

import dump
from metrics import fold_, reduced
from prompts import Prompt
from rollout import TICK_S, Slot
from worker import RolloutWorker

# What the evaluation's worker records, by the name under which it is logged.
RENAMED = {
    "reward": "eval/reward",
    "completions/mean_length": "eval/mean_length",
    "completions/clipped_ratio": "eval/clipped_ratio",
    "rollout/failed_count": "eval/failed_count",
}


def loop_for(base):
    """The class of the evaluation's loop: `base` (a RolloutLoop) with the held-out prompts."""

    class EvalLoop(base):
        def _prompts(self):
            """The first eval_prompts rows, again for each start; waits in a thread of its own."""
            rows = list(itertools.islice(self.task.rows, self.config.eval_prompts))
            for done in itertools.count():
                while self._shared[Slot.EVALUATIONS] <= done:
                    if self._shared[Slot.STOP]:
                        return
                    time.sleep(TICK_S)
                for i, row in enumerate(rows):
                    yield Prompt(done * len(rows) + i, done, False, i, row)

        def filter_prompt(self, row_index, row, epoch):
            return True

        def _is_too_far_ahead(self):
            return False

        async def _score(self, group):
            await super()._score(group)
            return []  # so the group is reported as one that ended without a sample

    return EvalLoop


class Evaluation:
    """Rank 0's handle of the evaluation and its worker."""

    def __init__(self, config, task, run, first_step, **names):
        self.config, self.run = config, run
        self.n_prompts = sum(1 for _ in itertools.islice(task.rows, config.eval_prompts))
        options = asdict(config) | {"dump_rollouts": True, "seed": config.seed + 1}
        self.worker = RolloutWorker(options, task, evaluates=True, **names)
        self.worker.start()
        # how often eval_steps had passed when the last one began
        self.n_due = first_step // config.eval_steps
        self.step = self.version = None  # of the weights that are being evaluated; None: none are
        self.held_since = None  # when the sync that waits became due
        self.records = []

    def start_if_due(self, step, version):
        """After a sync: begin if eval_steps steps have passed, or all, and the last one is over.
        (The last step has a sync, unless weight_sync_steps does not divide max_steps.)"""
        n_due = step // self.config.eval_steps
        is_due = n_due > self.n_due or step == self.config.max_steps
        if self.step is not None or not is_due:
            return
        self.n_due = n_due
        self.step, self.version, self.begin = step, version, time.monotonic()
        self.n_ended, self.stories = 0, []
        self.worker.set_version(version)
        self.worker.start_evaluation()

    def is_running(self):
        """Take what the worker has sent; the last of it makes the records."""
        self.worker.check()
        if self.step is None:
            return False
        ended, stories = self.worker.drain_ended()
        self.n_ended += len(ended)
        self.stories += stories
        if self.n_ended < self.n_prompts:
            return True
        self._conclude()
        return False

    def lets_go(self, may_wait, trainers_worker):
        """Whether a due sync may start. If it cannot wait for a later step, wait here."""
        if not self.is_running() and self.held_since is None:
            return True
        self.held_since = self.held_since or time.monotonic()
        if may_wait and self.is_running():
            return False
        self.wait(trainers_worker)
        held_s, self.held_since = time.monotonic() - self.held_since, None
        self.records.append(("eval/sync_held_s", held_s, 1))
        return True

    def wait(self, trainers_worker=None):
        """Until no evaluation runs."""
        while self.is_running():
            if trainers_worker:
                trainers_worker.check()
            time.sleep(TICK_S)

    def _conclude(self):
        versions = {v for story in self.stories for v in story["versions"] or ()}
        if versions - {self.version}:
            raise RuntimeError(
                f"the evaluation of version {self.version} has tokens of versions "
                f"{sorted(versions)}: does another trainer send weights to this server?"
            )
        window = {}
        for record in self.worker.drain_records():
            fold_(window, *record)
        found = reduced(window)
        self.records += [(RENAMED[name], found[name], 1) for name in RENAMED if name in found]
        self.records += passes(self.stories, self.n_prompts, self.config.eval_pass_reward)
        self.records.append(("eval/step", self.step, 1))
        self.records.append(("eval/duration_s", time.monotonic() - self.begin, 1))
        if self.config.dump_rollouts:
            fate = {"step": self.step, "outcome": "evaluated"}
            dump.append_lines(self.run / "eval.jsonl", [story | fate for story in self.stories])
        self.step = None

    def drain(self):
        """Records of the evaluations that ended since the last call."""
        self.is_running()
        records, self.records = self.records, []
        return records

    def stop(self):
        self.worker.stop()


def passes(stories, n_prompts, pass_reward):
    """eval/pass_at_1 and eval/pass_at_k of one evaluation, as records. An unscored rollout, and a
    prompt all of whose rollouts failed, does not pass."""
    passed = {}
    for story in stories:
        reward = story["reward"]
        passed.setdefault(story["group"], []).append(reward is not None and reward >= pass_reward)
    n = sum(map(len, passed.values()))
    return [
        ("eval/pass_at_1", sum(map(sum, passed.values())) / max(n, 1), 1),
        ("eval/pass_at_k", sum(map(any, passed.values())) / n_prompts, 1),
    ]
