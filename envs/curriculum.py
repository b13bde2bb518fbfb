"""A custom rollout loop: leave out prompts that the policy already solves.

    bash run.sh --env curriculum --pass_rate_cap 0.8

Sums of one to three digits. After each group the loop notes the share of right answers of its
prompt, and does not generate for it again while that is at pass_rate_cap or above;
rollout/filtered_count says how many prompts were left out. `self.config` has the run's options and
the task's own.
"""

from dataclasses import dataclass

import numpy as np

from envs.arithmetic import config_overrides, correct  # noqa: F401
from envs.arithmetic import dataset as sums
from rollout import RolloutLoop


@dataclass(frozen=True)
class Options:
    pass_rate_cap: float = 0.9  # prompts whose rollouts pass at this rate are not sampled again
    n_prompts: int = 64  # of each number of digits


@dataclass(frozen=True)
class _Sums:
    digits: int
    n_prompts: int


def dataset(options):
    return [row for d in (1, 2, 3) for row in sums(_Sums(d, options.n_prompts))]


class CurriculumRolloutLoop(RolloutLoop):
    def filter_prompt(self, row_index, row, epoch):
        return self.pass_rates.get(row_index, 0.0) < self.config.pass_rate_cap

    async def setup(self):
        self.pass_rates = {}

    def compute_advantages(self, group):
        scored = group.rewards[~np.isnan(group.rewards)]
        if len(scored):
            self.pass_rates[group.row_index] = float(np.mean(scored > 0))
        return super().compute_advantages(group)


rollout_loop = CurriculumRolloutLoop
reward_funcs = [correct]
