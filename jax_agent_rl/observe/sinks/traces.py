"""The sinks of ``trace.sinks``: ``traces.jsonl``, MLflow, Trackio and Weave.

Packages are imported where they are used.
"""

from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from contextvars import Context, copy_context
from dataclasses import asdict, replace
from datetime import UTC, datetime
from types import ModuleType
from typing import Any

from jax_agent_rl.config import TraceConfig
from jax_agent_rl.errors import ConfigError
from jax_agent_rl.observe.run_dir import RunDir
from jax_agent_rl.observe.sinks.threads import Sink, SinkThread, SinkThreads
from jax_agent_rl.tracing import Span, Trace, Tracer
from jax_agent_rl.utils.packages import import_installed, install_command
from jax_agent_rl.utils.plugins import load_installed
from jax_agent_rl.utils.services import start_service_blocking

logger = logging.getLogger(__name__)

CAPACITY = 256  # waiting traces per sink
OPENING_SECONDS = 180.0
CLOSING_SECONDS = 30.0
MAX_FAILURES = 5
INPUTS = ("messages", "arguments", "context_tokens")
OUTPUTS = ("text", "observation", "reward", "reward_parts", "finish_reason")
"""Span attributes that sinks show as inputs and as outputs, apart from other attributes."""


@asynccontextmanager
async def open_tracer(config: TraceConfig, run_dir: RunDir) -> AsyncIterator[Tracer | None]:
    """Yield the tracer of ``trace.sinks``, None without sinks; let the sinks finish at the end.

    Raises:
        ConfigError: a sink's package is missing, or it cannot be reached.
    """
    if not config.sinks:
        yield None
        return
    sinks = TraceSinks(await asyncio.to_thread(open_sinks, config, run_dir))
    try:
        yield Tracer(sinks.put, max_per_step=config.max_trajectories_per_step)
    finally:
        await asyncio.to_thread(sinks.close)


def open_sinks(config: TraceConfig, run_dir: RunDir) -> dict[str, Sink[Trace]]:
    """Open the configured sinks, by name.

    Raises:
        ConfigError: a sink's package is missing, or it cannot be reached.
    """
    sinks: dict[str, Sink[Trace]] = {}
    for name in config.sinks:
        context = copy_context()  # clients keep settings, and their current run, in contexts
        try:
            make_sink = SINKS.get(name) or load_installed("trace_sinks", name)
            sink = start_service_blocking(
                functools.partial(_open_in, context, functools.partial(make_sink, config, run_dir)),
                name=f"trace.sinks: {name}",
                fix="is its server reachable? else leave it out",
                seconds=OPENING_SECONDS,
            )
            sinks[name] = _OpenedSink(sink, config.max_text_length, context)
        except ConfigError:
            raise
        except Exception as error:  # clients raise anything
            raise ConfigError(
                f"trace.sinks: {name} cannot be opened: {type(error).__name__}: {error}"
            ) from error
    return sinks


class TraceSinks(SinkThreads[Trace]):
    """The trace sinks of a run.

    Args:
        sinks: sinks by name.
        capacity: number of traces that may wait for each sink.
    """

    def __init__(self, sinks: Mapping[str, Sink[Trace]], *, capacity: int = CAPACITY) -> None:
        options = {"print_line": logger.warning, "capacity": capacity, "max_failures": MAX_FAILURES}
        threads = []
        for name, sink in sinks.items():
            threads.append(SinkThread(name, sink, context=copy_context(), **options))
        super().__init__(threads)

    def close(self, seconds: float = CLOSING_SECONDS) -> None:
        """Let the sinks finish, and log how many traces were lost."""
        super().close(seconds)
        for name, lost in self.lost().items():
            logger.warning("%d traces did not reach %s", lost, name)


class TraceFileSink:
    """Appends to ``traces.jsonl``.

    A record has the attributes of :class:`~jax_agent_rl.tracing.Trace`.
    """

    def __init__(self, config: TraceConfig, run_dir: RunDir) -> None:
        self._run_dir = run_dir

    def write(self, trace: Trace) -> None:
        self._run_dir.append(self._run_dir.traces, [asdict(trace)])

    def close(self) -> None:
        """Do nothing: every line is on disk already."""


