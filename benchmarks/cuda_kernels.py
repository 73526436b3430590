"""Kernels of the learner on NVIDIA GPUs, by Triton, against XLA's operations.

    .venv-cuda/bin/python benchmarks/cuda_kernels.py --described h100      without a GPU
    .venv-gpu/bin/python benchmarks/cuda_kernels.py                        on one

One GPU computes what a kernel does, and its gradients, in bfloat16:

- attention over a packed row. The row is a tree: a prompt that takes half of it, and --branches
  answers. cuDNN has no masks of trees: its row is one sequence, which is more work.
- a matrix of each expert of a mixture. Every expert has as many rows.
- log-probs and entropies of a row's tokens under the head.

Without a GPU, XLA's CUDA compiler says what memory the program takes beside its arguments and
results, and ptxas what its kernels take: instructions (of PTX), registers of a thread, bytes that
registers spill. The time is predicted as in ``jax-agent-rl plan``, from what kernels compute, read
and write; it knows nothing of how well one is written. On a GPU the program is timed, and what it
computes is compared with XLA's operations. The tables are in Markdown.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from common import argument_parser
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jax_agent_rl.deploy.plan.hlo import parse
from jax_agent_rl.deploy.plan.prediction import kernel_costs, predict
from jax_agent_rl.deploy.plan.topology import Chip, Slice
from jax_agent_rl.learner import linear_logprobs, logprob_kernel_cuda
from jax_agent_rl.learner.logprob_kernel_cuda import Scoring, TokenGradients
from jax_agent_rl.models import attention, grouped_kernel_cuda, moe, tree_kernel_cuda
from jax_agent_rl.models.tree_kernel import TreeMask
from jax_agent_rl.utils.packages import package_folder

Arrays = tuple[jax.Array, ...]
REPEATS = 10
LARGEST_DIFFERENCE = 0.05
"""Over the largest number, of results in bfloat16."""


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
        predicted: milliseconds of outputs and gradients; None on a GPU.
        milliseconds: likewise, measured; None without a GPU.
        difference: largest from what XLA's operations compute; None without a GPU.
    """

    subject: str
    path: str
    temporaries: int
    kernels: int
    instructions: int
    registers: int
    spilled: int
    compile_seconds: float
    predicted: float | None = None
    milliseconds: float | None = None
    difference: float | None = None


def attention_by_kernels(q: Any, k: Any, v: Any, ends: Any, d_out: Any) -> Arrays:
    mask = TreeMask(ends)
    out, normalizer = tree_kernel_cuda.forward(q, k, v, mask)
    return out, *tree_kernel_cuda.backward(q, k, v, mask, out, normalizer, d_out)


def attention_by_blocks(q: Any, k: Any, v: Any, ends: Any, d_out: Any) -> Arrays:
    mask = TreeMask(ends)
    out, normalizer = attention.forward_by_blocks(q, k, v, mask)
    return out, *attention.backward_by_blocks(q, k, v, mask, out, normalizer, d_out)


def attention_by_cudnn(q: Any, k: Any, v: Any, ends: Any, d_out: Any) -> Arrays:
    def attend(q: Any, k: Any, v: Any) -> jax.Array:
        q, k, v = (x.transpose(0, 2, 1, 3) for x in (q, k, v))
        out = jax.nn.dot_product_attention(
            q, k, v, is_causal=True, scale=1.0, implementation="cudnn"
        )
        return out.transpose(0, 2, 1, 3)

    out, pull = jax.vjp(attend, q, k, v)
    return out, *pull(d_out)


def experts_by_kernels(x: Any, weight: Any, sizes: Any, d_out: Any) -> Arrays:
    product = grouped_kernel_cuda.product
    out = product(x, weight, sizes, transposed=False)
    d_x = product(d_out, weight, sizes, transposed=True)
    return out, d_x, grouped_kernel_cuda.outer(d_out, x, sizes)


def experts_by_ragged_dot(x: Any, weight: Any, sizes: Any, d_out: Any) -> Arrays:
    out = moe.ragged_dot(x, weight, sizes, transposed=False)
    d_x = moe.ragged_dot(d_out, weight, sizes, transposed=True)
    return out, d_x, moe.ragged_outer(d_out, x, sizes)


def logprobs_by_kernels(hidden: Any, head: Any, ids: Any, d_logprob: Any, d_entropy: Any) -> Arrays:
    scoring = Scoring(temperature=1.0, softcap=None)
    valid = ids >= 0
    results = logprob_kernel_cuda.forward(hidden, head, ids, valid, scoring=scoring)
    logprob, entropy, normalizer = results
    tokens = TokenGradients(ids, valid, d_logprob, d_entropy, entropy, normalizer)
    gradients = logprob_kernel_cuda.backward(hidden, head, tokens, scoring=scoring)
    return logprob, entropy, *gradients


