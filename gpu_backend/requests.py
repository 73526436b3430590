"""Requests on their way into vLLM, and its outputs on their way back.

Requests are checked and translated; outputs become chunks of ids, log-probs and versions.

Of images and videos, vLLM expects one placeholder per item and expands it itself. It would silently
change a prompt whose placeholders are expanded already: it would replace the first placeholder of a
run by a complete run, and take the others for text, or for the next item. So runs are folded before
vLLM gets them, and the ids that it expands them to are compared with the request's.
"""

from __future__ import annotations

import asyncio
import functools
import time
from bisect import bisect_right
from collections.abc import Callable, Container, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from gpu_backend.settings import VllmSettings
from jax_agent_rl.chat.grammar_limits import GrammarError, check_grammar, in_grammar_thread
from jax_agent_rl.errors import BackendError, PromptTooLongError, TokenDriftError
from jax_agent_rl.jetstream.request import RunningRequest
from jax_agent_rl.rollout.protocol import BackendMetrics, GenerateRequest, TokenChunk
from jax_agent_rl.types import RoutedExperts, StopReason
from jax_agent_rl.utils.media import FRAMES_PER_SECOND, as_frames, as_image


def check_request(
    request: GenerateRequest,
    running: Container[str],
    *,
    max_model_len: int,
    vocabulary: int,
    stop_strings: bool,
) -> None:
    """Refuse a request that no engine of this model could serve.

    Args:
        running: ids of the running requests.
        stop_strings: whether ids can be decoded to text, which stop strings need.

    Raises:
        PromptTooLongError: no room for one sampled id.
        BackendError: a duplicate id, an id that the model does not have, or stop strings.
    """
    name = f"request {request.request_id!r}"
    prompt_len = len(request.prompt_ids)
    if prompt_len >= max_model_len:
        raise PromptTooLongError(
            f"{name}: a prompt of {prompt_len} ids leaves no room in"
            f" rollout.max_model_len={max_model_len}; shorten the prompt or raise"
            " rollout.max_model_len"
        )
    if request.request_id in running:
        raise BackendError(f"{name} is already running; request ids must be unique while they run")
    if not all(0 <= token_id < vocabulary for token_id in request.prompt_ids):
        raise BackendError(f"{name}: prompt ids must be in [0, {vocabulary})")
    if request.sampling.stop and not stop_strings:
        raise BackendError(f"{name} has stop strings, but this engine was given no tokenizer")


