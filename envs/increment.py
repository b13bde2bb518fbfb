"""An environment: bring a counter to its target with the tool `increment`.

    bash run.sh --env increment
    MODEL=Qwen/Qwen3-0.6B bash run.sh --env increment --example false

One instance serves one rollout at a time; `reset` is given the columns of the row, and what it
returns goes to the end of the prompt. `reset` and `get_reward` are reserved, every other public
method is a tool. Without a dataset, `reset` would draw the target and return the whole prompt.
"""

from dataclasses import dataclass

config_overrides = {
    "max_completion_length": 48,
    "max_tool_calling_iterations": 2,
    "token_budget": 2048,
    "gradient_checkpointing": False,
    "learning_rate": 2e-5,
    "adam_beta2": 0.95,
    "max_staleness": 1,
    "max_steps": 12,
}


@dataclass(frozen=True)
class Options:
    largest: int = 6  # targets are 1 to this
    example: bool = True  # begin with two solved ones; a small model calls no tool without


class IncrementEnv:
    def reset(self, target: int, **row) -> str:
        self.counter, self.target = 0, target
        return f"Increment the counter by {target}."

    def get_reward(self) -> float:
        return float(self.counter == self.target)

    def increment(self, step: int) -> int:
        """
        Increment the internal counter.

        Args:
            step: Value to add to the counter.

        Returns:
            The updated counter value.
        """
        self.counter += step
        return self.counter


environment_factory = IncrementEnv


def called(name, arguments, result):
    """The messages of one tool call and its result."""
    function = {"name": name, "arguments": arguments}
    call = {"type": "function", "id": "call00000", "function": function}
    answer = {"role": "tool", "name": name, "tool_call_id": "call00000", "content": str(result)}
    return [{"role": "assistant", "content": "", "tool_calls": [call]}, answer]


def prompt(options):
    """The conversation so far; reset() writes the last message."""
    solved = []
    for n in (9, 4) if options.example else ():
        solved += [
            {"role": "user", "content": f"Increment the counter by {n}."},
            *called("increment", {"step": n}, n),
            {"role": "assistant", "content": "Done."},
        ]
    return [*solved, {"role": "user", "content": ""}]


def dataset(options):
    return [{"prompt": prompt(options), "target": n} for n in range(1, options.largest + 1)] * 64
