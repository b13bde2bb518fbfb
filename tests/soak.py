"""Runs under random faults, and an account of everything that they generated.

    python tests/soak.py --minutes 30            # not part of the test command
    python tests/soak.py --minutes 3 --no_kill   # the server stays
    python tests/soak.py --trainer_kills 10      # the trainer is killed and resumed instead

A tiny random model trains on a real CPU vLLM server behind a small proxy. The proxy answers some
generation requests with 500 and holds others back; one rollout in a hundred raises; the rollout
worker is stopped for 20 s (SIGSTOP); the server is killed (SIGKILL) and started again, which loses
its weights. The run has to go on through all of it, to end when told, to leave no process, to use
no more memory than at the start, and to account for every rollout of every group: trained, dropped
for a reason, failed twice, or in flight at the end.

With --trainer_kills the whole run is killed (SIGKILL) at random moments, each time resumed from its
newest checkpoint, and left to go through its data at last. What was trained or dropped up to the
checkpoints from which it went on has to be each prompt once.

The exit status is 1 if something does not hold.
"""

import argparse
import asyncio
import contextlib
import json
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter, defaultdict
from pathlib import Path
from types import SimpleNamespace

import aiohttp
from aiohttp import web

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # for a start as a script
from conftest import free_port, make_tiny_qwen3, start_server, stop_server  # noqa: E402
from test_end_to_end import finish, group_is_gone, start_run  # noqa: E402

from metrics import read_windows  # noqa: E402

GROUP, IN_FLIGHT, QUEUED = 4, 16, 16 + 2  # rollouts; rollouts; groups between worker's two halves
STALL_S = 300  # without a step: a server's start takes 100 s on a busy machine
TASK = f'''
import asyncio
import random
import time
from pathlib import Path

from rollout import RolloutLoop

config_overrides = {{
    "num_generations": {GROUP}, "max_completion_length": 24, "token_budget": 512,
    "max_concurrent_rollouts": {IN_FLIGHT}, "learning_rate": 1e-4, "max_steps": 1_000_000,
    "max_staleness": 2, "check_sync_every": 10, "gradient_checkpointing": False,
    "diagnose_steps": 0, "rollout_worker_timeout": 60.0, "vllm_server_timeout": 300.0,
}}
dataset = [{{"prompt": [{{"role": "user", "content": f"number {{i}}"}}]}} for i in range(500)]

def even(completion_ids, **columns):
    """The share of even ids, coarse enough that some groups agree."""
    return [round(2 * sum(i % 2 == 0 for i in ids) / max(len(ids), 1)) for ids in completion_ids]

class OneInAHundredRaises(RolloutLoop):
    """And it keeps a diary: when a rollout of which group began, ended, failed or was stopped."""

    async def generate_one(self, prompt, tools, group_id=0):
        self.note(group_id, "began")
        what = "ended"
        try:
            if random.random() < 0.01:
                raise ConnectionResetError("the judge is away")
            return await super().generate_one(prompt, tools, group_id)
        except Exception:
            what = "failed"
            raise
        except asyncio.CancelledError:
            what = "stopped"
            raise
        finally:
            self.note(group_id, what)

    def note(self, *what):
        with Path(__file__).with_name("diary").open("a") as file:
            print(time.time(), *what, file=file)

reward_funcs = [even]
rollout_loop = OneInAHundredRaises
'''


class Proxy:
    """Passes everything on to `server`. Of the generation requests 2% are answered with 500, 2%
    are held back for up to 5 s. Without a server it breaks the connection, as a dead one does."""

    def __init__(self, server):
        self.server, self.seen = server, Counter()
        self.url = f"http://127.0.0.1:{free_port()}"

    async def __aenter__(self):
        self.session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, force_close=True),
            timeout=aiohttp.ClientTimeout(total=None),
        )
        app = web.Application(client_max_size=2**30)
        app.router.add_route("*", "/{path:.*}", self.forward)
        self.runner = web.AppRunner(app, access_log=None, shutdown_timeout=1)
        await self.runner.setup()
        await web.TCPSite(self.runner, "127.0.0.1", int(self.url.rpartition(":")[2])).start()
        return self

    async def __aexit__(self, *error):
        await self.runner.cleanup()
        await self.session.close()

    async def forward(self, request):
        body = await request.read()
        if request.path == "/inference/v1/generate":
            draw = random.random()
            if draw < 0.02:
                self.seen["500"] += 1
                return web.json_response({"error": {"message": "out of luck"}}, status=500)
            if draw < 0.04:
                self.seen["held back"] += 1
                await asyncio.sleep(random.uniform(0.5, 5))
        kind = {"Content-Type": request.headers.get("Content-Type", "application/json")}
        try:
            async with self.session.request(
                request.method, self.server.url + request.path_qs, data=body, headers=kind
            ) as answer:
                content = await answer.read()
                return web.Response(
                    status=answer.status, body=content, content_type=answer.content_type
                )
        except (aiohttp.ClientError, OSError):
            self.seen["broken connection"] += 1
            if request.transport is not None:
                request.transport.abort()
            return web.Response(status=502)


