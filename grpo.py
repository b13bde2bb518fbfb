"""Asynchronous GRPO (DeepSeekMath, arXiv:2402.03300): the training loop. Start reading here.

    bash run.sh [--option value ...]                       server and trainer together
    python grpo.py --vllm_server_base_url URL [...]        one trainer process, a server of yours
    torchrun --nproc-per-node 2 grpo.py [...]              several

A vLLM server generates (sync.py talks to it), a worker process scores (rollout.py), and this loop
trains on what they queue, without waiting for either unless the queue is empty. A step:

    1 wait     for the next planned step; every rank gets its samples (feed.py, planner.py)
    2 pack     each rank packs its samples into prefix-tree rows (packing.py, attention.py)
    3 train    forward and backward over the rows (model.py, loss.py), clip, AdamW
    4 sync     every weight_sync_steps: the new weights go to the server while it waits; not while
               it is being evaluated on held-out prompts (evaluate.py)
    5 log      metrics of the window (metrics.py)

Weight versions: the weights that the run starts from are version 0 (sent before the first rollout),
those after n * weight_sync_steps steps are version n. A sample's staleness at a step is the version
that the step trains minus the version of the sample's oldest generated token.

Options are in config.py. Left out: a reference model (beta = 0), reward models on the GPU,
DeepSpeed, context and sequence parallelism.
Test: pytest tests/test_trainer.py tests/test_end_to_end.py
"""

import functools
import itertools
import json
import math
import os
import platform
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from contextlib import contextmanager
from dataclasses import asdict
from datetime import timedelta
from importlib.metadata import version as installed
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from transformers import get_scheduler

import attention
import chat
import loss
import model
import packing
import sync
import tasks
from config import Config, configure, parse_command_line, print_help
from diagnosis import LIMITS, diagnose
from feed import Feed, Replay
from metrics import Metrics, applicable, compare

# -------------------------------------------------------------------------------------- preparation


def prepare(argv, plan_path):
    """For run.sh, before it starts a server: check all that can be, make the model, and write what
    run.sh must know to plan_path, as shell assignments."""
    config, task = configure(argv)
    theirs = "vllm_server_base_url" in parse_command_line(argv)
    check_tasks(config, task)
    model_path = model.resolve_model(config.model)
    checkpoint = model.checkpoint_config(config, model_path)
    facts = {
        "MODEL_PATH": model_path,
        "MODEL_NAME": config.model,
        "CPU_DTYPE": "bfloat16" if model.is_hybrid(checkpoint) else "",
        "LOGPROBS": config.num_sampler_logprobs + 1,  # the token endpoint counts the sampled one
        "TOP_K": config.top_k or "",
        "TRAIN_PROCESSES": config.num_train_processes or "",
        "SERVER_URL": config.vllm_server_base_url if theirs or config.replay else "",
    }
    lines = (f"{name}={shlex.quote(str(value))}\n" for name, value in facts.items())
    Path(plan_path).write_text("".join(lines))


def check_tasks(config, task):
    """Find what is wrong with the task to learn, and with that of --eval_env, before anything."""
    tasks.check_task(task)
    if config.eval_env:
        tasks.check_task(tasks.load_eval_task(config, task))


def open_run(config, task, server):
    """Make the run folder (config, command, stack, git state, task file) and point runs/latest at
    it. -> its path."""
    name = config.run_name or f"{Path(config.env).stem}-{time.strftime('%Y%m%d-%H%M%S')}"
    folder = Path(config.output_dir or f"runs/{name}")
    folder.mkdir(parents=True, exist_ok=True)
    resolved = asdict(config) | (asdict(task.options) if task.options else {})
    (folder / "config.json").write_text(json.dumps(resolved, indent=2) + "\n")
    facts = {
        "command": shlex.join([sys.executable, *sys.argv]),
        "git_sha": git("rev-parse", "HEAD"),
        "git_untracked": git("ls-files", "--others", "--exclude-standard").splitlines(),
        "started": time.strftime("%Y-%m-%d %H:%M:%S %z"),
        "processes": dist.get_world_size(),
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else platform.machine(),
        "python": platform.python_version(),
        "vllm": None if config.replay else server.call("GET", "/version")["version"],
        "cuda": torch.version.cuda,
        **{name: installed(name) for name in ("torch", "transformers", "numpy")},
    }
    (folder / "run.json").write_text(json.dumps(facts, indent=2) + "\n")
    (folder / "git.diff").write_text(git("diff", "HEAD") + "\n")
    if task.path:  # it may be in no repository
        shutil.copy(task.path, folder / "task.py")
    changed = {n: v for n, v in resolved.items() if v != getattr(Config, n, None)}
    say(f"run: {folder}; options that differ from the defaults: {json.dumps(changed)}")
    link = Path("runs/latest")
    link.parent.mkdir(exist_ok=True)
    link.unlink(missing_ok=True)
    link.symlink_to(os.path.relpath(folder, link.parent))
    return folder


