"""How many rollouts the vLLM server can take, from what it says of its KV cache.

Test: pytest tests/test_rollout.py
"""

import math
import re
from dataclasses import dataclass


@dataclass
class LoadLimit:
    """How many rollouts the server can take: raised slowly while it has room, cut when it has not.

    Above 80% KV-cache usage it is cut by 30%; below 60% with nothing waiting it is raised by 25%,
    at most once per cap's worth of finished rollouts. Running requests go on after a cut, so there
    is no further one until it has taken effect.
    """

    ceiling: int  # max_concurrent_rollouts
    cap: int
    finished: int = 0  # rollouts since the last raise
    preemptions: float | None = None  # of the server, when it was last looked at

    def follow(self, load: "ServerLoad", in_flight: int, max_model_len: int | None) -> list:
        """Adapt to what the server says; -> records (name, value, weight). The first time the cap
        becomes the number of requests that fit the KV cache at full length."""
        if self.preemptions is None:  # what happened before is not ours
            self.preemptions = load.preemptions
            if load.kv_tokens and max_model_len:
                self.cap = min(max(int(load.kv_tokens // max_model_len), 1), self.ceiling)
        self.update(load.kv_usage, load.waiting, in_flight)
        new_preemptions = max(load.preemptions - self.preemptions, 0)  # a restart counts anew
        self.preemptions = load.preemptions
        return [
            ("rollout/vllm_preemption_count", float(new_preemptions), 1.0),
            ("rollout/vllm_kv_cache_usage_frac", float(load.kv_usage), 1.0),
            ("rollout/vllm_running_requests", float(load.running), 1.0),
            ("rollout/vllm_queued_requests", float(load.waiting), 1.0),
        ]

    def update(self, usage: float, waiting: float, in_flight: int) -> None:
        if usage > 0.8 and in_flight <= self.cap:
            self.cap = max(int(self.cap * 0.7), 1)
        elif usage < 0.6 and waiting == 0 and self.finished >= self.cap:
            self.cap = min(math.ceil(self.cap * 1.25), self.ceiling)
            self.finished = 0


@dataclass
class ServerLoad:
    kv_usage: float  # of the fullest engine, 0 to 1
    running: float
    waiting: float
    preemptions: float  # since the server's start
    kv_tokens: float  # capacity of all engines; 0 if the server does not say


def parse_load(text: str) -> ServerLoad | None:
    """ServerLoad from vLLM's Prometheus text, None if it is not in there."""

    def values(name):
        line = rf"^vllm:{name}(?:\{{.*\}})? (\S+)$"
        return [float(value) for value in re.findall(line, text, re.MULTILINE)]

    usage = values("kv_cache_usage_perc")
    if not usage:
        return None
    return ServerLoad(
        kv_usage=max(usage),
        running=sum(values("num_requests_running")),
        waiting=sum(values("num_requests_waiting")),
        preemptions=sum(values("num_preemptions_total")),
        kv_tokens=sum(map(float, re.findall(r'[{,]kv_cache_size_tokens="(\d+)"', text))),
    )
