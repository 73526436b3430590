"""Our engine under JetStream's own Driver gives the ids our scheduler gives.

The Driver kills its process when one of its threads fails and changes the root logger on import, so
it runs in a process of its own.
"""

import subprocess
import sys
from pathlib import Path

PROGRAM = """
import asyncio
import jax
import numpy as np
jax.tree_map = jax.tree_util.tree_map  # as it was called before 0.4.26: the Driver uses it
from jax_agent_rl.jetstream.driver_interface import JetStreamEngine
from jax_agent_rl.jetstream.engine import EngineShapes, JaxEngine
from jetstream.core import orchestrator
from jetstream.core.utils import async_multifuture
from tests.tiny import TINY, greedy, tiny_params

shapes = EngineShapes(
    max_model_len=48, max_concurrent_decodes=3, kv_cache_tokens=192, decode_steps=4,
    prefill_buckets=(16,),
)
engine = JetStreamEngine(JaxEngine(TINY, shapes))
raw = tiny_params()
params = engine.load_params(raw)
driver = orchestrator.Driver(
    prefill_engines=[engine], generate_engines=[engine],
    prefill_params=[params], generate_params=[params],
)

async def ask(prompt, count):
    channel = async_multifuture.AsyncMultifuture()
    driver.place_request_on_prefill_queue(orchestrator.ActiveRequest(
        max_tokens=count, prefill_content=list(prompt), is_client_side_tokenization=True,
        return_channel=channel,
    ))
    ids = []
    async for samples in channel:
        ids += samples[0].token_ids
    return ids

async def main():
    rng = np.random.default_rng(0)
    prompts = [rng.integers(3, 97, n).tolist() for n in (5, 11, 8, 14)]
    outputs = await asyncio.gather(*(ask(p, 6) for p in prompts))
    for prompt, ids in zip(prompts, outputs, strict=True):
        bos = TINY.bos_token_id  # the Driver puts it in front of every prompt
        expected = greedy(raw, [bos, *prompt], 6)
        # The Driver keeps the stop token to itself.
        assert ids == [i for i in expected if i != 2], (ids, expected)
    print("parity of", len(prompts), "requests", flush=True)

asyncio.run(main())
import os
os._exit(0)
"""


def test_the_driver_and_the_scheduler_sample_the_same_ids():
    root = Path(__file__).parents[2]
    result = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        cwd=root,
        capture_output=True,
        text=True,
        timeout=300,
        env=_environment(root),
    )
    assert "parity of 4 requests" in result.stdout, (result.stdout + result.stderr)[-2000:]


def _environment(root: Path) -> dict[str, str]:
    import os

    return os.environ | {"PYTHONPATH": str(root)}


def test_result_tokens_carry_logprobs_exactly():
    import jax.numpy as jnp
    import numpy as np

    from jax_agent_rl.jetstream.driver_interface import JetStreamEngine
    from jax_agent_rl.jetstream.engine import EngineShapes, JaxEngine
    from tests.tiny import TINY, greedy, logprobs_of, tiny_params

    shapes = EngineShapes(
        max_model_len=48,
        max_concurrent_decodes=2,
        kv_cache_tokens=128,
        decode_steps=4,
        prefill_buckets=(16,),
    )
    engine = JetStreamEngine(JaxEngine(TINY, shapes))
    raw = tiny_params()
    params = engine.load_params(raw)
    prompt = [5, 9, 11, 30]
    first = engine.prefill(params=params, padded_tokens=jnp.array(prompt[:2] + [0]), true_length=2)
    prefilled = engine.prefill(
        params=params, existing_prefix=first, padded_tokens=jnp.array(prompt[2:]), true_length=2
    )
    state = engine.insert(prefilled, engine.init_decode_state(), 1)
    ids = []
    logprobs = []
    for _ in range(4):
        state, result = engine.generate(params, state)
        result = result.convert_to_numpy()
        ids.append(int(result.get_result_at_slot(1).tokens[0, 0]))
        logprobs.append(float(result.log_probs()[1]))
    assert ids == greedy(raw, prompt, 4, frozenset())
    np.testing.assert_allclose(logprobs, logprobs_of(raw, prompt, ids), atol=2e-5)
