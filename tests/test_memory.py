"""The memory estimate: never below what a layer keeps, and the choice that follows from it."""

import dataclasses
from types import SimpleNamespace

import pytest
import torch
from conftest import load_policy
from test_models import CPU, FAMILIES, make_folder
from test_trainer import CONFIG, make_samples

import attention
import memory
import packing


def kept_bytes(policy, row):
    """What autograd keeps between forward and backward, parameters left out; each storage once."""
    parameters = {p.untyped_storage().data_ptr() for p in policy.parameters()}
    kept = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters:
            kept[storage.data_ptr()] = storage  # held, so that no address comes twice
        return tensor

    tree = attention.TreeMask(row).prepare(policy.model.config)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        policy(row, tree, 1.0)
    return sum(storage.nbytes() for storage in kept.values())


@pytest.mark.parametrize("mode", ["none", "selective", "full"])
@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3"])
def test_the_estimate_covers_what_layers_keep(family, mode, one_rank, tmp_path):
    folder = make_folder(FAMILIES[family](), tmp_path)
    policy = load_policy(CONFIG, folder, CPU)
    samples = make_samples(n_groups=40, group_size=4)
    row = packing.pack_row(samples, 4096).to(CPU)
    sizes = memory.estimate(
        policy, row_tokens=row.n_tokens, compute_dtype=torch.float32, shards=1, compiled=False
    )
    nothing = memory.estimate(
        policy, row_tokens=0, compute_dtype=torch.float32, shards=1, compiled=False
    )
    memory.apply(policy, mode)
    kept, estimated = kept_bytes(policy, row), sizes[mode] - nothing[mode]
    estimated -= row.n_tokens * 259 * memory.TILE_BYTES  # the head's tile is not kept
    if mode != "none":  # what one layer keeps while it runs again, which is after this count
        layer = memory.layer_elements(policy.model.config.get_text_config())
        estimated -= layer * 4 * 2 * row.n_tokens
    # never low, and not so high that the choice would mean nothing
    assert kept < estimated < 3 * kept


def test_states_and_layers_by_hand(one_rank, tmp_path):
    folder = make_folder(FAMILIES["llama"](), tmp_path)
    policy = load_policy(CONFIG, folder, CPU)
    options = dict(row_tokens=0, compute_dtype=torch.bfloat16, compiled=True)
    layer = 32 * (32 + 16 + 16 + 32) + 3 * 32 * 48 + 2 * 32
    root = 2 * 259 * 32 + 32
    total = 3 * layer + root
    # 16 bytes a weight by shard; gathered in 2 bytes: root, two layers; gradients in 2 and 4 bytes
    expected = 16 * total / 2 + (root + 2 * layer) * 2 + (root + layer) * 6
    assert memory.estimate(policy, shards=2, **options) == dict.fromkeys(
        ("none", "selective", "full"), expected
    )
    whole = memory.estimate(policy, shards=2, whole_gradients=True, **options)
    assert whole["none"] == expected + 4 * total
    # one rank alone keeps all three layers gathered, unless its masters are in host memory
    alone = memory.estimate(policy, shards=1, **options)
    assert alone["none"] == 16 * total + (root + 3 * layer) * 2 + (root + layer) * 6
    offloaded = memory.estimate(policy, shards=1, cpu_offload=True, **options)
    assert offloaded["none"] == (root + 2 * layer) * 2 + (root + layer) * 6
    # 5 x 32 + 3 x (32 + 16 + 16) + 2 x 48 elements a token and layer
    assert memory.layer_elements(policy.model.config) == 5 * 32 + 3 * 64 + 2 * 48


def test_the_choice_is_the_least_recomputation_that_fits(one_rank, tmp_path, monkeypatch):
    deep = FAMILIES["llama"]()
    deep.num_hidden_layers = 8
    folder = make_folder(deep, tmp_path)
    policy = load_policy(CONFIG, folder, CPU)
    auto = dataclasses.replace(CONFIG, gradient_checkpointing="auto", gradient_accumulation_steps=2)
    monkeypatch.setattr(memory.dist, "get_world_size", lambda: 2)
    sizes = memory.estimate(
        policy, row_tokens=10**6, compute_dtype=torch.float32, shards=2, compiled=False
    )
    assert sizes["full"] < sizes["selective"] < sizes["none"]

    def choose(usable, config=auto):
        monkeypatch.setattr(memory, "device_memory", lambda device: usable / memory.USABLE)
        return memory.choose(policy, config, 10**6, CPU, False)

    whole = 4 * sum(p.numel() for p in policy.parameters())  # float32 gradients before reduction
    for mode in ("none", "selective", "full"):
        found, reduce_each, sentence = choose(sizes[mode] + whole + 10)
        assert (found, reduce_each) == (mode, False)
        assert sentence.startswith(f"gradient checkpointing: {mode} (estimated GiB")
        found, reduce_each, sentence = choose(sizes[mode] + whole / 2)
        assert (found, reduce_each) == (mode, True) and "every micro-batch" in sentence
    assert choose(0)[0] == "full"
    asked = dataclasses.replace(auto, gradient_checkpointing=True)
    assert choose(sizes["none"] * 2, asked)[0] == "full"


def test_mixtures_count_the_experts_that_a_token_uses():
    config = dict(hidden_size=8, num_attention_heads=2, head_dim=4, intermediate_size=100)
    dense = memory.layer_elements(SimpleNamespace(**config))
    mixture = SimpleNamespace(**config, num_experts_per_tok=2, moe_intermediate_size=5)
    assert dense - memory.layer_elements(mixture) == 2 * (100 - 2 * 5)
