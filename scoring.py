"""Finished rollouts to rewards, metrics and samples, and the record of a group that hooks get.

Test: pytest tests/test_rollout.py
"""

import asyncio
import dataclasses
import functools
import math
import numbers
import time
from dataclasses import dataclass, field

import numpy as np

import chat
from tools import is_async


@dataclass(eq=False)
class RolloutGroup:
    """The rollouts of one prompt, scored together. Each list has one entry a rollout."""

    prompts: list[list[dict]]
    reward_kwargs: dict[str, list]  # the other columns of the prompt's row
    completions: list[list[dict]]
    completions_ids: list[list[int]]
    completions_sequences: list[list[chat.Sample]]  # training samples; several if turns forked
    tool_call_counts: list[int]
    tool_failure_counts: list[int]
    model_version: int  # when the group's first rollout started
    group_id: int  # position of the prompt in the run's order; without resuming counted from 0
    row_index: int
    env_rewards: list[tuple[type, float] | None]
    rollout_rewards: list[float | None]
    rollout_ids: list[str]
    queued_at: float = 0.0  # time.monotonic() when it was queued for scoring
    rewards: np.ndarray | None = None  # float64, NaN where no source scored; set before advantages


def reward_name(func) -> str:
    """The name under which a reward function is logged."""
    while isinstance(func, functools.partial):
        func = func.func
    return getattr(func, "__name__", type(func).__name__)


def checked_rewards(name: str, values, n: int) -> np.ndarray:
    """float64[n] of what a reward function returned, NaN where it gave None or NaN."""
    if isinstance(values, (str, bytes, dict)) or not hasattr(values, "__len__"):
        raise TypeError(f"reward {name} returned {values!r:.80}: it must return a list of floats")
    if len(values) != n:
        raise ValueError(f"reward {name} returned {len(values)} values for {n} completions")
    rewards = np.full(n, np.nan)
    for i, value in enumerate(values):
        value = value.item() if hasattr(value, "item") else value  # numpy and torch scalars
        if value is None:
            continue
        if not isinstance(value, numbers.Real):
            raise TypeError(f"reward {name} returned {value!r:.80}, which is not a number or None")
        if math.isinf(value):
            raise ValueError(f"reward {name} returned {value!r}: rewards must be finite or None")
        rewards[i] = value
    return rewards


def summed(sources: list[np.ndarray]) -> np.ndarray:
    """Sum over the sources that scored; NaN for a rollout that none of them scored."""
    rewards_SG = np.stack(sources)
    unscored = np.isnan(rewards_SG).all(axis=0)
    return np.where(unscored, np.nan, np.nansum(rewards_SG, axis=0))


@dataclass(eq=False)
class FinishedRollout:
    """One rollout of a group, before it is scored."""

    rollout: chat.Rollout
    samples: list[chat.Sample]
    drifts: list[int]  # of chat.samples_from_turns
    prompt: list[dict]  # with what the environment's reset() said
    env_reward: tuple[type, float | None] | None
    seconds: float = 0.0


@dataclass(eq=False)
class OpenGroup:
    """A group whose rollouts are still running."""

    group_id: int
    row_index: int
    row: dict
    version: int
    n_open: int  # rollouts that are not there yet
    finished: list[FinishedRollout] = field(default_factory=list)
    tokens: int = 0  # Sample.own_tokens of all of them
    queued_at: float = 0.0

    def closed(self) -> RolloutGroup:
        rollouts = [one.rollout for one in self.finished]
        n = len(rollouts)
        columns = {name: value for name, value in self.row.items() if name != "prompt"}
        return RolloutGroup(
            prompts=[one.prompt for one in self.finished],
            reward_kwargs={name: [value] * n for name, value in columns.items()},
            completions=[rollout.completion for rollout in rollouts],
            completions_ids=[rollout.completion_ids for rollout in rollouts],
            completions_sequences=[one.samples for one in self.finished],
            tool_call_counts=[rollout.tool_call_count for rollout in rollouts],
            tool_failure_counts=[rollout.tool_failure_count for rollout in rollouts],
            model_version=self.version,
            group_id=self.group_id,
            row_index=self.row_index,
            env_rewards=[one.env_reward for one in self.finished],
            rollout_rewards=[rollout.reward for rollout in rollouts],
            rollout_ids=[rollout.rollout_id for rollout in rollouts],
            queued_at=self.queued_at,
        )


