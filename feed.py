"""Samples in: from the rollout worker through the planner to every rank, a step at a time.

    Feed      rank 0 owns the worker process (worker.py), the planner's thread (planner.py), the
              evaluation (evaluate.py) and the dump (dump.py)
    Replay    the same steps again, from what another run dumped; no server, no worker

A collective call, next(), hands each rank the raw samples of its rows: they are smaller than packed
rows, and each rank packs its own.

Test: pytest tests/test_trainer.py tests/test_dump.py tests/test_end_to_end.py
"""

import math
import time
from collections import Counter
from dataclasses import asdict, dataclass, field

import numpy as np
import torch.distributed as dist

import dump
import model
import planner
import tasks
from evaluate import Evaluation
from packing import Row
from sync import together
from worker import RolloutWorker

TELL_S = 60.0  # of waiting for samples, after which a line says so
SYNC_AGAIN = "sync again"  # from next(): a server lacks the weights, so no samples come from it
STILL_WAITING = "still waiting"  # so that other ranks do not take a long wait for a dead rank 0


@dataclass
class Share:
    """What one rank trains on in one step."""

    rows: list  # samples of this rank, one list a micro-batch
    denominators: list  # what each micro-batch's summed loss is divided by
    token_shares: list  # of each row among the tokens of all rows: the aux loss's weight
    epoch: float = math.nan  # passes over the prompts once this step is done; NaN for a stream
    log_probs: list = field(default_factory=list)  # the policy's of each row's terms, once seen


def shares(plan, config, world_size, epoch=math.nan):
    """The Share of every rank. A plan for more processes than there are takes several rounds a
    micro-batch, which changes no gradient; who has no row in the last forwards without a loss."""
    counts = plan.n_trained
    if config.loss in ("gspo", "dr_grpo"):  # means over samples, not over tokens
        counts = [
            sum(len(row.samples) for row in rows if row.n_terms) for rows in plan.micro_batches
        ]
    if config.normalize == "step":
        denominators = [sum(counts)] * len(counts)
    else:
        denominators = [count * len(counts) for count in counts]
    found = [Share([], [], [], epoch) for _ in range(world_size)]
    for rows, denominator in zip(plan.micro_batches, denominators):
        # tokens weigh rows as the loss is normalised; a row without loss terms weighs nothing
        tokens = [row.n_tokens if row.n_terms else 0 for row in rows]
        whole = sum(tokens) * len(denominators)
        if config.normalize == "step":
            whole = plan.n_tokens
        for start in range(0, len(rows), world_size):
            batch = [row.samples for row in rows[start : start + world_size]]
            weights = [n / whole for n in tokens[start : start + world_size]]
            while len(batch) < world_size:
                batch.append([planner.lossless_copy(batch[0][0])])
                weights.append(0.0)
            for share, samples, weight in zip(found, batch, weights):
                share.rows.append(samples)
                share.denominators.append(denominator)
                share.token_shares.append(weight)
    return found


def scatter(plan, config, epoch=math.nan):
    """Rank 0's plan as this rank's Share; what is no plan goes as it is. Collective."""
    all_shares, mine = [plan] * dist.get_world_size(), [None]
    if isinstance(plan, planner.Plan):
        all_shares = shares(plan, config, dist.get_world_size(), epoch)
    dist.scatter_object_list(mine, all_shares, src=0)
    return mine[0]


def sample_records(samples, version):
    """`sample/*` of the trained samples, and what each brought along. version: of the weights that
    train on them."""
    ages = [version - sample.versions[sample.trained] for sample in samples]
    staleness = [int(age.max()) for age in ages]
    n, tokens = len(samples), [len(sample.input_ids) for sample in samples]
    trained = [int(sample.trained.sum()) for sample in samples]
    brought = {}
    for sample in samples:
        for name, value in sample.metrics.items():
            brought.setdefault(name, []).append(value)
    return [
        ("sample/forwarded_tokens_mean", sum(tokens) / n, n),
        ("sample/forwarded_tokens_max", max(tokens), 1),
        ("sample/trained_tokens_mean", sum(trained) / n, n),
        ("sample/staleness_mean", sum(staleness) / n, n),
        ("sample/staleness_max", max(staleness), 1),
        ("sample/token_staleness_mean", np.concatenate(ages).mean(), sum(trained)),
        *((name, sum(values) / len(values), len(values)) for name, values in brought.items()),
    ]


