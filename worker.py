"""The rollout process: how it starts, lives beside the trainer, and ends.

    RolloutWorker     the trainer's handle: start, samples and metrics out, limits and versions in
    _worker_main      what the spawned process runs: a rollout.RolloutLoop on an asyncio event loop

Samples, metrics and a failure's traceback come through one pipe, so their order holds and its end
tells at once that the process is gone. What the trainer says is a few numbers in shared memory
(rollout.Slot) without a lock that a killed process could hold.

Test: pytest tests/test_rollout.py
"""

import asyncio
import atexit
import contextlib
import ctypes
import multiprocessing
import os
import pickle
import signal
import sys
import threading
import time
import traceback
import types
from collections import deque
from concurrent.futures import ThreadPoolExecutor

import chat
from rollout import RolloutLoop, Slot
from tasks import Task, check_task, import_task_file

START_S = 120.0  # the worker's first heartbeat: importing transformers takes 10 s on a busy core

# ------------------------------------------------------------------------- in the worker process


def _die_with(parent_pid: int) -> None:
    """End this process when the trainer is gone, even if it was killed and our loop is blocked."""
    if sys.platform == "linux":
        pr_set_pdeathsig = 1
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)

    def watch():
        while os.getppid() == parent_pid:
            time.sleep(0.5)
        os._exit(1)

    threading.Thread(target=watch, daemon=True, name="parent watch").start()


