"""Mixed precision on one rank: what the modules compute with, and where gradients go."""

import pytest
import torch
from conftest import load_policy
from torch import nn
from torch.nn import functional as F

import masters
import model
from config import Config
from masters import ComputeCopies


class Tied(nn.Module):
    """Embedding and head share a weight; a bias is frozen."""

    def __init__(self):
        super().__init__()
        self.embedding, self.head = nn.Embedding(5, 3), nn.Linear(3, 5)
        self.head.weight = self.embedding.weight
        self.head.bias.requires_grad_(False)

    def forward(self, ids):
        return self.head(self.embedding(ids))


def loss_of(logits, ids):
    return F.cross_entropy(logits.float(), ids, reduction="sum")


@pytest.mark.parametrize("waiting_bytes", [0, 1 << 26])
def test_gradients_of_micro_batches_add_up_in_float32(waiting_bytes, monkeypatch):
    monkeypatch.setattr(masters, "WAITING_BYTES", waiting_bytes)
    # bf16(1 + 2^-7) is the number after 1, so 1 + 2^-9 four times would stay 1 if summed in bf16.
    module = nn.Linear(1, 1, bias=False)
    copies = ComputeCopies(module, torch.bfloat16)
    with copies.in_place():
        for x in (1.0, 2**-9, 2**-9, 2**-9, 2**-9):
            module(torch.tensor([[x]], dtype=torch.bfloat16)).sum().backward()
    assert module.weight.grad.dtype == torch.float32
    assert module.weight.grad.item() == 1 + 2**-7


def test_the_modules_compute_as_if_they_had_been_cast():
    torch.manual_seed(0)
    module, ids = Tied(), torch.tensor([0, 1, 4, 4])
    names = [name for name, _ in module.named_parameters()]
    copies = ComputeCopies(module, torch.bfloat16)
    for _ in range(2):  # again after the masters have moved
        cast = Tied()
        cast.load_state_dict(module.state_dict())
        expected = cast.to(torch.bfloat16)(ids)
        loss_of(expected, ids).backward()
        with copies.in_place():
            found = module(ids)
            loss_of(found, ids).backward()
        assert found.dtype == torch.bfloat16 and torch.equal(found, expected)
        weight = module.embedding.weight
        assert torch.equal(weight.grad, cast.embedding.weight.grad.float())
        with torch.no_grad():
            weight.sub_(weight.grad)
        module.zero_grad()

    assert module.head.weight is module.embedding.weight, "one master"
    assert len(copies.copies) == 2, "one copy of the tied weight, one of the bias"
    assert module.head.bias.grad is None, "frozen"
    assert [name for name, _ in module.named_parameters()] == names
    assert all(p.dtype == torch.float32 for p in module.parameters())


def test_masters_are_back_after_an_error():
    module = nn.Linear(1, 1)
    copies = ComputeCopies(module, torch.bfloat16)
    with pytest.raises(ZeroDivisionError), copies.in_place():
        assert module.weight.dtype == torch.bfloat16 and copies.in_use
        _ = 1 / 0
    assert module.weight.dtype == torch.float32 and not copies.in_use


def test_what_has_the_dtype_already_is_not_copied():
    module = nn.Linear(1, 1)
    copies = ComputeCopies(module, torch.float32)
    with copies.in_place():
        assert module.weight is dict(module.named_parameters())["weight"]
    assert not copies.copies


def test_a_forward_in_the_masters_dtype_is_refused(tiny_folder, one_rank):
    def forward(rank):
        policy = load_policy(Config(), tiny_folder, torch.device("cpu"))
        model.shard(policy, torch.device("cpu"), torch.bfloat16, compile_layers=False)
        with pytest.raises(RuntimeError, match=r"policy.computing\(\)"):
            policy(None, None, 1.0)

    one_rank(forward)
