"""Checks of what a configuration names: user code, tools, model, tokenizer, rows, reward functions."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jax_agent_rl.agents import (
    EnvironmentAgent,
    ToolAgent,
    agent_names,
    load_agents,
    select_agents,
)
from jax_agent_rl.chat.codec import ChatCodec
from jax_agent_rl.config import Config
from jax_agent_rl.config.conditions import Facts, unused
from jax_agent_rl.config.default_agent import default_agent, report_idle_tools
from jax_agent_rl.data.rows import Row, load_rows
from jax_agent_rl.deploy.doctor.findings import Finding, Reporter, UnmetError
from jax_agent_rl.deploy.doctor.machine import disk, gib, usable_memory
from jax_agent_rl.environments import load_environments, require_environments
from jax_agent_rl.models.config import DecoderConfig
from jax_agent_rl.models.hf import check_files, load_config
from jax_agent_rl.rewards import score
from jax_agent_rl.runtime.engines import read_model
from jax_agent_rl.runtime.sampling import Source, known_adapters, open_codec
from jax_agent_rl.runtime.scoring import POLICY, needed_services, reward_server
from jax_agent_rl.tool_server.sandbox import open_sandbox
from jax_agent_rl.tools.registry import ToolRegistry, list_schemas, open_tools
from jax_agent_rl.types import FinishReason, StopReason, TokenOutput, Trajectory, Turn

MOST_PROMPTS = 1000
"""Rows whose prompts are counted; of larger files evenly spread ones."""
_FORMS = ("{}", "#### {}", "\\boxed{{{}}}", "<answer>{}</answer>")
"""What reward functions usually look for an answer in."""
_CHECKPOINT_BYTES = 12  # per parameter: float32, and two moments of AdamW
_LEARNER_BYTES = 16  # and the gradient


@dataclass(kw_only=True)
class CheckContext:
    """State shared by the checks: what earlier ones found for later ones.

    Attributes:
        config: under examination.
        stack: closes what checks opened.
        tools, codec, model: None until found.
        rows: by ``train`` and ``eval``, as far as they could be read.
    """

    config: Config
    stack: AsyncExitStack
    tools: ToolRegistry | None = None
    codec: ChatCodec | None = None
    model: DecoderConfig | None = None
    rows: dict[str, list[Row]] = field(default_factory=dict)

    @property
    def all_rows(self) -> list[Row]:
        """The rows of every file; UnmetError if none could be read."""
        if not self.rows:
            raise UnmetError("no rows could be read")
        return [row for rows in self.rows.values() for row in rows]

    @property
    def tokenizer(self) -> ChatCodec:
        """The codec; UnmetError if it could not be read."""
        if self.codec is None:
            raise UnmetError("the tokenizer could not be read")
        return self.codec

    @property
    def parameters(self) -> int:
        """The model's parameter count; UnmetError if it could not be read."""
        if self.model is None:
            raise UnmetError("the model could not be read")
        return _count(self.model.parameter_shapes())


async def user_code(context: CheckContext, report: Reporter) -> Iterable[Finding]:
    """Import the files that register agents, environments and rewards."""
    config = context.config
    paths = {
        "agent.module": config.agent.module,
        "environments.path": config.environments.path,
        "reward.path": config.reward.path,
    }
    load_agents(config.agent.module)
    load_environments(config.environments.path)
    await context.stack.enter_async_context(reward_server(config))
    named = [f"{key}={path}" for key, path in paths.items() if path]
    return [report.ok(f"imported: {', '.join(named) or 'none is named'}")]


async def tools(context: CheckContext, report: Reporter) -> Iterable[Finding]:
    """Open function tools, native tools and tools of MCP servers."""
    context.tools = await context.stack.enter_async_context(open_tools(context.config.tools))
    return [
        report.ok(f"{len(context.tools)}: {', '.join(context.tools)}" if len(context.tools) else "none is configured")
    ]


async def model(context: CheckContext, report: Reporter) -> Iterable[Finding]:
    """Check the model's files, family, tensor shapes, and whether it fits."""
    path = context.config.model.path
    context.model = check_files(path)
    count = context.parameters
    engine = 2 if context.config.rollout.jetstream.dtype == "bfloat16" else 4
    need, memory = count * (_LEARNER_BYTES + engine), usable_memory()
    size = f"{count / 1e6:.1f} M parameters"
    findings = [report.ok(f"{path}: {context.model.family}, {size}, {context.model.num_layers} layers, files complete")]
    if context.config.learner.lora is None and need > memory:
        findings.append(
            report.warn(
                f"{size} with gradients and optimizer are about {gib(need)}; the {gib(memory)} of this machine do not "
                "hold them if jax computes on the CPU (jax-agent-rl plan looks at accelerators)"
            )
        )
    longest = context.model.max_position_embeddings
    if context.config.rollout.max_model_len > longest:
        findings.append(
            report.warn(
                f"rollout.max_model_len={context.config.rollout.max_model_len}, the model was made for {longest}"
            )
        )
    return findings


