"""Simulated engines whose KV cache is limited: what does not fit is computed again, and what that
costs.
"""

import asyncio
import io
import json
import random
from contextlib import closing

import pytest
from rich.console import Console

from jax_agent_rl.errors import ConfigError
from jax_agent_rl.testing.simulate.engine import SimulatedEngine
from jax_agent_rl.testing.simulate.run import run_command
from jax_agent_rl.testing.simulate.workload import EngineSpeed, KVCacheSize, VirtualLoop
from tests.messages import raises
from tests.unit.testing.simulate.test_engine_time import finish, request


def run(main, size: KVCacheSize, *, max_model_len: int, **speed):
    async def on_engine():
        return await main(
            SimulatedEngine(EngineSpeed(**speed), max_model_len=max_model_len, kv_cache=size)
        )

    with closing(VirtualLoop()) as loop:
        return loop.run_until_complete(on_engine())


def small(main, **size):
    """Run ``main`` on an engine of one-second steps and pages of 32.

    Prompts take no time but for what ``size`` says.
    """
    size = KVCacheSize(**{"tokens": 256} | size)
    return run(
        main, size, max_model_len=128, slots=4, step_seconds=1.0, prefill_tokens_per_step=10**9
    )


def test_a_prompt_stalls_all_slots():
    async def main(engine):
        first = asyncio.create_task(finish(engine, request("a", 10, (1,) * 33)))
        await asyncio.sleep(4.0 + 33 * 0.1)
        second = await finish(engine, request("b", 2, (2,) * 21))
        return [*await first, *second]

    # a: its own 3.3 s, and the 2.1 s of b; b begins at 7.3 s.
    assert [at for at, _ in small(main, prefill_seconds=0.1)] == pytest.approx(
        [15.4, 7.3 + 2.1 + 2.0], abs=1e-3
    )


def turns(session: str, *, evicted_by: int):
    """Two turns of a session, between which others need all pages: seconds of the second one, and
    its cached ids.
    """

    async def main(engine):
        prompt = (3,) * 60
        ((_, output),) = await finish(engine, request("1", 5, prompt, session_id=session))
        await finish(engine, *(request(f"{i}", 1, (i + 9,) * 100) for i in range(evicted_by)))
        began = asyncio.get_running_loop().time()
        longer = (*prompt, *output.token_ids, 1)
        ((ended, again),) = await finish(engine, request("2", 5, longer, session_id=session))
        return ended - began, again.cached_tokens

    return main


def test_evicted_kv_is_computed_again_and_offloaded_kv_is_copied_back():
    costs = {"tokens": 128, "prefill_seconds": 0.1, "restore_seconds": 0.01}
    report = small(turns("s", evicted_by=0), **costs)
    evicted = small(turns("s", evicted_by=1), **costs)
    restored = small(turns("s", evicted_by=1), offloading_tokens=128, **costs)
    assert report == (pytest.approx(5 + 2 * 0.1, abs=1e-3), 64)
    assert evicted == (pytest.approx(5 + 66 * 0.1, abs=1e-3), 0)
    assert restored == (pytest.approx(5 + 2 * 0.1 + 2 * 32 * 0.01, abs=1e-3), 64), "two pages"


def test_requests_wait_for_pages_and_those_given_up_free_theirs():
    async def main(engine):
        first = asyncio.create_task(engine.generate(request("a", 60, (1,) * 60)))
        await asyncio.sleep(10.0)
        second = asyncio.create_task(finish(engine, request("b", 5, (2,) * 90)))
        await asyncio.sleep(10.0)
        waiting = (await engine.health()).waiting
        first.cancel()
        ((ended, _),) = await second
        return waiting, ended

    assert small(main, tokens=128) == (1, pytest.approx(25.0, abs=1e-3))


AGENTS = 48
TURNS = 8


def throughput(
    policy: str, *, offloading_tokens: int = 0, seconds=lambda draw: draw.lognormvariate(1.0, 0.5)
) -> float:
    """Turns per second of 32 agents at a time, whose contexts of up to 10,000 ids do not fit in the
    cache.
    """

    async def main(engine):
        gate = asyncio.Semaphore(32)

        async def agent(number: int) -> None:
            draw = random.Random(number)
            ids = (number + 9,) * 400
            async with gate:
                for turn in range(TURNS):
                    ends = turn == TURNS - 1
                    sampled = draw.randint(30, 90)
                    ask = request(
                        f"{number}/{turn}", sampled, ids, session_id=str(number), session_ends=ends
                    )
                    ids += (await engine.generate(ask)).token_ids + (1,) * 1200
                    if not ends:
                        await asyncio.sleep(seconds(draw))

        await asyncio.gather(*map(agent, range(AGENTS)))
        return AGENTS * TURNS / asyncio.get_running_loop().time()

    size = KVCacheSize(
        tokens=64 * 1024,
        offloading_tokens=offloading_tokens,
        policy=policy,
        prefill_seconds=1e-4,
        restore_seconds=2e-6,
    )
    return run(main, size, max_model_len=11000, slots=24, step_seconds=0.02, slot_seconds=0.0002)


def test_at_equal_memory_agents_with_tools_get_more_turns_than_with_lru():
    lru = throughput("lru")
    expected_return = throughput("expected_return")
    assert expected_return > 1.2 * lru
    assert throughput("expected_return", offloading_tokens=1 << 19) > 1.8 * lru


def test_tools_of_which_nothing_can_be_known_cost_nothing():
    def memoryless(draw: random.Random) -> float:
        return draw.expovariate(1 / 20)

    assert throughput("expected_return", seconds=memoryless) > 0.95 * throughput(
        "lru", seconds=memoryless
    )


RECIPE = (
    "run_dir: x\n"
    "model: {path: none}\n"
    "data: {train: none}\n"
    "rollout: {prompts_per_step: 2, group_size: 2}\n"
)


def test_the_command_compares_caches_of_limited_size(tmp_path, capsys):
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(RECIPE)
    screen = Console(file=io.StringIO(), width=100)
    overrides = ["assume.steps=2", "assume.engines.count=1", "assume.kv_cache.tokens=8000"]
    outcomes = run_command(recipe, overrides, None, as_json=True, console=screen)
    assert [outcome.policy for outcome in outcomes] == ["lru", "expected return", "with offloading"]
    assert "KV cache" in screen.file.getvalue()
    assert "offloading_size" in screen.file.getvalue()
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert 0 < report["outcomes"][0]["cached"] <= report["outcomes"][2]["cached"] < 1


def test_a_cache_that_holds_no_context_is_refused(tmp_path):
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(RECIPE)
    with raises(ConfigError, key="kv_cache.tokens", value=100):
        run_command(
            recipe,
            ["assume.kv_cache.tokens=100"],
            None,
            as_json=False,
            console=Console(file=io.StringIO()),
        )
