"""The losses of asynchronous GRPO, and the head that feeds them. torch only; imports no sibling.

Tokens are drawn by a sampler q (the server, a few weight versions old, other kernels) and train a
policy p. One ratio a token, r = p / q, covers both differences. Four parts, each usable alone:

1. Head        candidate_log_probs: log p of a few tokens a position, without the logits
2. Weights     log_ratio and f(r): masked, truncated or plain importance sampling
3. Losses      one function each, one loss a term; y is the sampled token, sg stops the gradient
     score_centering_loss    -A (sg[f(r_y)] log p(y) - sum_{v in head} sg[c_v] log p(v))
     clipped_surrogate_loss  -min(r A, clip(r, 1 - epsilon, 1 + epsilon_high) A)
     cispo_loss              -A sg[clip(r, clip_min, clip_max)] log p(y)
     gspo_loss               -min(s A, clip(s, ...) A) / |y|, s = geometric mean of r in the sample
     dr_grpo_loss            the clipped surrogate / max_completion_length, with A = reward - mean
4. Metrics     loss_metrics: sums and extremes that reduce over micro-batches and ranks

A loss returns one number a term and normalises nothing: the caller sums, then divides by the
trained tokens (the first three) or by the samples (gspo, dr_grpo) of all ranks. The value of a loss
with sg is not a quantity to watch; its gradient is what is meant.

A term whose sampler log-prob is missing (NaN, infinite, or <= -9998, vLLM's mark) has loss 0 and
gradient 0, and is counted by loss_metrics. A head candidate that is missing leaves the head only.

Left out: reference KL, entropy bonus, gradient of the entropy, collectives, the shift by one (a
term already names the position that predicts its target).
Test: pytest tests/test_loss.py. Speed and memory: python bench/loss.py.
"""

# Shapes: M loss terms, H hidden size, V vocabulary, K head candidates, C = 1 + K candidates (column
# 0 is the sampled token), N samples. Inside a tile: R of the M terms, W of the V tokens.

import functools
from collections.abc import Callable

import torch
from torch import Tensor

MISSING = -9998.0  # log-probs at or below it are absent: vLLM reports -9999 for what top-k removed
NEVER = -1e30  # stands for -inf inside the head, where -inf - -inf would be NaN
MAX_LOG_RATIO = 20.0  # exp(20) = 4.9e8 is past any bound; exp(89) would be inf, its gradient NaN
PIECE = 1024  # logits of a term that one compiled reduction keeps in registers (Inductor's limit)
TAIL_FLOOR = 1e-6  # least mass of a tail: 1 - sum of float32 probabilities is noise below it


# ---------------------------------------------------------------------------------------- 1. head


def candidate_ids(targets: Tensor, top_ids: Tensor, top_log_probs: Tensor) -> Tensor:
    """Columns for candidate_log_probs: the sampled token, then the head. Returns int64[M, 1 + K].

    targets[M] are the sampled tokens, top_ids[M, K] the sampler's K most likely ones, whether or
    not they include the sampled one: it has its own column. A head entry whose sampler log-prob
    top_log_probs[M, K] is missing becomes -1, "no candidate".
    """
    head = top_ids.masked_fill(~is_present(top_log_probs), -1)
    return torch.cat([targets.unsqueeze(1), head], dim=1).long()


