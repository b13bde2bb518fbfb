"""Which samples train in which step, micro-batch and row.

A step is `gradient_accumulation_steps` micro-batches, a micro-batch is one row a process. A sample
goes to the row that holds its group, else to the least loaded row that has room; when there is
none, the micro-batch closes (specification, 'Tree packing'). Planner does this in a thread of
rank 0, ahead of the trainer.

Test: pytest tests/test_packing.py
"""

import copy
import logging
import queue
import threading
from collections import Counter
from dataclasses import dataclass

import numpy as np

from packing import Row, check_sample

log = logging.getLogger("espalier")

END = object()  # what a source of samples returns after its last one
POLL_S = 0.5  # how often the planner's thread looks whether it was closed
OVERSIZE_LIMIT = 1000  # oversize samples on end that mean the budget is wrong, not the samples


@dataclass
class Plan:
    """One optimizer step: for each micro-batch the row of each process. Raw samples are what gets
    sent, and each process packs its own. A row without loss terms only keeps step with the others
    (see lossless_copy); it counts as padding, not as work."""

    step: int
    micro_batches: list  # of lists of Row; none if what came after the last step was all dropped
    dropped: Counter  # samples dropped since the plan before: oversize, stale, untrained
    ended_groups: frozenset = frozenset()  # all of whose samples are now planned or dropped

    def samples(self, rank):
        """The raw samples of one process, micro-batch by micro-batch."""
        return [batch[rank].samples for batch in self.micro_batches]

    @property
    def rows(self):
        return [row for batch in self.micro_batches for row in batch if row.n_terms]

    @property
    def n_trained(self):
        """Trained tokens of each micro-batch over all processes: what its loss is divided by."""
        return [sum(row.n_terms for row in batch) for batch in self.micro_batches]

    @property
    def n_tokens(self):
        return sum(row.n_tokens for row in self.rows)

    @property
    def n_samples(self):
        return sum(len(row.samples) for row in self.rows)

    @property
    def n_groups(self):
        return len(set().union(*(row.groups for row in self.rows)))


def place(rows, sample):
    """The row that takes the sample, or None when the micro-batch has to close first."""

    def least_loaded(candidates):
        by_cost = sorted(candidates, key=lambda row: row.cost)
        return next((row for row in by_cost if row.fits(sample)), None)

    home = [row for row in rows if sample.group_id in row.groups]
    if not home:
        return least_loaded(rows)
    if (row := least_loaded(home)) is not None:
        return row
    # Splitting the group forwards its prompt again: only to give a process something to do, or
    # where the most loaded row, which sets the micro-batch's time, stays the most loaded. Otherwise
    # the sample waits for a fresh row, and what follows of its group joins it there.
    busiest = max(row.cost for row in rows)
    return least_loaded(
        row for row in rows if not row.samples or row.cost + row.added_cost(sample) <= busiest
    )


def lossless_copy(sample):
    """The sample without loss terms. When the data end, a process without samples forwards it, so
    that every process takes part in every collective."""
    clone = copy.copy(sample)
    clone.trained, clone.metrics = np.zeros_like(sample.trained), {}
    clone.top_ids, clone.top_log_probs = sample.top_ids[:0], sample.top_log_probs[:0]
    if sample.set_ids is not None:
        clone.set_ids, clone.set_offsets = sample.set_ids[:0], sample.set_offsets[:1]
    return clone


def plan_steps(
    samples,
    *,
    token_budget,
    world_size,
    gradient_accumulation_steps,
    first_step=0,
    is_stale=None,
    vocab_size=None,
):
    """Yield the Plan of one optimizer step after another until the iterable `samples` ends.

    A micro-batch closes when every row has a sample and the next sample has no place; that sample
    opens the next micro-batch, possibly of the next step. `is_stale(sample, step)` is asked for
    the step being filled. The last step may have fewer micro-batches than the others. If samples
    after it are dropped, one more Plan without micro-batches tells of them.
    """
    if token_budget < 2 or world_size < 1 or gradient_accumulation_steps < 1:
        raise ValueError(
            f"{token_budget=}, {world_size=}, {gradient_accumulation_steps=}: at least 2, 1 and 1"
        )
    stream, sample, step = iter(samples), None, first_step
    oversize = []  # lengths of the oversize samples since a sample was last placed
    while sample is not END:
        batches, dropped, rows = [], Counter(), [Row(token_budget) for _ in range(world_size)]
        ended_groups = set()
        while len(batches) < gradient_accumulation_steps:
            if sample is None:
                sample = next(stream, END)
            if sample is END or len(oversize) == OVERSIZE_LIMIT:
                break
            check_sample(sample, vocab_size)
            if len(sample.input_ids) > token_budget:
                dropped["oversize"] += 1
                oversize.append(len(sample.input_ids))
            elif not sample.trained.any():
                dropped["untrained"] += 1
            elif is_stale is not None and is_stale(sample, step):
                dropped["stale"] += 1
            elif (row := place(rows, sample)) is not None:
                row.add(sample)
                oversize = []
            else:
                batches.append(rows)
                rows = [Row(token_budget) for _ in range(world_size)]
                continue
            if sample.closes_group:
                ended_groups.add(sample.group_id)
            sample = None
        if sample is END and any(row.samples for row in rows):
            shortest = min((s for row in rows for s in row.samples), key=lambda s: len(s.input_ids))
            for row in rows:
                if not row.samples:
                    row.add(lossless_copy(shortest))
            batches.append(rows)
        if dropped["oversize"]:
            log.warning(
                "step %d: dropped %d samples longer than token_budget=%d; raise it",
                step,
                dropped["oversize"],
                token_budget,
            )
        nothing_fits = sample is END and step == first_step and not batches and oversize
        if nothing_fits or len(oversize) == OVERSIZE_LIMIT:
            raise ValueError(
                f"token_budget={token_budget} is smaller than every one of the last "
                f"{len(oversize)} samples (the shortest has {min(oversize)} tokens); "
                "raise it, at best to the server's max_model_len"
            )
        if batches or dropped:
            yield Plan(step, batches, dropped, frozenset(ended_groups))
        step += 1


