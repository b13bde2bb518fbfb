"""Environments and tools in the whole rollout loop, against the small server of test_rollout.py."""

import dataclasses
import functools
import itertools
import json
import pickle
import time

import pytest
import test_rollout
from conftest import make_tokenizer
from test_rollout import Run, prompts

import config
import grpo
import rollout
import tasks
from environments import first_prompt
from prompts import Prompt
from tasks import Task

server = test_rollout.server
EOS = 256  # of make_tokenizer()


def add(a: int, b: int) -> int:
    """Adds.

    Args:
        a: The first.
        b: The second.
    """
    return a + b


def block(seconds: float) -> str:
    """Blocks its thread.

    Args:
        seconds: How long.
    """
    time.sleep(seconds)
    return "back"


class Counter:
    """Counts to a target; it owns the task and the reward."""

    made = 0

    def __init__(self):
        type(self).made += 1
        self.resets = 0

    def reset(self, **row) -> str:
        self.row, self.value, self.resets = row, 0, self.resets + 1
        return "Count to 2."

    def get_reward(self) -> float:
        return float(self.value)

    def increment(self, step: int) -> int:
        """Adds to the counter.

        Args:
            step: What to add.
        """
        self.value += step
        return self.value

    def _hidden(self):
        raise AssertionError


class Quiet:
    """Has no reward and no prompt of its own; its methods are async."""

    async def reset(self, target, **row) -> None:
        assert "environment" not in row
        self.target = target

    async def aim(self, at: int) -> bool:
        """Aims.

        Args:
            at: Where.
        """
        return at == self.target


def call(name, **arguments):
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


class Agent:
    """Says its lines one after another in each rollout: a function of the prompt's text."""

    def __init__(self, server, *lines):
        self.tokenizer, self.lines, self.prompts = make_tokenizer(), lines, []
        server.reply = self.reply
        server.max_model_len = 4096

    def reply(self, i, prompt_ids):
        text = self.tokenizer.decode(prompt_ids, skip_special_tokens=False)
        self.prompts.append(text)
        n = text.count("<|im_start|>assistant\n") - 1
        line = self.lines[n] if n < len(self.lines) else "done"
        line = line(i) if callable(line) else line
        return [*self.tokenizer.encode(line, add_special_tokens=False), EOS]


def some_reward(completion_ids, **columns):
    return [float(len(ids) % 5) for ids in completion_ids]


def run(server, agent, rows=None, *funcs, task=(), **options):
    rows = prompts(1) if rows is None and "environment_factory" not in dict(task) else rows
    options = dict(num_generations=4, max_completion_length=200) | options
    return Run(server, rows, *funcs, tokenizer=agent.tokenizer, task=task, **options)


# ------------------------------------------------------------------------------------------- tools


def test_model_reads_the_results_of_its_calls_in_their_order(server):
    seen = []

    def look(completions, **columns):
        seen.extend(completions)
        return [float(i) for i in range(len(completions))]

    agent = Agent(server, "Hm. " + call("add", a=1, b=2) + call("add", a=3, b=4), call("ad"), "7!")
    task = {"tools": (add,)}
    result = run(server, agent, None, look, task=task).to_the_end()
    roles = [message["role"] for message in seen[0]]
    assert roles == ["assistant", "tool", "tool", "assistant", "tool", "assistant"]
    assert seen[0][0]["content"] == "Hm." and len(seen[0][0]["tool_calls"]) == 2
    assert [message["content"] for message in seen[0][1:3]] == ["3", "7"]
    assert "there is no tool 'ad'" in seen[0][4]["content"]
    assert seen[0][5] == {"role": "assistant", "content": "7!"}
    assert "user\nResult: 3\nResult: 7<|im_end|>" in agent.prompts[-1]
    assert result.mean("tools/call_frequency") == 3
    assert result.mean("tools/failure_frequency") == pytest.approx(1 / 3)
    assert result.total("tools/add/call_count") == 8
    assert result.total("tools/unknown_name_count") == 4
    assert result.mean("tools/parallel_calls_mean") == 1.5  # 2 and 1
    assert result.mean("rollout/turns_mean") == 3 and result.mean("tools/loop_exhausted_frac") == 0
    assert result.mean("rollout/fork_frac") == 0 and len(result.samples) == 4
    for sample in result.samples:  # what is trained is what the model said, and nothing else
        trained = agent.tokenizer.decode(sample.input_ids[sample.trained])
        assert trained == "".join(line + "<|im_end|>" for line in agent.lines)