def candidate_log_probs(
    hidden: Tensor,
    weight: Tensor,
    candidates: Tensor,
    *,
    temperature: float = 1.0,
    bias: Tensor | None = None,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    vocab_size: int | None = None,
    set_ids: Tensor | None = None,
    set_offsets: Tensor | None = None,
    fp32_head: bool = False,
    tile: tuple[int, int] | None = None,
    compiled: bool | None = None,
) -> tuple[Tensor, Tensor]:
    """log p of candidates[M, C] given hidden[M, H] and the output embedding weight[V, H].

    Returns (log_probs[M, C], entropy[M]), float32, or float64 for float64 inputs. log_probs carries
    gradients to hidden, weight and bias; entropy is a metric and carries none. The distribution is
        softmax(z),   z = cap(logit_scale * (hidden weight^T + bias)) / temperature,
        cap(x) = softcap * tanh(x / softcap), or x without a softcap,
    over the first vocab_size tokens (the rest is padding and gets gradient 0), or, where the
    sampler truncates (top-k, top-p, min-p), over one candidate set a term: that of term m is
    set_ids[set_offsets[m] : set_offsets[m + 1]] (CSR). The entropy is that distribution's too.

    A candidate that has no probability there (id < 0, padding, outside its set) gets -inf, and
    gradient 0 whatever comes from above. A token may be named in several columns.

    Precision. Products run in hidden's dtype, with weight cast to it. A bf16 product is rounded to
    bf16, as the server's is; everything after it is float32. fp32_head=True leaves the product in
    float32 (bf16 operands multiply exactly; a float32 weight is used as such, at float32 speed).
    The gradient of the logits is rounded to the operands' dtype, all sums over it are float32, and
    the weight's gradient is rounded once, to the weight's dtype. Call it outside autocast.

    Memory. Logits exist as one tile of tile[0] terms by tile[1] tokens at a time and are recomputed
    in the backward: four products in all. The backward goes once through the vocabulary and
    finishes each slice of the weight's gradient, so it needs no float32 copy of the whole. The
    default tile is the fastest measured; on a CPU it has to stay near the cache.

    compiled fuses the elementwise work on a tile (default: on a GPU). It compiles for each width of
    tile, not for each M.
    """
    n_terms = len(hidden)
    if temperature <= 0:
        raise ValueError(
            f"{temperature=} must be positive: greedy sampling leaves nothing to train"
        )
    if len(candidates) != n_terms:
        raise ValueError(f"{candidates.shape=} must have a row for each of {hidden.shape=}")
    if (set_ids is None) != (set_offsets is None):
        raise ValueError("set_ids and set_offsets describe one thing: give both or neither")
    set_terms = None
    if set_offsets is not None:
        if len(set_offsets) != n_terms + 1:
            raise ValueError(f"{set_offsets.shape=} must be ({n_terms + 1},), one more than terms")
        terms = torch.arange(n_terms, device=hidden.device)
        set_terms = terms.repeat_interleave(set_offsets.diff(), output_size=set_ids.numel())
    vocab_size = weight.shape[0] if vocab_size is None else min(vocab_size, weight.shape[0])
    compiled = hidden.is_cuda if compiled is None else compiled
    tile = tile or (32768, 16384 if hidden.is_cuda else 8192)
    operand = torch.promote_types(hidden.dtype, weight.dtype) if fp32_head else hidden.dtype
    exact = torch.promote_types(operand, torch.float32)
    dtypes = (operand, exact if fp32_head else operand, exact)
    form = (logit_scale, softcap, temperature, operand)
    options = (form, dtypes, vocab_size, tile, compiled)
    return _CandidateLogProbs.apply(hidden, weight, bias, candidates, set_terms, set_ids, options)


