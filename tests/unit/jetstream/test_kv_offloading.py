"""KV that went to the host and back is the same, bit by bit."""

from __future__ import annotations

import functools
import json
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_agent_rl.jetstream.engine import EngineShapes, JaxEngine
from jax_agent_rl.jetstream.host_cache import HostCache
from jax_agent_rl.jetstream.programs import ProgramTable
from jax_agent_rl.jetstream.scheduler import Scheduler
from jax_agent_rl.models.config import DecoderConfig
from jax_agent_rl.rollout.protocol import GenerateRequest
from jax_agent_rl.types import SamplingParams, StopReason, TokenOutput
from tests.simulated import run_on_devices
from tests.tiny import EXPERTS, LATENT, TINY, tiny_params

PAGE_BYTES = 2 * TINY.num_layers * TINY.num_kv_heads * TINY.head_dim * 32 * 4
SHAPES = EngineShapes(
    max_model_len=64,
    max_concurrent_decodes=2,
    kv_cache_tokens=64,
    decode_steps=4,
    prefill_buckets=(32,),
    kv_offloading_bytes=4 * PAGE_BYTES,
)
PROMPTS = [np.random.default_rng(i).integers(3, TINY.vocab_size, 25).tolist() for i in range(3)]


@functools.cache
def programs() -> ProgramTable:
    """Compiled once for all tests."""
    return ProgramTable()


def scheduler() -> Scheduler:
    engine = JaxEngine(TINY, SHAPES, program_table=programs())
    return Scheduler(engine, engine.load_params(tiny_params()), version=1)


def submit(
    on: Scheduler, session: str, prompt: list[int], *, count: int = 14, ends: bool = False
) -> None:
    sampling = SamplingParams(max_tokens=count, temperature=1.0, seed=len(prompt), ignore_eos=True)
    name = f"{session}/{len(prompt)}"
    request = GenerateRequest(
        request_id=name,
        prompt_ids=tuple(prompt),
        sampling=sampling,
        session_id=session,
        session_ends=ends,
    )
    on.submit(request)


def finish(on: Scheduler) -> list[TokenOutput]:
    """Runs until nothing does."""
    outputs = []
    while on.running or on.waiting:
        outputs += [chunk.final for _, chunk in on.step() if chunk.final is not None]
    return outputs


def first_turn(on: Scheduler, session: str, prompt: list[int]) -> list[int]:
    """The context of the next turn."""
    submit(on, session, prompt)
    (output,) = finish(on)
    return [*prompt, *output.token_ids, 5, 6]


def on_host(on: Scheduler) -> set[str]:
    return {
        session for page in on.block_manager.pages_on_host.values() for session in page.sessions
    }


def returning(*, other_sessions: int) -> tuple[Scheduler, TokenOutput]:
    """The second turn of a session, after the first turns of others."""
    on = scheduler()
    context = first_turn(on, "a", PROMPTS[0])
    for number in range(1, 1 + other_sessions):
        first_turn(on, str(number), PROMPTS[number])
    submit(on, "a", context)
    (output,) = finish(on)
    return on, output


def test_a_session_whose_kv_was_on_the_host_samples_what_it_would_have():
    on, output = returning(other_sessions=2)
    _, wanted = returning(other_sessions=0)
    metrics = on.metrics()
    assert metrics.offloaded_pages >= 2
    assert metrics.restored_pages == 2
    assert output.cached_tokens == wanted.cached_tokens == 25 + 14 - 1
    assert output.token_ids == wanted.token_ids and output.log_probs == wanted.log_probs, (
        "bit by bit"
    )


