"""The newest metrics of a run, served to Prometheus as ``train_…``: the last record of ``metrics.jsonl``."""

from __future__ import annotations

import asyncio
import re
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from jax_agent_rl.errors import ConfigError
from jax_agent_rl.utils.http_server import HttpServer
from jax_agent_rl.utils.prometheus import CONTENT_TYPE, exposition_text, gauges

if TYPE_CHECKING:
    from prometheus_client.core import Metric


class TrainerMetrics:
    """The newest metrics record of each kind; a collector for ``prometheus_client``, read in its thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._values: dict[str, float] = {}

    def __call__(self, record: Mapping[str, Any]) -> None:
        """Take a record of ``metrics.jsonl``."""
        from jax_agent_rl.observe.sinks.metrics import scalars

        step = "step" if record["kind"] == "step" else f"{record['kind']}/step"
        with self._lock:
            self._values |= {step: record["step"], **scalars(record)}

    def collect(self) -> Iterator[Metric]:
        """Yield ``train_<name>``, with characters invalid in a name as ``_``."""
        with self._lock:
            values = dict(self._values)
        yield from gauges({"train_" + re.sub(r"\W", "_", name, flags=re.ASCII): values[name] for name in values})


@contextmanager
def serve_trainer(port: int, *, print_line: Callable[[str], None]) -> Iterator[TrainerMetrics]:
    """Serve ``GET /metrics`` to this machine during a run, in a thread: the event loop may be busy for minutes.

    Port 0 takes a free one; ``print_line`` takes a line with the address.

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
        print_line(f"metrics for Prometheus: {server.url}/metrics")
        yield metrics
    finally:
        asyncio.run_coroutine_threadsafe(server.close(), loop).result()
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


def trainer_server(metrics: TrainerMetrics, port: int) -> HttpServer:
    """Return the server of a run's metrics, not started."""
    from aiohttp import web

    async def newest(request: web.Request) -> web.Response:
        return web.Response(body=exposition_text(metrics.collect()), headers={"Content-Type": CONTENT_TYPE})

    return HttpServer(
        [web.get("/metrics", newest)],
        refuse=lambda request, status, message: web.Response(status=status, text=message),
        port=port,
        token_key="(none: it listens on 127.0.0.1)",
        max_body_bytes=1,
        body_key="one byte",
    )
