"""dump.py and feed.Replay: what is written is what was trained, and trains the same again.

Run: pytest tests/test_dump.py
"""

import dataclasses
import json
from types import SimpleNamespace

import numpy as np
import pytest
from test_trainer import BUDGET, CONFIG, assert_close, gradients, make_samples

import config
import dump
import feed
import grpo
import planner


def with_odd_shapes(samples):
    """Candidate sets in some, another head width in one, none trained in the last."""
    samples = [
        dataclasses.replace(s, rollout_index=i, metrics={"m": i}) for i, s in enumerate(samples)
    ]
    n = int(samples[0].trained.sum())
    sets = {"set_ids": np.arange(2 * n, dtype=np.int32), "set_offsets": np.arange(n + 1) * 2}
    samples[0] = dataclasses.replace(samples[0], **sets)
    empty = {"top_ids": samples[1].top_ids[:, :0], "top_log_probs": samples[1].top_log_probs[:, :0]}
    samples[1] = dataclasses.replace(samples[1], **empty)
    samples[-1] = planner.lossless_copy(samples[-1])
    return samples


def test_a_step_comes_back_as_it_was_written(tmp_path):
    samples = with_odd_shapes(make_samples(n_groups=2))
    places = [(0, 0), (0, 0), (0, 1), (1, 0), (1, 1), (1, 1)]
    log_probs = [np.arange(s.trained.sum(), dtype=np.float32) for s in samples]
    written = dump.RecordedStep(7, BUDGET, samples, places, [0, 1, 2, 3, 4, 5], log_probs)
    dump.write_step(tmp_path / "step-000007.npz", written)
    assert [path.name for path in tmp_path.iterdir()] == ["step-000007.npz"]
    read = dump.read_step(tmp_path / "step-000007.npz")
    for name in ("step", "token_budget", "places", "staleness"):
        assert getattr(read, name) == getattr(written, name)
    for ours, theirs in zip(samples, read.samples, strict=True):
        for field in dataclasses.fields(ours):
            a, b = getattr(ours, field.name), getattr(theirs, field.name)
            if isinstance(a, np.ndarray):
                assert a.dtype == b.dtype and a.shape == b.shape and np.array_equal(a, b), (
                    field.name
                )
            else:
                assert a == b, field.name
    assert [len(log_probs) for log_probs in read.policy_log_probs] == [len(p) for p in log_probs]
    rows = [[len(samples) for samples in batch] for batch in read.rows()]
    assert rows == [[2, 1], [1, 2]]


def group_of(samples, rewards, **more):
    n = len(samples)
    return SimpleNamespace(
        group_id=3, row_index=9, prompts=[[{"role": "user", "content": "2+2?"}]] * n,
        completions=[[{"role": "assistant", "content": str(i)}] for i in range(n)],
        reward_kwargs={"answer": [4] * n}, completions_sequences=samples,
        rollout_ids=[f"id{i}" for i in range(n)],
        tool_call_counts=[0] * n, tool_failure_counts=[0] * n, rewards=np.array(rewards), **more
    )  # fmt: skip


def test_stories_name_every_reward_and_why_a_rollout_is_not_trained():
    one, two, three = make_samples(n_groups=1)
    two = dataclasses.replace(
        two, versions=np.where(two.trained, [4] * (len(two.versions) - 1) + [5], -1)
    )
    rewards = [1.0, 0.0, np.nan]
    group = group_of([[one], [two], [three]], rewards)
    told = dump.stories(group, {"correct": np.array(rewards)}, np.array([1.0, -1.0, 0.0]), True)
    assert [story.get("outcome") for story in told] == [None, None, "unscored"]
    assert [story["rewards"] for story in told] == [
        {"correct": 1.0},
        {"correct": 0.0},
        {"correct": None},
    ]
    assert [story["versions"] for story in told] == [[0, 0], [4, 5], [0, 0]]
    assert [story["rollout_id"] for story in told] == ["id0", "id1", "id2"]
    assert told[1]["advantage"] == -1 and told[1]["columns"] == {"answer": 4}
    assert json.loads(json.dumps(told)) == told
    equal = dump.stories(group_of([[one], [two]], [1.0, 1.0]), {}, np.zeros(2), False)
    assert [story["outcome"] for story in equal] == ["equal rewards"] * 2
    alone = dump.stories(group_of([[one], [two]], [1.0, np.nan]), {}, np.zeros(2), False)
    assert [story["outcome"] for story in alone] == ["unscored"] * 2
    nothing = dump.stories(group_of([[one], []], [1.0, 0.0]), {}, np.array([1.0, -1.0]), True)
    assert [story.get("outcome") for story in nothing] == [None, "untrained"]
    assert nothing[1]["versions"] is None and nothing[1]["generated_tokens"] == 0


