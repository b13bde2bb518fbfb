"""Packing, attention and planner against brute force: masks by definition, log-probs and gradients
by forwarding each sample alone.

CPU, float32, tiny models. Samples are drawn so that they fork, repeat and prefix one another.
"""

import dataclasses
import threading
import time
import types
from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import attention
import planner
from attention import TreeMask
from chat import Sample
from packing import Row, bucket, pack_row
from planner import END, Plan, Planner, plan_steps

VOCAB = 11
quick = settings(max_examples=150, deadline=None, database=None)


def make(ids, trained=None, group=0, k=0, advantage=1.0):
    """A sample; by default every token but the first is trained. Its sampler log-prob number t is
    -t / 100 - advantage, so that a test sees where each one went."""
    ids = np.array(ids, np.int32)
    trained = np.arange(len(ids)) > 0 if trained is None else np.array(trained, bool)
    n = int(trained.sum())
    return Sample(
        input_ids=ids,
        trained=trained,
        sampler_log_probs=np.float32(-np.arange(len(ids)) / 100 - advantage),
        top_ids=np.zeros((n, k), np.int32),
        top_log_probs=np.zeros((n, k), np.float32),
        versions=np.zeros(len(ids), np.int32),
        advantage=advantage,
        group_id=group,
        row_index=0,
    )


@st.composite
def forests(draw, max_samples=6, max_tokens=9, tokens=4):
    """Samples that share prefixes: some begin with a part, or all, of an earlier one."""
    samples = []
    for i in range(draw(st.integers(1, max_samples))):
        tail = draw(st.lists(st.integers(0, tokens - 1), max_size=max_tokens))
        head = []
        if samples and draw(st.booleans()):
            earlier = draw(st.sampled_from(samples)).input_ids.tolist()
            head = earlier[: draw(st.integers(1, len(earlier)))]
        ids = (head + tail) or [0]
        trained = [False] + draw(
            st.lists(st.booleans(), min_size=len(ids) - 1, max_size=len(ids) - 1)
        )
        samples.append(make(ids, trained, group=i % 2, advantage=1.0 + i))
    return samples


def visible_by_definition(row, window=None):
    """q sees k if k is q, or q's ancestor in the tree; the ancestors follow from the segments."""
    size, n = len(row.end), row.n_tokens
    parent = np.arange(-1, size - 1)
    for start, _, above, _ in row.segments:
        parent[start] = row.segments[above][1] - 1 if above >= 0 else -1
    parent[n:] = -1
    visible = np.zeros((size, size), bool)
    for q in range(size):
        k, steps = q, 0
        while k >= 0 and (window is None or steps < window):
            visible[q, k] = True
            k, steps = parent[k], steps + 1
    return visible


def mask_of(row, window=None):
    q, k = np.arange(len(row.end))[:, None], np.arange(len(row.end))
    visible = (k <= q) & (q < row.end)
    if window is not None:
        visible &= row.position_ids[:, None] - row.position_ids < window
    return visible


# ---------------------------------------------------------------- rows


def test_the_two_rollouts_of_the_specification():
    # p1 p2 p3 a1 a2 and p1 p2 p3 b1 b2. The specification forks at p3 and packs 8 tokens; we fork
    # where the samples differ: p3 is shared, predicts a1 and b1, and 7 tokens remain.
    p1, p2, p3, a1, a2, b1, b2 = range(7)
    trained = [False, False, False, True, True]
    row = pack_row(
        [
            make([p1, p2, p3, a1, a2], trained, advantage=1.0),
            make([p1, p2, p3, b1, b2], trained, advantage=-1.0),
        ],
        token_budget=7,
    )
    assert row.input_ids.tolist() == [p1, p2, p3, a1, a2, b1, b2]
    assert row.position_ids.tolist() == [0, 1, 2, 3, 4, 3, 4]
    assert row.end.tolist() == [7, 7, 7, 5, 5, 7, 7]
    assert row.segments.tolist() == [[0, 3, -1, 0], [3, 5, 0, 3], [5, 7, 0, 3]]
    assert row.term_positions.tolist() == [2, 3, 2, 5]
    assert row.term_targets.tolist() == [a1, a2, b1, b2]
    assert row.term_samples.tolist() == [0, 0, 1, 1]
    assert row.advantages.tolist() == [1, 1, -1, -1]
    np.testing.assert_allclose(row.sampler_log_probs, [-1.03, -1.04, 0.97, 0.96], rtol=1e-6)
    # 1 + 2 + 3 for the prompt, 4 + 5 for each completion
    assert (row.n_tokens, row.raw_tokens, row.visible_pairs) == (7, 10, 24)
    assert row.pairs(window=2) == 1 + 2 * 6


