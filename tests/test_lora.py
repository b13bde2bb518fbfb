"""LoRA: only adapters train, the saved adapter is the policy, what cannot work is refused."""

import dataclasses

import pytest
import torch
import transformers as tf
from conftest import load_policy
from test_models import CPU, FAMILIES, make_folder, train_step
from test_trainer import CONFIG, make_samples

import checkpoint
import lora
import model
import packing
import update
from attention import TreeMask

LORA = dataclasses.replace(CONFIG, lora_r=4, learning_rate=1e-2)


def log_probs_of(policy):
    row = packing.pack_row(make_samples(n_groups=1), 64).to(CPU)
    with torch.no_grad():
        return policy(row, TreeMask(row).prepare(policy.model.config), 1.0)[0][:, 0]


@pytest.mark.parametrize("family", ["qwen3", "qwen3_vl", "gemma3_vl", "qwen3_moe"])
def test_only_adapters_train_and_packed_equals_unpacked(family, one_rank, tmp_path):
    folder = make_folder(FAMILIES[family](), tmp_path)
    coefficient = 0.0 if family == "qwen3_moe" else None
    config = dataclasses.replace(LORA, router_aux_loss_coef=coefficient)
    config = dataclasses.replace(config, peft_config={"init_lora_weights": False})  # B is not 0
    samples = make_samples(n_groups=2)
    torch.manual_seed(0)
    packed, metrics, policy = train_step(folder, config, [samples])
    torch.manual_seed(0)
    apart, expected, _ = train_step(folder, config, [[sample] for sample in samples])
    assert packed.keys() == apart.keys() and all(".lora_" in name for name in packed)
    assert not any("vis" in name or "lm_head" in name for name in packed)
    # q, k, v, o in each layer; gate, up and down too where they are linear layers
    assert len(packed) == 3 * 2 * (4 if family == "qwen3_moe" else 7)
    largest = max(float(g.abs().max()) for g in apart.values())
    for name, gradient in apart.items():
        assert float((packed[name] - gradient).abs().max()) <= 1e-5 * max(1.0, largest), name
    assert metrics["loss"] == pytest.approx(expected["loss"], abs=1e-5)


def test_the_saved_adapter_on_its_base_is_the_policy(one_rank, tmp_path):
    folder = make_folder(FAMILIES["qwen3"](), tmp_path / "base")
    *_, policy = train_step(folder, LORA, [make_samples(n_groups=2)])
    target = tmp_path / "final"
    model.save_pretrained(policy, model.load_tokenizer(LORA, folder), target, torch.float32)
    names = {path.name for path in target.iterdir()}
    assert {"adapter_config.json", "adapter_model.safetensors", "tokenizer.json"} <= names
    from peft import PeftModel

    base = tf.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="espalier_tree")
    untouched = log_probs_of(model.make_policy(base))
    merged = PeftModel.from_pretrained(base, target).merge_and_unload()
    found, expected = log_probs_of(model.make_policy(merged)), log_probs_of(policy)
    assert float((expected - untouched).abs().max()) > 1e-3  # the step did something
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    # the folder alone is enough where its base model can be found
    tf.AutoModelForCausalLM.from_pretrained(target)


def test_a_checkpoint_holds_the_adapter_only_and_restores_it(one_rank, tmp_path):
    folder = make_folder(FAMILIES["qwen3"](), tmp_path / "base")
    policy = load_policy(LORA, folder, CPU)
    model.shard(policy, CPU, torch.float32, compile_layers=False)
    optimizer = update.make_optimizer(policy, LORA)
    saves = checkpoint.Checkpoints(tmp_path, policy, optimizer, LORA)
    with torch.no_grad():
        for parameter in (p for p in policy.parameters() if p.requires_grad):
            parameter.normal_()
    saves.save(1, {"num_tokens": 0, "next_prompt": 0, "used": []})
    saves.finish()
    expected = log_probs_of(policy)
    reader = checkpoint.dcp.FileSystemReader(tmp_path / "checkpoint-1")
    saved = [n for n in reader.read_metadata().state_dict_metadata if n.startswith("parameters.")]
    assert len(saved) == 3 * 2 * 7 and all(".lora_" in name for name in saved)
    fresh = load_policy(LORA, folder, CPU)
    model.shard(fresh, CPU, torch.float32, compile_layers=False)
    optimizer = update.make_optimizer(fresh, LORA)
    checkpoint.restore(tmp_path / "checkpoint-1", fresh, optimizer)
    assert torch.equal(log_probs_of(fresh), expected)


@pytest.mark.parametrize(
    "options, words",
    [
        ({"lora_target_modules": "q_proj,lm_head"}, "output head.*lm_head"),
        ({"lora_target_modules": "embed_tokens"}, "embeddings.*embed_tokens"),
        ({"lora_target_modules": "no_such_layer"}, "no_such_layer"),
        ({"lora_target_modules": ".*qkv"}, "visual.*outside the text model"),
        ({"peft_config": {"use_dora": True}}, "use_dora=True is not supported"),
        ({"peft_config": {"modules_to_save": ["norm"]}}, "modules_to_save"),
        ({"peft_config": {"bias": "all"}}, "bias='all'"),
        ({"peft_config": {"lora_dropout": 0.1}}, "lora_dropout=0.1"),
        ({"peft_config": {"target_parameters": ["experts.down_proj"]}}, "target_parameters"),
        ({"peft_config": {"init_lora_weights": "pissa"}}, "pissa.*base model"),
        ({"peft_config": {"peft_type": "IA3"}}, "IA3: only LORA"),
        ({"peft_config": {"rang": 3}}, "rang=3"),
    ],
)
def test_refusals_name_the_value(options, words, one_rank, tmp_path):
    folder = make_folder(FAMILIES["qwen3_vl"](), tmp_path)
    with pytest.raises(ValueError, match=words):
        load_policy(dataclasses.replace(LORA, **options), folder, CPU)


def test_options_become_a_peft_config():
    assert lora.adapter_config(CONFIG) is None
    made = lora.adapter_config(dataclasses.replace(LORA, lora_target_modules="q_proj, v_proj"))
    assert (made.r, made.lora_alpha, made.target_modules) == (4, 8, {"q_proj", "v_proj"})
    made = lora.adapter_config(dataclasses.replace(LORA, peft_config={"r": 2, "lora_alpha": 5}))
    assert (made.r, made.lora_alpha) == (2, 5)
    alone = {"r": 2, "target_modules": ["q_proj"], "rank_pattern": {"q_proj": 3}}
    made = lora.adapter_config(dataclasses.replace(CONFIG, peft_config=alone))
    assert made.r == 2 and made.rank_pattern == {"q_proj": 3}