def git(*arguments):
    """What the git command prints, or "" without git or a repository."""
    if shutil.which("git") is None:
        return ""
    return subprocess.run(["git", *arguments], capture_output=True, text=True).stdout.strip()


def say(text):
    print(text, flush=True)


# ----------------------------------------------------------------------------------------- training


def train(config, task):
    """One rank of the run, from the first look at the server to the saved model."""
    device = start_distributed(config)
    first = dist.get_rank() == 0
    torch.manual_seed(config.seed)
    with one_line_errors():
        server = sync.VllmServer(config.vllm_server_base_url, config.vllm_server_timeout)
        talks = first and not config.replay  # a replay trains from files, without a server
        info = sync.together(lambda: connect(server, config) if talks else None)
        model_path = model.resolve_model(config.model)
        tokenizer = model.load_tokenizer(config, model_path)
        policy = model.load_policy(config, model_path, device)
    model_config = policy.model.config
    pad = packing.bucket if device.type == "cuda" else None  # compiled layers want few shapes
    compiled = config.torch_compile if config.torch_compile is not None else device.type == "cuda"
    tied = model_config.get_text_config().tie_word_embeddings
    model.shard(policy, device, config.compute_dtype, compiled)
    optimizer, scheduler = make_optimizer(policy, config)

    # The first thing done is a sync: a server that cannot take weights, or whose log-probs differ,
    # is found before anything is generated; and a server that has seen another run starts anew.
    version, sender, difference = 0, None, math.nan
    if not config.replay:
        sender = sync.make_sender(server, info, sync.Weights(policy.model, info.dtype, tied=tied))
        with one_line_errors():
            sync.sync_weights(server, sender, version)
            difference = check_sync(policy, tokenizer, server, info, config, device)

    run = sync.together(lambda: open_run(config, task, server) if first else None)
    metrics = Metrics(
        run if first else None,
        report_to=config.report_to,
        total_steps=max(config.max_steps, 0) or None,
        disable_tqdm=config.disable_tqdm,
        config=asdict(config),
    )
    metrics.declare(metric_names(config, task, policy, device))
    metrics.record("sampling/sync_check_max", difference)
    if config.replay:
        feed = Replay(config, pad)
    else:
        budget = config.token_budget or info.max_model_len
        feed = Feed(config, task, policy, tokenizer, model_path, budget, pad, run)
    try:
        for step in itertools.count(1):
            if config.max_steps > 0 and step > config.max_steps:
                break
            clock = Clock(device)

            # ---- 1 wait --------------------------------------------------------------------------
            with clock("perf/rollout_wait_s"):
                share = feed.next()
            if share is None:  # the prompts have ended
                break

            # ---- 2 pack --------------------------------------------------------------------------
            rows = [
                packing.pack_row(samples, feed.budget, pad).to(device) for samples in share.rows
            ]
            trees = [
                attention.TreeMask(row, config.attention).prepare(model_config) for row in rows
            ]

            # ---- 3 forward, backward, step -------------------------------------------------------
            with clock("perf/fwd_bwd_s"):
                seen = []
                for samples, row, tree, denominator in zip(
                    share.rows, rows, trees, share.denominators, strict=True
                ):
                    with clock("perf/fwd_s"):
                        log_probs, entropy = policy(row, tree, config.temperature)
                    row_loss = term_losses(config, row, log_probs, len(samples)).sum() / denominator
                    row_loss.backward()
                    share.log_probs.append(log_probs[:, 0].detach())
                    seen.append(
                        row_metrics(config, row, log_probs, entropy, row_loss, len(samples))
                    )
            with clock("perf/optimizer_s"):
                grad_norm = clip_gradients(policy, config.max_grad_norm, step)
                optimizer.step()
                optimizer.zero_grad()
                learning_rate = scheduler.get_last_lr()[0]
                scheduler.step()

            # ---- 4 sync --------------------------------------------------------------------------
            if feed.sync_due(step):
                old, new, every = version, step // config.weight_sync_steps, config.check_sync_every
                metrics.extend(records(sync.sync_weights(server, sender, new)))
                version = new  # only now: the server has acknowledged it
                if every and new // every > old // every:
                    difference = check_sync(policy, tokenizer, server, info, config, device)
                    metrics.record("sampling/sync_check_max", difference)
            feed.trained(version)

            # ---- 5 log ---------------------------------------------------------------------------
            seconds = clock.read()
            metrics.extend(gather_metrics(seen))
            if first:
                metrics.extend(feed.records() + speed(seconds, feed.plan, policy, device, config))
                metrics.extend(records({"grad_norm": grad_norm, "learning_rate": learning_rate}))
                metrics.record("num_tokens", feed.n_tokens)
                metrics.trace(feed.told)
                if step % config.logging_steps == 0:
                    metrics.flush(step)
                if config.diagnose_steps and step % config.diagnose_steps == 0:
                    say_diagnosis(metrics, config)
        if first:
            metrics.extend(feed.finish())
            metrics.finish(step - 1)  # what no window has yet
    finally:
        feed.close()
        if sender:
            sender.close()
        metrics.close()

    final = str(run / "final")
    model.save_pretrained(policy, tokenizer, final, config.compute_dtype)
    if first:
        rewards = [w["reward"] for w in metrics.history if math.isfinite(w.get("reward", math.nan))]
        n = min(5, len(rewards))
        say(f"saved {final}")
        if n:
            begin, end = (sum(part) / n for part in (rewards[:n], rewards[-n:]))
            say(f"mean reward: {begin:.3f} in the first {n} steps, {end:.3f} in the last {n}")
    dist.destroy_process_group()


