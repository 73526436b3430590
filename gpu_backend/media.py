"""Images and videos in vLLM's words, and the proof that they did not change the ids.

vLLM wants one placeholder per item and writes it out itself. A prompt that has them written out already would be
changed silently: it would find the first placeholder of a run, put a whole run in its place, and take the rest of the
run for text, or for the next item's. So runs are folded before vLLM sees them, and what it makes of them is compared
with what was asked for.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from jax_agent_rl.errors import BackendError, TokenDriftError
from jax_agent_rl.rollout.protocol import GenerateRequest
from jax_agent_rl.utils.media import FRAMES_PER_SECOND, as_frames, as_image


def fold(ids: Sequence[int], counts: Mapping[str, int], placeholders: Mapping[str, int]) -> list[int]:
    """Ids in which the first runs of a placeholder, as many as there are items, are one id each.

    Later ones are left alone: they are text, sampled by a model that may sample any id.

    Args:
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
    """``multi_modal_data``: pictures, and frames with their times.

    Raises:
        BackendError: an item is no image or video.
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
    """Whether vLLM conditions on the request's ids.

    Args:
        ids: the prompt as vLLM has it.

    Raises:
        TokenDriftError: it does not; says how many placeholders each side has.
    """
    if tuple(ids) == request.prompt_ids:
        return
    counts = {
        kind: (request.prompt_ids.count(placeholders[kind]), list(ids).count(placeholders[kind]))
        for kind in request.multi_modal
    }
    told = ", ".join(f"{ours} {kind} placeholders where vLLM has {theirs}" for kind, (ours, theirs) in counts.items())
    raise TokenDriftError(
        f"request {request.request_id!r}: vLLM would condition on {len(ids)} ids, the request has "
        f"{len(request.prompt_ids)} ({told}); each placeholder must stand as often as the model reads its item "
        "(ChatCodec.expand_media), with the same model.max_pixels on both sides"
    )