def waiting(seconds, n_dropped):
    """What is said while no samples come. n_dropped: groups that ended without any meanwhile."""
    said = f"waiting for samples for {seconds:.0f} s"
    if n_dropped:
        said += (
            f"; meanwhile {n_dropped} groups taught nothing, most often because all rewards of a "
            "group are equal: the task may be too hard or too easy"
        )
    return said


class Feed:
    """The worker and the planner of rank 0, and the way of their samples to every rank.

    Generation is held to `max_staleness` by tokens: the worker may have max(max_staleness, 1) times
    the tokens of the last step queued, in progress, or planned but not yet trained on. It goes
    beyond that only while the planner waits for samples to fill a step.

    `resumed` is the state() that a checkpoint was saved with, `process` a WorkerProcess, if one
    waits already.
    """

    def __init__(
        self,
        config,
        task,
        policy,
        tokenizer,
        model_path,
        budget,
        pad,
        run,
        adapter_name,
        resumed=None,
        process=None,
    ):
        self.config, self.budget, self.pad = config, budget, pad
        resumed = resumed or {"step": 0, "num_tokens": 0, "next_prompt": 0, "used": []}
        self.plan, self.step, self.n_tokens = None, resumed["step"], resumed["num_tokens"]
        self.version = self.step // config.weight_sync_steps
        self.pulled_tokens = self.released_tokens = 0
        # groups that were trained or dropped, which an epoch counts: all below, and these above
        self.next_prompt, self.used = resumed["next_prompt"], set(resumed["used"])
        self.n_prompts = len(task.rows) if tasks.has_epochs(task) else math.nan
        self.waits_since = None  # for samples
        self.told = []  # dump.stories of the rollouts that were scored since the step before
        self.left_over, self.late_drops = None, 0  # of the end of the prompts
        self.worker = self.planner = self.evaluation = self.dump = None
        if dist.get_rank() != 0:
            return
        rows = dist.get_world_size() * config.gradient_accumulation_steps
        names = {
            "model_path": model_path,
            "model_name": config.model,
            "eos_token_ids": model.end_token_ids(policy.model, tokenizer),
            "adapter_name": adapter_name,
        }
        wants_told = config.dump_rollouts or "trackio" in config.report_to
        if config.dump_rollouts:
            self.dump = dump.Dump(run, budget, resumed["step"])
            tokenizer.save_pretrained(run / "rollouts" / "tokenizer")
        if config.eval_env:
            held_out = tasks.load_eval_task(config, task)
            self.evaluation = Evaluation(config, held_out, run, self.step, **names)
        options = asdict(config) | {"dump_rollouts": wants_told}
        self.worker = RolloutWorker(
            options,
            task,
            **names,
            start_index=self.next_prompt,
            used=frozenset(self.used),
            process=process,
        )
        self._allow(rows * budget)
        self.worker.set_version(self.version)
        self.worker.start()
        self.planner = planner.Planner(
            self._pull,
            token_budget=budget,
            world_size=dist.get_world_size(),
            gradient_accumulation_steps=config.gradient_accumulation_steps,
            first_step=resumed["step"] + 1,
            is_stale=self._is_stale,
            vocab_size=policy.model.get_output_embeddings().weight.shape[0],
        )

    def _allow(self, step_tokens):
        """Let generation run ahead by the staleness limit, given the tokens of a step."""
        self.worker.set_allowance(max(self.config.max_staleness, 1) * step_tokens)

    def _pull(self, timeout):  # in the planner's thread
        sample = self.worker.get(timeout)
        if sample is None:
            return planner.END if self.worker.finished else None
        self.pulled_tokens += sample.own_tokens(self.config.num_generations)
        if self.dump:
            self.dump.pulled.append(sample)
        return sample

    def _is_stale(self, sample, step):
        return self._staleness(sample, step) > self.config.max_staleness

    def _staleness(self, sample, step):
        """Weight updates between the sample's oldest token and the weights that train at `step`."""
        return self._version_at(step) - int(sample.versions[sample.trained].min())

    def _version_at(self, step):
        return (step - 1) // self.config.weight_sync_steps

    def next(self, must_sync=lambda: False):
        """The next step's samples of this rank, None at the end, SYNC_AGAIN if rank 0's
        must_sync(), asked once a second of waiting, says so, or STILL_WAITING once a minute. Every
        rank calls it."""
        if self.planner:
            self.plan = self._wait(must_sync)
            if self.plan not in (SYNC_AGAIN, STILL_WAITING):
                self._use_prompts()
        self.share = scatter(self.plan, self.config, self.epoch)
        return self.share

    def _wait(self, must_sync):
        self.waits_since = self.waits_since or time.monotonic()
        begin = time.monotonic()
        while True:
            self.worker.check()
            if (now := time.monotonic()) - begin > TELL_S:
                print(waiting(now - self.waits_since, self.worker.n_dropped), flush=True)
                return STILL_WAITING
            try:
                plan = self.planner.next(timeout=1.0)
            except TimeoutError:
                if must_sync():
                    return SYNC_AGAIN
                continue
            # Whatever was pulled for this step is trained or dropped now: no longer ahead of us.
            pulled = self.pulled_tokens
            self.worker.release(pulled - self.released_tokens)
            self.step_tokens, self.released_tokens = pulled - self.released_tokens, pulled
            self.queue_size, self.taken_at = self.worker.queue_size, time.time()
            self.waits_since = None
            return plan

    def _use_prompts(self):
        """Count as used up the prompts whose last sample is in this step or was dropped."""
        dropped, self.told = self.worker.drain_ended()
        if self.plan is None:  # the prompts have ended: what came since the last step
            self.left_over = self.planner.left_over or planner.Plan(self.step + 1, [], Counter())
            self.late_drops = len(dropped) + self.left_over.dropped.total()
        ended = (self.plan or self.left_over).ended_groups
        self.used |= {*dropped, *ended}
        if self.dump:
            self.dump.tell(self.told, self.plan.step if self.plan else self.step + 1)
        while self.next_prompt in self.used:
            self.used.remove(self.next_prompt)
            self.next_prompt += 1

    def state(self):
        """Where the run stands in the order of prompts after this step, for a checkpoint."""
        return {
            "num_tokens": self.n_tokens,
            "next_prompt": self.next_prompt,
            "used": sorted(self.used),
        }

    @property
    def epoch(self):
        """Passes over the prompts, this step's included; NaN for a streamed dataset."""
        return (self.next_prompt + len(self.used)) / self.n_prompts

    def sync_due(self, step):
        """Whether the weights go to the server after this step. Every rank calls it.

        A sync waits while an evaluation runs, so that the whole of it samples from one version;
        the trainer goes on meanwhile, until the next step's samples would be as stale as is
        allowed, or the last step is done. Versions count steps, held syncs or not, as the staleness
        does.
        """
        if not self.config.eval_env:
            return step % self.config.weight_sync_steps == 0
        behind = step // self.config.weight_sync_steps - self.version
        if not behind:
            return False
        may_wait = behind < self.config.max_staleness and step != self.config.max_steps
        return together(lambda: self.evaluation and self.evaluation.lets_go(may_wait, self.worker))

    def trained(self, version):
        """After a step: the server's version goes to the worker, with how far ahead it may run.
        Every rank calls it."""
        is_new, self.version = version != self.version, version
        log_probs = None
        if self.config.dump_rollouts:
            mine = [log_probs.cpu().numpy() for log_probs in self.share.log_probs]
            log_probs = [None] * dist.get_world_size() if self.worker else None
            dist.gather_object(mine, log_probs)
        if not self.worker:
            return
        self.worker.set_version(version)
        self._allow(self.step_tokens)
        self.step = step = self.plan.step
        if self.dump:
            self.dump.step(self.plan, lambda sample: self._staleness(sample, step), log_probs)
        if self.evaluation and is_new:
            self.evaluation.start_if_due(step, version)

    def records(self):
        """What the worker reported since the last step, and the step's `sample/*` and `batch/*`."""
        plan = self.plan
        samples = [sample for row in plan.rows for sample in row.samples]
        found = self.worker.drain_records() + planner.batch_metrics(plan, self.budget, self.pad)
        found += sample_records(samples, self._version_at(plan.step))
        waited_s = [self.taken_at - sample.created_at for sample in samples]
        found.append(("sample/time_in_queue_s", sum(waited_s) / len(waited_s), len(waited_s)))
        found.append(("rollout/queue_size", self.queue_size, 1))
        found.append(("sample/dropped_stale_count", plan.dropped["stale"], 1))
        found.append(("epoch", self.epoch, 1))
        self.n_tokens += plan.n_tokens
        return found + (self.evaluation.drain() if self.evaluation else [])

    def finish(self):
        """After the last step: what was dropped since, if the prompts have ended; and what the
        evaluation that runs has found, which is waited for."""
        found = []
        if self.late_drops:
            dropped = self.left_over.dropped
            found = self.worker.drain_records() + [
                ("sample/dropped_stale_count", dropped["stale"], 1),
                ("batch/dropped_oversize_count", dropped["oversize"], 1),
                ("epoch", self.epoch, 1),
            ]
        if not self.evaluation:
            return found
        self.evaluation.wait()
        return found + self.evaluation.drain()

    def close(self):
        if self.planner:
            self.planner.close()
        if self.dump:
            self.dump.tell(self.worker.drain_ended()[1], self.step + 1)
            self.dump.close(self.step + 1, prompts_ended=self.left_over is not None)
        for process in (self.worker, self.evaluation):
            if process:
                process.stop()


