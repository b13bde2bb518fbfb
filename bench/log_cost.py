"""What logging costs of a step: everything that grpo.py does for its log, on recorded-size data.

    python bench/log_cost.py [seconds of a step, default 1.0]

A step's worth: the records of the rollout process, of 256 samples and of the plan, one window to
console, metrics.jsonl and TensorBoard if it is installed, a diagnosis every ten; then what
--dump_rollouts adds. CPU seconds of this thread, so that other work on the machine does not count.
"""

import contextlib
import io
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import diagnosis
import dump
import feed
import metrics
import planner
from chat import Sample

N_GROUPS, GROUP_SIZE, N_PROMPT, N_REPLY, K, BUDGET = 16, 16, 128, 384, 8, 32768
STEPS = 20


def make_samples(step):
    random = np.random.default_rng(step)
    size = N_PROMPT + N_REPLY
    trained = np.arange(size) >= N_PROMPT
    shares = {"reward_group_std": 0.4, "rewards/correct/group_std": 0.4, "reward_kept": 0.5}
    samples = []
    for group in range(N_GROUPS):
        prompt = random.integers(0, 1000, N_PROMPT)
        for i in range(GROUP_SIZE):
            ids = np.concatenate([prompt, random.integers(0, 1000, N_REPLY)]).astype(np.int32)
            samples.append(
                Sample(
                    input_ids=ids,
                    trained=trained,
                    sampler_log_probs=np.full(size, -1, np.float32),
                    top_ids=np.zeros((N_REPLY, K), np.int32),
                    top_log_probs=np.full((N_REPLY, K), -2, np.float32),
                    set_ids=None,
                    set_offsets=None,
                    versions=np.where(trained, step, -1).astype(np.int32),
                    advantage=1.0,
                    group_id=step * N_GROUPS + group,
                    rollout_index=i,
                    metrics=shares,
                    created_at=time.time(),
                )
            )
    return samples


def worker_records():
    """What a group and a second of the rollout process bring."""
    names = metrics.NAMES["always"].split()
    names = [n for n in names if n.split("/")[0] in ("rollout", "completions", "rewards")]
    names = [name.replace("{reward_func_name}", "correct") for name in names]
    return [(name, 1.0, 16.0) for name in names] * N_GROUPS


def tell(samples):
    text = [{"role": "assistant", "content": "word " * N_REPLY}]
    story = {"row_index": 0, "prompt": text, "completion": text, "columns": {}, "rewards": {}}
    story |= {"reward": 1.0, "advantage": 1.0, "n_samples": 1}
    return [story | {"group": s.group_id, "rollout": s.rollout_index} for s in samples]


def main(step_s):
    spent = dict.fromkeys(("records", "flush", "diagnosis", "dump"), 0.0)

    @contextlib.contextmanager
    def clock(part):
        begin = time.thread_time()
        yield
        spent[part] += time.thread_time() - begin

    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        log = metrics.Metrics(folder, total_steps=STEPS)
        log.declare(metrics.applicable("score_centering", "mfu", rewards=["correct"]))
        dumped = dump.Dump(folder, BUDGET)
        for step in range(1, STEPS + 1):
            samples, from_worker = make_samples(step), worker_records()
            options = {"token_budget": BUDGET, "world_size": 4, "gradient_accumulation_steps": 1}
            (plan,) = planner.plan_steps(samples, **options, first_step=step)
            with clock("records"):
                log.extend(from_worker + planner.batch_metrics(plan, BUDGET))
                placed = [sample for row in plan.rows for sample in row.samples]
                log.extend(feed.sample_records(placed, 1))
                log.extend((name, 0.5, 1.0) for name in log.declared)  # the loss's and the clock's
            with clock("flush"):
                log.flush(step)
            with clock("diagnosis"):
                if step % 10 == 0:
                    diagnosis.diagnose(*metrics.compare(list(log.history), 10))
            log_probs = [[np.zeros(row.n_terms, np.float32)] for row in plan.micro_batches[0]]
            stories = tell(samples)
            with clock("dump"):
                dumped.tell(stories, step)
                dumped.pulled.extend(placed)
                dumped.step(plan, lambda sample: 1, log_probs)
        dumped.close(STEPS)
        n_bytes = sum(file.stat().st_size for file in dump.step_files(folder))
        log.close()
    n_tokens = N_GROUPS * GROUP_SIZE * (N_PROMPT + N_REPLY)
    print(f"{N_GROUPS * GROUP_SIZE} samples, {n_tokens:,} tokens a step; ms a step of one core")
    for part, seconds in spent.items():
        print(f"{part:12} {1000 * seconds / STEPS:8.2f}")
    cost = (sum(spent.values()) - spent["dump"]) / STEPS
    print("dump is the trainer's part; a thread writes the files beside it")
    print(f"dump: {n_bytes / STEPS / 1e6:.1f} MB a step")
    print(f"logging {cost / step_s:.2%} of a step of {step_s:g} s (goal: under 1%)")


if __name__ == "__main__":
    main(float(sys.argv[1]) if len(sys.argv) > 1 else 1.0)
