"""Task files: what a run learns, found by name in envs/ or by path, and checked before it starts.

A task file defines at module level some of

    dataset               rows (list, Dataset, IterableDataset), or a function that makes them
    reward_funcs          functions; completions in, a list of floats out
    tools                 functions that the model may call (tools.py)
    environment_factory   what makes an environment, or a dictionary of such (environments.py)
    rollout_loop          a subclass of rollout.RolloutLoop
    config_overrides      options that this task wants otherwise; the command line is stronger
    Options               a frozen dataclass of its own command-line options

A dataset may be left out if an environment brings the prompts, reward functions if it brings the
rewards. Everything is sent to the worker process, so it must be importable there.

Test: pytest tests/test_rollout.py tests/test_environments.py
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
import tools as tool_calls
from environments import as_factories, check_class, method_names, name_for
from rollout import RolloutLoop
from scoring import reward_name


@dataclass
class Task:
    """What is learnt. A task file defines these names at module level; see envs/arithmetic.py."""

    dataset: object = None  # rows with a conversational "prompt": list, Dataset, IterableDataset,
    # or a function that makes one; it gets the task's options if the file defines Options
    reward_funcs: tuple[Callable, ...] = ()
    tools: tuple[Callable, ...] = ()
    environment_factory: Callable | dict[str, Callable] | None = None
    rollout_loop: type | None = None  # a subclass of RolloutLoop
    config_overrides: dict = field(default_factory=dict)  # weaker than the command line
    Options: type | None = None  # frozen dataclass of the task's own command-line options
    options: object = None  # an instance of it
    name: str = "task"
    path: str | None = None  # of the file, for the worker to import

    @functools.cached_property
    def rows(self):
        if self.dataset is None:
            return [{}]  # every prompt comes from an environment
        if not callable(self.dataset):
            return self.dataset
        return self.dataset(self.options) if self.Options else self.dataset()

    def check_row(self, row, where: str) -> None:
        """ValueError for a row that no rollout can start from."""
        factories = as_factories(self.environment_factory)
        chat.check_row(row, where, needs_prompt=not factories)
        if factories:
            name_for(row, factories, where)

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
    Options, given = getattr(module, "Options", None), option_overrides or {}
    if given and not Options:
        raise ValueError(f"{path.name} defines no Options, so it cannot take {sorted(given)}")

    def functions(name):
        given = getattr(module, name, ())
        return tuple(given) if isinstance(given, (list, tuple)) else (given,)

    return Task(
        dataset=getattr(module, "dataset", None),
        reward_funcs=functions("reward_funcs"),
        tools=functions("tools"),
        environment_factory=getattr(module, "environment_factory", None),
        rollout_loop=getattr(module, "rollout_loop", None),
        config_overrides=dict(getattr(module, "config_overrides", {})),
        Options=Options,
        options=Options(**given) if Options else None,
        name=path.stem,
        path=str(path),
    )


def has_epochs(task: Task) -> bool:
    """Whether it is known how many prompts an epoch has."""
    return task.dataset is not None and hasattr(task.rows, "__len__")


def environment_classes(task: Task) -> list[type]:
    """Those environment factories that are classes: what they have is known before one is made."""
    factories = as_factories(task.environment_factory).values()
    return [factory for factory in factories if isinstance(factory, type)]


def reward_names(task: Task) -> list[str]:
    """The sources of rewards that have a name, as far as they are known beforehand."""
    owners = [
        cls for cls in environment_classes(task) if callable(getattr(cls, "get_reward", None))
    ]
    return [*map(reward_name, task.reward_funcs), *(cls.__name__ for cls in owners)]


def tool_names(task: Task) -> list[str]:
    """The tools of all environments, as far as they are known beforehand."""
    methods = [name for cls in environment_classes(task) for name in method_names(cls)]
    return [*(tool.__name__ for tool in task.tools), *methods]


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


def check_task(task: Task, run_options=()) -> None:
    """Raise, in one line with the remedy, for what cannot work; before anything is started.
    run_options: names that the task's own options must not have."""
    where, loop = f"task {task.name}", task.rollout_loop
    own = vars(task.options) if task.options else {}
    if twice := sorted(own.keys() & set(run_options)):
        raise ValueError(f"{where}: rename {twice}, which are options of the run")
    factories = as_factories(task.environment_factory)
    if loop is not None and not (isinstance(loop, type) and issubclass(loop, RolloutLoop)):
        raise ValueError(f"{where}: rollout_loop {loop!r} must be a subclass of RolloutLoop")
    if task.dataset is None and not factories:
        raise ValueError(f"{where} defines no dataset: add a list of rows, or a function")
    _check_functions(task, where)
    _check_has_reward(task, where)
    others = [*factories.values(), *filter(None, [loop]), *filter(callable, [task.dataset])]
    for thing in (*task.reward_funcs, *task.tools, *others):
        _check_can_be_sent(thing, where)
    _check_rows(task, where)


def _check_functions(task: Task, where: str) -> None:
    for func in task.reward_funcs:
        if not callable(func):
            raise TypeError(
                f"{where}: the reward {func!r} is not callable; reward models are not supported, "
                "write a function that calls your model's server"
            )
    for tool in task.tools:
        if not callable(tool):
            raise TypeError(f"{where}: the tool {tool!r} is not callable; give the function itself")
        tool_calls.schema(tool)
    names = [tool.__name__ for tool in task.tools]
    twice = {name for name in names if names.count(name) > 1}
    if twice:
        raise ValueError(f"{where}: several tools are named {sorted(twice)}: rename them")
    for name, factory in as_factories(task.environment_factory).items():
        if not callable(factory):
            raise TypeError(
                f"{where}: environment_factory {name or ''} is {factory!r:.80}, which is not "
                "callable: give the class, or a function that makes an environment"
            )
    for cls in environment_classes(task):
        check_class(cls, names)


def _check_has_reward(task: Task, where: str) -> None:
    factories = as_factories(task.environment_factory).values()
    owns = [not isinstance(f, type) or hasattr(f, "get_reward") for f in factories]
    loop = task.rollout_loop or RolloutLoop
    if not (task.reward_funcs or any(owns) or loop.generate_one is not RolloutLoop.generate_one):
        raise ValueError(
            f"{where} has no reward: define reward_funcs = [your_function]"
            + (", or get_reward in the environment" if factories else "")
        )


def _check_can_be_sent(thing, where: str) -> None:
    """TypeError unless it can be pickled for the worker process, which imports it by its name."""
    try:
        pickle.dumps(thing)
    except Exception as error:  # pickle raises AttributeError, TypeError, PicklingError, ...
        raise TypeError(
            f"{where}: {getattr(thing, '__qualname__', thing)} cannot be sent to the rollout "
            f"process ({error}); use a module-level function, a functools.partial of one or "
            "an instance of a module-level class, not a lambda or a nested function"
        ) from error


def _check_rows(task: Task, where: str) -> None:
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
        task.check_row(row, f"{where}, row {i}")
