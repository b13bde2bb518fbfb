"""loss.py against dense autograd in float64, and against numbers worked by hand. CPU, one core."""

import functools
import math

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import lm_head
import loss

LOG = math.log


def dense_candidate_log_probs(
    hidden,
    weight,
    candidates,
    *,
    temperature=1.0,
    bias=None,
    softcap=None,
    logit_scale=1.0,
    vocab_size=None,
    set_ids=None,
    set_offsets=None,
):
    """The definition: all logits, log_softmax, autograd. A set is a -inf mask."""
    logits = hidden @ weight.T if bias is None else hidden @ weight.T + bias
    logits = logits * logit_scale
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    logits = logits / temperature
    allowed = torch.ones(logits.shape, dtype=torch.bool)
    allowed[:, vocab_size if vocab_size is not None else weight.shape[0] :] = False
    if set_ids is not None:
        in_set = torch.zeros_like(allowed)
        for m in range(len(hidden)):
            in_set[m, set_ids[set_offsets[m] : set_offsets[m + 1]]] = True
        allowed &= in_set
    log_p = logits.masked_fill(~allowed, -math.inf).log_softmax(1)
    entropy = -(log_p.exp() * log_p.masked_fill(~allowed, 0)).sum(1)
    known = (candidates >= 0) & allowed.gather(1, candidates.clamp(min=0))
    picked = log_p.gather(1, candidates.clamp(min=0))
    return torch.where(known, picked, -math.inf), entropy


def random_sets(n_terms, vocab_size, largest, generator):
    """CSR of random sets, sizes 1 to largest, ids sorted as the server sends them."""
    sets = []
    for _ in range(n_terms):
        size = int(torch.randint(1, largest + 1, (1,), generator=generator))
        sets.append(torch.randperm(vocab_size, generator=generator)[:size].sort().values)
    sizes = torch.tensor([0] + [len(ids) for ids in sets])
    return torch.cat([*sets, torch.empty(0, dtype=torch.int64)]), sizes.cumsum(0)


def random_case(seed, dtype):
    """Shapes, options and inputs of one comparison with the dense head."""
    g = torch.Generator().manual_seed(seed)

    def pick(*choices):
        return choices[int(torch.randint(len(choices), (1,), generator=g))]

    def cast(value):
        return value.to(dtype) if torch.is_tensor(value) and value.is_floating_point() else value

    n_terms, hidden_size, vocab = pick(1, 2, 7, 19), pick(1, 3, 8), pick(1, 2, 13, 40)
    n_candidates = pick(1, 2, 9, 33)
    hidden = torch.randn(n_terms, hidden_size, generator=g, dtype=torch.float64)
    weight = torch.randn(vocab, hidden_size, generator=g, dtype=torch.float64)
    candidates = torch.randint(-1, vocab, (n_terms, n_candidates), generator=g)
    options = {
        "temperature": pick(1.0, 0.7, 1.3),
        "logit_scale": pick(1.0, 0.0625, 2.5),
        "softcap": pick(None, None, 2.0),
        "vocab_size": pick(None, max(1, vocab - 3)),
    }
    if pick(True, False):
        options["bias"] = torch.randn(vocab, generator=g, dtype=torch.float64)
    if pick(True, False):
        visible = options["vocab_size"] or vocab
        set_ids, set_offsets = random_sets(n_terms, visible, pick(1, visible), g)
        options |= {"set_ids": set_ids, "set_offsets": set_offsets}
        candidates[:, 0] = set_ids[set_offsets[:-1]]  # the sampled token is in its set
    upstream = torch.randn(n_terms, n_candidates, generator=g, dtype=torch.float64)
    options = {name: cast(value) for name, value in options.items()}
    return cast(hidden), cast(weight), candidates, options, cast(upstream)


def gradients(head, hidden, weight, candidates, options, upstream, **more):
    """(log_probs, entropy, gradients of sum(upstream * log_probs) over the finite entries)."""
    leaves = [hidden, weight] + ([options["bias"]] if "bias" in options else [])
    leaves = [leaf.clone().requires_grad_() for leaf in leaves]
    options = options | ({"bias": leaves[2]} if "bias" in options else {})
    log_probs, entropy = head(leaves[0], leaves[1], candidates, **options, **more)
    # Set aside the -inf before weighing, as the losses do.
    finite = torch.where(log_probs.isfinite(), log_probs, 0)
    return log_probs.detach(), entropy, torch.autograd.grad((upstream * finite).sum(), leaves)


# ---------------------------------------------------------------------------------------- 1. head


@pytest.mark.parametrize("seed", range(60))
def test_head_and_its_gradients_equal_dense_autograd(seed, monkeypatch):
    monkeypatch.setattr(lm_head, "PIECE", 4)  # tiles of 8 are two pieces, of 5 none
    for dtype, tolerance in ((torch.float64, 1e-10), (torch.float32, 1e-5)):
        hidden, weight, candidates, options, upstream = random_case(seed, dtype)
        # The oracle is in float64 for both, from the same (rounded) inputs.
        wide = {
            k: v.double() if torch.is_tensor(v) and v.is_floating_point() else v
            for k, v in options.items()
        }
        expected = gradients(
            dense_candidate_log_probs,
            hidden.double(),
            weight.double(),
            candidates,
            wide,
            upstream.double(),
        )
        for tile in ((32768, 8192), (3, 5), (3, 8)):  # one tile; many, with ragged ends
            actual = gradients(
                lm_head.candidate_log_probs,
                hidden,
                weight,
                candidates,
                options,
                upstream,
                tile=tile,
            )
            assert actual[0].dtype == actual[1].dtype == dtype
            for a, e in zip((*actual[:2], *actual[2]), (*expected[:2], *expected[2]), strict=True):
                # Sums of up to 19 x 33 terms of size 1: an absolute tolerance in that unit.
                scale = max(1.0, e[e.isfinite()].abs().max().item() if e.isfinite().any() else 1.0)
                torch.testing.assert_close(a.double(), e, rtol=0, atol=tolerance * scale)


