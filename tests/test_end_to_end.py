"""The whole thing against a real vLLM server (its CPU build) with a tiny random model."""

import json
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from conftest import free_port

import dump
import metrics

pytestmark = pytest.mark.server
ROOT = Path(__file__).resolve().parent.parent

TASK = '''
config_overrides = {"max_completion_length": 12, "token_budget": 256, "num_generations": 4,
                    "learning_rate": 1e-3, "max_steps": 3, "check_sync_every": 1}

dataset = [{"prompt": [{"role": "user", "content": f"number {i}"}]} for i in range(64)]

def even(completion_ids, **columns):
    """A reward that a random model sometimes gets: the share of even ids."""
    return [sum(i % 2 == 0 for i in ids) / max(len(ids), 1) for ids in completion_ids]

def broken(completion_ids, **columns):
    raise ZeroDivisionError("the reward divides by zero")

reward_funcs = [even]
'''


def start_run(server, tmp_path, *options, task=TASK, processes=1, launch=(), out="out"):
    """Start the trainer on the tiny server; returns the process, its output in tmp_path/out."""
    file = tmp_path / "share_even.py"
    file.write_text(task)
    launcher = [sys.executable]
    if processes > 1:
        launch = ["--standalone", f"--nproc-per-node={processes}"]
    if launch:
        launcher += ["-m", "torch.distributed.run", *launch]
    command = [*launcher, "grpo.py", "--env", str(file), "--model", server.name]
    command += ["--vllm_server_base_url", server.url, "--output_dir", str(tmp_path / "run")]
    with open(tmp_path / out, "wb") as output:
        return subprocess.Popen(
            [*command, "--report_to", "none", *options],
            cwd=ROOT,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env=quiet(),
        )


