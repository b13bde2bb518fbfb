"""The losses of asynchronous GRPO. torch only; imports no sibling. Their log-probs: lm_head.py.

Tokens are drawn by a sampler q (the server, a few weight versions old, other kernels) and train a
policy p. One ratio a token, r = p / q, covers both differences. Three parts, each usable alone:

1. Weights     log_ratio and f(r): masked, truncated or plain importance sampling
2. Losses      one function each, one loss a term; y is the sampled token, sg stops the gradient
     score_centering_loss    -A (sg[f(r_y)] log p(y) - sum_{v in head} sg[c_v] log p(v))
     clipped_surrogate_loss  -min(r A, clip(r, 1 - epsilon, 1 + epsilon_high) A)
     cispo_loss              -A sg[clip(r, clip_min, clip_max)] log p(y)
     gspo_loss               -min(s A, clip(s, ...) A) / |y|, s = geometric mean of r in the sample
     dr_grpo_loss            the clipped surrogate / max_completion_length, with A = reward - mean
3. Metrics     loss_metrics: sums and extremes that reduce over micro-batches and ranks

A loss returns one number a term and normalises nothing: the caller sums, then divides by the
trained tokens (the first three) or by the samples (gspo, dr_grpo) of all ranks. The value of a loss
with sg is not a quantity to watch; its gradient is what is meant.

A term whose sampler log-prob is missing (NaN, infinite, or <= -9998, vLLM's mark) has loss 0 and
gradient 0, and is counted by loss_metrics. A head candidate that is missing leaves the head only.

Left out: reference KL, entropy bonus, collectives, the shift by one (a term already names the
position that predicts its target).
Test: pytest tests/test_loss.py
"""

# Shapes: M loss terms, K candidates of the sampler's head, N samples.

from collections.abc import Callable

import torch
from torch import Tensor

MISSING = -9998.0  # log-probs at or below it are absent: vLLM reports -9999 for what top-k removed
MAX_LOG_RATIO = 20.0  # exp(20) = 4.9e8 is past any bound; exp(89) would be inf, its gradient NaN
TAIL_FLOOR = 1e-6  # least mass of a tail: 1 - sum of float32 probabilities is noise below it


# ------------------------------------------------------------------------------------- 1. weights


def is_present(log_probs: Tensor) -> Tensor:
    """bool: the log-prob is a number. NaN (None in JSON), infinite or <= -9998 is missing."""
    return log_probs.isfinite() & (log_probs > MISSING)


def candidate_ids(targets: Tensor, top_ids: Tensor, top_log_probs: Tensor) -> Tensor:
    """Columns for candidate_log_probs: the sampled token, then the head. Returns int64[M, 1 + K].

    targets[M] are the sampled tokens, top_ids[M, K] the sampler's K most likely ones, whether or
    not they include the sampled one: it has its own column. A head entry whose sampler log-prob
    top_log_probs[M, K] is missing becomes -1, "no candidate".
    """
    head = top_ids.masked_fill(~is_present(top_log_probs), -1)
    return torch.cat([targets.unsqueeze(1), head], dim=1).long()


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


# -------------------------------------------------------------------------------------- 2. losses


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


# ------------------------------------------------------------------------------------- 3. metrics


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