def test_gradcheck_with_every_option_at_once():
    g = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(n, 3, generator=g, dtype=torch.float64) for n in (4, 11))
    bias = torch.randn(11, generator=g, dtype=torch.float64)
    set_ids, set_offsets = random_sets(4, 9, 9, g)
    candidates = torch.stack([set_ids[set_offsets[:-1]], set_ids[set_offsets[1:] - 1]], 1)

    def head(hidden, weight, bias):
        return lm_head.candidate_log_probs(
            hidden,
            weight,
            candidates,
            bias=bias,
            temperature=0.8,
            softcap=3.0,
            logit_scale=1.5,
            vocab_size=9,
            set_ids=set_ids,
            set_offsets=set_offsets,
            tile=(3, 4),
        )[0]

    inputs = [t.requires_grad_() for t in (hidden, weight, bias)]
    assert torch.autograd.gradcheck(head, inputs, atol=1e-8)


def test_scale_comes_before_cap_and_cap_before_temperature():
    # products (1, -1); scale 2 -> (2, -2); cap 2 -> 2 tanh(+-1) = +-1.52319; temperature 0.5 ->
    # +-3.04638. log p of the first = -log(1 + exp(-6.09275)) = -0.0022567
    log_probs, _ = lm_head.candidate_log_probs(
        torch.ones(1, 1),
        torch.tensor([[1.0], [-1.0]]),
        torch.tensor([[0]]),
        logit_scale=2.0,
        softcap=2.0,
        temperature=0.5,
    )
    assert log_probs.item() == pytest.approx(-0.0022567, abs=1e-6)


def test_candidate_without_probability_is_minus_inf_and_takes_no_gradient():
    hidden = torch.ones(1, 1, requires_grad=True)
    weight = torch.tensor([[0.0], [1.0], [2.0], [9.0]], requires_grad=True)
    # vocab_size 3: id 3 is padding. Set {0, 1}: id 2 is outside. -1 is no candidate.
    candidates = torch.tensor([[1, 3, 2, -1]])
    log_probs, entropy = lm_head.candidate_log_probs(
        hidden,
        weight,
        candidates,
        vocab_size=3,
        set_ids=torch.tensor([0, 1]),
        set_offsets=torch.tensor([0, 2]),
    )
    # p(1) = e / (1 + e) = 0.731059; entropy = -0.731059 log 0.731059 - 0.268941 log 0.268941
    assert log_probs[0, 0].item() == pytest.approx(LOG(0.731059), abs=1e-6)
    assert log_probs[0, 1:].tolist() == [-math.inf] * 3
    assert entropy.item() == pytest.approx(0.582203, abs=1e-6)
    log_probs.backward(torch.tensor([[1.0, math.nan, math.inf, -5.0]]))
    # d log p(1) = (1 - p(1)) d(z1 - z0): 0.268941 to w1, -0.268941 to w0, times w1 - w0 to hidden
    torch.testing.assert_close(weight.grad.flatten(), torch.tensor([-0.268941, 0.268941, 0, 0]))
    assert hidden.grad.item() == pytest.approx(0.268941, abs=1e-6)


def test_padded_vocabulary_equals_the_vocabulary_cut_off():
    hidden, weight, candidates = torch.randn(5, 4), torch.randn(12, 4), torch.randint(10, (5, 3))
    padded = lm_head.candidate_log_probs(hidden, weight * 1.0, candidates, vocab_size=10)
    cut = lm_head.candidate_log_probs(hidden, weight[:10], candidates)
    assert torch.equal(padded[0], cut[0]) and torch.equal(padded[1], cut[1])


class Largest(TorchDispatchMode):
    """Remembers the most elements of a tensor that any operation made."""

    n = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, (tuple, list)) else [out]:
            if isinstance(tensor, torch.Tensor):
                self.n = max(self.n, tensor.numel())
        return out


def test_no_tensor_is_larger_than_a_tile_or_the_weight():
    n_terms, width, vocabulary, tile = 512, 8, 4096, (64, 256)
    hidden = torch.randn(n_terms, width, requires_grad=True)
    weight = torch.randn(vocabulary, width, requires_grad=True)
    candidates = torch.randint(0, vocabulary, (n_terms, 9))
    with Largest() as largest:
        log_probs, _ = lm_head.candidate_log_probs(hidden, weight, candidates, tile=tile)
        log_probs.sum().backward()
    assert 64 * 256 <= largest.n <= vocabulary * width  # all logits would be 64 times that
    with Largest() as largest:
        (hidden @ weight.T).log_softmax(1).gather(1, candidates).sum().backward()
    assert largest.n == n_terms * vocabulary  # what the check sees of a dense head


def test_zero_terms_give_zero_gradients():
    hidden, weight = torch.empty(0, 4, requires_grad=True), torch.randn(6, 4, requires_grad=True)
    for sets in ({}, {"set_ids": torch.empty(0).long(), "set_offsets": torch.zeros(1).long()}):
        log_probs, entropy = lm_head.candidate_log_probs(
            hidden, weight, torch.empty(0, 9).long(), **sets
        )
        assert log_probs.shape == (0, 9) and entropy.shape == (0,)
        log_probs.sum().backward()
    assert hidden.grad.shape == (0, 4) and weight.grad.abs().sum() == 0


