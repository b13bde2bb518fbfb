"""Weight sync: the trainer's weights into a running vLLM server, as version n, or an error.

    sync_weights()     send, and return the seconds it took; collective over the trainer's ranks
    check_sync()       proof: log-probs of a fixed prompt agree between the server and the trainer
    VllmServer         plain client of one server's control endpoints; all that it raises is
                       ServerError, naming the call, the url and the server's own message
    Weights            which parameters go to the server, under which name, in which dtype
    FileSender         CPU: a file in shared memory, mapped and loaded by each worker
    NcclSender         CUDA: vLLM's own trainer-side engine moves the bytes
    WorkerExtension    the server's end; start it with --worker-extension-cls sync.WorkerExtension

Who does what, in order. Rank 0 alone talks to the server; after each line all ranks learn from
rank 0 whether it worked and raise or go on together.

    stage     every rank gathers   CPU: the file is written while the server still generates
    pause     rank 0               mode=keep: requests freeze where they are, new ones wait
    load      rank 0 (NCCL: all)   no token is sampled between here and resume
    reset     rank 0               caches of the old weights; running requests are recomputed
    version   rank 0               the server labels each token with it from here on
    resume    rank 0               also when anything above failed

The caller counts the version up after sync_weights() has returned, never before.

Left out: adapters, several servers, fused experts' checkpoint names. After a load that failed half
way some layers may be new and some old; the error says so, and a complete sync repairs it.
Test: pytest tests/test_sync.py (fault injection, two gloo ranks, a real CPU server)
"""

import contextlib
import math
import os
import queue
import socket
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import requests
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

LAST_CALL_S = 10.0  # for cleaning up after an error: the server may well be dead
ALIGNMENT = 64  # bytes; a cache line, and a multiple of every dtype's size
WRAPPERS = ("_checkpoint_wrapped_module.", "_orig_mod.")  # activation checkpointing, torch.compile
WORKER_EXTENSION = "sync.WorkerExtension"
MIXED = "until a sync succeeds the server may hold a mix of old and new weights"


class ServerError(RuntimeError):
    """A call to the server failed: which call, which server, what it said."""

    def __init__(self, message: str, status: int | None = None):
        super().__init__(message)
        self.status = status  # None: no answer


class WeightSyncError(RuntimeError):
    """The server does not hold the weights that it should."""


# ---------------------------------------------------------------------------------------- server


@dataclass(frozen=True)
class ServerInfo:
    model_names: tuple[str, ...]
    max_model_len: int  # tokens, prompt and completion
    max_logprobs: int  # -1: no limit
    logprobs_mode: str
    dtype: torch.dtype  # of its weights
    on_cpu: bool
    world_size: int  # processes that hold weights: tensor x pipeline x data parallel
    worker_extension: str  # "" without
    nccl: bool  # started to receive weights that way
    chunked_prefill: bool


