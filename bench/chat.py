"""The rollout worker's work for long conversations: 64 of 128 turns, 46k to 64k tokens each.

    python bench/chat.py [--conversations 64] [--turns 128]

One process on one core. Server and tool are stand-ins: a reply of about 180 tokens comes after 0.3
to 0.9 s (20,000 tokens/s in all) and costs nothing, so what is measured is the worker's: rendering,
encoding, parsing calls, running tools, turns to samples. "whole" renders and encodes the whole
conversation in every turn, "ours" continues it (template.py). CPU seconds of the process. How long
the event loop was held is seen by a task that wants to run every 5 ms, in wall time and in CPU time
(the first has other processes in it).
"""

import argparse
import asyncio
import json
import os
import random
import sys
import time
import types
from pathlib import Path

import numpy as np

os.environ["TOKENIZERS_PARALLELISM"] = "false"
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from transformers import AutoTokenizer  # noqa: E402

import chat  # noqa: E402
import model  # noqa: E402
import tools  # noqa: E402
from config import Config  # noqa: E402
from rollout import RolloutLoop, Slot  # noqa: E402
from tasks import Task  # noqa: E402
from template import ChatTemplate  # noqa: E402

WORDS = (
    "the a of number sum table river because seven light under return value print list map".split()
)


def search(query: str) -> str:
    """Search the notes.

    Args:
        query: What to look for.
    """
    rng = random.Random(query)
    return " ".join(rng.choices(WORDS, k=rng.randint(150, 250)))


class Scripted(RolloutLoop):
    """Replies of 150 to 250 words with one call of the tool, until the last turn."""

    def script(self, n_turns):
        self.replies, rng, end = [], random.Random(0), self.tokenizer.encode("<|im_end|>")
        for i in range(64):
            text = " ".join(rng.choices(WORDS, k=rng.randint(100, 200)))
            call = json.dumps({"name": "search", "arguments": {"query": f"{i} {text[:20]}"}})
            text += f"\n<tool_call>\n{call}\n</tool_call>"
            self.replies.append(self.tokenizer.encode(text) + end)
        self.n_turns, self.last = n_turns, self.tokenizer.encode("Done.") + end

    async def generate_one_turn(self, prompt_ids):
        turn = self.turn_of.setdefault(asyncio.current_task(), [0])
        turn[0] += 1
        ids = self.last if turn[0] == self.n_turns else random.choice(self.replies)
        await asyncio.sleep(random.uniform(0.5, 1.5) * self.wait_s)
        return chat.TurnRecord(prompt_ids, ids, [-1.0] * len(ids))


def make_loop(n_turns, wait_s):
    tokenizer = AutoTokenizer.from_pretrained(model.resolve_model("smollm2-135m"))
    options = {name: getattr(Config, name) for name in Config.__dataclass_fields__}
    loop = Scripted(
        types.SimpleNamespace(**options), Task(tools=(search,)), tokenizer, model_name="m",
        eos_token_ids=[2], start_index=0, shared=[0] * len(Slot), send=None,
    )  # fmt: skip
    schemas = [tools.schema(search)]
    loop.template = ChatTemplate(tokenizer, {}, [2], schemas)
    assert loop.template.appends
    loop.tool_names, loop.turn_of, loop.wait_s = ["search"], {}, wait_s
    loop.script(n_turns)
    return loop


async def converse(loop, n, plain):
    """(CPU seconds, tokens of each conversation, held seconds in wall and in CPU time)."""
    held_wall, held_cpu, over = [], [], False

    async def watch():
        while not over:
            wall, cpu = time.perf_counter(), time.thread_time()
            await asyncio.sleep(0.005)
            held_wall.append(time.perf_counter() - wall - 0.005)
            held_cpu.append(time.thread_time() - cpu)

    async def one():
        prompt = [{"role": "user", "content": "Find it."}]
        rollout = await loop.generate_one(prompt, [search])
        samples, _ = chat.samples_from_turns(rollout.turns)
        return [len(sample.input_ids) for sample in samples]

    if plain:
        loop.template.appends = False
    watcher = asyncio.create_task(watch())
    start = time.process_time()
    lengths = await asyncio.gather(*(one() for _ in range(n)))
    seconds = time.process_time() - start
    over = True
    await watcher
    return seconds, lengths, held_wall, held_cpu


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--conversations", type=int, default=64)
    parser.add_argument("--turns", type=int, default=128)
    parser.add_argument("--wait_s", type=float, default=0.6, help="mean time of a reply")
    options = parser.parse_args()
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    random.seed(0)
    rows = {}
    for name, n, plain in (("ours", options.conversations, False), ("whole", 2, True)):
        loop = make_loop(options.turns, 0 if plain else options.wait_s)
        seconds, lengths, held_wall, held_cpu = asyncio.run(converse(loop, n, plain))
        longest = [max(one) for one in lengths]
        rows[name] = seconds / (n * options.turns)
        print(
            f"{name:6} {n:3} conversations of {min(longest):,} to {max(longest):,} tokens, "
            f"{sum(map(len, lengths)) / n:.1f} samples each: {1e3 * rows[name]:.2f} ms CPU a turn; "
            f"event loop held, p99 {1e3 * np.percentile(held_wall, 99):.1f} ms "
            f"({1e3 * np.percentile(held_cpu, 99):.1f} ms of CPU)"
        )
    print(f"whole / ours: {rows['whole'] / rows['ours']:.1f} (goal 5)")


if __name__ == "__main__":
    main()
