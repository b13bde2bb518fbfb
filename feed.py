"""Samples in: from the rollout worker through the planner to every rank, a step at a time.

Rank 0 owns the worker process (worker.py) and the planner's thread (planner.py). A collective
call, next(), hands each rank the raw samples of its rows: they are smaller than packed rows, and
each rank packs its own.

Test: pytest tests/test_trainer.py tests/test_end_to_end.py
"""

import time
from dataclasses import asdict, dataclass

import torch.distributed as dist

import model
import planner
from worker import RolloutWorker

SYNC_AGAIN = "sync again"  # from next(): a server lacks the weights, so no samples come from it


@dataclass
class Share:
    """What one rank trains on in one step."""

    rows: list  # samples of this rank, one list a micro-batch
    denominators: list  # what each micro-batch's summed loss is divided by


class Feed:
    """The worker and the planner of rank 0, and the way of their samples to every rank.

    Generation is held to `max_staleness` by tokens: the worker may have max(max_staleness, 1) times
    the tokens of the last step queued, in progress, or planned but not yet trained on. It goes
    beyond that only while the planner waits for samples to fill a step.
    """

    def __init__(self, config, task, policy, tokenizer, model_path, budget, pad, adapter_name):
        self.config, self.budget, self.pad = config, budget, pad
        self.plan, self.n_tokens = None, 0
        self.pulled_tokens = self.released_tokens = 0
        self.worker = self.planner = None
        if dist.get_rank() != 0:
            return
        rows = dist.get_world_size() * config.gradient_accumulation_steps
        self.worker = RolloutWorker(
            asdict(config),
            task,
            model_path=model_path,
            model_name=config.model,
            eos_token_ids=model.end_token_ids(policy.model, tokenizer),
            adapter_name=adapter_name,
        )
        self.worker.set_allowance(max(config.max_staleness, 1) * rows * budget)
        self.worker.start()
        self.planner = planner.Planner(
            self._pull,
            token_budget=budget,
            world_size=dist.get_world_size(),
            gradient_accumulation_steps=config.gradient_accumulation_steps,
            first_step=1,
            is_stale=self._is_stale,
            vocab_size=policy.model.get_output_embeddings().weight.shape[0],
        )

    def _pull(self, timeout):  # in the planner's thread
        sample = self.worker.get(timeout)
        if sample is None:
            return planner.END if self.worker.finished else None
        self.pulled_tokens += sample.own_tokens(self.config.num_generations)
        return sample

    def _is_stale(self, sample, step):
        return self._staleness(sample, step) > self.config.max_staleness

    def _staleness(self, sample, step):
        """Weight updates between the sample's oldest token and the weights that train at `step`."""
        version = (step - 1) // self.config.weight_sync_steps
        return version - int(sample.versions[sample.trained].min())

    def next(self, must_sync=lambda: False):
        """The next step's samples of this rank, None at the end, or SYNC_AGAIN if rank 0's
        must_sync(), asked once a second of waiting, says so. Every rank calls it."""
        shares = None
        if self.planner:
            self.plan = self._wait(must_sync)
            shares = [self._share(rank) for rank in range(dist.get_world_size())]
        mine = [None]
        dist.scatter_object_list(mine, shares, src=0)
        return mine[0]

    def _wait(self, must_sync):
        while True:
            self.worker.check()
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
            self.queue_size = self.worker.queue_size
            return plan

    def _share(self, rank):
        if self.plan is None or self.plan is SYNC_AGAIN:
            return self.plan
        counts = self.plan.n_trained
        if self.config.loss in ("gspo", "dr_grpo"):  # means over samples, not over tokens
            batches = self.plan.micro_batches
            counts = [sum(len(row.samples) for row in rows if row.n_terms) for rows in batches]
        if self.config.normalize == "step":
            denominators = [sum(counts)] * len(counts)
        else:
            denominators = [count * len(counts) for count in counts]
        return Share(self.plan.samples(rank), denominators)

    def trained(self, version):
        """After a step: tell the worker the server's version and how far ahead it may run."""
        if self.worker:
            self.worker.set_version(version)
            self.worker.set_allowance(max(self.config.max_staleness, 1) * self.step_tokens)

    def records(self):
        """What the worker reported since the last step, and the step's `sample/*` and `batch/*`."""
        now, plan = time.time(), self.plan
        found = self.worker.drain_records() + planner.batch_metrics(plan, self.budget, self.pad)
        found.append(("rollout/queue_size", self.queue_size, 1))
        found.append(("sample/dropped_stale_count", plan.dropped["stale"], 1))
        for sample in (sample for row in plan.rows for sample in row.samples):
            staleness = self._staleness(sample, plan.step)
            found += [
                ("sample/forwarded_tokens_mean", len(sample.input_ids), 1),
                ("sample/forwarded_tokens_max", len(sample.input_ids), 1),
                ("sample/trained_tokens_mean", int(sample.trained.sum()), 1),
                ("sample/time_in_queue_s", now - sample.created_at, 1),
                ("sample/staleness_mean", staleness, 1),
                ("sample/staleness_max", staleness, 1),
                *((name, value, 1) for name, value in sample.metrics.items()),
            ]
        self.n_tokens += plan.n_tokens
        return found

    def close(self):
        if self.planner:
            self.planner.close()
        if self.worker:
            self.worker.stop()
