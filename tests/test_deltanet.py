"""Gated DeltaNet over trees: packed log-probs and gradients are those of separate forwards."""

import functools
import importlib.util
import re
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import make_tokenizer
from hypothesis import given, settings
from hypothesis import strategies as st
from test_end_to_end import finish, group_is_gone, windows
from test_run_sh import ours, start_run_sh

import attention
import deltanet
import model
import packing
from chat import Sample
from config import Config

SHAPE = dict(
    vocab_size=64,
    hidden_size=32,
    num_hidden_layers=4,  # three gated DeltaNet layers, one of attention
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=16,
    intermediate_size=48,
    linear_num_key_heads=2,
    linear_num_value_heads=4,
    linear_key_head_dim=8,
    linear_value_head_dim=8,
    max_position_embeddings=512,
    initializer_range=0.1,
    tie_word_embeddings=True,
)
EXPERTS = dict(
    num_experts=4,
    num_experts_per_tok=2,
    moe_intermediate_size=16,
    shared_expert_intermediate_size=16,
)
FAMILIES = ("qwen3_5", "qwen3_5_moe", "qwen3_next")


def make_model(family, attn=attention.ATTENTION, seed=0):
    import transformers

    attention.register_attention()
    rope = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}
    if family != "qwen3_next":
        rope |= {"mrope_section": [2, 1, 1], "mrope_interleaved": True}
    options = SHAPE | (EXPERTS if family != "qwen3_5" else {}) | {"rope_parameters": rope}
    config_class, model_class = {
        "qwen3_5": (transformers.Qwen3_5TextConfig, transformers.Qwen3_5ForCausalLM),
        "qwen3_5_moe": (transformers.Qwen3_5MoeTextConfig, transformers.Qwen3_5MoeForCausalLM),
        "qwen3_next": (transformers.Qwen3NextConfig, transformers.Qwen3NextForCausalLM),
    }[family]
    config = config_class(**options, attn_implementation=attn)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        found = model_class(config)
    with torch.no_grad():  # decays that forget neither all nor nothing within a segment
        for name, parameter in found.named_parameters():
            if name.endswith("A_log"):
                parameter.copy_(torch.linspace(-4, 0, parameter.numel()))
    return found


def make_sample(ids, prompt):
    ids = np.asarray(ids, np.int32)
    n = len(ids) - prompt
    return Sample(
        input_ids=ids,
        trained=np.arange(len(ids)) >= prompt,
        sampler_log_probs=np.zeros(len(ids), np.float32),
        top_ids=np.zeros((n, 0), np.int32),
        top_log_probs=np.zeros((n, 0), np.float32),
        versions=np.zeros(len(ids), np.int32),
        advantage=1.0,
    )


def random_tree(rng, n_samples, lengths, vocab=64):
    """Samples that part from each other at random places; a branch has one of these lengths."""
    samples = [rng.integers(0, vocab, rng.choice(lengths) + 1)]
    while len(samples) < n_samples:
        stem = samples[rng.integers(len(samples))]
        stem = stem[: rng.integers(0, len(stem) + 1)]
        samples.append(np.append(stem, rng.integers(0, vocab, rng.choice(lengths) + 1)))
    return [make_sample(ids, 1) for ids in samples]


def packed(policy, samples, pad=7):
    """Log-probs of every trained token, sample after sample, from one padded row."""
    row = packing.pack_row(samples, 1 << 20, lambda n: n + pad).to("cpu")
    tree = attention.TreeMask(row).prepare(policy.model.config)
    return policy(row, tree, 1.0)[0][:, 0]


def separate(reference, samples):
    """The same from transformers' own forward, one sample at a time."""
    found = []
    for sample in samples:
        ids = torch.from_numpy(sample.input_ids).long()
        logits = reference(input_ids=ids[None], use_cache=False).logits[0]
        scores = logits.float().log_softmax(-1)[:-1].gather(1, ids[1:, None])[:, 0]
        found.append(scores[torch.from_numpy(sample.trained[1:])])
    return torch.cat(found)


