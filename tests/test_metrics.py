"""metrics.py and plot.py: windows worked by hand, broken sinks, METRICS.md, pictures.

Run: pytest tests/test_metrics.py
"""

import json
import math
import random
import re
import sys
import types
from pathlib import Path

import pytest

import metrics as m
import plot
from metrics import NAN, Metrics

ROOT = Path(__file__).parent.parent


def synthetic_run(steps=60, seed=0, speed=1.0):
    """Windows that look like a run on one-digit sums: reward climbs, entropy falls, groups drop."""
    rng = random.Random(seed)
    windows, tokens = [], 0
    for step in range(1, steps + 1):
        right = 0.2 + 0.74 / (1 + math.exp(-10 * (speed * step / steps - 0.4)))
        noisy = min(max(right + rng.gauss(0, 0.04), 0), 1)
        dropped = min(max(right**8 + (1 - right) ** 8 + rng.gauss(0, 0.05), 0), 1)
        wait, train, sync = abs(rng.gauss(2.0 if step > 1 else 9.0, 0.6)), rng.gauss(3.4, 0.2), 0.22
        step_s, trained = wait + train + sync + 0.35, int(rng.gauss(900, 60))
        tokens += 3 * trained
        windows.append(
            {
                "step": step,
                "time": 1.8e9 + 6.0 * step,
                "loss": rng.gauss(0, 0.01),
                "num_tokens": tokens,
                "reward": noisy,
                "reward_kept": 0.5 + 0.35 * (noisy - 0.5),
                "reward_dropped": NAN if dropped < 0.02 else min(1.0, right + 0.05),
                "frac_reward_zero_std": dropped,
                "completions/clipped_ratio": 0.3 * (1 - right),
                "completions/duplicate_frac": 0.1 + 0.7 * right**2,
                "entropy": 1.6 * (1 - right) + 0.05,
                "completions/mean_length": 30 - 20 * right + rng.gauss(0, 0.5),
                "completions/mean_terminated_length": 26 - 17 * right,
                "completions/max_length": 64,
                "sampling/importance_sampling_ratio/mean": 1 + rng.gauss(0, 0.01),
                "sampling/sampler_mass": 0.93 + 0.06 * right,
                "sampling/masked_mean": 0.004,
                "sample/staleness_mean": 1.4 + rng.gauss(0, 0.2),
                "sample/staleness_max": rng.choice([2, 3, 3, 4]),
                "perf/step_s": step_s,
                "perf/rollout_wait_s": wait,
                "perf/fwd_bwd_s": train,
                "perf/optimizer_s": 0.15,
                "perf/weight_sync_s": sync if step % 2 else NAN,
                "rollout/generated_tokens_per_s": 330 + rng.gauss(0, 15),
                "perf/wall_clock_forwarded_tokens_per_s": 3 * trained / step_s,
                "perf/wall_clock_trained_tokens_per_s": trained / step_s,
            }
        )
    return windows


def write_run(folder, windows):
    folder.mkdir(parents=True)
    write = m.jsonl_sink(folder / "metrics.jsonl")
    for window in windows:
        write(window["step"], window)
    return str(folder)


# ---- reduction --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name, how",
    [
        ("sample/dropped_stale_count", "sum"),
        ("tools/search/call_count", "sum"),
        ("tools/max/call_count", "sum"),  # only the last part decides: a tool may be named max
        ("rollout/max_retry_count", "sum"),  # count goes first
        ("rewards/count_words/mean", "mean"),
        ("rollout/discount", "mean"),
        ("env/minutes", "mean"),
        ("completions/max_length", "max"),
        ("clip_ratio/high_max", "max"),
        ("reward_max", "max"),
        ("sampling/importance_sampling_ratio/min", "min"),
        ("clip_ratio/low_min", "min"),
        ("num_tokens", "last"),
        ("eval/failed_count", "last"),
        ("eval/sync_held_s", "mean"),
        ("perf/step_s", "mean"),
        ("reward", "mean"),
    ],
)
def test_the_name_decides_the_reduction(name, how):
    assert m.reduction(name) == how


