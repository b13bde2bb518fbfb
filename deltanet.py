"""Gated DeltaNet layers (Qwen3.5, Qwen3.6, Qwen3-Next) over a packed prefix tree.

    S_t = exp(g_t) S_{t-1} (I - beta_t k_t k_t^T) + beta_t v_t k_t^T        o_t = S_t q_t / sqrt(D)
    (Gated Delta Networks, arXiv:2412.06464, eq. 10; q, k, v come out of a short causal convolution)

Such a layer remembers by a state, so in a packed row "the token before" must be the one before in
the token's own sample. The convolution reads a token's own predecessors. The recurrence runs over
the tree level by level: all runs of a level in one call, each from the final state of the run that
it continues. Gradients flow back through the states.

    install(model)         replace the token mixing of each such layer of a transformers model
    Trie(segments, ...)    what the layers must know of one row; model(..., trie=Trie(...))

CUDA: flash-linear-attention's chunk_gated_delta_rule. CPU: the torch form of transformers.
Left out: caches (the server generates), context parallelism, other recurrent layers.
Test: pytest tests/test_deltanet.py.  Speed: python bench/hybrid.py (GPU)
"""

import functools
import inspect
from collections import Counter

import numpy as np
import torch
import torch.nn.functional as F
from torch.nn.utils.rnn import pad_sequence

# P packed positions of a row, S segments, R positions of all runs (replayed ones twice), N runs of
# a level, C channels of the convolution, W its width, H key heads, V value heads, D head dims.

MODEL_TYPES = ("qwen3_5_text", "qwen3_5_moe_text", "qwen3_next")  # Qwen3.6 is of the first two
CHUNK = 64  # tokens that the delta rule takes at a time, in both forms
REPLAY = CHUNK  # see plan_runs


# ------------------------------------------------------------------------------------------ tree


def plan_runs(segments, replay=REPLAY):
    """Cut a tree into runs, each one sequence for the kernel, in as few levels as pays.

    segments: rows (start, stop, parent or -1, ...), parents first. -> list of (level, run that it
    continues or -1, pieces [(start, stop)]). A run ends at a fork, where its final state is kept,
    or at a leaf; so a chain is one run. Leaves wait for the last level, where all of them go side
    by side. A fork within `replay` tokens of the last kept state keeps none: each branch replays
    what lies between. Completions of a prompt often share a few words, some of them a few more,
    and that would be a level of tiny runs each.
    """
    n_children = Counter(parent for _, _, parent, *_ in segments)
    runs, after = [], []  # after: what the children of each segment start with
    for i, (start, stop, parent, *_) in enumerate(segments):
        level, from_run, pieces = after[parent] if parent >= 0 else (0, -1, [])
        pieces = [*pieces, (start, stop)]
        tokens = sum(stop - start for start, stop in pieces)
        if n_children[i] == 0:
            runs.append((None, from_run, pieces))
        elif n_children[i] > 1 and tokens > replay:
            runs.append((level, from_run, pieces))
            level, from_run, pieces = level + 1, len(runs) - 1, []
        after.append((level, from_run, pieces))
    last = max((level + 1 for level, _, _ in runs if level is not None), default=0)
    return [(last if level is None else level, *rest) for level, *rest in runs]


class Trie:
    """A row's tree in the form that DeltaNet layers want, on their device.

    segments: [S, 4] rows (start, stop, parent or -1, depth), depth-first (PackedRow.segments);
    size: packed positions P; what follows the last segment is padding, and a run of its own.
    """

    def __init__(self, segments, size, conv_width, device, replay=REPLAY):
        segments = np.asarray(segments).tolist()
        if segments[-1][1] < size:
            segments.append((segments[-1][1], size, -1, 0))
        to = functools.partial(_to_device, device=device)
        rows, taps = seams(segments, conv_width)
        self.seam_rows, self.seam_taps = to(rows), to(taps)

        runs = plan_runs(segments, replay)
        by_level = sorted(range(len(runs)), key=lambda i: runs[i][0])  # stable: depth-first within
        pieces = [np.arange(a, b) for i in by_level for a, b in runs[i][2]]
        order_R, pick_P = np.concatenate(pieces), np.empty(size, np.int64)
        pick_P[order_R] = np.arange(len(order_R))  # of a replayed token one output is kept
        self.in_order = len(order_R) == size and (order_R == np.arange(size)).all()
        self.order, self.pick = to(order_R), to(pick_P)
        self.twice = to(np.flatnonzero(pick_P[order_R] != np.arange(len(order_R))))

        self.levels, kept = [], {-1: 0}  # kept: the place of a run's final state; 0 is the zeros
        for level in range(runs[by_level[-1]][0] + 1):
            members = [i for i in by_level if runs[i][0] == level]
            lengths = [sum(b - a for a, b in runs[i][2]) for i in members]
            starts = [kept[runs[i][1]] for i in members]
            self.levels.append(Level(lengths, starts, device))
            kept.update({i: len(kept) + n for n, i in enumerate(members)})
        self.sizes = [sum(level.lengths) for level in self.levels]