def _worker_main(pipe, told, shared, parent_pid) -> None:
    """The worker process. Ends by os._exit: a reward that never returns must not keep it alive."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches us too; the trainer stops us
    _die_with(parent_pid)
    sender, code = ThreadPoolExecutor(1, "sender"), 0  # one thread, so messages stay whole

    def send(message):
        return sender.submit(pipe.send_bytes, pickle.dumps(message, protocol=5))

    try:
        # Not above, where _die_with() could not act yet; first, because it takes seconds.
        from transformers import AutoTokenizer  # noqa: F401

        from model import load_tokenizer

        arguments = pickle.loads(told.recv_bytes())
        config, model_path = arguments.pop("config"), arguments.pop("model_path")
        if task_path := arguments.pop("task_path"):
            import_task_file(task_path)
        task = pickle.loads(arguments.pop("pickled_task"))
        options = vars(task.options) if task.options is not None else {}
        loop_class = task.rollout_loop or RolloutLoop
        if arguments.pop("evaluates"):
            from evaluate import loop_for  # it imports this file

            loop_class = loop_for(loop_class)
        config = types.SimpleNamespace(**config, **options)
        tokenizer = load_tokenizer(config, model_path)
        loop = loop_class(config, task, tokenizer, shared=shared, send=send, **arguments)
        asyncio.run(loop.run())
    except BaseException as error:
        code = 1
        while isinstance(error, BaseExceptionGroup):  # of the TaskGroup
            error = error.exceptions[0]
        with contextlib.suppress(Exception):  # the trainer is gone: there is nobody to tell
            send(("failed", "".join(traceback.format_exception(error)))).result(timeout=10)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


# --------------------------------------------------------------------------- in the trainer process

# Set by torchrun. A library in the worker that saw them would take itself for a trainer rank.
_LAUNCHER_VARIABLES = """RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE GROUP_RANK GROUP_WORLD_SIZE
    ROLE_RANK ROLE_WORLD_SIZE ROLE_NAME MASTER_ADDR MASTER_PORT TORCH_NCCL_ASYNC_ERROR_HANDLING"""


@contextlib.contextmanager
def _worker_environment():
    """os.environ as the worker shall inherit it: no GPU, no torch.distributed."""
    saved = dict(os.environ)
    for name in saved:
        if name in _LAUNCHER_VARIABLES.split() or name.startswith("TORCHELASTIC_"):
            del os.environ[name]
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(saved)


class WorkerProcess:
    """A process that imports what a worker needs, and then waits to be told what for. Linux ends it
    with the calling thread, so make it in the main one."""

    def __init__(self):
        spawn = multiprocessing.get_context("spawn")
        self.shared = spawn.RawArray(ctypes.c_int64, len(Slot))
        self.pipe, workers_end = spawn.Pipe(duplex=False)
        workers_told, self._tell = spawn.Pipe(duplex=False)
        self.process = spawn.Process(
            target=_worker_main,
            name="rollout worker",
            args=(workers_end, workers_told, self.shared, os.getpid()),
        )
        with _worker_environment():
            self.process.start()
        workers_end.close()  # the pipe must end when the worker does
        workers_told.close()
        atexit.register(self.process.kill)  # before multiprocessing waits for it, for ever

    def tell(self, arguments: dict) -> None:
        atexit.unregister(self.process.kill)
        with contextlib.suppress(BrokenPipeError):  # it died: whoever reads its pipe will say so
            self._tell.send_bytes(pickle.dumps(arguments))
        self._tell.close()


class RolloutWorker:
    """The trainer's handle of the worker process. Every method may be called from any thread."""

    def __init__(
        self,
        config: dict,  # every option by name
        task: Task,
        *,
        model_path: str,  # of the tokenizer
        model_name: str,  # as the server serves it
        eos_token_ids,  # all that end a turn
        start_index: int = 0,  # first prompt in the run's order that is not used up
        used: frozenset[int] = frozenset(),  # those above it that are
        evaluates: bool = False,  # evaluates when asked, instead of making samples (evaluate.py)
        adapter_name: str | None = None,  # what is sampled, with {version} in it, if not the model
        process: WorkerProcess | None = None,  # one that was started before all this was known
    ):
        check_task(task, config)
        self._timeout_s = config["rollout_worker_timeout"]
        self._arguments = {
            "pickled_task": pickle.dumps(task),
            "task_path": task.path,
            "config": dict(config),
            "model_path": str(model_path),
            "model_name": model_name,
            "eos_token_ids": [int(i) for i in eos_token_ids],
            "start_index": start_index,
            "used": frozenset(used),
            "evaluates": evaluates,
            "adapter_name": adapter_name,
        }
        self._handle = process or WorkerProcess()
        self._shared, self._pipe = self._handle.shared, self._handle.pipe
        self._ready = threading.Condition()  # guards all below
        self._samples, self._records, self._dropped, self._stories = deque(), [], [], []
        self._failure: str | None = None
        self._done = False  # the worker said that there are no more prompts
        self._closed = False  # the pipe has ended
        self._stopping = False
        self._beat = 0  # the newest heartbeat seen by the reader thread
        self._silent_s = 0.0  # since it came, without times in which we were suspended as well
        self._process = None

    def start(self) -> None:
        """Tell the worker what to do, and listen to it."""
        self._process = self._handle.process
        self._handle.tell(self._arguments)
        atexit.register(self.stop)  # before multiprocessing's, which would wait for ever
        self._reader = threading.Thread(target=self._read, daemon=True, name="rollout reader")
        self._reader.start()

    def get(self, timeout: float = 1.0) -> chat.Sample | None:
        """The next sample; None if there is none within `timeout` s. Raises what check() raises."""
        with self._ready:
            if not self._samples:
                self._shared[Slot.HUNGRY] = 1
                self._ready.wait_for(lambda: self._samples or self._closed, timeout)
            if self._samples:
                return self._samples.popleft()
        self.check()
        return None

    @property
    def queue_size(self) -> int:
        return len(self._samples)

    @property
    def n_dropped(self) -> int:
        """Groups that ended without a sample since the last drain_ended()."""
        return len(self._dropped)

    @property
    def finished(self) -> bool:
        """There are no more prompts and every sample has been taken."""
        with self._ready:
            return self._done and not self._samples

    def oldest_version(self) -> int:
        """The oldest version that a request samples from; the newest if none is in flight."""
        return self._shared[Slot.OLDEST]

    def set_version(self, version: int) -> None:
        """The server has acknowledged these weights."""
        self._shared[Slot.VERSION] = version

    def set_allowance(self, tokens: int) -> None:
        """Tokens that may be queued and in progress: max(max_staleness, 1) last steps' worth."""
        self._shared[Slot.ALLOWANCE] = int(tokens)

    def start_evaluation(self) -> None:
        """Of the version that was set last (a worker with `evaluates` only)."""
        self._shared[Slot.EVALUATIONS] += 1

    def release(self, tokens: int) -> None:
        """Tokens (Sample.own_tokens) of samples that left the queue, for training or dropped."""
        with self._ready:
            self._shared[Slot.RELEASED] += tokens

    def drain_records(self) -> list[tuple[str, float, float]]:
        """(name, value, weight) of all metrics since the last call."""
        with self._ready:
            records, self._records = self._records, []
        return records

    def drain_ended(self) -> tuple[list[int], list[dict]]:
        """Since the last call: the ids of groups that ended without a sample, which will never
        train, and with --dump_rollouts the dump.stories of all groups that were scored."""
        with self._ready:
            dropped, self._dropped = self._dropped, []
            stories, self._stories = self._stories, []
        return dropped, stories

    def check(self) -> None:
        """Raise RuntimeError if the worker failed, died or hangs."""
        if self._failure is not None:
            raise RuntimeError(self._failure)
        limit_s = self._timeout_s if self._beat else max(self._timeout_s, START_S)
        if self._process is not None and not self._closed and self._silent_s > limit_s:
            raise RuntimeError(
                f"no heartbeat from the rollout worker for {self._silent_s:.0f} s "
                f"(rollout_worker_timeout {self._timeout_s:g}): it is stopped, or a hook of the "
                "rollout loop blocks its event loop; move blocking calls into threads"
            )

    def stop(self, timeout: float = 15.0) -> None:
        """End the worker: by the stop flag, after `timeout` s by force. May be called again."""
        with self._ready:
            if self._process is None or self._stopping:
                return
            self._stopping = True
        self._shared[Slot.STOP] = 1
        self._process.join(timeout)  # the reader goes on meanwhile, so the worker can always send
        if self._process.is_alive():
            self._process.kill()
            self._process.join()
        self._reader.join(5)  # longer only if a process that a reward left behind holds the pipe
        self._pipe.close()
        atexit.unregister(self.stop)

    def _read(self) -> None:
        """The reader thread, until the pipe ends."""
        failure, looked = None, time.monotonic()
        try:
            while True:
                if self._pipe.poll(0.5):
                    self._take(pickle.loads(self._pipe.recv_bytes()))
                elif not self._process.is_alive():  # and something it forked holds the pipe open
                    break
                now, beat = time.monotonic(), self._shared[Slot.BEAT]
                # More than 2 s: this process or machine was suspended, which is not its fault.
                is_new = beat != self._beat
                self._silent_s = 0.0 if is_new else self._silent_s + min(now - looked, 2.0)
                looked, self._beat = now, beat
        except (EOFError, OSError):
            pass
        except Exception:
            failure = "what the rollout worker sent cannot be read:\n" + traceback.format_exc()
        self._process.join(5)
        code = self._process.exitcode
        if failure is None and not (self._done or self._stopping or self._failure):
            died = f"exit code {code}"
            if code is not None and code < 0:
                died += f", {signal.Signals(-code).name}"
            failure = (
                f"the rollout worker died ({died}) without a word; if the machine ran out of "
                "memory, lower max_concurrent_rollouts or num_sampler_logprobs"
            )
        with self._ready:
            self._failure = self._failure or failure
            self._closed = True
            self._ready.notify_all()

    def _take(self, message) -> None:
        kind, *content = message
        with self._ready:
            if kind == "data":
                samples, records, dropped, stories = content
                self._samples.extend(samples)
                self._records.extend(records)
                self._dropped.extend(dropped)
                self._stories.extend(stories)
                if samples:
                    self._shared[Slot.HUNGRY] = 0
            elif kind == "failed":
                self._failure = f"the rollout worker failed:\n{content[0]}"
            else:
                self._done = True
            self._ready.notify_all()
