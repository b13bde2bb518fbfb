"""Weight sync: the server holds the trainer's weights, or everybody gets an error in time.

Three oracles: a server that lies (what the trainer does about it), two gloo ranks against that
server (what every rank learns), and a real CPU vLLM against transformers on the same weights.
"""

import contextlib
import copy
import json
import re
import sys
import threading
import time
import types
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import urlsplit

import pytest
import requests
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn

import sync

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
            state.shutdown_request(self.request)
            state.lies = dict.fromkeys(SYNC_CALLS, "die")
            return None
        if lie == "refuse":
            return self.answer({"status": "running"})
        return self.answer(state.act(path, body))

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
            if body["method"] == "espalier_restore":
                return {"results": [None]}
            path, manifest = body["kwargs"]["path"], body["kwargs"]["manifest"]
            file = torch.frombuffer(bytearray(open(path, "rb").read()), dtype=torch.uint8)
            self.received = {name: sync.view_tensor(file, *entry) for name, *entry in manifest}
            return {"results": [None]}
        if path == "/update_weight_version":
            self.version = body["new_version"]
        return {
            "/is_paused": {"is_paused": self.paused},
            "/reset_prefix_cache": {"success": True},
            "/server_info": self.info,
            "/v1/models": {"data": [{"id": "tiny"}]},
            "/get_world_size": {"world_size": 1},
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


def file_sender(liar, timeout_s=5.0, **weights):
    server = sync.VllmServer(liar.url, timeout_s)
    return server, sync.FileSender(server, sync.Weights(Tree(), torch.bfloat16, **weights))


def shared_files(folder="/dev/shm"):
    from pathlib import Path

    return sorted(path.name for path in Path(folder).glob("espalier-weights-*"))


# ------------------------------------------------------------------------------------ one process


def test_a_sync_makes_its_calls_in_order_and_delivers_every_bit(liar):
    server, sender = file_sender(liar)
    seconds = sync.sync_weights(server, sender, 7)
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
    server, sender = file_sender(liar)
    sender.stage()
    assert liar.calls == [] and len(shared_files()) == 1
    sender.release(failed=True)
    assert not shared_files()


@pytest.mark.parametrize("path", SYNC_CALLS)
def test_a_500_at_any_call_raises_and_names_it(liar, path):
    server, sender = file_sender(liar)
    liar.lies = {path: "500"}
    with pytest.raises(RuntimeError) as caught:
        sync.sync_weights(server, sender, 1)
    assert f"POST {liar.url}{path}: answered 500, out of luck" in str(caught.value)
    assert liar.calls[-1] == "/resume" and not shared_files()
    assert liar.paused == (path == "/resume")
    # The version moves in the last call but one, when the weights are in.
    assert liar.version == ("1" if path == "/resume" else "0")
    # A second attempt starts from scratch.
    liar.lies = {}
    sync.sync_weights(server, sender, 1)
    assert liar.version == "1" and not liar.paused


@pytest.mark.parametrize("path", SYNC_CALLS)
def test_a_call_that_is_never_answered_raises_within_the_timeout(liar, path):
    server, sender = file_sender(liar, timeout_s=0.3)
    liar.lies = {path: "never"}
    start = time.monotonic()
    with pytest.raises(RuntimeError, match=f"{path}: no answer within 0.3 s"):
        sync.sync_weights(server, sender, 1)
    # One timeout, and a second one where it is /resume that never answers.
    assert time.monotonic() - start < 1.5
    assert liar.calls[-1] == "/resume" and not shared_files()
    assert liar.version == ("1" if path == "/resume" else "0")


@pytest.mark.parametrize("path", ["/pause", "/collective_rpc", "/update_weight_version"])
def test_a_server_that_dies_in_the_middle_raises_the_first_error(liar, path):
    server, sender = file_sender(liar)
    liar.lies = {path: "die"}
    start = time.monotonic()
    with pytest.raises(RuntimeError, match=f"POST {liar.url}{path}: ") as caught:
        sync.sync_weights(server, sender, 1)
    assert time.monotonic() - start < 2 and liar.version == "0" and not shared_files()
    assert "/resume" in caught.value.__notes__[0]  # ... and what became of the attempt to resume


def test_a_refused_pause_stops_the_sync_before_any_weight_is_loaded(liar):
    server, sender = file_sender(liar)
    liar.lies = {"/pause": "refuse"}
    with pytest.raises(sync.ServerError, match="/pause: did not pause.*running"):
        sync.sync_weights(server, sender, 1)
    assert liar.calls == ["/pause", "/resume"] and liar.version == "0"


def test_caches_that_cannot_be_reset_are_an_error(liar):
    server, sender = file_sender(liar)
    liar.act, true = lambda *call: {} if "reset" in call[0] else true(*call), liar.act
    with pytest.raises(sync.ServerError, match="/reset_prefix_cache: not reset"):
        sync.sync_weights(server, sender, 1)
    assert liar.version == "0" and not liar.paused


def test_a_full_shared_memory_falls_back_to_disk_and_a_full_disk_is_an_error(monkeypatch, tmp_path):
    monkeypatch.setattr(sync.tempfile, "gettempdir", lambda: str(tmp_path))
    reserve, asked = sync.os.posix_fallocate, []

    def no_room_at_first(handle, offset, size):
        asked.append(size)
        if len(asked) == 1:
            raise OSError(28, "No space left on device")
        reserve(handle, offset, size)

    monkeypatch.setattr(sync.os, "posix_fallocate", no_room_at_first)
    path = sync.reserve_file(1000)
    assert path.startswith(str(tmp_path)) and not shared_files()
    with pytest.raises(sync.WeightSyncError, match="no room for 1000000.00 GB"):
        sync.reserve_file(10**15)
    assert not shared_files() and len(shared_files(tmp_path)) == 1


def test_waiting_for_a_server_that_is_not_there_ends_with_the_remedy():
    told = []
    server = sync.VllmServer("http://127.0.0.1:9", 0.3)
    with pytest.raises(TimeoutError, match=r"127.0.0.1:9 within 0.3 s.*--vllm_server_timeout"):
        server.wait_until_ready(told.append)
    assert told and told[0] < 0.3


def test_a_server_that_answers_is_ready_at_once(liar):
    sync.VllmServer(liar.url, 5).wait_until_ready()
    assert liar.calls == ["/health"]


@pytest.mark.parametrize(
    ("section", "key", "value", "remedy"),
    [
        ("model_config", "logprobs_mode", "raw_logprobs", "--logprobs-mode processed_logprobs"),
        ("model_config", "max_logprobs", 8, "--max-logprobs 9"),  # K = 8 and the sampled token
        ("model_config", "max_model_len", 99, "--max-model-len 100"),
        ("parallel_config", "worker_extension_cls", "", "--worker-extension-cls sync.Worker"),
        ("device_config", "device", "cuda", "--weight-transfer-config"),
        ("scheduler_config", "enable_chunked_prefill", True, "--no-enable-chunked-prefill"),
    ],
)
def test_a_server_that_cannot_serve_the_run_is_refused_with_the_remedy(
    liar, section, key, value, remedy
):
    server = sync.VllmServer(liar.url, 5)
    server.check("tiny", num_sampler_logprobs=8, min_model_len=100)
    liar.info["vllm_config"][section][key] = value
    with pytest.raises(ValueError, match=remedy) as caught:
        server.check("tiny", num_sampler_logprobs=8, min_model_len=100)
    assert "\n" not in str(caught.value)


def test_a_server_with_another_model_or_without_dev_mode_is_refused(liar):
    server = sync.VllmServer(liar.url, 5)
    with pytest.raises(ValueError, match="serves tiny, not other.*--served-model-name other"):
        server.check("other", num_sampler_logprobs=8)
    liar.lies = {"/server_info": "500"}
    with pytest.raises(sync.ServerError, match="/server_info: answered 500"):
        server.check("tiny", num_sampler_logprobs=8)

    Lies.answer, true = lambda self, *_: true(self, {"detail": "Not Found"}, 404), Lies.answer
    try:
        with pytest.raises(ValueError, match="VLLM_SERVER_DEV_MODE=1"):
            server.check("tiny", num_sampler_logprobs=8)
    finally:
        Lies.answer = true


def test_another_compute_dtype_is_a_warning(liar):
    server = sync.VllmServer(liar.url, 5)
    with pytest.warns(UserWarning, match="bfloat16 and the trainer in torch.float32"):
        info = server.check("tiny", num_sampler_logprobs=8, compute_dtype=torch.float32)
    assert info.dtype == torch.bfloat16 and info.on_cpu


# ------------------------------------------------------------------------------ names and selection


def test_names_are_the_checkpoints_under_any_wrapper():
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    policy = nn.Module()
    policy.inner = Tree()
    layers = policy.inner.model.layers
    layers[0], layers[1] = checkpoint_wrapper(layers[0]), checkpoint_wrapper(layers[1])
    weights = sync.Weights(policy, torch.float32, prefix="inner.")
    assert [name for name, _ in weights] == [name for name, _ in Tree().named_parameters()]
    assert [entry.name for entry in weights.metadata()] == [name for name, _ in weights]
    compiled = "model.layers.0._orig_mod._checkpoint_wrapped_module.mlp.up_proj.weight"
    assert sync.checkpoint_name(compiled) == "model.layers.0.mlp.up_proj.weight"


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
    """Stands in for the server: prompt log-probs -1 each, sampled ones -2 each."""

    url = "http://scorer"

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


# -------------------------------------------------------------------------------------- NCCL's rim
# What sync.py puts around vLLM's engine, with an engine that waits where NCCL would.


class FakeCommunicator:
    """broadcast() waits for ever, as NCCL does, until the server receives or somebody aborts."""

    device = None
    comm = None

    def __init__(self, receiving):
        self.receiving, self.disabled, self.nccl = receiving, False, self

    def broadcast(self):
        assert self.disabled or self.receiving.wait(10), "nobody freed the broadcast"

    def ncclCommAbort(self, comm):
        assert self.disabled, "a thread could still enter"
        self.receiving.set()


class FakeEngine:
    made = []

    @classmethod
    def trainer_init(cls, rendezvous, *, client, source):
        engine = cls()
        engine.client, engine.source = client, source
        FakeEngine.made.append(engine)
        with ThreadPoolExecutor(1) as pool:
            joined = pool.submit(client.init_weight_transfer_engine, {"world_size": 2})
            assert engine.server.joined.wait(3)  # NCCL: until all have come
            joined.result()
        engine.model_update_group = FakeCommunicator(engine.server.receiving)
        return engine

    def send_weights(self):
        names = [entry.name for entry in self.source.metadata()]
        self.client.start_weight_update()
        with ThreadPoolExecutor(1) as pool:
            update = pool.submit(self.client.update_weights, {"names": names})
            for _ in self.source:
                self.model_update_group.broadcast()
            update.result()
        self.client.finish_weight_update()


@pytest.fixture
def nccl(liar, monkeypatch):
    """-> (server, sender, names gathered in the last sync)."""
    module = types.ModuleType("vllm.distributed.weight_transfer.nccl_engine")
    module.NCCLTrainerWeightTransferEngine = FakeEngine
    module.NCCLTrainerInitInfo = lambda **fields: fields
    for name in ("vllm", "vllm.distributed", "vllm.distributed.weight_transfer"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    for name in ("current_device", "set_device", "synchronize"):
        monkeypatch.setattr(torch.cuda, name, lambda *args: 0)
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())

    def act(path, body):
        if path == "/init_weight_transfer_engine":
            liar.joined.set()
        if path == "/update_weights":
            assert liar.paused
            liar.receiving.set()
        return true(path, body)

    liar.act, true = act, liar.act
    liar.joined, liar.receiving = threading.Event(), threading.Event()
    FakeEngine.server, FakeEngine.made = liar, []
    liar.info["vllm_config"]["device_config"]["device"] = "cuda"
    liar.info["vllm_config"]["weight_transfer_config"] = {"backend": "nccl"}
    gathered = []

    class Watched(sync.Weights):
        def __iter__(self):
            gathered.clear()
            for name, tensor in super().__iter__():
                gathered.append(name)
                yield name, tensor

    server = sync.VllmServer(liar.url, 1.0)
    info = server.check("tiny", num_sampler_logprobs=8)
    liar.calls.clear()
    return server, sync.make_sender(server, info, Watched(Tree(), info.dtype)), gathered


NCCL_CALLS = [
    "/init_weight_transfer_engine",
    "/pause",
    "/start_weight_update",
    "/update_weights",
    "/finish_weight_update",
    "/reset_prefix_cache",
    "/reset_encoder_cache",
    "/update_weight_version",
    "/resume",
]


def test_an_nccl_group_is_opened_once_and_then_reused(liar, nccl):
    server, sender, gathered = nccl
    sync.sync_weights(server, sender, 1)
    assert liar.calls == NCCL_CALLS and liar.version == "1" and not liar.paused
    assert gathered == [name for name, _ in Tree().named_parameters()]
    sync.sync_weights(server, sender, 2)
    assert liar.calls == NCCL_CALLS + NCCL_CALLS[1:] and liar.version == "2"
    sender.close()
    assert liar.calls[-1] == "/shutdown_weight_transfer_engine"


@pytest.mark.parametrize("lie", ["500", "never"])
@pytest.mark.parametrize("path", [path for path in NCCL_CALLS if "weight" in path])
def test_no_failed_call_leaves_a_rank_in_a_broadcast_or_a_gather(liar, nccl, path, lie):
    server, sender, gathered = nccl
    liar.lies = {path: lie}
    start = time.monotonic()
    with pytest.raises(RuntimeError, match=f"POST {liar.url}{path}: "):
        sync.sync_weights(server, sender, 1)
    assert time.monotonic() - start < 3 and liar.version == "0" and not liar.paused
    if path != "/init_weight_transfer_engine":  # the other ranks gather; rank 0 did so to the end
        assert gathered == [name for name, _ in Tree().named_parameters()]
        # The worker puts its layers in order before a request can run on them.
        assert liar.calls.index("/collective_rpc") < liar.calls.index("/resume")
    # The next sync opens a new group.
    liar.lies = {}
    liar.receiving.clear()
    sync.sync_weights(server, sender, 2)
    assert liar.version == "2" and len(FakeEngine.made) == 2


# ------------------------------------------------------------------------------------- two ranks


def run_rank(rank, world_size, folder, url):
    """One trainer rank: four syncs; what this rank saw of each goes to a file."""
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
        def __iter__(self):
            for name, tensor in super().__iter__():
                gathered.append(name)
                yield name, tensor

    server = sync.VllmServer(url, 10)
    sender = sync.FileSender(server, Watched(tree, torch.bfloat16))
    reserve = sync.reserve_file
    for case in ("slow", "500", "full", "fine"):
        requests.post(f"{url}/case/{case}", json={})
        dist.barrier()
        gathered.clear()
        if case == "full" and rank == 0:
            sync.reserve_file = lambda n_bytes: (_ for _ in ()).throw(OSError("disk full"))
        else:
            sync.reserve_file = reserve
        try:
            sync.sync_weights(server, sender, 1)
            error = None
        except Exception as caught:
            error = str(caught)
        seen[case] = list(gathered), error
    (folder / f"rank_{rank}").write_text(json.dumps(seen))
    dist.destroy_process_group()


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
    for case in ("slow", "500", "full", "fine"):
        # Also where rank 0 had failed before the first tensor: the other rank was not left alone.
        assert seen[0][case][0] == seen[1][case][0] == names
    for rank in (0, 1):
        assert seen[rank]["slow"][1] is None and seen[rank]["fine"][1] is None
        assert "/collective_rpc: answered 500, out of luck" in seen[rank]["500"][1]
        assert "disk full" in seen[rank]["full"][1]
    assert liar.version == "1" and not liar.paused and not shared_files()
    for name, parameter in Tree().named_parameters():  # the shards arrived whole
        expected = parameter.bfloat16() if parameter.ndim > 1 else parameter
        assert torch.equal(liar.received[name], expected)


# -------------------------------------------------------------------------------- a real CPU vLLM


class Trainer:
    """A transformers model on the tiny folder, the server on the same, and a sync between them."""

    def __init__(self, tiny_server):
        from transformers import AutoModelForCausalLM

        self.url, self.name = tiny_server.url, tiny_server.name
        self.server = sync.VllmServer(tiny_server.url, 60)
        self.model = AutoModelForCausalLM.from_pretrained(tiny_server.folder, dtype=torch.float32)
        self.info = self.server.check(tiny_server.name, num_sampler_logprobs=8)
        weights = sync.Weights(self.model, self.info.dtype, tied=True)
        self.sender = sync.make_sender(self.server, self.info, weights)

    def send(self, version):
        return sync.sync_weights(self.server, self.sender, version)

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


@pytest.mark.server
def test_after_a_sync_the_server_computes_what_transformers_computes(trainer):
    for version in (1, 2):
        trainer.move(seed=version)
        assert max(map(trainer.gap, prompts(3, seed=version))) > 1  # the server has the old weights
        trainer.send(version)
        assert trainer.server.weight_version() == str(version)
        assert not trainer.server.is_paused() and not shared_files()
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
    length, n_tokens = 20, 450
    before = copy.deepcopy(trainer.model)
    trainer.move(seed=5)

    def generate(prompt):
        sampling = {"max_tokens": n_tokens, "logprobs": 1, "temperature": 1.0, "ignore_eos": True}
        body = {"model": trainer.name, "token_ids": prompt, "sampling_params": sampling}
        answer = requests.post(f"{trainer.url}/inference/v1/generate", json=body, timeout=60)
        return prompt, answer.json()["choices"][0]

    with ThreadPoolExecutor(8) as pool:
        answers = [pool.submit(generate, prompt) for prompt in prompts(8, seed=5, length=length)]
        deadline = time.monotonic() + 30
        while not running_requests(trainer.url):
            assert time.monotonic() < deadline
        trainer.send(1)
        answers = [answer.result() for answer in answers]

    n_spanning = 0
    for prompt, choice in answers:
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
    parameters = sync.Weights._parameters
    monkeypatch.setattr(
        sync.Weights,
        "_parameters",
        lambda self: parameters(self) + [("model.layers.1.mlp.stranger.weight", stranger)],
    )
    with pytest.raises(sync.WeightSyncError, match="no module or parameter.*stranger"):
        trainer.send(1)
    assert trainer.server.weight_version() == "0" and not trainer.server.is_paused()
    trainer.server.sample(trainer.name, prompt, 4)  # the engine is alive
    monkeypatch.setattr(sync.Weights, "_parameters", lambda self: parameters(self)[:-2])
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

        server, name = trainer.server, trainer.name
        return sync.check_sync(server, name, prompt, ours, dtypes=[torch.float32])

    assert prove() < 1e-4
    trainer.move(seed=7)
    with pytest.raises(sync.WeightSyncError, match="does not hold the trainer's weights"):
        prove()
    trainer.send(1)
    assert prove() < 1e-4


@pytest.mark.server
def test_requests_that_keep_arriving_through_many_syncs_are_all_answered(trainer):
    stop, counts = threading.Event(), []

    def flood(prompt):
        n = 0
        while not stop.is_set():
            sampled_ids, _ = trainer.server.sample(trainer.name, prompt, 8)
            n += len(sampled_ids) == 8
        return n

    with ThreadPoolExecutor(8) as pool:
        floods = [pool.submit(flood, prompt) for prompt in prompts(8, seed=8)]
        for version in range(1, 21):
            trainer.send(version)
        stop.set()
        counts = [flood.result(timeout=60) for flood in floods]
    assert min(counts) > 0 and trainer.server.weight_version() == "20"