class MlflowSink:
    """MLflow traces; ``mlflow ui --backend-store-uri URI`` shows them."""

    _TYPES = {
        "run": "AGENT",
        "generate": "LLM",
        "tool": "TOOL",
        "reward": "EVALUATOR",
        "wait": "UNKNOWN",
    }

    def __init__(self, config: TraceConfig, run_dir: RunDir) -> None:
        self._mlflow = _import("mlflow")
        self._run = run_dir.path.name
        path = run_dir.path.resolve()
        server_uri = config.mlflow_tracking_uri
        if server_uri:  # a server knows where files go
            self._mlflow.set_tracking_uri(server_uri)
        else:
            self._mlflow.set_tracking_uri(f"sqlite:///{path / 'mlflow.db'}")
            if self._mlflow.get_experiment_by_name(config.project) is None:
                files = (path / "mlflow").as_uri()
                self._mlflow.create_experiment(config.project, artifact_location=files)
        self._experiment = self._mlflow.set_experiment(config.project).experiment_id

    def write(self, trace: Trace) -> None:
        live_spans: list[Any] = []
        for span in trace.spans:
            options: dict[str, Any] = {}
            if span.parent >= 0:
                options["parent_span"] = live_spans[span.parent]
            else:
                options["tags"] = _tags(trace) | {"run": self._run}
                options["experiment_id"] = self._experiment
            live_span = self._mlflow.start_span_no_context(
                _title(span),
                span_type=self._TYPES[span.name],
                inputs=_select(span, INPUTS) or None,
                attributes=_other(span),
                start_time_ns=span.start_ns,
                **options,
            )
            live_spans.append(live_span)

        # The outermost span ends last: the trace is sent then.
        for span, live_span in reversed(list(zip(trace.spans, live_spans, strict=True))):
            outputs = _select(span, OUTPUTS)
            failure = _failure(span)
            if failure:
                outputs["error"] = failure
            live_span.end(
                outputs=outputs or None,
                status="ERROR" if failure else "OK",
                end_time_ns=span.end_ns,
            )

    def close(self) -> None:
        self._mlflow.flush_trace_async_logging()


class TrackioTraceSink:
    """Trackio traces; ``trackio show`` shows them."""

    _KINDS = {"generate": "generation", "tool": "tool"}

    def __init__(self, config: TraceConfig, run_dir: RunDir) -> None:
        self._trackio = _import("trackio")
        options: dict[str, Any] = {
            "embed": False,
            "resume": "allow",
            "auto_log_gpu": False,
            "auto_log_cpu": False,
        }
        self._run = self._trackio.init(config.project, name=run_dir.path.name, **options)

    def write(self, trace: Trace) -> None:
        root = trace.spans[0]
        trackio_trace = self._trackio.Trace(
            messages=root.attributes.get("messages", []),
            metadata=_tags(trace) | _other(root) | _select(root, OUTPUTS),
            spans=[self._span(number, span) for number, span in enumerate(trace.spans)],
        )
        self._run.log({"trace": trackio_trace}, step=trace.step)

    def close(self) -> None:
        self._run.finish()

    def _span(self, number: int, span: Span) -> dict[str, Any]:
        """Return a span as Trackio stores it, without empty fields."""
        fields = {
            "id": str(number),
            "parent_id": str(span.parent) if span.parent >= 0 else None,
            "name": _title(span),
            "kind": self._KINDS.get(span.name, "span"),
            "start_time": _time(span.start_ns).isoformat(),
            "end_time": _time(span.end_ns).isoformat(),
            "duration_ms": (span.end_ns - span.start_ns) / 1e6,
            "status": "error" if _failure(span) else "ok",
            "error": _failure(span),
            "input": _select(span, INPUTS),
            "output": _select(span, OUTPUTS),
            "metadata": _other(span),
        }
        return {key: value for key, value in fields.items() if value not in (None, {})}


