"""A whole weight sync by its parts, against vLLM's own trainer-side NCCL engine in the same run.

    python bench/sync.py             # two GPUs of one host, 4 minutes: server on 0, trainer on 1
    python bench/sync.py --tiny      # on the CPU, through the file in shared memory

A model of Qwen3-1.7B's shape with random weights, 3.44 GB in bf16; the trainer holds fp32 masters,
as a run does. The peer gets the same weights as a plain bf16 module, its best case:
nothing to cast or to gather. Its pause, cache reset and resume are made by our client. Medians over
several syncs; every way moves the weights before its last sync, and the proof must then hold.

    vLLM engine     NCCLTrainerWeightTransferEngine.send_weights()
    ours, vLLM      our buckets, loaded by vLLM's loader: a server without our WorkerExtension
    ours            our buckets, loaded by the recorded copies (transfer.Copies)
"""

import argparse
import contextlib
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections import defaultdict
from dataclasses import replace
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
if __name__ == "__main__":
    sys.path[0] = str(ROOT)  # this file's folder has a sync.py too

import torch  # noqa: E402

import sync  # noqa: E402
from masters import ComputeCopies  # noqa: E402
from server import WORKER_EXTENSION, Fleet, VllmServer  # noqa: E402
from transfer import FileSender, NcclSender  # noqa: E402
from weights import Weights  # noqa: E402

EXTENSION = "bench.sync.Extension"
START_S = 400
# What a sync calls, by the column it is counted in.
COLUMNS = {
    "pause": ["/pause"],
    "start": ["/start_weight_update"],
    "update": ["/update_weights", "/collective_rpc"],
    "finish": ["/finish_weight_update"],
    "reset": ["/reset_prefix_cache", "/reset_encoder_cache"],
    "version": ["/update_weight_version"],
    "resume": ["/resume"],
}


class Extension(sync.WorkerExtension):
    """In the server's worker: what a run has, and a clock around its loading."""

    def bench_watch(self):
        """Count the host seconds spent in loading: vLLM's own, or our copies."""
        self.bench_s = 0.0
        model, engine = self.model_runner.get_model(), self.weight_transfer_engine
        for thing, name in (
            (model, "load_weights"),
            (engine, "start_weight_update"),
            (engine, "finish_weight_update"),
        ):
            if thing is not None and name not in vars(thing):
                setattr(thing, name, self.bench_clock(getattr(thing, name)))

    def bench_clock(self, function):
        def clocked(*args, **kwargs):
            begin = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                self.bench_s += time.perf_counter() - begin

        return clocked

    def bench_read(self):
        """-> host seconds in vLLM's loading since bench_watch(), seconds of all our copies or 0."""
        copies_s = 0.0
        if copies := vars(self).get("espalier_copies"):
            for targets, _ in (group for _, groups in copies.steps for group in groups):
                sources = [target.clone() for target in targets]
                torch.cuda.synchronize()
                begin = time.perf_counter()
                torch._foreach_copy_(targets, sources)
                torch.cuda.synchronize()
                copies_s += time.perf_counter() - begin
        return self.bench_s, copies_s

    def bench_receive(self, n_bytes, times):
        """The other end of raw_rate()."""
        group = self.weight_transfer_engine.model_update_group
        buffer = torch.empty(n_bytes, dtype=torch.uint8, device=self.device)
        for _ in range(times):
            group.broadcast(buffer, src=0, stream=torch.cuda.current_stream())
        torch.cuda.synchronize()


# --------------------------------------------------------------------------------- server and model


def say(text):
    print(f"[{time.perf_counter() - BEGIN:5.0f} s] {text}", flush=True)


