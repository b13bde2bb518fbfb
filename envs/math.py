"""Competition mathematics: DeepMath-103K or GSM8K from the hub, checked by math-verify.

    MODEL=Qwen/Qwen3-0.6B bash run.sh --env math --max_steps 200
    MODEL=Qwen/Qwen2.5-0.5B-Instruct bash run.sh --env math --source gsm8k

Needs `pip install math-verify`, and the hub or a local copy of the data set (the `datasets` cache).
"""

import importlib.util
import re
from dataclasses import dataclass

config_overrides = {"max_completion_length": 2048, "learning_rate": 1e-6}
SOURCES = {
    "deepmath": ("trl-lib/DeepMath-103K", None),
    "gsm8k": ("openai/gsm8k", "main"),
}


@dataclass(frozen=True)
class Options:
    source: str = "deepmath"  # deepmath or gsm8k


def dataset(options):
    if options.source not in SOURCES:
        raise ValueError(f"--source {options.source!r}: must be one of {', '.join(SOURCES)}")
    import datasets

    path, name = SOURCES[options.source]
    try:
        rows = datasets.load_dataset(path, name, split="train")
    except Exception as error:  # of the hub, the network or the cache: many kinds
        raise ValueError(
            f"the data set {path} cannot be read ({type(error).__name__}: {str(error)[:200]}): "
            "go online once, or copy the datasets cache; tasks without a hub: arithmetic, countdown"
        ) from error
    if importlib.util.find_spec("math_verify") is None:  # said now and not by the first reward
        raise ValueError("the task math checks answers with math-verify: pip install math-verify")
    if options.source == "deepmath":
        return rows  # it has a conversational prompt and a solution
    ask = "{}\nPut the final answer into \\boxed{{}}."
    return rows.map(
        lambda row: {
            "prompt": [{"role": "user", "content": ask.format(row["question"])}],
            "solution": re.sub(r".*####\s*", "", row["answer"], flags=re.DOTALL).replace(",", ""),
        },
        remove_columns=rows.column_names,
    )


def accuracy(completions, solution, **columns):
    """1 if math-verify finds the answers equal, 0 if not, None if the solution cannot be read."""
    from math_verify import parse, verify

    rewards = []
    for completion, gold in zip(completions, solution):
        # Its time limit is a signal, which only a main thread may set; rewards run in others.
        wanted = parse(gold if "$" in gold else f"${gold}$", parsing_timeout=None)
        found = parse(completion[-1]["content"], parsing_timeout=None)
        rewards.append(float(verify(wanted, found, timeout_seconds=None)) if wanted else None)
    return rewards


reward_funcs = [accuracy]
