"""sampler.py without a server: parsing real answers."""

import json

import numpy as np
import pytest

import sampler
from chat import samples_from_turns


def entry(token_id, logprob, rank):
    return {"token_id": token_id, "logprob": logprob, "rank": rank}


def generate_answer(content, **choice):
    """An answer of /inference/v1/generate with the fields that vLLM 0.32 sends."""
    choice = {
        "index": 0,
        "finish_reason": "stop",
        "stop_reason": 2,
        "token_ids": [token["token_id"] for token in content],
        "routed_experts": None,
        "sampling_mask": None,
        "weight_versions": [{"version": "default", "start": 0, "end": len(content)}],
        "logprobs": {"content": content},
        **choice,
    }
    answer = {"request_id": "generate-tokens-1", "output_mode": "tokens", "choices": [choice]}
    return json.dumps(answer).encode()


# logprobs: 3, of a real server: the sampled token first, whatever its rank, then by rank.
SAMPLED_5TH = {
    **entry(16705, -2.77, 5),
    "top_logprobs": [entry(16705, -2.77, 5), entry(35, -2.02, 1), entry(504, -2.02, 2)],
}
SAMPLED_2ND = {
    **entry(314, -1.71, 2),
    "top_logprobs": [entry(314, -1.71, 2), entry(284, -1.21, 1), entry(1232, -1.96, 3)],
}
SAMPLED_1ST = {
    **entry(253, -0.97, 1),
    "top_logprobs": [entry(253, -0.97, 1), entry(441, -2.22, 2), entry(354, -2.59, 3)],
}


def test_head_is_the_most_likely_tokens_whatever_was_sampled():
    body = generate_answer([SAMPLED_5TH, SAMPLED_2ND, SAMPLED_1ST])
    turn = sampler.parse_generate(body, [1, 2], k=2, version=4)
    ids, log_probs = turn.output_sampler_logprobs
    assert ids.tolist() == [[35, 504], [284, 314], [253, 441]]
    np.testing.assert_allclose(log_probs, [[-2.02, -2.02], [-1.21, -1.71], [-0.97, -2.22]])
    assert turn.output_ids == [16705, 314, 253]
    assert turn.output_log_probs == [-2.77, -1.71, -0.97]
    assert turn.versions.tolist() == [4, 4, 4]  # "default" says nothing: the version at dispatch


def test_both_endpoints_give_the_same_turn():
    tops = [  # logprobs: 2 of the same three positions; the sampled token only adds a third entry
        {"token_id:16705": -2.77, "token_id:35": -2.02, "token_id:504": -2.02},
        {"token_id:314": -1.71, "token_id:284": -1.21},
        {"token_id:253": -0.97, "token_id:441": -2.22},
    ]
    log_probs = {"text_offset": [0, 14, 26], "tokens": [], "top_logprobs": tops}
    log_probs["token_logprobs"] = [-2.77, -1.71, -0.97]
    choice = {"index": 0, "text": "x", "token_ids": [16705, 314, 253], "logprobs": log_probs}
    body = json.dumps({"id": "cmpl-1", "choices": [choice]}).encode()
    ours = sampler.parse_completions(body, [1, 2], k=2, version=4)
    theirs = generate_answer([SAMPLED_5TH, SAMPLED_2ND, SAMPLED_1ST])
    theirs = sampler.parse_generate(theirs, [1, 2], k=2, version=4)
    assert ours.output_ids == theirs.output_ids
    assert ours.output_log_probs == theirs.output_log_probs
    for one, other in zip(head_as_dicts(ours), head_as_dicts(theirs)):
        assert one == pytest.approx(other)


def head_as_dicts(turn):
    ids, log_probs = turn.output_sampler_logprobs
    return [
        {i: p for i, p in zip(row_i, row_p) if not np.isnan(p)}
        for row_i, row_p in zip(ids.tolist(), log_probs.tolist())
    ]


def test_versions_change_at_the_token_where_the_sync_fell():
    spans = [{"version": "7", "start": 0, "end": 2}, {"version": "8", "start": 2, "end": 3}]
    body = generate_answer([SAMPLED_1ST] * 3, weight_versions=spans)
    assert sampler.parse_generate(body, [1], k=0, version=5).versions.tolist() == [7, 7, 8]


def test_missing_log_probs_stay_missing():
    # vLLM sends -9999 for NaN and -inf and drops the rank; other servers send null.
    content = [
        {"token_id": 5, "logprob": None, "rank": None, "top_logprobs": [entry(5, None, None)]},
        entry(6, -9999.0, 2) | {"top_logprobs": [entry(6, -9999.0, 2)]},
        {"token_id": 7, "logprob": -1.0, "top_logprobs": []},
    ]
    turn = sampler.parse_generate(generate_answer(content), [1], k=2, version=0)
    (sample,), _ = samples_from_turns([turn])
    assert sample.trained.tolist() == [False, True, True, True]
    np.testing.assert_array_equal(sample.sampler_log_probs[1:], [np.nan, -9999.0, -1.0])
    np.testing.assert_array_equal(
        sample.top_log_probs, [[np.nan, np.nan], [np.nan, -9999.0], [np.nan, np.nan]]
    )


def test_candidate_sets_become_offsets():
    body = generate_answer([SAMPLED_1ST] * 3, sampling_mask=[[3, 253], [253], [1, 2, 253]])
    ids, offsets = sampler.parse_generate(body, [1], k=0, version=0).output_sampling_mask
    assert ids.tolist() == [3, 253, 253, 1, 2, 253]
    assert offsets.tolist() == [0, 2, 3, 6]


@pytest.mark.parametrize(
    "body, error",
    [
        (b"<html>bad gateway</html>", Exception),
        (b'{"choices": []}', sampler.BadAnswer),
        (generate_answer([SAMPLED_1ST], finish_reason="abort"), sampler.BadAnswer),
        (generate_answer([]), sampler.BadAnswer),
        (generate_answer([SAMPLED_1ST], token_ids=[1, 2]), sampler.BadAnswer),
        (generate_answer([SAMPLED_1ST], logprobs=None), Exception),
    ],
)
def test_answer_that_is_no_finished_reply_is_asked_for_again(body, error):
    with pytest.raises(error) as caught:
        sampler.parse_generate(body, [1], k=2, version=0)
    assert isinstance(caught.value, sampler._RETRIED)
