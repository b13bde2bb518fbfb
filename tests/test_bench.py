"""The scripts in bench/ run: at tiny sizes, without peers, GPUs and compiled layers."""

import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
COMMANDS = (
    "step.py --tiny",
    "hybrid.py --tiny",
    "chat.py --conversations 2 --turns 4 --wait_s 0.01",
    "log_cost.py",
    "loss.py --device cpu",
)
ABSENT = re.compile(r"No module named '(trl|liger_kernel)'")  # peers, which are named and left out


@pytest.fixture(scope="module")
def outcomes():
    """command -> (exit code, what it printed); two run at a time."""

    def run(command):
        script, *options = command.split()
        done = subprocess.run(
            [sys.executable, f"bench/{script}", *options],
            cwd=ROOT,
            env=os.environ | {"TORCH_COMPILE_DISABLE": "1", "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=300,
        )
        return done.returncode, done.stdout

    with ThreadPoolExecutor(2) as pool:
        return dict(zip(COMMANDS, pool.map(run, COMMANDS), strict=True))


@pytest.mark.parametrize("command", COMMANDS)
def test_a_bench_runs_and_fails_in_no_part(outcomes, command):
    code, output = outcomes[command]
    assert code == 0, output[-3000:]
    errors = [line for line in output.splitlines() if re.search(r"\w(Error|Exception):", line)]
    assert [line for line in errors if not ABSENT.search(line)] == []
