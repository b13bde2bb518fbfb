"""Rollouts as one HTML page without external resources: python plot.py RUN --rollouts N

N groups, spread over the run, each with its rollouts side by side: the turns, the rewards by
source, what became of it, and the trained tokens, shaded by advantage or by importance ratio. It
needs a run with --dump_rollouts (dump.py). The page loads nothing and runs no script (its
Content-Security-Policy forbids both), so what a model wrote cannot act in the reader's browser.

Left out: search, filters; rollouts.jsonl is one grep away.
Test: pytest tests/test_page.py
"""

import json
import math
from html import escape
from pathlib import Path

import numpy as np

import chat
import dump

FULL_ADVANTAGE, FULL_RATIO = 2.0, math.log(2)  # where the shade is darkest
MORE, LESS = "0,114,178", "213,94,0"  # blue, vermilion: told apart by colour-blind readers

STYLE = """
:root { --ink: #222; --dim: #6b6b6b; --line: #ddd; --paper: #fff; --card: #fafafa }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e6e6e6; --dim: #9a9a9a; --line: #3a3a3a; --paper: #161616; --card: #1f1f1f }
}
* { box-sizing: border-box }
body { margin: 0 auto; padding: 1rem; max-width: 120rem; color: var(--ink);
  background: var(--paper); font: 15px/1.45 system-ui, sans-serif }
h1 { font-size: 1.3rem; margin: 0 } h2 { font-size: 1.05rem; margin: 0 }
p { margin: .2rem 0; color: var(--dim) }
fieldset { position: sticky; top: 0; z-index: 1; border: 0; border-bottom: 1px solid var(--line);
  margin: .5rem -1rem; padding: .5rem 1rem; background: var(--paper); display: flex;
  flex-wrap: wrap; gap: .3rem 1.2rem; align-items: center }
label { cursor: pointer } .key { color: var(--dim) }
.key span { padding: 0 .4em; border-radius: 3px; color: var(--ink) }
section { margin: 1.2rem 0 2rem; border-top: 2px solid var(--line); padding-top: .7rem }
.side { display: flex; gap: .8rem; overflow-x: auto; padding: .3rem 0 .8rem;
  scroll-snap-type: x proximity }
article { flex: 1 0 17rem; max-width: 40rem; background: var(--card); scroll-snap-align: start;
  border: 1px solid var(--line); border-radius: 8px; padding: .6rem .7rem; overflow-wrap: anywhere }
article header { border-bottom: 1px solid var(--line); padding-bottom: .4rem; font-size: 13px }
article header b { font-size: 1.15rem } article header span { white-space: nowrap }
.turn { white-space: pre-wrap; margin: .5rem 0 0; padding-left: .6rem;
  border-left: 3px solid var(--line); font: 13px/1.55 ui-monospace, monospace }
.turn i { display: block; font: 11px system-ui, sans-serif; color: var(--dim) }
.turn.ctx { color: var(--dim); max-height: 16rem; overflow-y: auto }
.prompt { max-width: 60rem } .prompt .turn { max-height: 24rem; overflow-y: auto }
.turn u { text-decoration: none; border-radius: 2px; background: var(--a) }
body:has(#ratio:checked) .turn u { background: var(--r) }
.turn u.m { outline: 1px dashed var(--dim); outline-offset: -1px }
.turn u.s { font-size: .8em; color: var(--dim) }
"""


