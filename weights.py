"""Which parameters go to the server, under which name, in which dtype; gathered piece by piece.

    Weights.metadata()     what will be sent: Entry(name, dtype, shape) of each, gathers nothing
    iter(Weights)          (name, whole tensor) one at a time
    Weights.buckets()      the same bytes in buffers of a bounded size, as NCCL sends them
    cut()                  the layout of those buffers; the server's end cuts by the same rule

Every rank must iterate: gathering shards is a collective, in the order of named_parameters(), which
is the same on all ranks.
Test: pytest tests/test_sync.py
"""

import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Shard

ALIGNMENT = 64  # bytes; a cache line, and a multiple of every dtype's size
GATHER_BYTES = 1 << 26  # of shards at a time, where tensors go one by one
# What activation checkpointing, torch.compile and peft put into a parameter's name.
WRAPPERS = ("_checkpoint_wrapped_module.", "_orig_mod.", "base_model.model.", "base_layer.")


class Entry(NamedTuple):
    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def n_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


class Bucket(NamedTuple):
    """Some entries end to end in one buffer."""

    entries: list[Entry]
    offsets: list[int]  # bytes
    n_bytes: int


def aligned(n_bytes: int, alignment: int = ALIGNMENT) -> int:
    """Rounded up."""
    return -(-n_bytes // alignment) * alignment


def cut(entries: Sequence[Entry], limit: int, alignment: int = ALIGNMENT) -> list[Bucket]:
    """Entries into buckets, each closed by the entry that takes it beyond `limit` bytes.

    With alignment 1 it is the layout of vLLM's own packed transfer.
    """
    buckets, n_bytes = [], limit + 1
    for entry in entries:
        if n_bytes > limit:
            buckets.append(([], []))
            n_bytes = 0
        offset = aligned(n_bytes, alignment)
        buckets[-1][0].append(entry)
        buckets[-1][1].append(offset)
        n_bytes = offset + entry.n_bytes
        buckets[-1] = (*buckets[-1][:2], n_bytes)
    return [Bucket(*bucket) for bucket in buckets]


def view_tensor(buffer: torch.Tensor, entry: Entry, offset: int) -> torch.Tensor:
    """An entry's tensor inside a buffer of bytes."""
    return buffer[offset : offset + entry.n_bytes].view(entry.dtype).view(entry.shape)


class Part(NamedTuple):
    """A parameter and what of it is in the checkpoint."""

    parameter: torch.nn.Parameter
    entries: list[Entry]
    name: str = ""  # in the model, if the checkpoint has it in several pieces or another layout
    low_rank: tuple | None = None  # (A, B, scaling) of a LoRA adapter, merged as it is sent


@dataclass(frozen=True)
class Weights:
    """The parameters that go to the server, with the names of the Hugging Face checkpoint.

    With `tied`, the head is the embedding and is not sent. What transformers stacks and a
    checkpoint does not (a layer's experts) goes by the checkpoint's names, which the server
    expects. A LoRA adapter is added to its base weights on their way, so the model itself is never
    changed.

    Make it before the first forward: FSDP leaves gathered copies in the place of the root's
    parameters, and those here are the parameters that the optimizer steps.
    """

    model: torch.nn.Module
    dtype: torch.dtype  # the server's
    tied: bool = False

    def __post_init__(self):
        self.parts  # noqa: B018 - looks at the model now

    @cached_property
    def parts(self) -> list[Part]:
        """A layer without a single trained parameter (a frozen tower's) is left out; of a layer
        that has one everything goes, since the server fuses q, k, v and cannot load a part."""
        adapters = low_rank_parts(self.model)
        named = [
            (checkpoint_name(name), parameter, adapters.get(name))
            for name, parameter in self.model.named_parameters()
        ]
        trained = {layer_of(name) for name, parameter, _ in named if parameter.requires_grad}
        return [
            self._part(name, parameter, low_rank)
            for name, parameter, low_rank in named
            if layer_of(name) in trained
            and not (self.tied and name.endswith("lm_head.weight"))
            and ".lora_" not in name
        ]

    def _part(self, name, parameter, low_rank) -> Part:
        # Matrices are cast here, which halves the bytes of fp32 masters. Vectors weigh nothing and
        # the server keeps some of them in fp32 (A_log of a gated DeltaNet): it does the rounding.
        dtype = self.dtype if parameter.ndim > 1 else parameter.dtype
        blank = torch.empty(parameter.shape, dtype=dtype, device="meta")
        pieces = self._pieces(name, blank)
        entries = [Entry(n, dtype, tuple(piece.shape)) for n, piece in pieces.items()]
        same = len(entries) == 1 and entries[0].shape == blank.shape
        return Part(parameter, entries, "" if same else name, low_rank)

    def _pieces(self, name, tensor) -> dict[str, torch.Tensor]:
        """A tensor of the model as the checkpoint has it."""
        base = self.model.get_base_model() if hasattr(self.model, "peft_config") else self.model
        if not hasattr(base, "config"):  # not transformers'
            return {name: tensor}
        from transformers.core_model_loading import revert_weight_conversion

        return revert_weight_conversion(base, {name: tensor})

    def complete(self) -> bool:
        """Whether everything goes, so that the server can insist on it."""
        return all(parameter.requires_grad for parameter in self.model.parameters())

    def metadata(self) -> list[Entry]:
        """What iteration will yield. Gathers nothing: a DTensor's shape is the whole's."""
        return [entry for part in self.parts for entry in part.entries]

    def n_bytes(self) -> int:
        return sum(entry.n_bytes for entry in self.metadata())

    def _tensors(self, limit: int) -> Iterator[tuple[Entry, torch.Tensor]]:
        """Whole tensors, gathered about `limit` bytes at a time; in their wire dtype if they were
        sharded, else in the parameter's."""
        for parts in self._groups(limit):
            wanted = []
            for part in parts:
                down, up, _ = part.low_rank or (None, None, 0)
                dtype = part.entries[0].dtype if up is None else part.parameter.dtype
                wanted.append((part.parameter, dtype))
                wanted += [] if up is None else [(up, up.dtype), (down, down.dtype)]
            gathered = iter(gather(wanted))
            for part in parts:
                tensor = next(gathered)
                if part.low_rank is not None:
                    tensor = tensor + part.low_rank[2] * (next(gathered) @ next(gathered))
                if not part.name:
                    yield part.entries[0], tensor
                else:
                    pieces = self._pieces(part.name, tensor)
                    yield from ((entry, pieces[entry.name]) for entry in part.entries)

    def _groups(self, limit) -> Iterator[list[Part]]:
        parts, n_bytes = [], 0
        for part in self.parts:
            parts.append(part)
            n_bytes += part.parameter.numel() * part.entries[0].dtype.itemsize
            if n_bytes > limit:
                yield parts
                parts, n_bytes = [], 0
        if parts:
            yield parts

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        """(name, whole tensor), one at a time."""
        for entry, tensor in self._tensors(GATHER_BYTES):
            yield entry.name, tensor.to(entry.dtype)

    def buckets(self, limit: int, alignment: int, device) -> Iterator[torch.Tensor]:
        """uint8 buffers on `device`, as cut() lays them out. A new buffer each: the caller decides
        how many live at a time."""
        tensors = self._tensors(limit)
        for bucket in cut(self.metadata(), limit, alignment):
            buffer = torch.empty(bucket.n_bytes, dtype=torch.uint8, device=device)
            targets = [
                view_tensor(buffer, entry, offset)
                for entry, offset in zip(bucket.entries, bucket.offsets, strict=True)
            ]
            for group in by_dtype((target, next(tensors)[1]) for target in targets):
                torch._foreach_copy_(*group)
            yield buffer


def by_dtype(pairs) -> list[tuple[list[torch.Tensor], list[torch.Tensor]]]:
    """(target, source) pairs as (targets, sources) of like dtypes: those are copied by one kernel,
    a mixed list by one a tensor."""
    groups: dict = {}
    for target, source in pairs:
        targets, sources = groups.setdefault((target.dtype, source.dtype), ([], []))
        targets.append(target)
        sources.append(source)
    return list(groups.values())


def low_rank_parts(model) -> dict[str, tuple]:
    """peft's adapters: name of the base weight in the model -> (A, B, scaling); W + scaling B A."""
    found = {}
    for name, module in model.named_modules():
        if not (hasattr(module, "base_layer") and hasattr(module, "lora_A")):
            continue
        (adapter,) = module.scaling
        is_plain = adapter in module.lora_A and not module.lora_variant.get(adapter)
        if not is_plain or module.fan_in_fan_out or module.lora_B[adapter].bias is not None:
            raise ValueError(
                f"the adapter at {name} ({type(module).__name__}) is no plain LoRA of a linear "
                "layer: weight sync supports LoRA without DoRA, embeddings and bias"
            )
        pair = module.lora_A[adapter].weight, module.lora_B[adapter].weight
        found[f"{name}.base_layer.weight"] = (*pair, module.scaling[adapter])
    return found


def gather(wanted: Sequence[tuple[torch.Tensor, torch.dtype]]) -> list[torch.Tensor]:
    """Parameters without their shards. Collective: one all-gather for all that FSDP has sharded,
    by rows, which travel in the dtype that is given with each. Others come as they are, uncast."""
    tensors = [tensor for tensor, _ in wanted]
    sharded = [
        i for i, t in enumerate(tensors) if isinstance(t, DTensor) and t.device_mesh.size() > 1
    ]
    with torch.no_grad():  # so that to_local() is a look and no operation
        found = [(t.to_local() if isinstance(t, DTensor) else t).detach() for t in tensors]
    if not sharded:
        return found
    mesh, placements = tensors[sharded[0]].device_mesh, tensors[sharded[0]].placements
    assert all(tensors[i].device_mesh == mesh for i in sharded), "FSDP has one mesh"
    dim = placements.index(Shard(0))
    size = mesh.size(dim)
    chunks = [  # the rows of one rank; the last ranks may have fewer, or none
        Entry("", wanted[i][1], (-(-tensors[i].shape[0] // size), *tensors[i].shape[1:]))
        for i in sharded
    ]
    (layout,) = cut(chunks, sys.maxsize)
    n_bytes = aligned(layout.n_bytes)
    mine = torch.zeros(n_bytes, dtype=torch.uint8, device=found[sharded[0]].device)
    shards = [
        (view_tensor(mine, chunk, offset)[: len(found[i])], found[i])
        for i, chunk, offset in zip(sharded, chunks, layout.offsets, strict=True)
    ]
    for group in by_dtype(shards):
        torch._foreach_copy_(*group)
    everyones = mine.new_empty(size * n_bytes)
    dist.all_gather_into_tensor(everyones, mine, group=mesh.get_group(dim))
    for i, chunk, offset in zip(sharded, chunks, layout.offsets, strict=True):
        rows = everyones.view(size, n_bytes)[:, offset : offset + chunk.n_bytes].view(chunk.dtype)
        found[i] = rows.reshape(-1, *chunk.shape[1:])[: tensors[i].shape[0]]
    return found


def checkpoint_name(name: str) -> str:
    for wrapper in WRAPPERS:
        name = name.replace(wrapper, "")
    return name


def layer_of(name: str) -> str:
    """model.layers.3.mlp.up_proj.weight -> model.layers.3; a name without a number stays."""
    parts = name.split(".")
    number = next((i for i, part in enumerate(parts) if part.isdigit()), len(parts))
    return ".".join(parts[: number + 1])