@pytest.mark.parametrize("limit, turns", [(0, 1), (1, 2), (2, 3)])
def test_rollout_ends_when_it_may_call_no_more(server, limit, turns):
    agent = Agent(server, *[call("add", a=1, b=1)] * 9)
    options = dict(task={"tools": (add,)}, max_tool_calling_iterations=limit)
    result = run(server, agent, None, some_reward, **options).to_the_end()
    assert result.mean("rollout/turns_mean") == turns
    assert result.mean("tools/loop_exhausted_frac") == 1
    assert result.mean("tools/call_frequency") == limit
    assert len(result.records["tools/parallel_calls_mean"]) == 4 * turns  # the last one calls, too


def test_conversation_that_would_not_fit_ends_there_and_is_counted(server):
    agent = Agent(server, *[call("add", a=1, b=1)] * 99)
    server.max_model_len = 700
    result = run(server, agent, None, some_reward, task={"tools": (add,)}).to_the_end()
    assert result.total("tools/context_exhausted_count") == 4
    assert max(len(body["token_ids"]) for body in server.requests) <= 500
    assert result.mean("rollout/turns_mean") >= 2


def shout(text: str) -> str:
    """Says it 900 times.

    Args:
        text: What.
    """
    return text * 900


def test_result_that_does_not_fit_the_context_is_an_error_to_the_model(server):
    agent = Agent(server, call("shout", text="a"), "I see.")
    server.max_model_len = 1000
    result = run(server, agent, None, some_reward, task={"tools": (shout,)}).to_the_end()
    assert "does not fit the context" in agent.prompts[-1]
    assert result.mean("tools/failure_frequency") == 1
    assert result.total("tools/shout/failure_count") == result.total("tools/shout/call_count") == 4


def test_blocking_tool_does_not_slow_the_other_rollouts(server):
    # Of 8 rollouts every second blocks for longer than it may; the others are done in that time,
    # and nobody waits for the end of a call that is given up.
    turns = itertools.cycle([call("block", seconds=0), call("block", seconds=60)])
    agent = Agent(server, lambda _: next(turns))
    options = dict(task={"tools": (block,)}, tool_timeout_s=2.0, num_generations=8)
    result = run(server, agent, None, some_reward, **options).to_the_end()
    seconds = sorted(value for value, _ in result.records["tools/latency_s"])
    assert len(seconds) == 8 and seconds[3] < 2.0 <= seconds[4] and seconds[7] < 30
    assert result.total("tools/timeout_count") == result.total("tools/abandoned_count") == 4
    assert result.total("rollout/failed_count") == 0
    assert result.records["rollout/event_loop_lag_max_s"]


class OwnCalls(rollout.RolloutLoop):
    """Calls the tool itself: no chat template is needed for it."""

    async def generate_one(self, prompt, tools, group_id=0):
        (tool,) = tools
        result = await super().generate_one(prompt, [], group_id)
        result.reward = float(tool(a=1, b=group_id)) + len(result.completion_ids)
        return result


def test_loop_of_ones_own_may_call_tools_in_a_form_that_is_not_known(server, capsys):
    agent = Agent(server, lambda i: "x" * (i + 1))
    shows = "{% for tool in tools or [] %}{{ tool | tojson }}{% endfor %}"
    agent.tokenizer.chat_template = shows + agent.tokenizer.chat_template
    with pytest.raises(ValueError, match="how this model writes tool calls is not known"):
        run(server, agent, None, some_reward, task={"tools": (add,)}).to_the_end()
    result = run(server, agent, None, loop=OwnCalls, task={"tools": (add,)}).to_the_end()
    assert len(result.samples) == 4 and "OwnCalls must do without" in capsys.readouterr().err


# ------------------------------------------------------------------------------------ environments


def test_environment_owns_task_and_reward_and_is_used_again(server):
    Counter.made = 0
    agent = Agent(server, lambda i: call("increment", step=i % 3), "ok")
    options = dict(max_steps=1, max_concurrent_rollouts=2)
    result = run(server, agent, None, task={"environment_factory": Counter}, **options)
    result.loop._prompts = lambda: iter([Prompt(i, 0, i == 0, 0, {}) for i in range(3)])
    result.to_the_end()
    assert "user\nCount to 2.<|im_end|>" in agent.prompts[0]
    assert "increment(step: integer)" in agent.prompts[0] and "_hidden" not in agent.prompts[0]
    assert "get_reward" not in agent.prompts[0] and "reset" not in agent.prompts[0]
    assert Counter.made <= 2  # as many as rollouts run at once
    assert len(result.records["env/reset_s"]) == len(result.records["env/reward_s"]) == 12
    assert 0 <= result.mean("rewards/Counter/mean") <= 2
    assert result.mean("reward") == result.mean("rewards/Counter/mean")


