"""Mixed precision where one rank has all weights: float32 masters, copies in the compute dtype.

With several ranks FSDP2 does this (model.shard). A single one has nothing to shard, gather or
reduce, and FSDP2 would still copy each weight twice, each gradient three times, and run its hooks
around every layer.

    with copies.in_place():      the copies, filled anew, stand in the modules where masters were
        forward and backward     each gradient goes to its master, in the master's dtype
                                 after the block the masters are back

So the optimizer, checkpoints and the weight sync see masters and their gradients alone.
Test: pytest tests/test_masters.py.  Speed: python bench/step.py (GPU)
"""

import contextlib
import functools

import torch
from torch import nn

WAITING_BYTES = 1 << 26  # of gradients in the compute dtype; a step's first go on in one kernel


class ComputeCopies:
    """Copies of a module's floating-point parameters in `dtype`. Those that have it already stay
    as they are; a parameter that stands in several places (a tied head) has one copy."""

    def __init__(self, module, dtype):
        self.in_use, self.places, self.waiting, self.n_bytes = False, [], {}, 0
        copies = {}
        for part in module.modules():
            for name, master in part._parameters.items():
                if master is None or master.dtype == dtype or not master.is_floating_point():
                    continue
                if master not in copies:
                    copies[master] = self._make_copy(master, dtype)
                self.places.append((part._parameters, name, master, copies[master]))
        self.masters, self.copies = list(copies), list(copies.values())

    def _make_copy(self, master, dtype):
        copy = nn.Parameter(torch.empty_like(master, dtype=dtype), master.requires_grad)
        if master.requires_grad:
            copy.register_post_accumulate_grad_hook(functools.partial(self._collect, master))
        return copy

    @contextlib.contextmanager
    def in_place(self):
        """The module computes with the copies, as the masters are now."""
        if self.copies:
            with torch.no_grad():
                torch._foreach_copy_(self.copies, self.masters)
        for parameters, name, _, copy in self.places:
            parameters[name] = copy
        self.in_use = True
        try:
            yield
            self._hand_over()
        finally:
            self.in_use, self.waiting, self.n_bytes = False, {}, 0
            for parameters, name, master, _ in self.places:
                parameters[name] = master

    def _collect(self, master, copy):
        if master in self.waiting:  # of the micro-batch before
            self._hand_over()
        self.waiting[master], copy.grad = copy.grad, None
        self.n_bytes += self.waiting[master].nbytes
        if self.n_bytes > WAITING_BYTES:
            self._hand_over()

    @torch.no_grad()
    def _hand_over(self):
        """Add the gradients that wait to those of their masters, in the masters' dtype."""
        first = [master for master in self.waiting if master.grad is None]
        for master, grad in self.waiting.items():
            if master.grad is not None:
                master.grad += grad
        for master in first:
            master.grad = torch.empty_like(master)
        if first:
            torch._foreach_copy_([m.grad for m in first], [self.waiting[m] for m in first])
        self.waiting, self.n_bytes = {}, 0