@quick
@given(forests(), st.integers(0, 3))
def test_row_is_the_trie_of_its_samples(samples, padding):
    row = pack_row(samples, 100, lambda n: n + padding)
    prefixes = {tuple(s.input_ids[: t + 1]) for s in samples for t in range(len(s.input_ids))}
    assert row.n_tokens == len(prefixes) and len(row.end) == row.n_tokens + padding
    assert row.raw_tokens == sum(len(s.input_ids) for s in samples)
    visible = mask_of(row)
    assert (visible == visible_by_definition(row)).all()
    assert row.visible_pairs == visible[: row.n_tokens].sum() == row.pairs()
    for window in (1, 2, 5):
        assert row.pairs(window) == visible_by_definition(row, window)[: row.n_tokens].sum()
    # every position sees exactly one prefix, and no two the same
    spelled = [tuple(row.input_ids[visible[q]]) for q in range(row.n_tokens)]
    assert set(spelled) == prefixes and len(spelled) == len(prefixes)
    assert all(row.position_ids[q] == len(spelled[q]) - 1 for q in range(row.n_tokens))
    # each trained token is predicted where its own history ends, in order
    terms = [
        (spelled[p], t, i, lp, a)
        for p, t, i, lp, a in zip(
            row.term_positions,
            row.term_targets,
            row.term_samples,
            row.sampler_log_probs,
            row.advantages,
        )
    ]
    assert terms == [
        (tuple(s.input_ids[:t]), s.input_ids[t], i, s.sampler_log_probs[t], s.advantage)
        for i, s in enumerate(samples)
        for t in np.flatnonzero(s.trained)
    ]


@quick
@given(forests(), st.integers(2, 25))
def test_fits_and_cost_say_what_add_does(samples, budget):
    row = Row(budget)
    for sample in samples:
        grown = Row(1000)
        for s in [*row.samples, sample]:
            grown.add(s)
        assert row.fits(sample) == (max(grown.n_tokens, grown.n_terms) <= budget)
        assert row.added_cost(sample) == grown.cost - row.cost
        if row.fits(sample):
            row.add(sample)
            assert (row.n_tokens, row.n_terms, row.cost) == (
                grown.n_tokens,
                grown.n_terms,
                grown.cost,
            )
        else:
            with pytest.raises(ValueError, match=f"token_budget={budget}"):
                row.add(sample)


def test_budget_bounds_loss_terms_of_duplicates():
    row = Row(10)
    for _ in range(9):
        if row.fits(sample := make([1, 2, 3, 4])):
            row.add(sample)
    assert (len(row.samples), row.n_tokens, row.n_terms) == (3, 4, 9)


def test_candidates_and_sets_follow_their_terms():
    a, b = make([1, 2, 3], k=2), make([1, 2, 4], [False, False, True], k=3)
    a.top_ids[:], a.top_log_probs[:] = [[1, 2], [3, 4]], [[-1, -2], [-3, np.nan]]
    b.top_ids[:], b.top_log_probs[:] = [[5, 6, 7]], [[-5, -6, -np.inf]]
    a.set_ids, a.set_offsets = np.array([2, 9, 3], np.int32), np.array([0, 2, 3], np.int32)
    b.set_ids, b.set_offsets = np.array([4, 8], np.int32), np.array([0, 2], np.int32)
    row = pack_row([a, b], 8).to("cpu")
    nan, inf = float("nan"), float("inf")
    assert row.top_ids.tolist() == [[1, 2, 0], [3, 4, 0], [5, 6, 7]]
    expected = torch.tensor([[-1, -2, nan], [-3, nan, nan], [-5, -6, -inf]])
    assert torch.equal(row.top_log_probs.nan_to_num(9), expected.nan_to_num(9))
    assert row.set_ids.tolist() == [2, 9, 3, 4, 8] and row.set_offsets.tolist() == [0, 2, 3, 5]
    assert {x.dtype for x in (row.top_ids, row.set_ids, row.set_offsets, row.input_ids)} == {
        torch.int64
    }
    with pytest.raises(ValueError, match="no candidate set"):
        pack_row([a, make([1, 2])], 8)


def test_bucket_is_close_above_and_has_few_values():
    lengths = np.arange(1, 40_000)
    padded = np.array([bucket(int(n)) for n in lengths])
    assert (padded >= lengths).all() and (padded % 128 == 0).all() and (np.diff(padded) >= 0).all()
    large = lengths > 2048
    assert (padded[large] < lengths[large] * (1 + 1 / 16)).all()
    assert (padded[large] / lengths[large]).mean() < 1.025
    assert len(set(padded[(lengths > 16_384) & (lengths <= 32_768)])) == 16


# ---------------------------------------------------------------- bad input


def broken(**changes):
    return dataclasses.replace(make([1, 2, 3]), **changes)


@pytest.mark.parametrize(
    "sample, complaint",
    [
        (make([]), "no tokens"),
        (broken(trained=np.array([True, True, False])), "first token"),
        (broken(trained=np.array([False, True])), "trained has length 2 instead of 3"),
        (broken(sampler_log_probs=np.zeros(2, np.float32)), "sampler_log_probs has length 2"),
        (broken(top_ids=np.zeros((3, 0), np.int32)), "top_ids has length 3 instead of 2"),
        (broken(set_offsets=np.zeros(2, np.int32)), "set_offsets has length 2 instead of 3"),
        (broken(advantage=float("nan")), "advantage nan"),
    ],
)
def test_a_malformed_sample_is_named(sample, complaint):
    with pytest.raises(ValueError, match=complaint):
        Row(9).add(sample)