class _CandidateLogProbs(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, weight, bias, candidates, set_terms, set_ids, options):
        form, (operand, product, exact), vocab_size, tile, compiled = options
        n_terms, n_candidates = candidates.shape
        log_normaliser = hidden.new_empty(n_terms, dtype=exact)
        entropy = hidden.new_empty(n_terms, dtype=exact)
        log_probs = hidden.new_empty(n_terms, n_candidates, dtype=exact)

        for rows in _slices(n_terms, tile[0]):
            hidden_RH = hidden[rows].to(operand)
            highest = hidden.new_full((len(hidden_RH),), NEVER, dtype=exact)
            z_candidates = hidden.new_full((len(hidden_RH), n_candidates), NEVER, dtype=exact)
            state = (highest, torch.zeros_like(highest), torch.zeros_like(highest), z_candidates)
            for columns in _slices(vocab_size, tile[1]):
                weight_WH = weight[columns].to(operand)
                products = _product(hidden_RH, weight_WH.t(), product)
                local = candidates[rows] - columns.start
                allowed = _allowed_tile(set_terms, set_ids, rows, columns)
                bias_W = None if bias is None else bias[columns]
                state = _call(_fold_tile, compiled, form, products, bias_W, allowed, local, *state)
                del products  # the next tile takes its place
            highest, total, dot, z_candidates = state
            log_normaliser[rows] = highest + total.log()
            entropy[rows] = log_normaliser[rows] - dot / total  # -sum p log p = log Z - sum p z
            log_probs[rows] = z_candidates - log_normaliser[rows].unsqueeze(1)
            log_probs[rows].masked_fill_(z_candidates <= NEVER / 2, -torch.inf)

        ctx.save_for_backward(
            hidden, weight, bias, candidates, set_terms, set_ids, log_normaliser, log_probs
        )
        ctx.options = options
        ctx.mark_non_differentiable(entropy)
        return log_probs, entropy

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, upstream, _):
        (hidden, weight, bias, candidates, set_terms, set_ids, log_normaliser, log_probs) = (
            ctx.saved_tensors
        )
        form, (operand, product, exact), vocab_size, tile, compiled = ctx.options
        need_hidden, need_weight, need_bias = ctx.needs_input_grad[:3]
        # -inf is not a function of the logits: NaN or anything else from above stops here.
        upstream = torch.where(log_probs.isfinite(), upstream, 0)

        hidden_grad = torch.zeros_like(hidden, dtype=exact) if need_hidden else None
        weight_grad = torch.zeros_like(weight) if need_weight else None
        bias_grad = torch.zeros_like(bias, dtype=exact) if need_bias else None
        for columns in _slices(vocab_size, tile[1]):
            weight_WH = weight[columns].to(operand)
            weight_grad_WH = None  # in float32 while it is a sum; one product sums by itself
            weight_dtype = exact if len(hidden) > tile[0] else weight.dtype
            for rows in _slices(len(hidden), tile[0]):
                hidden_RH = hidden[rows].to(operand)
                products = _product(hidden_RH, weight_WH.t(), product)
                local = candidates[rows] - columns.start
                allowed = _allowed_tile(set_terms, set_ids, rows, columns)
                bias_W = None if bias is None else bias[columns]
                above = (log_normaliser[rows], upstream[rows])
                grad = _call(
                    _tile_gradient, compiled, form, products, bias_W, allowed, local, *above
                )
                del products
                if need_hidden:
                    _add_product_(hidden_grad[rows], grad, weight_WH)
                if need_weight and weight_grad_WH is None:
                    weight_grad_WH = _product(grad.t(), hidden_RH, weight_dtype)
                elif need_weight:
                    _add_product_(weight_grad_WH, grad.t(), hidden_RH)
                if need_bias:
                    bias_grad[columns] += grad.sum(0, dtype=exact)
                del grad
            if weight_grad_WH is not None:
                weight_grad[columns] = weight_grad_WH
        return (
            hidden_grad.to(hidden.dtype) if need_hidden else None,
            weight_grad,
            bias_grad.to(bias.dtype) if need_bias else None,
            *(None,) * 4,
        )


def _fold_tile(form, products, bias, allowed, local, highest, total, dot, z_candidates):
    """Adds one tile[R, W] to the running softmax sums of its R terms; returns the new state.

    highest = max z, total = sum exp(z - highest), dot = sum exp(z - highest) z, each [R];
    local[R, C]: columns of the candidates (outside [0, W): in another tile), z_candidates their z.
    """
    z, _ = _logits(form, products, bias, allowed)
    # By pieces that stay in registers, so that a tile is read once and not once for each sum.
    z = z.unflatten(1, (-1, PIECE if z.shape[1] % PIECE == 0 else z.shape[1]))
    piece_highest = z.amax(2)
    exp_z = (z - piece_highest.unsqueeze(2)).exp()
    new_highest = torch.maximum(highest, piece_highest.amax(1))
    shrink, piece_shrink = (
        (highest - new_highest).exp(),
        (piece_highest - new_highest[:, None]).exp(),
    )
    total = total * shrink + (exp_z.sum(2) * piece_shrink).sum(1)
    dot = dot * shrink + ((exp_z * z).sum(2) * piece_shrink).sum(1)

    column, z_here, _ = _logits_at(form, products, bias, allowed, local)
    return new_highest, total, dot, torch.where(column == local, z_here, z_candidates)


