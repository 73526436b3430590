"""Requests on their way in: which ones an engine takes, and their translation for vLLM.

Of images and videos, vLLM expects one placeholder per item and expands it itself. It would silently change a prompt
whose placeholders are expanded already: replace the first of a run by a whole run, and take the rest for text, or for
the next item. So runs are folded before vLLM gets them, and the ids that it expands them to are compared with the
request's.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence
from pathlib import Path
from typing import Any

from gpu_backend.settings import VllmSettings
from jax_agent_rl.errors import BackendError, PromptTooLongError, TokenDriftError
from jax_agent_rl.jetstream.request import RunningRequest
from jax_agent_rl.rollout.protocol import GenerateRequest
from jax_agent_rl.utils.media import FRAMES_PER_SECOND, as_frames, as_image


class RequestAdmission:
    """Refuses what vLLM would refuse late, unclearly, or with a crash (an id outside the vocabulary).

    Args:
        settings: of the engine.
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
        self._placeholders = placeholders or {}
        self._grammars = grammars

    def admit(self, request: GenerateRequest, running: Container[str]) -> RunningRequest:
        """Check a request, and return its initial state.

        Args:
            request: the request.
            running: ids of the running requests.

        Raises:
            PromptTooLongError: no room for one sampled id.
            BackendError: a duplicate id, or something this engine cannot do.
        """
        limit, name = self._settings.max_model_len, f"request {request.request_id!r}"
        if len(request.prompt_ids) >= limit:
            raise PromptTooLongError(
                f"{name}: a prompt of {len(request.prompt_ids)} ids leaves no room in rollout.max_model_len={limit}; "
                "shorten the prompt or raise rollout.max_model_len"
            )
        if request.request_id in running:
            raise BackendError(f"{name} is already running; request ids must be unique while they run")
        if not all(0 <= i < self._vocabulary for i in request.prompt_ids):
            raise BackendError(f"{name}: prompt ids must be in [0, {self._vocabulary})")
        if request.sampling.stop and self._decode_text is None:
            raise BackendError(f"{name} has stop strings, but this engine was given no tokenizer")
        if request.sampling.grammar is not None and not self._grammars:
            raise BackendError(f"{name} has a grammar, which this engine cannot follow")
        if request.sampling.grammar is not None and request.resumed:
            raise BackendError(f"{name} resumes an output under a grammar, which vLLM begins anew only")
        for kind, items in request.multi_modal.items():
            if len(items) > (allowed := self._settings.multi_modal.get(kind, 0)):
                raise BackendError(
                    f"{name} has {len(items)} of kind {kind!r}, this engine takes {allowed}: "
                    f"raise rollout.vllm.multi_modal.{kind}"
                )
        if request.lora is not None and request.lora not in self._settings.adapters:
            known = sorted(self._settings.adapters)
            raise BackendError(f"{name}: no LoRA adapter {request.lora!r}; there are {known} (rollout.adapters)")
        return RunningRequest(
            request,
            max_tokens=min(request.sampling.max_tokens, limit - len(request.prompt_ids)),
            eos_ids=self._eos_ids,
            seed=0,  # vLLM draws
            decode_text=self._decode_text,
        )

    def prompt(self, request: GenerateRequest) -> dict[str, Any]:
        """Return the prompt for vLLM."""
        if not request.multi_modal:
            return {"prompt_token_ids": list(request.prompt_ids)}
        counts = {kind: len(items) for kind, items in request.multi_modal.items()}
        folded = fold(request.prompt_ids, counts, self._placeholders)
        return {"prompt_token_ids": folded, "multi_modal_data": vllm_media(request)}

    def check_conditioned(self, request: GenerateRequest, ids: Sequence[int]) -> None:
        """Check the ids of multi-modal prompts, see :func:`check_conditioned`.

        Text reaches vLLM unchanged, which the digest of the context proves.
        """
        if request.multi_modal:
            check_conditioned(request, ids, self._placeholders)

    def adapter(self, request: GenerateRequest) -> Any:
        """Return vLLM's ``LoRARequest``, None for the plain model. Adapters are numbered in order of their names."""
        if request.lora is None:
            return None
        from vllm.lora.request import LoRARequest

        number = 1 + list(self._settings.adapters).index(request.lora)
        return LoRARequest(request.lora, number, str(Path(self._settings.adapters[request.lora]).expanduser()))


