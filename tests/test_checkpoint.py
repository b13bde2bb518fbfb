"""Checkpoints: a resumed run is the run that never stopped, whatever happened to it."""

import dataclasses
import itertools
import json
import multiprocessing
import os
import resource
import signal

import numpy as np
import pytest
import torch
import torch.distributed as dist
from conftest import load_policy, whole
from test_dump import record
from test_trainer import BUDGET, CONFIG, make_samples

import attention
import checkpoint
import grpo
import model
import packing
import planner
import update
from chat import Sample
from feed import Feed, Replay

CPU = torch.device("cpu")
STEPS = dataclasses.replace(
    CONFIG,
    max_steps=50,
    learning_rate=1e-4,
    lr_scheduler_type="cosine",
    warmup_steps=5,
    weight_decay=0.1,
)
WHERE = {"num_tokens": 0, "next_prompt": 0, "used": []}


def make_training(folder, config, device=CPU):
    torch.set_num_threads(1)
    policy = load_policy(config, folder, device)
    offload = {"cpu_offload": config.cpu_offload}
    model.shard(policy, device, torch.float32, compile_layers=False, **offload)
    return policy, update.make_optimizer(policy, config)


def curve(rank, folder, config, run, *, resume=None, stop=50, device=CPU):
    """Losses of config.replay's steps from `resume` (a checkpoint) to `stop`, and what the run then
    holds. A draw a step stands for everything random."""
    torch.manual_seed(0)
    policy, optimizer = make_training(folder, config, device)
    saves, state, losses = checkpoint.Checkpoints(run, policy, optimizer, config), None, []
    if resume:
        state = checkpoint.load_state(resume)
        checkpoint.restore(resume, policy, optimizer)
        saves.resume(state)
    pad = packing.bucket if device.type == "cuda" else None  # or each length is compiled
    replay, done = Replay(config, None), state["step"] if state else 0
    replay.files = itertools.islice(replay.files, done, None)  # the samples that come next
    for step in range(done + 1, stop + 1):
        share = replay.next()
        rows = [packing.pack_row(samples, BUDGET, pad).to(device) for samples in share.rows]
        trees = [attention.TreeMask(row).prepare(policy.model.config) for row in rows]
        seen = update.forward_backward(policy, config, share, rows, trees, grpo.Clock(device))
        norm = update.clip_gradients(policy, config.max_grad_norm)
        update.set_learning_rate(optimizer, config, step)
        optimizer.step()
        optimizer.zero_grad()
        found, norm, _ = update.gather_metrics(seen, norm)
        draw = float(torch.rand(()))
        losses.append((dict((n, v) for n, v, _ in found)["loss"], norm, draw))
        if saves.is_due(step, share.epoch):
            saves.save(step, replay.state())
    saves.finish()
    saves.close()
    return losses, held(policy, optimizer), [group["lr"] for group in optimizer.param_groups]


def held(policy, optimizer):
    """{name: whole tensor} of all parameters and moments."""
    tensors = {}
    for name, parameter in policy.named_parameters():
        state = {"": parameter.detach()} | dict(optimizer.state[parameter])
        for kind, value in state.items():
            tensors[f"{name} {kind}"] = whole(value).clone()
    return tensors


@pytest.fixture(scope="module")
def replaying(tmp_path_factory):
    """Options that replay 50 steps which two processes dumped."""
    folder = tmp_path_factory.mktemp("dumped")
    plans = record(folder, make_samples(n_groups=320), 2, gradient_accumulation_steps=1)
    assert len(plans) >= 50
    return dataclasses.replace(STEPS, replay=str(folder), save_steps=25)


@pytest.fixture(scope="module")
def uninterrupted(tiny_folder, one_rank, replaying, tmp_path_factory):
    run = tmp_path_factory.mktemp("uninterrupted")
    return run, one_rank(curve, tiny_folder, replaying, run)


class curve_from:  # a job that two_ranks can pickle
    def __init__(self, resume, stop=50):
        self.resume, self.stop = resume, stop

    def __call__(self, *arguments):
        return curve(*arguments, resume=self.resume, stop=self.stop)


def test_a_resumed_run_equals_the_uninterrupted_one_to_the_bit(
    tiny_folder, one_rank, replaying, uninterrupted, tmp_path
):
    # The first run went on training while its state was being written.
    run, (losses, tensors, rate) = uninterrupted
    again = one_rank(curve_from(run / "checkpoint-25"), tiny_folder, replaying, tmp_path)
    assert again[0] == losses[25:] and again[2] == rate
    assert again[1].keys() == tensors.keys() and len(tensors) > 60
    for name, tensor in tensors.items():
        assert torch.equal(again[1][name], tensor), name


