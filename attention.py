"""Attention over a packed row: the tree mask in the form that each kernel wants.

    visible(q, k)  <=>  k <= q < end[k]           sliding window W: and depth[q] - depth[k] < W

One function, registered with transformers as "espalier_tree", with four backends:

    flash    FlexAttention on flash-attn-4      Hopper and Blackwell, 16 bit, head dim up to 128
    flex     FlexAttention on Triton            any GPU; attention sinks too
    varlen   K/V gathered once per segment      the specification's way: a choice and a cross-check
    sdpa     dense masks, query chunk by chunk  CPU, tests

Block masks follow from the minimum and maximum of `end` in a block: nothing is evaluated over
queries x keys, and K/V are neither gathered nor repeated (but by varlen).

Left out: dropout, chunked attention (Llama 4).
Test: pytest tests/test_packing.py.  Speed: python bench/attention.py (GPU)
"""

import functools
import importlib.util
import math
import os

import numpy as np
import torch
import torch.nn.functional as F
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention

from packing import ranges

# H query heads, Q queries, N keys, P packed positions of a row.


def block_summary(end, depth, block_size=(128, 128), window=None):
    """Which blocks [P / BQ, P / BK] of the mask hold a visible pair, and which are all visible.

    Exact without a window. With one, `full` is exact; `some` may keep a block whose pairs are all
    too far apart, since depths are compared block by block: that costs time and nothing else.
    """
    q0, k0 = np.arange(0, len(end), block_size[0]), np.arange(0, len(end), block_size[1])
    q1 = np.minimum(q0 + block_size[0], len(end))[:, None] - 1
    k1 = np.minimum(k0 + block_size[1], len(end)) - 1
    lowest, highest = np.minimum.reduceat(end, k0), np.maximum.reduceat(end, k0)
    some = (q1 >= k0) & (q0[:, None] < highest)
    full = (q0[:, None] >= k1) & (q1 < lowest)
    if window is not None:
        lowest_Q, highest_Q = np.minimum.reduceat(depth, q0), np.maximum.reduceat(depth, q0)
        lowest_K, highest_K = np.minimum.reduceat(depth, k0), np.maximum.reduceat(depth, k0)
        some &= lowest_Q[:, None] - highest_K < window
        full &= highest_Q[:, None] - lowest_K < window
    return some, full


def _ordered(blocks):
    """Rows of bools -> how many are set in each row, and which (packed left, the rest unused)."""
    counts = blocks.sum(1)
    rows, columns = np.nonzero(blocks)
    indices = np.zeros(blocks.shape, np.int32)
    indices[rows, ranges(np.zeros_like(counts), counts)] = columns
    return tuple(torch.from_numpy(x)[None, None] for x in (counts.astype(np.int32), indices))


