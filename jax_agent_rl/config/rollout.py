"""The ``rollout`` section: how trajectories are collected, by which engines, and where those run.

The keys of tree-structured rollouts (``rollout.strategy``) are in the notation of their papers.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field

from jax_agent_rl.config.base import (
    NonNegative,
    OrInstalled,
    Positive,
    Section,
    Unless,
    WhenCommand,
    WhenKey,
)
from jax_agent_rl.config.engines import JetStreamConfig, SglangConfig, VllmConfig
from jax_agent_rl.utils.plugins import InstalledName

_IN_ACTORS = WhenKey("rollout.placement", "separate", "hybrid")


class TreeGrpoConfig(Section):
    """`tree_grpo`, arXiv 2509.21240. A group has m * k trajectories."""

    m: Positive = Field(default=2, description="Trees per group: initial chains.")
    n: Positive = Field(
        default=2, description="Nodes of each tree drawn per round; each is continued once."
    )
    l: Positive = Field(default=1, description="Rounds of expansion.")  # noqa: E741
    k: Positive = Field(default=3, description="Leaves kept of the 1 + l * n leaves of each tree.")


class TreerlConfig(Section):
    """`treerl`, arXiv 2506.11902. A group has m * (1 + l * n * t) trajectories."""

    m: Positive = Field(default=6, description="Trees per group: initial chains.")
    n: Positive = Field(
        default=2, description="Tokens of each tree forked per round, the most uncertain ones."
    )
    l: Positive = Field(default=1, description="Rounds of forking.")  # noqa: E741
    t: Positive = Field(default=2, description="Branches per forked token.")


class ArpoConfig(Section):
    """`arpo`, arXiv 2507.19849. A group has rollout.group_size trajectories."""

    initial_rollouts: Positive = Field(
        default=4, description="Initial chains per group; the rest are branches."
    )
    beam_size: int = Field(
        default=2,
        ge=2,
        description="Maximum number of continuations of a turn, the original included.",
    )
    branch_probability: float = Field(
        default=0.5,
        ge=0,
        le=1,
        description="Probability of branching where the entropy does not change.",
    )
    entropy_weight: float = Field(
        default=0.2,
        ge=0,
        description="Weight of an increase in entropy, in nats per token, in that probability.",
    )
    entropy_tokens: Positive = Field(
        default=20,
        description="Number of tokens, from the start of a turn, over which entropy is estimated.",
    )


class StrategyConfig(Section):
    """Where the trajectories of a group start.

    They start at the prompt, or at a turn or token of another trajectory.
    """

    name: Literal["chain", "tree_grpo", "treerl", "arpo"] = Field(
        default="chain",
        description=(
            "chain: all from the prompt. tree_grpo branches at random turns, treerl at the most"
            " uncertain tokens, arpo after tool results that raise the entropy."
        ),
    )
    tree_grpo: Annotated[TreeGrpoConfig, WhenKey("rollout.strategy.name", "tree_grpo")] = Field(
        default_factory=TreeGrpoConfig
    )
    treerl: Annotated[TreerlConfig, WhenKey("rollout.strategy.name", "treerl")] = Field(
        default_factory=TreerlConfig
    )
    arpo: Annotated[ArpoConfig, WhenKey("rollout.strategy.name", "arpo")] = Field(
        default_factory=ArpoConfig
    )


class RolloutConfig(Section):
    """Collection of trajectories: engines, their placement, sampling."""

    placement: Literal["colocated", "separate", "hybrid"] = Field(
        default="colocated",
        description=(
            "colocated: engines on the learner's devices, in each of its processes (hosts)."
            " separate: engines in Ray actors on their own resources. hybrid: both; the colocated"
            " engine samples while the learner is idle."
        ),
    )
    num_engines: Annotated[Positive, _IN_ACTORS] = Field(
        default=1, description="Number of engines in Ray actors (placement separate and hybrid)."
    )
    gpus_per_engine: Annotated[NonNegative, _IN_ACTORS] = Field(
        default=0, description="GPUs per engine in a Ray actor; 0 runs engines on CPUs."
    )
    ray_address: Annotated[str | None, _IN_ACTORS] = Field(
        default=None,
        description=(
            "Address of the Ray cluster; null: RAY_ADDRESS, otherwise a local cluster that ends"
            " with the run."
        ),
    )
    sleep_during_update: bool = Field(
        default=False,
        description=(
            "The colocated engine releases its memory (KV cache, weights) while the learner"
            " updates. With placement colocated, this needs trainer.mode=sync."
        ),
    )
    backend: Annotated[
        Literal["jetstream", "vllm", "sglang", "remote"], OrInstalled("backends")
    ] = Field(default="jetstream", description="The engine that samples.")
    urls: tuple[str, ...] = Field(
        default=(),
        description=(
            "Rollout servers, for backend: remote, e.g. http://10.0.0.5:8100; or SGLang's own, for"
            " backend: sglang, which starts one where none is named."
        ),
    )
    token_env: Annotated[
        str | None, WhenKey("rollout.backend", "remote", "sglang") | WhenCommand("rollout-server")
    ] = Field(
        default=None,
        description="Environment variable with the token of the servers at rollout.urls.",
    )
    weight_dir: Annotated[
        str | None,
        WhenKey("rollout.backend", "vllm", "sglang", "remote") | WhenCommand("rollout-server"),
    ] = Field(
        default=None,
        description=(
            "Folder through which weights reach vllm, sglang and remote engines. Engines must see"
            " it, and rollout servers read weights from nowhere else. null: shared memory, or an"
            " upload to rollout servers on other machines. With weight_transport: tensorstore also"
            " a bucket, gs://bucket/path."
        ),
    )
    weight_transport: Annotated[
        Literal["files", "tensorstore", "jax_transfer", "broadcast"],
        WhenKey("rollout.backend", "remote", "vllm"),
    ] = Field(
        default="files",
        description=(
            "How weights reach other processes. files: one process writes safetensors. tensorstore:"
            " each learner process writes its own shards to weight_dir, and each jetstream server"
            " reads its devices' shards (backend: remote). jax_transfer: each jetstream server"
            " pulls them from the learner's devices (backend: remote, a learner of one process, a"
            " trusted network). broadcast: from the learner's device to each engine's, by NCCL or,"
            " between CPUs, gloo (backend: vllm with placement: separate; a trusted network)."
        ),
    )
    full_weights_every: Annotated[
        Positive,
        WhenKey("rollout.backend", "remote") & WhenKey("rollout.weight_transport", "files"),
    ] = Field(
        default=20,
        description=(
            "Uploads to rollout servers hold the numbers that changed since the version before, and"
            " every so many versions all of them; 1: always all. Each server keeps one copy of the"
            " files in memory. A server that lacks the version before, or whose result has another"
            " digest, gets all of them."
        ),
    )
    prompts_per_step: Positive = Field(default=8, description="Dataset rows per training step.")
    group_size: Positive = Field(default=8, description="Trajectories per row (a GRPO group).")
    strategy: StrategyConfig = Field(default_factory=StrategyConfig)
    max_in_flight: Positive = Field(
        default=64, description="Maximum number of trajectories in flight."
    )
    trajectory_timeout: float | None = Field(
        default=3600.0,
        gt=0,
        description=(
            "Seconds a trajectory may take from its start, tools and reward included; then it is"
            " dropped as trajectory_timeout. So a step ends while an engine and the learner live."
            " null: unlimited."
        ),
    )
    min_group_size: Annotated[Positive | None, WhenKey("rollout.strategy.name", "chain")] = Field(
        default=None,
        description=(
            "Number of surviving trajectories with which a group is complete after group_timeout;"
            " the others are dropped as straggler. null: a group waits for all."
        ),
    )
    group_timeout: Annotated[float, WhenKey("rollout.min_group_size")] = Field(
        default=600.0,
        gt=0,
        description=(
            "Seconds from the start of a group's last trajectory until min_group_size holds."
        ),
    )
    max_in_flight_per_server: Positive | None = Field(
        default=None,
        description=(
            "Maximum number of requests a server runs; others wait, older trajectories first. A"
            " trajectory whose server is full moves to another one if computing its context there"
            " takes less time. null: no limit."
        ),
    )
    recovery_seconds: float = Field(
        default=600.0,
        ge=0,
        description=(
            "Seconds to keep trying to restart or reconnect a lost engine or rollout server; 0:"
            " never. The embedded jetstream engine of a single-process run is not restarted."
        ),
    )
    wait_for_server_seconds: float = Field(
        default=300.0,
        ge=0,
        description="Seconds requests wait while all servers are lost and one is being recovered.",
    )
    stall_seconds: float | None = Field(
        default=300.0,
        gt=0,
        description=(
            "Seconds without progress after which a server with requests counts as lost (3 times as"
            " long before its first token, when it may compile; 10 times while it loads weights);"
            " null: never."
        ),
    )
    max_model_len: Positive = Field(
        default=1024,
        description=(
            "Maximum context length in tokens, prompt and response together. `serve` takes the"
            " model's own with the embedded engine, unless the command line sets this key."
        ),
    )
    temperature: float = Field(
        default=1.0,
        gt=0,
        description="Sampling temperature in training; log-probs are computed at this temperature.",
    )
    top_p: float = Field(
        default=1.0,
        gt=0,
        le=1,
        description=(
            "Nucleus sampling in training; 1: off. The learner normalizes over the token ids that"
            " top_p, top_k and min_p left at each draw, which the engine reports (in up to V / 6"
            " bytes a token of a vocabulary of V)."
        ),
    )
    top_k: NonNegative = Field(default=0, description="Top-k sampling in training; 0: off.")
    min_p: float = Field(
        default=0.0,
        ge=0,
        le=1,
        description="Training samples ids at least min_p times as likely as the likeliest; 0: off.",
    )
    eval_temperature: float = Field(
        default=0.0, ge=0, description="Sampling temperature of held-out evaluation; 0 is greedy."
    )
    adapters: Annotated[dict[str, str], Unless("rollout.backend", "remote", "sglang")] = Field(
        default_factory=dict,
        description=(
            "LoRA adapters that eval, rollout and serve may sample with, besides the plain model:"
            " name to PEFT folder. agent.adapter, a row's `adapter` or a request's `model` selects"
            " one. Training refuses them: it samples with the model it trains."
        ),
    )
    deterministic: bool = Field(
        default=False,
        description=(
            "Run prefill, decoding and the learner's old log-probs in one program (jetstream):"
            " bit-identical in any batch and on any mesh, and several times slower."
        ),
    )
    jetstream: Annotated[JetStreamConfig, WhenKey("rollout.backend", "jetstream", "remote")] = (
        Field(default_factory=JetStreamConfig)
    )
    vllm: Annotated[VllmConfig, WhenKey("rollout.backend", "vllm", "remote")] = Field(
        default_factory=VllmConfig
    )
    sglang: Annotated[SglangConfig, WhenKey("rollout.backend", "sglang", "remote")] = Field(
        default_factory=SglangConfig
    )

    @property
    def restricts_sampling(self) -> bool:
        """Whether top_p, top_k or min_p exclude token ids from sampling in training."""
        return self.top_p < 1 or self.top_k > 0 or self.min_p > 0

    def problems(self) -> Iterator[str]:
        """Yield every inconsistency of the section, each with its fix."""
        yield from _placement_problems(self)
        yield from _group_problems(self)
        yield from _engine_problems(self)
        yield from _transport_problems(self)


def _group_problems(rollout: RolloutConfig) -> Iterator[str]:
    """Yield inconsistencies of the size of a group."""
    min_group_size = rollout.min_group_size
    if min_group_size is not None and min_group_size > rollout.group_size:
        yield (
            f"rollout.min_group_size={min_group_size} is more than"
            f" rollout.group_size={rollout.group_size}; lower it, or leave it out"
        )
    yield from _tree_problems(rollout.strategy, rollout.group_size)


def _tree_problems(strategy: StrategyConfig, group_size: int) -> Iterator[str]:
    """Yield sizes of the chosen strategy's trees that do not make up a group."""
    if strategy.name == "tree_grpo":
        tree = strategy.tree_grpo
        leaves = 1 + tree.l * tree.n
        if tree.k > leaves:
            yield (
                f"rollout.strategy.tree_grpo.k={tree.k} leaves are to be kept of each tree, but it"
                f" has only 1 + l * n = {leaves}; lower k, or raise n or l"
            )
        size = tree.m * tree.k
        if group_size != size:
            yield (
                f"rollout.strategy=tree_grpo makes groups of m * k = {tree.m} * {tree.k} = {size}"
                f" trajectories, rollout.group_size is {group_size}; set rollout.group_size={size}"
            )

    if strategy.name == "treerl":
        tree = strategy.treerl
        size = tree.m * (1 + tree.l * tree.n * tree.t)
        if group_size != size:
            yield (
                f"rollout.strategy=treerl makes groups of m * (1 + l * n * t) = {tree.m} * (1 +"
                f" {tree.l} * {tree.n} * {tree.t}) = {size} trajectories, rollout.group_size is"
                f" {group_size}; set rollout.group_size={size}"
            )

    if strategy.name == "arpo":
        initial_rollouts = strategy.arpo.initial_rollouts
        if initial_rollouts >= group_size:
            yield (
                f"rollout.strategy.arpo.initial_rollouts={initial_rollouts} leaves nothing of"
                f" rollout.group_size={group_size} to branch; lower it (half is usual)"
            )


