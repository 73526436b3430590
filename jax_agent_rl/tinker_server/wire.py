"""The SDK's messages to training sequences and sampling parameters, and results back."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from tinker.proto import tinker_public_pb2 as pb

from jax_agent_rl.learner.batch import TrainingSequence
from jax_agent_rl.learner.sequence_learner import LOSSES, ForwardBackward
from jax_agent_rl.types import SamplingParams, StopReason, TokenOutput

INPUTS = ("target_tokens", "weights", "mask", "logprobs", "advantages", "sequence_ratio_mask")
"""Tensors of a datum that are read; ``mask`` is another name of ``weights``."""
STABLE_REINFORCE = (
    "the loss stable_reinforce is not computed, because the SDK does not define its objective;"
    " train with another one, such as loss_fn=importance_sampling"
)
MOST_IDS = 64
"""Ids that a client may have scored at each token, chosen or the likeliest."""
MOST_COLUMNS = 1024
"""Columns of a tensor of a datum, which may be sparse: targets of one token."""
EMPTY = -99999.0
"""The log-prob of a cell of top-k log-probs that holds nothing."""


class BadRequest(Exception):
    """A request that cannot be computed; the message is for the client."""


@dataclass(frozen=True, kw_only=True)
class ScoringRequest:
    """A context of n ids to score.

    Attributes:
        ids: n of them.
        top: how many of the likeliest ids are wanted at each.
        targets: int64 [n - 1, K], ids to score in place of each id but the first; -1: none. None:
            no others.
    """

    ids: list[int]
    top: int = 0
    targets: np.ndarray | None = None


@dataclass(frozen=True, kw_only=True)
class ContextScores:
    """Log-probs at each id of a context but the first; float64.

    Attributes:
        logprobs: of the context's own ids, [n - 1].
        top: the likeliest ids, int64, and theirs, [n - 1, top]; None if not wanted.
        targets: of the targets, [n - 1, K], 0 where there is none; None without any.
    """

    logprobs: np.ndarray
    top: tuple[np.ndarray, np.ndarray] | None
    targets: np.ndarray | None


def parse_batch(body: bytes) -> pb.ForwardBackwardRequest:
    """Return the message of a ``forward`` or ``forward_backward``; raise BadRequest if it is none."""
    message = pb.ForwardBackwardRequest()
    try:
        message.ParseFromString(body)
    except Exception as error:  # protobuf's DecodeError differs between its implementations
        raise BadRequest(f"the body is no ForwardBackwardRequest: {error}") from error
    return message


def read_batch(
    message: pb.ForwardBackwardRequest, *, pack_length: int
) -> tuple[list[TrainingSequence], list[int | None], dict[str, float]]:
    """Convert a request; raise BadRequest if the server, whose packed rows have this length, does not compute it.

    Returns:
        A sequence for each datum; if the loss is not ``cross_entropy``, or the data differ in their
        targets per token, for each of these, those of a datum in one context. Of each datum its
        targets per token, None if its tensors have no such axis. And the constants of the loss.
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
    data, columns = [], []
    for number, datum in enumerate(message.data):
        try:
            sequence, count = _read_datum(datum, message.loss_fn)
            if (length := len(sequence.token_ids)) > pack_length:
                raise BadRequest(
                    f"{length - 1} tokens are more than the {pack_length - 1} that this server"
                    f" trains on; start it with pack_length={length} or more"
                )
        except (BadRequest, ValueError) as error:
            raise BadRequest(f"datum {number}: {error}") from error
        data.append(sequence)
        columns.append(count)
    if message.loss_fn != "cross_entropy" or len({sequence.per_token for sequence in data}) > 1:
        data = [column for sequence in data for column in sequence.columns()]
    return data, columns, constants or dict(message.loss_fn_config)


