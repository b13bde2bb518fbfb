"""Tree attention on one GPU: FlexAttention's FLASH and Triton backends against gathered K/V.

    pip install flash-attn-4==4.0.0b36 nvidia-cutlass-dsl==4.8.0
    python bench/attention.py                  # one H200, under 7 minutes, most of it compilation
    python bench/attention.py --device cpu     # the same code on tiny shapes: does it run at all?

The gathered way is the reference implementation's: K/V copied once per segment of the tree, then
variable-length attention, here with the same flash-attn-4 kernels as FLASH. Times are forward plus
backward, medians by CUDA events. What fails prints its error, and the rest goes on.
"""

import argparse
import functools
import statistics
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch

sys.path[0] = str(Path(__file__).resolve().parents[1])  # this file's folder has a packing.py too
import attention  # noqa: E402
import model  # noqa: E402
import packing  # noqa: E402

START = time.perf_counter()
BACKENDS = {"flash": "FLASH", "flex": "Triton", "varlen": "gathered"}
# (groups, samples a group, prompt, completion); the last has nothing to share and equal lengths
TREES = {
    "2 x 16 x 512 on 3072": (2, 16, 3072, 512),
    "3 x 8 x 1024 on 1024": (3, 8, 1024, 1024),
    "16 x 2048, none shared": (16, 1, 1024, 1024),
}
# bfloat16 against float64 on the small tree; head dim 256 is where the tiles differ
FEATURES = {
    "plain": {},
    "window 100": {"sliding_window": 100},
    "softcap 5": {"softcap": 5.0},
    "window + sinks": {"sliding_window": 100, "sinks": True},
    "head dim 64": {"dim": 64},
    "head dim 256": {"dim": 256},
}


def samples_of(groups, size, prompt, completion, vocab=30_000):
    rng, samples = np.random.default_rng(0), []
    for group in range(groups):
        # groups differ in their first token, so that they share nothing
        head = np.append(group, rng.integers(0, vocab, prompt - 1)).astype(np.int32)
        for _ in range(size):
            ids = np.append(head, rng.integers(0, vocab, completion)).astype(np.int32)
            samples.append(
                SimpleNamespace(
                    input_ids=ids,
                    trained=np.arange(len(ids)) >= prompt,
                    sampler_log_probs=np.zeros(len(ids), np.float32),
                    advantage=1.0,
                    group_id=group,
                    top_ids=np.zeros((completion, 0), np.int32),
                    set_ids=None,
                    set_offsets=None,
                    top_log_probs=np.zeros((completion, 0), np.float32),
                    row_index=0,
                    closes_group=False,
                    metrics={},
                )
            )
    return samples


def row_of(*shape):
    return packing.pack_row(samples_of(*shape), 1 << 20, packing.bucket)


def inputs(size, heads, kv_heads, dim, args):
    generator = torch.Generator().manual_seed(0)
    shapes = [(1, size, heads, dim), *[(1, size, kv_heads, dim)] * 2, (1, size, heads, dim)]
    query, key, value, upstream = (torch.randn(shape, generator=generator) for shape in shapes)
    leaves = [x.to(args.device, args.dtype).requires_grad_() for x in (query, key, value)]
    return leaves, upstream.to(args.device, args.dtype)


def attend(leaves, upstream, tree, **options):
    """Output of one attention call, and the gradients of query, key, value (and sinks)."""
    query, key, value = (x.transpose(1, 2) for x in leaves[:3])
    sinks = leaves[3] if len(leaves) > 3 else None
    out, _ = attention.tree_attention(None, query, key, value, tree=tree, s_aux=sinks, **options)
    return [out, *torch.autograd.grad(out, leaves, upstream)]


def milliseconds(function, args, repeats=None):
    """Median time of a call, after three that compile and warm up. On a GPU all calls are queued
    before the first is waited for, so that launching does not count."""
    marks = []
    for i in range(3 + (repeats or args.repeats)):
        if i == 3:
            marks.append(mark(args))
        function()
        if i >= 3:
            marks.append(mark(args))
    if args.cuda:
        torch.cuda.synchronize()
        return statistics.median(a.elapsed_time(b) for a, b in zip(marks, marks[1:]))
    return statistics.median(1e3 * (b - a) for a, b in zip(marks, marks[1:]))


