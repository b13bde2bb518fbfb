"""Sums of two numbers, made on the fly: the default task, small enough for a CPU.

    bash run.sh                          one-digit sums
    bash run.sh --digits 2               two-digit sums (a 135M model starts near 0)

A task file defines `dataset`, `reward_funcs` and, if it likes, `config_overrides`, `Options` (its
own command-line options) and `rollout_loop`. This one is meant to be copied.
"""

import re
from dataclasses import dataclass

import numpy as np

config_overrides = {
    "max_completion_length": 16,
    "token_budget": 1024,  # about 8 groups of 8 short completions: 64 rollouts a step
    "learning_rate": 2e-5,
    "adam_beta2": 0.95,
    "max_staleness": 1,
    "max_steps": 12,
}


@dataclass(frozen=True)
class Options:
    digits: int = 1  # both numbers are drawn from 0 to 10^digits - 1
    n_prompts: int = 4096  # rows of the data set, drawn with replacement


def dataset(options):
    """Rows with a conversational `prompt` and the `answer` that the reward reads."""
    numbers = np.random.default_rng(0).integers(0, 10**options.digits, size=(options.n_prompts, 2))
    return [
        {
            "prompt": [
                {"role": "user", "content": f"What is {a}+{b}? Answer with only the number."}
            ],
            "answer": int(a + b),
        }
        for a, b in numbers
    ]


def correct(completions, answer, **columns):
    """1 if the last integer of the reply is the sum, else 0."""
    replies = [completion[-1]["content"] for completion in completions]
    integers = [re.findall(r"-?\d+", reply) for reply in replies]
    return [float(bool(found) and int(found[-1]) == a) for found, a in zip(integers, answer)]


reward_funcs = [correct]
