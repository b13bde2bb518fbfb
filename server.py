"""Plain client of a vLLM server's control endpoints: what a run needs besides sampling.

    VllmServer     one server; all that a call raises is ServerError, naming the call, the url and
                   the server's own message, within the time limit
    ServerInfo     what the server says about itself
    Fleet          the servers of a run: called in parallel, one that fails is taken out

Test: pytest tests/test_sync.py
"""

import contextlib
import functools
import queue
import threading
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from json import dumps, loads
from typing import Any
from urllib.parse import urlencode, urlsplit

import torch

from http1 import error_message

REUSE_S = 2.0  # a server closes a connection that is idle for 5 s, just when a call is sent
REST_S = 60.0  # that a server is not asked for after it has failed, while others serve
HEALTH_S = 2.0  # for an answer of a server that is alive
LAST_CALL_S = 10.0  # for cleaning up after an error: the server may well be dead
WORKER_EXTENSION = "sync.WorkerExtension"


class ServerError(RuntimeError):
    """A call to the server failed: which call, which server, what it said."""

    def __init__(self, message: str, status: int | None = None):
        super().__init__(message)
        self.status = status  # None: no answer


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
    returns_sets: bool | None  # of candidates, with --return-sampling-mask; None: it is too old to
    chunked_prefill: bool
    max_loras: int = 0  # adapters that it holds at once; 0: started without --enable-lora
    max_lora_rank: int = 0
    loads_adapters: bool = False  # while it runs


class VllmServer:
    """Synchronous client of one server. Every call ends within `timeout_s`, unless it says other.

    Calls may come from several threads. A sync makes six calls within a tenth of a second, so a
    connection that was just used is used again: a new one, or a larger HTTP library, costs
    milliseconds a call.
    """

    def __init__(self, url: str, timeout_s: float):
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"server address {url!r} must start with http:// or https://")
        self.url = url.rstrip("/")
        self.timeout_s = timeout_s
        self.host, self.port = parts.hostname, parts.port
        self._kind = HTTPSConnection if parts.scheme == "https" else HTTPConnection
        self._path = parts.path.rstrip("/")
        self._idle: list[tuple[HTTPConnection, float]] = []  # connection, when it was last used

    def call(
        self, method: str, path: str, *, timeout_s=None, params=None, json=None
    ) -> dict[str, Any]:
        """One request, its query from `params`, its body from `json`; -> its JSON body ({}
        without one)."""
        what = f"{method} {self.url}{path}"
        limit_s = min(self.timeout_s, timeout_s or self.timeout_s)
        target = self._path + path + (f"?{urlencode(params)}" if params else "")
        body = None if json is None else dumps(json)
        headers = {} if json is None else {"Content-Type": "application/json"}
        connection = self._connection(limit_s)
        try:
            connection.request(method, target, body, headers)
            response = connection.getresponse()
            status, answer = response.status, response.read()
        except TimeoutError as error:
            connection.close()
            raise ServerError(f"{what}: no answer within {limit_s:g} s") from error
        except (OSError, HTTPException) as error:
            connection.close()
            raise ServerError(f"{what}: {error or type(error).__name__}") from error
        if status == 200 and not response.will_close:
            self._idle.append((connection, time.monotonic()))
        else:
            connection.close()  # after a 500 uvicorn closes it without saying so
        if status == 200:
            return loads(answer) if answer.startswith(b"{") else {}  # some say "Success: ..."
        raise ServerError(f"{what}: answered {status}, {error_message(answer)}", status)

    def _connection(self, timeout_s: float) -> HTTPConnection:
        while self._idle:
            connection, last_use = self._idle.pop()
            if time.monotonic() - last_use < REUSE_S:
                connection.sock.settimeout(timeout_s)
                return connection
            connection.close()
        return self._kind(self.host, self.port, timeout=timeout_s)

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
        lora = config.get("lora_config") or {}
        return ServerInfo(
            model_names=self.model_names(),
            max_model_len=model["max_model_len"],
            max_logprobs=model["max_logprobs"],
            logprobs_mode=model["logprobs_mode"],
            dtype=getattr(torch, model["dtype"].removeprefix("torch.")),
            on_cpu=str(config["device_config"]["device"]).startswith("cpu"),
            world_size=self.call("GET", "/get_world_size")["world_size"],
            worker_extension=parallel["worker_extension_cls"] or "",
            chunked_prefill=config["scheduler_config"]["enable_chunked_prefill"],
            nccl=(config["weight_transfer_config"] or {}).get("backend") == "nccl",
            returns_sets=model.get("return_sampling_mask"),
            max_loras=lora.get("max_loras", 0),
            max_lora_rank=lora.get("max_lora_rank", 0),
            loads_adapters=bool(lora) and self._loads_adapters(),
        )

    def model_names(self, timeout_s: float | None = None) -> tuple[str, ...]:
        """What requests may ask for: the model, and adapters by their names."""
        models = self.call("GET", "/v1/models", timeout_s=timeout_s)["data"]
        return tuple(entry["id"] for entry in models)

    def _loads_adapters(self) -> bool:
        try:
            self.call("POST", "/v1/unload_lora_adapter", json={"lora_name": ""})
        except ServerError as error:
            return error.status == 400  # the path is there, and refuses this
        return True

    def check(
        self,
        model_name: str,
        *,
        num_sampler_logprobs: int,
        min_model_len: int = 1,
        top_k: int = 0,
        compute_dtype: torch.dtype | None = None,
    ) -> ServerInfo:
        """Refuse a server that could not serve this run, before anything is trained."""
        info = self.info()
        # The token endpoint counts the sampled token among its entries: K needs K + 1.
        entries = num_sampler_logprobs + 1
        way_ok = info.nccl or info.worker_extension == WORKER_EXTENSION
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
            (  # one that cannot is named by a warning of the worker's (sampler.py)
                not top_k or info.returns_sets is not False or info.on_cpu,
                "returns no candidate sets, without which top_k biases every ratio",
                "--return-sampling-mask --enable-scale-out, and VLLM_USE_V2_MODEL_RUNNER=1 in its "
                "environment if it refuses the first",
            ),
            (
                top_k or not info.returns_sets,
                "answers no request without a top_k",
                "no --return-sampling-mask, or give --top_k",
            ),
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
        """Freeze requests where they are; those that arrive later wait in the server. Caches stay:
        reset_caches() drops them once the weights are there, and each time the server visits every
        block of its KV cache, 200,000 of a small model's in 14 ms."""
        answer = self.call("POST", "/pause", params={"mode": "keep", "clear_cache": "false"})
        if answer.get("status") != "paused":
            raise ServerError(f"POST {self.url}/pause: did not pause, answered {answer}")

    def resume(self, timeout_s: float | None = None) -> None:
        """Harmless when the server is not paused."""
        self.call("POST", "/resume", timeout_s=timeout_s)

    def reset_caches(self) -> None:
        """Drop all that was computed with the old weights, running requests' own part included."""
        query = {"reset_running_requests": "true"}
        answer = self.call("POST", "/reset_prefix_cache", params=query)
        if not answer.get("success"):
            raise ServerError(f"POST {self.url}/reset_prefix_cache: not reset, answered {answer}")
        self.call("POST", "/reset_encoder_cache")

    def update_weight_version(self, version: int) -> None:
        self.call("POST", "/update_weight_version", json={"new_version": str(version)})

    def weight_version(self, timeout_s: float | None = None) -> str:
        """The text "default" until somebody has set one."""
        return self.call("GET", "/weight_info", timeout_s=timeout_s)["weight_version"]

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
            "top_k": 1 << 30,  # all tokens; with --return-sampling-mask a server refuses 0
            "min_p": 0.0,
            "repetition_penalty": 1.0,
            "return_token_ids": True,
            **extra,
        }
        return self.call("POST", "/v1/completions", json=body)["choices"][0]


