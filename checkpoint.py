"""Checkpoints: what a run needs to go on as if it had never stopped.

    Checkpoints       when to save, in the background; how many are kept
    find()            which checkpoint --resume_from_checkpoint means
    restore()         its tensors into policy, optimizer and schedule, on any number of ranks

    RUN/checkpoint-500/         complete, or it is not there
        *.distcp  .metadata     torch.distributed.checkpoint: trained parameters, AdamW, generators
        rollout_state.json      step, tokens, and the position in the order of prompts
    RUN/checkpoint-500.part/    being written, or left by a run that was killed

A checkpoint is written under the second name and renamed when every rank's files are on disk, so a
full disk or a kill costs the newest one only. `next_prompt` is the first prompt (a group_id, the
position in the order that the seed fixes) that is not yet used up, `used` those above it that are:
a prompt is used up once every sample of its group was trained or dropped. So a resumed run
generates again, as a whole, each group that was under way or partly trained, and no other. A
dataset that can only be streamed starts again at its first row.

Learning rate, betas and schedule are those of the resumed run's options, at the saved step. On
several machines the run's folder has to be one that all of them see.
Left out: saving on SIGTERM; the model as a Hugging Face folder at each save (that is RUN/final).
Test: pytest tests/test_checkpoint.py
"""

import contextlib
import json
import os
import shutil
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_state_dict,
)

STATE = "rollout_state.json"
# A frozen base model or vision tower is loaded from where it came from.
OPTIONS = StateDictOptions(ignore_frozen_params=True, strict=False)


class Checkpoints:
    """Saves of one run, at most one under way. Every rank has one and calls the same methods."""

    def __init__(self, folder, policy, optimizer, config):
        self.folder, self.policy, self.optimizer = Path(folder), policy, optimizer
        self.strategy, self.limit = config.save_strategy, config.save_total_limit
        self.every = config.steps_of("save_steps")
        self.identity = run_identity(config)
        self.epoch, self.saved_step = 0.0, None
        # The writer's collectives run in a thread, beside those of the training step.
        self._group = dist.new_group(backend="gloo")
        self._thread = ThreadPoolExecutor(1, "checkpoint")
        self._writing = None  # the future of the save under way
        if dist.get_rank() == 0:
            for left in self.folder.glob("checkpoint-*.part"):
                shutil.rmtree(left)

    def resume(self, state):
        """Count on from a checkpoint."""
        self.epoch, self.saved_step = state["epoch"], state["step"]

    def is_due(self, step, epoch, last=False):
        """Ask once after each step, with `epoch` passes over the prompts done. At the end of a run
        that is long enough to have saved anything, its last step is saved as well."""
        passed, self.epoch = epoch // 1 > self.epoch // 1, epoch
        if self.strategy == "no" or step == self.saved_step:
            return False
        if last:
            return self.saved_step is not None
        return passed if self.strategy == "epoch" else step % self.every == 0

    def save(self, step, rollout_state):
        """Copy the state; a thread writes it. -> seconds that this took. Raises if the save before
        has failed. rollout_state: feed.state(); rank 0's counts."""
        began = time.perf_counter()
        self.finish()
        part = self.folder / f"checkpoint-{step}.part"
        if dist.get_rank() == 0:  # before the writer's first collective, so before any rank writes
            shutil.rmtree(part, ignore_errors=True)
            part.mkdir(parents=True)
        writing = dcp.async_save(
            state_of(self.policy, self.optimizer),
            storage_writer=dcp.FileSystemWriter(part),
            process_group=self._group,
        )
        state = {"step": step, "saved_at": time.time(), "epoch": self.epoch}
        state |= self.identity | rollout_state
        self._writing = self._thread.submit(self._publish, writing, part, state)
        self.saved_step = step
        return time.perf_counter() - began

    def check(self):
        """Raise what went wrong in the background, if it is known already."""
        if self._writing is not None and self._writing.done():
            self.finish()

    def finish(self):
        """Wait until the save under way is on disk."""
        writing, self._writing = self._writing, None
        if writing is not None:
            writing.result()

    def close(self):
        """Finish quietly: there is an error on its way already, or none."""
        with contextlib.suppress(RuntimeError):
            self.finish()
        self._thread.shutdown()

    def _publish(self, writing, part, state):
        """In the thread: wait for all ranks' files; rank 0 gives them their name."""
        try:
            writing.result()  # on every rank, once every rank has written
            if dist.get_rank() == 0:
                publish(part, state)
                prune(self.folder, self.limit)
        except (OSError, CheckpointException) as error:
            # the latter holds the first reasons of all ranks, and derives from BaseException
            failures = getattr(error, "failures", {0: (error,)})
            reason = next(iter(failures.values()))[0]
            if dist.get_rank() == 0:
                shutil.rmtree(part, ignore_errors=True)
            raise RuntimeError(
                f"checkpoint-{state['step']} could not be written to {self.folder} ({reason}); "
                "what was saved before is intact. Free disk space, or lower --save_total_limit, "
                "and go on with --resume_from_checkpoint True"
            ) from error