def test_the_loss_curve_is_that_of_one_rank_and_two_resume_as_one(
    tiny_folder, one_rank, two_ranks, replaying, uninterrupted, tmp_path
):
    run, (one, *_) = uninterrupted
    two, *_ = two_ranks(curve, tiny_folder, replaying, tmp_path)
    for (loss, norm, _), (loss_2, norm_2, _) in zip(one, two, strict=True):
        assert loss_2 == pytest.approx(loss, abs=1e-5) and norm_2 == pytest.approx(norm, rel=1e-3)
    # What two ranks saved at step 25 goes on as one.
    saved = tmp_path / "checkpoint-25"
    assert len(list(saved.glob("*.distcp"))) == 2
    rest, *_ = one_rank(curve_from(saved), tiny_folder, replaying, tmp_path / "rest")
    for (loss, *_), (loss_2, *_) in zip(one[25:], rest, strict=True):
        assert loss_2 == pytest.approx(loss, abs=1e-5)
    # ... and one rank's as two: the states right after loading are the same to the bit.
    end = curve_from(run / "checkpoint-50")
    as_one = one_rank(end, tiny_folder, replaying, tmp_path / "a")[1]
    as_two = two_ranks(end, tiny_folder, replaying, tmp_path / "b")[1]
    assert all(torch.equal(as_two[name], tensor) for name, tensor in as_one.items())


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("cpu_offload", [False, True])
def test_on_a_gpu_a_resumed_run_goes_on(tiny_folder, one_rank, replaying, tmp_path, cpu_offload):
    config = dataclasses.replace(replaying, save_steps=5, cpu_offload=cpu_offload)
    options = {"stop": 10, "device": torch.device("cuda", 0)}
    losses, tensors, _ = curve(0, tiny_folder, config, tmp_path, **options)
    saved = tmp_path / "checkpoint-5"
    again, tensors_again, _ = curve(0, tiny_folder, config, tmp_path, resume=saved, **options)
    for (loss, norm, draw), (loss_2, norm_2, draw_2) in zip(losses[5:], again, strict=True):
        # to the kernels' own noise; atomics add in any order
        assert loss_2 == pytest.approx(loss, abs=1e-4) and draw_2 == draw
        assert norm_2 == pytest.approx(norm, rel=1e-2)
    on_cpu, *_ = curve(0, tiny_folder, replaying, tmp_path / "cpu", stop=5)
    for (loss, *_), (loss_2, *_) in zip(on_cpu, losses[:5], strict=True):
        assert loss_2 == pytest.approx(loss, abs=1e-3)
    assert tensors.keys() == tensors_again.keys()


def save_twice_and_be_killed(folder, run, store):
    """Step 1 is saved; in the save of step 2 the process is killed at its first fsync."""
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=1)
    policy, optimizer = make_training(folder, STEPS)
    saves = checkpoint.Checkpoints(run, policy, optimizer, STEPS)
    saves.save(1, WHERE)
    saves.finish()
    os.fsync = lambda descriptor: os.kill(os.getpid(), signal.SIGKILL)
    saves.save(2, WHERE)
    saves.finish()


def test_a_kill_in_the_middle_of_a_save_leaves_the_one_before(
    tiny_folder, one_rank, replaying, tmp_path
):
    run = tmp_path / "run"
    process = multiprocessing.get_context("spawn").Process(
        target=save_twice_and_be_killed, args=(tiny_folder, run, tmp_path / "store")
    )
    process.start()
    process.join(100)
    assert process.exitcode == -signal.SIGKILL
    assert sorted(path.name for path in run.iterdir()) == ["checkpoint-1", "checkpoint-2.part"]
    config = dataclasses.replace(STEPS, output_dir=str(run), resume_from_checkpoint="True")
    assert checkpoint.find(config) == run / "checkpoint-1"
    losses, *_ = one_rank(curve_from(run / "checkpoint-1", stop=2), tiny_folder, replaying, run)
    assert len(losses) == 1
    assert [path.name for path in run.iterdir()] == ["checkpoint-1"]  # the rest was cleared away


def test_a_full_disk_stops_the_run_and_leaves_what_was_saved(
    tiny_folder,
    one_rank,
    tmp_path,
):
    policy, optimizer = make_training(tiny_folder, STEPS)
    saves = checkpoint.Checkpoints(tmp_path, policy, optimizer, STEPS)
    saves.save(1, WHERE)
    saves.finish()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))  # a write beyond it fails
    try:
        saves.save(2, WHERE)
        with pytest.raises(
            RuntimeError, match="checkpoint-2 could not be written.*too large.*disk"
        ):
            saves.finish()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint-1"]
    saves.save(3, WHERE)  # there is room again
    saves.finish()
    assert checkpoint.complete(tmp_path)[-1].name == "checkpoint-3"


def make_complete(run, step, saved_at):
    folder = run / f"checkpoint-{step}"
    folder.mkdir(parents=True)
    (folder / checkpoint.STATE).write_text(json.dumps({"step": step, "saved_at": saved_at}))


def test_the_newest_are_kept_in_the_order_of_saving(tmp_path):
    # Resumed from 10 after 20 and 30 had been saved: 15 is the newest, though its number is not.
    for saved_at, step in enumerate([10, 20, 30, 15]):
        make_complete(tmp_path, step, saved_at)
    checkpoint.prune(tmp_path, None)
    assert len(checkpoint.complete(tmp_path)) == 4
    checkpoint.prune(tmp_path, 2)
    assert [path.name for path in checkpoint.complete(tmp_path)] == [
        "checkpoint-30",
        "checkpoint-15",
    ]


