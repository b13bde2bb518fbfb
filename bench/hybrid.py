"""Claim: at packing ratio 3.4 a gated DeltaNet hybrid trains 2.5 times as many tokens/s as rows in
which nothing is shared.

    pip install flash-linear-attention==0.6.0
    python bench/hybrid.py            # one H200, Qwen3.5-2B's shape, bf16
    python bench/hybrid.py --tiny     # CPU, to see that it runs; its times mean nothing

Weights are random. First 8 layers: log-probs and gradients of packed samples against rows of one
sample each, and of both against transformers in float32. Then all 24 layers, compiled and with
checkpointing: packed rows against separate ones. Then the token mixing of one DeltaNet layer on
several trees, at several limits of deltanet.REPLAY. Times are medians, forward and backward.
"""

import argparse
import faulthandler
import gc
import multiprocessing
import os
import statistics
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch

sys.path[0] = str(Path(__file__).resolve().parents[1])
import attention  # noqa: E402
import deltanet  # noqa: E402
import model  # noqa: E402
import packing  # noqa: E402

START = time.perf_counter()
SHAPE = dict(
    vocab_size=248_320,
    hidden_size=2048,
    intermediate_size=6144,
    num_attention_heads=8,
    num_key_value_heads=2,
    head_dim=256,
    linear_num_key_heads=16,
    linear_num_value_heads=16,
    linear_key_head_dim=128,
    linear_value_head_dim=128,
    tie_word_embeddings=True,
)
TINY = SHAPE | dict(
    vocab_size=512,
    hidden_size=64,
    intermediate_size=96,
    num_attention_heads=2,
    head_dim=32,
    linear_num_key_heads=2,
    linear_num_value_heads=2,
    linear_key_head_dim=16,
    linear_value_head_dim=16,
)
CANDIDATES = 8  # of the sampler, for each trained token


def make_model(args, n_layers, implementation=attention.ATTENTION):
    from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig

    rope = {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25}
    rope |= {"mrope_section": [2, 1, 1] if args.tiny else [11, 11, 10], "mrope_interleaved": True}
    config = Qwen3_5TextConfig(
        num_hidden_layers=n_layers, rope_parameters=rope, **(TINY if args.tiny else SHAPE)
    )
    torch.manual_seed(0)
    with torch.device(args.device):
        found = Qwen3_5ForCausalLM._from_config(
            config, dtype=args.dtype, attn_implementation=implementation
        )
    with torch.no_grad():  # decays that neither forget a segment at once nor keep all of it
        for layer in found.model.layers:
            if layer.block_type == "linear_attention":
                layer.linear_attn.A_log.copy_(torch.linspace(-4, 0, len(layer.linear_attn.A_log)))
    return found.train()


def make_sample(ids, prompt, vocab):
    rng, n = np.random.default_rng(len(ids)), len(ids) - prompt
    return SimpleNamespace(
        input_ids=np.asarray(ids, np.int32),
        trained=np.arange(len(ids)) >= prompt,
        sampler_log_probs=np.zeros(len(ids), np.float32),
        advantage=1.0,
        group_id=0,
        row_index=0,
        top_ids=rng.integers(0, vocab, (n, CANDIDATES)).astype(np.int32),
        top_log_probs=np.full((n, CANDIDATES), -5, np.float32),
        set_ids=None,
        set_offsets=None,
    )


def groups(n_groups, size, prompt, completion, vocab, stem=0):
    """Completions of prompts; those of a prompt share their first words: half of them `stem`
    tokens, a quarter `stem` more, and so on, as sampled ones do."""
    rng, samples = np.random.default_rng(0), []
    for group in range(n_groups):
        head = np.append(group, rng.integers(0, vocab, prompt - 1))
        words = rng.integers(0, vocab, completion)
        for i in range(size):
            ids = rng.integers(0, vocab, completion)
            shared = stem * ((i + 1) & -(i + 1)).bit_length() - stem
            ids[:shared] = words[:shared]
            samples.append(make_sample(np.append(head, ids), prompt, vocab))
    return samples


