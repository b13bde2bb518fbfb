"""chat.py without a server: rendering, parsing real answers, and turns to samples."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import chat
from chat import Sample, TurnRecord, samples_from_turns

# --------------------------------------------------------------------------------- prompts

USER = {"role": "user", "content": "hi"}
IMAGE = {"role": "user", "content": [{"type": "text", "text": "what?"}, {"type": "image"}]}


@pytest.mark.parametrize(
    "prompt, message",
    [
        ("2+2?", r"row 3 is not conversational \(got '2\+2\?'\): write it as"),
        ([], "is not conversational"),
        (7, r"is not conversational \(got int\)"),
        (["2+2?"], "holds '2\\+2\\?', which is not a message"),
        ([{"content": "hi"}], "which is not a message"),
        ([USER, IMAGE], "content of type 'image': only text"),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}], "'image_url'"),
        ([{"role": "user", "content": None}], "a message without text"),
    ],
)
def test_unusable_prompt_is_named_with_the_remedy(prompt, message):
    with pytest.raises(ValueError, match=message):
        chat.check_prompt(prompt, "row 3")


def test_text_prompts_are_accepted():
    chat.check_prompt([{"role": "system", "content": "Be short."}, USER], "row 0")
    chat.check_prompt([{"role": "user", "content": [{"type": "text", "text": "hi"}]}], "row 0")
    chat.check_prompt([USER, {"role": "assistant", "tool_calls": [{}], "content": None}], "row 0")


# --------------------------------------------------------------------------- turns to samples


def turn(prompt_ids, output_ids, **fields):
    fields.setdefault("output_log_probs", [-0.5] * len(output_ids))
    return TurnRecord(prompt_ids, output_ids, **fields)


def test_turn_that_continues_the_held_tokens_extends_the_sample():
    # turn 1: prompt 1 2, reply 3 4; then the tool's 5 6, reply 7
    turns = [
        turn([1, 2], [3, 4], output_log_probs=[-0.1, -0.2], versions=np.array([3, 4])),
        turn([1, 2, 3, 4, 5, 6], [7], output_log_probs=[-0.3]),
    ]
    (sample,), drifts = samples_from_turns(turns, version=9)
    assert isinstance(sample, Sample)
    assert sample.input_ids.tolist() == [1, 2, 3, 4, 5, 6, 7]
    assert sample.trained.tolist() == [False, False, True, True, False, False, True]
    np.testing.assert_allclose(sample.sampler_log_probs[sample.trained], [-0.1, -0.2, -0.3])
    assert sample.versions.tolist() == [-1, -1, 3, 4, -1, -1, 9]
    assert drifts == [0]
    assert [array.dtype for array in (sample.input_ids, sample.versions)] == [np.int32] * 2
    assert sample.sampler_log_probs.dtype == sample.top_log_probs.dtype == np.float32


def test_rewritten_history_forks_and_counts_what_it_renders_anew():
    # The second prompt drops the reasoning token 3: of the held 1 2 3 4 it shares 1 2, so 2 drift.
    turns = [turn([1, 2], [3, 4]), turn([1, 2, 4, 5], [6]), turn([1, 2, 4, 5, 6], [8])]
    (first, second), drifts = samples_from_turns(turns)
    assert first.input_ids.tolist() == [1, 2, 3, 4]
    assert second.input_ids.tolist() == [1, 2, 4, 5, 6, 8]
    assert second.trained.tolist() == [False] * 4 + [True, True]
    assert drifts == [2, 0]


def test_masked_tokens_are_context_and_untrained_samples_are_left_out():
    turns = [
        turn([1], [2, 3], output_mask=[0, 1], output_log_probs=[None, -1.0]),
        turn([9], [8], output_mask=[0], output_log_probs=[]),
    ]
    (sample,), drifts = samples_from_turns(turns)
    assert sample.trained.tolist() == [False, False, True]
    assert sample.versions.tolist() == [-1, -1, 0]
    assert drifts == [3]


def test_heads_as_dicts_and_as_arrays_are_joined():
    arrays = np.array([[5, 6, 7]]), np.array([[-1.0, -2.0, -3.0]], dtype=np.float32)
    turns = [
        turn([1], [2, 3], output_sampler_logprobs=[{2: -0.1, 9: -2.5}, {}], output_mask=[1, 1]),
        turn([1, 2, 3], [4], output_sampler_logprobs=arrays),
    ]
    (sample,), _ = samples_from_turns(turns)
    assert sample.top_ids[0, :2].tolist() == [2, 9] and sample.top_ids[2].tolist() == [5, 6, 7]
    nan = np.nan
    expected = np.array([[-0.1, -2.5, nan], [nan] * 3, [-1, -2, -3]], dtype=np.float32)
    np.testing.assert_array_equal(sample.top_log_probs, expected)


def test_candidate_sets_follow_the_trained_tokens():
    sets = np.array([7, 8, 9], dtype=np.int32), np.array([0, 2, 3], dtype=np.int32)
    turns = [
        turn([1], [2, 3], output_mask=[0, 1], output_sampling_mask=[[2, 4], [3, 5, 6]]),
        turn([1, 2, 3], [8, 9], output_sampling_mask=sets),
    ]
    (sample,), _ = samples_from_turns(turns)
    assert sample.set_ids.tolist() == [3, 5, 6, 7, 8, 9]
    assert sample.set_offsets.tolist() == [0, 3, 5, 6]


@pytest.mark.parametrize(
    "turns, message",
    [
        ([turn([], [2])], "empty prompt_ids"),
        ([turn([1], [2, 3], output_log_probs=[-1.0])], "2 output_ids, 1 output_log_probs"),
        ([turn([1], [2], output_log_probs=[])], "1 output_ids, 0 output_log_probs"),
        ([turn([1], [2, 3], output_mask=[1])], "1 entries of output_mask"),
        ([turn([1], [2, 3], output_sampler_logprobs=[{}])], "2 output_ids and 1 sampler log-probs"),
        ([turn([1], [2, 3], output_sampling_mask=[[2]])], "2 output_ids and 1 candidate sets"),
        (
            [turn([1], [2], output_sampling_mask=[[2]]), turn([1, 2, 3], [4])],
            "some turns .* have an output_sampling_mask and others have none",
        ),
    ],
)
def test_inconsistent_turn_is_refused(turns, message):
    with pytest.raises(ValueError, match=message):
        samples_from_turns(turns)


@st.composite
def conversations(draw):
    """Turns whose prompts continue, rewrite or forget the history, over a tiny vocabulary. Every
    generated token gets a log-prob of its own, by which it can be found again."""
    ids = st.lists(st.integers(0, 3), max_size=4)
    turns, history, n = [], draw(ids.filter(len)), 0
    for _ in range(draw(st.integers(1, 6))):
        how = draw(st.sampled_from(["continue", "continue", "cut", "change", "restart"]))
        if how == "cut":
            history = history[: draw(st.integers(1, len(history)))]
        elif how == "change":
            i = draw(st.integers(0, len(history) - 1))
            history = history[:i] + [9] + history[i + 1 :]
        elif how == "restart":
            history = draw(ids.filter(len))
        history = history + draw(ids)
        output = draw(ids)
        log_probs = [-float(n + i) for i in range(len(output))]
        mask = draw(st.none() | st.lists(st.integers(0, 1), min_size=4))
        mask = None if mask is None else mask[: len(output)]
        versions = np.arange(n, n + len(output))
        head = np.arange(n, n + len(output))[:, None], np.array(log_probs, np.float32)[:, None]
        n += len(output)
        turns.append(
            turn(
                history,
                output,
                output_log_probs=log_probs,
                output_mask=mask,
                versions=versions,
                output_sampler_logprobs=head,
            )
        )
        history = history + output
    return turns


@settings(max_examples=300, deadline=None)
@given(conversations())
def test_every_generated_token_is_trained_exactly_once_with_its_own_numbers(turns):
    samples, drifts = samples_from_turns(turns)
    expected = []  # (id, log-prob) of every token that is to be trained, in order
    for one in turns:
        mask = one.output_mask or [1] * len(one.output_ids)
        expected += [t for t, m in zip(zip(one.output_ids, one.output_log_probs), mask) if m]
    got = []
    for sample in samples:
        trained = sample.trained
        assert trained.any() and not trained[0]
        got += zip(sample.input_ids[trained].tolist(), sample.sampler_log_probs[trained].tolist())
        numbers = -sample.sampler_log_probs[trained]
        np.testing.assert_array_equal(sample.versions[trained], numbers)
        np.testing.assert_array_equal(sample.top_ids[:, 0], numbers)
        assert (sample.versions[~trained] == -1).all()
    assert got == expected
    assert len(drifts) == len(turns) - 1

    # Each sample ends with a turn's prompt and reply: what the sampler saw is what is trained on.
    wholes = [list(one.prompt_ids) + list(one.output_ids) for one in turns]
    assert all(sample.input_ids.tolist() in wholes for sample in samples)
    forks = sum(whole != after.prompt_ids[: len(whole)] for whole, after in zip(wholes, turns[1:]))
    assert sum(drift > 0 for drift in drifts) == forks
    assert len(samples) <= forks + 1