class VllmServer:
    """Synchronous client of one server. Every call ends within `timeout_s`, unless it says other.

    No connection is kept: a server closes idle ones after 5 s, just when the next call is sent,
    and a new one costs a millisecond.
    """

    def __init__(self, url: str, timeout_s: float):
        if not url.startswith(("http://", "https://")):
            raise ValueError(f"server address {url!r} must start with http:// or https://")
        self.url = url.rstrip("/")
        self.timeout_s = timeout_s

    def call(self, method: str, path: str, *, timeout_s=None, **request) -> dict[str, Any]:
        """One request; -> its JSON body ({} when empty). `request` goes to requests as it is."""
        what = f"{method} {self.url}{path}"
        limit_s = min(self.timeout_s, timeout_s or self.timeout_s)
        try:
            with requests.Session() as session:
                session.trust_env = False  # no proxy between machines of one cluster
                response = session.request(method, self.url + path, timeout=limit_s, **request)
            if response.ok:
                return response.json() if response.content else {}
        except requests.Timeout as error:
            raise ServerError(f"{what}: no answer within {limit_s:g} s") from error
        except requests.RequestException as error:
            raise ServerError(f"{what}: {innermost(error)}") from error
        status = response.status_code
        raise ServerError(f"{what}: answered {status}, {error_message(response)}", status)

    def wait_until_ready(self, progress: Callable[[float], None] = lambda waited_s: None) -> None:
        """Poll /health once a second; `progress` is told the seconds waited."""
        start = time.monotonic()
        while (waited_s := time.monotonic() - start) < self.timeout_s:
            with contextlib.suppress(ServerError):
                self.call("GET", "/health", timeout_s=5.0)
                return
            progress(waited_s)
            time.sleep(min(1.0, self.timeout_s - waited_s))
        raise TimeoutError(
            f"no vLLM server answered at {self.url} within {self.timeout_s:g} s: start one there, "
            "correct --vllm_server_base_url, or raise --vllm_server_timeout"
        )

    def info(self) -> ServerInfo:
        """What the server says about itself. The first call takes it some seconds."""
        try:
            told = self.call("GET", "/server_info", params={"config_format": "json"})
        except ServerError as error:
            if error.status == 404:
                raise ValueError(
                    f"the server at {self.url} has no control endpoints: restart it with "
                    "VLLM_SERVER_DEV_MODE=1 in its environment"
                ) from error
            raise
        config = told["vllm_config"]
        model, parallel = config["model_config"], config["parallel_config"]
        models = self.call("GET", "/v1/models")["data"]
        return ServerInfo(
            model_names=tuple(entry["id"] for entry in models),
            max_model_len=model["max_model_len"],
            max_logprobs=model["max_logprobs"],
            logprobs_mode=model["logprobs_mode"],
            dtype=getattr(torch, model["dtype"].removeprefix("torch.")),
            on_cpu=str(config["device_config"]["device"]).startswith("cpu"),
            world_size=self.call("GET", "/get_world_size")["world_size"],
            worker_extension=parallel["worker_extension_cls"] or "",
            chunked_prefill=config["scheduler_config"]["enable_chunked_prefill"],
            nccl=(config["weight_transfer_config"] or {}).get("backend") == "nccl",
        )

    def check(
        self,
        model_name: str,
        *,
        num_sampler_logprobs: int,
        min_model_len: int = 1,
        compute_dtype: torch.dtype | None = None,
    ) -> ServerInfo:
        """Refuse a server that could not serve this run, before anything is trained."""
        info = self.info()
        # The token endpoint counts the sampled token among its entries: K needs K + 1.
        entries = num_sampler_logprobs + 1
        way_ok = info.worker_extension == WORKER_EXTENSION if info.on_cpu else info.nccl
        way = f"PYTHONPATH=. and --worker-extension-cls {WORKER_EXTENSION}, in this folder"
        if not info.on_cpu:
            way = """--weight-transfer-config '{"backend":"nccl"}'"""
        for fine, problem, remedy in (
            (
                model_name in info.model_names,
                f"serves {', '.join(info.model_names)}, not {model_name}",
                f"--served-model-name {model_name}",
            ),
            (
                info.logprobs_mode == "processed_logprobs",
                f"returns {info.logprobs_mode}, not the log-probs that it samples from",
                "--logprobs-mode processed_logprobs",
            ),
            (
                info.max_logprobs < 0 or info.max_logprobs >= entries,
                f"returns {info.max_logprobs} log-probs a token, {num_sampler_logprobs=} needs "
                f"{entries}",
                f"--max-logprobs {entries}",
            ),
            (
                info.max_model_len >= min_model_len,
                f"takes {info.max_model_len} tokens, this run needs {min_model_len}",
                f"--max-model-len {min_model_len}, or shorten prompts or completions",
            ),
            (way_ok, "cannot take weights", way),
            (
                not (info.on_cpu and info.chunked_prefill),
                "would die of the first seeded request whose prefill it splits",
                "--no-enable-chunked-prefill --max-num-batched-tokens N, N at least its "
                "--max-model-len",
            ),
        ):
            if not fine:
                raise ValueError(f"the server at {self.url} {problem}: restart it with {remedy}")
        if compute_dtype not in (None, info.dtype):
            warnings.warn(
                f"{self.url} computes in {info.dtype} and the trainer in {compute_dtype}: their "
                "log-probs will differ by more than they must",
                stacklevel=2,
            )
        return info

    def pause(self) -> None:
        """Freeze requests where they are; those that arrive later wait in the server."""
        answer = self.call("POST", "/pause", params={"mode": "keep"})
        if answer.get("status") != "paused":
            raise ServerError(f"POST {self.url}/pause: did not pause, answered {answer}")

    def resume(self, timeout_s: float | None = None) -> None:
        """Harmless when the server is not paused."""
        self.call("POST", "/resume", timeout_s=timeout_s)

    def is_paused(self) -> bool:
        return self.call("GET", "/is_paused")["is_paused"]

    def reset_caches(self) -> None:
        """Drop all that was computed with the old weights, running requests' own part included."""
        query = {"reset_running_requests": "true"}
        answer = self.call("POST", "/reset_prefix_cache", params=query)
        if not answer.get("success"):
            raise ServerError(f"POST {self.url}/reset_prefix_cache: not reset, answered {answer}")
        self.call("POST", "/reset_encoder_cache")

    def update_weight_version(self, version: int) -> None:
        self.call("POST", "/update_weight_version", json={"new_version": str(version)})

    def weight_version(self) -> str:
        """The text "default" until somebody has set one."""
        return self.call("GET", "/weight_info")["weight_version"]

    def collective_rpc(self, method: str, *, timeout_s=None, **kwargs: Any) -> list[Any]:
        """Run a method of every worker; -> their results. kwargs must survive JSON."""
        body = {"method": method, "kwargs": kwargs, "timeout": self.timeout_s}
        return self.call("POST", "/collective_rpc", timeout_s=timeout_s, json=body)["results"]

    def score(self, model_name: str, ids: Sequence[int]) -> list[float]:
        """Log-probs of ids[1:], each given all before it. Computed afresh: this request makes no
        use of the prefix cache."""
        answer = self._complete(model_name, ids, 1, prompt_logprobs=0)
        entries = answer["prompt_logprobs"][1:]
        return [entry[str(i)]["logprob"] for entry, i in zip(entries, ids[1:], strict=True)]

    def sample(
        self, model_name: str, ids: Sequence[int], n_tokens: int
    ) -> tuple[list[int], list[float]]:
        """n_tokens sampled after `ids` and their log-probs, by the way that rollouts go: through
        the prefix cache, token by token."""
        answer = self._complete(model_name, ids, n_tokens, logprobs=0)
        return answer["token_ids"], answer["logprobs"]["token_logprobs"]

    def _complete(self, model_name, ids, n_tokens, **extra):
        # All sampling parameters are sent: the model's generation_config.json would fill the gaps.
        body = {
            "model": model_name,
            "prompt": list(ids),
            "max_tokens": n_tokens,
            "ignore_eos": True,
            "temperature": 1.0,
            "top_p": 1.0,
            "top_k": 0,
            "min_p": 0.0,
            "repetition_penalty": 1.0,
            "return_token_ids": True,
            **extra,
        }
        return self.call("POST", "/v1/completions", json=body)["choices"][0]


