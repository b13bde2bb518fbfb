"""The training step: what a split over ranks, micro-batches and rows must not change."""

import dataclasses
import threading
import time
import types

import numpy as np
import pytest
import torch
import torch.distributed as dist
import transformers
from conftest import load_policy, whole

import attention
import chat
import feed
import grpo
import loss
import model
import packing
import planner
import update
from config import Config

BUDGET = 64
CONFIG = Config(gradient_checkpointing=False, num_sampler_logprobs=3, max_completion_length=8)


def make_samples(n_groups=4, group_size=3, seed=0):
    """Groups that share a prompt, with random completions, sampler log-probs and advantages."""
    random = np.random.default_rng(seed)
    samples = []
    for group in range(n_groups):
        prompt = random.integers(0, 250, 6)
        for _ in range(group_size):
            n = int(random.integers(2, 8))
            ids = np.concatenate([prompt, random.integers(0, 250, n)]).astype(np.int32)
            trained = np.arange(len(ids)) >= len(prompt)
            samples.append(
                chat.Sample(
                    input_ids=ids,
                    trained=trained,
                    sampler_log_probs=random.normal(-5.5, 0.3, len(ids)).astype(np.float32),
                    top_ids=random.integers(0, 250, (n, 3)).astype(np.int32),
                    top_log_probs=random.normal(-5.5, 0.3, (n, 3)).astype(np.float32),
                    versions=np.where(trained, 0, -1).astype(np.int32),
                    advantage=float(random.normal()),
                    group_id=group,
                )
            )
    return samples


@pytest.mark.parametrize(
    "options, expected",
    [
        # Ratios 1.5, 0.9 and 10, advantages 1. Clipped at 1.3; 10 is above clip_max: no loss.
        ({"score_centering": False}, [-1.3, -0.9, 0]),
        ({"loss": "dr_grpo"}, [-1.3 / 8, -0.9 / 8, 0]),
        # -r log p, with r clipped to 5; log p = log q + log r = -0.594535, -1.105361, -1.697415
        ({"loss": "cispo"}, [1.5 * 0.594535, 0.9 * 1.105361, 5 * 1.697415]),
        # The first sample has sqrt(1.5 * 0.9) = 1.161895 over two terms, the other 10, clipped.
        ({"loss": "gspo"}, [-1.161895 / 2, -1.161895 / 2, -1.3]),
    ],
)
def test_an_options_loss_gets_the_runs_bounds(options, expected):
    config = dataclasses.replace(CONFIG, epsilon=0.2, epsilon_high=0.3, **options)
    sampler = torch.tensor([-1.0, -1.0, -4.0])
    policy = sampler + torch.tensor([1.5, 0.9, 10.0]).log()
    row = types.SimpleNamespace(
        sampler_log_probs=sampler,
        top_log_probs=None,
        advantages=torch.ones(3),
        term_samples=torch.tensor([0, 0, 1]),
    )
    found = update.term_losses(config, row, policy[:, None], 2)
    torch.testing.assert_close(found, torch.tensor(expected), atol=1e-5, rtol=0)


def gradients(
    folder,
    config,
    share,
    *,
    reduce_each=False,
    replicas=1,
    compute_dtype=torch.float32,
    loss_scale=1.0,
):
    """{name: whole gradient} after forward and backward of this rank's rows."""
    torch.set_num_threads(1)
    cpu = torch.device("cpu")
    policy = load_policy(config, folder, cpu)
    policy.reduce_each = reduce_each
    model.shard(policy, cpu, compute_dtype, compile_layers=False, replicas=replicas)
    rows = [packing.pack_row(samples, BUDGET).to("cpu") for samples in share.rows]
    trees = [attention.TreeMask(row).prepare(policy.model.config) for row in rows]
    clock = grpo.Clock(torch.device("cpu"))
    update.forward_backward(policy, config, share, rows, trees, clock, loss_scale)
    return {n: whole(p.grad).clone() for n, p in policy.named_parameters()}