async def further_models(context: CheckContext, report: Reporter) -> Iterable[Finding]:
    """Check the models of critic and judge."""
    config = context.config
    judge = config.reward.judge.model if config.reward.judge else None
    named = {"critic.path": config.critic.path, "reward.judge.model": judge if judge != POLICY else None}
    return [
        report.ok(f"{key}={path}: {(load_config(path) if key == 'critic.path' else check_files(path)).family}")
        for key, path in named.items()
        if path
    ]


async def run_folder(context: CheckContext, report: Reporter) -> Iterable[Finding]:
    """Check the space for checkpoints and logs."""
    kept = context.config.trainer.keep_checkpoints + 1  # while the next one is written
    need = context.parameters * _CHECKPOINT_BYTES * kept
    return [disk(report, Path(context.config.run_dir), need=need, key="run_dir")]


async def tokenizer(context: CheckContext, report: Reporter) -> Iterable[Finding]:
    """Check text to ids and back, that turns append without changing the prefix, and the tool-call format."""
    context.codec = codec = open_codec(context.config)
    text = "Is 12 × 34 = 408?\n\tYes – naïve café 数."
    ids = codec.encode_text(text)
    if codec.decode(ids) != text:
        return [report.fail(f"text changes on its way to ids and back: {text!r} becomes {codec.decode(ids)!r}")]
    messages = [{"role": "user", "content": text}]
    prompt = codec.encode_prompt(messages)
    appended = codec.encode_append([*ids, codec.eos_token_ids[0]], [{"role": "tool", "content": "408", "name": "f"}])
    if "408" not in codec.decode(appended):
        return [report.fail("the chat template leaves out tool results; choose another agent.tool_format or model")]
    read_model(context.config, codec, [*prompt, *appended])
    call = codec.tool_format if context.config.agent.tool_format == "auto" else f"{codec.tool_format} (as configured)"
    return [
        report.ok(f"text and turns come back as they were; tool calls: {call}; a turn ends with {codec.eos_token_ids}")
    ]


async def rows(context: CheckContext, report: Reporter, *, name: str, source: Source) -> Iterable[Finding]:
    """Load a file: every row well-formed, every name in it known."""
    file, limit = source
    tools = None if context.tools is None else list(context.tools)
    loaded = load_rows(file, agents=agent_names(), tools=tools, adapters=known_adapters(context.config))[:limit]
    config = context.config.agent
    require_environments(
        [row for row in loaded if (row.get("agent_name") or config.default_agent) == EnvironmentAgent.name]
    )
    context.rows[name] = loaded
    default = default_agent(config, context.config.tool_config)
    agents = Counter(row.get("agent_name") or f"{default} (the default)" for row in loaded)
    sources = Counter(str(row["data_source"]) for row in loaded)
    findings = [report.ok(f"{file}: {len(loaded)} rows; agents {_counts(agents)}; data sources {_counts(sources)}")]
    untrue = sum((row.get("reward_model") or {}).get("ground_truth") is None for row in loaded)
    if untrue:
        findings.append(report.warn(f"{untrue} of {len(loaded)} rows have no reward_model.ground_truth"))
    if idle := report_idle_tools(context.config, loaded):
        findings.append(report.warn("; ".join(idle)))
    return findings


async def keys(context: CheckContext, report: Reporter) -> Iterable[Finding]:
    """Check for keys that neither the rows' agents nor the model use."""
    sees = None if context.model is None else context.model.vision is not None
    facts = Facts(agents=select_agents(context.config, context.all_rows), has_vision=sees)
    return [report.fail(problem) for problem in unused(context.config, facts)] or [
        report.ok("all that are set are used")
    ]


