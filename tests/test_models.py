"""Every family that is named as supported: a tiny random one trains a packed row as its samples."""

import dataclasses

import pytest
import torch
import transformers as tf
from conftest import load_policy, make_tokenizer
from test_trainer import BUDGET, CONFIG, make_samples

import attention
import grpo
import memory
import model
import packing
import update
from feed import Share

CPU = torch.device("cpu")
SHARED = dict(
    vocab_size=259,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    max_position_embeddings=256,
    initializer_range=0.2,
    pad_token_id=257,
    bos_token_id=None,
    eos_token_id=256,
)
ALTERNATING = ["sliding_attention", "full_attention", "sliding_attention"]
ROPE = {"rope_type": "default", "rope_theta": 10_000.0}
EXPERTS = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=24)
VISION = dict(depth=1, hidden_size=16, intermediate_size=16, num_heads=2, out_hidden_size=32)
QWEN3_VL = dict(
    text_config={
        **SHARED,
        "rope_parameters": ROPE | {"mrope_section": [2, 1, 1], "mrope_interleaved": True},
    },
    vision_config=VISION | {"num_position_embeddings": 16, "deepstack_visual_indexes": [0]},
    image_token_id=1,
    video_token_id=2,
    vision_start_token_id=3,
    vision_end_token_id=4,
)
GEMMA3 = SHARED | dict(
    sliding_window=4,
    query_pre_attn_scalar=8,
    layer_types=ALTERNATING,
    rope_parameters={kind: ROPE for kind in ("sliding_attention", "full_attention")},
)
FAMILIES = {
    "qwen2.5": lambda: tf.Qwen2Config(**SHARED, tie_word_embeddings=True),
    "qwen3": lambda: tf.Qwen3Config(**SHARED),
    "qwen3_moe": lambda: tf.Qwen3MoeConfig(**SHARED, **EXPERTS),
    "qwen3_vl": lambda: tf.Qwen3VLConfig(**QWEN3_VL, tie_word_embeddings=True),
    "llama": lambda: tf.LlamaConfig(**SHARED),
    "mistral": lambda: tf.MistralConfig(**SHARED, sliding_window=4),
    "gemma2": lambda: tf.Gemma2Config(
        **SHARED, sliding_window=4, query_pre_attn_scalar=8, layer_types=ALTERNATING
    ),
    "gemma3": lambda: tf.Gemma3TextConfig(**GEMMA3),
    "gemma3_vl": lambda: tf.Gemma3Config(
        text_config=GEMMA3,
        vision_config=dict(
            hidden_size=16,
            intermediate_size=16,
            num_hidden_layers=1,
            num_attention_heads=2,
            image_size=28,
            patch_size=14,
        ),
        mm_tokens_per_image=4,
    ),
    "gpt_oss": lambda: tf.GptOssConfig(
        **SHARED,
        sliding_window=4,
        num_local_experts=4,
        num_experts_per_tok=2,
        rope_parameters=ROPE,
        layer_types=ALTERNATING,
    ),
}


def make_folder(config, folder):
    kind = tf.AutoModelForCausalLM
    if hasattr(config, "vision_config"):
        kind = tf.AutoModelForImageTextToText
    with torch.random.fork_rng():
        torch.manual_seed(0)
        made = kind.from_config(config, dtype=torch.float32)
        for parameter in made.parameters():  # norms at 0 or 1 and biases at 0 would hide mistakes
            if parameter.ndim == 1:
                parameter.data.add_(0.1 * torch.randn_like(parameter))
    made.save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    return folder


def train_step(folder, config, rows_of_samples):
    """{name: gradient} and metrics of one step over these rows, its loss divided by all terms."""
    policy = load_policy(config, folder, CPU)
    memory.apply(policy, config.checkpointing)
    model.shard(policy, CPU, torch.float32, compile_layers=False)
    optimizer = update.make_optimizer(policy, config)
    rows = [packing.pack_row(samples, BUDGET).to(CPU) for samples in rows_of_samples]
    trees = [attention.TreeMask(row).prepare(policy.model.config) for row in rows]
    n = sum(len(row.term_targets) for row in rows)
    tokens = [row.n_tokens for row in rows]
    share = Share(rows_of_samples, [n] * len(rows), [t / sum(tokens) for t in tokens], 0.0)
    seen = update.forward_backward(policy, config, share, rows, trees, grpo.Clock(CPU))
    gradients = {
        name: p.grad.clone() for name, p in policy.model.named_parameters() if p.grad is not None
    }
    norm = update.clip_gradients(policy, config.max_grad_norm)
    optimizer.step()
    records, *_ = update.gather_metrics(seen, norm)
    return gradients, {name: value for name, value, _ in records}, policy


