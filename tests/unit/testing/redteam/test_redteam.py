"""Attacks break what has no protection, and tell what they could not try."""

import asyncio
import json
import socket
from collections.abc import AsyncIterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from aiohttp import web
from typer.testing import CliRunner

from jax_agent_rl.cli import app
from jax_agent_rl.errors import ConfigError, ToolError
from jax_agent_rl.testing.redteam import on_sandboxes
from jax_agent_rl.testing.redteam.attack import Attack, AttackResult, AttackVerdict, Surface
from jax_agent_rl.testing.redteam.run import MAX_EVIDENCE, page, run_attacks, summary
from jax_agent_rl.testing.redteam.suite import attacks
from jax_agent_rl.testing.redteam.targets import (
    EndpointTarget,
    SandboxFusionPrograms,
    ServerTarget,
    ToolServerPrograms,
    require_loopback,
)
from tests.capabilities import needs_bwrap
from tests.messages import raises
from tests.redteam_targets import (
    UnprotectedChat,
    UnprotectedPrograms,
    UnprotectedTests,
    unprotected_app,
)
from tests.unit.chat.test_template_families import codec_of

NEEDS_PRIVILEGES = {"sandbox-clock", "sandbox-gain-privileges", "sandbox-raise-limits"}
"""Attacks that succeed on an unprotected target only as root, or with a limit to raise."""

NEEDS_ROUTE = {"sandbox-reach-network"}
"""An attack that a machine without a network withstands by itself."""


def of(surface: Surface) -> list[Attack]:
    return [attack for attack in attacks() if attack.surface is surface]


def names(surface: Surface, *, without: set[str] = frozenset()) -> list[str]:
    return [attack.name for attack in of(surface) if attack.name not in without]


async def result_on(name: str, target) -> AttackResult:
    chosen = [attack for attack in attacks() if attack.name == name]
    (result,) = await run_attacks(
        chosen, {chosen[0].surface: [target]}, print_line=lambda line: None
    )
    return result


async def verdict_on(name: str, target) -> AttackVerdict:
    return (await result_on(name, target)).verdict


def test_every_attack_has_a_name_of_its_own_and_an_aim():
    known = attacks()
    assert len({attack.name for attack in known}) == len(known) > 40
    for attack in known:
        assert attack.name.startswith(f"{attack.surface}-") and attack.aim, attack.name
        assert attack.seconds <= 90


@pytest.mark.parametrize(
    "name",
    names(Surface.SANDBOX, without=NEEDS_PRIVILEGES | NEEDS_ROUTE | {"sandbox-endless"}),
)
async def test_without_a_sandbox_programs_get_through(name: str, monkeypatch):
    # Small enough for any machine.
    monkeypatch.setattr(on_sandboxes, "MEMORY_BYTES", 256 << 20)
    monkeypatch.setattr(on_sandboxes, "DISK_BYTES", 16 << 20)
    monkeypatch.setattr(on_sandboxes, "PROCESSES", 20)
    monkeypatch.setattr(on_sandboxes, "MAX_OUTPUT", 1 << 20)
    assert await verdict_on(name, UnprotectedPrograms()) is AttackVerdict.BROKE


async def test_a_program_that_nobody_ends_is_broken():
    class Endless:
        name = "waits for its programs"

        async def run(self, program: str) -> str:
            await asyncio.Event().wait()
            return ""

    (attack,) = [attack for attack in attacks() if attack.name == "sandbox-endless"]
    hasty = replace(attack, seconds=0.2)
    (result,) = await run_attacks(
        [hasty], {Surface.SANDBOX: [Endless()]}, print_line=lambda line: None
    )
    assert result.verdict is AttackVerdict.BROKE


@pytest.mark.parametrize(
    "name",
    # A wrong program without a trick passes nowhere. The others are aimed at tests that compare in
    # Python code of their own, or beside the program's frames.
    names(Surface.TESTS, without={"tests-wrong-program", "tests-builtins", "tests-trace"}),
)
async def test_tests_beside_the_program_are_passed_wrongly(name: str):
    assert await verdict_on(name, UnprotectedTests()) is AttackVerdict.BROKE


@pytest.mark.parametrize(
    "name",
    ["endpoint-user-control-tokens", "judge-control-tokens", "judge-forged-verdict"],
)
async def test_text_that_is_tokenized_with_its_template_ends_messages(name: str):
    assert (
        await verdict_on(name, UnprotectedChat(codec_of("qwen2.5").tokenizer))
        is AttackVerdict.BROKE
    )


@pytest.fixture
async def unprotected_server() -> AsyncIterator[ServerTarget]:
    runner = web.AppRunner(unprotected_app())
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    port = runner.addresses[0][1]
    yield ServerTarget(url=f"http://127.0.0.1:{port}", path="/json")
    await runner.cleanup()


