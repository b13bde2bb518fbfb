"""How the bytes of a sync travel: the trainer's end and the server's end of each way.

    FileSender         CPU, or one GPU for both: a file in shared memory, read by each worker
    NcclSender         several GPUs: buckets of weights, broadcast to the server's workers
    WorkerExtension    the server's end; start it with --worker-extension-cls sync.WorkerExtension
    Copies             which bytes of a bucket belong where in the serving model

A server without our WorkerExtension takes weights over NCCL all the same, by vLLM's own loader,
which takes longer: it walks all modules before and after, and calls every tensor's loader twice,
in Python (0.2 s for the 310 tensors of a tiny model with 28 layers, on a busy core). Ours does so
at the first sync only, records where each tensor was copied to, and from then on copies a bucket in
one kernel, wherever it came from. See Copies for when that is right; on a CPU it never is.

vLLM's private parts are touched here only.
Test: pytest tests/test_sync.py, python bench/sync.py on two GPUs
"""

import base64
import contextlib
import logging
import os
import queue
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Sequence

import torch
from torch.utils._python_dispatch import TorchDispatchMode

import nccl
from server import HEALTH_S, LAST_CALL_S, WORKER_EXTENSION, Fleet, ServerError, VllmServer
from weights import ALIGNMENT, Entry, Weights, aligned, by_dtype, cut, view_tensor

logger = logging.getLogger("vllm.espalier")  # vllm's handlers print the server's end's lines
FILE_BUCKET_BYTES = 1 << 26  # of a file that are brought to the server's GPU at a time
MIXED = "until a sync succeeds the server may hold a mix of old and new weights"


class WeightSyncError(RuntimeError):
    """The server does not hold the weights that it should."""


def manifest(entries: Sequence[Entry]) -> list[tuple[str, str, tuple[int, ...]]]:
    """Entries as JSON has them."""
    return [(name, str(dtype).removeprefix("torch."), shape) for name, dtype, shape in entries]


def read_manifest(lines) -> list[Entry]:
    return [Entry(name, getattr(torch, dtype), tuple(shape)) for name, dtype, shape in lines]


# ------------------------------------------------------------------------------------------ file


class FileSender:
    """The tensors end to end in one file in shared memory, mapped by trainer and workers alike.

    It is the only copy: tensors are gathered one by one and written in place.
    """

    pauses = True  # the servers must not generate while they load
    adapter_name = None  # what is sampled is the model itself

    def __init__(self, fleet: Fleet, weights: Weights, *, first: bool = True):
        self.fleet, self.weights, self.first = fleet, weights, first
        self.path = ""

    def stage(self, version: int) -> None:
        """Every rank gathers, rank 0 writes."""
        stream = iter(self.weights)
        n_threads = torch.get_num_threads()
        # The server generates on the same cores, and threads that wait for each other there are
        # slow: 269 MB take 1.4 to 2.4 s with two and 0.35 to 0.6 s with one.
        torch.set_num_threads(1)
        try:
            if self.first:
                self._write(stream)
        finally:
            for _ in stream:  # also after an error on rank 0: the others are still gathering
                pass
            torch.set_num_threads(n_threads)

    def _write(self, stream):
        (layout,) = cut(self.weights.metadata(), sys.maxsize)
        self.path = reserve_file(layout.n_bytes)
        file = map_file(self.path)
        for (name, tensor), entry, offset in zip(
            stream, layout.entries, layout.offsets, strict=True
        ):
            assert name == entry.name, f"{name} gathered where {entry.name} was announced"
            view_tensor(file, entry, offset).copy_(tensor)

    def load(self) -> None:
        """Rank 0 only: have every worker load the file."""
        if not self.first:
            return
        request = {
            "path": self.path,
            "manifest": manifest(self.weights.metadata()),
            "complete": self.weights.complete(),
        }

        def load(server):
            try:
                server.collective_rpc("espalier_load_weights", **request)
            except ServerError as error:
                raise WeightSyncError(f"{error}; {MIXED}") from error

        self.fleet.each(load)

    @staticmethod
    def is_current(server: VllmServer, version: int) -> bool:
        return server.weight_version(HEALTH_S) == str(version)

    def release(self, failed: Sequence[VllmServer] = ()) -> None:
        """After every sync. `failed`: servers that did not take it."""
        if self.path:
            os.unlink(self.path)
            self.path = ""

    def close(self) -> None:
        """Nothing is held between syncs."""