def vllm_sampling(run: RunningRequest, *, tpu: bool = False) -> dict[str, Any]:
    """Return keyword arguments of ``vllm.SamplingParams``.

    vLLM gets every stopping id as a plain stop id, and neither EOS nor stop strings: :class:`RunningRequest` decides,
    for every engine alike, which of them ended the generation, and which ids are kept.

    Args:
        run: the request.
        tpu: for the TPU plugin, which refuses seeds of requests, and reports no log-probs unless one more than the
            sampled id's is requested.
    """
    sampling = run.request.sampling
    greedy = sampling.temperature == 0
    return {
        "max_tokens": run.max_tokens,
        "temperature": sampling.temperature,
        # A greedy request that shares a batch with random ones would get log-probs of its truncated distribution.
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


def fold(ids: Sequence[int], counts: Mapping[str, int], placeholders: Mapping[str, int]) -> list[int]:
    """Fold the first runs of a placeholder, as many as there are items, to one id each.

    Later ones are kept: they are text, as a model may sample any id.

    Args:
        ids: the prompt.
        counts: number of items by kind.
        placeholders: ids by kind.

    >>> fold([1, 7, 7, 7, 2, 7, 7], {"image": 1}, {"image": 7})
    [1, 7, 2, 7, 7]
    """
    left = {placeholders[kind]: count for kind, count in counts.items()}
    folded: list[int] = []
    run: int | None = None
    for i in ids:
        if i == run:
            continue
        run = None
        if left.get(i, 0) > 0:
            left[i] -= 1
            run = i
        folded.append(i)
    return folded


def vllm_media(request: GenerateRequest) -> dict[str, list[Any]]:
    """Return ``multi_modal_data``: images, and frames with their times.

    Raises:
        BackendError: an item is not an image or a video.
    """
    try:
        return {
            kind: [_timed(as_frames(item)) if kind == "video" else as_image(item) for item in items]
            for kind, items in request.multi_modal.items()
        }
    except ValueError as error:
        raise BackendError(f"request {request.request_id!r}: {error}") from None


def _timed(frames: Any) -> tuple[Any, dict[str, Any]]:
    count = len(frames)
    return frames, {
        "fps": FRAMES_PER_SECOND,
        "duration": count / FRAMES_PER_SECOND,
        "total_num_frames": count,
        "frames_indices": list(range(count)),
        "do_sample_frames": False,
    }


def check_conditioned(request: GenerateRequest, ids: Sequence[int], placeholders: Mapping[str, int]) -> None:
    """Check that vLLM conditions on the request's ids.

    Args:
        request: the request.
        ids: the prompt as vLLM expanded it.
        placeholders: ids by kind.

    Raises:
        TokenDriftError: it does not; names the number of placeholders on each side.
    """
    if tuple(ids) == request.prompt_ids:
        return
    counts = {
        kind: (request.prompt_ids.count(placeholders[kind]), list(ids).count(placeholders[kind]))
        for kind in request.multi_modal
    }
    numbers = ", ".join(
        f"{ours} {kind} placeholders where vLLM has {theirs}" for kind, (ours, theirs) in counts.items()
    )
    raise TokenDriftError(
        f"request {request.request_id!r}: vLLM would condition on {len(ids)} ids, the request has "
        f"{len(request.prompt_ids)} ({numbers}); each placeholder must stand as often as the model reads its item "
        "(ChatCodec.expand_media), with the same model.max_pixels on both sides"
    )