def test_counts_sum_extremes_are_extremes_means_are_weighted():
    metrics = Metrics()
    metrics.extend(
        [
            ("rollout/vllm_retry_count", 2, 1.0),
            ("completions/max_length", 7, 1.0),
            ("completions/min_length", 7, 1.0),
            ("reward", 1.0, 3.0),
            ("num_tokens", 10, 1.0),
        ]
    )
    metrics.extend(
        [
            ("rollout/vllm_retry_count", 3, 5.0),
            ("completions/max_length", -2, 9.0),
            ("completions/min_length", -2, 9.0),
            ("reward", 0.0, 1.0),
            ("num_tokens", 25, 1.0),
        ]
    )
    window = metrics.flush(4)
    assert window["step"] == 4
    assert window["rollout/vllm_retry_count"] == 5  # 2 + 3; weights belong to means only
    assert window["completions/max_length"] == 7 and window["completions/min_length"] == -2
    assert window["reward"] == 0.75  # (1 * 3 + 0 * 1) / 4
    assert window["num_tokens"] == 25  # a running total


def test_a_rate_is_total_over_total_not_a_mean_of_rates():
    metrics = Metrics()
    # 100 tokens in 1 s, then 100 tokens in 4 s: 200 / 5 = 40 tokens/s; the mean of rates is 62.5
    for tokens, seconds in ((100, 1), (100, 4)):
        metrics.record("perf/wall_clock_trained_tokens_per_s", tokens / seconds, seconds)
    assert metrics.flush(1)["perf/wall_clock_trained_tokens_per_s"] == 40


def test_a_rate_over_no_time_leaves_no_trace():
    metrics = Metrics()
    metrics.record("rollout/generated_tokens_per_s", 0.0, 0.0)
    assert "rollout/generated_tokens_per_s" not in metrics.flush(1)


def test_nan_is_left_out_but_a_nan_loss_stays_nan():
    metrics = Metrics()
    for value in (NAN, 1.0, 3.0):
        metrics.record("reward", value)
        metrics.record("completions/max_length", value)
        metrics.record("rollout/vllm_retry_count", value)
        metrics.record("loss", value)
    window = metrics.flush(1)
    assert window["reward"] == 2  # (1 + 3) / 2: an unscored rollout does not blank the others
    assert window["completions/max_length"] == 3 and window["rollout/vllm_retry_count"] == 4
    assert math.isnan(window["loss"])


def test_a_window_forgets_the_one_before():
    metrics = Metrics()
    metrics.record("reward", 1.0)
    metrics.flush(1)
    metrics.record("reward", 0.0)
    assert metrics.flush(2)["reward"] == 0.0
    assert "reward" not in metrics.flush(3)


def test_what_comes_after_the_last_step_joins_its_window(tmp_path):
    metrics = Metrics(tmp_path, report_to="none")
    metrics.declare(["entropy", "x_count"])
    metrics.extend([("reward", 0.5, 1.0), ("x_count", 2, 1.0)])
    metrics.flush(3)
    metrics.finish(3)  # nothing came: no line
    metrics.record("eval/pass_at_1", 0.25)
    metrics.extend([("reward", 0.0, 3.0), ("x_count", 1, 1.0), ("completions/max_length", 7, 1.0)])
    metrics.finish(3)
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 2
    (window,) = m.read_windows(tmp_path / "metrics.jsonl")
    assert window["reward"] == 0.125  # (0.5 * 1 + 0 * 3) / 4
    assert window["x_count"] == 2 + 1 and window["completions/max_length"] == 7
    assert window["eval/pass_at_1"] == 0.25 and math.isnan(window["entropy"])
    metrics.record("reward", 1.0)
    metrics.finish(4)  # a last window that is shorter than the others
    assert [w["step"] for w in m.read_windows(tmp_path / "metrics.jsonl")] == [3, 4]
    resumed = Metrics(tmp_path, report_to="none", first_step=4)
    resumed.record("sampling/sync_check_max", 0.1)
    resumed.finish(4)  # no step was left to do
    assert m.read_windows(tmp_path / "metrics.jsonl")[-1]["reward"] == 1.0
    hopeless = Metrics(tmp_path / "new", report_to="none")
    hopeless.record("frac_reward_zero_std", 1.0)
    hopeless.finish(0)  # all groups were dropped
    assert [w["step"] for w in m.read_windows(tmp_path / "new/metrics.jsonl")] == [0]


