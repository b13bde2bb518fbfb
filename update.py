"""One optimizer step of one rank: the losses of its rows, backward, clipping, AdamW, what was seen.

    forward_backward()    rows -> gradients, reduced once a step, and metrics on the device
    clip_gradients()      global norm, over all ranks
    LossScale             float16: which steps count, and the factor on the loss
    gather_metrics()      the step's only wait for the device: two transfers, one all-gather
    make_optimizer()      AdamW on the sharded masters
    learning_rate()       of any step: the schedule; set_learning_rate() gives it to AdamW

Gradients are summed over rows and ranks: each loss comes divided by the counts of all of them
(feed.Share), so no count is reduced here. Nothing before gather_metrics() waits for the device,
but LossScale in float16.
Test: pytest tests/test_trainer.py
"""

import functools
import math

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

import loss
import model


def make_optimizer(policy, config):
    """AdamW on the sharded masters, with weight decay on matrices only."""
    trained = [p for p in policy.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in trained if p.ndim > 1], "weight_decay": config.weight_decay},
        {"params": [p for p in trained if p.ndim <= 1], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(
        [group for group in groups if group["params"]],
        lr=config.learning_rate,
        betas=(config.adam_beta1, config.adam_beta2),
        eps=config.adam_epsilon,
        fused=True,
    )


def learning_rate(config, step):
    """Of optimizer step 1, 2, ..., max_steps, as transformers.get_scheduler has it: it grows from 0
    over warmup_steps, then stays, or falls as a line or half a cosine to 0 after the last step."""
    peak, done, warmup = config.learning_rate, step - 1, config.steps_of("warmup_steps")
    if done < warmup:
        return peak * done / warmup
    if config.lr_scheduler_type in ("constant", "constant_with_warmup"):
        return peak
    left = (config.max_steps - done) / (config.max_steps - warmup)
    if config.lr_scheduler_type == "linear":
        return peak * left
    return peak * (1 - math.cos(math.pi * left)) / 2


def set_learning_rate(optimizer, config, step):
    """Before that optimizer step. -> the rate."""
    rate = learning_rate(config, step)
    for group in optimizer.param_groups:
        group["lr"] = rate
    return rate


class LossScale:
    """Keeps float16 gradients in range (arXiv:1710.03740, section 3.2): the loss is multiplied by
    `value` before backward, the gradient divided by it after. A step whose gradient overflows is
    left out and halves it, 2000 good ones double it. Other dtypes: 1, and every step counts."""

    START, LEAST, GOOD_STEPS = 2.0**16, 2.0**-8, 2000

    def __init__(self, compute_dtype, state=None):
        self.active = compute_dtype == torch.float16
        self.value, self.good = (state or (self.START, 0)) if self.active else (1.0, 0)

    def admits(self, grad_norm):
        """Whether the optimizer may step. The norm is the same on all ranks, so the answer is."""
        if not self.active:
            return True
        if not math.isfinite(grad_norm):
            self.value, self.good = self.value / 2, 0
            if self.value < self.LEAST:
                raise FloatingPointError(
                    f"float16: the gradient overflows at a loss scale of {self.value} still; lower "
                    "--learning_rate or use --bf16 true"
                )
            return False
        self.good += 1
        if self.good == self.GOOD_STEPS:
            self.value, self.good = 2 * self.value, 0
        return True

    def state(self):
        return {"loss_scale": [self.value, self.good]} if self.active else {}


def forward_backward(policy, config, share, rows, trees, clock, loss_scale=1.0):
    """Forward and backward of this rank's rows. Gradients are left in the parameters, summed over
    all ranks, times loss_scale; -> the rows' metrics, on the device."""
    seen = []
    with policy.computing():
        for i, (samples, row, tree) in enumerate(zip(share.rows, rows, trees, strict=True)):
            # gradients of earlier micro-batches wait for the last one: one reduction a step
            policy.set_requires_gradient_sync(i == len(rows) - 1 or policy.reduce_each)
            with clock("perf/fwd_s"):
                log_probs, entropy, aux_loss = policy(row, tree, config.temperature)
            terms = term_losses(config, row, log_probs, len(samples))
            row_loss = terms.sum() / share.denominators[i]
            if aux_loss is not None:
                aux_loss = aux_loss * share.token_shares[i]
                row_loss = row_loss + policy.router_aux_loss_coef * aux_loss
            (row_loss * loss_scale).backward()
            share.log_probs.append(log_probs[:, 0].detach())
            seen.append(row_metrics(config, row, log_probs, entropy, row_loss, len(samples)))
            seen[-1]["flops"] = entropy.new_full((), model.row_flops(policy, row.host))
            if aux_loss is not None:
                seen[-1]["aux_loss"] = aux_loss.detach()
    return seen


def term_losses(config, row, log_probs, n_samples):
    """The configured loss of each term, [M]. log_probs [M, 1 + K]: sampled token, then head."""
    bounds = {
        "clip_min": config.vllm_importance_sampling_clip_min,
        "clip_max": config.vllm_importance_sampling_clip_max,
    }
    region = {"epsilon": config.epsilon, "epsilon_high": config.epsilon_high}
    shared = {
        "policy_log_probs": log_probs[:, 0],
        "sampler_log_probs": row.sampler_log_probs,
        "advantages": row.advantages,
    }
    if config.loss == "cispo":
        return loss.cispo_loss(**shared, clip_max=config.vllm_importance_sampling_clip_max)
    if config.loss == "gspo":
        samples = {"term_samples": row.term_samples, "n_samples": n_samples}
        return loss.gspo_loss(**shared, **samples, **region)
    if config.loss == "dr_grpo":
        length = config.max_completion_length
        return loss.dr_grpo_loss(**shared, **region, **bounds, max_completion_length=length)
    if not config.is_centered:
        return loss.clipped_surrogate_loss(**shared, **region, **bounds)
    return loss.score_centering_loss(
        **shared,
        head_policy_log_probs=log_probs[:, 1:],
        head_sampler_log_probs=row.top_log_probs,
        weight=functools.partial(loss.masked_weight, **bounds),
        tail=config.score_centering_tail,
    )


def clip_gradients(policy, max_norm, loss_scale=1.0):
    """Divide the gradients by loss_scale, then scale them down to max_norm (0: never). -> their
    norm in between, a tensor. Collective."""
    parameters = [p for p in policy.parameters() if p.requires_grad]
    if loss_scale != 1.0:
        for parameter in parameters:
            parameter.grad.div_(loss_scale)
    norm = torch.nn.utils.clip_grad_norm_(parameters, max_norm or math.inf)
    return norm.full_tensor() if isinstance(norm, DTensor) else norm


def check_norm(norm, step):
    """End the run before weights that a broken gradient has spoilt are sent or saved."""
    if not math.isfinite(norm):
        raise FloatingPointError(
            f"step {step}: the gradient's norm is {norm}; lower --learning_rate, or look whether "
            "sampling/sync_check_max says that server and trainer disagree"
        )


def row_metrics(config, row, log_probs, entropy, row_loss, n_samples):
    """One row's sums and extremes (loss.loss_metrics) and its part of the loss, on the device."""
    return {"loss": row_loss.detach()} | loss.loss_metrics(
        policy_log_probs=log_probs[:, 0],
        sampler_log_probs=row.sampler_log_probs,
        advantages=row.advantages,
        entropy=entropy,
        term_samples=row.term_samples,
        n_samples=n_samples,
        head_sampler_log_probs=row.top_log_probs if config.is_centered else None,
        epsilon=config.epsilon,
        epsilon_high=config.epsilon_high,
        clip_min=config.vllm_importance_sampling_clip_min,
        clip_max=config.vllm_importance_sampling_clip_max,
    )


def gather_metrics(rows, grad_norm):
    """The step's loss metrics over rows and ranks, as records; the gradient's norm and the model
    FLOPs of all rows, as floats. One transfer beside the norm's, one all-gather."""
    merged = loss.merge_metrics(rows)
    sizes, shapes = zip(*((value.numel(), value.shape) for value in merged.values()))
    flat = torch.cat([value.float().reshape(-1) for value in merged.values()]).cpu()
    gathered = [torch.empty_like(flat) for _ in range(dist.get_world_size())]
    dist.all_gather(gathered, flat)
    ranks = [
        {n: v.view(s) for n, v, s in zip(merged, one.split(sizes), shapes)} for one in gathered
    ]
    merged = loss.merge_metrics(ranks)
    flops = float(merged.pop("flops"))
    records = [
        (name, float(value), float(merged[name][1]) if merged.get(name, value).ndim else 1.0)
        for name, value in loss.finish_metrics(merged).items()
    ]
    return records, float(grad_norm), flops
