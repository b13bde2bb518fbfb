"""Countdown: reach a target with some numbers and + - * /, each number used once.

    bash run.sh --env countdown --numbers 3 --largest 20 --operations "+-*/"

Every problem has a solution. Answers are parsed, never run as code, and checked exactly.
"""

import ast
import operator
import random
import re
from dataclasses import dataclass
from fractions import Fraction

from envs import arithmetic

config_overrides = arithmetic.config_overrides | {
    "max_completion_length": 24,
    "learning_rate": 1e-5,  # at 2e-5 a small model soon adds, whatever is asked
    "max_steps": 16,
}


@dataclass(frozen=True)
class Options:
    numbers: int = 2  # how many there are
    largest: int = 10  # each is 1 to this
    operations: str = "+-"  # those that a solution needs, of +-*/
    n_prompts: int = 4096  # rows of the data set


OPERATIONS = {"+": operator.add, "-": operator.sub, "*": operator.mul, "/": operator.truediv}
PARSED = dict(zip((ast.Add, ast.Sub, ast.Mult, ast.Div), OPERATIONS.values()))
QUESTION = "Use the numbers {} once each, with {}, to make {}. Answer with an expression only."
# worked examples, one an operation: without them a small model writes sentences
SOLVED = {"+": ("3, 5", 8, "5 + 3"), "-": ("2, 9", 7, "9 - 2")}
SOLVED |= {"*": ("3, 5", 15, "3 * 5"), "/": ("2, 6", 3, "6 / 2")}


def dataset(options):
    if not options.operations or set(options.operations) - OPERATIONS.keys():
        raise ValueError(f"operations {options.operations!r}: take some of +-*/, such as +-")
    rng, rows, solved, names = random.Random(0), [], [], " ".join(options.operations)
    for numbers, target, solution in map(SOLVED.get, options.operations):
        solved.append({"role": "user", "content": QUESTION.format(numbers, names, target)})
        solved.append({"role": "assistant", "content": solution})
    while len(rows) < options.n_prompts:
        operations = rng.choices(options.operations, k=options.numbers - 1)  # none is the likelier
        target = Fraction(0)
        while target <= 0 or target.denominator > 1:
            numbers = [rng.randint(1, options.largest) for _ in range(options.numbers)]
            target = Fraction(numbers[0])
            for operation, n in zip(operations, numbers[1:]):
                target = OPERATIONS[operation](target, n)
        shown = ", ".join(map(str, rng.sample(numbers, len(numbers))))
        prompt = [*solved, {"role": "user", "content": QUESTION.format(shown, names, target)}]
        rows.append({"prompt": prompt, "numbers": sorted(numbers), "target": int(target)})
    return rows


def value(node, used):
    """The exact value of a parsed expression; adds its numbers to `used`. ValueError for others."""
    if isinstance(node, ast.BinOp) and type(node.op) in PARSED:
        return PARSED[type(node.op)](value(node.left, used), value(node.right, used))
    if isinstance(node, ast.Constant) and type(node.value) is int:
        used.append(node.value)
        return Fraction(node.value)
    raise ValueError(ast.dump(node))


def reached(completions, numbers, target, **columns):
    """1 for the target with the numbers, 0.2 for another value of them, 0 for anything else."""
    return [score(c[-1]["content"], n, t) for c, n, t in zip(completions, numbers, target)]


def score(reply, numbers, target):
    used, text = [], re.sub(r"=.*", "", reply.strip()[:200])
    try:
        result = value(ast.parse(text.strip(), mode="eval").body, used)
    except (SyntaxError, ValueError, ZeroDivisionError, RecursionError, MemoryError):
        return 0.0
    return (1.0 if result == target else 0.2) if sorted(used) == numbers else 0.0


reward_funcs = [reached]