def test_rows_route_to_environments_and_rewards_of_all_sources_are_summed(server):
    agent = Agent(server, lambda i: call("increment", step=i) + call("aim", at=7), "ok")
    message = {"role": "user", "content": "Hit it."}
    rows = [
        {"environment": "counter", "target": 1},
        {"environment": "quiet", "target": 7, "prompt": [message]},
    ]
    factories = {"counter": Counter, "quiet": functools.partial(Quiet)}
    tasks.check_task(Task(rows, (some_reward,), environment_factory=factories))
    result = run(server, agent, rows, some_reward, task={"environment_factory": factories})
    result.to_the_end()
    aimed = [text for text in agent.prompts if "Hit it." in text]
    counted = [text for text in agent.prompts if "Count to 2." in text]
    assert aimed and counted and len(aimed) + len(counted) == len(agent.prompts)
    assert all("aim(at: integer)" in text and "increment(" not in text for text in aimed)
    assert all("increment(" in text and "aim(at" not in text for text in counted)
    assert any("Result: true" in text for text in aimed)
    by_source = [result.records[f"rewards/{name}/mean"] for name in ("some_reward", "Counter")]
    assert [sum(weight for _, weight in records) for records in by_source] == [8, 4]
    assert result.total("reward") == pytest.approx(sum(v for r in by_source for v, _ in r))
    assert result.total("rewards/Counter/unscored_count") == 0


class Flaky(Counter):
    def reset(self, **row):
        super().reset(**row)
        if self.made == 2:
            raise OSError("sandbox lost")
        return "Count."


class Stuck(Counter):
    def increment(self, step: int) -> int:
        """Never comes back.

        Args:
            step: Ignored.
        """
        time.sleep(1.0)
        return 0


def test_environment_that_failed_or_still_runs_is_not_used_again(server):
    Flaky.made = Stuck.made = 0
    agent = Agent(server, call("increment", step=1), "ok")
    options = dict(max_concurrent_rollouts=1, max_steps=1)
    one = [Prompt(0, 0, True, 0, {})]
    for cls, made in ((Stuck, 4), (Flaky, 3)):
        result = run(
            server, agent, None, task={"environment_factory": cls}, tool_timeout_s=0.1, **options
        )
        result.loop._prompts = lambda: iter(one)
        if cls is Flaky:  # the first instance is made before the first rollout
            server.delay_s, options["max_concurrent_rollouts"] = 0.05, 4
        result.to_the_end()
        assert cls.made == made or cls is Flaky
    assert result.total("rollout/failed_count") == 0


def test_first_prompt_is_the_rows_or_the_environments_or_both():
    user, system = {"role": "user", "content": "Hi."}, {"role": "system", "content": "S"}
    assert first_prompt(None, "Go.", "E") == [{"role": "user", "content": "Go."}]
    assert first_prompt([system, user], None, "E") == [system, user]
    row = [system, user, {"role": "assistant", "content": "Well,"}]
    assert first_prompt(row, " Go.", "E")[1]["content"] == "Hi. Go." and user["content"] == "Hi."
    parts = [{"role": "user", "content": [{"type": "text", "text": "Hi."}]}]
    assert first_prompt(parts, "Go.", "E")[0]["content"][1] == {"type": "text", "text": "Go."}
    with pytest.raises(ValueError, match="no column 'prompt' and E.reset returned None"):
        first_prompt(None, None, "E")
    with pytest.raises(ValueError, match="no user message to append it to"):
        first_prompt([system], "Go.", "E")
    with pytest.raises(TypeError, match="E.reset returned 3: it must return a string or None"):
        first_prompt([user], 3, "E")


# -------------------------------------------------------------------------------------- the task


class NoReset:
    def get_reward(self):
        return 0.0


class Undescribed(Counter):
    def jump(self, far):
        return far


class Named(Quiet):
    def add(self, a: int) -> int:
        """The same name as a tool.

        Args:
            a: A.
        """