def turns(n_turns, length, stub, vocab):
    """One conversation; at each turn a short branch ends, as where a template drops reasoning."""
    rng, samples = np.random.default_rng(0), []
    trunk = rng.integers(0, vocab, n_turns * length)
    for turn in range(1, n_turns + 1):
        ids = np.append(trunk[: turn * length], rng.integers(0, vocab, stub))
        samples.append(make_sample(ids, len(ids) - stub, vocab))
    return samples


def pack(samples, args, pad=None):
    return packing.pack_row(samples, 1 << 20, pad).to(args.device)


def score(policy, row, backend="auto"):
    tree = attention.TreeMask(row, backend).prepare(policy.model.config)
    return policy(row, tree, 1.0)[0]


@torch.no_grad()
def relative(found, expected):
    return float((found.double() - expected.double()).norm() / expected.double().norm())


# ---------------------------------------------------------------- exactness


def exactness(args):
    """Relative distances: of packed rows from the same samples in rows of their own, and of both
    from transformers' forward in float32. Log-probs are compared without their mean: with random
    weights they are all close to -log V."""
    from transformers.models.qwen3_5 import modeling_qwen3_5

    policy = model.Policy(make_model(args, 4 if args.tiny else 8))
    vocab = policy.model.config.vocab_size
    scale = 10 if args.tiny else 1
    samples = groups(2, 4, 300 // scale, 200 // scale, vocab, stem=2)
    samples += turns(6, 70 // scale, 5, vocab)
    weight = torch.randn(sum(int(sample.trained.sum()) for sample in samples), device=args.device)

    def results(module, log_probs):
        """-> log-probs of all trained tokens, and the whole gradient of their weighted sum."""
        (log_probs * weight).sum().backward()
        gradient = torch.cat([p.grad.flatten().float() for p in module.parameters()])
        module.zero_grad()
        return log_probs.detach() - log_probs.detach().mean(), gradient

    packed = results(policy, score(policy, pack(samples, args), "sdpa")[:, 0])
    parts = [score(policy, pack([sample], args), "sdpa")[:, 0] for sample in samples]
    separate = results(policy, torch.cat(parts))

    # transformers' torch form: flash-linear-attention's kernels would be tuned for float32 as well
    modeling_qwen3_5.torch_chunk_gated_delta_rule = deltanet._torch_form()
    reference = make_model(args, len(model.layers(policy)), "sdpa").float()
    reference.load_state_dict(policy.model.state_dict())
    parts = []
    for sample in samples:
        ids = torch.from_numpy(sample.input_ids).long().to(args.device)
        hidden = reference.model(input_ids=ids[None], use_cache=False).last_hidden_state[0]
        hidden = hidden[:-1][torch.from_numpy(sample.trained[1:]).to(args.device)]
        targets = ids[torch.from_numpy(sample.trained).to(args.device)]
        scores = reference.lm_head(hidden).log_softmax(-1)
        parts.append(scores.gather(1, targets[:, None])[:, 0])
    exact = results(reference, torch.cat(parts))

    lines = [f"{len(samples)} samples, {args.dtype}, relative distance of log-probs, of gradients:"]
    for name, one, other in (
        ("packed from separate rows (goal 2e-2)", packed, separate),
        ("packed from transformers in float32", packed, exact),
        ("separate from transformers in float32", separate, exact),
    ):
        lines.append(
            f"  {name:40} {relative(one[0], other[0]):.1e} {relative(one[1], other[1]):.1e}"
        )
    return lines


# ---------------------------------------------------------------- time


def milliseconds(function, args, repeats):
    """Median of `repeats` calls, after two that compile and warm up."""
    times = []
    for i in range(repeats + 2):
        began = time.perf_counter()
        function()
        if args.device == "cuda":
            torch.cuda.synchronize()
        if i >= 2:
            times.append(1e3 * (time.perf_counter() - began))
    return statistics.median(times)


def mix_once(row, args, replay=deltanet.REPLAY):
    """A function that runs one layer's token mixing over the row, forward and backward."""
    shape = TINY if args.tiny else SHAPE
    heads, dim = shape["linear_num_key_heads"], shape["linear_key_head_dim"]
    n, options = len(row.input_ids), dict(device=args.device, dtype=args.dtype)
    trie = deltanet.Trie(row.host.segments, n, 4, args.device, replay)
    qkv = torch.randn(n, 3 * heads * dim, **options).requires_grad_()
    weight = torch.randn(3 * heads * dim, 4, **options).requires_grad_()
    decay = (-torch.rand(n, heads, device=args.device) / 10).requires_grad_()
    beta = torch.rand(n, heads, **options).requires_grad_()
    upstream = torch.randn(n, heads, dim, **options)

    def run():
        out = deltanet.mix(qkv, weight, decay, beta, trie, (heads, dim, heads, dim))
        torch.autograd.grad(out, (qkv, weight, decay, beta), upstream)

    return run, trie


def mixing(args):
    vocab = (TINY if args.tiny else SHAPE)["vocab_size"]
    prompt, completion = (133, 32) if args.tiny else (2136, 512)
    turn, stub = (80, 5) if args.tiny else (1280, 32)
    trees = {
        "12 samples, nothing shared": groups(12, 1, prompt, completion, vocab),
        "5 groups of 8": groups(5, 8, prompt, completion, vocab),
        "5 groups of 8, shared words": groups(5, 8, prompt, completion, vocab, stem=3),
        "24 turns, a stub at each": turns(24, turn, stub, vocab),
    }
    lines = [f"{'mixing of one layer':30} tokens segments   levels and ms, replaying 0, 64, 256"]
    for name, samples in trees.items():
        row, cells = pack(samples, args), ""
        for replay in (0, 64, 256):
            run, trie = mix_once(row, args, replay)
            took = milliseconds(run, args, args.repeats)
            cells += f" {len(trie.levels):3} {took:7.2f}"
        lines.append(f"  {name:28} {row.n_tokens:6} {len(row.host.segments):8} {cells}")
        print(lines[-1], flush=True)
    return lines


def training(args):
    policy = model.Policy(make_model(args, 4 if args.tiny else 24))
    vocab = policy.model.config.vocab_size
    policy.model.gradient_checkpointing_enable({"use_reentrant": False})
    if args.device == "cuda":
        for layer in model.layers(policy):
            layer.compile(dynamic=False)
    # 8 (p + c) / (p + 8 c) = 3.4 at p = 4.17 c. 5 groups of 8 packed and 12 samples unpacked are
    # 31,160 and 31,776 tokens: padded to the same length, so that one graph serves both.
    prompt, completion = (2136, 512) if not args.tiny else (42, 10)
    packed = groups(5, 8, prompt, completion, vocab)
    separate = groups(12, 1, prompt, completion, vocab)
    length = 12 * (prompt + completion)
    rates, lines, ratio = {}, [], 0
    for name, samples in {"packed": packed, "separate": separate}.items():
        row = pack(samples, args, lambda n: length)

        def step(row=row):
            (-score(policy, row).mean()).backward()
            policy.zero_grad()

        began = time.perf_counter()
        took = milliseconds(step, args, args.repeats)
        n_trained = len(row.term_targets)
        rates[name] = 1e3 * n_trained / took
        ratio = max(ratio, row.raw_tokens / row.n_tokens)
        lines.append(
            f"training step, {name:8} {row.n_tokens:6} tokens, {n_trained:6} trained: "
            f"{took:8.1f} ms, {rates[name]:9,.0f} trained tokens/s"
        )
        print(f"{lines[-1]} (with warm-up {time.perf_counter() - began:.0f} s)", flush=True)
    lines.append(
        f"packing ratio {ratio:.2f}: {rates['packed'] / rates['separate']:.2f} times the trained "
        "tokens/s of separate rows (goal 2.5)"
    )
    if args.device == "cuda":
        lines.append(f"peak memory {torch.cuda.max_memory_allocated() / 2**30:.1f} GiB")
    return lines


# ---------------------------------------------------------------- kernels, compiled side by side


def compile_kernels(part, parts):
    """In a process of its own: compile every `parts`-th configuration of each kernel that the
    layer's autotuning will try, into Triton's cache on disk. In turn they take minutes."""
    import fla.ops.gated_delta_rule  # noqa: F401
    from triton.runtime.autotuner import Autotuner

    tuners = set()
    for module in [m for name, m in sys.modules.items() if name.startswith("fla.")]:
        for kernel in list(vars(module).values()):
            while kernel is not None and not isinstance(kernel, Autotuner):
                kernel = getattr(kernel, "fn", None)  # below heuristics
            tuners.add(kernel)
    for tuner in tuners - {None}:
        safe, mine = tuner.configs[0], tuner.configs[part::parts]  # others may not fit the GPU
        tuner.configs = mine if safe in mine else [safe, *mine]
    deltanet._compiled_convolve = lambda: deltanet.convolve
    tune(SimpleNamespace(tiny=False, device="cuda", dtype=torch.bfloat16))


def tune(args):
    """Every kernel once, without a fork and with one: states are kernels' options. Here and in the
    processes alike, so that what they compiled is what is tried here."""
    for size in (1, 2):
        mix_once(pack(groups(2, size, 100, 100, 1000), args), args)[0]()


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tiny", action="store_true", help="a small model on the CPU")
    parser.add_argument("--seconds", type=int, default=400, help="begin nothing new after these")
    parser.add_argument("--compilers", type=int, default=min(12, os.cpu_count() - 1))
    args = parser.parse_args()
    args.device = "cpu" if args.tiny else "cuda"
    args.dtype = torch.float32 if args.tiny else torch.bfloat16
    args.repeats = 1 if args.tiny else 5
    attention.register_attention()
    # A kernel that never ends would hide where: flash-linear-attention's autotuning tries some that
    # Triton miscompiles for some GPUs.
    faulthandler.dump_traceback_later(args.seconds + 90, exit=True)
    if not args.tiny:
        spawn = multiprocessing.get_context("spawn")
        jobs = [(part, args.compilers) for part in range(args.compilers)]
        processes = [spawn.Process(target=compile_kernels, args=job, daemon=True) for job in jobs]
        for process in processes:
            process.start()
        for process in processes:
            process.join(max(0, START + 180 - time.perf_counter()))
            if process.exitcode is None:
                process.terminate()
        print(f"kernels compiled, {time.perf_counter() - START:.0f} s", flush=True)
        tune(args)
        print(f"kernels tuned, {time.perf_counter() - START:.0f} s", flush=True)
    lines = []
    for part in (exactness, training, mixing):
        if time.perf_counter() - START > args.seconds:
            print(f"{part.__name__}: skipped, {args.seconds} s are over", flush=True)
            continue
        try:
            lines += part(args)
        except Exception as error:  # one part that fails must not hide the others
            lines.append(f"{part.__name__}: {type(error).__name__}: {str(error)[:300]}")
            print(lines[-1], flush=True)
        gc.collect()
        if args.device == "cuda":
            torch.cuda.empty_cache()
        print(f"{part.__name__}: {time.perf_counter() - START:.0f} s", flush=True)
    where = "CPU" if args.tiny else torch.cuda.get_device_name()
    print(f"\n{where}, torch {torch.__version__}, {args.dtype}", *lines, sep="\n")


if __name__ == "__main__":
    main()
