"""Runs attacks on targets, one after the other, and tells what came of them."""

from __future__ import annotations

import asyncio
import contextlib
import html
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from jax_agent_rl.chat.codec import ChatCodec
from jax_agent_rl.config.commands import ToolServerSettings
from jax_agent_rl.errors import ConfigError, JaxAgentRLError
from jax_agent_rl.testing.redteam.attack import (
    Attack,
    AttackResult,
    AttackVerdict,
    NotApplicableError,
    Surface,
)
from jax_agent_rl.testing.redteam.on_files import OwnReaders
from jax_agent_rl.testing.redteam.on_sandboxes import require_programs
from jax_agent_rl.testing.redteam.on_servers import require_answer
from jax_agent_rl.testing.redteam.suite import attacks
from jax_agent_rl.testing.redteam.targets import (
    CodecTarget,
    EndpointTarget,
    OwnJudge,
    OwnSandbox,
    SandboxFusionPrograms,
    ServerTarget,
    ToolServerPrograms,
    require_loopback,
)
from jax_agent_rl.tool_server.sandbox import open_sandbox
from jax_agent_rl.tool_server.server import ToolServer

_CONTROLS: Mapping[Surface, Callable[[Any], Awaitable[None]]] = {
    Surface.SANDBOX: require_programs,
    Surface.SERVER: require_answer,
}
"""What a target of a surface must do before each attack: else its silence would count as held."""

REPORT_A_HOLE = "Report what broke as SECURITY.md says: in private, with the table's line."

MAX_EVIDENCE = 300
"""Characters of evidence in a report: a target may write as much as it likes."""

Targets = Mapping[Surface, Sequence[Any]]


@dataclass(frozen=True, kw_only=True)
class RedTeamRequest:
    """The options of ``redteam``: which targets, which attacks.

    Attributes:
        tool_server: address of a tool server (verl-tool's protocol) that runs Python.
        sandbox_fusion: address of a SandboxFusion server.
        server: address and path of any server that takes JSON by POST.
        endpoint: base URL of a server of OpenAI's chat completions.
        model: folder of a model for this installation's parts; the name of the endpoint's model.
        only: beginnings of names of attacks; empty: all.

    Without an address this installation's parts are attacked.
    """

    tool_server: str | None = None
    sandbox_fusion: str | None = None
    server: str | None = None
    endpoint: str | None = None
    model: str | None = None
    only: Sequence[str] = ()

    @property
    def names_others(self) -> bool:
        """Whether other programs are attacked, instead of this installation."""
        addresses = (self.tool_server, self.sandbox_fusion, self.server, self.endpoint)
        return any(address is not None for address in addresses)

    def attacks(self) -> list[Attack]:
        """Return the attacks that are asked for.

        Raises:
            ConfigError: there are none of a name.
        """
        known = attacks()
        if not self.only:
            return known
        for beginning in self.only:
            if not any(attack.name.startswith(beginning) for attack in known):
                names = ", ".join(attack.name for attack in known)
                raise ConfigError(f"--only {beginning}: no attack begins so; there are {names}")
        return [attack for attack in known if attack.name.startswith(tuple(self.only))]


@contextlib.asynccontextmanager
async def open_targets(request: RedTeamRequest) -> AsyncIterator[Targets]:
    """Yield the targets of each surface; what was started for them is closed in the end.

    Raises:
        ConfigError: an address is not on this machine, or the sandbox does not work here.
    """
    if request.names_others:
        yield _targets_of_others(request)
        return

    async with AsyncExitStack() as stack:
        sandbox = OwnSandbox(await open_sandbox())
        settings = ToolServerSettings.model_validate({"tools": ["python"], "port": 0, "workers": 1})
        server = await stack.enter_async_context(ToolServer(settings))
        targets: dict[Surface, list[Any]] = {
            Surface.SANDBOX: [sandbox, ToolServerPrograms(url=server.url)],
            Surface.TESTS: [sandbox],
            Surface.SERVER: [ServerTarget(url=server.url, path="/get_observation")],
            Surface.FILES: [OwnReaders()],
        }
        if request.model is not None:
            codec = ChatCodec.from_pretrained(request.model)
            targets[Surface.ENDPOINT] = [CodecTarget(codec, Path(request.model).name)]
            targets[Surface.JUDGE] = [OwnJudge(codec)]
        yield targets


def _targets_of_others(request: RedTeamRequest) -> Targets:
    targets: dict[Surface, list[Any]] = {}
    programs: list[Any] = []
    if request.tool_server is not None:
        programs.append(ToolServerPrograms(url=require_loopback(request.tool_server)))
    if request.sandbox_fusion is not None:
        programs.append(SandboxFusionPrograms(url=require_loopback(request.sandbox_fusion)))
    if programs:
        targets[Surface.SANDBOX] = programs

    if request.server is not None:
        url = require_loopback(request.server)
        scheme, _, rest = url.partition("://")
        address, slash, path = rest.partition("/")
        targets[Surface.SERVER] = [ServerTarget(url=f"{scheme}://{address}", path=slash + path)]
    if request.endpoint is not None:
        if request.model is None:
            raise ConfigError("--endpoint needs the name of its model: --model NAME")
        url = require_loopback(request.endpoint)
        targets[Surface.ENDPOINT] = [EndpointTarget(url=url, model=request.model)]
    return targets


