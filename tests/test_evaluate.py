"""evaluate.py: pass@1 and pass@k worked by hand; what is asked, when, and under which weights.

Run: pytest tests/test_evaluate.py
"""

import asyncio
import dataclasses
import threading
import time
from types import SimpleNamespace

import pytest
from test_rollout import Run, first_number, prompts, server  # noqa: F401

import evaluate
import metrics
import rollout
import tasks
from config import Config


def test_pass_at_1_counts_rollouts_and_pass_at_k_prompts():
    rewards = {0: [1.0, 0.2, 1.5], 1: [0.0, None, 0.9], 2: [1.0]}  # two rollouts of 2 failed
    stories = [{"group": g, "reward": r} for g, values in rewards.items() for r in values]
    # 3 of 7 rollouts pass; of 4 prompts 0 and 2 do, 1 does not, and no rollout of the fourth ended
    assert evaluate.passes(stories, 4, pass_reward=1.0) == [
        ("eval/pass_at_1", pytest.approx(3 / 7), 1),
        ("eval/pass_at_k", 2 / 4, 1),
    ]
    assert evaluate.passes([], 4, 1.0) == [("eval/pass_at_1", 0, 1), ("eval/pass_at_k", 0, 1)]


def wait_for(holds, seconds=20):
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_the_loop_samples_the_first_prompts_once_for_every_start(server):  # noqa: F811
    loop = evaluate.loop_for(rollout.RolloutLoop)
    options = {"eval_prompts": 3, "num_generations": 2, "dump_rollouts": True}
    run = Run(server, prompts(5), first_number, loop=loop, **options)
    thread = threading.Thread(target=lambda: asyncio.run(run.loop.run()))
    thread.start()
    try:
        wait_for(lambda: run.loop.sampler.max_model_len)
        time.sleep(0.2)
        assert not run.stories  # nothing before it is asked for
        for n in (1, 2):
            run.shared[rollout.Slot.EVALUATIONS] = n
            wait_for(lambda n=n: len(run.dropped) == 3 * n)
    finally:
        run.shared[rollout.Slot.STOP] = 1
        thread.join(20)
    assert not thread.is_alive()
    assert run.samples == []  # nothing to train on
    rows = [(story["row_index"], story["rollout"]) for story in run.stories]
    assert sorted(rows) == sorted(2 * [(row, i) for row in range(3) for i in range(2)])
    assert len({story["group"] for story in run.stories}) == 6


class FakeWorker:
    """An evaluation's worker that the test plays."""

    def __init__(self):
        self.events, self.sent = [], ([], [])  # dropped ids, stories

    def set_version(self, version):
        self.events.append(version)

    def start_evaluation(self):
        self.events.append("start")

    def check(self):
        pass

    def drain_ended(self):
        sent, self.sent = self.sent, ([], [])
        return sent

    def drain_records(self):  # of two groups
        return [("reward", 0.25, 4.0), ("rollout/duration_s", 1.0, 1.0), ("reward", 1.0, 2.0)]

    def ends(self, version):
        story = {"group": 0, "reward": 1.0, "versions": [version, version]}
        self.sent = [0, 1], [story, story | {"group": 1, "reward": 0.0}]


def evaluation(**options):
    made = object.__new__(evaluate.Evaluation)
    made.config = dataclasses.replace(Config(), eval_steps=2, **options)
    made.worker, made.n_prompts, made.n_due = FakeWorker(), 2, 0
    made.step = made.version = made.held_since = None
    made.records = []
    return made


def test_a_sync_waits_for_the_evaluation_and_says_how_long():
    it = evaluation()
    it.start_if_due(1, 1)
    assert it.worker.events == []
    it.start_if_due(2, 2)
    assert it.worker.events == [2, "start"]
    it.start_if_due(4, 4)  # it still runs
    assert it.worker.events == [2, "start"]
    assert not it.lets_go(may_wait=True, trainers_worker=it.worker)
    it.worker.ends(version=2)
    assert it.lets_go(may_wait=True, trainers_worker=it.worker)
    found = {name: value for name, value, _ in it.drain()}
    assert found["eval/pass_at_1"] == found["eval/pass_at_k"] == 0.5
    assert found["eval/reward"] == 0.5 and found["eval/step"] == 2
    assert found["eval/sync_held_s"] > 0 and "rollout/duration_s" not in found
    assert it.lets_go(may_wait=True, trainers_worker=it.worker)
    assert it.drain() == []  # a sync that did not wait says nothing
    it.start_if_due(5, 5)  # step 4 was missed
    assert it.worker.events == [2, "start", 5, "start"]


def test_a_resumed_run_evaluates_at_the_steps_of_one_that_never_stopped(monkeypatch, tmp_path):
    worker = FakeWorker()
    worker.start = lambda: None
    monkeypatch.setattr(evaluate, "RolloutWorker", lambda *options, **more: worker)
    config = dataclasses.replace(Config(), eval_steps=50)
    it = evaluate.Evaluation(config, SimpleNamespace(rows=[{}] * 3), tmp_path, 140)
    for step in range(141, 152):
        it.start_if_due(step, step)
    assert it.step == 150 and worker.events == [150, "start"]


def test_of_two_evaluations_in_one_window_the_newer_is_shown():
    it, window = evaluation(), {}
    for version, passed in ((2, 1.0), (4, 0.0)):
        it.start_if_due(version, version)
        it.worker.ends(version)
        it.worker.sent[1][0]["reward"] = passed
        for record in it.drain():
            metrics.fold_(window, *record)
    found = metrics.reduced(window)
    assert found["eval/step"] == 4 and found["eval/pass_at_1"] == found["eval/pass_at_k"] == 0
    assert found["eval/reward"] == (0.25 * 4 + 1.0 * 2) / 6  # over the groups of one evaluation


def test_a_sync_that_cannot_wait_for_a_later_step_waits_for_the_end():
    it = evaluation()
    it.start_if_due(2, 2)
    threading.Timer(0.3, it.worker.ends, kwargs={"version": 2}).start()
    begin = time.monotonic()
    assert it.lets_go(may_wait=False, trainers_worker=it.worker)
    assert time.monotonic() - begin > 0.2
    assert it.step is None


def test_tokens_of_other_weights_are_an_error():
    it = evaluation()
    it.start_if_due(2, 2)
    it.worker.ends(version=3)
    with pytest.raises(RuntimeError, match="version 2 has tokens of versions .3.: does another"):
        it.is_running()


def test_the_last_step_is_evaluated_too():
    it = evaluation(max_steps=3)
    it.start_if_due(3, 3)
    assert it.worker.events == [3, "start"]


def test_two_task_files_of_one_name_are_refused(tmp_path):
    (tmp_path / "arithmetic.py").write_text("dataset = []")
    config = dataclasses.replace(Config(), eval_env=str(tmp_path / "arithmetic.py"))
    with pytest.raises(ValueError, match="--eval_env .*rename one of them"):
        tasks.load_eval_task(config, tasks.load_task("arithmetic"))


def test_the_held_out_task_shares_the_options_of_the_trained_one():
    task = tasks.load_task("arithmetic", {"digits": 2, "n_prompts": 16})
    config = dataclasses.replace(Config(), eval_env="arithmetic")
    assert tasks.load_eval_task(config, task).options == task.options
