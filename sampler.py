"""The worker's client of a vLLM server: token ids in, one sampled turn out.

The sampler's head: score centering needs the sampler's K most likely tokens at each position,
whatever was sampled. The server adds the sampled token to its answer, so up to K + 1 entries come
back; keeping all of them would make the head depend on the draw. See `parse_generate` and
`parse_completions`, one for each endpoint's way of saying it.

Test: pytest tests/test_sampler.py tests/test_rollout.py
"""

import asyncio
import functools
import itertools
import math
import random
import struct
import time
import warnings

import msgspec
import numpy as np

import http1
from chat import TurnRecord, sets_as_arrays
from http1 import error_message

# ------------------------------------------------------------------------ answers to TurnRecords
# Typed structs: msgspec reads only the named fields, without a dict a token. On one core and with
# top-8 this path takes about 4 us a token, json.loads alone 11. gc=False: these never form cycles,
# and tracking nine objects a token costs a third.


class _Candidate(msgspec.Struct, gc=False):
    token_id: int
    logprob: float | None = math.nan


class _GeneratedToken(msgspec.Struct, gc=False):
    logprob: float | None = None
    rank: int | None = None
    top_logprobs: list[_Candidate] = []


class _GeneratedLogProbs(msgspec.Struct, gc=False):
    content: list[_GeneratedToken]


class _VersionSpan(msgspec.Struct, gc=False):
    version: str | int
    start: int
    end: int


class _GenerateChoice(msgspec.Struct, gc=False):
    token_ids: list[int]
    logprobs: _GeneratedLogProbs
    finish_reason: str | None = None
    weight_versions: list[_VersionSpan] | None = None
    sampling_mask: list[list[int]] | None = None


class _GenerateAnswer(msgspec.Struct, gc=False):
    choices: list[_GenerateChoice]


class _CompletionLogProbs(msgspec.Struct, gc=False):
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float | None] | None] | None = None


class _CompletionChoice(msgspec.Struct, gc=False):
    token_ids: list[int]
    logprobs: _CompletionLogProbs
    finish_reason: str | None = None


class _CompletionAnswer(msgspec.Struct, gc=False):
    choices: list[_CompletionChoice]


_decode_generate = msgspec.json.Decoder(_GenerateAnswer).decode
_decode_completions = msgspec.json.Decoder(_CompletionAnswer).decode


class BadAnswer(Exception):
    """The server answered, but not with a finished reply. Asking again may help."""


class RequestRefused(ValueError):
    """The server will never answer this request (HTTP 4xx). Asking again cannot help."""


class ServerLost(RuntimeError):
    """No request has been answered for the whole of vllm_server_timeout."""


def _checked(choices, n_log_probs):
    if len(choices) != 1:
        raise BadAnswer(f"{len(choices)} choices instead of 1")
    choice = choices[0]
    if choice.finish_reason == "abort":
        raise BadAnswer("the server aborted the request")
    n = len(choice.token_ids)
    if n == 0 or n_log_probs(choice) != n:
        raise BadAnswer(f"{n} token ids with {n_log_probs(choice)} log-probs")
    return choice


def parse_generate(
    body: bytes, prompt_ids, *, k: int, version: int, labelled: bool = False
) -> TurnRecord:
    """TurnRecord of an answer of /inference/v1/generate. `labelled`: it must name its weights.

    Here `logprobs: k + 1` gives k + 1 entries in all: the sampled token, then the others by rank.
    The head is the k most likely of them, one a column.
    """
    choice = _checked(_decode_generate(body).choices, lambda c: len(c.logprobs.content))
    content, n = choice.logprobs.content, len(choice.token_ids)
    head = _ranked_head(content, k) if k else None
    sets = None
    if choice.sampling_mask is not None:
        if len(choice.sampling_mask) != n:
            raise BadAnswer(f"{n} token ids with {len(choice.sampling_mask)} candidate sets")
        sets = sets_as_arrays(choice.sampling_mask)
    versions_n = np.full(n, version, dtype=np.int32)
    for span in choice.weight_versions or ():
        # A server whose weights were never updated says "default": the version known at dispatch.
        if str(span.version).isdecimal():
            versions_n[span.start : span.end] = int(span.version)
        elif labelled:
            raise BadAnswer(f"the server was restarted and has not got version {version} yet")
    return TurnRecord(
        prompt_ids=prompt_ids,
        output_ids=choice.token_ids,
        output_log_probs=[token.logprob for token in content],
        output_sampling_mask=sets,
        output_sampler_logprobs=head,
        versions=versions_n,
    )


