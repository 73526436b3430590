"""Attacks break what has no protection, and tell what they could not try."""

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest
from aiohttp import web
from typer.testing import CliRunner

from jax_agent_rl.cli import app
from jax_agent_rl.errors import ConfigError
from jax_agent_rl.testing.redteam import on_sandboxes
from jax_agent_rl.testing.redteam.attack import Attack, AttackVerdict, Surface
from jax_agent_rl.testing.redteam.run import page, run_attacks, summary
from jax_agent_rl.testing.redteam.suite import attacks
from jax_agent_rl.testing.redteam.targets import ServerTarget, require_loopback
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


async def verdict_on(name: str, target) -> AttackVerdict:
    chosen = [attack for attack in attacks() if attack.name == name]
    (result,) = await run_attacks(
        chosen, {chosen[0].surface: [target]}, print_line=lambda line: None
    )
    return result.verdict


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


@pytest.mark.parametrize("url", ["http://10.0.0.1:8000", "https://example.org", "8.8.8.8:80"])
def test_servers_elsewhere_are_not_attacked(url: str):
    with raises(ConfigError, value=url):
        require_loopback(url)


def test_an_unknown_attack_is_named():
    error = CliRunner().invoke(app, ["redteam", "--only", "sandbx"]).exception
    assert "sandbx" in str(error) and "sandbox-disk" in str(error)
