"""What a run records, how a window is reduced, and where it goes. CPU, no torch.

    metrics = Metrics("runs/sums", report_to="auto", total_steps=200)
    metrics.declare(applicable("score_centering", rewards=["correct"]))
    metrics.record("perf/fwd_bwd_forwarded_tokens_per_s", tokens / seconds, weight=seconds)
    metrics.extend(records)                    # (name, value, weight) tuples of the rollout process
    window = metrics.flush(step)               # reduce, write to every sink, start the next window

The name alone decides the reduction (`reduction`), so a producer cannot disagree with a reader:
    last path part contains the word "count"  ->  sum         sample/dropped_stale_count
    ... the word "max" or "min"               ->  extreme     completions/max_length
    num_tokens, learning_rate, epoch, eval/step  ->  last value  (running totals or settings)
    every other name                          ->  sum(value * weight) / sum(weight)
A rate recorded as (tokens / seconds, weight=seconds) thereby becomes total tokens / total seconds.

NaN means "there was nothing to measure": it is left out of its window, and a declared name with no
value at all is NaN (a count: 0). A NaN `loss` or `grad_norm` is not missing but broken, so it stays
NaN. In metrics.jsonl NaN and infinities are null; the other sinks get no point for them.

Left out: histograms, per-process curves. METRICS.md defines every name.
Test: pytest tests/test_metrics.py
"""

import contextlib
import functools
import importlib
import importlib.util
import json
import math
import os
import sys
import time
from collections import deque
from pathlib import Path

NAN = float("nan")

# Every name, by the condition under which it is logged. METRICS.md says what each one means.
NAMES = {
    "always": """
        loss grad_norm learning_rate epoch num_tokens entropy
        reward reward_group_std reward_kept reward_dropped reward_min reward_max
        frac_reward_zero_std rewards/{reward_func_name}/mean rewards/{reward_func_name}/group_std
        rewards/{reward_func_name}/unscored_count
        completions/mean_length completions/min_length completions/max_length
        completions/mean_terminated_length completions/min_terminated_length
        completions/max_terminated_length completions/clipped_ratio completions/duplicate_frac
        sampling/sampling_logp_difference/mean sampling/sampling_logp_difference/max
        sampling/importance_sampling_ratio/min sampling/importance_sampling_ratio/mean
        sampling/importance_sampling_ratio/max sampling/masked_mean sampling/missing_count
        sampling/effective_sample_frac sampling/sync_check_max kl_k3/sampler_policy
        clip_ratio/region_mean clip_ratio/low_mean clip_ratio/low_min clip_ratio/high_mean
        clip_ratio/high_max
        rollout/duration_s rollout/generated_tokens_per_s rollout/concurrency
        rollout/concurrency_cap rollout/turns_mean rollout/turns_max rollout/samples_per_rollout
        rollout/fork_frac rollout/drift_tokens_mean rollout/drift_tokens_max
        rollout/score_queue_size rollout/queue_size rollout/score_s rollout/score_wait_s
        rollout/score_block_s rollout/backpressure_s rollout/vllm_retry_count
        rollout/vllm_kv_cache_usage_frac rollout/vllm_running_requests
        rollout/vllm_queued_requests rollout/vllm_preemption_count
        rollout/filtered_count rollout/restarted_count rollout/failed_count
        rollout/event_loop_lag_max_s
        sample/forwarded_tokens_mean sample/forwarded_tokens_max sample/trained_tokens_mean
        sample/time_in_queue_s sample/staleness_mean sample/staleness_max
        sample/token_staleness_mean sample/dropped_stale_count
        batch/forwarded_tokens_per_step batch/trained_tokens_per_step batch/samples_per_step
        batch/groups_per_step batch/microbatches_per_step batch/masked_token_frac
        batch/samples_per_row batch/row_tokens_mean batch/row_tokens_max batch/row_fill_frac
        batch/row_imbalance batch/packing_ratio batch/pad_frac batch/dropped_oversize_count
        perf/step_s perf/fwd_bwd_s perf/fwd_s perf/optimizer_s perf/rollout_wait_s
        perf/checkpoint_s
        perf/weight_sync_s perf/weight_sync_pause_s perf/weight_sync_barrier_s
        perf/weight_sync_transfer_s perf/fwd_bwd_forwarded_tokens_per_s
        perf/wall_clock_forwarded_tokens_per_s perf/wall_clock_trained_tokens_per_s""",
    "tools": """
        tools/call_frequency tools/failure_frequency tools/latency_s tools/{tool_name}/latency_s
        tools/{tool_name}/call_count tools/{tool_name}/failure_count tools/unknown_name_count
        tools/parallel_calls_mean tools/loop_exhausted_frac tools/malformed_count
        tools/timeout_count tools/abandoned_count tools/context_exhausted_count""",
    "environment": "env/reset_s",
    "get_reward": "env/reward_s",
    "score_centering": "sampling/sampler_mass",
    "moe": "aux_loss",
    "fp16": "loss_scale skipped_step_count",
    "mfu": "perf/fwd_bwd_mfu perf/wall_clock_mfu",
    "evaluation": """
        eval/pass_at_1 eval/pass_at_k eval/reward eval/mean_length eval/clipped_ratio
        eval/failed_count eval/step eval/duration_s eval/sync_held_s""",
}
# An evaluation is one measurement: of two in a window the newer is shown (eval.jsonl has both).
LAST = {"step", "time", "num_tokens", "learning_rate", "epoch", *NAMES["evaluation"].split()}
LAST -= {"eval/sync_held_s"}
TRACES = 8  # conversations of a window that trackio gets: a group
BROKEN_IF_NAN = {"loss", "grad_norm"}