class TreeMask:
    """The tree mask of one packed row, in the form that each attention backend wants.

    Forms are made when first asked for and shared by all layers. A compiled layer cannot make them
    while it is traced: call `prepare(model.config)` first.
    """

    QUERY_CHUNK = 128  # of the dense form, which on a CPU is then 4 to 5 times faster than P x P

    def __init__(self, row, backend="auto"):
        if backend not in ("auto", "flash", "flex", "varlen", "sdpa"):
            raise ValueError(f"attention={backend!r}: choose auto, flash, flex, varlen or sdpa")
        self.backend = backend
        self.row = row.host or row  # numpy: summaries need no trip to the device and back
        device = row.end.device if row.host else torch.device("cpu")
        self.device_type = device.type
        self.end = torch.from_numpy(self.row.end).to(device)
        self.depth = torch.from_numpy(self.row.position_ids.astype(np.int32)).to(device)
        self.flash_ok, self.blackwell = _flash_support(device)
        self._block_masks, self._chunks, self._paths = {}, {}, None

    def prepare(self, config):
        """Make every form that a forward of this transformers model may ask for."""
        text, backends = config.get_text_config(), [self.backend]
        if self.backend == "auto":
            backends = ["flash", "flex"] if self.device_type == "cuda" else ["sdpa"]
        for window in layer_windows(text):
            for backend in backends:
                if backend == "sdpa":
                    self.chunks(window)
                elif backend == "varlen":
                    self.paths()
                else:
                    self.block_mask(window, self.block_size(backend, head_dim(text)))
        return self

    def block_size(self, backend, head_dim):
        """(queries, keys) a block: what the kernel's tiles divide."""
        if backend == "flash" and self.blackwell:
            return (256, 128)
        if backend == "flash" and head_dim > 128:
            return (128, 64)  # Hopper, and only where FLASH is forced: see choose_backend
        return (128, 128)

    def block_mask(self, window=None, block_size=(128, 128)):
        """FlexAttention's form, from the block summaries alone."""
        if (window, block_size) not in self._block_masks:
            _refuse_tracing()
            end, depth, size = self.end, self.depth, len(self.row.end)

            def visible(b, h, q, k):
                return (k <= q) & (q < end[k])

            def visible_in_window(b, h, q, k):
                return (k <= q) & (q < end[k]) & (depth[q] - depth[k] < window)

            some, full = block_summary(self.row.end, self.row.position_ids, block_size, window)
            partial = some & ~full
            # The backward wants the transpose as well. from_kv_blocks would make it on the device,
            # with some thirty kernels; here it is one more numpy call.
            blocks = [
                tensor.to(end.device)
                for form in (partial, full, partial.T, full.T)
                for tensor in _ordered(form)
            ]
            self._block_masks[window, block_size] = BlockMask(
                (size, size),
                *blocks,
                BLOCK_SIZE=block_size,
                mask_mod=visible if window is None else visible_in_window,
            )
        return self._block_masks[window, block_size]

    def chunks(self, window=None):
        """The dense form: (q0, q1, keys_N, visible_QN) for each stretch of queries. Its keys are
        those still open at q0 and the stretch itself, so work follows the tree and not P x P."""
        if window not in self._chunks:
            _refuse_tracing()
            end, depth, chunks = self.row.end, self.row.position_ids, []
            for q0 in range(0, len(end), self.QUERY_CHUNK):
                q = np.arange(q0, min(q0 + self.QUERY_CHUNK, len(end)))[:, None]
                k = np.append(np.flatnonzero(end[:q0] > q0), q)
                visible = (k <= q) & (q < end[k])
                if window is not None:
                    visible &= depth[q] - depth[k] < window
                    seen = visible.any(0)
                    k, visible = k[seen], visible[:, seen]
                tensors = [torch.from_numpy(x).to(self.end.device) for x in (k, visible)]
                chunks.append((q0, q0 + len(q), *tensors))
            self._chunks[window] = chunks
        return self._chunks[window]

    def paths(self):
        """The gathered form: (kernel, cu_seqlens_q, cu_seqlens_k, keys, longest segment, longest
        path), where `keys` lays the root-to-segment paths of all segments end to end."""
        if self._paths is None:
            _refuse_tracing()
            segments = self.row.segments.tolist()
            if self.row.n_tokens < len(self.row.end):  # padding: one more segment
                segments.append((self.row.n_tokens, len(self.row.end), -1, 0))
            paths = []
            for start, stop, parent, _ in segments:
                paths.append((paths[parent] if parent >= 0 else []) + [(start, stop - start)])
            keys = ranges(*np.array([piece for path in paths for piece in path]).T)
            sizes_q = [stop - start for start, stop, _, _ in segments]
            sizes_k = [depth + stop - start for start, stop, _, depth in segments]
            cumulative = [np.cumsum([0, *sizes], dtype=np.int32) for sizes in (sizes_q, sizes_k)]
            tensors = [torch.from_numpy(x).to(self.end.device) for x in (*cumulative, keys)]
            self._paths = (_varlen_kernel(), *tensors, max(sizes_q), max(sizes_k))
        return self._paths


def head_dim(text_config):
    """Size of a query or key head, which not every config names."""
    named = getattr(text_config, "head_dim", None)
    return named or text_config.hidden_size // text_config.num_attention_heads


def windows_by_layer(text_config):
    """The sliding window of each attention layer of a model; None stands for full attention."""
    window = getattr(text_config, "sliding_window", None)
    kinds = getattr(text_config, "layer_types", None)
    if kinds is None:  # all layers alike: Llama (no window), Mistral
        return [window] * text_config.num_hidden_layers
    if "chunked_attention" in kinds:
        raise ValueError(f"{text_config.model_type}: chunked attention cannot run over a tree yet")
    kinds = [kind for kind in kinds if kind != "linear_attention"]
    return [window if kind == "sliding_attention" else None for kind in kinds]


def layer_windows(text_config):
    """The different ones, those without first."""
    return sorted(set(windows_by_layer(text_config)), key=lambda window: window or 0)