def reserve_file(n_bytes: int) -> str:
    """-> path of a new file of that size in shared memory, or on disk where there is no room.

    The space is taken now: writing to a mapping of a full file system kills the process.
    """
    problems = []
    for folder in ("/dev/shm", tempfile.gettempdir()):
        path = ""
        try:
            handle, path = tempfile.mkstemp(prefix=f"espalier-weights-{os.getpid()}-", dir=folder)
            with os.fdopen(handle, "wb"):
                os.posix_fallocate(handle, 0, n_bytes)
            return path
        except OSError as error:
            problems.append(f"{folder}: {error.strerror}")
            if path:
                os.unlink(path)
    raise WeightSyncError(f"no room for {n_bytes / 1e9:.2f} GB of weights ({'; '.join(problems)})")


def map_file(path: str) -> torch.Tensor:
    return torch.from_file(path, shared=True, size=os.path.getsize(path), dtype=torch.uint8)


# ------------------------------------------------------------------------------------------ NCCL


class NcclSender:
    """Every rank gathers a bucket, rank 0 broadcasts it to all servers at once, one group each.

    Nothing waits without a limit: a server that fails a call, or does not receive within the
    server's time limit, has its group aborted, which frees the broadcast, and opened anew at the
    next sync. Trainer memory beyond the weights: two buckets.
    """

    pauses, adapter_name = True, None

    def __init__(
        self,
        fleet: Fleet,
        weights: Weights,
        *,
        first: bool = True,
        bucket_bytes: int = 1 << 28,
        direct: bool = True,
    ):
        self.fleet, self.weights, self.first = fleet, weights, first
        # direct: every server has our extension; otherwise all get the layout of vLLM's own loader
        self.bucket_bytes, self.direct = bucket_bytes, direct
        self.device = torch.device("cuda")
        self.links: dict[VllmServer, Link] = {}

    def stage(self, version: int) -> None:
        """Rank 0 only: open the groups with the workers, the first time and after failures."""

        def connect(server):
            if server not in self.links:
                size = 1 + self.fleet.infos[server].world_size
                self.links[server] = Link(server, size, self.bucket_bytes, device)

        device = torch.cuda.current_device() if self.first else None  # it is set for each thread
        if self.first:
            self.fleet.each(connect)

    def load(self) -> None:
        """Every rank gathers, rank 0 broadcasts."""
        alignment = ALIGNMENT if self.direct else 1
        buckets = self.weights.buckets(self.bucket_bytes, alignment, self.device)
        try:
            if self.first:
                self._broadcast(buckets)
        finally:
            for _ in buckets:  # also after an error on rank 0: the others are still gathering
                pass

    def _broadcast(self, buckets):
        lines = manifest(self.weights.metadata())
        links = [self.links[server] for server in self.fleet.serving]
        request = {"manifest": lines, "limit": self.bucket_bytes}
        if self.direct:
            request |= {"complete": self.weights.complete(), "wait_s": self.fleet.timeout_s}
        for link in links:
            link.ask(self.direct, request)
        in_flight = deque()
        for bucket in buckets:
            for link in links:
                link.broadcast(bucket)
            in_flight.append((bucket, [link.mark() for link in links]))
            if len(in_flight) == 2:  # the one before is freed: its sending has ended
                wait(in_flight.popleft()[1])
        for _, marks in in_flight:
            wait(marks)
        self.fleet.each(lambda server: self.links[server].answer())

    is_current = staticmethod(FileSender.is_current)

    def release(self, failed: Sequence[VllmServer] = ()) -> None:
        """The groups stay for the next sync, but those of servers that failed."""
        for server in failed if self.first else ():
            if link := self.links.pop(server, None):
                link.close()
            if self.fleet.infos[server].worker_extension == WORKER_EXTENSION:
                with contextlib.suppress(ServerError):
                    server.collective_rpc("espalier_restore", timeout_s=LAST_CALL_S)

    def close(self) -> None:
        self.release(list(self.links))


def wait(marks):
    for mark in marks:
        mark.synchronize()  # at the latest when the link is aborted


