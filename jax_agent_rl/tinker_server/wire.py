"""The SDK's messages to training sequences and sampling parameters, and results back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from tinker.proto import tinker_public_pb2 as pb

from jax_agent_rl.learner.sequence_learner import LOSSES, ForwardBackward, TrainingSequence
from jax_agent_rl.types import SamplingParams, StopReason, TokenOutput


class BadRequest(Exception):
    """A request that cannot be computed; the message is for the client."""


@dataclass(frozen=True, kw_only=True)
class ForwardRequest:
    """A request of ``forward`` or ``forward_backward``."""

    data: list[TrainingSequence]
    loss: str
    constants: dict[str, float]
    forward_only: bool


def parse_batch(body: bytes) -> tuple[str, int, pb.ForwardBackwardRequest]:
    """Return model, number and message of a request; raise BadRequest if it is none."""
    message = pb.ForwardBackwardRequest()
    try:
        message.ParseFromString(body)
    except Exception as error:  # protobuf's DecodeError differs between its implementations
        raise BadRequest(f"the body is no ForwardBackwardRequest: {error}") from error
    return message.model_id, message.seq_id, message


def read_batch(message: pb.ForwardBackwardRequest) -> ForwardRequest:
    """Convert a request; raise BadRequest if the server does not compute it."""
    if message.loss_fn not in LOSSES:
        raise BadRequest(f"no loss is called {message.loss_fn!r}; there are {', '.join(LOSSES)}")
    constants = {}
    for name, value in message.loss_fn_config_v2.items():
        if not value.HasField("number"):
            raise BadRequest(f"loss_fn_config.{name} must be a number")
        constants[name] = value.number
    if not message.data:
        raise BadRequest("a batch needs at least one datum")
    data = []
    for number, datum in enumerate(message.data):
        try:
            data.append(_read_datum(datum, off_policy=message.loss_fn != "cross_entropy"))
        except (BadRequest, ValueError) as error:
            raise BadRequest(f"datum {number}: {error}") from error
    return ForwardRequest(
        data=data,
        loss=message.loss_fn,
        constants=constants or dict(message.loss_fn_config),
        forward_only=message.forward_only,
    )


def _read_datum(datum: pb.Datum, *, off_policy: bool) -> TrainingSequence:
    tokens = _read_chunks(datum.model_input)
    inputs = {name: _read_tensor(name, tensor) for name, tensor in datum.loss_fn_inputs.items()}
    wanted = {"target_tokens", *(("logprobs", "advantages") if off_policy else ())}
    if missing := sorted(wanted - inputs.keys()):
        raise BadRequest(f"loss_fn_inputs lack {', '.join(missing)}")
    for name, values in inputs.items():
        if values.shape != tokens.shape:
            raise BadRequest(
                f"{name} has shape {list(values.shape)}, the input {list(tokens.shape)}; they must be equal"
            )
    targets = inputs["target_tokens"].astype(np.int32)
    if not np.array_equal(targets[:-1], tokens[1:]):
        raise BadRequest("target_tokens must be the input shifted by one; other targets are not computed")
    ids = np.append(tokens, targets[-1:])
    weights = inputs.get("weights", inputs.get("mask"))
    return TrainingSequence(
        token_ids=ids,
        loss_mask=np.arange(len(ids)) > 0,
        weight=weights,
        advantage=inputs.get("advantages"),
        old_logprob=inputs.get("logprobs"),
    )


def _read_chunks(chunks: Any) -> np.ndarray:
    if not all(chunk.HasField("encoded_text") for chunk in chunks):
        raise BadRequest("the input holds images or audio; this server takes text only")
    parts = [np.frombuffer(chunk.encoded_text.tokens, np.int32) for chunk in chunks]
    if not sum(map(len, parts)):
        raise BadRequest("the input is empty")
    return np.concatenate(parts)


def _read_tensor(name: str, tensor: pb.Tensor) -> np.ndarray:
    dtypes = {pb.DTYPE_FLOAT32: np.float32, pb.DTYPE_INT64: np.int64}
    if tensor.HasField("sparse_csr") or len(tensor.shape) > 1:
        raise BadRequest(f"{name} has several values per token; this server takes one")
    if tensor.dtype not in dtypes:
        raise BadRequest(f"{name} has dtype {tensor.dtype}; send float32 or int64")
    values = np.frombuffer(tensor.dense, dtypes[tensor.dtype])
    return values.astype(np.float64) if values.dtype == np.float32 else values


def write_batch_result(result: ForwardBackward) -> bytes:
    """Return the output of a pass: log-probs of all targets, and the loss's sum."""
    values = [np.asarray(x, np.float32) for x in result.logprobs]
    offsets = np.cumsum([0, *(x.nbytes for x in values)], dtype=np.int64)
    tensor = pb.BatchedTensor(
        data=b"".join(x.tobytes() for x in values), offsets=offsets.tobytes(), dtype=pb.DTYPE_FLOAT32
    )
    message = pb.ForwardBackwardOutput(loss_fn_output_type="ArrayRecord")
    message.metrics["loss:sum"] = result.loss
    for name, value in result.metrics.items():
        message.metrics[f"{name}:mean"] = value
    record = message.loss_fn_outputs.add()
    record.num_datums = len(values)
    record.fields["logprobs"].CopyFrom(tensor)
    return message.SerializeToString()


def sampling_params(given: dict[str, Any], number: int, *, longest: int) -> SamplingParams:
    """Convert the parameters of the sample of this number; raise BadRequest if they are invalid.

    Args:
        given: the SDK's.
        number: of the sample; each has a seed of its own.
        longest: tokens that fit after the prompt.
    """
    stop = given.get("stop")
    stops = [stop] if isinstance(stop, str) else list(stop or ())
    seed, top_k = given.get("seed"), int(given.get("top_k", -1))
    try:
        return SamplingParams(
            max_tokens=min(given.get("max_tokens") or longest, longest),
            temperature=float(given.get("temperature", 1.0)),
            top_p=float(given.get("top_p", 1.0)),
            top_k=max(top_k, 0),
            seed=None if seed is None else int(seed) + number,
            stop=tuple(one for one in stops if isinstance(one, str)),
            stop_token_ids=tuple(one for one in stops if isinstance(one, int)),
            ignore_eos=stop is not None and not stops,
        )
    except (TypeError, ValueError) as error:
        raise BadRequest(f"sampling_params: {error}") from error


def write_samples(outputs: Sequence[TokenOutput], prompt_logprobs: np.ndarray | None) -> bytes:
    """Return sampled sequences, and the log-probs of the prompt [P - 1] if they were asked for."""
    message = pb.SampleResponse()
    for output in outputs:
        sequence = message.sequences.add()
        sequence.tokens = np.asarray(output.token_ids, np.int32).tobytes()
        sequence.logprobs = np.asarray(output.log_probs, np.float32).tobytes()
        is_cut = output.stop_reason == StopReason.LENGTH
        sequence.stop_reason = pb.STOP_REASON_LENGTH if is_cut else pb.STOP_REASON_STOP
    if prompt_logprobs is not None:
        message.prompt_logprobs = np.append(np.float32(np.nan), prompt_logprobs).astype(np.float32).tobytes()
    message.prompt_cache_hit_tokens = min((output.cached_tokens for output in outputs), default=0)
    return message.SerializeToString()