def applicable(*conditions, rewards=(), tools=()):
    """Names that a run with these conditions (keys of NAMES) logs; pass them to Metrics.declare."""
    fill = {"{reward_func_name}": rewards, "{tool_name}": tools}
    names = [name for key in ("always", *conditions) for name in NAMES[key].split()]
    for placeholder, values in fill.items():
        names = [
            name.replace(placeholder, value)
            for name in names
            for value in (values if placeholder in name else [""])
        ]
    return names


@functools.cache
def reduction(name):
    """'sum', 'min', 'max', 'last' or 'mean', from the name alone."""
    if name in LAST:
        return "last"
    words = name.rpartition("/")[2].split("_")
    for word, how in (("count", "sum"), ("max", "max"), ("min", "min")):
        if word in words:
            return how
    return "mean"


# ---- one window -------------------------------------------------------------------------------


def fold_(state, name, value, weight=1.0):
    """Add one record to state: name -> (accumulated value, accumulated weight). Changes state."""
    value, weight = float(value), float(weight)
    if not weight >= 0:
        raise ValueError(f"metric {name}: {weight=} must be a number >= 0")
    if math.isnan(value) and name not in BROKEN_IF_NAN:
        return
    how = reduction(name)
    if how == "mean" and weight == 0:  # a rate over no time, a mean over no samples
        return
    old, seen = state.get(name, (0.0, 0.0))
    if how == "mean":
        state[name] = (old + value * weight, seen + weight)
    elif how == "sum":
        state[name] = (old + value, 1.0)
    elif how == "last" or not seen:
        state[name] = (value, 1.0)
    else:
        state[name] = ((max if how == "max" else min)(old, value), 1.0)


def reduced(state):
    return {name: value / weight for name, (value, weight) in state.items()}


def merge(windows):
    """Several windows as one, by the same rule; each weighs the same, weights are not kept."""
    state = {}
    for window in windows:
        for name, value in window.items():
            fold_(state, name, value)
    return reduced(state)


def compare(windows, size):
    """(the newest `size` windows as one, the `size` windows four such blocks earlier as one)."""
    earlier = windows[-5 * size : -size]
    return merge(windows[-size:]), merge(earlier[:size])