def test_frozen_weight_and_frozen_hidden_leave_the_other_gradient_unchanged():
    hidden, weight, candidates = torch.randn(5, 4), torch.randn(9, 4), torch.randint(9, (5, 3))
    both = gradients(lm_head.candidate_log_probs, hidden, weight, candidates, {}, torch.ones(5, 3))[
        2
    ]
    for i, names in enumerate((("hidden",), ("weight",))):
        leaves = {"hidden": hidden.clone(), "weight": weight.clone()}
        leaves[names[0]].requires_grad_()
        lm_head.candidate_log_probs(**leaves, candidates=candidates)[0].sum().backward()
        assert torch.equal(leaves[names[0]].grad, both[i])


def test_tied_weight_gets_the_gradient_of_both_uses():
    weight = torch.randn(9, 4, dtype=torch.float64, requires_grad=True)
    ids, candidates = torch.randint(9, (5,)), torch.randint(9, (5, 3))

    def grad(head):
        return torch.autograd.grad(head(weight[ids].tanh(), weight, candidates)[0].sum(), weight)[0]

    difference = grad(lm_head.candidate_log_probs) - grad(dense_candidate_log_probs)
    assert difference.abs().max() < 1e-12


def test_bfloat16_rounds_products_only_and_fp32_head_not_even_those():
    g = torch.Generator().manual_seed(3)
    hidden, weight = (torch.randn(n, 64, generator=g).bfloat16() for n in (32, 300))
    candidates = torch.randint(300, (32, 9), generator=g)
    upstream = torch.randn(32, 9, generator=g)
    exact = gradients(
        dense_candidate_log_probs,
        hidden.double(),
        weight.double(),
        candidates,
        {},
        upstream.double(),
    )
    for fp32_head, tolerance in ((False, 0.13), (True, 1e-4)):
        # Logits of size 16 to 32 round by at most 2^-4 each: log p by twice that at most.
        log_probs, _, grads = gradients(
            lm_head.candidate_log_probs,
            hidden,
            weight,
            candidates,
            {},
            upstream,
            fp32_head=fp32_head,
            tile=(10, 70),
        )
        assert log_probs.dtype == torch.float32
        assert (log_probs - exact[0]).abs().max() < tolerance
        for grad, expected in zip(grads, exact[2], strict=True):
            assert grad.dtype == torch.bfloat16
            # 2^-8 is the rounding of bf16; gradients of logits and results are rounded once each.
            error = (grad.double() - expected).norm() / expected.norm()
            assert error < (0.05 if not fp32_head else 2 * 2**-8)


def test_fp32_head_uses_a_float32_weight_unrounded():
    # 1 + 2^-10 is 1 in bf16. Products 1 + 2^-10 and 0: log p = -log(1 + exp(-1 - 2^-10))
    weight = torch.tensor([[1 + 2**-10], [0.0]])
    for fp32_head, product in ((False, 1.0), (True, 1 + 2**-10)):
        log_probs, _ = lm_head.candidate_log_probs(
            torch.ones(1, 1).bfloat16(), weight, torch.tensor([[0]]), fp32_head=fp32_head
        )
        assert log_probs.item() == pytest.approx(-LOG(1 + math.exp(-product)), abs=1e-6)


def test_weight_gradient_does_not_depend_on_the_tiles_even_in_bfloat16():
    g = torch.Generator().manual_seed(4)
    hidden, weight = (torch.randn(n, 16, generator=g).bfloat16() for n in (64, 50))
    candidates, upstream = torch.randint(50, (64, 2), generator=g), torch.ones(64, 2)
    case = (lm_head.candidate_log_probs, hidden, weight, candidates, {}, upstream)
    grads = [gradients(*case, tile=tile)[2][1] for tile in ((64, 50), (1, 50), (64, 7))]
    # Rounding every row's product to bf16 would lose about 2^-8 x sqrt(64) = 3% here; summed in
    # float32 and rounded once, two splits differ by one rounding at most.
    for other in grads[1:]:
        assert ((grads[0] - other).float().abs() <= 2**-7 * grads[0].float().abs() + 1e-3).all()


def test_compiled_tiles_are_compiled_once_for_any_number_of_terms(monkeypatch):
    graphs = []

    def count(graph, _):
        products = next(node for node in graph.graph.nodes if node.name == "l_products_")
        graphs.append(products.meta["example_value"].shape)
        return graph

    monkeypatch.setattr(
        lm_head,
        "_compile",
        functools.cache(lambda f: torch.compile(f, backend=count, fullgraph=True)),
    )
    torch._dynamo.reset()
    for n_terms in (7, 12, 5, 30):
        hidden, weight = torch.randn(n_terms, 4).double(), torch.randn(20, 4).double()
        candidates = torch.randint(20, (n_terms, 3))
        case = (hidden, weight, candidates, {}, torch.ones(n_terms, 3).double())
        compiled = gradients(lm_head.candidate_log_probs, *case, tile=(100, 8), compiled=True)
        plain = gradients(lm_head.candidate_log_probs, *case, tile=(100, 8))
        for a, b in zip((*compiled[:2], *compiled[2]), (*plain[:2], *plain[2]), strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=1e-12)
    # Vocabulary 20 in tiles of 8, 8 and 4: two widths, forward and backward.
    assert [width for _, width in graphs] == [8, 4, 8, 4]
    assert [(type(rows), type(width)) for rows, width in graphs] == [(torch.SymInt, int)] * 4


def test_mistakes_are_named():
    args = (torch.zeros(2, 3), torch.zeros(5, 3), torch.zeros(2, 1).long())
    with pytest.raises(ValueError, match="temperature"):
        lm_head.candidate_log_probs(*args, temperature=0.0)
    with pytest.raises(ValueError, match="both or neither"):
        lm_head.candidate_log_probs(*args, set_ids=torch.zeros(1).long())
    with pytest.raises(ValueError, match="one more than terms"):
        lm_head.candidate_log_probs(
            *args, set_ids=torch.zeros(1).long(), set_offsets=torch.zeros(2)
        )
    with pytest.raises(ValueError, match="row for each"):
        lm_head.candidate_log_probs(*args[:2], torch.zeros(3, 1).long())


