"""diagnosis.py: the spec's lists and tables, row by row.

Run: pytest tests/test_diagnosis.py
"""

import pytest

from diagnosis import diagnose
from metrics import NAN

STEP = {
    "perf/step_s": 10.0,
    "perf/rollout_wait_s": 0.5,
    "rollout/backpressure_s": NAN,
    "batch/samples_per_step": 64,
    "rollout/queue_size": 64,
    "sample/staleness_mean": 1.0,
}
WAITS = STEP | {"perf/rollout_wait_s": 6.3, "rollout/queue_size": 1}
SERVER = {
    "rollout/concurrency": 40,
    "rollout/concurrency_cap": 100,
    "rollout/score_s": 2.5,
    "rollout/vllm_kv_cache_usage_frac": 0.3,
    "rollout/vllm_queued_requests": 0,
    "rollout/score_queue_size": 0,
    "rollout/score_wait_s": 0.1,
    "rollout/duration_s": 10.0,
    "rollout/generated_tokens_per_s": 3200,
}


@pytest.mark.parametrize(
    "window, said",
    [
        (STEP, "balanced: training waited 5% of a step (0.5 of 10.0 s)"),
        (
            WAITS | SERVER,
            "generation-bound: training waited 63% of a step (6.3 of 10.0 s). vLLM makes "
            "3,200 tokens/s (40 rollouts in flight, KV cache 30% full)",
        ),
        (
            STEP
            | {
                "rollout/backpressure_s": 4.0,
                "rollout/queue_size": 224,
                "sample/staleness_mean": 3.6,
            },  # 224 / 64 = 3.5 steps
            "trainer-bound: generation was held back for 4.0 s at a time, the queue holds 3.5 "
            "steps, staleness is 3.6 of at most 4",
        ),
        (
            WAITS | {"rollout/backpressure_s": 4.0},
            "max_staleness is too tight: training waited 63%",
        ),
        (
            WAITS | SERVER | {"rollout/concurrency": 128, "rollout/concurrency_cap": 128},
            "max_concurrent_rollouts sets the limit (128 rollouts in flight, KV cache 30% full): "
            "raise it (now 128)",
        ),
        (
            WAITS | SERVER | {"rollout/concurrency": 99, "rollout/vllm_kv_cache_usage_frac": 0.83},
            "The server's load sets the limit (99 rollouts in flight, cap 100, KV cache 83% full)",
        ),
        (
            WAITS | SERVER | {"rollout/concurrency": 99},
            "The cap on rollouts in flight is still rising (99 rollouts in flight, cap 100, KV "
            "cache 30% full); it began at what fits the KV cache at full length. Start vLLM with a "
            "lower --max-model-len",
        ),
        (  # requests wait although the cache has room: the engine itself is busy
            WAITS | SERVER | {"rollout/concurrency": 99, "rollout/vllm_queued_requests": 8},
            "The server's load sets the limit (99 rollouts in flight, cap 100, KV cache 30% full)",
        ),
        (
            WAITS | SERVER | {"rollout/score_queue_size": 5, "rollout/score_wait_s": 12.5},
            "Scoring lags (5 groups wait for 12.5 s, one takes 2.5 s)",
        ),
        (  # as on two H200s with completions of 12 tokens
            WAITS
            | SERVER
            | {
                "rollout/score_queue_size": 10,
                "rollout/score_wait_s": 0.1,
                "rollout/score_s": 0.006,
                "rollout/duration_s": 0.32,
            },
            "The rollout worker is busy (10 groups wait for 0.1 s though scoring one takes 6 ms)",
        ),
        (  # they ended together and are scored at once
            WAITS | SERVER | {"rollout/score_queue_size": 5},
            "vLLM makes 3,200 tokens/s",
        ),
        (STEP | {"perf/weight_sync_s": 3.9}, "balanced: "),  # every second step: 0.195 of it
        (
            STEP | {"perf/weight_sync_s": 4.1},
            "sync-bound: a weight sync takes 4.1 s, a step 10.0 s. Raise weight_sync_steps (now 2)",
        ),
        (WAITS | SERVER | {"perf/weight_sync_s": 4.1}, "generation-bound: "),
        ({}, None),
    ],
)
def test_bottleneck_rows(window, said):
    limits = {"max_staleness": 4, "max_concurrent_rollouts": 128, "weight_sync_steps": 2}
    lines = diagnose(window, **limits)
    assert said in lines[0] if said else lines == []
    assert len(lines) <= 1 and all(line.count(". ") <= 2 for line in lines)