def rollout_records(finished: list[FinishedRollout], eos_token_ids: frozenset, has_tools: bool):
    """What a group's rollouts say whatever their rewards are: records (name, value, weight)."""
    found = []

    def record(name, values, how=np.mean):
        found.append((name, float(how(values)), float(len(values)) if how is np.mean else 1.0))

    lengths, ended, repeated, seen = [], [], [], set()
    for one in finished:
        replies = tuple(tuple(turn.output_ids) for turn in one.rollout.turns)
        lengths.append(sum(map(len, replies)))
        ended.append(any(replies) and bool(eos_token_ids & set(replies[-1][-1:])))
        repeated.append(replies in seen)
        seen.add(replies)
    record("completions/mean_length", lengths)
    record("completions/min_length", lengths, min)
    record("completions/max_length", lengths, max)
    terminated = [length for length, has_ended in zip(lengths, ended) if has_ended]
    if terminated:
        record("completions/mean_terminated_length", terminated)
        record("completions/min_terminated_length", terminated, min)
        record("completions/max_terminated_length", terminated, max)
    record("completions/clipped_ratio", [not has_ended for has_ended in ended])
    record("completions/duplicate_frac", repeated)
    turns = [len(one.rollout.turns) for one in finished]
    record("rollout/turns_mean", turns)
    record("rollout/turns_max", turns, max)
    record("rollout/samples_per_rollout", [len(one.samples) for one in finished])
    record("rollout/duration_s", [one.seconds for one in finished])
    drifts = [drift for one in finished for drift in one.drifts]
    if drifts:
        record("rollout/fork_frac", [drift > 0 for drift in drifts])
        record("rollout/drift_tokens_mean", drifts)
        record("rollout/drift_tokens_max", drifts, max)
    if has_tools:
        n_calls = sum(one.rollout.tool_call_count for one in finished)
        n_failed = sum(one.rollout.tool_failure_count for one in finished)
        record("tools/call_frequency", [one.rollout.tool_call_count for one in finished])
        if n_calls:
            found.append(("tools/failure_frequency", n_failed / n_calls, float(n_calls)))
    return found


def environment_rewards(group: RolloutGroup) -> list[tuple[str, np.ndarray]]:
    """(class name, float64[n]) of what get_reward of each class gave; NaN for other rollouts."""
    found = []
    for cls in dict.fromkeys(pair[0] for pair in group.env_rewards if pair is not None):
        values = [pair[1] if pair and pair[0] is cls else None for pair in group.env_rewards]
        rewards = checked_rewards(f"{cls.__name__}.get_reward", values, len(values))
        found.append((cls.__name__, rewards))
    return found


async def call_reward(func, group: RolloutGroup, in_thread, timeout_s: float) -> np.ndarray:
    """float64[n] of what a reward function gives the group's rollouts, NaN where it gives none.
    in_thread(func): awaits a sync function. RuntimeError names the function and the row."""
    name = reward_name(func)
    columns = {
        "prompts": group.prompts,
        "completions": group.completions,
        "completion_ids": group.completions_ids,
        **group.reward_kwargs,
    }
    try:
        async with asyncio.timeout(timeout_s) as limit:
            if is_async(func):
                values = await func(**columns)
            else:
                values = await in_thread(functools.partial(func, **columns))
    except Exception as error:
        what = f"raised {type(error).__name__}: {error}"
        if limit.expired():
            what = f"has not returned within {timeout_s:g} s (rollout_timeout_s)"
        raise RuntimeError(f"reward {name} {what}; row {group.row_index}") from error
    return checked_rewards(name, values, len(group.prompts))


def reward_records(rewards: np.ndarray, named, is_kept: bool):
    """What a group's rewards say: records (name, value, weight). named: (source, float64[n])."""
    found = [("frac_reward_zero_std", float(not is_kept), 1.0)]
    scored = rewards[~np.isnan(rewards)]
    if len(scored):
        found.append(("reward", float(scored.mean()), float(len(scored))))
        found.append(("reward_min", float(scored.min()), 1.0))
        found.append(("reward_max", float(scored.max()), 1.0))
        if not is_kept:
            found.append(("reward_dropped", float(scored.mean()), 1.0))
    for name, given in named:
        by_this = given[~np.isnan(given)]
        if len(by_this):
            found.append((f"rewards/{name}/mean", float(by_this.mean()), float(len(by_this))))
        found.append((f"rewards/{name}/unscored_count", float(len(given) - len(by_this)), 1.0))
    return found


def trained_samples(group: RolloutGroup, advantages: np.ndarray, named) -> list[chat.Sample]:
    """The samples of the scored rollouts of a group that is kept. Metrics "averaged over the
    trained samples" go with them: each sample takes its share."""
    scored = np.flatnonzero(~np.isnan(group.rewards))
    shares = {"reward_group_std": float(group.rewards[scored].std())}
    for name, given in named:
        by_this = given[~np.isnan(given)]
        if len(by_this):
            shares[f"rewards/{name}/group_std"] = float(by_this.std())
    now = time.time()
    samples = [
        dataclasses.replace(
            sample,
            advantage=float(advantages[i]),
            group_id=group.group_id,
            row_index=group.row_index,
            rollout_index=int(i),
            metrics=shares | {"reward_kept": float(group.rewards[i])},
            created_at=now,
        )
        for i in scored
        for sample in group.completions_sequences[i]
    ]
    if samples:
        samples[-1].closes_group = True
    return samples


def as_text(group: RolloutGroup, advantages: np.ndarray, n: int | None):
    """The first n rollouts of a scored group (None: all) to read, one text each."""
    for i in range(len(group.prompts))[:n]:
        lines = [f"row {group.row_index}, weights of version {group.model_version}"]
        for message in [*group.prompts[i], *group.completions[i]]:
            said = [chat.text_of(message)]
            said += [str(call["function"]) for call in message.get("tool_calls") or ()]
            lines.append(f"{message['role']}: " + "\n".join(said))
        lines.append(f"reward {group.rewards[i]:g}, advantage {advantages[i]:.3g}")
        yield "\n".join(lines).replace("\n", "\n    ")
