"""The parts of a run together: exchanges, backends, agreement, checkpoints, and training."""

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
from jax_agent_rl.deploy.certify.machine import Machine, NotRunError
from jax_agent_rl.deploy.certify.report import CheckResult, Claim, format_number
from jax_agent_rl.deploy.certify.speed import full_groups
from jax_agent_rl.deploy.plan.learner_programs import make_group
from jax_agent_rl.deploy.plan.topology import place_devices
from jax_agent_rl.errors import ConfigError
from jax_agent_rl.learner.checkpoint import Checkpointer
from jax_agent_rl.learner.comparison import Comparison, comparable, compare
from jax_agent_rl.models.sharding import MESH_AXES, place_mesh
from jax_agent_rl.rollout.protocol import GenerateRequest, RolloutBackend
from jax_agent_rl.runtime.build import follow_run
from jax_agent_rl.runtime.engines import backend_factories
from jax_agent_rl.runtime.train import train
from jax_agent_rl.types import SamplingParams, TokenOutput
from jax_agent_rl.utils.packages import install_command, is_installed
from jax_agent_rl.utils.text import counted

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
"""Prompts of the agreement check; after random ids every token would be unlikely, and gaps
larger."""
SAMPLED = 32
"""Tokens of each answer in the agreement check."""


# --- collectives ----------------------------------------------------------------------------------


def check_collectives(machine: Machine, record: CheckResult) -> None:
    """Run every kind of exchange over every axis of the meshes, of all hosts together."""
    devices = jax.devices()
    if len(devices) == 1:
        raise NotRunError("there is one device, which exchanges nothing")

    size = 1024 if machine.platform == "cpu" else 1 << 22
    for name, mesh in _meshes(machine, devices):
        for axis in MESH_AXES:
            if mesh.shape[axis] == 1:
                continue
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
    """Yield a mesh along each axis, of all devices, and the meshes of the configuration."""
    for number, axis in enumerate(MESH_AXES):
        shape = [1] * len(MESH_AXES)
        shape[number] = len(devices)
        yield counted(len(devices), "device"), place_mesh(shape, devices, key=axis)
    if jax.process_count() == 1:
        placement = place_devices(machine.alone, devices)
        yield "learner.mesh", placement.learner
        yield "rollout.jetstream.mesh", placement.engines[0]


