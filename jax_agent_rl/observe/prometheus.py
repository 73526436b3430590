"""Metrics as Prometheus reads them (text format 0.0.4): of engines, of requests, of a run.

Names begin with ``jax_agent_rl_``: ``engine_…`` is what an engine counts since it started, ``server_requests`` what
asked for it, ``train_…`` the newest line of a run's ``metrics.jsonl``. Counters end in ``_total``.
"""

from __future__ import annotations

import asyncio
import re
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from jax_agent_rl.errors import ConfigError
from jax_agent_rl.rollout.protocol import BackendMetrics, Capabilities, Health

if TYPE_CHECKING:
    from prometheus_client.core import Metric

    from jax_agent_rl.http_server import HttpServer

PREFIX = "jax_agent_rl_"
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
COUNTED = {
    "generated_tokens": "Ids sampled.",
    "prefill_tokens": "Prompt ids computed.",
    "cached_tokens": "Prompt ids reused from the prefix cache.",
    "requests_finished": "Requests that ended, by any stop reason.",
    "busy_seconds": "Time the engine was computing.",
    "prefill_seconds": "Part of it spent on prompts.",
    "recompilations": "Programs compiled since warm-up ended.",
    "weight_update_seconds": "Time spent taking weights.",
    "lane_steps": "Lanes of every decode step, idle ones among them.",
}
"""Every field of :class:`~jax_agent_rl.rollout.protocol.BackendMetrics`, in words."""


class RequestCounts:
    """Requests by path and status, and those being answered. One event loop."""

    def __init__(self) -> None:
        self._ended: Counter[tuple[str, int]] = Counter()
        self._running = 0

    @contextmanager
    def request(self, path: str) -> Iterator[list[int]]:
        """Around one request; put its status into the list. Without one it counts as 499: the client went away.

        Args:
            path: of the route, without ids, or every id would be a series of its own.
        """
        status: list[int] = []
        self._running += 1
        try:
            yield status
        finally:
            self._running -= 1
            self.count(path, status[-1] if status else 499)

    def count(self, path: str, status: int) -> None:
        """One request that ended."""
        self._ended[path, status] += 1

    def families(self) -> Iterator[Metric]:
        """``server_requests_total{path,status}`` and ``server_requests_running``."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        ended = CounterMetricFamily(PREFIX + "server_requests", "Requests answered.", labels=["path", "status"])
        for (path, status), count in sorted(self._ended.items()):
            ended.add_metric([path, str(status)], count)
        yield ended
        yield GaugeMetricFamily(PREFIX + "server_requests_running", "Requests under way.", value=self._running)


def gauges(values: Mapping[str, float]) -> Iterator[Metric]:
    """Plain values by name, without :data:`PREFIX`."""
    from prometheus_client.core import GaugeMetricFamily

    for name, value in values.items():
        yield GaugeMetricFamily(PREFIX + name, name.replace("_", " ").capitalize() + ".", value=value)


def engine_families(
    metrics: BackendMetrics, health: Health, capabilities: Capabilities, *, engine: str
) -> Iterator[Metric]:
    """What an engine did and how it stands, labelled with its name."""
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

    for name, text in COUNTED.items():
        family = CounterMetricFamily(f"{PREFIX}engine_{name}", text, labels=["engine"])
        family.add_metric([engine], getattr(metrics, name))
        yield family
    stands = {
        "up": ("Whether it serves.", health.ok),
        "policy_version": ("Version of the weights it serves.", health.policy_version),
        "requests_running": ("Requests that sample.", health.running),
        "requests_waiting": ("Requests that wait for a place.", health.waiting),
        "max_concurrent": ("Places.", capabilities.max_concurrent),
        "kv_used_share": ("Share of the KV cache that holds something, kept prefixes included.", health.kv_used_share),
    }
    for name, (text, value) in stands.items():
        if value is not None:
            family = GaugeMetricFamily(f"{PREFIX}engine_{name}", text, labels=["engine"])
            family.add_metric([engine], float(value))
            yield family


def text_of(families: Iterable[Metric]) -> bytes:
    """The body of ``GET /metrics``; families of one name (of several engines) are put together."""
    from prometheus_client import generate_latest

    merged: dict[str, Metric] = {}
    for family in families:
        if family.name in merged:
            merged[family.name].samples += family.samples
        else:
            merged[family.name] = family

    class Read:
        def collect(self) -> Iterable[Metric]:
            return merged.values()

    return generate_latest(Read())  # pyright: ignore[reportArgumentType]


class TrainerMetrics:
    """The newest line of a run's metrics of each kind; a collector for ``prometheus_client``, read in its thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._values: dict[str, float] = {}

    def __call__(self, record: Mapping[str, Any]) -> None:
        """Takes a line of ``metrics.jsonl``."""
        from jax_agent_rl.observe.sinks.base import scalars

        step = "step" if record["kind"] == "step" else f"{record['kind']}/step"
        with self._lock:
            self._values |= {step: record["step"], **scalars(record)}

    def collect(self) -> Iterator[Metric]:
        """``train_<name>``, with what a name may not hold as ``_``."""
        with self._lock:
            values = dict(self._values)
        yield from gauges({"train_" + re.sub(r"\W", "_", name, flags=re.ASCII): values[name] for name in values})


@contextmanager
def serve_trainer(port: int, *, say: Callable[[str], None]) -> Iterator[TrainerMetrics]:
    """Serves ``GET /metrics`` to this machine while a run lasts, in a thread: the run's own may be busy for minutes.

    Args:
        port: 0 takes a free one.
        say: takes a line with the address.

    Raises:
        ConfigError: the port is in use.
    """
    metrics = TrainerMetrics()
    server = trainer_server(metrics, port)
    try:
        server.listen()
    except ConfigError as error:
        raise ConfigError(f"trainer.prometheus_port={port} cannot be used: {error}") from error
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, name="prometheus", daemon=True)
    thread.start()
    try:
        asyncio.run_coroutine_threadsafe(server.start(), loop).result()
        say(f"metrics for Prometheus: {server.url}/metrics")
        yield metrics
    finally:
        asyncio.run_coroutine_threadsafe(server.close(), loop).result()
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


def trainer_server(metrics: TrainerMetrics, port: int) -> HttpServer:
    """The server of a run's metrics, not started."""
    from aiohttp import web

    from jax_agent_rl.http_server import HttpServer

    async def newest(request: web.Request) -> web.Response:
        return web.Response(body=text_of(metrics.collect()), headers={"Content-Type": CONTENT_TYPE})

    return HttpServer(
        [web.get("/metrics", newest)],
        refuse=lambda status, message: web.Response(status=status, text=message),
        port=port,
        token_key="(none: it listens on 127.0.0.1)",
        max_body_bytes=1,
        body_key="one byte",
    )
