"""In which order the requests admitted together are copied and prefilled."""

from __future__ import annotations

import numpy as np

from jax_agent_rl.jetstream.engine import Extension
from jax_agent_rl.jetstream.rows import Placement
from jax_agent_rl.models.shown import Shown


class AdmissionPlan:
    """Copies and prefills of one round of admissions, in stages, so that one stage's prefills run together.

    Within a stage copies come first, in the order they were planned. A copy waits for the stage after the one that
    fills its source, and nothing touches a row before the stage that copies from it.
    """

    def __init__(self) -> None:
        self._stages: list[tuple[list[tuple[int, int]], list[Extension]]] = []
        self._filled: dict[int, int] = {}  # row -> stage that writes it
        self._read: dict[int, int] = {}  # row -> last stage that copies from it

    def add(self, placement: Placement, new: np.ndarray, shown: Shown | None = None) -> None:
        """Plans one admission: an optional copy, then a prefill of ``new`` (int32) behind what is reused.

        Args:
            shown: the whole context, if it has pictures.
        """
        source, row = placement.copy_from, placement.row
        stage = self._read.get(row, 0)
        if source is not None:
            stage = max(stage, self._filled.get(source, -1) + 1)
            self._read[source] = max(stage, self._read.get(source, 0))
        self._filled[row] = stage
        while len(self._stages) <= stage:
            self._stages.append(([], []))
        copies, extensions = self._stages[stage]
        if source is not None:
            copies.append((source, row))
        extensions.append(Extension(row, placement.reused, new, shown))

    def stages(self) -> list[tuple[list[tuple[int, int]], list[Extension]]]:
        """(source, target) copies and extensions, stage by stage."""
        return self._stages
