"""Asynchronous GRPO (DeepSeekMath, arXiv:2402.03300): the training loop. Start reading here.

    bash run.sh [--option value ...]                       server and trainer together
    python grpo.py --vllm_server_base_url URL [...]        one trainer process, a server of yours
    torchrun --nproc-per-node 2 grpo.py [...]              several; README.md says how on machines

A vLLM server generates (sync.py talks to it), a worker process scores (rollout.py), and this loop
trains on what they queue, without waiting for either unless the queue is empty. A step:

    1 wait     for the next planned step; every rank gets its samples (feed.py, planner.py)
    2 pack     each rank packs its samples into prefix-tree rows (packing.py, attention.py)
    3 train    forward and backward over the rows (model.py, loss.py), clip, AdamW (update.py)
    4 sync     every weight_sync_steps: the new weights go to the server while it waits; not while
               it is being evaluated on held-out prompts (evaluate.py)
    5 log      metrics of the window (metrics.py), a checkpoint when it is due (checkpoint.py)

Weight versions: the weights that the run starts from are version 0 (sent before the first rollout),
those after n * weight_sync_steps steps are version n (a server that comes back between two syncs
gets the newest weights under the last number). A sample's staleness at a step is the version that
the step trains minus the version of the sample's oldest generated token.

Options are in config.py. Left out: a reference model (beta = 0), reward models on the GPU,
DeepSpeed, context and sequence parallelism.
Test: pytest tests/test_trainer.py tests/test_end_to_end.py
"""

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
import threading
import time
from collections import Counter
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from datetime import timedelta
from importlib.metadata import version as installed
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

import adapters
import attention
import chat
import checkpoint
import lora
import memory
import model
import packing
import sync
import tasks
import update
from config import Config, configure, parse_command_line, print_help
from diagnosis import LIMITS, diagnose
from feed import STILL_WAITING, SYNC_AGAIN, Feed, Replay
from hub import Hub
from metrics import Metrics, applicable, compare, read_windows
from server import Fleet, ServerError
from weights import Weights
from worker import WorkerProcess

# -------------------------------------------------------------------------------------- preparation


def prepare(argv, plan_path):
    """For run.sh, before it starts a server: check all that can be, make the model, and write what
    run.sh must know to plan_path, as shell assignments."""
    config, task = configure(argv)
    theirs = "vllm_server_base_url" in parse_command_line(argv)
    check(config, task)
    model_path = model.resolve_model(config.model)
    model_config = model.checkpoint_config(config, model_path)
    adapter = lora.adapter_config(config)
    facts = {
        "MODEL_PATH": model_path,
        "MODEL_NAME": config.model,
        "HYBRID": "yes" if model.is_hybrid(model_config) else "",
        "LOGPROBS": config.num_sampler_logprobs + 1,  # the token endpoint counts the sampled one
        "TOP_K": config.top_k or "",
        "SERVER_DTYPE": "float16" if config.fp16 else "bfloat16",
        "LORA_SLOTS": config.max_staleness + 2,  # adapters that a LoRA run has registered at most
        "LORA_RANK": adapters.served_rank(adapters.largest_rank(adapter) if adapter else 1),
        "TRAIN_PROCESSES": config.num_train_processes or "",
        "SERVER_URL": config.vllm_server_base_url if theirs or config.replay else "",
    }
    lines = (f"{name}={shlex.quote(str(value))}\n" for name, value in facts.items())
    Path(plan_path).write_text("".join(lines))


def check(config, task):
    """What is wrong with the task to learn, with that of --eval_env, or with a checkpoint to resume
    from, is said before anything starts."""
    names = asdict(config)
    tasks.check_task(task, names)
    if config.eval_env:
        tasks.check_task(tasks.load_eval_task(config, task), names)
    if config.save_strategy == "epoch" and not tasks.has_epochs(task):
        raise ValueError(
            f"--save_strategy epoch: task {task.name} streams its dataset or has none, so the end "
            "of an epoch is not known; use --save_strategy steps"
        )
    checkpoint.find(config)


