"""Speed and memory of a run's parts beside what ``plan`` says, and beside the device's peaks.

The engine's and the learner's own programs are timed, with full slots and full micro-batches. On
TPUs ``plan`` predicts their time (docs/tpu_programs.md); elsewhere its ideal time is taken, at the
peaks that this machine reached before.
"""

from __future__ import annotations

import math
import platform
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np

from jax_agent_rl.deploy.certify.machine import Machine
from jax_agent_rl.deploy.certify.report import CheckResult, Claim, NotRunError, format_number
from jax_agent_rl.deploy.plan.compiled import Compiled, ideal_seconds
from jax_agent_rl.deploy.plan.engine_programs import pass_flops
from jax_agent_rl.deploy.plan.learner_programs import as_sampled, make_group
from jax_agent_rl.jetstream.decode_batch import PREFILL_ROWS, Extension, make_decode_batch
from jax_agent_rl.types import Group

PEAKS = Claim(
    page="docs/certify.md",
    text="A large matrix product and a large sum reach 60 % of a TPU's documented peaks.",
)
PREDICTED = Claim(
    page="docs/tpu_programs.md",
    text="compiles a run's programs with `libtpu` and predicts their time without a TPU.",
)
IDEAL = Claim(
    page="docs/certify.md", text="No part of a run takes more than ten times its ideal time."
)
MEMORY = Claim(
    page="docs/hardware.md",
    text="shapes, sharding and memory are then known, speed is an estimate.",
)
PEAK_SHARE = 0.6
"""Least share of a TPU's documented peaks that a large product, or a large sum, reaches."""
FACTOR = 2.0
"""Largest factor between a time on a TPU and ``plan``'s prediction, either way."""
SLOWEST = 10.0
"""Largest factor between a time and the ideal time."""
DISPATCH = 0.02
"""Seconds of a call from Python, which no plan counts."""
SPARE = 1.25
"""Memory used over memory planned, at most; beside it, on CPUs, what Python and compilers take."""
HOST_SPARE = 1 << 30


def check_peaks(machine: Machine, record: CheckResult) -> None:
    """Measure what the device reaches on a large matrix product and on a large sum."""
    chip = machine.chip

    def reached(name: str, value: float, unit: str, documented: float | None) -> None:
        known = (
            {}
            if documented is None
            else {"low": PEAK_SHARE * documented, "beside": {"documented": documented}}
        )
        record(name, value, unit, **known)

    for dtype in dict.fromkeys(
        (machine.alone.learner.compute_dtype, machine.alone.rollout.jetstream.dtype)
    ):
        reached(f"matrix product, {dtype}", machine.flops(dtype), "FLOP/s", chip and chip.flops)
    reached("reading of memory", machine.bandwidth(), "B/s", chip and chip.hbm_bandwidth)


class Timing(NamedTuple):
    """A timed part: ``work`` of a unit in ``seconds``, and the planned and the ideal seconds."""

    title: str
    unit: str
    work: float
    seconds: float
    planned: float
    ideal: float


def check_speed(machine: Machine, record: CheckResult) -> None:
    """Time decoding, prefill, a learner's update, and the transfer of its weights to the engine."""
    machine.learner  # noqa: B018  # or a reason not to run
    parts = {
        "weight transfer": _time_weights,
        "decoding": _time_decoding,
        "prefill": _time_prefill,
        "learner": _time_learner,
    }
    for name, run in parts.items():
        if not record.has_time(name):
            continue
        title, unit, work, seconds, planned, ideal = run(machine)
        predicts = machine.plan.predicts
        most = DISPATCH + planned * (FACTOR if predicts else SLOWEST)
        record(
            name + title,
            work / seconds,
            f"{unit}/s",
            low=work / most,
            high=FACTOR * work / planned if predicts else None,
            beside=({"plan": work / planned} if predicts else {}) | {"ideal": work / ideal},
            claim=PREDICTED if predicts else IDEAL,
            detail=f"{ideal / seconds:.0%} of the ideal; {format_number(seconds, 's')} a call",
        )


def _planned(machine: Machine, one: Compiled) -> tuple[float, float]:
    """Return planned and ideal seconds of a call."""
    learns = one.program.phase == "learner"
    dtype = machine.alone.learner.compute_dtype if learns else machine.alone.rollout.jetstream.dtype
    ideal = ideal_seconds(one, machine.as_chip(dtype)).total
    return one.prediction.seconds if machine.plan.predicts and one.prediction else ideal, ideal


def _find(machine: Machine, prefix: str) -> Compiled:
    if (one := machine.plan.find(prefix)) is None:
        raise NotRunError(f"plan has no program {prefix!r} for this engine")
    return one


def _time_weights(machine: Machine) -> Timing:
    params, engine = machine.learner.params, machine.engine
    served = engine.load_params(params)

    def load() -> object:
        nonlocal served
        served = engine.load_params(params, served)
        return served

    seconds, size = machine.best_seconds(load), sum(x.nbytes for x in jax.tree.leaves(params))
    return Timing("", "B", size, seconds, *_planned(machine, _find(machine, "take weights")))