class Replay:
    """Feed's interface over what `run` dumped: the same samples in the same steps, micro-batches
    and rows, so the losses and gradients too, if the model and the options are the same. It may
    have another number of processes. There is no server to sync, and rewards are not logged."""

    worker = None

    def __init__(self, config, pad):
        self.config, self.pad = config, pad
        self.plan, self.n_tokens, self.told = None, 0, []
        files = dump.step_files(config.replay)
        self.budget = together(lambda: dump.read_step(files[0]).token_budget)
        self.files = iter(files)

    def next(self, must_sync=None):
        if dist.get_rank() == 0:
            file = next(self.files, None)
            self.plan = file and self._plan(dump.read_step(file))
        return scatter(self.plan, self.config)

    def _plan(self, recorded):
        batches = []
        for rows in recorded.rows():
            batches.append([Row(recorded.token_budget) for _ in rows])
            for row, samples in zip(batches[-1], rows):
                for sample in samples:
                    row.add(sample)
        sample, stale = next(
            pair for pair in zip(recorded.samples, recorded.staleness) if pair[0].trained.any()
        )
        self.version = stale + int(sample.versions[sample.trained].min())  # that trained then
        return planner.Plan(recorded.step, batches, dropped=Counter())

    def state(self):
        return {"num_tokens": self.n_tokens, "next_prompt": 0, "used": []}

    def sync_due(self, step):
        return False

    def trained(self, version):
        pass

    def records(self):
        samples = [sample for row in self.plan.rows for sample in row.samples]
        self.n_tokens += self.plan.n_tokens
        found = planner.batch_metrics(self.plan, self.budget, self.pad)
        return found + sample_records(samples, self.version)

    def finish(self):
        return []

    def close(self):
        pass