def _engine_problems(rollout: RolloutConfig) -> Iterator[str]:
    """Yield what the chosen engine cannot do."""
    engine = rollout.jetstream
    is_jetstream = rollout.backend == "jetstream"
    is_custom_engine = is_jetstream and engine.engine_factory is not None
    if rollout.adapters and is_jetstream and rollout.deterministic:
        yield "rollout.adapters cannot be served with rollout.deterministic; remove one of them"
    elif rollout.adapters and is_custom_engine:
        yield (
            "rollout.adapters cannot be served with rollout.jetstream.engine_factory; remove one"
            " of them"
        )

    lacks_urls = rollout.backend == "remote" and not rollout.urls
    takes_urls = rollout.backend in ("remote", "sglang")
    if lacks_urls or (rollout.urls and not takes_urls):
        yield (
            f"rollout.backend={rollout.backend} and rollout.urls={list(rollout.urls)}: backend"
            " remote needs addresses of rollout servers, sglang takes those of SGLang's, and other"
            " backends take none"
        )
    repeated_urls = sorted({url for url in rollout.urls if rollout.urls.count(url) > 1})
    if repeated_urls:
        yield (
            f"rollout.urls names {', '.join(repeated_urls)} more than once; a server is one address"
        )

    if rollout.deterministic and engine.num_speculative_tokens > 0:
        yield (
            f"rollout.jetstream.num_speculative_tokens={engine.num_speculative_tokens} needs"
            " programs besides the one of rollout.deterministic; set one of them to 0 or false"
        )
    if is_custom_engine:
        yield from _custom_engine_problems(rollout)
    cache_tokens = engine.kv_cache_tokens
    if cache_tokens is not None and cache_tokens < rollout.max_model_len:
        yield (
            f"rollout.jetstream.kv_cache_tokens={cache_tokens} holds no context of"
            f" rollout.max_model_len={rollout.max_model_len}; raise it, or lower"
            " rollout.max_model_len"
        )

    if isinstance(rollout.backend, InstalledName):
        refused = {}
        if rollout.adapters:
            refused["adapters"] = sorted(rollout.adapters)
        if rollout.placement != "colocated":
            refused["placement"] = rollout.placement
        for key, value in refused.items():
            yield (
                f"rollout.{key}={value} does not go with rollout.backend={rollout.backend};"
                " remove it"
            )