@pytest.mark.parametrize("family", FAMILIES)
def test_a_packed_step_equals_the_unpacked_one(family, one_rank, tmp_path):
    folder = make_folder(FAMILIES[family](), tmp_path)
    config = dataclasses.replace(
        CONFIG, router_aux_loss_coef=0.0 if family in ("qwen3_moe", "gpt_oss") else None
    )
    samples = make_samples(n_groups=2)
    packed, metrics, policy = train_step(folder, config, [samples])
    apart, expected, _ = train_step(folder, config, [[sample] for sample in samples])
    for name in ("loss", "entropy", "sampling/importance_sampling_ratio/mean"):
        assert metrics[name] == pytest.approx(expected[name], rel=1e-5, abs=1e-5)
    assert packed.keys() == apart.keys()
    largest = max(float(g.abs().max()) for g in apart.values())
    assert largest > 1e-3
    for name, gradient in apart.items():
        difference = float((packed[name] - gradient).abs().max())
        assert difference <= 1e-5 * max(1.0, largest), f"{name}: {difference}"
    # Every weight of the text model takes part, nothing outside it does.
    trained = {n for n, p in policy.model.named_parameters() if p.requires_grad}
    assert packed.keys() == trained
    frozen = {n for n, p in policy.model.named_parameters() if not p.requires_grad}
    assert bool(frozen) == family.endswith("_vl")
    tower = ("model.visual.", "model.vision_tower.", "model.multi_modal_projector.")
    assert all(name.startswith(tower) for name in frozen)


def test_the_auxiliary_loss_is_transformers_and_leaves_padding_out(one_rank, tmp_path):
    from transformers.models.qwen3_moe.modeling_qwen3_moe import load_balancing_loss_func

    logits = tuple(torch.randn(12, 4, generator=torch.Generator().manual_seed(i)) for i in range(3))
    mask = (torch.arange(12) < 9).float()[None]
    expected = load_balancing_loss_func(logits, num_experts=4, top_k=2, attention_mask=mask)
    torch.testing.assert_close(model.load_balancing_loss(logits, 2, 9), expected)
    # two experts of 2, one always chosen with probability e/(1+e): 2 (1 e/(1+e) + 0)
    always = (torch.tensor([[1.0, 0.0]] * 5),)
    e = torch.e
    assert float(model.load_balancing_loss(always, 1, 5)) == pytest.approx(2 * e / (1 + e))


def test_the_auxiliary_loss_is_added_to_the_loss_and_logged(one_rank, tmp_path):
    folder = make_folder(FAMILIES["qwen3_moe"](), tmp_path)
    rows = [make_samples(n_groups=1, seed=seed) for seed in (1, 2)]
    plain, without, _ = train_step(
        folder, dataclasses.replace(CONFIG, router_aux_loss_coef=0.0), rows
    )
    config = dataclasses.replace(CONFIG, router_aux_loss_coef=0.5)
    balanced, metrics, policy = train_step(folder, config, rows)
    assert "aux_loss" not in without
    # 4 experts, 2 a token: 2 when even
    assert 2 <= metrics["aux_loss"] < 4
    assert metrics["loss"] == pytest.approx(without["loss"] + 0.5 * metrics["aux_loss"], rel=1e-5)
    router = "model.layers.0.mlp.gate.weight"
    assert not torch.allclose(balanced[router], plain[router])
    default = load_policy(CONFIG, folder, CPU)
    assert default.router_aux_loss_coef == policy.model.config.router_aux_loss_coef > 0


@pytest.mark.parametrize("mode, recomputed", [("selective", [1]), ("full", [0, 1, 2])])
def test_recomputing_layers_changes_nothing(mode, recomputed, one_rank, tmp_path):
    folder = make_folder(FAMILIES["qwen3_moe"](), tmp_path)
    config, rows = dataclasses.replace(CONFIG, router_aux_loss_coef=0.5), [make_samples(n_groups=2)]
    expected, metrics, _ = train_step(folder, config, rows)
    config = dataclasses.replace(config, gradient_checkpointing=mode)
    found, again, policy = train_step(folder, config, rows)
    flags = [layer.gradient_checkpointing for layer in model.layers(policy)]
    assert [i for i, flag in enumerate(flags) if flag] == recomputed
    assert again == metrics
    assert all(torch.equal(found[name], gradient) for name, gradient in expected.items())


def test_a_dense_model_has_no_auxiliary_loss(tiny_folder):
    config = dataclasses.replace(CONFIG, router_aux_loss_coef=0.1)
    with pytest.raises(ValueError, match="router_aux_loss_coef 0.1.*qwen3.*mixture of experts"):
        model.checkpoint_config(config, tiny_folder)


def test_flops_of_a_row_by_hand(one_rank, tmp_path):
    # 3 layers of 32 x (32 + 16 + 16 + 32) + 3 x 32 x 48 weights, a head of 259 x 32
    folder = make_folder(FAMILIES["mistral"](), tmp_path / "mistral")
    policy = load_policy(CONFIG, folder, CPU)
    row = packing.pack_row(make_samples(n_groups=1, group_size=1), BUDGET)
    n, m = row.n_tokens, len(row.term_targets)
    pairs = sum(min(position + 1, 4) for position in range(n))  # a window of 4
    expected = 6 * 3 * (32 * 96 + 3 * 32 * 48) * n + 6 * 259 * 32 * m + 3 * 12 * 32 * pairs
    assert model.row_flops(policy, row) == expected
    # experts: 2 of 4 are used; gate 32 x 4, qk-norms are vectors
    folder = make_folder(FAMILIES["qwen3_moe"](), tmp_path / "moe")
    policy = load_policy(CONFIG, folder, CPU)
    layer = 32 * 96 + 2 * 3 * 32 * 24 + 32 * 4
    expected = 6 * 3 * layer * n + 6 * 259 * 32 * m + 3 * 12 * 32 * n * (n + 1) // 2
    assert model.row_flops(policy, row) == expected
