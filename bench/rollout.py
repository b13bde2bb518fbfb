"""Generated tokens a second through the rollout worker and its pipe to the trainer's side, against
TRL's worker.

    pip install --no-deps trl==1.16.0
    python bench/rollout.py              # all three, the same server, about a minute
    python bench/rollout.py --profile 9  # ours with nine log-probs, and where its time goes

A server in another process answers at once with bodies encoded beforehand, 256 tokens each, as
vLLM writes them: ours asks /inference/v1/generate for one and for nine log-probs a token (score
centering's head of 8 and the sampled token), TRL's asks /v1/completions for one. 256 requests are
in flight. The worker renders, asks, parses, scores and sends; this process takes samples out.
What counts is the CPU time of the worker's process, so that other work on the machine and the
server's own time matter little: tokens a CPU second are tokens a second on one core of its own.
"""

import argparse
import asyncio
import contextlib
import cProfile
import importlib.util
import itertools
import multiprocessing
import os
import pstats
import re
import shutil
import signal
import sys
import tempfile
import time
import warnings
from collections import Counter
from dataclasses import asdict
from pathlib import Path

import msgspec
import numpy as np

ROOT = Path(__file__).resolve().parents[1]
sys.path[0] = str(ROOT)  # this file's folder has a rollout.py too
from config import Config  # noqa: E402
from rollout import RolloutLoop  # noqa: E402
from tasks import Task  # noqa: E402
from worker import RolloutWorker  # noqa: E402

TOKENS, IN_FLIGHT, GROUP, VOCAB = 256, 256, 8, 49_000
WARM_UP = 2 * IN_FLIGHT  # samples that are not measured: imports, connections, first groups

# --------------------------------------------------------------------------------- the stub server


def generate_body(rng, k):
    """An answer of /inference/v1/generate to `logprobs: k + 1` (0 if k is 0), in vLLM's order: the
    sampled token, then the others by rank."""
    content = []
    for _ in range(TOKENS):
        ids = rng.choice(VOCAB, k + 1, replace=False).tolist()
        log_probs = sorted(np.log(rng.dirichlet(np.ones(k + 4)), dtype=np.float32)[: k + 1])[::-1]
        ranks = {"token_id": ids, "logprob": [float(x) for x in log_probs], "rank": range(1, k + 2)}
        entries = [dict(zip(ranks, values)) for values in zip(*ranks.values())]
        sampled = entries.pop(min(int(rng.geometric(0.6)) - 1, k))
        content.append(sampled | {"top_logprobs": [sampled, *entries]})
    choice = {
        "index": 0,
        "finish_reason": "length",
        "stop_reason": None,
        "token_ids": [token["token_id"] for token in content],
        "routed_experts": None,
        "sampling_mask": None,
        "weight_versions": [{"version": "0", "start": 0, "end": TOKENS}],
        "logprobs": {"content": content},
    }
    return {"request_id": "0" * 32, "model": "m", "output_mode": "tokens", "choices": [choice]}


def completions_body(rng):
    """An answer of /v1/completions to `logprobs: 0, return_token_ids: true`."""
    ids = rng.integers(0, VOCAB, TOKENS).tolist()
    log_probs = np.log(rng.uniform(0.01, 1, TOKENS), dtype=np.float32).astype(float).tolist()
    words = [f" w{i}"[:4] for i in ids]
    log_probs_object = {
        "text_offset": list(range(0, 4 * TOKENS, 4)),
        "token_logprobs": log_probs,
        "tokens": words,
        "top_logprobs": [{word: value} for word, value in zip(words, log_probs)],
    }
    choice = {
        "index": 0,
        "text": "".join(words),
        "logprobs": log_probs_object,
        "finish_reason": "length",
        "stop_reason": None,
        "token_ids": ids,
        "prompt_logprobs": None,
        "prompt_token_ids": list(range(40)),
    }
    return {"id": "cmpl-0", "object": "text_completion", "model": "m", "choices": [choice]}


def http(status, body):
    text = msgspec.json.encode(body)
    return b"HTTP/1.1 %s\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%s" % (
        status,
        len(text),
        text,
    )


class Stub(asyncio.Protocol):
    """As little HTTP as the two clients need."""

    models = http(b"200 OK", {"data": [{"id": "m", "max_model_len": 4096}]})
    absent = http(b"404 Not Found", {"detail": "Not Found"})
    answers = {}  # first bytes of the request's line and what its body contains: bodies, repeated

    def connection_made(self, transport):
        self.transport, self.received = transport, b""

    def data_received(self, data):
        self.received += data
        while (end := self.received.find(b"\r\n\r\n") + 4) > 3:
            length = re.search(rb"content-length: (\d+)", self.received[:end], re.IGNORECASE)
            stop = end + int(length[1] if length else 0)
            if len(self.received) < stop:
                return
            request, self.received = self.received[:stop], self.received[stop:]
            self.transport.write(self.answer(request))

    def answer(self, request):
        if request.startswith(b"GET /v1/models "):
            return self.models
        for (path, text), bodies in self.answers.items():
            if request.startswith(path) and text in request:
                return next(bodies)
        return self.absent


