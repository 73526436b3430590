"""One check that fails, raises or hangs is a line, and never hides the others."""

import asyncio

from jax_agent_rl.deploy.doctor.machine import Finding, Status, UnmetError, run_checks
from jax_agent_rl.errors import ConfigError, ModelError


async def fine(report):
    report.ok("well")


async def no_model(report):
    raise ModelError("config.json is missing")


async def two_problems(report):
    report.ok("before")
    raise ConfigError(["first", "second"])


async def has_a_bug(report):
    raise KeyError("name")


async def hangs(report):
    await asyncio.Event().wait()


async def lacks_rows(report):
    raise UnmetError("no rows could be read")


async def test_every_check_is_told_whatever_the_others_do():
    looks = (no_model, two_problems, has_a_bug, hangs, lacks_rows, fine)
    checks = [(look.__name__, look) for look in looks]
    findings = [(f.check, f.status, f.text) async for f in run_checks(checks, timeout=0.5)]
    assert findings == [
        ("no_model", Status.FAIL, "config.json is missing"),
        ("two_problems", Status.OK, "before"),
        ("two_problems", Status.FAIL, "first"),
        ("two_problems", Status.FAIL, "second"),
        ("has_a_bug", Status.FAIL, "KeyError: 'name'"),
        ("hangs", Status.FAIL, "no answer within 0.5 s"),
        ("lacks_rows", Status.WARN, "not checked: no rows could be read"),
        ("fine", Status.OK, "well"),
    ]


async def test_a_check_with_nothing_to_say_is_no_line():
    async def silent(report):
        pass

    assert [f async for f in run_checks([("silent", silent)], timeout=60)] == []
    assert Finding(check="x", status=Status.OK, text="") != Finding(
        check="x", status=Status.FAIL, text=""
    )
