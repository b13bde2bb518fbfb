"""Claim: a reward threshold in at most half of the wall time that TRL's AsyncGRPOTrainer needs.

    pip install flash-attn-4==4.0.0b36 nvidia-cutlass-dsl==4.8.0; pip install --no-deps trl==1.16.0
    python bench/end_to_end.py                 # two GPUs of one host, 8 minutes
    python bench/end_to_end.py --seeds 0,1,2   # 20 minutes
    python bench/end_to_end.py --sides surrogate/0,centered/0,surrogate/16,centered/16 \
        --servers 4 --apart --gpu 0            # what staleness does; one GPU is enough
    python bench/end_to_end.py --picture docs/against_trl.png   # the curves of those seeds as well

SmolLM2-135M learns sums of two two-digit numbers. The servers for all share GPU 0: two, since an
engine is one thread of Python; TRL, which knows one server, has the first. On GPU 1 one trainer
after the other, each with a new process, the same data, group size, lengths, token budget, learning
rate, AdamW, requests in flight and number of steps:

    trl          AsyncGRPOTrainer of TRL 1.16: float32 masters under bfloat16 autocast, layers not
                 recomputed; its attention kernel is flash-attn-4, as it fetches its own from a hub
    surrogate    ours with --score_centering false, which is TRL's loss
    centered     ours as it is

A number after a slash is the staleness at which ours trains: the worker holds scored samples back
until so many steps' worth of newer ones are there (0: --max_staleness 0, generation waits for the
step). Without it samples are as old as they come, at most --max_staleness 4. With --rehearse each
trainer runs for two steps before anything is measured, so that what it compiles is on disk. With
--apart each trainer has one server, and as many run at a time: their times mean little. With
--gpu 0 the trainers share the servers' GPU, weights go through shared memory, and TRL stays out.

This file is the task of all three: its reward function notes when it scored what, so that rewards
and generated tokens are counted in the same way. `seconds` run from the start of the trainer's
process, `after the first` from its first scored group. The share of time that a GPU works is
nvidia-smi's, from the first step to the last.
"""

import argparse
import contextlib
import json
import math
import os
import queue
import statistics
import subprocess
import sys
import tempfile
import time
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
if __name__ == "__main__":
    sys.path[0] = str(ROOT)  # this file's folder has a sync.py too

import plot  # noqa: E402
from envs import arithmetic  # noqa: E402
from metrics import NAN, read_windows  # noqa: E402
from rollout import RolloutLoop  # noqa: E402
from server import WORKER_EXTENSION  # noqa: E402

TITLES = {  # in the picture
    "trl": "TRL 1.16",
    "surrogate": "espalier, TRL's loss",
    "centered": "espalier",
}
THRESHOLD = 0.5  # of the mean reward, over
WINDOW = 512  # completions
COMMON = dict(  # options of the same name and meaning on both sides
    learning_rate=1e-5,
    adam_beta2=0.95,
    num_generations=16,
    max_completion_length=16,
    token_budget=4096,
    max_staleness=4,
)
IN_FLIGHT = 512
A_STEP = 320  # about as many completions as a step trains
OURS = {"surrogate": "false", "centered": "true"}  # --score_centering
REHEARSAL = 1000  # its seed
RATIO = "sampling/importance_sampling_ratio"

# --------------------------------------------------------------------------- the task of all three


@dataclass(frozen=True)
class Options(arithmetic.Options):
    held_back: int = 0  # scored samples that are sent only when newer ones have come


dataset = arithmetic.dataset
SCORES = "BENCH_SCORES"  # environment variable: the file in which rewards are noted


def correct(completions, completion_ids, **columns):
    """The arithmetic task's reward, noted with its time and the number of generated tokens."""
    rewards = arithmetic.correct(completions, **columns)
    with open(os.environ[SCORES], "a") as file:
        print(time.time(), sum(rewards), len(rewards), sum(map(len, completion_ids)), file=file)
    return rewards


