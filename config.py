"""The configuration: every option, its default, what it does, and how the command line is read.

Names and defaults are the spec's where it has the option. Precedence: the default, then the task
file's `config_overrides`, then the options of the run to --replay, then the command line. A task's
own options (its `Options` dataclass) are given the same way. What can be wrong before a server is
needed is a ValueError of one line here.

Test: pytest tests/test_config.py
"""

import difflib
import inspect
import json
import math
import re
import typing
from dataclasses import dataclass
from pathlib import Path

import torch

import dump
import tasks
from metrics import sink_names


@dataclass(frozen=True)
class Config:
    """Every option. `--help` shows the comments, so each field has one, in its line."""

    # --- what is trained
    model: str = "smollm2-135m"  # folder, hub id, or made here: smollm2-135m, tiny-qwen3.5
    env: str = "arithmetic"  # task file: a name in envs/ or a path
    model_init_kwargs: dict | None = None  # further arguments of from_pretrained, as JSON
    dtype: str = "float32"  # of the master weights: auto, bfloat16 or float32
    trust_remote_code: bool = False  # allow models and tokenizers that bring their own code
    attention: str = "auto"  # auto, flash, flex, varlen or sdpa
    gradient_checkpointing: str = "auto"  # recompute layers: none, selective, full; auto: as fits
    torch_compile: bool | None = None  # compile each decoder layer; default: on CUDA
    bf16: bool | None = None  # compute in bfloat16 (masters keep dtype); default: on CUDA
    fp16: bool = False  # compute in float16 with a scaled loss; serve in float16 as well
    tf32: bool | None = None  # float32 products in TF32 on CUDA; default: PyTorch's setting
    router_aux_loss_coef: float | None = None  # of the experts' balance; default: the model's own
    lora_r: int | None = None  # rank of LoRA adapters; default: none, all weights train
    lora_alpha: int | None = None  # adapters are scaled by alpha / r; default: twice lora_r
    lora_target_modules: str = "all-linear"  # names with commas, a pattern, or all-linear
    peft_config: dict | None = None  # further arguments of peft.LoraConfig, as JSON

    # --- generation
    num_generations: int = 8  # rollouts a prompt; the baseline is their mean
    max_completion_length: int = 2048  # tokens a request, so a turn
    temperature: float = 1.0  # of sampling; log-probs on both sides are taken at it
    top_p: float = 1.0  # below 1 needs top_k and a server that returns the candidate set
    top_k: int = 0  # 0: all tokens
    min_p: float | None = None  # least probability relative to the most likely token
    chat_template_kwargs: dict | None = None  # further arguments of apply_chat_template, as JSON
    max_tool_calling_iterations: int | None = None  # turns of a rollout that may call tools
    tool_timeout_s: float = 120.0  # for one tool call; then the model gets an error

    # --- the server
    vllm_server_base_url: str = "http://localhost:8000"  # its address; several: with commas
    vllm_server_timeout: float = 1800.0  # seconds for start-up, a generation request, a sync call

    # --- the loss
    loss: str = "grpo"  # grpo, cispo, gspo or dr_grpo; all but grpo ignore score_centering
    score_centering: bool = True  # centred scores; false: the clipped surrogate
    score_centering_tail: str = "drop"  # outside the sampler's top K: drop or proportional
    num_sampler_logprobs: int = 8  # K: sampler log-probs a token, for score centering
    epsilon: float = 0.2  # clip range below 1
    epsilon_high: float | None = None  # clip range above 1; default: epsilon
    vllm_importance_sampling_clip_min: float = 0.5  # tokens with a smaller ratio have no loss
    vllm_importance_sampling_clip_max: float = 5.0  # tokens with a larger ratio have no loss
    normalize: str = "micro_batch"  # divide by the trained tokens of the micro_batch or the step

    # --- optimisation
    learning_rate: float = 1e-6  # peak of the schedule
    lr_scheduler_type: str = "constant"  # constant, constant_with_warmup, linear or cosine
    warmup_steps: float = 0  # steps of linear warm-up; below 1 a fraction of max_steps
    weight_decay: float = 0.0  # AdamW's, on matrices only
    adam_beta1: float = 0.9  # AdamW's
    adam_beta2: float = 0.999  # AdamW's
    adam_epsilon: float = 1e-8  # AdamW's
    max_grad_norm: float = 1.0  # gradients are scaled down to this norm; 0: never
    gradient_accumulation_steps: int = 1  # micro-batches a step
    token_budget: int | None = None  # unique tokens a row; default: the server's max_model_len
    num_train_epochs: float = 3.0  # passes over the prompts, unless max_steps is set
    max_steps: int = -1  # optimizer steps; above 0 it replaces num_train_epochs

    # --- asynchrony
    max_concurrent_rollouts: int = 512  # ceiling of rollouts in flight
    max_staleness: int = 4  # a sample more weight updates old than this is dropped
    weight_sync_steps: int = 1  # optimizer steps between two syncs
    rollout_worker_timeout: float = 300.0  # seconds without heartbeat: the worker hangs
    rollout_timeout_s: float | None = None  # for one rollout; default: vllm_server_timeout
    check_sync_every: int = 20  # syncs between two proofs that it worked; 0: the first only

    # --- evaluation on held-out prompts
    eval_env: str | None = None  # task file with the held-out prompts and their rewards
    eval_steps: int = 50  # optimizer steps between two evaluations
    eval_prompts: int = 64  # how many of its rows, the first ones; num_generations rollouts each
    eval_pass_reward: float = 1.0  # a rollout with at least this reward passes

    # --- the run
    dump_rollouts: bool = False  # keep every rollout in the run folder, to read and to replay
    replay: str | None = None  # train from what this run dumped, with its options; no server
    output_dir: str | None = None  # default: runs/RUN_NAME
    run_name: str | None = None  # default: task and time
    num_train_processes: int | None = None  # started by run.sh; default: one a training GPU
    replicas: int = 1  # whole copies of the model; the processes of each share one (HSDP)
    cpu_offload: bool = False  # masters, gradients and AdamW in host memory: slow, and large models
    logging_steps: int = 1  # optimizer steps a logging window
    log_completions: bool = False  # print prompts and completions of a group every logging_steps
    num_completions_to_print: int | None = None  # of that group; default: all
    diagnose_steps: int = 10  # optimizer steps between two diagnoses; 0: never
    report_to: str = "auto"  # tensorboard, trackio, wandb, none or a comma-separated list
    disable_tqdm: bool | None = None  # no progress bar; default: unless on a terminal
    seed: int = 42  # of everything random here
    data_seed: int | None = None  # of the order of prompts; default: seed
    train_sampling_strategy: str = "random"  # order of prompts in an epoch: random or sequential
    ddp_timeout: int = 1800  # seconds that one rank waits for the others

    # --- checkpoints
    save_strategy: str = "steps"  # when a checkpoint is saved: steps, epoch or no
    save_steps: float = 500  # optimizer steps between two; below 1 a fraction of max_steps
    save_total_limit: int | None = None  # checkpoints that are kept; default: all
    resume_from_checkpoint: str | None = None  # a checkpoint's folder, or True for the newest
    push_to_hub: bool = False  # upload the model at the end, and at saves: see hub_strategy
    hub_model_id: str | None = None  # USER/NAME there; default: the run folder's name
    hub_strategy: str = "every_save"  # upload at each checkpoint too, or only at the end
    hub_private_repo: bool | None = None  # if the repository is made; default: the account's way
    hub_revision: str | None = None  # branch; default: main

    @property
    def run_folder(self):
        """Where the run lives, if it was named."""
        return self.output_dir or (self.run_name and f"runs/{self.run_name}")

    def steps_of(self, name):
        """An option in steps, where a value below 1 stands for a fraction of max_steps."""
        value = getattr(self, name)
        return math.ceil(value * self.max_steps if 0 < value < 1 else value)

    @property
    def checkpointing(self):
        """gradient_checkpointing as auto, none, selective or full."""
        given = str(self.gradient_checkpointing).lower()
        return {"true": "full", "false": "none"}.get(given, given)

    @property
    def is_centered(self):
        """Whether the loss is score centering, which needs the sampler's head."""
        return self.score_centering and self.loss == "grpo"

    @property
    def compute_dtype(self):
        if self.fp16:
            return torch.float16
        bf16 = torch.cuda.is_available() if self.bf16 is None else self.bf16
        return torch.bfloat16 if bf16 else torch.float32


