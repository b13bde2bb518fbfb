"""The head: log-probs of a few tokens a position, without the logits. torch only.

    candidate_log_probs(hidden, weight, candidates, ...)    -> (log_probs, entropy), with backward

A tile of logits at a time is folded into running softmax sums, and made again in the backward.
Scale, softcap, temperature, padded vocabularies and candidate sets are those of the sampler, so
that both sides speak of the same distribution. The losses on top of it are in loss.py.

Left out: the loss (the gradients could be formed in the forward if the head knew it: three products
instead of four, and one function instead of two), the gradient of the entropy, collectives.
Test: pytest tests/test_loss.py. Speed and memory: python bench/loss.py.
"""

# Shapes: M loss terms, H hidden size, V vocabulary, C candidates a term (column 0 is the sampled
# token). Inside a tile: R of the M terms, W of the V tokens.

import functools

import torch
from torch import Tensor

NEVER = -1e30  # stands for -inf inside the head, where -inf - -inf would be NaN
GPU_TILE = 32768, 12288  # terms and tokens: as fast as any below 2.5 GiB (bench/loss.py)
CPU_TILE = 32768, 8192  # near the cache
PIECE = 1024  # logits of a term that one compiled reduction keeps in registers (Inductor's limit)


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
    default tile is as fast as any of its memory; on a CPU it has to stay near the cache.

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
    tile = tile or (GPU_TILE if hidden.is_cuda else CPU_TILE)
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
