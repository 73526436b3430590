"""The sinks of ``trainer.logger``, and the newest metrics for Prometheus.

The sinks are TensorBoard, Weights & Biases and Trackio. Metrics keep the names of
``metrics.jsonl``, with the training step as the axis; evaluations are ``evaluation/…``, nested
counts ``tool_errors_by_kind/timeout``. A resumed run continues the same run in each library.
Packages are imported only where they are used.
"""

from __future__ import annotations

import asyncio
import json
import re
import threading
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from jax_agent_rl.errors import ConfigError
from jax_agent_rl.observe.sinks.threads import Sink, SinkThread, SinkThreads
from jax_agent_rl.utils.bounded_json import read_json_object
from jax_agent_rl.utils.fences import fenced
from jax_agent_rl.utils.files import write_atomically
from jax_agent_rl.utils.packages import import_installed, install_command
from jax_agent_rl.utils.plugins import load_installed
from jax_agent_rl.utils.services import start_service_blocking

if TYPE_CHECKING:
    from prometheus_client.core import Metric

    from jax_agent_rl.utils.http_server import HttpServer

PACKAGES = {"tensorboard": "tensorboardX", "wandb": "wandb", "trackio": "trackio"}
"""Packages by name in ``trainer.logger``; the extra to install has the same name."""
IDENTITIES_FILE = "loggers.json"
CLOSING_SECONDS = 60.0  # enough for an upload
FLUSH_SECONDS = 10
STEP = "step"


@dataclass(frozen=True, kw_only=True)
class RunFacts:
    """The facts about the run that a sink needs.

    Attributes:
        run_dir: the run folder; its name is the run's name.
        project: name under which runs are shown together.
        config: the resolved configuration, as JSON.
        step: the step from which the run continues; later steps are logged again. 0 means a new
            run.
        identity: the return value of :meth:`MetricSink.open` when the run began; None means a new
            run.
    """

    run_dir: Path
    project: str
    config: Mapping[str, Any]
    step: int = 0
    identity: Mapping[str, str] | None = None


class StepScalars(NamedTuple):
    """The numbers of one ``metrics.jsonl`` record by name, and its training step."""

    step: int
    values: Mapping[str, float]


class MetricSink(Sink[StepScalars], Protocol):
    """A library that stores metrics, opened in its thread."""

    def open(self, run: RunFacts) -> Mapping[str, str]:
        """Begin or continue a run; return its identity."""
        ...


class MetricSinks(SinkThreads[StepScalars]):
    """The metric sinks of a run; call it with each record of metrics."""

    def __call__(self, record: Mapping[str, Any]) -> None:
        self.put(StepScalars(record["step"], scalars(record)))


class TensorBoardSink:
    """Event files in ``<run folder>/tensorboard``.

    A resumed run purges what was logged after its step.
    """

    _writer: Any = None

    def open(self, run: RunFacts) -> Mapping[str, str]:
        import yaml
        from tensorboardX import SummaryWriter

        is_new = run.identity is None
        self._writer = SummaryWriter(
            str(run.run_dir / "tensorboard"),
            flush_secs=FLUSH_SECONDS,
            purge_step=None if is_new else run.step + 1,
            # Names have a resolution of one second: without the step, a process that resumes at
            # once would overwrite a file.
            filename_suffix=f".{run.step}",
        )
        if is_new:
            config = yaml.safe_dump(dict(run.config), sort_keys=False)
            self._writer.add_text("config", fenced(config, "yaml"), 0)
        return {"folder": "tensorboard"}

    def write(self, item: StepScalars) -> None:
        for name, value in item.values.items():
            self._writer.add_scalar(name, value, item.step)

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()


class WandbSink:
    """One W&B run; ``WANDB_MODE=offline`` writes to ``<run folder>/wandb`` for ``wandb sync``.

    W&B's own step only grows, and a resumed run may log a step again. So the training step is a
    metric, and the axis of all others.
    """

    _run: Any = None

    def open(self, run: RunFacts) -> Mapping[str, str]:
        import wandb

        identity = run.identity or {"id": uuid.uuid4().hex}
        self._run = wandb.init(
            project=run.project,
            name=run.run_dir.name,
            id=identity["id"],
            resume="allow",
            dir=str(run.run_dir),
            config=dict(run.config),
            settings=wandb.Settings(console="off", silent=True),
        )
        self._run.define_metric(STEP)
        self._run.define_metric("*", step_metric=STEP)
        return identity

    def write(self, item: StepScalars) -> None:
        self._run.log({**item.values, STEP: item.step})

    def close(self) -> None:
        if self._run is not None:
            self._run.finish()


class TrackioSink:
    """One run in Trackio's local database.

    Its name identifies it, and therefore ends randomly: run folders may share a name.
    """

    _run: Any = None

    def open(self, run: RunFacts) -> Mapping[str, str]:
        import trackio

        identity = run.identity or {"name": f"{run.run_dir.name}-{uuid.uuid4().hex[:6]}"}
        self._run = trackio.init(
            project=run.project,
            name=identity["name"],
            resume="allow",
            config=dict(run.config),
            embed=False,
        )
        return identity

    def write(self, item: StepScalars) -> None:
        self._run.log(dict(item.values), step=item.step)

    def close(self) -> None:
        if self._run is not None:
            self._run.finish()


SINKS: dict[str, Callable[[], MetricSink]] = {
    "tensorboard": TensorBoardSink,
    "wandb": WandbSink,
    "trackio": TrackioSink,
}