def planned_gradients(rank, folder, config, samples, options=()):
    """Gradients of one step that the planner splits over these ranks."""
    plan = next(
        planner.plan_steps(
            samples,
            token_budget=BUDGET,
            world_size=dist.get_world_size(),
            gradient_accumulation_steps=config.gradient_accumulation_steps,
        )
    )
    share = feed.shares(plan, config, dist.get_world_size())[rank]
    assert sum(len(row.samples) for row in plan.rows) == len(samples), "all in one step"
    return gradients(folder, config, share, **dict(options))


def assert_close(found, expected, tolerance):
    assert found.keys() == expected.keys()
    largest = max(float(g.abs().max()) for g in expected.values())
    for name, gradient in expected.items():
        difference = float((found[name] - gradient).abs().max())
        assert difference <= tolerance * largest, f"{name}: {difference} of {largest}"


@pytest.mark.parametrize("options", [{}, {"score_centering": False}, {"loss": "gspo"}])
def test_two_ranks_give_the_one_rank_gradient(tiny_folder, one_rank, two_ranks, options):
    config = dataclasses.replace(CONFIG, **options)
    samples = make_samples(n_groups=2)  # fits one row; two ranks get one group each
    one = one_rank(planned_gradients, tiny_folder, config, samples)
    two = two_ranks(planned_gradients, tiny_folder, config, samples)
    assert_close(two, one, 1e-6)


def test_normalize_step_makes_any_split_the_same(tiny_folder, one_rank, two_ranks):
    samples = make_samples(n_groups=6)
    whole = dataclasses.replace(CONFIG, normalize="step", gradient_accumulation_steps=4)
    split = dataclasses.replace(whole, gradient_accumulation_steps=2)
    one = one_rank(planned_gradients, tiny_folder, whole, samples)
    two = two_ranks(planned_gradients, tiny_folder, split, samples)
    assert_close(two, one, 1e-6)


def test_masters_of_one_rank_get_the_gradient_of_two_in_shards(tiny_folder, one_rank, two_ranks):
    # bfloat16: two micro-batches one after the other (masters.py), or side by side (FSDP2).
    samples = make_samples(n_groups=2)
    one = one_rank(_bfloat16_gradients, tiny_folder, [samples[:3], samples[3:]])
    two = two_ranks(_bfloat16_gradients, tiny_folder, [samples[:3], samples[3:]])
    assert_close(two, one, 1e-6)


def _bfloat16_gradients(rank, folder, rows):
    rows = rows[rank :: dist.get_world_size()]
    share = feed.Share(rows, [10.0] * len(rows), [1.0] * len(rows), 0.0)
    return gradients(folder, CONFIG, share, compute_dtype=torch.bfloat16)


def test_replicas_and_late_reduction_leave_the_gradient_as_it_is(tiny_folder, two_ranks):
    # Two copies of the model instead of one in shards; a reduction a step or one a micro-batch.
    samples = make_samples(n_groups=6)
    config = dataclasses.replace(CONFIG, gradient_accumulation_steps=2)
    expected = two_ranks(planned_gradients, tiny_folder, config, samples)
    for options in ({"replicas": 2}, {"reduce_each": True}):
        found = two_ranks(planned_gradients, tiny_folder, config, samples, options)
        assert_close(found, expected, 1e-6)


def test_a_rank_without_samples_keeps_step_and_adds_nothing(tiny_folder, one_rank, two_ranks):
    samples = make_samples(n_groups=1, group_size=1)
    one = one_rank(planned_gradients, tiny_folder, CONFIG, samples)
    two = two_ranks(planned_gradients, tiny_folder, CONFIG, samples)
    assert_close(two, one, 1e-6)


