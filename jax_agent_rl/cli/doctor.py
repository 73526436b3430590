"""``jax-agent-rl doctor``: command line and output."""

from __future__ import annotations

from typing import TYPE_CHECKING

import typer

from jax_agent_rl.cli.options import (
    JsonOption,
    OptionalConfig,
    Overrides,
    Panel,
    command,
    config_or_key,
    run_to_end,
)

if TYPE_CHECKING:
    from rich.console import Console

    from jax_agent_rl.config import Config
    from jax_agent_rl.deploy.doctor.findings import Finding

_STYLES = {"ok": "green", "warn": "yellow", "fail": "bold red"}


def register(app: typer.Typer) -> None:
    """Add the command."""
    command(
        app,
        Panel.CHECK,
        "doctor",
        "doctor configs/quickstart.yaml",
        "doctor configs/ppo_tool.yaml rollout.backend=vllm --json",
    )(doctor)


def doctor(config: OptionalConfig = None, overrides: Overrides = None, json: JsonOption = False) -> None:
    """Check, before a run, what would stop or spoil it: a line for each thing, with what to do where it is not ok.

    Without CONFIG, the machine: Python, packages, cores, memory, disk, limits, ports, accelerators, sandbox. With it,
    also what it names: code, tools, model, tokenizer, rows, prompts, rewards, agents and their servers, engine. Nothing
    is trained and no weights are loaded. Exits with 1 if anything fails.
    """
    import json as json_module
    from dataclasses import asdict

    from rich.console import Console

    from jax_agent_rl.config import load
    from jax_agent_rl.errors import ConfigError

    file, keys = config_or_key(config, overrides)
    if file is None and keys:
        raise ConfigError(f"{' '.join(keys)}: without a configuration there are no keys to change; give its file first")
    settings = load(file, keys) if file else None
    findings = run_to_end(_show(settings, Console()))
    failed = [finding for finding in findings if finding.status == "fail"]
    if json:
        print(json_module.dumps({"ok": not failed, "findings": [asdict(finding) for finding in findings]}))
    if failed:
        raise typer.Exit(1)


async def _show(config: Config | None, console: Console) -> list[Finding]:
    """Print each finding as it comes, and their counts by status."""
    from collections import Counter

    from rich.text import Text

    from jax_agent_rl.deploy.doctor import examine

    findings = []
    async for finding in examine(config):
        findings.append(finding)
        line = Text(f"{finding.status:<5}", style=_STYLES[finding.status])
        line.append(f"{finding.check}: ", style="bold").append(finding.text, style="default")
        console.print(line, soft_wrap=True)
    counts = Counter(finding.status for finding in findings)
    console.print(f"{counts['ok']} ok, {counts['warn']} warnings, {counts['fail']} failures", highlight=False)
    return findings
