"""LoRA adapters to the server by themselves (spec, "Train adapters with PEFT").

    AdapterSender     a sender for sync_weights(): writes version n as a folder, has servers load it
    adapter_problem() why an adapter cannot be served as such: then it is merged (weights.py)

A version is a name of its own, so no request changes its weights on the way: a rollout that began
under version n ends under it. With S = max_staleness, at version v

    registered      v - S ... v, and v - S - 1 until the next sync: S + 2 slots (--max-loras)
    rollouts        of v - S ... v go on; older ones are stopped (router.py), dropped and counted
    files           <output_dir>/.vllm_lora/espalier-vN, written aside and renamed, deleted with the
                    name. A serving cache: checkpoints keep the adapter

The next sync removes v - S - 1 first, after the worker has said that nothing samples from it any
more; so no request names an adapter that is gone. Nothing is paused and no cache is reset: vLLM
keeps the caches of adapters apart.

vLLM registers adapters in its API server, so there can be one of those only (--api-server-count 1).
Test: pytest tests/test_adapters.py
"""

import contextlib
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import save_file

from server import HEALTH_S, Fleet, ServerError, ServerInfo
from weights import checkpoint_name, gather

MODEL_NAME = "espalier-v{version}"  # what requests call the model
FOLDER = ".vllm_lora"
MAX_LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # that vLLM takes
IN_USE_S = 30.0  # for the worker to stop rollouts that are too old; it looks 10 times a second


def adapter_problem(model, fleet: Fleet) -> str:
    """Why servers that take adapters cannot serve this one by itself, "" if they can."""
    for server, info in fleet.infos.items():
        if not info.loads_adapters:
            return f"{server.url} was started without VLLM_ALLOW_RUNTIME_LORA_UPDATING=1"
    config = model.peft_config[model.active_adapter]
    if config.use_dora:
        return "use_dora is set"
    if config.modules_to_save:
        return f"modules_to_save {config.modules_to_save} are no adapters"
    if config.bias != "none":
        return f"bias={config.bias!r} trains the base model's biases"
    return ""


def largest_rank(adapter) -> int:
    """Of a peft.LoraConfig."""
    return max([adapter.r, *adapter.rank_pattern.values()])


def served_rank(rank: int) -> int:
    """The least --max-lora-rank of a server that takes adapters of that rank."""
    least = next((r for r in MAX_LORA_RANKS if r >= rank), None)
    if least is None:
        raise ValueError(f"lora_r={rank} is above {MAX_LORA_RANKS[-1]}, the most that vLLM serves")
    return least


def check_slots(url: str, info: ServerInfo, rank: int, max_staleness: int) -> None:
    """Raise unless a server with --enable-lora can hold the adapters of a run."""
    least, slots = served_rank(rank), max_staleness + 2
    if info.max_lora_rank < rank or info.max_loras < slots:
        raise ValueError(
            f"the server at {url} holds {info.max_loras} adapters of rank {info.max_lora_rank} at "
            f"most; this run needs {slots} (max_staleness {max_staleness} + 2) of rank {rank}: "
            f"restart it with --max-loras {slots} --max-lora-rank {least}, or without "
            "--enable-lora for merged weights"
        )