def test_denominators_of_the_spec_and_of_the_step():
    # Two micro-batches on one rank: 3 + 5 trained tokens, then 2. The spec divides each by its own
    # count and averages over the 2: 16 and 4. `step` divides both by all 10.
    def row(*n_terms):
        return [
            type("Row", (), {"n_terms": n, "n_tokens": n, "samples": [None]})() for n in n_terms
        ]

    plan = planner.Plan(step=1, micro_batches=[row(8), row(2)], dropped={})

    def denominators(**options):
        (share,) = feed.shares(plan, dataclasses.replace(CONFIG, **options), world_size=1)
        return share.denominators

    assert denominators() == [16, 4]
    assert denominators(normalize="step") == [10, 10]
    assert denominators(loss="gspo") == [2, 2]  # one sample a micro-batch, mean of 2


def test_gathered_metrics_are_those_of_all_rows(two_ranks):
    records, norm, flops = two_ranks(_gathered)
    assert norm == 3.0 and flops == pytest.approx(5e12 + 7e12)
    # Rank 0 has ratios 1 and 2 over 2 terms, rank 1 has 4 over 1 term: mean 7 / 3, max 4.
    found = {name: (value, weight) for name, value, weight in records}
    assert found["sampling/importance_sampling_ratio/mean"] == (pytest.approx(7 / 3), 3)
    assert found["sampling/importance_sampling_ratio/max"][0] == pytest.approx(4)
    assert found["loss"][0] == pytest.approx(0.5 + 0.25)


def _gathered(rank):
    ratios = torch.tensor([[1.0, 2.0], [4.0]][rank])
    n = len(ratios)
    metrics = loss.loss_metrics(
        policy_log_probs=ratios.log() - 1,
        sampler_log_probs=torch.full((n,), -1.0),
        advantages=torch.ones(n),
        entropy=torch.ones(n),
        term_samples=torch.zeros(n, dtype=torch.int64),
        n_samples=1,
    )
    metrics["loss"] = torch.tensor([0.5, 0.25][rank])
    metrics["flops"] = torch.tensor([5e12, 7e12][rank])
    return update.gather_metrics([metrics], torch.tensor(3.0))


def sampled_at(folder, temperature):
    """(samples, samples): two that the model draws, with log-probs at the temperature, and raw."""
    causal_lm = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    found = []
    for sample in make_samples(n_groups=2, group_size=1):
        ids = sample.input_ids[:6].tolist()
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            torch.manual_seed(len(found))
            for _ in range(16):
                logits = causal_lm(torch.tensor([ids])).logits[0, -1]
                ids.append(int(torch.multinomial((logits / temperature).softmax(0), 1)))
            logits = causal_lm(torch.tensor([ids])).logits[0, :-1]
        targets = torch.tensor(ids[1:])[:, None]
        at, raw = ((logits / t).log_softmax(1).gather(1, targets)[:, 0] for t in (temperature, 1))
        trained = np.arange(len(ids)) >= 6
        options = dict(input_ids=np.array(ids, np.int32), trained=trained)
        options |= dict(top_ids=np.zeros((16, 0), np.int32), versions=np.where(trained, 0, -1))
        options |= dict(top_log_probs=np.zeros((16, 0), np.float32))
        sample = dataclasses.replace(sample, **options)
        log_probs = [np.append(0, values.numpy()).astype(np.float32) for values in (at, raw)]
        found.append([dataclasses.replace(sample, sampler_log_probs=given) for given in log_probs])
    return zip(*found)


def metrics_of(rank, folder, config, samples):
    policy = load_policy(config, folder, torch.device("cpu"))
    model.shard(policy, torch.device("cpu"), torch.float32, compile_layers=False)
    row = packing.pack_row(samples, BUDGET).to("cpu")
    tree = attention.TreeMask(row).prepare(policy.model.config)
    share, clock = feed.Share([samples], [32], [1.0]), grpo.Clock(torch.device("cpu"))
    seen = update.forward_backward(policy, config, share, [row], [tree], clock)
    records, *_ = update.gather_metrics(seen, torch.tensor(0.0))
    return {name: value for name, value, _ in records}