class Metrics:
    """Collects records, reduces them once a window, and hands the window to the sinks.

    Without run_dir it writes nowhere: the ranks above 0 use it so.
    """

    def __init__(
        self,
        run_dir=None,
        *,
        report_to="auto",
        total_steps=None,
        first_step=0,
        disable_tqdm=None,  # no progress bar; None: unless on a terminal
        config=None,
    ):
        self.state, self.declared, self.traces = {}, [], []
        self.flushed = {}  # the state of the newest window
        self.history = deque(maxlen=500)  # windows for the diagnosis: bounded, about 8 KB each
        self.sinks, self.warned = {}, set()  # sink name -> (write, close)
        self.total_steps, self.first_step, self.bar = total_steps, first_step, None
        if run_dir is None:
            return
        trackers, run_dir = sink_names(report_to), Path(run_dir)
        run_dir.mkdir(parents=True, exist_ok=True)
        self.sinks["console"] = (self._console, self._close_bar)
        self.sinks["jsonl"] = (jsonl_sink(run_dir / "metrics.jsonl"), lambda: None)
        if disable_tqdm is None:
            disable_tqdm = not (sys.stdout.isatty() and sys.stderr.isatty())
        if not disable_tqdm:
            with contextlib.suppress(ImportError):  # no tqdm, no bar; the lines say the same
                from tqdm import tqdm

                self.bar = tqdm(
                    total=total_steps, initial=first_step, unit="step", dynamic_ncols=True
                )
        for name in trackers:
            build = (
                functools.partial(tensorboard_sink, run_dir, first_step)
                if name == "tensorboard"
                else functools.partial(
                    tracker_sink, name, run_dir.resolve().name, config, self.traces
                )
            )
            self._guard(name, lambda name=name, build=build: self.sinks.update({name: build()}))

    def declare(self, names):
        """Names that every window carries, recorded or not: counts as 0, the rest as NaN."""
        self.declared += [name for name in names if name not in self.declared]

    def record(self, name, value, weight=1.0):
        fold_(self.state, name, value, weight)

    def extend(self, records):
        for name, value, weight in records:
            fold_(self.state, name, value, weight)

    def trace(self, stories):
        """Rollouts (dump.stories) for trackio's traces; the first few of a window are kept."""
        self.traces += stories[: TRACES - len(self.traces)]

    def flush(self, step):
        """Close the window: its values by name, with `step` and `time` (s since the epoch)."""
        state, self.state = self.state, {}
        if self.history and self.history[-1]["step"] == step:  # came late: the window says it, too
            self.history.pop()
            late, state = state, self.flushed
            for name, (value, weight) in late.items():
                fold_(state, name, value / weight, weight)
        self.flushed = state
        window = {name: 0.0 if reduction(name) == "sum" else NAN for name in self.declared}
        window |= {"step": step, "time": time.time(), **reduced(state)}
        self.history.append(window)
        for name, (write, _) in list(self.sinks.items()):
            self._guard(name, lambda write=write: write(step, window))
        self.traces.clear()
        return window

    def finish(self, step):
        """At the end of the run: flush what no window has yet, if there is anything. A resumed run
        that found no step to do leaves the last window as it was; a new one whose groups were all
        dropped has a window of step 0."""
        if self.state and (step > self.first_step or not self.first_step):
            self.flush(step)

    def note(self, text):
        """Print beside the progress bar, not through it."""
        if self.bar is None:
            print(text, flush=True)
        else:
            self.bar.write(text)

    def close(self):
        for name, (_, close) in list(self.sinks.items()):
            self._guard(name, close)
        self.sinks = {}

    def _guard(self, name, call):
        """A sink may fail in any way (disk, network, tracker); training outlives its log."""
        try:
            call()
        except Exception as error:
            fate = "is tried again" if name in ("console", "jsonl") else "is switched off"
            if name not in self.warned:
                self.warned.add(name)
                with contextlib.suppress(OSError):  # stderr may be the broken pipe itself
                    print(
                        f"metrics: the {name} sink {fate}, the run goes on: "
                        f"{type(error).__name__}: {error}",
                        file=sys.stderr,
                        flush=True,
                    )
            if fate == "is switched off":
                self.sinks.pop(name, None)

    def _console(self, step, window):
        self.note(step_line(step, window, self.total_steps, color=use_color()))
        if self.bar is not None:
            self.bar.set_postfix_str(
                f"loss {window.get('loss', NAN):.4f}, reward {window.get('reward', NAN):.3f}",
                refresh=False,
            )
            self.bar.update(step - self.bar.n)

    def _close_bar(self):
        if self.bar is not None:
            self.bar.close()
            self.bar = None


# ---- sinks ------------------------------------------------------------------------------------

LINE = [  # label, name, format, width
    ("reward", "reward", "{:.3f}", 6),
    ("kept", "reward_kept", "{:.3f}", 6),
    ("eval", "eval/pass_at_1", "{:.3f}", 5),
    ("loss", "loss", "{:.4f}", 8),
    ("tok/s", "perf/wall_clock_trained_tokens_per_s", "{:,.0f}", 7),
    ("MFU", "perf/fwd_bwd_mfu", "{:.1f}%", 5),
    ("stale", "sample/staleness_mean", "{:.1f}", 3),
    ("wait", "perf/rollout_wait_s", "{:.1f}s", 5),
    ("sync", "perf/weight_sync_s", "{:.2f}s", 5),
    ("of", "perf/step_s", "{:.1f}s", 5),
]


