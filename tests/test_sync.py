"""Weight sync: the server holds the trainer's weights, or everybody gets an error in time.

Three oracles: a server that lies (what the trainer does about it), two gloo ranks against that
server (what every rank learns), and a real CPU vLLM against transformers on the same weights.
"""

import contextlib
import copy
import importlib.util
import json
import os
import queue
import re
import sys
import threading
import time
import types
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import urlsplit

import pytest
import requests
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from conftest import make_tokenizer, start_server, stop_server
from torch import nn

import grpo
import nccl
import sync
import transfer
import weights
from config import Config
from server import Fleet, ServerError, VllmServer

# ------------------------------------------------------------------------------ a server that lies

INFO = {
    "vllm_config": {
        "model_config": {
            "max_model_len": 512,
            "max_logprobs": 9,
            "logprobs_mode": "processed_logprobs",
            "dtype": "torch.bfloat16",
        },
        "device_config": {"device": "cpu"},
        "parallel_config": {"worker_extension_cls": "sync.WorkerExtension"},
        "weight_transfer_config": None,
        "scheduler_config": {"enable_chunked_prefill": False},
    }
}
SYNC_CALLS = [
    "/pause",
    "/collective_rpc",
    "/reset_prefix_cache",
    "/reset_encoder_cache",
    "/update_weight_version",
    "/resume",
]


class Lies(BaseHTTPRequestHandler):
    """Answers as vLLM does, except to the paths in server.lies: 500, never, die, refuse."""

    def do_GET(self):
        self.do_POST()

    def do_POST(self):
        state = self.server
        path = urlsplit(self.path).path
        body = json.loads(self.rfile.read(int(self.headers.get("Content-Length") or 0)) or "{}")
        state.calls.append(path)
        lie = state.lies.get(path)
        if lie == "500":
            return self.answer({"error": {"message": "out of luck"}}, 500)
        if lie == "never":
            return state.closing.wait(30)
        if lie == "die":
            state.lies = dict.fromkeys(SYNC_CALLS, "die") | state.lies
            state.shutdown_request(self.request)
            return None
        if lie == "refuse":
            return self.answer({"status": "running"})
        answer = state.act(path, body)
        return self.answer(*answer) if isinstance(answer, tuple) else self.answer(answer)

    def answer(self, body, status=200):
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *args):
        pass


class LyingServer(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Lies)
        self.url = f"http://127.0.0.1:{self.server_port}"
        self.lies, self.calls, self.paused, self.version = {}, [], False, "0"
        self.received, self.load_s = {}, 0.0
        self.info = copy.deepcopy(INFO)
        self.closing = threading.Event()
        threading.Thread(target=self.serve_forever, args=(0.01,), daemon=True).start()

    def act(self, path, body):
        if path == "/pause":
            self.paused = True
            return {"status": "paused"}
        if path == "/resume":
            self.paused = False
            return {"status": "resumed"}
        if path == "/collective_rpc":
            time.sleep(self.load_s)
            assert self.paused
            if body["method"] == "espalier_load_weights":
                file = open(body["kwargs"]["path"], "rb").read()
                file = torch.frombuffer(bytearray(file), dtype=torch.uint8)
                entries = transfer.read_manifest(body["kwargs"]["manifest"])
                (layout,) = weights.cut(entries, sys.maxsize)
                self.received = {
                    entry.name: weights.view_tensor(file, entry, offset)
                    for entry, offset in zip(layout.entries, layout.offsets, strict=True)
                }
            return {"results": [None]}
        if path == "/update_weight_version":
            self.version = body["new_version"]
        return {
            "/is_paused": {"is_paused": self.paused},
            "/reset_prefix_cache": {"success": True},
            "/server_info": self.info,
            "/v1/models": {"data": [{"id": "tiny"}]},
            "/get_world_size": {"world_size": 1},
            "/weight_info": {"weight_version": self.version},
        }.get(path, {})

    def close(self):
        self.closing.set()
        self.shutdown()
        self.server_close()


@pytest.fixture
def liar():
    with contextlib.closing(LyingServer()) as server:
        yield server


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.q_proj = nn.Linear(6, 5, bias=False)
        self.norm = nn.LayerNorm(6)

    def forward(self, x):
        return self.q_proj(self.norm(x))


class Tree(nn.Module):
    """Parameter names of a checkpoint; layer 1 is frozen where asked."""

    def __init__(self, frozen_layer=False):
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.model = nn.Module()
        self.model.embed_tokens = nn.Embedding(10, 6)
        self.model.layers = nn.ModuleList(Layer() for _ in range(2))
        self.lm_head = nn.Linear(6, 10, bias=False)
        for parameter in self.parameters():
            parameter.data = torch.randn(parameter.shape, generator=generator)
        self.model.layers[0].q_proj.weight.requires_grad_(False)
        self.model.layers[1].requires_grad_(not frozen_layer)


def file_sender(liar, timeout_s=5.0, **options):
    fleet = Fleet([liar.url], timeout_s)
    return fleet, sync.FileSender(fleet, sync.Weights(Tree(), torch.bfloat16, **options))


def shared_files(folder="/dev/shm"):
    """What this process left there; several test runs may share the machine."""
    return sorted(path.name for path in Path(folder).glob(f"espalier-weights-{os.getpid()}-*"))


# ------------------------------------------------------------------------------------ one process


def test_a_sync_makes_its_calls_in_order_and_delivers_every_bit(liar):
    fleet, sender = file_sender(liar)
    seconds = sync.sync_weights(fleet, sender, 7)
    assert liar.calls == SYNC_CALLS
    assert liar.version == "7" and not liar.paused and not shared_files()
    sent = dict(Tree().named_parameters())
    assert list(liar.received) == list(sent)
    for name, parameter in sent.items():
        # Matrices in the server's dtype, vectors as they are.
        expected = parameter.bfloat16() if parameter.ndim > 1 else parameter
        assert torch.equal(liar.received[name], expected)
    assert set(seconds) == {
        "perf/weight_sync_s",
        "perf/weight_sync_pause_s",
        "perf/weight_sync_barrier_s",
        "perf/weight_sync_transfer_s",
    }
    assert seconds["perf/weight_sync_s"] >= seconds["perf/weight_sync_transfer_s"] > 0


def test_the_file_is_written_before_generation_is_paused(liar):
    fleet, sender = file_sender(liar)
    sender.stage(1)
    assert liar.calls == [] and len(shared_files()) == 1
    sender.release(failed=True)
    assert not shared_files()


@pytest.mark.parametrize("path", SYNC_CALLS)
def test_a_500_at_any_call_raises_and_names_it(liar, path):
    fleet, sender = file_sender(liar)
    liar.lies = {path: "500"}
    with pytest.raises(RuntimeError) as caught:
        sync.sync_weights(fleet, sender, 1)
    assert f"POST {liar.url}{path}: answered 500, out of luck" in str(caught.value)
    assert liar.calls[-1] == "/resume" and not shared_files()
    assert liar.paused == (path == "/resume")
    # The version moves in the last call but one, when the weights are in.
    assert liar.version == ("1" if path == "/resume" else "0")
    # A second attempt starts from scratch.
    liar.lies = {}
    sync.sync_weights(fleet, sender, 1)
    assert liar.version == "1" and not liar.paused


