"""Claim: a training step at twice the reference's rate on the same rows, at half the GPU's peak.

    pip install flash-attn-4==4.0.0b36 nvidia-cutlass-dsl==4.8.0; pip install --no-deps trl==1.16.0
    python bench/step.py             # one H200, under 5 minutes, much of it compilation
    python bench/step.py --tiny      # the same code on a CPU and tiny shapes: does it run at all?

A Qwen3-1.7B of random weights on two rows: three groups of 8 x 1,024 tokens on a prompt of 1,024,
and two groups of 16 x 512 on 3,072, of which each token is shared by five samples. Float32 masters
and bfloat16 compute on both sides; a step is forward, loss and backward.

    ours        compiled layers, FlexAttention on the tree mask (FLASH), candidate_log_probs;
                masters.py
    reference   transformers as it is, K/V gathered for flash-attn-4, TRL 1.16's fused head; under
                FSDP2, and without it under autocast, which is how one GPU runs it by default: the
                faster of the two counts

Times are medians by CUDA events; MFU counts neither recomputation nor padding. What fails prints
its error, and the rest goes on.
"""

import argparse
import contextlib
import dataclasses
import functools
import gc
import math
import statistics
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, Qwen3Config

sys.path[0] = str(Path(__file__).resolve().parents[1])  # this file's folder has a loss.py too
import attention  # noqa: E402
import grpo  # noqa: E402
import model  # noqa: E402
import packing  # noqa: E402
import planner  # noqa: E402
import update  # noqa: E402
from bench.attention import attempt, milliseconds, samples_of  # noqa: E402
from config import Config  # noqa: E402
from feed import Share  # noqa: E402

TREES = {"3 x 8 x 1024 on 1024": (3, 8, 1024, 1024), "2 x 16 x 512 on 3072": (2, 16, 3072, 512)}
TINY_TREES = {"3 x 8 x 10 on 10": (3, 8, 10, 10), "2 x 16 x 5 on 30": (2, 16, 30, 5)}
SHAPE = dict(
    hidden_size=2048,
    intermediate_size=6144,
    num_hidden_layers=28,
    num_attention_heads=16,
    num_key_value_heads=8,
    head_dim=128,
    vocab_size=151_936,
)
TINY_SHAPE = dict(
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=32,
    vocab_size=512,
)
K = 8  # the sampler's candidates a token, beside the sampled one
MODES = {"none": False, "full": True}  # activation checkpointing
SURROGATE, CENTERED = Config(score_centering=False), Config()


class Reference(model.Policy):
    """The reference's forward: its fused head on the trained positions; one log-prob a term."""

    def forward(self, row, tree, temperature):
        from trl.kernels import ChunkedLogProbFunction

        hidden_PH = self.decoder()(
            input_ids=row.input_ids[None],
            position_ids=row.position_ids[None],
            use_cache=False,
            tree=tree,
        ).last_hidden_state[0]
        log_probs, entropy, *_ = ChunkedLogProbFunction.apply(
            hidden_PH[row.term_positions],
            self.model.get_output_embeddings().weight,
            None,
            row.term_targets,
            temperature,
            32768,  # the width of a tile in TRL 1.16
            None,
            1.0,
            ("entropy",),
        )
        return torch.stack([log_probs], 1), entropy, None


