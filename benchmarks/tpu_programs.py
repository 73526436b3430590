r"""Predicted times of TPU programs and their share of the ideal, for well-known models.

    python benchmarks/tpu_programs.py [--only qwen3-8b/v5e] [--programs decode learner] \
        [--layers 2 4] [--set KEY=VALUE]

No TPU is needed. Each program is compiled with few layers, twice, and its time scaled to the
model's number: what a layer adds is the difference. A step of decoding has all slots at the end of
their contexts; a gradient has one micro-batch. The ideal is as in ``jax-agent-rl plan``: weights
and visible keys and values read once, the model's operations at the chips' peak, or the exchanges
at the links' speed, whichever takes longest. Extra: plan. Compiling takes minutes per row; rows are
printed as they are ready, as a table in Markdown.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

os.environ["JAX_PLATFORMS"] = "cpu"  # before JAX is loaded: the chips are described

from common import argument_parser

from jax_agent_rl.config import load
from jax_agent_rl.deploy.plan.architectures import ARCHITECTURES
from jax_agent_rl.deploy.plan.compiled import Compiled, Seconds, ideal_seconds
from jax_agent_rl.deploy.plan.plan import Profile, check, compile_profiled
from jax_agent_rl.deploy.plan.topology import Slice

RECIPE = Path(__file__).parent.parent / "configs" / "tpu_8b.yaml"
MAIN = {"decode": "decode", "prefill": "prefill", "learner": "policy gradient"}


@dataclass(frozen=True)
class Case:
    """A model on a slice, and the meshes of engine and learner, such as ``fsdp=4 expert=2``."""

    model: str
    topology: str
    engine: str
    learner: str

    @property
    def overrides(self) -> list[str]:
        """Return the changes of the recipe."""
        overrides = []
        meshes = {"rollout.jetstream.mesh": self.engine, "learner.mesh": self.learner}
        for mesh, axes in meshes.items():
            overrides.append(f"{mesh}.tensor=1")  # the recipe splits its engine by tensor
            overrides += [f"{mesh}.{axis}" for axis in axes.split()]
        return overrides


def cases() -> Iterator[Case]:
    """Yield models of 1.5B to 32B parameters, one of experts among them, on every generation."""
    for topology in ("v5e:2x4", "v5p:2x2x1", "v6e:2x4"):
        chips = Slice.parse(topology).chips
        fsdp = f"fsdp={chips}"
        yield Case("qwen2.5-1.5b", topology, "tensor=1", fsdp)
        yield Case("qwen3-8b", topology, "tensor=4", fsdp)
        yield Case("qwen3-32b", topology, f"tensor={chips}", fsdp)
        yield Case("qwen3-30b-a3b", topology, "expert=4", f"fsdp={chips // 2} expert=2")


def compiled_with(case: Case, program: Profile, layers: int, changes: list[str]) -> Compiled:
    """Compile a program of a model with so many layers.

    Args:
        changes: of the recipe, besides those of the case.
    """
    fields = ARCHITECTURES[case.model] | {"num_hidden_layers": layers}
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(fields))
        overrides = [
            f"model.path={folder}",
            "rollout.jetstream.mesh.data=1",  # one engine has all slots
            *case.overrides,
            *changes,
        ]
        config = load(RECIPE, overrides)
        topology = Slice.parse(case.topology)
        all_compiled = compile_profiled(config, check(config), topology, profile=program)
    for compiled in all_compiled:
        if compiled.program.name.startswith(MAIN[program]):
            return compiled
    raise RuntimeError(f"{case.model} has no program {MAIN[program]!r}")


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("--only", default="", help="part of model/topology")
    parser.add_argument(
        "--case",
        nargs=4,
        metavar=("MODEL", "TOPOLOGY", "ENGINE", "LEARNER"),
        help="another, with its meshes: qwen3-8b v6e:2x2 tensor=4 fsdp=4",
    )
    parser.add_argument("--programs", nargs="+", default=["decode", "learner"], choices=list(MAIN))
    parser.add_argument(
        "--layers", nargs=2, type=int, default=[2, 4], help="layers that are compiled"
    )
    parser.add_argument(
        "--set", nargs="*", default=[], metavar="KEY=VALUE", help="changes of configs/tpu_8b.yaml"
    )
    args = parser.parse_args()
    print("| model | slice | program | chips | ideal | bound by | predicted | share |")
    print("|---|---|---|---|---|---|---|---|", flush=True)
    all_cases = list(cases())
    if args.case:
        all_cases = [Case(*args.case)]
    for case in all_cases:
        if args.only not in f"{case.model}/{case.topology}":
            continue
        for program in args.programs:
            print(row(case, program, args.layers, args.set), flush=True)


def row(case: Case, program: Profile, layers: list[int], changes: list[str]) -> str:
    """Return a line of the table.

    Args:
        layers: how many are compiled, few and more.
        changes: of the recipe, besides those of the case.
    """
    few_layers, more_layers = layers
    smaller = compiled_with(case, program, few_layers, changes)
    larger = compiled_with(case, program, more_layers, changes)
    program_name = larger.program.name
    num_chips = larger.program.mesh.size
    start = f"| {case.model} | {case.topology} | {program_name} | {num_chips} |"
    if smaller.prediction is None or larger.prediction is None:
        return f"{start} does not fit with {more_layers} layers | | | |"

    # Each resource alone: few layers may be bound by another one than all.
    chip = Slice.parse(case.topology).chip
    smaller_ideal = vars(ideal_seconds(smaller, chip))
    larger_ideal = vars(ideal_seconds(larger, chip))
    ideal_by_resource = {}
    for resource, seconds in larger_ideal.items():
        ideal_by_resource[resource] = scaled(case, layers, smaller_ideal[resource], seconds)
    ideal = Seconds(**ideal_by_resource)

    predicted = scaled(case, layers, smaller.prediction.seconds, larger.prediction.seconds)
    steps = larger.program.loops
    ideal_ms = ideal.total / steps * 1e3
    predicted_ms = predicted / steps * 1e3
    return (
        f"{start} {ideal_ms:.2f} ms | {ideal.bound} | {predicted_ms:.2f} ms |"
        f" {ideal.total / predicted:.0%} |"
    )


def scaled(case: Case, layers: list[int], few_seconds: float, more_seconds: float) -> float:
    """Return the time with all layers of a model, from the times with few and with more layers."""
    few_layers, more_layers = layers
    layer_seconds = (more_seconds - few_seconds) / (more_layers - few_layers)
    num_layers = ARCHITECTURES[case.model]["num_hidden_layers"]
    return more_seconds + layer_seconds * (num_layers - more_layers)


if __name__ == "__main__":
    main()
