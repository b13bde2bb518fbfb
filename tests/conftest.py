"""What several test files share: a tiny random Qwen3 folder and a real CPU vLLM server on it.

    tokenizer_folder   with the byte-level tokenizer and its ChatML template
    tiny_folder   a Hugging Face folder, made offline: config, fp32 weights, that tokenizer
    tiny_server   TinyServer(url, name, folder, log, process) around it; about 25 s, once a session.
                  Marker `server`. Its weights are whatever the last sync left there: a test that
                  cares about them sends them first
    one_rank      run(job, *arguments) in a process group of one
    two_ranks     ... on two gloo ranks, which live as long as the session

Without the CPU build of vLLM the `server` tests are skipped, with that reason.
"""

import contextlib
import importlib.util
import os
import signal
import socket
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import pytest
import requests
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

START_TIMEOUT_S = 400  # 25 s on two idle cores, 100 s on busy ones
CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@dataclass(frozen=True)
class TinyServer:
    url: str
    name: str
    folder: Path
    log: Path
    process: subprocess.Popen


def make_tokenizer():
    """One token a byte (ids 0 to 255), then <|im_end|> 256 (EOS), <|endoftext|> 257 (padding) and
    <|im_start|> 258."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    bpe = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(letters)}, merges=[]))
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        additional_special_tokens=["<|im_start|>"],
    )
    tokenizer.chat_template = CHATML
    return tokenizer


@pytest.fixture(scope="session")
def tokenizer_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    make_tokenizer().save_pretrained(folder)
    return folder


def make_tiny_qwen3(folder):
    """Random fp32 Qwen3 with tied embeddings, 0.1 M parameters.

    The vocabulary (259) is no multiple of 64, so the server pads it; a standard deviation of 0.1
    instead of 0.02 makes distributions peaked, so that wrong weights show in every log-prob.
    """
    from transformers import Qwen3Config, Qwen3ForCausalLM

    tokenizer = make_tokenizer()
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        initializer_range=0.1,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        dtype="float32",
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = Qwen3ForCausalLM(config)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def start_server(folder, name, log, *options):
    """Start vLLM on a free port and wait until it answers; the caller stops it."""
    port = free_port()
    root = Path(__file__).resolve().parent.parent
    core = max(os.sched_getaffinity(0))
    environment = dict(
        os.environ,
        PYTHONPATH=str(root),  # the worker imports sync.WorkerExtension
        VLLM_SERVER_DEV_MODE="1",
        VLLM_CPU_KVCACHE_SPACE="1",  # GiB
        VLLM_CPU_OMP_THREADS_BIND=str(core),  # one thread: waiting for a second costs more
        VLLM_ENABLE_V1_MULTIPROCESSING="0",  # as run.sh does
        VLLM_NO_USAGE_STATS="1",
        HF_HUB_OFFLINE="1",
    )
    command = f"""{sys.executable} -m vllm.entrypoints.openai.api_server --host 127.0.0.1
        --port {port} --model {folder} --served-model-name {name} --dtype float32
        --logprobs-mode processed_logprobs --max-logprobs 32 --enable-scale-out
        --max-model-len 512 --max-num-batched-tokens 2048 --no-enable-chunked-prefill
        --enforce-eager --worker-extension-cls sync.WorkerExtension"""
    with open(log, "wb") as output:
        process = subprocess.Popen(
            [*command.split(), *options],
            env=environment,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    server = TinyServer(f"http://127.0.0.1:{port}", name, folder, log, process)
    deadline = time.monotonic() + START_TIMEOUT_S
    try:
        while not answers(server.url):
            if process.poll() is not None or time.monotonic() > deadline:
                tail = log.read_text(errors="replace")[-3000:]
                raise RuntimeError(f"no tiny server within {START_TIMEOUT_S} s; its log:\n{tail}")
            time.sleep(0.2)
    except BaseException:
        stop_server(server)
        raise
    return server


def answers(url):
    try:
        return requests.get(url + "/health", timeout=2).status_code == 200
    except requests.RequestException:
        return False


def stop_server(server):
    """Ask the parent, which stops its engine and worker; only then kill what is left of the group.

    A signal to the whole group at once would leave the engine's shared memory behind.
    """
    server.process.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
        server.process.wait(15)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(server.process.pid, signal.SIGKILL)
    server.process.wait(5)


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny_qwen3")
    make_tiny_qwen3(folder)
    return folder


@pytest.fixture(scope="session")
def tiny_server(tiny_folder, tmp_path_factory):
    if importlib.util.find_spec("vllm") is None or torch.version.cuda:
        pytest.skip("needs the CPU build of vLLM (requirements-cpu.txt)")
    log = tmp_path_factory.mktemp("tiny_server") / "log.txt"
    # Served under its path: grpo.py's --model is both the folder and the name.
    server = start_server(tiny_folder, str(tiny_folder), log)
    yield server
    stop_server(server)


@pytest.fixture(scope="module")
def one_rank(tmp_path_factory):
    """run(job, *arguments) -> job(0, *arguments), in a process group of one."""
    store = tmp_path_factory.mktemp("one_rank") / "store"
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    dist.init_process_group(backend, init_method=f"file://{store}", rank=0, world_size=1)
    yield lambda job, *arguments: job(0, *arguments)
    dist.destroy_process_group()


def load_policy(config, folder, device):
    """The policy of a folder on a device, not sharded."""
    import model

    return model.configured_policy(config, model.load_model(config, folder).to(device))


def whole(tensor):
    """A tensor, gathered from its shards if several ranks hold them."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


@pytest.fixture(scope="session")
def two_ranks(tmp_path_factory):
    """run(job, *arguments) -> rank 0's job(0, *arguments), with rank 1 doing its own."""
    store = f"file://{tmp_path_factory.mktemp('two_ranks') / 'store'}"
    spawn = mp.get_context("spawn")
    ends = [spawn.Pipe() for _ in range(2)]
    ranks = [
        spawn.Process(target=_serve_rank, args=(rank, store, ends[rank][1]), daemon=True)
        for rank in range(2)
    ]
    for process in ranks:
        process.start()

    def run(job, *arguments):
        for end, _ in ends:
            end.send((job, arguments))
        results = [end.recv() if end.poll(100) else TimeoutError("rank hangs") for end, _ in ends]
        for result in results:
            if isinstance(result, Exception):
                raise result
        return results[0]

    yield run
    for end, _ in ends:
        end.send(None)
    for process in ranks:
        process.join(10)


def _serve_rank(rank, store, end):
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=2)
    while (task := end.recv()) is not None:
        job, arguments = task
        try:
            end.send(job(rank, *arguments))
        except Exception as error:
            end.send(error)
    dist.destroy_process_group()