# --------------------------------------------------------------------------------- one step's parts


def start_distributed(config):
    """Join the process group (of one, without torchrun); -> this rank's device."""
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "0")
    cuda = torch.cuda.is_available()
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    device = (
        torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0))) if cuda else torch.device("cpu")
    )
    if cuda:
        torch.cuda.set_device(device)
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if cuda else "gloo",
        rank=rank,
        world_size=world,
        timeout=timedelta(seconds=config.ddp_timeout),
    )
    return device


def connect(server, config):
    """Wait for the server and refuse one that cannot serve this run."""
    told = 0

    def progress(waited_s):
        nonlocal told
        if waited_s - told >= 10:
            told = waited_s
            say(f"waiting for the vLLM server at {server.url} ({waited_s:.0f} s)")

    server.wait_until_ready(progress)
    return server.check(
        config.model,
        num_sampler_logprobs=config.num_sampler_logprobs,
        min_model_len=config.max_completion_length + 1,
        compute_dtype=config.compute_dtype,
    )


def check_sync(policy, tokenizer, server, info, config, device):
    """Do server and trainer agree on a fixed text? Collective; -> largest log-prob difference.

    The text is longer than one block of the server's prefix cache, so that a cache of older weights
    would show.
    """
    text = ", ".join(f"{n} times {n} is {n * n}" for n in range(40))
    prompt = tokenizer.encode(text)[: min(200, info.max_model_len // 2)]

    def trainer_log_probs(ids):
        row = packing.pack_row([text_sample(ids)], len(ids), packing.bucket).to(device)
        tree = attention.TreeMask(row, config.attention).prepare(policy.model.config)
        with torch.no_grad():
            return policy(row, tree, temperature=1.0)[0][:, 0]

    dtypes = (info.dtype, config.compute_dtype)
    return sync.check_sync(server, config.model, prompt, trainer_log_probs, dtypes=dtypes)


def text_sample(ids):
    """A Sample that asks for the log-prob of every token but the first, and for nothing else."""
    n = len(ids)
    return chat.Sample(
        input_ids=np.array(ids, dtype=np.int32),
        trained=np.arange(n) > 0,
        sampler_log_probs=np.zeros(n, np.float32),
        top_ids=np.empty((n - 1, 0), np.int32),
        top_log_probs=np.empty((n - 1, 0), np.float32),
        set_ids=None,
        set_offsets=None,
        versions=np.zeros(n, np.int32),
    )


def make_optimizer(policy, config):
    """AdamW on the sharded masters (weight decay on matrices only), and its schedule."""
    trained = [p for p in policy.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in trained if p.ndim > 1], "weight_decay": config.weight_decay},
        {"params": [p for p in trained if p.ndim <= 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(
        [group for group in groups if group["params"]],
        lr=config.learning_rate,
        betas=(config.adam_beta1, config.adam_beta2),
        eps=config.adam_epsilon,
        fused=True,
    )
    warmup = config.warmup_steps
    scheduler = get_scheduler(
        config.lr_scheduler_type,
        optimizer,
        num_warmup_steps=math.ceil(warmup * config.max_steps if 0 < warmup < 1 else warmup),
        num_training_steps=config.max_steps,
    )
    return optimizer, scheduler


def term_losses(config, row, log_probs, n_samples):
    """The configured loss of each term, [M]. log_probs [M, 1 + K]: sampled token, then head."""
    bounds = {
        "clip_min": config.vllm_importance_sampling_clip_min,
        "clip_max": config.vllm_importance_sampling_clip_max,
    }
    region = {"epsilon": config.epsilon, "epsilon_high": config.epsilon_high}
    shared = {
        "policy_log_probs": log_probs[:, 0],
        "sampler_log_probs": row.sampler_log_probs,
        "advantages": row.advantages,
    }
    if config.loss == "cispo":
        return loss.cispo_loss(**shared, clip_max=config.vllm_importance_sampling_clip_max)
    if config.loss == "gspo":
        samples = {"term_samples": row.term_samples, "n_samples": n_samples}
        return loss.gspo_loss(**shared, **samples, **region)
    if config.loss == "dr_grpo":
        length = config.max_completion_length
        return loss.dr_grpo_loss(**shared, **region, **bounds, max_completion_length=length)
    if not config.score_centering:
        return loss.clipped_surrogate_loss(**shared, **region, **bounds)
    return loss.score_centering_loss(
        **shared,
        head_policy_log_probs=log_probs[:, 1:],
        head_sampler_log_probs=row.top_log_probs,
        weight=functools.partial(loss.masked_weight, **bounds),
        tail=config.score_centering_tail,
    )


def clip_gradients(policy, max_norm, step):
    """Scale the summed gradients down to max_norm (0: never). -> their norm before. Collective."""
    parameters = [p for p in policy.parameters() if p.requires_grad]
    norm = torch.nn.utils.clip_grad_norm_(parameters, max_norm or math.inf)
    norm = float(norm.full_tensor() if isinstance(norm, DTensor) else norm)
    if not math.isfinite(norm):
        raise FloatingPointError(
            f"step {step}: the gradient's norm is {norm}; lower --learning_rate, or look whether "
            "sampling/sync_check_max says that server and trainer disagree"
        )
    return norm


def row_metrics(config, row, log_probs, entropy, row_loss, n_samples):
    """One row's sums and extremes (loss.loss_metrics) and its part of the loss, on the device."""
    return {"loss": row_loss.detach()} | loss.loss_metrics(
        policy_log_probs=log_probs[:, 0],
        sampler_log_probs=row.sampler_log_probs,
        advantages=row.advantages,
        entropy=entropy,
        term_samples=row.term_samples,
        n_samples=n_samples,
        head_sampler_log_probs=row.top_log_probs if config.score_centering else None,
        epsilon=config.epsilon,
        epsilon_high=config.epsilon_high,
        clip_min=config.vllm_importance_sampling_clip_min,
        clip_max=config.vllm_importance_sampling_clip_max,
    )


def gather_metrics(rows):
    """The step's loss metrics over rows and ranks, as records. One transfer, one all-gather."""
    merged = loss.merge_metrics(rows)
    flat = torch.cat([value.float().reshape(-1) for value in merged.values()]).cpu()
    gathered = [torch.empty_like(flat) for _ in range(dist.get_world_size())]
    dist.all_gather(gathered, flat)
    ranks = []
    for flat in gathered:
        values = flat.split([value.numel() for value in merged.values()])
        shapes = [value.shape for value in merged.values()]
        ranks.append({n: v.view(s) for n, v, s in zip(merged, values, shapes)})
    merged = loss.merge_metrics(ranks)
    return [
        (name, float(value), float(merged[name][1]) if merged.get(name, value).ndim else 1.0)
        for name, value in loss.finish_metrics(merged).items()
    ]


def speed(seconds, plan, policy, device, config):
    """perf/* of one step, from its seconds and the plan's counts."""
    step_s, work_s = seconds["perf/step_s"], seconds["perf/fwd_bwd_s"]
    found = list(records(seconds))
    found += [
        ("perf/fwd_bwd_forwarded_tokens_per_s", plan.n_tokens / work_s, work_s),
        ("perf/wall_clock_forwarded_tokens_per_s", plan.n_tokens / step_s, step_s),
        ("perf/wall_clock_trained_tokens_per_s", sum(plan.n_trained) / step_s, step_s),
    ]
    peak = model.peak_flops(device, config.compute_dtype)
    flops = model.step_flops(policy, plan)
    if peak and flops:
        peak *= dist.get_world_size()
        found += [
            ("perf/fwd_bwd_mfu", 100 * flops / work_s / peak, work_s),
            ("perf/wall_clock_mfu", 100 * flops / step_s / peak, step_s),
        ]
    return found


def metric_names(config, task, policy, device):
    """What every logging window of this run carries, if only as NaN or a count of 0."""
    conditions = ["score_centering"] if config.score_centering and config.loss == "grpo" else []
    if model.peak_flops(device, config.compute_dtype):
        conditions.append("mfu")
    rewards, tool_names = tasks.reward_names(task), tasks.tool_names(task)
    conditions += ["tools"] if tool_names else []
    conditions += ["environment"] if task.environment_factory else []
    conditions += ["get_reward"] if len(rewards) > len(task.reward_funcs) else []
    return applicable(*conditions, rewards=rewards, tools=tool_names)


def say_diagnosis(metrics, config):
    """Say in words what holds the run back, over the newest windows."""
    size = -(-config.diagnose_steps // config.logging_steps)
    limits = {name: getattr(config, name) for name in LIMITS}
    for sentence in diagnose(*compare(list(metrics.history), size), **limits):
        metrics.note(f"diagnosis: {sentence}")


def records(values):
    """{name: value} as (name, value, weight) records."""
    return [(name, value, 1.0) for name, value in values.items()]


class Clock:
    """Seconds of one step by name; spans may nest and repeat. On CUDA they are timed by events, so
    that nothing waits for the device before read()."""

    def __init__(self, device):
        self.cuda, self.spans, self.begin = device.type == "cuda", [], time.perf_counter()

    @contextmanager
    def __call__(self, name):
        begin = self._now()
        yield
        self.spans.append((name, begin, self._now()))

    def _now(self):
        if not self.cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def read(self):
        if self.cuda:
            torch.cuda.synchronize()
        seconds = Counter({"perf/step_s": time.perf_counter() - self.begin})
        for name, begin, end in self.spans:
            seconds[name] += begin.elapsed_time(end) / 1000 if self.cuda else end - begin
        return seconds


@contextmanager
def one_line_errors():
    """Set-up mistakes end the process with their message: a traceback would bury the remedy."""
    try:
        yield
    except (ValueError, TypeError, TimeoutError, sync.ServerError, sync.WeightSyncError) as error:
        sys.exit(f"error: {error}")


def main(argv):
    if "--help" in argv or "-h" in argv:
        return print_help()
    # run.sh and torchrun stop a rank with SIGTERM: leave through the finally blocks
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    with one_line_errors():
        if argv[:1] == ["--prepare"]:
            return prepare(argv[2:], argv[1])
        config, task = configure(argv)
        check_tasks(config, task)
    train(config, task)


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except KeyboardInterrupt:
        sys.exit(130)
