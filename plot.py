"""Draw the curves of one or more runs from their metrics.jsonl. CPU; matplotlib for the picture.

    python plot.py                      runs/latest -> runs/latest/plot.png
    python plot.py RUN RUN -o out.png   overlaid; RUNs named X-seed0, X-seed1, ... are seeds of X:
                                        one line (their mean) in a band (their smallest to largest)
    python plot.py RUN --reward_only    the reward alone, wide and low, for the top of a README
    python plot.py RUN --minutes        over minutes since the first logged step began, not steps
    python plot.py RUN --text           the same in a terminal, with a diagnosis in words
    python plot.py RUN --rollouts 8     rollouts.html: eight groups to read (page.py)

From 40 points on, lines and bands are means over a fifteenth of the run; a single run is also drawn
as recorded, faint.
A panel for which nothing was recorded is left out. Left out: interaction, TensorBoard does that.
Test: pytest tests/test_metrics.py
"""

# R runs (seeds) of one setup, S logged steps
import argparse
import json
import re
import sys
from pathlib import Path

import numpy as np

import page
from diagnosis import LIMITS, diagnose
from metrics import compare, read_windows

# Okabe and Ito's colours: told apart by colour-blind readers and in grey print.
BLUE, ORANGE, GREEN, RED, PURPLE, SKY, GREY = (
    "#0072b2",
    "#e69f00",
    "#009e73",
    "#d55e00",
    "#cc79a7",
    "#56b4e9",
    "#9a9a9a",
)
INK = "#333333"
COLORS = (BLUE, ORANGE, GREEN, RED, PURPLE, SKY, GREY) * 9  # of setups

PANELS = [  # title, [(label, metric, colour)]; several setups show the first metric only
    (
        "Reward",
        [
            ("all groups", "reward", BLUE),
            ("kept", "reward_kept", GREEN),
            ("dropped", "reward_dropped", ORANGE),
        ],
    ),
    (
        "Held-out prompts",
        [("pass@1", "eval/pass_at_1", BLUE), ("pass@k", "eval/pass_at_k", GREEN)],
    ),
    (
        "Shares",
        [
            ("dropped", "frac_reward_zero_std", ORANGE),
            ("duplicates", "completions/duplicate_frac", PURPLE),
            ("cut off", "completions/clipped_ratio", SKY),
            ("masked", "sampling/masked_mean", RED),
        ],
    ),
    (
        "Completion length (tokens)",
        [
            ("mean", "completions/mean_length", BLUE),
            ("ended", "completions/mean_terminated_length", GREEN),
            ("longest", "completions/max_length", GREY),
        ],
    ),
    ("Entropy (nat)", [("mean over tokens", "entropy", BLUE)]),
    (
        "Ratio and mass",
        [
            ("importance ratio", "sampling/importance_sampling_ratio/mean", BLUE),
            ("sampler mass", "sampling/sampler_mass", GREEN),
        ],
    ),
    (
        "Staleness (weight updates)",
        [("mean", "sample/staleness_mean", BLUE), ("max", "sample/staleness_max", GREY)],
    ),
    ("Time per step (s)", []),  # stacked: TIME
    (
        "Tokens per second",
        [
            ("generated", "rollout/generated_tokens_per_s", ORANGE),
            ("forwarded", "perf/wall_clock_forwarded_tokens_per_s", BLUE),
            ("trained", "perf/wall_clock_trained_tokens_per_s", GREEN),
        ],
    ),
]
TIME = [
    ("wait", "perf/rollout_wait_s", ORANGE),
    ("fwd+bwd", "perf/fwd_bwd_s", BLUE),
    ("optimizer", "perf/optimizer_s", SKY),
    ("sync", "perf/weight_sync_s", GREEN),
]


# ---- runs -------------------------------------------------------------------------------------


def load(path):
    """The windows of a run folder, given as a path or as a name below runs/."""
    folder = Path(path) if Path(path).is_dir() else Path("runs") / path
    if not folder.is_dir():
        there = sorted(f"{file.parent}" for file in Path("runs").glob("*/metrics.jsonl"))
        raise SystemExit(
            f"plot: no run at {path}. "
            + (
                f"Runs here: {', '.join(there)}"
                if there
                else "There is none below runs/ yet: start one with `bash run.sh`."
            )
        )
    file = folder / "metrics.jsonl"
    windows = read_windows(file) if file.is_file() else []
    if not windows:
        raise SystemExit(
            f"plot: {file} has no line yet: the run has not finished its first step. "
            "Try again in a minute, or read its console output."
        )
    begin = windows[0]["time"] - np.nan_to_num(windows[0].get("perf/step_s", 0.0))
    return folder, [w | {"minutes": (w["time"] - begin) / 60} for w in windows]