def quiet():
    """The environment of a trainer: offline, on the CPU, one thread."""
    return os.environ | {"HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}


def finish(process, tmp_path, timeout=240):
    """-> (exit code, output)."""
    try:
        code = process.wait(timeout)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    return code, (tmp_path / "out").read_text()


def group_is_gone(process, within_s=20):
    """No process of the run's session is left."""
    deadline = time.monotonic() + within_s
    while time.monotonic() < deadline:
        try:
            os.killpg(process.pid, 0)
        except ProcessLookupError:
            return True
        time.sleep(0.2)
    return False


def windows(tmp_path):
    return metrics.read_windows(tmp_path / "run/metrics.jsonl")


@pytest.mark.parametrize("processes", [1, 2])
def test_three_steps_after_each_of_which_server_and_trainer_agree(tiny_server, tmp_path, processes):
    options = ["--temperature", "0.6"] if processes == 2 else []  # log-probs are those at it
    process = start_run(tiny_server, tmp_path, *options, processes=processes)
    code, output = finish(process, tmp_path)
    assert code == 0, output[-3000:]
    assert group_is_gone(process)
    steps = windows(tmp_path)
    assert [step["step"] for step in steps] == [1, 2, 3]
    for step in steps:
        assert step["sampling/sync_check_max"] < 1e-4  # float32 on both sides
        assert abs(step["loss"]) < 10 and step["grad_norm"] > 0
        # What a short step trains on may all have been scored in the window before it.
        if step["step"] == 1 or not math.isnan(step["completions/mean_length"]):
            assert 0 < step["reward"] < 1
        assert step["batch/packing_ratio"] > 1
        assert step["sample/staleness_max"] <= 4 and step["perf/weight_sync_s"] > 0
    # Before any update nothing separates the sampler from the policy but kernels.
    assert steps[0]["sampling/importance_sampling_ratio/max"] == pytest.approx(1, abs=1e-3)
    from transformers import AutoModelForCausalLM

    AutoModelForCausalLM.from_pretrained(tmp_path / "run/final")
    config = json.loads((tmp_path / "run/config.json").read_text())
    assert config["learning_rate"] == 1e-3 and config["num_generations"] == 4


def test_a_policy_in_bfloat16_starts_where_the_sampler_is(tiny_server, tmp_path):
    options = "--score_centering false --bf16 true --max_steps 1".split()
    process = start_run(tiny_server, tmp_path, *options)
    code, output = finish(process, tmp_path)
    assert code == 0, output[-3000:]
    (step,) = windows(tmp_path)
    assert step["grad_norm"] > 0
    # The server computes in float32; bfloat16 has 8 bits.
    assert step["sampling/importance_sampling_ratio/mean"] == pytest.approx(1, abs=2**-8)
    assert 1e-5 < step["sampling/sync_check_max"] < 0.1


def test_sequence_ratios_take_a_step(tiny_server, tmp_path):
    options = "--loss gspo --epsilon 3e-4 --epsilon_high 4e-4 --max_steps 1".split()
    process = start_run(tiny_server, tmp_path, *options)
    code, output = finish(process, tmp_path)
    assert code == 0, output[-3000:]
    assert windows(tmp_path)[0]["grad_norm"] > 0


def test_one_epoch_trains_every_prompt_and_ends_by_itself(tiny_server, tmp_path):
    task = TASK.replace("range(64)", "range(7)")
    options = ["--max_steps", "-1", "--num_train_epochs", "1", "--max_staleness", "100"]
    process = start_run(tiny_server, tmp_path, *options, task=task)
    code, output = finish(process, tmp_path)
    assert code == 0, output[-3000:]
    steps = windows(tmp_path)
    trained = sum(step["batch/samples_per_step"] for step in steps)
    # 7 prompts of 4 rollouts; a group of equal rewards is dropped, and counts toward the epoch
    assert trained % 4 == 0 and 20 <= trained <= 28, output[-3000:]
    assert steps[-1]["epoch"] == 1  # also if the last groups to end were dropped


# What may be null in a window of a run without tools and turns, each with its reason.
MAY_BE_NULL = {
    "perf/checkpoint_s": "no checkpoint was due",
    "rollout/fork_frac": "no second turn",
    "rollout/drift_tokens_mean": "no second turn",
    "rollout/drift_tokens_max": "no second turn",
    "rollout/score_block_s": "scoring was never behind",
    "rollout/backpressure_s": "generation was not held back",
    "reward_dropped": "no group was dropped",
    "completions/mean_terminated_length": "no rollout ended by itself",
    "completions/min_terminated_length": "no rollout ended by itself",
    "completions/max_terminated_length": "no rollout ended by itself",
    "sampling/sync_check_max": "no sync, so no proof of one",
    **dict.fromkeys(
        ["perf/weight_sync_s"]
        + [f"perf/weight_sync_{p}_s" for p in ("pause", "barrier", "transfer")],
        "the sync waited for an evaluation",
    ),
    **dict.fromkeys(
        [
            "rollout/generated_tokens_per_s",
            "rollout/concurrency",
            "rollout/concurrency_cap",
            "rollout/event_loop_lag_max_s",
        ],
        "recorded once a second, a step may be shorter",
    ),
    **dict.fromkeys(
        ["rollout/vllm_kv_cache_usage_frac", "rollout/vllm_running_requests"]
        + ["rollout/vllm_queued_requests"],
        "the server is polled every 5 seconds",
    ),
    **dict.fromkeys(
        ["reward", "reward_min", "reward_max", "frac_reward_zero_std", "rewards/even/mean"]
        + [f"completions/{n}" for n in "mean_length min_length max_length clipped_ratio".split()]
        + ["completions/duplicate_frac", "rollout/duration_s", "rollout/turns_mean"]
        + ["rollout/turns_max", "rollout/samples_per_rollout", "rollout/score_queue_size"]
        + ["rollout/score_s", "rollout/score_wait_s"],
        "no group was scored since the step before",
    ),
}


def test_ten_steps_can_be_seen_evaluated_and_replayed(tiny_server, tmp_path):
    """Two processes, then the same again with one: what was logged, dumped, evaluated."""
    options = [
        "--max_steps",
        "10",
        "--dump_rollouts",
        "--eval_env",
        str(tmp_path / "share_even.py"),
    ]
    options += ["--eval_steps", "4", "--eval_prompts", "6", "--eval_pass_reward", "0.5"]
    code, output = finish(start_run(tiny_server, tmp_path, *options, processes=2), tmp_path)
    assert code == 0, output[-3000:]
    run = tmp_path / "run"
    steps = metrics.read_windows(run / "metrics.jsonl")
    assert [step["step"] for step in steps] == list(range(1, 11))
    for name in metrics.applicable("score_centering", rewards=["even"]):
        values = [step[name] for step in steps]  # KeyError: it is not in the file
        if not all(map(math.isfinite, values)):
            assert name in MAY_BE_NULL, f"{name}: {values}"
    assert steps[-1]["epoch"] > steps[0]["epoch"] > 0

    # The folder says what was run, and on what.
    facts = json.loads((run / "run.json").read_text())
    assert facts["vllm"] and facts["torch"] == torch.__version__ and facts["processes"] == 2
    assert "grpo.py --env" in facts["command"] and len(facts["git_sha"]) in (0, 40)
    assert (run / "task.py").read_text() == TASK and (run / "git.diff").exists()
    assert (ROOT / "runs/latest").resolve() == run

    # Every evaluation under one version, the last one of the last weights.
    evaluated = [step for step in steps if "eval/step" in step]
    assert evaluated and evaluated[-1]["eval/step"] == 10
    stories = [json.loads(line) for line in (run / "eval.jsonl").read_text().splitlines()]
    for step in {story["step"] for story in stories}:
        mine = [story for story in stories if story["step"] == step]
        assert len(mine) == 6 * 4  # prompts x rollouts
        assert {version for story in mine for version in story["versions"]} == {step}
    last = [story["reward"] >= 0.5 for story in stories if story["step"] == 10]
    assert evaluated[-1]["eval/pass_at_1"] == pytest.approx(sum(last) / 24)

    # Every trained sample is in the dump, once, and in a line of a rollout.
    lines = dump.read_rollouts(run)
    assert len({(line["group"], line["rollout"]) for line in lines}) == len(lines)
    trained = [s for line in lines for s in line["samples"] if s["outcome"] == "trained"]
    assert len(trained) == sum(step["batch/samples_per_step"] for step in steps)
    for file, step in zip(dump.step_files(run), steps, strict=True):
        samples = dump.read_step(file).samples
        assert sum(s.trained.any() for s in samples) == step["batch/samples_per_step"]

    replay = [sys.executable, "grpo.py", "--replay", str(run), "--report_to", "none"]
    replay += ["--output_dir", str(tmp_path / "replay")]
    subprocess.run(replay, cwd=ROOT, check=True, capture_output=True, env=quiet(), timeout=200)
    again = metrics.read_windows(tmp_path / "replay/metrics.jsonl")
    assert len(again) == 10
    for live, replayed in zip(steps, again):
        assert replayed["loss"] == pytest.approx(live["loss"], abs=1e-5)
        assert replayed["grad_norm"] == pytest.approx(live["grad_norm"], rel=1e-5)
        assert replayed["num_tokens"] == live["num_tokens"]
        assert replayed["reward_kept"] == pytest.approx(live["reward_kept"], rel=1e-6)


def test_a_broken_reward_reaches_the_trainer_with_its_traceback(tiny_server, tmp_path):
    task = TASK.replace("reward_funcs = [even]", "reward_funcs = [even, broken]")
    process = start_run(tiny_server, tmp_path, task=task)
    code, output = finish(process, tmp_path)
    assert code == 1
    assert "ZeroDivisionError" in output and "the reward divides by zero" in output
    assert group_is_gone(process)


def test_a_stopped_run_leaves_no_process(tiny_server, tmp_path):
    process = start_run(tiny_server, tmp_path, "--max_steps", "100000")
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and not (tmp_path / "run/metrics.jsonl").exists():
        time.sleep(0.5)
    assert process.poll() is None, (tmp_path / "out").read_text()[-3000:]
    os.kill(process.pid, signal.SIGTERM)
    code, _ = finish(process, tmp_path, timeout=20)
    assert code == 143
    assert group_is_gone(process)


def test_a_trainer_that_waits_for_a_server_can_be_stopped(tiny_folder, tmp_path):
    nobody = SimpleNamespace(name=str(tiny_folder), url=f"http://127.0.0.1:{free_port()}")
    process = start_run(nobody, tmp_path)
    deadline = time.monotonic() + 120
    # the model is loaded meanwhile
    while time.monotonic() < deadline and "(10 s)" not in (tmp_path / "out").read_text():
        time.sleep(0.5)
    assert process.poll() is None, (tmp_path / "out").read_text()[-3000:]
    os.kill(process.pid, signal.SIGTERM)
    code, output = finish(process, tmp_path, timeout=20)
    assert code == 143 and f"waiting for the vLLM server at {nobody.url}" in output
    assert group_is_gone(process)


def test_a_server_that_disagrees_ends_the_run_before_its_first_step(tiny_server, tmp_path):
    strict = "import sync\nsync.sync_bounds = lambda dtypes: (0.0, 0.0)  # not even rounding\n"
    process = start_run(tiny_server, tmp_path, task=strict + TASK)
    code, output = finish(process, tmp_path)
    assert code == 1 and "does not hold the trainer's weights" in output
    assert "Traceback" not in output and not (tmp_path / "run/metrics.jsonl").exists()
    assert group_is_gone(process)


def test_two_launchers_train_as_two_machines_do(tiny_server, tmp_path):
    def launch(node, out):
        place = f"--nnodes=2 --nproc-per-node=1 --node-rank={node} --master-addr=127.0.0.1"
        arguments = [*place.split(), f"--master-port={port}"]
        options = ["--max_steps", "2", "--replicas", "2"]
        return start_run(tiny_server, tmp_path, *options, launch=arguments, out=out)

    port = free_port()
    other, first = launch(1, "out1"), launch(0, "out")
    code, output = finish(first, tmp_path)
    assert code == 0 and other.wait(60) == 0, output[-3000:]
    assert group_is_gone(first) and group_is_gone(other)
    assert [step["step"] for step in windows(tmp_path)] == [1, 2]
    assert "saved" in output and "saved" not in (tmp_path / "out1").read_text()
