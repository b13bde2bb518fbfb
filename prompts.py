"""The order of prompts: which group is the n-th, fixed by the seed, so that a run can be resumed.

Group n of a data set with N rows is row `permutation of epoch n // N`[n % N]. A stream is read from
its beginning in its own order.
Test: pytest tests/test_rollout.py
"""

import math
import typing

import numpy as np


class Prompt(typing.NamedTuple):
    group_id: int
    epoch: int
    opens_epoch: bool
    row_index: int
    row: dict


def prompts(rows, config, start_index, used, warn):
    """Every Prompt to come from group start_index on, less the groups in `used`.

    rows: the task's; config has max_steps, num_train_epochs, seed, data_seed and
    train_sampling_strategy; warn(text) is told of a stream that starts again.
    """
    n_epochs = math.inf if config.max_steps > 0 else config.num_train_epochs
    if hasattr(rows, "__len__"):
        found = _shuffled(rows, n_epochs, config, start_index)
    else:
        found = _streamed(rows, n_epochs, max([start_index, *(i + 1 for i in used)]), warn)
    return (prompt for prompt in found if prompt.group_id not in used)


def _shuffled(rows, n_epochs, config, group_id):
    n, order = len(rows), None
    seed = config.seed if config.data_seed is None else config.data_seed
    while group_id < n_epochs * n - 1e-6:  # 0.1 * 30 is a little more than 3
        epoch, i = divmod(group_id, n)
        if i == 0 or order is None:
            order = np.arange(n)
            if config.train_sampling_strategy != "sequential":
                order = np.random.default_rng([seed, epoch]).permutation(n)
        row_index = int(order[i])
        yield Prompt(group_id, epoch, i == 0, row_index, rows[row_index])
        group_id += 1


def _streamed(rows, n_epochs, group_id, warn):
    epoch = 0
    if group_id:
        warn("a streaming dataset starts again at its first row")
    while epoch < n_epochs:
        if hasattr(rows, "set_epoch"):  # IterableDataset.shuffle draws anew
            rows.set_epoch(epoch)
        i = -1
        for i, row in enumerate(rows):
            yield Prompt(group_id + i, epoch, i == 0, i, row)
        if i < 0:
            raise RuntimeError(f"the dataset gave no rows in epoch {epoch}")
        group_id, epoch = group_id + i + 1, epoch + 1