def test_declared_names_are_in_an_empty_window():
    metrics = Metrics()
    metrics.declare(m.applicable("tools", "moe", rewards=["correct"], tools=["search", "python"]))
    window = metrics.flush(1)
    assert math.isnan(window["tools/failure_frequency"])
    assert window["sample/dropped_stale_count"] == 0
    assert window["tools/python/call_count"] == 0 and "tools/search/latency_s" in window
    assert math.isnan(window["rewards/correct/mean"]) and "aux_loss" in window
    assert "sampling/sampler_mass" not in window and not [name for name in window if "{" in name]


def test_negative_or_nan_weight_is_an_error():
    for weight in (-1.0, NAN):
        with pytest.raises(ValueError, match="metric reward: weight"):
            Metrics().record("reward", 1.0, weight)


def test_merged_windows_reduce_by_name():
    merged = m.merge(
        [
            {"step": 1, "reward": 0.2, "x_count": 1, "x_max": 5, "num_tokens": 10},
            {"step": 2, "reward": NAN, "x_count": 2, "x_max": 3, "num_tokens": 20},
            {"step": 3, "reward": 0.4, "x_count": 0, "x_max": NAN, "num_tokens": 30},
        ]
    )
    assert merged == {
        "step": 3,
        "reward": pytest.approx(0.3),
        "x_count": 3,
        "x_max": 5,
        "num_tokens": 30,
    }


def test_compare_looks_four_blocks_back():
    windows = [{"step": step} for step in range(1, 21)]
    # blocks of 2: now is 19 and 20, before is 11 and 12
    now, before = m.compare(windows, 2)
    assert (now["step"], before["step"]) == (20, 12)
    assert m.compare(windows[:3], 2)[1] == {"step": 1}  # what there is
    assert m.compare(windows[:2], 2)[1] == {}


# ---- sinks ------------------------------------------------------------------------------------


def test_jsonl_round_trip_with_null_for_what_is_not_finite(tmp_path):
    metrics = Metrics(tmp_path / "run", report_to="none")
    for value in (0.1, NAN, math.inf):
        metrics.record("loss", value)
        metrics.flush(len(metrics.history) + 1)
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    strict = [json.loads(line, parse_constant=pytest.fail) for line in lines]  # no NaN literals
    assert [line["loss"] for line in strict] == [0.1, None, None]
    windows = m.read_windows(tmp_path / "run" / "metrics.jsonl")
    assert [window["step"] for window in windows] == [1, 2, 3]
    assert windows[0]["time"] > 1e9 and windows[0]["loss"] == 0.1 and math.isnan(windows[1]["loss"])


def test_a_resumed_run_replaces_what_came_after_its_checkpoint(tmp_path):
    file = tmp_path / "metrics.jsonl"
    file.write_text(
        '{"step": 1, "reward": 1}\n{"step": 2, "reward": 2}\n'
        '{"step": 3, "reward": 3}\n{"step": 4, "rew'
    )  # killed while writing
    Metrics(tmp_path, report_to="none", first_step=1).flush(2)
    windows = m.read_windows(file)
    assert [window["step"] for window in windows] == [1, 2] and "reward" not in windows[1]


def test_a_broken_sink_warns_once_and_the_run_goes_on(tmp_path, capsys):
    metrics = Metrics(tmp_path, report_to="none")
    calls = []

    def broken(step, window):
        calls.append(step)
        raise ConnectionError("no route")

    metrics.sinks["wandb"] = (broken, lambda: None)
    metrics.sinks["jsonl"] = (broken, lambda: None)
    for step in (1, 2, 3):
        metrics.flush(step)
    metrics.close()
    # the tracker is switched off after its first failure; the file is tried again each time
    assert calls == [1, 1, 2, 3]
    warnings = capsys.readouterr().err.splitlines()
    assert len(warnings) == 2 and "wandb" in "".join(warnings) and "no route" in warnings[0]