class AdapterSender:
    """Every rank gathers the adapter, rank 0 writes it and tells the servers to load it."""

    pauses = False  # sync_weights(): the servers go on generating
    adapter_name = MODEL_NAME  # what requests ask for

    def __init__(
        self,
        fleet: Fleet,
        model,  # peft's
        output_dir,  # on rank 0
        *,
        dtype: torch.dtype,  # the server's
        max_staleness: int,
        first: bool = True,
        oldest_in_use: Callable[[], int] = lambda: 1 << 62,
    ):
        self.fleet, self.model, self.dtype, self.first = fleet, model, dtype, first
        self.folder = Path(output_dir).resolve() / FOLDER if first else None
        self.max_staleness, self.oldest_in_use = max_staleness, oldest_in_use
        self.loaded: int | None = None  # the newest that servers have; never written again
        self.parameters = [  # before the first forward, as in weights.Weights
            (name, parameter) for name, parameter in model.named_parameters() if ".lora_" in name
        ]
        if first:
            self._clear()

    def _clear(self, *ignored):
        """Names and files of an earlier run would be taken for ours."""
        shutil.rmtree(self.folder, ignore_errors=True)
        prefix = MODEL_NAME.format(version="")
        for server in self.fleet.servers:
            with contextlib.suppress(*ignored):
                for name in server.model_names():
                    if name.startswith(prefix):
                        self._unload(server, name)

    def stage(self, version: int) -> None:
        """Make room, then write the version; the servers go on meanwhile."""
        gathered = gather([(parameter, self.dtype) for _, parameter in self.parameters])
        if not self.first or version == self.loaded:  # a server came back and needs the same
            return
        for old in self._registered():
            if old >= version:  # of a sync that failed: nobody was told of it
                self._forget(old)
            elif old < version - 1 - self.max_staleness:
                self._wait_until_unused(old)
                self._forget(old)
        path = self.folder / MODEL_NAME.format(version=version)
        aside = path.with_suffix(".tmp")
        shutil.rmtree(aside, ignore_errors=True)
        aside.mkdir(parents=True)
        tensors = {
            peft_name(name): tensor.to("cpu", self.dtype).contiguous()
            for (name, _), tensor in zip(self.parameters, gathered, strict=True)
        }
        save_file(tensors, aside / "adapter_model.safetensors")
        self.model.peft_config[self.model.active_adapter].save_pretrained(str(aside))
        os.rename(aside, path)

    def _registered(self):
        prefix = MODEL_NAME.format(version="")
        names = [path.name for path in self.folder.glob(f"{prefix}*") if path.suffix != ".tmp"]
        return sorted(int(name.removeprefix(prefix)) for name in names)

    def _wait_until_unused(self, version):
        deadline = time.monotonic() + IN_USE_S
        while self.oldest_in_use() <= version:
            if time.monotonic() > deadline:
                raise RuntimeError(
                    f"rollouts still sample from adapter {version} after {IN_USE_S:g} s, which is "
                    f"more than max_staleness={self.max_staleness} syncs old"
                )
            time.sleep(0.01)

    def _forget(self, version):
        """Take a version from the servers and the disk."""
        name = MODEL_NAME.format(version=version)
        self.fleet.each(lambda server: self._unload(server, name))
        shutil.rmtree(self.folder / name)

    @staticmethod
    def _unload(server, name):
        try:
            server.call("POST", "/v1/unload_lora_adapter", json={"lora_name": name})
        except ServerError as error:
            if error.status != 404:  # it had not been loaded: the server was restarted
                raise

    def load(self) -> None:
        """Rank 0: every server registers the version, and those that it does not know yet."""

        def load(server):
            known = server.model_names()
            for version in self._registered():
                name = MODEL_NAME.format(version=version)
                if name not in known:
                    body = {"lora_name": name, "lora_path": str(self.folder / name)}
                    server.call("POST", "/v1/load_lora_adapter", json=body)

        if self.first:
            self.fleet.each(load)
            self.loaded = self._registered()[-1]

    def is_current(self, server, version: int) -> bool:
        return MODEL_NAME.format(version=version) in server.model_names(HEALTH_S)

    def release(self, failed=()) -> None:
        """What was written stays: the next sync of the same version writes it anew."""

    def close(self) -> None:
        """Forget all versions."""
        if self.first:
            self._clear(ServerError)  # a server that is gone has forgotten them


def peft_name(name: str) -> str:
    """As peft saves it: without the adapter's own name and without wrappers."""
    name = checkpoint_name(name)
    for part in ("lora_A", "lora_B"):
        name = name.replace(f".{part}.default.", f".{part}.")
    return f"base_model.model.{name}"