@pytest.mark.parametrize("ids", [[1, 11, 2], [1, -1, 2]])
def test_ids_beyond_the_vocabulary_are_named(ids):
    with pytest.raises(ValueError, match=f"token {ids[1]}, the model's vocabulary ends at {VOCAB}"):
        list(plan([make(ids)], vocab_size=VOCAB))
    candidate = make([1, 2], k=1)
    candidate.top_ids[:] = ids[1]
    with pytest.raises(ValueError, match="top_ids holds token"):
        list(plan([candidate], vocab_size=VOCAB))


def test_missing_log_probs_reach_the_trainer_as_they_are():
    sample = make([1, 2, 3, 4])
    sample.sampler_log_probs[1:] = [np.nan, -np.inf, -9999.0]
    row = pack_row([sample, make([1, 2, 3, 5])], 9)
    assert np.isnan(row.sampler_log_probs[0])
    assert row.sampler_log_probs[1:3].tolist() == [-np.inf, -9999.0]
    assert np.isfinite(row.sampler_log_probs[3:]).all()


def test_empty_row_and_short_padding_are_refused():
    with pytest.raises(ValueError, match="empty row"):
        Row(4).pack()
    with pytest.raises(ValueError, match="pad_to=2"):
        pack_row([make([1, 2, 3])], 4, lambda n: 2)


# ---------------------------------------------------------------- masks


@quick
@given(
    forests(max_samples=8, max_tokens=12),
    st.integers(0, 5),
    st.sampled_from([None, 1, 2, 3, 7]),
    st.sampled_from([(4, 4), (2, 8), (8, 2), (3, 5), (64, 64)]),
)
def test_block_summaries_against_the_mask(samples, padding, window, block_size):
    row = pack_row(samples, 200, lambda n: n + padding)
    some, full = attention.block_summary(row.end, row.position_ids, block_size, window)
    visible, (bq, bk) = mask_of(row, window), block_size
    for i in range(some.shape[0]):
        for j in range(some.shape[1]):
            block = visible[i * bq : (i + 1) * bq, j * bk : (j + 1) * bk]
            assert full[i, j] == block.all()
            assert some[i, j] == block.any() if window is None else some[i, j] >= block.any()
    assert (some >= full).all()


@quick
@given(
    forests(max_samples=8, max_tokens=12),
    st.integers(0, 5),
    st.sampled_from([None, 1, 3, 7]),
    st.sampled_from([1, 4, 16]),
)
def test_chunks_are_the_mask(samples, padding, window, chunk):
    row = pack_row(samples, 200, lambda n: n + padding)
    mask = TreeMask(row)
    mask.QUERY_CHUNK = chunk
    rebuilt = np.zeros((len(row.end), len(row.end)), bool)
    for q0, q1, keys, visible in mask.chunks(window):
        rebuilt[q0:q1, keys] = visible.numpy()
    assert (rebuilt == mask_of(row, window)).all()


def varlen_by_loops(
    q,
    k,
    v,
    *,
    cu_seqlens_q,
    cu_seqlens_k,
    max_seqlen_q,
    max_seqlen_k,
    softmax_scale,
    causal,
    window_size=(-1, -1),
    softcap=0.0,
):
    """flash-attn's varlen function: causal, the queries are the last of the keys' positions."""
    assert causal
    out = torch.empty_like(q)
    pairs_q, pairs_k = cu_seqlens_q.tolist(), cu_seqlens_k.tolist()
    assert max_seqlen_q == max(np.diff(pairs_q)) and max_seqlen_k == max(np.diff(pairs_k))
    repeats = q.shape[1] // k.shape[1]
    for q0, q1, k0, k1 in zip(pairs_q, pairs_q[1:], pairs_k, pairs_k[1:]):
        distance = torch.arange(q1 - q0)[:, None] + (k1 - k0) - (q1 - q0) - torch.arange(k1 - k0)
        visible = (distance >= 0) & ((window_size[0] < 0) | (distance <= window_size[0]))
        keys, values = (x[k0:k1].repeat_interleave(repeats, 1) for x in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q[q0:q1], keys) * softmax_scale
        if softcap:
            scores = softcap * torch.tanh(scores / softcap)
        weights = scores.masked_fill(~visible, -torch.inf).softmax(-1)
        out[q0:q1] = torch.einsum("hqk,khd->qhd", weights, values)
    return out


def attention_inputs(size, heads=4, kv_heads=2, dim=16):
    generator = torch.Generator().manual_seed(size)
    return [
        torch.randn(1, size, n, dim, generator=generator).transpose(1, 2)
        for n in (heads, kv_heads, kv_heads)
    ]


@settings(max_examples=60, deadline=None, database=None)
@given(
    forests(max_samples=8, max_tokens=12),
    st.integers(0, 5),
    st.sampled_from([None, 1, 3, 7]),
    st.sampled_from([None, 2.0]),
)
def test_gathered_keys_give_the_dense_result(samples, padding, window, softcap):
    row = pack_row(samples, 200, lambda n: n + padding)
    q, k, v = attention_inputs(len(row.end))
    options = dict(scaling=0.3, sliding_window=window, softcap=softcap)
    dense = attention.tree_attention(None, q, k, v, tree=TreeMask(row), **options)[0]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention, "_varlen_kernel", lambda: varlen_by_loops)
        gathered = attention._varlen(q, k, v, TreeMask(row).paths(), 0.3, window, softcap)
    n = row.n_tokens  # padding is one more segment there, so it sees more than itself
    torch.testing.assert_close(gathered.transpose(1, 2)[:, :n], dense[:, :n], rtol=1e-5, atol=1e-5)