class LateLoop(RolloutLoop):
    """Samples leave the worker in their order, when `held_back` newer ones are there."""

    async def setup(self):
        self.late = deque()

    async def _ship(self, samples=(), dropped=()):
        self.late.extend(samples)
        n = max(0, len(self.late) - self.config.held_back)
        await super()._ship([self.late.popleft() for _ in range(n)], dropped)


reward_funcs = [correct]
rollout_loop = LateLoop

# ---------------------------------------------------------------------------------- TRL's trainer


def train_trl(model, url, folder, steps, seed):
    """One process: AsyncGRPOTrainer with the options above; its log goes to metrics.jsonl."""
    from datasets import Dataset
    from transformers import AutoTokenizer, TrainerCallback
    from trl.chat_template_utils import qwen3_template
    from trl.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer, packing

    class Kernel:
        """What TRL asks of the kernel that it would fetch."""

        @staticmethod
        def flash_attn_varlen_func(q, k, v, cu_q, cu_k, longest_q, longest_k, **options):
            from flash_attn.cute import flash_attn_varlen_func

            options = {name: x for name, x in options.items() if x != (-1, -1)}  # no window
            sizes = (cu_q, cu_k, int(longest_q), int(longest_k))
            return flash_attn_varlen_func(q, k, v, None, *sizes, **options)  # None: no latent part

    packing._flash_attn = lambda: Kernel
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.response_template = qwen3_template  # it has none; the same ChatML, and nothing calls

    class Log(TrainerCallback):
        def on_log(self, args, state, control, logs, **unused):
            if "loss" in logs:  # the last log is a summary
                window = logs | {"step": state.global_step, "time": time.time()}
                with open(Path(folder, "metrics.jsonl"), "a") as file:
                    print(json.dumps(window), file=file)

    trainer = AsyncGRPOTrainer(
        model=model,
        reward_funcs=correct,
        processing_class=tokenizer,
        train_dataset=Dataset.from_list(dataset(Options(digits=2))),
        args=AsyncGRPOConfig(
            **COMMON,
            output_dir=folder,
            vllm_server_base_url=url,
            max_steps=steps,
            seed=seed,
            max_inflight_tasks=IN_FLIGHT,
            gradient_checkpointing=False,
            report_to="none",
            save_strategy="no",
            disable_tqdm=True,
        ),
        callbacks=[Log()],
    )
    trainer.train()


# ------------------------------------------------------------------------------------- one trainer


def run(side, url, args, seed, steps):
    """Start the trainer of one side, wait for its end; -> its figures."""
    folder = Path(args.folder, f"{side.replace('/', '-')}-seed{seed}")
    folder.mkdir(parents=True)
    name, _, staleness = side.partition("/")
    environment = dict(os.environ, CUDA_VISIBLE_DEVICES=args.gpu, HF_HUB_OFFLINE="1")
    environment[SCORES] = str(folder / "scores")
    if name == "trl":
        options = dict(trl=1, url=url.split(",")[0], folder=folder, steps=steps, seeds=seed)
        command = [__file__]
    else:
        options = COMMON | dict(
            digits=2,
            env=__file__,
            model=args.model,
            vllm_server_base_url=url,
            output_dir=folder,
            max_steps=steps,
            max_concurrent_rollouts=IN_FLIGHT,
            seed=seed,
            score_centering=OURS[name],
            save_strategy="no",
        )
        if staleness:  # what is in flight is about one step old when it is trained
            late = int(staleness)
            options["held_back"] = A_STEP * max(0, late - 1)
            options["max_staleness"] = late and late + COMMON["max_staleness"]
            options["max_concurrent_rollouts"] = A_STEP
        command = ["grpo.py"]
    command += [part for option, value in options.items() for part in (f"--{option}", str(value))]
    began = time.time()
    with open(folder / "log", "wb") as log, gpu_load(folder / "load"):
        trainer = subprocess.Popen(
            [sys.executable, *command], cwd=ROOT, env=environment, stdout=log, stderr=log
        )
        try:
            code = trainer.wait(args.seconds)
        except subprocess.TimeoutExpired:
            trainer.terminate()
            code = trainer.wait()
    if code:
        print((folder / "log").read_text(errors="replace")[-3000:])
    found = figures(folder, began)
    cells = " ".join(f"{key} {value:.4g}," for key, value in found.items())
    print(f"{side}, seed {seed}: {cells} exit code {code}", flush=True)
    return found