def make_folder(folder, tiny, layers=28):
    """Config and tokenizer of Qwen3-1.7B's shape; --load-format dummy needs no weights."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen3Config

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    bpe = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(letters)}, merges=[]))
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token="<eos>").save_pretrained(folder)
    size = {
        "vocab_size": 151_936,
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
    }
    if tiny:
        size |= {"vocab_size": 1024, "hidden_size": 64, "intermediate_size": 96, "head_dim": 32}
        size |= {"num_attention_heads": 4, "num_key_value_heads": 2}
    config = Qwen3Config(
        **size,
        num_hidden_layers=layers,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
        eos_token_id=256,
        architectures=["Qwen3ForCausalLM"],
        dtype="float32" if tiny else "bfloat16",
    )
    config.save_pretrained(folder)
    return config


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@contextlib.contextmanager
def serve(folder, name, log, extension, *options, tiny=False, n=1, nccl=True):
    """n vLLM servers on GPU 0 (or the CPU, if tiny) while the block runs; -> their urls, joined by
    commas. They take weights by NCCL, or without it through shared memory."""
    environment = dict(
        os.environ,
        PYTHONPATH=f"{ROOT}:{os.environ.get('PYTHONPATH', '')}",
        VLLM_SERVER_DEV_MODE="1",
        VLLM_NO_USAGE_STATS="1",
        HF_HUB_OFFLINE="1",
        CUDA_VISIBLE_DEVICES="" if tiny else "0",
    )
    flags = f"""--host 127.0.0.1 --served-model-name {name}
        --logprobs-mode processed_logprobs --max-logprobs 9 --enable-scale-out
        --disable-uvicorn-access-log --worker-extension-cls {extension}""".split()
    if tiny:
        environment |= {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "0"}
        environment["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # as run.sh does
        flags += "--dtype float32 --max-model-len 512 --max-num-batched-tokens 2048".split()
        flags += ["--no-enable-chunked-prefill", "--enforce-eager"]
        command = ["-m", "vllm.entrypoints.openai.api_server", "--model", folder]
    else:
        flags += "--dtype bfloat16 --max-model-len 4096 --api-server-count 8".split()
        flags += ["--gpu-memory-utilization", "0.5"]
        if nccl:
            flags += ["--weight-transfer-config", '{"backend":"nccl"}']
        command = ["-m", "vllm.entrypoints.cli.main", "serve", folder]
    processes, servers = [], []

    def alive(waited_s):
        if any(process.poll() is not None for process in processes):
            raise RuntimeError("a server ended")

    try:
        with open(log, "wb") as output:
            for _ in range(n):
                port = free_port()
                servers.append(VllmServer(f"http://127.0.0.1:{port}", START_S))
                processes.append(
                    subprocess.Popen(
                        [sys.executable, *command, "--port", str(port), *flags, *options],
                        env=environment,
                        stdout=output,
                        stderr=subprocess.STDOUT,
                        start_new_session=True,
                    )
                )
        for server in servers:
            server.wait_until_ready(alive)
        yield ",".join(server.url for server in servers)
    except BaseException:
        print(Path(log).read_text(errors="replace")[-4000:], flush=True)
        raise
    finally:
        for process in processes:
            process.terminate()
        for process in processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(20)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


def make_trainer(config, tiny):
    """A model with fp32 masters, as a run has them."""
    import torch.distributed as dist
    from transformers import Qwen3ForCausalLM

    device = torch.device("cpu" if tiny else "cuda:0")
    store = dist.HashStore()
    dist.init_process_group("gloo" if tiny else "nccl", store=store, rank=0, world_size=1)
    torch.manual_seed(1)
    with device:
        return Qwen3ForCausalLM(config).float()


# ------------------------------------------------------------------------------------ one way each


class Clock:
    """Milliseconds of every call to the server, by path, while it is on."""

    def __init__(self):
        self.ms = defaultdict(float)
        self.lock = threading.Lock()

    def around(self, call):
        def clocked(method, path, **request):
            begin = time.perf_counter()
            try:
                return call(method, path, **request)
            finally:
                self.add(path, begin)

        return clocked

    def add(self, path, begin):
        with self.lock:
            self.ms[path] += 1000 * (time.perf_counter() - begin)


class Peer:
    """vLLM's engine as a sender of ours: stage() opens the group, load() sends."""

    pauses = True

    def __init__(self, fleet, weights, clock, bucket_bytes):
        from vllm.distributed.weight_transfer.clients import HTTPVLLMWeightSyncClient

        self.fleet, self.weights, self.bucket_bytes = fleet, weights, bucket_bytes
        self.engine = None
        (self.server,) = fleet.servers
        self.client = HTTPVLLMWeightSyncClient(self.server.url)
        for name in ("start_weight_update", "update_weights", "finish_weight_update"):
            setattr(self.client, name, self.timed(getattr(self.client, name), f"/{name}", clock))
        self.refresh()

    @staticmethod
    def timed(call, path, clock):
        def clocked(*args):
            begin = time.perf_counter()
            call(*args)
            clock.add(path, begin)

        return clocked

    def refresh(self):
        self.plain = {name: tensor.clone() for name, tensor in self.weights}

    # vLLM's WeightSource: ModuleSource of a plain bf16 module does no more
    def metadata(self):
        from vllm.distributed.weight_transfer.base import ParamMeta

        return [ParamMeta(n, t.dtype, tuple(t.shape)) for n, t in self.plain.items()]

    def __iter__(self):
        return iter(self.plain.items())

    def stage(self, version):
        from vllm.distributed.weight_transfer.nccl_engine import (
            NCCLTrainerInitInfo,
            NCCLTrainerWeightTransferEngine,
        )

        if self.engine is None:
            place = {"master_address": "127.0.0.1", "master_port": free_port()}
            place |= {"world_size": 2, "rank": 0}
            rendezvous = NCCLTrainerInitInfo(**place, packed_buffer_size_bytes=self.bucket_bytes)
            self.engine = NCCLTrainerWeightTransferEngine.trainer_init(
                rendezvous, client=self.client, source=self
            )

    def load(self):
        self.engine.send_weights()

    def release(self, failed=()):
        pass

    def close(self):
        self.engine.model_update_group.destroy()
        self.server.call("POST", "/shutdown_weight_transfer_engine")


