"""The README's first command, with a tiny model: interrupted, it leaves nothing (a whole run:
test_deltanet.py); and which GPUs it gives to whom."""

import os
import signal
import subprocess
import sys
import time

import pytest
from test_end_to_end import ROOT, TASK, finish


def start_run_sh(folder, tmp_path, *options):
    """run.sh as a terminal starts it: in the foreground, so that it hears Ctrl-C."""
    (tmp_path / "share_even.py").write_text(TASK)
    command = ["bash", "run.sh", "--model", str(folder), "--env", str(tmp_path / "share_even.py")]
    command += ["--output_dir", str(tmp_path / "run"), "--report_to", "none", *options]
    with open(tmp_path / "out", "wb") as out:
        return subprocess.Popen(
            command,
            cwd=ROOT,
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env=os.environ | {"PYTHON": sys.executable, "CUDA_VISIBLE_DEVICES": ""},
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
        )


def ours(folder):
    """Command lines of processes that serve or train the folder's model."""
    found = subprocess.run(["pgrep", "-af", str(folder)], capture_output=True, text=True).stdout
    return [line for line in found.splitlines() if "pgrep" not in line]


@pytest.fixture
def own_folder(tiny_folder, tmp_path):
    """The tiny model under a path of its own, which tells this test's processes from others'."""
    folder = tmp_path / "model"
    folder.symlink_to(tiny_folder)
    return folder


@pytest.mark.server
def test_ctrl_c_stops_server_and_trainer_within_20_seconds(own_folder, tmp_path):
    process = start_run_sh(own_folder, tmp_path, "--max_steps", "100000")
    deadline = time.monotonic() + 240
    while time.monotonic() < deadline and "step " not in (tmp_path / "out").read_text():
        assert process.poll() is None, (tmp_path / "out").read_text()[-3000:]
        time.sleep(0.5)
    os.killpg(process.pid, signal.SIGINT)
    code, _ = finish(process, tmp_path, timeout=20)
    assert code == 130
    assert ours(own_folder) == []


# Stands for an interpreter on a machine with GPUs: what would be started is written down instead.
# A plan is made once for all cases of the same options, which takes seconds.
INTERPRETER = """#!/bin/sh
case "$*" in
  *--prepare*)
    plan=$3; shift 3; made={plans}/$(echo "$*" | cksum | tr ' ' -)
    [ -e "$made" ] || {python} grpo.py --prepare "$made" "$@" || exit
    exec cp "$made" "$plan" ;;
  -c*) echo $$ ;;
  *grpo.py*) sleep 0.5; echo "train on $CUDA_VISIBLE_DEVICES: $*" >> {log} ;;
  *serve*nccl*) echo "serve on $CUDA_VISIBLE_DEVICES" >> {log}; exec sleep 30 ;;
  *serve*) echo "serve on a part of $CUDA_VISIBLE_DEVICES" >> {log}; exec sleep 30 ;;
esac
"""
BYTES = "--kv-cache-memory-bytes 8000000000"
THEIRS = ["--vllm_server_base_url", "http://127.0.0.1:9", "--env=countdown"]


def run_with_gpus(folder, tmp_path, interpreter, gpus, options=(), **variables):
    """run.sh to its end on a machine that has so many GPUs and that interpreter, it seems; -> what
    it did, and the lines that the interpreter wrote."""
    log = tmp_path / "log"
    log.unlink(missing_ok=True)
    scripts = {
        "nvidia-smi": f"#!/bin/sh\nfor i in $(seq {gpus}); do echo GPU $i; done\n",
        "python": interpreter.format(python=sys.executable, log=log, plans=tmp_path.parent),
    }
    for name, text in scripts.items():
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    environment = {n: v for n, v in os.environ.items() if n != "CUDA_VISIBLE_DEVICES"} | variables
    environment |= {"PYTHON": str(tmp_path / "python"), "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    command = ["bash", "run.sh", "--model", str(folder), *options]
    found = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    return found, log.read_text().splitlines() if log.exists() else []


@pytest.mark.parametrize(
    "gpus, options, variables, serving, training, processes, is_default_task",
    [
        (1, [], {}, ["a part of 0"], "0", 1, True),
        (4, [], {}, ["0", "1"], "2,3", 2, True),
        # NCCL, because rank 0 is on 3
        (4, [], {"TRAIN_GPUS": "3,0", "VLLM_GPUS": "0,1 2"}, ["0,1", "2"], "3,0", 2, True),
        (2, [], {"VLLM_GPUS": "0 0", "VLLM_ARGS": BYTES}, ["0", "0"], "1", 1, True),
        (4, THEIRS, {}, [], "0,1,2,3", 4, False),
        (8, [], {"CUDA_VISIBLE_DEVICES": "4,5"}, ["4"], "5", 1, True),
        (8, [], {"CUDA_VISIBLE_DEVICES": "6"}, ["a part of 6"], "6", 1, True),
        (8, THEIRS, {"CUDA_VISIBLE_DEVICES": "4,5"}, [], "4,5", 2, False),
    ],
)
def test_who_gets_which_gpus(
    tiny_folder, tmp_path, gpus, options, variables, serving, training, processes, is_default_task
):
    found, lines = run_with_gpus(tiny_folder, tmp_path, INTERPRETER, gpus, options, **variables)
    assert found.returncode == 0, found.stdout + found.stderr
    *servers, trainer = sorted(lines)
    assert servers == [f"serve on {devices}" for devices in serving]
    if serving:
        assert trainer.split("--vllm_server_base_url ")[1].count("http://") == len(serving)
    assert trainer.startswith(f"train on {training}:")
    assert ("--nproc-per-node" in trainer) == (processes > 1)
    assert processes == 1 or f"--nproc-per-node {processes} grpo.py" in trainer
    assert ("--digits 2" in trainer) == is_default_task


def test_two_servers_on_a_gpu_must_be_told_their_memory(tiny_folder, tmp_path):
    found, lines = run_with_gpus(tiny_folder, tmp_path, INTERPRETER, 4, VLLM_GPUS="1,0 0")
    assert found.returncode == 1 and lines == []
    assert "VLLM_GPUS='1,0 0' names GPU 0 twice" in found.stdout and BYTES in found.stdout


@pytest.mark.parametrize("restart_s", ["1", "600"])
def test_a_server_that_dies_is_started_again_but_not_at_once(tiny_folder, tmp_path, restart_s):
    dies = "[ -e {log}.died ] || {{ touch {log}.died; sleep 2; echo no memory; exit 3; }}"
    interpreter = INTERPRETER.replace("exec sleep", f"{dies}; exec sleep")
    interpreter = interpreter.replace("sleep 0.5", "sleep 6")
    found, lines = run_with_gpus(tiny_folder, tmp_path, interpreter, 2, RESTART_S=restart_s)
    assert "died; the end of runs/server.log:\nno memory\n" in found.stdout, found.stderr
    if restart_s == "1":
        assert found.returncode == 0
        assert lines[:2] == ["serve on 0", "serve on 0"] and lines[2].startswith("train on 1:")
        ports = {
            l.split(" port ")[1].split()[0] for l in found.stdout.splitlines() if "starting" in l
        }
        assert len(ports) == 1  # where the trainer looks for it
    else:
        assert found.returncode == 1 and lines == ["serve on 0"]