def logprobs_by_blocks(hidden: Any, head: Any, ids: Any, d_logprob: Any, d_entropy: Any) -> Arrays:
    scoring = Scoring(temperature=1.0, softcap=None)
    options: dict[str, Any] = {"scoring": scoring, "vocab_shards": 1, "kept_chunks": 0}
    arguments = (hidden, head, ids, ids >= 0, None, None)
    (logprob, entropy, normalizer), _ = linear_logprobs.forward_by_blocks(*arguments, **options)
    saved = (*arguments, entropy, normalizer, None)
    d_results = (d_logprob, d_entropy)
    return logprob, entropy, *linear_logprobs.backward_by_blocks(saved, d_results, **options)


def row_of_branches(length: int, branches: int) -> np.ndarray:
    """Return the ends of subtrees, int32 [1, length]: a prompt, and branches of equal length."""
    prompt = length // 2
    ends = np.full((1, length), length, np.int32)
    bounds = np.linspace(prompt, length, branches + 1).astype(int)
    for begin, end in zip(bounds, bounds[1:], strict=False):
        ends[0, begin:end] = end
    return ends


class Argument(NamedTuple):
    """An argument of a path.

    Attributes:
        scale: of the normally distributed numbers that it has.
        values: what it has instead.
    """

    shape: tuple[int, ...]
    dtype: str = "bfloat16"
    scale: float = 1.0
    values: np.ndarray | None = None

    def described(self, sharding: NamedSharding) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(self.shape, jnp.dtype(self.dtype), sharding=sharding)

    def filled(self, seed: int, sharding: NamedSharding) -> jax.Array:
        if self.values is not None:
            return jax.device_put(self.values, sharding)
        numbers = jax.random.normal(jax.random.key(seed), self.shape, jnp.dtype(self.dtype))
        return jax.device_put(numbers * self.scale, sharding)


def attention_arguments(args: argparse.Namespace) -> list[Argument]:
    scale = args.head_size**-0.25
    queries = Argument((1, args.heads, args.length, args.head_size), scale=scale)
    keys = Argument((1, args.kv_heads, args.length, args.head_size), scale=scale)
    ends = row_of_branches(args.length, args.branches)
    return [queries, keys, keys, Argument(ends.shape, "int32", values=ends), queries]