@contextlib.contextmanager
def gpu_load(path):
    """While the block runs nvidia-smi writes time, GPU and the percent of time with a kernel."""
    query = "--query-gpu=timestamp,index,utilization.gpu"
    command = ["nvidia-smi", query, "--format=csv,noheader,nounits", "-lms", "250"]
    with open(path, "wb") as file:
        process = subprocess.Popen(command, stdout=file)
        try:
            yield
        finally:
            process.terminate()
            process.wait()


def busy(path, begin, end):
    """Mean percent of time with a kernel running, [GPU 0, GPU 1], between two times."""
    seen = ([], [])
    for line in path.read_text().splitlines()[:-1]:
        stamp, gpu, percent = line.split(", ")
        if int(gpu) < 2 and begin <= stamp_seconds(stamp) <= end:
            seen[int(gpu)].append(float(percent))
    return [statistics.fmean(gpu) if gpu else NAN for gpu in seen]


def stamp_seconds(stamp):
    whole, fraction = stamp.split(".")
    return time.mktime(time.strptime(whole, "%Y/%m/%d %H:%M:%S")) + float(f"0.{fraction}")


def curve(scores):
    """Lines of the reward function -> [(time, mean reward of the last WINDOW completions)]."""
    points, total, n, begin = [], 0.0, 0, 0
    for when, rewards, count, _ in scores:
        total, n = total + rewards, n + count
        while n - scores[begin][2] >= WINDOW:
            total, n, begin = total - scores[begin][1], n - scores[begin][2], begin + 1
        if n >= WINDOW:
            points.append((when, total / n))
    return points


def figures(folder, began):
    """What one trainer did, from the reward function's notes, its metrics and nvidia-smi."""
    text = (folder / "scores").read_text() if (folder / "scores").exists() else ""
    scores = [tuple(map(float, line.split())) for line in text.splitlines()]
    log = folder / "metrics.jsonl"
    steps = read_windows(log) if log.exists() else []
    if not scores or len(steps) < 2:
        return {}
    points = curve(scores)
    (folder / "curve.json").write_text(json.dumps([(t - began, r) for t, r in points]))
    reached = next((when for when, reward in points if reward >= THRESHOLD), NAN)
    times = [step["time"] for step in steps]
    begin, end = times[0], times[-1]
    within = [score for score in scores if begin <= score[0] <= end]
    server, trainer = busy(folder / "load", begin, end)

    def mean(name):  # of the steps after the first, which has start-up in it
        values = [step.get(name, NAN) for step in steps[1:]]
        values = [value for value in values if not math.isnan(value)]
        return statistics.fmean(values) if values else NAN

    return {
        "seconds": reached - began,
        "after the first": reached - scores[0][0],
        "first step at": begin - began,
        "steps": len(steps),
        "s a step": (end - begin) / (len(steps) - 1),
        "last reward": points[-1][1] if points else NAN,
        "generated tokens/s": sum(score[3] for score in within) / (end - begin),
        "trained tokens/s": sum(s["batch/trained_tokens_per_step"] for s in steps[1:])
        / (end - begin),
        "samples a step": mean("batch/samples_per_step"),
        "server works %": server,
        "trainer works %": trainer,
        "sync s": mean("perf/weight_sync_s"),
        "staleness": mean("sample/staleness_mean"),
        "ratio, lowest": min(step.get(f"{RATIO}/min", NAN) for step in steps),
        "ratio, highest": max(step.get(f"{RATIO}/max", NAN) for step in steps),
        "masked": mean("sampling/masked_mean"),
        "wait s": mean("perf/rollout_wait_s"),
    }