class Link:
    """The NCCL group of rank 0 and one server's workers."""

    def __init__(self, server: VllmServer, size: int, bucket_bytes: int, device: int):
        self.server, self.device = server, device
        self.stream = torch.cuda.Stream(device)
        self.answers: queue.SimpleQueue = queue.SimpleQueue()
        self.communicator = self._connect(size, bucket_bytes)

    def _connect(self, size, bucket_bytes):
        group = nccl.unique_id()
        place = {"nccl_unique_id_b64": base64.b64encode(group).decode(), "world_size": size}
        form = {"packed": True, "packed_buffer_size_bytes": bucket_bytes}
        body = {"init_info": place | form | {"rank_offset": 1}}
        joined: queue.SimpleQueue = queue.SimpleQueue()

        def call():
            try:
                self.server.call("POST", "/init_weight_transfer_engine", json=body)
            except Exception as error:
                joined.put(error)

        def join():
            try:
                joined.put(nccl.Communicator(group, 0, size, self.device))
            except Exception as error:
                joined.put(WeightSyncError(f"{self.server.url}: {error}"))

        # NCCL waits for its peers without a limit. If they do not come the thread stays behind.
        for step in (call, join):
            threading.Thread(target=step, daemon=True).start()
        try:
            # A little longer than the call's own limit, whose error says more.
            communicator = joined.get(timeout=self.server.timeout_s + LAST_CALL_S)
        except queue.Empty:
            raise WeightSyncError(
                f"{self.server.url} did not join an NCCL group with this process within "
                f"{self.server.timeout_s:g} s: trainer and server need different GPUs, and the "
                "server must reach this machine (by the interface that NCCL_SOCKET_IFNAME names)"
            ) from None
        if isinstance(communicator, Exception):
            raise communicator
        return communicator

    def ask(self, direct: bool, request: dict) -> None:
        """Have the server receive; its answer comes while we broadcast."""

        def call():
            try:
                if direct:
                    self.server.collective_rpc("espalier_receive_weights", **request)
                else:
                    self._ask_vllm(request["manifest"])
                self.answers.put(None)
            except Exception as error:
                self.communicator.abort()
                self.answers.put(WeightSyncError(f"{error}; {MIXED}"))

        threading.Thread(target=call, daemon=True).start()

    def _ask_vllm(self, lines):
        names, dtypes, shapes = (list(column) for column in zip(*lines, strict=True))
        update = {"names": names, "dtype_names": dtypes, "shapes": shapes}
        self.server.call("POST", "/start_weight_update")
        self.server.call("POST", "/update_weights", json={"update_info": update})
        self.server.call("POST", "/finish_weight_update")

    def answer(self) -> None:
        """Wait for it. Every call has its limit, so an answer comes."""
        if error := self.answers.get():
            raise error

    def broadcast(self, bucket: torch.Tensor) -> None:
        """On a stream of its own, so that servers receive at the same time."""
        self.stream.wait_stream(torch.cuda.current_stream())
        try:
            self.communicator.broadcast(bucket, src=0, stream=self.stream)
        except nccl.NcclError as error:
            raise WeightSyncError(f"{self.server.url}: {error}; {MIXED}") from error

    def mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event()
        event.record(self.stream)
        return event

    def close(self) -> None:
        self.communicator.abort()
        with contextlib.suppress(ServerError):
            path = "/shutdown_weight_transfer_engine"
            self.server.call("POST", path, timeout_s=LAST_CALL_S)


# --------------------------------------------------------------------------- the server's workers