def open_run(config, task, fleet, resumed_from):
    """Make the run folder (config, command, stack, git state, task file) and point runs/latest at
    it. -> its path. A resumed run goes on in its checkpoint's folder unless it is given another."""
    new = f"runs/{Path(config.env).stem}-{time.strftime('%Y%m%d-%H%M%S')}"
    folder = Path(config.run_folder or (resumed_from.parent if resumed_from else new))
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
        "vllm": None if config.replay else fleet.servers[0].call("GET", "/version")["version"],
        "cuda": torch.version.cuda,
        "resumed_from": resumed_from and str(resumed_from),
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

    # ---- servers, model, optimizer ---------------------------------------------------------------
    pad = packing.bucket if device.type == "cuda" else None  # compiled layers want few shapes
    compiled = config.torch_compile if config.torch_compile is not None else device.type == "cuda"
    with one_line_errors():
        resumed_from = sync.together(lambda: checkpoint.find(config) if first else None)
        resumed = checkpoint.load_state(resumed_from) if resumed_from else None
        fleet = Fleet(config.vllm_server_base_url.split(","), config.vllm_server_timeout)
        talks = first and not config.replay  # a replay trains from files, without a server
        process = WorkerProcess() if talks else None  # its imports take as long as what follows
        connected = in_background(lambda: connect(fleet, config) if talks else None)
        model_path = model.resolve_model(config.model)
        tokenizer = model.load_tokenizer(config, model_path)
        loaded = model.load_model(config, model_path)  # GPU memory is the server's, until it is up
        info = sync.together(connected)
        replay = Replay(config, pad) if config.replay else None
        budget = replay.budget if replay else config.token_budget or info.max_model_len
        longest = pad(budget) if pad else budget
        policy = sharded_policy(config, loaded, device, longest, compiled)
    optimizer = update.make_optimizer(policy, config)
    scale = update.LossScale(config.compute_dtype, resumed and resumed.get("loss_scale"))
    done = resumed["step"] if resumed else 0
    if resumed:
        checkpoint.restore(resumed_from, policy, optimizer)

    # ---- the first sync --------------------------------------------------------------------------
    # A server that cannot take weights is found before anything is generated; and a server that has
    # seen another run starts anew.
    run = sync.together(lambda: open_run(config, task, fleet, resumed_from) if first else None)
    version, sender = done // config.weight_sync_steps, None
    if not config.replay:
        with one_line_errors():
            tied = policy.model.config.get_text_config().tie_word_embeddings
            weights = Weights(policy.model, info.dtype, tied=tied)
            staleness = config.max_staleness
            sender = sync.make_sender(fleet, weights, output_dir=run, max_staleness=staleness)
            sync.sync_weights(fleet, sender, version)

    # ---- log, checkpoints, samples ---------------------------------------------------------------
    metrics = Metrics(
        run if first else None,
        report_to=config.report_to,
        total_steps=max(config.max_steps, 0) or None,
        disable_tqdm=config.disable_tqdm,
        config=asdict(config),
        first_step=done,
    )
    metrics.declare(metric_names(config, task, policy, device))
    with one_line_errors():
        hub = Hub(config, run)
    saves = checkpoint.Checkpoints(run, policy, optimizer, config)
    if resumed:
        saves.resume(resumed)
    feed = replay or Feed(
        config,
        task,
        policy,
        tokenizer,
        model_path,
        budget,
        pad,
        run,
        sender.adapter_name,
        resumed,
        process,
    )
    if feed.worker:
        sender.oldest_in_use = feed.worker.oldest_version

    def must_sync():  # asked while the loop waits for samples
        return sync.behind(fleet, sender, version)

    def prove_sync():
        difference = check_sync(policy, tokenizer, fleet, sender, version, info, config, device)
        metrics.record("sampling/sync_check_max", difference)

    try:
        # ---- while the first samples are generated -----------------------------------------------
        # A server whose log-probs differ is found before anything is trained.
        if sender:
            with one_line_errors():
                prove_sync()
            if compiled:
                warm_up(policy, config, longest, device)

        for step in itertools.count(done + 1):
            if config.max_steps > 0 and step > config.max_steps:
                break
            clock = Clock(device)

            # ---- 1 wait --------------------------------------------------------------------------
            with clock("perf/rollout_wait_s"):
                while (share := feed.next(must_sync)) in (SYNC_AGAIN, STILL_WAITING):
                    if share == SYNC_AGAIN:
                        sync.sync_through_restart(fleet, sender, version)
            if share is None:  # the prompts have ended
                break

            # ---- 2 pack --------------------------------------------------------------------------
            rows = [packing.pack_row(samples, budget, pad).to(device) for samples in share.rows]
            trees = [
                attention.TreeMask(row, config.attention).prepare(policy.model.config)
                for row in rows
            ]

            # ---- 3 forward, backward, step -------------------------------------------------------
            with clock("perf/fwd_bwd_s"):
                seen = update.forward_backward(
                    policy, config, share, rows, trees, clock, scale.value
                )
            with clock("perf/optimizer_s"):
                grad_norm = update.clip_gradients(policy, config.max_grad_norm, scale.value)
                learning_rate = update.set_learning_rate(optimizer, config, step)
                if counts := scale.admits(grad_norm):
                    optimizer.step()
                optimizer.zero_grad()
            found, grad_norm, flops = update.gather_metrics(seen, grad_norm)  # waits for the GPU
            if counts:
                update.check_norm(grad_norm, step)

            # ---- 4 sync --------------------------------------------------------------------------
            if feed.sync_due(step):
                old, new, every = version, step // config.weight_sync_steps, config.check_sync_every
                metrics.extend(records(sync.sync_through_restart(fleet, sender, new)))
                version = new  # only now: the server has acknowledged it
                if every and new // every > old // every:
                    prove_sync()
            feed.trained(version)

            # ---- 5 log, save ---------------------------------------------------------------------
            seconds = clock.read()
            metrics.extend(found)
            if first:
                metrics.extend(feed.records() + speed(seconds, feed.plan, flops, device, config))
                if counts:
                    metrics.record("grad_norm", grad_norm)
                if scale.active:
                    metrics.record("loss_scale", scale.value)
                    metrics.record("skipped_step_count", not counts)
                metrics.record("learning_rate", learning_rate)
                metrics.record("num_tokens", feed.n_tokens)
                metrics.trace(feed.told)
                if step % config.logging_steps == 0:
                    metrics.flush(step)
                if config.diagnose_steps and step % config.diagnose_steps == 0:
                    say_diagnosis(metrics, config)
            done = step
            if saves.is_due(step, share.epoch):
                metrics.record("perf/checkpoint_s", saves.save(step, feed.state() | scale.state()))
                hub.push(policy, tokenizer, config.compute_dtype, step)
            saves.check()
        final = str(run / "final")
        model.save_pretrained(policy, tokenizer, final, config.compute_dtype)
        if first:
            say(f"saved {final}")
        if saves.is_due(done, saves.epoch, last=True):
            saves.save(done, feed.state() | scale.state())
        saves.finish()
        if first:
            metrics.extend(feed.finish())
            metrics.finish(done)  # what no window has yet
    finally:
        with ExitStack() as closing:  # the last comes first, and none needs another's success
            for part in filter(None, (metrics, sender, feed, saves)):
                closing.callback(part.close)

    hub.push_final(final)
    if first:
        say_result(run, compiled)
    leave_distributed()


