"""Plan and pack rows on one CPU core: packing.py against TRL's TreeRow, side by side.

    pip install --no-deps trl==1.16.0
    python bench/packing.py

Both get the same samples in the order in which a rollout worker sends them, fill rows of 32,768
unique tokens and pack each full row. With one process TRL's planner is: add while it fits, else
close the row. No sampler candidates, since TreeRow does not carry any. Times are CPU
time, the best of several runs, so that other processes on the machine matter little.
"""

import argparse
import importlib.util
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch

sys.path[0] = str(Path(__file__).resolve().parents[1])  # this file's folder has a packing.py too
import attention  # noqa: E402
import packing  # noqa: E402
import planner  # noqa: E402

BUDGET = 32_768
VOCAB = 150_000


def sample_of(pieces, group):
    """A sample from (tokens, whether trained) pieces."""
    ids = np.concatenate([tokens for tokens, _ in pieces]).astype(np.int32)
    trained = np.concatenate([np.full(len(tokens), flag) for tokens, flag in pieces])
    n = int(trained.sum())
    return SimpleNamespace(
        input_ids=ids,
        trained=trained,
        sampler_log_probs=np.full(len(ids), -1.0, np.float32),
        top_ids=np.zeros((n, 0), np.int32),
        top_log_probs=np.zeros((n, 0), np.float32),
        set_ids=None,
        set_offsets=None,
        advantage=1.0,
        group_id=group,
        row_index=0,
        closes_group=False,
        metrics={},
    )


def single_turn(group_size, prompt, shortest, longest):
    def group(rng, g):
        head = rng.integers(0, VOCAB, prompt), False
        for _ in range(group_size):
            tail = rng.integers(0, VOCAB, rng.integers(shortest, longest + 1)), True
            yield sample_of([head, tail], g)

    return group


def multi_turn(rng, g):
    """8 rollouts of 12 turns below one 700-token tool schema. A turn is 80 sampled and 120 tool
    tokens. One transition in three forks: the template rewrites the last 20 tokens, so the sample
    ends, and the next one repeats the conversation as context."""
    schema = np.random.default_rng(0).integers(0, VOCAB, 700), False
    question = rng.integers(0, VOCAB, 100), False
    for _ in range(8):
        held = [schema, question]
        for turn in range(12):
            if turn and rng.random() < 1 / 3:
                yield sample_of(held, g)
                context = np.concatenate([tokens for tokens, _ in held])
                context = np.append(context[:-20], rng.integers(0, VOCAB, 25))
                held = [(context, False)]
            held.append((rng.integers(0, VOCAB, 80), True))
            if turn < 11:
                held.append((rng.integers(0, VOCAB, 120), False))
        yield sample_of(held, g)


WORKLOADS = {
    "8 x (512 + 256..768)": single_turn(8, 512, 256, 768),
    "16 x (1024 + 128..384)": single_turn(16, 1024, 128, 384),
    "8 x (256 + 1024..3072)": single_turn(8, 256, 1024, 3072),
    "multi-turn, 12 turns": multi_turn,
}


def stream(group, raw_tokens):
    rng, samples, total, g = np.random.default_rng(1), [], 0, 0
    while total < raw_tokens:
        new = list(group(rng, g))
        samples, total, g = samples + new, total + sum(len(s.input_ids) for s in new), g + 1
    return samples


def ours(samples, budget=BUDGET):
    """Rows as (unique tokens, raw tokens, loss terms)."""
    rows = []
    for plan in planner.plan_steps(
        samples, token_budget=budget, world_size=1, gradient_accumulation_steps=1
    ):
        ((row,),) = plan.micro_batches
        packed = row.pack(packing.bucket(row.n_tokens))
        rows.append((packed.n_tokens, packed.raw_tokens, len(packed.term_targets)))
    return rows