def innermost(error: BaseException) -> BaseException:
    """requests wraps "connection refused" four times over."""
    while error.__context__ is not None:
        error = error.__context__
    return error


def error_message(response: requests.Response) -> str:
    """vLLM's own words: {"error": str}, {"error": {"message": str}}, {"detail": ...} or text."""
    try:
        body = response.json()
        message = body.get("error") or body.get("detail") or body
        return str(message.get("message", message) if isinstance(message, dict) else message)
    except (requests.JSONDecodeError, AttributeError):
        return response.text.strip()[:500] or response.reason


# --------------------------------------------------------------------------------------- weights


class Entry(NamedTuple):
    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Weights:
    """The parameters that go to the server, with the names of the Hugging Face checkpoint.

    `prefix` is what the trainer's module tree puts before those names. With `tied`, the head is
    the embedding and is not sent. Every rank must iterate: gathering a shard is a collective, in
    the order of named_parameters(), which is the same on all ranks.
    """

    model: torch.nn.Module
    dtype: torch.dtype  # the server's
    prefix: str = ""
    tied: bool = False

    def _parameters(self) -> list[tuple[str, torch.nn.Parameter]]:
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
            for name, parameter in self._parameters()
        ]

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        """(name, whole tensor), one at a time; no more than one is held."""
        for name, parameter in self._parameters():
            tensor = parameter.detach().to(self._wire_dtype(parameter))
            yield name, tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def checkpoint_name(name: str, prefix: str = "") -> str:
    for wrapper in WRAPPERS:
        name = name.replace(wrapper, "")
    return name.removeprefix(prefix)


