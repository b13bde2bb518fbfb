"""Environments: stateful objects that own a rollout's task. Their public methods are its tools.

    class Guess:
        def reset(self, **row) -> str | None   # a rollout begins; a string is (part of) its prompt
        def get_reward(self) -> float          # optional, sync or async; once, when it has ended
        def guess(self, number: int) -> str    # a tool

A task file's `environment_factory` is a callable without arguments that makes one, usually the
class, or a dictionary of such by name; then each row's column `environment` names its one.
An instance serves one rollout at a time and is used again, so a costly constructor is paid for as
often as rollouts run at once. One whose rollout failed, or in which a call may still be running, is
thrown away.

Test: pytest tests/test_environments.py
"""

import functools
import time

import tools

RESERVED = ("reset", "get_reward")


def as_factories(environment_factory) -> dict:
    """{name: factory}; the name is None for the only one."""
    if environment_factory is None or isinstance(environment_factory, dict):
        return environment_factory or {}
    return {None: environment_factory}


def method_names(cls: type) -> list[str]:
    """The methods that are tools, in the alphabet's order."""
    names = [name for name in dir(cls) if not name.startswith("_") and name not in RESERVED]
    return [name for name in names if callable(getattr(cls, name))]


def methods(environment) -> list:
    return [getattr(environment, name) for name in method_names(type(environment))]


def check_class(cls: type, standalone=()) -> None:
    """ValueError unless it can be an environment beside the standalone tools of these names."""
    if not callable(getattr(cls, "reset", None)):
        raise ValueError(f"the environment {cls.__name__} has no method reset: it begins a rollout")
    for name in method_names(cls):
        if name in standalone:
            raise ValueError(f"the tool {name} and {cls.__name__}.{name} have one name: rename one")
        tools.schema(getattr(cls, name))


def name_for(row: dict, factories: dict, where: str):
    """The key of the row's environment in `factories`. ValueError if there is none."""
    if None in factories:
        return None
    name = row.get("environment")
    if name not in factories:
        raise ValueError(
            f"{where} has environment={name!r}, which is not among {sorted(factories)}: give every "
            "row a column 'environment' with one of these names"
        )
    return name


class Environments:
    """The instances of one rollout loop: made in threads when needed, handed out, taken back."""

    def __init__(self, environment_factory, standalone, runner: tools.ToolRunner):
        self.factories = as_factories(environment_factory)
        self._standalone = [tool.__name__ for tool in standalone]
        self._runner, self._idle = runner, {name: [] for name in self.factories}

    async def prepare(self) -> list[dict]:
        """Make the first instance of each and check it; -> the schemas of all of their tools."""
        schemas = []
        for name, factory in self.factories.items():
            environment = await self._runner.call(factory)
            check_class(type(environment), self._standalone)
            schemas += [tools.schema(method) for method in methods(environment)]
            self._idle[name].append(environment)
        return schemas

    async def open(self, row: dict, where: str) -> tuple[object, list[dict]]:
        """(an environment that was reset for the row, the rollout's prompt)."""
        name = name_for(row, self.factories, where)
        idle = self._idle[name]
        environment = idle.pop() if idle else await self._runner.call(self.factories[name])
        columns = {key: row[key] for key in row if name is None or key != "environment"}
        start = time.monotonic()
        text = await self._runner.call(functools.partial(environment.reset, **columns))
        self._runner.record("env/reset_s", time.monotonic() - start)
        return environment, first_prompt(row.get("prompt"), text, type(environment).__name__)

    async def reward(self, environment) -> tuple[type, float | None] | None:
        """(class, what its get_reward gives), None if it has no such method."""
        if not callable(getattr(environment, "get_reward", None)):
            return None
        start = time.monotonic()
        reward = await self._runner.call(environment.get_reward)
        self._runner.record("env/reward_s", time.monotonic() - start)
        return type(environment), reward

    def close(self, environment, row: dict) -> None:
        """Take it back after a rollout that ended well."""
        lost = self._runner.out_of_time
        if id(environment) in lost:
            lost.remove(id(environment))
        else:
            self._idle[name_for(row, self.factories, "the row")].append(environment)


def first_prompt(prompt: list[dict] | None, text: str | None, name: str) -> list[dict]:
    """The prompt of a rollout: the row's, what reset() returned, or both. A new list."""
    if text is not None and not isinstance(text, str):
        raise TypeError(f"{name}.reset returned {text!r:.60}: it must return a string or None")
    if prompt is None and text is None:
        raise ValueError(
            f"there is no prompt: the row has no column 'prompt' and {name}.reset returned None"
        )
    if prompt is None:
        return [{"role": "user", "content": text}]
    last = max((i for i, m in enumerate(prompt) if m["role"] == "user"), default=None)
    if text is None or (last is None and not text):
        return list(prompt)
    if last is None:
        raise ValueError(
            f"{name}.reset returned a string, but the prompt has no user message to append it to"
        )
    content = prompt[last]["content"]
    more = text if isinstance(content, str) else [{"type": "text", "text": text}]
    return [*prompt[:last], prompt[last] | {"content": content + more}, *prompt[last + 1 :]]
