"""Prefix-tree rows: a token that several samples share is forwarded once, with its own history.

    visible(q, k)  <=>  k <= q < end[k]           sliding window W: and depth[q] - depth[k] < W

The samples of a row are folded into a radix trie and laid out depth-first. `depth` is a token's
position id, `end` is one past the last position of its segment's subtree: a key is visible while
its subtree is open. That one comparison is the whole tree mask. Block summaries follow from the
minimum and maximum of `end` in a block, so nothing is evaluated over queries x keys, and K/V are
neither gathered nor repeated.

Top to bottom: `Row` and `PackedRow`, masks (`TreeMask`), attention for transformers, the planner
that fills the micro-batches of a step.

Left out: images, dropout, chunked attention (Llama 4); gated DeltaNet layers are in deltanet.py.
A small tree to look at: python packing.py.  Test: pytest tests/test_packing.py
Speed: python bench/packing.py (CPU), python bench/attention.py (GPU)
"""
import copy
import functools
import importlib.util
import logging
import math
import queue
import threading
from collections import Counter
from dataclasses import dataclass, fields, replace
from types import SimpleNamespace

import numpy as np
import torch
import torch.nn.functional as F
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention

# P packed positions of a row (padding included), S segments, M loss terms, K sampler candidates of
# a term; in attention H query heads, Q queries, N keys.

log = logging.getLogger("espalier")


# ---------------------------------------------------------------- rows


class Segment:
    """An edge of the trie: a run of tokens that the same samples share."""

    __slots__ = ("tokens", "depth", "parent", "children", "start")

    def __init__(self, tokens, depth, parent):
        self.tokens = tokens  # a view into the ids of the sample that brought them
        self.depth = depth  # position id of the first token
        self.parent = parent
        self.children = {}  # first token -> Segment
        self.start = 0  # packed position of the first token, once the row is packed


