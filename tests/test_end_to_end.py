"""The whole thing against a real vLLM server (its CPU build) with a tiny random model."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

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


def start_run(server, tmp_path, *options, task=TASK, processes=1):
    """Start the trainer on the tiny server; returns the process, its output in tmp_path/out."""
    file = tmp_path / "share_even.py"
    file.write_text(task)
    launcher = [sys.executable]
    if processes > 1:
        launcher += ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    command = [*launcher, "grpo.py", "--env", str(file), "--model", server.name]
    command += ["--vllm_server_base_url", server.url, "--output_dir", str(tmp_path / "run")]
    with open(tmp_path / "out", "wb") as out:
        return subprocess.Popen(
            [*command, "--report_to", "none", *options],
            cwd=ROOT,
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env=os.environ
            | {"HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"},
        )


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
    return [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("processes", [1, 2])
def test_three_steps_after_each_of_which_server_and_trainer_agree(tiny_server, tmp_path, processes):
    process = start_run(tiny_server, tmp_path, processes=processes)
    code, output = finish(process, tmp_path)
    assert code == 0, output[-3000:]
    assert group_is_gone(process)
    steps = windows(tmp_path)
    assert [step["step"] for step in steps] == [1, 2, 3]
    for step in steps:
        assert step["sampling/sync_check_max"] < 1e-4  # float32 on both sides
        assert abs(step["loss"]) < 10 and step["grad_norm"] > 0
        assert 0 < step["reward"] < 1 and step["batch/packing_ratio"] > 1
        assert step["sample/staleness_max"] <= 4 and step["perf/weight_sync_s"] > 0
    # Before any update nothing separates the sampler from the policy but kernels.
    assert steps[0]["sampling/importance_sampling_ratio/max"] == pytest.approx(1, abs=1e-3)
    from transformers import AutoModelForCausalLM

    AutoModelForCausalLM.from_pretrained(tmp_path / "run/final")
    config = json.loads((tmp_path / "run/config.json").read_text())
    assert config["learning_rate"] == 1e-3 and config["num_generations"] == 4


@pytest.mark.parametrize("loss", ["clipped", "cispo", "gspo", "dr_grpo"])
def test_every_loss_takes_a_step(tiny_server, tmp_path, loss):
    options = ["--score_centering", "false"] if loss == "clipped" else ["--loss", loss]
    options += ["--epsilon", "3e-4", "--epsilon_high", "4e-4"] if loss == "gspo" else []
    process = start_run(tiny_server, tmp_path, "--max_steps", "1", *options)
    code, output = finish(process, tmp_path)
    assert code == 0, output[-3000:]
    assert windows(tmp_path)[0]["grad_norm"] > 0


def test_one_epoch_trains_every_prompt_and_ends_by_itself(tiny_server, tmp_path):
    task = TASK.replace("range(64)", "range(7)")
    options = ["--max_steps", "-1", "--num_train_epochs", "1", "--max_staleness", "100"]
    process = start_run(tiny_server, tmp_path, *options, task=task)
    code, output = finish(process, tmp_path)
    assert code == 0, output[-3000:]
    trained = sum(step["batch/samples_per_step"] for step in windows(tmp_path))
    # 7 prompts of 4 rollouts; a group of equal rewards is dropped, and counts toward the epoch
    assert trained % 4 == 0 and 20 <= trained <= 28, output[-3000:]


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