def _refuse_tracing():
    if torch.compiler.is_compiling():
        raise RuntimeError(
            "a compiled layer asks for a mask that does not exist yet: call "
            "TreeMask.prepare(model.config) before the forward"
        )


def _flash_support(device):
    """Whether FlexAttention's FLASH backend can run here, and whether the GPU is a Blackwell."""
    if device.type != "cuda" or torch.version.hip:
        return False, False
    major = torch.cuda.get_device_capability(device)[0]
    try:
        installed = importlib.util.find_spec("flash_attn.cute") is not None
    except ModuleNotFoundError:
        installed = False
    # FLASH refuses a deterministic backward on Hopper, and wants more metadata on Blackwell.
    deterministic = torch.are_deterministic_algorithms_enabled()
    return installed and major in (9, 10) and not deterministic, major == 10


# ---------------------------------------------------------------- attention

ATTENTION = "espalier_tree"


def register_attention():
    """Make transformers know attn_implementation=ATTENTION."""
    from transformers import AttentionInterface, AttentionMaskInterface

    # flash-attn-4 compiles its kernels in each process, 20 s for a step, unless it may keep them
    os.environ.setdefault("FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED", "1")
    AttentionInterface.register(ATTENTION, tree_attention)
    AttentionMaskInterface.register(ATTENTION, lambda *args, **kwargs: None)  # TreeMask is the mask
    # A row length is a shape of its own. Beyond the limit (8 by default) Dynamo runs the function
    # eagerly without an error, and eager FlexAttention builds all P x P scores.
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, 64)


def choose_backend(backend, *, device_type, flash_ok, head_dim, dtype, sinks):
    """The backend of one attention call. A forced one that cannot work raises."""
    half = dtype in (torch.bfloat16, torch.float16)
    if backend == "auto":
        if device_type != "cuda":
            return "sdpa"  # FlexAttention has no backward on a CPU
        # Above head dim 128 Hopper's FLASH tiles do not divide a block of 128. Sinks need the
        # gradient of the log-sum-exp, which FLASH does not give.
        fast = flash_ok and half and head_dim <= 128 and head_dim % 8 == 0 and not sinks
        return "flash" if fast else "flex"
    if backend == "flash" and not flash_ok:
        raise ValueError(
            "attention=flash needs flash-attn-4, a Hopper or Blackwell GPU, and "
            "deterministic algorithms off; use auto or flex"
        )
    if backend in ("flash", "varlen") and not half:
        raise ValueError(f"attention={backend} needs bfloat16 or float16 and got {dtype}; use flex")
    if backend in ("flash", "varlen") and sinks:
        raise ValueError(f"attention={backend} cannot train attention sinks; use flex or sdpa")
    return backend


def tree_attention(
    module,
    query,
    key,
    value,
    attention_mask=None,
    *,
    tree=None,
    scaling=None,
    sliding_window=None,
    softcap=None,
    s_aux=None,
    dropout=0.0,
    **unused,
):
    """Attention function for transformers: [1, H, P, D] and fewer key heads -> [1, P, H, D].

    Models pass `sliding_window` (Mistral, Qwen, Gemma, gpt-oss), `softcap` (Gemma 2) and their
    sinks as `s_aux` (gpt-oss); `tree` comes from the caller of the model.
    """
    if tree is None:
        raise ValueError(f"{ATTENTION} needs the row's mask: model(..., tree=TreeMask(row))")
    if dropout:
        raise ValueError(f"attention dropout is {dropout}, and the sampler has none: set it to 0")
    kind, head_dim = query.device.type, query.shape[-1]
    # Under autocast a norm with float32 weights leaves q and k in float32 beside a bfloat16 v.
    autocast = torch.is_autocast_enabled(kind)
    dtype = torch.get_autocast_dtype(kind) if autocast else value.dtype
    query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
    scaling = head_dim**-0.5 if scaling is None else scaling
    backend = choose_backend(
        tree.backend,
        device_type=kind,
        flash_ok=tree.flash_ok,
        head_dim=head_dim,
        dtype=dtype,
        sinks=s_aux is not None,
    )
    if backend == "sdpa":
        out = _dense(query, key, value, tree.chunks(sliding_window), scaling, softcap, s_aux)
    elif backend == "varlen":
        out = _varlen(query, key, value, tree.paths(), scaling, sliding_window, softcap)
    else:
        block_mask = tree.block_mask(sliding_window, tree.block_size(backend, head_dim))
        out = _flex(query, key, value, block_mask, backend, scaling, softcap, s_aux)
    return out.transpose(1, 2).contiguous(), None


