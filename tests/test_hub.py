"""Uploads: what goes where and when, and what a failing one does. The Hub itself is a fake."""

import dataclasses
import types

import huggingface_hub
import pytest
import torch
from conftest import load_policy
from test_trainer import CONFIG

import model
from hub import Hub

PUSH = dataclasses.replace(CONFIG, push_to_hub=True, hub_revision="try")


@pytest.fixture
def api(monkeypatch):
    """Records calls; an upload raises what is put into `failures`."""
    calls, failures = [], []

    class Api:
        def create_repo(self, name, private, exist_ok):
            if failures:
                raise failures.pop()
            calls.append(("create", name, private))
            return types.SimpleNamespace(repo_id=f"me/{name}")

        def create_branch(self, repo, branch, exist_ok):
            calls.append(("branch", repo, branch))

        def upload_folder(self, folder_path, repo_id, commit_message, revision):
            if failures:
                raise failures.pop()
            calls.append(("upload", folder_path, repo_id, commit_message, revision))

    monkeypatch.setattr(huggingface_hub, "HfApi", Api)
    return types.SimpleNamespace(calls=calls, failures=failures)


def test_the_model_is_uploaded_at_saves_and_at_the_end(
    api, tiny_folder, one_rank, tmp_path, capsys
):
    cpu = torch.device("cpu")
    policy = load_policy(PUSH, tiny_folder, cpu)
    tokenizer = model.load_tokenizer(PUSH, tiny_folder)
    model.shard(policy, cpu, torch.float32, compile_layers=False)
    hub = Hub(PUSH, tmp_path / "sums")
    hub.push(policy, tokenizer, torch.float32, 3)
    hub.push_final("somewhere/final")
    folder = tmp_path / "sums" / "hub"
    assert (folder / "model.safetensors").exists() and (folder / "tokenizer.json").exists()
    assert api.calls == [
        ("create", "sums", None),
        ("branch", "me/sums", "try"),
        ("upload", str(folder), "me/sums", "step 3", "try"),
        ("upload", "somewhere/final", "me/sums", "end of training", "try"),
    ]
    api.failures.append(OSError("no network"))
    hub.push(policy, tokenizer, torch.float32, 6)
    hub.push_final("somewhere/final")  # the one before failed, and is said
    assert "no network" in capsys.readouterr().err and len(api.calls) == 5
    api.failures.append(OSError("no network"))
    with pytest.raises(RuntimeError, match="somewhere/final.*me/sums failed: no network"):
        hub.push_final("somewhere/final")


def test_a_wrong_token_is_found_at_the_start(api, one_rank, tmp_path):
    api.failures.append(OSError("401 Unauthorized\nmore"))
    with pytest.raises(ValueError, match="sums.*401 Unauthorized.*HF_TOKEN"):
        Hub(PUSH, tmp_path / "sums")


def test_without_push_to_hub_nothing_is_asked(api, one_rank, tmp_path):
    hub = Hub(CONFIG, tmp_path)
    hub.push(None, None, None, 1)
    hub.push_final("final")
    assert api.calls == []