def measure(fleet, sender, weights, model, clock, version, repeats):
    """Several syncs by one way and the proof; -> a line of the table: medians in ms, and GB/s."""
    (server,) = fleet.servers
    lines = []
    for number in range(2 + repeats):
        if number == 1 + repeats:  # the proof below must see these
            move(model, seed=version)
            if isinstance(sender, Peer):
                sender.refresh()
        server.collective_rpc("bench_watch")
        clock.ms.clear()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        begin = time.perf_counter()
        sync.sync_weights(fleet, sender, version)
        line = {"whole": 1000 * (time.perf_counter() - begin)}
        line |= {c: sum(clock.ms[path] for path in paths) for c, paths in COLUMNS.items()}
        loading_s, copies_s = server.collective_rpc("bench_read")[0]
        line["load"] = 1000 * (loading_s or copies_s)
        lines.append(line)
    first = lines[0]["whole"]
    lines = lines[2:]  # the first opens the group and fills caches
    line = {column: statistics.median(one[column] for one in lines) for column in lines[0]}
    line["GB/s"] = weights.n_bytes() / line["whole"] / 1e6
    line["first"] = first
    line["proof"] = prove(fleet, model)
    return line


@torch.no_grad()
def move(model, seed):
    device = next(model.parameters()).device
    generator = torch.Generator(device).manual_seed(seed)
    for parameter in model.parameters():
        parameter += 0.005 * torch.randn(parameter.shape, generator=generator, device=device)


def prove(fleet, model):
    prompt = torch.randint(0, 1000, (200,), generator=torch.Generator().manual_seed(0)).tolist()
    device = next(model.parameters()).device
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    copies = ComputeCopies(model, dtype)

    @torch.no_grad()
    def log_probs(ids):
        with copies.in_place():
            logits = model(torch.tensor([ids], device=device)).logits[0].float()
        targets = torch.tensor(ids[1:], device=device)[:, None]
        return logits.log_softmax(-1)[:-1].gather(1, targets)[:, 0]

    return sync.check_sync(fleet, "shape", prompt, log_probs, dtypes=[dtype])


@contextlib.contextmanager
def traffic(url, n_requests):
    """So many requests of 256 tokens in flight, while the block runs."""
    stop = threading.Event()

    def ask():
        server = VllmServer(url, 60.0)
        while not stop.is_set():
            server.sample("shape", [1, 2, 3], 256)

    threads = [threading.Thread(target=ask, daemon=True) for _ in range(n_requests)]
    for thread in threads:
        thread.start()
    time.sleep(2)
    try:
        yield
    finally:
        stop.set()
        for thread in threads:
            thread.join(60)