class Row:
    """What one process forwards in one micro-batch: a radix trie of samples.

    The budget bounds unique tokens, and loss terms too: samples that share everything add no token,
    and such a row would never be full. A loss term is (packed position whose hidden state predicts
    the target, target). A position may carry terms of several samples with different targets, so
    the trie forks where the samples differ and not one token earlier.
    """

    def __init__(self, token_budget):
        self.token_budget = token_budget
        self.samples, self.groups = [], set()
        self.n_tokens = self.n_terms = self.raw_tokens = 0
        self.cost = 0  # visible (query, key) pairs: the attention's work, exactly
        self._root = Segment(np.empty(0, np.int32), 0, None)
        self._leaves = []  # where each sample's last token was put
        self._found = None  # (sample, *its _find): fits() and add() walk the trie once

    def _find(self, sample):
        """The segment in which the trie and the sample part, and how many tokens they share."""
        if self._found is not None and self._found[0] is sample:
            return self._found[1:]
        ids, segment, shared = sample.input_ids, self._root, 0
        size = len(ids)
        while shared < size:
            child = segment.children.get(ids.item(shared))
            if child is None:
                break
            segment, n = child, min(len(child.tokens), size - shared)
            differs = child.tokens[:n] != ids[shared : shared + n]
            first = int(differs.argmax())
            if differs[first]:
                shared += first
                break
            shared += n
        self._found = (sample, segment, shared)
        return segment, shared

    def fits(self, sample):
        """Whether tokens and loss terms stay within the budget with the sample added."""
        tokens = self.n_tokens + len(sample.input_ids) - self._find(sample)[1]
        terms = self.n_terms + int(np.count_nonzero(sample.trained))
        return max(tokens, terms) <= self.token_budget

    def added_cost(self, sample):
        """Pairs that the sample would add: each new token sees its whole history and itself."""
        size, shared = len(sample.input_ids), self._find(sample)[1]
        return (size - shared) * (shared + 1 + size) // 2

    def add(self, sample):
        check_sample(sample)
        if not self.fits(sample):
            raise ValueError(
                f"{_name(sample)} with {len(sample.input_ids)} tokens does not fit a row of "
                f"token_budget={self.token_budget} that holds {self.n_tokens} tokens and "
                f"{self.n_terms} loss terms; ask fits() first")
        ids, size, cost = sample.input_ids, len(sample.input_ids), self.added_cost(sample)
        leaf, shared = self._find(sample)
        if shared < size:
            if shared < leaf.depth + len(leaf.tokens):
                leaf = self._split(leaf, shared - leaf.depth)
            leaf.children[ids.item(shared)] = leaf = Segment(ids[shared:], shared, leaf)
        self.samples.append(sample)
        self.groups.add(sample.group_id)
        self._leaves.append(leaf)
        self._found = None
        self.n_tokens += size - shared
        self.n_terms += int(np.count_nonzero(sample.trained))
        self.raw_tokens += size
        self.cost += cost

    def _split(self, segment, inside):
        """Cut a segment in two and return the upper half. The object stays the lower half, so that
        samples which end in that half still do."""
        upper = Segment(segment.tokens[:inside], segment.depth, segment.parent)
        upper.children[segment.tokens.item(inside)] = segment
        segment.parent.children[segment.tokens.item(0)] = upper
        segment.tokens, segment.depth = segment.tokens[inside:], segment.depth + inside
        segment.parent = upper
        return upper

    def pack(self, pad_to=None):
        """Lay the trie out depth-first, padded to `pad_to` positions (see `bucket`)."""
        if not self.samples:
            raise ValueError("cannot pack an empty row: every row needs at least one sample")
        n = self.n_tokens
        padded = n if pad_to is None else pad_to
        if padded < n:
            raise ValueError(f"pad_to={pad_to} is less than the row's {n} tokens")
        segments, parents = [], []
        stack = [(child, -1) for child in reversed(self._root.children.values())]
        while stack:
            segment, parent = stack.pop()
            stack.extend((child, len(segments)) for child in reversed(segment.children.values()))
            segments.append(segment)
            parents.append(parent)
        sizes_S = np.array([len(segment.tokens) for segment in segments])
        depths_S = np.array([segment.depth for segment in segments])
        stops_S = np.cumsum(sizes_S)
        closes_S = stops_S.tolist()  # the end of the subtree; backwards, children come first
        for i in range(len(segments) - 1, -1, -1):
            segments[i].start = int(stops_S[i] - sizes_S[i])
            if parents[i] >= 0:
                closes_S[parents[i]] = max(closes_S[parents[i]], closes_S[i])
        input_ids, position_ids = np.zeros(padded, np.int64), np.zeros(padded, np.int64)
        end = np.arange(1, padded + 1, dtype=np.int32)  # padding sees itself: no softmax is empty
        input_ids[:n] = np.concatenate([segment.tokens for segment in segments])
        position_ids[:n] = _ranges(depths_S, sizes_S)
        end[:n] = np.repeat(closes_S, sizes_S)
        layout = np.stack([stops_S - sizes_S, stops_S, parents, depths_S], axis=1)
        return PackedRow(
            input_ids=input_ids, position_ids=position_ids, end=end,
            segments=layout.astype(np.int32), n_tokens=n, visible_pairs=self.cost,
            raw_tokens=self.raw_tokens, **self._terms())

    def _terms(self):
        """The loss terms, sample after sample, as flat arrays."""
        samples, pieces = self.samples, []  # pieces: (packed start, tokens), root to leaf
        for sample, leaf in zip(samples, self._leaves):
            stop, path = len(sample.input_ids), []
            while leaf is not self._root:
                if leaf.depth < stop:  # else a later split put the sample's end into the upper half
                    path.append((leaf.start, stop - leaf.depth))
                    stop = leaf.depth
                leaf = leaf.parent
            pieces.extend(reversed(path))
        packed = _ranges(*np.array(pieces).T)  # samples laid end to end -> packed position
        ids = np.concatenate([s.input_ids for s in samples])
        raw_M = np.flatnonzero(np.concatenate([s.trained for s in samples]))
        counts = [int(np.count_nonzero(s.trained)) for s in samples]
        log_probs = np.concatenate([s.sampler_log_probs for s in samples])
        width = max(s.top_ids.shape[1] for s in samples)
        terms = dict(
            # The one place that shifts: a token is predicted where the token before it in its own
            # sample is packed. No first token is trained, so raw - 1 stays within the sample.
            term_positions=packed[raw_M - 1],
            term_targets=ids[raw_M].astype(np.int64),
            term_samples=np.repeat(np.arange(len(samples)), counts),
            sampler_log_probs=log_probs[raw_M].astype(np.float32),
            advantages=np.repeat(np.array([s.advantage for s in samples], np.float32), counts),
            top_ids=np.concatenate([_widen(s.top_ids, width, 0) for s in samples], dtype=np.int64),
            top_log_probs=np.concatenate([_widen(s.top_log_probs, width, np.nan) for s in samples]),
            set_ids=None, set_offsets=None)
        without_set = [s for s in samples if s.set_ids is None]
        if not without_set:
            widths_M = np.concatenate([np.diff(s.set_offsets) for s in samples])
            terms["set_ids"] = np.concatenate([s.set_ids for s in samples], dtype=np.int64)
            terms["set_offsets"] = np.append(0, np.cumsum(widths_M, dtype=np.int64))
        elif len(without_set) < len(samples):
            raise ValueError(f"{_name(without_set[0])} has no candidate set, others in its row do: "
                             "the log-probs of a run are normalised over sets, or over none")
        return terms


