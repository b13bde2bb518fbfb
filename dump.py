"""Rollouts on disk: to read them, and to train from them again (--dump_rollouts, --replay).

    RUN/rollouts.jsonl              one line a rollout, written when its fate is known
    RUN/rollouts/step-000012.npz    every array of the samples that step 12 forwarded, where each
                                    was packed, and the policy's log-probs of its trained tokens
    RUN/rollouts/tokenizer/         for page.py, which shows the tokens as text

A line has the keys of `stories`, and then: `outcome` (trained, or why not: see FATES), `step` (that
trained it, or that was being filled when it was dropped), `staleness` (weight updates between its
oldest token and that step) and `samples` (for each, the same and its place: micro-batch, row, index
in the step's file). Everything stays in the run folder; prompts may hold personal data.

Left out: rollouts that failed twice (rollout/failed_count), prompts that were filtered.
Test: pytest tests/test_dump.py
"""

import json
import sys
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, fields
from pathlib import Path

import numpy as np

from chat import Sample

FATES = {
    "trained": "at least one of its samples was",
    "equal rewards": "its group teaches nothing: all rewards are the same",
    "unscored": "no reward source scored it, or fewer than two of its group",
    "untrained": "it has no trained token",
    "stale": "more than max_staleness weight updates old",
    "oversize": "longer than token_budget",
    "unused": "the run ended first",
}
ARRAYS = [field.name for field in fields(Sample) if "ndarray" in str(field.type)]
NUMBERS = [field.name for field in fields(Sample) if field.type in (int, float)]


# ---- in the rollout process ---------------------------------------------------------------------


def stories(group, rewards_by_source, advantages, is_kept, tools=()):
    """What a reader wants to know of each rollout of a scored group, as JSON-ready dicts.

    group: RolloutGroup with its rewards; rewards_by_source: {name: float64[n], NaN where it did not
    score}; tools: names of those that the model could call. A group that is not kept, or a rollout
    without reward or trained token, has its outcome already; the others get theirs from the
    trainer.
    """
    told = []
    for i, samples in enumerate(group.completions_sequences):
        versions = np.concatenate([s.versions[s.trained] for s in samples] or [[]])
        story = {
            "group": group.group_id,
            "rollout": i,
            "rollout_id": group.rollout_ids[i],
            "row_index": group.row_index,
            "prompt": group.prompts[i],
            "completion": group.completions[i],
            "tools": list(tools),
            "columns": {name: values[i] for name, values in group.reward_kwargs.items()},
            "rewards": {name: _number(values[i]) for name, values in rewards_by_source.items()},
            "reward": _number(group.rewards[i]),
            "advantage": float(advantages[i]),
            "tool_calls": group.tool_call_counts[i],
            "tool_failures": group.tool_failure_counts[i],
            "generated_tokens": int(sum(s.trained.sum() for s in samples)),
            "versions": [int(versions.min()), int(versions.max())] if len(versions) else None,
            "n_samples": len(samples),
        }
        if story["reward"] is None:
            story["outcome"] = "unscored"
        elif not is_kept:
            n_scored = np.count_nonzero(~np.isnan(group.rewards))
            story["outcome"] = "equal rewards" if n_scored >= 2 else "unscored"
        elif not samples:
            story["outcome"] = "untrained"
        told.append(story)
    return told


def _number(value):
    return None if np.isnan(value) else float(value)


# ---- in the trainer: writing --------------------------------------------------------------------