def check_sinks(names: Sequence[str]) -> None:
    """Check, before anything starts, that the sinks can be opened.

    Raises:
        ConfigError: a package or a login is missing; the message says how to get it.
    """
    missing = []
    for name in names:
        if name not in SINKS:
            load_installed("metric_sinks", name)
            continue
        try:
            import_installed(PACKAGES[name])
        except ImportError:
            missing.append(name)
    if missing:
        raise ConfigError(
            f"trainer.logger names {', '.join(missing)}, which is not installed:"
            f" {install_command(*missing)}, or remove it"
        )

    if "wandb" in names:
        import wandb

        # Without a key, W&B would prompt for one during start-up.
        def has_key() -> bool:
            offline = wandb.setup().settings.mode in ("offline", "disabled", "dryrun")
            return offline or wandb.login(prompt=False, verify=False)

        if not start_service_blocking(has_key, name="W&B", fix="take wandb out of trainer.logger"):
            raise ConfigError(
                "trainer.logger names wandb, which has no API key: run 'wandb login', set"
                " WANDB_API_KEY, or WANDB_MODE=offline"
            )


def _read_identities(file: Path) -> dict[str, dict[str, str]]:
    """Return each sink's identity of the run; nothing for a new run."""
    try:
        if not file.exists():
            return {}
        return read_json_object(file)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{file} cannot be read ({error}); remove it, and the trackers begin new records of"
            " this run"
        ) from None


@contextmanager
def open_sinks(
    names: Sequence[str], run: RunFacts, *, print_line: Callable[[str], None]
) -> Iterator[MetricSinks]:
    """Yield the sinks of a run. Each sink's first failure is reported; none is raised.

    Args:
        names: names from ``trainer.logger``.
        run: facts about the run; identities are read from the run folder.
        print_line: prints a line for the user; called in any thread.
    """
    file = run.run_dir / IDENTITIES_FILE
    identities = _read_identities(file)
    lock = threading.Lock()

    def start(name: str, sink: MetricSink) -> None:
        sink_run = replace(run, identity=identities.get(name))
        identity = dict(sink.open(sink_run))
        with lock:  # every sink's thread writes this file
            identities[name] = identity
            write_atomically(file, json.dumps(identities, indent=2) + "\n")

    def feed(name: str) -> SinkThread[StepScalars]:
        make_sink = SINKS.get(name) or load_installed("metric_sinks", name)
        sink = make_sink()
        return SinkThread(name, sink, print_line=warn, start=lambda: start(name, sink))

    def warn(text: str) -> None:
        print_line(f"  warning: {text}; metrics.jsonl has everything")

    sinks = MetricSinks([feed(name) for name in names])
    try:
        yield sinks
    finally:
        sinks.close(CLOSING_SECONDS)


def scalars(record: Mapping[str, Any]) -> dict[str, float]:
    """Return the numbers of a ``metrics.jsonl`` record by name, nested ones with a slash.

    >>> scalars({"kind": "evaluation", "step": 3, "accuracy": 0.5, "lost": {"tool": 1}})
    {'evaluation/accuracy': 0.5, 'evaluation/lost/tool': 1.0}
    """
    prefix = "" if record["kind"] == "step" else f"{record['kind']}/"
    metrics = {name: value for name, value in record.items() if name not in ("kind", "step")}
    return dict(_numbers(metrics, prefix))


def _numbers(tree: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, float]]:
    for name, value in tree.items():
        if isinstance(value, Mapping):
            yield from _numbers(value, f"{prefix}{name}/")
        elif isinstance(value, (int, float)):
            yield f"{prefix}{name}", float(value)


class TrainerMetrics:
    """The newest metrics record of each kind, as a collector for ``prometheus_client``.

    The record is written in the trainer's thread and read in the server's.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._values: dict[str, float] = {}

    def __call__(self, record: Mapping[str, Any]) -> None:
        """Take a record of ``metrics.jsonl``."""
        step = "step" if record["kind"] == "step" else f"{record['kind']}/step"
        with self._lock:
            self._values |= {step: record["step"], **scalars(record)}

    def collect(self) -> Iterator[Metric]:
        """Yield ``train_<name>``, with characters invalid in a name as ``_``."""
        from jax_agent_rl.utils.prometheus import gauges

        with self._lock:
            values = dict(self._values)
        renamed = {}
        for name, value in values.items():
            renamed["train_" + re.sub(r"\W", "_", name, flags=re.ASCII)] = value
        yield from gauges(renamed)


@contextmanager
def serve_trainer(port: int, *, print_line: Callable[[str], None]) -> Iterator[TrainerMetrics]:
    """Serve ``GET /metrics`` to this machine during a run.

    It has its own thread, because the run's event loop may be busy for minutes.

    Args:
        port: the port; 0 takes a free one.
        print_line: called with a line that names the address.

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

    from jax_agent_rl.utils.http_server import HttpServer
    from jax_agent_rl.utils.prometheus import CONTENT_TYPE, exposition_text

    async def newest(request: web.Request) -> web.Response:
        return web.Response(
            body=exposition_text(metrics.collect()), headers={"Content-Type": CONTENT_TYPE}
        )

    return HttpServer(
        [web.get("/metrics", newest)],
        refuse=lambda request, status, message: web.Response(status=status, text=message),
        port=port,
        token_key="(none: it listens on 127.0.0.1)",
        max_body_bytes=1,
        body_key="one byte",
    )