class Side:
    """One of the two: its policy, how it attends, and its results by (tree, checkpointing)."""

    def __init__(self, name, cls, args, *, backend, compiled, sharded=True):
        self.name, self.args, self.backend, self.results = name, args, backend, {}
        torch.manual_seed(0)
        config = Qwen3Config(tie_word_embeddings=True, **args.shape)
        with torch.device(args.device):
            bare = AutoModelForCausalLM.from_config(
                config, dtype=torch.float32, attn_implementation=attention.ATTENTION
            )
        bare.gradient_checkpointing_enable({"use_reentrant": False})
        self.policy = cls(model.make_policy(bare).model)
        self.autocast = contextlib.nullcontext
        if compiled:
            model.shard(self.policy, args.device, args.dtype, compile_layers=True)
        elif sharded:
            model.shard_over_ranks(self.policy, args.device, args.dtype)
        else:
            self.autocast = functools.partial(torch.autocast, args.device.type, args.dtype)

    def checkpointing(self, mode):
        for layer in model.layers(self.policy):
            layer.gradient_checkpointing = MODES[mode]

    def tree(self, row):
        tree = attention.TreeMask(row, self.backend)
        return tree.prepare(self.policy.model.config)

    def step(self, row, tree, config=SURROGATE, optimizer=None):
        with self.policy.computing():
            with self.autocast():
                log_probs, *_ = self.policy(row, tree, 1.0)
            terms = update.term_losses(config, row, log_probs, self.args.n_samples)
            (terms.sum() / len(row.term_targets)).backward()
        if optimizer:
            update.clip_gradients(self.policy, 1.0)
            optimizer.step()
        self.policy.zero_grad()

    def measure(self, label, tree_name, mode, config=SURROGATE, optimizer=None):
        """Print and keep one line: ms a step, forwarded and raw tokens/s, MFU, peak memory."""
        row, args = self.args.rows[tree_name], self.args
        if config.score_centering:
            row = with_candidates(row, args)
        self.checkpointing(mode)
        call = functools.partial(self.step, row, self.tree(row), config, optimizer)

        def run():
            began = time.perf_counter()
            call()
            wait(args)
            first = time.perf_counter() - began
            if args.cuda:
                torch.cuda.reset_peak_memory_stats()
            took = milliseconds(call, args)
            peak = torch.cuda.max_memory_allocated() / 2**30 if args.cuda else math.nan
            return took, first, peak

        gc.collect()  # what failed before may hold its tensors in a traceback
        if args.cuda:
            torch.cuda.empty_cache()
        found = attempt(f"{self.name}, {label}", run, args)
        self.policy.zero_grad()
        if found is None:
            return
        took, first, peak = found
        result = dict(
            ms=took, rate=1e3 * row.n_tokens / took, mfu=mfu(self.policy, row, took, args)
        )
        self.results[tree_name, mode, label] = result
        print(
            f"{self.name:20} {label:34} {tree_name:20} {mode:5} {took:8.1f} {result['rate']:9,.0f} "
            f"{1e3 * row.raw_tokens / took:9,.0f} {result['mfu']:6.1f} {peak:6.1f} {first:6.1f}",
            flush=True,
        )


HEADER = (
    f"{'':20} {'':34} {'tree':20} {'ckpt':5} {'ms':>8} {'tokens/s':>9} {'raw/s':>9} "
    f"{'MFU %':>6} {'GiB':>6} {'1st s':>6}"
)


def mfu(policy, row, took, args):
    peak = model.peak_flops(args.device, args.dtype) or math.nan
    return 100 * model.row_flops(policy, row.host) / (took / 1e3) / peak


def wait(args):
    if args.cuda:
        torch.cuda.synchronize()


def make_rows(args):
    """Rows whose ratios are near 1 and whose advantages vary: masked gradients would be zeros, and
    a GPU multiplies zeros faster."""
    near = -math.log(args.shape["vocab_size"]) - 0.4  # of a random model's log-probs
    rng, samples = np.random.default_rng(1), {}
    for name, shape in args.trees.items():
        samples[name] = samples_of(*shape, args.shape["vocab_size"])
        for sample in samples[name]:
            sample.sampler_log_probs = np.full(len(sample.input_ids), near, np.float32)
            sample.advantage = float(rng.normal())
    return samples


def with_candidates(row, args):
    shape, device = (len(row.term_targets), K), row.input_ids.device
    ids = torch.randint(args.shape["vocab_size"], shape, device=device)
    logs = torch.full(shape, -math.log(2 * K), device=device)
    return dataclasses.replace(row, top_ids=ids, top_log_probs=logs)