def layer_of(name: str) -> str:
    """model.layers.3.mlp.up_proj.weight -> model.layers.3; a name without a number stays."""
    parts = name.split(".")
    number = next((i for i, part in enumerate(parts) if part.isdigit()), len(parts))
    return ".".join(parts[: number + 1])


# ------------------------------------------------------------------------------------------ sync


def sync_weights(
    server: VllmServer, sender: "FileSender | NcclSender", version: int, *, group=None
) -> dict[str, float]:
    """Make the server sample from the trainer's weights, under `version`; -> seconds by metric.

    Collective over `group` (None: all ranks; without torch.distributed: this process). Rank 0's
    error is raised on every rank. The group's timeout must be longer than the server's, since the
    others wait while rank 0 talks to it.
    """
    start = time.perf_counter()
    seconds = dict.fromkeys(("pause", "barrier", "transfer"), 0.0)
    first = is_first(group)

    def commit():
        server.reset_caches()
        server.update_weight_version(version)

    def only_first(step):
        return step if first else lambda: None

    try:
        together(sender.stage, group, seconds, "transfer")
        together(only_first(server.pause), group, seconds, "pause")
        together(sender.load, group, seconds, "transfer")
        together(only_first(commit), group)
        together(only_first(server.resume), group)
    except BaseException as error:
        # No collective here: ranks may have come from different places. A pause that was not
        # acknowledged may yet have paused the server, so resume in any case.
        sender.release(failed=True)
        if first:
            try:
                server.resume(timeout_s=LAST_CALL_S)
            except ServerError as again:
                error.add_note(f"the server could not be resumed either: {again}")
        raise
    sender.release(failed=False)
    total = {"perf/weight_sync_s": time.perf_counter() - start}
    return total | {f"perf/weight_sync_{part}_s": value for part, value in seconds.items()}


def is_first(group=None) -> bool:
    return not dist.is_initialized() or dist.get_rank(group) == 0


def together(step: Callable[[], Any], group=None, seconds=None, part: str = "") -> Any:
    """Run `step` here, then do as rank 0 did: -> its result, or raise its error, on every rank.

    One broadcast. Its time is the wait for the slower side; it is counted as "barrier", and the
    step's own as `part`. An error on another rank than 0 is raised at once: that rank's process
    ends, and the launcher ends the others.
    """
    begin = time.perf_counter()
    result, error = None, None
    try:
        result = step()
    except Exception as caught:
        if not is_first(group):
            raise
        error = caught
    done = time.perf_counter()
    outcome = [result, None if error is None else f"{type(error).__name__}: {error}"]
    if dist.is_initialized():
        dist.broadcast_object_list(outcome, group=group, group_src=0)
    if seconds is not None:
        seconds[part] += done - begin
        seconds["barrier"] += time.perf_counter() - done
    if error is not None:
        raise error
    if outcome[1] is not None:
        raise WeightSyncError(f"on rank 0: {outcome[1]}")
    return outcome[0]


def make_sender(
    server: VllmServer, info: ServerInfo, weights: Weights, *, group=None
) -> "FileSender | NcclSender":
    """The way that suits the server; every rank makes one."""
    if info.on_cpu:
        return FileSender(server, weights, group=group)
    return NcclSender(server, info, weights, group=group)