# Options of the spec that are not here, each with its reason.
_NO_TRAINER = "there is no trainer class: edit the loop in grpo.py"
_ROWS = "rows are filled up to token_budget, not by a count of samples"
REFUSED = {
    "per_device_train_batch_size": _ROWS,
    "auto_find_batch_size": _ROWS,
    "deepspeed": "sharded training is FSDP2",
    "fsdp": "several training processes (num_train_processes) always share the model by FSDP2",
    "fsdp_config": "FSDP2 needs no options here",
    "accelerator_config": _NO_TRAINER,
    "parallelism_config": "context and sequence parallelism are not supported",
    "use_liger_kernel": "the head never holds the logits anyway (lm_head.py)",
    "liger_kernel_config": "see use_liger_kernel",
    "beta": "there is no reference model and no KL term",
    "scale_rewards": "always the group's standard deviation, but none with --loss dr_grpo",
    "ignore_data_skip": "a rollout queue cannot be replayed; it is always true",
    "remove_unused_columns": "every column reaches the reward functions; it is always false",
    "lr_scheduler_kwargs": "the four schedules take no further arguments",
    "optim": "AdamW, fused on CUDA",
    "optim_args": "AdamW takes adam_beta1, adam_beta2, adam_epsilon and weight_decay",
    "optim_target_modules": "it belongs to optimizers that are not here",
    "average_tokens_across_devices": "the denominator always counts all processes",
    "label_smoothing_factor": "it belongs to supervised losses",
    "neftune_noise_alpha": "noise in the policy's embeddings would falsify the importance ratio",
    "group_by_length": _ROWS,
    "torch_compile_backend": "inductor",
    "torch_compile_mode": "default",
    "gradient_checkpointing_kwargs": "the non-reentrant kind takes none",
    "use_cache": "training never caches keys and values",
    "torch_empty_cache_steps": "allocator: set PYTORCH_CUDA_ALLOC_CONF",
    "use_cpu": "CUDA_VISIBLE_DEVICES= does that",
    "full_determinism": "a live server's replies differ from run to run",
    "logging_strategy": "logging_steps counts steps",
    "logging_first_step": "logging_steps=1 logs every step",
    "logging_nan_inf_filter": "a broken loss must show",
    "log_on_each_node": "the first process logs for all",
    "log_level": "Python's logging is left as it is",
    "log_level_replica": "Python's logging is left as it is",
    "include_num_input_tokens_seen": "num_tokens is always logged",
    "project": "set TRACKIO_PROJECT or WANDB_PROJECT",
    "trackio_space_id": "set TRACKIO_SPACE_ID",
    "trackio_bucket_id": "set it in trackio itself",
    "trackio_static_space_id": "set it in trackio itself",
    "save_only_model": "a checkpoint is for resuming; the model alone is RUN/final",
    "save_on_each_node": "the run's folder is shared by all machines",
    "enable_jit_checkpoint": "checkpoints are saved every save_steps, not when a run is stopped",
    "hub_token": "set HF_TOKEN or `hf auth login`: an option would stand in every log",
    "hub_always_push": "an upload waits for the one before it",
    "load_best_model_at_end": "no metric of a policy's own rollouts says which model is best",
    "metric_for_best_model": "see load_best_model_at_end",
    "greater_is_better": "see load_best_model_at_end",
    "restore_callback_states_from_checkpoint": _NO_TRAINER,
    "skip_memory_metrics": _NO_TRAINER,
    "do_train": _NO_TRAINER,
    "do_eval": _NO_TRAINER,
    "do_predict": _NO_TRAINER,
    "debug": _NO_TRAINER,
    "local_rank": "torchrun sets LOCAL_RANK",
    "label_names": "it belongs to supervised losses",
    "length_column_name": _ROWS,
    **dict.fromkeys(
        "bf16_full_eval fp16_full_eval eval_delay per_device_eval_batch_size prediction_loss_only "
        "eval_on_start eval_do_concat_batches eval_use_gather_object eval_accumulation_steps "
        "include_for_metrics batch_eval_metrics".split(),
        "evaluation runs through the server (eval_steps), not through the trainer",
    ),
    **dict.fromkeys(
        "dataloader_drop_last dataloader_num_workers dataloader_pin_memory "
        "dataloader_persistent_workers dataloader_prefetch_factor dataloader_in_order "
        "dataloader_multiprocessing_context".split(),
        "samples come from the rollout worker, not from a data loader",
    ),
    **dict.fromkeys(
        "ddp_find_unused_parameters ddp_bucket_cap_mb ddp_broadcast_buffers ddp_static_graph "
        "ddp_backend".split(),
        "sharded training is FSDP2",
    ),
    "tools": "a task file defines tools",
    "environment_factory": "a task file defines environment_factory",
    "reward_funcs": "a task file defines reward_funcs",
    "train_dataset": "a task file defines dataset",
    "eval_strategy": "every eval_steps steps, if eval_env is given",
}