def test_the_ratio_is_one_at_the_samplers_temperature(tiny_folder, one_rank):
    config = dataclasses.replace(CONFIG, temperature=0.6, score_centering=False)
    name = "sampling/importance_sampling_ratio"
    at_temperature, raw = sampled_at(tiny_folder, 0.6)
    found = one_rank(metrics_of, tiny_folder, config, list(at_temperature))
    assert found[f"{name}/min"] == pytest.approx(1, abs=1e-4)
    assert found[f"{name}/max"] == pytest.approx(1, abs=1e-4)
    found = one_rank(metrics_of, tiny_folder, config, list(raw))  # what processed_logprobs prevents
    assert found[f"{name}/mean"] > 1.2


def test_all_ids_that_end_a_turn_count():
    def ids(generation, tokenizer):
        config = generation and types.SimpleNamespace(eos_token_id=generation[0])
        return model.end_token_ids(
            types.SimpleNamespace(generation_config=config),
            types.SimpleNamespace(eos_token_id=tokenizer),
        )

    assert ids([[7, 8]], 9) == [7, 8, 9] and ids([[7, 8]], 8) == [7, 8]
    assert ids([7], None) == [7] and ids([None], 9) == ids(None, 9) == [9]


@pytest.mark.parametrize(
    "schedule, warmup, expected",
    [
        ("constant", 0, [4, 4, 4, 4, 4, 4]),
        ("constant_with_warmup", 2, [0, 2, 4, 4, 4, 4]),
        ("linear", 2, [0, 2, 4, 3, 2, 1]),
        # 2 + 2 cos x at x = 0, pi / 4, ..., and with a third of the steps, ceil(0.33 * 6) = 2
        ("cosine", 0.33, [0, 2, 4, 2 + 2**0.5, 2, 2 - 2**0.5]),
    ],
)
def test_the_learning_rate_of_each_step_is_that_of_transformers(schedule, warmup, expected):
    config = Config(learning_rate=4.0, lr_scheduler_type=schedule, warmup_steps=warmup, max_steps=6)
    rates = [update.learning_rate(config, step) for step in range(1, 7)]
    assert rates == pytest.approx(expected, abs=1e-12)
    optimizer, theirs = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=4.0), []
    options = dict(num_warmup_steps=config.steps_of("warmup_steps"), num_training_steps=6)
    scheduler = transformers.get_scheduler(schedule, optimizer, **options)
    for _ in range(6):
        theirs += scheduler.get_last_lr()
        optimizer.step()
        scheduler.step()
    assert rates == pytest.approx(theirs, abs=1e-12)


def test_an_infinite_gradient_stops_the_run():
    module = torch.nn.Linear(2, 1, bias=False)
    module.weight.grad = torch.tensor([[1.0, float("inf")]])
    with pytest.raises(FloatingPointError, match="step 7.*learning_rate"):
        update.check_norm(float(update.clip_gradients(module, 1.0)), 7)


def test_float16_overflow_leaves_a_step_out_and_halves_the_scale(monkeypatch):
    monkeypatch.setattr(update.LossScale, "GOOD_STEPS", 2)
    scale, module = update.LossScale(torch.float16), torch.nn.Linear(2, 1, bias=False)
    module.weight.grad = torch.tensor([[3.0, 4.0]]) * scale.value
    assert float(update.clip_gradients(module, 0, scale.value)) == 5.0  # of the unscaled gradient
    assert module.weight.grad.tolist() == [[3.0, 4.0]]
    norms = [5.0, float("inf"), float("nan"), 5.0, 5.0, 5.0]
    seen = [(scale.admits(torch.tensor(norm)), scale.value) for norm in norms]
    assert seen == [
        (True, 2.0**16),
        (False, 2.0**15),
        (False, 2.0**14),
        (True, 2.0**14),
        (True, 2.0**15),  # two good ones
        (True, 2.0**15),
    ]
    again = update.LossScale(torch.float16, scale.state()["loss_scale"])
    assert (again.value, again.good) == (2.0**15, 1)
    with pytest.raises(FloatingPointError, match="--bf16"):
        while True:
            scale.admits(float("inf"))
    plain = update.LossScale(torch.bfloat16, [2.0**15, 1])  # of a checkpoint in float16
    assert plain.state() == {}  # so that a resumed run in float16 starts at 2^16
    assert plain.value == 1.0 and plain.admits(float("inf"))  # check_norm ends such a run