def use_color():
    return sys.stdout.isatty() and "NO_COLOR" not in os.environ


def step_line(step, window, total_steps=None, color=False):
    """One line a step; '-' for a figure that this window lacks, none that the run lacks (MFU)."""
    dim, bold, red, off = ("\033[2m", "\033[1m", "\033[31m", "\033[0m") if color else [""] * 4
    of = f"/{total_steps}" if total_steps else ""
    parts = [f"{dim}step{off} {step:>{len(str(total_steps or 1000))}}{dim}{of}{off}"]
    for label, name, form, width in LINE:
        if name not in window and name not in ("reward", "reward_kept", "loss"):
            continue
        value = window.get(name, NAN)
        style = red if not math.isfinite(value) else bold if name == "reward" else ""
        text = "-" if math.isnan(value) and name != "loss" else form.format(value)
        parts.append(f"{dim}{label}{off} {style}{text:>{width}}{off if style else ''}")
    return "  ".join(parts)


def jsonl_sink(path):
    """One JSON object a window. Opened for each line, so a full disk costs lines, not the run."""
    if path.exists() and path.read_bytes()[-1:] not in (b"", b"\n"):
        with path.open("a") as file:  # a killed run may have left half a line
            file.write("\n")

    def write(step, window):
        values = {name: value if math.isfinite(value) else None for name, value in window.items()}
        with path.open("a") as file:
            file.write(json.dumps(values, allow_nan=False) + "\n")

    return write


def read_windows(path):
    """The windows of a metrics.jsonl, null as NaN. A run that resumed from an older checkpoint
    repeats steps: the later line replaces the earlier ones with the same or a higher step."""
    windows = []
    for line in Path(path).read_text().splitlines():
        try:
            window = {
                name: NAN if value is None else value for name, value in json.loads(line).items()
            }
        except (ValueError, AttributeError):  # half a line of a killed run
            continue
        while windows and windows[-1]["step"] >= window["step"]:
            windows.pop()
        windows.append(window)
    return windows


def sink_names(report_to):
    """'auto' (TensorBoard if installed), 'none', or a comma-separated list."""
    names = [name.strip() for name in report_to.split(",") if name.strip()]
    if set(names) - {"auto", "none", "tensorboard", "trackio", "wandb"}:
        raise ValueError(
            f"--report_to {report_to!r}: must be some of trackio, wandb, tensorboard "
            "(comma-separated), or auto or none"
        )
    if "auto" in names and importlib.util.find_spec("tensorboard"):
        names.append("tensorboard")
    return [name for name in dict.fromkeys(names) if name not in ("auto", "none")]


def finite(window):
    return {
        name: value
        for name, value in window.items()
        if math.isfinite(value) and name not in ("step", "time")
    }


def tensorboard_sink(run_dir, first_step):
    from torch.utils.tensorboard import SummaryWriter

    # purge_step hides what a run logged after the checkpoint that it now resumes from
    writer = SummaryWriter(str(run_dir / "tensorboard"), purge_step=first_step + 1)

    def write(step, window):
        for name, value in finite(window).items():
            writer.add_scalar(name, value, step)

    return write, writer.close


def tracker_sink(name, run_name, config, traces):
    """trackio and wandb: the first copied the second's interface. Only it takes `traces`, the
    conversations of the window; it keeps them on this machine unless it was told otherwise."""
    tracker = importlib.import_module(name)
    project = os.environ.get(f"{name.upper()}_PROJECT", "espalier")
    tracker.init(project=project, name=run_name, config=config or {})

    def write(step, window):
        told = {"rollouts": [as_trace(tracker, story) for story in traces]} if traces else {}
        tracker.log(finite(window) | (told if name == "trackio" else {}), step=step)

    return write, tracker.finish


def as_trace(trackio, story):
    names = ("group", "rollout", "reward", "rewards", "advantage", "versions", "generated_tokens")
    return trackio.Trace(
        messages=[*story["prompt"], *story["completion"]],
        metadata={name: story[name] for name in names},
    )