async def run_attacks(
    chosen: Sequence[Attack], targets: Targets, *, print_line: Callable[[str], None]
) -> list[AttackResult]:
    """Make every attack on every target of its surface.

    An attack on a surface without a target is not applicable.

    Args:
        print_line: prints the result of each.
    """
    results = []
    for attack in chosen:
        for target in targets.get(attack.surface, [None]):
            result = await _make(attack, target)
            results.append(result)
            line = f"{result.verdict:<15} {attack.name}"
            if result.evidence:
                line += f": {result.evidence}"
            print_line(line)
    return results


async def _make(attack: Attack, target: Any) -> AttackResult:
    """Make one attack on one target, or on none."""
    began = time.monotonic()
    verdict = AttackVerdict.NOT_APPLICABLE
    evidence = ""
    if target is None:
        evidence = f"no target of the surface {attack.surface}"
    else:
        try:
            async with asyncio.timeout(attack.seconds):
                evidence = await _evidence(attack, target)
            verdict = AttackVerdict.BROKE if evidence else AttackVerdict.HELD
        except NotApplicableError as error:
            evidence = str(error)
        except TimeoutError:
            verdict = AttackVerdict.BROKE
            evidence = f"it had not ended after {time.monotonic() - began:.0f} seconds"
        except JaxAgentRLError as error:
            verdict = AttackVerdict.HELD  # a target that refuses has held
            evidence = f"refused: {error}"
        except Exception as error:  # of a reader, or of somebody's adapter
            verdict = AttackVerdict.BROKE
            evidence = f"{type(error).__name__}, which nobody handled: {error}"
    return AttackResult(
        name=attack.name,
        surface=attack.surface,
        aim=attack.aim,
        target="" if target is None else target.name,
        verdict=verdict,
        evidence=evidence[:MAX_EVIDENCE],
        seconds=round(time.monotonic() - began, 2),
    )


async def _evidence(attack: Attack, target: Any) -> str:
    """Return what an attack reached; "" if nothing.

    Raises:
        NotApplicableError: the target does not even do what it must.
        JaxAgentRLError: it refuses the attack, and still does what it must.
    """
    control = _CONTROLS.get(attack.surface)
    if control is not None:
        await control(target)
    try:
        return await attack.attempt(target)
    except JaxAgentRLError as refusal:
        if control is None:
            raise
        try:
            await control(target)
        except NotApplicableError as error:
            return f"{refusal}; afterwards, {error}"
        raise


async def redteam(
    request: RedTeamRequest, *, print_line: Callable[[str], None]
) -> list[AttackResult]:
    """Attack what the request names, and return what came of it.

    Raises:
        ConfigError: an address is not on this machine, or a name of an attack is unknown.
    """
    chosen = request.attacks()
    async with open_targets(request) as targets:
        return await run_attacks(chosen, targets, print_line=print_line)


def summary(results: Sequence[AttackResult]) -> dict[str, Any]:
    """Return the results as JSON, with the number of each verdict."""
    counts = Counter(str(result.verdict) for result in results)
    return {
        "counts": {str(verdict): counts[str(verdict)] for verdict in AttackVerdict},
        "attacks": [asdict(result) for result in results],
    }


def page(results: Sequence[AttackResult]) -> str:
    """Return the results as an HTML page that loads nothing."""
    rows = []
    for result in results:
        cells = [result.verdict, result.name, result.aim, result.target, result.evidence]
        texts = "".join(f"<td>{html.escape(str(cell))}</td>" for cell in cells)
        rows.append(f'<tr class="{str(result.verdict).replace(" ", "-")}">{texts}</tr>')
    counts = summary(results)["counts"]
    line = ", ".join(f"{count} {verdict}" for verdict, count in counts.items())
    return _PAGE.format(line=html.escape(line), rows="\n".join(rows), report=REPORT_A_HOLE)


_PAGE = """<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>Red team</title>
<style>
body {{ font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 70rem; padding: 0 1rem;
  color-scheme: light dark; }}
table {{ border-collapse: collapse; width: 100%; }}
th, td {{ text-align: left; padding: .35rem .6rem; border-bottom: 1px solid #8884;
  overflow-wrap: anywhere; vertical-align: top; }}
.broke td:first-child {{ color: #c62828; font-weight: 600; }}
.held td:first-child {{ color: #2e7d32; }}
</style>
<h1>Red team</h1>
<p>{line}</p>
<table>
<thead><tr><th>verdict<th>attack<th>aim<th>target<th>evidence</tr></thead>
<tbody>
{rows}
</tbody>
</table>
<p>{report}</p>
</html>
"""