def test_a_float16_gradient_is_the_float32_one_but_for_rounding(tiny_folder, one_rank):
    samples = make_samples(n_groups=2)
    exact = one_rank(planned_gradients, tiny_folder, CONFIG, samples)
    options = {"compute_dtype": torch.float16, "loss_scale": 2.0**10}
    scaled = one_rank(planned_gradients, tiny_folder, CONFIG, samples, options)
    assert_close({n: g / 2.0**10 for n, g in scaled.items()}, exact, 1e-2)


@pytest.mark.parametrize("centered, top_k", [(True, 0), (False, 0), (True, 5)])
def test_warming_up_forwards_the_longest_row_and_leaves_nothing(
    tiny_folder, one_rank, centered, top_k
):
    config = dataclasses.replace(CONFIG, score_centering=centered, top_k=top_k)

    def warm_up(rank):
        policy, seen = load_policy(config, tiny_folder, torch.device("cpu")), []
        model.shard(policy, torch.device("cpu"), torch.bfloat16, compile_layers=False)
        before = {name: value.clone() for name, value in policy.state_dict().items()}
        policy.register_forward_hook(lambda _, inputs, found: seen.append((inputs[0], found[0])))
        grpo.warm_up(policy, config, BUDGET, torch.device("cpu"))
        ((row, log_probs),) = seen
        assert len(row.input_ids) == BUDGET and (row.set_ids is None) == (top_k == 0)
        # 3 candidates of the sampler beside each token, where the loss wants them
        assert log_probs.shape == (BUDGET - 1, 4 if centered else 1) and log_probs.requires_grad
        assert all(parameter.grad is None for parameter in policy.parameters())
        assert all(torch.equal(value, before[n]) for n, value in policy.state_dict().items())

    one_rank(warm_up)


def test_replicas_that_do_not_divide_the_ranks_are_refused_before_anything_is_estimated(one_rank):
    config = dataclasses.replace(CONFIG, replicas=2)
    with pytest.raises(ValueError, match="--replicas 2 does not divide the 1"):
        one_rank(lambda rank: grpo.sharded_policy(config, None, torch.device("cpu"), 64, False))


def test_a_result_and_an_error_come_back_from_the_background():
    assert grpo.in_background(lambda: 3)() == 3
    begun, go_on = threading.Event(), threading.Event()
    found = grpo.in_background(lambda: begun.set() or go_on.wait(60))
    assert begun.wait(60)  # before anybody asks
    go_on.set()
    assert found() is True
    with pytest.raises(ZeroDivisionError):
        grpo.in_background(lambda: 1 / 0)()


def test_clipping_scales_to_the_norm():
    module = torch.nn.Linear(2, 1, bias=False)
    module.weight.grad = torch.tensor([[3.0, 4.0]])
    assert float(update.clip_gradients(module, 1.0)) == pytest.approx(5.0)
    assert module.weight.grad.tolist() == [[pytest.approx(0.6), pytest.approx(0.8)]]
    module.weight.grad = torch.tensor([[3.0, 4.0]])
    update.clip_gradients(module, 0)  # 0: never
    assert module.weight.grad.tolist() == [[3.0, 4.0]]