def test_a_full_disk_costs_lines_not_the_run(tmp_path, capsys):
    metrics = Metrics(tmp_path / "run", report_to="none")
    (tmp_path / "run").rename(tmp_path / "gone")
    metrics.flush(1)
    (tmp_path / "gone").rename(tmp_path / "run")
    metrics.flush(2)
    assert [w["step"] for w in m.read_windows(tmp_path / "run" / "metrics.jsonl")] == [2]


def story(reward):
    names = ("group", "rollout", "rewards", "advantage", "versions", "generated_tokens")
    messages = {"prompt": [{"content": "2+2?"}], "completion": [{"content": "4"}]}
    return dict.fromkeys(names) | messages | {"reward": reward}


def test_trackers_get_finite_values_and_the_step(tmp_path, monkeypatch):
    events = []
    for name in ("trackio", "wandb"):
        monkeypatch.setitem(
            sys.modules,
            name,
            types.SimpleNamespace(
                init=lambda **kw: events.append((kw["project"], kw["name"], kw["config"])),
                log=lambda values, step: events.append((values, step)),
                Trace=lambda messages, metadata: (messages, metadata["reward"]),
                finish=lambda: events.append("finish"),
            ),
        )
    metrics = Metrics(tmp_path / "sums", report_to="trackio, wandb", config={"seed": 3})
    metrics.record("reward", 0.5)
    metrics.declare(["entropy"])  # NaN: no point
    metrics.trace([story(i) for i in range(m.TRACES + 1)])
    metrics.flush(7)
    metrics.flush(8)  # a window forgets the conversations of the one before
    metrics.close()
    metrics.close()
    # trackio gets the first conversations as traces, wandb none
    traces = [([{"content": "2+2?"}, {"content": "4"}], i) for i in range(m.TRACES)]
    assert events[:2] == [("espalier", "sums", {"seed": 3})] * 2
    assert events[2:4] == [({"reward": 0.5, "rollouts": traces}, 7), ({"reward": 0.5}, 7)]
    assert events[4:] == [({}, 8)] * 2 + ["finish"] * 2


def test_a_tracker_that_is_not_installed_is_a_warning(tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)  # makes its import fail
    Metrics(tmp_path, report_to="wandb").flush(1)
    assert "wandb sink is switched off" in capsys.readouterr().err
    with pytest.raises(ValueError, match="report_to .*mlflow.*: must be some of trackio"):
        Metrics(tmp_path, report_to="mlflow")


def test_tensorboard_is_written_if_installed(tmp_path):
    pytest.importorskip("tensorboard")
    assert m.sink_names("auto") == ["tensorboard"] and m.sink_names("none") == []
    metrics = Metrics(tmp_path)
    metrics.record("reward", 0.25)
    metrics.flush(3)
    metrics.close()
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [(event.step, event.value) for event in events.Scalars("reward")] == [(3, 0.25)]


def test_the_bar_counts_steps_and_lines_go_past_it(tmp_path, capsys):
    pytest.importorskip("tqdm")
    metrics = Metrics(tmp_path, report_to="none", total_steps=4, disable_tqdm=False)
    metrics.extend([("loss", 0.5, 1.0), ("reward", 0.25, 1.0)])
    metrics.flush(2)
    metrics.close()
    said = capsys.readouterr()
    assert "step 2/4  reward  0.250" in said.out
    assert "2/4" in said.err and "loss 0.5000, reward 0.250" in said.err
    assert Metrics(tmp_path, report_to="none").bar is None  # not on a terminal


def test_the_console_line_has_the_figures_and_leaves_out_unknown_ones():
    window = {
        "reward": 0.6125,
        "reward_kept": 0.48,
        "loss": -0.0123,
        "perf/step_s": 8.44,
        "perf/wall_clock_trained_tokens_per_s": 1234.4,
        "sample/staleness_mean": 1.25,
        "perf/rollout_wait_s": 3.1,
        "perf/weight_sync_s": NAN,
    }
    assert (
        m.step_line(7, window, total_steps=20).split()
        == (
            "step 7/20 reward 0.613 kept 0.480 loss -0.0123 tok/s 1,234 stale 1.2 wait 3.1s "
            "sync - of 8.4s"
        ).split()
    )
    assert "MFU 38.2%" in m.step_line(7, window | {"perf/fwd_bwd_mfu": 38.2})
    assert m.step_line(7, {}).split() == "step 7 reward - kept - loss nan".split()
    assert "\033[31m" in m.step_line(7, {"loss": NAN}, color=True)  # red


