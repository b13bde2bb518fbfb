"""One conversation: what its turns are, which prompts can start one, turns to training samples.

Token ids go in and token ids come out. What is trained is what was sampled: generated text is
decoded for tools and rewards, and never encoded again for training.

    messages -- template.ChatTemplate --> prompt ids -- sampler.Sampler --> TurnRecords
    TurnRecords -- samples_from_turns() --> Samples, the only thing that reaches the trainer

Left out: images.
Test: pytest tests/test_chat.py
"""

import itertools
import uuid
from dataclasses import dataclass, field

import numpy as np

# Shapes: T tokens of a sample, n generated (or trained) tokens in order, K candidates in the
# sampler's head, m ids in all candidate sets together.


@dataclass(eq=False)
class Sample:
    """One sequence to train on. Flat arrays only: lists of Python floats cost seconds a step."""

    input_ids: np.ndarray  # int32[T]
    trained: np.ndarray  # bool[T]; [0] is False, since nothing predicts the first token
    sampler_log_probs: np.ndarray  # float32[T], valid where trained; NaN or <= -9998 is missing
    top_ids: np.ndarray  # int32[n, K], the sampler's head at each trained token
    top_log_probs: np.ndarray  # float32[n, K]; NaN or <= -9998: no such candidate
    versions: np.ndarray  # int32[T], weight version that generated the token; -1 where not trained
    set_ids: np.ndarray | None = None  # int32[m], candidate sets of truncated sampling, end to end
    set_offsets: np.ndarray | None = None  # int32[n + 1], where each trained token's set begins
    advantage: float = 0.0
    group_id: int = -1
    row_index: int = -1
    rollout_index: int = -1  # in its group
    closes_group: bool = False  # the last of its group's samples in the queue
    metrics: dict[str, float] = field(default_factory=dict)  # to be recorded when trained on
    created_at: float = 0.0  # time.time() when it was queued

    def own_tokens(self, group_size: int) -> int:
        """Tokens that it adds to a row which holds its group: its own, and its part of the prompt.
        The unit of the staleness limit, on both sides of the queue."""
        n_prompt = int(self.trained.argmax())
        return len(self.input_ids) - n_prompt + -(-n_prompt // group_size)


@dataclass(eq=False)
class TurnRecord:
    """One sampling request: the prompt sent to the sampler and the tokens it generated.

    `output_sampler_logprobs` and `output_sampling_mask` may be Python objects, as a custom rollout
    loop writes them, or the arrays that `Sampler` makes (a tuple), which are much cheaper.
    """

    prompt_ids: list[int]  # the whole prompt of this turn, earlier turns included
    output_ids: list[int]
    output_log_probs: list[float] = field(default_factory=list)
    output_mask: list[int] | None = None  # 1: train on the token, 0: context only; None: all 1
    # The ids that each token was drawn from, or (ids[m], offsets[n + 1]); None: the vocabulary.
    output_sampling_mask: list[list[int]] | tuple[np.ndarray, np.ndarray] | None = None
    # The sampler's most likely tokens: {id: log-prob} a token, or (ids[n, K], log_probs[n, K]).
    output_sampler_logprobs: list[dict[int, float]] | tuple[np.ndarray, np.ndarray] | None = None
    versions: np.ndarray | None = None  # int32[n]; None: the version known at dispatch


@dataclass(eq=False)
class Rollout:
    """One finished conversation, as `RolloutLoop.generate_one` returns it."""

    completion: list[dict]  # messages after the prompt, given to the reward functions
    completion_ids: list[int]  # given to the reward functions
    turns: list[TurnRecord]
    tool_call_count: int = 0
    tool_failure_count: int = 0
    reward: float | None = None  # added to what the reward functions give
    rollout_id: str = field(default_factory=lambda: uuid.uuid4().hex)  # in rollouts.jsonl


# ------------------------------------------------------------------------------------ messages


def text_of(message: dict) -> str:
    """The text of a message, whose content may be a string, a list of text parts, or missing."""
    content = message.get("content") or ""
    return content if isinstance(content, str) else "".join(part["text"] for part in content)


def check_prompt(prompt, where: str) -> None:
    """Raise unless `prompt` is a list of text messages; `where` names it in the message."""
    shown = "[{'role': 'user', 'content': 'What is 3+4?'}]"
    if not isinstance(prompt, (list, tuple)) or not prompt:
        got = repr(prompt)[:60] if isinstance(prompt, (str, list, tuple)) else type(prompt).__name__
        raise ValueError(f"{where} is not conversational (got {got}): write it as {shown}")
    for message in prompt:
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise ValueError(
                f"{where} holds {repr(message)[:60]}, which is not a message: write it as {shown}"
            )
        content = message.get("content")
        parts = content if isinstance(content, (list, tuple)) else []
        for part in parts:
            kind = part.get("type") if isinstance(part, dict) else type(part).__name__
            if kind != "text":
                raise ValueError(
                    f"{where} holds content of type {kind!r}: only text can be trained on, "
                    "images are not supported; remove those parts or rows"
                )
        if not isinstance(content, str) and not parts and "tool_calls" not in message:
            raise ValueError(f"{where} has a message without text ({message!r}): add its content")


def check_row(row, where: str, needs_prompt: bool = True) -> None:
    """ValueError for a row of a data set that rollouts cannot start from."""
    if not isinstance(row, dict) or (needs_prompt and "prompt" not in row):
        names = sorted(row) if isinstance(row, dict) else type(row).__name__
        raise ValueError(f"{where} has no column 'prompt' (it has {names}): rename or add it")
    taken = {"prompts", "completions", "completion_ids"} & row.keys()
    if taken:
        raise ValueError(f"{where} has a column {taken.pop()!r}, which rewards get too: rename it")
    if needs_prompt or row.get("prompt") is not None:
        check_prompt(row["prompt"], f"{where}: the prompt")


# --------------------------------------------------------------------------- turns to samples


def common_prefix(a: np.ndarray, b: np.ndarray) -> int:
    """Number of leading elements in which `a` and `b` agree."""
    n = min(len(a), len(b))
    differs = a[:n] != b[:n]
    return int(differs.argmax()) if differs.any() else n


def samples_from_turns(turns: list[TurnRecord], *, version: int = 0):
    """Training samples of one rollout, and how far each turn drifted from the one before.

    A turn whose prompt starts with the tokens held so far (the previous prompt and reply) is
    appended to the same sample; any other turn starts a new one, in which earlier replies are
    context. So every generated token is trained in exactly one sample.

    Returns (samples, drifts): one drift a turn transition, the number of held tokens that the next
    prompt rendered differently, 0 where it did not fork. Samples without a trained token are left
    out. `version` labels turns that carry no versions of their own.
    """
    runs, drifts, before = [], [], None
    for turn in turns:
        if len(turn.prompt_ids) == 0:
            raise ValueError("a TurnRecord has empty prompt_ids: its first token has no predictor")
        drift = 0 if before is None else _drift(before, turn)
        if before is not None:
            drifts.append(drift)
        if before is None or drift:
            runs.append([])
        n_held = len(before.prompt_ids) + len(before.output_ids) if runs[-1] else 0
        runs[-1].append((np.asarray(turn.prompt_ids[n_held:], dtype=np.int32), turn))
        before = turn
    samples = [_join(run, version) for run in runs]
    return [sample for sample in samples if sample.trained.any()], drifts


def _drift(before: TurnRecord, turn: TurnRecord) -> int:
    """Tokens held after `before` (its prompt and reply) from the first that `turn` differs in."""
    n_prompt, n_output = len(before.prompt_ids), len(before.output_ids)
    prompt = turn.prompt_ids
    if all(isinstance(ids, list) for ids in (prompt, before.prompt_ids, before.output_ids)):
        # Lists share their integers, so this is much cheaper than to make arrays of them.
        same_prompt = prompt[:n_prompt] == before.prompt_ids
        if same_prompt and prompt[n_prompt : n_prompt + n_output] == before.output_ids:
            return 0
    held = np.concatenate([np.asarray(ids) for ids in (before.prompt_ids, before.output_ids)])
    return len(held) - common_prefix(held, np.asarray(prompt))


def _join(run: list[tuple[np.ndarray, TurnRecord]], version: int) -> Sample:
    """One sample of turns that extend each other; each comes with the prompt tokens it adds."""
    ids, trained, log_probs, versions, heads, sets = [], [], [], [], [], []
    for context, turn in run:
        n_context, n_output = len(context), len(turn.output_ids)
        keep = np.ones(n_output, dtype=bool)
        if turn.output_mask is not None:
            keep = np.asarray(turn.output_mask, dtype=bool)
        # None becomes NaN in the conversion: missing, and masked by the trainer.
        given = np.asarray(turn.output_log_probs, dtype=np.float32)
        if keep.any() and len(given) != n_output or len(keep) != n_output:
            raise ValueError(
                f"a TurnRecord has {n_output} output_ids, {len(given)} output_log_probs and "
                f"{len(keep)} entries of output_mask: give one each, or mask what is not trained"
            )
        turn_versions = np.full(n_output, version) if turn.versions is None else turn.versions
        ids += [context, np.asarray(turn.output_ids, dtype=np.int32)]
        trained += [np.zeros(n_context, dtype=bool), keep]
        log_probs += [np.zeros(n_context, np.float32), given if keep.any() else np.zeros(n_output)]
        versions += [np.full(n_context, -1), np.where(keep, turn_versions, -1)]
        if keep.any():
            heads.append(_head(turn, keep))
            sets.append(_candidate_sets(turn, keep))
    top_ids, top_log_probs = _stack_heads(heads)
    set_ids, set_offsets = _concatenate_sets(sets)
    return Sample(
        input_ids=np.concatenate(ids),
        trained=np.concatenate(trained),
        sampler_log_probs=np.concatenate(log_probs, dtype=np.float32),
        top_ids=top_ids,
        top_log_probs=top_log_probs,
        set_ids=set_ids,
        set_offsets=set_offsets,
        versions=np.concatenate(versions, dtype=np.int32, casting="same_kind"),
    )


def _head(turn: TurnRecord, keep: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(ids[n, K], log_probs[n, K]) of the turn's trained tokens; K is 0 without a head."""
    given = turn.output_sampler_logprobs
    n_given = 0 if given is None else len(given[0] if isinstance(given, tuple) else given)
    if given is not None and n_given != len(keep):
        raise ValueError(f"a TurnRecord has {len(keep)} output_ids and {n_given} sampler log-probs")
    if isinstance(given, tuple):
        return given if keep.all() else (given[0][keep], given[1][keep])
    if given is None:
        n = int(keep.sum())
        return np.zeros((n, 0), dtype=np.int32), np.zeros((n, 0), dtype=np.float32)
    rows = [row or {} for row, kept in zip(given, keep) if kept]
    k = max(map(len, rows))
    ids = np.zeros((len(rows), k), dtype=np.int32)
    log_probs = np.full((len(rows), k), np.nan, dtype=np.float32)
    for i, row in enumerate(rows):
        ids[i, : len(row)] = list(row)
        log_probs[i, : len(row)] = list(row.values())
    return ids, log_probs


def _stack_heads(heads) -> tuple[np.ndarray, np.ndarray]:
    """The heads of several turns below each other, padded to the widest with missing entries."""
    n = sum(len(ids) for ids, _ in heads)
    k = max((ids.shape[1] for ids, _ in heads), default=0)
    top_ids = np.zeros((n, k), dtype=np.int32)
    top_log_probs = np.full((n, k), np.nan, dtype=np.float32)
    row = 0
    for ids, log_probs in heads:
        top_ids[row : row + len(ids), : ids.shape[1]] = ids
        top_log_probs[row : row + len(ids), : ids.shape[1]] = log_probs
        row += len(ids)
    return top_ids, top_log_probs


def sets_as_arrays(sets: list[list[int]]) -> tuple[np.ndarray, np.ndarray]:
    offsets = np.zeros(len(sets) + 1, dtype=np.int32)
    np.cumsum([len(one) for one in sets], out=offsets[1:])
    ids = np.fromiter(itertools.chain.from_iterable(sets), dtype=np.int32, count=offsets[-1])
    return ids, offsets


def _candidate_sets(turn: TurnRecord, keep: np.ndarray):
    """(ids[m], sizes[n]) of the candidate sets of the turn's trained tokens, or None."""
    given = turn.output_sampling_mask
    if given is None:
        return None
    ids, offsets = given if isinstance(given, tuple) else sets_as_arrays(given)
    sizes = np.diff(offsets)
    if len(sizes) != len(keep):
        raise ValueError(f"a TurnRecord has {len(keep)} output_ids and {len(sizes)} candidate sets")
    return ids[np.repeat(keep, sizes)], sizes[keep]


def _concatenate_sets(sets):
    """CSR arrays of all turns' candidate sets; (None, None) if no turn has any."""
    if all(one is None for one in sets):
        return None, None
    if any(one is None for one in sets):
        raise ValueError(
            "some turns of a rollout have an output_sampling_mask and others have none: sample "
            "all of them with the same top_k, top_p and min_p"
        )
    sizes = np.concatenate([sizes for _, sizes in sets])
    offsets = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int32)
    return np.concatenate([ids for ids, _ in sets]).astype(np.int32), offsets