def mark(args):
    if not args.cuda:
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def attempt(label, function, args):
    """The function's result, or None after printing why there is none."""
    if time.perf_counter() - START > args.seconds:
        print(f"  {label}: skipped, {args.seconds} s are over", flush=True)
        return None
    try:
        return function()
    except Exception as error:  # a backend that cannot run here must not hide the others
        lines = [line for line in str(error).splitlines() if line.strip()] or [""]
        print(f"  {label}: {type(error).__name__}: {lines[0][:300]}", flush=True)
        if args.verbose:
            raise
        return None


def exactness(args):
    """Root mean square error of output and gradients, relative to their own size. Padding is left
    out: nobody reads it, and the gathered way treats it differently."""
    print("\nbfloat16 against dense float64, relative error of: out, dq, dk, dv (and sinks)")
    row = row_of(2, 4, *((300, 200) if args.cuda else (150, 60))).to(args.device)
    for name, feature in FEATURES.items():
        options = dict(feature)
        dim, sinks = options.pop("dim", args.dim), options.pop("sinks", False)
        leaves, upstream = inputs(len(row.end), 8, 2, dim, args)
        upstream[:, row.n_tokens :] = 0
        if sinks:
            leaves.append(torch.linspace(-2, 3, 8, device=args.device))

        def run(backend, dtype=args.dtype, leaves=leaves, upstream=upstream, options=options):
            copies = [x.detach().to(dtype).requires_grad_() for x in leaves]
            tree = attention.TreeMask(row, backend)
            out, *gradients = attend(copies, upstream.to(dtype), tree, **options)
            return [x.detach().double() for x in (out[:, : row.n_tokens], *gradients)]

        exact = attempt(f"{name}, reference", lambda run=run: run("sdpa", torch.float64), args)
        for backend in ("sdpa", *BACKENDS) if exact else ():
            if sinks and backend in ("flash", "varlen"):
                continue  # refused, see choose_backend
            found = attempt(f"{name}, {backend}", lambda run=run, b=backend: run(b), args)
            if found:
                errors = [float((x - y).norm() / y.norm()) for x, y in zip(found, exact)]
                cells = "".join(f" {error:9.2e}" for error in errors)
                print(f"  {name:15} {backend:7}{cells}", flush=True)


def tree_times(args):
    lines = []
    for name, shape in TREES.items():
        row = row_of(*(shape if args.cuda else (*shape[:2], 40, 20))).to(args.device)
        leaves, upstream = inputs(len(row.end), args.heads, args.kv_heads, args.dim, args)
        times = {}
        for backend in BACKENDS:
            call = functools.partial(attend, leaves, upstream, attention.TreeMask(row, backend))
            label = f"{name}, {backend}"
            times[backend] = attempt(label, lambda c=call: milliseconds(c, args), args)
        gathered = times["varlen"]
        cells = [
            *times.values(),
            *[gathered and times[b] and gathered / times[b] for b in ("flash", "flex")],
        ]
        lines.append(
            f"{name:24} {row.n_tokens:6}"
            + "".join(f" {'-' if cell is None else f'{cell:.2f}':>9}" for cell in cells)
        )
        print(lines[-1], flush=True)
    return lines


def head_dim_256(args):
    """Whether Hopper's FLASH should be the choice there: its tiles want blocks of (128, 64)."""
    shape = TREES["3 x 8 x 1024 on 1024"] if args.cuda else (2, 2, 40, 20)
    row = row_of(*shape).to(args.device)
    leaves, upstream = inputs(len(row.end), 8, 2, 256, args)
    for backend in (*BACKENDS, *(() if args.cuda else ("sdpa",))):
        call = functools.partial(attend, leaves, upstream, attention.TreeMask(row, backend))
        took = attempt(f"head dim 256, {backend}", lambda c=call: milliseconds(c, args), args)
        if took is not None:
            print(f"  head dim 256, 8 heads, {row.n_tokens} tokens, {backend}: {took:.2f} ms")


def mask_times(args):
    lines = []
    for name, window in (("full", None), ("window 1024", 1024)):
        row = row_of(*((4, 8, 2048, 768) if args.cuda else (2, 4, 100, 50))).to(args.device)
        times = []
        for _ in range(11):
            began = time.perf_counter()
            attention.TreeMask(row, "flex").block_mask(window)
            if args.cuda:
                torch.cuda.synchronize()
            times.append(1e3 * (time.perf_counter() - began))
        took = statistics.median(times)
        lines.append(f"mask of a {row.n_tokens}-token row, {name}: {took:.2f} ms")
        print(f"  {lines[-1]}", flush=True)
    return lines