def _ranked_head(content: list[_GeneratedToken], k: int) -> tuple[np.ndarray, np.ndarray]:
    """(ids int32[n, k], log_probs float32[n, k]) of the k most likely tokens, NaN where missing."""
    entries = list(itertools.chain.from_iterable([token.top_logprobs for token in content]))
    entries.append(_Candidate(0))  # what a missing one is taken from
    ids = _packed("i", [entry.token_id for entry in entries])
    log_probs = _packed("f", [entry.logprob for entry in entries])
    sizes_n1 = _packed("i", [len(token.top_logprobs) for token in content])[:, None]
    # A sampled token whose log-prob is NaN has no rank; this leaves it out of the head.
    ranks_n = _packed("i", [token.rank or k + 1 for token in content])
    place_nK = _places(k)[np.minimum(ranks_n, k + 1) - 1]
    begins_n1 = np.cumsum(sizes_n1)[:, None] - sizes_n1
    where_nK = np.where(place_nK < sizes_n1, begins_n1 + place_nK, -1)
    return ids[where_nK], log_probs[where_nK]


@functools.cache
def _places(k: int) -> np.ndarray:
    """int64[k + 1, k]: in row r - 1, which of a token's entries belong into the k columns if the
    sampled token has rank r (the last row: a rank beyond k). The sampled token's entry comes first;
    what follows it in the order of ranks has moved back by one."""
    sampled, column = np.arange(k + 1)[:, None], np.arange(k)
    return np.where(column < sampled, column + 1, np.where(column > sampled, column, 0))


def _packed(kind: str, values: list) -> np.ndarray:
    """int32 ("i") or float32 ("f") of a list. Without a None three times as fast as np.array."""
    try:
        return np.frombuffer(struct.pack(f"{len(values)}{kind}", *values), dtype=kind)
    except struct.error:
        return np.array(values, dtype=kind)


def parse_completions(
    body: bytes, prompt_ids, *, k: int, version: int, labelled: bool = False
) -> TurnRecord:
    """TurnRecord of an answer of /v1/completions. It names no weight versions, labelled or not.

    Here `logprobs: k` gives the k most likely tokens, preceded by the sampled one if it is not
    among them: the head is the last k entries.
    """
    choice = _checked(_decode_completions(body).choices, lambda c: len(c.logprobs.token_logprobs))
    log_probs, n = choice.logprobs, len(choice.token_ids)
    head = None
    if k:
        tops = log_probs.top_logprobs or ()
        if len(tops) != n or None in tops:
            raise BadAnswer(f"{n} token ids, not all with top log-probs ({k} were asked for)")
        ids_nK = np.zeros((n, k), dtype=np.int32)
        log_probs_nK = np.full((n, k), np.nan, dtype=np.float32)
        for i, top in enumerate(tops):
            skip = max(len(top) - k, 0)
            ids = [int(name[9:]) for name in top]  # "token_id:216"
            ids_nK[i, : len(top) - skip] = ids[skip:]
            log_probs_nK[i, : len(top) - skip] = list(top.values())[skip:]
        head = ids_nK, log_probs_nK
    return TurnRecord(
        prompt_ids=prompt_ids,
        output_ids=choice.token_ids,
        output_log_probs=log_probs.token_logprobs,
        output_sampler_logprobs=head,
        versions=np.full(n, version, dtype=np.int32),
    )


# ----------------------------------------------------------------------------- the vLLM client

_FIRST_RETRY_S, _LONGEST_RETRY_S = 0.25, 10.0
_PROBE_ATTEMPTS = 6  # 8 s of errors from a server that listens: misconfigured, not starting
_RETRIED = (TimeoutError, OSError, msgspec.MsgspecError, BadAnswer)


def _remedy(message: str) -> str:
    if "logprobs" in message:
        return "lower num_sampler_logprobs, or start the server with a larger --max-logprobs"
    if "model length" in message or "max_model_len" in message:
        return (
            "lower max_completion_length, leave out long prompts, or start the server with a "
            "larger --max-model-len"
        )
    return "check the server's log"