def _flex(query, key, value, block_mask, backend, scaling, softcap, sinks):
    def capped(score, b, h, q, k):
        return softcap * torch.tanh(score / softcap)

    # Inside a compiled layer flex_attention is traced with it; elsewhere on a GPU it comes compiled
    # by itself. On a CPU (forward only, a cross-check in tests) building all scores is fine.
    eager = query.device.type == "cuda" and not torch.compiler.is_compiling()
    out = (_compiled_flex() if eager else flex_attention)(
        query,
        key,
        value,
        score_mod=capped if softcap is not None else None,
        block_mask=block_mask,
        scale=scaling,
        enable_gqa=query.shape[1] != key.shape[1],
        kernel_options={"BACKEND": "FLASH" if backend == "flash" else "TRITON"},
        return_aux=AuxRequest(lse=True) if sinks is not None else None,
    )
    if sinks is None:
        return out
    # A sink is one more key, with logit s and value 0: out * exp(lse) / (exp(lse) + exp(s)).
    out, aux = out
    return out * torch.sigmoid(aux.lse - sinks.float()[:, None])[..., None].to(out.dtype)


@functools.cache
def _compiled_flex():
    return torch.compile(flex_attention, dynamic=False)


def _dense(query, key, value, chunks, scaling, softcap, sinks):
    outs = []
    repeats = query.shape[1] // key.shape[1]
    for q0, q1, keys_N, visible_QN in chunks:
        q, k, v = query[:, :, q0:q1], key.index_select(2, keys_N), value.index_select(2, keys_N)
        if softcap is None and sinks is None:
            outs.append(
                F.scaled_dot_product_attention(
                    q, k, v, attn_mask=visible_QN, scale=scaling, enable_gqa=repeats > 1
                )
            )
            continue
        k, v = k.repeat_interleave(repeats, 1), v.repeat_interleave(repeats, 1)
        scores_HQN = (q @ k.mT)[0].float() * scaling
        if softcap is not None:
            scores_HQN = softcap * torch.tanh(scores_HQN / softcap)
        scores_HQN = scores_HQN.masked_fill(~visible_QN, -math.inf)
        if sinks is not None:
            column = sinks.float()[:, None, None].expand(-1, q1 - q0, 1)
            scores_HQN = torch.cat([scores_HQN, column], -1)
        outs.append(scores_HQN.softmax(-1)[None, ..., : len(keys_N)].to(v.dtype) @ v)
    return torch.cat(outs, 2)


def _varlen(query, key, value, paths, scaling, window, softcap):
    """The specification's way: K/V gathered once per segment, then variable-length attention, in
    which a segment's queries are the last of its path. A choice, and a cross-check."""
    kernel, cu_q, cu_k, keys, longest_q, longest_k = paths
    options = {} if window is None else {"window_size": (window - 1, 0)}
    if softcap is not None:
        options["softcap"] = softcap
    out = kernel(
        query[0].transpose(0, 1),
        key[0].transpose(0, 1).index_select(0, keys),
        value[0].transpose(0, 1).index_select(0, keys),
        cu_seqlens_q=cu_q,
        cu_seqlens_k=cu_k,
        max_seqlen_q=longest_q,
        max_seqlen_k=longest_k,
        softmax_scale=scaling,
        causal=True,
        **options,
    )
    out = out[0] if isinstance(out, tuple) else out
    return out.transpose(0, 1)[None]


@functools.cache
def _varlen_kernel():
    """flash-attn-4 if installed, else the Hub's kernel for this GPU. Dynamo can trace neither, so
    a compiled layer breaks its graph there."""
    try:
        from flash_attn.cute import flash_attn_varlen_func
    except ImportError:
        from kernels import get_kernel

        if torch.version.hip:
            kernel = get_kernel("kernels-community/aiter-flash-attn", version=2)
        elif torch.cuda.get_device_capability()[0] >= 10:
            kernel = get_kernel("kernels-community/flash-attn4", version=1)
        else:
            kernel = get_kernel("kernels-community/flash-attn3", version=1)
        flash_attn_varlen_func = kernel.flash_attn_varlen_func
    return torch.compiler.disable(flash_attn_varlen_func)
