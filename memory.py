"""What a step keeps in memory, estimated before it runs: which layers recompute, when to reduce.

    choose(policy, config, ...)   the way of gradient checkpointing, and a sentence that says why
    apply(policy, mode)           switch it on

    none        every layer keeps what its backward needs
    selective   every second layer is run again in backward, the others keep it
    full        every layer is run again: a third more work, the least memory

The estimate counts, for one process: masters, gradients and AdamW's moments by shard; the root
(embedding, head) and two layers gathered in the compute dtype, with the gradients of one; what a
layer keeps of a token; the head's tile. It is meant to be high, never low: on an H200, 1.7B
parameters and 27,648 tokens, by 12% without recomputation and by up to half with all of it.
Left out: offloading activations, recomputing parts of a layer.
Test: pytest tests/test_memory.py.  Measured against: python bench/step.py (peak memory)
"""

import os

import torch
import torch.distributed as dist

import attention
from lm_head import GPU_TILE
from model import layers

GIB = 2**30
TILE_BYTES = 2 + 4 + 4  # of an element: product, float32 logit, gradient
USABLE = 0.9  # of the device: the rest is fragments, communication buffers, the CUDA context


def layer_elements(config):
    """What one layer keeps of a token for its backward, in elements of the compute dtype: inputs
    and norms, queries, keys and values before and after norm and rotation, the gated product."""
    key_heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    projected = attention.head_dim(config) * (config.num_attention_heads + 2 * key_heads)
    inner = getattr(config, "intermediate_size", None) or 4 * config.hidden_size
    if experts := getattr(config, "num_experts_per_tok", None):
        inner = experts * (getattr(config, "moe_intermediate_size", None) or inner)
    return 5 * config.hidden_size + 3 * projected + 2 * inner


def estimate(
    policy, *, row_tokens, compute_dtype, shards, compiled, whole_gradients=False, cpu_offload=False
):
    """{mode: bytes} that one process needs at most for a row of so many tokens.

    Sizes are the policy's before sharding or after it (a DTensor's shape is the whole's).
    whole_gradients: of all micro-batches but the last, in float32, not yet reduced. cpu_offload:
    masters, gradients and moments are elsewhere.
    """
    config, width = policy.model.config.get_text_config(), compute_dtype.itemsize
    trained = [p for p in policy.parameters() if p.requires_grad]
    held = sum(p.numel() * p.element_size() for p in policy.parameters())
    held += 3 * sum(p.numel() * p.element_size() for p in trained)  # gradient and two moments
    n_layers = len(layers(policy))
    layer = sum(p.numel() for p in layers(policy).parameters()) / n_layers
    root = sum(p.numel() for p in policy.parameters()) - n_layers * layer
    at_once = 2 if shards > 1 or cpu_offload else n_layers  # else layers stay gathered
    gathered = (root + at_once * layer) * width + (root + layer) * (width + 4)
    tile = min(row_tokens, GPU_TILE[0]) * min(config.vocab_size, GPU_TILE[1]) * TILE_BYTES
    fixed = (0 if cpu_offload else held / shards) + gathered + tile
    if whole_gradients:
        fixed += 4 * sum(p.numel() for p in trained)
    # below the head: the last norm in float32, its output at the terms, their gradients
    head = row_tokens * config.hidden_size * (3 * width + 8)
    # Uncompiled layers keep their norms in float32 and every step of the gated product.
    kept = layer_elements(config) * width * (1 if compiled else 2) * row_tokens
    entry = config.hidden_size * width * row_tokens  # all that a recomputed layer keeps
    halves = n_layers - n_layers // 2, n_layers // 2
    return {
        "none": fixed + head + n_layers * kept,
        "selective": fixed + head + halves[0] * kept + halves[1] * entry + kept,
        "full": fixed + head + n_layers * entry + kept,
    }


def device_memory(device):
    """Bytes that this process may count on."""
    if device.type == "cuda":  # a server may hold a part; all ranks must recompute alike
        free, _ = torch.cuda.mem_get_info(device)
        least = torch.tensor(free + torch.cuda.memory_reserved(device))
        dist.all_reduce(least, dist.ReduceOp.MIN)
        return int(least)
    processes = int(os.environ.get("LOCAL_WORLD_SIZE", dist.get_world_size()))
    # half of a machine without a GPU is the server's
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2 / processes


def choose(policy, config, row_tokens, device, compiled):
    """-> (mode, whether to reduce after each micro-batch, a sentence). `auto` takes the first of
    none, selective and full that fits."""
    usable = USABLE * device_memory(device)
    shards = dist.get_world_size() // config.replicas

    def sizes(whole_gradients):
        return estimate(
            policy,
            row_tokens=row_tokens,
            compute_dtype=config.compute_dtype,
            shards=shards,
            compiled=compiled,
            whole_gradients=whole_gradients,
            cpu_offload=config.cpu_offload,
        )

    found, mode = sizes(False), config.checkpointing
    if mode == "auto":
        mode = next((name for name, size in found.items() if size <= usable), "full")
    several = config.gradient_accumulation_steps > 1 and shards > 1
    reduce_each = several and sizes(True)[mode] > usable
    figures = ", ".join(f"{name} {size / GIB:.1f}" for name, size in found.items())
    sentence = (
        f"gradient checkpointing: {mode} (estimated GiB a process for rows of {row_tokens} tokens: "
        f"{figures}; usable {usable / GIB:.1f})"
    )
    if reduce_each:
        sentence += "; gradients are reduced after every micro-batch, to save memory"
    return mode, reduce_each, sentence


def apply(policy, mode):
    """Which layers run again in backward."""
    if mode == "none":
        return
    policy.model.gradient_checkpointing_enable({"use_reentrant": False})
    if mode == "selective":
        for layer in list(layers(policy))[::2]:
            layer.gradient_checkpointing = False