def option_comments(cls):
    """{option: the comment behind its field}: the one place where an option is explained."""
    found = re.findall(r"^    (\w+): .*?  # (.*)$", inspect.getsource(cls), re.MULTILINE)
    return dict(found)


def parse_value(name, text, kind):
    """The text as the field's type. ValueError names the option and what it takes."""
    kinds = typing.get_args(kind) or (kind,)
    if type(None) in kinds and text.lower() == "none":
        return None
    kind = next(k for k in kinds if k is not type(None))
    try:
        if kind is bool:
            return {"true": True, "false": False}[text.lower()]
        if kind is dict:
            value = json.loads(text)
            if not isinstance(value, dict):
                raise ValueError
            return value
        return kind(text)
    except (ValueError, KeyError):
        wanted = {bool: "true or false", dict: "a JSON object"}.get(kind, kind.__name__)
        raise ValueError(f"--{name} {text!r}: expected {wanted}") from None


def parse_command_line(argv):
    """[--name value ...] as {name: text}; also `--name=value`, and `--flag` alone for true."""
    given, position = {}, 0
    while position < len(argv):
        word = argv[position]
        if not word.startswith("--"):
            raise ValueError(f"{word!r} is not an option; options look like --learning_rate 1e-5")
        name, equals, text = word[2:].partition("=")
        position += 1
        if not equals:
            # a value may begin with a minus (--max_steps -1), an option with two
            alone = position == len(argv) or argv[position].startswith("--")
            text = "true" if alone else argv[position]
            position += not alone
        given[name.replace("-", "_")] = text
    return given