@pytest.mark.parametrize(
    "name",
    [
        "server-large-body",
        "server-deep-json",
        "server-no-text",
        "server-other-host",
        "server-other-origin",
        "server-path-outside",
    ],
)
async def test_a_server_that_takes_everything_is_broken(name: str, unprotected_server):
    assert await verdict_on(name, unprotected_server) is AttackVerdict.BROKE


def closed_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


@pytest.mark.parametrize(
    ("name", "target"),
    [
        ("sandbox-memory", ToolServerPrograms),
        ("sandbox-output", SandboxFusionPrograms),
        ("endpoint-user-control-tokens", partial(EndpointTarget, model="m")),
        ("server-two-lengths", partial(ServerTarget, path="/json")),
    ],
)
async def test_a_server_that_is_not_there_has_not_held(name: str, target):
    url = f"http://127.0.0.1:{closed_port()}"
    assert await verdict_on(name, target(url=url)) is AttackVerdict.NOT_APPLICABLE


class Programs:
    """Runs programs until one asks for memory, and refuses all from then on.

    Attributes:
        ends: whether such a program ends it; else only that one is refused.
    """

    name = "fragile"

    def __init__(self, *, ends: bool) -> None:
        self.ends = ends
        self.has_ended = False

    async def run(self, program: str) -> str:
        asks_for_memory = "held.append" in program
        if self.ends and asks_for_memory:
            self.has_ended = True
        if self.has_ended or asks_for_memory:
            raise ToolError("broke off the connection")
        return on_sandboxes.MARK


async def test_a_target_that_an_attack_has_ended_is_broken():
    assert await verdict_on("sandbox-memory", Programs(ends=True)) is AttackVerdict.BROKE
    assert await verdict_on("sandbox-memory", Programs(ends=False)) is AttackVerdict.HELD


async def test_a_server_that_ends_after_a_deep_request_is_broken():
    ended = asyncio.Event()

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        if b"Content-Length: 2\r\n" in head:
            writer.write(b"HTTP/1.1 200 OK\r\n\r\n")
        else:
            server.close()
            ended.set()
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    target = ServerTarget(url=f"http://127.0.0.1:{port}", path="/json")
    result = await result_on("server-deep-json", target)
    assert ended.is_set()
    assert result.verdict is AttackVerdict.BROKE and "cannot be reached" in result.evidence


async def test_lengths_that_never_change_tell_nothing():
    class Constant:
        name = "says 7 to everything"

        async def prompt_length(self, messages: object) -> int:
            return 7

    result = await result_on("endpoint-user-control-tokens", Constant())
    assert result.verdict is AttackVerdict.NOT_APPLICABLE


async def test_an_error_of_one_target_does_not_end_the_others():
    class Unhandled:
        name = "raises"

        async def run(self, program: str) -> str:
            raise RuntimeError("x" * 10_000)

    chosen = [attack for attack in attacks() if attack.name == "sandbox-clock"]
    targets = {Surface.SANDBOX: [Unhandled(), Programs(ends=False)]}
    results = await run_attacks(chosen, targets, print_line=lambda line: None)
    assert [result.target for result in results] == ["raises", "fragile"]
    assert "RuntimeError" in results[0].evidence and len(results[0].evidence) <= MAX_EVIDENCE


@needs_bwrap
def test_this_installation_holds(tmp_path: Path):
    html = tmp_path / "redteam.html"
    result = CliRunner().invoke(app, ["redteam", "--json", "--html", str(html)])
    told = json.loads(result.stdout)
    broke = [attack for attack in told["attacks"] if attack["verdict"] == AttackVerdict.BROKE]
    assert broke == [] and result.exit_code == 0
    assert told["counts"][AttackVerdict.HELD] >= 40
    for attack in told["attacks"]:
        assert attack["name"] in html.read_text()


async def test_a_surface_without_a_target_is_not_applicable():
    chosen = of(Surface.JUDGE)[:1]
    (result,) = await run_attacks(chosen, {}, print_line=lambda line: None)
    assert result.verdict is AttackVerdict.NOT_APPLICABLE and "judge" in result.evidence
    assert summary([result])["counts"] == {"held": 0, "broke": 0, "not applicable": 1}


async def test_evidence_is_text_on_the_page():
    chosen = of(Surface.JUDGE)[:1]
    (result,) = await run_attacks(chosen, {}, print_line=lambda line: None)
    text = page([replace(result, evidence="<script>alert(1)</script>")])
    assert "<script>" not in text and "&lt;script&gt;" in text


@pytest.mark.parametrize(
    "url",
    [
        "http://10.0.0.1:8000",
        "https://example.org",
        "8.8.8.8:80",
        "http://127.0.0.1:99999",
        "http://[::1",
    ],
)
def test_servers_elsewhere_are_not_attacked(url: str):
    with raises(ConfigError, value=url):
        require_loopback(url)


def test_an_unknown_attack_is_named():
    error = CliRunner().invoke(app, ["redteam", "--only", "sandbx"]).exception
    assert "sandbx" in str(error) and "sandbox-disk" in str(error)