def _time_decoding(machine: Machine) -> Timing:
    engine, steps = machine.engine, machine.engine.shapes.decode_steps
    weights, cache = engine.load_params(machine.learner.params), engine.init_cache()
    count = min(
        engine.shapes.max_concurrent_decodes, engine.shapes.pages // engine.shapes.context_pages
    )
    slots = make_decode_batch(
        count, engine.shapes.context_pages, engine.shapes.cache_length - steps
    )
    pages = 1 + np.arange(count * engine.shapes.context_pages, dtype=np.int32).reshape(count, -1)
    busy = np.full(count, 2 * steps, np.int32)
    warm = np.full(count, machine.config.rollout.temperature, np.float32)
    slots = replace(slots, pages=pages, remaining=busy, temperature=warm)

    def decode() -> object:
        nonlocal cache
        cache, sampled = engine.decode(weights, cache, slots, steps, count + 1)
        return sampled.ids

    seconds = machine.best_seconds(decode)
    one = _find(machine, f"decode {engine.width(count)} slots")
    title = f", {count} slots of {engine.shapes.cache_length}"
    return Timing(title, "tokens", count * steps, seconds, *_planned(machine, one))


def _time_prefill(machine: Machine) -> Timing:
    engine, size = machine.engine, machine.engine.shapes.chunk_buckets[-1]
    weights, cache = engine.load_params(machine.learner.params), engine.init_cache()
    size = min(size, engine.shapes.max_model_len)
    each = -(-size // engine.shapes.page)
    rows = min(PREFILL_ROWS, engine.shapes.pages // each)
    ids = np.random.default_rng(0).integers(3, machine.model.vocab_size, size).astype(np.int32)
    chunks = [
        Extension(pages=[*range(1 + i * each, 1 + (i + 1) * each)], start=0, ids=ids)
        for i in range(rows)
    ]

    def prefill() -> object:
        nonlocal cache
        cache = engine.extend(weights, cache, chunks)
        return cache

    seconds, chip = (
        machine.best_seconds(prefill),
        machine.as_chip(machine.alone.rollout.jetstream.dtype),
    )
    flops = rows * pass_flops(machine.model, size, visible=(size + 1) / 2, head=False)
    ideal = max(
        flops / chip.flops, sum(x.nbytes for x in jax.tree.leaves(weights)) / chip.hbm_bandwidth
    )
    one = machine.plan.find("prefill")
    planned = ideal if one is None or not machine.plan.predicts else _planned(machine, one)[0]
    return Timing(f", {rows} prompts of {size} ids", "tokens", rows * size, seconds, planned, ideal)


def _time_learner(machine: Machine) -> Timing:
    groups, tokens = full_groups(machine)
    seconds = machine.best_seconds(lambda: bool(machine.learner.update(groups)), repeats=2)
    planned = ideal = 0.0
    for one in machine.plan.compiled:
        if one.program.phase == "learner":
            calls = one.program.calls * (
                math.ceil(tokens / one.program.tokens) if one.program.of else 1
            )
            here = _planned(machine, one)
            planned, ideal = planned + calls * here[0], ideal + calls * here[1]
    return Timing(f", updates of {tokens:,} tokens", "tokens", tokens, seconds, planned, ideal)


def full_groups(machine: Machine) -> tuple[Sequence[Group], int]:
    """Return groups of full length that fill a micro-batch or more, and the tokens that the learner packs of them."""
    config, rng = machine.alone, np.random.default_rng(0)
    members, response = config.rollout.group_size, config.agent.max_response_length
    prompt = min(config.agent.max_prompt_length, config.rollout.max_model_len - response)
    each = prompt * (1 if config.learner.share_prefixes else members) + members * response
    gradient = _find(machine, "policy gradient").program
    count = min(config.rollout.prompts_per_step, -(-gradient.tokens // each))
    groups = []
    for group in range(count):
        own = tuple(map(int, rng.integers(3, machine.model.vocab_size, prompt)))
        outputs = [
            rng.integers(3, machine.model.vocab_size, response).tolist() for _ in range(members)
        ]
        groups.append(make_group(f"g{group}", own, list(map(as_sampled, outputs))))
    return groups, count * each


def check_memory(machine: Machine, record: CheckResult) -> None:
    """Compare the most memory that the learner and the engine took with what ``plan`` says."""
    fullest = max(machine.plan.loads, key=lambda load: load.total)
    peaks = [
        (device.id, (device.memory_stats() or {}).get("peak_bytes_in_use"))
        for device in machine.devices
    ]
    used = [(number, peak) for number, peak in peaks if peak is not None]
    beside = {"plan": float(fullest.total), "capacity": float(fullest.capacity)}
    for number, peak in used:
        record(
            f"device {number}, most in use",
            peak,
            "B",
            high=SPARE * fullest.total,
            beside=beside,
            detail=f"plan's fullest program: {fullest.program.name}",
        )
    if not used:
        _record_host_memory(machine, record, beside)


def _record_host_memory(machine: Machine, record: CheckResult, beside: dict[str, float]) -> None:
    """Measure the process's own memory, as CPUs count none: what learner and engine add to the rest."""
    reset, status = Path("/proc/self/clear_refs"), Path("/proc/self/status")
    if not status.is_file():
        raise NotRunError(f"the device counts no memory, and {platform.system()} has no {status}")
    groups, _ = full_groups(machine)
    before = _status(status, "VmRSS") - sum(x.nbytes for x in jax.live_arrays())
    reset.write_text("5")  # the high-water mark begins again
    engine, learner = machine.engine, machine.learner
    weights, cache = engine.load_params(learner.params), engine.init_cache()
    learner.update(groups)
    jax.block_until_ready((weights, cache))
    record(
        "the process, most in use",
        max(0, _status(status, "VmHWM") - before),
        "B",
        high=SPARE * beside["plan"] + HOST_SPARE,
        beside=beside,
        detail="without what Python, the compiler and freed arrays held before",
    )


def _status(file: Path, name: str) -> int:
    """Return bytes of a line of ``/proc/self/status``."""
    found = re.search(rf"^{name}:\s+(\d+) kB$", file.read_text(), re.MULTILINE)
    return int(found[1]) * 1024 if found else 0