def batch_metrics(plan, token_budget, pad=None):
    """The specification's `batch/*` of one step over all processes, as (name, value, weight).

    Forwarded tokens are the unique ones, as in num_tokens, but masked_token_frac compares trained
    tokens with tokens before sharing: one position may train several samples. `pad` is the
    processes' padding; unlike the specification's it is forwarded.
    """
    rows, n_rows = plan.rows, sum(len(batch) for batch in plan.micro_batches)
    raw, tokens = sum(row.raw_tokens for row in rows), plan.n_tokens
    trained = sum(plan.n_trained)
    padded = sum(pad(row.n_tokens) for row in rows) if pad else tokens
    records = [
        ("batch/forwarded_tokens_per_step", tokens, 1),
        ("batch/trained_tokens_per_step", trained, 1),
        ("batch/samples_per_step", plan.n_samples, 1),
        ("batch/groups_per_step", plan.n_groups, 1),
        ("batch/microbatches_per_step", len(plan.micro_batches), 1),
        ("batch/masked_token_frac", (raw - trained) / raw, raw),
        ("batch/samples_per_row", plan.n_samples / n_rows, n_rows),
        ("batch/row_tokens_mean", tokens / n_rows, n_rows),
        ("batch/row_tokens_max", max(row.n_tokens for row in rows), 1),
        ("batch/row_fill_frac", tokens / (token_budget * n_rows), n_rows),
        ("batch/packing_ratio", raw / tokens, tokens),
        ("batch/pad_frac", (padded - tokens) / padded, padded),
        ("batch/dropped_oversize_count", plan.dropped["oversize"], 1),
    ]
    for batch in plan.micro_batches:
        costs = [row.cost if row.n_terms else 0 for row in batch]
        records.append(("batch/row_imbalance", max(costs) * len(costs) / sum(costs), 1))
    return [(name, float(value), weight) for name, value, weight in records]


class Planner:
    """Plans ahead of the trainer, in a thread; rank 0 has one. Options: those of plan_steps.

    `pull(timeout)` returns a sample, None if none came in time, or END. At most one step is planned
    or being planned beyond those that next() has handed out, so that samples do not age here and
    `is_stale` knows the step.
    """

    def __init__(self, pull, **options):
        self.n_pulled = 0
        self.left_over = None  # Plan of samples that were dropped after the last step, if any
        self._pull, self._options, self._last = pull, options, None
        self._slot, self._ready = threading.Semaphore(1), queue.Queue()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="planner", daemon=True)
        self._thread.start()

    def _samples(self):
        while not self._closed.is_set():
            sample = self._pull(POLL_S)
            if sample is END:
                return
            if sample is not None:
                self.n_pulled += 1
                yield sample

    def _run(self):
        try:
            plans = plan_steps(self._samples(), **self._options)
            while self._slot.acquire() and not self._closed.is_set():
                plan = next(plans, END)
                if plan is not END and not plan.micro_batches:
                    self.left_over, plan = plan, END
                self._ready.put(plan)
                if plan is END:
                    return
        except Exception as error:  # whatever it is, next() raises it in the trainer
            self._ready.put(error)

    def next(self, timeout):
        """The next Plan, or None after the last one. Raises what the thread raised."""
        if self._last is None:
            try:
                item = self._ready.get(timeout=timeout)
            except queue.Empty as error:
                raise TimeoutError(
                    f"no step could be planned in {timeout} s ({self.n_pulled} samples since the "
                    "start); are rollouts still coming?"
                ) from error
            if isinstance(item, Plan):
                self._slot.release()
                return item
            self._last = item  # END or an exception: the thread is gone
        if self._last is END:
            return None
        raise self._last

    def close(self):
        self._closed.set()
        self._slot.release()
        self._thread.join(timeout=10 * POLL_S)