class WeaveSink:
    """W&B Weave calls; they need an account (``WANDB_API_KEY``) and the network."""

    def __init__(self, config: TraceConfig, run_dir: RunDir) -> None:
        # By default Weave wraps MCP's and OpenAI's clients, whose calls would then fail whenever
        # Weave is unreachable.
        settings = {
            "print_call_link": False,
            "capture_code": False,
            "implicitly_patch_integrations": False,
        }
        self._client = _import("weave").init(config.project, settings=settings)
        self._run = run_dir.path.name

    def write(self, trace: Trace) -> None:
        calls: list[Any] = []
        for span in trace.spans:
            call = self._client.create_call(
                span.name,
                _select(span, INPUTS),
                parent=calls[span.parent] if span.parent >= 0 else None,
                attributes=_tags(trace) | {"run": self._run} | _other(span),
                display_name=_title(span),
                use_stack=False,
                started_at=_time(span.start_ns),
            )
            calls.append(call)

        for span, call in reversed(list(zip(trace.spans, calls, strict=True))):
            failure = _failure(span)
            error = RuntimeError(failure) if failure else None
            self._client.finish_call(
                call, _select(span, OUTPUTS), error, ended_at=_time(span.end_ns)
            )

    def close(self) -> None:
        self._client.finish(use_progress_bar=False)


SINKS: dict[str, Callable[[TraceConfig, RunDir], Sink[Trace]]] = {
    "files": TraceFileSink,
    "mlflow": MlflowSink,
    "trackio": TrackioTraceSink,
    "weave": WeaveSink,
}


def _open_in(context: Context, make_sink: Callable[[], Sink[Trace]]) -> Sink[Trace]:
    return context.run(make_sink)


class _OpenedSink:
    """Passes traces on to a sink, with attributes as JSON.

    Args:
        max_length: largest number of characters of a text.
        context: the context in which the sink was opened, and runs.
    """

    def __init__(self, sink: Sink[Trace], max_length: int, context: Context) -> None:
        self._sink = sink
        self._max_length = max_length
        self._context = context

    def write(self, trace: Trace) -> None:
        spans = []
        for span in trace.spans:
            attributes = shortened(span.attributes, self._max_length)
            spans.append(replace(span, attributes=attributes))
        self._context.run(self._sink.write, replace(trace, spans=tuple(spans)))

    def close(self) -> None:
        self._context.run(self._sink.close)


def shortened(value: Any, max_length: int) -> Any:
    """Return a value as JSON, with both ends of texts longer than ``max_length`` characters."""
    if isinstance(value, str):
        if len(value) <= max_length:
            return value
        start_chars = max_length // 2
        end_chars = max_length - start_chars
        return f"{value[:start_chars]} … {value[-end_chars:]}"
    if isinstance(value, Mapping):
        return {str(key): shortened(item, max_length) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [shortened(item, max_length) for item in value]
    if isinstance(value, int | float | bool | None):
        return value
    return shortened(str(value), max_length)


def _import(name: str) -> ModuleType:
    try:
        return import_installed(name)
    except ImportError as error:
        raise ConfigError(
            f"trace.sinks: {name} is not installed ({error}): {install_command('trace')}, or leave"
            " it out"
        ) from error


def _time(nanoseconds: int) -> datetime:
    return datetime.fromtimestamp(nanoseconds / 1e9, UTC)


def _title(span: Span) -> str:
    return f"{span.name} {span.about}".rstrip()


def _tags(trace: Trace) -> dict[str, str]:
    """Return the searchable tags of a trace."""
    return {
        "trajectory_id": str(trace.trajectory_id),
        "group_id": str(trace.group_id),
        "step": str(trace.step),
        "sample": str(trace.sample),
        "rollout": str(trace.rollout),
        "validate": str(trace.validate).lower(),
    }


def _failure(span: Span) -> str | None:
    """Return why a span failed; None if it did not.

    A tool's error is an attribute, because it is reported to the model rather than raised.
    """
    return span.error or span.attributes.get("tool_error")


def _select(span: Span, names: tuple[str, ...]) -> dict[str, Any]:
    return {name: span.attributes[name] for name in names if name in span.attributes}


def _other(span: Span) -> dict[str, Any]:
    """Return the attributes that are neither inputs nor outputs."""
    return {
        name: value for name, value in span.attributes.items() if name not in (*INPUTS, *OUTPUTS)
    }