def test_what_resume_from_checkpoint_means(tmp_path, monkeypatch):
    def find(value, **options):
        return checkpoint.find(dataclasses.replace(CONFIG, resume_from_checkpoint=value, **options))

    assert find(None) is None and find("False") is None
    run = tmp_path / "runs" / "sums"
    run.mkdir(parents=True)
    with pytest.raises(ValueError, match="no complete checkpoint.*--output_dir"):
        find("True", output_dir=str(run))
    make_complete(run, 3, 0)
    make_complete(run, 6, 1)
    (run / "checkpoint-9.part").mkdir()
    assert find("true", output_dir=str(run)) == run / "checkpoint-6"
    assert find(str(run / "checkpoint-3")) == run / "checkpoint-3"
    with pytest.raises(ValueError, match="checkpoint-9.part: not a complete checkpoint"):
        find(str(run / "checkpoint-9.part"))
    state = run / "checkpoint-3" / checkpoint.STATE
    state.write_text(json.dumps({"step": 3, "saved_at": 0, "env": "arithmetic", "model": "other"}))
    with pytest.raises(ValueError, match="checkpoint-3 was saved with model='other'.*smollm2"):
        find(str(run / "checkpoint-3"))
    monkeypatch.chdir(tmp_path)
    assert find("True", run_name="sums") == run / "checkpoint-6"
    (tmp_path / "runs" / "latest").symlink_to("sums")
    assert find("True") == run / "checkpoint-6"


@pytest.mark.parametrize(
    "options, steps",
    [
        ({"save_steps": 3}, [3, 6, 7]),  # the last step too, in a run long enough to save
        ({"save_steps": 8}, []),
        ({"save_steps": 0.5, "max_steps": 8}, [4, 7]),
        ({"save_strategy": "epoch"}, [3, 5, 7]),  # 0.4 passes a step: 1.2 after 3, 2.0 after 5
        ({"save_strategy": "no", "save_steps": 1}, []),
    ],
)
def test_when_a_checkpoint_is_due(options, steps):
    config = dataclasses.replace(CONFIG, **options)
    saves = checkpoint.Checkpoints.__new__(checkpoint.Checkpoints)
    saves.strategy, saves.every = config.save_strategy, config.steps_of("save_steps")
    saves.epoch, saves.saved_step = 0.0, None
    saved = []
    for step in range(1, 8):
        if saves.is_due(step, 0.4 * step):
            saved.append(step)
            saves.saved_step = step
    if saves.is_due(7, saves.epoch, last=True):
        saved.append(7)
    assert saved == steps


def test_a_prompt_is_used_up_once_all_of_its_group_is_trained_or_dropped():
    def sample(i, group_id, n, closes_group):  # they share no tokens
        trained = np.arange(n) == n - 1
        arrays = {"top_ids": np.zeros((1, 0), np.int32), "top_log_probs": np.zeros((1, 0))}
        arrays |= {"set_ids": None, "set_offsets": None, "sampler_log_probs": np.zeros(n)}
        versions = np.where(trained, 0, -1)
        return Sample(
            input_ids=100 * i + np.arange(n, dtype=np.int32), trained=trained, versions=versions,
            group_id=group_id, closes_group=closes_group, **arrays,
        )  # fmt: skip

    # A row of 20 tokens takes two samples of 8. Group 3 ends with one that is too long.
    stream = [
        (2, 8, True),
        (3, 8, False),
        (0, 8, False),
        (3, 21, True),
        (4, 8, True),
        (0, 8, False),
    ]
    stream = [sample(i, *numbers) for i, numbers in enumerate([*stream, (7, 8, True)])]
    options = dict(token_budget=20, world_size=1, gradient_accumulation_steps=1, first_step=1)
    plans = list(planner.plan_steps(stream, **options))
    groups = [[s.group_id for s in plan.rows[0].samples] for plan in plans]
    assert groups == [[2, 3], [0, 4], [0, 7]]

    feed = Feed.__new__(Feed)  # without worker and planner
    feed.step, feed.planner = 3, type("Planner", (), {"left_over": None})
    feed.next_prompt, feed.used, feed.n_prompts, feed.dump = 0, set(), 100, None
    feed.worker = type("Worker", (), {"drain_ended": lambda self: (gone.pop(0), [])})()
    gone = [[1], [5], [], [0]]  # without samples, such as groups of equal rewards
    seen = []
    for feed.plan in [*plans, None]:
        feed._use_prompts()
        seen.append((feed.next_prompt, sorted(feed.used)))
    # 0 is open until the end, then it is dropped; 6 is still under way.
    assert seen == [(0, [1, 2]), (0, [1, 2, 3, 4, 5]), (0, [1, 2, 3, 4, 5, 7]), (6, [7])]
    assert feed.epoch == (6 + 1) / 100