def publish(part, state):
    """Write the rest, sync, rename."""
    with open(part / STATE, "w") as file:
        file.write(json.dumps(state, indent=2) + "\n")
        file.flush()
        os.fsync(file.fileno())
    final = part.with_suffix("")
    if final.exists():  # of a run that was resumed from an older one
        os.rename(final, old := part.with_name(final.name + ".old.part"))
        os.rename(part, final)
        shutil.rmtree(old)
    else:
        os.rename(part, final)
    descriptor = os.open(final.parent, os.O_RDONLY)
    try:
        os.fsync(descriptor)  # the new name itself
    finally:
        os.close(descriptor)


def complete(folder):
    """The complete checkpoints of a run, the one saved last at the end."""
    states = {path.parent: json.loads(path.read_text()) for path in Path(folder).glob(f"*/{STATE}")}
    return sorted(
        (path for path in states if not path.name.endswith(".part")),
        key=lambda path: states[path]["saved_at"],
    )


def prune(folder, limit):
    """Remove all but the `limit` newest; under another name first, for it takes a while."""
    for old in complete(folder)[: -limit if limit else 0]:
        os.rename(old, part := old.with_name(old.name + ".part"))
        shutil.rmtree(part)


def run_identity(config):
    """What must be the same for a position in the order of prompts to mean the same."""
    names = ("model", "seed", "data_seed", "train_sampling_strategy")
    return {"env": Path(config.env).stem} | {name: getattr(config, name) for name in names}


def find(config):
    """The checkpoint to resume from, or None. True means the newest in output_dir, or else in the
    run that runs/latest points at. ValueError if there is none, or it is of another run."""
    path = named(config)
    saved = load_state(path) if path else {}
    for name, value in run_identity(config).items():
        if saved.get(name, value) != value:
            raise ValueError(
                f"--resume_from_checkpoint: {path} was saved with {name}={saved[name]!r}, and this "
                f"run has {value!r}; give the same, or the path of another checkpoint"
            )
    return path


def named(config):
    wanted = config.resume_from_checkpoint
    if wanted is None or wanted.lower() == "false":
        return None
    if wanted.lower() == "true":
        folder = Path(config.run_folder or "runs/latest").resolve()
        found = complete(folder)
        if not found:
            raise ValueError(
                f"--resume_from_checkpoint True: {folder} has no complete checkpoint; give the "
                "path of one, or name the run with --output_dir"
            )
        return found[-1]
    path = Path(wanted).resolve()
    if not (path / STATE).is_file() or path.name.endswith(".part"):
        raise ValueError(
            f"--resume_from_checkpoint {wanted}: not a complete checkpoint (it has no {STATE}); "
            "give the path of a folder checkpoint-N, or True for the newest"
        )
    return path


def load_state(path):
    """What save() was given, and the step. ValueError if it cannot be read."""
    try:
        return json.loads((path / STATE).read_text())
    except (OSError, ValueError) as error:
        raise ValueError(f"{path / STATE} cannot be read: {error}") from error


def state_of(policy, optimizer):
    """Everything with tensors, sharded as it lies; an optimizer without state gets zeros."""
    parameters, moments = get_state_dict(policy, optimizer, options=OPTIONS)
    generators = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        generators["cuda"] = torch.cuda.get_rng_state()
    return {
        "parameters": parameters,
        "optimizer": moments,
        "generators": {str(dist.get_rank()): generators},
    }


def restore(path, policy, optimizer):
    """Load into the sharded policy and its optimizer, whose hyperparameters stay as they are.
    Collective. A rank that the saved run did not have takes the first rank's generators."""
    own = [{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups]
    state, rank = state_of(policy, optimizer), str(dist.get_rank())
    saved = dcp.FileSystemReader(path).read_metadata().state_dict_metadata
    donor = rank if f"generators.{rank}.cpu" in saved else "0"
    state["generators"] = {
        donor: {n: v for n, v in state["generators"][rank].items()
                if f"generators.{donor}.{n}" in saved}
    }  # fmt: skip
    dcp.load(state, checkpoint_id=path)
    set_state_dict(
        policy,
        optimizer,
        model_state_dict=state["parameters"],
        optim_state_dict=state["optimizer"],
        options=OPTIONS,
    )
    for group, settings in zip(optimizer.param_groups, own, strict=True):
        group.update(settings)
    generators = state["generators"][donor]
    torch.set_rng_state(generators["cpu"])
    if "cuda" in generators:
        torch.cuda.set_rng_state(generators["cuda"])