class WorkerExtension:
    """Mixed into each of the server's workers; /collective_rpc calls its methods by name.

    What they raise reaches the client as a 500 with the message, and the worker lives on. vLLM
    refuses names that its worker already has, hence the prefix.
    """

    def espalier_load_weights(self, path: str, manifest: list, complete: bool) -> None:
        """All weights from a file, on a GPU by buckets that are cut like those of NCCL."""
        file = map_file(path)
        if on_cpu():  # it keeps weights repacked; the file is the buffer
            (layout,) = cut(read_manifest(manifest), sys.maxsize)
            self._espalier_load_tensors(tensors_of(layout, file), complete)
            return
        position = 0

        def receive(buffer):
            nonlocal position
            buffer.copy_(file[position : position + len(buffer)])
            position += aligned(len(buffer))

        limit, wait = FILE_BUCKET_BYTES, torch.cuda.synchronize
        self._espalier_load_buckets(manifest, limit, complete, receive, wait)

    def espalier_receive_weights(
        self, manifest: list, limit: int, complete: bool, wait_s: float
    ) -> None:
        """All weights over NCCL."""
        group = self.weight_transfer_engine.model_update_group
        if group is None or group.disabled:
            raise RuntimeError("no NCCL group is open with the trainer")
        deadline = time.monotonic() + wait_s

        def receive(buffer):
            group.broadcast(buffer, src=0, stream=torch.cuda.current_stream())

        def wait_for_receipt():
            done = torch.cuda.Event()
            done.record()
            while not done.query():
                if time.monotonic() > deadline:  # a trainer that died: do not wait with it
                    group.disabled = True
                    group.nccl.ncclCommAbort(group.comm)
                    raise RuntimeError(f"the trainer's weights did not come within {wait_s:g} s")
                time.sleep(0.0005)

        self._espalier_load_buckets(manifest, limit, complete, receive, wait_for_receipt)

    def _espalier_load_buckets(self, manifest, limit, complete, receive, wait):
        """Buckets, at first by vLLM's loader, then by the copies it made. receive(buffer) has the
        next bucket written into a buffer, wait() waits until that has happened."""
        copies = vars(self).get("espalier_copies")
        if copies is not None and copies.matches(manifest, limit):
            for buffer, groups in copies.steps:
                receive(buffer)
                for targets, sources in groups:
                    torch._foreach_copy_(targets, sources)
            wait()
            return
        self.espalier_copies = None
        buckets = cut(read_manifest(manifest), limit)
        model = self.model_runner.get_model()
        copies = Copies.record(model, buckets, self.vllm_config, (manifest, limit))

        def tensors():
            for number, bucket in enumerate(buckets):
                buffer = torch.empty(bucket.n_bytes, dtype=torch.uint8, device=self.device)
                receive(buffer)
                wait()
                if copies:
                    copies.sample(number, buffer)
                yield from tensors_of(bucket, buffer)

        self._espalier_load_tensors(tensors(), complete)
        if copies and copies.agree():
            copies.allocate(self.device)
            self.espalier_copies = copies

    def _espalier_load_tensors(self, tensors, complete):
        """vLLM's own way."""
        missing = load_layerwise(self.vllm_config, self.model_runner.get_model(), tensors)
        if complete and missing:
            raise ValueError(f"no weights came for {', '.join(missing[:5])}")

    def espalier_restore(self) -> None:
        """After a vLLM update that failed: without this the next request kills the engine."""
        self._weight_update_active = False  # or the next start would be refused
        restore_layers(self.model_runner.get_model())


class Copies:
    """Where the serving model keeps each tensor: the copies of its load_weights(), recorded once.

    For most models loading is nothing but copies: each tensor of a checkpoint into a slice of some
    parameter (q, k and v into one, an expert into a stack). So load_weights() runs once on tensors
    without data, under a mode that notes each copy instead of making it, and a sync makes all
    copies of a bucket in one kernel.

    That is right only where the server keeps parameters as it loads them. Where it does not
    (weights re-laid for a kernel, quantised, multiplied out), either the recorder meets something
    else than a copy, or, after a load by vLLM's own way, a sample of each tensor is not found where
    the record says. Then there is no record, and every sync goes vLLM's way.
    """

    def __init__(self, buckets, key):
        self.buckets, self.key = buckets, key
        # For each bucket (target in the model, entry number, strides of the source in the entry).
        self.made: list[list[tuple[torch.Tensor, int, torch.Tensor]]] = [[] for _ in buckets]
        self.samples: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.steps: list[tuple[torch.Tensor, list]] = []  # (buffer, [(targets, sources)])

    def matches(self, *key) -> bool:
        """Made for this manifest and bucket size?"""
        return self.key == key

    @classmethod
    def record(cls, model, buckets, vllm_config, key) -> "Copies | None":
        copies = cls(buckets, key)
        blanks, places = [], {}
        for number, bucket in enumerate(buckets):
            for i, entry in enumerate(bucket.entries):
                blank = torch.empty(entry.shape, dtype=entry.dtype, device="meta")
                blanks.append((entry.name, blank))
                places[blank.untyped_storage()._cdata] = copies.made[number], i
        if vllm_config.model_config.use_mla:
            logger.info("every sync loads as vLLM does: MLA multiplies weights out after loading")
            return None
        try:
            with loading(vllm_config), CopyRecorder(places):
                model.load_weights(iter(blanks))
        except Exception as error:  # whatever a model's loader does with a tensor without data
            logger.info("every sync loads as vLLM does, which takes longer: %s", error)
            return None
        return copies

    def _pairs(self, number, buffer):
        """(target, source in the buffer) of each copy of a bucket."""
        bucket = self.buckets[number]
        for target, i, source in self.made[number]:
            entry = view_tensor(buffer, bucket.entries[i], bucket.offsets[i])
            begin = entry.storage_offset() + source.storage_offset()
            yield target, entry.as_strided(source.shape, source.stride(), begin)

    def sample(self, number, buffer) -> None:
        """Remember a part of what came, to be looked for where it should arrive."""
        for target, source in self._pairs(number, buffer):
            self.samples.append((target, grid(source).to(target.dtype, copy=True)))

    def agree(self) -> bool:
        """After the load: is it there?"""
        agree = all(torch.equal(grid(target), sample) for target, sample in self.samples)
        self.samples = []
        if not agree:
            logger.info("every sync loads as vLLM does: it does not keep weights as they come")
        return agree

    def allocate(self, device) -> None:
        """One buffer for all buckets, and the views of it that are copied."""
        size = max(bucket.n_bytes for bucket in self.buckets)
        buffer = torch.empty(size, dtype=torch.uint8, device=device)
        for number, bucket in enumerate(self.buckets):
            part = buffer[: bucket.n_bytes]
            self.steps.append((part, by_dtype(self._pairs(number, part))))


