"""What holds a run back, in sentences: the spec's bottleneck list and its two saturation tables.

    diagnose(*compare(windows, 10), **limits)  ->  ["generation-bound: training waited 63% ..."]

Each rule reads a few metrics of a merge of windows, some also those of an earlier one, and says
the figures and the remedy in one or two sentences. Sources: specification, chapters 'Concurrency',
'The rollout queue', 'Saturation and duplicates'.

Test: pytest tests/test_diagnosis.py
"""

import math
from collections import defaultdict

from metrics import NAN

LIMITS = (  # options of the run
    "max_staleness",
    "max_concurrent_rollouts",
    "num_generations",
    "weight_sync_steps",
)

# Rules of thumb, as fractions: of a step, of groups, of the reward's range, of the KV cache.
HIGH_WAIT = 0.2  # waiting less than this gains little when it is removed
HIGH_DROPPED = 0.5  # below it most groups produce a gradient; half of it counts while climbing
MOVED = 0.1  # a smaller change since `before` is noise over a few dozen groups
NEAR_END = 0.2  # "near the top (bottom) of the range"
KV_LOW = 0.6  # the worker raises its cap below this, so the server has room
QUICK_SCORE_S = 0.05  # seconds: a group that is scored so fast does not keep others waiting
SMALL_MASS = 0.9  # of probability; what the head leaves out is not centered


def diagnose(
    now,
    before=None,
    *,
    max_staleness=None,
    max_concurrent_rollouts=None,
    num_generations=None,
    weight_sync_steps=None,
):
    """What holds the run back, in sentences. `now` is a window or a merge of some, `before` the
    same from earlier in the run (see `compare`); without it nothing is called climbing or falling.
    The limits are the run's options; a rule whose limit is unknown stays silent about it.
    Every comparison with a missing figure (NaN) is False, so the rule does not fire."""
    now, before = (defaultdict(lambda: NAN, window) for window in (now, before or {}))
    lines = [
        bottleneck(now, max_staleness, max_concurrent_rollouts, weight_sync_steps),
        saturation(now, before, *seen_range(now, before)),
        duplicates(now, before, num_generations),
        mismatch(now),
    ]
    return [line for line in lines if line]


def bottleneck(now, max_staleness, max_concurrent, sync_steps):
    """The two waits are mirror images; both are read against the length of a step. Where neither
    is long, the sync may be, for which both sides wait."""
    step_s, wait_s = now["perf/step_s"], now["perf/rollout_wait_s"]
    held_s = now["rollout/backpressure_s"]
    if not step_s > 0:
        return ""
    waiting, held = wait_s > HIGH_WAIT * step_s, held_s > HIGH_WAIT * step_s
    waited = f"training waited {wait_s / step_s:.0%} of a step ({wait_s:.1f} of {step_s:.1f} s)"
    if waiting and held:
        return (
            f"max_staleness is too tight: {waited} while generation was held back for "
            f"{held_s:.1f} s at a time. Raise max_staleness{now_is(max_staleness)}."
        )
    if waiting:
        return f"generation-bound: {waited}. {generation_limit(now, max_concurrent)}"
    if held:
        steps = now["rollout/queue_size"] / max(now["batch/samples_per_step"], 1)
        return (
            f"trainer-bound: generation was held back for {held_s:.1f} s at a time, the queue "
            f"holds {steps:.1f} steps, staleness is {now['sample/staleness_mean']:.1f}"
            f"{f' of at most {max_staleness}' if max_staleness else ''}. Expected when "
            "inference is faster; for more speed move GPUs from vLLM to training."
        )
    sync_s = now["perf/weight_sync_s"]
    if sync_s > HIGH_WAIT * step_s * (sync_steps or 1):
        return (
            f"sync-bound: a weight sync takes {sync_s:.1f} s, a step {step_s:.1f} s. Raise "
            f"weight_sync_steps{now_is(sync_steps)} or what a step trains (token_budget, "
            "gradient_accumulation_steps), or give vLLM a GPU of its own."
        )
    return f"balanced: {waited}, generation was not held back."


def generation_limit(now, max_concurrent):
    """Which of the limits keeps generation from going faster, and what to do about it."""
    running, cap = now["rollout/concurrency"], now["rollout/concurrency_cap"]
    kv, waiting = now["rollout/vllm_kv_cache_usage_frac"], now["rollout/score_queue_size"]
    flight = f"{running:.0f} rollouts in flight" if running >= 0 else "concurrency unknown"
    cache = f", KV cache {kv:.0%} full" if kv >= 0 else ""
    if max_concurrent and running > 0.9 * max_concurrent and not kv > KV_LOW:
        return (
            f"max_concurrent_rollouts sets the limit ({flight}{cache}): raise it"
            f"{now_is(max_concurrent)} if your environments and tools allow."
        )
    capped = running > 0.9 * cap and not cap >= (max_concurrent or math.inf)
    if capped and kv < KV_LOW and now["rollout/vllm_queued_requests"] < 1:
        return (
            f"The cap on rollouts in flight is still rising ({flight}, cap {cap:.0f}{cache}); it "
            "began at what fits the KV cache at full length. Start vLLM with a lower "
            "--max-model-len (run.sh: MAX_MODEL_LEN), and it begins higher."
        )
    if capped:
        return (
            f"The server's load sets the limit ({flight}, cap {cap:.0f}{cache}): "
            "give vLLM more GPUs or KV cache, or shorten completions."
        )
    waited_s = now["rollout/score_wait_s"]  # groups that end together wait a moment, too
    if waiting > 1 and waited_s > HIGH_WAIT * now["rollout/duration_s"]:
        wait, score_s = f"{waiting:.0f} groups wait for {waited_s:.1f} s", now["rollout/score_s"]
        if score_s < QUICK_SCORE_S:
            return (
                f"The rollout worker is busy ({wait} though scoring one takes {1000 * score_s:.0f} "
                "ms): short completions cost its one process most; a lower num_sampler_logprobs, "
                "or longer ones, cost it less a token."
            )
        return f"Scoring lags ({wait}, one takes {score_s:.1f} s): speed up the reward functions."
    return (
        f"vLLM makes {now['rollout/generated_tokens_per_s']:,.0f} tokens/s ({flight}{cache}): "
        "give it more GPUs, or shorten completions."
    )