def large_row(n_groups=2, group_size=3, prompt=270, completion=50, pad=bucket):
    rng = np.random.default_rng(0)
    samples = []
    for group in range(n_groups):
        head = rng.integers(0, VOCAB, prompt)
        samples += [
            make([*head, *rng.integers(0, VOCAB, completion + 5 * i)], group=group)
            for i in range(group_size)
        ]
    return pack_row(samples, 10_000, pad)


@pytest.fixture
def flex_gradients_on_cpu(monkeypatch):
    """FlexAttention's backward in plain PyTorch is refused on a CPU, but works."""
    monkeypatch.setattr(torch.nn.attention.flex_attention, "_validate_device", lambda *qkv: None)


@pytest.mark.filterwarnings("ignore:flex_attention called without")
@pytest.mark.parametrize(
    "window, softcap, sinks",
    [(None, None, False), (60, None, False), (None, 2.0, False), (60, 2.0, True)],
)
def test_flex_attention_gives_the_dense_result(flex_gradients_on_cpu, window, softcap, sinks):
    row, results = large_row(), []
    block_mask = TreeMask(row).block_mask(window)
    kept = int(block_mask.kv_num_blocks.sum() + block_mask.full_kv_num_blocks.sum())
    assert kept < 0.6 * (len(row.end) // 128) ** 2
    assert int(block_mask.full_kv_num_blocks.sum()) > 0 or window is not None
    for backend in ("flex", "sdpa"):
        inputs = attention_inputs(len(row.end))
        inputs.append(torch.tensor([-1.0, 0.0, 1.0, 3.0]))
        inputs = [x.detach().requires_grad_() for x in inputs]
        out, _ = attention.tree_attention(
            None,
            *inputs[:3],
            tree=TreeMask(row, backend),
            sliding_window=window,
            softcap=softcap,
            s_aux=inputs[3] if sinks else None,
        )
        upstream = torch.randn(out.shape, generator=torch.Generator().manual_seed(0))
        gradients = torch.autograd.grad(out, inputs if sinks else inputs[:3], upstream)
        results.append([out, *gradients])
    for flex, dense in zip(*results):
        torch.testing.assert_close(flex, dense, rtol=1e-5, atol=1e-5)


def test_block_mask_is_what_create_block_mask_makes():
    from torch.nn.attention.flex_attention import create_block_mask

    row = large_row(pad=lambda n: bucket(n) + 100)  # not a multiple of the block
    for size in ((128, 128), (256, 128), (128, 64)):
        ours = TreeMask(row, "flex").block_mask(None, size)
        theirs = create_block_mask(
            ours.mask_mod, None, None, len(row.end), len(row.end), device="cpu", BLOCK_SIZE=size
        )
        assert torch.equal(ours.to_dense(), theirs.to_dense())
        for name in ("kv_num_blocks", "full_kv_num_blocks", "q_num_blocks", "full_q_num_blocks"):
            assert torch.equal(getattr(ours, name), getattr(theirs, name)), name
        for name in ("kv", "q", "full_kv", "full_q"):
            counts = getattr(theirs, f"{name}_num_blocks")[0, 0].tolist()
            pair = [getattr(mask, f"{name}_indices")[0, 0] for mask in (ours, theirs)]
            for i, n in enumerate(counts):
                assert torch.equal(pair[0][i, :n], pair[1][i, :n])


def test_backends_are_chosen_by_device_head_dim_and_sinks():
    def choose(
        backend="auto", device="cuda", flash=True, dim=128, dtype=torch.bfloat16, sinks=False
    ):
        return attention.choose_backend(
            backend, device_type=device, flash_ok=flash, head_dim=dim, dtype=dtype, sinks=sinks
        )

    assert choose() == choose(dim=64) == "flash"
    assert choose(device="cpu", flash=False, dtype=torch.float32) == "sdpa"
    assert {
        choose(flash=False),
        choose(dim=256),
        choose(dtype=torch.float32),
        choose(sinks=True),
    } == {"flex"}
    assert choose("varlen") == "varlen" and choose("sdpa") == "sdpa" and choose("flash") == "flash"
    for forced in (
        dict(backend="flash", flash=False),
        dict(backend="varlen", sinks=True),
        dict(backend="flash", sinks=True),
        dict(backend="varlen", dtype=torch.float32),
    ):
        with pytest.raises(ValueError, match=f"attention={forced['backend']}"):
            choose(**forced)
    with pytest.raises(ValueError, match="choose auto, flash"):
        TreeMask(large_row(), "fast")


def test_windows_of_a_models_layers():
    def windows(**config):
        config = types.SimpleNamespace(model_type="some", num_hidden_layers=2, **config)
        return attention.layer_windows(config)

    full, sliding = "full_attention", "sliding_attention"
    assert windows() == windows(sliding_window=None) == [None]  # Llama
    assert windows(sliding_window=4096) == [4096]  # Mistral
    assert windows(sliding_window=128, layer_types=[sliding, full, sliding]) == [None, 128]
    assert windows(sliding_window=None, layer_types=[full, "linear_attention"]) == [None]
    with pytest.raises(ValueError, match="chunked attention"):
        windows(layer_types=["chunked_attention", full])


# ---------------------------------------------------------------- exactness


def tiny(kind):
    """A model of the family, and its twin with the same weights and transformers' attention."""
    import transformers as tf

    attention.register_attention()
    shared = dict(
        vocab_size=VOCAB,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=128,
        pad_token_id=0,
        bos_token_id=None,
        eos_token_id=None,
    )
    configs = {
        "llama": lambda: tf.LlamaConfig(**shared, tie_word_embeddings=True),
        "qwen3": lambda: tf.Qwen3Config(**shared),
        "mistral": lambda: tf.MistralConfig(**shared, sliding_window=4),
        "gemma2": lambda: tf.Gemma2Config(
            **shared,
            sliding_window=4,
            attn_logit_softcapping=3.0,
            final_logit_softcapping=None,
            query_pre_attn_scalar=8,
            layer_types=["sliding_attention", "full_attention"],
        ),
        "gpt_oss": lambda: tf.GptOssConfig(
            **shared,
            sliding_window=4,
            num_local_experts=2,
            num_experts_per_tok=1,
            rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
            layer_types=["sliding_attention", "full_attention"],
        ),
    }
    models = [
        tf.AutoModelForCausalLM.from_config(
            configs[kind](), attn_implementation=attention, experts_implementation="eager"
        ).eval()
        for attention in (attention.ATTENTION, "eager")
    ]
    torch.manual_seed(0)
    for parameter in models[0].parameters():
        torch.nn.init.normal_(parameter, std=0.4)
    models[1].load_state_dict(models[0].state_dict())
    return models


def logits_of(model, row, tree):
    return model(
        input_ids=row.input_ids[None],
        position_ids=row.position_ids[None],
        use_cache=False,
        tree=tree,
    ).logits


def score(logits, positions, targets, weights):
    """Log-probs of the targets, and their weighted sum as the loss to differentiate."""
    log_probs = logits[0].log_softmax(-1)[torch.as_tensor(positions), torch.as_tensor(targets)]
    return log_probs, (log_probs * torch.as_tensor(weights)).sum()


def check_exactness(models, samples, padding, chunk=256):
    packed_model, reference = models
    row = pack_row(samples, 1000, lambda n: n + padding).to("cpu")
    tree = TreeMask(row)
    tree.QUERY_CHUNK = chunk
    weights = torch.randn(len(row.term_targets), generator=torch.Generator().manual_seed(1))
    for model in models:
        model.zero_grad()
    logits = logits_of(packed_model, row, tree)
    packed, loss = score(logits, row.term_positions, row.term_targets, weights)
    loss.backward()
    separate, first = [], 0
    for sample in samples:
        trained, ids = np.flatnonzero(sample.trained), torch.from_numpy(sample.input_ids).long()
        if len(trained):
            log_probs, loss = score(
                reference(input_ids=ids[None], use_cache=False).logits,
                trained - 1,
                sample.input_ids[trained].astype(np.int64),
                weights[first : first + len(trained)],
            )
            loss.backward()
            separate.append(log_probs)
            first += len(trained)
    assert first == len(packed)
    if not separate:
        return
    torch.testing.assert_close(packed, torch.cat(separate), rtol=1e-5, atol=1e-5)
    gradients = [
        {n: p.grad for n, p in model.named_parameters() if p.grad is not None} for model in models
    ]
    assert gradients[0].keys() >= gradients[1].keys()
    largest = max(float(g.abs().max()) for g in gradients[1].values())
    for name, gradient in gradients[1].items():
        torch.testing.assert_close(
            gradients[0][name],
            gradient,
            rtol=1e-5,
            atol=1e-5 * max(1.0, largest),
            msg=lambda m, n=name: f"{n}: {m}",
        )


@pytest.mark.parametrize(
    "kind, tries", [("llama", 80), ("qwen3", 30), ("mistral", 30), ("gemma2", 60), ("gpt_oss", 40)]
)
def test_packed_log_probs_and_gradients_equal_separate_forwards(kind, tries):
    models = tiny(kind)

    @settings(max_examples=tries, deadline=None, database=None)
    @given(forests(max_samples=5), st.integers(0, 3), st.sampled_from([3, 256]))
    def check(samples, padding, chunk):
        check_exactness(models, samples, padding, chunk)

    check()


def test_exactness_on_the_named_shapes():
    system, prompt = [1, 2, 3], [1, 2, 3, 4, 5]
    shapes = {
        "duplicates": [prompt + [6, 7]] * 3,
        "one token": [[1], [1], prompt],
        "a prefix of another": [prompt + [6, 7, 8], prompt + [6], prompt],
        "shared system prompt": [
            system + [4, 5],
            system + [4, 6],
            system + [7, 8],
            system + [7, 9],
        ],
        "multi-turn forks": [
            prompt + [6],
            prompt + [6, 7, 8],
            prompt + [6, 7, 9, 10],
            prompt + [6, 7, 9, 2],
            prompt + [2],
        ],
        "nothing shared": [[1, 2, 3], [2, 3, 4], [3, 4, 5]],
    }
    models = tiny("llama")
    for samples in shapes.values():
        check_exactness(models, [make(ids, group=0) for ids in samples], padding=0)
    full = Row(8)  # exactly full: 5 + 1 + 1 + 1 tokens
    for ids in (prompt + [6, 7], prompt + [8]):
        full.add(make(ids, [t >= 5 for t in range(len(ids))]))
    assert full.n_tokens == full.token_budget and not full.fits(make(prompt + [9]))
    check_exactness(models, full.samples, padding=0)


def test_half_precision_under_autocast_is_close():
    packed_model, _ = tiny("qwen3")
    row = large_row(pad=None, prompt=20, completion=15).to("cpu")
    outs = []
    for enabled in (False, True):
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            outs.append(logits_of(packed_model, row, TreeMask(row)))
    assert (outs[0] - outs[1].float()).abs().mean() < 0.1 * outs[0].abs().mean()


def test_attention_refuses_what_it_cannot_do():
    q, k, v = attention_inputs(4)
    row = pack_row([make([1, 2, 3, 4])], 8)
    with pytest.raises(ValueError, match="tree=TreeMask"):
        attention.tree_attention(None, q, k, v)
    with pytest.raises(ValueError, match="dropout is 0.1"):
        attention.tree_attention(None, q, k, v, tree=TreeMask(row), dropout=0.1)


def test_compiled_layers_are_traced_once_for_rows_of_one_length(flex_gradients_on_cpu):
    """Each row brings a new TreeMask: no graph break, no recompilation, the gradients of eager."""
    (model, _), (eager, _) = tiny("mistral"), tiny("mistral")
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    for layer in model.model.layers:
        layer.compile(backend="aot_eager", fullgraph=True, dynamic=False)
    for seed in range(3):
        rng = np.random.default_rng(seed)
        samples = [make(rng.integers(0, VOCAB, 60)) for _ in range(4)]
        row = pack_row(samples, 500, bucket).to("cpu")
        tree = TreeMask(row, "flex")
        if seed == 0:
            with pytest.raises(Exception, match="call TreeMask.prepare"):
                logits_of(model, row, tree)
        for m, t in ((model, tree.prepare(model.config)), (eager, TreeMask(row))):
            m.zero_grad()
            logits = logits_of(m, row, t)
            score(logits, row.term_positions, row.term_targets, 1.0)[1].backward()
        for p, q in zip(model.parameters(), eager.parameters()):
            torch.testing.assert_close(p.grad, q.grad, rtol=1e-4, atol=1e-4)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1  # the layers are alike


# ---------------------------------------------------------------- planner


def plan(samples, budget=20, world=1, accumulation=1, **options):
    return plan_steps(
        samples,
        token_budget=budget,
        world_size=world,
        gradient_accumulation_steps=accumulation,
        **options,
    )


def rows_of(plans):
    return [[[row.samples for row in batch] for batch in p.micro_batches] for p in plans]


@st.composite
def streams(draw):
    """Groups of samples in the order in which a rollout worker sends them."""
    samples = []
    for group in range(draw(st.integers(1, 6))):
        prompt = draw(st.lists(st.integers(0, 5), min_size=1, max_size=8))
        for _ in range(draw(st.integers(1, 6))):
            ids = prompt + draw(st.lists(st.integers(0, 5), min_size=1, max_size=10))
            trained = [t >= len(prompt) for t in range(len(ids))]
            if draw(st.integers(0, 9)) == 0:
                trained = [False] * len(ids)
            samples.append(make(ids, trained, group=group))
    return samples


@quick
@given(streams(), st.integers(12, 40), st.integers(1, 4), st.integers(1, 3), st.integers(0, 4))
def test_plans_lose_nothing_and_keep_every_limit(samples, budget, world, accumulation, stale_every):
    def is_stale(sample, step):
        return bool(stale_every) and id(sample) in stale

    stale = {id(s) for s in samples[::stale_every]} if stale_every else set()
    try:
        plans = list(plan(samples, budget, world, accumulation, is_stale=is_stale))
    except ValueError as error:
        assert "smaller than every one" in str(error)
        assert all(
            len(s.input_ids) > budget or not s.trained.any() or id(s) in stale for s in samples
        )
        return
    dropped = sum((p.dropped for p in plans), start=Counter())
    left_over = plans and not plans[-1].micro_batches
    if left_over:  # it only says what was dropped
        assert plans.pop().dropped
    placed = [s for p in plans for row in p.rows for s in row.samples]
    assert dropped.total() == len(samples) - len(placed)
    wanted = [
        s for s in samples if len(s.input_ids) <= budget and s.trained.any() and id(s) not in stale
    ]
    assert {id(s) for s in placed} == {id(s) for s in wanted} and len(placed) == len(wanted)
    for i, p in enumerate(plans):
        assert p.step == i
        last = p is plans[-1]
        assert len(p.micro_batches) == accumulation or (last and 0 < len(p.micro_batches))
        for batch in p.micro_batches:
            assert len(batch) == world
            for row in batch:
                assert row.samples and max(row.n_tokens, row.n_terms) <= budget
                assert row.n_terms or (last and batch is p.micro_batches[-1])
        assert p.n_trained == [sum(row.n_terms for row in batch) for batch in p.micro_batches]
        for name, value, weight in planner.batch_metrics(p, budget, bucket):
            assert np.isfinite(value) and weight > 0, name
        assert [p.samples(rank) for rank in range(world)] == [
            [batch[rank].samples for batch in p.micro_batches] for rank in range(world)
        ]


def test_a_group_stays_in_its_row_and_new_groups_go_to_the_cheapest():
    a = [make([1, 2, 3, t], group=1) for t in range(3)]
    b = [make([5, 6, t], group=2) for t in range(2)]
    c = make([7, 8, 9], group=3)
    # a0 -> row 0, a1 with its group, b0 -> the empty row, a2 home, b1 home, c -> row 1 (cheaper)
    (step,) = plan([a[0], a[1], b[0], a[2], b[1], c], world=2)
    assert rows_of([step]) == [[[[a[0], a[1], a[2]], [b[0], b[1], c]]]]


def test_a_full_home_row_spills_only_where_it_costs_no_time():
    # One prompt token and 6 of completion: the first sample costs 1 + ... + 7 = 28 pairs, each
    # further one of its group 2 + ... + 7 = 27. A row of 14 tokens takes two: 13 tokens, 55 pairs.
    group = [make([1] + [10 + t] * 6, group=1) for t in range(4)]
    # an empty row is left: the third goes there although it costs 28 again, and the fourth joins it
    (step,) = plan(group, budget=14, world=2)
    assert rows_of([step]) == [[[group[:2], group[2:]]]]
    # 6 tokens (21 pairs) in the other row: with the third it costs 49, still less than 55
    other = make([5] * 6, group=2)
    (step,) = plan([*group[:2], other, group[2]], budget=14, world=2)
    assert rows_of([step]) == [[[group[:2], [other, group[2]]]]]
    # 7 tokens (28 pairs): the third would fit (14 tokens) but make it cost 56, so the micro-batch
    # closes; in the next one the group is together again and the other process keeps step
    other = make([5] * 7, group=2)
    first, second = plan([*group[:2], other, *group[2:]], budget=14, world=2)
    assert rows_of([first]) == [[[group[:2], [other]]]]
    assert second.samples(0) == [group[2:]] and second.n_trained == [12]
    assert second.samples(1)[0][0].input_ids is group[2].input_ids
    # a sample of a new group has no prompt to lose: it goes wherever it fits
    new = make([6] * 7, group=3)
    (step,) = plan([*group[:2], other, new], budget=14, world=2)
    assert rows_of([step]) == [[[group[:2], [other, new]]]]


def test_a_partial_last_step_keeps_every_process_busy():
    sample = make([1, 2, 3], k=2)
    sample.set_ids, sample.set_offsets = np.array([2, 3], np.int32), np.array([0, 1, 2], np.int32)
    (step,) = plan([sample], world=3, accumulation=4)
    assert len(step.micro_batches) == 1 and step.n_trained == [2]
    assert (step.n_tokens, step.n_samples, step.n_groups) == (3, 1, 1)
    for samples in (step.samples(1), step.samples(2)):
        ((copy,),) = samples
        assert copy.input_ids is sample.input_ids and not copy.trained.any()
        row = pack_row([copy], 20)
        assert row.n_tokens == 3 and row.term_positions.shape == (0,)
        assert row.top_ids.shape == (0, 2) and row.set_offsets.tolist() == [0]
    assert sample.trained.tolist() == [False, True, True]  # the original is as it was


def test_the_closing_sample_opens_the_next_step_and_is_asked_again():
    samples = [make([t] * 6, group=t) for t in range(5)]
    asked = []

    def is_stale(sample, step):
        asked.append((sample.group_id, step))
        return (sample.group_id, step) == (2, 1)

    plans = list(plan(samples, budget=12, is_stale=is_stale))
    # step 0 takes 0 and 1; 2 closes it, and is too old for step 1, which takes 3 and 4
    assert rows_of(plans) == [[[samples[:2]]], [[samples[3:]]]]
    assert asked == [(0, 0), (1, 0), (2, 0), (2, 1), (3, 1), (4, 1)]
    assert [p.dropped["stale"] for p in plans] == [0, 1]


def test_oversize_and_untrained_samples_are_counted_drops(caplog, monkeypatch):
    good, long = make([1, 2, 3]), make(range(9))
    (step,) = plan([long, good, make([1, 2], [False, False]), long], budget=8)
    assert rows_of([step]) == [[[[good]]]]
    assert step.dropped == {"oversize": 2, "untrained": 1}
    assert "dropped 2 samples longer than token_budget=8" in caplog.text
    metrics = {name: value for name, value, _ in planner.batch_metrics(step, 8)}
    assert metrics["batch/dropped_oversize_count"] == 2
    # nor is a run that ends with one, or has many in the long run, an error
    monkeypatch.setattr(planner, "OVERSIZE_LIMIT", 3)
    plans = list(plan([long, long, make([1] * 8), make([2] * 8)] * 3 + [long, long], budget=8))
    assert [p.n_samples for p in plans] == [1] * 6


def test_a_budget_below_every_sample_is_an_error_not_an_endless_wait(monkeypatch):
    with pytest.raises(ValueError, match="token_budget=4 .* 2 samples .* shortest has 5 tokens"):
        list(plan([make(range(9)), make(range(5))], budget=4))

    def endless():
        while True:
            yield make(range(9))

    monkeypatch.setattr(planner, "OVERSIZE_LIMIT", 30)
    with pytest.raises(ValueError, match="last 30 samples"):
        next(plan(endless(), budget=4))
    with pytest.raises(ValueError, match="token_budget=1"):
        next(plan([make([1, 2])], budget=1))


def test_batch_metrics_of_a_hand_made_step():
    # row 0: prompt 1 2 with completions 3 and 4 -> 4 unique of 6 tokens, 1 + 2 + 3 + 3 = 9 pairs;
    # row 1: 5 6 7, all but the first trained -> 3 tokens, 6 pairs
    trained = [False, False, True]
    (step,) = plan(
        [
            make([1, 2, 3], trained, group=1),
            make([5, 6, 7], group=2),
            make([1, 2, 4], trained, group=1),
        ],
        budget=8,
        world=2,
    )
    records = {n: (v, w) for n, v, w in planner.batch_metrics(step, 8, lambda n: 4)}
    assert records == {
        "batch/forwarded_tokens_per_step": (7, 1),
        "batch/trained_tokens_per_step": (4, 1),
        "batch/samples_per_step": (3, 1),
        "batch/groups_per_step": (2, 1),
        "batch/microbatches_per_step": (1, 1),
        "batch/masked_token_frac": (5 / 9, 9),
        "batch/samples_per_row": (1.5, 2),
        "batch/row_tokens_mean": (3.5, 2),
        "batch/row_tokens_max": (4, 1),
        "batch/row_fill_frac": (7 / 16, 2),
        "batch/packing_ratio": (9 / 7, 7),
        "batch/pad_frac": (1 / 8, 8),
        "batch/dropped_oversize_count": (0, 1),
        "batch/row_imbalance": (9 / 7.5, 1),
    }


# ---------------------------------------------------------------- the planner's thread


def source(samples, pulled=None):
    """pull(timeout) over a list."""
    items = iter(samples)

    def pull(timeout):
        sample = next(items, END)
        if pulled is not None and sample is not END:
            pulled.append(sample)
        return sample

    return pull


def start(pull, **options):
    return Planner(
        pull, **{**dict(token_budget=12, world_size=1, gradient_accumulation_steps=1), **options}
    )


def test_planner_hands_out_every_step_then_none():
    samples = [make([t] * 6, group=t) for t in range(5)]
    planner = start(source(samples), first_step=7)
    plans = [planner.next(5) for _ in range(3)]
    assert all(isinstance(p, Plan) for p in plans) and [p.step for p in plans] == [7, 8, 9]
    assert rows_of(plans) == rows_of(plan(samples, budget=12))
    assert planner.next(5) is None and planner.next(5) is None
    assert planner.left_over is None
    planner.close()


def test_planner_keeps_what_was_dropped_after_the_last_step():
    samples = [make([t] * 6, group=t) for t in range(3)]
    samples[2].closes_group = True
    # step 0 takes 0 and 1; 2 closes it, and is too old for step 1, which then has none
    planner = start(source(samples), is_stale=lambda sample, step: step == 1)
    assert planner.next(5).n_samples == 2 and planner.next(5) is None
    assert planner.left_over.dropped == {"stale": 1} and planner.left_over.ended_groups == {2}
    planner.close()


def test_planner_plans_one_step_ahead():
    pulled = []
    planner = start(source([make([t] * 6, group=t) for t in range(40)], pulled))
    for handed_out in range(4):
        # a step takes two samples, and the one that closes it
        wanted = 2 * (handed_out + 1) + 1
        deadline = time.monotonic() + 5
        while len(pulled) < wanted and time.monotonic() < deadline:
            time.sleep(0.001)
        time.sleep(0.01)
        assert len(pulled) == wanted
        planner.next(5)
    planner.close()
    assert not planner._thread.is_alive()


def test_planner_raises_the_threads_error_in_the_trainer():
    def pull(timeout):
        raise RuntimeError("the rollout worker died: out of memory")

    planner = start(pull)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="rollout worker died"):
            planner.next(5)
    planner.close()
    planner = start(source([make([1, 99])]), vocab_size=VOCAB)
    with pytest.raises(ValueError, match="token 99"):
        planner.next(5)


def test_planner_waits_no_longer_than_told_and_closes_while_waiting():
    stopped = threading.Event()
    planner = start(lambda timeout: None if stopped.wait(0.01) else None)
    with pytest.raises(TimeoutError, match="no step could be planned in 0.05 s .0 samples"):
        planner.next(0.05)
    planner.close()
    assert not planner._thread.is_alive()