def raw_rate(fleet, sender, n_bytes, times=10):
    """GB/s of nothing but NCCL broadcasts of one buffer."""
    (server,) = fleet.servers
    sender.stage(0)
    link = sender.links[server]
    buffer = torch.ones(n_bytes, dtype=torch.uint8, device="cuda")
    request = {"n_bytes": n_bytes, "times": times + 1}

    def receive():
        server.collective_rpc("bench_receive", **request)

    for _ in range(2):  # the first opens the channels
        thread = threading.Thread(target=receive, daemon=True)
        thread.start()
        link.broadcast(buffer)
        link.stream.synchronize()
        begin = time.perf_counter()
        for _ in range(times):
            link.broadcast(buffer)
        link.stream.synchronize()
        seconds = time.perf_counter() - begin
        thread.join(60)
    return times * n_bytes / seconds / 1e9


def show(table, rates, weights):
    n_bytes = weights.n_bytes()
    print(f"\n{n_bytes / 1e9:.2f} GB, {len(weights.metadata())} tensors; medians in ms")
    columns = ["whole", *COLUMNS, "load", "first", "GB/s", "proof"]
    print("| way | " + " | ".join(columns) + " |\n|" + "---|" * (len(columns) + 1))
    for name, line in table.items():
        cells = [f"{line[column]:.3g}" for column in columns]
        print(f"| {name} | " + " | ".join(cells) + " |")
    for size, rate in rates.items():
        floor = n_bytes / rate / 1e6
        print(f"NCCL broadcasts of {size >> 20} MiB alone: {rate:.0f} GB/s, {floor:.1f} ms for all")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--tiny", action="store_true", help="CPU, file sender, a tiny model")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--mib", default="1024,256,64", help="bucket sizes; the peer gets two")
    parser.add_argument("--requests", type=int, default=64, help="in flight in the last way")
    parser.add_argument("--log", default="/tmp/bench-sync-server.log", help="the server's")
    args = parser.parse_args()
    if not args.tiny:
        os.environ["CUDA_VISIBLE_DEVICES"] = "1"  # before CUDA starts; the server gets GPU 0
    sizes = [int(size) << 20 for size in args.mib.split(",")]
    table, rates = {}, {}
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        config = make_folder(folder, args.tiny)
        say("starting the server")
        dummy = ("--load-format", "dummy")
        server = serve(folder, "shape", args.log, EXTENSION, *dummy, tiny=args.tiny)
        url = stack.enter_context(server)
        say("it is ready; making the trainer")
        fleet, clock = Fleet([url], 60.0), Clock()
        (server,) = fleet.servers
        fleet.infos = {server: replace(server.info(), worker_extension=WORKER_EXTENSION)}
        model = make_trainer(config, args.tiny)
        weights = Weights(model, fleet.infos[server].dtype, tied=True)
        server.call = clock.around(server.call)

        def nccl(size, direct):
            return lambda: NcclSender(fleet, weights, bucket_bytes=size, direct=direct)

        ways = {"ours, file": (lambda: FileSender(fleet, weights), 0)}
        if not args.tiny:
            ways = {
                f"vLLM engine, {size >> 20} MiB": (
                    lambda size=size: Peer(fleet, weights, clock, size),
                    0,
                )
                for size in sizes[:2]
            }
            ways |= {f"ours, vLLM, {sizes[0] >> 20} MiB": (nccl(sizes[0], False), 0)}
            ways |= {f"ours, {size >> 20} MiB": (nccl(size, True), 0) for size in sizes}
        name, (make, _) = list(ways.items())[-1]
        ways[f"{name}, {args.requests} requests"] = make, args.requests
        for version, (name, (make, n_requests)) in enumerate(ways.items(), 1):
            sender = make()
            try:
                with traffic(url, n_requests) if n_requests else contextlib.nullcontext():
                    line = measure(fleet, sender, weights, model, clock, version, args.repeats)
                table[name] = line
                say(f"{name}: {line['whole']:.1f} ms, proof {line['proof']:.2g}")
                if isinstance(sender, NcclSender) and sender.direct and not n_requests:
                    rates[sender.bucket_bytes] = raw_rate(fleet, sender, sender.bucket_bytes)
            except Exception:  # show what the other ways give
                traceback.print_exc()
            finally:
                sender.close()
        show(table, rates, weights)
        for text in Path(args.log).read_text(errors="replace").splitlines():
            if "every sync loads" in text:  # no record of copies could be made
                print(text)


BEGIN = time.perf_counter()
if __name__ == "__main__":
    main()