def test_every_rollout_gets_one_line_that_says_what_became_of_it(tmp_path):
    """Six rollouts, one a group; in pull order: trained, stale, oversize, untrained, trained (the
    second of its two samples), left over."""
    samples = make_samples(n_groups=6, group_size=1)
    versions = np.where(samples[1].trained, -5, -1).astype(np.int32)
    samples[1] = dataclasses.replace(samples[1], versions=versions)
    long = np.arange(BUDGET + 1) % 250
    samples[2] = dataclasses.replace(
        samples[2], input_ids=long.astype(np.int32), trained=np.arange(len(long)) == BUDGET,
        sampler_log_probs=np.zeros(len(long), np.float32), versions=np.zeros(len(long), np.int32),
        top_ids=samples[2].top_ids[:1], top_log_probs=samples[2].top_log_probs[:1],
    )  # fmt: skip
    samples[3] = planner.lossless_copy(samples[3])
    second = dataclasses.replace(samples[4], versions=np.where(samples[4].trained, -5, -1))
    pulled = [dataclasses.replace(s, rollout_index=0) for s in [*samples[:4], second, samples[4]]]
    left_over = dataclasses.replace(samples[5], rollout_index=0)

    def staleness(sample):
        return -int(sample.versions[sample.trained].min())

    (plan,) = planner.plan_steps(
        pulled, token_budget=BUDGET, world_size=1, gradient_accumulation_steps=1,
        first_step=1, is_stale=lambda sample, step: staleness(sample) > 4,
    )  # fmt: skip
    assert plan.n_samples == 2 and plan.dropped == {"stale": 2, "oversize": 1, "untrained": 1}
    writer = dump.Dump(tmp_path, BUDGET)
    told = [
        {"group": i, "rollout": 0, "n_samples": 2 if i == 4 else 1, "reward": 1.0} for i in range(6)
    ]
    writer.tell([*told, {"group": 6, "rollout": 0, "n_samples": 1, "outcome": "equal rewards"}], 1)
    writer.pulled.extend([*pulled, left_over])
    n_terms = sum(int(s.trained.sum()) for row in plan.rows for s in row.samples)
    writer.step(plan, staleness, [[np.zeros(n_terms, np.float32)]])
    writer.close(1)
    lines = {line["group"]: line for line in dump.read_rollouts(tmp_path)}
    assert len(dump.read_rollouts(tmp_path)) == 7
    assert {group: line["outcome"] for group, line in lines.items()} == {
        0: "trained", 1: "stale", 2: "oversize", 3: "untrained", 4: "trained", 5: "unused",
        6: "equal rewards",
    }  # fmt: skip
    assert {line["outcome"] for line in lines.values()} <= dump.FATES.keys()
    assert lines[4]["step"] == 1 and lines[4]["staleness"] == 0
    assert [s["outcome"] for s in lines[4]["samples"]] == ["stale", "trained"]
    place = {name: lines[4]["samples"][1][name] for name in ("micro_batch", "row", "index")}
    assert place == {"micro_batch": 0, "row": 0, "index": 1}
    # at the end of the prompts what the planner took after the last step was dropped, too
    (tmp_path / "ends").mkdir()
    writer = dump.Dump(tmp_path / "ends", BUDGET)
    writer.tell([told[1]], 2)
    writer.pulled.append(pulled[1])
    writer.close(2, prompts_ended=True)
    (line,) = dump.read_rollouts(tmp_path / "ends")
    assert (line["outcome"], line["step"]) == ("stale", 2)


def test_a_resumed_run_leaves_out_what_came_after_its_checkpoint(tmp_path):
    def story(group, outcome="equal rewards"):
        return {"group": group, "rollout": 0, "n_samples": 0, "outcome": outcome}

    killed = dump.Dump(tmp_path, BUDGET)
    for step in (1, 2, 3):
        killed.tell([story(step)], step)
        dump.step_file(tmp_path, step).touch()
    killed.close(3)
    with open(tmp_path / "rollouts.jsonl", "a") as file:
        file.write('{"group": 4, "ste')
    resumed = dump.Dump(tmp_path, BUDGET, resumed_step=2)
    assert dump.step_files(tmp_path) == [dump.step_file(tmp_path, step) for step in (1, 2)]
    resumed.tell([story(5)], 3)
    resumed.close(3)
    lines = dump.read_rollouts(tmp_path)
    assert [(line["group"], line["step"]) for line in lines] == [(1, 1), (2, 2), (5, 3)]


def test_a_full_disk_ends_the_dump_not_the_run(tmp_path, capsys):
    writer = dump.Dump(tmp_path, BUDGET)
    (tmp_path / "rollouts.jsonl").mkdir()  # so that it cannot be written
    story = {"group": 0, "rollout": 0, "n_samples": 0, "outcome": "equal rewards"}
    writer.tell([story, story], 1)
    writer.close(1)
    assert capsys.readouterr().err.count("rollouts are no longer dumped") == 1


