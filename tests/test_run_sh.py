"""The README's first command, with a tiny model: it starts its own server, and leaves nothing."""

import os
import re
import signal
import subprocess
import sys
import time

import pytest
from test_end_to_end import ROOT, TASK, finish, group_is_gone

pytestmark = pytest.mark.server


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


def test_run_sh_trains_draws_and_leaves_nothing(own_folder, tmp_path):
    process = start_run_sh(own_folder, tmp_path, "--max_steps", "2")
    code, output = finish(process, tmp_path, timeout=300)
    assert code == 0, output[-3000:]
    assert re.search(r"mean reward: 0\.\d+ in the first 2 steps", output)
    assert re.search(r"run\.sh: \d+\.\d minutes in all, exit code 0", output)
    assert (tmp_path / "run/final/config.json").exists()
    assert group_is_gone(process) and ours(own_folder) == []


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
