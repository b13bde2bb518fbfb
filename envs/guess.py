"""A game of several turns with state: find a number; each guess is answered "higher" or "lower".

    bash run.sh --env guess --max_steps 5

The environment owns the reward: 1 if the number was found, else a little for a near guess, so that
the rollouts of a model that never finds it differ. The number is drawn from the row's seed, so all
rollouts of a group play the same game.
"""

import random
from dataclasses import dataclass

from envs.increment import called

config_overrides = {
    "max_completion_length": 40,
    "max_tool_calling_iterations": 3,
    "token_budget": 2048,
    "gradient_checkpointing": False,
    "learning_rate": 2e-5,
    "adam_beta2": 0.95,
    "max_staleness": 1,
    "max_steps": 12,
}


@dataclass(frozen=True)
class Options:
    n_games: int = 512  # rows of the data set
    example: bool = True  # begin the prompt with two finished games


class GuessEnv:
    def reset(self, seed: int, **row) -> str:
        self.number, self.guesses = random.Random(seed).randint(1, 10), []
        return "Find my number between 1 and 10."

    def get_reward(self) -> float:
        if self.number in self.guesses:
            return 1.0
        misses = [abs(guess - self.number) for guess in self.guesses]
        return max(0.0, 0.5 - 0.05 * min(misses, default=10))

    def guess(self, number: int) -> str:
        """
        Guess the number.

        Args:
            number: Your guess.

        Returns:
            higher, lower or right.
        """
        self.guesses.append(int(number))
        if self.guesses[-1] == self.number:
            return "right"
        return "higher" if self.guesses[-1] < self.number else "lower"


environment_factory = GuessEnv


def prompt(options):
    """The conversation so far; reset() writes the last message."""
    played = []
    for guesses in ([(5, "higher"), (8, "right")], [(4, "right")]) if options.example else ():
        played.append({"role": "user", "content": "Find my number between 1 and 10."})
        for number, answer in guesses:
            played += called("guess", {"number": number}, answer)
        played.append({"role": "assistant", "content": f"It is {guesses[-1][0]}."})
    return [*played, {"role": "user", "content": ""}]


def dataset(options):
    return [{"prompt": prompt(options), "seed": seed} for seed in range(options.n_games)]