@dataclass
class PackedRow:
    """One row, ready to forward: numpy arrays, or tensors after `.to(device)`."""

    input_ids: np.ndarray  # int64 [P]
    position_ids: np.ndarray  # int64 [P]: depth in the tree
    end: np.ndarray  # int32 [P]: one past the subtree; i + 1 for padding
    segments: np.ndarray  # int32 [S, 4]: start, stop, parent or -1, depth; depth-first, no padding
    term_positions: np.ndarray  # int64 [M]: the hidden state there predicts ...
    term_targets: np.ndarray  # int64 [M]: ... this token
    term_samples: np.ndarray  # int64 [M]: the sample's index in the row
    sampler_log_probs: np.ndarray  # float32 [M]; a missing one (NaN, -inf, -9999) stays as it came
    advantages: np.ndarray  # float32 [M]
    top_ids: np.ndarray  # int64 [M, K]
    top_log_probs: np.ndarray  # float32 [M, K]
    set_ids: np.ndarray | None  # int64 [m]: candidate sets of the terms, as CSR
    set_offsets: np.ndarray | None  # int64 [M + 1]
    n_tokens: int  # without padding
    visible_pairs: int  # (query, key) pairs of full attention without padding
    raw_tokens: int  # before sharing
    host: "PackedRow | None" = None  # the numpy row that tensors were made from

    def to(self, device):
        arrays = {f.name: getattr(self, f.name) for f in fields(self)}
        tensors = {name: torch.from_numpy(array).to(device, non_blocking=True)
                   for name, array in arrays.items() if isinstance(array, np.ndarray)}
        return replace(self, **tensors, host=self)

    def pairs(self, window=None):
        """Visible (query, key) pairs of a layer with this sliding window, for FLOPs."""
        seen = self.position_ids[: self.n_tokens] + 1
        return int((seen if window is None else seen.clip(max=window)).sum())


def pack_row(samples, token_budget, pad=None):
    """Pack the samples of one process. `pad`: unpadded length -> padded length, e.g. `bucket`."""
    row = Row(token_budget)
    for sample in samples:
        row.add(sample)
    return row.pack(pad and pad(row.n_tokens))