def truncated(probabilities, *, top_k=None, top_p=None, min_p=None):
    """bool[M, V]: what the sampler keeps. top_p keeps the token that crosses the line."""
    order = probabilities.sort(1, descending=True)
    keep = torch.ones_like(probabilities, dtype=torch.bool)
    if top_k is not None:
        keep &= torch.arange(keep.shape[1]) < top_k
    if top_p is not None:
        keep &= order.values.cumsum(1) - order.values < top_p
    if min_p is not None:
        keep &= order.values >= min_p * order.values[:, :1]
    return torch.zeros_like(keep).scatter(1, order.indices, keep)


@pytest.mark.parametrize(
    "how", [{"top_k": 20}, {"top_k": 20, "top_p": 0.8}, {"top_k": 20, "min_p": 0.05}]
)
def test_unchanged_policy_has_ratio_one_under_truncated_sampling_with_the_set_only(how):
    g = torch.Generator().manual_seed(5)
    hidden, weight = torch.randn(200, 32, generator=g), torch.randn(500, 32, generator=g) / 4
    p = (hidden @ weight.T).softmax(1)
    keep = truncated(p, **how)
    q = torch.where(keep, p, 0) / torch.where(keep, p, 0).sum(1, keepdim=True)
    sampled = torch.multinomial(q, 1, generator=g)
    set_ids = keep.nonzero()[:, 1]
    set_offsets = torch.cat([torch.zeros(1).long(), keep.sum(1).cumsum(0)])

    def mean_ratio(**sets):
        log_p, _ = lm_head.candidate_log_probs(hidden, weight, sampled, tile=(64, 128), **sets)
        log_r, present = loss.log_ratio(
            policy_log_probs=log_p[:, 0], sampler_log_probs=q.gather(1, sampled)[:, 0].log()
        )
        assert present.all()
        return log_r.exp().mean().item()

    assert mean_ratio(set_ids=set_ids, set_offsets=set_offsets) == pytest.approx(1, abs=1e-5)
    assert mean_ratio() < 0.95


def test_the_head_keeps_its_own_column_and_drops_missing_candidates():
    top_log_probs = torch.tensor([[-1.0, -9999.0], [math.nan, -2.0], [-math.inf, -9998.0]])
    ids = loss.candidate_ids(
        torch.tensor([7, 8, 9]), torch.tensor([[7, 1], [2, 3], [4, 5]]).int(), top_log_probs
    )
    # The sampled 7 is also the most likely token: both columns stay.
    assert ids.tolist() == [[7, 7, -1], [8, -1, 3], [9, -1, -1]] and ids.dtype == torch.int64


# ------------------------------------------------------------------------------------- 2. weights


def test_weights_of_ratios():
    ratio = torch.tensor([0.4, 0.5, 1.0, 5.0, 5.1])
    assert loss.masked_weight(ratio).tolist() == pytest.approx([0, 0.5, 1, 5, 0])
    assert loss.truncated_weight(ratio, clip_max=1.5).tolist() == pytest.approx(
        [0.4, 0.5, 1, 1.5, 1.5]
    )
    assert loss.unit_weight(ratio).tolist() == [1] * 5


def test_log_ratio_is_finite_and_says_what_is_missing():
    policy = torch.tensor([-1.0, -1.0, -1.0, -1.0, -math.inf, -200.0, -0.1], requires_grad=True)
    sampler = torch.tensor([-2.0, math.nan, -math.inf, -9999.0, -1.0, -1.0, -200.0])
    log_r, present = loss.log_ratio(policy_log_probs=policy, sampler_log_probs=sampler)
    assert present.tolist() == [True, False, False, False, False, True, True]
    assert log_r.tolist() == [1, 0, 0, 0, 0, -20, 20]
    log_r.exp().sum().backward()
    # d exp(log r) = r where neither missing nor at the limit: e, then zeros
    assert policy.grad.tolist() == pytest.approx([math.e, 0, 0, 0, 0, 0, 0])


# -------------------------------------------------------------------------------------- 3. losses


def mean_gradient(logits, q, head, advantage, weight, tail="drop"):
    """Gradient of the expected loss over y ~ q at one position, exactly: all y, weighted by q.

    The policy is softmax(logits); the head is a list of token ids.
    """
    logits = logits.clone().requires_grad_()
    log_p = logits.log_softmax(0)
    n, head = len(q), torch.tensor(head, dtype=torch.int64)
    losses = loss.score_centering_loss(
        policy_log_probs=log_p,
        sampler_log_probs=q.log(),
        head_policy_log_probs=log_p[head].expand(n, -1),
        head_sampler_log_probs=q.log()[head].expand(n, -1),
        advantages=torch.full((n,), advantage, dtype=logits.dtype),
        weight=weight,
        tail=tail,
    )
    return torch.autograd.grad((q * losses).sum(), logits)[0]


def score_sum(logits, coefficients):
    """sum_v coefficients_v grad log p(v) = coefficients - sum(coefficients) p."""
    return coefficients - coefficients.sum() * logits.softmax(0)


def policy_and_sampler(seed, vocab=12, spread=1.0):
    g = torch.Generator().manual_seed(seed)
    logits = torch.randn(vocab, generator=g, dtype=torch.float64)
    q = (logits + spread * torch.randn(vocab, generator=g, dtype=torch.float64)).softmax(0)
    return logits, q, q.argsort(descending=True).tolist()


def masked(low, high):
    return functools.partial(loss.masked_weight, clip_min=low, clip_max=high)