def configure(argv):
    """-> (Config, Task). Raises ValueError for unknown options, bad values and bad task files."""
    given = parse_command_line(argv)
    kinds = typing.get_type_hints(Config)
    chosen = {n: parse_value(n, text, kinds[n]) for n, text in given.items() if n in kinds}
    recorded = {}
    if chosen.get("replay"):
        recorded = recorded_options(chosen["replay"])
        chosen["replay"] = str(Path(chosen["replay"]).resolve())  # runs/latest will be the new run
    task = tasks.load_task(chosen.get("env", recorded.get("env", Config.env)))
    task_kinds = typing.get_type_hints(task.Options) if task.Options else {}
    for name in given.keys() - kinds.keys() - task_kinds.keys():
        if name in REFUSED:
            raise ValueError(f"--{name} is not an option here: {REFUSED[name]}")
        close = difflib.get_close_matches(name, [*kinds, *task_kinds], n=1)
        hint = f"did you mean --{close[0]}?" if close else "python grpo.py --help lists them"
        raise ValueError(f"unknown option --{name}; {hint}")
    unknown = sorted(task.config_overrides.keys() - kinds.keys())
    if unknown:
        raise ValueError(f"task {task.name}: config_overrides has {unknown}, which are no options")
    theirs = {n: value for n, value in recorded.items() if n in kinds}
    config = Config(**{**task.config_overrides, **theirs, **chosen})
    check_config(config)
    if task.dataset is None and config.max_steps <= 0:
        raise ValueError(f"task {task.name} has no dataset, so it has no epochs: give --max_steps")
    own = {n: value for n, value in recorded.items() if n in task_kinds}
    own |= {n: parse_value(n, given[n], kind) for n, kind in task_kinds.items() if n in given}
    return config, tasks.load_task(config.env, own)