def by_setup(runs):
    """[(folder, windows)] -> {setup: [windows of each seed]}; X-seed0 and X-seed1 are both X."""
    setups = {}
    for folder, windows in runs:
        name = folder.resolve().name  # runs/latest is a link
        setups.setdefault(re.sub(r"[-_.]?seed[-_=]?\d+", "", name) or name, []).append(windows)
    return setups


def curves(seeds, name, x="step"):
    """steps_S (or minutes) and values_RS of one metric; between its points a run is interpolated,
    beyond its ends it is NaN. None if no run has a finite value."""
    points = [np.array([(w[x], w.get(name, np.nan)) for w in windows], float) for windows in seeds]
    points = [p[np.isfinite(p[:, 1])] for p in points]
    points = [p for p in points if len(p)]
    if not points:
        return None
    steps_S = np.unique(np.concatenate([p[:, 0] for p in points]))
    values_RS = np.stack([np.interp(steps_S, p[:, 0], p[:, 1], np.nan, np.nan) for p in points])
    return steps_S, values_RS


def smooth(values_S):
    """Centred mean over a fifteenth of the run; near the ends over what is there."""
    if len(values_S) < 40:
        return values_S
    half = len(values_S) // 30
    total_S = np.concatenate([[0], np.cumsum(values_S)])
    low_S = np.maximum(np.arange(len(values_S)) - half, 0)
    high_S = np.minimum(np.arange(len(values_S)) + half + 1, len(values_S))
    return (total_S[high_S] - total_S[low_S]) / (high_S - low_S)


def time_parts(seeds, x="step"):
    """steps_S and {part: seconds_S} of a step, averaged over seeds; 'other' is the remainder."""
    whole = curves(seeds, "perf/step_s", x)
    if whole is None:
        return None
    steps_S, left_S = whole[0], np.nanmean(whole[1], axis=0)
    parts = {}
    for label, name, _ in TIME:
        part = curves(seeds, name, x)
        if part is None:
            continue
        # a window without a sync has no sync time: 0 there, not interpolated
        mean_S = np.interp(steps_S, part[0], np.nanmean(part[1], axis=0))
        parts[label] = np.where(np.isin(steps_S, part[0]), np.minimum(mean_S, left_S), 0.0)
        left_S = left_S - parts[label]
    return steps_S, {**parts, "other": left_S}


def summary(windows):
    """'40 steps, 12 min, 1.3M tokens'"""
    seconds = windows[-1]["time"] - windows[0]["time"]
    took = f"{seconds / 3600:.1f} h" if seconds > 5400 else f"{seconds / 60:.0f} min"
    tokens = windows[-1].get("num_tokens", np.nan)
    size = f"{tokens / 1e6:.1f}M" if tokens >= 1e6 else f"{tokens / 1e3:.0f}k"
    return f"{windows[-1]['step']} steps, {took}" + (f", {size} tokens" if tokens > 0 else "")


# ---- picture ----------------------------------------------------------------------------------