class RequestAdmission:
    """Refuses what vLLM would refuse late, unclearly, or with a crash.

    An id outside the vocabulary would crash it.

    Args:
        vocabulary: size of the model's vocabulary.
        eos_ids: ids that end a generation.
        decode_text: ids to text; without it requests with stop strings are refused.
        placeholders: id of one position of an image or a video, by kind.
        grammars: whether vLLM was started with what it needs to follow grammars.
    """

    def __init__(
        self,
        settings: VllmSettings,
        *,
        vocabulary: int,
        eos_ids: frozenset[int],
        decode_text: Callable[[Sequence[int]], str] | None,
        placeholders: Mapping[str, int] | None = None,
        grammars: bool = False,
    ) -> None:
        self._settings = settings
        self._vocabulary = vocabulary
        self._eos_ids = eos_ids
        self._decode_text = decode_text
        self.placeholders = placeholders or {}
        self._grammars = grammars

    def admit(self, request: GenerateRequest, running: Container[str]) -> RunningRequest:
        """Check a request, and return its initial state.

        Args:
            running: ids of the running requests.

        Raises:
            PromptTooLongError: no room for one sampled id.
            BackendError: a duplicate id, or something this engine cannot do.
        """
        name = f"request {request.request_id!r}"
        max_model_len = self._settings.max_model_len
        check_request(
            request,
            running,
            max_model_len=max_model_len,
            vocabulary=self._vocabulary,
            stop_strings=self._decode_text is not None,
        )

        if request.sampling.grammar is not None:
            if not self._grammars:
                raise BackendError(f"{name} has a grammar, which this engine cannot follow")
            if request.resumed:
                raise BackendError(
                    f"{name} resumes an output under a grammar, which vLLM begins anew only"
                )

        for kind, items in request.multi_modal.items():
            max_items = self._settings.multi_modal.get(kind, 0)
            if len(items) > max_items:
                raise BackendError(
                    f"{name} has {len(items)} of kind {kind!r}, this engine takes {max_items}: "
                    f"raise rollout.vllm.multi_modal.{kind}"
                )
        if request.lora is not None and request.lora not in self._settings.adapters:
            known = sorted(self._settings.adapters)
            raise BackendError(
                f"{name}: no LoRA adapter {request.lora!r}; there are {known} (rollout.adapters)"
            )

        return RunningRequest(
            request,
            max_tokens=min(request.sampling.max_tokens, max_model_len - len(request.prompt_ids)),
            eos_ids=self._eos_ids,
            seed=0,  # vLLM draws
            decode_text=self._decode_text,
        )

    async def check_grammar(self, request: GenerateRequest) -> None:
        """Check that a request's grammar, if it has one, can be compiled within limits.

        vLLM compiles grammars without limits.

        Raises:
            BackendError: it cannot.
        """
        grammar = request.sampling.grammar
        if grammar is None:
            return
        try:
            await in_grammar_thread(functools.partial(check_grammar, grammar))
        except GrammarError as error:
            raise BackendError(f"request {request.request_id!r}: {error}") from None

    def prompt(self, request: GenerateRequest) -> dict[str, Any]:
        """Return the prompt for vLLM."""
        if not request.multi_modal:
            return {"prompt_token_ids": list(request.prompt_ids)}
        counts = {kind: len(items) for kind, items in request.multi_modal.items()}
        folded = fold(request.prompt_ids, counts, self.placeholders)
        return {"prompt_token_ids": folded, "multi_modal_data": vllm_media(request)}

    def adapter(self, request: GenerateRequest) -> Any:
        """Return vLLM's ``LoRARequest``, None for the plain model."""
        if request.lora is None:
            return None
        from vllm.lora.request import LoRARequest  # pyright: ignore[reportMissingImports]

        adapters = self._settings.adapters
        number = 1 + list(adapters).index(request.lora)
        folder = Path(adapters[request.lora]).expanduser()
        return LoRARequest(request.lora, number, str(folder))


def vllm_sampling(run: RunningRequest, *, tpu: bool = False) -> dict[str, Any]:
    """Return keyword arguments of ``vllm.SamplingParams``.

    vLLM gets every stopping id as a plain stop id, and neither EOS nor stop strings:
    :class:`RunningRequest` decides, for every engine alike, which of them ended the generation, and
    which ids are kept.

    Args:
        tpu: for the TPU plugin, which refuses seeds of requests, and reports no log-probs unless
            one more than the sampled id's is requested.
    """
    sampling = run.request.sampling
    greedy = sampling.temperature == 0
    return {
        "max_tokens": run.max_tokens,
        "temperature": sampling.temperature,
        # A greedy request that shares a batch with random ones would get log-probs of its truncated
        # distribution.
        "top_p": 1.0 if greedy else sampling.top_p,
        "top_k": 0 if greedy else sampling.top_k,
        "min_p": 0.0 if greedy else sampling.min_p,
        "seed": None if tpu else sampling.seed,
        "stop_token_ids": run.stop_ids,
        "ignore_eos": True,
        "logprobs": 1 if tpu else 0,
        "detokenize": False,
        "routed_experts_prompt_start": run.request.routed_experts_prompt_start,
    }


def fold(
    ids: Sequence[int], counts: Mapping[str, int], placeholders: Mapping[str, int]
) -> list[int]:
    """Fold the first runs of a placeholder, as many as there are items, to one id each.

    Later runs stay as they are: they are text, as a model may sample any id.

    Args:
        ids: the prompt.
        counts: number of items by kind.
        placeholders: placeholder ids by kind.

    >>> fold([1, 7, 7, 7, 2, 7, 7], {"image": 1}, {"image": 7})
    [1, 7, 2, 7, 7]
    """
    items_left = {placeholders[kind]: count for kind, count in counts.items()}
    folded: list[int] = []
    run_id: int | None = None  # the placeholder whose run is being folded
    for token_id in ids:
        if token_id == run_id:
            continue
        run_id = None
        if items_left.get(token_id, 0) > 0:
            items_left[token_id] -= 1
            run_id = token_id
        folded.append(token_id)
    return folded