# --------------------------------------------------------------------------------- train()'s parts


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
    if config.tf32 is not None:
        torch.set_float32_matmul_precision("high" if config.tf32 else "highest")
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if cuda else "gloo",
        rank=rank,
        world_size=world,
        # ranks wait for each other while rank 0 waits for a server
        timeout=timedelta(seconds=config.ddp_timeout + config.vllm_server_timeout),
    )
    return device


def leave_distributed():
    """Leave the process group, before a rank's process ends."""
    dist.destroy_process_group()
    # Gloo's threads live on, as DTensor's caches hold the group, and need the interpreter to drop
    # the last collective's tensors. One that waits for it while it ends aborts the process (torch
    # 2.13), so let them have it now.
    time.sleep(0.1)


def sharded_policy(config, loaded, device, longest, compiled):
    """The policy of a loaded model, sharded over the ranks' devices, recomputing what it must for
    rows of at most `longest` tokens."""
    if dist.get_world_size() % config.replicas:
        raise ValueError(
            f"--replicas {config.replicas} does not divide the {dist.get_world_size()} training "
            "processes"
        )
    policy = model.configured_policy(config, loaded)
    mode, policy.reduce_each, why = memory.choose(policy, config, longest, device, compiled)
    memory.apply(policy, mode)
    model.shard(
        policy,
        device,
        config.compute_dtype,
        compiled,
        replicas=config.replicas,
        cpu_offload=config.cpu_offload,
    )
    if dist.get_rank() == 0:
        say(why)
    return policy


def connect(fleet, config):
    """Wait for the servers and refuse one that cannot serve this run. (With top_k it ends a turn
    that does not fit by itself, so any length will do.)"""
    told = Counter()  # when a line was last printed, by server

    def progress(server, waited_s):
        if waited_s - told[server] >= 10:
            told[server] = waited_s
            say(f"waiting for the vLLM server at {server.url} ({waited_s:.0f} s)")

    fleet.wait_until_ready(progress)
    return fleet.check(
        config.model,
        num_sampler_logprobs=config.num_sampler_logprobs if config.is_centered else 0,
        min_model_len=2 if config.top_k else config.max_completion_length + 1,
        top_k=config.top_k,
        compute_dtype=config.compute_dtype,
    )