async def prompts(context: CheckContext, report: Reporter) -> Iterable[Finding]:
    """Count prompts that are too long."""
    codec, rows, most = context.tokenizer, context.all_rows, context.config.agent.max_prompt_length
    spread = rows[:: math.ceil(len(rows) / MOST_PROMPTS)]
    lengths = [len(codec.encode_prompt(row["prompt"], _schemas(context, row))) for row in spread if row["prompt"]]
    if not lengths:
        return [report.ok("environments write them")]
    share = sum(length > most for length in lengths) / len(lengths)
    text = f"{len(lengths)} counted, the longest has {max(lengths)} ids; agent.max_prompt_length={most}"
    if share == 0:
        return [report.ok(text)]
    tell = report.fail if share > 0.5 else report.warn
    return [tell(f"{text}: {share:.1%} are longer and would be dropped; raise it to {max(lengths)}, or leave them out")]


async def reward_functions(context: CheckContext, report: Reporter) -> Iterable[Finding]:
    """Call each data source's function with its first row's ground truth as the answer, in the usual forms."""
    rows, config = context.all_rows, context.config
    needed = needed_services(config, rows)
    services = {"sandbox": await open_sandbox(config.reward.sandbox)} if "sandbox" in needed else {}
    first: dict[str, Row] = {}
    for row in rows:
        first.setdefault(str(row["data_source"]), row)
    findings = []
    for name, row in sorted(first.items()):
        if "judge" in needed_services(config, [row]):
            findings.append(report.ok(f"{name}: asks for the judge, which starts with the run; not tried"))
            continue
        answer = _answer_of(row)
        rewards: dict[str, float] = {}
        for form in _FORMS[:1] if answer is None else _FORMS:
            answered = _answered(row, form.format(answer))
            rewards[form] = (await score(answered, timeout=config.reward.timeout, services=services)).reward
            if rewards[form] > 0:
                break
        findings.append(_earned(report, name, answer, rewards))
    return findings


def _earned(report: Reporter, name: str, answer: str | None, rewards: Mapping[str, float]) -> Finding:
    """Report what the forms of an answer earned, until one earned something.

    That none does is no failure: the function may want a program, tool calls, or a form of its own.
    """
    form, reward = list(rewards.items())[-1]
    if answer is None:
        return report.ok(f"{name}: called; its first row holds no answer to try it with")
    if reward > 0:
        return report.ok(f"{name}: its first row's ground truth earns {reward:g} as {form.format(answer)[:60]!r}")
    return report.warn(
        f"{name}: its first row's ground truth {answer[:60]!r} earns nothing, neither bare nor as "
        f"{', '.join(form.format('…') for form in _FORMS[1:])}. Unless answers have another form here, check that "
        "data_source names the reward function you mean, and that reward_model.ground_truth is what it compares with"
    )


def _answer_of(row: Row) -> str | None:
    """Return a right answer by the row's ground truth; None where that is no answer, or nobody compares it."""
    truth = (row.get("reward_model") or {}).get("ground_truth")
    if isinstance(truth, Mapping):
        truth = truth.get("target")
    if isinstance(truth, list | tuple) and truth:  # any of them is right
        truth = truth[0]
    if row.get("agent_name") == EnvironmentAgent.name or not isinstance(truth, str | int | float):
        return None
    return None if str(truth).lstrip().startswith(("{", "[")) else str(truth)  # the tests of a program, as JSON


def _answered(row: Row, text: str) -> Trajectory:
    """Return a trajectory that answers with ``text``."""
    output = TokenOutput(
        token_ids=(0,), log_probs=(0.0,), policy_versions=(0,), stop_reason=StopReason.EOS, context_digest=""
    )
    return Trajectory.from_turns(
        prompt_ids=(0,),
        turns=(Turn(output=output),),
        trajectory_id="doctor-0",
        group_id="doctor",
        agent_name=row.get("agent_name") or "single_turn_agent",
        finish_reason=FinishReason.ANSWER,
        row=row,
        messages=(*row["prompt"], {"role": "assistant", "content": text}),
    )


def _schemas(context: CheckContext, row: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
    """Return the tool schemas in the prompt of a ``tool_agent``."""
    name = row.get("agent_name") or context.config.agent.default_agent
    if name != ToolAgent.name or context.tools is None or context.config.agent.tool_prompt == "none":
        return ()
    return list_schemas(context.tools.select((row.get("extra_info") or {}).get("tool_selection")))


def _counts(counts: Counter[str]) -> str:
    return ", ".join(f"{name} {count}" for name, count in counts.most_common(8))


def _count(shapes: Any) -> int:
    """Count the elements of a tree of shapes."""
    return sum(map(_count, shapes.values())) if isinstance(shapes, Mapping) else math.prod(shapes)
