"""The training step: what a split over ranks, micro-batches and rows must not change."""

import dataclasses

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import transformers

import attention
import chat
import grpo
import loss
import model
import packing
import planner
from config import Config
from feed import shares

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
                    set_ids=None,
                    set_offsets=None,
                    versions=np.where(trained, 0, -1).astype(np.int32),
                    advantage=float(random.normal()),
                    group_id=group,
                )
            )
    return samples


def gradients(folder, config, batches, denominators):
    """{name: whole gradient} after forward and backward of this rank's rows."""
    torch.set_num_threads(1)
    policy = model.load_policy(config, folder, torch.device("cpu"))
    model.shard(policy, torch.device("cpu"), torch.float32, compile_layers=False)
    for samples, denominator in zip(batches, denominators):
        row = packing.pack_row(samples, BUDGET).to("cpu")
        tree = attention.TreeMask(row, config.attention).prepare(policy.model.config)
        log_probs, _ = policy(row, tree, config.temperature)
        terms = grpo.term_losses(config, row, log_probs, len(samples))
        (terms.sum() / denominator).backward()
    return {n: p.grad.full_tensor().clone() for n, p in policy.named_parameters()}


@pytest.fixture(scope="module")
def one_rank(tmp_path_factory):
    """run(job, *arguments) -> job(0, *arguments), in a process group of one."""
    store = tmp_path_factory.mktemp("one_rank") / "store"
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=1)
    yield lambda job, *arguments: job(0, *arguments)
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory):
    """run(job, *arguments) -> rank 0's job(0, *arguments), with rank 1 doing its own."""
    store = f"file://{tmp_path_factory.mktemp('two_ranks') / 'store'}"
    spawn = mp.get_context("spawn")
    ends = [spawn.Pipe() for _ in range(2)]
    ranks = [
        spawn.Process(target=_serve_rank, args=(rank, store, ends[rank][1]), daemon=True)
        for rank in range(2)
    ]
    for process in ranks:
        process.start()

    def run(job, *arguments):
        for end, _ in ends:
            end.send((job, arguments))
        results = [end.recv() if end.poll(100) else TimeoutError("rank hangs") for end, _ in ends]
        for result in results:
            if isinstance(result, Exception):
                raise result
        return results[0]

    yield run
    for end, _ in ends:
        end.send(None)
    for process in ranks:
        process.join(10)


def _serve_rank(rank, store, end):
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=2)
    while (task := end.recv()) is not None:
        job, arguments = task
        try:
            end.send(job(rank, *arguments))
        except Exception as error:
            end.send(error)
    dist.destroy_process_group()


def planned_gradients(rank, folder, config, samples):
    """Gradients of one step that the planner splits over these ranks."""
    plan = next(
        planner.plan_steps(
            samples,
            token_budget=BUDGET,
            world_size=dist.get_world_size(),
            gradient_accumulation_steps=config.gradient_accumulation_steps,
        )
    )
    share = shares(plan, config, dist.get_world_size())[rank]
    assert sum(len(row.samples) for row in plan.rows) == len(samples), "all in one step"
    return gradients(folder, config, share.rows, share.denominators)


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


def test_a_rank_without_samples_keeps_step_and_adds_nothing(tiny_folder, one_rank, two_ranks):
    samples = make_samples(n_groups=1, group_size=1)
    one = one_rank(planned_gradients, tiny_folder, CONFIG, samples)
    two = two_ranks(planned_gradients, tiny_folder, CONFIG, samples)
    assert_close(two, one, 1e-6)


def test_denominators_of_the_spec_and_of_the_step():
    # Two micro-batches on one rank: 3 + 5 trained tokens, then 2. The spec divides each by its own
    # count and averages over the 2: 16 and 4. `step` divides both by all 10.
    def row(*n_terms):
        return [type("Row", (), {"n_terms": n, "samples": [None]})() for n in n_terms]

    plan = planner.Plan(step=1, micro_batches=[row(8), row(2)], dropped={})

    def denominators(**options):
        (share,) = shares(plan, dataclasses.replace(CONFIG, **options), world_size=1)
        return share.denominators

    assert denominators() == [16, 4]
    assert denominators(normalize="step") == [10, 10]
    assert denominators(loss="gspo") == [2, 2]  # one sample a micro-batch, mean of 2


def test_gathered_metrics_are_those_of_all_rows(two_ranks):
    records = two_ranks(_gathered)
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
    return grpo.gather_metrics([metrics | {"loss": torch.tensor([0.5, 0.25][rank])}])


def test_an_infinite_gradient_stops_the_run():
    parameter = torch.nn.Parameter(torch.ones(2))
    parameter.grad = torch.tensor([1.0, float("inf")])
    module = torch.nn.Module()
    module.parameter = parameter
    with pytest.raises(FloatingPointError, match="step 7.*learning_rate"):
        grpo.clip_gradients(module, 1.0, 7)


def test_clipping_scales_to_the_norm():
    module = torch.nn.Linear(2, 1, bias=False)
    module.weight.grad = torch.tensor([[3.0, 4.0]])
    assert grpo.clip_gradients(module, 1.0, 1) == pytest.approx(5.0)
    assert module.weight.grad.tolist() == [[pytest.approx(0.6), pytest.approx(0.8)]]
    module.weight.grad = torch.tensor([[3.0, 4.0]])
    grpo.clip_gradients(module, 0, 1)  # 0: never
    assert module.weight.grad.tolist() == [[3.0, 4.0]]


def test_the_saved_folder_is_the_policy(tiny_folder, two_ranks, tmp_path):
    from transformers import AutoModelForCausalLM

    saved = two_ranks(_save, tiny_folder, tmp_path / "final")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "final")
    assert saved.keys() == dict(again.named_parameters()).keys()
    for name, parameter in again.named_parameters():
        assert torch.equal(parameter.detach(), saved[name]), name


def _save(rank, folder, target):
    policy = model.load_policy(CONFIG, folder, torch.device("cpu"))
    tokenizer = model.load_tokenizer(CONFIG, folder)
    model.shard(policy, torch.device("cpu"), torch.float32, compile_layers=False)
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.mul_(1.5)
    model.save_pretrained(policy, tokenizer, target, torch.float32)
    named = policy.model.named_parameters()
    return {name: parameter.detach().full_tensor() for name, parameter in named}


def test_a_wrong_model_path_is_one_line():
    with pytest.raises(ValueError, match="no/such/folder.*smollm2-135m") as error:
        model.load_policy(CONFIG, "no/such/folder", torch.device("cpu"))
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
    log_probs, entropy = model.Policy(causal_lm)(row, tree, temperature=0.7)

    logits = causal_lm(torch.tensor([ids]), tree=tree).logits[0, :-1] / 0.7
    expected = logits.log_softmax(-1)
    sampled = expected.gather(1, torch.tensor(ids[1:])[:, None])
    torch.testing.assert_close(log_probs, sampled, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(entropy, -(expected.exp() * expected).sum(-1), atol=1e-5, rtol=1e-5)