def training(args):
    """Trained tokens/s of packed rows and of the same samples in padding-free rows, for the policy
    as it is trained: a stack of layers shaped like Qwen3-1.7B, compiled and checkpointed, with a
    vocabulary cut in proportion, so that the head weighs the same."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    attention.register_attention()
    size = (2048, 6144, 16, 8, 128) if args.cuda else (64, 128, 4, 2, 32)
    names = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads")
    config = Qwen3Config(
        num_hidden_layers=args.layers,
        vocab_size=151_936 * args.layers // 28,
        attn_implementation=attention.ATTENTION,
        **dict(zip((*names, "head_dim"), size)),
    )
    with torch.device(args.device):
        policy = model.Policy(Qwen3ForCausalLM._from_config(config, dtype=args.dtype))
    policy.model.gradient_checkpointing_enable({"use_reentrant": False})
    policy.train()
    if args.cuda:
        for layer in model.layers(policy):
            layer.compile()

    def step(row, backend):
        tree = attention.TreeMask(row, backend).prepare(config)
        log_probs, *_ = policy(row, tree, temperature=1.0)
        log_probs.sum().backward()
        policy.zero_grad()

    # G (p + c) / (p + G c) = 3.4 at p = 4.17 c for G = 8 and at p = 16 c for G = 4
    lines = []
    for size, prompt, completion in ((8, 2136, 512), (4, 4096, 256)):
        if not args.cuda:
            prompt, completion = prompt // 50, completion // 50
        groups = -(-31_000 // (prompt + size * completion)) if args.cuda else 2
        packed = row_of(groups, size, prompt, completion, config.vocab_size).to(args.device)
        n_plain = max(1, packed.n_tokens // (prompt + completion))
        plain = row_of(n_plain, 1, prompt, completion, config.vocab_size).to(args.device)
        rates = {}
        for name, row, backend in (
            ("packed", packed, "auto"),
            ("unpacked", plain, "auto"),
            ("unpacked varlen", plain, "varlen"),
        ):
            call = functools.partial(step, row, backend)
            took = attempt(name, lambda c=call: milliseconds(c, args, -(-args.repeats // 3)), args)
            if took is not None:
                rates[name] = 1e3 * len(row.term_targets) / took
                print(
                    f"  groups of {size}, {name:16} {row.n_tokens:6} tokens, "
                    f"{len(row.term_targets):6} trained: {took:8.1f} ms, "
                    f"{rates[name]:,.0f} trained tokens/s",
                    flush=True,
                )
        unpacked = max((rate for name, rate in rates.items() if name != "packed"), default=None)
        if "packed" in rates and unpacked:
            lines.append(
                f"groups of {size}, packing ratio {packed.raw_tokens / packed.n_tokens:.2f}: "
                f"{rates['packed']:,.0f} trained tokens/s, unpacked padding-free rows "
                f"{unpacked:,.0f}: {rates['packed'] / unpacked:.2f} times"
            )
    return lines


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--layers", type=int, default=8, help="of the stack that is trained")
    parser.add_argument("--seconds", type=int, default=400, help="begin nothing new after these")
    parser.add_argument("--verbose", action="store_true", help="stop at the first error")
    args = parser.parse_args()
    args.device = torch.device(args.device)
    args.cuda = args.device.type == "cuda"
    args.dtype = torch.bfloat16
    args.heads, args.kv_heads, args.dim = (16, 8, 128) if args.cuda else (4, 2, 32)
    args.repeats = 20 if args.cuda else 1
    if not args.cuda:  # FlexAttention's plain backward works on a CPU too, if one lets it
        torch.nn.attention.flex_attention._validate_device = lambda *qkv: None
    attention.register_attention()
    where = torch.cuda.get_device_name(args.device) if args.cuda else "CPU"
    print(
        f"{where}, torch {torch.__version__}, {args.heads} heads, {args.kv_heads} KV heads, "
        f"head dim {args.dim}, bfloat16; ms forward and backward",
        flush=True,
    )
    header = (
        f"{'tree (groups x samples)':24} {'tokens':>6}"
        + "".join(f" {name:>9}" for name in BACKENDS.values())
        + "  gathered / FLASH, / Triton"
    )
    print(header)
    trees = tree_times(args)
    masks = attempt("masks", lambda: mask_times(args), args) or []
    trained = attempt("training", lambda: training(args), args) or []
    exactness(args)
    head_dim_256(args)
    seconds = time.perf_counter() - START
    print(f"\n{seconds:.0f} s in all", *masks, *trained, header, *trees, sep="\n")


if __name__ == "__main__":
    main()