def recorded_options(run):
    """The options of the run that --replay names, less those that are about that run alone."""
    file = Path(run) / "config.json"
    if not file.is_file() or not dump.step_files(run):
        raise ValueError(
            f"--replay {run!r}: there is nothing to replay; name the folder of a run that had "
            "--dump_rollouts"
        )
    own = """output_dir run_name replay dump_rollouts eval_env num_train_processes replicas
        resume_from_checkpoint push_to_hub""".split()
    return {n: value for n, value in json.loads(file.read_text()).items() if n not in own}


def check_config(config):
    """ValueError naming the value and what it must be."""

    def need(holds, name, rule):
        if not holds:
            raise ValueError(f"--{name} {getattr(config, name)!r}: {rule}")

    c = config
    for rule, holds, names in (
        (
            "must be at least 1",
            lambda value: value >= 1,
            "max_completion_length num_completions_to_print gradient_accumulation_steps "
            "weight_sync_steps max_concurrent_rollouts save_total_limit logging_steps eval_prompts "
            "lora_r lora_alpha num_train_processes replicas",
        ),
        ("must be at least 2", lambda value: value >= 2, "token_budget"),
        (
            "must not be negative",
            lambda value: value >= 0,
            "epsilon epsilon_high num_sampler_logprobs max_staleness max_tool_calling_iterations "
            "router_aux_loss_coef learning_rate warmup_steps weight_decay max_grad_norm "
            "check_sync_every diagnose_steps seed data_seed",
        ),
        (
            "must be positive",
            lambda value: value > 0,
            "adam_epsilon tool_timeout_s rollout_timeout_s rollout_worker_timeout "
            "vllm_server_timeout ddp_timeout",
        ),
        ("must be in [0, 1)", lambda value: 0 <= value < 1, "min_p adam_beta1 adam_beta2"),
    ):
        for name in names.split():
            value = getattr(c, name)
            need(value is None or holds(value), name, rule)
    need(c.num_generations >= 2, "num_generations", "a group needs 2 rollouts to have a baseline")
    need(
        c.temperature > 0,
        "temperature",
        "must be positive: greedy rollouts of a group are all alike",
    )
    need(0 < c.top_p <= 1, "top_p", "must be in (0, 1]")
    need(c.top_k >= 0, "top_k", "must be 0 (all tokens) or more")
    if (c.top_p < 1 or (c.min_p or 0) > 0) and not c.top_k:
        raise ValueError(
            "--top_p and --min_p need --top_k too: it bounds the candidate set (try 512)"
        )
    need(
        0 <= c.vllm_importance_sampling_clip_min < c.vllm_importance_sampling_clip_max,
        "vllm_importance_sampling_clip_min",
        f"must be below vllm_importance_sampling_clip_max={c.vllm_importance_sampling_clip_max}",
    )
    need(
        c.loss != "gspo" or c.epsilon < 0.05,
        "epsilon",
        "with --loss gspo it bounds a mean of log-ratios; the paper takes --epsilon 3e-4 "
        "--epsilon_high 4e-4",
    )
    need(
        c.num_sampler_logprobs >= 1 or not c.is_centered,
        "num_sampler_logprobs",
        "score centering needs at least 1; or give --score_centering false",
    )
    need(c.save_steps > 0, "save_steps", "must be positive; --save_strategy no saves none")
    for name in ("save_steps", "warmup_steps"):
        fraction = 0 < getattr(c, name) < 1
        need(not fraction or c.max_steps > 0, name, "a fraction of max_steps needs --max_steps")
    need(
        not c.warmup_steps or c.lr_scheduler_type != "constant",
        "warmup_steps",
        "--lr_scheduler_type constant has no warm-up; give constant_with_warmup, linear or cosine",
    )
    need(c.eval_steps >= 1, "eval_steps", "must be at least 1; without --eval_env there is no one")
    need(not c.replay or not c.eval_env, "eval_env", "a replay has no server to evaluate with")
    need(not c.replay or not c.dump_rollouts, "dump_rollouts", "the replayed run has that dump")
    need(
        not c.replay or not c.resume_from_checkpoint,
        "resume_from_checkpoint",
        "a replay starts with the first step that was dumped",
    )
    need(c.max_steps > 0 or c.num_train_epochs > 0, "num_train_epochs", "must be positive")
    need(
        c.checkpointing in ("auto", "none", "selective", "full"),
        "gradient_checkpointing",
        "must be auto, none, selective, full, true or false",
    )
    need(not (c.fp16 and c.bf16), "fp16", "excludes --bf16 true")
    need(c.lora_r or c.lora_alpha is None, "lora_alpha", "needs --lora_r")
    need(
        all(re.match(r"https?://[^/ ]", url) for url in c.vllm_server_base_url.split(",")),
        "vllm_server_base_url",
        "must be like http://localhost:8000, several with commas and no spaces",
    )
    sink_names(c.report_to)
    masters = (c.model_init_kwargs or {}).get("dtype", c.dtype)  # the former takes precedence
    if masters == "float16":
        raise ValueError(
            "--dtype 'float16': masters in float16 lose small updates; keep float32 and compute in "
            "it with --fp16 true"
        )
    for name, values in {
        "loss": ("grpo", "cispo", "gspo", "dr_grpo"),
        "score_centering_tail": ("drop", "proportional"),
        "normalize": ("micro_batch", "step"),
        "lr_scheduler_type": ("constant", "constant_with_warmup", "linear", "cosine"),
        "save_strategy": ("steps", "epoch", "no"),
        "hub_strategy": ("every_save", "end"),
        "dtype": ("auto", "bfloat16", "float32"),
        "attention": ("auto", "flash", "flex", "varlen", "sdpa"),
        "train_sampling_strategy": ("random", "sequential"),
    }.items():
        need(getattr(c, name) in values, name, f"must be one of {', '.join(values)}")
    if c.lr_scheduler_type in ("linear", "cosine") and c.max_steps <= 0:
        raise ValueError(
            f"--lr_scheduler_type {c.lr_scheduler_type} needs --max_steps: how many steps an epoch "
            "takes is not known beforehand"
        )


def print_help():
    """Every option with its default and its sentence."""
    print("bash run.sh [--option value ...], or python grpo.py with a vLLM server of yours\n")
    for name, comment in option_comments(Config).items():
        print(f"  --{name:34} {comment} [{getattr(Config, name)}]")
    print("\nA task file may have options of its own: see its Options.")