# ---------------------------------------------------------------------------------- several servers


class Fleet:
    """The servers of a run. One that fails a call of a sync is left out of the rest of it; only
    when none is left is that an error, the first server's."""

    def __init__(self, urls: Sequence[str], timeout_s: float):
        self.servers = [VllmServer(url, timeout_s) for url in urls]
        self.timeout_s = timeout_s
        self.infos: dict[VllmServer, ServerInfo] = {}  # after check()
        self.failures: dict[VllmServer, Exception] = {}
        self.failed_at: dict[VllmServer, float] = {}

    @property
    def serving(self) -> list[VllmServer]:
        return [server for server in self.servers if server not in self.failures]

    def each(self, step: Callable[[VllmServer], Any]) -> dict[VllmServer, Any]:
        """step(server) for those that serve, in parallel; -> {server: result}, without failures."""
        answers: queue.SimpleQueue = queue.SimpleQueue()

        def call(server):
            try:
                answers.put((server, step(server), None))
            except Exception as error:
                answers.put((server, None, error))

        servers, results = self.serving, {}
        for server in servers[1:]:  # daemons: a call that hangs must not keep the process alive
            threading.Thread(target=call, args=(server,), daemon=True).start()
        call(servers[0])
        for _ in servers:
            server, result, error = answers.get()
            if error is None:
                results[server] = result
            else:
                self.failures[server], self.failed_at[server] = error, time.monotonic()
        if not results:
            raise self.failures[servers[0]]
        return results

    def rests(self, server: VllmServer) -> bool:
        """Whether it failed a moment ago and others serve."""
        if server not in self.failures or not self.serving:
            return False
        return time.monotonic() - self.failed_at[server] < REST_S

    def readmit(self) -> None:
        """Before a sync: those left out of the last one take part again if they answer."""
        failed, self.failures = self.failures, {}
        for server, error in failed.items():
            try:
                server.call("GET", "/health", timeout_s=HEALTH_S)
            except ServerError:
                self.failures[server], self.failed_at[server] = error, time.monotonic()
        if not self.serving:  # so that this sync says what is wrong
            self.failures = {}

    def wait_for_one(self) -> None:
        """Poll all of them until one answers."""
        deadline = time.monotonic() + self.timeout_s
        while True:
            for server in self.servers:
                with contextlib.suppress(ServerError):
                    return server.call("GET", "/health", timeout_s=HEALTH_S)
            if time.monotonic() > deadline:
                urls = ", ".join(server.url for server in self.servers)
                raise TimeoutError(f"no vLLM server answered within {self.timeout_s:g} s: {urls}")
            time.sleep(0.5)

    def wait_until_ready(self, progress=lambda server, waited_s: None) -> None:
        for server in self.servers:
            server.wait_until_ready(functools.partial(progress, server))

    def check(self, model_name: str, **needs) -> ServerInfo:
        """VllmServer.check() of each; -> what holds for all. They must be alike."""
        self.infos = self.each(lambda server: server.check(model_name, **needs))
        for error in self.failures.values():  # at the start one is too many
            raise error
        first = self.infos[self.servers[0]]
        for server, info in self.infos.items():
            for name in ("dtype", "nccl"):
                ours, theirs = getattr(first, name), getattr(info, name)
                if ours != theirs:
                    raise ValueError(
                        f"{server.url} has {name}={theirs} and {self.servers[0].url} {ours}: start "
                        "all servers alike"
                    )
        shortest = min(info.max_model_len for info in self.infos.values())
        return replace(first, max_model_len=shortest)