def groups(dropped, stuck_at, reward, **more):
    return {"frac_reward_zero_std": dropped, "reward_dropped": stuck_at, "reward": reward} | more


@pytest.mark.parametrize(
    "now, before, said",
    [
        # dropped, reward_dropped, reward
        (groups(0.1, 0.9, 0.5), {}, "healthy: 10% of groups"),
        (groups(0.1, NAN, 0.5), {}, "healthy"),
        (groups(0.4, 0.95, 0.8), groups(0.2, 0.9, 0.5), "saturating at the top: 40%"),
        (
            groups(0.9, 0.99, 0.97),
            {},
            "saturating at the top: 90% of groups carry no signal, stuck at 0.99; reward 0.97",
        ),
        (groups(0.8, 0.02, 0.05), groups(0.8, 0.02, 0.04), "stuck at the bottom: 80%"),
        (
            groups(0.8, 0.02, 0.05, **{"completions/clipped_ratio": 0.6}),
            {},
            "60% of completions are cut off: raise max_completion_length",
        ),
        (
            groups(0.8, 0.02, 0.05, **{"completions/clipped_ratio": 0.01}),
            {},
            "read a few and check that the reward function parses them",
        ),
        (groups(0.7, 0.02, 0.3), groups(0.9, 0.01, 0.1), "hard prompts"),
        (
            groups(0.4, 0.3, 0.4, entropy=0.1),
            groups(0.2, 0.9, 0.8, entropy=0.5),
            "regression: 40% of groups carry no signal, stuck at 0.30; reward 0.40, was 0.80",
        ),
        (groups(0.7, 0.5, 0.5), {}, "mixed: 70%"),
        (groups(0.7, NAN, NAN), {}, "unscored: 70%"),
        (groups(NAN, NAN, NAN), {}, None),
    ],
)
def test_saturation_rows(now, before, said):
    lines = diagnose(now, before)
    assert said in lines[0] if said else lines == []
    assert len(lines) <= 1


def test_saturation_reads_rewards_against_their_range():
    window = groups(0.9, 0.9, 1.0)
    assert "top" in diagnose(window)[0]
    assert "mixed" in diagnose(window | {"reward_max": 2.0})[0]  # 0.9 of 2 is the middle
    low = {"reward_min": 0.8, "reward_max": 5.0}
    assert "bottom" in diagnose(window | low)[0]


def copies(frac, entropy, length=100):
    return {
        "completions/duplicate_frac": frac,
        "entropy": entropy,
        "reward": 0.4,
        "completions/mean_length": length,
    }


@pytest.mark.parametrize(
    "now, before, said",
    [
        (copies(0.02, 0.5), copies(0.02, 0.6), None),
        (copies(0.30, 0.5, length=2), {}, None),  # two tokens, 1 nat: repeats by chance
        (copies(0.87, 0.5), copies(0.02, 0.5), "sampling is not random: 87%"),  # 7/8 is every one
        (
            copies(0.87, 0.01),
            copies(0.70, 0.05),
            "collapse: 87% of rollouts repeat another, was 70%",
        ),
        (copies(0.30, 0.2), copies(0.10, 0.5), "entropy fell from 0.500 to 0.200"),
    ],
)
def test_duplicate_rows(now, before, said):
    lines = diagnose(now, before, num_generations=8)
    assert said in lines[0] if said else lines == []


def test_mismatch_rows():
    gap = {"sampling/sampling_logp_difference/mean": 0.3, "sample/staleness_max": 0}
    assert "mismatch: log-probs differ by 0.30" in diagnose(gap)[0]
    assert diagnose(gap | {"sample/staleness_max": 2}) == []  # staleness explains it
    assert "cover 84%" in diagnose({"sampling/sampler_mass": 0.84})[0]
