"""The SDK's messages to training sequences and sampling parameters, and results back."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from tinker.proto import tinker_public_pb2 as pb

from jax_agent_rl.learner.sequence_learner import LOSSES, ForwardBackward
from jax_agent_rl.learner.sequences import TrainingSequence
from jax_agent_rl.types import SamplingParams, StopReason, TokenOutput

INPUTS = ("target_tokens", "weights", "mask", "logprobs", "advantages", "sequence_ratio_mask")
"""Tensors of a datum that are read; ``mask`` is another name of ``weights``."""
STABLE_REINFORCE = (
    "the loss stable_reinforce is not computed, because the SDK does not define its objective;"
    " train with another one, such as loss_fn=importance_sampling"
)
MOST_IDS = 64
"""Ids that a client may have scored at each token, the likeliest or ones that it names."""
MOST_COLUMNS = 1024
"""Columns of a datum's tensor, which may be sparse: the targets of one token."""
EMPTY = -99999.0
"""The log-prob of a cell of top-k log-probs that holds no id."""


class BadRequest(Exception):
    """A request that cannot be computed; the message is for the client."""


@dataclass(frozen=True, kw_only=True)
class ScoringRequest:
    """A context of n ids to score.

    Attributes:
        top: how many of the likeliest ids are wanted at each id.
        targets: int64 [n - 1, K], ids to score in place of each id but the first, where -1 stands
            for no id; None if there are no targets.
    """

    ids: list[int]
    top: int = 0
    targets: np.ndarray | None = None


@dataclass(frozen=True, kw_only=True)
class ContextScores:
    """Log-probs at each id of a context but the first; float64.

    Attributes:
        logprobs: of the ids of the context, [n - 1].
        top: the likeliest ids, int64, and their log-probs, [n - 1, top]; None if not wanted.
        targets: of the targets, [n - 1, K], 0 where there is none; None if there are no targets.
    """

    logprobs: np.ndarray
    top: tuple[np.ndarray, np.ndarray] | None
    targets: np.ndarray | None


def parse_batch(body: bytes) -> pb.ForwardBackwardRequest:
    """Return the message of a ``forward`` or ``forward_backward``.

    Raises:
        BadRequest: the body holds something else.
    """
    message = pb.ForwardBackwardRequest()
    try:
        message.ParseFromString(body)
    except Exception as error:  # protobuf's DecodeError differs between its implementations
        raise BadRequest(f"the body is not a ForwardBackwardRequest: {error}") from error
    return message


def read_batch(
    message: pb.ForwardBackwardRequest, *, pack_length: int
) -> tuple[list[TrainingSequence], list[int | None], dict[str, float]]:
    """Convert a request.

    Args:
        pack_length: of the server's packed rows.

    Returns:
        The sequences, one for each datum. If the loss is not ``cross_entropy``, or the data differ
        in their number of targets per token, there is one for each target per token; the sequences
        of a datum share a context. Then, for each datum, its number of targets per token, None if
        its tensors have no such axis; and the constants of the loss.

    Raises:
        BadRequest: the server does not compute it.
    """
    if message.loss_fn == "stable_reinforce":
        raise BadRequest(f"{STABLE_REINFORCE}; there are {', '.join(LOSSES)}")
    if message.loss_fn not in LOSSES:
        raise BadRequest(f"no loss is called {message.loss_fn!r}; there are {', '.join(LOSSES)}")
    constants = {}
    for name, value in message.loss_fn_config_v2.items():
        if not value.HasField("number"):
            raise BadRequest(f"loss_fn_config.{name} must be a number")
        constants[name] = value.number
    if not message.data:
        raise BadRequest("a batch needs at least one datum")

    sequences: list[TrainingSequence] = []
    columns: list[int | None] = []
    for number, datum in enumerate(message.data):
        try:
            sequence, count = _read_datum(datum, message.loss_fn)
            length = len(sequence.token_ids)
            if length > pack_length:
                raise BadRequest(
                    f"{length - 1} tokens are more than the {pack_length - 1} that this server"
                    f" trains on; start it with pack_length={length} or more"
                )
        except (BadRequest, ValueError) as error:
            raise BadRequest(f"datum {number}: {error}") from error
        sequences.append(sequence)
        columns.append(count)

    targets_per_token = {sequence.per_token for sequence in sequences}
    if message.loss_fn != "cross_entropy" or len(targets_per_token) > 1:
        sequences = [column for sequence in sequences for column in sequence.columns()]
    if not constants:
        constants = dict(message.loss_fn_config)  # of older SDKs
    return sequences, columns, constants


