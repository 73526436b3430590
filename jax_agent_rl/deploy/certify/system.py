"""The parts of a run together: engine and learner, backends, devices, checkpoints, and a short training run."""

from __future__ import annotations

import asyncio
import functools
import hashlib
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from etils import epath
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from rich.console import Console

from jax_agent_rl.agreement.report import coarsest, product_precision, run_tolerance, tolerance
from jax_agent_rl.config import Config
from jax_agent_rl.deploy.certify.machine import Machine
from jax_agent_rl.deploy.certify.report import CheckResult, Claim, NotRunError, format_number
from jax_agent_rl.deploy.certify.speed import full_groups
from jax_agent_rl.deploy.plan.learner_programs import make_group
from jax_agent_rl.deploy.plan.topology import place_devices
from jax_agent_rl.errors import ConfigError
from jax_agent_rl.learner.checkpoint import Checkpointer
from jax_agent_rl.learner.metrics import Comparison, comparable, compare
from jax_agent_rl.models.sharding import MESH_AXES, place_mesh
from jax_agent_rl.rollout.protocol import GenerateRequest, RolloutBackend
from jax_agent_rl.runtime.build import follow_run
from jax_agent_rl.runtime.engines import backend_factories
from jax_agent_rl.runtime.train import train
from jax_agent_rl.types import SamplingParams, TokenOutput
from jax_agent_rl.utils.packages import is_installed

COLLECTIVES = Claim(page="docs/training.md", text="Any mesh computes the gradient of one device")
AGREEMENT = Claim(
    page="docs/agreement.md",
    text="Tolerances are in nats and depend on the coarsest precision on either side",
)
CONFORMANCE = Claim(
    page="docs/index.md",
    text=(
        "The embedded JAX engine, vLLM, rollout servers and Ray actors implement one small protocol"
        " and pass one conformance suite."
    ),
)
CHECKPOINT = Claim(
    page="docs/testing.md", text="a resumed run equals one that was never interrupted."
)
ACCOUNTING = Claim(
    page="docs/index.md",
    text="Every trajectory is trained on, in flight, or dropped for a counted reason",
)
DRIFT = Claim(
    page="docs/index.md", text="The learner trains on the token ids that the policy sampled"
)
COMPILED = Claim(page="docs/certify.md", text="Nothing is compiled after the first step.")
HANG_SECONDS = 600.0
"""Time after which an engine or a training run counts as hanging."""
PRECISIONS: Mapping[str, Mapping[str, str]] = {
    "float32": {"dtype": "float32"},
    "bfloat16": {"dtype": "bfloat16"},
    "int8 cache": {"kv_dtype": "int8"},
    "fp8 cache": {"kv_dtype": "fp8"},
    "int8 weights": {"quantize": "int8"},
    "fp8 weights": {"quantize": "fp8"},
}
"""Settings of ``rollout.jetstream``; those without a dtype keep the configured one."""
QUESTIONS = (
    "Explain to a child why the sky is blue.",
    "Write a short story about a lighthouse keeper.",
    "How do I bake bread? List every step.",
    "Compare trains and planes for a trip of 500 km.",
)
"""Prompts of the agreement check: after random ids every token would be unlikely, and gaps larger.
"""
SAMPLED = 32


# --- collectives ----------------------------------------------------------------------------------


def check_collectives(machine: Machine, record: CheckResult) -> None:
    """Run every kind of exchange over every axis of the meshes, of all hosts together."""
    devices = jax.devices()
    if len(devices) == 1:
        raise NotRunError("there is one device, which exchanges nothing")
    size = 1024 if machine.platform == "cpu" else 1 << 22
    for name, mesh in _meshes(machine, devices):
        for axis in (axis for axis in MESH_AXES if mesh.shape[axis] > 1):
            errors, seconds = exchange(machine, mesh, axis, size)
            kind, worst = max(errors.items(), key=lambda pair: pair[1])
            record(
                f"exchanges over {axis} of {name}",
                worst,
                high=1e-6,
                detail=f"worst of {len(errors)}: {kind}",
            )
            rate = mesh.shape[axis] * size * 4 / seconds
            record(
                f"sums over {axis} of {name}",
                rate,
                "B/s",
                detail="float32, of all devices together",
            )