def build(run, n):
    """Write RUN/rollouts.html with n groups. -> its path."""
    run = Path(run)
    if not (run / "rollouts.jsonl").is_file():
        raise SystemExit(f"plot: {run} has no rollouts.jsonl: start runs with --dump_rollouts")
    groups = {}
    for line in dump.read_rollouts(run):
        groups.setdefault(line["group"], []).append(line)
    picked = pick(groups.values(), n)
    config = json.loads((run / "config.json").read_text())
    bounds = [config[f"vllm_importance_sampling_clip_{end}"] for end in ("min", "max")]
    tokens = Tokens(run)
    body = "\n".join(group_html(lines, tokens, bounds) for lines in picked)
    name = escape(run.resolve().name)
    about = f"{len(picked)} of {len(groups)} groups, spread over the run, some of them dropped"
    output = run / "rollouts.html"
    output.write_text(
        f"""<!doctype html><html lang="en"><head><meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{name}: rollouts</title><style>{STYLE}</style></head><body>
<h1>{name}</h1><p>{about}: {escape(config["model"])} on {escape(config["env"])}</p>
<fieldset><span>Trained tokens by</span>
<label><input type="radio" name="by" id="advantage" checked> advantage</label>
<label><input type="radio" name="by" id="ratio"> ratio trainer / sampler</label>
<span class="key"><span style="background:{shade(1, 1)}">above 0, ratio above 1</span>
<span style="background:{shade(-1, 1)}">below</span>
<span style="outline:1px dashed">masked: ratio out of bounds</span></span></fieldset>
{body}
</body></html>
"""
    )
    return output