class Callable_:
    """Instances are rewards or factories, sync or async."""

    def __call__(self, completions=(), **columns):
        return [0.0 for _ in completions] or Counter()


class AsyncCallable:
    async def __call__(self, completions, **columns):
        return [0.0 for _ in completions]


def made_here():
    class Local(Counter):
        pass

    return Local


ROWS = [{"environment": "a"}, {"environment": "b"}]


@pytest.mark.parametrize(
    "task, error, message",
    [
        (Task(environment_factory=NoReset), ValueError, "NoReset has no method reset"),
        (Task(environment_factory=Undescribed), ValueError, "the tool jump cannot be described"),
        (Task(environment_factory="Counter"), TypeError, "'Counter', which is not callable"),
        (Task(environment_factory=made_here()), TypeError, "Local cannot be sent .* module-level"),
        (Task(environment_factory=lambda: Counter()), TypeError, "<lambda> cannot be sent"),
        (Task(environment_factory=Quiet), ValueError, "has no reward: .*get_reward in the env"),
        (
            Task(prompts(1), (some_reward,), (add,), Named),
            ValueError,
            "the tool add and Named.add have one name",
        ),
        (
            Task(ROWS, (some_reward,), environment_factory={"a": Counter}),
            ValueError,
            r"row 1 has environment='b', which is not among \['a'\]",
        ),
        (
            Task(prompts(1), (some_reward,), (add, add)),
            ValueError,
            r"several tools are named \['add",
        ),
        (Task(prompts(1), (some_reward,), ("add",)), TypeError, "the tool 'add' is not callable"),
        (
            Task(prompts(1), (some_reward,), (functools.partial(add, b=1),)),
            ValueError,
            "has no name to call it by",
        ),
        (Task(None, (some_reward,)), ValueError, "defines no dataset"),
    ],
)
def test_unusable_tools_and_environments_are_refused_before_anything_starts(task, error, message):
    with pytest.raises(error, match=message):
        tasks.check_task(task)


@pytest.mark.parametrize(
    "thing", [some_reward, functools.partial(some_reward, x=1), Callable_(), AsyncCallable()]
)
def test_everything_importable_can_be_a_reward(thing):
    task = Task(prompts(1), (thing,))
    tasks.check_task(task)
    assert pickle.loads(pickle.dumps(task)).reward_funcs


@pytest.mark.parametrize("factory", [Counter, functools.partial(Counter), Callable_()])
def test_everything_importable_can_make_an_environment(factory, server):
    tasks.check_task(Task(environment_factory=factory))
    agent = Agent(server, lambda i: call("increment", step=i))
    result = run(server, agent, None, task={"environment_factory": factory}, max_steps=1)
    one = [Prompt(0, 0, True, 0, {})]
    result.loop._prompts = lambda: iter(one)
    assert len(result.to_the_end().samples) == 4


def test_a_run_without_rows_needs_a_number_of_steps(tmp_path):
    path = tmp_path / "owner.py"
    path.write_text("from test_environments import Counter\nenvironment_factory = Counter\n")
    with pytest.raises(ValueError, match="owner has no dataset, .* give --max_steps"):
        config.configure(["--env", str(path)])
    chosen, task = config.configure(["--env", str(path), "--max_steps", "3"])
    with pytest.raises(ValueError, match="--save_strategy epoch: task owner .* use .* steps"):
        grpo.check(dataclasses.replace(chosen, save_strategy="epoch"), task)
    grpo.check(chosen, task)
    assert task.rows == [{}] and tasks.tool_names(task) == ["increment"]
    assert tasks.reward_names(task) == ["Counter"]


def test_completions_are_shown_once_a_logging_window(server, capsys):
    agent = Agent(server, lambda i: call("increment", step=i), "Counted.")
    options = dict(max_steps=1, log_completions=True, num_completions_to_print=1)
    result = run(server, agent, None, task={"environment_factory": Counter}, **options)
    in_parts = {"role": "user", "content": [{"type": "text", "text": "Now. "}]}
    rows = [Prompt(i, 0, i == 0, 0, {"prompt": [in_parts]}) for i in range(3)]
    result.loop._prompts = lambda: iter(rows)
    result.to_the_end()
    out = capsys.readouterr().out
    assert out.count("user: Now. Count to 2.") == out.count("assistant: Counted.") == 1
    assert "'name': 'increment'" in out and "reward" in out and "advantage" in out


# ---------------------------------------------------------------------------------- the task files


