"""One conversation: messages to token ids, one sampled turn from vLLM, turns to training samples.

Token ids go in and token ids come out. What is trained is what was sampled: generated text is
decoded for rewards, and never encoded again for training.

    messages -- render() --> prompt ids -- Sampler.sample() --> TurnRecord, TurnRecord, ...
    TurnRecords -- samples_from_turns() --> Samples, the only thing that reaches the trainer

The sampler's head: score centering needs the sampler's K most likely tokens at each position,
whatever was sampled. The server adds the sampled token to its answer, so up to K + 1 entries come
back; keeping all of them would make the head depend on the draw. See `parse_generate` and
`parse_completions`, one for each endpoint's way of saying it.

Left out: tool calls, images.
Test: pytest tests/test_chat.py
"""

import asyncio
import itertools
import random
import time
import uuid
import warnings
from dataclasses import dataclass, field

import aiohttp
import msgspec
import numpy as np

# Shapes: T tokens of a sample, n generated (or trained) tokens in order, K candidates in the
# sampler's head, m ids in all candidate sets together.


@dataclass(eq=False)
class Sample:
    """One sequence to train on. Flat arrays only: lists of Python floats cost seconds a step."""

    input_ids: np.ndarray  # int32[T]
    trained: np.ndarray  # bool[T]; [0] is False, since nothing predicts the first token
    sampler_log_probs: np.ndarray  # float32[T], valid where trained; NaN or <= -9998 is missing
    top_ids: np.ndarray  # int32[n, K], the sampler's head at each trained token
    top_log_probs: np.ndarray  # float32[n, K]; NaN or <= -9998: no such candidate
    set_ids: np.ndarray | None  # int32[m], candidate sets of truncated sampling, one after another
    set_offsets: np.ndarray | None  # int32[n + 1], where the set of each trained token begins
    versions: np.ndarray  # int32[T], weight version that generated the token; -1 where not trained
    advantage: float = 0.0
    group_id: int = -1
    row_index: int = -1
    rollout_index: int = -1  # in its group
    metrics: dict[str, float] = field(default_factory=dict)  # to be recorded when trained on
    created_at: float = 0.0  # time.time() when it was queued

    def own_tokens(self, group_size: int) -> int:
        """Tokens that it adds to a row which holds its group: its own, and its part of the prompt.
        The unit of the staleness limit, on both sides of the queue."""
        n_prompt = int(self.trained.argmax())
        return len(self.input_ids) - n_prompt + -(-n_prompt // group_size)


@dataclass(eq=False)
class TurnRecord:
    """One sampling request: the prompt sent to the sampler and the tokens it generated.

    `output_sampler_logprobs` and `output_sampling_mask` may be Python objects, as a custom rollout
    loop writes them, or the arrays that `Sampler` makes (a tuple), which are much cheaper.
    """

    prompt_ids: list[int]  # the whole prompt of this turn, earlier turns included
    output_ids: list[int]
    output_log_probs: list[float] = field(default_factory=list)
    output_mask: list[int] | None = None  # 1: train on the token, 0: context only; None: all 1
    # The ids that each token was drawn from, or (ids[m], offsets[n + 1]); None: the vocabulary.
    output_sampling_mask: list[list[int]] | tuple[np.ndarray, np.ndarray] | None = None
    # The sampler's most likely tokens: {id: log-prob} a token, or (ids[n, K], log_probs[n, K]).
    output_sampler_logprobs: list[dict[int, float]] | tuple[np.ndarray, np.ndarray] | None = None
    versions: np.ndarray | None = None  # int32[n]; None: the version known at dispatch


@dataclass(eq=False)
class Rollout:
    """One finished conversation, as `RolloutLoop.generate_one` returns it."""

    completion: list[dict]  # messages after the prompt, given to the reward functions
    completion_ids: list[int]  # given to the reward functions
    turns: list[TurnRecord]
    tool_call_count: int = 0
    tool_failure_count: int = 0
    reward: float | None = None  # added to what the reward functions give
    rollout_id: str = field(default_factory=lambda: uuid.uuid4().hex)


# ---------------------------------------------------------------------------- messages to ids


def check_prompt(prompt, where: str) -> None:
    """Raise unless `prompt` is a list of text messages; `where` names it in the message."""
    shown = "[{'role': 'user', 'content': 'What is 3+4?'}]"
    if not isinstance(prompt, (list, tuple)) or not prompt:
        got = repr(prompt)[:60] if isinstance(prompt, (str, list, tuple)) else type(prompt).__name__
        raise ValueError(f"{where} is not conversational (got {got}): write it as {shown}")
    for message in prompt:
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise ValueError(
                f"{where} holds {repr(message)[:60]}, which is not a message: write it as {shown}"
            )
        content = message.get("content")
        parts = content if isinstance(content, (list, tuple)) else []
        for part in parts:
            kind = part.get("type") if isinstance(part, dict) else type(part).__name__
            if kind != "text":
                raise ValueError(
                    f"{where} holds content of type {kind!r}: only text can be trained on, "
                    "images are not supported; remove those parts or rows"
                )
        if not isinstance(content, str) and not parts and "tool_calls" not in message:
            raise ValueError(f"{where} has a message without text ({message!r}): add its content")


def check_row(row, where: str) -> None:
    """ValueError for a row of a data set that rollouts cannot start from."""
    if not isinstance(row, dict) or "prompt" not in row:
        names = sorted(row) if isinstance(row, dict) else type(row).__name__
        raise ValueError(f"{where} has no column 'prompt' (it has {names}): rename or add it")
    taken = {"prompts", "completions", "completion_ids"} & row.keys()
    if taken:
        raise ValueError(f"{where} has a column {taken.pop()!r}, which rewards get too: rename it")
    check_prompt(row["prompt"], f"{where}: the prompt")


def render(tokenizer, messages, tools=None, chat_template_kwargs=None) -> np.ndarray:
    """Token ids (int32) of a conversation, up to where the assistant's next reply begins.

    A conversation that ends with an assistant message is continued inside that message.
    """
    if not getattr(tokenizer, "chat_template", None):
        raise ValueError(
            "the tokenizer has no chat template: use an instruct model, or put a "
            "chat_template.jinja into the model folder"
        )
    prefilled = messages[-1]["role"] == "assistant"
    ids = tokenizer.apply_chat_template(
        list(messages),
        tools=list(tools) if tools else None,
        add_generation_prompt=not prefilled,
        continue_final_message=prefilled,
        tokenize=True,
        return_dict=False,
        **(chat_template_kwargs or {}),
    )
    return np.asarray(ids, dtype=np.int32)


# ------------------------------------------------------------------------ answers to TurnRecords
# Typed structs: msgspec reads only the named fields, without a dict a token. On one core and with
# top-8 this path parses several hundred thousand tokens a second; json.loads alone takes 11 us a
# token. gc=False: these never form cycles, and tracking nine objects a token costs a third.


class _Candidate(msgspec.Struct, gc=False):
    token_id: int
    logprob: float | None = None
    rank: int | None = None


class _GeneratedToken(msgspec.Struct, gc=False):
    logprob: float | None = None
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

    Here `logprobs: k + 1` gives k + 1 entries in all, the sampled token first and every entry with
    its rank: the head is the entries of rank <= k, put into column rank - 1.
    """
    choice = _checked(_decode_generate(body).choices, lambda c: len(c.logprobs.content))
    content, n = choice.logprobs.content, len(choice.token_ids)
    head = None
    if k:
        entries = [entry for token in content for entry in token.top_logprobs]
        token = np.repeat(np.arange(n), [len(token.top_logprobs) for token in content])
        # A sampled token whose log-prob is NaN has no rank; -1 drops it from the head.
        column = np.array([entry.rank or 0 for entry in entries], dtype=np.int64) - 1
        ids_nK = np.zeros((n, k), dtype=np.int32)
        log_probs_nK = np.full((n, k), np.nan, dtype=np.float32)
        keep = (column >= 0) & (column < k)
        where = token[keep], column[keep]
        ids_nK[where] = np.array([entry.token_id for entry in entries], dtype=np.int32)[keep]
        log_probs_nK[where] = np.array([entry.logprob for entry in entries], np.float32)[keep]
        head = ids_nK, log_probs_nK
    sets = None
    if choice.sampling_mask is not None:
        if len(choice.sampling_mask) != n:
            raise BadAnswer(f"{n} token ids with {len(choice.sampling_mask)} candidate sets")
        sets = _sets_as_arrays(choice.sampling_mask)
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
# uvicorn closes an idle connection after 5 s; reusing one that it is just closing costs a retry.
_KEEP_ALIVE_S = 3.0
_RETRIED = (aiohttp.ClientError, TimeoutError, OSError, msgspec.MsgspecError, BadAnswer)


def _server_message(body: bytes) -> str:
    """What the server says in an error: vLLM's or FastAPI's JSON, or the beginning of the text."""
    try:
        answer = msgspec.json.decode(body)
        return str(answer["error"]["message"] if "error" in answer else answer["detail"])
    except (msgspec.DecodeError, KeyError, TypeError):
        return body[:300].decode(errors="replace") or "no message"


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
        if self.truncated and top_k <= 0:
            raise ValueError(
                f"{top_p=} and {min_p=} need top_k > 0: it bounds the candidate set that the "
                "server returns; set for example top_k=512"
            )
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
        self._session: aiohttp.ClientSession | None = None

    async def start(self) -> None:
        """Wait for the server (at most `timeout_s`), then sample one token to learn what it has."""
        # limit=0: how many rollouts run is decided elsewhere, and /metrics must not wait for them
        connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEEP_ALIVE_S)
        headers = {"Content-Type": "application/json"}
        self._session = aiohttp.ClientSession(connector=connector, headers=headers)
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
        except _NoGenerateEndpoint:
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
        if self._session is not None:
            await self._session.close()

    async def sample(self, prompt_ids, version: int = 0) -> TurnRecord:
        """One reply to `prompt_ids`. `version` labels its tokens if the server does not."""
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
        limit = aiohttp.ClientTimeout(total=timeout_s)
        try:
            async with self._session.get(self.url + path, timeout=limit) as response:
                return await response.text() if response.status == 200 else None
        except (aiohttp.ClientError, TimeoutError, OSError):
            return None

    async def _served_models(self) -> dict[str, int | None]:
        deadline = time.monotonic() + self.timeout_s
        for delay_s in _retry_delays():
            text = await self.read("/v1/models")
            if text is not None:
                models = msgspec.json.decode(text)["data"]
                return {model["id"]: model.get("max_model_len") for model in models}
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
        for attempt, delay_s in enumerate(_retry_delays(), start=1):
            try:
                turn = await self._attempt(body, prompt_ids, version, start + self.timeout_s)
            except _RETRIED as e:
                error = e
            else:
                self.down_since = None
                self.generated_tokens += len(turn.output_ids)
                return turn
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
        limit = aiohttp.ClientTimeout(total=max(deadline - time.monotonic(), 0.001))
        async with self._session.post(self.url + path, data=body, timeout=limit) as response:
            status, answer = response.status, await response.read()
        if status == 200:
            parse = parse_generate if self.tokens_in_tokens_out else parse_completions
            turn = parse(answer, prompt_ids, k=self.k, version=version, labelled=self.labelled)
            if self.adapter:  # the server's own account is of the base model
                turn.versions[:] = version
            return turn
        message = _server_message(answer)
        if self.adapter and status == 404:  # a server that was restarted; the next sync loads it
            raise BadAnswer(f"HTTP {status}: {message}")
        # Without --enable-scale-out the endpoint answers 403; an older vLLM has no such path.
        if self.tokens_in_tokens_out and status in (403, 404, 405):
            raise _NoGenerateEndpoint(f"HTTP {status} from {path}: {message}")
        if 400 <= status < 500 and status not in (408, 429):
            raise RequestRefused(
                f"the vLLM server refused a request (HTTP {status}): {message}; {_remedy(message)}"
            )
        raise BadAnswer(f"HTTP {status}: {message}")


class _NoGenerateEndpoint(RequestRefused):
    """403, 404 or 405 from /inference/v1/generate: at the start a fact, later a refusal."""


def _retry_delays():
    """0.25, 0.5, 1, ... 10, 10, ... seconds, each with jitter: retries must not arrive together."""
    for i in itertools.count():
        delay_s = min(_FIRST_RETRY_S * 2 ** min(i, 10), _LONGEST_RETRY_S)
        yield delay_s * random.uniform(0.75, 1.25)


# --------------------------------------------------------------------------- turns to samples


def common_prefix(a: np.ndarray, b: np.ndarray) -> int:
    """Number of leading elements in which `a` and `b` agree."""
    n = min(len(a), len(b))
    differs = a[:n] != b[:n]
    return int(differs.argmax()) if differs.any() else n


def samples_from_turns(turns: list[TurnRecord], *, version: int = 0):
    """Training samples of one rollout, and how far each turn drifted from the one before.

    A turn whose prompt starts with the tokens held so far (the previous prompt and reply) is
    appended to the same sample; any other turn starts a new one, in which earlier replies are
    context. So every generated token is trained in exactly one sample.

    Returns (samples, drifts): one drift a turn transition, the number of held tokens that the next
    prompt rendered differently, 0 where it did not fork. Samples without a trained token are left
    out. `version` labels turns that carry no versions of their own.
    """
    runs, drifts, held = [], [], None
    for turn in turns:
        if len(turn.prompt_ids) == 0:
            raise ValueError("a TurnRecord has empty prompt_ids: its first token has no predictor")
        prompt = np.asarray(turn.prompt_ids, dtype=np.int32)
        shared = 0 if held is None else common_prefix(held, prompt)
        if held is not None:
            drifts.append(len(held) - shared)
        if held is None or shared < len(held):
            runs.append([])
            shared = 0
        runs[-1].append((prompt[shared:], turn))
        held = np.concatenate([prompt, np.asarray(turn.output_ids, dtype=np.int32)])
    samples = [_join(run, version) for run in runs]
    return [sample for sample in samples if sample.trained.any()], drifts


def _join(run: list[tuple[np.ndarray, TurnRecord]], version: int) -> Sample:
    """One sample of turns that extend each other; each comes with the prompt tokens it adds."""
    ids, trained, log_probs, versions, heads, sets = [], [], [], [], [], []
    for context, turn in run:
        n_context, n_output = len(context), len(turn.output_ids)
        keep = np.ones(n_output, dtype=bool)
        if turn.output_mask is not None:
            keep = np.asarray(turn.output_mask, dtype=bool)
        # None becomes NaN in the conversion: missing, and masked by the trainer.
        given = np.asarray(turn.output_log_probs, dtype=np.float32)
        if keep.any() and len(given) != n_output or len(keep) != n_output:
            raise ValueError(
                f"a TurnRecord has {n_output} output_ids, {len(given)} output_log_probs and "
                f"{len(keep)} entries of output_mask: give one each, or mask what is not trained"
            )
        turn_versions = np.full(n_output, version) if turn.versions is None else turn.versions
        ids += [context, np.asarray(turn.output_ids, dtype=np.int32)]
        trained += [np.zeros(n_context, dtype=bool), keep]
        log_probs += [np.zeros(n_context, np.float32), given if keep.any() else np.zeros(n_output)]
        versions += [np.full(n_context, -1), np.where(keep, turn_versions, -1)]
        if keep.any():
            heads.append(_head(turn, keep))
            sets.append(_candidate_sets(turn, keep))
    top_ids, top_log_probs = _stack_heads(heads)
    set_ids, set_offsets = _concatenate_sets(sets)
    return Sample(
        input_ids=np.concatenate(ids),
        trained=np.concatenate(trained),
        sampler_log_probs=np.concatenate(log_probs, dtype=np.float32),
        top_ids=top_ids,
        top_log_probs=top_log_probs,
        set_ids=set_ids,
        set_offsets=set_offsets,
        versions=np.concatenate(versions, dtype=np.int32, casting="same_kind"),
    )


def _head(turn: TurnRecord, keep: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(ids[n, K], log_probs[n, K]) of the turn's trained tokens; K is 0 without a head."""
    given = turn.output_sampler_logprobs
    n_given = 0 if given is None else len(given[0] if isinstance(given, tuple) else given)
    if given is not None and n_given != len(keep):
        raise ValueError(f"a TurnRecord has {len(keep)} output_ids and {n_given} sampler log-probs")
    if isinstance(given, tuple):
        return given[0][keep], given[1][keep]
    rows = [row or {} for row, kept in zip(given or [{}] * len(keep), keep) if kept]
    k = max(map(len, rows))
    ids = np.zeros((len(rows), k), dtype=np.int32)
    log_probs = np.full((len(rows), k), np.nan, dtype=np.float32)
    for i, row in enumerate(rows):
        ids[i, : len(row)] = list(row)
        log_probs[i, : len(row)] = list(row.values())
    return ids, log_probs


def _stack_heads(heads) -> tuple[np.ndarray, np.ndarray]:
    """The heads of several turns below each other, padded to the widest with missing entries."""
    n = sum(len(ids) for ids, _ in heads)
    k = max((ids.shape[1] for ids, _ in heads), default=0)
    top_ids = np.zeros((n, k), dtype=np.int32)
    top_log_probs = np.full((n, k), np.nan, dtype=np.float32)
    row = 0
    for ids, log_probs in heads:
        top_ids[row : row + len(ids), : ids.shape[1]] = ids
        top_log_probs[row : row + len(ids), : ids.shape[1]] = log_probs
        row += len(ids)
    return top_ids, top_log_probs


def _sets_as_arrays(sets: list[list[int]]) -> tuple[np.ndarray, np.ndarray]:
    offsets = np.zeros(len(sets) + 1, dtype=np.int32)
    np.cumsum([len(one) for one in sets], out=offsets[1:])
    ids = np.fromiter(itertools.chain.from_iterable(sets), dtype=np.int32, count=offsets[-1])
    return ids, offsets


def _candidate_sets(turn: TurnRecord, keep: np.ndarray):
    """(ids[m], sizes[n]) of the candidate sets of the turn's trained tokens, or None."""
    given = turn.output_sampling_mask
    if given is None:
        return None
    ids, offsets = given if isinstance(given, tuple) else _sets_as_arrays(given)
    sizes = np.diff(offsets)
    if len(sizes) != len(keep):
        raise ValueError(f"a TurnRecord has {len(keep)} output_ids and {len(sizes)} candidate sets")
    return ids[np.repeat(keep, sizes)], sizes[keep]


def _concatenate_sets(sets):
    """CSR arrays of all turns' candidate sets; (None, None) if no turn has any."""
    if all(one is None for one in sets):
        return None, None
    if any(one is None for one in sets):
        raise ValueError(
            "some turns of a rollout have an output_sampling_mask and others have none: sample "
            "all of them with the same top_k, top_p and min_p"
        )
    sizes = np.concatenate([sizes for _, sizes in sets])
    offsets = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int32)
    return np.concatenate([ids for ids, _ in sets]).astype(np.int32), offsets