def _tile_gradient(form, products, bias, allowed, local, log_normaliser, upstream):
    """Gradient of sum(upstream * log_probs) to products[R, W], in the operands' dtype.

    d/dz_w = sum over candidates c of upstream_c (1[w is c] - p_w),   d/dproduct = d/dz dz/dproduct
    """
    operand = form[3]
    z, slope = _logits(form, products, bias, allowed)
    pull = upstream.sum(1, keepdim=True)
    grad = (-pull * (z - log_normaliser.unsqueeze(1)).exp() * slope).to(operand)

    # The columns of the candidates again, now with their own term, rounded once. Every candidate
    # writes the whole value of the column that it points to (clamped, if it lies in another tile),
    # so candidates that meet in one column write the same number, and their order does not matter.
    column, z, slope = _logits_at(form, products, bias, allowed, local)
    own = ((column.unsqueeze(2) == local.unsqueeze(1)) * upstream.unsqueeze(1)).sum(2)
    value = (own - pull * (z - log_normaliser.unsqueeze(1)).exp()) * slope
    return grad.scatter_(1, column, value.to(operand))


def _logits(form, products, bias, allowed):
    """Elementwise (z, dz/dproduct), float32 or wider. The order is that of the model code: scale
    (Cohere, Granite, Falcon-H1), cap (Gemma), temperature. Tokens outside the set get NEVER."""
    logit_scale, softcap, temperature, _ = form
    z = products.to(torch.promote_types(products.dtype, torch.float32))
    if bias is not None:
        z = z + bias
    z = z * logit_scale
    slope = logit_scale / temperature
    if softcap is not None:
        squashed = (z / softcap).tanh()
        z = softcap * squashed
        slope = slope * (1 - squashed * squashed)
    z = z / temperature
    return z if allowed is None else torch.where(allowed, z, NEVER), slope


def _logits_at(form, products, bias, allowed, local):
    """(column, z, dz/dproduct) at the candidates' columns, local[R, C] clamped into the tile."""
    column = local.clamp(0, products.shape[1] - 1)
    z, slope = _logits(
        form,
        products.gather(1, column),
        None if bias is None else bias[column],
        None if allowed is None else allowed.gather(1, column),
    )
    return column, z, slope


def _allowed_tile(set_terms, set_ids, rows, columns):
    """bool[R, W]: is the token in the term's candidate set? set_terms[i] is the term of set_ids[i].

    Entries of other tiles go to one spare element at the end, so that no size depends on the data
    (a boolean index would make the device wait)."""
    if set_ids is None:
        return None
    height, width = rows.stop - rows.start, columns.stop - columns.start
    row, column = set_terms - rows.start, set_ids - columns.start
    inside = (row >= 0) & (row < height) & (column >= 0) & (column < width)
    flat = torch.where(inside, row * width + column, height * width)
    allowed = torch.zeros(height * width + 1, dtype=torch.bool, device=set_ids.device)
    return allowed.index_fill_(0, flat, True)[:-1].view(height, width)


def _slices(length, step):
    return [slice(start, min(start + step, length)) for start in range(0, length, step)]


def _product(a, b, dtype):
    """a @ b in dtype. Half operands with a float32 result: no rounding to half in between."""
    if a.dtype == dtype:
        return a @ b
    if a.is_cuda:
        return torch.mm(a, b, out_dtype=dtype)
    return a.to(dtype) @ b.to(dtype)


def _add_product_(total, a, b):
    """total += a @ b in total's dtype. Rounding each product to half first would bias long sums."""
    if a.dtype == total.dtype:
        total.addmm_(a, b)
    elif a.is_cuda:
        torch.addmm(total, a, b, out_dtype=total.dtype, out=total)
    else:
        total.addmm_(a.to(total.dtype), b.to(total.dtype))


@functools.cache
def _compile(function):
    return torch.compile(function)