def check_sync(
    server: VllmServer,
    model_name: str,
    prompt_ids: Sequence[int],
    trainer_log_probs: Callable[[list[int]], Any],
    *,
    dtypes: Sequence[torch.dtype],
    n_sampled: int = 16,
    group=None,
) -> float:
    """Largest difference between the server's log-probs and the trainer's; too large a one raises.

    Collective. `trainer_log_probs(ids)` gives those of ids[1:], and runs on every rank. `dtypes`
    are those that server and trainer compute in. The server scores the prompt and n_sampled
    tokens that it samples after it; sampling goes through the prefix cache, so with a prompt
    longer than one of its blocks (16 tokens on CUDA, 128 on CPU) a cache left from older weights
    shows too.
    """

    def ask():
        sampled_ids, sampled = server.sample(model_name, prompt_ids, n_sampled)
        ids = [*prompt_ids, *sampled_ids]
        return ids, server.score(model_name, ids) + sampled

    ids, theirs = together(ask if is_first(group) else lambda: None, group)
    ours = torch.as_tensor(trainer_log_probs(ids)).detach().float().cpu()
    ours, theirs = torch.cat([ours, ours[-n_sampled:]]), torch.tensor(theirs)
    gaps = (theirs - ours).abs()
    worst, mean = int(gaps.argmax()), float(gaps.mean())
    max_bound, mean_bound = sync_bounds(dtypes)
    if not (gaps[worst] <= max_bound and mean <= mean_bound):  # also for NaN
        token = (ids[1:] + ids[-n_sampled:])[worst]
        raise WeightSyncError(
            f"{server.url} does not hold the trainer's weights: log-prob of token {token} is "
            f"{theirs[worst]:.4f} there and {ours[worst]:.4f} here; over {len(gaps)} tokens the "
            f"difference is at most {gaps[worst]:.2g} (allowed {max_bound:.2g}) and on average "
            f"{mean:.2g} (allowed {mean_bound:.2g})"
        )
    return float(gaps[worst])


def sync_bounds(dtypes: Sequence[torch.dtype]) -> tuple[float, float]:
    """Largest and mean difference of log-probs that the coarser dtype's rounding explains.

    Rounding a logit of 16 to 32 errs by up to 8 eps; server and trainer both do it: 16 eps for
    the mean. Improbable tokens err ten times as much, and a few hundred are compared: 256 eps for
    the largest. 1e-4 is for sums in another order, whatever the dtype. Measured with bf16: mean
    2e-2 to 4e-2 (bound 0.125), largest 4e-2 to 0.42 (bound 2.0); with fp32: largest 6e-6.
    """
    eps = max(torch.finfo(dtype).eps for dtype in dtypes)
    return 256 * eps + 1e-4, 16 * eps + 1e-4


# ------------------------------------------------------------------------------------- CPU: file