def bucket(n, multiple=128, steps=16):
    """Round a length up so that few lengths occur (torch.compile makes one graph for each): the
    step is 1/16 of the power of two below n, so padding is under 6.3%, and 2% on average."""
    step = max(multiple, 2 ** ((n - 1).bit_length() - 1) // steps) if n > 1 else multiple
    return -(-n // step) * step


def check_sample(sample, vocab_size=None):
    """Raise ValueError naming what is wrong with a sample. One without trained tokens passes."""
    size, n = len(sample.input_ids), int(np.count_nonzero(sample.trained))
    if size == 0:
        raise ValueError(f"{_name(sample)} has no tokens; drop such rollouts where they are made")
    wanted = {"trained": size, "sampler_log_probs": size, "top_ids": n, "top_log_probs": n,
              "set_offsets": n + 1}
    for name, length in wanted.items():
        array = getattr(sample, name)
        if array is not None and len(array) != length:
            raise ValueError(f"{_name(sample)}: {name} has length {len(array)} instead of {length} "
                             f"({size} tokens, {n} of them trained)")
    if sample.trained[0]:
        raise ValueError(f"{_name(sample)} trains its first token, which nothing predicts")
    if not math.isfinite(sample.advantage):
        raise ValueError(f"{_name(sample)} has advantage {sample.advantage}; rollouts without a "
                         "reward must be left out, see compute_advantages")
    for name in ("input_ids", "top_ids") if vocab_size is not None else ():
        ids = getattr(sample, name)
        if ids.size and not 0 <= (low := int(ids.min())) <= (high := int(ids.max())) < vocab_size:
            raise ValueError(
                f"{_name(sample)}: {name} holds token {low if low < 0 else high}, the model's "
                f"vocabulary ends at {vocab_size}; server and trainer must load the same model")


def _name(sample):
    return f"sample (group {sample.group_id}, row {sample.row_index})"


def _ranges(starts, sizes):
    """s0, s0 + 1, ... (sizes[0] numbers), s1, s1 + 1, ... (sizes[1] numbers), ..."""
    stops = np.cumsum(sizes)
    return np.arange(stops[-1]) + np.repeat(starts - stops + sizes, sizes)


def _widen(array, width, fill):
    missing = width - array.shape[1]
    return np.pad(array, ((0, 0), (0, missing)), constant_values=fill) if missing else array


# ---------------------------------------------------------------- masks


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
    indices[rows, _ranges(np.zeros_like(counts), counts)] = columns
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
        head_dim = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
        for window in layer_windows(text):
            for backend in backends:
                if backend == "sdpa":
                    self.chunks(window)
                elif backend == "varlen":
                    self.paths()
                else:
                    self.block_mask(window, self.block_size(backend, head_dim))
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
            blocks = [tensor.to(end.device) for form in (partial, full, partial.T, full.T)
                      for tensor in _ordered(form)]
            self._block_masks[window, block_size] = BlockMask(
                (size, size), *blocks, BLOCK_SIZE=block_size,
                mask_mod=visible if window is None else visible_in_window)
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
            keys = _ranges(*np.array([piece for path in paths for piece in path]).T)
            sizes_q = [stop - start for start, stop, _, _ in segments]
            sizes_k = [depth + stop - start for start, stop, _, depth in segments]
            cumulative = [np.cumsum([0, *sizes], dtype=np.int32) for sizes in (sizes_q, sizes_k)]
            tensors = [torch.from_numpy(x).to(self.end.device) for x in (*cumulative, keys)]
            self._paths = (_varlen_kernel(), *tensors, max(sizes_q), max(sizes_k))
        return self._paths


def layer_windows(text_config):
    """The sliding windows that a model's layers use; None stands for full attention."""
    window = getattr(text_config, "sliding_window", None)
    kinds = getattr(text_config, "layer_types", None)
    if kinds is None:
        return [window]  # all layers alike: Llama (no window), Mistral
    if "chunked_attention" in kinds:
        raise ValueError(f"{text_config.model_type}: chunked attention cannot run over a tree yet")
    windows = {window if kind == "sliding_attention" else None for kind in kinds}
    return sorted(windows, key=lambda window: window or 0)


def _refuse_tracing():
    if torch.compiler.is_compiling():
        raise RuntimeError("a compiled layer asks for a mask that does not exist yet: call "
                           "TreeMask.prepare(model.config) before the forward")


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
        raise ValueError("attention=flash needs flash-attn-4, a Hopper or Blackwell GPU, and "
                         "deterministic algorithms off; use auto or flex")
    if backend in ("flash", "varlen") and not half:
        raise ValueError(f"attention={backend} needs bfloat16 or float16 and got {dtype}; use flex")
    if backend in ("flash", "varlen") and sinks:
        raise ValueError(f"attention={backend} cannot train attention sinks; use flex or sdpa")
    return backend


def tree_attention(module, query, key, value, attention_mask=None, *, tree=None, scaling=None,
                   sliding_window=None, softcap=None, s_aux=None, dropout=0.0, **unused):
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
    backend = choose_backend(tree.backend, device_type=kind, flash_ok=tree.flash_ok,
                             head_dim=head_dim, dtype=dtype, sinks=s_aux is not None)
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
        query, key, value,
        score_mod=capped if softcap is not None else None,
        block_mask=block_mask,
        scale=scaling,
        enable_gqa=query.shape[1] != key.shape[1],
        kernel_options={"BACKEND": "FLASH" if backend == "flash" else "TRITON"},
        return_aux=AuxRequest(lse=True) if sinks is not None else None)
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
            outs.append(F.scaled_dot_product_attention(
                q, k, v, attn_mask=visible_QN, scale=scaling, enable_gqa=repeats > 1))
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
        cu_seqlens_q=cu_q, cu_seqlens_k=cu_k, max_seqlen_q=longest_q, max_seqlen_k=longest_k,
        softmax_scale=scaling, causal=True, **options)
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