BOUNDS = [(0.5, 5.0), (0.9, 1.1), (0.0, 1.0), (1.0, math.inf), (0.0, math.inf)]


@pytest.mark.parametrize("bounds", BOUNDS)
def test_constant_advantage_with_a_full_head_moves_nothing_on_average(bounds):
    for seed in range(5):
        logits, q, order = policy_and_sampler(seed)
        for tail in ("drop", "proportional"):
            grad = mean_gradient(logits, q, order, 1.7, masked(*bounds), tail)
            assert grad.abs().max() < 1e-12


def test_every_weight_function_is_centered():
    logits, q, order = policy_and_sampler(0)
    for weight in (loss.unit_weight, functools.partial(loss.truncated_weight, clip_max=1.2)):
        assert mean_gradient(logits, q, order, -0.6, weight).abs().max() < 1e-12
        assert mean_gradient(logits, q, [], -0.6, weight).abs().max() > 1e-3


@pytest.mark.parametrize("bounds", BOUNDS)
def test_without_centering_the_mean_is_the_sum_over_the_kept(bounds):
    for seed in range(5):
        logits, q, _ = policy_and_sampler(seed)
        p = logits.softmax(0)
        kept = torch.where((p / q >= bounds[0]) & (p / q <= bounds[1]), p, 0)
        grad = mean_gradient(logits, q, [], 1.7, masked(*bounds))
        # E_q[-A f(r) s] = -A sum_kept q (p / q) s = -A sum_kept p s; nothing masked: sum p s = 0
        torch.testing.assert_close(grad, -1.7 * score_sum(logits, kept), rtol=0, atol=1e-12)
        if (kept == p).all():
            assert grad.abs().max() < 1e-12


@pytest.mark.parametrize("bounds", BOUNDS)
@pytest.mark.parametrize("k", [0, 1, 4, 11])
def test_dropping_the_tail_leaves_exactly_the_tail_sum(bounds, k):
    logits, q, order = policy_and_sampler(1)
    p = logits.softmax(0)
    tail = torch.where((p / q >= bounds[0]) & (p / q <= bounds[1]), p, 0)
    tail[order[:k]] = 0
    grad = mean_gradient(logits, q, order[:k], 1.7, masked(*bounds), "drop")
    torch.testing.assert_close(grad, -1.7 * score_sum(logits, tail), rtol=0, atol=1e-12)


@pytest.mark.parametrize("weight", [loss.unit_weight, loss.masked_weight])
def test_a_proportional_tail_is_exact_when_the_tail_is_proportional(weight):
    # The head is tokens 0 and 1; in the tail q is half of p.
    p = torch.tensor([0.4, 0.2, 0.3, 0.1], dtype=torch.float64)
    q = torch.tensor([0.5, 0.3, 0.15, 0.05], dtype=torch.float64)
    assert mean_gradient(p.log(), q, [0, 1], 2.0, weight, "proportional").abs().max() < 1e-12
    assert mean_gradient(p.log(), q, [0, 1], 2.0, weight, "drop").abs().max() > 1e-2


def gradient_by_log_prob(*, p, q, sampled, advantage, weight, tail):
    """d loss / d log p(v) for each token of the head, and for the sampled token's own column."""
    p, q, advantages = (torch.tensor(x, dtype=torch.float64) for x in (p, q, [advantage]))
    own, head = p[sampled : sampled + 1].log().requires_grad_(), p.log()[None].requires_grad_()
    losses = loss.score_centering_loss(
        policy_log_probs=own,
        sampler_log_probs=q[sampled : sampled + 1].log(),
        head_policy_log_probs=head,
        head_sampler_log_probs=q.log()[None],
        advantages=advantages,
        weight=weight,
        tail=tail,
    )
    own_grad, head_grad = torch.autograd.grad(losses.sum(), (own, head))
    return own_grad.item(), head_grad[0].tolist()


def test_coefficients_worked_by_hand():
    # q = [.5, .3], p = [.4, .4], tails .2 and .2, f = 1: t = 1, so c = q - p = [+.1, -.1].
    # A = 1, y = 0: d loss = -(1, on log p(y)) + c
    own, head = gradient_by_log_prob(
        p=[0.4, 0.4],
        q=[0.5, 0.3],
        sampled=0,
        advantage=1.0,
        weight=loss.unit_weight,
        tail="proportional",
    )
    assert own == pytest.approx(-1) and head == pytest.approx([0.1, -0.1])

    # The same under masking to [0.5, 5]: r = [0.8, 1.3333], f(r) = r, so q f(r) = p = [.4, .4];
    # t f(1/t) = 1, so c = p - p = 0. Dropped tail: c = p = [.4, .4]. A = -2, f(r_y) = 0.8.
    own, head = gradient_by_log_prob(
        p=[0.4, 0.4],
        q=[0.5, 0.3],
        sampled=0,
        advantage=-2.0,
        weight=loss.masked_weight,
        tail="proportional",
    )
    assert own == pytest.approx(1.6) and head == pytest.approx([0, 0])
    own, head = gradient_by_log_prob(
        p=[0.4, 0.4],
        q=[0.5, 0.3],
        sampled=0,
        advantage=-2.0,
        weight=loss.masked_weight,
        tail="drop",
    )
    assert own == pytest.approx(1.6) and head == pytest.approx([-0.8, -0.8])

    # p = [.1, .6], q = [.5, .3]: r = [0.2, 2], f = [0, 2] under [0.5, 5], q f = [0, .6]. Tails: .3
    # of p, .2 of q: t = 2/3, f(1/t) = 1.5, t f(1/t) = 1, so c = [0, .6] - [.1, .6] = [-.1, 0].
    # y = 0 is masked: no term of its own, the expectation is subtracted all the same.
    own, head = gradient_by_log_prob(
        p=[0.1, 0.6],
        q=[0.5, 0.3],
        sampled=0,
        advantage=1.0,
        weight=loss.masked_weight,
        tail="proportional",
    )
    assert own == 0 and head == pytest.approx([-0.1, 0], abs=1e-12)