def _custom_engine_problems(rollout: RolloutConfig) -> Iterator[str]:
    """Yield what an engine from ``engine_factory`` cannot do."""
    setting = f"rollout.jetstream.engine_factory={rollout.jetstream.engine_factory}"
    if rollout.temperature != 1 or rollout.eval_temperature not in (0, 1):
        yield (
            f"{setting} reports log-probs of the raw logits, but"
            f" rollout.temperature={rollout.temperature:g} and"
            f" eval_temperature={rollout.eval_temperature:g}; set temperature to 1 and"
            " eval_temperature to 0 or 1"
        )
    if rollout.restricts_sampling:
        yield (
            f"{setting} samples from all ids: set rollout.top_p=1, rollout.top_k=0 and"
            " rollout.min_p=0"
        )
    if rollout.deterministic:
        yield (
            f"{setting} is not the learner's program; remove it, or set rollout.deterministic=false"
        )


def _placement_problems(rollout: RolloutConfig) -> Iterator[str]:
    """Yield inconsistencies of where the engines run."""
    placement = rollout.placement
    is_remote = bool(rollout.urls)
    if placement != "colocated" and is_remote:
        yield (
            f"rollout.placement={placement} places engines that the run starts, but"
            f" rollout.backend={rollout.backend} runs where its servers are; remove"
            " rollout.placement, or set rollout.backend=jetstream or vllm"
        )
    elif placement != "colocated" and rollout.deterministic:
        yield (
            "rollout.deterministic shares one program with the learner, but"
            f" rollout.placement={placement} runs engines in other processes; set"
            " rollout.placement=colocated, or rollout.deterministic=false"
        )
    if rollout.sleep_during_update and (placement == "separate" or is_remote):
        yield "rollout.sleep_during_update: no engine shares the learner's devices; remove it"
    yield from _gpu_count_problems(rollout)


