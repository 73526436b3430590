"""An engine's counters and state for Prometheus."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields
from typing import TYPE_CHECKING

from jax_agent_rl.rollout.protocol import BackendMetrics, Capabilities, Health
from jax_agent_rl.utils.prometheus import PREFIX

if TYPE_CHECKING:
    from prometheus_client.core import Metric


def engine_families(
    metrics: BackendMetrics, health: Health, capabilities: Capabilities, *, engine: str
) -> Iterator[Metric]:
    """Yield an engine's counters and state, labelled with its name."""
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

    for counter in fields(metrics):
        family = CounterMetricFamily(
            f"{PREFIX}engine_{counter.name}", counter.metadata["help"], labels=["engine"]
        )
        family.add_metric([engine], getattr(metrics, counter.name))
        yield family

    gauges = {
        "up": ("Whether it serves.", health.ok),
        "policy_version": ("Version of the weights it serves.", health.policy_version),
        "requests_running": ("Requests that sample.", health.running),
        "requests_waiting": ("Requests that wait for a slot.", health.waiting),
        "max_concurrent": ("Decode slots.", capabilities.max_concurrent),
        "kv_used_share": (
            "Used share of the KV cache, kept prefixes included.",
            health.kv_used_share,
        ),
    }
    for name, (description, value) in gauges.items():
        if value is not None:
            family = GaugeMetricFamily(f"{PREFIX}engine_{name}", description, labels=["engine"])
            family.add_metric([engine], float(value))
            yield family