def test_equal_policies_give_plain_reinforce():
    logits, _, order = policy_and_sampler(2)
    p = logits.softmax(0)
    for k, tail in (
        (len(order), "drop"),
        (0, "proportional"),
        (3, "proportional"),
        (len(order), "proportional"),
    ):
        for y in range(3):
            x = logits.clone().requires_grad_()
            log_p, head = x.log_softmax(0), torch.tensor(order[:k], dtype=torch.int64)
            losses = loss.score_centering_loss(
                policy_log_probs=log_p[y : y + 1],
                sampler_log_probs=p.log()[y : y + 1],
                head_policy_log_probs=log_p[head].unsqueeze(0),
                head_sampler_log_probs=p.log()[head].unsqueeze(0),
                advantages=torch.tensor([0.3], dtype=torch.float64),
                tail=tail,
            )
            grad = torch.autograd.grad(losses.sum(), x)[0]
            one_hot = torch.zeros_like(p)
            one_hot[y] = 0.3
            torch.testing.assert_close(grad, -score_sum(logits, one_hot), rtol=0, atol=1e-12)


def test_clipped_surrogate_worked_by_hand():
    # epsilon 0.2, mask [0.5, 5]. r:            A:   min(r A, clip(r) A):       d loss / d log p:
    rows = [
        (1.5, 1.0, -1.2, 0.0),  # min(1.5, 1.2) = 1.2; clipped
        (1.5, -1.0, 1.5, 1.5),  # min(-1.5, -1.2) = -1.5; -r A
        (0.6, -1.0, 0.8, 0.0),  # min(-0.6, -0.8) = -0.8; clipped
        (0.6, 2.0, -1.2, -1.2),  # min(1.2, 1.6) = 1.2; -r A
        (1.1, 2.0, -2.2, -2.2),  # inside
        (0.4, 1.0, 0.0, 0.0),  # below 0.5: masked
        (6.0, -1.0, 0.0, 0.0),
    ]  # above 5: masked
    ratio, advantages, expected, slopes = (torch.tensor(c).double() for c in zip(*rows))
    policy = (ratio.log() - 2).requires_grad_()
    sampler = torch.full_like(ratio, -2.0)
    losses = loss.clipped_surrogate_loss(
        policy_log_probs=policy, sampler_log_probs=sampler, advantages=advantages
    )
    torch.testing.assert_close(losses.detach(), expected)
    torch.testing.assert_close(torch.autograd.grad(losses.sum(), policy)[0], slopes)

    # epsilon_high 0.28: r = 1.5, A = 1 clips at 1.28; r = 1.25, A = 1 does not clip any more.
    wider = loss.clipped_surrogate_loss(
        policy_log_probs=torch.tensor([1.5, 1.25]).log(),
        sampler_log_probs=torch.zeros(2),
        advantages=torch.ones(2),
        epsilon_high=0.28,
    )
    assert wider.tolist() == pytest.approx([-1.28, -1.25])

    dr_grpo = loss.dr_grpo_loss(
        policy_log_probs=policy,
        sampler_log_probs=sampler,
        advantages=advantages,
        max_completion_length=100,
    )
    torch.testing.assert_close(dr_grpo.detach(), expected / 100)


def test_cispo_clips_the_weight_and_keeps_every_gradient():
    # r = 0.1, 1, 8 with bounds [0.5, 5]: weights 0.5, 1, 5; gradient -A w
    policy = torch.tensor([0.1, 1.0, 8.0]).double().log().sub(3).requires_grad_()
    losses = loss.cispo_loss(
        policy_log_probs=policy,
        sampler_log_probs=torch.full((3,), -3.0).double(),
        advantages=torch.tensor([1.0, -2.0, 1.0]).double(),
        clip_min=0.5,
        clip_max=5.0,
    )
    assert torch.autograd.grad(losses.sum(), policy)[0].tolist() == pytest.approx([-0.5, 2, -5])


def test_gspo_worked_by_hand():
    # Sample 0, A = 1: ratios 1.2 and 1.21 / 1.2, s = sqrt(1.21) = 1.1. Sample 1, A = -1: s = 0.7.
    # epsilon 0.2: s0 is inside, -1.1 / 2 a term; s1 clips at 0.8, -min(-0.7, -0.8) / 1 = 0.8
    policy = torch.tensor([1.2, 1.21 / 1.2, 0.7]).double().log().requires_grad_()
    arguments = {
        "sampler_log_probs": torch.zeros(3).double(),
        "advantages": torch.tensor([1.0, 1.0, -1.0]).double(),
        "term_samples": torch.tensor([0, 0, 1]),
        "n_samples": 2,
        "epsilon": 0.2,
        "epsilon_high": None,
    }
    losses = loss.gspo_loss(policy_log_probs=policy, **arguments)
    assert losses.tolist() == pytest.approx([-0.55, -0.55, 0.8])
    # d(-s A) / d log p_t = -s A / |y| = -0.55 for both tokens of sample 0; clipped: 0
    grad = torch.autograd.grad(losses.sum(), policy)[0]
    assert grad.tolist() == pytest.approx([-0.55, -0.55, 0])

    # Without its second token, sample 0 is one token long with s = 1.2.
    arguments["sampler_log_probs"] = torch.tensor([0.0, math.nan, 0.0]).double()
    losses = loss.gspo_loss(policy_log_probs=policy, **arguments)
    assert losses.tolist() == pytest.approx([-1.2, 0, 0.8])