# ---------------------------------------------------------------- planner

END = object()  # what a source of samples returns after its last one
POLL_S = 0.5  # how often the planner's thread looks whether it was closed
OVERSIZE_LIMIT = 1000  # oversize samples on end that mean the budget is wrong, not the samples


@dataclass
class Plan:
    """One optimizer step: for each micro-batch the row of each process. Raw samples are what gets
    sent, and each process packs its own. A row without loss terms only keeps step with the others
    (see lossless_copy); it counts as padding, not as work."""

    step: int
    micro_batches: list  # of lists of Row
    dropped: Counter  # samples dropped since the plan before: oversize, stale, untrained

    def samples(self, rank):
        """The raw samples of one process, micro-batch by micro-batch."""
        return [batch[rank].samples for batch in self.micro_batches]

    @property
    def rows(self):
        return [row for batch in self.micro_batches for row in batch if row.n_terms]

    @property
    def n_trained(self):
        """Trained tokens of each micro-batch over all processes: what its loss is divided by."""
        return [sum(row.n_terms for row in batch) for batch in self.micro_batches]

    @property
    def n_tokens(self):
        return sum(row.n_tokens for row in self.rows)

    @property
    def n_samples(self):
        return sum(len(row.samples) for row in self.rows)

    @property
    def n_groups(self):
        return len(set().union(*(row.groups for row in self.rows)))


def place(rows, sample):
    """The row that takes the sample, or None when the micro-batch has to close first."""
    def least_loaded(candidates):
        by_cost = sorted(candidates, key=lambda row: row.cost)
        return next((row for row in by_cost if row.fits(sample)), None)

    home = [row for row in rows if sample.group_id in row.groups]
    if not home:
        return least_loaded(rows)
    if (row := least_loaded(home)) is not None:
        return row
    # Splitting the group forwards its prompt again: only to give a process something to do, or
    # where the most loaded row, which sets the micro-batch's time, stays the most loaded. Otherwise
    # the sample waits for a fresh row, and what follows of its group joins it there.
    busiest = max(row.cost for row in rows)
    return least_loaded(row for row in rows
                        if not row.samples or row.cost + row.added_cost(sample) <= busiest)


def lossless_copy(sample):
    """The sample without loss terms. When the data end, a process without samples forwards it, so
    that every process takes part in every collective."""
    clone = copy.copy(sample)
    clone.trained, clone.metrics = np.zeros_like(sample.trained), {}
    clone.top_ids, clone.top_log_probs = sample.top_ids[:0], sample.top_log_probs[:0]
    if sample.set_ids is not None:
        clone.set_ids, clone.set_offsets = sample.set_ids[:0], sample.set_offsets[:1]
    return clone


