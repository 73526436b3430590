"""What the benchmarks share: this machine's figures, the quickstart model, random workloads."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import re
import time
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jax_agent_rl.config import AlgorithmConfig, LearnerConfig
from jax_agent_rl.deploy.quickstart.model import fetch_quickstart_model
from jax_agent_rl.learner.learner import Learner
from jax_agent_rl.models.config import DecoderConfig, Params
from jax_agent_rl.models.hf import load_hf
from jax_agent_rl.rollout.protocol import GenerateRequest, RolloutBackend
from jax_agent_rl.runtime.compilation_cache import use_compilation_cache
from jax_agent_rl.types import (
    FinishReason,
    SamplingParams,
    StopReason,
    TokenOutput,
    Trajectory,
    Turn,
)
from jax_agent_rl.utils.startup import ignore_absent_tpus

Backend = TypeVar("Backend", bound=RolloutBackend)

ROOT = Path(__file__).parents[1]
VECTORS = {"avx512f": "AVX-512", "avx2": "AVX2", "avx": "AVX"}


def argument_parser(docstring: str | None) -> argparse.ArgumentParser:
    """Make a parser whose ``--help`` is a script's docstring.

    It also keeps JAX from waiting for TPUs that are absent.
    """
    ignore_absent_tpus()
    # JAX is imported already, so that it does not read the variable again.
    jax.config.update("jax_platforms", os.environ.get("JAX_PLATFORMS", ""))
    return argparse.ArgumentParser(
        description=docstring, formatter_class=argparse.RawDescriptionHelpFormatter
    )


# --- the machine ----------------------------------------------------------------------------------


def cpu() -> str:
    """Return the CPU's name, its widest vectors and the cores this process may use.

    Figures depend on all three.
    """
    facts = {}
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        name, _, value = line.partition(":")
        facts[name.strip()] = value.strip()

    flags = facts.get("flags", "").split()
    vectors = "no AVX"
    for flag, name in VECTORS.items():
        if flag in flags:
            vectors = name
            break
    xla_limit = re.search(r"--xla_cpu_max_isa=(\S+)", os.environ.get("XLA_FLAGS", ""))
    if xla_limit is not None:
        vectors += f", XLA limited to {xla_limit[1]}"

    num_cores = len(os.sched_getaffinity(0))
    return f"{facts.get('model name', 'unknown')} ({vectors}), {num_cores} cores"


def best_seconds(run: Callable[[], object], repeats: int = 5) -> float:
    """Return the shortest of several timed calls, after one that warms up."""
    jax.block_until_ready(run())
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        jax.block_until_ready(run())
        times.append(time.perf_counter() - start)
    return min(times)


def sgemm_flops() -> float:
    """Measure floating-point operations per second of a 2048³ float32 product."""
    size = 2048
    x = jax.random.normal(jax.random.key(0), (size, size))
    product = jax.jit(lambda x: x @ x)
    return 2 * size**3 / best_seconds(lambda: product(x))


def read_bandwidth() -> float:
    """Measure bytes per second of summing 800 MB."""
    x = jnp.ones(200_000_000)
    total = jax.jit(jnp.sum)
    return x.nbytes / best_seconds(lambda: total(x))


# --- the model and its work -----------------------------------------------------------------------


def load_quickstart() -> tuple[DecoderConfig, Params]:
    """Load SmolLM2-135M in float32, with programs from the compilation cache."""
    use_compilation_cache()
    return load_hf(fetch_quickstart_model())


def random_ids(*shape: int, seed: int = 0) -> np.ndarray:
    """Draw int64 ids of SmolLM2's vocabulary."""
    return np.random.default_rng(seed).integers(3, 49000, shape)


@contextlib.asynccontextmanager
async def running(backend: Backend) -> AsyncIterator[Backend]:
    """Start a backend, and close it in the end."""
    await backend.start()
    try:
        yield backend
    finally:
        await backend.close()


async def rollout(
    backend: RolloutBackend, prompts: np.ndarray, max_tokens: int
) -> tuple[list[TokenOutput], float]:
    """Sample exactly ``max_tokens`` ids for every prompt at once.

    Args:
        prompts: ids [N, P].

    Returns:
        The outputs, and the seconds it took.
    """
    sampling = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
    requests = []
    for i, prompt_ids in enumerate(prompts.tolist()):
        request = GenerateRequest(
            request_id=str(i), prompt_ids=tuple(prompt_ids), sampling=sampling
        )
        requests.append(request)

    start = time.perf_counter()
    outputs = await asyncio.gather(*map(backend.generate, requests))
    return outputs, time.perf_counter() - start


def make_learner(**settings: Any) -> Learner:
    """Make a GRPO learner of SmolLM2-135M with these settings of ``learner``."""
    config, params = load_quickstart()
    return Learner(
        config,
        params,
        algorithm=AlgorithmConfig(),
        config=LearnerConfig(**settings),
        temperature=1.0,
    )


def first_gradient(learner: Learner, adam_b1: float) -> Params:
    """Return the clipped gradient of the only update so far.

    AdamW's first moment is that times 1 - b1.
    """
    first_moment = optax.tree_utils.tree_get(learner.state.policy.opt_state, "mu")
    return jax.tree.map(lambda x: np.asarray(x) / (1 - adam_b1), first_moment)


def make_trajectory(
    prompt: Sequence[int], ids: Sequence[int], *, group: str, index: int
) -> Trajectory:
    """Make member ``index`` of a group in which every second member is rewarded.

    Args:
        ids: sampled after the prompt.
    """
    output = TokenOutput(
        token_ids=tuple(ids),
        log_probs=(-1.0,) * len(ids),
        policy_versions=(0,) * len(ids),
        stop_reason=StopReason.EOS,
        context_digest="",
    )
    return Trajectory.from_turns(
        prompt_ids=prompt,
        turns=[Turn(output=output)],
        trajectory_id=f"{group}-{index}",
        group_id=group,
        agent_name="benchmark",
        finish_reason=FinishReason.ANSWER,
        reward=float(index % 2),
    )
