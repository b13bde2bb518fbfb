"""Claim: where both sides are equally fast, both GPUs work for 90% of the time, and trainer and
generation together wait for each other less than 10% of it.

    python bench/balance.py            # two GPUs of one host, 5 minutes
    python bench/balance.py --tiny     # on the CPU, to try the script: its figures mean nothing

A model of Qwen3-1.7B's shape with more layers (72: 3.9B) and random weights; every completion has
the same length, and a reward drawn from its ids, so that every group is trained. The prompt decides
which side is faster: the trainer forwards it once a group, but the server reads it for each token
that it generates. So one run goes through prompts of several lengths, and the table has a line for
each; the balanced one is the claim. The first steps with each length are left out: what they train
was generated beside other prompts.

    wait            share of the time that the trainer waited for samples (perf/rollout_wait_s)
    backpressure    share that generation was held back because it was max_staleness steps ahead
    server, trainer GPU    percent of the time with a kernel running (nvidia-smi)
"""

import argparse
import contextlib
import math
import os
import random
import statistics
import string
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
if __name__ == "__main__":
    sys.path[0] = str(ROOT)  # this file's folder has a sync.py too

from metrics import NAN, read_windows  # noqa: E402
from rollout import RolloutLoop  # noqa: E402
from server import WORKER_EXTENSION  # noqa: E402

TEMPLATE = (
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}<eos>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
OVERHEAD = len("<user>") + 1 + len("<assistant>")  # tokens of a prompt beside its content
LEFT_OUT = 3  # first steps with each length
AFTERWARDS = 16  # tokens that the prompts after the last length are longer
HELD = "BENCH_HELD"  # environment variable: the file in which waits of generation are noted

# ---------------------------------------------------------------------------------------- the task


@dataclass(frozen=True)
class Options:
    lengths: str = "64"  # of prompts, in tokens, with commas
    groups: str = "8"  # how many prompts of each


def dataset(options):
    """Prompts of one letter a token, the lengths one after the other."""
    rng = random.Random(0)
    pairs = zip(map(int, options.lengths.split(",")), map(int, options.groups.split(",")))
    texts = [rng.choices(string.ascii_letters, k=n - OVERHEAD) for n, k in pairs for _ in range(k)]
    return [{"prompt": [{"role": "user", "content": "".join(text)}]} for text in texts]


def draw(completion_ids, **columns):
    """1 or 0, by the ids."""
    return [float(sum(ids) % 2) for ids in completion_ids]


class WatchedLoop(RolloutLoop):
    """Notes when generation was held back: the metric has the mean length of a wait only."""

    async def _wait_while(self, holds, metric=None):
        begin = time.time()
        await super()._wait_while(holds, metric)
        if metric == "rollout/backpressure_s" and time.time() - begin > 0.001:
            with open(os.environ[HELD], "a") as file:
                print(begin, time.time(), file=file)


reward_funcs = [draw]
rollout_loop = WatchedLoop

# ----------------------------------------------------------------------------------------- the run


def make_model(folder, tiny, layers):
    """Config, tokenizer and random weights."""
    import torch
    from transformers import AutoTokenizer, Qwen3ForCausalLM

    from bench.sync import make_folder

    config = make_folder(folder, tiny, layers)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    with torch.device("cuda:1" if torch.cuda.device_count() > 1 else "cpu"):
        model = Qwen3ForCausalLM(config)
    model.to(config.dtype).save_pretrained(folder)
    del model
    torch.cuda.empty_cache()  # the trainer's


def train(url, folder, args, lengths, groups):
    """One trainer process until the prompts have ended."""
    from bench.end_to_end import gpu_load

    options = dict(
        env=__file__,
        model=args.model,
        vllm_server_base_url=url,
        output_dir=folder / "run",
        lengths=",".join(map(str, lengths)),
        groups=",".join(map(str, groups)),
        train_sampling_strategy="sequential",
        num_train_epochs=1,
        num_generations=args.num_generations,
        max_completion_length=args.completion,
        token_budget=args.token_budget,
        gradient_accumulation_steps=args.accumulation,
        max_concurrent_rollouts=args.in_flight,
        learning_rate=1e-7,
        save_strategy="no",
    )
    command = ["grpo.py", *(f"--{name}={value}" for name, value in options.items())]
    environment = dict(os.environ, CUDA_VISIBLE_DEVICES="" if args.tiny else "1")
    environment |= {HELD: str(folder / "held"), "HF_HUB_OFFLINE": "1"}
    load = contextlib.nullcontext() if args.tiny else gpu_load(folder / "load")
    with open(folder / "log", "wb") as log, load:
        code = subprocess.call(
            [sys.executable, *command], cwd=ROOT, env=environment, stdout=log, stderr=log
        )
    if code:
        sys.exit(f"the trainer ended with {code}:\n{(folder / 'log').read_text()[-3000:]}")