@pytest.mark.parametrize("path", SYNC_CALLS)
def test_a_call_that_is_never_answered_raises_within_the_timeout(liar, path):
    fleet, sender = file_sender(liar, timeout_s=0.3)
    liar.lies = {path: "never"}
    start = time.monotonic()
    with pytest.raises(RuntimeError, match=f"{path}: no answer within 0.3 s"):
        sync.sync_weights(fleet, sender, 1)
    # One timeout, and a second one where it is /resume that never answers.
    assert time.monotonic() - start < 1.5
    assert liar.calls[-1] == "/resume" and not shared_files()
    assert liar.version == ("1" if path == "/resume" else "0")


@pytest.mark.parametrize("path", ["/pause", "/collective_rpc", "/update_weight_version"])
def test_a_server_that_dies_in_the_middle_raises_the_first_error(liar, path):
    fleet, sender = file_sender(liar)
    liar.lies = {path: "die"}
    start = time.monotonic()
    with pytest.raises(RuntimeError, match=f"POST {liar.url}{path}: ") as caught:
        sync.sync_weights(fleet, sender, 1)
    assert time.monotonic() - start < 5 and liar.version == "0" and not shared_files()
    assert "/resume" in caught.value.__notes__[0]  # ... and what became of the attempt to resume


def test_a_refused_pause_stops_the_sync_before_any_weight_is_loaded(liar):
    fleet, sender = file_sender(liar)
    liar.lies = {"/pause": "refuse"}
    with pytest.raises(ServerError, match="/pause: did not pause.*running"):
        sync.sync_weights(fleet, sender, 1)
    assert liar.calls == ["/pause", "/resume"] and liar.version == "0"


def test_caches_that_cannot_be_reset_are_an_error(liar):
    fleet, sender = file_sender(liar)
    liar.act, true = lambda *call: {} if "reset" in call[0] else true(*call), liar.act
    with pytest.raises(ServerError, match="/reset_prefix_cache: not reset"):
        sync.sync_weights(fleet, sender, 1)
    assert liar.version == "0" and not liar.paused


def test_a_full_shared_memory_falls_back_to_disk_and_a_full_disk_is_an_error(monkeypatch, tmp_path):
    monkeypatch.setattr(transfer.tempfile, "gettempdir", lambda: str(tmp_path))
    reserve, asked = transfer.os.posix_fallocate, []

    def no_room_at_first(handle, offset, size):
        asked.append(size)
        if len(asked) == 1:
            raise OSError(28, "No space left on device")
        reserve(handle, offset, size)

    monkeypatch.setattr(transfer.os, "posix_fallocate", no_room_at_first)
    path = transfer.reserve_file(1000)
    assert path.startswith(str(tmp_path)) and not shared_files()
    with pytest.raises(sync.WeightSyncError, match="no room for 1000000.00 GB"):
        transfer.reserve_file(10**15)
    assert not shared_files() and len(shared_files(tmp_path)) == 1


def test_waiting_for_a_server_that_is_not_there_ends_with_the_remedy():
    told = []
    server = VllmServer("http://127.0.0.1:9", 0.3)
    with pytest.raises(TimeoutError, match=r"127.0.0.1:9 within 0.3 s.*--vllm_server_timeout"):
        server.wait_until_ready(told.append)
    assert told and told[0] < 0.3


def test_a_server_that_answers_is_ready_at_once(liar):
    VllmServer(liar.url, 5).wait_until_ready()
    assert liar.calls == ["/health"]


@pytest.mark.parametrize(
    ("section", "key", "value", "remedy"),
    [
        ("model_config", "logprobs_mode", "raw_logprobs", "--logprobs-mode processed_logprobs"),
        ("model_config", "max_logprobs", 8, "--max-logprobs 9"),  # K = 8 and the sampled token
        ("model_config", "max_model_len", 99, "--max-model-len 100"),
        ("parallel_config", "worker_extension_cls", "", "--worker-extension-cls sync.Worker"),
        ("scheduler_config", "enable_chunked_prefill", True, "--no-enable-chunked-prefill"),
    ],
)
def test_a_server_that_cannot_serve_the_run_is_refused_with_the_remedy(
    liar, section, key, value, remedy
):
    server = VllmServer(liar.url, 5)
    server.check("tiny", num_sampler_logprobs=8, min_model_len=100)
    liar.info["vllm_config"][section][key] = value
    with pytest.raises(ValueError, match=remedy) as caught:
        server.check("tiny", num_sampler_logprobs=8, min_model_len=100)
    assert "\n" not in str(caught.value)


def test_a_gpu_server_without_nccl_shares_the_trainers_gpu_and_takes_a_file(liar):
    config = liar.info["vllm_config"]
    config["device_config"]["device"] = "cuda"
    fleet = Fleet([liar.url], 5)
    fleet.check("tiny", num_sampler_logprobs=8)
    assert isinstance(
        sync.make_sender(fleet, sync.Weights(Tree(), torch.bfloat16)), sync.FileSender
    )
    config["parallel_config"]["worker_extension_cls"] = ""
    with pytest.raises(ValueError, match="cannot take weights: .*--weight-transfer-config"):
        fleet.check("tiny", num_sampler_logprobs=8)


def test_candidate_sets_and_top_k_come_together(liar):
    server, config = VllmServer(liar.url, 5), liar.info["vllm_config"]
    needs = dict(num_sampler_logprobs=8)
    server.check("tiny", **needs, top_k=20)  # too old to know the flag: the worker warns
    config["model_config"]["return_sampling_mask"] = False
    server.check("tiny", **needs, top_k=20)  # a CPU build, which cannot
    config["device_config"]["device"] = "cuda"
    config["weight_transfer_config"] = {"backend": "nccl"}
    server.check("tiny", **needs)
    with pytest.raises(ValueError, match="--return-sampling-mask --enable-scale-out"):
        server.check("tiny", **needs, top_k=20)
    config["model_config"]["return_sampling_mask"] = True
    server.check("tiny", **needs, top_k=20)
    with pytest.raises(ValueError, match="no --return-sampling-mask, or give --top_k"):
        server.check("tiny", **needs)


def test_the_run_asks_of_a_server_what_it_needs():
    asked = {}

    class Fleet:
        def wait_until_ready(self, progress):
            pass

        def check(self, model_name, **needs):
            asked.update(needs)

    def needs(**options):
        grpo.connect(Fleet(), Config(max_completion_length=40, **options))
        return asked["num_sampler_logprobs"], asked["min_model_len"], asked["top_k"]

    assert needs() == (8, 41, 0)
    assert needs(score_centering=False) == needs(loss="cispo") == (0, 41, 0)
    assert needs(top_k=20) == (8, 2, 20)  # the server ends a turn that does not fit


def test_a_server_with_another_model_or_without_dev_mode_is_refused(liar):
    server = VllmServer(liar.url, 5)
    with pytest.raises(ValueError, match="serves tiny, not other.*--served-model-name other"):
        server.check("other", num_sampler_logprobs=8)
    liar.lies = {"/server_info": "500"}
    with pytest.raises(ServerError, match="/server_info: answered 500"):
        server.check("tiny", num_sampler_logprobs=8)

    Lies.answer, true = lambda self, *_: true(self, {"detail": "Not Found"}, 404), Lies.answer
    try:
        with pytest.raises(ValueError, match="VLLM_SERVER_DEV_MODE=1"):
            server.check("tiny", num_sampler_logprobs=8)
    finally:
        Lies.answer = true


def test_another_compute_dtype_is_a_warning(liar):
    server = VllmServer(liar.url, 5)
    with pytest.warns(UserWarning, match="bfloat16 and the trainer in torch.float32"):
        info = server.check("tiny", num_sampler_logprobs=8, compute_dtype=torch.float32)
    assert info.dtype == torch.bfloat16 and info.on_cpu