def draw(setups, path, reward_only=False, columns=None, x="step"):
    """One PNG with a panel for each of PANELS that has data, in two columns, or three if they fill
    them. x: "step" or "minutes"."""
    try:
        import matplotlib
    except ImportError as error:
        raise SystemExit(f"plot: {error}: pip install matplotlib, or use --text") from error
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    plt.rcParams.update(
        {
            "font.size": 10,
            "axes.titlesize": 11,
            "axes.titleweight": "bold",
            "text.color": INK,
            "axes.edgecolor": "#b0b0b0",
            "xtick.color": INK,
            "ytick.color": INK,
            "axes.labelcolor": INK,
            "axes.spines.top": False,
            "axes.spines.right": False,
            "axes.grid": True,
            "grid.color": "#e8e8e8",
            "axes.axisbelow": True,
            "xtick.major.size": 0,
            "ytick.major.size": 0,
        }
    )
    every = [windows for seeds in setups.values() for windows in seeds]
    panels = [
        (title, lines)
        for title, lines in PANELS[: 1 if reward_only else None]
        if any(curves(every, name, x) is not None for _, name, _ in lines)
        or (not lines and time_parts(every, x) is not None)
    ]
    if not panels:
        raise SystemExit("plot: the runs have none of the metrics that plot.py draws")
    columns = min(columns or (3 if len(panels) % 3 == 0 else 2), len(panels))
    rows = -(-len(panels) // columns)
    width, height = (6.6, 2.7) if reward_only else (3.8 * columns, 2.5 * rows + 0.5)
    across = max(int(width * 11 / (max(map(len, setups)) + 6)), 1)  # names; 11 characters an inch
    height += 0.21 * (-(-len(setups) // across) - 1)  # for their other lines
    figure, axes = plt.subplots(
        rows, columns, figsize=(width, height), squeeze=False, layout="constrained"
    )
    figure.get_layout_engine().set(w_pad=0.1, h_pad=0.08)
    for ax, panel in zip(axes.flat, panels):
        draw_panel(ax, *panel, setups, x)
    for ax in axes.flat[len(panels) :]:
        ax.set_axis_off()
    for ax in axes.flat[max(len(panels) - columns, 0) : len(panels)]:
        if not ax.patches:  # the bars of several setups have seconds on this axis
            ax.set_xlabel(x, labelpad=1)
    headline = summary(every[0]) if len(every) == 1 else f"{len(every)} runs"
    if len(every) > len(setups):
        headline += "; lines: mean over seeds, bands: smallest to largest"
    if len(setups) == 1:
        figure.suptitle(f"{next(iter(setups))}: {headline}", x=0.012, ha="left", fontsize=10)
    else:
        keys = [plt.Line2D([], [], color=color, linewidth=3) for _, color in zip(setups, COLORS)]
        figure.legend(
            keys,
            setups,
            loc="outside upper left",
            ncols=across,
            title=headline,
            alignment="left",
            frameon=False,
            borderpad=0.2,
        )
    figure.savefig(path, dpi=200, facecolor="white")
    plt.close(figure)
    return path


def draw_panel(ax, title, lines, setups, x):
    """Title, below it the names of the lines in their colours, then the curves."""
    names = []
    if not lines:
        names = draw_time(ax, setups, x)
    elif len(setups) > 1:  # named once, above all panels
        title += f": {lines[0][0]}" if len(lines) > 1 else ""
        for seeds, color in reversed(list(zip(setups.values(), COLORS))):
            draw_line(ax, curves(seeds, lines[0][1], x), color)
    else:
        for label, name, color in reversed(lines):  # the first, the main one, comes on top
            if draw_line(ax, curves(*setups.values(), name, x), color):
                names.insert(0, (label, color))
    ax.set_title(title, loc="left", pad=19 if names else 6)
    left = None
    for label, color in names:  # each begins where the one before ends
        place = (
            {"xy": (0, 1), "xycoords": "axes fraction", "xytext": (0, 5)}
            if left is None
            else {"xy": (1, 0), "xycoords": left, "xytext": (9, 0)}
        )
        left = ax.annotate(
            label,
            **place,
            textcoords="offset points",
            color=color,
            fontsize=9.5,
            fontweight="bold",
            va="bottom",
        )
    ax.margins(x=0.01)
    if not ax.patches:
        steps = [window[x] for seeds in setups.values() for run in seeds for window in run]
        margin = max(0.01 * (max(steps) - min(steps)), 0.1 if x == "step" else 0.0)
        ax.set_xlim(min(steps) - margin, max(steps) + margin)  # also where only some have values
        ax.locator_params(axis="x", integer=x == "step")
        ax.locator_params(axis="y", nbins=4)
        if not title.startswith(("Reward", "Ratio")):
            ax.set_ylim(bottom=0)
    if ax.get_ylim()[1] > 5000:
        ax.yaxis.set_major_formatter(lambda value, _: f"{value / 1000:g}k")


def draw_line(ax, curve, color):
    """True if there is something to draw."""
    if curve is None:
        return False
    steps_S, values_RS = curve
    mean_S = np.nanmean(values_RS, axis=0)
    if len(values_RS) > 1:
        ax.fill_between(
            steps_S,
            smooth(np.nanmin(values_RS, axis=0)),
            smooth(np.nanmax(values_RS, axis=0)),
            color=color,
            alpha=0.18,
            linewidth=0,
        )
    elif len(steps_S) >= 40:
        ax.plot(steps_S, mean_S, color=color, alpha=0.25, linewidth=0.8)
    ax.plot(
        steps_S,
        smooth(mean_S),
        color=color,
        linewidth=1.8,
        solid_capstyle="round",
        marker="o" if len(steps_S) <= 12 else None,  # evaluations are few
        markersize=4,
    )
    return True


def draw_time(ax, setups, x):
    """One setup: seconds of a step over the run, stacked. Several: one bar each, their means."""
    parts = {setup: time_parts(seeds, x) for setup, seeds in setups.items()}
    colors = {label: color for label, _, color in TIME} | {"other": "#c4c4c4"}
    labels = [label for label in colors if any(p and label in p[1] for p in parts.values())]
    if len(setups) == 1:
        ((steps_S, seconds),) = parts.values()
        ax.stackplot(
            steps_S,
            *[smooth(seconds[label]) for label in labels],
            linewidth=0,
            colors=[colors[label] for label in labels],
        )
    else:
        for row, part in enumerate(parts.values()):
            left = 0.0
            for label in labels if part else []:
                mean = float(np.mean(part[1].get(label, 0.0)))
                ax.barh(row, mean, left=left, height=0.6, color=colors[label])
                left += mean
        ax.set_yticks(range(len(parts)), [setup[:12] for setup in parts])
        ax.invert_yaxis()
        ax.grid(axis="y", visible=False)
    return list({label: colors[label] for label in labels}.items())


# ---- text -------------------------------------------------------------------------------------


def bars(values, width=24):
    """A row of block characters, lowest to highest; ASCII where the terminal knows no others."""
    unicode = "utf" in (sys.stdout.encoding or "").lower()
    blocks = "".join(map(chr, range(0x2581, 0x2589))) if unicode else "_.:-=+*#"
    values = [np.mean(part) for part in np.array_split(values, min(width, len(values)))]
    low, span = min(values), (max(values) - min(values)) or 1.0
    return "".join(blocks[min(int((value - low) / span * 8), 7)] for value in values)


def number(value):
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def limits_of(folder):
    """The options that the diagnosis reads figures against, as far as the run saved them."""
    file = folder / "config.json"
    config = json.loads(file.read_text()) if file.is_file() else {}
    return {name: config[name] for name in LIMITS if config.get(name) is not None}


def text(folder, windows):
    """First and last value (each the mean of a tenth of the run) and the course of each metric."""
    lines = [
        f"{folder.resolve().name}: {summary(windows)}",
        "",
        f"{'':39} {'first':>8} {'last':>8}",
    ]
    for name in [name for _, group in PANELS for _, name, _ in group or TIME]:
        if (curve := curves([windows], name)) is not None:
            values = curve[1][0]
            tenth = max(len(values) // 10, 1)
            lines.append(
                f"{name:39.39} {number(np.mean(values[:tenth])):>8} "
                f"{number(np.mean(values[-tenth:])):>8} {bars(values)}"
            )
    if (parts := time_parts([windows])) is not None:
        means = {label: float(np.mean(seconds)) for label, seconds in parts[1].items()}
        total = sum(means.values()) or 1.0
        lines += [
            "",
            "a step: "
            + ", ".join(
                f"{label} {mean:.2f} s ({mean / total:.0%})" for label, mean in means.items()
            ),
        ]
    size = min(10, -(-len(windows) // 5))
    said = diagnose(*compare(windows, size), **limits_of(folder))
    return "\n".join(lines + [""] * bool(said) + said)


def main(argv=None):
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("runs", nargs="*", metavar="RUN", default=["runs/latest"])
    parser.add_argument("-o", "--output", help="default: plot.png in the first run's folder")
    parser.add_argument("--text", action="store_true", help="print instead of drawing")
    parser.add_argument("--reward_only", action="store_true", help="one wide panel")
    parser.add_argument("--minutes", action="store_true", help="time, not steps, to the right")
    parser.add_argument("--columns", type=int, help="1 for a narrow screen")
    parser.add_argument("--rollouts", type=int, metavar="N", help="a page of N groups to read")
    args = parser.parse_args(argv)
    runs = [load(path) for path in args.runs]
    if args.rollouts:
        for folder, _ in runs:
            print(page.build(folder, args.rollouts))
    elif args.text:
        print("\n\n".join(text(*run) for run in runs))
    else:
        output = args.output or runs[0][0] / ("reward.png" if args.reward_only else "plot.png")
        x = "minutes" if args.minutes else "step"
        print(draw(by_setup(runs), output, args.reward_only, args.columns, x))


if __name__ == "__main__":
    main()