def _call(function, compiled, form, products, bias, allowed, *tensors):
    """function(form, products, ...), compiled or not. Rows vary from step to step and are symbolic;
    a tile has at most two widths (the last is narrower), each worth kernels of its own."""
    if compiled and len(products) > 1:  # sizes 0 and 1 would each be compiled apart
        for tensor in (products, allowed, *tensors):
            if tensor is not None:
                torch._dynamo.maybe_mark_dynamic(tensor, 0)
        for tensor in (products, allowed):
            if tensor is not None:
                torch._dynamo.mark_static(tensor, 1)
        function = _compile(function)
    return function(form, products, bias, allowed, *tensors)


# ------------------------------------------------------------------------------------- 2. weights


def is_present(log_probs: Tensor) -> Tensor:
    """bool: the log-prob is a number. NaN (None in JSON), infinite or <= -9998 is missing."""
    return log_probs.isfinite() & (log_probs > MISSING)


def log_ratio(*, policy_log_probs: Tensor, sampler_log_probs: Tensor) -> tuple[Tensor, Tensor]:
    """(log r, present), any shape: log r = log p - log q, within +-MAX_LOG_RATIO.

    Where either log-prob is missing, present is False and log r a constant 0. The gradient flows to
    policy_log_probs and is finite everywhere, so callers may mask the result as they like.
    """
    present = is_present(sampler_log_probs) & is_present(policy_log_probs.detach())
    difference = torch.where(present, policy_log_probs, 0) - torch.where(
        present, sampler_log_probs, 0
    )
    return difference.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO), present


def masked_weight(ratio: Tensor, *, clip_min: float = 0.5, clip_max: float = 5.0) -> Tensor:
    """Masked importance sampling (IcePop; Ring-1T report, arXiv:2510.18855).

    f(r) = r if clip_min <= r <= clip_max, else 0: a token on which policy and sampler disagree
    that much teaches nothing. It stays in the normaliser's count.
    """
    return torch.where((ratio >= clip_min) & (ratio <= clip_max), ratio, 0)


def truncated_weight(ratio: Tensor, *, clip_max: float = 5.0) -> Tensor:
    """Truncated importance sampling (Ionides, 2008): f(r) = min(r, clip_max)."""
    return ratio.clamp(max=clip_max)


def unit_weight(ratio: Tensor) -> Tensor:
    """No correction: f(r) = 1, score centering's plain form."""
    return torch.ones_like(ratio)


# -------------------------------------------------------------------------------------- 3. losses


def score_centering_loss(
    *,
    policy_log_probs: Tensor,
    sampler_log_probs: Tensor,
    head_policy_log_probs: Tensor,
    head_sampler_log_probs: Tensor,
    advantages: Tensor,
    weight: Callable[[Tensor], Tensor] = masked_weight,
    tail: str = "drop",
) -> Tensor:
    """Score centering (Marek and Ryabinin, arXiv:2609.20807). Returns the loss of each term, [M].

    With s_v = grad log p(v), f the weight and y ~ q, the update's mean at one position is
        E_q[A f s] = E_q[A] E_q[f s] + Cov_q(A, f s).
    The first term pulls the policy even if every answer is equally good. Subtract it:
        loss = -A (sg[f(r_y)] log p(y) - sum_{v in head} sg[c_v] log p(v)),   c_v = q_v f(r_v).
    Unmasked f(r) = r makes E_q[f s] = sum_v p_v s_v = 0 by itself; masking makes it nonzero.

    The sum runs over the head, the sampler's K most likely tokens: log-probs [M, K] of p and of q.
    For the tail outside it there are two choices:
      "drop"          nothing. The mean update for constant A is then A sum_tail q_v f(r_v) s_v:
                      a bias that grows with the tail's mass.
      "proportional"  take q's tail to look like p's: q_v = t p_v there, with t = (1 - sum_head q) /
                      (1 - sum_head p), so all its ratios are 1/t. As sum_v p_v s_v is 0 over the
                      vocabulary, the tail's share t f(1/t) sum_tail p_v s_v equals
                      -t f(1/t) sum_head p_v s_v: c_v = q_v f(r_v) - t f(1/t) p_v.
    With p = q that is plain REINFORCE: "drop" needs the full head for it, "proportional" none.
    K = 0 leaves uncentered importance sampling, -A sg[f(r_y)] log p(y).
    Where f drops the sampled token the expectation is still subtracted: that centres the mean.
    """
    if tail not in ("drop", "proportional"):
        raise ValueError(f"{tail=} must be 'drop' or 'proportional'")
    log_r, present = log_ratio(
        policy_log_probs=policy_log_probs, sampler_log_probs=sampler_log_probs
    )
    head_log_r, in_head = log_ratio(
        policy_log_probs=head_policy_log_probs, sampler_log_probs=head_sampler_log_probs
    )
    q = torch.where(in_head, head_sampler_log_probs, -torch.inf).exp()  # MK; 0 for the missing
    coefficients = q * weight(head_log_r.detach().exp())
    if tail == "proportional":
        p = torch.where(in_head, head_policy_log_probs.detach(), -torch.inf).exp()
        q_tail = (1 - q.sum(1, keepdim=True)).clamp(min=TAIL_FLOOR)
        p_tail = (1 - p.sum(1, keepdim=True)).clamp(min=TAIL_FLOOR)
        coefficients = coefficients - q_tail / p_tail * weight(p_tail / q_tail) * p

    sampled = weight(log_r.detach().exp()) * torch.where(present, policy_log_probs, 0)
    expected = (coefficients * torch.where(in_head, head_policy_log_probs, 0)).sum(1)
    return torch.where(present, -advantages * (sampled - expected), 0)


