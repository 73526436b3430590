"""Where metrics go besides ``metrics.jsonl``: TensorBoard, Weights & Biases, Trackio (``trainer.logger``).

::

    a line of metrics ─► scalars ─► one queue and one thread per sink ─► its library
                                      fails or hangs: counted, said once; the run goes on

    thread  consumes: records.  produces: what its library keeps.  waits for: the next record, the library.

All sinks get the names of ``metrics.jsonl`` and the training step as their axis; evaluations are ``evaluation/…``.
Nested counts become ``tool_errors_by_kind/timeout``. When a run resumes, each goes on with the run it had.
"""

from __future__ import annotations

from jax_agent_rl.observe.sinks.base import RunFacts, Sink, scalars
from jax_agent_rl.observe.sinks.opening import Sinks, check_sinks, open_sinks

__all__ = ["RunFacts", "Sink", "Sinks", "check_sinks", "open_sinks", "scalars"]