def gradients(module, log_probs):
    """{name: gradient} of a sum that weighs each token differently."""
    (log_probs * torch.linspace(-1, 1, len(log_probs))).sum().backward()
    named = module.named_parameters()
    return {n.split("model.")[-1]: p.grad for n, p in named if p.grad is not None}


def distance(found, expected):
    return float(((found - expected).norm() / expected.norm()).detach())


# ---------------------------------------------------------------- whole models


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("seed", range(3))
def test_packed_equals_separate_in_log_probs_and_all_gradients(family, seed, monkeypatch):
    """Segments of 1 token up, shorter than the convolution (4) and than a chunk (64). The bound is
    1e-5 beyond the noise of the torch form, which is taken from itself with chunks of 16 tokens
    instead of 64: relative 2e-7 in log-probs, 5e-6 to 3e-5 in the noisiest gradient. Ours differs
    by 2e-7, and 4e-6 to 2e-5."""
    samples = random_tree(np.random.default_rng(seed), 8, (1, 2, 3, 5, 40, 70, 130))
    policy = model.Policy(make_model(family, seed=seed))
    log_probs = packed(policy, samples)
    found = gradients(policy, log_probs)

    references = []
    for chunk in (deltanet.CHUNK, 16):
        reference = make_model(family, "eager", seed)
        module = sys.modules[type(reference).__module__]
        rule = functools.partial(deltanet._torch_form(), chunk_size=chunk)
        monkeypatch.setattr(module, "torch_chunk_gated_delta_rule", rule)
        expected = separate(reference, samples)
        references.append((expected, gradients(reference, expected)))
    (expected, expected_gradients), (noisy, noisy_gradients) = references
    noise = distance(noisy, expected)
    assert distance(log_probs, expected) < 1e-5 + noise
    assert found.keys() == expected_gradients.keys()
    for name, gradient in expected_gradients.items():
        noise = distance(noisy_gradients[name], gradient)
        assert distance(found[name], gradient) < 1e-5 + 2 * noise, name


def test_checkpointing_a_layer_changes_no_gradient():
    samples = random_tree(np.random.default_rng(5), 5, (2, 5, 70))
    found = []
    for checkpointing in (False, True):
        policy = model.Policy(make_model("qwen3_5"))
        if checkpointing:
            policy.model.gradient_checkpointing_enable({"use_reentrant": False})
        found.append(gradients(policy.train(), packed(policy, samples)))
    plain, recomputed = found
    assert all(torch.equal(recomputed[name], gradient) for name, gradient in plain.items())


# ---------------------------------------------------------------- one layer, against its definition