def vllm_media(request: GenerateRequest) -> dict[str, list[Any]]:
    """Return ``multi_modal_data``: images, and frames with their times.

    Raises:
        BackendError: an item is not an image or a video.
    """
    media: dict[str, list[Any]] = {}
    try:
        for kind, items in request.multi_modal.items():
            if kind == "video":
                media[kind] = [_timed(as_frames(item)) for item in items]
            else:
                media[kind] = [as_image(item) for item in items]
    except ValueError as error:
        raise BackendError(f"request {request.request_id!r}: {error}") from None
    return media


def _timed(frames: Any) -> tuple[Any, dict[str, Any]]:
    """Return a video's frames, and what vLLM's processor has to know of their times."""
    count = len(frames)
    return frames, {
        "fps": FRAMES_PER_SECOND,
        "duration": count / FRAMES_PER_SECOND,
        "total_num_frames": count,
        "frames_indices": list(range(count)),
        "do_sample_frames": False,
    }


def check_conditioned(
    request: GenerateRequest, ids: Sequence[int], placeholders: Mapping[str, int]
) -> None:
    """Check that vLLM conditions on the ids of a multi-modal request.

    The ids of other requests reach it unchanged.

    Args:
        ids: the prompt as vLLM expanded it.
        placeholders: placeholder ids by kind.

    Raises:
        TokenDriftError: it does not; names the number of placeholders on each side.
    """
    if not request.multi_modal or tuple(ids) == request.prompt_ids:
        return

    differences = []
    for kind in request.multi_modal:
        ours = request.prompt_ids.count(placeholders[kind])
        theirs = list(ids).count(placeholders[kind])
        differences.append(f"{ours} {kind} placeholders where vLLM has {theirs}")
    raise TokenDriftError(
        f"request {request.request_id!r}: vLLM would condition on {len(ids)} ids, the request has"
        f" {len(request.prompt_ids)} ({', '.join(differences)}); each placeholder must stand as"
        " often as the model reads its item (ChatCodec.expand_media), with the same"
        " model.max_pixels on both sides"
    )


# --- outputs --------------------------------------------------------------------------------------

Span = tuple[int, int]
"""(version, index of the first output token it sampled), in rising order."""


class LiveRequest:
    """A request and its state.

    Attributes:
        run: ids so far, and the stop conditions.
        submitted: set once vLLM has accepted or refused the request.
        collector: vLLM's queue of its outputs (``RequestOutputCollector``).
        state: vLLM's own record of it (``RequestState``); holds the versions of tokens not yet
            reported as final.
        left_engine: vLLM has finished it.
        prompt_ids: the prompt as vLLM reports it.
    """

    def __init__(self, run: RunningRequest) -> None:
        self.run = run
        self.submitted = asyncio.Event()
        self.collector: Any = None
        self.state: Any = None
        self.left_engine = False
        self.prompt_ids: Sequence[int] = run.request.prompt_ids

    @property
    def finished(self) -> bool:
        return self.run.stop_reason is not None

    def take(self, output: Any, spans: Sequence[Span]) -> TokenChunk | None:
        """Return the chunk that a vLLM ``RequestOutput`` adds; None if there is none.

        vLLM does not say what a grammar excluded, so all ids under a grammar count as constrained.
        Nor can it continue an output within a grammar. So the ids of such a request come in one
        chunk at the end; an aborted one returns no ids and begins anew.

        Args:
            output: with new tokens only.
            spans: versions by index of output token, at least up to the end of this output.

        Raises:
            BackendError: vLLM reports an error or omits log-probs.
        """
        run = self.run
        completion = output.outputs[0]
        self.left_engine = output.finished
        ids = list(completion.token_ids)
        log_probs = _log_probs(run.request.request_id, ids, completion.logprobs)
        versions = expand_versions(spans, len(run.token_ids), len(ids))
        num_accepted = 0
        for token, log_prob, version in zip(ids, log_probs, versions, strict=True):
            num_accepted += run.accept(np.array([token]), np.array([log_prob]), version)

        if output.finished and run.stop_reason is None:
            run.stop_reason = self._reason(completion.finish_reason)
        if run.stop_reason is not None:
            if output.prompt_token_ids is not None:
                self.prompt_ids = output.prompt_token_ids
            run.cached_tokens = output.num_cached_tokens or 0
        if completion.routed_experts is not None:
            # The last output alone reports them, for all positions that were fed.
            routed = RoutedExperts.of(
                run.request.routed_experts_prompt_start, completion.routed_experts
            )
            run.routed = routed.until(len(run.request.prompt_ids) + len(run.token_ids) - 1)

        if run.request.sampling.grammar is not None:
            if self.finished:
                return self._constrained_chunk()
            return None
        if num_accepted == 0 and run.stop_reason is None:
            return None
        final = None
        if run.stop_reason is not None:
            final = run.output([*self.prompt_ids, *run.token_ids])
        return TokenChunk(
            token_ids=tuple(ids[:num_accepted]),
            log_probs=tuple(log_probs[:num_accepted]),
            policy_versions=tuple(versions[:num_accepted]),
            final=final,
        )

    def _constrained_chunk(self) -> TokenChunk:
        """Return the complete output of a finished request under a grammar as one chunk."""
        run = self.run
        if run.stop_reason is StopReason.ABORTED:
            run.token_ids = []
            run.log_probs = []
            run.versions = []
            run.routed = None
        run.constrained = [True] * len(run.token_ids)
        final = run.output([*self.prompt_ids, *run.token_ids])
        return TokenChunk(
            token_ids=final.token_ids,
            log_probs=final.log_probs,
            policy_versions=final.policy_versions,
            constrained=final.constrained,
            final=final,
        )

    def _reason(self, finish_reason: str | None) -> StopReason:
        if finish_reason == "abort":
            return StopReason.ABORTED
        if finish_reason == "length":
            return StopReason.LENGTH
        raise BackendError(
            f"request {self.run.request.request_id!r}: vLLM ended it with {finish_reason!r}"
        )