class Sampler:
    """Samples turns from one vLLM server. Create it anywhere, `start()` it on the event loop.

    Every sampling parameter is sent with every request, so that the server's
    generation_config.json changes nothing. The only retries of the whole worker's requests are
    here: a request is sent again until it is answered or `timeout_s` is over.
    """

    def __init__(
        self,
        url: str,
        model: str,
        *,
        max_tokens: int,
        temperature: float = 1.0,
        top_p: float = 1.0,
        top_k: int = 0,
        min_p: float | None = None,
        num_logprobs: int = 0,  # K; 0 asks for the sampled token's log-prob only
        eos_token_ids=(),
        timeout_s: float = 1800.0,
        seed: int = 0,  # any integer; the requests' seeds count up from it
        adapter: str | None = None,  # name of the adapter that is sampled, with {version} in it
    ):
        self.url, self.model = url.rstrip("/"), model
        self.adapter = adapter
        self.labelled = False  # a trainer has given it weights; known after start()
        self.max_attempts: int | None = None  # of a request; None: until it is answered
        self.k, self.timeout_s, self.max_tokens = num_logprobs, timeout_s, max_tokens
        self.truncated = top_p < 1.0 or top_k > 0 or bool(min_p)
        self.parameters = {
            "n": 1,
            "max_tokens": max_tokens,
            "min_tokens": 0,
            "temperature": temperature,
            "top_p": top_p,
            "top_k": top_k,
            "min_p": min_p or 0.0,
            "repetition_penalty": 1.0,
            "presence_penalty": 0.0,
            "frequency_penalty": 0.0,
            "ignore_eos": False,
            "stop_token_ids": [int(i) for i in eos_token_ids],
        }
        self.max_model_len: int | None = None  # known after start()
        self.tokens_in_tokens_out = True  # has /inference/v1/generate; known after start()
        self.retry_count = 0
        self.generated_tokens = 0
        self.down_since: float | None = None  # first failed attempt since the last good answer
        self._next_seed = seed
        self._client = http1.Client(self.url)

    async def start(self) -> None:
        """Wait for the server (at most `timeout_s`), then sample one token to learn what it has."""
        models = await self._served_models()
        if self.model not in models:
            raise ValueError(
                f"the server at {self.url} serves {sorted(models)}, not {self.model!r}: restart "
                "it with the model that is trained, or pass its --served-model-name"
            )
        self.max_model_len = models[self.model]
        if not self.adapter:
            info = msgspec.json.decode(await self.read("/weight_info") or b"{}")
            self.labelled = str(info.get("weight_version", "")).isdecimal()
        probe = [self.parameters["stop_token_ids"][0] if self.parameters["stop_token_ids"] else 0]
        try:
            turn = await self._ask(probe, 0, max_tokens=1, max_attempts=_PROBE_ATTEMPTS)
        except _NoGenerateEndpoint as refusal:
            if self.truncated and refusal.status == 403:
                raise ValueError(
                    f"with top_k the server at {self.url} must return candidate sets, by an "
                    "endpoint that it keeps closed: restart it with --enable-scale-out"
                ) from refusal
            self.tokens_in_tokens_out = False
            turn = await self._ask(probe, 0, max_tokens=1, max_attempts=_PROBE_ATTEMPTS)
        self.retry_count = self.generated_tokens = 0
        if self.truncated and turn.output_sampling_mask is None:
            warnings.warn(
                "the server returns no candidate sets, so with top_k, top_p or min_p the "
                "importance ratio is biased: start it with --return-sampling-mask "
                "--enable-scale-out (vLLM 0.28 or later, on a GPU)",
                stacklevel=2,
            )

    async def close(self) -> None:
        await self._client.close()

    async def sample(self, prompt_ids, version: int = 0) -> TurnRecord:
        """One reply to `prompt_ids`. `version` labels its tokens if the server does not."""
        # With top_k or top_p the server is to end that turn at its max_model_len (the spec).
        if not self.truncated and self.max_model_len:
            # vLLM up to 0.31 refuses this; later ones cut the reply short, which the rewards and
            # the truncation metrics would take for the policy's doing.
            if len(prompt_ids) + self.max_tokens > self.max_model_len:
                message = (
                    f"a prompt of {len(prompt_ids)} tokens and max_completion_length "
                    f"{self.max_tokens} exceed the server's max_model_len {self.max_model_len}"
                )
                raise RequestRefused(f"{message}: {_remedy(message)}")
        return await self._ask(prompt_ids, version)

    async def read(self, path: str, timeout_s: float = 5.0) -> str | None:
        """Text of a GET, None if the server does not answer it with 200."""
        try:
            status, body = await self._client.request("GET", path, timeout_s=timeout_s)
        except (TimeoutError, OSError):
            return None
        return body.decode() if status == 200 else None

    async def _served_models(self) -> dict[str, int | None]:
        deadline = time.monotonic() + self.timeout_s
        for attempt in itertools.count(1):
            text = await self.read("/v1/models")
            if text is not None:
                models = msgspec.json.decode(text)["data"]
                return {model["id"]: model.get("max_model_len") for model in models}
            delay_s = _retry_delay(attempt)
            if time.monotonic() + delay_s > deadline:
                raise ServerLost(
                    f"no vLLM server answered at {self.url} within {self.timeout_s:g} s "
                    "(vllm_server_timeout): start it, or set vllm_server_base_url"
                )
            await asyncio.sleep(delay_s)

    def model_name(self, version: int) -> str:
        """What a request of that version asks for."""
        return self.adapter.format(version=version) if self.adapter else self.model

    def _body(self, prompt_ids, version, max_tokens: int | None) -> bytes:
        model = self.model_name(version) if max_tokens is None else self.model
        parameters = dict(self.parameters)
        if max_tokens is not None:
            parameters["max_tokens"] = max_tokens
        # Unique: data-parallel engines that share a seed would decode the same text.
        parameters["seed"] = self._next_seed % 2**31
        self._next_seed += 1
        prompt_ids = prompt_ids.tolist() if isinstance(prompt_ids, np.ndarray) else prompt_ids
        if self.tokens_in_tokens_out:
            # detokenize: nothing reads the text, and with top-8 it is most of the API server's work
            parameters |= {"logprobs": self.k + 1 if self.k else 0, "detokenize": False}
            body = {"model": model, "token_ids": prompt_ids, "sampling_params": parameters}
        else:
            body = {"model": model, "prompt": prompt_ids, "logprobs": self.k, **parameters}
            body |= {"return_token_ids": True, "return_tokens_as_token_ids": True}
        return msgspec.json.encode(body)

    async def _ask(self, prompt_ids, version, max_tokens=None, max_attempts=None) -> TurnRecord:
        body = self._body(prompt_ids, version, max_tokens)
        max_attempts = max_attempts or self.max_attempts
        start = time.monotonic()
        for attempt in itertools.count(1):
            try:
                turn = await self._attempt(body, prompt_ids, version, start + self.timeout_s)
            except _RETRIED as e:
                error = e
            else:
                self.down_since = None
                self.generated_tokens += len(turn.output_ids)
                return turn
            delay_s = _retry_delay(attempt)
            next_try = time.monotonic() + delay_s
            self.down_since = self.down_since or time.monotonic()
            silent_s = next_try - self.down_since
            if attempt == max_attempts or self.timeout_s <= max(next_try - start, silent_s):
                last = f"{attempt} attempts, last error: {type(error).__name__}: {error}"
                # Others got an answer meanwhile: it is this request that the server cannot answer.
                if attempt != max_attempts and silent_s < self.timeout_s / 2:
                    raise TimeoutError(
                        f"no good answer from {self.url} in {self.timeout_s:g} s; {last}"
                    ) from error
                raise ServerLost(
                    f"the vLLM server at {self.url} has answered no request for {silent_s:.0f} s "
                    f"(vllm_server_timeout {self.timeout_s:g}); {last}; see the server's log"
                ) from error
            self.retry_count += 1
            await asyncio.sleep(delay_s)

    async def _attempt(self, body, prompt_ids, version, deadline) -> TurnRecord:
        path = "/inference/v1/generate" if self.tokens_in_tokens_out else "/v1/completions"
        left_s = max(deadline - time.monotonic(), 0.001)
        status, answer = await self._client.request("POST", path, body, timeout_s=left_s)
        if status == 200:
            parse = parse_generate if self.tokens_in_tokens_out else parse_completions
            turn = parse(answer, prompt_ids, k=self.k, version=version, labelled=self.labelled)
            if self.adapter:  # the server's own account is of the base model
                turn.versions[:] = version
            return turn
        message = error_message(answer)
        if self.adapter and status == 404:  # a server that was restarted; the next sync loads it
            raise BadAnswer(f"HTTP {status}: {message}")
        # Without --enable-scale-out the endpoint answers 403; an older vLLM has no such path.
        if self.tokens_in_tokens_out and status in (403, 404, 405):
            raise _NoGenerateEndpoint(f"HTTP {status} from {path}: {message}", status)
        if 400 <= status < 500 and status not in (408, 429):
            raise RequestRefused(
                f"the vLLM server refused a request (HTTP {status}): {message}; {_remedy(message)}"
            )
        raise BadAnswer(f"HTTP {status}: {message}")


class _NoGenerateEndpoint(RequestRefused):
    """403, 404 or 405 from /inference/v1/generate: at the start a fact, later a refusal."""

    def __init__(self, message: str, status: int):
        super().__init__(message)
        self.status = status


def _retry_delay(attempt):
    """0.25, 0.5, 1, ... 10, 10, ... seconds, each with jitter: retries must not arrive together."""
    delay_s = min(_FIRST_RETRY_S * 2 ** min(attempt - 1, 10), _LONGEST_RETRY_S)
    return delay_s * random.uniform(0.75, 1.25)