def serve(pipe):
    rng = np.random.default_rng(0)

    def several(make, *arguments):
        return itertools.cycle([http(b"200 OK", make(rng, *arguments)) for _ in range(16)])

    Stub.answers = {
        (b"POST /inference/v1/generate ", b'"logprobs":9'): several(generate_body, 8),
        (b"POST /inference/v1/generate ", b'"logprobs":0'): several(generate_body, 0),
        (b"POST /v1/completions ", b""): several(completions_body),
    }

    async def run():
        server = await asyncio.get_running_loop().create_server(Stub, "127.0.0.1", 0)
        pipe.send(server.sockets[0].getsockname()[1])
        await server.serve_forever()

    asyncio.run(run())


# --------------------------------------------------------------------------------- the two workers


def first_token(completion_ids, **columns):
    """A reward that differs within a group, so that none is dropped."""
    return [float(ids[0] % 1000) for ids in completion_ids]


def prompts():
    text = "A train leaves at {} and arrives at {}. How long does it take? Think first."
    rows = [text.format(i, i + 7) for i in range(1000)]
    return [{"prompt": [{"role": "user", "content": row}], "answer": 7} for row in rows]


class Profiled(RolloutLoop):
    async def run(self):
        profile = cProfile.Profile()
        profile.enable()
        try:
            await super().run()
        finally:
            profile.disable()
            profile.dump_stats(os.environ["ESPALIER_PROFILE"])


def ours(url, folder, k, loop=None):
    """(worker's process, function that returns the next sample's number of trained tokens, stop)"""
    config = Config(
        vllm_server_base_url=url,
        num_generations=GROUP,
        max_completion_length=TOKENS,
        max_concurrent_rollouts=IN_FLIGHT,
        score_centering=k > 0,
        num_sampler_logprobs=k,
        max_steps=10**9,
    )
    worker = RolloutWorker(
        asdict(config),
        Task(prompts, (first_token,), rollout_loop=loop),
        model_path=folder,
        model_name="m",
        eos_token_ids=[0],
    )
    worker.set_allowance(2 * IN_FLIGHT * TOKENS)  # in flight and queued
    worker.start()

    def take():
        while (sample := worker.get(60)) is None:
            pass
        worker.release(sample.own_tokens(GROUP))
        assert sample.top_ids.shape == (TOKENS, k)
        return int(sample.trained.sum())

    return worker._process, take, worker.stop


def trls(url, folder):
    """The same of TRL's worker."""
    os.environ |= {"TRL_EXPERIMENTAL_SILENCE": "1", "PYTHONWARNINGS": "ignore"}
    warnings.simplefilter("ignore")
    from accelerate.state import PartialState
    from transformers import AutoTokenizer
    from trl.experimental.async_grpo.async_rollout_worker import AsyncRolloutWorker

    PartialState()  # its logger asks for it
    worker = AsyncRolloutWorker(
        model_name="m",
        dataset=prompts(),
        reward_funcs=[first_token],
        processing_class=AutoTokenizer.from_pretrained(folder),
        eos_token_ids=[0],
        num_generations=GROUP,
        max_inflight_tasks=IN_FLIGHT,
        queue_maxsize=IN_FLIGHT,
        vllm_server_url=url,
        max_tokens=TOKENS,
    )
    worker.start()

    def take():
        return int(worker.rollout_buffer.get(timeout=120).completion_mask.sum())

    return worker._process, take, worker.stop


@contextlib.contextmanager
def running(*starts):
    with contextlib.ExitStack() as stack:
        workers = []
        for start in starts:
            process, take, stop = start()
            stack.callback(stop)
            stack.callback(os.kill, process.pid, signal.SIGCONT)  # before it
            workers.append((process, take, stop))
        yield workers


def tokenizer_folder(folder):
    """The embedded model's tokenizer with a template that TRL's worker knows how to parse."""
    package = importlib.util.find_spec("trl")
    if package is None:
        raise SystemExit("bench/rollout.py needs the peer: pip install --no-deps trl==1.16.0")
    source = ROOT / "models" / "smollm2-135m"
    if not source.is_dir():
        raise SystemExit("no models/smollm2-135m: bash run.sh makes it")
    for name in ("tokenizer.json", "tokenizer_config.json", "config.json"):
        shutil.copy(source / name, folder)
    template = Path(package.submodule_search_locations[0], "chat_templates", "qwen2_5.jinja")
    shutil.copy(template, Path(folder, "chat_template.jinja"))
    return folder