# --------------------------------------------------------------------------- the run, from outside


def worker_of(trainer):
    """The process id of the rollout worker, None before it has started."""
    for file in Path(f"/proc/{trainer.pid}/task").glob("*/children"):
        for pid in file.read_text().split():
            with contextlib.suppress(OSError):
                if b"spawn_main" in Path(f"/proc/{pid}/cmdline").read_bytes():
                    return int(pid)
    return None


def rss_mib(pid):
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.partition("VmRSS:")[2].split()[0]) / 1024


def n_steps(folder):
    file = folder / "run" / "metrics.jsonl"
    return file.read_bytes().count(b"\n") if file.exists() else 0


async def steps(folder, trainer, at_least):
    """Until so many steps are done."""
    last, since = n_steps(folder), time.monotonic()
    while (now := n_steps(folder)) < at_least:
        if trainer.poll() is not None:
            raise SystemExit(f"the run ended ({trainer.returncode}):\n{tail(folder)}")
        if now != last:
            last, since = now, time.monotonic()
        if time.monotonic() - since > STALL_S:
            raise SystemExit(f"no step for {STALL_S} s:\n{tail(folder)}")
        await asyncio.sleep(0.5)


def tail(folder):
    return (folder / "out").read_text(errors="replace")[-4000:]


async def faults(minutes, trainer, folder, proxy, kill):
    """Stop the worker, and kill the server if `kill`, in turn until the time is over; -> how often.
    After each fault the run has to make steps again."""
    end, count = time.monotonic() + 60 * minutes, Counter()
    while (left := end - time.monotonic()) > 0:
        await asyncio.sleep(min(left, random.uniform(10, 30)))
        await steps(folder, trainer, n_steps(folder) + 2)
        if kill and count["server killed"] <= count["worker stopped"]:
            count["server killed"] += 1
            server = proxy.server
            os.killpg(server.process.pid, signal.SIGKILL)
            server.process.wait()
            await asyncio.sleep(random.uniform(0, 10))
            log = folder / f"server{count.total()}.txt"
            proxy.server = await asyncio.to_thread(start_server, server.folder, server.name, log)
        else:
            count["worker stopped"] += 1
            pid = worker_of(trainer)
            os.kill(pid, signal.SIGSTOP)
            await asyncio.sleep(min(20, 10 * minutes))
            os.kill(pid, signal.SIGCONT)
        await steps(folder, trainer, n_steps(folder) + 2)
    return count


# ------------------------------------------------------------------------------------- the account


def account(folder):
    """(rollouts by outcome, what is wrong): the run's lines against the diary."""
    lines = [json.loads(line) for line in (folder / "run/rollouts.jsonl").read_text().splitlines()]
    outcomes, told = Counter(line["outcome"] for line in lines), defaultdict(set)
    wrong = [f"an outcome of no kind: {line}" for line in lines if not line["outcome"]]
    for line in lines:
        if line["rollout"] in told[line["group"]]:
            wrong.append(f"told twice: group {line['group']}, rollout {line['rollout']}")
        told[line["group"]].add(line["rollout"])
    diary, begin = defaultdict(Counter), {}
    for entry in (folder / "diary").read_text().splitlines():
        when, group, what = entry.split()
        end = float(when)
        begin.setdefault(int(group), end)
        diary[int(group)][what] += 1
    waited, waits = 0.0, []  # of the groups that were in flight or not yet scored at the end
    for group, seen in diary.items():
        n_ended = seen["ended"]
        if group in told:
            outcomes["failed twice"] += GROUP - n_ended
            if len(told[group]) != n_ended:
                wrong.append(f"group {group}: {n_ended} ended, {len(told[group])} told")
        elif seen["began"] == seen["ended"] + seen["failed"] and seen["failed"] >= 2 * GROUP:
            outcomes["failed twice"] += GROUP
        else:
            outcomes["in flight"] += GROUP
            waited = max(waited, end - begin[group])
            waits.append(group)
    outcomes["in flight"] += outcomes.pop("unused", 0)
    if told.keys() - diary.keys():
        wrong.append(f"told, but never begun: {sorted(told.keys() - diary.keys())}")
    if len(waits) > IN_FLIGHT + QUEUED or waited > 60:
        wrong.append(f"{waits} are neither told nor under way; the oldest began {waited:.0f} s ago")
    return outcomes, wrong


