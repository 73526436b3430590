"""Attention of the learner on NVIDIA GPUs: Triton kernels against XLA's blocks and cuDNN.

    .venv-cuda/bin/python benchmarks/cuda_attention.py --described h100      without a GPU
    .venv-gpu/bin/python benchmarks/cuda_attention.py                        on one

One GPU computes attention over a packed row, and its gradients, in bfloat16. The row is a tree: a
prompt that takes half of it, and --branches answers. Without a GPU, XLA's CUDA compiler says what
memory the program takes beside its arguments and results, and ptxas what its kernels take:
instructions (of PTX), registers of a thread, bytes that registers spill. On a GPU the program is
also timed, and what it computes is compared with the blocks. cuDNN has no masks of trees: its row
is one sequence, which is more work. The table is in Markdown.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from common import argument_parser
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jax_agent_rl.deploy.plan.topology import Slice
from jax_agent_rl.models import attention, tree_kernel_cuda
from jax_agent_rl.models.tree_kernel import TreeMask
from jax_agent_rl.utils.packages import package_folder

Arrays = tuple[jax.Array, ...]
REPEATS = 10


@dataclass(frozen=True, kw_only=True)
class Row:
    """One path.

    Attributes:
        temporaries: bytes of memory beside arguments and results.
        kernels: number of different kernels.
        instructions: of PTX, in all kernels.
        registers: of a thread, of the kernel that takes most.
        spilled: bytes that all kernels store because registers do not suffice.
        compile_seconds: of the compilation.
        milliseconds: of outputs and gradients; None without a GPU.
        difference: largest from what the blocks compute; None without a GPU.
    """

    path: str
    temporaries: int
    kernels: int
    instructions: int
    registers: int
    spilled: int
    compile_seconds: float
    milliseconds: float | None = None
    difference: float | None = None


def by_kernels(q: Any, k: Any, v: Any, ends: Any, d_out: Any) -> Arrays:
    mask = TreeMask(ends)
    out, normalizer = tree_kernel_cuda.forward(q, k, v, mask)
    return out, *tree_kernel_cuda.backward(q, k, v, mask, out, normalizer, d_out)


def by_blocks(q: Any, k: Any, v: Any, ends: Any, d_out: Any) -> Arrays:
    mask = TreeMask(ends)
    out, normalizer = attention.forward_by_blocks(q, k, v, mask)
    return out, *attention.backward_by_blocks(q, k, v, mask, out, normalizer, d_out)


def by_cudnn(q: Any, k: Any, v: Any, ends: Any, d_out: Any) -> Arrays:
    def attend(q: Any, k: Any, v: Any) -> jax.Array:
        q, k, v = (x.transpose(0, 2, 1, 3) for x in (q, k, v))
        out = jax.nn.dot_product_attention(
            q, k, v, is_causal=True, scale=1.0, implementation="cudnn"
        )
        return out.transpose(0, 2, 1, 3)

    out, pull = jax.vjp(attend, q, k, v)
    return out, *pull(d_out)


PATHS: dict[str, Callable[..., Arrays]] = {
    "Triton kernels": by_kernels,
    "XLA's blocks": by_blocks,
    "cuDNN, one sequence": by_cudnn,
}


def row_of_branches(length: int, branches: int) -> np.ndarray:
    """Return the ends of subtrees, int32 [1, length]: a prompt, and branches of equal length."""
    prompt = length // 2
    ends = np.full((1, length), length, np.int32)
    bounds = np.linspace(prompt, length, branches + 1).astype(int)
    for begin, end in zip(bounds, bounds[1:], strict=False):
        ends[0, begin:end] = end
    return ends


def find_ptxas() -> str:
    """Return NVIDIA's assembler: of jax's packages, or the machine's."""
    folder = package_folder("nvidia")
    if folder is not None:
        for file in sorted(Path(folder).rglob("bin/ptxas")):
            return str(file)
    found = shutil.which("ptxas")
    if found is None:
        raise SystemExit("no ptxas: install jax[cuda13], or the CUDA toolkit")
    return found


def assembled(texts: list[str]) -> dict[str, int]:
    """Return what ptxas says of kernels, given as PTX."""
    figures: dict[str, int] = {"kernels": 0, "instructions": 0, "registers": 0, "spilled": 0}
    for text in texts:
        target = re.search(r"^\.target (\w+)", text, re.MULTILINE)
        if target is None:  # constants alone
            continue
        with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file:
            file.write(text)
            file.flush()
            command = [find_ptxas(), "-v", f"-arch={target[1]}", "-o", os.devnull, file.name]
            said = subprocess.run(command, capture_output=True, text=True, check=True).stderr
        registers = [int(number) for number in re.findall(r"Used (\d+) registers", said)]
        spilled = [int(number) for number in re.findall(r"(\d+) bytes spill stores", said)]
        figures["kernels"] += len(registers)
        figures["instructions"] += len(re.findall(r"^\s+[a-z@].*;$", text, re.MULTILINE))
        figures["registers"] = max(figures["registers"], *registers)
        figures["spilled"] += sum(spilled)
    return figures