# ---- METRICS.md against the code --------------------------------------------------------------


def table(heading):
    section = (ROOT / "METRICS.md").read_text().split(f"## {heading}\n")[1].split("\n## ")[0]
    rows = [
        line.strip().strip("|").split(" | ")
        for line in section.splitlines()
        if line.startswith("| `")
    ]
    assert all(len(row) == 6 for row in rows), [row for row in rows if len(row) != 6]
    return {row[0].strip(" `"): [cell.strip(" `|") for cell in row[1:]] for row in rows}


SPEC, OURS = table("Names of the specification"), table("Names of our own")
FILES = ["grpo.py", "update.py", "feed.py", "rollout.py", "load.py", "scoring.py"]
FILES += ["tools.py", "environments.py", "planner.py", "loss.py", "sync.py", "evaluate.py"]


def test_the_table_and_the_code_name_the_same_metrics():
    assert len(SPEC) == 97  # the specification's chapter, counted once
    assert not SPEC.keys() & OURS.keys()
    assert SPEC.keys() | OURS.keys() == {n for names in m.NAMES.values() for n in names.split()}
    always = m.NAMES["always"].split()
    for name, (meaning, _, reduction, where, condition) in (SPEC | OURS).items():
        assert reduction == m.reduction(name), name
        assert meaning and where in [*FILES, "not yet"], name
        assert (condition == "") == (name in always), name


def test_units_follow_the_names():
    for name, (_, unit, *_) in (SPEC | OURS).items():
        last = name.rpartition("/")[2]
        if last.endswith("tokens_per_s"):
            assert unit == "1/s", name
        elif last.endswith("_s"):
            assert unit == "s", name
        elif last.endswith("_frac"):
            assert unit == "0..1", name


# loss.py sums these over ranks; finish_metrics makes sampling/effective_sample_frac of them
INTERMEDIATE = {"sampling/kept_weight", "sampling/kept_weight_square"}


@pytest.mark.parametrize("file", FILES)
def test_each_metric_is_recorded_where_the_table_says(file):
    """Each name stands in its file as a string, at most with {placeholders} of an f-string, so that
    a reader can search for it; and each string that looks like a metric is in METRICS.md."""
    if not (ROOT / file).exists():
        pytest.skip(f"{file} is not part of this checkout")
    literals = set(re.findall(r"[\"']([\w/{}.]+)[\"']", (ROOT / file).read_text()))
    patterns = {text: re.compile(re.sub(r"{[^{}]+}", "[^/]+", text)) for text in literals}
    for name, row in (SPEC | OURS).items():
        if row[3] == file:
            found = [text for text, pattern in patterns.items() if pattern.fullmatch(name)]
            assert found, f"{file} never records {name}"
    families = {name.split("/")[0] for name in SPEC | OURS if "/" in name}
    for text, pattern in patterns.items():
        if "/" in text and text.split("/")[0] in families and text not in INTERMEDIATE:
            assert any(map(pattern.fullmatch, SPEC | OURS)), f"{text} is not in METRICS.md"


# ---- plot -------------------------------------------------------------------------------------


def png_size(path):
    data = Path(path).read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    return int.from_bytes(data[16:20], "big"), int.from_bytes(data[20:24], "big")


