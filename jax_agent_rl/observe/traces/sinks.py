"""The sinks of ``trace.sinks``. Their packages are imported only where they are used."""

from __future__ import annotations

import importlib
from datetime import UTC, datetime
from pathlib import Path
from types import ModuleType
from typing import Any

from jax_agent_rl.config import TraceConfig
from jax_agent_rl.errors import ConfigError
from jax_agent_rl.observe.metrics import RunFolder, append_records
from jax_agent_rl.observe.traces.records import (
    INPUTS,
    OUTPUTS,
    failure,
    part,
    rest,
    shortened,
    tags,
    title,
    trace_record,
)
from jax_agent_rl.observe.traces.writer import TraceSink
from jax_agent_rl.tracing import Span, Trace


class TraceFileSink:
    """Lines of ``traces.jsonl``."""

    def __init__(self, file: Path, *, most: int) -> None:
        self._file, self._most = file, most

    def write(self, trace: Trace) -> None:
        append_records(self._file, [trace_record(trace, max_text_length=self._most)])

    def close(self) -> None:
        """Every line is on disk already."""


class MlflowSink:
    """MLflow traces: look at them with ``mlflow ui --backend-store-uri URI``.

    Args:
        uri: of the tracking server or database.
        experiment: made if there is none of this name.
        artifacts: folder of a new experiment's files; None: where the server puts them.
        run: name of the run, a tag of every trace.
        most: characters kept of a text.
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
            opening = {"tags": tags(trace) | {"run": self._run}, "experiment_id": self._experiment}
            live.append(
                self._mlflow.start_span_no_context(
                    title(span),
                    span_type=self._TYPES[span.name],
                    parent_span=live[span.parent] if span.parent >= 0 else None,
                    inputs=part(span, INPUTS, self._most) or None,
                    attributes=rest(span, self._most),
                    start_time_ns=span.start_ns,
                    **(opening if span.parent < 0 else {}),
                )
            )
        for span, opened in reversed(list(zip(trace.spans, live, strict=True))):  # the outermost last: it is sent then
            opened.end(
                outputs=part(span, OUTPUTS, self._most) | ({"error": why} if (why := failure(span)) else {}) or None,
                status="ERROR" if why else "OK",
                end_time_ns=span.end_ns,
            )

    def close(self) -> None:
        self._mlflow.flush_trace_async_logging()


class TrackioTraceSink:
    """trackio traces: look at them with ``trackio show``.

    Args:
        project, run: names.
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
            metadata=tags(trace) | rest(trace.spans[0], self._most) | part(trace.spans[0], OUTPUTS, self._most),
            spans=[self._span(number, span) for number, span in enumerate(trace.spans)],
        )
        self._run.log({"trace": made}, step=trace.step)

    def close(self) -> None:
        self._run.finish()

    def _span(self, number: int, span: Span) -> dict[str, Any]:
        made = {
            "id": str(number),
            "parent_id": str(span.parent) if span.parent >= 0 else None,
            "name": title(span),
            "kind": self._KINDS.get(span.name, "span"),
            "start_time": _time(span.start_ns).isoformat(),
            "end_time": _time(span.end_ns).isoformat(),
            "duration_ms": (span.end_ns - span.start_ns) / 1e6,
            "status": "error" if failure(span) else "ok",
            "error": failure(span),
            "input": part(span, INPUTS, self._most),
            "output": part(span, OUTPUTS, self._most),
            "metadata": rest(span, self._most),
        }
        return {key: value for key, value in made.items() if value not in (None, {})}


class WeaveSink:
    """W&B Weave calls. It needs an account (``WANDB_API_KEY``) and the network.

    Args:
        project: ``entity/project``, or a project of the account's own entity.
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
                    part(span, INPUTS, self._most),
                    parent=calls[span.parent] if span.parent >= 0 else None,
                    attributes=tags(trace) | {"run": self._run} | rest(span, self._most),
                    display_name=title(span),
                    use_stack=False,
                    started_at=_time(span.start_ns),
                )
            )
        for span, call in reversed(list(zip(trace.spans, calls, strict=True))):
            self._client.finish_call(
                call,
                part(span, OUTPUTS, self._most),
                RuntimeError(why) if (why := failure(span)) else None,
                ended_at=_time(span.end_ns),
            )

    def close(self) -> None:
        self._client.finish(use_progress_bar=False)


def open_sinks(config: TraceConfig, folder: RunFolder) -> dict[str, TraceSink]:
    """The configured sinks by name.

    Raises:
        ConfigError: a sink's package is missing, or it cannot be reached.
    """
    return {name: _opened(name, config, folder) for name in config.sinks}


def _opened(name: str, config: TraceConfig, folder: RunFolder) -> TraceSink:
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
    except Exception as error:  # whatever a foreign client raises, before the run has cost anything
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