def _read_datum(datum: pb.Datum, loss: str) -> tuple[TrainingSequence, int | None]:
    tokens = _read_chunks(datum.model_input)
    inputs = {name: _read_tensor(name, tensor) for name, tensor in datum.loss_fn_inputs.items()}
    required = ["target_tokens"]
    if loss != "cross_entropy":
        required += ["logprobs", "advantages"]
    if loss == "gspo":
        required.append("sequence_ratio_mask")
    missing = [name for name in required if name not in inputs]
    if missing:
        raise BadRequest(f"loss_fn_inputs lack {', '.join(missing)}, which {loss} needs")
    unknown = sorted(inputs.keys() - set(INPUTS))
    if unknown:
        raise BadRequest(f"loss_fn_inputs have {', '.join(unknown)}; there are {', '.join(INPUTS)}")

    targets = inputs["target_tokens"].astype(np.int32)
    if targets.shape[:1] != tokens.shape or not targets.size:
        length = len(tokens)
        raise BadRequest(
            f"target_tokens has shape {list(targets.shape)}; the input has {length} tokens: send"
            f" [{length}] or [{length}, K]"
        )
    for name, values in inputs.items():
        if values.shape != targets.shape:
            raise BadRequest(
                f"{name} has shape {list(values.shape)}, target_tokens {list(targets.shape)}; make"
                " them equal"
            )

    columns = targets.shape[1] if targets.ndim == 2 else None
    if columns == 1:
        targets = targets[:, 0]
        inputs = {name: values[:, 0] for name, values in inputs.items()}
    last_target = targets.reshape(len(tokens), -1)[-1, 0]
    ids = np.append(tokens, last_target)
    are_next_ids = np.array_equal(targets, ids[1:])
    sequence = TrainingSequence(
        token_ids=ids,
        loss_mask=np.arange(len(ids)) > 0,
        targets=None if are_next_ids else targets,
        weight=inputs.get("weights", inputs.get("mask")),
        advantage=inputs.get("advantages"),
        old_logprob=inputs.get("logprobs"),
        ratio_mask=inputs.get("sequence_ratio_mask"),
    )
    return sequence, columns


def _read_chunks(chunks: Any) -> np.ndarray:
    """Return the token ids of an input."""
    if not all(chunk.HasField("encoded_text") for chunk in chunks):
        raise BadRequest("the input holds images or audio; this server takes text only")
    parts = [np.frombuffer(chunk.encoded_text.tokens, np.int32) for chunk in chunks]
    if not sum(map(len, parts)):
        raise BadRequest("the input is empty")
    return np.concatenate(parts)


def _read_tensor(name: str, tensor: pb.Tensor) -> np.ndarray:
    """Return a dense array, float64 or int64."""
    dtypes = {pb.DTYPE_FLOAT32: np.float32, pb.DTYPE_INT64: np.int64}
    if len(tensor.shape) > 2:
        raise BadRequest(f"{name} has shape {list(tensor.shape)}; send [N] or [N, K]")
    if tensor.dtype not in dtypes:
        raise BadRequest(f"{name} has dtype {tensor.dtype}; send float32 or int64")

    dtype = dtypes[tensor.dtype]
    if tensor.HasField("sparse_csr"):
        csr = tensor.sparse_csr
        values = np.frombuffer(csr.values, dtype)
        crow = np.frombuffer(csr.crow_indices, np.int64)
        columns = np.frombuffer(csr.col_indices, np.int64)
        values = _dense(name, values, crow, columns, tensor.shape, 0)
    else:
        values = np.frombuffer(tensor.dense, dtype)
        if tensor.shape:
            values = values.reshape(tensor.shape)
    if values.dtype == np.float32:
        values = values.astype(np.float64)
    return values


def _dense(
    name: str,
    values: np.ndarray,
    crow: np.ndarray,
    columns: np.ndarray,
    shape: Sequence[int],
    fill: int,
) -> np.ndarray:
    """Return a sparse tensor of two axes as a dense one.

    Args:
        name: for the message.
        values: [M], of the cells that are listed, row by row.
        crow: int64 [R + 1], where in ``values`` each row begins, and the last one ends.
        columns: int64 [M], of the same cells.
        shape: R and C.
        fill: value of all other cells.

    Raises:
        BadRequest: the indices do not fit the values or the shape.
    """
    if not _is_csr(values, crow, columns, shape):
        raise BadRequest(
            f"{name} is not a sparse CSR tensor of shape {list(shape)}: its indices do not fit, or"
            f" it has more than {MOST_COLUMNS} columns"
        )
    dense = np.full(shape, fill, values.dtype)
    dense[_csr_rows(crow), columns] = values
    return dense