def test_plot_draws_one_run(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    run = write_run(tmp_path / "sums", synthetic_run())
    plot.main([run])
    assert capsys.readouterr().out.strip() == f"{run}/plot.png"
    width, height = png_size(tmp_path / "sums" / "plot.png")
    assert height > width > 1000
    plot.main([run, "--reward_only", "-o", str(tmp_path / "reward.png")])
    width, height = png_size(tmp_path / "reward.png")
    assert width > 2 * height


def test_plot_draws_evaluations_and_fills_three_columns(tmp_path):
    pytest.importorskip("matplotlib")
    windows = synthetic_run()
    for window in windows[9::10]:
        window |= {"eval/pass_at_1": window["reward"], "eval/pass_at_k": 1.0}
    run = write_run(tmp_path / "sums", windows)
    plot.main([run])
    width, height = png_size(tmp_path / "sums" / "plot.png")
    assert width > height  # nine panels
    steps, values = plot.curves([windows], "eval/pass_at_1")
    assert steps.tolist() == [10, 20, 30, 40, 50, 60]


def test_plot_leaves_out_panels_without_data_and_survives_one_step(tmp_path):
    pytest.importorskip("matplotlib")
    run = write_run(tmp_path / "short", [{"step": 1, "time": 0.0, "reward": 0.5, "entropy": NAN}])
    plot.main([run, "-o", str(tmp_path / "short.png")])
    assert png_size(tmp_path / "short.png")[1] < 1000  # a single panel


def test_seeds_of_one_setup_share_a_band(tmp_path):
    pytest.importorskip("matplotlib")
    runs = [
        write_run(tmp_path / name, synthetic_run(steps=20, seed=seed))
        for seed, name in enumerate(["fast-seed0", "fast-seed1", "slow"])
    ]
    setups = plot.by_setup([plot.load(run) for run in runs])
    assert {name: len(seeds) for name, seeds in setups.items()} == {"fast": 2, "slow": 1}
    plot.main([*runs, "-o", str(tmp_path / "both.png")])
    assert png_size(tmp_path / "both.png")[0] > 1000


def test_minutes_count_from_the_start_of_the_first_step(tmp_path):
    pytest.importorskip("matplotlib")
    windows = [
        {"step": 1, "time": 1000.0, "perf/step_s": 30.0, "reward": 0.0},
        {"step": 2, "time": 1060.0, "perf/step_s": 60.0, "reward": 1.0},
    ]
    run = write_run(tmp_path / "run", windows)
    minutes, values = plot.curves([plot.load(run)[1]], "reward", "minutes")
    assert minutes.tolist() == [0.5, 1.5] and values.tolist() == [[0.0, 1.0]]
    plot.main([run, "--minutes"])
    assert png_size(tmp_path / "run" / "plot.png")[0] > 500


def test_curves_interpolate_within_a_run_only():
    a = [{"step": 1, "x": 1.0}, {"step": 3, "x": 3.0}]
    b = [{"step": 2, "x": 5.0}, {"step": 3, "x": NAN}]
    steps, values = plot.curves([a, b], "x")
    assert steps.tolist() == [1, 2, 3] and values[0].tolist() == [1, 2, 3]
    assert str(values[1].tolist()) == "[nan, 5.0, nan]"
    assert plot.curves([a, b], "y") is None


def test_time_parts_add_up_to_the_step():
    window = {
        "step": 1,
        "perf/step_s": 10.0,
        "perf/rollout_wait_s": 4.0,
        "perf/fwd_bwd_s": 3.0,
        "perf/weight_sync_s": NAN,
    }
    parts = plot.time_parts([[window]])[1]
    assert {label: seconds.tolist() for label, seconds in parts.items()} == {
        "wait": [4.0],
        "fwd+bwd": [3.0],
        "other": [3.0],
    }


def test_text_shows_the_course_and_the_diagnosis(tmp_path, capsys):
    run = write_run(tmp_path / "sums", synthetic_run())
    (tmp_path / "sums" / "config.json").write_text('{"max_staleness": 4, "num_generations": 8}')
    plot.main([run, "--text"])
    out = capsys.readouterr().out
    assert "sums: 60 steps, 6 min" in out and "sampling/sampler_mass" in out
    assert "a step: wait" in out and "generation-bound: training waited" in out
    assert max(map(len, out.splitlines()[:20])) <= 90


def test_plot_explains_a_missing_run_and_an_empty_one(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit, match="no run at runs/latest.*run.sh"):
        plot.main([])
    (tmp_path / "runs" / "new").mkdir(parents=True)
    (tmp_path / "runs" / "new" / "metrics.jsonl").write_text("")
    with pytest.raises(SystemExit, match="has no line yet"):
        plot.main(["new"])
    with pytest.raises(SystemExit, match="no run at odl. Runs here: runs/new"):
        plot.main(["odl"])
