"""Checks of a configuration: what ``train`` runs before its first step, and what a run would find out late.

A run checks user code, tools, rows, rewards, agents and engine by itself; the doctor calls the same
functions one by one, so that a failure hides no other. Disk, memory, prompt lengths, whether
rewards accept the ground truth, and the state of rollout servers are checked here alone.
"""

from __future__ import annotations

import functools
import math
import os
import shutil
from collections import Counter
from collections.abc import Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jax_agent_rl.agents import EnvironmentAgent, get_agent, load_agents, select_agents
from jax_agent_rl.agents.prompt import codec_of_row, encode_prompt
from jax_agent_rl.chat.codec import ChatCodec
from jax_agent_rl.config import Config
from jax_agent_rl.config.base import Facts, unused
from jax_agent_rl.config.run import default_agent, report_idle_tools
from jax_agent_rl.data.dataset import Dataset, RowsWithoutPrompts, find_files
from jax_agent_rl.data.reader import Row
from jax_agent_rl.deploy.doctor import machine
from jax_agent_rl.deploy.doctor.machine import Check, Reporter, UnmetError
from jax_agent_rl.environments import load_environments
from jax_agent_rl.errors import ConfigError, JaxAgentRLError
from jax_agent_rl.learner.optimizer import optimizer_bytes
from jax_agent_rl.models.config import DecoderConfig
from jax_agent_rl.models.hf import check_files, load_config
from jax_agent_rl.rewards import score
from jax_agent_rl.rollout.client import LLMServerClient
from jax_agent_rl.rollout.http.client import RemoteBackend
from jax_agent_rl.runtime.engine_devices import MASTER, parameter_count
from jax_agent_rl.runtime.engines import check_engine, read_model
from jax_agent_rl.runtime.sampling import Source, make_agents, open_codec, read_rows
from jax_agent_rl.runtime.scoring import POLICY, needed_services, reward_server
from jax_agent_rl.runtime.teachers import check_teachers
from jax_agent_rl.tool_server.sandbox import open_sandbox
from jax_agent_rl.tools.registry import ToolRegistry, list_schemas, open_tools
from jax_agent_rl.types import FinishReason, StopReason, TokenOutput, Trajectory, Turn
from jax_agent_rl.utils.media import text_message

MAX_PROMPTS = 1000
"""Rows whose prompts are counted; evenly spread ones of larger files."""
_FORMS = ("{}", "#### {}", "\\boxed{{{}}}", "<answer>{}</answer>")
"""Usual forms of an answer."""
_SHARED_MEMORY = Path("/dev/shm")
_REMOTE_SECONDS = 3.0


def count_devices(config: Config) -> int:
    """Return the devices that learner and engine take in one process; several processes share the learner's mesh."""
    if config.learner.multihost.num_processes not in (None, 1):
        return 1
    engine = config.rollout.jetstream
    here = config.rollout.backend == "jetstream" and config.rollout.placement != "separate"
    return max(
        config.learner.mesh.devices, engine.device_offset + engine.mesh.devices if here else 1
    )


