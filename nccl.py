"""NCCL groups that other processes join, for the bytes of a sync: the trainer's end.

A server's workers cannot join a group of torch.distributed. vLLM has a class for such groups, but
importing it takes the trainer 4 seconds of its start; the five functions of NCCL that a broadcast
needs are called here by ctypes, in the library that torch has loaded.

Source: nccl.h of NCCL 2.29; what the workers do after joining, PyNcclCommunicator of vLLM 0.32.
Test: pytest tests/test_sync.py; on two GPUs pytest -m gpu tests/test_sync.py
"""

import ctypes
import functools
import threading

import torch

UNIQUE_ID_BYTES = 128
# ncclDataType_t and ncclRedOp_t
UINT8, FLOAT32 = 1, 7
SUM = 0


class NcclError(RuntimeError):
    """A call of NCCL failed."""


class UniqueId(ctypes.Structure):
    """ncclUniqueId, which is passed by value."""

    _fields_ = [("internal", ctypes.c_char * UNIQUE_ID_BYTES)]


@functools.cache
def library() -> ctypes.CDLL:
    """libnccl with the types of what is called here."""
    nccl = ctypes.CDLL("libnccl.so.2")
    pointer, size, number = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
    nccl.ncclGetErrorString.restype = ctypes.c_char_p
    for name, types in {
        "ncclGetUniqueId": [ctypes.POINTER(UniqueId)],
        "ncclCommInitRank": [ctypes.POINTER(pointer), number, UniqueId, number],
        "ncclAllReduce": [pointer, pointer, size, number, number, pointer, pointer],
        "ncclBroadcast": [pointer, pointer, size, number, number, pointer, pointer],
        "ncclCommAbort": [pointer],
    }.items():
        getattr(nccl, name).argtypes = types
    return nccl


def call(name: str, *arguments) -> None:
    """One function of NCCL; NcclError with its name and reason if it fails."""
    if code := getattr(library(), name)(*arguments):
        reason = library().ncclGetErrorString(code).decode()
        raise NcclError(f"{name}: {reason}; NCCL_DEBUG=INFO prints more")


def unique_id() -> bytes:
    """A new group's name, 128 bytes: whoever has it can join. This process is where they meet."""
    group = UniqueId()
    call("ncclGetUniqueId", ctypes.byref(group))
    return bytes(group)


class Communicator:
    """This process's end of a group of `size` ranks on as many GPUs.

    Made in all ranks at the same time: NCCL waits for the others without a limit.
    """

    def __init__(self, group: bytes, rank: int, size: int, device: int):
        self.device, self.comm = torch.device("cuda", device), ctypes.c_void_p()
        self.disabled, self.lock = False, threading.Lock()
        with torch.cuda.device(self.device):
            identity = UniqueId.from_buffer_copy(group)
            call("ncclCommInitRank", ctypes.byref(self.comm), size, identity, rank)
            # The first thing that vLLM's workers do in a group is to add up one number.
            one, stream = torch.zeros(1, device=self.device), torch.cuda.current_stream()
            place = one.data_ptr()
            call("ncclAllReduce", place, place, 1, FLOAT32, SUM, self.comm, stream.cuda_stream)
            stream.synchronize()

    def broadcast(self, buffer: torch.Tensor, src: int, stream: torch.cuda.Stream) -> None:
        """Queue on `stream` that `buffer`, uint8 and contiguous, becomes rank `src`'s. Nothing
        happens in a group that was aborted."""
        if not self.disabled:
            place, n_bytes = buffer.data_ptr(), buffer.numel()
            call("ncclBroadcast", place, place, n_bytes, UINT8, src, self.comm, stream.cuda_stream)

    def abort(self) -> None:
        """Free the group here, and with it a thread or a stream that waits in it. From any thread;
        again does nothing."""
        with self.lock:
            if self.disabled:
                return
            self.disabled = True  # first: no thread may enter what is being freed
            with torch.cuda.device(self.device):
                call("ncclCommAbort", self.comm)