@pytest.mark.parametrize(
    "name", ["calculator", "countdown", "curriculum", "guess", "increment", "mixed"]
)
def test_task_file_is_usable_and_short(name):
    task = tasks.load_task(name)
    tasks.check_task(task)
    assert pickle.loads(pickle.dumps(task)).name == name
    with open(task.path) as file:
        assert len(file.readlines()) < 90


def test_task_with_environments_runs_in_the_worker_process(server, tmp_path):
    make_tokenizer().save_pretrained(tmp_path)
    Agent(server, lambda i: call("guess", number=1 + i % 9) + call("increment", step=i % 3), "ok")
    task = tasks.load_task("mixed", {"n_games": 8, "example": False})
    options = dict(max_completion_length=200, max_steps=1, eos_token_ids=[EOS])
    with test_rollout.started_worker(server, tmp_path, task, **options) as worker:
        test_rollout.taken(worker, 16)
        records = {name for name, _, _ in worker.drain_records()}
    assert {"tools/latency_s", "env/reset_s", "env/reward_s", "tools/call_frequency"} <= records
    assert "rewards/GuessEnv/mean" in records or "rewards/IncrementEnv/mean" in records
    assert "rollout/failed_count" not in records


def test_countdown_checks_with_exact_arithmetic():
    from envs import countdown

    options = {"numbers": 3, "n_prompts": 50, "operations": "+-*/"}
    task = tasks.load_task("countdown", options)
    assert len(task.rows) == 50 and len(task.rows[0]["prompt"]) == 9  # four examples
    with pytest.raises(ValueError, match="operations '%'.*such as"):
        countdown.dataset(countdown.Options(operations="%"))
    for reply, reward in {
        "(8 - 2) / 3": 1.0, "8/3 - 2/3": 0.0, "(8-2)/3 = 2": 1.0, "8 + 2 + 3": 0.2, "2": 0.0,
        "8 / (3 - 3)": 0.0, "__import__('os')": 0.0, "(" * 999: 0.0, "-8 + 2": 0.0, "": 0.0,
        "1/3*8 - 2": 0.0,
    }.items():  # fmt: skip
        assert countdown.score(reply, [2, 3, 8], 2) == reward, reply
    assert countdown.score("1/3*3", [1, 3, 3], 1) == 1.0  # not 0.999...


def test_guess_plays_the_same_game_for_a_group():
    from envs import guess

    games = [guess.GuessEnv() for _ in range(2)]
    assert games[0].reset(seed=5) == games[1].reset(seed=5) and games[0].number == games[1].number
    number = games[0].number
    assert games[0].get_reward() == 0.0
    assert games[0].guess(number + 1) == "lower" and games[0].get_reward() == 0.45
    assert games[0].guess(number - 1) == "higher" and games[0].guess(number) == "right"
    assert games[0].get_reward() == 1.0
    games[0].reset(seed=6)
    assert games[0].get_reward() == 0.0  # nothing is left of the game before


def test_solved_prompts_leave_the_curriculum(server):
    from envs import curriculum

    def always(completions, **columns):
        return [1.0] * len(completions)

    rows = prompts(2)
    result = Run(server, rows, always, loop=curriculum.CurriculumRolloutLoop, num_train_epochs=2,
                 pass_rate_cap=0.9)  # fmt: skip
    result.shared[rollout.Slot.ALLOWANCE] = 1  # a group at a time: each is scored before the next
    with pytest.raises(RuntimeError, match="filter_prompt rejected every prompt of epoch 1"):
        result.to_the_end()
    assert result.loop.pass_rates == {0: 1.0, 1: 1.0}
    result = Run(server, rows, always, loop=curriculum.CurriculumRolloutLoop, num_train_epochs=2,
                 pass_rate_cap=1.1)  # fmt: skip
    assert len(result.to_the_end().dropped) == 4  # nobody is left out; equal rewards teach nothing


def test_math_says_what_to_do_without_a_hub_or_math_verify(monkeypatch):
    import datasets

    def no_hub(*arguments, **options):
        raise ConnectionError("no route to the hub")

    monkeypatch.setattr(datasets, "load_dataset", no_hub)
    with pytest.raises(ValueError, match="DeepMath-103K cannot be read .*: go online once"):
        tasks.check_task(tasks.load_task("math"))
    with pytest.raises(ValueError, match="--source 'aime': must be one of deepmath, gsm8k"):
        tasks.check_task(tasks.load_task("math", {"source": "aime"}))