def expert_arguments(args: argparse.Namespace) -> list[Argument]:
    rows = args.length * args.experts_per_token
    sizes = np.full(args.experts, rows // args.experts, np.int32)
    scale = args.hidden_size**-0.5
    return [
        Argument((rows, args.hidden_size)),
        Argument((args.experts, args.expert_size, args.hidden_size), scale=scale),
        Argument(sizes.shape, "int32", values=sizes),
        Argument((rows, args.expert_size)),
    ]


def logprob_arguments(args: argparse.Namespace) -> list[Argument]:
    tokens = (1, args.length)
    ids = np.random.default_rng(0).integers(0, args.vocabulary, tokens).astype(np.int32)
    return [
        Argument((*tokens, args.head_width)),
        Argument((args.vocabulary, args.head_width), scale=args.head_width**-0.5),
        Argument(tokens, "int32", values=ids),
        Argument(tokens, "float32"),
        Argument(tokens, "float32"),
    ]


class Subject(NamedTuple):
    """What is computed.

    Attributes:
        paths: ways to compute it, the kernels first, then XLA's operations.
        arguments: of every path.
    """

    paths: dict[str, Callable[..., Arrays]]
    arguments: Callable[[argparse.Namespace], list[Argument]]


KERNELS = "Triton kernels"
SUBJECTS = {
    "attention": Subject(
        {
            KERNELS: attention_by_kernels,
            "XLA's blocks": attention_by_blocks,
            "cuDNN, one sequence": attention_by_cudnn,
        },
        attention_arguments,
    ),
    "experts": Subject(
        {KERNELS: experts_by_kernels, "XLA's ragged_dot": experts_by_ragged_dot},
        expert_arguments,
    ),
    "log-probs": Subject(
        {KERNELS: logprobs_by_kernels, "XLA's blocks": logprobs_by_blocks},
        logprob_arguments,
    ),
}


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
        figures["registers"] = max([figures["registers"], *registers])
        figures["spilled"] += sum(spilled)
    return figures


def compile_path(
    name: str, path: str, arguments: Any, mesh: Mesh, dump: Path, chip: Chip | None
) -> tuple[Row, jax.stages.Compiled]:
    """Compile a path.

    Args:
        name: of the subject.
        dump: where the compiler leaves its PTX.
        chip: the GPU if it is a described one.
    """
    before = set(dump.glob("*.ptx"))
    start_time = time.perf_counter()
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):  # Pallas asks it for the device
        traced = jax.jit(SUBJECTS[name].paths[path]).trace(*arguments)
        compiled = traced.lower().compile()
    seconds = time.perf_counter() - start_time

    predicted = None
    if chip is not None:
        text = compiled.as_text()
        assert text is not None
        prediction = predict(parse(text), chip, mesh, costs=kernel_costs(traced.jaxpr))
        predicted = 1e3 * prediction.seconds
    memory = compiled.memory_analysis()
    assert memory is not None
    texts = [file.read_text() for file in sorted(set(dump.glob("*.ptx")) - before)]
    row = Row(
        subject=name,
        path=path,
        temporaries=memory.temp_size_in_bytes,
        compile_seconds=seconds,
        predicted=predicted,
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


def compare_paths(
    name: str, args: argparse.Namespace, mesh: Mesh, dump: Path, chip: Chip | None
) -> list[Row]:
    """Return a row for each path of a subject; see :func:`compile_path`."""
    subject = SUBJECTS[name]
    sharding = NamedSharding(mesh, PartitionSpec())
    arguments: list[Any] = []
    for seed, argument in enumerate(subject.arguments(args)):
        if chip is not None:
            arguments.append(argument.described(sharding))
        else:
            arguments.append(argument.filled(seed, sharding))

    rows = []
    results: dict[str, Arrays] = {}
    for path in subject.paths:
        if args.paths and path not in args.paths:
            continue
        row, compiled = compile_path(name, path, arguments, mesh, dump, chip)
        if chip is None:
            milliseconds, results[path] = timed(compiled, arguments)
            row = replace(row, milliseconds=milliseconds)
        rows.append(row)

    kernels, operations, *_ = subject.paths
    if kernels in results and operations in results:
        compared = difference(results[kernels], results[operations])
        rows[0] = replace(rows[0], difference=compared)
        if compared > LARGEST_DIFFERENCE:
            raise SystemExit(f"{name}: the kernels differ from {operations} by {compared:.3g}")
    return rows


def print_table(rows: Sequence[Row]) -> None:
    columns = ("", "path", "memory", "kernels", "instructions", "registers", "spilled", "time")
    print(f"| {' | '.join(columns)} |")
    print("|---" * len(columns) + "|")
    for row in rows:
        milliseconds = row.predicted if row.milliseconds is None else row.milliseconds
        print(
            f"| {row.subject} | {row.path} | {row.temporaries / 2**20:.1f} MiB | {row.kernels} |"
            f" {row.instructions:,} | {row.registers} | {row.spilled} B | {milliseconds:.3g} ms |"
        )


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("--described", metavar="GPU", help="h100, h200 or b200: not this machine's")
    parser.add_argument("--only", nargs="+", choices=list(SUBJECTS), default=list(SUBJECTS))
    parser.add_argument("--paths", nargs="+", help="of every subject; without it, all")
    parser.add_argument("--length", type=int, default=4096, help="of the row")
    parser.add_argument("--branches", type=int, default=8)
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--kv-heads", type=int, default=8)
    parser.add_argument("--head-size", type=int, default=128)
    parser.add_argument("--experts", type=int, default=128)
    parser.add_argument("--experts-per-token", type=int, default=8)
    parser.add_argument("--hidden-size", type=int, default=2048, help="of the mixture")
    parser.add_argument("--expert-size", type=int, default=768, help="hidden units of an expert")
    parser.add_argument("--vocabulary", type=int, default=151936)
    parser.add_argument("--head-width", type=int, default=4096, help="hidden size at the head")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()

    # Before JAX looks for devices.
    dump = Path(tempfile.mkdtemp(prefix="cuda_kernels_"))
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_dump_to={dump}"
    chip = None
    if args.described:
        jax.config.update("jax_platforms", "cpu")
        one_gpu = Slice.parse(f"{args.described}:1")
        chip = one_gpu.chip
        devices = one_gpu.devices
    else:
        devices = jax.devices("gpu")[:1]
    mesh = Mesh(np.array(devices), ("data",))

    rows = []
    for name in args.only:
        rows += compare_paths(name, args, mesh, dump, chip)
    shutil.rmtree(dump)

    if args.json:
        print(json.dumps([asdict(row) for row in rows]))
    else:
        print_table(rows)


if __name__ == "__main__":
    main()