def clipped_surrogate_loss(
    *,
    policy_log_probs: Tensor,
    sampler_log_probs: Tensor,
    advantages: Tensor,
    epsilon: float = 0.2,
    epsilon_high: float | None = None,
    clip_min: float = 0.5,
    clip_max: float = 5.0,
) -> Tensor:
    """PPO's clipped surrogate (arXiv:1707.06347, eq. 7) as in GRPO (arXiv:2402.03300), [M].

        loss = -m min(r A, clip(r, 1 - epsilon, 1 + epsilon_high) A)
        m = 1 if clip_min <= r <= clip_max, else 0

    with gradient through r, the sampler in the role of the old policy. epsilon_high defaults to
    epsilon; DAPO (arXiv:2503.14476) takes 0.28. clip_min=0 and clip_max=inf turn the mask m off.
    """
    log_r, present = log_ratio(
        policy_log_probs=policy_log_probs, sampler_log_probs=sampler_log_probs
    )
    ratio = log_r.exp()
    keep = present & (ratio >= clip_min) & (ratio <= clip_max)
    return torch.where(keep, _clipped(ratio, advantages, epsilon, epsilon_high), 0)


def cispo_loss(
    *,
    policy_log_probs: Tensor,
    sampler_log_probs: Tensor,
    advantages: Tensor,
    clip_min: float = 0.0,
    clip_max: float = 5.0,
) -> Tensor:
    """CISPO (MiniMax-M1, arXiv:2506.13585, eq. 4 and 5), [M].

        loss = -A sg[clip(r, clip_min, clip_max)] log p(y)

    The weight is clipped, never the token: each keeps a gradient. The paper writes the bounds as
    1 - epsilon_low and 1 + epsilon_high and uses no lower one.
    """
    log_r, present = log_ratio(
        policy_log_probs=policy_log_probs, sampler_log_probs=sampler_log_probs
    )
    weights = log_r.detach().exp().clamp(clip_min, clip_max)
    return torch.where(
        present, -advantages * weights * torch.where(present, policy_log_probs, 0), 0
    )


