"""Images and videos for vLLM, and the check that they did not change the ids.

vLLM expects one placeholder per item and expands it itself. It would silently change a prompt whose placeholders are
expanded already: replace the first of a run by a whole run, and take the rest for text, or for the next item. So runs
are folded before vLLM gets them, and the ids that it expands them to are compared with the request's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from jax_agent_rl.errors import BackendError, TokenDriftError
from jax_agent_rl.rollout.protocol import GenerateRequest
from jax_agent_rl.utils.media import FRAMES_PER_SECOND, as_frames, as_image


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