def overlap(spans, begin, end):
    """Seconds of (begin, end) spans between two times."""
    return sum(max(0.0, min(e, end) - max(b, begin)) for b, e in spans)


def figures(folder, length, args):
    """A line of the table: the steps whose samples all have prompts of this length."""
    from bench.end_to_end import busy

    windows = read_windows(folder / "run/metrics.jsonl")
    whole = length + args.completion  # a completion may have ended by itself: rarely
    mine = [w for w in windows if abs(w["sample/forwarded_tokens_mean"] - whole) < 4][LEFT_OUT:]
    if len(mine) < 2:
        return {"steps": len(mine)}
    begin, end = mine[0]["time"], mine[-1]["time"]
    mine = mine[1:]  # the first one's end is where the clock starts
    held = []
    if (folder / "held").exists():
        lines = (folder / "held").read_text().splitlines()
        held = [tuple(map(float, line.split())) for line in lines]

    def total(name):
        return sum(window[name] for window in mine)

    def mean(name):
        values = [window[name] for window in mine if not math.isnan(window[name])]
        return statistics.fmean(values) if values else NAN

    server, trainer = (0.0, 0.0) if args.tiny else busy(folder / "load", begin, end)
    return {
        "steps": len(mine),
        "s a step": (end - begin) / len(mine),
        "wait %": 100 * total("perf/rollout_wait_s") / (end - begin),
        "backpressure %": 100 * overlap(held, begin, end) / (end - begin),
        "server GPU %": server,
        "trainer GPU %": trainer,
        "generated tokens/s": mean("rollout/generated_tokens_per_s"),
        "trained tokens/s": total("batch/trained_tokens_per_step") / (end - begin),
        "sync s": mean("perf/weight_sync_s"),
        "staleness": mean("sample/staleness_mean"),
        "in flight": mean("rollout/concurrency"),
    }


def show(table):
    keys = max(table.values(), key=len)
    print("\n| prompt | " + " | ".join(keys) + " |\n|---|" + "---|" * len(keys))
    for length, line in table.items():
        cells = (f"{line[key]:.4g}" if key in line else "" for key in keys)
        print(f"| {length} | " + " | ".join(cells) + " |")
    whole = {n: line for n, line in table.items() if "wait %" in line}
    if whole:
        waits = {n: line["wait %"] + line["backpressure %"] for n, line in whole.items()}
        best = min(waits, key=waits.get)
        print(
            f"least at prompts of {best} tokens: {waits[best]:.1f}% of the time waited (goal 10), "
            f"GPUs at work {whole[best]['server GPU %']:.0f}% and "
            f"{whole[best]['trainer GPU %']:.0f}% (goal 90)"
        )


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--lengths", default="64,128,256,384,512,768,1024", help="of prompts")
    parser.add_argument("--layers", type=int, default=72, help="of the model")
    parser.add_argument("--steps", type=int, default=8, help="with each length, about")
    parser.add_argument("--completion", type=int, default=256, help="tokens")
    parser.add_argument("--num_generations", type=int, default=8)
    parser.add_argument("--token_budget", type=int, default=32768, help="of a row")
    parser.add_argument("--accumulation", type=int, default=2, help="rows a step")
    parser.add_argument("--in_flight", type=int, default=768, help="rollouts at most")
    parser.add_argument("--folder", help="for model, logs and metrics; default: a temporary one")
    args = parser.parse_args()
    if args.tiny:
        small = dict(
            lengths="64,96", steps=6, completion=16, token_budget=1024, in_flight=32, layers=28
        )
        vars(args).update(small)
    from bench.sync import serve

    folder = Path(args.folder or tempfile.mkdtemp(prefix="balance-"))
    folder.mkdir(parents=True, exist_ok=True)
    args.model = str(folder / "model")
    make_model(args.model, args.tiny, args.layers)
    lengths = [int(length) for length in args.lengths.split(",")]
    of_a_group = args.num_generations * args.completion
    step = args.token_budget * args.accumulation
    # others follow, so that generation does not end while the last ones are trained
    asked = [*lengths, lengths[-1] + AFTERWARDS]
    groups = [args.steps * step // (length + of_a_group) for length in asked]
    more = "--kv-cache-memory-bytes 100000000000 --max-model-len 1344"
    more = [] if args.tiny else more.split()
    log = str(folder / "server.log")
    server = serve(args.model, args.model, log, WORKER_EXTENSION, *more, tiny=args.tiny)
    with server as url:
        train(url, folder, args, asked, groups)
    show({length: figures(folder, length, args) for length in lengths})


if __name__ == "__main__":
    main()