def _read_datum(datum: pb.Datum, loss: str) -> tuple[TrainingSequence, int | None]:
    tokens = _read_chunks(datum.model_input)
    inputs = {name: _read_tensor(name, tensor) for name, tensor in datum.loss_fn_inputs.items()}
    wanted = (
        ["target_tokens"]
        if loss == "cross_entropy"
        else ["target_tokens", "logprobs", "advantages"]
    )
    wanted += ["sequence_ratio_mask"] if loss == "gspo" else []
    if missing := [name for name in wanted if name not in inputs]:
        raise BadRequest(f"loss_fn_inputs lack {', '.join(missing)}, which {loss} needs")
    if unknown := sorted(inputs.keys() - set(INPUTS)):
        raise BadRequest(f"loss_fn_inputs have {', '.join(unknown)}; there are {', '.join(INPUTS)}")
    targets = inputs["target_tokens"].astype(np.int32)
    if targets.shape[:1] != tokens.shape or not targets.size:
        shape, length = list(targets.shape), len(tokens)
        raise BadRequest(
            f"target_tokens has shape {shape}; the input has {length} tokens: send [{length}] or"
            f" [{length}, K]"
        )
    for name, values in inputs.items():
        if values.shape != targets.shape:
            raise BadRequest(
                f"{name} has shape {list(values.shape)}, target_tokens {list(targets.shape)}; make"
                " them equal"
            )
    columns = targets.shape[1] if targets.ndim == 2 else None
    if columns == 1:
        targets, inputs = targets[:, 0], {name: values[:, 0] for name, values in inputs.items()}
    ids = np.append(tokens, targets.reshape(len(tokens), -1)[-1, 0])
    return (
        TrainingSequence(
            token_ids=ids,
            loss_mask=np.arange(len(ids)) > 0,
            targets=None if np.array_equal(targets, ids[1:]) else targets,
            weight=inputs.get("weights", inputs.get("mask")),
            advantage=inputs.get("advantages"),
            old_logprob=inputs.get("logprobs"),
            ratio_mask=inputs.get("sequence_ratio_mask"),
        ),
        columns,
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
    if len(tensor.shape) > 2:
        raise BadRequest(f"{name} has shape {list(tensor.shape)}; send [N] or [N, K]")
    if tensor.dtype not in dtypes:
        raise BadRequest(f"{name} has dtype {tensor.dtype}; send float32 or int64")
    if tensor.HasField("sparse_csr"):
        csr = tensor.sparse_csr
        values = np.frombuffer(csr.values, dtypes[tensor.dtype])
        crow, columns = (np.frombuffer(x, np.int64) for x in (csr.crow_indices, csr.col_indices))
        values = _dense(name, values, crow, columns, tensor.shape, 0)
    else:
        values = np.frombuffer(tensor.dense, dtypes[tensor.dtype])
        values = values.reshape(tensor.shape) if tensor.shape else values
    return values.astype(np.float64) if values.dtype == np.float32 else values


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
        values: of the cells that are listed, row by row, [M].
        crow: int64 [R + 1], where in ``values`` each row begins, and the last one ends.
        columns: int64 [M].
        shape: [R, C].
        fill: value of all other cells.

    Raises:
        BadRequest: the indices do not fit the values or the shape.
    """
    counts = np.diff(crow)
    fits = (
        len(shape) == 2
        and len(crow) == shape[0] + 1 >= 1
        and crow[0] == 0
        and crow[-1] == len(columns) == len(values)
        and 0 <= shape[1] <= MOST_COLUMNS
    )
    if not fits or np.any(counts < 0) or np.any((columns < 0) | (columns >= shape[1])):
        raise BadRequest(
            f"{name} is no sparse CSR tensor of shape {list(shape)}: its indices do not fit, or it"
            f" has more than {MOST_COLUMNS} columns"
        )
    made = np.full(shape, fill, values.dtype)
    made[np.repeat(np.arange(shape[0]), counts), columns] = values
    return made


def write_batch_result(result: ForwardBackward, columns: Sequence[int | None]) -> bytes:
    """Return the output of a pass: log-probs of all targets, and the loss's sum.

    Args:
        result: of each sequence.
        columns: see :func:`read_batch`.
    """
    message = pb.ForwardBackwardOutput(loss_fn_output_type="ArrayRecord")
    message.metrics["loss:sum"] = result.loss
    for name, value in result.metrics.items():
        message.metrics[f"{name}:mean"] = value
    of_sequences = iter(result.logprobs)

    def of_datum(count: int | None) -> np.ndarray:
        first = next(of_sequences)
        if first.ndim == 1:
            first = np.stack([first, *(next(of_sequences) for _ in range((count or 1) - 1))], -1)
        return first.astype(np.float32)

    for count, data in itertools.groupby(columns):
        values = [of_datum(count) for _ in data]
        offsets = np.cumsum([0, *(x.nbytes for x in values)], dtype=np.int64)
        record = message.loss_fn_outputs.add(num_datums=len(values))
        record.fields["logprobs"].CopyFrom(
            pb.BatchedTensor(
                data=b"".join(x.tobytes() for x in values),
                offsets=offsets.tobytes(),
                dtype=pb.DTYPE_FLOAT32,
                trailing_shape=[] if count is None else [count],
            )
        )
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


def read_prompt(prompt: dict[str, Any], *, vocab_size: int) -> list[int]:
    """Return a prompt's ids; raise BadRequest if it holds others than the model's, or more than text."""
    if any(chunk.get("type", "encoded_text") != "encoded_text" for chunk in prompt["chunks"]):
        raise BadRequest("the prompt holds images or audio; this server takes text only")
    ids = [token for chunk in prompt["chunks"] for token in chunk["tokens"]]
    if wrong := [token for token in ids if not 0 <= token < vocab_size]:
        raise BadRequest(f"the prompt has the id {wrong[0]}; the model's are 0 to {vocab_size - 1}")
    return ids


def read_targets(
    given: dict[str, Any] | None, length: int, *, vocab_size: int
) -> np.ndarray | None:
    """Return the ids that ``target_prompt_logprobs`` names, int64 [P - 1, K], -1: none; None if it is not asked for.

    Args:
        given: the tensor, dense or sparse.
        length: of the prompt, P.
        vocab_size: of the model.

    Raises:
        BadRequest: a shape, or an id, that cannot be scored.
    """
    if given is None:
        return None
    name, shape, ids = "target_prompt_logprobs", given["shape"], np.array(given["data"], np.int64)
    if length < 2:
        raise BadRequest(f"{name} needs a prompt of at least two tokens")
    if len(shape) != 2 or shape[0] != length - 1 or not 1 <= shape[1] <= MOST_IDS:
        raise BadRequest(
            f"{name} has shape {shape}; send [{length - 1}, K] for {length} tokens, K at most"
            f" {MOST_IDS}"
        )
    if (crow := given.get("sparse_crow_indices")) is not None:
        ids = _dense(name, ids, np.array(crow), np.array(given["sparse_col_indices"]), shape, -1)
    elif ids.size != shape[0] * shape[1]:
        raise BadRequest(f"{name} has {ids.size} ids, its shape is {shape}")
    ids = ids.reshape(shape)
    if not -1 <= ids.min() <= ids.max() < vocab_size or ids.max() < 0:
        raise BadRequest(
            f"{name} has ids from {ids.min()} to {ids.max()}; send 0 to {vocab_size - 1}, or -1 for"
            " no id, and at least one id"
        )
    return ids


def write_samples(
    asked: dict[str, Any],
    length: int,
    outputs: Sequence[TokenOutput],
    prompt: ContextScores | None,
    samples: Sequence[ContextScores],
) -> bytes:
    """Return sampled sequences, and the log-probs that were asked for.

    Args:
        asked: the request.
        length: of the prompt, P.
        outputs: the samples.
        prompt: of the prompt; None if not asked for.
        samples: of the prompt with each sample; empty if not asked for.
    """
    message = pb.SampleResponse()
    for number, output in enumerate(outputs):
        sequence = message.sequences.add()
        sequence.tokens = np.asarray(output.token_ids, np.int32).tobytes()
        sequence.logprobs = np.asarray(output.log_probs, np.float32).tobytes()
        is_cut = output.stop_reason == StopReason.LENGTH
        sequence.stop_reason = pb.STOP_REASON_LENGTH if is_cut else pb.STOP_REASON_STOP
        if samples:
            ids, logprobs = _likeliest(samples[number])
            count = asked["topk_sample_logprobs"]
            sequence.topk_sampled_logprobs.CopyFrom(
                _top(ids[length - 1 :, :count], logprobs[length - 1 :, :count])
            )
    first = max(
        1, length - (asked.get("prompt_logprobs_last_n") or length)
    )  # of those that are scored
    if asked.get("prompt_logprobs"):
        values = np.full(length, np.nan, np.float32)
        if prompt is not None:
            values[first:] = prompt.logprobs[first - 1 :]
        message.prompt_logprobs = values.tobytes()
    if count := asked.get("topk_prompt_logprobs", 0):
        ids, logprobs = (
            np.zeros((length, count), np.int32),
            np.full((length, count), EMPTY, np.float32),
        )
        if prompt is not None:
            ids[first:], logprobs[first:] = (x[first - 1 :, :count] for x in _likeliest(prompt))
        message.topk_prompt_logprobs.CopyFrom(_top(ids, logprobs))
    if prompt is not None and prompt.targets is not None:
        given, logprobs = asked["target_prompt_logprobs"], prompt.targets.astype(np.float32)
        tensor = message.target_prompt_logprobs
        tensor.dtype = pb.DTYPE_FLOAT32
        tensor.shape.extend(given["shape"])
        if (crow := given.get("sparse_crow_indices")) is None:
            tensor.dense = logprobs.tobytes()
        else:
            crow, columns = (np.array(x, np.int64) for x in (crow, given["sparse_col_indices"]))
            tensor.sparse_csr.values = logprobs[
                np.repeat(np.arange(length - 1), np.diff(crow)), columns
            ].tobytes()
            tensor.sparse_csr.crow_indices, tensor.sparse_csr.col_indices = (
                crow.tobytes(),
                columns.tobytes(),
            )
    message.prompt_cache_hit_tokens = min((output.cached_tokens for output in outputs), default=0)
    return message.SerializeToString()


def _likeliest(scores: ContextScores) -> tuple[np.ndarray, np.ndarray]:
    assert scores.top is not None
    return scores.top


def _top(ids: np.ndarray, logprobs: np.ndarray) -> pb.TopkLogprobs:
    length, count = ids.shape
    token_ids, values = ids.astype(np.int32).tobytes(), logprobs.astype(np.float32).tobytes()
    return pb.TopkLogprobs(token_ids=token_ids, logprobs=values, k=count, length=length)