# -------------------------------------------------------------------------------------- measurement


def cpu_seconds(pid):
    """(of the process, of its main thread) so far, user and system."""

    def of(file):
        fields = Path(file).read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    return np.array([of(f"/proc/{pid}/stat"), of(f"/proc/{pid}/task/{pid}/stat")])


def measure(workers, n_tokens, rounds):
    """For each worker: tokens a second, then CPU seconds a million tokens of its process, of its
    event loop and of this process. They take turns, the others being suspended, so that what else
    the machine does weighs on all alike."""
    totals = [np.zeros(5) for _ in workers]  # tokens, seconds, CPU seconds of the three
    for process, take, _ in workers:
        for _ in range(WARM_UP):
            take()
        os.kill(process.pid, signal.SIGSTOP)
    for _ in range(rounds):
        for total, (process, take, _) in zip(totals, workers):
            os.kill(process.pid, signal.SIGCONT)
            for _ in range(2 * IN_FLIGHT):  # what was queued
                take()
            marks = [time.monotonic(), *cpu_seconds(process.pid), time.process_time()]
            seen = 0
            while seen < n_tokens / rounds:
                seen += take()
            now = [time.monotonic(), *cpu_seconds(process.pid), time.process_time()]
            total += [seen, *np.subtract(now, marks)]
            os.kill(process.pid, signal.SIGSTOP)
    return [(n / wall, *(1e6 * s / n for s in cpu)) for n, wall, *cpu in totals]


def show_profile(path, n=30):
    """Where the event loop's time goes, in percent: by package, then by function. What built-in
    functions take counts for their callers."""
    by_function = Counter()
    for function, (_, _, own, _, callers) in pstats.Stats(path).stats.items():
        if function[0] != "~":
            by_function[function] += own
        else:
            for caller, (_, _, there, _) in callers.items():
                by_function[caller] += there
    percent, by_package = 100 / by_function.total(), Counter()
    for (file, *_), own in by_function.items():
        file = Path(file)
        by_package[file.name if file.parent == ROOT else file.parent.name] += own
    print("  ".join(f"{name} {own * percent:.1f}" for name, own in by_package.most_common(12)))
    for (file, line, name), own in by_function.most_common(n):
        print(f"{own * percent:6.1f}  {Path(file).name}:{line} {name}")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=500_000, help="measured of each")
    parser.add_argument("--profile", type=int, choices=(1, 9), help="ours with so many log-probs")
    parser.add_argument("--rounds", type=int, default=10, help="turns of each worker")
    options = parser.parse_args()
    context = multiprocessing.get_context("spawn")
    pipe, servers_end = context.Pipe()
    server = context.Process(target=serve, args=(servers_end,), daemon=True)
    server.start()
    try:
        with tempfile.TemporaryDirectory() as folder:
            url, folder = f"http://127.0.0.1:{pipe.recv()}", tokenizer_folder(folder)
            if options.profile:
                os.environ["ESPALIER_PROFILE"] = str(Path(folder, "profile"))
                with running(lambda: ours(url, folder, options.profile - 1, Profiled)) as workers:
                    measure(workers, options.tokens, 1)
                show_profile(os.environ["ESPALIER_PROFILE"])
                return
            print(f"{IN_FLIGHT} in flight, {TOKENS} tokens each, groups of {GROUP}")
            print("CPU seconds a million tokens: worker, event loop in it, trainer's side")
            print(
                f"{'':32}{'tokens/s':>9}{'worker':>9}{'loop':>8}{'trainer':>9}{'tokens/CPU s':>14}"
            )
            starts = {
                "ours, nine log-probs a token": lambda: ours(url, folder, 8),
                "ours, one": lambda: ours(url, folder, 0),
                "trl 1.16.0, one": lambda: trls(url, folder),
            }
            with running(*starts.values()) as workers:
                found = measure(workers, options.tokens, options.rounds)
            for name, (wall, worker, loop, own) in zip(starts, found):
                print(
                    f"{name:32}{wall:9,.0f}{worker:9.2f}{loop:8.2f}{own:9.2f}{1e6 / worker:14,.0f}"
                )
            nine, one, peer = (1e6 / worker for _, worker, *_ in found)
            print(f"nine: {nine:,.0f} tokens a CPU second (goal 50,000)")
            print(f"nine / trl: {nine / peer:.2f} (goal 1), one / trl: {one / peer:.2f} (goal 2)")
    finally:
        server.kill()
        server.join()


if __name__ == "__main__":
    main()