def show(results):
    """One table: a line a figure, a column a side, means over seeds; then the ratio."""
    names = list(results)
    keys = max((list(run) for runs in results.values() for run in runs), key=len)
    means = {
        name: {key: statistics.fmean(run.get(key, NAN) for run in runs) for key in keys}
        for name, runs in results.items()
    }
    print("\n| | " + " | ".join(names) + " |\n|---|" + "---|" * len(names))
    for key in keys:
        print(f"| {key} | " + " | ".join(f"{means[name][key]:.4g}" for name in names) + " |")
    for key in ("after the first", "seconds"):
        for name in names:
            if name != "trl" and "trl" in means:
                ratio = means["trl"][key] / means[name][key]
                print(f"reward {THRESHOLD}, {key}: TRL's time over that of {name} {ratio:.2f}")


def picture(folder, path):
    """The curves of all trainers below `folder`, over minutes since the start of each."""
    runs = []
    for file in sorted(Path(folder).glob("*-seed*/curve.json")):
        points = json.loads(file.read_text())
        windows = [
            {"step": i, "time": t, "minutes": t / 60, "reward": r}
            for i, (t, r) in enumerate(points)
        ]
        side, _, seed = file.parent.name.partition("-seed")
        if windows and seed != str(REHEARSAL):
            runs.append((Path(f"{TITLES.get(side, side)}-seed{seed}"), windows))
    return plot.draw(plot.by_setup(runs), path, reward_only=True, x="minutes")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default=str(ROOT / "models/smollm2-135m"))
    parser.add_argument("--sides", default="trl,surrogate,centered")
    parser.add_argument("--seeds", default="0")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--rehearse", action="store_true", help="two steps of each side before")
    parser.add_argument("--seconds", type=float, default=200, help="of a trainer at most")
    parser.add_argument("--picture", help="PNG to draw the curves to")
    parser.add_argument("--folder", help="for logs and curves; default: a temporary one")
    parser.add_argument("--servers", type=int, default=2, help="on GPU 0")
    parser.add_argument("--gpu", default="1", choices=["0", "1"], help="of the trainers")
    parser.add_argument("--apart", action="store_true", help="a server for each trainer")
    parser.add_argument("--url", help="of servers that run; default: some are started")
    parser.add_argument("--trl", help=argparse.SUPPRESS)  # this process is TRL's trainer
    args = parser.parse_args()
    if args.trl:
        return train_trl(args.model, args.url, args.folder, args.steps, int(args.seeds))
    from bench.sync import serve

    args.folder = args.folder or tempfile.mkdtemp(prefix="end-to-end-")
    results = {name: [] for name in args.sides.split(",")}
    if unknown := [s for s in results if s != "trl" and s.split("/")[0] not in OURS]:
        parser.error(f"--sides {','.join(unknown)}: there are trl, {', '.join(OURS)}")
    nccl = args.gpu != "0"  # it refuses two processes on one GPU
    if "trl" in results and not nccl:
        parser.error("--gpu 0: TRL sends weights by NCCL only; leave trl out of --sides")
    log = str(Path(args.folder, "server.log"))
    Path(args.folder).mkdir(parents=True, exist_ok=True)
    with contextlib.ExitStack() as stack:
        # memory that is given, or they could not start side by side; and the cap on rollouts in
        # flight, which begins at what fits the cache at full length, begins at all of them
        more = ["--kv-cache-memory-bytes", "8000000000", "--max-model-len", "1024"]
        served = (args.model, args.model, log, WORKER_EXTENSION, *more)
        server = serve(*served, n=args.servers, nccl=nccl)
        url = args.url or stack.enter_context(server)
        if args.rehearse:
            for name in results:
                run(name, url, args, REHEARSAL, 2)
        free = queue.SimpleQueue()
        for part in url.split(",") if args.apart else [url]:
            free.put(part)

        def start(name, seed):
            part = free.get()
            try:
                return run(name, part, args, seed, args.steps)
            finally:
                free.put(part)

        with ThreadPoolExecutor(free.qsize()) as pool:
            seeds = args.seeds.split(",")
            started = [(name, pool.submit(start, name, s)) for s in seeds for name in results]
            for name, one in started:
                results[name].append(one.result())
    show(results)
    if args.picture:
        print(picture(args.folder, args.picture))


if __name__ == "__main__":
    main()