def group_of_three(*, other_sessions: int) -> tuple[Scheduler, dict[str, TokenOutput]]:
    """Second turns of three sessions with a common page, all at once, after others needed all pages
    at once.
    """
    shapes = replace(
        SHAPES, max_concurrent_decodes=3, kv_cache_tokens=192, kv_offloading_bytes=8 * PAGE_BYTES
    )
    engine = JaxEngine(TINY, shapes, program_table=more_programs())
    on = Scheduler(engine, engine.load_params(tiny_params()), version=1)
    prompt = (PROMPTS[0] + PROMPTS[1])[:40]
    contexts = {}
    for name in "abc":
        contexts[name] = first_turn(on, name, [*prompt[:-1], ord(name) % 90])
    for number in range(other_sessions):
        submit(on, str(number), [number + 3, *PROMPTS[2], *PROMPTS[1]][:50], count=9, ends=True)
    finish(on)
    for name, context in contexts.items():
        submit(on, name, context, count=6)
    outputs = {}
    while on.running or on.waiting:
        for run, chunk in on.step():
            if chunk.final is not None:
                outputs[run.request.session_id] = chunk.final
    return on, outputs


@functools.cache
def more_programs() -> ProgramTable:
    return ProgramTable()


def test_sessions_that_share_pages_come_back_together():
    on, outputs = group_of_three(other_sessions=3)
    _, wanted = group_of_three(other_sessions=0)
    assert on.metrics().restored_pages == 4, "what they share once, and an own page each"
    for name in "abc":
        assert outputs[name].cached_tokens == wanted[name].cached_tokens == 40 + 14 - 1
        assert outputs[name].token_ids == wanted[name].token_ids
        np.testing.assert_allclose(outputs[name].log_probs, wanted[name].log_probs, atol=1e-5)


@pytest.mark.parametrize(
    ("model", "dtype", "kv_dtype"),
    [
        (TINY, "float32", None),
        (TINY, "bfloat16", None),
        (TINY, "float32", "int8"),
        (EXPERTS, "float32", None),
        (LATENT, "float32", "int8"),
    ],
    ids=["float32", "bfloat16", "int8", "chosen experts too", "latents"],
)
def test_pages_come_back_bit_by_bit_wherever_they_go(model: DecoderConfig, dtype: str, kv_dtype):
    engine = JaxEngine(
        model, replace(SHAPES, kv_cache_tokens=64 * 32), dtype=jnp.dtype(dtype), kv_dtype=kv_dtype
    )
    random = np.random.default_rng(0)

    def fill(x: jax.Array) -> jax.Array:
        return jax.device_put(
            np.abs(50 * random.standard_normal(x.shape, np.float32)).clip(max=120).astype(x.dtype),
            x.sharding,
        )

    cache = jax.tree.map(fill, engine.init_cache())
    original = jax.tree.map(np.asarray, cache)
    host = HostCache(engine, cache)
    host_pages = list(range(host.count))
    moved = random.permutation(np.arange(1, 41))[: host.count].tolist()
    host.save(cache, list(zip(moved, host_pages, strict=True)))
    targets = [page for page in range(1, 60) if page not in moved][: len(moved)]
    restored = jax.tree.map(np.asarray, engine.put_pages(cache, host.read(host_pages), targets))
    for x, y in zip(jax.tree.leaves(original), jax.tree.leaves(restored), strict=True):
        np.testing.assert_array_equal(y[targets].view(np.uint8), x[moved].view(np.uint8))
        other_pages = [page for page in range(len(x)) if page not in targets]
        np.testing.assert_array_equal(y[other_pages].view(np.uint8), x[other_pages].view(np.uint8))


def test_the_host_takes_no_more_than_its_size():
    on = scheduler()
    host = on.host_cache
    assert host.count == 4
    assert sum(x.nbytes for x in jax.tree.leaves(host.pages)) <= SHAPES.kv_offloading_bytes
    for number in range(6):
        first_turn(on, str(number), [number + 3, *PROMPTS[number % 3]])
    assert on.metrics().offloaded_pages > 4
    assert len(on.block_manager.pages_on_host) == 4


def test_new_weights_and_sleep_drop_what_is_on_the_host():
    for drop in (lambda on: on.set_weights(on.params, 2), lambda on: (on.sleep(), on.wake())):
        on = scheduler()
        context = first_turn(on, "a", PROMPTS[0])
        first_turn(on, "b", PROMPTS[1])
        assert on_host(on) == {"a"} and not on.host_cache.arriving, (
            "nothing of it is left on the device"
        )
        drop(on)
        assert not on_host(on)
        submit(on, "a", context)
        (output,) = finish(on)
        assert output.cached_tokens == 0
        assert on.metrics().restored_pages == 0


