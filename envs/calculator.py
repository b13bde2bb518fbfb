"""Products of two numbers with a calculator: a tool without state.

    bash run.sh --env calculator
    MODEL=Qwen/Qwen3-0.6B bash run.sh --env calculator --example false

A tool is a function, sync or async, with type hints and a Google-style docstring. The embedded
model was not trained to call any: its prompt begins with two worked examples.
"""

import re
from dataclasses import dataclass

import numpy as np

from envs import arithmetic
from envs.increment import called

QUESTION = "What is {} times {}?"

config_overrides = arithmetic.config_overrides | {
    "max_completion_length": 48,
    "max_tool_calling_iterations": 2,
    "token_budget": 2048,
}


@dataclass(frozen=True)
class Options:
    digits: int = 2  # both numbers are drawn from 10^(digits - 1) to 10^digits - 1
    n_prompts: int = 4096  # rows of the data set, drawn with replacement
    example: bool = True  # begin the prompt with two solved ones


def example(a, b):
    return [
        {"role": "user", "content": QUESTION.format(a, b)},
        *called("multiply", {"a": a, "b": b}, a * b),
        {"role": "assistant", "content": str(a * b)},
    ]


def dataset(options):
    low, high = 10 ** (options.digits - 1), 10**options.digits
    pairs = np.random.default_rng(0).integers(low, high, size=(options.n_prompts, 2)).tolist()
    solved = [message for a, b in ((31, 5), (7, 12)) for message in example(a, b)]
    prompts = [{"role": "user", "content": QUESTION.format(a, b)} for a, b in pairs]
    return [
        {"prompt": [*(solved if options.example else []), prompt], "answer": a * b}
        for prompt, (a, b) in zip(prompts, pairs)
    ]


def multiply(a: int, b: int) -> int:
    """Multiply two integers.

    Args:
        a: The first factor.
        b: The second factor.
    """
    return a * b


tools = [multiply]


def correct(completions, answer, **columns):
    """1 if the last integer of the last reply is the product, else 0."""
    replies = [completion[-1]["content"] for completion in completions]
    integers = [re.findall(r"-?\d+", reply.replace(",", "")) for reply in replies]
    return [float(bool(found) and int(found[-1]) == a) for found, a in zip(integers, answer)]


def computed(completions, answer, **columns):
    """0.5 if the tool gave the product."""
    results = [[m["content"] for m in c if m["role"] == "tool"] for c in completions]
    return [0.5 * (str(a) in found) for found, a in zip(results, answer)]


reward_funcs = [correct, computed]