def exchange(machine: Machine, mesh: Mesh, axis: str, size: int) -> tuple[dict[str, float], float]:
    """Exchange numbers over an axis of a mesh.

    Args:
        mesh: all devices of an exchange.
        axis: axis of the mesh.
        size: least count of numbers of each member; rounded up to what can be split twice.

    Returns:
        The largest error of each kind of exchange, relative to the numbers, and the seconds of a
        sum.
    """
    members = mesh.shape[axis]
    size = -(-size // members**2) * members**2
    numbers = np.random.default_rng(0).integers(-1000, 1000, (members, size)).astype(np.float32)
    spec = PartitionSpec(axis)
    operand = jax.make_array_from_callback(
        numbers.shape, NamedSharding(mesh, spec), lambda index: numbers[index]
    )
    ring = [(member, (member + 1) % members) for member in range(members)]
    parts = numbers.reshape(members, members, -1)

    # Each exchange of one member's numbers, and what all members should have then.
    exchanges = {
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
    errors = {}
    seconds = 0.0
    for kind, (function, expected) in exchanges.items():
        program = jax.jit(
            jax.shard_map(function, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
        )
        result = program(operand)
        differences = []
        for shard in result.addressable_shards:
            difference = np.abs(np.asarray(shard.data) - expected[shard.index])
            differences.append(float(difference.max()))
        errors[kind] = max(differences) / 1000
        if kind == "psum":
            seconds = machine.best_seconds(functools.partial(program, operand))
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
        raise NotRunError(f"the suite's reference runs on torch: {install_command('conformance')}")

    tolerated_gap = 0.1
    if product_precision("float32", machine.platform) == "float32":
        tolerated_gap = 1e-3
    for name in ("jetstream", "remote", "ray", "vllm"):
        if name in ("ray", "vllm") and not is_installed(name):
            record.leave_out(name, f"the package {name} is not installed")
            continue
        if not record.has_time(name):
            continue
        folder = machine.scratch / f"conformance-{name}"
        folder.mkdir()
        options = BackendOptions(folders=prepare_folders(None, folder), tolerance=tolerated_gap)
        report = run_suite(select_backend(name, options))

        broken = []
        for result in report.results:
            if result.outcome == "failed":
                broken.append(f"{result.check} ({result.claim.strip()})")
        applicable = len(report.results) - report.count("skipped")
        detail = f"of {applicable} that apply"
        if broken:
            detail += f": {'; '.join(broken)}"
        record(f"{name}: broken rules", len(broken), high=0, detail=detail)


def check_agreement(machine: Machine, record: CheckResult) -> None:
    """Compare the engine's log-probs with the learner's for the same weights.

    This is done in every precision of the engine.
    """
    machine.learner  # noqa: B018  # or a reason not to run
    backends = {}
    for name, settings in PRECISIONS.items():
        backends[name] = _with_precision(machine.alone, settings)
    if machine.config.rollout.backend == "vllm":
        backends["vLLM"] = machine.config

    for name, config in backends.items():
        if not record.has_time(name):
            continue
        gap, precision = asyncio.run(_sample_and_score(machine, config))
        jax_engine = config.rollout.backend == "jetstream"
        precisions = [precision, config.learner.compute_dtype]
        tolerated = tolerance(precisions, jax_engine=jax_engine, platform=machine.platform)
        row = coarsest([product_precision(one, machine.platform) for one in precisions])
        detail = f"{counted(gap.tokens, 'token')}; row {row} of the table"

        mean = gap.mean
        largest = gap.largest
        if gap.tokens != len(QUESTIONS) * SAMPLED:  # tokens whose gap is NaN do not count
            mean = math.nan
            largest = math.nan
        record(f"{name}: mean gap", mean, "nats", high=tolerated.mean, detail=detail)
        record(f"{name}: largest gap", largest, "nats", high=tolerated.token, detail=detail)


def _with_precision(config: Config, settings: Mapping[str, str]) -> Config:
    engine = config.rollout.jetstream.model_copy(update=dict(settings))
    return config.model_copy(
        update={"rollout": config.rollout.model_copy(update={"jetstream": engine})}
    )


async def _sample_and_score(machine: Machine, config: Config) -> tuple[Comparison, str]:
    """Return the gap over freshly sampled tokens, and the engine's precision."""
    learner = machine.learner
    factories = backend_factories(
        config,
        machine.codec,
        weights=lambda: (machine.model, learner.params),
        print_line=lambda line: None,
    )
    (make_backend,) = factories.values()
    backend: RolloutBackend = make_backend()
    async with asyncio.timeout(HANG_SECONDS):
        await backend.start()
        try:
            room = config.rollout.max_model_len - SAMPLED
            sampling = SamplingParams(
                max_tokens=SAMPLED, ignore_eos=True, temperature=config.rollout.temperature
            )
            requests = []
            for number, question in enumerate(QUESTIONS):
                ids = machine.codec.encode_prompt([{"role": "user", "content": question}])
                requests.append(
                    GenerateRequest(
                        request_id=str(number), prompt_ids=tuple(ids[-room:]), sampling=sampling
                    )
                )
            outputs: list[TokenOutput] = await asyncio.gather(*map(backend.generate, requests))
            precision = backend.capabilities.precision
        finally:
            await backend.close()

    groups = []
    masks = []
    for request, output in zip(requests, outputs, strict=True):
        group = make_group(f"p{request.request_id}", request.prompt_ids, [output])
        groups.append(group)
        masks += [comparable(trajectory, 0) for trajectory in group.trajectories]
    rollout_logprobs = [np.asarray(output.log_probs) for output in outputs]
    return compare(learner.logprobs(groups), rollout_logprobs, masks), precision


# --- learner --------------------------------------------------------------------------------------


def check_checkpoint(machine: Machine, record: CheckResult) -> None:
    """Save the learner, restore it, and go on from it: numbers are equal bit by bit."""
    learner = machine.learner
    groups, _ = full_groups(machine)
    checkpointer = Checkpointer(machine.scratch / "checkpoint", keep=1)
    try:
        learner.update(groups)
        saved_digests = digests(learner.state)
        size = sum(array.nbytes for array in jax.tree.leaves(learner.state))
        start_time = machine.clock()
        checkpointer.save(1, learner.state, {})
        checkpointer.wait()
        saved_time = machine.clock()
        _, restored_state, _ = checkpointer.restore(learner.state)
        restored_time = machine.clock()
    finally:
        checkpointer.close()

    detail = f"of {len(saved_digests)}"
    differing = count_differing(saved_digests, digests(restored_state))
    record("arrays that differ after restoring", differing, high=0, detail=detail)
    _record_transfer(record, "writing", size, saved_time - start_time)
    _record_transfer(record, "restoring", size, restored_time - saved_time)

    learner.update(groups)
    uninterrupted = digests(learner.state)
    learner.state = restored_state
    del restored_state  # the update donates its arrays
    learner.update(groups)
    differing = count_differing(uninterrupted, digests(learner.state))
    record("arrays that differ one update later", differing, high=0, detail=detail)


def _record_transfer(record: CheckResult, name: str, size: int, seconds: float) -> None:
    detail = f"{format_number(size, 'B')} in {seconds:.3g} s"
    record(name, size / seconds, "B/s", detail=detail)


def digests(state: Any) -> list[bytes]:
    """Return a digest of every array, since copies of two states would not fit every machine."""
    values = []
    for array in jax.tree.leaves(state):
        values.append(hashlib.sha256(np.asarray(array).tobytes()).digest())
    return values


def count_differing(first: Sequence[bytes], second: Sequence[bytes]) -> int:
    """Count the digests that differ."""
    count = 0
    for digest, other in zip(first, second, strict=True):
        if digest != other:
            count += 1
    return count


def check_training(machine: Machine, record: CheckResult) -> None:
    """Train for a few steps as ``jax-agent-rl train`` does, on all hosts."""
    config = machine.config
    machine.release()
    checkpoint_dir = config.trainer.checkpoint_dir
    if checkpoint_dir is not None:  # hosts agree on a folder of this run alone
        start = int(multihost_utils.broadcast_one_to_all(np.int64(time.time())))
        checkpoint_dir = f"{checkpoint_dir.rstrip('/')}/certify-{start}"
        trainer = config.trainer.model_copy(update={"checkpoint_dir": checkpoint_dir})
        config = config.model_copy(update={"trainer": trainer})
    if jax.process_index():
        follow_run(config)
        return
    try:
        with (machine.scratch / "training.log").open("w") as log:
            summary = asyncio.run(_train(config, Console(file=log, width=120)))
    finally:
        if checkpoint_dir is not None:
            epath.Path(checkpoint_dir).rmtree(missing_ok=True)
    _record_training(record, config, summary)


def _record_training(record: CheckResult, config: Config, summary: Mapping[str, Any]) -> None:
    """Record what the summary of a training run says."""
    accounted = summary["trained"] + sum(summary["dropped"].values())
    record(
        "trajectories unaccounted for",
        summary["started"] - accounted,
        low=0,
        high=0,
        claim=ACCOUNTING,
        detail=f"of {summary['started']}",
    )
    record("trajectories trained on", summary["trained"], low=1, claim=ACCOUNTING)
    record("trajectories whose ids drifted", summary["token_drift"], high=0, claim=DRIFT)
    engine = config.rollout.jetstream
    coarse = {engine.kv_dtype, engine.quantize} & {"int8", "fp8"}
    tolerated = run_tolerance(config, [engine.dtype, *coarse])
    record(
        "largest log-prob gap of engine and learner",
        summary["max_logprob_gap"],
        "nats",
        high=tolerated.token,
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
        detail=counted(summary["steps"], "step"),
    )


async def _train(config: Config, console: Console) -> dict[str, Any]:
    try:
        async with asyncio.timeout(HANG_SECONDS):
            return await train(config, resume=False, console=console)
    except TimeoutError as error:
        raise TimeoutError(f"the run did not end within {HANG_SECONDS:g} s") from error