def record(folder, samples, world_size, **options):
    """Dump what the planner makes of the samples, as a run of `world_size` processes would."""
    plans = list(
        planner.plan_steps(
            samples, token_budget=BUDGET, world_size=world_size, first_step=1, **options
        )
    )
    writer = dump.Dump(folder, BUDGET)
    for plan in plans:
        shares = feed.shares(plan, CONFIG, world_size)
        log_probs = [
            [np.zeros(sum(int(s.trained.sum()) for s in row), np.float32) for row in share.rows]
            for share in shares
        ]
        writer.pulled.extend(s for row in plan.rows for s in row.samples)
        writer.step(plan, lambda sample: 0, log_probs)
    writer.close(plans[-1].step)
    return plans


def test_replay_hands_out_the_same_rows_with_the_same_denominators(tmp_path, one_rank):
    options = dataclasses.replace(CONFIG, replay=str(tmp_path), gradient_accumulation_steps=2)
    plans = record(tmp_path, make_samples(n_groups=9), 1, gradient_accumulation_steps=2)
    assert len(plans) > 1
    replay = feed.Replay(options, pad=None)
    assert replay.budget == BUDGET
    for plan in plans:
        share, expected = replay.next(), feed.shares(plan, options, 1)[0]
        assert share.denominators == expected.denominators
        for ours, theirs in zip(share.rows, expected.rows, strict=True):
            assert [s.input_ids.tolist() for s in ours] == [s.input_ids.tolist() for s in theirs]
            assert [s.advantage for s in ours] == [s.advantage for s in theirs]
        found = {name: value for name, value, _ in replay.records()}
        expected = {name: value for name, value, _ in planner.batch_metrics(plan, BUDGET)}
        assert {name: found[name] for name in expected} == expected
        assert not replay.sync_due(plan.step)
    assert replay.next() is None


def test_a_replay_with_fewer_processes_has_the_same_gradient(tiny_folder, tmp_path, one_rank):
    (plan,) = record(tmp_path, make_samples(n_groups=3), 3, gradient_accumulation_steps=1)
    live = feed.shares(plan, CONFIG, 3)
    whole = feed.Share(
        [rows for share in live for rows in share.rows],
        [d for share in live for d in share.denominators],
        [n for share in live for n in share.token_shares],
    )
    assert sum(whole.token_shares) == pytest.approx(1)
    expected = gradients(tiny_folder, CONFIG, whole)
    share = feed.Replay(dataclasses.replace(CONFIG, replay=str(tmp_path)), None).next()
    assert len(share.rows) == 3
    assert_close(gradients(tiny_folder, CONFIG, share), expected, 1e-6)
    # Two processes take two rounds; who has no row in the second forwards without a loss.
    one, two = feed.shares(plan, CONFIG, 2)
    assert [len(one.rows), len(two.rows)] == [2, 2]
    assert not any(sample.trained.any() for sample in two.rows[1])


def test_replay_takes_the_options_of_the_run_and_needs_its_dump(tmp_path):
    with pytest.raises(ValueError, match="--replay.*--dump_rollouts"):
        config.configure(["--replay", str(tmp_path)])
    run = dataclasses.asdict(dataclasses.replace(config.Config(), learning_rate=0.5, loss="cispo"))
    run |= {"digits": 2, "output_dir": "x", "dump_rollouts": True, "max_steps": 7}
    run |= {"resume_from_checkpoint": "True", "push_to_hub": True, "replicas": 2}
    (tmp_path / "config.json").write_text(json.dumps(run))
    record(tmp_path, make_samples(n_groups=1), 1, gradient_accumulation_steps=1)
    latest = tmp_path / "latest"
    latest.symlink_to(tmp_path)
    options, task = config.configure(["--replay", str(latest), "--loss", "dr_grpo"])
    assert options.replay == str(tmp_path)  # the link will point to the new run
    assert options.learning_rate == 0.5 and options.loss == "dr_grpo" and options.max_steps == 7
    assert task.options.digits == 2
    assert options.output_dir is None and not options.dump_rollouts and options.replicas == 1
    assert not options.push_to_hub and options.resume_from_checkpoint is None
    with pytest.raises(ValueError, match="--eval_env.*replay"):
        config.configure(["--replay", str(tmp_path), "--eval_env", "arithmetic"])


def test_run_sh_starts_no_server_for_a_replay(tiny_folder, tmp_path):
    run = dataclasses.asdict(dataclasses.replace(config.Config(), model=str(tiny_folder)))
    (tmp_path / "config.json").write_text(json.dumps(run))
    record(tmp_path, make_samples(n_groups=1), 1, gradient_accumulation_steps=1)
    grpo.prepare(["--replay", str(tmp_path)], tmp_path / "plan")
    plan = dict(line.split("=", 1) for line in (tmp_path / "plan").read_text().splitlines())
    assert plan["SERVER_URL"].startswith("http") and plan["MODEL_PATH"] == str(tiny_folder)
    grpo.prepare(["--model", str(tiny_folder)], tmp_path / "plan")
    assert "SERVER_URL=''" in (tmp_path / "plan").read_text()  # its own
