"""What SGLang's server is sent and what it answers, one schema for each route.

``/generate`` answers with server-sent events: a line ``data: {…}`` for each chunk, and ``data:
[DONE]`` at the end. An answer's ids come from ``output_token_logprobs``, next to the log-prob of
each: nothing is tokenized. How many of them are new follows from ``completion_tokens``, because a
server may repeat those of earlier chunks, and repeats some where a request that waits is aborted.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from jax_agent_rl.errors import BackendError
from jax_agent_rl.jetstream.request import RunningRequest
from jax_agent_rl.rollout.http.connection import MAX_LINE_VALUES
from jax_agent_rl.types.token_ids import ID_BOUND
from jax_agent_rl.utils.bounded_json import decode_json

MAX_TEXT = 65_536
"""Longest message of a server that is read."""
MAX_SPANS = 100_000
_DATA = b"data: "
_DONE = b"[DONE]"


def _as_tuple(value: object) -> object:
    """JSON has no tuples."""
    if isinstance(value, list):
        return tuple(value)
    return value


_Text = Annotated[str, Field(max_length=MAX_TEXT)]
_Id = Annotated[int, Field(ge=0, lt=ID_BOUND)]
_LogProb = Annotated[float, Field(allow_inf_nan=False, le=1e-3)]
_TokenLogProb = Annotated[tuple[_LogProb, _Id, _Text | None], BeforeValidator(_as_tuple)]
_FirstLogProb = Annotated[tuple[_LogProb | None, _Id, _Text | None], BeforeValidator(_as_tuple)]
_Count = Annotated[int, Field(ge=0, lt=ID_BOUND)]


class _Answer(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore", strict=True)


StateT = TypeVar("StateT", bound=_Answer)


class ModelInfo(_Answer):
    """``GET /model_info``."""

    weight_version: _Text


class ServerInfo(_Answer):
    """``GET /server_info``: what the server was started with.

    Attributes:
        max_req_input_len: most ids of a prompt.
        sampling_mask_max_tokens: most ids of which a draw's support is reported.
    """

    version: _Text
    skip_tokenizer_init: bool
    device: _Text
    dtype: _Text
    quantization: _Text | None
    kv_cache_dtype: _Text
    context_length: _Count | None
    max_req_input_len: _Count
    max_running_requests: _Count | None
    disable_radix_cache: bool
    enable_priority_scheduling: bool
    schedule_low_priority_values_first: bool
    enable_deterministic_inference: bool
    enable_memory_saver: bool
    sampling_mask_max_tokens: _Count


class Done(_Answer):
    """``POST /update_weights_from_disk``, ``/pause_generation``, ``/continue_generation``."""

    message: _Text
    success: bool = True


class RequestEnd(_Answer):
    """Why a request ended."""

    type: Literal["stop", "length", "abort"]
    message: _Text | None = None


class VersionSpan(_Answer):
    """Which weights sampled the ids ``start .. end`` of an output."""

    version: _Text
    start: _Count
    end: _Count


class ChunkInfo(_Answer):
    """``meta_info`` of a chunk: see SGLang's ``GenerateReqInput``."""

    completion_tokens: _Count
    cached_tokens: _Count = 0
    finish_reason: RequestEnd | None
    output_token_logprobs: list[_TokenLogProb] = Field(default_factory=list)
    output_token_sampling_mask: list[list[_Id]] | None = None
    output_token_sampling_logprobs: list[_LogProb] | None = None
    weight_versions: Annotated[list[VersionSpan], Field(max_length=MAX_SPANS)] | None = None


class Chunk(_Answer):
    """A chunk of ``POST /generate``."""

    meta_info: ChunkInfo


class ScoresInfo(_Answer):
    """``meta_info`` of a request that scores its prompt."""

    input_token_logprobs: list[_FirstLogProb]
    input_top_logprobs: list[list[_TokenLogProb] | None] | None = None


class ScoresAnswer(_Answer):
    """The answer to such a request."""

    meta_info: ScoresInfo


def event(line: bytes) -> Mapping[str, Any] | None:
    """Return the object of a line of ``/generate``; None for the mark at its end.

    Raises:
        BackendError: the server refuses the request.
        ValueError: it is no such line.
    """
    line = line.strip()
    if not line.startswith(_DATA):
        raise ValueError(f"a line of the answer is {line[:100]!r}")
    content = line[len(_DATA) :]
    if content == _DONE:
        return None
    message = decode_json(content, max_values=MAX_LINE_VALUES, non_finite=True)
    if not isinstance(message, dict):
        raise ValueError(f"a chunk of the answer is {content[:100]!r}")
    error = message.get("error")
    if error is not None:
        raise BackendError(f"SGLang refused it: {refusal(message)}")
    return message


def refusal(answer: object) -> str:
    """Return the server's words in the answer to a request that it refuses."""
    if isinstance(answer, dict):
        for key in ("error", "message"):
            if key in answer:
                return refusal(answer[key])
    return str(answer)[:1000]


def generate_body(
    run: RunningRequest,
    rid: str,
    *,
    vocabulary: int,
    priorities: bool,
    seeds: bool,
) -> bytes:
    """Return the body of ``POST /generate``.

    SGLang gets every stopping id as a plain stop id, and neither EOS nor stop strings:
    :class:`RunningRequest` decides, for every engine alike, which of them ended the generation, and
    which ids are kept.

    Args:
        rid: the request's name on the server.
        vocabulary: size of the model's vocabulary.
        priorities: whether the server orders its queue.
        seeds: whether it takes seeds.
    """
    request = run.request
    sampling = request.sampling
    params: dict[str, Any] = {
        "max_new_tokens": run.max_tokens,
        "temperature": sampling.temperature,
        "ignore_eos": True,
        "stop_token_ids": [stop_id for stop_id in run.stop_ids if stop_id < vocabulary],
        "skip_special_tokens": False,
    }
    body: dict[str, Any] = {
        "rid": rid,
        "input_ids": list(request.prompt_ids),
        "return_logprob": True,
        "stream": True,
    }
    if sampling.restricted:
        # SGLang's own log-probs are those before top-p, top-k and min-p; with the support, it
        # reports those of what was sampled from, if top-k is finite.
        params["top_p"] = sampling.top_p
        params["min_p"] = sampling.min_p
        params["top_k"] = min(sampling.top_k or vocabulary, vocabulary)
        body["return_sampling_mask"] = True
        body["sampling_logprobs_mode"] = "selected"
    if seeds and sampling.seed is not None:
        params["sampling_seed"] = sampling.seed
    if priorities:
        body["priority"] = request.priority
    body["sampling_params"] = params
    return encode(body)


def score_body(token_ids: Sequence[int], rid: str, *, top_k: int, priority: int | None) -> bytes:
    """Return the body of a request that scores its prompt and samples nothing that is used."""
    body: dict[str, Any] = {
        "rid": rid,
        "input_ids": list(token_ids),
        "sampling_params": {"max_new_tokens": 1, "temperature": 0.0, "ignore_eos": True},
        "return_logprob": True,
        "logprob_start_len": 0,
        "top_logprobs_num": top_k,
        "stream": True,
    }
    if priority is not None:
        body["priority"] = priority
    return encode(body)


def encode(body: Mapping[str, Any]) -> bytes:
    """Return a body as JSON."""
    return json.dumps(body, separators=(",", ":")).encode()