def _gpu_count_problems(rollout: RolloutConfig) -> Iterator[str]:
    may_grow = False
    if rollout.backend == "vllm":
        key = "rollout.vllm.tensor_parallel_size"
        devices = rollout.vllm.tensor_parallel_size
    elif rollout.backend == "sglang":
        key = "rollout.sglang.tensor_parallel_size"
        devices = rollout.sglang.tensor_parallel_size
    else:
        mesh = rollout.jetstream.mesh
        key = "rollout.jetstream.mesh"
        devices = mesh.devices
        may_grow = mesh.data is None or mesh.tensor is None  # the engine fills the devices it has

    gpus = rollout.gpus_per_engine
    is_enough = gpus in (0, devices) or (may_grow and gpus % devices == 0)
    if not is_enough:
        yield (f"rollout.gpus_per_engine={gpus}: set {devices}, which {key} needs, or 0 for CPUs")


def _transport_problems(rollout: RolloutConfig) -> Iterator[str]:
    """Yield inconsistencies of how weights reach the engines."""
    weight_dir = rollout.weight_dir
    reads_shards = rollout.backend == "remote" and weight_dir is not None
    if rollout.weight_transport == "tensorstore" and not reads_shards:
        yield (
            f"rollout.weight_transport=tensorstore with rollout.backend={rollout.backend} and"
            f" rollout.weight_dir={weight_dir}: it is for remote servers that see a folder or"
            " bucket; set rollout.weight_dir, or rollout.weight_transport=files"
        )
    if rollout.weight_transport == "jax_transfer" and rollout.backend != "remote":
        yield (
            f"rollout.weight_transport=jax_transfer with rollout.backend={rollout.backend}: it is"
            " for jetstream engines behind rollout servers; set rollout.backend=remote, or"
            " rollout.weight_transport=files"
        )
    if rollout.weight_transport == "jax_transfer" and weight_dir is not None:
        yield (
            f"rollout.weight_dir={weight_dir} with rollout.weight_transport=jax_transfer: weights"
            " are pulled from the learner's devices, and pass through no folder; remove"
            " rollout.weight_dir, or set rollout.weight_transport=files or tensorstore"
        )
    joins_broadcast = rollout.backend == "vllm" and rollout.placement == "separate"
    if rollout.weight_transport == "broadcast" and not joins_broadcast:
        yield (
            f"rollout.weight_transport=broadcast with rollout.backend={rollout.backend} and"
            f" rollout.placement={rollout.placement}: it is for vllm engines in Ray actors; set"
            " rollout.placement=separate, or rollout.weight_transport=files"
        )
    # With backend jetstream a rollout server has this configuration, and reads buckets.
    writes_files = rollout.weight_transport == "files" and rollout.backend != "jetstream"
    if writes_files and weight_dir is not None and "://" in weight_dir:
        yield (
            f"rollout.weight_dir={weight_dir} is not a folder of this machine; set"
            " rollout.weight_transport=tensorstore, which writes to buckets"
        )
