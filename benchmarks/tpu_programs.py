"""Predicted times of TPU programs and their share of the ideal, for well-known models; no TPU is
needed.

    python benchmarks/tpu_programs.py [--only qwen3-8b/v5e] [--programs decode learner] [--layers 2 4] [--set KEY=VALUE]

Each program is compiled with few layers, twice, and its time scaled to the model's number: what a
layer adds is the difference. A step of decoding has all slots at the end of their contexts; a
gradient has one micro-batch. The ideal is that of ``jax-agent-rl plan``: weights and visible keys
and values read once, the model's operations at the chips' peak, or the exchanges at the links'
speed, whichever takes longest. Extra: plan. Compiling takes minutes per row; rows are printed as
they are ready, as a table in Markdown.
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
    """A model on a slice, and the meshes of an engine and of the learner, as ``fsdp=4 expert=2``."""

    model: str
    topology: str
    engine: str
    learner: str

    @property
    def overrides(self) -> list[str]:
        """Return the changes of the recipe."""
        # The recipe splits its engine by tensor.
        meshes = {"rollout.jetstream.mesh": self.engine, "learner.mesh": self.learner}
        return [
            f"{mesh}.{part}"
            for mesh, parts in meshes.items()
            for part in ("tensor=1", *parts.split())
        ]


def cases() -> Iterator[Case]:
    """Yield models of 1.5B, 8B and 32B parameters, and a mixture of experts, on every generation."""
    for topology in ("v5e:2x4", "v5p:2x2x1", "v6e:2x4"):
        chips = Slice.parse(topology).chips
        fsdp = f"fsdp={chips}"
        yield Case("qwen2.5-1.5b", topology, "tensor=1", fsdp)
        yield Case("qwen3-8b", topology, "tensor=4", fsdp)
        yield Case("qwen3-32b", topology, f"tensor={chips}", fsdp)
        yield Case("qwen3-30b-a3b", topology, "expert=4", f"fsdp={chips // 2} expert=2")


def compiled_with(case: Case, program: Profile, layers: int, more: list[str]) -> Compiled:
    """Compile a program of a model with so many layers."""
    fields = ARCHITECTURES[case.model] | {"num_hidden_layers": layers}
    slice = Slice.parse(case.topology)
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(fields))
        alone = "rollout.jetstream.mesh.data=1"  # an engine has all slots
        config = load(RECIPE, [f"model.path={folder}", alone, *case.overrides, *more])
        made = compile_profiled(config, check(config), slice, profile=program)
    return next(one for one in made if one.program.name.startswith(MAIN[program]))


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
    chosen = cases()
    if args.case:
        chosen = [Case(*args.case)]
    for case in chosen:
        if args.only not in f"{case.model}/{case.topology}":
            continue
        chip = Slice.parse(case.topology).chip
        for program in args.programs:
            few, more = (compiled_with(case, program, layers, args.set) for layers in args.layers)
            where = (
                f"| {case.model} | {case.topology} | {more.program.name} |"
                f" {more.program.mesh.size} |"
            )
            if few.prediction is None or more.prediction is None:
                print(f"{where} does not fit with {args.layers[1]} layers | | | |", flush=True)
                continue
            # Each resource alone: few layers may be bound by another one than all.
            fewer, own = vars(ideal_seconds(few, chip)), vars(ideal_seconds(more, chip))
            ideal = Seconds(
                **{part: scaled(case, args.layers, (fewer[part], own[part])) for part in own}
            )
            predicted = scaled(case, args.layers, (few.prediction.seconds, more.prediction.seconds))
            steps = more.program.loops
            numbers = (
                f"{ideal.total / steps * 1e3:.2f} ms | {ideal.bound} |"
                f" {predicted / steps * 1e3:.2f} ms"
            )
            print(f"{where} {numbers} | {ideal.total / predicted:.0%} |", flush=True)


def scaled(case: Case, layers: list[int], seconds: tuple[float, float]) -> float:
    """Return the time with all layers of a model, from that with few and with more."""
    each = (seconds[1] - seconds[0]) / (layers[1] - layers[0])
    return seconds[1] + each * (ARCHITECTURES[case.model]["num_hidden_layers"] - layers[1])


if __name__ == "__main__":
    main()
