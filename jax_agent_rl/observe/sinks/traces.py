"""The sinks of ``trace.sinks``: ``traces.jsonl``, MLflow, Trackio, Weave.

Their packages are imported only where they are used.
"""

from __future__ import annotations

import asyncio
import importlib
import logging
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from contextvars import copy_context
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from types import ModuleType
from typing import Any

from jax_agent_rl.config import TraceConfig
from jax_agent_rl.errors import ConfigError
from jax_agent_rl.observe.metrics import RunFolder, append_records
from jax_agent_rl.observe.sinks.background import Sink, SinkThread, SinkThreads
from jax_agent_rl.tracing import Span, Trace, Tracer

logger = logging.getLogger(__name__)

CAPACITY = 256
"""Traces that wait for a sink; more are lost."""
CLOSING_SECONDS = 30.0
"""How long all sinks together may take to finish when a run ends."""
MAX_FAILURES = 5
"""Failures in a row after which a sink gets nothing more."""

INPUTS = ("messages", "arguments", "context_tokens")
"""Span attributes that are inputs; the sinks show them separately."""
OUTPUTS = ("text", "observation", "reward", "reward_parts", "finish_reason")
"""Span attributes that are outputs."""


@asynccontextmanager
async def open_tracer(config: TraceConfig, folder: RunFolder) -> AsyncIterator[Tracer | None]:
    """Yield the tracer of ``trace.sinks``, None if there are none; let the sinks finish in the end.

    Raises:
        ConfigError: a sink's package is missing, or it cannot be reached.
    """
    if not config.sinks:
        yield None
        return
    sinks = TraceSinks(open_sinks(config, folder))
    try:
        yield Tracer(sinks.put, max_per_step=config.max_trajectories_per_step)
    finally:
        await asyncio.to_thread(sinks.close)


class TraceSinks(SinkThreads[Trace]):
    """The trace sinks of a run.

    Args:
        sinks: by name.
        capacity: traces that may wait for each.
    """

    def __init__(self, sinks: Mapping[str, Sink[Trace]], *, capacity: int = CAPACITY) -> None:
        options = {"say": logger.warning, "capacity": capacity, "max_failures": MAX_FAILURES}
        super().__init__([SinkThread(name, sink, context=copy_context(), **options) for name, sink in sinks.items()])

    def close(self, seconds: float = CLOSING_SECONDS) -> None:
        """Let the sinks finish, and log how many traces were lost."""
        super().close(seconds)
        for name, lost in self.lost().items():
            logger.warning("%d traces did not reach %s", lost, name)


class TraceFileSink:
    """Appends to ``traces.jsonl``."""

    def __init__(self, file: Path, *, most: int) -> None:
        self._file, self._most = file, most

    def write(self, trace: Trace) -> None:
        append_records(self._file, [trace_record(trace, max_text_length=self._most)])

    def close(self) -> None:
        """Every line is on disk already."""


