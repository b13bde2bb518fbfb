"""Claim: nine log-probs a token, their loss and all gradients in little more than the time of the
matrix products, in little more memory than the weight's gradient.

    python bench/loss.py                 # one H200, M 16384, H 2048, V 151936, C 9, bf16; 2 minutes
    python bench/loss.py --device cpu    # tiny, to see that it runs; its times mean nothing

The peers run if they can be imported: TRL's fused head (trl 1.16.0) and Liger's fused linear
cross-entropy (liger-kernel 0.8.5). They return one log-prob a token; ours returns nine and the
entropy, TRL's one and the entropy. Each row is forward, loss and backward to hidden states and
weight. All rows are timed in turns, in another order each round: a GPU that slows down slows all,
and one that a row of little arithmetic has spared helps whichever comes next. The median counts.
Peak memory is what a row allocates beyond its inputs, its gradients included.
"""

import argparse
import random
import statistics
import sys
import time
from pathlib import Path

import torch

sys.path[0] = str(Path(__file__).resolve().parents[1])  # this file's folder also has a loss.py
import lm_head  # noqa: E402
import loss  # noqa: E402

ROUNDS = 15
GOALS = {"products": 1.25, "trl": 1.0, "liger": 1.1, "memory_gib": 2.5}


def make_inputs(device, n_terms, hidden_size, vocab_size, n_candidates):
    torch.manual_seed(0)
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    hidden = torch.randn(n_terms, hidden_size, device=device, dtype=dtype)
    weight = torch.randn(vocab_size, hidden_size, device=device, dtype=dtype)
    weight *= 2 / hidden_size**0.5  # logits of standard deviation 2
    candidates = torch.randint(vocab_size, (n_terms, n_candidates), device=device)
    with torch.no_grad():
        policy, _ = lm_head.candidate_log_probs(hidden, weight, candidates)
    sampler = policy + 0.1 * torch.randn_like(policy)
    advantages = torch.randn(n_terms, device=device)
    return hidden.requires_grad_(), weight.requires_grad_(), candidates, sampler, advantages


def terms_of(log_probs, sampler, advantages):
    return loss.score_centering_loss(
        policy_log_probs=log_probs[:, 0],
        sampler_log_probs=sampler[:, 0],
        head_policy_log_probs=log_probs[:, 1:],
        head_sampler_log_probs=sampler[:, 1:],
        advantages=advantages,
    )


def whole_products(hidden, weight, n_products):
    """The least that any head has to do: logits (once or twice), gradients of hidden and weight."""
    with torch.no_grad():
        grad = hidden @ weight.t()
        if n_products == 4:
            torch.mm(hidden, weight.t(), out=grad)
        return grad @ weight, grad.t() @ hidden


def tiled_products(hidden, weight, tile):
    """The four products as candidate_log_probs runs them, without the work in between."""
    with torch.no_grad():
        hidden_grad = torch.zeros_like(hidden, dtype=torch.float32)
        weight_grad = torch.empty_like(weight)
        for columns in lm_head._slices(len(weight), tile[1]):
            grad = hidden @ weight[columns].t()
        for columns in lm_head._slices(len(weight), tile[1]):
            grad = hidden @ weight[columns].t()
            lm_head._add_product_(hidden_grad, grad, weight[columns])
            weight_grad[columns] = lm_head._product(grad.t(), hidden, hidden.dtype)
        return hidden_grad.to(hidden.dtype), weight_grad


def trl_step(hidden, weight, targets, upstream):
    from trl.kernels import ChunkedLogProbFunction

    # 32768: the tile width that TRL 1.16.0 uses for its models.
    log_probs, *_ = ChunkedLogProbFunction.apply(
        hidden, weight, None, targets, 1.0, 32768, None, 1.0, ("entropy",)
    )
    (log_probs * upstream).sum().backward()


def liger_step(hidden, weight, targets, chunk_mem_const, accum_dtype):
    from liger_kernel.ops.fused_linear_cross_entropy import LigerFusedLinearCrossEntropyFunction

    value, *_ = LigerFusedLinearCrossEntropyFunction.apply(
        hidden,
        weight,
        targets,
        None,
        None,
        -100,
        0.0,
        0.0,
        "sum",
        None,
        False,
        accum_dtype,
        False,
        False,
        False,
        None,
        None,
        chunk_mem_const,
    )
    value.backward()


def candidate_sets(candidates, vocab_size, size):
    """Sets of `size` ids a term, as of top_k sampling: the candidates and random others."""
    n_terms, n_candidates = candidates.shape
    others = torch.randint(vocab_size, (n_terms, size - n_candidates), device=candidates.device)
    offsets = torch.arange(n_terms + 1, device=candidates.device) * size
    return {"set_ids": torch.cat([candidates, others], 1).flatten(), "set_offsets": offsets}


def wait(device):
    if device == "cuda":
        torch.cuda.synchronize()


def first_call(step, leaves, device):
    """(seconds, peak GiB beyond the inputs) of the second call; the first one compiles."""
    started = time.perf_counter()
    step()
    wait(device)
    seconds = time.perf_counter() - started
    for leaf in leaves:
        leaf.grad = None
    if device != "cuda":
        step()
        return seconds, float("nan")
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    step()
    wait(device)
    return seconds, (torch.cuda.max_memory_allocated() - before) / 2**30