def theirs(tree_row, samples, budget=BUDGET):
    rows, row = [], tree_row()
    for sample in [*samples, None]:
        if sample is None or not row.fits(sample, budget):
            packed = row.pack()
            rows.append(
                (
                    len(row.tokens),
                    sum(len(s["input_ids"]) for s in row.samples),
                    len(packed["token_index"]),
                )
            )
            row = tree_row()
        if sample is not None:
            row.add(sample)
    return rows


def trl_tree_row():
    """TreeRow, loaded from its file: the package around it would pull in the whole trainer."""
    package = importlib.util.find_spec("trl")
    if package is None:
        raise SystemExit("bench/packing.py needs the peer: pip install --no-deps trl==1.16.0")
    file = Path(package.submodule_search_locations[0], "experimental", "async_grpo", "packing.py")
    spec = importlib.util.spec_from_file_location("trl_packing", file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.TreeRow


def for_trl(sample):
    return {
        "input_ids": torch.from_numpy(sample.input_ids).long(),
        "advantage": 1.0,
        "completion_mask": torch.from_numpy(sample.trained).long(),
        "group_id": sample.group_id,
        "old_log_probs": torch.from_numpy(sample.sampler_log_probs),
    }


def best(function, *arguments, runs):
    times = []
    for _ in range(runs):
        start = time.thread_time()
        result = function(*arguments)
        times.append(time.thread_time() - start)
    return min(times), result


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--raw_tokens", type=int, default=600_000, help="of each workload")
    raw_tokens = parser.parse_args().raw_tokens
    torch.set_num_threads(1)
    tree_row = trl_tree_row()
    print(f"rows of {BUDGET} tokens, {raw_tokens} raw tokens a workload; ms for one row's worth")
    print(
        f"{'workload':24} {'samples':>7} {'ours':>8} {'TRL':>8} "
        f"{'packed':>7} {'by TRL':>7} {'padding':>8} {'times faster':>13}"
    )
    for name, group in WORKLOADS.items():
        samples = stream(group, raw_tokens)
        their_samples = [for_trl(sample) for sample in samples]
        our_s, our_rows = best(ours, samples, runs=7)
        their_s, their_rows = best(theirs, tree_row, their_samples, runs=2)
        for i, what in ((1, "raw tokens"), (2, "loss terms")):
            totals = [sum(row[i] for row in rows) for rows in (our_rows, their_rows)]
            if totals[0] != totals[1]:
                raise SystemExit(f"{name}: {what} differ: ours {totals[0]}, TRL {totals[1]}")
        unique, their_unique = (sum(row[0] for row in rows) for rows in (our_rows, their_rows))
        padded = sum(packing.bucket(row[0]) for row in our_rows)
        raw = sum(row[1] for row in our_rows)
        print(
            f"{name:24} {len(samples):7} {1e3 * our_s * BUDGET / unique:8.2f} "
            f"{1e3 * their_s * BUDGET / their_unique:8.1f} {raw / unique:7.3f} "
            f"{raw / their_unique:7.3f} {padded / unique - 1:8.1%} {their_s / our_s:13.0f}"
        )

    print("\none row of n raw tokens (first workload): plan and pack, then the block mask on a CPU")
    print(f"{'n':>8} {'plan + pack':>12} {'per 1000':>10} {'mask':>10}")
    for n in (8_192, 32_768, 131_072):
        samples = stream(next(iter(WORKLOADS.values())), n)
        seconds, _ = best(ours, samples, 10 * n, runs=15)
        raw = sum(len(s.input_ids) for s in samples)
        row = packing.pack_row(samples, 10 * n, packing.bucket)
        mask_s, _ = best(lambda row=row: attention.TreeMask(row, "flex").block_mask(), runs=7)
        print(
            f"{raw:8} {1e3 * seconds:9.2f} ms {1e6 * seconds / (raw / 1000):7.1f} us "
            f"{1e3 * mask_s:7.2f} ms"
        )


if __name__ == "__main__":
    main()