class FileSender:
    """The tensors end to end in one file in shared memory, mapped by trainer and workers alike.

    It is the only copy: tensors are gathered one by one and written in place.
    """

    def __init__(self, server: VllmServer, weights: Weights, *, group=None):
        self.server, self.weights, self.group = server, weights, group
        self.path = ""
        self.manifest: list[
            tuple[str, str, tuple[int, ...], int]
        ] = []  # name, dtype, shape, offset

    def stage(self) -> None:
        """Every rank gathers, rank 0 writes."""
        stream = iter(self.weights)
        n_threads = torch.get_num_threads()
        # The server generates on the same cores, and threads that wait for each other there are
        # slow: 269 MB take 1.4 to 2.4 s with two and 0.35 to 0.6 s with one.
        torch.set_num_threads(1)
        try:
            if is_first(self.group):
                self._write(stream)
        finally:
            for _ in stream:  # also after an error on rank 0: the others are still gathering
                pass
            torch.set_num_threads(n_threads)

    def _write(self, stream):
        self.manifest, n_bytes = [], 0
        for name, dtype, shape in self.weights.metadata():
            self.manifest.append((name, str(dtype).removeprefix("torch."), shape, n_bytes))
            n_bytes += -(-math.prod(shape) * dtype.itemsize // ALIGNMENT) * ALIGNMENT
        self.path = reserve_file(n_bytes)
        file = torch.from_file(self.path, shared=True, size=n_bytes, dtype=torch.uint8)
        for (name, tensor), entry in zip(stream, self.manifest, strict=True):
            assert name == entry[0], f"{name} gathered where {entry[0]} was announced"
            view_tensor(file, *entry[1:]).copy_(tensor)

    def load(self) -> None:
        """Rank 0 only: have every worker load the file."""
        if not is_first(self.group):
            return
        try:
            self.server.collective_rpc(
                "espalier_load_weights",
                path=self.path,
                manifest=self.manifest,
                complete=self.weights.complete(),
            )
        except ServerError as error:
            raise WeightSyncError(f"{error}; {MIXED}") from error

    def release(self, failed: bool) -> None:
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
            handle, path = tempfile.mkstemp(prefix="espalier-weights-", dir=folder)
            with os.fdopen(handle, "wb"):
                os.posix_fallocate(handle, 0, n_bytes)
            return path
        except OSError as error:
            problems.append(f"{folder}: {error.strerror}")
            if path:
                os.unlink(path)
    raise WeightSyncError(f"no room for {n_bytes / 1e9:.2f} GB of weights ({'; '.join(problems)})")


def view_tensor(file: torch.Tensor, dtype: str, shape: Sequence[int], offset: int) -> torch.Tensor:
    kind = getattr(torch, dtype)
    return file[offset : offset + math.prod(shape) * kind.itemsize].view(kind).view(*shape)


# ------------------------------------------------------------------------------------ CUDA: NCCL


class NcclSender:
    """Drives vLLM's trainer-side NCCL engine, and puts a limit to each wait that it has not.

    The engine lives on rank 0. It is given this object twice: as the source, whose tensors are
    those of the current pass over the weights, and as the client, whose update_weights() ends a
    broadcast that no server joins. A group that failed is rebuilt at the next sync.
    Trainer memory beyond the weights: four buffers (two, each gathered and then packed).
    """

    def __init__(
        self,
        server: VllmServer,
        info: ServerInfo,
        weights: Weights,
        *,
        group=None,
        buffer_bytes: int = 1 << 30,
    ):
        self.server, self.info, self.weights, self.group = server, info, weights, group
        self.buffer_bytes = buffer_bytes
        self.engine = None
        self.stream: Iterator[tuple[str, torch.Tensor]] = iter(())
        self.lock = threading.Lock()
        self.joined: queue.SimpleQueue = queue.SimpleQueue()

    def stage(self) -> None:
        """Rank 0 only: open the group of trainer and workers, the first time and after failures."""
        if is_first(self.group) and self.engine is None:
            self.engine = self._connect()

    def _connect(self):
        from vllm.distributed.weight_transfer.nccl_engine import (
            NCCLTrainerInitInfo,
            NCCLTrainerWeightTransferEngine,
        )

        address, port = meeting_point(self.server.url)
        rendezvous = NCCLTrainerInitInfo(
            master_address=address,
            master_port=port,
            world_size=1 + self.info.world_size,
            packed_buffer_size_bytes=self.buffer_bytes,
            rank=0,
        )
        device = torch.cuda.current_device()
        self.joined = joined = queue.SimpleQueue()

        def connect():
            torch.cuda.set_device(device)  # per thread
            try:
                engine = NCCLTrainerWeightTransferEngine.trainer_init(
                    rendezvous, client=self, source=self
                )
                joined.put(engine)
            except Exception as error:
                joined.put(error)

        # NCCL waits for its peers without a limit. If they do not come the thread stays behind.
        threading.Thread(target=connect, daemon=True).start()
        try:
            # A little longer than the call's own limit, whose error says more.
            engine = joined.get(timeout=self.server.timeout_s + LAST_CALL_S)
        except queue.Empty:
            raise WeightSyncError(
                f"{self.server.url} did not join an NCCL group with {address} within "
                f"{self.server.timeout_s:g} s: trainer and server need different GPUs, and the "
                "server must reach that address"
            ) from None
        if isinstance(engine, Exception):
            raise engine
        return engine

    def load(self) -> None:
        """Every rank gathers, rank 0 broadcasts."""
        # The engine reads on streams of its own, which do not wait for the optimizer's.
        torch.cuda.synchronize()
        self.stream = iter(self.weights)
        try:
            if is_first(self.group):
                self.engine.send_weights()
        except Exception as error:
            raise WeightSyncError(f"{error}; {MIXED}") from error
        finally:
            for _ in self.stream:  # also after an error on rank 0: the others are still gathering
                pass

    def release(self, failed: bool) -> None:
        """The group stays for the next sync, unless this one failed."""
        if failed and self.engine is not None and self.info.worker_extension == WORKER_EXTENSION:
            with contextlib.suppress(ServerError):
                self.server.collective_rpc("espalier_restore", timeout_s=LAST_CALL_S)
        if failed:
            self.close()

    def close(self) -> None:
        if self.engine is not None:
            self._abort()
            self.engine = None
            with contextlib.suppress(ServerError):
                path = "/shutdown_weight_transfer_engine"
                self.server.call("POST", path, timeout_s=LAST_CALL_S)

    def _abort(self):
        """Free the communicator, and with it a thread that waits in it. From any thread."""
        with self.lock:
            communicator = self.engine and self.engine.model_update_group
            if communicator is None or communicator.disabled:
                return
            communicator.disabled = True  # first: no thread may enter what is being freed
            with torch.cuda.device(communicator.device):
                communicator.nccl.ncclCommAbort(communicator.comm)

    # The engine's source.

    def metadata(self) -> list[Entry]:
        return self.weights.metadata()

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        return self.stream

    # The engine's client.

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        try:
            body = {"init_info": init_info}
            self.server.call("POST", "/init_weight_transfer_engine", json=body)
        except ServerError as error:
            self.joined.put(error)  # the engine itself now waits in NCCL
            raise

    def start_weight_update(self) -> None:
        self.server.call("POST", "/start_weight_update")

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Runs in a thread of the engine's while its own waits in the broadcast."""
        try:
            self.server.call("POST", "/update_weights", json={"update_info": update_info})
        except ServerError:
            self._abort()
            raise

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        """Without the version: it is set when the caches are reset."""
        self.server.call("POST", "/finish_weight_update")


def meeting_point(url: str) -> tuple[str, int]:
    """This machine's address as the server sees it, and a free port there."""
    parts = urlsplit(url)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((parts.hostname, parts.port or 80))  # of a datagram socket: sends nothing
        address = probe.getsockname()[0]
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.bind((address, 0))
        return address, probe.getsockname()[1]


# --------------------------------------------------------------------------- the server's workers


class WorkerExtension:
    """Mixed into each of the server's workers; /collective_rpc calls its methods by name.

    What they raise reaches the client as a 500 with the message, and the worker lives on. vLLM
    refuses names that its worker already has, hence the prefix.
    """

    def espalier_load_weights(self, path: str, manifest: list, complete: bool) -> None:
        n_bytes = os.path.getsize(path)
        file = torch.from_file(path, shared=True, size=n_bytes, dtype=torch.uint8)
        tensors = (
            (name, view_tensor(file, dtype, shape, offset))
            for name, dtype, shape, offset in manifest
        )
        missing = load_layerwise(self.vllm_config, self.model_runner.get_model(), tensors)
        if complete and missing:
            raise ValueError(f"no weights came for {', '.join(missing[:5])}")

    def espalier_restore(self) -> None:
        """After an NCCL update that failed: without this the next request kills the engine."""
        self._weight_update_active = False  # or the next start would be refused
        restore_layers(self.model_runner.get_model())


def load_layerwise(vllm_config, model, tensors) -> list[str]:
    """In the worker: load checkpoint tensors into a serving model; -> parameters left as they were.

    model.load_weights() by itself would write into weights that the CPU build has repacked. vLLM's
    layerwise reload gives each layer fresh storage, loads, repacks, and copies into place.
    """
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
    from vllm.model_executor.model_loader import reload
    from vllm.platforms import current_platform

    with set_current_vllm_config(vllm_config):
        reload.initialize_layerwise_reload(model)
        try:
            loaded = model.load_weights(tensors)
            reload.finalize_layerwise_reload(model, vllm_config.model_config)
        except BaseException:
            restore_layers(model)
            raise
        tied = vllm_config.model_config.hf_text_config.tie_word_embeddings
        if tied and current_platform.is_cpu():
            # The CPU build keeps a packed copy of the head, which no reload refreshes when the
            # head is tied (vLLM 0.32). Remove when it does.
            for module in model.modules():
                if isinstance(module, ParallelLMHead):
                    module.quant_method.process_weights_after_loading(module)
    return sorted({name for name, _ in model.named_parameters()} - (loaded or set()))


def restore_layers(model) -> None:
    """Put a layer's old weights back where a reload was begun and not ended."""
    from vllm.model_executor.model_loader.reload import layerwise

    for module in model.modules():
        info = layerwise.get_layerwise_info(module)
        if info.can_load():
            layerwise._place_kernel_tensors(module, info)
            info.reset()