def gspo_loss(
    *,
    policy_log_probs: Tensor,
    sampler_log_probs: Tensor,
    advantages: Tensor,
    term_samples: Tensor,
    n_samples: int,
    epsilon: float = 3e-4,
    epsilon_high: float | None = 4e-4,
) -> Tensor:
    """GSPO (arXiv:2507.18071, eq. 5 to 7), [M]. Its sequence is the sample.

        s_i = exp(mean over the terms t of sample i of log r_t)
        loss_t = -min(s_i A_i, clip(s_i, 1 - epsilon, 1 + epsilon_high) A_i) / |y_i|

    term_samples[M] int64 in [0, n_samples) names each term's sample; all terms of a sample must be
    in the call. A sample's terms add up to the paper's term of that sequence, so divide the sum by
    the number of samples. Missing terms count neither in the mean nor in |y_i|. The clipping range
    is the paper's (section 5.1): a mean of log-ratios moves far less than one of them.
    """
    log_r, present = log_ratio(
        policy_log_probs=policy_log_probs, sampler_log_probs=sampler_log_probs
    )
    zeros = log_r.new_zeros(n_samples)
    length = zeros.index_add(0, term_samples, present.to(log_r.dtype)).clamp(min=1)
    ratio = (zeros.index_add(0, term_samples, log_r) / length).exp()[term_samples]
    loss = _clipped(ratio, advantages, epsilon, epsilon_high) / length[term_samples]
    return torch.where(present, loss, 0)


def dr_grpo_loss(
    *,
    policy_log_probs: Tensor,
    sampler_log_probs: Tensor,
    advantages: Tensor,
    max_completion_length: int,
    epsilon: float = 0.2,
    epsilon_high: float | None = None,
    clip_min: float = 0.5,
    clip_max: float = 5.0,
) -> Tensor:
    """Dr. GRPO (arXiv:2503.20783, section 3.2), [M].

        loss = clipped_surrogate_loss / max_completion_length,  advantages A = reward - group mean

    The paper's two changes: a constant in place of each answer's length, and no division by the
    group's standard deviation (the caller must not have divided). Divide the sum by the samples.
    """
    loss = clipped_surrogate_loss(
        policy_log_probs=policy_log_probs,
        sampler_log_probs=sampler_log_probs,
        advantages=advantages,
        epsilon=epsilon,
        epsilon_high=epsilon_high,
        clip_min=clip_min,
        clip_max=clip_max,
    )
    return loss / max_completion_length


def _clipped(ratio, advantages, epsilon, epsilon_high):
    """-min(r A, clip(r, 1 - epsilon, 1 + epsilon_high) A), any shape."""
    highest = 1 + (epsilon if epsilon_high is None else epsilon_high)
    return -torch.minimum(ratio * advantages, ratio.clamp(1 - epsilon, highest) * advantages)


# ------------------------------------------------------------------------------------- 4. metrics