def whole_loop(side, args):
    """Steps as grpo.train does them, less worker and server: what share is neither forward,
    backward nor optimizer? Packing, masks, metrics and their transfers count as overhead."""
    samples = [
        SimpleNamespace(
            **vars(sample)
            | dict(
                top_ids=np.zeros((int(sample.trained.sum()), K), np.int32),
                top_log_probs=np.full((int(sample.trained.sum()), K), -math.log(2 * K), np.float32),
            )
        )
        for sample in args.samples[next(iter(args.trees))]
    ]
    policy, config = side.policy, CENTERED
    optimizer = update.make_optimizer(policy, config)
    options = dict(token_budget=1 << 20, world_size=1, gradient_accumulation_steps=1)
    side.checkpointing("none")
    shares = []
    for step in range(args.repeats + 2):
        plan = next(planner.plan_steps(samples, **options))  # in a thread of its own in training
        clock = grpo.Clock(args.device)
        row = packing.pack_row(plan.samples(0)[0], 1 << 20, packing.bucket).to(args.device)
        tree = side.tree(row)
        share = Share(plan.samples(0), [plan.n_tokens], [1.0], 0.0)
        with clock("perf/fwd_bwd_s"):
            seen = update.forward_backward(policy, config, share, [row], [tree], clock)
        with clock("perf/optimizer_s"):
            norm = update.clip_gradients(policy, 1.0)
            update.set_learning_rate(optimizer, config, step + 1)
            optimizer.step()
            optimizer.zero_grad()
        update.gather_metrics(seen, norm)
        seconds = clock.read()
        whole = seconds["perf/step_s"]
        rest = whole - seconds["perf/fwd_bwd_s"] - seconds["perf/optimizer_s"]
        if step > 1:
            shares.append((rest / whole, 1e3 * whole, 1e3 * rest))
    share, whole, rest = (statistics.median(column) for column in zip(*shares))
    return f"the loop's own share of a step: {100 * share:.1f}% ({rest:.1f} of {whole:.1f} ms)"


def kernels(side, args):
    """Where the time of one step goes, kernel by kernel."""
    from torch.profiler import ProfilerActivity, profile

    row = args.rows[next(iter(args.trees))]
    tree = side.tree(row)
    side.checkpointing("none")
    activity = ProfilerActivity.CUDA if args.cuda else ProfilerActivity.CPU
    with profile(activities=[activity]) as seen:
        side.step(row, tree)
        wait(args)
    column = "self_device_time_total" if args.cuda else "self_cpu_time_total"
    events = sorted(seen.key_averages(), key=lambda e: -getattr(e, column))
    total = sum(getattr(e, column) for e in events)
    print(f"\nkernels of one step of ours, {total / 1e3:.0f} ms in all:")
    for event in events[:18]:
        spent = getattr(event, column) / 1e3
        print(f"  {spent:8.2f} ms {event.count:6} x {event.key[:90]}", flush=True)


def release(side):
    side.policy = None
    gc.collect()
    if side.args.cuda:
        torch.cuda.empty_cache()


def graphs():
    """How many graphs Dynamo has compiled so far in this process."""
    return torch._dynamo.utils.counters["stats"].get("unique_graphs", 0)