def used_up(folder):
    """(the groups that were used up in each part of the run that a later one built on, how many
    were begun in one part and generated again in the next)."""
    parts = [[]]
    for line in (folder / "run/rollouts.jsonl").read_text().splitlines():
        with contextlib.suppress(ValueError):  # half a line
            line = json.loads(line)
            if "resumed_step" in line:
                parts = [[s for s in part if s["step"] <= line["resumed_step"]] for part in parts]
                parts.append([])
            else:
                parts[-1].append(line)
    counts = [Counter(line["group"] for line in part) for part in parts]
    whole = [group for count in counts for group, n in count.items() if n == GROUP]
    return whole, sum(n < GROUP for count in counts for n in count.values())


async def soak(folder, server, minutes, kill):
    """-> what is wrong, a list of sentences; prints the account."""
    async with Proxy(server) as proxy:
        target = SimpleNamespace(url=proxy.url, name=server.name)
        trainer = start_run(target, folder, "--dump_rollouts", "true", task=TASK)
        try:
            await steps(folder, trainer, at_least=10)
            pids = {"trainer": trainer.pid, "worker": worker_of(trainer)}
            before = {name: rss_mib(pid) for name, pid in pids.items()}
            count = await faults(minutes, trainer, folder, proxy, kill)
            after = {name: rss_mib(pid) for name, pid in pids.items()}
            wrong, trained = [], n_steps(folder)
            trainer.terminate()
            code = await asyncio.to_thread(trainer.wait, 60)
        finally:
            if trainer.poll() is None:
                os.killpg(trainer.pid, signal.SIGKILL)
            if proxy.server is not server:
                stop_server(proxy.server)
    if code != 143:
        wrong.append(f"the trainer ended with {code}, not 143:\n{tail(folder)}")
    if not group_is_gone(trainer):
        wrong.append("processes are left over")
    for name in pids:
        print(
            f"RSS of the {name}: {before[name]:.0f} MiB at the start, {after[name]:.0f} at the end"
        )
        if after[name] > 1.2 * before[name] + 50:
            wrong.append(f"the {name} grew from {before[name]:.0f} to {after[name]:.0f} MiB")
    outcomes, unaccounted = account(folder)
    print(f"{trained} steps; faults: {dict(count + proxy.seen)}")
    print("rollouts: " + ", ".join(f"{n} {outcome}" for outcome, n in outcomes.most_common()))
    return wrong + unaccounted


def kills(folder, server, n_kills, n_prompts):
    """-> what is wrong, a list of sentences; prints the account."""
    task = TASK.replace('"max_steps": 1_000_000', '"num_train_epochs": 1, "save_steps": 2')
    task = task.replace("range(500)", f"range({n_prompts})").replace("< 0.01", "< 0")
    task = task.replace('"token_budget": 512', '"token_budget": 128')  # groups are often split
    options = ["--dump_rollouts", "true", "--resume_from_checkpoint", "True"]
    n_lost, resumed, wrong = 0, [], []
    for kill in range(n_kills + 1):
        trainer = start_run(server, folder, *options[: None if kill else 2], task=task)
        if kill == n_kills:
            break
        asyncio.run(steps(folder, trainer, n_steps(folder) + random.randint(3, 6)))
        time.sleep(random.random())
        os.kill(trainer.pid, signal.SIGKILL)
        trainer.wait()
        if not group_is_gone(trainer):
            wrong.append(f"processes are left over after kill {kill + 1}")
        saved = [int(path.name[11:]) for path in (folder / "run").glob("checkpoint-*[0-9]")]
        resumed.append(max(saved))
        n_lost += read_windows(folder / "run/metrics.jsonl")[-1]["step"] - max(saved)
    code, output = finish(trainer, folder, timeout=600)
    if code:
        return [f"the last run ended with {code}:\n{output[-3000:]}"]
    groups, again = used_up(folder)
    print(f"{n_kills} kills; resumed at steps {resumed}; steps that were lost: {n_lost}")
    print(f"{len(groups)} groups were used up; {again} more were partly trained at a checkpoint")
    count = Counter(groups)
    return wrong + [
        f"group {group} was used up {count[group]} times"
        for group in sorted({*count, *range(n_prompts)})
        if count[group] != 1
    ]


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=30)
    parser.add_argument("--no_kill", action="store_true", help="leave the server alive")
    parser.add_argument("--trainer_kills", type=int, default=0, help="kill the trainer, only it")
    parser.add_argument("--seed", type=int, default=0, help="of the faults")
    options = parser.parse_args()
    random.seed(options.seed)
    with tempfile.TemporaryDirectory() as folder:
        folder = Path(folder)
        make_tiny_qwen3(folder / "model")
        server = start_server(folder / "model", str(folder / "model"), folder / "server0.txt")
        try:
            if n := options.trainer_kills:
                wrong = kills(folder, server, n, n_prompts=40 * n)
            else:
                wrong = asyncio.run(soak(folder, server, options.minutes, not options.no_kill))
        finally:
            stop_server(server)
    print("\n".join(wrong) or "every rollout is accounted for")
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