def pick(groups, n):
    """n groups in the order of the run: a quarter of them dropped ones, the rest trained."""
    of_kind = {True: [], False: []}
    for lines in groups:
        outcomes = {line["outcome"] for line in lines}
        if outcomes != {"unused"}:
            of_kind["trained" in outcomes].append(lines)
    trained, dropped = of_kind[True], of_kind[False]
    n_dropped = min(len(dropped), max(n // 4, n - len(trained)))
    picked = evenly(trained, n - n_dropped) + evenly(dropped, n_dropped)
    return sorted(picked, key=lambda lines: (min(x["step"] for x in lines), lines[0]["group"]))


def evenly(groups, n):
    """n of the groups, the first and the last among them."""
    places = np.linspace(0, len(groups) - 1, min(n, len(groups)))
    return [groups[round(place)] for place in places]


class Tokens:
    """The arrays of trained samples, and their tokens as text."""

    def __init__(self, run):
        from transformers import AutoTokenizer  # here: plot.py draws curves without it

        self.run, self.step = run, None
        self.tokenizer = AutoTokenizer.from_pretrained(run / "rollouts" / "tokenizer")
        added = self.tokenizer.added_tokens_decoder
        self.special = {i for i, token in added.items() if token.special}

    def sample(self, step, index):
        """(Sample, the policy's log-probs of its trained tokens)."""
        if self.step is None or self.step.step != step:
            self.step = dump.read_step(dump.step_file(self.run, step))
        return self.step.samples[index], self.step.policy_log_probs[index]

    def texts(self, ids):
        """One text a token. Bytes of one character stand at its last token."""
        found, pending, before = [], [], []
        for token in ids.tolist():
            pending.append(token)
            # decoded after the token before: alone, some tokenizers drop a leading space
            text = self._decode(before + pending)[len(self._decode(before)) :]
            if text.endswith("\N{REPLACEMENT CHARACTER}") and len(pending) < 4:
                found.append("")
                continue
            found.append(text)
            before, pending = pending[-1:], []
        return found

    def _decode(self, ids):
        return self.tokenizer.decode(
            ids, skip_special_tokens=False, clean_up_tokenization_spaces=False
        )


# ---- parts of the page --------------------------------------------------------------------------


def group_html(lines, tokens, bounds):
    """One group: its prompt, then its rollouts side by side. lines: of rollouts.jsonl."""
    lines = sorted(lines, key=lambda line: line["rollout"])
    first = lines[0]
    rewards = [line["reward"] for line in lines if line["reward"] is not None]
    mean = f"mean reward {np.mean(rewards):.2f}, " if rewards else ""
    columns = ", ".join(f"{name} = {value!r:.80}" for name, value in first["columns"].items())
    prompt = "".join(message_html(message) for message in first["prompt"])
    cards = "".join(card_html(line, tokens, bounds) for line in lines)
    return (
        f"<section><h2>Step {first['step']}, group {first['group']}</h2>"
        f"<p>{mean}row {first['row_index']} of the data set{escape('; ' * bool(columns) + columns)}"
        f'</p><div class="prompt">{prompt}</div><div class="side">{cards}</div></section>'
    )


def card_html(line, tokens, bounds):
    """One rollout: how it was scored, what became of it, its turns."""
    trained = [s for s in line["samples"] if s["outcome"] == "trained"]
    outcome = line["outcome"] + (f" in step {line['step']}" if trained else "")
    sources = {name: value for name, value in line["rewards"].items() if value is not None}
    facts = [outcome]
    facts += [f"{name} {value:.2f}" for name, value in sources.items() if len(sources) > 1]
    facts.append(f"{line['generated_tokens']} tokens")
    if line["versions"]:
        facts.append("weights " + " to ".join(map(str, sorted(set(line["versions"])))))
    if line["staleness"] is not None:
        facts.append(f"staleness {line['staleness']}")
    if line["tool_calls"]:
        facts.append(f"{line['tool_calls']} tool calls, {line['tool_failures']} failed")
    reward = "no reward" if line["reward"] is None else f"{line['reward']:.2f}"
    color = shade(line["advantage"], FULL_ADVANTAGE)
    turns = "".join(
        sample_html(*tokens.sample(s["step"], s["index"]), line, i, tokens, bounds)
        for i, s in enumerate(trained)
    ) or "".join(message_html(message) for message in line["completion"])
    return (
        f"<article><header><b>{reward}</b> "
        f'<span style="background:{color}">advantage {line["advantage"]:+.2f}</span><br>'
        f"{escape(', '.join(facts))}</header>{turns}</article>"
    )


def message_html(message):
    calls = "".join("\n" + json.dumps(call) for call in message.get("tool_calls") or ())
    text = escape(chat.text_of(message) + calls)
    return f'<div class="turn"><i>{escape(message["role"])}</i>{text}</div>'


def sample_html(sample, policy_log_probs, line, i, tokens, bounds):
    """The i-th trained sample of a rollout: what it was given (the prompt of the first is above),
    and what it generated, token by token."""
    context_roles = [m["role"] for m in line["completion"] if m["role"] != "assistant"]
    texts, special = tokens.texts(sample.input_ids), tokens.special
    starts = np.flatnonzero(np.diff(sample.trained, prepend=~sample.trained[:1])).tolist()
    parts, term = [], 0
    for start, stop in zip(starts, [*starts[1:], len(texts)]):
        if not sample.trained[start]:
            if start == 0 and i == 0:
                continue
            role = context_roles.pop(0) if start and context_roles else "context"
            text = escape("".join(texts[start:stop]))
            parts.append(f'<div class="turn ctx"><i>{escape(role)}</i>{text}</div>')
            continue
        spans = []
        for position in range(start, stop):
            sampled, now = sample.sampler_log_probs[position], policy_log_probs[term]
            log_ratio, term = float(now - sampled), term + 1
            style = f"--a:{shade(sample.advantage, FULL_ADVANTAGE)};"
            style += f"--r:{shade(log_ratio, FULL_RATIO)}"
            ratio = math.exp(min(log_ratio, 50))
            kinds = "m" * (not bounds[0] <= ratio <= bounds[1])
            kinds += " s" * (int(sample.input_ids[position]) in special)
            told = (
                f"ratio {ratio:.3g}, p {math.exp(now):.3g} trainer, {math.exp(sampled):.3g} sampler"
            )
            shown = escape(texts[position]).replace("\n", "\N{RETURN SYMBOL}\n")
            spans.append(f'<u class="{kinds}" style="{style}" title="{told}">{shown}</u>')
        parts.append(f'<div class="turn"><i>assistant</i>{"".join(spans)}</div>')
    return "".join(parts)


def shade(value, full):
    """A CSS colour: blue above 0, vermilion below, opaque from `full` on; none for NaN."""
    strength = min(abs(value) / full, 1.0) if math.isfinite(value) else 0.0
    return f"rgba({MORE if value > 0 else LESS},{0.6 * strength:.2f})"
