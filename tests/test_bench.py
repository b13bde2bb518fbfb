"""The scripts in bench/ run: at tiny sizes, without peers, GPUs and compiled layers."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
ABSENT = re.compile(r"No module named '(trl|liger_kernel)'")  # peers, which are named and left out


@pytest.mark.parametrize(
    "command",
    [
        "log_cost.py",
        "chat.py --conversations 2 --turns 4 --wait_s 0.01",
        "loss.py --device cpu",
        "step.py --tiny",
        "hybrid.py --tiny",
    ],
)
def test_a_bench_runs_and_fails_in_no_part(command):
    script, *options = command.split()
    done = subprocess.run(
        [sys.executable, f"bench/{script}", *options],
        cwd=ROOT,
        env=os.environ | {"TORCH_COMPILE_DISABLE": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout[-3000:]
    errors = [line for line in done.stdout.splitlines() if re.search(r"\w(Error|Exception):", line)]
    assert [line for line in errors if not ABSENT.search(line)] == []