# ------------------------------------------------------------------------------ names and selection


def test_names_are_the_checkpoints_under_any_wrapper():
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    policy = Tree()
    layers = policy.model.layers
    layers[0], layers[1] = checkpoint_wrapper(layers[0]), checkpoint_wrapper(layers[1])
    sent = sync.Weights(policy, torch.float32)
    assert [name for name, _ in sent] == [name for name, _ in Tree().named_parameters()]
    assert [entry.name for entry in sent.metadata()] == [name for name, _ in sent]
    compiled = "model.layers.0._orig_mod._checkpoint_wrapped_module.mlp.up_proj.weight"
    assert weights.checkpoint_name(compiled) == "model.layers.0.mlp.up_proj.weight"


def test_a_frozen_vision_tower_is_not_sent_and_the_language_model_has_the_checkpoints_names(
    tmp_path,
):
    from safetensors.torch import load_file
    from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

    rope = {"rope_type": "default", "mrope_section": [2, 3, 3], "rope_theta": 1e4}
    text = {
        "vocab_size": 300,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "rope_parameters": rope,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    vision = {"depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2}
    vision |= {"out_hidden_size": 64, "fullatt_block_indexes": [0]}
    config = Qwen2_5_VLConfig(text_config=text, vision_config=vision, tie_word_embeddings=True)
    Qwen2_5_VLForConditionalGeneration(config).save_pretrained(tmp_path)
    saved = load_file(tmp_path / "model.safetensors")
    assert any("visual" in name for name in saved)
    model = Qwen2_5_VLForConditionalGeneration.from_pretrained(tmp_path, dtype=torch.float32)
    model.model.visual.requires_grad_(False)
    # In the model they are called model.language_model.layers..., in the checkpoint model.layers...
    sent = dict(sync.Weights(model, torch.float32, tied=True))
    assert sent.keys() == {name for name in saved if "visual" not in name}
    for name, tensor in sent.items():
        assert torch.equal(tensor, saved[name])


def test_stacked_experts_are_sent_one_by_one_as_a_checkpoint_has_them(tmp_path):
    from safetensors.torch import load_file

    model = tiny_moe()
    assert "model.layers.0.mlp.experts.gate_up_proj" in dict(model.named_parameters())
    model.save_pretrained(tmp_path)
    saved = load_file(tmp_path / "model.safetensors")
    sent = dict(sync.Weights(model, torch.float32))
    assert sent.keys() == saved.keys() and "model.layers.1.mlp.experts.3.up_proj.weight" in sent
    for name, tensor in sent.items():
        assert torch.equal(tensor, saved[name])


def test_a_tied_head_is_not_sent_and_a_frozen_layer_neither():
    # q_proj of layer 0 is frozen but its layer is not: the server fuses q, k and v, so it goes.
    names = [name for name, _ in sync.Weights(Tree(frozen_layer=True), torch.float32, tied=True)]
    assert names == [
        "model.embed_tokens.weight",
        "model.layers.0.q_proj.weight",
        "model.layers.0.norm.weight",
        "model.layers.0.norm.bias",
    ]


def test_only_a_wholly_trained_model_lets_the_server_insist_on_every_weight():
    tree = Tree()
    assert not sync.Weights(tree, torch.float32).complete()
    assert sync.Weights(tree.requires_grad_(), torch.float32).complete()


# ------------------------------------------------------------------------------------- the proof


class Scorer:
    """Stands in for the only server: prompt log-probs -1 each, sampled ones -2 each."""

    url = "http://scorer"

    def each(self, step):
        return {self: step(self)}

    def sample(self, model_name, ids, n_tokens):
        return [5] * n_tokens, [-2.0] * n_tokens

    def score(self, model_name, ids):
        return [-1.0] * (len(ids) - 3) + [-2.0, -2.0]


def prove(ours, dtype=torch.float32):
    return sync.check_sync(
        Scorer(), "tiny", [1, 2, 3], lambda ids: ours, dtypes=[dtype], n_sampled=2
    )


def test_the_proof_returns_the_largest_difference():
    # Log-probs of tokens 2, 3 (prompt) and 5, 5 (sampled, compared twice).
    assert prove([-1.0, -1.00005, -2.0, -2.0]) == pytest.approx(5e-5, rel=1e-2)


class Restarted(Scorer):
    """The same, killed between the sync and its proof; without the weights until they are sent."""

    weight, resent = -3.0, 0

    def score(self, model_name, ids):
        if not self.resent:
            raise ServerError("POST http://scorer/v1/completions: Connection refused")
        return [self.weight] * (len(ids) - 3) + [-2.0, -2.0]

    def resend(self):
        self.resent += 1
        self.weight = -1.0


def test_a_proof_survives_a_server_that_dies_before_it():
    server, ours = Restarted(), [-1.0, -1.0, -2.0, -2.0]

    def prove(resend):
        options = dict(dtypes=[torch.float32], n_sampled=2, resend=resend)
        return sync.check_sync(server, "tiny", [1, 2, 3], lambda ids: ours, **options)

    again = pytest.warns(UserWarning, match="tried again: POST http://scorer")
    with again, pytest.raises(ServerError, match="Connection refused"):  # it does not come back
        prove(lambda: None)
    with pytest.warns(UserWarning, match="tried again: POST http://scorer"):
        assert prove(server.resend) == 0.0
    assert server.resent == 1


@pytest.mark.parametrize("value", [-2.3, float("nan")])
def test_the_proof_stops_a_run_beyond_the_bound_and_shows_both_numbers(value):
    with pytest.raises(
        sync.WeightSyncError, match=rf"token 5 is -2.0000 there and {value:.4f} here"
    ):
        prove([-1.0, -1.0, -2.0, value])


def test_the_bound_follows_the_coarser_dtype():
    # 256 eps + 1e-4 and 16 eps + 1e-4; eps is 2^-7 for bf16 and 2^-23 for fp32.
    assert sync.sync_bounds([torch.float32, torch.bfloat16]) == pytest.approx((2.0001, 0.1251))
    assert sync.sync_bounds([torch.float32]) == pytest.approx((1.305e-4, 1.019e-4), rel=1e-3)
    # In bf16 0.4 at one prompt token, a mean of 0.4 / 6, is noise; at all it is not.
    assert prove([-1.4, -1.0, -2.0, -2.0], torch.bfloat16) == pytest.approx(0.4)
    with pytest.raises(sync.WeightSyncError, match="on average 0.4"):
        prove([-1.4, -1.4, -2.4, -2.4], torch.bfloat16)


# ------------------------------------------------------------------------------------------- NCCL
# Both ends of the wire in one process: a group whose broadcast is a queue, or waits as NCCL does.


class FakeGroup:
    """Rank 0's end and the worker's end of one NCCL group."""

    device = comm = None

    def __init__(self):
        self.sent, self.disabled, self.nccl = queue.SimpleQueue(), False, self
        self.n_aborts, self.fails = 0, False

    def broadcast(self, buffer, src, stream):
        if stream == "worker":
            received = self.sent.get(timeout=5)
            assert len(received) == len(buffer)
            return buffer.copy_(received)
        if self.fails:
            raise nccl.NcclError("ncclBroadcast: remote process exited")
        return None if self.disabled else self.sent.put(buffer.clone())

    def ncclCommAbort(self, comm):
        assert self.disabled, "a thread could still enter"
        self.n_aborts += 1

    def abort(self):
        self.disabled = True


class FakeEvent:
    """An event after a broadcast: passed when the server receives, or when somebody aborts."""

    def record(self, stream=None):
        pass

    def query(self):
        return True

    def synchronize(self):
        liar = FakeEvent.liar
        deadline = time.monotonic() + 10
        while not (liar.receiving.is_set() or liar.groups[-1].disabled):
            assert time.monotonic() < deadline, "nobody freed the broadcast"
            time.sleep(0.01)


@pytest.fixture
def nccl_sender(liar, monkeypatch):
    """-> sender(direct) of a liar with a GPU."""

    def join(group, rank, size, device):
        assert (group, rank, size, device) == (b"a group", 0, 2, 0)
        assert liar.joined.wait(3)  # NCCL: until all have come
        liar.groups.append(FakeGroup())
        return liar.groups[-1]

    monkeypatch.setattr(nccl, "unique_id", lambda: b"a group")
    monkeypatch.setattr(nccl, "Communicator", join)
    stream = types.SimpleNamespace(wait_stream=lambda other: None)
    for name, value in {
        "current_device": lambda: 0,
        "device": lambda device: contextlib.nullcontext(),
        "Stream": lambda device: stream,
        "current_stream": lambda: "worker",
        "Event": FakeEvent,
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    FakeEvent.liar = liar
    liar.joined, liar.receiving, liar.groups = threading.Event(), threading.Event(), []
    liar.requests = []

    def act(path, body):
        if path == "/init_weight_transfer_engine":
            assert body["init_info"] == {
                "nccl_unique_id_b64": "YSBncm91cA==",  # b"a group"
                "rank_offset": 1,
                "world_size": 2,
                "packed": True,
                "packed_buffer_size_bytes": 200,
            }
            liar.joined.set()
        if path == "/update_weights" or body.get("method") == "espalier_receive_weights":
            assert liar.paused
            liar.requests.append(body.get("kwargs"))
            liar.receiving.set()
        return true(path, body)

    liar.act, true = act, liar.act
    liar.info["vllm_config"]["device_config"]["device"] = "cuda"
    liar.info["vllm_config"]["weight_transfer_config"] = {"backend": "nccl"}

    def make(direct, model=None):
        extension = "sync.WorkerExtension" if direct else ""
        liar.info["vllm_config"]["parallel_config"]["worker_extension_cls"] = extension
        fleet = Fleet([liar.url], 1.0)
        info = fleet.check("tiny", num_sampler_logprobs=8)
        sender = sync.make_sender(fleet, sync.Weights(model or Tree(), info.dtype))
        assert isinstance(sender, sync.NcclSender) and sender.direct == direct
        sender.device, sender.bucket_bytes = torch.device("cpu"), 200
        liar.calls.clear()
        return fleet, sender

    return make


def nccl_calls(direct):
    update = ["/start_weight_update", "/update_weights", "/finish_weight_update"]
    return [
        "/init_weight_transfer_engine",
        "/pause",
        *(["/collective_rpc"] if direct else update),
        "/reset_prefix_cache",
        "/reset_encoder_cache",
        "/update_weight_version",
        "/resume",
    ]


@pytest.mark.parametrize("direct", [False, True])
def test_an_nccl_group_is_opened_once_and_then_reused(liar, nccl_sender, direct):
    fleet, sender = nccl_sender(direct)
    calls = nccl_calls(direct)
    sync.sync_weights(fleet, sender, 1)
    assert liar.calls == calls and liar.version == "1" and not liar.paused
    sync.sync_weights(fleet, sender, 2)
    assert liar.calls == calls + calls[1:] and liar.version == "2" and len(liar.groups) == 1
    assert sync.behind(fleet, sender, 3) and not sync.behind(fleet, sender, 2)
    sender.close()
    assert "/shutdown_weight_transfer_engine" in liar.calls


NCCL_FAULTS = [
    (direct, path)
    for direct in (False, True)
    for path in nccl_calls(direct)
    if "weight" in path or "rpc" in path
]


@pytest.mark.parametrize("lie", ["500", "never"])
@pytest.mark.parametrize(("direct", "path"), NCCL_FAULTS)
def test_no_failed_call_leaves_a_rank_in_a_broadcast(liar, nccl_sender, direct, path, lie):
    fleet, sender = nccl_sender(direct)
    liar.lies = {path: lie}
    start = time.monotonic()
    with pytest.raises(RuntimeError, match=f"POST {liar.url}{path}: "):
        sync.sync_weights(fleet, sender, 1)
    assert time.monotonic() - start < 5 and liar.version == "0" and not liar.paused
    if direct and path != "/init_weight_transfer_engine":
        # The worker puts its layers in order before a request can run on them.
        assert max(i for i, call in enumerate(liar.calls) if call == "/collective_rpc") < (
            liar.calls.index("/resume")
        )
    # The next sync opens a new group.
    liar.lies = {}
    liar.receiving.clear()
    sync.sync_weights(fleet, sender, 2)
    assert liar.version == "2" and not liar.groups[-1].disabled
    if path != "/init_weight_transfer_engine":
        assert [group.disabled for group in liar.groups] == [True, False]


def test_an_nccl_error_is_a_failed_sync_which_is_tried_again(liar, nccl_sender):
    fleet, sender = nccl_sender(True)
    sync.sync_weights(fleet, sender, 1)
    liar.groups[0].fails = True
    error = f"{liar.url}: ncclBroadcast: remote process exited; until a sync succeeds"
    with pytest.warns(UserWarning, match=f"weight sync 2 is tried again: {error}"):
        sync.sync_through_restart(fleet, sender, 2)
    assert liar.version == "2" and not liar.paused
    assert [group.disabled for group in liar.groups] == [True, False]


class FakeNccl:
    """What nccl.py calls of the library; `fails`: the function that answers with an error."""

    def __init__(self, fails=None):
        self.calls, self.fails = [], fails

    def __getattr__(self, name):
        def function(*arguments):
            self.calls.append((name, arguments))
            return 5 if name == self.fails else 0

        return function

    def ncclGetErrorString(self, code):
        return b"invalid usage" if code == 5 else b"?"


@pytest.fixture
def cuda_on_the_cpu(monkeypatch):
    zeros, stream = torch.zeros, types.SimpleNamespace(cuda_stream=7, synchronize=lambda: None)
    monkeypatch.setattr(torch, "zeros", lambda n, device: zeros(n))
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: stream)
    return stream


def test_an_nccl_communicator_joins_broadcasts_and_is_freed_once(cuda_on_the_cpu, monkeypatch):
    library = FakeNccl()
    monkeypatch.setattr(nccl, "library", lambda: library)
    group = bytes(range(128))
    communicator = nccl.Communicator(group, 0, 3, 1)
    (name, (_, size, identity, rank)), (second, (_, _, n, dtype, op, _, stream)) = library.calls
    assert (name, size, bytes(identity), rank) == ("ncclCommInitRank", 3, group, 0)
    # what vLLM's workers wait for in a new group: the sum of one float (nccl.h: 7 and 0)
    assert (second, n, dtype, op, stream) == ("ncclAllReduce", 1, 7, 0, 7)

    library.calls.clear()
    buffer = torch.ones(10, dtype=torch.uint8)
    communicator.broadcast(buffer, src=0, stream=cuda_on_the_cpu)
    place = buffer.data_ptr()
    assert library.calls == [("ncclBroadcast", (place, place, 10, 1, 0, communicator.comm, 7))]

    library.calls.clear()
    threads = [threading.Thread(target=communicator.abort) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    communicator.broadcast(buffer, src=0, stream=cuda_on_the_cpu)  # nobody enters what was freed
    assert [name for name, _ in library.calls] == ["ncclCommAbort"]


@pytest.mark.parametrize("fails", ["ncclCommInitRank", "ncclAllReduce"])
def test_an_nccl_error_says_which_call_and_why(cuda_on_the_cpu, monkeypatch, fails):
    library = FakeNccl(fails)
    monkeypatch.setattr(nccl, "library", lambda: library)
    with pytest.raises(nccl.NcclError, match=f"{fails}: invalid usage; NCCL_DEBUG=INFO"):
        nccl.Communicator(bytes(128), 0, 2, 0)


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_bytes_travel_between_two_gpus():
    group, sent = nccl.unique_id(), torch.arange(1000).to(torch.uint8)
    assert len(group) == 128
    received = {}

    def run(rank):
        torch.cuda.set_device(rank)
        communicator = nccl.Communicator(group, rank, 2, rank)
        buffer = sent.to(f"cuda:{rank}") if rank == 1 else torch.zeros_like(sent, device="cuda:0")
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        communicator.broadcast(buffer, src=1, stream=stream)
        stream.synchronize()
        received[rank] = buffer.cpu()
        communicator.abort()

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(run, (0, 1)))
    assert torch.equal(received[0], sent) and torch.equal(received[1], sent)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_group_that_cannot_be_is_refused_by_nccl():
    with pytest.raises(nccl.NcclError, match="ncclCommInitRank: "):
        nccl.Communicator(nccl.unique_id(), 2, 2, 0)  # ranks are 0 and 1


class Served(nn.Module):
    """A serving model's way of loading: q, k, v in one parameter, padding, a norm of its own dtype.

    `way`: "copies", or what makes a record of copies wrong.
    """

    def __init__(self, way="copies"):
        super().__init__()
        self.way = way
        self.embed = nn.Parameter(torch.zeros(12, 6), requires_grad=False)  # two rows of padding
        self.qkv = nn.Parameter(torch.zeros(15, 6), requires_grad=False)
        self.norm = nn.Parameter(torch.zeros(6, dtype=torch.bfloat16), requires_grad=False)

    def load_weights(self, tensors):
        loaded = set()
        for name, tensor in tensors:
            if name == "embed":
                self.embed.data[:10].copy_(tensor)
                self.embed.data[10:].fill_(0)
            elif name == "norm":
                self.norm.data.copy_(-tensor.exp() if self.way == "computes" else tensor)
            else:
                row = 5 * "qkv".index(name)
                self.qkv.data.narrow(0, row, 5).copy_(tensor)
            loaded.add({"q": "qkv", "k": "qkv", "v": "qkv"}.get(name, name))
        if self.way == "re-laid":
            self.qkv.data.copy_(self.qkv.data.flip(0))
        return loaded


class Worker(transfer.WorkerExtension):
    device = torch.device("cpu")

    def __init__(self, group, model):
        self.weight_transfer_engine = types.SimpleNamespace(model_update_group=group)
        self.model_runner = types.SimpleNamespace(get_model=lambda: model)
        model_config = types.SimpleNamespace(use_mla=False)
        self.vllm_config = types.SimpleNamespace(model_config=model_config)


class Sent(nn.Module):
    def __init__(self, seed):
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        for name, shape in (("embed", (10, 6)), ("q", (5, 6)), ("k", (5, 6)), ("norm", (6,))):
            self.register_parameter(name, nn.Parameter(torch.randn(shape, generator=generator)))
        self.v = nn.Parameter(torch.randn(5, 6, generator=generator))


@pytest.fixture
def n_loads(monkeypatch):
    """A list that grows with each load by the serving model's own loader."""
    loads = []

    def load(vllm_config, model, tensors):
        loads.append(0)
        return sorted(dict(model.named_parameters()).keys() - model.load_weights(tensors))

    monkeypatch.setattr(transfer, "load_layerwise", load)
    monkeypatch.setattr(transfer, "loading", lambda vllm_config: torch.no_grad())
    return loads


def change(sent):
    with torch.no_grad():
        for parameter in sent.parameters():
            parameter.mul_(-1.5)


def check_served(served, sent, way):
    """Is it what the loader makes of the weights that were sent?"""
    expected = Served(way)
    expected.load_weights((name, p.detach()) for name, p in sent)
    for name, parameter in served.named_parameters():
        assert torch.equal(parameter, expected.get_parameter(name)), name


@pytest.mark.parametrize("way", ["copies", "computes", "re-laid"])
def test_recorded_copies_load_what_the_loader_loads(liar, nccl_sender, n_loads, way):
    served, sent = Served(way), Sent(seed=0)
    fleet, sender = nccl_sender(True, sent)
    worker = None
    for version in (1, 2, 3):
        change(sent)
        sync.sync_weights(fleet, sender, version)
        worker = worker or Worker(liar.groups[0], served)
        worker.espalier_receive_weights(**liar.requests[-1])
        assert liar.groups[0].sent.empty()  # both ends cut alike
        check_served(served, sender.weights, way)
    # Only where loading is nothing but copies is it done by them from the second time on.
    assert len(n_loads) == (1 if way == "copies" else 3)


@pytest.mark.parametrize("way", ["copies", "computes", "re-laid"])
def test_copies_load_from_a_file_what_the_loader_loads(monkeypatch, n_loads, way):
    monkeypatch.setattr(transfer, "on_cpu", lambda: False)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(transfer, "FILE_BUCKET_BYTES", 130)  # two buckets, the first of 188 bytes
    served, sent = Served(way), Sent(seed=0)
    sender = transfer.FileSender(None, sync.Weights(sent, torch.bfloat16))
    worker = Worker(None, served)
    lines = transfer.manifest(sender.weights.metadata())
    assert len(weights.cut(sender.weights.metadata(), 130)) == 2
    for version in (1, 2, 3):
        change(sent)
        sender.stage(version)
        worker.espalier_load_weights(sender.path, lines, complete=False)
        sender.release()
        check_served(served, sender.weights, way)
    assert len(n_loads) == (1 if way == "copies" else 3)


def test_a_worker_does_not_wait_for_ever_for_a_trainer_that_died(monkeypatch):
    group = FakeGroup()
    group.broadcast = lambda buffer, src, stream: None  # on a GPU it returns at once
    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: "worker")
    monkeypatch.setattr(FakeEvent, "query", lambda self: False)
    monkeypatch.setattr(transfer, "load_layerwise", lambda config, model, tensors: list(tensors))
    monkeypatch.setattr(transfer, "loading", lambda vllm_config: torch.no_grad())
    worker = Worker(group, Served())
    lines = [["embed", "float32", [10, 6]]]
    with pytest.raises(RuntimeError, match="did not come within 0.1 s"):
        worker.espalier_receive_weights(lines, limit=100, complete=False, wait_s=0.1)
    assert group.disabled and group.n_aborts == 1
    with pytest.raises(RuntimeError, match="no NCCL group is open"):
        worker.espalier_receive_weights(lines, limit=100, complete=False, wait_s=0.1)


@pytest.mark.parametrize("alignment", [1, 64])
def test_buckets_hold_every_byte_once_and_none_is_larger_than_it_must(alignment):
    tree = Tree()
    sent = sync.Weights(tree, torch.bfloat16)
    for limit in (1, 100, 10**6):
        found = []
        layout = weights.cut(sent.metadata(), limit, alignment)
        for bucket, buffer in zip(layout, sent.buckets(limit, alignment, "cpu"), strict=True):
            assert len(buffer) == bucket.n_bytes
            for entry, offset in zip(bucket.entries, bucket.offsets, strict=True):
                assert offset % alignment == 0
                found.append((entry.name, weights.view_tensor(buffer, entry, offset)))
            assert (
                bucket.offsets[-1] < limit + alignment
            )  # closed by the first entry that goes beyond
        for (name, tensor), (expected_name, expected) in zip(found, sent, strict=True):
            assert name == expected_name and torch.equal(tensor, expected)


# --------------------------------------------------------------------------------- several servers


@pytest.fixture
def two_liars():
    with contextlib.closing(LyingServer()) as one, contextlib.closing(LyingServer()) as two:
        yield one, two


def fleet_sender(liars, timeout_s=2.0):
    fleet = Fleet([liar.url for liar in liars], timeout_s)
    return fleet, sync.FileSender(fleet, sync.Weights(Tree(), torch.bfloat16))


def test_all_servers_get_the_weights_at_once(two_liars):
    fleet, sender = fleet_sender(two_liars, timeout_s=10.0)
    both_load = threading.Barrier(2)
    for liar in two_liars:

        def act(path, body, act=liar.act):
            if path == "/collective_rpc":
                both_load.wait(5.0)
            return act(path, body)

        liar.act = act
    sync.sync_weights(fleet, sender, 3)
    for liar in two_liars:
        assert liar.calls == SYNC_CALLS and liar.version == "3" and not liar.paused
        assert list(liar.received) == [name for name, _ in Tree().named_parameters()]
    assert not shared_files()


@pytest.mark.parametrize("path", SYNC_CALLS)
def test_a_server_that_fails_is_left_out_and_taken_in_again_by_the_next_sync(
    two_liars, path, capsys
):
    good, bad = two_liars
    fleet, sender = fleet_sender(two_liars)
    bad.lies = {path: "500"}
    sync.sync_weights(fleet, sender, 1)
    assert f"weight sync 1 without {bad.url}: " in capsys.readouterr().out
    assert [server.url for server in fleet.serving] == [good.url]
    assert "answered 500" in str(fleet.failures[fleet.servers[1]])
    assert good.version == "1" and not good.paused and not shared_files()
    bad.lies = {"/health": "500"}  # still down: it costs the next sync one question
    sync.sync_weights(fleet, sender, 2)
    assert good.version == "2" and bad.calls[-2:] == ["/resume", "/health"]
    bad.lies = {}
    sync.sync_weights(fleet, sender, 3)
    assert fleet.serving == fleet.servers and good.version == bad.version == "3"
    assert not bad.paused


def test_a_server_that_answers_and_cannot_load_does_not_make_the_others_pause(
    two_liars, monkeypatch
):
    good, bad = two_liars
    fleet, sender = fleet_sender(two_liars)
    bad.lies = {"/collective_rpc": "500"}
    sync.sync_weights(fleet, sender, 1)
    assert bad.version == "0" and not sync.behind(fleet, sender, 1)
    monkeypatch.setattr("server.REST_S", 0.0)  # a minute later
    assert sync.behind(fleet, sender, 1)
    good.version = "0"  # one that serves was restarted
    monkeypatch.undo()
    assert sync.behind(fleet, sender, 1)


def test_when_no_server_is_left_the_sync_fails_with_what_the_first_said(two_liars):
    fleet, sender = fleet_sender(two_liars)
    two_liars[0].lies = {"/pause": "500"}
    two_liars[1].lies = {"/collective_rpc": "500"}
    with pytest.raises(sync.WeightSyncError, match=f"{two_liars[1].url}/collective_rpc"):
        sync.sync_weights(fleet, sender, 1)
    two_liars[1].lies = {}
    two_liars[0].lies = {}
    sync.sync_weights(fleet, sender, 2)
    assert [liar.version for liar in two_liars] == ["2", "2"]


def test_a_server_that_was_restarted_is_noticed_and_gets_the_weights_again(liar):
    fleet, sender = file_sender(liar, timeout_s=10.0)
    sync.sync_weights(fleet, sender, 4)
    assert not sync.behind(fleet, sender, 4)
    liar.version = "default"
    assert sync.behind(fleet, sender, 4)
    liar.lies = {"/weight_info": "500"}  # one that does not answer is not behind: it is away
    assert not sync.behind(fleet, sender, 4)
    liar.lies = {"/weight_info": "never"}  # and one that hangs does not hold up the trainer
    fleet.servers[0].timeout_s, start = 60.0, time.monotonic()
    assert not sync.behind(fleet, sender, 4) and time.monotonic() - start < 10
    liar.lies = dict.fromkeys([*SYNC_CALLS, "/health"], "die")
    timer = threading.Timer(1.0, setattr, (liar, "lies", {}))
    timer.start()
    liar.received = {}
    with pytest.warns(UserWarning, match="weight sync 4 is tried again.*/pause"):
        sync.sync_through_restart(fleet, sender, 4)
    assert liar.version == "4" and not liar.paused
    assert list(liar.received) == [name for name, _ in Tree().named_parameters()]


def test_a_server_that_stays_away_ends_the_run_in_time(liar):
    fleet, sender = file_sender(liar, timeout_s=1.0)
    liar.lies = dict.fromkeys([*SYNC_CALLS, "/health"], "die")
    start = time.monotonic()
    with (
        pytest.warns(UserWarning, match="tried again"),
        pytest.raises(TimeoutError, match=f"no vLLM server answered within 1 s: {liar.url}"),
    ):
        sync.sync_through_restart(fleet, sender, 1)
    assert time.monotonic() - start < 4


def test_servers_that_are_not_alike_are_refused(two_liars):
    fleet, _ = fleet_sender(two_liars)
    two_liars[1].info["vllm_config"]["model_config"]["max_model_len"] = 100
    assert fleet.check("tiny", num_sampler_logprobs=8).max_model_len == 100
    two_liars[1].info["vllm_config"]["model_config"]["dtype"] = "torch.float32"
    with pytest.raises(ValueError, match=f"{two_liars[1].url} has dtype=torch.float32"):
        fleet.check("tiny", num_sampler_logprobs=8)


def test_a_server_that_cannot_serve_is_refused_though_another_can(two_liars):
    fleet, _ = fleet_sender(two_liars)
    two_liars[1].info["vllm_config"]["model_config"]["logprobs_mode"] = "raw_logprobs"
    with pytest.raises(ValueError, match=f"{two_liars[1].url} returns raw_logprobs"):
        fleet.check("tiny", num_sampler_logprobs=8)


# ------------------------------------------------------------------------------------- two ranks


class SlowLink:
    """Stands in for transfer.Link, where NCCL and a GPU would be needed."""

    sent, breaks_off = [], False

    def __init__(self, *group):
        pass

    def ask(self, direct, request):
        pass

    def broadcast(self, bucket):
        time.sleep(0.05)
        if self.breaks_off and self.sent:
            raise sync.WeightSyncError("the receiver broke off")
        self.sent.append(bucket.clone())

    def mark(self):
        return types.SimpleNamespace(synchronize=lambda: None)

    def answer(self):
        pass

    def close(self):
        pass


def run_rank(rank, world_size, folder, url):
    """One trainer rank: six syncs; what this rank saw of each goes to a file."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world_size
    )
    from torch.distributed.fsdp import fully_shard

    tree = Tree().requires_grad_()
    for layer in tree.model.layers:
        fully_shard(layer)
    fully_shard(tree)
    gathered, seen = [], {}

    class Watched(sync.Weights):
        def _tensors(self, limit):
            for entry, tensor in super()._tensors(limit):
                gathered.append(entry.name)
                yield entry, tensor

    def sync_once(sender):
        dist.barrier()
        gathered.clear()
        try:
            sync.sync_weights(fleet, sender, 1)
            error = None
        except Exception as caught:
            error = str(caught)
        assert not shared_files()
        return list(gathered), error

    fleet = Fleet([url], 10)
    sender = sync.FileSender(fleet, Watched(tree, torch.bfloat16), first=rank == 0)
    reserve = transfer.reserve_file
    for case in ("slow", "500", "full", "fine"):
        requests.post(f"{url}/case/{case}", json={})
        if case == "full" and rank == 0:
            transfer.reserve_file = lambda n_bytes: (_ for _ in ()).throw(OSError("disk full"))
        else:
            transfer.reserve_file = reserve
        seen[case] = sync_once(sender)

    # The same over NCCL, with a receiver that is slow, and one that breaks off.
    transfer.Link, torch.cuda.current_device = SlowLink, lambda: 0
    fleet.infos = {fleet.servers[0]: types.SimpleNamespace(world_size=1, worker_extension="")}
    sent = Watched(tree, torch.bfloat16)
    sender = sync.NcclSender(fleet, sent, first=rank == 0, bucket_bytes=100, direct=False)
    sender.device = torch.device("cpu")
    for case in ("breaks off", "nccl"):
        SlowLink.breaks_off = case == "breaks off"
        SlowLink.sent.clear()
        seen[case] = sync_once(sender)
    unsharded = sync.Weights(Tree(), torch.bfloat16)
    expected = [bucket.tolist() for bucket in unsharded.buckets(100, 1, "cpu")]
    if rank == 0:
        assert [bucket.tolist() for bucket in SlowLink.sent] == expected
    (folder / f"rank_{rank}").write_text(json.dumps(seen))
    grpo.leave_distributed()


def test_two_ranks_gather_in_one_order_and_share_rank_0s_errors(liar, tmp_path):
    def act(path, body):
        if path.startswith("/case/"):
            case = path.removeprefix("/case/")
            liar.load_s = 1.0 if case == "slow" else 0.0
            liar.lies = {"/collective_rpc": "500"} if case == "500" else {}
            return {}
        return true(path, body)

    liar.act, true = act, liar.act
    context = mp.spawn(run_rank, (2, tmp_path, liar.url), nprocs=2, join=False)
    deadline = time.monotonic() + 60
    try:
        while not context.join(timeout=1):  # raises what a rank raised
            assert time.monotonic() < deadline, "the ranks do not end"
    finally:
        for process in context.processes:
            process.kill()
    seen = [json.loads((tmp_path / f"rank_{rank}").read_text()) for rank in (0, 1)]

    names = [name for name, _ in Tree().named_parameters()]
    for case in ("slow", "500", "full", "fine", "breaks off", "nccl"):
        # Also where rank 0 had failed before the first tensor: the other rank was not left alone.
        assert seen[0][case][0] == seen[1][case][0] == names
    for rank in (0, 1):
        assert seen[rank]["slow"][1] is None and seen[rank]["fine"][1] is None
        assert "/collective_rpc: answered 500, out of luck" in seen[rank]["500"][1]
        assert "disk full" in seen[rank]["full"][1]
        assert "broke off" in seen[rank]["breaks off"][1] and seen[rank]["nccl"][1] is None
    assert liar.version == "1" and not liar.paused
    for name, parameter in Tree().named_parameters():  # the shards arrived whole
        expected = parameter.bfloat16() if parameter.ndim > 1 else parameter
        assert torch.equal(liar.received[name], expected)


# -------------------------------------------------------------------------------- a real CPU vLLM


class Trainer:
    """A transformers model on a tiny folder, the server on the same, and a sync between them."""

    def __init__(self, tiny_server, tied=True):
        from transformers import AutoModelForCausalLM

        self.url, self.name = tiny_server.url, tiny_server.name
        self.fleet = Fleet([tiny_server.url], 60)
        (self.server,) = self.fleet.servers
        self.model = AutoModelForCausalLM.from_pretrained(tiny_server.folder, dtype=torch.float32)
        self.info = self.fleet.check(tiny_server.name, num_sampler_logprobs=8)
        weights = sync.Weights(self.model, self.info.dtype, tied=tied)
        self.sender = sync.make_sender(self.fleet, weights)

    def send(self, version):
        return sync.sync_weights(self.fleet, self.sender, version)

    def move(self, seed):
        """As far as no optimizer step would: log-probs change by 1 to 5."""
        generator = torch.Generator().manual_seed(seed)
        for parameter in self.model.parameters():
            parameter.data += 0.05 * torch.randn(parameter.shape, generator=generator)

    @staticmethod
    @torch.no_grad()
    def log_probs(model, ids):
        log_probs_TV = model(torch.tensor([ids])).logits[0].log_softmax(-1)
        return log_probs_TV[:-1].gather(1, torch.tensor(ids[1:])[:, None])[:, 0]

    def gap(self, ids):
        theirs = torch.tensor(self.server.score(self.name, ids))
        return float((theirs - self.log_probs(self.model, ids)).abs().max())

    def sampled_gap(self, ids, n_tokens=16):
        sampled_ids, sampled = self.server.sample(self.name, ids, n_tokens)
        ours = self.log_probs(self.model, ids + sampled_ids)[-n_tokens:]
        return float((torch.tensor(sampled) - ours).abs().max())


@pytest.fixture
def trainer(tiny_server):
    trainer = Trainer(tiny_server)
    trainer.send(0)
    return trainer


def prompts(n, seed, length=None):
    generator = torch.Generator().manual_seed(seed)
    lengths = [
        length or int(torch.randint(1, 200, (1,), generator=generator)) + 1 for _ in range(n)
    ]
    return [torch.randint(0, 259, (size,), generator=generator).tolist() for size in lengths]


def is_paused(server):
    return server.call("GET", "/is_paused")["is_paused"]


@pytest.mark.server
def test_after_a_sync_the_server_computes_what_transformers_computes(trainer):
    for version in (1, 2):
        trainer.move(seed=version)
        assert max(map(trainer.gap, prompts(3, seed=version))) > 1  # the server has the old weights
        trainer.send(version)
        assert trainer.server.weight_version() == str(version)
        assert not is_paused(trainer.server) and not shared_files()
        assert max(map(trainer.gap, prompts(20, seed=version))) < 1e-4


@pytest.mark.server
def test_a_prefix_cached_before_the_sync_is_not_used_after_it(trainer):
    (prompt,) = prompts(1, seed=3, length=300)  # two full cache blocks of 128 tokens
    trainer.server.sample(trainer.name, prompt, 1)
    trainer.move(seed=3)
    trainer.send(1)
    assert trainer.sampled_gap(prompt) < 1e-4


@pytest.mark.server
def test_a_stale_tied_head_would_be_seen(trainer):
    # Only the embedding moves, which is also the head: a stale packed head changes every log-prob.
    trainer.model.lm_head.weight.data += 0.05
    trainer.model.lm_head.weight.data[::2] *= 1.5
    (prompt,) = prompts(1, seed=4, length=150)
    assert trainer.gap(prompt) > 0.1
    trainer.send(1)
    assert trainer.gap(prompt) < 1e-4 and trainer.sampled_gap(prompt) < 1e-4


@pytest.mark.server
def test_tokens_sampled_around_a_sync_carry_the_version_that_sampled_them(trainer):
    length, before, synced = 20, copy.deepcopy(trainer.model), threading.Event()
    trainer.move(seed=5)

    def generate_until_synced(prompt, n_tokens):
        sampling = {"max_tokens": n_tokens, "logprobs": 1, "temperature": 1.0, "ignore_eos": True}
        body = {"model": trainer.name, "token_ids": prompt, "sampling_params": sampling}
        answers = []
        while not synced.is_set():
            answer = requests.post(f"{trainer.url}/inference/v1/generate", json=body, timeout=60)
            answers.append((prompt, n_tokens, answer.json()["choices"][0]))
        return answers

    with ThreadPoolExecutor(8) as pool:
        # Of several lengths: they do not all end at once, just when the sync begins.
        rounds = [
            pool.submit(generate_until_synced, prompt, 240 + 30 * i)
            for i, prompt in enumerate(prompts(8, seed=5, length=length))
        ]
        try:
            deadline = time.monotonic() + 30
            while not running_requests(trainer.url):
                assert time.monotonic() < deadline
            trainer.send(1)
        finally:
            synced.set()
        answers = [answer for each in rounds for answer in each.result()]

    n_spanning = 0
    for prompt, n_tokens, choice in answers:
        ids = prompt + choice["token_ids"]
        theirs = torch.tensor([entry["logprob"] for entry in choice["logprobs"]["content"]])
        by_version = {
            "0": Trainer.log_probs(before, ids)[length - 1 :],
            "1": Trainer.log_probs(trainer.model, ids)[length - 1 :],
        }
        spans = choice["weight_versions"]
        assert [span["end"] for span in spans] == [*(span["start"] for span in spans[1:]), n_tokens]
        for span in spans:
            part = slice(span["start"], span["end"])
            # To the token: each is sampled from its version's weights, given all before it.
            assert (theirs[part] - by_version[span["version"]][part]).abs().max() < 1e-4
        if len(spans) == 2:
            n_spanning += 1
            assert [span["version"] for span in spans] == ["0", "1"]
            part = slice(spans[1]["start"], n_tokens)
            assert (theirs[part] - by_version["0"][part]).abs().max() > 0.1
    assert n_spanning > 0


def running_requests(url):
    text = requests.get(url + "/metrics", timeout=10).text
    return sum(map(float, re.findall(r"^vllm:num_requests_running\{.*\} (\S+)$", text, re.M)))


@pytest.mark.server
def test_a_server_whose_load_failed_goes_on_and_takes_the_next_sync(trainer, monkeypatch):
    trainer.move(seed=6)
    (prompt,) = prompts(1, seed=6, length=150)
    stranger = nn.Parameter(torch.ones(4, 4))
    parts = trainer.sender.weights.parts
    entry = weights.Entry("model.layers.1.mlp.stranger.weight", torch.float32, (4, 4))
    more = [*parts, weights.Part(stranger, [entry])]
    monkeypatch.setitem(vars(trainer.sender.weights), "parts", more)
    with pytest.raises(sync.WeightSyncError, match="no module or parameter.*stranger") as caught:
        trainer.send(1)
    assert not getattr(caught.value, "__notes__", ())  # it could be resumed
    assert trainer.server.weight_version() == "0" and not is_paused(trainer.server)
    trainer.server.sample(trainer.name, prompt, 4)  # the engine is alive
    monkeypatch.setitem(vars(trainer.sender.weights), "parts", parts[:-2])
    with pytest.raises(sync.WeightSyncError, match="no weights came for"):
        trainer.send(1)
    monkeypatch.undo()
    trainer.send(1)
    assert trainer.gap(prompt) < 1e-4 and trainer.sampled_gap(prompt) < 1e-4


@pytest.mark.server
def test_the_proof_passes_after_a_sync_and_fails_without(trainer):
    (prompt,) = prompts(1, seed=7, length=150)

    def prove():
        def ours(ids):
            return trainer.log_probs(trainer.model, ids)

        fleet, name = trainer.fleet, trainer.name
        return sync.check_sync(fleet, name, prompt, ours, dtypes=[torch.float32])

    assert prove() < 1e-4
    trainer.move(seed=7)
    with pytest.raises(sync.WeightSyncError, match="does not hold the trainer's weights"):
        prove()
    trainer.send(1)
    assert prove() < 1e-4


@pytest.mark.server
def test_requests_that_keep_arriving_through_a_hundred_syncs_are_all_answered(trainer):
    stop, counts = threading.Event(), []

    def flood(prompt):
        n = 0
        while not stop.is_set():
            sampled_ids, _ = trainer.server.sample(trainer.name, prompt, 8)
            n += len(sampled_ids) == 8
        return n

    with ThreadPoolExecutor(8) as pool:
        floods = [pool.submit(flood, prompt) for prompt in prompts(8, seed=8)]
        for version in range(1, 101):
            trainer.send(version)
        stop.set()
        counts = [flood.result(timeout=60) for flood in floods]
    assert min(counts) > 0 and trainer.server.weight_version() == "100"


def tiny_moe():
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    config = Qwen3MoeConfig(
        vocab_size=259,  # make_tokenizer's
        hidden_size=64,
        intermediate_size=96,
        moe_intermediate_size=32,
        num_experts=4,
        num_experts_per_tok=2,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=1024,
        tie_word_embeddings=False,
        initializer_range=0.1,
        dtype="float32",
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return Qwen3MoeForCausalLM(config)


@pytest.fixture
def moe_server(tmp_path_factory):
    """A server that is fresh, on a tiny mixture of experts with a head of its own."""
    if importlib.util.find_spec("vllm") is None or torch.version.cuda:
        pytest.skip("needs the CPU build of vLLM (requirements-cpu.txt)")
    folder = tmp_path_factory.mktemp("tiny_moe")
    tiny_moe().save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    server = start_server(folder, str(folder), tmp_path_factory.mktemp("moe_server") / "log.txt")
    yield server
    stop_server(server)


@pytest.mark.server
def test_after_a_sync_a_server_is_as_if_started_on_those_weights_also_its_experts(moe_server):
    trainer = Trainer(moe_server, tied=False)
    texts = prompts(20, seed=20) + prompts(1, seed=21, length=300)  # the last fills cache blocks

    def score():
        return torch.tensor([log_prob for ids in texts for log_prob in server.score(name, ids)])

    server, name = trainer.server, moe_server.name
    fresh = score()
    sampled_ids, sampled = server.sample(name, texts[-1], 16)
    start = copy.deepcopy(trainer.model.state_dict())
    for version in (1, 2):  # only the experts move, so that nothing else hides them
        generator = torch.Generator().manual_seed(version)
        for parameter_name, parameter in trainer.model.named_parameters():
            if ".experts." in parameter_name:
                parameter.data += 0.1 * torch.randn(parameter.shape, generator=generator)
        assert max(map(trainer.gap, texts[-3:])) > 0.1
        trainer.send(version)
        assert max(map(trainer.gap, texts)) < 1e-4 and trainer.sampled_gap(texts[-1]) < 1e-4
    assert (score() - fresh).abs().max() > 0.1
    trainer.model.load_state_dict(start)
    trainer.send(3)
    assert (score() - fresh).abs().max() < 1e-4
    again = torch.tensor(server.score(name, texts[-1] + sampled_ids)[-16:])
    assert (again - torch.tensor(sampled)).abs().max() < 1e-4