def test_the_end_of_a_session_frees_its_host_pages():
    on = scheduler()
    context = first_turn(on, "a", PROMPTS[0])
    first_turn(on, "b", PROMPTS[1])
    submit(on, "a", context, ends=True)
    finish(on)
    assert on_host(on) == {"b"}


@pytest.mark.parametrize("steps", [0, 1])
def test_a_request_aborted_around_its_kvs_return_changes_no_other(steps: int):
    on = scheduler()
    contexts = {
        name: first_turn(on, name, prompt) for name, prompt in zip("ab", PROMPTS, strict=False)
    }
    submit(on, "a", contexts["a"])
    for _ in range(steps):
        on.step()
    _, chunk = on.abort(f"a/{len(contexts['a'])}")
    assert chunk.final.stop_reason is StopReason.ABORTED
    outputs = {}
    for name in "ab":
        submit(on, name, contexts[name])
        (outputs[name],) = finish(on)
    for name, prompt in zip("ab", PROMPTS, strict=False):
        alone = scheduler()
        submit(alone, name, first_turn(alone, name, prompt))
        (wanted,) = finish(alone)
        assert outputs[name].token_ids == wanted.token_ids
        np.testing.assert_allclose(outputs[name].log_probs, wanted.log_probs, atol=1e-5)


def test_programs_that_move_pages_are_compiled_before_they_are_needed():
    engine = JaxEngine(TINY, SHAPES, compile_ahead=True)
    on = Scheduler(engine, engine.load_params(tiny_params()), version=1)
    on.cache = engine.warm_up(on.params, on.cache)
    context = first_turn(on, "a", PROMPTS[0])
    first_turn(on, "b", PROMPTS[1])
    submit(on, "a", context)
    finish(on)
    metrics = on.metrics()
    assert metrics.restored_pages == 2
    assert metrics.recompilations == 0


ON_A_MESH = """
import json
from dataclasses import replace
import jax, numpy as np
from jax_agent_rl.config.engines import EngineMeshConfig
from jax_agent_rl.jetstream.engine import JaxEngine
from jax_agent_rl.jetstream.scheduler import Scheduler
from jax_agent_rl.jetstream.sharding import make_engine_mesh
from tests.tiny import TINY, tiny_params
from tests.unit.jetstream.test_kv_offloading import PROMPTS, SHAPES, finish, first_turn, submit

model = replace(TINY, vocab_size=96, num_layers=1, num_heads=4, num_kv_heads=4)

def second_turn(others):
    engine = JaxEngine(model, SHAPES, mesh=make_engine_mesh(EngineMeshConfig(tensor=4)))
    on = Scheduler(engine, engine.load_params(tiny_params(config=model)), version=1)
    context = first_turn(on, "a", [i % 96 for i in PROMPTS[0]])
    for number in range(1, 1 + others):
        first_turn(on, str(number), [i % 96 for i in PROMPTS[number]])
    submit(on, "a", context)
    (output,) = finish(on)
    keys = on.cache.layers[0].keys
    part = keys.addressable_shards[0].data.size / keys.size
    return output, on.metrics().restored_pages, part

(found, restored, part), (wanted, _, _) = second_turn(1), second_turn(0)
same_ids = found.token_ids == wanted.token_ids
print(json.dumps({
    "restored": restored,
    "part": part,
    "cached": [found.cached_tokens, wanted.cached_tokens],
    "same": same_ids and found.log_probs == wanted.log_probs,
}))
"""


def test_a_mesh_keeps_its_sharding_and_its_bits():
    (line,) = run_on_devices(ON_A_MESH)
    assert json.loads(line) == {"restored": 2, "part": 1 / 4, "cached": [38, 38], "same": True}
