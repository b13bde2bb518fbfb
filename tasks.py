"""Task files: what a run learns, found by name in envs/ or by path, and checked before it starts.

A task file defines at module level: `dataset` (rows with a conversational "prompt", or a function
that makes them), `reward_funcs`, and if it likes `config_overrides`, `Options` (a frozen dataclass
of its own command-line options) and `rollout_loop` (a subclass of rollout.RolloutLoop).

Left out: tools and environments.
Test: pytest tests/test_rollout.py
"""

import dataclasses
import functools
import importlib.util
import pickle
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path

import chat
from rollout import RolloutLoop


@dataclass
class Task:
    """What is learnt. A task file defines these names at module level; see envs/arithmetic.py."""

    dataset: object  # rows with a conversational "prompt": list, Dataset, IterableDataset, or a
    # function that makes one; it gets the task's options if the file defines Options
    reward_funcs: tuple[Callable, ...] = ()
    rollout_loop: type | None = None  # a subclass of RolloutLoop
    config_overrides: dict = field(default_factory=dict)  # weaker than the command line
    Options: type | None = None  # frozen dataclass of the task's own command-line options
    options: object = None  # an instance of it
    name: str = "task"
    path: str | None = None  # of the file, for the worker to import

    @functools.cached_property
    def rows(self):
        if not callable(self.dataset):
            return self.dataset
        return self.dataset(self.options) if self.Options else self.dataset()

    def __getstate__(self):  # the worker makes its own rows where it can: less to send
        return {name: value for name, value in vars(self).items() if name != "rows"}


def import_task_file(path: str):
    """Import by path under a name that both processes use, so that its functions can be pickled."""
    name = "task_" + Path(path).stem
    if getattr(sys.modules.get(name), "__file__", None) != path:
        spec = importlib.util.spec_from_file_location(name, path)
        sys.modules[name] = importlib.util.module_from_spec(spec)
        try:
            spec.loader.exec_module(sys.modules[name])
        except BaseException:
            del sys.modules[name]
            raise
    return sys.modules[name]


def load_task(name_or_path: str, option_overrides: dict | None = None) -> Task:
    """The task of envs/NAME.py, or of a file. `option_overrides` set fields of its Options."""
    folder = Path(__file__).resolve().parent / "envs"
    path = Path(name_or_path) if name_or_path.endswith(".py") else folder / f"{name_or_path}.py"
    if not path.is_file():
        known = ", ".join(sorted(file.stem for file in folder.glob("*.py")))
        raise ValueError(f"no task file {path}: give a path, or one of {known or 'envs/*.py'}")
    path = path.resolve()
    module = import_task_file(str(path))
    for word in ("tools", "environment_factory"):
        if getattr(module, word, None):
            raise ValueError(f"{path.name} defines {word}, which is not supported yet: remove it")
    if not hasattr(module, "dataset"):
        raise ValueError(f"{path.name} defines no dataset: add a list of rows, or a function")
    Options, given = getattr(module, "Options", None), option_overrides or {}
    if given and not Options:
        raise ValueError(f"{path.name} defines no Options, so it cannot take {sorted(given)}")
    funcs = getattr(module, "reward_funcs", ())
    return Task(
        dataset=module.dataset,
        reward_funcs=tuple(funcs) if isinstance(funcs, (list, tuple)) else (funcs,),
        rollout_loop=getattr(module, "rollout_loop", None),
        config_overrides=dict(getattr(module, "config_overrides", {})),
        Options=Options,
        options=Options(**given) if Options else None,
        name=path.stem,
        path=str(path),
    )


def load_eval_task(config, task: Task) -> Task:
    """The task of --eval_env; an option that it shares with the trained task has the same value."""
    eval_task = load_task(config.eval_env)
    if eval_task.name == task.name and eval_task.path != task.path:  # one would replace the other
        raise ValueError(
            f"--eval_env {config.eval_env}: its file has the name of the trained task's, "
            f"{task.path}; rename one of them"
        )
    if not (task.options and eval_task.Options):
        return eval_task
    names = {field.name for field in dataclasses.fields(eval_task.Options)}
    shared = {n: value for n, value in vars(task.options).items() if n in names}
    return load_task(config.eval_env, shared)


def check_task(task: Task) -> None:
    """Raise, in one line with the remedy, for what cannot work; before anything is started."""
    where, loop = f"task {task.name}", task.rollout_loop
    if loop is not None and not (isinstance(loop, type) and issubclass(loop, RolloutLoop)):
        raise ValueError(f"{where}: rollout_loop {loop!r} must be a subclass of RolloutLoop")
    if not task.reward_funcs and (loop is None or loop.generate_one is RolloutLoop.generate_one):
        raise ValueError(f"{where} has no reward: define reward_funcs = [your_function]")
    for func in task.reward_funcs:
        if not callable(func):
            raise TypeError(
                f"{where}: the reward {func!r} is not callable; reward models are not supported, "
                "write a function that calls your model's server"
            )
    for thing in (*task.reward_funcs, *filter(None, [loop]), *filter(callable, [task.dataset])):
        try:
            pickle.dumps(thing)
        except Exception as error:  # pickle raises AttributeError, TypeError, PicklingError, ...
            raise TypeError(
                f"{where}: {getattr(thing, '__qualname__', thing)} cannot be sent to the rollout "
                f"process ({error}); use a module-level function, a functools.partial of one or "
                "an instance of a module-level class, not a lambda or a nested function"
            ) from error
    rows = task.rows
    is_map = hasattr(rows, "__len__") and hasattr(rows, "__getitem__")
    if not is_map and (not hasattr(rows, "__iter__") or iter(rows) is rows):
        raise TypeError(
            f"{where}: dataset is a {type(rows).__name__}, which cannot be read once an epoch; "
            "make it a list of rows, a datasets.Dataset or an IterableDataset"
        )
    # Every row is checked again when it is used; these show a wrong format. A stream may be slow.
    first = [rows[i] for i in range(min(len(rows), 64))] if is_map else list(islice(rows, 1))
    if not first:
        raise ValueError(f"{where}: the dataset has no rows; give at least one prompt")
    for i, row in enumerate(first):
        chat.check_row(row, f"{where}, row {i}")