def random_terms(n, k, seed=0):
    g = torch.Generator().manual_seed(seed)
    policy = -torch.rand(n, 1 + k, generator=g).double() * 3 - 0.1
    sampler = policy + torch.randn(n, 1 + k, generator=g).double() / 2
    sampler[:, 1:] -= 2  # so that the heads sum to less than 1
    return policy, sampler, torch.randn(n, generator=g).double()


def all_losses(policy, sampler, advantages):
    """name -> loss of each term, for every loss and both tails; policy, sampler: [M, 1 + K]."""
    sampled = {
        "policy_log_probs": policy[:, 0],
        "sampler_log_probs": sampler[:, 0],
        "advantages": advantages,
    }
    heads = {"head_policy_log_probs": policy[:, 1:], "head_sampler_log_probs": sampler[:, 1:]}
    samples = torch.arange(len(policy)) // 2
    return {
        "drop": loss.score_centering_loss(**sampled, **heads),
        "proportional": loss.score_centering_loss(**sampled, **heads, tail="proportional"),
        "clipped": loss.clipped_surrogate_loss(**sampled),
        "cispo": loss.cispo_loss(**sampled),
        "gspo": loss.gspo_loss(**sampled, term_samples=samples, n_samples=len(policy)),
        "dr_grpo": loss.dr_grpo_loss(**sampled, max_completion_length=10),
    }


LOSSES = ["drop", "proportional", "clipped", "cispo", "gspo", "dr_grpo"]
ABSENT = [math.nan, math.inf, -math.inf, -9999.0, -9998.0]


@pytest.mark.parametrize("absent", ABSENT)
@pytest.mark.parametrize("name", LOSSES)
def test_missing_sampler_log_prob_masks_its_term_and_nothing_else(name, absent):
    policy, sampler, advantages = random_terms(8, 3)
    kept = torch.tensor([0, 1, 3, 4, 5, 6, 7])
    if name == "gspo":  # term 3 shares its sample with term 2, whose length then is 1, not 2
        kept = torch.tensor([0, 1, 4, 5, 6, 7])
    expected = all_losses(policy, sampler, advantages)[name][kept]
    sampler[2, 0] = absent
    policy.requires_grad_()
    losses = all_losses(policy, sampler, advantages)[name]
    assert losses[2] == 0
    torch.testing.assert_close(losses[kept].detach(), expected)
    grad = torch.autograd.grad(losses.sum(), policy)[0]
    assert grad.isfinite().all() and (grad[2] == 0).all()


@pytest.mark.parametrize("absent", ABSENT)
@pytest.mark.parametrize("tail", ["drop", "proportional"])
def test_missing_candidate_leaves_the_head_only(tail, absent):
    policy, sampler, advantages = random_terms(8, 3)
    without = all_losses(policy[:, :3], sampler[:, :3], advantages)[tail]
    sampler[:, 3] = absent
    for policy_value in (policy[:, 3], torch.full((8,), -math.inf), torch.full((8,), math.nan)):
        policy[:, 3] = policy_value
        leaf = policy.clone().requires_grad_()
        losses = all_losses(leaf, sampler, advantages)[tail]
        torch.testing.assert_close(losses.detach(), without)
        grad = torch.autograd.grad(losses.sum(), leaf)[0]
        assert grad.isfinite().all() and (grad[:, 3] == 0).all()
        assert (grad[:, :3] != 0).any()


@pytest.mark.parametrize("name", LOSSES)
def test_all_masked_and_no_terms_give_zero_gradient(name):
    policy, sampler, advantages = random_terms(6, 3)
    for rows, values in ((slice(None), math.nan), (slice(0), -1.0)):
        leaf = policy[rows].clone().requires_grad_()
        losses = all_losses(leaf, torch.full_like(sampler[rows], values), advantages[rows])[name]
        assert losses.shape == advantages[rows].shape
        assert (torch.autograd.grad(losses.sum(), leaf)[0] == 0).all()


@pytest.mark.parametrize("name", LOSSES)
def test_extreme_differences_keep_the_gradient_finite(name):
    policy, sampler, advantages = random_terms(6, 3)
    policy[0], sampler[1] = -300.0, -300.0  # ratios of e^-300 and e^300
    policy[2, 0], sampler[2, 0] = -math.inf, -1.0  # outside the set, though sampled
    for dtype in (torch.float32, torch.float64):
        leaf = policy.to(dtype).requires_grad_()
        losses = all_losses(leaf, sampler.to(dtype), advantages.to(dtype))[name]
        assert losses.isfinite().all()
        assert torch.autograd.grad(losses.sum(), leaf)[0].isfinite().all()


@pytest.mark.parametrize("name", LOSSES)
def test_micro_batch_split_leaves_gradient_unchanged(name):
    g = torch.Generator().manual_seed(6)
    hidden = torch.randn(12, 5, generator=g, dtype=torch.float64)
    weight = torch.randn(30, 5, generator=g, dtype=torch.float64, requires_grad=True)
    candidates = torch.randint(30, (12, 4), generator=g)
    with torch.no_grad():
        policy = lm_head.candidate_log_probs(hidden, weight, candidates)[0]
    sampler = policy + torch.randn(12, 4, generator=g).double() / 3
    advantages = torch.randn(12, generator=g).double()

    def gradient(bounds):
        weight.grad = None
        for start, stop in zip(bounds, bounds[1:], strict=False):
            rows = slice(start, stop)
            log_probs, _ = lm_head.candidate_log_probs(hidden[rows], weight, candidates[rows])
            losses = all_losses(log_probs, sampler[rows], advantages[rows])[name]
            (losses.sum() / 12).backward()  # the step's trained tokens, not the micro-batch's
        return weight.grad

    whole = gradient([0, 12])
    for bounds in ([0, 6, 12], [0, 2, 2, 10, 12]):  # also an empty one; samples of two stay whole
        torch.testing.assert_close(gradient(bounds), whole, rtol=0, atol=1e-12)


