"""Uploads to the Hugging Face Hub (--push_to_hub): the model at each checkpoint and at the end.

    hub = Hub(config, run)                     makes the repository: a wrong token is found at start
    hub.push(policy, tokenizer, dtype, step)   collective; uploads in the background
    hub.push_final(folder)                     uploads run/final and waits

A failed upload at a checkpoint is said and the run goes on; one at the end is an error, after the
model is on disk. Without --push_to_hub every method does nothing.
Test: pytest tests/test_hub.py
"""

import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch.distributed as dist

import model


class Hub:
    def __init__(self, config, run):
        self.config, self.folder = config, Path(run) / "hub"
        self.repo, self._uploading = None, None
        if not config.push_to_hub or dist.get_rank() != 0:
            return
        from huggingface_hub import HfApi
        from huggingface_hub.errors import HfHubHTTPError, LocalTokenNotFoundError

        self._api = HfApi()
        name = config.hub_model_id or Path(run).name
        try:
            made = self._api.create_repo(name, private=config.hub_private_repo, exist_ok=True)
            if config.hub_revision:
                self._api.create_branch(made.repo_id, branch=config.hub_revision, exist_ok=True)
        except (HfHubHTTPError, LocalTokenNotFoundError, OSError) as error:
            reason = str(error).strip().splitlines()[0]
            raise ValueError(
                f"--push_to_hub: {name} cannot be written to ({reason}); log in with `hf auth "
                "login` or set HF_TOKEN, and give --hub_model_id USER/NAME"
            ) from error
        self.repo, self._thread = made.repo_id, ThreadPoolExecutor(1, "hub")

    def push(self, policy, tokenizer, dtype, step):
        """After a checkpoint: every rank gathers, rank 0 uploads while the run goes on."""
        if not self.config.push_to_hub or self.config.hub_strategy != "every_save":
            return
        self._finish()
        model.save_pretrained(policy, tokenizer, self.folder, dtype)
        if self.repo:
            self._uploading = self._thread.submit(self._upload, self.folder, f"step {step}")

    def push_final(self, folder):
        """Rank 0 uploads what is saved, after whatever is still under way."""
        self._finish()
        if self.repo:
            try:
                self._upload(folder, "end of training")
            except OSError as error:
                raise RuntimeError(
                    f"the model is in {folder}, but its upload to {self.repo} failed: {error}"
                ) from error

    def _upload(self, folder, message):
        self._api.upload_folder(
            folder_path=str(folder),
            repo_id=self.repo,
            commit_message=message,
            revision=self.config.hub_revision,
        )

    def _finish(self):
        uploading, self._uploading = self._uploading, None
        if uploading is None:
            return
        try:
            uploading.result()
        except OSError as error:  # HfHubHTTPError is one
            print(
                f"hub: an upload to {self.repo} failed, the run goes on: {error}", file=sys.stderr
            )
