"""An engine's counters and state as Prometheus metrics."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from jax_agent_rl.rollout.protocol import BackendMetrics, Capabilities, Health
from jax_agent_rl.utils.prometheus import PREFIX

if TYPE_CHECKING:
    from prometheus_client.core import Metric

COUNTED = {
    "generated_tokens": "Ids sampled.",
    "prefill_tokens": "Prompt ids computed.",
    "cached_tokens": "Prompt ids reused from the prefix cache.",
    "requests_finished": "Requests that ended, by any stop reason.",
    "busy_seconds": "Time the engine was computing.",
    "prefill_seconds": "Part of busy_seconds spent on prompts.",
    "recompilations": "Programs compiled since warm-up ended.",
    "weight_update_seconds": "Time spent taking weights.",
    "slot_steps": "Slots of every decode step, idle ones included.",
}
"""Description of every field of :class:`~jax_agent_rl.rollout.protocol.BackendMetrics`."""


def engine_families(
    metrics: BackendMetrics, health: Health, capabilities: Capabilities, *, engine: str
) -> Iterator[Metric]:
    """Yield an engine's counters and state, labelled with its name."""
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

    for name, text in COUNTED.items():
        family = CounterMetricFamily(f"{PREFIX}engine_{name}", text, labels=["engine"])
        family.add_metric([engine], getattr(metrics, name))
        yield family
    state = {
        "up": ("Whether it serves.", health.ok),
        "policy_version": ("Version of the weights it serves.", health.policy_version),
        "requests_running": ("Requests that sample.", health.running),
        "requests_waiting": ("Requests that wait for a slot.", health.waiting),
        "max_concurrent": ("Decode slots.", capabilities.max_concurrent),
        "kv_used_share": ("Used share of the KV cache, kept prefixes included.", health.kv_used_share),
    }
    for name, (text, value) in state.items():
        if value is not None:
            family = GaugeMetricFamily(f"{PREFIX}engine_{name}", text, labels=["engine"])
            family.add_metric([engine], float(value))
            yield family