@torch.no_grad()
def loss_metrics(
    *,
    policy_log_probs: Tensor,
    sampler_log_probs: Tensor,
    advantages: Tensor,
    entropy: Tensor,
    term_samples: Tensor,
    n_samples: int,
    head_sampler_log_probs: Tensor | None = None,
    epsilon: float = 0.2,
    epsilon_high: float | None = None,
    clip_min: float = 0.5,
    clip_max: float = 5.0,
) -> dict[str, Tensor]:
    """What one micro-batch says about policy and sampler: name -> tensor on its device, no waiting.

    Three kinds, told by the value and the name, and no others:
      shape [2]                  (sum, count) of a mean over terms
      shape [], ".../x_count"    a sum
      shape [], the name's last part has the word min or max    an extreme (+-inf without a term)
    So they reduce over micro-batches (merge_metrics) and ranks (SUM for the first two, MIN or MAX
    for the third; one all-gather of the flattened values and merge_metrics do it at once).
    finish_metrics makes the final scalars.

    Ratios r = p(y) / q(y) of the sampled y are taken before any mask, over the terms that have both
    log-probs; they saturate at exp(+-MAX_LOG_RATIO).
      sampling/sampling_logp_difference/mean, /max   |log p - log q|
      sampling/importance_sampling_ratio/min, /mean, /max   r
      sampling/masked_mean      share of terms with r outside [clip_min, clip_max]
      sampling/missing_count    terms that lack a log-prob; they have no ratio
      sampling/kept_weight, sampling/kept_weight_square   moments of f(r), for finish_metrics
      sampling/sampler_mass     sum of q over the head (only with a head)
      kl_k3/sampler_policy      r - 1 - log r, Schulman's estimate of KL(q || p)
      entropy                   of the policy, over all terms
      clip_ratio/low_mean, /high_mean, /region_mean   share with r < 1 - epsilon and A < 0; with
                                r > 1 + epsilon_high and A > 0; with either
      clip_ratio/low_min, /high_max   least and greatest such share of one sample
    """
    policy_log_probs = policy_log_probs.detach()
    log_r, present = log_ratio(
        policy_log_probs=policy_log_probs, sampler_log_probs=sampler_log_probs
    )
    ratio = log_r.exp()
    difference = torch.where(present, policy_log_probs - sampler_log_probs, 0).abs()
    weight = masked_weight(ratio, clip_min=clip_min, clip_max=clip_max)
    low = (ratio < 1 - epsilon) & (advantages < 0)
    high = (ratio > 1 + (epsilon if epsilon_high is None else epsilon_high)) & (advantages > 0)

    def mean(values, where=present):
        return torch.stack([torch.where(where, values, 0).sum(), where.sum().to(values.dtype)])

    def extreme(values, where, nothing):  # nothing: what an empty set has for an extreme
        values = torch.cat([torch.where(where, values, nothing), values.new_full((1,), nothing)])
        return values.amin() if nothing > 0 else values.amax()

    def share(flags):  # by sample; no flag is set where r is missing, as log r is 0 there
        zeros = ratio.new_zeros(n_samples)
        hits = zeros.index_add(0, term_samples, flags.to(ratio.dtype))
        return hits / zeros.index_add(0, term_samples, present.to(ratio.dtype))

    has_terms = ~share(present).isnan()
    metrics = {
        "sampling/sampling_logp_difference/mean": mean(difference),
        "sampling/sampling_logp_difference/max": extreme(difference, present, -torch.inf),
        "sampling/importance_sampling_ratio/min": extreme(ratio, present, torch.inf),
        "sampling/importance_sampling_ratio/mean": mean(ratio),
        "sampling/importance_sampling_ratio/max": extreme(ratio, present, -torch.inf),
        "sampling/masked_mean": mean(((ratio < clip_min) | (ratio > clip_max)).to(ratio.dtype)),
        "sampling/missing_count": (~present).sum().to(ratio.dtype),
        "sampling/kept_weight": mean(weight),
        "sampling/kept_weight_square": mean(weight.square()),
        "kl_k3/sampler_policy": mean(torch.expm1(log_r) - log_r),
        "entropy": mean(entropy, torch.ones_like(present)),
        "clip_ratio/low_mean": mean(low.to(ratio.dtype)),
        "clip_ratio/low_min": extreme(share(low), has_terms, torch.inf),
        "clip_ratio/high_mean": mean(high.to(ratio.dtype)),
        "clip_ratio/high_max": extreme(share(high), has_terms, -torch.inf),
        "clip_ratio/region_mean": mean((low | high).to(ratio.dtype)),
    }
    if head_sampler_log_probs is not None:
        in_head = is_present(head_sampler_log_probs)
        q = torch.where(in_head, head_sampler_log_probs, -torch.inf).exp()
        metrics["sampling/sampler_mass"] = mean(q.sum(1))
    return metrics


def merge_metrics(parts: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """One dict of that kind from those of several micro-batches or ranks, same names in each."""
    merged = {}
    for name in parts[0]:
        values = torch.stack([part[name] for part in parts])
        words = name.rsplit("/", 1)[-1].split("_")
        if values.ndim == 1 and "min" in words:
            merged[name] = values.amin()
        elif values.ndim == 1 and "max" in words:
            merged[name] = values.amax()
        else:
            merged[name] = values.sum(0)
    return merged


def finish_metrics(metrics: dict[str, Tensor]) -> dict[str, Tensor]:
    """Scalars to log. A mean over no term is NaN, an extreme of none +-inf.

    sampling/effective_sample_frac is Kish's effective sample size over the number of terms,
    (sum f)^2 / (n sum f^2), f = 0 for a dropped term: the share of terms that would tell as much if
    all weights were equal.
    """
    scalars = {name: v[0] / v[1] if v.ndim else v for name, v in metrics.items()}
    mean_weight = scalars.pop("sampling/kept_weight")
    mean_square = scalars.pop("sampling/kept_weight_square")
    scalars["sampling/effective_sample_frac"] = mean_weight.square() / mean_square
    return scalars
