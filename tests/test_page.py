"""page.py: every rollout is on the page, nothing of it can act, each token is there once.

Run: pytest tests/test_page.py
"""

import dataclasses
import json
import re
from html.parser import HTMLParser

import numpy as np
import pytest
from conftest import make_tokenizer
from test_trainer import make_samples

import dump
import page
import plot
from config import Config

EVIL = "</div><script>alert(1)</script><img src=http://example.com/x>"


def spell(sample, text, tokenizer):
    """The sample with `text` as its trained tokens, after its prompt."""
    ids = np.array(tokenizer.encode(text), np.int32)
    n_prompt, n = int(sample.trained.argmax()), len(ids)
    whole = np.concatenate([sample.input_ids[:n_prompt], ids])
    trained = np.arange(len(whole)) >= n_prompt
    return dataclasses.replace(
        sample, input_ids=whole, trained=trained, versions=np.where(trained, 2, -1),
        sampler_log_probs=np.full(len(whole), -1, np.float32),
        top_ids=np.zeros((n, 0), np.int32), top_log_probs=np.zeros((n, 0), np.float32),
    )  # fmt: skip


def write_run(folder, texts):
    """A run of one step with one trained group, whose replies are `texts`, and a dropped one."""
    tokenizer, samples = make_tokenizer(), make_samples(n_groups=1, group_size=len(texts))
    samples = [spell(s, text, tokenizer) for s, text in zip(samples, texts)]
    (folder / "rollouts").mkdir(parents=True)
    tokenizer.save_pretrained(folder / "rollouts" / "tokenizer")
    (folder / "config.json").write_text(json.dumps(dataclasses.asdict(Config())))
    (folder / "metrics.jsonl").write_text('{"step": 1, "time": 1.0}\n')
    # ratios e^0 = 1 and, in the last reply, e^2 = 7.4: above vllm_importance_sampling_clip_max
    log_probs = [np.full(s.trained.sum(), -1, np.float32) for s in samples]
    log_probs[-1] += 2
    n = len(samples)
    recorded = dump.RecordedStep(1, 512, samples, [(0, 0)] * n, [1] * n, log_probs)
    dump.write_step(dump.step_file(folder, 1), recorded)
    story = {
        "row_index": 4, "prompt": [{"role": "user", "content": EVIL}], "columns": {"answer": EVIL},
        "rewards": {"correct": 1.0, "short": 0.5}, "reward": 1.5, "advantage": 0.7,
        "tool_calls": 0, "tool_failures": 0, "generated_tokens": 3, "versions": [2, 2],
    }  # fmt: skip
    for i, text in enumerate(texts):
        line = story | {"group": 0, "rollout": i, "outcome": "trained", "step": 1, "staleness": 1}
        line["completion"] = [{"role": "assistant", "content": text}]
        line["samples"] = [{"outcome": "trained", "step": 1, "index": i}]
        dump.append_lines(folder / "rollouts.jsonl", [line])
    line = story | {"group": 1, "rollout": 0, "outcome": "equal rewards", "step": 1}
    line |= {"completion": [{"role": "assistant", "content": "dropped"}], "staleness": None}
    dump.append_lines(folder / "rollouts.jsonl", [line | {"samples": []}])


class Page(HTMLParser):
    def __init__(self, text):
        super().__init__()
        self.tags, self.tokens, self.open = [], [], []
        self.feed(text)
        assert self.open == [], "every element is closed"

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))
        if tag not in ("meta", "input", "br"):
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open and self.open[-1] == "u":
            self.tokens.append(data)


def test_the_page_shows_every_rollout_and_nothing_in_it_can_act(tmp_path, capsys):
    replies = [EVIL, "two words", "sch\N{LATIN SMALL LETTER O WITH DIAERESIS}n\n"]
    write_run(tmp_path, replies)
    plot.main([str(tmp_path), "--rollouts", "5"])
    assert capsys.readouterr().out.strip() == str(tmp_path / "rollouts.html")
    text = (tmp_path / "rollouts.html").read_text()
    shown = Page(text)
    names = {tag for tag, _ in shown.tags}
    assert not names & {"script", "img", "link", "iframe", "form"}
    assert not any({"src", "href"} & attributes.keys() for _, attributes in shown.tags)
    assert "url(" not in page.STYLE and "@import" not in page.STYLE
    assert "default-src 'none'" in text
    assert sum(tag == "article" for tag, _ in shown.tags) == 4
    # every trained token once; the umlaut's two bytes are one text, at the second of them
    assert "".join(shown.tokens).replace("\N{RETURN SYMBOL}", "") == "".join(replies)
    assert "trained in step 1" in text and "equal rewards" in text and "staleness 1" in text
    assert "correct 1.00, short 0.50" in text
    marks = [values for tag, values in shown.tags if tag == "u"]
    masked = [values for values in marks if "m" in values["class"].split()]
    assert len(masked) == len("schn\n") + 2 and "ratio 7.39" in masked[0]["title"]


def test_turns_after_the_first_prompt_are_shown_with_their_roles(tmp_path):
    write_run(tmp_path, ["one"])
    tokens, tokenizer = page.Tokens(tmp_path), make_tokenizer()
    sample = spell(make_samples(1, 1)[0], "call!RESULT!done", tokenizer)
    n_prompt = int(sample.trained.argmax())
    sample.trained[n_prompt + 5 : n_prompt + 11] = False  # what the tool wrote
    line = {"completion": [{"role": r} for r in ("assistant", "tool", "assistant")]}
    log_probs = np.zeros(sample.trained.sum())
    html = page.sample_html(sample, log_probs, line, 0, tokens, [0.5, 5])
    assert re.findall("<i>(.*?)</i>", html) == ["assistant", "tool", "assistant"]
    assert "RESULT" in html and "".join(Page(html).tokens) == "call!!done"


def test_shades():
    assert page.shade(2.0, 2.0) == page.shade(9.0, 2.0) == "rgba(0,114,178,0.60)"
    assert page.shade(-1.0, 2.0) == "rgba(213,94,0,0.30)"
    assert page.shade(float("nan"), 2.0).endswith(",0.00)")


def test_a_run_without_dump_is_explained(tmp_path):
    with pytest.raises(SystemExit, match="--dump_rollouts"):
        page.build(tmp_path, 3)
