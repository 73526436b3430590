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

from jax_agent_rl.deploy.certify.machine import Machine, NotRunError
from jax_agent_rl.deploy.certify.report import CheckResult, Claim, format_number
from jax_agent_rl.deploy.plan.compiled import Compiled, ideal_seconds
from jax_agent_rl.deploy.plan.learner_programs import as_sampled, make_group
from jax_agent_rl.deploy.plan.model_flops import pass_flops
from jax_agent_rl.jetstream.decode_batch import PREFILL_ROWS, Extension, make_decode_batch
from jax_agent_rl.types import Group
from jax_agent_rl.utils.text import counted

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
"""Memory used over memory planned, at most."""
HOST_SPARE = 1 << 30
"""Bytes that Python and compilers may take besides, on CPUs."""


def check_peaks(machine: Machine, record: CheckResult) -> None:
    """Measure what the device reaches on a large matrix product and on a large sum."""
    chip = machine.chip

    def record_peak(name: str, value: float, unit: str, documented: float | None) -> None:
        if documented is None:
            record(name, value, unit)
            return
        low = PEAK_SHARE * documented
        record(name, value, unit, low=low, references={"documented": documented})

    flops = None
    bandwidth = None
    if chip is not None:
        flops = chip.flops
        bandwidth = chip.hbm_bandwidth
    dtypes = [machine.alone.learner.compute_dtype, machine.alone.rollout.jetstream.dtype]
    for dtype in dict.fromkeys(dtypes):
        record_peak(f"matrix product, {dtype}", machine.flops(dtype), "FLOP/s", flops)
    record_peak("reading of memory", machine.bandwidth(), "B/s", bandwidth)


class Timing(NamedTuple):
    """A timed part.

    Attributes:
        title: follows the part's name.
        work: how much was done, in ``unit``.
        seconds: measured time.
        planned, ideal: seconds according to ``plan``.
    """

    title: str
    unit: str
    work: float
    seconds: float
    planned: float
    ideal: float


class PlannedSeconds(NamedTuple):
    """Seconds of a call according to ``plan``; both are the ideal where it predicts no time."""

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
        timing = run(machine)
        _record_timing(record, name, timing, predicts=machine.plan.predicts)


def _record_timing(record: CheckResult, name: str, timing: Timing, *, predicts: bool) -> None:
    """Record a part's speed, and its limits by the predicted or the ideal time."""
    work = timing.work
    ideal_speed = work / timing.ideal
    if predicts:
        longest = DISPATCH + FACTOR * timing.planned
        highest = FACTOR * work / timing.planned
        references = {"plan": work / timing.planned, "ideal": ideal_speed}
        claim = PREDICTED
    else:
        longest = DISPATCH + SLOWEST * timing.planned
        highest = None
        references = {"ideal": ideal_speed}
        claim = IDEAL

    share = timing.ideal / timing.seconds
    record(
        name + timing.title,
        work / timing.seconds,
        f"{timing.unit}/s",
        low=work / longest,
        high=highest,
        references=references,
        claim=claim,
        detail=f"{share:.0%} of the ideal; {format_number(timing.seconds, 's')} a call",
    )


def _planned(machine: Machine, compiled: Compiled) -> PlannedSeconds:
    """Return the planned and the ideal seconds of a call."""
    if compiled.program.phase == "learner":
        dtype = machine.alone.learner.compute_dtype
    else:
        dtype = machine.alone.rollout.jetstream.dtype
    ideal = ideal_seconds(compiled, machine.as_chip(dtype)).total
    planned = ideal
    if machine.plan.predicts and compiled.prediction is not None:
        planned = compiled.prediction.seconds
    return PlannedSeconds(planned, ideal)


def find_program(machine: Machine, prefix: str) -> Compiled:
    """Return the program whose name begins so; raise NotRunError if there is none."""
    found = machine.plan.find(prefix)
    if not found:
        raise NotRunError(f"plan has no program {prefix!r} for this engine")
    return found[0]


def _time_weights(machine: Machine) -> Timing:
    params = machine.learner.params
    engine = machine.engine
    served = engine.load_params(params)

    def load() -> object:
        nonlocal served
        served = engine.load_params(params, served)
        return served

    seconds = machine.best_seconds(load)
    planned = 0.0
    ideal = 0.0
    for compiled in machine.plan.find("take weights"):
        expected = _planned(machine, compiled)
        planned += compiled.program.calls * expected.planned
        ideal += compiled.program.calls * expected.ideal
    if not planned:
        raise NotRunError("plan has no program that takes weights for this engine")
    return Timing("", "B", _nbytes(params), seconds, planned, ideal)