class MlflowSink:
    """MLflow traces; ``mlflow ui --backend-store-uri URI`` shows them.

    Args:
        uri: tracking server or database.
        experiment: created if it does not exist.
        run: name of the run, a tag of every trace.
        most: characters kept of a text.
        artifacts: folder for a new experiment's files; None: the server chooses.
    """

    _TYPES = {"run": "AGENT", "generate": "LLM", "tool": "TOOL", "reward": "EVALUATOR", "wait": "UNKNOWN"}

    def __init__(self, *, uri: str, experiment: str, run: str, most: int, artifacts: Path | None = None) -> None:
        self._mlflow = _package("mlflow")
        self._mlflow.set_tracking_uri(uri)
        if artifacts is not None and self._mlflow.get_experiment_by_name(experiment) is None:
            self._mlflow.create_experiment(experiment, artifact_location=artifacts.as_uri())
        self._experiment = self._mlflow.set_experiment(experiment).experiment_id
        self._run, self._most = run, most

    def write(self, trace: Trace) -> None:
        live: list[Any] = []
        for span in trace.spans:
            opening = {"tags": _tags(trace) | {"run": self._run}, "experiment_id": self._experiment}
            live.append(
                self._mlflow.start_span_no_context(
                    _title(span),
                    span_type=self._TYPES[span.name],
                    parent_span=live[span.parent] if span.parent >= 0 else None,
                    inputs=_part(span, INPUTS, self._most) or None,
                    attributes=_rest(span, self._most),
                    start_time_ns=span.start_ns,
                    **(opening if span.parent < 0 else {}),
                )
            )
        for span, opened in reversed(list(zip(trace.spans, live, strict=True))):  # the outermost last: it is sent then
            opened.end(
                outputs=_part(span, OUTPUTS, self._most) | ({"error": why} if (why := _failure(span)) else {}) or None,
                status="ERROR" if why else "OK",
                end_time_ns=span.end_ns,
            )

    def close(self) -> None:
        self._mlflow.flush_trace_async_logging()


class TrackioTraceSink:
    """Trackio traces; ``trackio show`` shows them.

    Args:
        project: name of the project.
        run: name of the run.
        most: characters kept of a text.
    """

    _KINDS = {"generate": "generation", "tool": "tool"}

    def __init__(self, *, project: str, run: str, most: int) -> None:
        self._trackio = _package("trackio")
        self._run = self._trackio.init(
            project, name=run, embed=False, resume="allow", auto_log_gpu=False, auto_log_cpu=False
        )
        self._most = most

    def write(self, trace: Trace) -> None:
        made = self._trackio.Trace(
            messages=shortened(trace.spans[0].attributes.get("messages", []), self._most),
            metadata=_tags(trace) | _rest(trace.spans[0], self._most) | _part(trace.spans[0], OUTPUTS, self._most),
            spans=[self._span(number, span) for number, span in enumerate(trace.spans)],
        )
        self._run.log({"trace": made}, step=trace.step)

    def close(self) -> None:
        self._run.finish()

    def _span(self, number: int, span: Span) -> dict[str, Any]:
        made = {
            "id": str(number),
            "parent_id": str(span.parent) if span.parent >= 0 else None,
            "name": _title(span),
            "kind": self._KINDS.get(span.name, "span"),
            "start_time": _time(span.start_ns).isoformat(),
            "end_time": _time(span.end_ns).isoformat(),
            "duration_ms": (span.end_ns - span.start_ns) / 1e6,
            "status": "error" if _failure(span) else "ok",
            "error": _failure(span),
            "input": _part(span, INPUTS, self._most),
            "output": _part(span, OUTPUTS, self._most),
            "metadata": _rest(span, self._most),
        }
        return {key: value for key, value in made.items() if value not in (None, {})}


class WeaveSink:
    """W&B Weave calls; they need an account (``WANDB_API_KEY``) and the network.

    Args:
        project: ``entity/project``, or a project of the account's entity.
        run: name of the run, an attribute of every call.
        most: characters kept of a text.
    """

    def __init__(self, *, project: str, run: str, most: int) -> None:
        # Left to itself, Weave wraps MCP's and OpenAI's clients: a call of theirs would fail when its server is away.
        settings = {"print_call_link": False, "capture_code": False, "implicitly_patch_integrations": False}
        self._client = _package("weave").init(project, settings=settings)
        self._run, self._most = run, most

    def write(self, trace: Trace) -> None:
        calls: list[Any] = []
        for span in trace.spans:
            calls.append(
                self._client.create_call(
                    span.name,
                    _part(span, INPUTS, self._most),
                    parent=calls[span.parent] if span.parent >= 0 else None,
                    attributes=_tags(trace) | {"run": self._run} | _rest(span, self._most),
                    display_name=_title(span),
                    use_stack=False,
                    started_at=_time(span.start_ns),
                )
            )
        for span, call in reversed(list(zip(trace.spans, calls, strict=True))):
            self._client.finish_call(
                call,
                _part(span, OUTPUTS, self._most),
                RuntimeError(why) if (why := _failure(span)) else None,
                ended_at=_time(span.end_ns),
            )

    def close(self) -> None:
        self._client.finish(use_progress_bar=False)