class Level:
    """The runs of one level: one call of the kernel."""

    def __init__(self, lengths, starts, device):
        self.lengths = lengths
        self.starts = _to_device(np.array(starts), device)  # which of the kept states each takes
        self.cu_seqlens = _to_device(np.cumsum([0, *lengths]), device)
        # Made here and not by the kernel in every layer: (run, its n-th chunk) of every chunk.
        chunks = [(run, n) for run, size in enumerate(lengths) for n in range(-(-size // CHUNK))]
        self.chunk_indices = _to_device(np.array(chunks), device)


def seams(segments, width):
    """Where the convolution must not read its neighbours in the row: most segments' first tokens.

    -> (positions [n], what each of them reads [n, width]: position + width - 1, so that the zeros
    before a sample are at 0 to width - 2, as in a row padded on the left)
    """
    tails, rows, taps = [], [], []  # tails: the last width - 1 reads at the end of each segment
    zeros = list(range(width - 1))
    for start, stop, parent, *_ in segments:
        path = tails[parent] if parent >= 0 else zeros
        first = [position + width - 1 for position in range(start, min(stop, start + width - 1))]
        for i, position in enumerate(range(start, start + len(first))):
            reads = (path + first)[i : i + width]
            if reads != list(range(position, position + width)):
                rows.append(position)
                taps.append(reads)
        last = range(max(start, stop - width + 1) + width - 1, stop + width - 1)
        tails.append((path + list(last))[len(last) :])
    return np.array(rows, np.int64), np.array(taps, np.int64).reshape(-1, width)


def _to_device(array, device):
    return torch.from_numpy(np.ascontiguousarray(array, np.int64)).to(device, non_blocking=True)


# ----------------------------------------------------------------------------------------- layer


def install(model):
    """Make every gated DeltaNet layer of a transformers model mix over trees. -> how many."""
    layers = [m for m in model.modules() if type(m).__name__.endswith("GatedDeltaNet")]
    for layer in layers:
        if layer.activation != "silu" or layer.conv1d.bias is not None:
            raise ValueError(f"{type(layer).__name__} has another convolution than Qwen3.5's")
        layer.forward = functools.partial(forward, layer)
    return len(layers)


def forward(layer, hidden_states, *, trie=None, cache_params=None, **unused):
    """The layer's forward, [1, P, hidden] -> [1, P, hidden], over the tree."""
    if trie is None or cache_params is not None:
        raise ValueError("a gated DeltaNet layer needs model(..., trie=Trie(...), use_cache=False)")
    qkv_PC, z_PVD, b_PV, a_PV = project(layer, hidden_states)
    decay_PV = -layer.A_log.float().exp() * F.softplus(a_PV.float() + layer.dt_bias)
    shape = (layer.num_k_heads, layer.head_k_dim, layer.num_v_heads, layer.head_v_dim)
    out_PVD = mix(qkv_PC, layer.conv1d.weight[:, 0], decay_PV, b_PV.sigmoid(), trie, shape)
    out = layer.norm(out_PVD.flatten(0, 1), z_PVD.flatten(0, 1))
    return layer.out_proj(out.view(1, len(z_PVD), -1))


def recurrence_flops(text_config):
    """FLOPs of one token in one layer's recurrence, forward: S k, the update by v k^T, and S q take
    2 D D each a value head. Chunks take more, which is how and not what is computed."""
    state = text_config.linear_key_head_dim * text_config.linear_value_head_dim
    return 6 * text_config.linear_num_value_heads * state


def project(layer, hidden_states):
    """-> q, k and v side by side [P, C], gate z [P, V, D], logits of beta and of the decay [P, V].
    Qwen3-Next has them in two matrices, ordered by key head; Qwen3.5 in four."""
    if hasattr(layer, "in_proj_qkvz"):
        q, k, v, z, b, a = (
            x[0]
            for x in layer.fix_query_key_value_ordering(
                layer.in_proj_qkvz(hidden_states), layer.in_proj_ba(hidden_states)
            )
        )
        return torch.cat([x.flatten(1) for x in (q, k, v)], 1), z, b, a
    z = layer.in_proj_z(hidden_states)[0].unflatten(-1, (-1, layer.head_v_dim))
    b, a = layer.in_proj_b(hidden_states)[0], layer.in_proj_a(hidden_states)[0]
    return layer.in_proj_qkv(hidden_states)[0], z, b, a


@torch.compiler.disable  # the kernel cannot be traced, and each row has another number of levels
def mix(qkv_PC, weight_CW, decay_PV, beta_PV, trie, shape):
    """Convolution and recurrence over the tree -> [P, V, D]. shape: (H, its D, V, its D)."""
    key_heads, key_dim, value_heads, value_dim = shape
    sizes = [key_heads * key_dim, key_heads * key_dim, value_heads * value_dim]
    conv = _compiled_convolve() if qkv_PC.is_cuda else convolve
    qkv = conv(qkv_PC, weight_CW, trie.seam_rows, trie.seam_taps, sizes, key_dim)
    inputs = [*qkv, decay_PV, beta_PV]
    if not trie.in_order:
        inputs = [Spread.apply(x, trie.order, trie.pick, trie.twice) for x in inputs]
    q, k, v, decay, beta = (x.split(trie.sizes) for x in inputs)
    rule = chunked_rule_cuda if qkv_PC.is_cuda else chunked_rule_torch
    outs, kept = [], [decay_PV.new_zeros(1, value_heads, key_dim, value_dim)]
    for i, level in enumerate(trie.levels):
        out, states = rule(
            q[i].unflatten(-1, (key_heads, key_dim)),
            k[i].unflatten(-1, (key_heads, key_dim)),
            v[i].unflatten(-1, (value_heads, value_dim)),
            decay[i],
            beta[i],
            level,
            torch.cat(kept).index_select(0, level.starts) if i else None,
            keep_states=i + 1 < len(trie.levels),
        )
        outs.append(out)
        kept.append(states)
    out_R = torch.cat(outs)
    return out_R if trie.in_order else Collect.apply(out_R, trie.order, trie.pick, trie.twice)


def convolve(x_PC, weight_CW, seam_rows, seam_taps, sizes, key_dim):
    """Depthwise causal convolution and SiLU, each token over its own predecessors. -> q, k and v
    [P, size] each, q and k of length 1 in every head.

    In a depth-first row a token's predecessors are its neighbours, but for the first tokens of
    segments (seams), which are computed apart. Sums are float32, as the server's kernel has them.
    """
    width = weight_CW.shape[1]
    padded = F.pad(x_PC, (0, 0, width - 1, 0))
    weight_WC = weight_CW.T.float()
    out_PC = sum(padded[i : i + len(x_PC)].float() * weight_WC[i] for i in range(width))
    seam = (padded[seam_taps].float() * weight_WC).sum(1)
    out_PC = F.silu(out_PC).to(x_PC.dtype).index_copy(0, seam_rows, F.silu(seam).to(x_PC.dtype))
    q, k, v = out_PC.split(sizes, -1)
    return unit_heads(q, key_dim), unit_heads(k, key_dim), v.contiguous()


def unit_heads(x, dim):
    """Each head of x [P, heads * dim] divided by its length. Here and not in the kernels, which
    flash-linear-attention tunes anew, for half a minute, whenever a row has another size."""
    heads = x.unflatten(-1, (-1, dim)).float()
    scale = torch.rsqrt(heads.square().sum(-1, keepdim=True) + 1e-6)
    return (heads * scale).to(x.dtype).flatten(1)


@functools.cache
def _compiled_convolve():
    return torch.compile(convolve)


class Spread(torch.autograd.Function):
    """Rows from packed order [P] into the order of the runs [R]. As an index_select its backward
    would add up row by row, in bfloat16; only rows that are there twice need a sum."""

    @staticmethod
    def forward(ctx, x, order, pick, twice):
        ctx.save_for_backward(order, pick, twice)
        return x.index_select(0, order)

    @staticmethod
    def backward(ctx, grad):
        order, pick, twice = ctx.saved_tensors
        found = grad.index_select(0, pick)
        return found.index_add_(0, order[twice], grad[twice]), None, None, None


class Collect(torch.autograd.Function):
    """Rows from the order of the runs [R] back into packed order [P], the way back of Spread."""

    @staticmethod
    def forward(ctx, x, order, pick, twice):
        ctx.save_for_backward(order, twice)
        return x.index_select(0, pick)

    @staticmethod
    def backward(ctx, grad):
        order, twice = ctx.saved_tensors
        return grad.index_select(0, order).index_fill_(0, twice, 0), None, None, None


def chunked_rule_cuda(q, k, v, decay, beta, level, states, keep_states):
    """All runs of a level on CUDA. q, k [T, H, D], v [T, V, D], decay (float32) and beta [T, V],
    states [N, V, D, D] float32 or None (zeros) -> out [T, V, D], the runs' final states or None."""
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule

    out, states = chunk_gated_delta_rule(
        *(x[None] for x in (q, k, v, decay, beta)),
        initial_state=states,
        output_final_state=keep_states,
        cu_seqlens=level.cu_seqlens,
        chunk_indices=level.chunk_indices,
    )
    return out[0], states


def chunked_rule_torch(q, k, v, decay, beta, level, states, keep_states):
    """The same in torch, the runs of a level side by side, padded at their ends: a token of zeros
    changes no state."""
    repeats = v.shape[1] // q.shape[1]
    q, k = q.repeat_interleave(repeats, 1), k.repeat_interleave(repeats, 1)
    out, states = _torch_form()(
        *(pad_sequence(x.split(level.lengths), True) for x in (q, k, v, decay, beta)),
        chunk_size=CHUNK,
        initial_state=states,
        output_final_state=keep_states,
    )
    return torch.cat([run[:size] for run, size in zip(out, level.lengths)]), states


@functools.cache
def _torch_form():
    from transformers.models.qwen3_next import modeling_qwen3_next

    # Unwrapped: the wrapper would take flash-linear-attention wherever that is installed.
    return inspect.unwrap(modeling_qwen3_next.torch_chunk_gated_delta_rule)
