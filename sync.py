"""Weight sync: the trainer's weights into running vLLM servers, as version n, or an error.

    sync_weights()     send, and return the seconds it took; collective over the trainer's ranks
    check_sync()       proof: log-probs of a fixed prompt agree between a server and the trainer
    make_sender()      the way for the bytes that suits the servers (transfer.py)

Who does what, in order. Rank 0 alone talks to the servers (server.py), to all at once; after each
line all ranks learn from rank 0 whether it worked and raise or go on together.

    stage     every rank gathers   CPU: the file is written while the server still generates
    pause     rank 0               mode=keep: requests freeze where they are, new ones wait
    load      rank 0 (NCCL: all)   no token is sampled between here and resume
    reset     rank 0               caches of the old weights; running requests are recomputed
    version   rank 0               the server labels each token with it from here on
    resume    rank 0               also when anything above failed

A LoRA adapter that travels alone (adapters.py) is a new name beside the old ones: stage and load,
nothing is paused.

The caller counts the version up after sync_weights() has returned, never before. With several
servers one that fails is left out, and tried again at the next sync; the last one's failure is
raised. After a load that failed half way some layers may be new and some old; the error says so,
and a complete sync repairs it.
Test: pytest tests/test_sync.py (fault injection, two gloo ranks, a real CPU server)
"""

import time
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from adapters import AdapterSender, adapter_problem, check_slots, largest_rank
from server import LAST_CALL_S, WORKER_EXTENSION, Fleet, ServerError, VllmServer
from transfer import FileSender, NcclSender, WeightSyncError, WorkerExtension
from weights import Weights

__all__ = ["WorkerExtension"]  # the server imports it from here
Sender = FileSender | NcclSender | AdapterSender


def sync_weights(fleet: Fleet, sender: Sender, version: int) -> dict[str, float]:
    """Make the servers sample from the trainer's weights, under `version`; -> seconds by metric.

    Collective (without torch.distributed: this process alone). Rank 0's error is raised on every
    rank. The process group's timeout must be longer than the servers', since the others wait while
    rank 0 talks to them.
    """
    start = time.perf_counter()
    seconds = dict.fromkeys(("pause", "barrier", "transfer"), 0.0)
    first = is_first()

    def commit(server):
        server.reset_caches()
        server.update_weight_version(version)

    def everywhere(step):
        if first:
            fleet.each(step)

    if first:
        fleet.readmit()
    out = set(fleet.failures)  # they have no part in this sync, nor in its failure
    try:
        together(lambda: sender.stage(version), seconds, "transfer")
        if sender.pauses:
            together(lambda: everywhere(VllmServer.pause), seconds, "pause")
        together(sender.load, seconds, "transfer")
        if sender.pauses:
            together(lambda: everywhere(commit))
            together(lambda: everywhere(VllmServer.resume))
    except BaseException as error:
        # No collective here: ranks may have come from different places. A pause that was not
        # acknowledged may yet have paused the server, so resume in any case.
        fleet.failures |= {server: error for server in fleet.serving}
        raise
    finally:
        failed = {server: e for server, e in fleet.failures.items() if server not in out}
        sender.release(failed=list(failed))
        for server, error in failed.items() if first else ():
            if fleet.serving:
                print(f"weight sync {version} without {server.url}: {error}", flush=True)
            try:
                if sender.pauses:
                    server.resume(timeout_s=LAST_CALL_S)
            except ServerError as again:
                error.add_note(f"the server could not be resumed either: {again}")
    total = {"perf/weight_sync_s": time.perf_counter() - start}
    return total | {f"perf/weight_sync_{part}_s": value for part, value in seconds.items()}


def sync_through_restart(fleet: Fleet, sender: Sender, version: int) -> dict[str, float]:
    """sync_weights(), and once more if it fails: a server that was restarted has lost its NCCL
    group or its adapters. Waits until one server answers, as long as at the start of a run."""
    try:
        return sync_weights(fleet, sender, version)
    except (ServerError, WeightSyncError) as error:
        warnings.warn(f"weight sync {version} is tried again: {error}", stacklevel=2)
    together(lambda: fleet.wait_for_one() if is_first() else None)
    return sync_weights(fleet, sender, version)


def behind(fleet: Fleet, sender: Sender, version: int) -> bool:
    """Does a server that answers lack this version? It was restarted, or has come back. One that a
    sync has left out is asked again a while later: a sync pauses the others. Rank 0."""

    def lacks(server):
        try:
            return not sender.is_current(server, version)
        except ServerError:
            return False

    return any(lacks(server) for server in fleet.servers if not fleet.rests(server))


def is_first() -> bool:
    return not dist.is_initialized() or dist.get_rank() == 0


def together(step: Callable[[], Any], seconds=None, part: str = "") -> Any:
    """Run `step` here, then do as rank 0 did: -> its result, or raise its error, on every rank.

    One broadcast. Its time is the wait for the slower side; it is counted as "barrier", and the
    step's own as `part`. An error on another rank than 0 is raised at once: that rank's process
    ends, and the launcher ends the others.
    """
    begin = time.perf_counter()
    result, error = None, None
    try:
        result = step()
    except Exception as caught:
        if not is_first():
            raise
        error = caught
    done = time.perf_counter()
    outcome = [result, None if error is None else f"{type(error).__name__}: {error}"]
    if dist.is_initialized():
        dist.broadcast_object_list(outcome, src=0)
    if seconds is not None:
        seconds[part] += done - begin
        seconds["barrier"] += time.perf_counter() - done
    if error is not None:
        raise error
    if outcome[1] is not None:
        raise WeightSyncError(f"on rank 0: {outcome[1]}")
    return outcome[0]