def timed(step, leaves, device):
    for leaf in leaves:
        leaf.grad = None
    wait(device)
    started = time.perf_counter()
    step()
    wait(device)
    return time.perf_counter() - started


def relative_difference(step, reference_step, leaves):
    grads = []
    for run in (step, reference_step):
        for leaf in leaves:
            leaf.grad = None
        run()
        grads.append([leaf.grad.float() for leaf in leaves])
    return max(((a - b).norm() / b.norm()).item() for a, b in zip(*grads))


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    device = parser.parse_args().device
    if device == "cuda":
        shape = {"n_terms": 16384, "hidden_size": 2048, "vocab_size": 151936, "n_candidates": 9}
        tile, widths = lm_head.GPU_TILE, (4096, 8192, 16384, 32768)
    else:
        shape = {"n_terms": 64, "hidden_size": 32, "vocab_size": 1000, "n_candidates": 9}
        tile, widths = (64, 256), (512, 1000)
    where = torch.cuda.get_device_name() if device == "cuda" else "CPU"
    # Many tile widths in one process; training has two. The limit is a thread's own.
    torch._dynamo.config.recompile_limit = 64
    torch.autograd.set_multithreading_enabled(False)
    hidden, weight, candidates, sampler, advantages = make_inputs(device, **shape)
    leaves = (hidden, weight)
    print(f"{where}, torch {torch.__version__}, {shape}, {hidden.dtype}", flush=True)

    def ours(**options):
        options = {"tile": tile, "compiled": device == "cuda"} | options
        log_probs, _ = lm_head.candidate_log_probs(hidden, weight, candidates, **options)
        terms_of(log_probs, sampler, advantages).sum().backward()

    def one_log_prob(upstream):  # what the peers return: that of the sampled token
        options = {"tile": tile, "compiled": device == "cuda"}
        log_probs, _ = lm_head.candidate_log_probs(hidden, weight, candidates[:, :1], **options)
        (log_probs[:, 0] * upstream).sum().backward()

    targets, minus_one = candidates[:, 0].contiguous(), -torch.ones_like(advantages)
    sets = candidate_sets(candidates, shape["vocab_size"], 20)
    steps = {
        "products, whole (4)": lambda: whole_products(hidden, weight, 4),
        "products, whole (3)": lambda: whole_products(hidden, weight, 3),
        "products, tiled (4)": lambda: tiled_products(hidden, weight, tile),
        "ours": lambda: ours(),
        "ours, one log-prob": lambda: one_log_prob(advantages),
        "ours, not compiled": lambda: ours(compiled=False),
        **{f"ours, tiles {w} wide": lambda w=w: ours(tile=(tile[0], w)) for w in widths},
        "ours, fp32_head": lambda: ours(fp32_head=True),
        "ours, sets of 20": lambda: ours(**sets),
        "trl": lambda: trl_step(hidden, weight, targets, advantages),
        "liger": lambda: liger_step(hidden, weight, targets, 1, None),
        "liger, 8x chunks, fp32 sums": lambda: liger_step(
            hidden, weight, targets, 8, torch.float32
        ),
    }
    checks = {
        "ours, not compiled": lambda: ours(),
        "trl": lambda: one_log_prob(advantages),
        "liger": lambda: one_log_prob(minus_one),
        "liger, 8x chunks, fp32 sums": lambda: one_log_prob(minus_one),
    }

    peaks, differences = {}, {}
    for name in list(steps):
        try:
            seconds, peaks[name] = first_call(steps[name], leaves, device)
            if name in checks:
                differences[name] = relative_difference(steps[name], checks[name], leaves)
        except Exception as error:  # a peer that is not installed, or not for this device
            reason = (str(error) or repr(error)).splitlines()[0][:120]
            print(f"{name}: not run, {type(error).__name__}: {reason}", flush=True)
            del steps[name]
            continue
        print(f"{name}: first call {seconds:.1f} s", flush=True)

    times, order = {name: [] for name in steps}, list(steps)
    shuffle = random.Random(0).shuffle
    for _ in range(ROUNDS):
        shuffle(order)
        for name in order:
            times[name].append(timed(steps[name], leaves, device))
    medians = {name: statistics.median(t) for name, t in times.items()}

    flops = 2 * shape["n_terms"] * shape["hidden_size"] * shape["vocab_size"]
    print(f"\n{'':36}{'ms':>9}{'peak GiB':>10}{'TFLOP/s':>9}  gradient against ours")
    for name, seconds in medians.items():
        # Of the products that the row needs: "(3)" or four. Liger forms its gradients in forward.
        n_products = 3 if "(3)" in name or "liger" in name else 4
        rate = n_products * flops / seconds / 1e12
        difference = f"{differences[name]:9.1e}" if name in differences else ""
        print(f"{name:36}{1e3 * seconds:9.2f}{peaks[name]:10.2f}{rate:9.1f}  {difference}")

    print(f"\nours: peak {peaks['ours']:.2f} GiB (goal: below {GOALS['memory_gib']})")
    for name in ("products, whole (4)", "trl", *(n for n in medians if "liger" in n)):
        if name in medians:
            ratio, goal = medians["ours"] / medians[name], GOALS[name.split(",")[0]]
            print(f"ours / {name}: {ratio:.3f} (goal: at most {goal})")
    if "trl" in medians:
        ratio = medians["ours, one log-prob"] / medians["trl"]
        print(f"ours, one log-prob as TRL returns / trl: {ratio:.3f}")


if __name__ == "__main__":
    main()