def _time_decoding(machine: Machine) -> Timing:
    engine = machine.engine
    shapes = engine.shapes
    steps = shapes.decode_steps
    weights = engine.load_params(machine.learner.params)
    cache = engine.init_cache()

    # As many slots as there are pages for contexts of full length.
    count = min(shapes.max_concurrent_decodes, shapes.pages // shapes.context_pages)
    pages = 1 + np.arange(count * shapes.context_pages, dtype=np.int32).reshape(count, -1)
    slots = replace(
        make_decode_batch(count, shapes.context_pages, shapes.cache_length - steps),
        pages=pages,
        remaining=np.full(count, 2 * steps, np.int32),
        temperature=np.full(count, machine.config.rollout.temperature, np.float32),
    )

    def decode() -> object:
        nonlocal cache
        cache, sampled = engine.decode(weights, cache, slots, steps, count + 1)
        return sampled.ids

    seconds = machine.best_seconds(decode)
    expected = _planned(machine, find_program(machine, f"decode {engine.width(count)} slots"))
    title = f", {counted(count, 'slot')} of {shapes.cache_length}"
    return Timing(title, "tokens", count * steps, seconds, expected.planned, expected.ideal)


def _time_prefill(machine: Machine) -> Timing:
    engine = machine.engine
    shapes = engine.shapes
    weights = engine.load_params(machine.learner.params)
    cache = engine.init_cache()

    size = min(shapes.chunk_buckets[-1], shapes.max_model_len)
    pages_per_prompt = -(-size // shapes.page)
    rows = min(PREFILL_ROWS, shapes.pages // pages_per_prompt)
    ids = np.random.default_rng(0).integers(3, machine.model.vocab_size, size).astype(np.int32)
    chunks = []
    for row in range(rows):
        first_page = 1 + row * pages_per_prompt
        pages = list(range(first_page, first_page + pages_per_prompt))
        chunks.append(Extension(pages=pages, start=0, ids=ids))

    def prefill() -> object:
        nonlocal cache
        cache = engine.extend(weights, cache, chunks)
        return cache

    seconds = machine.best_seconds(prefill)
    chip = machine.as_chip(machine.alone.rollout.jetstream.dtype)
    flops = rows * pass_flops(
        machine.model, size, visible=(size + 1) / 2, head=False, over_latents=True
    )
    ideal = max(flops / chip.flops, _nbytes(weights) / chip.hbm_bandwidth)
    planned = ideal
    compiled = machine.plan.find("prefill")
    if compiled and machine.plan.predicts:
        planned = _planned(machine, compiled[0]).planned
    return Timing(
        f", {counted(rows, 'prompt')} of {counted(size, 'id')}",
        "tokens",
        rows * size,
        seconds,
        planned,
        ideal,
    )


def _time_learner(machine: Machine) -> Timing:
    groups, tokens = full_groups(machine)
    seconds = machine.best_seconds(lambda: bool(machine.learner.update(groups)), repeats=2)
    planned = 0.0
    ideal = 0.0
    for compiled in machine.plan.compiled:
        program = compiled.program
        if program.phase != "learner":
            continue
        calls = program.calls
        if program.token_kind is not None:
            calls *= math.ceil(tokens / program.tokens)
        expected = _planned(machine, compiled)
        planned += calls * expected.planned
        ideal += calls * expected.ideal
    return Timing(f", updates of {tokens:,} tokens", "tokens", tokens, seconds, planned, ideal)


def full_groups(machine: Machine) -> tuple[Sequence[Group], int]:
    """Return groups of full length that fill a micro-batch or more.

    Returns:
        The groups, and the tokens that the learner packs of them.
    """
    config = machine.alone
    rng = np.random.default_rng(0)
    vocab_size = machine.model.vocab_size
    members = config.rollout.group_size
    response = config.agent.max_response_length
    prompt = min(config.agent.max_prompt_length, config.rollout.max_model_len - response)
    prompt_copies = 1 if config.learner.share_prefixes else members
    group_tokens = prompt * prompt_copies + members * response
    micro_batch_tokens = find_program(machine, "policy gradient").program.tokens
    count = min(config.rollout.prompts_per_step, -(-micro_batch_tokens // group_tokens))

    groups = []
    for number in range(count):
        prompt_ids = rng.integers(3, vocab_size, prompt).tolist()
        outputs = []
        for _ in range(members):
            outputs.append(as_sampled(rng.integers(3, vocab_size, response).tolist()))
        groups.append(make_group(f"g{number}", tuple(prompt_ids), outputs))
    return groups, count * group_tokens


def _nbytes(tree: object) -> int:
    return sum(array.nbytes for array in jax.tree.leaves(tree))


def check_memory(machine: Machine, record: CheckResult) -> None:
    """Compare the most memory that the learner and the engine took with what ``plan`` says."""
    fullest = max(machine.plan.loads, key=lambda load: load.total)
    references = {"plan": float(fullest.total), "capacity": float(fullest.capacity)}
    devices_count_memory = False
    for device in machine.devices:
        peak = (device.memory_stats() or {}).get("peak_bytes_in_use")
        if peak is None:
            continue
        devices_count_memory = True
        record(
            f"device {device.id}, most in use",
            peak,
            "B",
            high=SPARE * fullest.total,
            references=references,
            detail=f"plan's fullest program: {fullest.program.name}",
        )
    if not devices_count_memory:
        _record_host_memory(machine, record, references)


def _record_host_memory(
    machine: Machine, record: CheckResult, references: dict[str, float]
) -> None:
    """Measure the memory that learner and engine add to the process, as CPUs count none."""
    reset = Path("/proc/self/clear_refs")
    status = Path("/proc/self/status")
    if not status.is_file():
        raise NotRunError(f"the device counts no memory, and {platform.system()} has no {status}")
    groups, _ = full_groups(machine)
    baseline = _status(status, "VmRSS") - sum(array.nbytes for array in jax.live_arrays())
    reset.write_text("5")  # the high-water mark begins again

    engine = machine.engine
    learner = machine.learner
    weights = engine.load_params(learner.params)
    cache = engine.init_cache()
    learner.update(groups)
    jax.block_until_ready((weights, cache))
    record(
        "the process, most in use",
        max(0, _status(status, "VmHWM") - baseline),
        "B",
        high=SPARE * references["plan"] + HOST_SPARE,
        references=references,
        detail="without what Python, the compiler and freed arrays held before",
    )


def _status(file: Path, name: str) -> int:
    """Return bytes of a line of ``/proc/self/status``."""
    match = re.search(rf"^{name}:\s+(\d+) kB$", file.read_text(), re.MULTILINE)
    if match is None:
        return 0
    return int(match[1]) * 1024