def _meshes(machine: Machine, devices: Sequence[Any]) -> Iterator[tuple[str, Mesh]]:
    """Yield a mesh along each axis, of all devices, and those of the configuration."""
    for axis in MESH_AXES:
        shape = [len(devices) if axis == one else 1 for one in MESH_AXES]
        yield f"{len(devices)} devices", place_mesh(shape, devices, key=axis)
    if jax.process_count() == 1:
        where = place_devices(machine.alone, devices)
        yield "learner.mesh", where.learner
        yield "rollout.jetstream.mesh", where.engines[0]


def exchange(machine: Machine, mesh: Mesh, axis: str, size: int) -> tuple[dict[str, float], float]:
    """Exchange numbers over an axis of a mesh.

    Args:
        machine: for its clock.
        mesh: of all devices of an exchange.
        axis: one of its axes.
        size: numbers of each member, a multiple of their count squared if it is a power of two.

    Returns:
        The largest error of each kind of exchange, relative to the numbers, and the seconds of a
        sum.
    """
    members = mesh.shape[axis]
    size = -(-size // members**2) * members**2
    numbers = np.random.default_rng(0).integers(-1000, 1000, (members, size)).astype(np.float32)
    split, along = NamedSharding(mesh, PartitionSpec(axis)), PartitionSpec(axis)
    given = jax.make_array_from_callback(numbers.shape, split, lambda index: numbers[index])
    ring = [(member, (member + 1) % members) for member in range(members)]
    parts = numbers.reshape(members, members, -1)
    run = {
        "psum": (
            lambda x: jax.lax.psum(x, axis),
            np.broadcast_to(numbers.sum(axis=0), numbers.shape),
        ),
        "all_gather": (
            lambda x: jax.lax.all_gather(x[0], axis).reshape(1, -1),
            np.broadcast_to(numbers.reshape(-1), (members, numbers.size)),
        ),
        "psum_scatter": (
            lambda x: jax.lax.psum_scatter(x.reshape(members, -1), axis)[None],
            numbers.sum(axis=0).reshape(members, -1),
        ),
        "ppermute": (lambda x: jax.lax.ppermute(x, axis, ring), np.roll(numbers, 1, axis=0)),
        "all_to_all": (
            lambda x: jax.lax.all_to_all(x.reshape(members, -1), axis, 0, 0)[None],
            parts.swapaxes(0, 1),
        ),
    }
    errors, seconds = {}, 0.0
    for kind, (function, wanted) in run.items():
        program = jax.jit(
            jax.shard_map(function, mesh=mesh, in_specs=along, out_specs=along, check_vma=False)
        )
        found = program(given)
        shards = (
            (np.asarray(shard.data), wanted[shard.index]) for shard in found.addressable_shards
        )
        errors[kind] = max(float(np.abs(own - part).max()) for own, part in shards) / 1000
        if kind == "psum":
            seconds = machine.best_seconds(functools.partial(program, given))
    return errors, seconds


# --- backends -------------------------------------------------------------------------------------


def check_conformance(machine: Machine, record: CheckResult) -> None:
    """Run the conformance suite on every backend that is installed, with a tiny random model."""
    try:
        from jax_agent_rl.testing.conformance.backends import BackendOptions, select_backend
        from jax_agent_rl.testing.conformance.models import prepare_folders
        from jax_agent_rl.testing.conformance.runner import run_suite
    except (ImportError, ConfigError) as error:
        raise NotRunError(str(error)) from None
    if not is_installed("torch"):
        raise NotRunError(
            "the suite's reference runs on torch: pip install 'jax_agent_rl[conformance]'"
        )
    exact = product_precision("float32", machine.platform) == "float32"
    missing = {
        name: package
        for name, package in {"ray": "ray", "vllm": "vllm"}.items()
        if not is_installed(package)
    }
    for name in ("jetstream", "remote", "ray", "vllm"):
        if name in missing:
            record.leave_out(name, f"the package {missing[name]} is not installed")
            continue
        if not record.has_time(name):
            continue
        folder = machine.scratch / f"conformance-{name}"
        folder.mkdir()
        options = BackendOptions(
            folders=prepare_folders(None, folder), tolerance=1e-3 if exact else 0.1
        )
        report = run_suite(select_backend(name, options))
        failed = [
            f"{one.check} ({one.claim.strip()})"
            for one in report.results
            if one.outcome == "failed"
        ]
        ran = len(report.results) - report.count("skipped")
        detail = f"of {ran} that apply{': ' if failed else ''}{'; '.join(failed)}"
        record(f"{name}: broken rules", len(failed), high=0, detail=detail)


def check_agreement(machine: Machine, record: CheckResult) -> None:
    """Compare the engine's log-probs with the learner's for the same weights, in every precision of the engine."""
    machine.learner  # noqa: B018  # or a reason not to run
    backends = {
        name: _with_precision(machine.alone, settings) for name, settings in PRECISIONS.items()
    }
    if machine.config.rollout.backend == "vllm":
        backends["vLLM"] = machine.config
    for name, config in backends.items():
        if not record.has_time(name):
            continue
        found, precision = asyncio.run(_sample_and_score(machine, config))
        jax_engine = config.rollout.backend == "jetstream"
        precisions = [precision, config.learner.compute_dtype]
        allowed = tolerance(precisions, jax_engine=jax_engine, platform=machine.platform)
        row = coarsest([product_precision(one, machine.platform) for one in precisions])
        detail = f"{found.tokens} tokens; row {row} of the table"
        gaps = {"mean": (found.mean, allowed.mean), "largest": (found.largest, allowed.token)}
        for which, (gap, most) in gaps.items():
            whole = found.tokens == len(QUESTIONS) * SAMPLED  # NaN counts as none
            record(
                f"{name}: {which} gap", gap if whole else math.nan, "nats", high=most, detail=detail
            )


def _with_precision(config: Config, settings: Mapping[str, str]) -> Config:
    engine = config.rollout.jetstream.model_copy(update=dict(settings))
    return config.model_copy(
        update={"rollout": config.rollout.model_copy(update={"jetstream": engine})}
    )


async def _sample_and_score(machine: Machine, config: Config) -> tuple[Comparison, str]:
    """Return the gap over freshly sampled tokens, and the engine's precision."""
    learner = machine.learner
    (make,) = backend_factories(
        config,
        machine.codec,
        weights=lambda: (machine.model, learner.params),
        print_line=lambda line: None,
    ).values()
    backend: RolloutBackend = make()
    async with asyncio.timeout(HANG_SECONDS):
        await backend.start()
        try:
            room = config.rollout.max_model_len - SAMPLED
            chats = [[{"role": "user", "content": question}] for question in QUESTIONS]
            prompts = [machine.codec.encode_prompt(chat)[-room:] for chat in chats]
            sampling = SamplingParams(
                max_tokens=SAMPLED, ignore_eos=True, temperature=config.rollout.temperature
            )
            requests = [
                GenerateRequest(request_id=str(number), prompt_ids=tuple(ids), sampling=sampling)
                for number, ids in enumerate(prompts)
            ]
            outputs: list[TokenOutput] = await asyncio.gather(*map(backend.generate, requests))
            precision = backend.capabilities.precision
        finally:
            await backend.close()
    groups = [make_group(f"p{i}", prompts[i], [output]) for i, output in enumerate(outputs)]
    trajectories = [t for group in groups for t in group.trajectories]
    rollout = [np.asarray(output.log_probs) for output in outputs]
    return (
        compare(learner.logprobs(groups), rollout, [comparable(t, 0) for t in trajectories]),
        precision,
    )


# --- learner --------------------------------------------------------------------------------------


def check_checkpoint(machine: Machine, record: CheckResult) -> None:
    """Save the learner, restore it, and go on from it: numbers are equal bit by bit."""
    learner, (groups, _) = machine.learner, full_groups(machine)
    checkpointer = Checkpointer(machine.scratch / "checkpoint", keep=1)
    try:
        learner.update(groups)
        kept = digests(learner.state)
        size = sum(x.nbytes for x in jax.tree.leaves(learner.state))
        begin = machine.clock()
        checkpointer.save(1, learner.state, {})
        checkpointer.wait()
        written = machine.clock()
        _, state, _ = checkpointer.restore(learner.state)
        restored = machine.clock()
    finally:
        checkpointer.close()
    of = f"of {len(kept)}"
    record("arrays that differ after restoring", differing(kept, digests(state)), high=0, detail=of)
    for name, seconds in (("writing", written - begin), ("restoring", restored - written)):
        record(name, size / seconds, "B/s", detail=f"{format_number(size, 'B')} in {seconds:.3g} s")
    learner.update(groups)
    uninterrupted = digests(learner.state)
    learner.state = state
    del state
    learner.update(groups)
    record(
        "arrays that differ one update later",
        differing(uninterrupted, digests(learner.state)),
        high=0,
        detail=of,
    )


def digests(state: Any) -> list[bytes]:
    """Return a digest of every array: copies of two states would not fit every machine."""
    return [hashlib.sha256(np.asarray(x).tobytes()).digest() for x in jax.tree.leaves(state)]


def differing(one: Sequence[bytes], other: Sequence[bytes]) -> int:
    """Count the arrays that differ."""
    return sum(x != y for x, y in zip(one, other, strict=True))


def check_training(machine: Machine, record: CheckResult) -> None:
    """Train for a few steps as ``jax-agent-rl train`` does, on all hosts."""
    config = machine.config
    machine.release()
    place = config.trainer.checkpoint_dir
    if place is not None:  # hosts agree on a folder of this run alone
        began = int(multihost_utils.broadcast_one_to_all(np.int64(time.time())))
        place = f"{place.rstrip('/')}/certify-{began}"
        config = config.model_copy(
            update={"trainer": config.trainer.model_copy(update={"checkpoint_dir": place})}
        )
    if jax.process_index():
        follow_run(config)
        return
    try:
        with (machine.scratch / "training.log").open("w") as log:
            summary = asyncio.run(_train(config, Console(file=log, width=120)))
    finally:
        if place is not None:
            epath.Path(place).rmtree(missing_ok=True)
    lost = summary["started"] - summary["trained"] - sum(summary["dropped"].values())
    record(
        "trajectories unaccounted for",
        lost,
        low=0,
        high=0,
        claim=ACCOUNTING,
        detail=f"of {summary['started']}",
    )
    record("trajectories trained on", summary["trained"], low=1, claim=ACCOUNTING)
    record("trajectories whose ids drifted", summary["token_drift"], high=0, claim=DRIFT)
    engine = config.rollout.jetstream
    allowed = run_tolerance(
        config, [engine.dtype, *{engine.kv_dtype, engine.quantize} & {"int8", "fp8"}]
    )
    gap = summary["max_logprob_gap"]
    record(
        "largest log-prob gap of engine and learner",
        gap,
        "nats",
        high=allowed.token,
        claim=AGREEMENT,
    )
    record(
        "programs compiled after the first step",
        summary["recompilations_after_warmup"],
        high=0,
        claim=COMPILED,
    )
    record(
        "training",
        summary["train_seconds"],
        "s",
        claim=ACCOUNTING,
        detail=f"{summary['steps']} steps",
    )


async def _train(config: Config, console: Console) -> dict[str, Any]:
    try:
        async with asyncio.timeout(HANG_SECONDS):
            return await train(config, resume=False, console=console)
    except TimeoutError as error:
        raise TimeoutError(f"the run did not end within {HANG_SECONDS:g} s") from error