class Dump:
    """Rank 0's writer. Stories come from the rollout process, fates from the steps that are
    trained: samples leave the queue in order, so one that no step trained while a later one was
    trained was dropped by the planner. A thread writes, at most one step behind."""

    def __init__(self, run, token_budget, resumed_step=0):
        self.run, self.token_budget = Path(run), token_budget
        (self.run / "rollouts").mkdir(exist_ok=True)
        for file in step_files(run):
            if file > step_file(run, resumed_step):  # of a step that is not part of this run
                file.unlink()
        if (self.run / "rollouts.jsonl").exists():  # a killed run may have left half a line
            with open(self.run / "rollouts.jsonl", "a") as file:
                file.write(f'\n{{"resumed_step": {resumed_step}}}\n')
        self.waiting = {}  # (group, rollout) -> story whose samples do not all have a fate
        self.pulled = deque()  # samples in the order in which the planner took them
        self.lines = []  # to be written with the step
        self.thread = ThreadPoolExecutor(1, "dump")
        self.written, self.broken = None, False

    def tell(self, told, step):
        """Stories of groups that were just scored, while `step` is being filled."""
        for story in told:
            if "outcome" in story:
                self._write(story | {"step": step, "staleness": None, "samples": []})
            else:
                self.waiting[story["group"], story["rollout"]] = story | {"samples": []}

    def step(self, plan, staleness, log_probs):
        """A step was trained. staleness(sample) in weight updates; log_probs: for each rank and
        micro-batch float32[M], the policy's log-probs of the row's terms."""
        places, pieces = [], []  # of every forwarded sample: micro-batch, row
        for b, rows in enumerate(plan.micro_batches):
            for r, row in enumerate(rows):
                counts = np.cumsum([int(s.trained.sum()) for s in row.samples])
                pieces += np.split(log_probs[r][b], counts[:-1])
                places += [(b, r)] * len(row.samples)
        samples = [s for rows in plan.micro_batches for row in rows for s in row.samples]
        stale = [staleness(s) if s.trained.any() else 0 for s in samples]
        recorded = RecordedStep(plan.step, self.token_budget, samples, places, stale, pieces)
        trained = {id(s): i for i, s in enumerate(samples) if s.trained.any()}
        n_left = len(trained)
        while n_left:
            sample = self.pulled.popleft()
            i = trained.get(id(sample))
            if i is None:
                fate = self._why_dropped(sample)
                self._has_fate(sample, {"outcome": fate, "step": plan.step})
                continue
            n_left -= 1
            place = {"micro_batch": places[i][0], "row": places[i][1], "index": i}
            fate = {"outcome": "trained", "step": plan.step, "staleness": stale[i]}
            self._has_fate(sample, fate | place)
        self._write_behind(recorded)

    def _why_dropped(self, sample):
        if len(sample.input_ids) > self.token_budget:
            return "oversize"
        return "stale" if sample.trained.any() else "untrained"

    def _has_fate(self, sample, fate):
        key = sample.group_id, sample.rollout_index
        story = self.waiting.get(key)
        if story is None:  # a custom loop made a sample that belongs to no told rollout
            return
        tokens = {"tokens": len(sample.input_ids), "trained_tokens": int(sample.trained.sum())}
        story["samples"].append(fate | tokens)
        if len(story["samples"]) == story["n_samples"]:
            del self.waiting[key]
            self._write(story | _first_fate(story["samples"]))

    def close(self, step, prompts_ended=False):
        """Write the rollouts that no step came to train. prompts_ended: the planner has seen the
        last sample, so it dropped what it has taken since the last step."""
        for sample in self.pulled if prompts_ended else ():
            fate = {"outcome": self._why_dropped(sample), "step": step, "staleness": None}
            self._has_fate(sample, fate)
        for story in self.waiting.values():
            fate = _first_fate(story["samples"]) or {"outcome": "unused", "step": step}
            self._write({"staleness": None} | story | fate)
        self._write_behind(None)
        self.thread.shutdown()

    def _write(self, story):
        self.lines.append({name: value for name, value in story.items() if name != "n_samples"})

    def _write_behind(self, recorded):
        lines, self.lines = self.lines, []
        if self.written:
            self.written.result()
        self.written = self.thread.submit(self._write_out, recorded, lines)

    def _write_out(self, recorded, lines):
        """In the thread. A full disk ends the dump, not the run."""
        if self.broken:
            return
        try:
            if recorded:
                write_step(step_file(self.run, recorded.step), recorded)
            append_lines(self.run / "rollouts.jsonl", lines)
        except OSError as error:
            self.broken = True
            print(f"rollouts are no longer dumped: {error}", file=sys.stderr, flush=True)