def plain_layer(qkv, weight, decay, beta, parents, shape):
    """The layer token by token in float64. parents: each token's predecessor, -1 at a root."""
    key_heads, key_dim, value_heads, value_dim = shape
    width, states, outs = weight.shape[1], [], []
    for t, parent in enumerate(parents):
        mixed, at = 0, t
        for w in reversed(range(width)):
            mixed = mixed + weight[:, w] * (qkv[at] if at >= 0 else 0)
            at = parents[at] if at >= 0 else -1
        sizes = [key_heads * key_dim, key_heads * key_dim, value_heads * value_dim]
        q, k, v = (mixed * torch.sigmoid(mixed)).split(sizes)
        q, k, v = q.view(key_heads, -1), k.view(key_heads, -1), v.view(value_heads, -1)
        q, k = (x / (x.pow(2).sum(-1, keepdim=True) + 1e-6).sqrt() for x in (q, k))
        q, k = (x.repeat_interleave(value_heads // key_heads, 0) for x in (q, k))
        state = states[parent] if parent >= 0 else torch.zeros(value_heads, key_dim, value_dim)
        state = state.double() * decay[t].exp()[:, None, None]
        read = torch.einsum("hkv,hk->hv", state, k)
        state = state + torch.einsum("hk,hv->hkv", k, beta[t][:, None] * (v - read))
        states.append(state)
        outs.append(torch.einsum("hkv,hk->hv", state, q) * key_dim**-0.5)
    return torch.stack(outs)


@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 1 << 30),
    n_samples=st.integers(1, 7),
    lengths=st.sampled_from([(1,), (1, 2, 3, 4), (1, 3, 30), (63, 64, 65)]),
    replay=st.sampled_from([0, 3, deltanet.REPLAY]),
    pad=st.integers(0, 5),
)
def test_mixing_over_a_tree_is_the_recurrence_along_each_path(
    seed, n_samples, lengths, replay, pad
):
    rng, shape = np.random.default_rng(seed), (1, 4, 2, 3)
    row = packing.pack_row(
        random_tree(rng, n_samples, lengths, vocab=3), 1 << 20, lambda n: n + pad
    )
    size = len(row.input_ids)
    parents = np.arange(size) - 1
    for start, _, parent, _ in row.segments:
        parents[start] = row.segments[parent][1] - 1 if parent >= 0 else -1
    parents[row.n_tokens : row.n_tokens + 1] = -1  # padding is a sequence of its own
    generator = torch.Generator().manual_seed(seed)
    channels = 2 * shape[0] * shape[1] + shape[2] * shape[3]
    inputs = [
        torch.randn(size, channels, generator=generator, dtype=torch.float64),
        torch.randn(channels, 4, generator=generator, dtype=torch.float64),
        -torch.rand(size, shape[2], generator=generator, dtype=torch.float64) / 2,
        torch.rand(size, shape[2], generator=generator, dtype=torch.float64),
    ]
    upstream = torch.randn(size, *shape[2:], generator=generator, dtype=torch.float64)
    exact = [x.clone().requires_grad_() for x in inputs]
    expected = plain_layer(*exact, parents.tolist(), shape)
    expected_gradients = torch.autograd.grad(expected, exact, upstream)
    rounded = [x.float().requires_grad_() for x in inputs]
    trie = deltanet.Trie(row.segments, size, 4, "cpu", replay)
    found = deltanet.mix(*rounded, trie, shape)
    assert distance(found.double(), expected) < 1e-5
    for x, y in zip(torch.autograd.grad(found, rounded, upstream.float()), expected_gradients):
        assert distance(x.double(), y) < 1e-5


# ---------------------------------------------------------------- the tree


def test_a_chain_is_one_run_and_short_forks_are_no_level():
    # 0 [0, 100) is continued by 1 [100, 200) alone: one run. It forks into 2 and 5, which start
    # from its state. 2 [200, 210) forks after 10 tokens: no state is kept, 3 and 4 replay it.
    segments = [
        (0, 100, -1, 0),
        (100, 200, 0, 100),
        (200, 210, 1, 200),
        (210, 300, 2, 210),
        (300, 301, 2, 210),
        (301, 400, 1, 200),
    ]
    assert deltanet.plan_runs(segments, replay=64) == [
        (0, -1, [(0, 100), (100, 200)]),
        (1, 0, [(200, 210), (210, 300)]),
        (1, 0, [(200, 210), (300, 301)]),
        (1, 0, [(301, 400)]),
    ]
    # Without replaying, the fork at 210 is a level of its own, and the last leaf waits for the
    # others.
    assert deltanet.plan_runs(segments, replay=9) == [
        (0, -1, [(0, 100), (100, 200)]),
        (1, 0, [(200, 210)]),
        (2, 1, [(210, 300)]),
        (2, 1, [(300, 301)]),
        (2, 0, [(301, 400)]),
    ]


def test_twelve_turns_that_only_grow_are_one_call():
    turns = [make_sample(np.arange(10 * n) % 60, 1) for n in range(1, 13)]  # each extends the last
    row = packing.pack_row(turns, 1 << 20)
    assert len(row.segments) == 12
    trie = deltanet.Trie(row.segments, row.n_tokens, 4, "cpu")
    assert trie.sizes == [120] and trie.in_order


def test_seams_read_the_path_and_zeros_before_it():
    # Segments "abcde" (0-4), its children "f" (5) and "gh" (6, 7), a root "i" (8). Width 3:
    # position p is at p + 2 in the padded row, the zeros at 0 and 1. "f" follows its parent.
    segments = [(0, 5, -1, 0), (5, 6, 0, 5), (6, 8, 0, 5), (8, 9, -1, 0)]
    rows, taps = deltanet.seams(segments, width=3)
    assert rows.tolist() == [6, 7, 8]
    #                        g = d e g  h = e g h  i
    assert taps.tolist() == [[5, 6, 8], [6, 8, 9], [0, 1, 10]]


