"""Two environments in one run: the column `environment` of a row says which one its rollouts get.

    bash run.sh --env mixed

Only the tools of that environment are shown. The column itself goes to the reward functions, not to
`reset`. Each environment has its own reward metric, `rewards/GuessEnv/mean` and so on.
"""

from dataclasses import dataclass

from envs import guess, increment

config_overrides = guess.config_overrides


@dataclass(frozen=True)
class Options:
    n_games: int = 512  # rows of `guess`
    largest: int = 6  # targets of `increment` are 1 to this
    example: bool = True  # begin each prompt with two solved ones


environment_factory = {"guess": guess.GuessEnv, "increment": increment.IncrementEnv}


def dataset(options):
    rows = {"guess": guess.dataset(options), "increment": increment.dataset(options)}
    return [row | {"environment": name} for name in rows for row in rows[name]]