def make_sender(
    fleet: Fleet, weights: Weights, *, output_dir=None, max_staleness: int = 0
) -> Sender:
    """The way that suits the servers and the model; every rank makes one, of the same kind.

    A LoRA adapter travels alone if all servers were started with --enable-lora, as files in
    `output_dir`; merged into the weights otherwise, which a warning says where it is a fallback.
    """
    first = is_first()

    def choose():
        infos = fleet.infos.values()
        if hasattr(weights.model, "peft_config") and all(info.max_loras for info in infos):
            if not (problem := adapter_problem(weights.model, fleet)):
                for server, info in fleet.infos.items():
                    adapter = weights.model.peft_config[weights.model.active_adapter]
                    check_slots(server.url, info, largest_rank(adapter), max_staleness)
                return "adapter"
            warnings.warn(f"adapters are merged for the server: {problem}", stacklevel=2)
        if not all(info.nccl for info in infos):
            return "file"
        extensions = {info.worker_extension for info in infos}
        return "nccl, direct" if extensions == {WORKER_EXTENSION} else "nccl"

    way = together(choose if first else lambda: None)
    if way == "adapter":
        options = {"dtype": weights.dtype, "max_staleness": max_staleness}
        return AdapterSender(fleet, weights.model, output_dir, first=first, **options)
    if way == "file":
        return FileSender(fleet, weights, first=first)
    return NcclSender(fleet, weights, first=first, direct=way == "nccl, direct")


def check_sync(
    fleet: Fleet,
    model_name: str,
    prompt_ids: Sequence[int],
    trainer_log_probs: Callable[[list[int]], Any],
    *,
    dtypes: Sequence[torch.dtype],
    n_sampled: int = 4,
    resend: Callable[[], Any] | None = None,
) -> float:
    """Largest difference between the servers' log-probs and the trainer's; too large a one raises.

    Collective. `trainer_log_probs(ids)` gives those of ids[1:], and runs on every rank. `dtypes`
    are those that server and trainer compute in. Each server scores the prompt and n_sampled
    tokens that it samples after it; sampling goes through the prefix cache, so with a prompt
    longer than one of its blocks (16 tokens on CUDA, 128 on CPU) a cache left from older weights
    shows too. A sampled token is a step of a server with hundreds of rollouts under way: training
    waits some 40 ms for each. If no server answers they are asked once more, after `resend()`, a
    sync: a server that died since the last one comes back with the weights it was started with.
    """

    def ask(server):
        sampled_ids, sampled = server.sample(model_name, prompt_ids, n_sampled)
        ids = [*prompt_ids, *sampled_ids]
        return server.url, ids, server.score(model_name, ids) + sampled

    def ask_all():
        return list(fleet.each(ask).values()) if is_first() else None

    try:
        answers = together(ask_all)
    except (ServerError, WeightSyncError) as error:
        if resend is None:
            raise
        warnings.warn(f"the proof of a weight sync is tried again: {error}", stacklevel=2)
        resend()
        answers = together(ask_all)
    return max(
        _difference(url, ids, theirs, trainer_log_probs(ids), n_sampled, dtypes)
        for url, ids, theirs in answers
    )


def _difference(url, ids, theirs, ours, n_sampled, dtypes):
    ours = torch.as_tensor(ours).detach().float().cpu()
    ours, theirs = torch.cat([ours, ours[-n_sampled:]]), torch.tensor(theirs)
    gaps = (theirs - ours).abs()
    worst, mean = int(gaps.argmax()), float(gaps.mean())
    max_bound, mean_bound = sync_bounds(dtypes)
    if not (gaps[worst] <= max_bound and mean <= mean_bound):  # also for NaN
        token = (ids[1:] + ids[-n_sampled:])[worst]
        raise WeightSyncError(
            f"{url} does not hold the trainer's weights: log-prob of token {token} is "
            f"{theirs[worst]:.4f} there and {ours[worst]:.4f} here; over {len(gaps)} tokens the "
            f"difference is at most {gaps[worst]:.2g} (allowed {max_bound:.2g}) and on average "
            f"{mean:.2g} (allowed {mean_bound:.2g})"
        )
    return float(gaps[worst])


def sync_bounds(dtypes: Sequence[torch.dtype]) -> tuple[float, float]:
    """Largest and mean difference of log-probs that the coarser dtype's rounding explains.

    Rounding a logit of 16 to 32 errs by up to 8 eps; server and trainer both do it: 16 eps for
    the mean. Improbable tokens err ten times as much, and a few hundred are compared: 256 eps for
    the largest. 1e-4 is for sums in another order, whatever the dtype. Measured with bf16: mean
    2e-2 to 4e-2 (bound 0.125), largest 4e-2 to 0.42 (bound 2.0); with fp32: largest 6e-6.
    """
    eps = max(torch.finfo(dtype).eps for dtype in dtypes)
    return 256 * eps + 1e-4, 16 * eps + 1e-4