def _is_csr(
    values: np.ndarray, crow: np.ndarray, columns: np.ndarray, shape: Sequence[int]
) -> bool:
    """Return whether the indices of a sparse tensor fit its values and its shape."""
    if len(shape) != 2 or shape[0] < 0 or not 0 <= shape[1] <= MOST_COLUMNS:
        return False
    if len(crow) != shape[0] + 1 or crow[0] != 0 or np.any(np.diff(crow) < 0):
        return False
    if crow[-1] != len(values) or len(columns) != len(values):
        return False
    return bool(np.all((columns >= 0) & (columns < shape[1])))


def _csr_rows(crow: np.ndarray) -> np.ndarray:
    """Return the row of each cell that a sparse tensor lists."""
    return np.repeat(np.arange(len(crow) - 1), np.diff(crow))


def write_batch_result(result: ForwardBackward, columns: Sequence[int | None]) -> bytes:
    """Return the output of a pass: log-probs of all targets, and the sum of the loss.

    Args:
        result: of the sequences of :func:`read_batch`.
        columns: targets per token of each datum, see :func:`read_batch`.
    """
    message = pb.ForwardBackwardOutput(loss_fn_output_type="ArrayRecord")
    message.metrics["loss:sum"] = result.loss
    for name, value in result.metrics.items():
        message.metrics[f"{name}:mean"] = value
    sequence_logprobs = iter(result.logprobs)

    def datum_logprobs(count: int | None) -> np.ndarray:
        logprobs = next(sequence_logprobs)
        if logprobs.ndim == 1:
            # One sequence for each target per token.
            per_target = [logprobs]
            for _ in range(1, count or 1):
                per_target.append(next(sequence_logprobs))
            logprobs = np.stack(per_target, -1)
        return logprobs.astype(np.float32)

    # A record holds neighbouring data of equal shape.
    for count, data in itertools.groupby(columns):
        logprobs = [datum_logprobs(count) for _ in data]
        offsets = np.cumsum([0, *(x.nbytes for x in logprobs)], dtype=np.int64)
        tensor = pb.BatchedTensor(
            data=b"".join(x.tobytes() for x in logprobs),
            offsets=offsets.tobytes(),
            dtype=pb.DTYPE_FLOAT32,
            trailing_shape=[] if count is None else [count],
        )
        record = message.loss_fn_outputs.add(num_datums=len(logprobs))
        record.fields["logprobs"].CopyFrom(tensor)
    return message.SerializeToString()


def sampling_params(fields: dict[str, Any], number: int, *, longest: int) -> SamplingParams:
    """Convert the sampling parameters of one of a request's samples.

    Args:
        fields: as the SDK sends them.
        number: of the sample; each has a different seed.
        longest: tokens that fit after the prompt.

    Raises:
        BadRequest: they are invalid.
    """
    stop = fields.get("stop")
    stops = [stop] if isinstance(stop, str) else list(stop or ())
    seed = fields.get("seed")
    top_k = int(fields.get("top_k", -1))
    try:
        return SamplingParams(
            max_tokens=min(fields.get("max_tokens") or longest, longest),
            temperature=float(fields.get("temperature", 1.0)),
            top_p=float(fields.get("top_p", 1.0)),
            top_k=max(top_k, 0),
            seed=None if seed is None else int(seed) + number,
            stop=tuple(one for one in stops if isinstance(one, str)),
            stop_token_ids=tuple(one for one in stops if isinstance(one, int)),
            # An empty list asks for none at all.
            ignore_eos=stop is not None and not stops,
        )
    except (TypeError, ValueError) as error:
        raise BadRequest(f"sampling_params: {error}") from error


def read_prompt(prompt: dict[str, Any], *, vocab_size: int) -> list[int]:
    """Return a prompt's token ids.

    Raises:
        BadRequest: the model does not have an id, or the prompt holds more than text.
    """
    if any(chunk.get("type", "encoded_text") != "encoded_text" for chunk in prompt["chunks"]):
        raise BadRequest("the prompt holds images or audio; this server takes text only")
    ids = [token for chunk in prompt["chunks"] for token in chunk["tokens"]]
    for token in ids:
        if not 0 <= token < vocab_size:
            raise BadRequest(
                f"the prompt has the id {token}; the model's are 0 to {vocab_size - 1}"
            )
    return ids