def run(args):
    first, second = args.trees
    nine, stepped = "nine, score centering", "one log-prob, clip, AdamW"
    forced = {} if args.cuda else {"backend": "sdpa"}
    mine = {"backend": "auto"} | forced
    ours = Side("ours", model.Policy, args, **mine, compiled=True)
    ours.measure("one log-prob", first, "none")
    ours.measure("one log-prob", first, "full")
    ours.measure(nine, first, "none", CENTERED)
    ours.measure(nine, first, "full", CENTERED)
    ours.measure("one log-prob", second, "none")
    print(f"  graphs compiled for these: {graphs()}", flush=True)
    row = args.rows[first]
    with torch.no_grad(), ours.policy.computing():
        ours_log_probs = ours.policy(row, ours.tree(row), 1.0)[0][:, 0]
    attempt("kernels", lambda: kernels(ours, args), args)
    optimizer = update.make_optimizer(ours.policy, SURROGATE)
    ours.measure(stepped, first, "none", optimizer=optimizer)
    ours.measure(stepped, first, "full", optimizer=optimizer)
    ours.measure("nine, clip, AdamW", first, "none", CENTERED, optimizer=optimizer)
    del optimizer
    lines = [attempt("whole loop", lambda: whole_loop(ours, args), args)]
    release(ours)

    theirs = {"backend": "varlen"} | forced
    reference = Side("reference", Reference, args, **theirs, compiled=False)
    reference.measure("one log-prob", first, "full")
    reference.measure("one log-prob", second, "full")

    def agreement():
        with torch.no_grad():
            theirs = reference.policy(row, reference.tree(row), 1.0)[0][:, 0]
        difference = (theirs - ours_log_probs).abs()
        return (
            f"log-probs of ours and the reference's way differ by {difference.mean():.1e} on "
            f"average, {difference.max():.1e} at most"
        )

    lines.append(attempt("agreement", agreement, args))
    optimizer = update.make_optimizer(reference.policy, SURROGATE)
    reference.measure(stepped, first, "full", optimizer=optimizer)
    optimizer.state.clear()  # its memory
    reference.measure("one log-prob", first, "none")  # late: what runs out of memory stays broken
    reference.measure(stepped, first, "none", optimizer=optimizer)
    del optimizer
    release(reference)
    eager = Side("reference, autocast", Reference, args, **theirs, compiled=False, sharded=False)
    eager.measure("one log-prob", first, "full")
    eager.measure("one log-prob", second, "full")
    release(eager)

    # The first length that a layer meets gets a graph of its own, the second one for all lengths.
    again = Side("ours, again", model.Policy, args, **mine, compiled=True)
    torch._dynamo.reset()
    again.measure("one log-prob, graph of its own", second, "none")
    again.measure("one log-prob, graph for any length", first, "none")
    release(again)

    def ratio(text, goal, mine, other, label="one log-prob", other_label="one log-prob"):
        a = ours.results.get((*mine, label))
        found = [side.results.get((*other, other_label)) for side in (reference, eager)]
        b = max((x["rate"] for x in found if x), default=None)  # the faster of its two ways
        if a and b:
            lines.append(f"{text}: {a['rate'] / b:.2f}" + (f" (goal {goal})" if goal else ""))

    ratio("checkpointed on both sides", 1.5, (first, "full"), (first, "full"))
    ratio("not checkpointed on either side", 1.5, (first, "none"), (first, "none"))
    default = (first, "none"), (first, "full")
    ratio("default against default", 1.9, *default)
    ratio("default against default, ratio 5", 2.0, (second, "none"), (second, "full"))
    ratio("... with clipping and AdamW on both sides", None, *default, stepped, stepped)
    ratio("... with nine log-probs on ours, one on the reference's", None, *default, nine)
    best = ours.results.get((first, "none", "one log-prob"))
    if best:
        lines.append(f"MFU without checkpointing: {best['mfu']:.1f}% (goal 50, aim 55)")
    print("\n" + "\n".join(line for line in lines if line), flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tiny", action="store_true", help="tiny shapes on the CPU")
    parser.add_argument("--seconds", type=int, default=260, help="begin nothing new after these")
    parser.add_argument("--repeats", type=int, default=5, help="timed steps of each line")
    parser.add_argument("--verbose", action="store_true", help="stop at the first error")
    args = parser.parse_args()
    args.device = grpo.start_distributed(Config()) if not args.tiny else torch.device("cpu")
    if args.tiny:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        args.repeats = 1
    args.cuda = args.device.type == "cuda"
    args.dtype = torch.bfloat16 if args.cuda else torch.float32
    args.shape, args.trees = (TINY_SHAPE, TINY_TREES) if args.tiny else (SHAPE, TREES)
    args.samples, args.n_samples = make_rows(args), 32
    args.rows = {
        name: packing.pack_row(samples, 1 << 20, packing.bucket).to(args.device)
        for name, samples in args.samples.items()
    }
    attention.register_attention()
    began = time.perf_counter()
    where = torch.cuda.get_device_name(args.device) if args.cuda else "CPU"
    print(f"{where}, torch {torch.__version__}, {args.dtype} compute, float32 masters")
    for name, row in args.rows.items():
        ratio = row.raw_tokens / row.n_tokens
        print(
            f"{name}: {row.n_tokens} tokens packed from {row.raw_tokens} (ratio {ratio:.2f}), "
            f"{len(row.term_targets)} trained, padded to {len(row.end)}"
        )
    print(HEADER, flush=True)
    run(args)
    print(f"{time.perf_counter() - began:.0f} s in all")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
