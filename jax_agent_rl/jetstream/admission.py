"""In which order the requests admitted together are copied and prefilled."""

from __future__ import annotations

import numpy as np

from jax_agent_rl.jetstream.block_manager import Allocation
from jax_agent_rl.jetstream.engine import Extension
from jax_agent_rl.models.vision.context import MultimodalContext


class AdmissionPlan:
    """Copies and prefills of one round of admissions, in stages, so that one stage's prefills run together.

    Within a stage copies come first, in the order they were planned. Who reuses or copies a page waits for the stage
    after the one that fills it, and nothing is written to a page before the stage that copies from it.

    Args:
        size: positions of a page.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._stages: list[tuple[list[tuple[int, int]], list[Extension]]] = []
        self._filled: dict[int, int] = {}  # page -> stage that writes it
        self._read: dict[int, int] = {}  # page -> last stage that copies from it

    def add(
        self, placement: Allocation, new: np.ndarray, multimodal: MultimodalContext | None = None, adapter: int = 0
    ) -> None:
        """Plans one admission: an optional copy, then a prefill of ``new`` (int32) behind what is reused.

        Args:
            multimodal: the whole context, if it has pictures.
            adapter: see :class:`~jax_agent_rl.jetstream.engine.Extension`.
        """
        pages, first = placement.pages, placement.reused // self._size
        source = None if placement.copy is None else placement.copy[0]
        reused = pages[:first] if source is None else (*pages[:first], source)
        stage = max((self._filled.get(page, -1) + 1 for page in reused), default=0)
        stage = max([stage, *(self._read.get(page, 0) for page in pages[first:])])
        if source is not None:
            self._read[source] = max(stage, self._read.get(source, 0))
        self._filled |= dict.fromkeys(pages[first:], stage)
        while len(self._stages) <= stage:
            self._stages.append(([], []))
        copies, extensions = self._stages[stage]
        if placement.copy is not None:
            copies.append(placement.copy)
        extensions.append(Extension(pages, placement.reused, new, multimodal, adapter))

    def stages(self) -> list[tuple[list[tuple[int, int]], list[Extension]]]:
        """(source, target) copies and extensions, stage by stage."""
        return self._stages
