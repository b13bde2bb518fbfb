"""LoRA (arXiv:2106.09685) through peft: low-rank updates of the text part's linear layers train,
the base model stays as it was loaded.

    adapter_config(config)   peft.LoraConfig from lora_r, lora_alpha, lora_target_modules,
                             peft_config; None without any
    wrap(model, ...)         peft's wrapper, refused where server and trainer could not agree

Left out, and refused by name: adapters on the head or the embeddings (the head reads its weight
without them; vLLM serves none there), fully trained modules, biases, DoRA, adapters on fused
experts, dropout (the sampler has none), initialisations that change the base model.
Test: pytest tests/test_lora.py
"""

import re

from torch import nn

ALLOWED = """r lora_alpha target_modules exclude_modules layers_to_transform layers_pattern
    rank_pattern alpha_pattern use_rslora init_lora_weights task_type peft_type inference_mode
    base_model_name_or_path revision""".split()
HARMLESS = (None, False, 0, [], {}, "none")  # an option that switches something off


def adapter_config(config):
    """The peft.LoraConfig that the options ask for, or None."""
    given = dict(config.peft_config or {})
    if config.lora_r is not None:
        given = {
            "r": config.lora_r,
            "lora_alpha": config.lora_alpha or 2 * config.lora_r,
            "target_modules": config.lora_target_modules,
        } | given
    elif not given:
        return None
    if given.get("peft_type", "LORA") != "LORA":
        raise ValueError(f"peft_type {given['peft_type']}: only LORA adapters are supported")
    for name, value in given.items():
        if name not in ALLOWED and value not in HARMLESS:
            raise ValueError(f"peft_config {name}={value!r} is not supported (lora.py says why)")
    if given.get("init_lora_weights", True) not in (True, False, "gaussian"):
        raise ValueError(
            f"init_lora_weights={given['init_lora_weights']!r} changes the base model that the "
            "server has loaded; use true or gaussian"
        )
    targets = given.get("target_modules", "all-linear")
    # a pattern has a character that no module's name has
    if isinstance(targets, str) and targets != "all-linear" and re.fullmatch(r"[\w., ]+", targets):
        targets = [name.strip() for name in targets.split(",")]
    from peft import LoraConfig

    options = given | {"target_modules": targets, "task_type": "CAUSAL_LM"}
    try:
        return LoraConfig(**options)
    except TypeError as error:
        raise ValueError(f"peft_config: {error}") from error


def wrap(model, text_model, adapter):
    """peft's model around `model`, whose `text_model` gets the adapters; nothing else trains."""
    from peft import get_peft_model
    from peft.tuners.tuners_utils import BaseTunerLayer

    if adapter.target_modules == "all-linear":
        # peft's own idea of it takes in vision towers and fused experts
        path = next(n for n, module in model.named_modules() if module is text_model)
        linear = [n for n, m in model.named_modules() if isinstance(m, nn.Linear)]
        names = {n.rpartition(".")[2] for n in linear if n.startswith(path + ".")}
        elsewhere = {n.rpartition(".")[2] for n in linear if not n.startswith(path + ".")}
        if names & elsewhere:
            names = rf"(.*\.)?{re.escape(path)}\..*\.({'|'.join(sorted(names))})"
        adapter.target_modules = names
    wrapped = get_peft_model(model, adapter)
    for what, module in (
        ("output head", wrapped.get_output_embeddings()),
        ("embeddings", wrapped.get_input_embeddings()),
    ):
        if isinstance(module, BaseTunerLayer):
            raise ValueError(
                f"the adapter's target_modules match the {what}, where it would not be applied on "
                "both sides; leave lm_head and embed_tokens out of --lora_target_modules"
            )
    inside = {id(module) for module in text_model.modules()}
    outside = [
        name
        for name, module in wrapped.named_modules()
        if isinstance(module, BaseTunerLayer) and id(module) not in inside
    ]
    if outside:
        raise ValueError(
            f"the adapter's target_modules match {outside[0]}, outside the text model, which is "
            "all that is trained; make --lora_target_modules narrower"
        )
    return wrapped
