"""LoRA to the server: as an adapter under versioned names, or merged into the weights.

The oracle of the server tests is transformers with the adapter merged, on the same tiny folder.
"""

import asyncio
import contextlib
import importlib.util
import threading
import time

import pytest
import torch
from conftest import start_server, stop_server
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from test_sync import LyingServer, Trainer, prompts

import adapters
import sync
from router import Router, Stale
from sampler import Sampler
from server import Fleet, ServerError

LORA_CALLS = ["/v1/models", "/v1/load_lora_adapter"]


def make_peft(folder, **options):
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    config = LoraConfig(**({"r": 4, "lora_alpha": 8, "target_modules": "all-linear"} | options))
    return get_peft_model(model, config)


def move(model, seed):
    """Adapters that change log-probs by about 1: B is zero at first."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        if ".lora_" in name:
            parameter.data = 0.2 * torch.randn(parameter.shape, generator=generator)


@torch.no_grad()
def merged_log_probs(model, ids):
    model.merge_adapter()
    try:
        return Trainer.log_probs(model, ids)
    finally:
        model.unmerge_adapter()


# ---------------------------------------------------------------------------- a server that lies


@pytest.fixture
def liar():
    """A server that keeps a list of adapters."""
    with contextlib.closing(LyingServer()) as liar:
        liar.names = ["tiny"]

        def act(path, body):
            if path == "/v1/models":
                return {"data": [{"id": name} for name in liar.names]}
            if path == "/v1/load_lora_adapter":
                assert body["lora_name"] not in liar.names
                liar.loaded = load_file(body["lora_path"] + "/adapter_model.safetensors")
                liar.names.append(body["lora_name"])
            if path == "/v1/unload_lora_adapter":
                if not body["lora_name"]:
                    return {"error": {"message": "needs a name"}}, 400
                if body["lora_name"] not in liar.names:
                    return {"error": {"message": "cannot be found"}}, 404
                liar.names.remove(body["lora_name"])
            return true(path, body)

        liar.act, true = act, liar.act
        yield liar


def adapter_sender(liar, model, output_dir, max_staleness=1, **options):
    fleet = Fleet([liar.url], 2.0)
    options = {"dtype": torch.bfloat16, "max_staleness": max_staleness} | options
    sender = adapters.AdapterSender(fleet, model, output_dir, **options)
    liar.calls.clear()
    return fleet, sender


def files(output_dir):
    return sorted(path.name for path in (output_dir / ".vllm_lora").iterdir())


def test_a_version_is_written_whole_and_loaded_without_a_pause(liar, tiny_folder, tmp_path):
    model = make_peft(tiny_folder)
    move(model, seed=0)
    fleet, sender = adapter_sender(liar, model, tmp_path)
    seconds = sync.sync_weights(fleet, sender, 0)
    assert liar.calls == LORA_CALLS and liar.names == ["tiny", "espalier-v0"]
    assert seconds["perf/weight_sync_pause_s"] == 0 < seconds["perf/weight_sync_transfer_s"]
    folder = tmp_path / ".vllm_lora" / "espalier-v0"
    expected = model.state_dict()
    assert len(liar.loaded) == 2 * 7 * 2  # A and B, seven matrices a layer, two layers
    for name, tensor in liar.loaded.items():
        original = expected[name.replace(".lora_A.", ".lora_A.default.").replace(
            ".lora_B.", ".lora_B.default.")]  # fmt: skip
        assert torch.equal(tensor, original.bfloat16())
    assert LoraConfig.from_pretrained(folder).r == 4
    sender.close()
    assert liar.names == ["tiny"] and not (tmp_path / ".vllm_lora").exists()


def test_a_server_that_is_gone_at_the_end_is_no_error(liar, tiny_folder, tmp_path):
    _, sender = adapter_sender(liar, make_peft(tiny_folder), tmp_path)
    sync.sync_weights(sender.fleet, sender, 0)
    liar.lies = {"/v1/models": "500"}
    sender.close()
    assert not (tmp_path / ".vllm_lora").exists()


def test_at_most_max_staleness_and_two_versions_are_registered(liar, tiny_folder, tmp_path):
    fleet, sender = adapter_sender(liar, make_peft(tiny_folder), tmp_path, max_staleness=2)
    most = 0
    for version in range(7):
        sync.sync_weights(fleet, sender, version)
        most = max(most, len(liar.names) - 1)
        # v - S ... v can be sampled from, v - S - 1 waits for the next sync.
        oldest = max(version - 3, 0)
        assert files(tmp_path) == [f"espalier-v{v}" for v in range(oldest, version + 1)]
        assert liar.names[1:] == [f"espalier-v{v}" for v in range(oldest, version + 1)]
    assert most == 4


def test_no_version_goes_while_a_rollout_samples_from_it(liar, tiny_folder, tmp_path):
    in_use = [0]
    model = make_peft(tiny_folder)
    fleet, sender = adapter_sender(
        liar, model, tmp_path, max_staleness=0, oldest_in_use=lambda: in_use[0]
    )
    for version in (0, 1):
        sync.sync_weights(fleet, sender, version)
    done = threading.Event()

    def third():
        sync.sync_weights(fleet, sender, 2)
        done.set()

    threading.Thread(target=third, daemon=True).start()
    assert not done.wait(0.3) and "espalier-v0" in liar.names
    in_use[0] = 1
    assert done.wait(5) and liar.names == ["tiny", "espalier-v1", "espalier-v2"]


def test_rollouts_that_never_stop_are_an_error(liar, tiny_folder, tmp_path, monkeypatch):
    monkeypatch.setattr(adapters, "IN_USE_S", 0.1)
    model = make_peft(tiny_folder)
    fleet, sender = adapter_sender(liar, model, tmp_path, 0, oldest_in_use=lambda: 0)
    for version in (0, 1):
        sync.sync_weights(fleet, sender, version)
    with pytest.raises(RuntimeError, match="still sample from adapter 0"):
        sync.sync_weights(fleet, sender, 2)


@pytest.mark.parametrize("lie", ["500", "never", "die"])
@pytest.mark.parametrize("path", LORA_CALLS)
def test_a_load_that_fails_raises_in_time_and_can_be_tried_again(
    liar, tiny_folder, tmp_path, path, lie
):
    fleet, sender = adapter_sender(liar, make_peft(tiny_folder), tmp_path)
    sync.sync_weights(fleet, sender, 0)
    liar.lies = {path: lie}
    start = time.monotonic()
    with pytest.raises(ServerError, match=path):
        sync.sync_weights(fleet, sender, 1)
    assert time.monotonic() - start < 5 and liar.names == ["tiny", "espalier-v0"]
    liar.lies = {}
    sync.sync_weights(fleet, sender, 1)
    assert liar.names == ["tiny", "espalier-v0", "espalier-v1"]
    assert files(tmp_path) == ["espalier-v0", "espalier-v1"]


def test_a_restarted_server_gets_every_version_that_may_be_asked_for(liar, tiny_folder, tmp_path):
    fleet, sender = adapter_sender(liar, make_peft(tiny_folder), tmp_path)
    for version in (0, 1):
        sync.sync_weights(fleet, sender, version)
    liar.names = ["tiny"]
    sync.sync_weights(fleet, sender, 2)
    assert liar.names == ["tiny", "espalier-v0", "espalier-v1", "espalier-v2"]


def test_what_an_earlier_run_left_is_removed(liar, tiny_folder, tmp_path):
    liar.names.append("espalier-v3")
    (tmp_path / ".vllm_lora" / "espalier-v3").mkdir(parents=True)
    adapter_sender(liar, make_peft(tiny_folder), tmp_path)
    assert liar.names == ["tiny"] and not (tmp_path / ".vllm_lora").exists()


def test_servers_without_room_for_the_adapters_are_refused_with_the_remedy(liar):
    lora = {"max_loras": 5, "max_lora_rank": 16}
    liar.info["vllm_config"]["lora_config"] = lora
    (server,) = Fleet([liar.url], 2.0).servers
    liar.lies = {"/v1/unload_lora_adapter": "500"}
    info = server.info()
    assert (info.max_loras, info.max_lora_rank) == (5, 16) and not info.loads_adapters
    adapters.check_slots(liar.url, info, rank=16, max_staleness=3)
    with pytest.raises(ValueError, match="--max-loras 6 --max-lora-rank 16,"):
        adapters.check_slots(liar.url, info, rank=16, max_staleness=4)
    with pytest.raises(ValueError, match="--max-loras 5 --max-lora-rank 32,"):
        adapters.check_slots(liar.url, info, rank=17, max_staleness=3)
    with pytest.raises(ValueError, match="lora_r=513 is above 512"):
        adapters.check_slots(liar.url, info, rank=513, max_staleness=3)


def test_the_largest_rank_counts_and_what_is_no_plain_adapter_is_named(tiny_folder):
    fleet = Fleet(["http://nowhere"], 1.0)  # no server is asked
    model = make_peft(tiny_folder, rank_pattern={"q_proj": 9})
    assert adapters.largest_rank(model.peft_config["default"]) == 9
    assert adapters.served_rank(9) == 16 and adapters.adapter_problem(model, fleet) == ""
    dora = make_peft(tiny_folder, use_dora=True)
    assert "use_dora" in adapters.adapter_problem(dora, fleet)
    with pytest.raises(ValueError, match="no plain LoRA.*without DoRA"):
        sync.Weights(dora, torch.float32)
    saved = make_peft(tiny_folder, target_modules=["q_proj"], modules_to_save=["norm"])
    assert "modules_to_save" in adapters.adapter_problem(saved, fleet)


def test_the_server_decides_whether_an_adapter_travels_alone(liar, tiny_folder, tmp_path):
    config = liar.info["vllm_config"]

    def sender(**options):
        fleet = Fleet([liar.url], 2.0)
        fleet.check("tiny", num_sampler_logprobs=8)
        weights = sync.Weights(make_peft(tiny_folder, **options), torch.float32)
        return sync.make_sender(fleet, weights, output_dir=tmp_path, max_staleness=1)

    assert isinstance(sender(), sync.FileSender)  # no --enable-lora
    config["lora_config"] = {"max_loras": 3, "max_lora_rank": 8}
    assert isinstance(sender(), sync.AdapterSender)
    with pytest.raises(ValueError, match="--max-lora-rank 16"):
        sender(r=9)
    with pytest.warns(UserWarning, match="are merged for the server: bias='all'"):
        assert isinstance(sender(bias="all"), sync.FileSender)
    liar.lies = {"/v1/unload_lora_adapter": "500"}  # the path is not there
    with pytest.warns(UserWarning, match="without VLLM_ALLOW_RUNTIME_LORA_UPDATING=1"):
        assert isinstance(sender(), sync.FileSender)


# ---------------------------------------------------------------------------------------- merged


def test_merged_weights_are_those_of_peft_and_the_model_keeps_every_bit(tiny_folder):
    model = make_peft(tiny_folder, use_rslora=True)
    move(model, seed=1)
    before = {name: parameter.clone() for name, parameter in model.named_parameters()}
    sent = dict(sync.Weights(model, torch.float32, tied=True))
    packed = sync.Weights(model, torch.float32, tied=True).buckets(1 << 20, 1, "cpu")
    assert b"".join(bucket.numpy().tobytes() for bucket in packed) == b"".join(
        tensor.numpy().tobytes() for tensor in sent.values()
    )
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, before[name])
    expected = dict(model.merge_and_unload().named_parameters())
    # The embedding and the last norm belong to no adapted layer: the server has them.
    assert expected.keys() - sent.keys() == {"model.embed_tokens.weight", "model.norm.weight"}
    for name, tensor in sent.items():
        torch.testing.assert_close(tensor, expected[name], rtol=0, atol=1e-6)
        if "norm" not in name:
            assert not torch.equal(tensor, before_weight(before, name))


def before_weight(before, name):
    return before[f"base_model.model.{name.removesuffix('weight')}base_layer.weight"]


# ----------------------------------------------------------------------------- a real CPU vLLM


@pytest.fixture(scope="module")
def lora_server(tiny_folder, tmp_path_factory):
    if importlib.util.find_spec("vllm") is None or torch.version.cuda:
        pytest.skip("needs the CPU build of vLLM (requirements-cpu.txt)")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_ALLOW_RUNTIME_LORA_UPDATING", "1")
        log = tmp_path_factory.mktemp("lora_server") / "log.txt"
        slots = ["--enable-lora", "--max-lora-rank", "8", "--max-loras", "3"]
        server = start_server(tiny_folder, str(tiny_folder), log, *slots)
    yield server
    stop_server(server)


@pytest.fixture
def lora(lora_server, tiny_folder, tmp_path):
    """-> (fleet, server, peft model, adapter sender with max_staleness 1)."""
    fleet = Fleet([lora_server.url], 60)
    info = fleet.check(lora_server.name, num_sampler_logprobs=8)
    assert (info.max_loras, info.max_lora_rank, info.loads_adapters) == (3, 8, True)
    model = make_peft(tiny_folder)
    sender = adapters.AdapterSender(fleet, model, tmp_path, dtype=torch.float32, max_staleness=1)
    yield fleet, fleet.servers[0], model, sender
    sender.close()


@pytest.mark.server
def test_an_adapter_is_served_as_the_merged_model(lora):
    fleet, server, model, sender = lora
    texts = prompts(6, seed=11) + prompts(1, seed=12, length=300)  # the last one fills cache blocks
    expected = {}
    for version in range(4):
        move(model, seed=version)
        sync.sync_weights(fleet, sender, version)
        expected[version] = [merged_log_probs(model, ids) for ids in texts]
        for living in range(max(version - 1, 0), version + 1):
            # Old versions go on as they were, also through the prefix cache.
            name = f"espalier-v{living}"
            for ids, ours in zip(texts, expected[living], strict=True):
                theirs = torch.tensor(server.score(name, ids))
                assert (theirs - ours).abs().max() < 1e-4, (version, living)
        gap = torch.tensor(server.score(f"espalier-v{version}", texts[-1])) - expected[0][-1]
        assert version == 0 or gap.abs().max() > 0.1  # the versions differ
        sampled_ids, sampled = server.sample(f"espalier-v{version}", texts[-1], 16)
        ours = merged_log_probs(model, texts[-1] + sampled_ids)[-16:]
        assert (torch.tensor(sampled) - ours).abs().max() < 1e-4
    assert [name for name in server.model_names() if "espalier" in name] == [
        "espalier-v1",  # v - S - 1, until the next sync
        "espalier-v2",
        "espalier-v3",
    ]
    with pytest.raises(ServerError, match="404"):
        server.score("espalier-v0", texts[0])


@pytest.mark.server
def test_a_rollout_ends_under_its_own_adapter_or_is_stopped_and_no_name_is_gone(lora, lora_server):
    fleet, server, model, sender = lora
    (prompt,) = prompts(1, seed=13, length=20)
    version = 0

    async def push():
        nonlocal version
        move(model, seed=version + 1)
        await asyncio.to_thread(sync.sync_weights, fleet, sender, version + 1)
        version += 1

    async def test():
        options = {"max_tokens": 400, "adapter": adapters.MODEL_NAME, "timeout_s": 60.0}
        sampler = Sampler(server.url, lora_server.name, **options)
        sampler.parameters["ignore_eos"] = True
        router = Router([sampler], lambda: version, max_staleness=1)
        sender.oldest_in_use = router.stop_stale
        await router.start()

        async def rollout():
            router.pin()
            return await router.sample(prompt, version)

        async def talk():  # turn after turn, so that it is sampling however long a push takes
            router.pin()
            while True:
                await router.sample(prompt, version)

        living = asyncio.create_task(rollout())
        await asyncio.sleep(0.2)  # it is sampling
        await push()
        assert not living.done()
        later = asyncio.create_task(rollout())
        turns = [await living, await later]
        await push()
        dying = asyncio.create_task(talk())
        await asyncio.sleep(0.2)
        await push()  # version 3: it may go on
        router.stop_stale()
        await asyncio.sleep(0.05)
        assert not dying.done()
        await push()  # version 4: it may not
        router.stop_stale()
        with pytest.raises(Stale):
            await dying
        await push()
        turns.append(await rollout())
        await router.close()
        return turns

    move(model, seed=0)
    sync.sync_weights(fleet, sender, 0)
    turns = asyncio.run(test())
    for began, turn in zip((0, 1, 5), turns, strict=True):
        assert set(turn.versions) == {began} and len(turn.output_ids) == 400
        move(model, seed=began)
        ours = merged_log_probs(model, prompt + turn.output_ids)[-400:]
        assert (torch.tensor(turn.output_log_probs) - ours).abs().max() < 1e-4
    assert 'generate HTTP/1.1" 404' not in lora_server.log.read_text()


@pytest.mark.server
def test_merged_weights_reach_a_server_that_could_serve_adapters(lora, lora_server):
    fleet, server, model, _ = lora
    sender = sync.FileSender(fleet, sync.Weights(model, torch.float32, tied=True))
    original = model.state_dict()
    for version in (1, 2):
        move(model, seed=version)
        sync.sync_weights(fleet, sender, version)
        for ids in prompts(5, seed=version):
            theirs = torch.tensor(server.score(lora_server.name, ids))
            assert (theirs - merged_log_probs(model, ids)).abs().max() < 1e-4
    with torch.no_grad():  # as it was: the adapters of the other tests are of these weights
        for name, parameter in model.named_parameters():
            if ".lora_B" in name:
                parameter.zero_()
    sync.sync_weights(fleet, sender, 3)
    assert original.keys() == model.state_dict().keys()