def compile_path(
    path: str, arguments: Any, mesh: Mesh, dump: Path
) -> tuple[Row, jax.stages.Compiled]:
    """Compile a path.

    Args:
        dump: where the compiler leaves its PTX.
    """
    before = set(dump.glob("*.ptx"))
    start_time = time.perf_counter()
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):  # Pallas asks it for the device
        compiled = jax.jit(PATHS[path]).lower(*arguments).compile()
    seconds = time.perf_counter() - start_time

    memory = compiled.memory_analysis()
    assert memory is not None
    texts = [file.read_text() for file in sorted(set(dump.glob("*.ptx")) - before)]
    row = Row(
        path=path,
        temporaries=memory.temp_size_in_bytes,
        compile_seconds=seconds,
        **assembled(texts),
    )
    return row, compiled


def timed(compiled: jax.stages.Compiled, arguments: Any) -> tuple[float, Arrays]:
    """Return the shortest milliseconds of several calls, and what they compute."""
    result = jax.block_until_ready(compiled(*arguments))
    times = []
    for _ in range(REPEATS):
        start_time = time.perf_counter()
        jax.block_until_ready(compiled(*arguments))
        times.append(1e3 * (time.perf_counter() - start_time))
    return min(times), result


def difference(result: Arrays, expected: Arrays) -> float:
    """Return the largest difference over the largest number."""
    largest = 0.0
    for got, wanted in zip(result, expected, strict=True):
        got = np.asarray(got).astype(np.float64)
        wanted = np.asarray(wanted).astype(np.float64)
        largest = max(largest, float(np.abs(got - wanted).max() / np.abs(wanted).max()))
    return largest


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("--described", metavar="GPU", help="h100, h200 or b200: not this machine's")
    parser.add_argument("--length", type=int, default=4096, help="of the row")
    parser.add_argument("--branches", type=int, default=8)
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--kv-heads", type=int, default=8)
    parser.add_argument("--head-size", type=int, default=128)
    parser.add_argument("--paths", nargs="+", choices=list(PATHS), default=list(PATHS))
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()

    # Before JAX looks for devices.
    dump = Path(tempfile.mkdtemp(prefix="cuda_attention_"))
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_dump_to={dump}"
    if args.described:
        jax.config.update("jax_platforms", "cpu")
        devices = Slice.parse(f"{args.described}:1").devices
    else:
        devices = jax.devices("gpu")[:1]
    mesh = Mesh(np.array(devices), ("data",))
    sharding = NamedSharding(mesh, PartitionSpec())
    ends = row_of_branches(args.length, args.branches)

    def array(heads: int, seed: int) -> Any:
        shape = (1, heads, args.length, args.head_size)
        if args.described:
            return jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=sharding)
        numbers = np.random.default_rng(seed).standard_normal(shape) / args.head_size**0.25
        return jax.device_put(jnp.asarray(numbers, jnp.bfloat16), sharding)

    if args.described:
        marks: Any = jax.ShapeDtypeStruct(ends.shape, jnp.int32, sharding=sharding)
    else:
        marks = jax.device_put(ends, sharding)
    arguments = (
        array(args.heads, 0),
        array(args.kv_heads, 1),
        array(args.kv_heads, 2),
        marks,
        array(args.heads, 3),
    )

    rows = []
    results: dict[str, Arrays] = {}
    for path in args.paths:
        row, compiled = compile_path(path, arguments, mesh, dump)
        if not args.described:
            milliseconds, results[path] = timed(compiled, arguments)
            row = Row(**{**asdict(row), "milliseconds": milliseconds})
        rows.append(row)
    blocks = results.get("XLA's blocks")
    kernels = results.get("Triton kernels")
    if blocks is not None and kernels is not None:
        compared = difference(kernels, blocks)
        rows[0] = Row(**{**asdict(rows[0]), "difference": compared})
        if compared > 0.05:
            raise SystemExit(f"the kernels differ from the blocks by {compared:.3g}")
    shutil.rmtree(dump)

    if args.json:
        print(json.dumps([asdict(row) for row in rows]))
        return
    print("| path | memory | kernels | instructions | registers | spilled | compiled in | time |")
    print("|---|---|---|---|---|---|---|---|")
    for row in rows:
        measured = "-" if row.milliseconds is None else f"{row.milliseconds:.3g} ms"
        print(
            f"| {row.path} | {row.temporaries / 2**20:.1f} MiB | {row.kernels} |"
            f" {row.instructions:,} | {row.registers} | {row.spilled} B |"
            f" {row.compile_seconds:.0f} s | {measured} |"
        )


if __name__ == "__main__":
    main()