@dataclass(kw_only=True)
class RunChecks:
    """Checks of a configuration; earlier ones find what later ones need.

    Attributes:
        config: the configuration.
        stack: closes what checks opened.
        user_code_imported: without it, the names in rows are not all known.
        opened_tools, codec, decoder: None until found.
        found_rows: rows that could be read, by ``train`` and ``eval``.
    """

    config: Config
    stack: AsyncExitStack
    user_code_imported: bool = False
    opened_tools: ToolRegistry | None = None
    codec: ChatCodec | None = None
    decoder: DecoderConfig | None = None
    found_rows: dict[str, Dataset] = field(default_factory=dict)

    def all(self) -> list[tuple[str, Check]]:
        """Return the checks with their names, in order."""
        data: dict[str, Source] = {"train": (self.config.data.train, None)}
        if self.config.data.eval:
            data["eval"] = (self.config.data.eval, self.config.data.eval_limit)
        return [
            ("user code", self.user_code),
            ("tools", self.tools),
            ("model", self.model),
            ("tokenizer", self.tokenizer),
            ("other models", self.other_models),
            ("run folder", self.run_folder),
            *(
                (f"data.{name}", functools.partial(self.rows, name=name, source=data[name]))
                for name in data
            ),
            ("keys", self.keys),
            ("prompts", self.prompts),
            ("rewards", self.rewards),
            ("agents", self.agents),
            ("engine", self.engine),
            ("shared memory", self.shared_memory),
            ("learner processes", self.coordinator),
        ]

    # --- what earlier checks found ----------------------------------------------------------------

    def _rows(self) -> RowsWithoutPrompts:
        if not self.found_rows:
            raise UnmetError("no rows could be read")
        return RowsWithoutPrompts(*self.found_rows.values())

    def _codec(self) -> ChatCodec:
        if self.codec is None:
            raise UnmetError("the tokenizer could not be read")
        return self.codec

    def _sizes(self) -> tuple[int, int]:
        if self.decoder is None:
            raise UnmetError("the model could not be read")
        count = parameter_count(self.decoder)  # all are trained
        return count, MASTER * count + optimizer_bytes(
            self.config.learner, self.decoder.parameter_shapes()
        )

    # --- code, tools, model -----------------------------------------------------------------------

    async def user_code(self, report: Reporter) -> None:
        """Import the files that register agents, environments and rewards."""
        config = self.config
        load_agents(config.agent.module)
        load_environments(config.environments.path)
        await self.stack.enter_async_context(reward_server(config))
        self.user_code_imported = True
        paths = {"agent.module": config.agent.module, "environments.path": config.environments.path}
        paths["reward.path"] = config.reward.path
        report.ok(
            "imported:"
            f" {', '.join(f'{key}={path}' for key, path in paths.items() if path) or 'none is named'}"
        )

    async def tools(self, report: Reporter) -> None:
        """Open function tools, native tools and tools of MCP servers."""
        self.opened_tools = tools = await self.stack.enter_async_context(
            open_tools(self.config.tools)
        )
        report.ok(f"{len(tools)}: {', '.join(tools)}" if len(tools) else "none is configured")

    async def model(self, report: Reporter) -> None:
        """Check the model's files, family, tensor shapes, and whether it fits."""
        rollout, path = self.config.rollout, self.config.model.path
        self.decoder = model = check_files(path)
        count, saved = self._sizes()
        need = saved + count * (
            MASTER + (2 if rollout.jetstream.dtype == "bfloat16" else 4)
        )  # gradients, engine
        memory, size = machine.usable_memory(), f"{count / 1e6:.1f} M parameters"
        report.ok(f"{path}: {model.family}, {size}, {model.num_layers} layers, files complete")
        if self.config.learner.lora is None and need > memory:
            report.warn(
                f"{size} with gradients and optimizer are about {machine.format_gib(need)}; the"
                f" {machine.format_gib(memory)} of this machine do not hold them if jax computes on"
                " the CPU (jax-agent-rl plan looks at accelerators)"
            )
        if rollout.max_model_len > model.max_position_embeddings:
            report.warn(
                f"rollout.max_model_len={rollout.max_model_len}, the model was made for"
                f" {model.max_position_embeddings}"
            )

    async def tokenizer(self, report: Reporter) -> None:
        """Check text to ids and back, that turns append without changing the prefix, and the tool-call format."""
        self.codec = codec = open_codec(self.config)
        text = "Is 12 × 34 = 408?\n\tYes – naïve café 数."
        ids = codec.encode_text(text)
        if codec.decode(ids) != text:
            report.fail(
                f"text changes on its way to ids and back: {text!r} becomes {codec.decode(ids)!r}"
            )
            return
        prompt = codec.encode_prompt([{"role": "user", "content": text}])
        result = {"role": "tool", "content": "408", "name": "f"}
        appended = codec.encode_append([*ids, codec.eos_token_ids[0]], [result])
        if "408" not in codec.decode(appended):
            report.fail(
                "the chat template leaves out tool results; choose another agent.tool_format or"
                " model"
            )
            return
        read_model(self.config, codec, [*prompt, *appended])
        call = codec.tool_format + (
            "" if self.config.agent.tool_format == "auto" else " (as configured)"
        )
        report.ok(
            f"text and turns are reproduced; tool calls: {call}; a turn ends with"
            f" {codec.eos_token_ids}"
        )

    async def other_models(self, report: Reporter) -> None:
        """Check the models of critic and judge, and the teachers."""
        if path := self.config.critic.path:
            report.ok(f"critic.path={path}: {load_config(path).family}")
        judge = self.config.reward.judge
        if judge and judge.model != POLICY:
            report.ok(f"reward.judge.model={judge.model}: {check_files(judge.model).family}")
        for line in check_teachers(self.config):
            report.ok(line)

    async def run_folder(self, report: Reporter) -> None:
        """Check the space for checkpoints and logs."""
        need = self._sizes()[1] * (
            self.config.trainer.keep_checkpoints + 1
        )  # while the next one is written
        machine.check_disk(report, Path(self.config.run_dir), need=need, key="run_dir")

    # --- rows -------------------------------------------------------------------------------------

    async def rows(self, report: Reporter, *, name: str, source: Source) -> None:
        """Load a file: every row well-formed, every name in it known."""
        if not self.user_code_imported:
            for named in source[0]:
                find_files(named)  # a missing file is reported in any case
            raise UnmetError("the user code, which registers agents, could not be imported")
        self.found_rows[name] = read_rows(self.config, self.opened_tools, source)
        rows = RowsWithoutPrompts(self.found_rows[name])
        default = default_agent(self.config.agent, self.config.tool_config)
        agents = Counter(row.get("agent_name") or f"{default} (the default)" for row in rows)
        sources = Counter(str(row["data_source"]) for row in rows)
        files, counts = ", ".join(map(str, source[0])), machine.format_counts
        report.ok(
            f"{files}: {len(rows)} rows; agents {counts(agents)}; data sources {counts(sources)}"
        )
        misplaced = sum(row.get("ground_truth") is not None for row in rows)
        if unlabelled := sum(
            (row.get("reward_model") or {}).get("ground_truth") is None for row in rows
        ):
            report.warn(f"{unlabelled} of {len(rows)} rows have no reward_model.ground_truth")
        if misplaced:
            report.warn(
                f"{misplaced} of {len(rows)} rows have a column ground_truth, which no reward"
                " function is given as ground_truth: write it into reward_model,"
                " {'ground_truth': …}"
            )
        if idle := report_idle_tools(self.config, rows):
            report.warn("; ".join(idle))

    async def keys(self, report: Reporter) -> None:
        """Check for keys that neither the rows' agents nor the model use."""
        has_vision = None if self.decoder is None else self.decoder.vision is not None
        facts = Facts(agents=select_agents(self.config, self._rows()), has_vision=has_vision)
        if problems := list(unused(self.config, facts)):
            raise ConfigError(problems)
        report.ok("all that are set are used")

    async def prompts(self, report: Reporter) -> None:
        """Count prompts that are too long."""
        codec, count, limit = self._codec(), len(self._rows()), self.config.agent.max_prompt_length
        tools = self.opened_tools if self.config.agent.tool_prompt != "none" else None

        def length(row: Row) -> int:
            agent = row.get("agent_name") or default_agent(
                self.config.agent, self.config.tool_config
            )
            uses_tools = get_agent(agent).describes_tools
            selection = (row.get("extra_info") or {}).get("tool_selection")
            schemas = (
                list_schemas(tools.select(selection)) if tools is not None and uses_tools else ()
            )
            continues = bool(row.get("continue_final_message"))
            return len(
                encode_prompt(
                    codec_of_row(codec, row), row["prompt"], schemas, continue_last=continues
                )[0]
            )

        chosen = (
            row
            for rows in self.found_rows.values()
            for row in rows[:: math.ceil(count / MAX_PROMPTS)]
        )
        lengths = [length(row) for row in chosen if row["prompt"]]
        if not lengths:
            report.ok("environments write them")
            return
        share, longest = sum(n > limit for n in lengths) / len(lengths), max(lengths)
        described = ", with the tools they describe" if tools is not None and len(tools) else ""
        text = (
            f"{len(lengths)} counted{described}, the longest has {longest} ids;"
            f" agent.max_prompt_length={limit}"
        )
        if share:
            text += (
                f": {share:.1%} are longer and would be dropped; raise it to {longest}, or leave"
                " them out"
            )
        (report.fail if share > 0.5 else report.warn if share else report.ok)(text)

    async def rewards(self, report: Reporter) -> None:
        """Call each data source's function with its first row's ground truth as the answer, in the usual forms."""
        rows, config = self._rows(), self.config
        needed = needed_services(config, rows)
        services = (
            {"sandbox": await open_sandbox(config.reward.sandbox)} if "sandbox" in needed else {}
        )
        first: dict[str, Row] = {}
        for dataset in self.found_rows.values():
            for number, outline in enumerate(RowsWithoutPrompts(dataset)):
                if outline["data_source"] not in first:
                    first[outline["data_source"]] = dataset[number]
        for name, row in sorted(first.items()):
            if "judge" in needed_services(config, [row]):
                report.ok(f"{name}: asks for the judge, which starts with the run; not tried")
                continue
            answer, form, reward = _right_answer(row), "", 0.0
            for form in _FORMS[:1] if answer is None else _FORMS:
                if (reward := await self._reward(row, form.format(answer), services)) > 0:
                    break
            if answer is None:
                report.ok(f"{name}: called; its first row holds no answer to try it with")
            elif reward > 0:
                text = (
                    f"{name}: its first row's ground truth earns {reward:g} as"
                    f" {form.format(answer)[:60]!r}"
                )
                sentence = f"The answer is {answer}."
                if form == "{}" and await self._reward(row, sentence, services) <= 0:
                    text += (
                        f", and nothing as {sentence[:80]!r}: the answer must be all that the"
                        " policy writes"
                    )
                report.ok(text)
            else:  # no failure: the function may want a program, tool calls, or a form of its own
                report.warn(
                    f"{name}: its first row's ground truth {answer[:60]!r} earns nothing, neither"
                    f" bare nor as {', '.join(form.format('…') for form in _FORMS[1:])}. Unless it"
                    " wants another form, check data_source, which names the function, and"
                    " reward_model.ground_truth, with which it compares"
                )

    async def _reward(self, row: Row, text: str, services: Mapping[str, Any]) -> float:
        """Return what the row's reward function pays for an answer."""
        return (
            await score(_answer(row, text), timeout=self.config.reward.timeout, services=services)
        ).reward

    # --- what a run connects to or starts ---------------------------------------------------------

    async def agents(self, report: Reporter) -> None:
        """Check every agent the rows name, with its tool server or retrieval server."""
        codec = self._codec()
        agents = make_agents(
            self.config,
            client=LLMServerClient(decode_text=codec.decode),
            codec=codec,
            tools=self.opened_tools or ToolRegistry(),
            score=_refuse_to_score,
        )
        self.stack.push_async_callback(agents.close)
        last = {
            placed.row.get("agent_name") or "(the default)": placed
            for placed in self._rows().located()
        }
        for name, placed in last.items():
            try:
                await agents.preflight([placed])
                agents.collector.require_branching([placed.row])
                report.ok(f"{name}: ready")
            except ConfigError as error:
                for problem in error.problems:
                    report.fail(f"{name}: {problem}")

    async def engine(self, report: Reporter) -> None:
        """Check the backend's packages, or its servers."""
        rollout = self.config.rollout
        if rollout.placement != "colocated":
            machine.require_extra(report, "ray", f"rollout.placement={rollout.placement}")
        if (lora := self.config.learner.lora) and lora.quantize != "none":
            machine.require_extra(report, "qlora", f"learner.lora.quantize={lora.quantize}")
        token = (
            os.environ.get(rollout.token_env) if rollout.token_env else None
        )  # check_engine reports a missing one
        for url in rollout.urls:
            await _check_server(report, url, token)
        check_engine(self.config)
        report.ok(f"rollout.backend={rollout.backend}, placement {rollout.placement}")

    async def shared_memory(self, report: Reporter) -> None:
        """Check the shared memory through which weights pass to engines in other processes."""
        rollout = self.config.rollout
        if rollout.weight_dir or (
            rollout.backend == "jetstream" and rollout.placement == "colocated"
        ):
            return
        if not _SHARED_MEMORY.is_dir():
            raise UnmetError(f"there is no {_SHARED_MEMORY}")
        need, free = 4 * self._sizes()[0], shutil.disk_usage(_SHARED_MEMORY).free
        text = f"{_SHARED_MEMORY}: {machine.format_gib(free)} free"
        if free >= need:
            report.ok(text)
        else:
            report.fail(
                f"{text}, weights take up to {machine.format_gib(need)}; make it larger (docker:"
                " --shm-size), or set rollout.weight_dir"
            )

    async def coordinator(self, report: Reporter) -> None:
        """Check the address at which the learner's processes meet."""
        multihost = self.config.learner.multihost
        host, colon, port = (multihost.coordinator or "").rpartition(":")
        if not colon:
            return
        if not port.isdigit():
            report.fail(f"learner.multihost.coordinator={multihost.coordinator}: write host:port")
        elif multihost.process_id == 0 and not machine.is_free("", int(port)):
            report.fail(
                f"port {port} of learner.multihost.coordinator={multihost.coordinator} is in use;"
                " choose one"
            )
        else:
            report.ok(f"{multihost.coordinator}, {multihost.num_processes or '?'} processes")