def plan_steps(samples, *, token_budget, world_size, gradient_accumulation_steps, first_step=0,
               is_stale=None, vocab_size=None):
    """Yield the Plan of one optimizer step after another until the iterable `samples` ends.

    A micro-batch closes when every row has a sample and the next sample has no place; that sample
    opens the next micro-batch, possibly of the next step. `is_stale(sample, step)` is asked for
    the step being filled. The last step may have fewer micro-batches than the others.
    """
    if token_budget < 2 or world_size < 1 or gradient_accumulation_steps < 1:
        raise ValueError(f"{token_budget=}, {world_size=}, {gradient_accumulation_steps=}: "
                         "at least 2, 1 and 1")
    stream, sample, step = iter(samples), None, first_step
    oversize = []  # lengths of the oversize samples since a sample was last placed
    while sample is not END:
        batches, dropped, rows = [], Counter(), [Row(token_budget) for _ in range(world_size)]
        while len(batches) < gradient_accumulation_steps:
            if sample is None:
                sample = next(stream, END)
            if sample is END or len(oversize) == OVERSIZE_LIMIT:
                break
            check_sample(sample, vocab_size)
            if len(sample.input_ids) > token_budget:
                dropped["oversize"] += 1
                oversize.append(len(sample.input_ids))
                sample = None
            elif not sample.trained.any():
                dropped["untrained"] += 1
                sample = None
            elif is_stale is not None and is_stale(sample, step):
                dropped["stale"] += 1
                sample = None
            elif (row := place(rows, sample)) is not None:
                row.add(sample)
                sample, oversize = None, []
            else:
                batches.append(rows)
                rows = [Row(token_budget) for _ in range(world_size)]
        if sample is END and any(row.samples for row in rows):
            shortest = min((s for row in rows for s in row.samples), key=lambda s: len(s.input_ids))
            for row in rows:
                if not row.samples:
                    row.add(lossless_copy(shortest))
            batches.append(rows)
        if dropped["oversize"]:
            log.warning("step %d: dropped %d samples longer than token_budget=%d; raise it",
                        step, dropped["oversize"], token_budget)
        nothing_fits = sample is END and step == first_step and not batches and oversize
        if nothing_fits or len(oversize) == OVERSIZE_LIMIT:
            raise ValueError(f"token_budget={token_budget} is smaller than every one of the last "
                             f"{len(oversize)} samples (the shortest has {min(oversize)} tokens); "
                             "raise it, at best to the server's max_model_len")
        if batches:
            yield Plan(step, batches, dropped)
        step += 1


def batch_metrics(plan, token_budget, pad=None):
    """The specification's `batch/*` of one step over all processes, as (name, value, weight).

    Forwarded tokens are the unique ones, as in num_tokens, but masked_token_frac compares trained
    tokens with tokens before sharing: one position may train several samples. `pad` is the
    processes' padding; unlike the specification's it is forwarded.
    """
    rows, n_rows = plan.rows, sum(len(batch) for batch in plan.micro_batches)
    raw, tokens = sum(row.raw_tokens for row in rows), plan.n_tokens
    trained = sum(plan.n_trained)
    padded = sum(pad(row.n_tokens) for row in rows) if pad else tokens
    records = [
        ("batch/forwarded_tokens_per_step", tokens, 1),
        ("batch/trained_tokens_per_step", trained, 1),
        ("batch/samples_per_step", plan.n_samples, 1),
        ("batch/groups_per_step", plan.n_groups, 1),
        ("batch/microbatches_per_step", len(plan.micro_batches), 1),
        ("batch/masked_token_frac", (raw - trained) / raw, raw),
        ("batch/samples_per_row", plan.n_samples / n_rows, n_rows),
        ("batch/row_tokens_mean", tokens / n_rows, n_rows),
        ("batch/row_tokens_max", max(row.n_tokens for row in rows), 1),
        ("batch/row_fill_frac", tokens / (token_budget * n_rows), n_rows),
        ("batch/packing_ratio", raw / tokens, tokens),
        ("batch/pad_frac", (padded - tokens) / padded, padded),
        ("batch/dropped_oversize_count", plan.dropped["oversize"], 1)]
    for batch in plan.micro_batches:
        costs = [row.cost if row.n_terms else 0 for row in batch]
        records.append(("batch/row_imbalance", max(costs) * len(costs) / sum(costs), 1))
    return [(name, float(value), weight) for name, value, weight in records]