def test_unknown_tail_is_an_error():
    policy, sampler, advantages = random_terms(2, 1)
    with pytest.raises(ValueError, match="proportional"):
        loss.score_centering_loss(
            policy_log_probs=policy[:, 0],
            sampler_log_probs=sampler[:, 0],
            head_policy_log_probs=policy,
            head_sampler_log_probs=sampler,
            advantages=advantages,
            tail="keep",
        )


# ------------------------------------------------------------------------------------- 4. metrics

# Two samples. Sample 0, A = 1: ratios 0.6, 1.5, 8. Sample 1, A = -1: ratios 0.4, 2, one missing.
METRIC_INPUTS = {
    "policy_log_probs": torch.tensor([0.6, 1.5, 8, 0.4, 2, 1]).double().log() - 3,
    "sampler_log_probs": torch.tensor([-3, -3, -3, -3, -3, math.nan]).double(),
    "advantages": torch.tensor([1, 1, 1, -1, -1, -1]).double(),
    "entropy": torch.tensor([1, 2, 3, 4, 5, 9]).double(),
    "term_samples": torch.tensor([0, 0, 0, 1, 1, 1]),
}
HEAD = torch.tensor([[0.5, 0.25], [0.5, 0.5], [0.25, 0.25], [0.75, 0.25], [0.5, 0], [0, 0]]).log()
EXPECTED = {
    # |log r| = log of 1 / 0.6, 1.5, 8, 2.5, 2; five present terms
    "sampling/sampling_logp_difference/mean": LOG(1.5 * 8 * 2.5 * 2 / 0.6) / 5,
    "sampling/sampling_logp_difference/max": LOG(8),
    "sampling/importance_sampling_ratio/min": 0.4,
    "sampling/importance_sampling_ratio/mean": (0.6 + 1.5 + 8 + 0.4 + 2) / 5,
    "sampling/importance_sampling_ratio/max": 8,
    "sampling/masked_mean": 2 / 5,  # 8 > 5 and 0.4 < 0.5
    "sampling/missing_count": 1,
    # kept weights 0.6, 1.5, 0, 0, 2: 4.1^2 / (5 x (0.36 + 2.25 + 4)) = 16.81 / 33.05
    "sampling/effective_sample_frac": 16.81 / 33.05,
    "sampling/sampler_mass": (0.75 + 1 + 0.5 + 1 + 0.5) / 5,
    # r - 1: -0.4, 0.5, 7, -0.6, 1; sum 7.5
    "kl_k3/sampler_policy": (7.5 - LOG(0.6 * 1.5 * 8 * 0.4 * 2)) / 5,
    "entropy": 24 / 6,
    "clip_ratio/low_mean": 1 / 5,  # 0.4 with A = -1; 0.6 has A = 1
    "clip_ratio/low_min": 0,  # sample 0 has none of 3; sample 1 has 1 of 2
    "clip_ratio/high_mean": 2 / 5,  # 1.5 and 8 with A = 1; 2 has A = -1
    "clip_ratio/high_max": 2 / 3,  # of sample 0
    "clip_ratio/region_mean": 3 / 5,
}


def test_metrics_worked_by_hand():
    metrics = loss.loss_metrics(**METRIC_INPUTS, n_samples=2, head_sampler_log_probs=HEAD)
    finished = {k: v.item() for k, v in loss.finish_metrics(metrics).items()}
    assert finished == pytest.approx(EXPECTED)


def test_metrics_of_parts_merge_to_those_of_the_whole():
    parts = []
    for rows in (slice(0, 3), slice(3, 3), slice(3, 6)):  # sample 0, nothing, sample 1
        inputs = {k: v[rows] for k, v in METRIC_INPUTS.items()}
        inputs["term_samples"] = inputs["term_samples"] * 0
        parts.append(loss.loss_metrics(**inputs, n_samples=1, head_sampler_log_probs=HEAD[rows]))
    finished = loss.finish_metrics(loss.merge_metrics(parts))
    assert {k: v.item() for k, v in finished.items()} == pytest.approx(EXPECTED)


def test_metrics_without_a_head_have_no_sampler_mass():
    metrics = loss.finish_metrics(loss.loss_metrics(**METRIC_INPUTS, n_samples=2))
    assert set(EXPECTED) - set(metrics) == {"sampling/sampler_mass"}


def test_metrics_of_no_term_are_neutral():
    inputs = {k: v[:0] for k, v in METRIC_INPUTS.items()}
    metrics = loss.loss_metrics(**inputs, n_samples=0)
    assert metrics["sampling/importance_sampling_ratio/min"] == math.inf
    assert metrics["clip_ratio/high_max"] == -math.inf
    assert metrics["entropy"].tolist() == [0, 0] and metrics["sampling/missing_count"] == 0


def test_kl_k3_estimates_the_divergence_of_policy_from_sampler():
    logits, q, _ = policy_and_sampler(7, spread=0.3)
    log_r = logits.log_softmax(0) - q.log()
    # E_q[r - 1 - log r] = sum p - 1 + KL(q || p) = KL(q || p)
    counts = (q * 1e6).round().long()
    log_ratios, zeros = log_r.repeat_interleave(counts), torch.zeros(int(counts.sum()))
    metrics = loss.loss_metrics(
        policy_log_probs=log_ratios,
        sampler_log_probs=zeros,
        advantages=zeros,
        entropy=zeros,
        term_samples=zeros.long(),
        n_samples=1,
    )
    divergence = -(q * log_r).sum().item()
    estimate = loss.finish_metrics(metrics)["kl_k3/sampler_policy"].item()
    assert estimate == pytest.approx(divergence, rel=1e-4)
