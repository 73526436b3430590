"""``jax-agent-rl conformance``: run the suite and print its report."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from jax_agent_rl.errors import ConfigError
from jax_agent_rl.testing.conformance.backends import BackendOptions, select_backend
from jax_agent_rl.testing.conformance.models import prepare_folders
from jax_agent_rl.testing.conformance.runner import Report, Result, run_suite

_STYLES = {"passed": "green", "failed": "bold red", "skipped": "yellow"}


def run_command(
    backend: str,
    *,
    model: Path | None,
    url: str | None,
    token: str | None,
    engine: str,
    engine_factory: str | None,
    adapters: bool,
    data_parallel: int,
    tolerance: float,
    max_model_len: int,
    only: Sequence[str],
    as_json: bool,
    console: Console,
) -> Report:
    """Run the suite on a backend and print the report.

    Args:
        backend: a name in :data:`~jax_agent_rl.testing.conformance.backends.BACKENDS`, or ``module:function``.
        model: model folder; None for a tiny random one.
        url: address of a running rollout server, for ``remote``.
        token: that server's token.
        engine: backend behind the server or in the Ray actor that the suite starts.
        engine_factory: value of ``rollout.jetstream.engine_factory``, for ``jetstream``.
        adapters: whether to serve and test a LoRA adapter.
        data_parallel: engines of ``jetstream``, each on a device of its own.
        tolerance: largest log-prob error, in nats.
        max_model_len: context length to serve with.
        only: names of checks to run; empty for all.
        as_json: print one JSON object as the last line.
        console: where the report is printed.

    Raises:
        ConfigError: the options are incompatible, or the backend is not available.
    """
    if url is not None and (backend != "remote" or model is None):
        raise ConfigError(
            f"--url {url} goes with --backend remote and --model: the folder of the model that server serves, to "
            f"compare with; got --backend {backend}, --model {model}"
        )
    if engine_factory is not None and "jetstream" not in (backend, engine):
        raise ConfigError(f"--engine-factory {engine_factory} needs backend jetstream; got --backend {backend}")
    if engine in ("remote", "ray"):
        raise ConfigError(f"--engine {engine}: it needs an engine of its own behind it; use jetstream or vllm")
    with tempfile.TemporaryDirectory(prefix="conformance-") as scratch, console.status("preparing") as status:

        def show(result: Result) -> None:
            status.update(f"{result.check}: {result.outcome}")

        options = BackendOptions(
            folders=prepare_folders(model, Path(scratch)),
            max_model_len=max_model_len,
            tolerance=tolerance,
            url=url,
            token=token,
            engine=engine,
            engine_factory=engine_factory,
            adapters=adapters,
            data_parallel=data_parallel,
        )
        report = run_suite(select_backend(backend, options), only=only, on_result=show)
    print_report(report, console)
    if as_json:
        print(json.dumps(report.to_json()))
    return report


def print_report(report: Report, console: Console) -> None:
    """Print one row per check, then each failure with what was expected, the result and the likely cause."""
    table = Table(title=f"conformance of {report.backend}", title_justify="left")
    table.add_column("check", no_wrap=True)
    table.add_column("result", no_wrap=True)
    table.add_column("s", justify="right")
    table.add_column("rule, or why it was skipped")
    for result in report.results:
        note = result.detail if result.outcome == "skipped" else result.claim
        style = _STYLES[result.outcome]
        table.add_row(result.check, f"[{style}]{result.outcome}[/]", f"{result.seconds:.1f}", escape(note))
    console.print(table)
    for result in report.results:
        if result.outcome == "failed":
            console.print(f"[bold red]{result.check}[/]: {escape(result.detail)}\n", highlight=False)
    counts = ", ".join(f"{report.count(outcome)} {outcome}" for outcome in _STYLES)
    console.print(f"{report.backend}: {counts}", highlight=False)