def _log_probs(request_id: str, ids: Sequence[int], reported: Sequence[Any] | None) -> list[float]:
    """Return the sampled ids' log-probs, which vLLM reports as one mapping per position."""
    reported = reported or ()
    if ids and len(reported) != len(ids):
        raise BackendError(
            f"request {request_id!r}: vLLM returned {len(ids)} ids, but {len(reported)} log-probs"
        )
    return [float(position[token].logprob) for token, position in zip(ids, reported, strict=False)]


def expand_versions(spans: Sequence[Span], start: int, count: int) -> list[int]:
    """Return the versions of output tokens ``start .. start + count``.

    >>> expand_versions([(1, 0), (2, 5)], start=3, count=4)
    [1, 1, 2, 2]

    Raises:
        ValueError: a token lies before the first span.
    """
    starts = [span_start for _, span_start in spans]
    if count and (not spans or starts[0] > start):
        raise ValueError(
            f"tokens {start}..{start + count} lie before the first version span {list(spans[:1])}"
        )
    versions = []
    for index in range(start, start + count):
        version, _ = spans[bisect_right(starts, index) - 1]
        versions.append(version)
    return versions


class Usage:
    """Counts requests as they begin and end.

    vLLM does not report the time it spends on prompts, so ``prefill_seconds`` stays 0;
    ``busy_seconds`` is the time with at least one request inside.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._running: dict[int, RunningRequest] = {}
        self._busy_since = 0.0
        self._busy_seconds = 0.0
        self._generated = 0
        self._prefilled = 0
        self._cached = 0
        self._finished = 0
        self.weight_update_seconds = 0.0

    def begin(self, run: RunningRequest) -> None:
        if not self._running:
            self._busy_since = self._clock()
        self._running[id(run)] = run

    def end(self, run: RunningRequest) -> None:
        del self._running[id(run)]
        if not self._running:
            self._busy_seconds += self._clock() - self._busy_since
        self._generated += len(run.token_ids)
        if run.stop_reason is not None:
            self._finished += 1
            self._cached += run.cached_tokens
            self._prefilled += len(run.request.prompt_ids) - run.cached_tokens

    def metrics(self) -> BackendMetrics:
        generated = self._generated
        for run in self._running.values():
            generated += len(run.token_ids)
        busy_seconds = self._busy_seconds
        if self._running:
            busy_seconds += self._clock() - self._busy_since
        return BackendMetrics(
            generated_tokens=generated,
            prefill_tokens=self._prefilled,
            cached_tokens=self._cached,
            requests_finished=self._finished,
            busy_seconds=busy_seconds,
            weight_update_seconds=self.weight_update_seconds,
        )
