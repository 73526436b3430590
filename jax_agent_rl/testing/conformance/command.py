"""``jax-agent-rl conformance``: the suite for users."""

from __future__ import annotations

import asyncio
import json
import tempfile
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from jax_agent_rl.errors import ConfigError
from jax_agent_rl.testing.conformance.models import prepare_folders
from jax_agent_rl.testing.conformance.report import print_report
from jax_agent_rl.testing.conformance.runner import Report, Result, run_suite
from jax_agent_rl.testing.conformance.subjects import SubjectOptions, make_subject


def run_command(
    backend: str,
    *,
    model: Path | None,
    url: str | None,
    token: str | None,
    engine: str,
    brought: str | None = None,
    adapters: bool = False,
    tolerance: float,
    max_model_len: int,
    only: Sequence[str],
    as_json: bool,
    console: Console,
) -> Report:
    """Runs the suite on a backend, prints the table and, with ``as_json``, one JSON object as the last line.

    Raises:
        ConfigError: options that do not go together, or a backend that is not there.
    """
    if url is not None and (backend != "remote" or model is None):
        raise ConfigError(
            f"--url {url} goes with --backend remote and --model: the folder of the model that server serves, to "
            f"compare with; got --backend {backend}, --model {model}"
        )
    if brought is not None and "jetstream" not in (backend, engine):
        raise ConfigError(f"--brought {brought} is an engine of backend jetstream; got --backend {backend}")
    if engine in ("remote", "ray"):
        raise ConfigError(f"--engine {engine}: it needs an engine of its own behind it; use jetstream or vllm")
    with tempfile.TemporaryDirectory(prefix="conformance-") as scratch, console.status("preparing") as status:

        def say(result: Result) -> None:
            status.update(f"{result.check}: {result.outcome}")

        options = SubjectOptions(
            folders=prepare_folders(model, Path(scratch)),
            max_model_len=max_model_len,
            tolerance=tolerance,
            url=url,
            token=token,
            engine=engine,
            brought=brought,
            adapters=adapters,
        )
        report = asyncio.run(run_suite(make_subject(backend, options), only=only, say=say))
    print_report(report, console)
    if as_json:
        print(json.dumps(report.to_json()))
    return report
