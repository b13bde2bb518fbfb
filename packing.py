"""Prefix-tree rows: a token that several samples share is forwarded once, with its own history.

    visible(q, k)  <=>  k <= q < end[k]           sliding window W: and depth[q] - depth[k] < W

The samples of a row are folded into a radix trie and laid out depth-first. `depth` is a token's
position id, `end` is one past the last position of its segment's subtree: a key is visible while
its subtree is open. That one comparison is the whole tree mask; attention.py gives it to the
kernels, planner.py decides which samples share a row.

Left out: images.
A small tree to look at: python packing.py.  Test: pytest tests/test_packing.py
Speed: python bench/packing.py
"""

import math
from dataclasses import dataclass, fields, replace
from types import SimpleNamespace

import numpy as np
import torch

# P packed positions of a row (padding included), S segments, M loss terms, K sampler candidates of
# a term.


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
                f"{self.n_terms} loss terms; ask fits() first"
            )
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
        position_ids[:n] = ranges(depths_S, sizes_S)
        end[:n] = np.repeat(closes_S, sizes_S)
        layout = np.stack([stops_S - sizes_S, stops_S, parents, depths_S], axis=1)
        return PackedRow(
            input_ids=input_ids,
            position_ids=position_ids,
            end=end,
            segments=layout.astype(np.int32),
            n_tokens=n,
            visible_pairs=self.cost,
            raw_tokens=self.raw_tokens,
            **self._terms(),
        )

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
        packed = ranges(*np.array(pieces).T)  # samples laid end to end -> packed position
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
            set_ids=None,
            set_offsets=None,
        )
        without_set = [s for s in samples if s.set_ids is None]
        if not without_set:
            widths_M = np.concatenate([np.diff(s.set_offsets) for s in samples])
            terms["set_ids"] = np.concatenate([s.set_ids for s in samples], dtype=np.int64)
            terms["set_offsets"] = np.append(0, np.cumsum(widths_M, dtype=np.int64))
        elif len(without_set) < len(samples):
            raise ValueError(
                f"{_name(without_set[0])} has no candidate set, others in its row do: "
                "the log-probs of a run are normalised over sets, or over none"
            )
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
        tensors = {
            name: torch.from_numpy(array).to(device, non_blocking=True)
            for name, array in arrays.items()
            if isinstance(array, np.ndarray)
        }
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
    wanted = {
        "trained": size,
        "sampler_log_probs": size,
        "top_ids": n,
        "top_log_probs": n,
        "set_offsets": n + 1,
    }
    for name, length in wanted.items():
        array = getattr(sample, name)
        if array is not None and len(array) != length:
            raise ValueError(
                f"{_name(sample)}: {name} has length {len(array)} instead of {length} "
                f"({size} tokens, {n} of them trained)"
            )
    if sample.trained[0]:
        raise ValueError(f"{_name(sample)} trains its first token, which nothing predicts")
    if not math.isfinite(sample.advantage):
        raise ValueError(
            f"{_name(sample)} has advantage {sample.advantage}; rollouts without a "
            "reward must be left out, see compute_advantages"
        )
    for name in ("input_ids", "top_ids") if vocab_size is not None else ():
        ids = getattr(sample, name)
        if ids.size and not 0 <= (low := int(ids.min())) <= (high := int(ids.max())) < vocab_size:
            raise ValueError(
                f"{_name(sample)}: {name} holds token {low if low < 0 else high}, the model's "
                f"vocabulary ends at {vocab_size}; server and trainer must load the same model"
            )


def _name(sample):
    return f"sample (group {sample.group_id}, row {sample.row_index})"


def ranges(starts, sizes):
    """s0, s0 + 1, ... (sizes[0] numbers), s1, s1 + 1, ... (sizes[1] numbers), ..."""
    stops = np.cumsum(sizes)
    return np.arange(stops[-1]) + np.repeat(starts - stops + sizes, sizes)


def _widen(array, width, fill):
    missing = width - array.shape[1]
    return np.pad(array, ((0, 0), (0, missing)), constant_values=fill) if missing else array


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
    lines.append(
        f"{row.raw_tokens} tokens packed into {row.n_tokens}; "
        f"{row.visible_pairs} visible pairs of {row.n_tokens**2}"
    )
    return "\n".join(lines)


def main():
    words = ["p1", "p2", "p3", "a1", "a2", "b1", "b2", "c1"]
    none = np.zeros((2, 0), np.int32)  # two trained tokens, no sampler candidates
    row = Row(token_budget=16)
    for i, text in enumerate(["p1 p2 p3 a1 a2", "p1 p2 p3 b1 b2", "p1 p2 p3 b1 c1"]):
        print(f"rollout {i}: {text}")
        row.add(
            SimpleNamespace(
                input_ids=np.array([words.index(word) for word in text.split()], np.int32),
                trained=np.array([False, False, False, True, True]),
                sampler_log_probs=np.zeros(5, np.float32),
                advantage=1.0,
                group_id=0,
                row_index=0,
                top_ids=none,
                top_log_probs=none.astype(np.float32),
                set_ids=None,
                set_offsets=None,
            )
        )
    print(draw(row.pack(), words))


if __name__ == "__main__":
    main()