def tensors_of(bucket, buffer):
    """(name, tensor) of each entry, as views."""
    for entry, offset in zip(bucket.entries, bucket.offsets, strict=True):
        yield entry.name, view_tensor(buffer, entry, offset)


def grid(tensor: torch.Tensor) -> torch.Tensor:
    """About 17 entries along each dimension."""
    return tensor[tuple(slice(None, None, max(1, n // 16)) for n in tensor.shape)]


class MoreThanCopies(Exception):
    """A loader does something that recorded copies cannot repeat."""


class CopyRecorder(TorchDispatchMode):
    """Notes copies out of the given storages instead of making them; lets nothing else write."""

    def __init__(self, places: dict):
        super().__init__()
        self.places = places  # storage: (list to append to, entry number)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func._schema.is_mutable and not args[0].is_meta:
            if func is torch.ops.aten.copy_.default:
                found = self.places.get(args[1].untyped_storage()._cdata)
                if found and args[0].shape == args[1].shape:
                    found[0].append((args[0], found[1], args[1]))
                    return args[0]
            elif func is torch.ops.aten.fill_.Scalar or func is torch.ops.aten.zero_.default:
                return args[0]  # padding; it stays as it is
            raise MoreThanCopies(f"the loader writes by {func}")
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def loading(vllm_config):
    """What a model's load_weights() needs around it."""
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.model_loader.mtp_validation import disable_mtp_completeness_check

    with set_current_vllm_config(vllm_config), disable_mtp_completeness_check(), torch.no_grad():
        yield


def load_layerwise(vllm_config, model, tensors) -> list[str]:
    """In the worker: load checkpoint tensors into a serving model; -> parameters left as they were.

    model.load_weights() by itself would write into weights that the CPU build has repacked. vLLM's
    layerwise reload gives each layer fresh storage, loads, repacks, and copies into place.
    """
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
    from vllm.model_executor.model_loader import reload

    # Two things that the CPU build keeps packed are not packed again by a reload (vLLM 0.32; remove
    # when they are): experts, unless their kernel is made anew, and a head that is tied.
    packs = on_cpu()
    methods = [getattr(module, "quant_method", None) for module in model.modules() if packs]
    kernels = [(method, method.moe_kernel) for method in methods if hasattr(method, "moe_kernel")]
    with loading(vllm_config):
        reload.initialize_layerwise_reload(model)
        for method, _ in kernels:
            method.moe_kernel = None
        try:
            loaded = model.load_weights(tensors)
            reload.finalize_layerwise_reload(model, vllm_config.model_config)
        except BaseException:
            restore_layers(model)
            raise
        finally:
            for method, kernel in kernels:
                method.moe_kernel = method.moe_kernel or kernel  # of a layer that was not loaded
        if packs and vllm_config.model_config.hf_text_config.tie_word_embeddings:
            for module in model.modules():
                if isinstance(module, ParallelLMHead):
                    module.quant_method.process_weights_after_loading(module)
    return sorted({name for name, _ in model.named_parameters()} - (loaded or set()))


def on_cpu() -> bool:
    """In the worker: is it vLLM's CPU build?"""
    from vllm.platforms import current_platform

    return current_platform.is_cpu()


def restore_layers(model) -> None:
    """Put a layer's old weights back where a reload was begun and not ended."""
    from vllm.model_executor.model_loader.reload import layerwise

    for module in model.modules():
        info = layerwise.get_layerwise_info(module)
        if info.can_load():
            layerwise._place_kernel_tensors(module, info)
            info.reset()