async def _check_server(report: Reporter, url: str, token: str | None) -> None:
    """Check that a rollout server answers, and accepts the first weights of a run."""
    backend = RemoteBackend(url, token=token, start_seconds=_REMOTE_SECONDS)
    try:
        await backend.start()
        health = await backend.health()
    except JaxAgentRLError as error:
        report.fail(f"{url}: {error}; start it with: jax-agent-rl rollout-server --config CONFIG")
        return
    finally:
        await backend.close()
    if not health.ok:
        report.fail(f"{url} is not healthy: {health.detail}")
    elif health.policy_version >= 0:
        report.warn(
            f"{url} serves policy version {health.policy_version} of an earlier run, and would"
            " refuse the first weights of a new one; restart it before that"
        )
    else:
        report.ok(f"{url} is healthy, with the model's own weights")


def _right_answer(row: Row) -> str | None:
    """Return a right answer by the row's ground truth; None where that is no answer, or nobody compares it."""
    truth = (row.get("reward_model") or {}).get("ground_truth")
    if isinstance(truth, Mapping):
        truth = truth.get("target")
    if isinstance(truth, list | tuple) and truth:  # any of them is right
        truth = truth[0]
    if row.get("agent_name") == EnvironmentAgent.name or not isinstance(truth, str | int | float):
        return None
    return (
        None if str(truth).lstrip().startswith(("{", "[")) else str(truth)
    )  # the tests of a program, as JSON


def _answer(row: Row, text: str) -> Trajectory:
    """Return a trajectory that answers with ``text``."""
    output = TokenOutput(
        token_ids=(0,),
        log_probs=(0.0,),
        policy_versions=(0,),
        stop_reason=StopReason.EOS,
        context_digest="",
    )
    return Trajectory.from_turns(
        prompt_ids=(0,),
        turns=(Turn(output=output),),
        trajectory_id="doctor-0",
        group_id="doctor",
        agent_name=row.get("agent_name") or "single_turn_agent",
        finish_reason=FinishReason.ANSWER,
        row=row,
        messages=(
            *map(text_message, row.get("prompt", ())),
            {"role": "assistant", "content": text},
        ),
    )


async def _refuse_to_score(trajectory: Trajectory) -> Trajectory:
    raise UnmetError(f"{trajectory.trajectory_id} was to be scored, but the doctor runs none")
