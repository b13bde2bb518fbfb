"""Which parameters go to the server, under which name, in which dtype; gathered piece by piece.

    Weights.metadata()     what will be sent: Entry(name, dtype, shape) of each, gathers nothing
    iter(Weights)          (name, whole tensor) one at a time
    Weights.buckets()      the same bytes in buffers of a bounded size, as NCCL sends them
    cut()                  the layout of those buffers; the server's end cuts by the same rule

Every rank must iterate: gathering a shard is a collective, in the order of named_parameters(),
which is the same on all ranks.
Test: pytest tests/test_sync.py
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch.distributed.tensor import DTensor

ALIGNMENT = 64  # bytes; a cache line, and a multiple of every dtype's size
WRAPPERS = ("_checkpoint_wrapped_module.", "_orig_mod.")  # activation checkpointing, torch.compile


class Entry(NamedTuple):
    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]


class Bucket(NamedTuple):
    """Some entries end to end in one buffer."""

    entries: list[Entry]
    offsets: list[int]  # bytes
    n_bytes: int


def cut(entries: Sequence[Entry], limit: int, alignment: int = ALIGNMENT) -> list[Bucket]:
    """Entries into buckets, each closed by the entry that takes it beyond `limit` bytes.

    With alignment 1 it is the layout of vLLM's own packed transfer.
    """
    buckets, n_bytes = [], limit + 1
    for entry in entries:
        if n_bytes > limit:
            buckets.append(([], []))
            n_bytes = 0
        offset = -(-n_bytes // alignment) * alignment
        buckets[-1][0].append(entry)
        buckets[-1][1].append(offset)
        n_bytes = offset + math.prod(entry.shape) * entry.dtype.itemsize
        buckets[-1] = (*buckets[-1][:2], n_bytes)
    return [Bucket(*bucket) for bucket in buckets]


def view_tensor(buffer: torch.Tensor, entry: Entry, offset: int) -> torch.Tensor:
    """An entry's tensor inside a buffer of bytes."""
    n_bytes = math.prod(entry.shape) * entry.dtype.itemsize
    return buffer[offset : offset + n_bytes].view(entry.dtype).view(entry.shape)


@dataclass(frozen=True)
class Weights:
    """The parameters that go to the server, with the names of the Hugging Face checkpoint.

    `prefix` is what the trainer's module tree puts before those names. With `tied`, the head is
    the embedding and is not sent. Make it before the first forward: FSDP leaves gathered copies in
    the place of the root's parameters, and those are the parameters that the optimizer steps.
    """

    model: torch.nn.Module
    dtype: torch.dtype  # the server's
    prefix: str = ""
    tied: bool = False

    def __post_init__(self):
        self.parameters  # noqa: B018 - looks at the model now

    @cached_property
    def parameters(self) -> list[tuple[str, torch.nn.Parameter]]:
        """A layer without a single trained parameter (a frozen tower's) is left out; of a layer
        that has one everything goes, since the server fuses q, k, v and cannot load a part."""
        named = [
            (checkpoint_name(name, self.prefix), parameter)
            for name, parameter in self.model.named_parameters()
        ]
        trained = {layer_of(name) for name, parameter in named if parameter.requires_grad}
        return [
            (name, parameter)
            for name, parameter in named
            if layer_of(name) in trained and not (self.tied and name.endswith("lm_head.weight"))
        ]

    def complete(self) -> bool:
        """Whether everything goes, so that the server can insist on it."""
        return all(parameter.requires_grad for parameter in self.model.parameters())

    def _wire_dtype(self, parameter: torch.Tensor) -> torch.dtype:
        # Matrices are cast here, which halves the bytes of fp32 masters. Vectors weigh nothing and
        # the server keeps some of them in fp32 (A_log of a gated DeltaNet): it does the rounding.
        return self.dtype if parameter.ndim > 1 else parameter.dtype

    def metadata(self) -> list[Entry]:
        """What iteration will yield. Gathers nothing: a DTensor's shape is the whole's."""
        return [
            Entry(name, self._wire_dtype(parameter), tuple(parameter.shape))
            for name, parameter in self.parameters
        ]

    def n_bytes(self) -> int:
        return sum(math.prod(entry.shape) * entry.dtype.itemsize for entry in self.metadata())

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        """(name, whole tensor), one at a time; no more than one is held."""
        for name, parameter in self.parameters:
            dtype = self._wire_dtype(parameter)
            yield name, whole(parameter, dtype).to(dtype)

    def buckets(self, limit: int, alignment: int, device) -> Iterator[torch.Tensor]:
        """uint8 buffers on `device`, as cut() lays them out. A new buffer each: the caller decides
        how many live at a time."""
        parameters = iter(self.parameters)
        for bucket in cut(self.metadata(), limit, alignment):
            buffer = torch.empty(bucket.n_bytes, dtype=torch.uint8, device=device)
            targets = [
                view_tensor(buffer, entry, offset)
                for entry, offset in zip(bucket.entries, bucket.offsets, strict=True)
            ]
            sources = [whole(next(parameters)[1], entry.dtype) for entry in bucket.entries]
            torch._foreach_copy_(targets, sources)
            yield buffer


def whole(parameter: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A parameter without its shards. Collective if it has some, which travel as `dtype`."""
    tensor = parameter.detach()
    if not isinstance(tensor, DTensor):
        return tensor
    if tensor.device_mesh.size() > 1:
        return tensor.to(dtype).full_tensor()
    return tensor.to_local()  # a twentieth of the time of full_tensor()


def checkpoint_name(name: str, prefix: str = "") -> str:
    for wrapper in WRAPPERS:
        name = name.replace(wrapper, "")
    return name.removeprefix(prefix)


def layer_of(name: str) -> str:
    """model.layers.3.mlp.up_proj.weight -> model.layers.3; a name without a number stays."""
    parts = name.split(".")
    number = next((i for i, part in enumerate(parts) if part.isdigit()), len(parts))
    return ".".join(parts[: number + 1])