def test_separate_samples_need_no_gather():
    rng = np.random.default_rng(0)
    samples = [make_sample(np.append(i, rng.integers(0, 9, 5)), 1) for i in range(4)]
    row = packing.pack_row(samples, 1 << 20, lambda n: n + 3)
    trie = deltanet.Trie(row.segments, len(row.input_ids), 4, "cpu")
    assert trie.in_order and trie.sizes == [27] and trie.levels[0].lengths == [6, 6, 6, 6, 3]


# ---------------------------------------------------------------- around it


def test_flops_of_a_hybrid_by_hand():
    policy = model.Policy(make_model("qwen3_5"))
    # A token: three DeltaNet layers (qkv 32 x 64, z 32 x 32, b and a 32 x 4 each, convolution
    # 64 x 4, out 32 x 32), one of attention (q and gate 32 x 64, k and v 32 x 16 each, o 32 x 32),
    # four MLPs (3 x 32 x 48): 3 * 4608 + 4096 + 4 * 4608 = 36352 weights, 6 FLOPs each. Recurrence:
    # 4 heads of 8 x 8, 6 FLOPs, 3 layers, 3 passes: 13824. A pair: 12 * 2 heads * 16 = 384, in one
    # layer. A loss term: 6 * 64 * 32 = 12288.
    row = SimpleNamespace(pairs=lambda window: 100, n_tokens=10, term_targets=[0] * 5)
    by_hand = 10 * (6 * 36352 + 13824) + 100 * 384 + 5 * 12288
    assert model.row_flops(policy, row) == by_hand


@pytest.mark.parametrize(
    "name, kinds",
    [
        ("Jamba", "linear_attention"),
        ("Lfm2", "conv"),
        ("FalconH1", "hybrid"),
        ("Rwkv", "recurrent"),
    ],
)
def test_other_recurrent_layers_are_refused_by_name(tmp_path, name, kinds):
    import transformers

    options = {"full_attn_idxs": [1]} if name == "Lfm2" else {}
    checkpoint = getattr(transformers, f"{name}Config")(**options)
    checkpoint.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=f"{checkpoint.model_type} has layers of kind {kinds};.*"):
        model.checkpoint_config(Config(), tmp_path)


def test_a_gpu_without_the_kernels_is_refused_before_a_server_starts(tmp_path, monkeypatch):
    model.make_tiny_hybrid(tmp_path, tokenizer=make_tokenizer())
    assert model.checkpoint_config(Config(), tmp_path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *more: name != "fla" and find_spec(name, *more)
    )
    with pytest.raises(ValueError, match="pip install flash-linear-attention"):
        model.checkpoint_config(Config(), tmp_path)


@pytest.mark.server
def test_run_sh_trains_a_hybrid_whose_weights_arrive_draws_and_leaves_nothing(tmp_path):
    """In bf16, which run.sh chooses. Adam moves each weight by up to 0.02 a step, a fifth of their
    deviation: log-probs move by more than 1, where bf16 differs from float32 by 0.2."""
    folder = tmp_path / "tiny-hybrid"
    model.make_tiny_hybrid(folder, tokenizer=make_tokenizer())
    options = ["--max_steps", "3", "--learning_rate", "0.02"]
    options += ["--max_concurrent_rollouts", "16"]  # proofs wait for steps in emulated bf16
    process = start_run_sh(folder, tmp_path, *options)
    code, output = finish(process, tmp_path, timeout=300)
    assert code == 0, output[-3000:]
    checks = [window["sampling/sync_check_max"] for window in windows(tmp_path)]
    assert len(checks) == 3 and max(checks) < 0.6
    rewards = r"[01]\.\d+, [01]\.\d+"
    assert re.search(f"first 1 and of the last 1 logged steps: {rewards}", output)
    assert re.search(r"run\.sh: \d+\.\d minutes in all, exit code 0", output)
    assert (tmp_path / "run/final/config.json").exists() and (tmp_path / "run/plot.png").exists()
    assert group_is_gone(process) and ours(folder) == []