def saturation(now, before, low, high):
    """Are there groups left to learn from, and where are those stuck that are dropped?"""
    dropped, stuck_at = now["frac_reward_zero_std"], now["reward_dropped"]
    if math.isnan(dropped):
        return ""
    place = (stuck_at - low) / (high - low)
    climbing = dropped - before["frac_reward_zero_std"] > MOVED
    reward_rose = (now["reward"] - before["reward"]) / (high - low)
    stuck_rose = (stuck_at - before["reward_dropped"]) / (high - low)
    share = f"{dropped:.0%} of groups carry no signal"
    state = f"{share}, stuck at {stuck_at:.2f}; reward {now['reward']:.2f}"
    if climbing and stuck_rose < -MOVED and reward_rose < -MOVED:
        return (
            f"regression: {state}, was {before['reward']:.2f}: groups that used to pass now "
            f"fail together. Look for a collapse: entropy {now['entropy']:.3f}, was "
            f"{before['entropy']:.3f}; duplicates {now['completions/duplicate_frac']:.0%}."
        )
    if dropped < (HIGH_DROPPED / 2 if climbing else HIGH_DROPPED):
        return f"healthy: {share}, most produce a gradient."
    if math.isnan(stuck_at):
        return (
            f"unscored: {share}, and none of their rollouts was scored. See why the reward "
            "functions return None."
        )
    if place >= 1 - NEAR_END:
        return (
            f"saturating at the top: {state}. The prompts have become too easy: stop the run, "
            "or move to harder ones."
        )
    if place <= NEAR_END and not reward_rose > MOVED:
        cut = now["completions/clipped_ratio"]
        first = (
            f"{cut:.0%} of completions are cut off: raise max_completion_length, then"
            if cut > 0.1
            else "Few completions are cut off:"
        )
        return (
            f"stuck at the bottom: {state}. {first} read a few and check that the reward "
            "function parses them."
        )
    if place <= NEAR_END:
        return f"hard prompts: {state}, was {before['reward']:.2f}. It climbs: wait."
    return (
        f"mixed: {state}. Some prompts are too easy and others too hard, or groups share a "
        "partial score: read the rollouts."
    )


def duplicates(now, before, num_generations):
    """Does sampling still give different rollouts for one prompt?"""
    copies, entropy = now["completions/duplicate_frac"], now["entropy"]
    # Independent rollouts agree with a probability of about exp(-nats). Beyond 3 nats that is one
    # pair in twenty; below, short or settled answers repeat by chance.
    nats = entropy * now["completions/mean_length"]
    all_copies = (num_generations - 1) / num_generations if num_generations else NAN
    if copies > 0.9 * all_copies and not nats < 3:
        return (
            f"sampling is not random: {copies:.0%} of rollouts repeat another, {all_copies:.0%}"
            " means all. Check the temperature, and that vLLM's engines share no seed."
        )
    if (
        copies - before["completions/duplicate_frac"] > MOVED / 2
        and entropy < 0.9 * before["entropy"]
    ):
        return (
            f"collapse: {copies:.0%} of rollouts repeat another, was "
            f"{before['completions/duplicate_frac']:.0%}, and entropy fell from "
            f"{before['entropy']:.3f} to {entropy:.3f}: one answer per prompt. Fine if it is "
            f"right (reward {now['reward']:.2f}), else lower the learning rate."
        )
    return ""


def mismatch(now):
    """Sampler and trainer disagree with no update between them, or the centered head is small."""
    gap, mass = now["sampling/sampling_logp_difference/mean"], now["sampling/sampler_mass"]
    if now["sample/staleness_max"] == 0 and gap > 0.1:  # bf16 alone gives about 0.02
        return (
            f"mismatch: log-probs differ by {gap:.2f} on average with no staleness. Check "
            "the server's dtype, temperature and --logprobs-mode processed_logprobs."
        )
    if mass < SMALL_MASS:
        return (
            f"small head: the sampler's top tokens cover {mass:.0%}. Raise "
            "num_sampler_logprobs, or set score_centering_tail to proportional."
        )
    return ""


def now_is(limit):
    return f" (now {limit})" if limit is not None else ""


def seen_range(*windows):
    """The reward's range: 0 to 1, the usual rewards, widened by what was seen."""
    names = ("reward", "reward_kept", "reward_dropped", "reward_min", "reward_max")
    seen = [window[name] for window in windows for name in names if math.isfinite(window[name])]
    return min([0.0, *seen]), max([1.0, *seen])