def read_targets(
    tensor: dict[str, Any] | None, length: int, *, vocab_size: int
) -> np.ndarray | None:
    """Return the ids that ``target_prompt_logprobs`` names, int64 [P - 1, K]; -1 stands for no id.

    Args:
        tensor: dense or sparse; None if there are no targets.
        length: of the prompt, P.

    Raises:
        BadRequest: a shape, or an id, that cannot be scored.
    """
    if tensor is None:
        return None

    name = "target_prompt_logprobs"
    shape = tensor["shape"]
    ids = np.array(tensor["data"], np.int64)
    if length < 2:
        raise BadRequest(f"{name} needs a prompt of at least two tokens")
    if len(shape) != 2 or shape[0] != length - 1 or not 1 <= shape[1] <= MOST_IDS:
        raise BadRequest(
            f"{name} has shape {shape}; send [{length - 1}, K] for {length} tokens, K at most"
            f" {MOST_IDS}"
        )
    crow = tensor.get("sparse_crow_indices")
    if crow is not None:
        columns = np.array(tensor["sparse_col_indices"])
        ids = _dense(name, ids, np.array(crow), columns, shape, -1)
    elif ids.size != shape[0] * shape[1]:
        raise BadRequest(f"{name} has {ids.size} ids, its shape is {shape}")
    ids = ids.reshape(shape)
    is_known = ids.min() >= -1 and ids.max() < vocab_size
    has_any = ids.max() >= 0
    if not is_known or not has_any:
        raise BadRequest(
            f"{name} has ids from {ids.min()} to {ids.max()}; send 0 to {vocab_size - 1}, or -1 for"
            " no id, and at least one id"
        )
    return ids


def write_samples(
    request: dict[str, Any],
    length: int,
    outputs: Sequence[TokenOutput],
    prompt_scores: ContextScores | None,
    sample_scores: Sequence[ContextScores],
) -> bytes:
    """Return sampled sequences, and the log-probs that the request asks for.

    Args:
        length: of the prompt, P.
        prompt_scores: None if not requested.
        sample_scores: of the prompt with each sample; empty if not requested.
    """
    message = pb.SampleResponse()
    for number, output in enumerate(outputs):
        sequence = message.sequences.add()
        sequence.tokens = np.asarray(output.token_ids, np.int32).tobytes()
        sequence.logprobs = np.asarray(output.log_probs, np.float32).tobytes()
        is_cut = output.stop_reason == StopReason.LENGTH
        sequence.stop_reason = pb.STOP_REASON_LENGTH if is_cut else pb.STOP_REASON_STOP
        if sample_scores:
            count = request["topk_sample_logprobs"]
            ids, logprobs = _top(sample_scores[number], count)
            # The id after index i is scored at index i.
            top = _write_top(ids[length - 1 :], logprobs[length - 1 :])
            sequence.topk_sampled_logprobs.CopyFrom(top)

    # The first id of the prompt that is scored: none precedes the very first one.
    first = max(1, length - (request.get("prompt_logprobs_last_n") or length))
    if request.get("prompt_logprobs"):
        values = np.full(length, np.nan, np.float32)
        if prompt_scores is not None:
            values[first:] = prompt_scores.logprobs[first - 1 :]
        message.prompt_logprobs = values.tobytes()

    count = request.get("topk_prompt_logprobs", 0)
    if count:
        ids = np.zeros((length, count), np.int32)
        logprobs = np.full((length, count), EMPTY, np.float32)
        if prompt_scores is not None:
            scored_ids, scored_logprobs = _top(prompt_scores, count)
            ids[first:] = scored_ids[first - 1 :]
            logprobs[first:] = scored_logprobs[first - 1 :]
        message.topk_prompt_logprobs.CopyFrom(_write_top(ids, logprobs))

    if prompt_scores is not None and prompt_scores.targets is not None:
        logprobs = prompt_scores.targets.astype(np.float32)
        _write_targets(message.target_prompt_logprobs, request["target_prompt_logprobs"], logprobs)
    message.prompt_cache_hit_tokens = min((output.cached_tokens for output in outputs), default=0)
    return message.SerializeToString()


def _write_targets(tensor: pb.Tensor, targets: dict[str, Any], logprobs: np.ndarray) -> None:
    """Write the log-probs of targets in the form, dense or sparse, in which the targets came."""
    tensor.dtype = pb.DTYPE_FLOAT32
    tensor.shape.extend(targets["shape"])
    if targets.get("sparse_crow_indices") is None:
        tensor.dense = logprobs.tobytes()
        return
    crow = np.array(targets["sparse_crow_indices"], np.int64)
    columns = np.array(targets["sparse_col_indices"], np.int64)
    tensor.sparse_csr.values = logprobs[_csr_rows(crow), columns].tobytes()
    tensor.sparse_csr.crow_indices = crow.tobytes()
    tensor.sparse_csr.col_indices = columns.tobytes()


def _top(scores: ContextScores, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the ``count`` likeliest ids at each index, and their log-probs."""
    assert scores.top is not None
    ids, logprobs = scores.top
    return ids[:, :count], logprobs[:, :count]


def _write_top(ids: np.ndarray, logprobs: np.ndarray) -> pb.TopkLogprobs:
    length, count = ids.shape
    return pb.TopkLogprobs(
        token_ids=ids.astype(np.int32).tobytes(),
        logprobs=logprobs.astype(np.float32).tobytes(),
        k=count,
        length=length,
    )