def test_the_saved_folder_is_the_policy(tiny_folder, two_ranks, tmp_path):
    from transformers import AutoModelForCausalLM

    saved = two_ranks(_save, tiny_folder, tmp_path / "final")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "final")
    assert saved.keys() == dict(again.named_parameters()).keys()
    for name, parameter in again.named_parameters():
        assert torch.equal(parameter.detach(), saved[name]), name


def _save(rank, folder, target):
    policy = load_policy(CONFIG, folder, torch.device("cpu"))
    tokenizer = model.load_tokenizer(CONFIG, folder)
    model.shard(policy, torch.device("cpu"), torch.float32, compile_layers=False)
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.mul_(1.5)
    model.save_pretrained(policy, tokenizer, target, torch.float32)
    named = policy.model.named_parameters()
    return {name: whole(parameter.detach()) for name, parameter in named}


def test_a_wrong_model_path_is_one_line():
    with pytest.raises(ValueError, match="no/such/folder.*smollm2-135m") as error:
        load_policy(CONFIG, "no/such/folder", torch.device("cpu"))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("model_type", "options"),
    [
        ("cohere", {"logit_scale": 0.25}),
        ("granite", {"logits_scaling": 8.0}),
        ("hyperclovax", {"logits_scaling": 0.5}),
        ("gemma2", {"final_logit_softcapping": 2.0, "head_dim": 16}),
        ("llama", {"tie_word_embeddings": True}),
        ("phi", {}),  # a head with a bias
    ],
)
def test_the_head_does_to_the_logits_what_the_model_does(model_type, options):
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(
        model_type,
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        pad_token_id=0,
        initializer_range=0.5,
        **options,
    )
    attention.register_attention()
    causal_lm = transformers.AutoModelForCausalLM.from_config(
        config, attn_implementation=attention.ATTENTION
    )
    if model_type == "phi":
        torch.nn.init.normal_(causal_lm.lm_head.bias)
    ids = torch.randint(1, 64, (12,)).tolist()
    row = packing.pack_row([grpo.text_sample(ids)], len(ids)).to("cpu")
    tree = attention.TreeMask(row).prepare(config)
    log_probs, entropy, _ = model.Policy(causal_lm)(row, tree, temperature=0.7)

    logits = causal_lm(torch.tensor([ids]), tree=tree).logits[0, :-1] / 0.7
    expected = logits.log_softmax(-1)
    sampled = expected.gather(1, torch.tensor(ids[1:])[:, None])
    torch.testing.assert_close(log_probs, sampled, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(entropy, -(expected.exp() * expected).sum(-1), atol=1e-5, rtol=1e-5)


def test_a_long_wait_says_what_became_of_the_groups(monkeypatch, capsys):
    waits = [TimeoutError, None]  # one second without a plan, then the end of the prompts

    def next_plan(self, timeout):
        if found := waits.pop(0):
            raise found

    waiting = feed.Feed.__new__(feed.Feed)
    waiting.waits_since = time.monotonic() - 100
    waiting.pulled_tokens = waiting.released_tokens = 0
    worker = {"n_dropped": 7, "queue_size": 0, "check": lambda s: 0, "release": lambda s, n: 0}
    waiting.worker = type("Worker", (), worker)()
    waiting.planner = type("Planner", (), {"next": next_plan})()
    with monkeypatch.context() as patch:
        patch.setattr(feed, "TELL_S", 0.0)  # all ranks hear of it, whose collectives have a limit
        assert waiting._wait(must_sync=lambda: False) is feed.STILL_WAITING
    said = capsys.readouterr().out
    assert said.startswith("waiting for samples for 100 s; meanwhile 7 groups taught nothing")
    assert waiting._wait(must_sync=lambda: False) is None and waiting.waits_since is None
    assert feed.waiting(61.2, 0) == "waiting for samples for 61 s"


def test_the_time_in_the_queue_ends_where_the_step_begins(monkeypatch):
    now = [103.0]
    monkeypatch.setattr(feed.time, "time", lambda: now[0])
    samples = make_samples(n_groups=1, group_size=2)
    for sample, created_at in zip(samples, (100.0, 101.0)):
        sample.created_at = created_at
    options = dict(token_budget=BUDGET, world_size=1, gradient_accumulation_steps=1, first_step=1)
    (plan,) = planner.plan_steps(samples, **options)
    allowed = []
    worker = {
        "n_dropped": 0,
        "queue_size": 5,
        "check": lambda s: 0,
        "release": lambda s, n: 0,
        "drain_records": lambda s: [],
        "set_allowance": lambda s, n: allowed.append(n),
    }
    fed = feed.Feed.__new__(feed.Feed)
    fed.config, fed.budget, fed.pad, fed.evaluation = CONFIG, BUDGET, None, None
    fed.waits_since = None
    fed.pulled_tokens, fed.released_tokens, fed.n_tokens = 40, 10, 0
    fed.next_prompt, fed.used, fed.n_prompts = 0, set(), 1
    fed.worker = type("Worker", (), worker)()
    fed.planner = type("Planner", (), {"next": lambda s, timeout: plan})()
    fed.plan = fed._wait(must_sync=lambda: False)
    now[0] = 110.0  # forward and backward take seven seconds
    found = {name: (value, weight) for name, value, weight in fed.records()}
    assert found["sample/time_in_queue_s"] == (2.5, 2)  # 3 and 2 seconds
    assert found["rollout/queue_size"] == (5, 1)
    for max_staleness in (0, 1, 4):  # max(max_staleness, 1) times the step's 30 tokens
        fed.config = dataclasses.replace(CONFIG, max_staleness=max_staleness)
        fed._allow(fed.step_tokens)
    assert allowed == [30, 30, 120]


def test_what_is_dropped_after_the_last_step_is_counted():
    fed = feed.Feed.__new__(feed.Feed)
    fed.step, fed.plan, fed.dump, fed.evaluation = 7, None, None, None
    fed.next_prompt, fed.used, fed.n_prompts = 6, {7}, 10
    late = [("reward", 1.0, 8.0)]
    worker = {"drain_ended": lambda s: ([6, 9], []), "drain_records": lambda s: late}
    fed.worker = type("Worker", (), worker)()
    dropped = planner.Counter(stale=3, oversize=1)
    fed.planner = type("Planner", (), {"left_over": planner.Plan(8, [], dropped, {8})})()
    fed._use_prompts()
    assert fed.next_prompt == 10 and not fed.used
    assert fed.finish() == [
        ("reward", 1.0, 8.0),
        ("sample/dropped_stale_count", 3, 1),
        ("batch/dropped_oversize_count", 1, 1),
        ("epoch", 1.0, 1),
    ]


def test_rates_of_a_step_are_amounts_over_its_seconds(one_rank, monkeypatch):
    def found():
        plan = types.SimpleNamespace(n_tokens=100, n_trained=[10, 20])
        seconds = {"perf/step_s": 8.0, "perf/fwd_bwd_s": 2.0}
        records = grpo.speed(seconds, plan, 5e11, torch.device("cpu"), CONFIG)
        return {name: (value, weight) for name, value, weight in records}

    assert found() == {
        "perf/step_s": (8.0, 1.0),
        "perf/fwd_bwd_s": (2.0, 1.0),
        "perf/fwd_bwd_forwarded_tokens_per_s": (50.0, 2.0),  # 100 tokens in 2 s; weighs 2 s
        "perf/wall_clock_forwarded_tokens_per_s": (12.5, 8.0),
        "perf/wall_clock_trained_tokens_per_s": (3.75, 8.0),  # 10 + 20 in 8 s
    }
    monkeypatch.setattr(model, "peak_flops", lambda device, dtype: 1e12)
    assert found()["perf/fwd_bwd_mfu"] == (25.0, 2.0)  # 5e11 in 2 s of 1e12 a second, in per cent
    assert found()["perf/wall_clock_mfu"] == (6.25, 8.0)