def check_sync(policy, tokenizer, fleet, sender, version, info, config, device):
    """Do servers and trainer agree on a fixed text? Collective; -> largest log-prob difference.

    The text is longer than one block of the server's prefix cache, so that a cache of older weights
    would show.
    """
    text = ", ".join(f"{n} times {n} is {n * n}" for n in range(40))
    prompt = tokenizer.encode(text)[: min(200, info.max_model_len // 2)]

    def trainer_log_probs(ids):
        row = packing.pack_row([text_sample(ids)], len(ids), packing.bucket).to(device)
        tree = attention.TreeMask(row, config.attention).prepare(policy.model.config)
        with torch.no_grad(), policy.computing():
            return policy(row, tree, temperature=1.0)[0][:, 0]

    dtypes = (info.dtype, config.compute_dtype)
    name = sender.adapter_name.format(version=version) if sender.adapter_name else config.model

    def resend():
        sync.sync_through_restart(fleet, sender, version)

    return sync.check_sync(fleet, name, prompt, trainer_log_probs, dtypes=dtypes, resend=resend)


def warm_up(policy, config, longest, device):
    """Compile for rows of any length up to `longest`: forward and backward of the longest, whose
    gradients are dropped. Lengths are symbolic from the second one on (the proof has the first), so
    the steps find their graphs made."""
    begin = time.perf_counter()
    n_candidates = config.num_sampler_logprobs if config.is_centered else 0
    sample = text_sample([0] * longest, n_candidates, with_sets=config.top_k > 0)
    row = packing.pack_row([sample], longest).to(device)
    tree = attention.TreeMask(row, config.attention).prepare(policy.model.config)
    with policy.computing():
        policy(row, tree, config.temperature)[0].sum().backward()
    policy.zero_grad()
    if dist.get_rank() == 0:
        say(f"layers and head compiled in {time.perf_counter() - begin:.0f} s")


def text_sample(ids, n_candidates=0, with_sets=False):
    """A Sample that asks for the log-prob of every token but the first, and of `n_candidates` ids
    beside each, and for nothing else. with_sets: among candidate sets, of that token alone."""
    n = len(ids)
    return chat.Sample(
        input_ids=np.array(ids, dtype=np.int32),
        trained=np.arange(n) > 0,
        sampler_log_probs=np.zeros(n, np.float32),
        top_ids=np.zeros((n - 1, n_candidates), np.int32),
        top_log_probs=np.zeros((n - 1, n_candidates), np.float32),
        versions=np.zeros(n, np.int32),
        set_ids=np.array(ids[1:], np.int32) if with_sets else None,
        set_offsets=np.arange(n, dtype=np.int32) if with_sets else None,
    )


def speed(seconds, plan, flops, device, config):
    """perf/* of one step, from its seconds, the plan's counts and the model FLOPs."""
    step_s, work_s = seconds["perf/step_s"], seconds["perf/fwd_bwd_s"]
    found = records(seconds) + [
        ("perf/fwd_bwd_forwarded_tokens_per_s", plan.n_tokens / work_s, work_s),
        ("perf/wall_clock_forwarded_tokens_per_s", plan.n_tokens / step_s, step_s),
        ("perf/wall_clock_trained_tokens_per_s", sum(plan.n_trained) / step_s, step_s),
    ]
    peak = model.peak_flops(device, config.compute_dtype)
    if peak:
        peak *= dist.get_world_size()
        found += [
            ("perf/fwd_bwd_mfu", 100 * flops / work_s / peak, work_s),
            ("perf/wall_clock_mfu", 100 * flops / step_s / peak, step_s),
        ]
    return found


def metric_names(config, task, policy, device):
    """What every logging window of this run carries, if only as NaN or a count of 0."""
    conditions = ["score_centering"] if config.is_centered else []
    if policy.router_aux_loss_coef:
        conditions.append("moe")
    if config.fp16:
        conditions.append("fp16")
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


def say_result(run, compiled):
    """The last lines of a run, a resumed one's earlier part included."""
    if compiled:
        graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
        say(f"{graphs} graphs were compiled, for the lengths of rows and the head's tiles")
    windows = read_windows(run / "metrics.jsonl")
    rewards = [w["reward"] for w in windows if math.isfinite(w.get("reward", math.nan))]
    if n := min(5, len(rewards) // 2):
        begin, end = (sum(part) / n for part in (rewards[:n], rewards[-n:]))
        which = f"the first {n} and of the last {n} logged steps"
        say(f"mean reward of {which}: {begin:.3f}, {end:.3f}")


def in_background(function):
    """Start `function` in a thread; -> a function that waits for what it returns or raises."""
    future = Future()

    def run():
        try:
            future.set_result(function())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()  # a pool's thread would hold up the exit
    return future.result


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
    except (ValueError, TypeError, TimeoutError, ServerError, sync.WeightSyncError) as error:
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
        check(config, task)
    train(config, task)


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except KeyboardInterrupt:
        sys.exit(130)