def _first_fate(samples):
    """A rollout counts as trained if one of its samples was."""
    best = min(samples, key=lambda s: s["outcome"] != "trained", default=None)
    return best and {name: best.get(name) for name in ("outcome", "step", "staleness")}


def append_lines(path, lines):
    with open(path, "a") as file:
        file.writelines(json.dumps(line, default=str) + "\n" for line in lines)


# ---- one step as a file -------------------------------------------------------------------------


@dataclass
class RecordedStep:
    """The samples of one optimizer step, in the order micro-batch, row, position in the row."""

    step: int
    token_budget: int  # of a row
    samples: list  # of Sample
    places: list  # (micro-batch, row) of each
    staleness: list  # weight updates, of each
    policy_log_probs: list  # float32[n] of each: of its trained tokens, before the update

    def rows(self):
        """[micro-batch][row] -> its samples."""
        batches = {}
        for sample, (b, r) in zip(self.samples, self.places):
            batches.setdefault(b, {}).setdefault(r, []).append(sample)
        return [list(rows.values()) for rows in batches.values()]


def step_file(run, step):
    return Path(run) / "rollouts" / f"step-{step:06}.npz"


def step_files(run):
    return sorted((Path(run) / "rollouts").glob("step-*.npz"))


def write_step(path, recorded):
    """Arrays of all samples end to end, with their shapes; numpy's own format, no pickle."""
    samples, flat = recorded.samples, {}
    columns = {name: [getattr(s, name) for s in samples] for name in ARRAYS}
    columns["policy_log_probs"] = recorded.policy_log_probs
    for name, values in columns.items():
        there = [value for value in values if value is not None]
        if there:
            flat[name] = np.concatenate([value.ravel() for value in there])
        ndim = max((value.ndim for value in there), default=1)
        missing = (-1,) * ndim
        shapes = [missing if value is None else value.shape for value in values]
        flat[f"{name}.shapes"] = np.array(shapes, np.int64).reshape(len(samples), ndim)
    flat |= {name: np.array([getattr(s, name) for s in samples]) for name in NUMBERS}
    flat["metrics"] = np.array(json.dumps([s.metrics for s in samples]))
    flat |= {name: np.array(getattr(recorded, name)) for name in ("step", "token_budget")}
    flat |= {name: np.array(getattr(recorded, name)) for name in ("places", "staleness")}
    part = path.with_name(path.name + ".part")
    with open(part, "wb") as file:
        np.savez(file, **flat)
    part.replace(path)  # a reader never sees half a file


def read_step(path):
    with np.load(path) as file:
        flat = dict(file)
    places = [tuple(map(int, place)) for place in flat["places"]]
    columns = {name: _cut(flat, name) for name in [*ARRAYS, "policy_log_probs"]}
    log_probs = columns.pop("policy_log_probs")
    columns |= {name: flat[name].tolist() for name in NUMBERS}
    columns["metrics"] = json.loads(str(flat["metrics"]))
    names = list(columns)
    return RecordedStep(
        step=int(flat["step"]),
        token_budget=int(flat["token_budget"]),
        samples=[Sample(**dict(zip(names, row))) for row in zip(*columns.values())],
        places=places,
        staleness=flat["staleness"].tolist(),
        policy_log_probs=log_probs,
    )


def _cut(flat, name):
    """The arrays that write_step laid end to end; None where there was none."""
    arrays, start = [], 0
    for shape in flat[f"{name}.shapes"].tolist():
        if shape[0] < 0:
            arrays.append(None)
            continue
        size = int(np.prod(shape))
        arrays.append(flat[name][start : start + size].reshape(shape))
        start += size
    return arrays


def read_rollouts(run):
    """The lines of rollouts.jsonl. What a run did after the checkpoint from which it was resumed is
    left out, as is half a line of a killed run."""
    found = []
    for line in (Path(run) / "rollouts.jsonl").read_text().splitlines():
        try:
            line = json.loads(line)
        except ValueError:
            continue
        if "resumed_step" in line:
            found = [story for story in found if story["step"] <= line["resumed_step"]]
        else:
            found.append(line)
    return found