class Planner:
    """Plans ahead of the trainer, in a thread; rank 0 has one. Options: those of plan_steps.

    `pull(timeout)` returns a sample, None if none came in time, or END. At most `ahead` steps are
    planned or being planned beyond those that next() has handed out, so that samples do not age
    here and `is_stale` knows the step.
    """

    def __init__(self, pull, *, ahead=1, **options):
        if ahead < 1:
            raise ValueError(f"{ahead=}: the planner needs at least one step to plan ahead")
        self.n_pulled = 0
        self._pull, self._options, self._last = pull, options, None
        self._slots, self._ready = threading.Semaphore(ahead), queue.Queue()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="planner", daemon=True)
        self._thread.start()

    def _samples(self):
        while not self._closed.is_set():
            sample = self._pull(POLL_S)
            if sample is END:
                return
            if sample is not None:
                self.n_pulled += 1
                yield sample

    def _run(self):
        try:
            plans = plan_steps(self._samples(), **self._options)
            while self._slots.acquire() and not self._closed.is_set():
                plan = next(plans, END)
                self._ready.put(plan)
                if plan is END:
                    return
        except Exception as error:  # whatever it is, next() raises it in the trainer
            self._ready.put(error)

    def next(self, timeout):
        """The next Plan, or None after the last one. Raises what the thread raised."""
        if self._last is None:
            try:
                item = self._ready.get(timeout=timeout)
            except queue.Empty as error:
                raise TimeoutError(
                    f"no step could be planned in {timeout} s ({self.n_pulled} samples since the "
                    "start); are rollouts still coming?") from error
            if isinstance(item, Plan):
                self._slots.release()
                return item
            self._last = item  # END or an exception: the thread is gone
        if self._last is END:
            return None
        raise self._last

    def close(self):
        self._closed.set()
        self._slots.release()
        self._thread.join(timeout=10 * POLL_S)


# ---------------------------------------------------------------- a picture for readers


def draw(row, words):
    """A packed row as text: one line a token with what it sees, then segments and loss terms."""
    lines = ["position  token  depth  end  sees"]
    for q in range(row.n_tokens):
        sees = " ".join("x" if k <= q < row.end[k] else "." for k in range(row.n_tokens))
        word = words[row.input_ids[q]]
        lines.append(f"{q:8}  {word:>5}  {row.position_ids[q]:5}  {row.end[q]:3}  {sees}")
    for i, (start, stop, parent, depth) in enumerate(row.segments):
        text = " ".join(words[t] for t in row.input_ids[start:stop])
        above = f"continues segment {parent}" if parent >= 0 else "is a root"
        lines.append(f"segment {i} [{text}] {above}, depth {depth}")
    for i, position, target in zip(row.term_samples, row.term_positions, row.term_targets):
        lines.append(f"loss of rollout {i}: {words[target]} is predicted at position {position}")
    lines.append(f"{row.raw_tokens} tokens packed into {row.n_tokens}; "
                 f"{row.visible_pairs} visible pairs of {row.n_tokens**2}")
    return "\n".join(lines)


def main():
    words = ["p1", "p2", "p3", "a1", "a2", "b1", "b2", "c1"]
    none = np.zeros((2, 0), np.int32)  # two trained tokens, no sampler candidates
    row = Row(token_budget=16)
    for i, text in enumerate(["p1 p2 p3 a1 a2", "p1 p2 p3 b1 b2", "p1 p2 p3 b1 c1"]):
        print(f"rollout {i}: {text}")
        row.add(SimpleNamespace(
            input_ids=np.array([words.index(word) for word in text.split()], np.int32),
            trained=np.array([False, False, False, True, True]),
            sampler_log_probs=np.zeros(5, np.float32), advantage=1.0, group_id=0, row_index=0,
            top_ids=none, top_log_probs=none.astype(np.float32), set_ids=None, set_offsets=None))
    print(draw(row.pack(), words))


if __name__ == "__main__":
    main()