def open_sinks(config: TraceConfig, folder: RunFolder) -> dict[str, Sink[Trace]]:
    """Open the configured sinks, by name.

    Raises:
        ConfigError: a sink's package is missing, or it cannot be reached.
    """
    return {name: _open(name, config, folder) for name in config.sinks}


def _open(name: str, config: TraceConfig, folder: RunFolder) -> Sink[Trace]:
    most, run = config.max_text_length, folder.path.name
    try:
        match name:
            case "files":
                return TraceFileSink(folder.traces, most=most)
            case "mlflow":
                if config.mlflow_tracking_uri:
                    return MlflowSink(uri=config.mlflow_tracking_uri, experiment=config.project, run=run, most=most)
                here = folder.path.resolve()
                return MlflowSink(
                    uri=f"sqlite:///{here / 'mlflow.db'}",
                    experiment=config.project,
                    run=run,
                    most=most,
                    artifacts=here / "mlflow",
                )
            case "trackio":
                return TrackioTraceSink(project=config.project, run=run, most=most)
            case _:
                return WeaveSink(project=config.project, run=run, most=most)
    except ConfigError:
        raise
    except Exception as error:  # clients raise anything, before the run has cost anything
        raise ConfigError(f"trace.sinks: {name} cannot be opened: {type(error).__name__}: {error}") from error


def _package(name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ConfigError(
            f"trace.sinks: {name} is not installed ({error}); pip install 'jax_agent_rl[trace]', or leave it out"
        ) from error


def _time(nanoseconds: int) -> datetime:
    return datetime.fromtimestamp(nanoseconds / 1e9, UTC)


def trace_record(trace: Trace, *, max_text_length: int) -> dict[str, Any]:
    """Return a record of ``traces.jsonl``: the attributes of :class:`~jax_agent_rl.tracing.Trace`, texts shortened."""
    record = asdict(trace)
    for span in record["spans"]:
        span["attributes"] = shortened(span["attributes"], max_text_length)
    return record


def shortened(value: Any, most: int) -> Any:
    """Return a value as JSON, with both ends of texts longer than ``most`` characters."""
    if isinstance(value, str):
        return value if len(value) <= most else f"{value[: most // 2]} … {value[-(most - most // 2) :]}"
    if isinstance(value, Mapping):
        return {str(key): shortened(item, most) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [shortened(item, most) for item in value]
    return value if isinstance(value, int | float | bool | None) else shortened(str(value), most)


def _title(span: Span) -> str:
    """Return the label of a span: ``tool calculator``."""
    return f"{span.name} {span.about}".rstrip()


def _tags(trace: Trace) -> dict[str, str]:
    """Return the searchable tags of a trace."""
    named = {name: getattr(trace, name) for name in ("trajectory_id", "group_id", "step", "sample", "rollout")}
    return {name: str(value) for name, value in named.items()} | {"validate": str(trace.validate).lower()}


def _failure(span: Span) -> str | None:
    """Return why a span failed, or None. A tool's error is reported to the model rather than raised."""
    return span.error or span.attributes.get("tool_error")


def _part(span: Span, names: tuple[str, ...], most: int) -> dict[str, Any]:
    """Return the attributes of a span with these names."""
    return {name: shortened(span.attributes[name], most) for name in names if name in span.attributes}


def _rest(span: Span, most: int) -> dict[str, Any]:
    """Return the attributes that are neither inputs nor outputs."""
    known = {*INPUTS, *OUTPUTS}
    return {name: shortened(value, most) for name, value in span.attributes.items() if name not in known}
