"""Checks of a configuration, which a run would make before its first step, or make late.

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
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from jax_agent_rl.agents import EnvironmentAgent, get_agent, load_agents, select_agents
from jax_agent_rl.agents.prompt import codec_of_row, encode_prompt
from jax_agent_rl.chat.codec import ChatCodec
from jax_agent_rl.config import Config
from jax_agent_rl.config.base import Facts, unused
from jax_agent_rl.config.default_agent import default_agent, report_idle_tools
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
from jax_agent_rl.runtime.rollouts import Source, make_agents, open_codec, read_rows
from jax_agent_rl.runtime.scoring import POLICY, needed_services, reward_server
from jax_agent_rl.runtime.teachers import check_teachers
from jax_agent_rl.tool_server.sandbox import open_sandbox
from jax_agent_rl.tools.registry import ToolRegistry, list_schemas, open_tools
from jax_agent_rl.types import FinishReason, StopReason, TokenOutput, Trajectory, Turn
from jax_agent_rl.utils.media import text_message
from jax_agent_rl.utils.memory import usable_memory
from jax_agent_rl.utils.text import counted

MAX_PROMPTS = 1000
"""Rows whose prompts are counted; evenly spread ones of larger files."""
_ANSWER_FORMS = ("{}", "#### {}", "\\boxed{{{}}}", "<answer>{}</answer>")
"""Usual forms of an answer; the first one is the bare answer."""
_NO_ANSWER = "I do not know."
"""An answer that should earn less than the ground truth."""
_SHARED_MEMORY = Path("/dev/shm")
REMOTE_SECONDS = 3.0
"""How long a rollout server may take to answer."""


def count_devices(config: Config) -> int:
    """Return the devices that learner and engine take in one process.

    Several processes share the learner's mesh: then it is 1.
    """
    if config.learner.multihost.num_processes not in (None, 1):
        return 1
    learner_devices = config.learner.mesh.devices
    if config.rollout.backend != "jetstream" or config.rollout.placement == "separate":
        return learner_devices
    engine = config.rollout.jetstream
    return max(learner_devices, engine.device_offset + engine.mesh.devices)


@dataclass(kw_only=True)
class RunChecks:
    """Checks of a configuration; earlier ones find what later ones need.

    Attributes:
        stack: closes what checks opened.
        user_code_imported: without it, the names in rows are not all known.
        opened_tools, codec, decoder: None until their checks have read them.
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
        data = self.config.data
        sources: dict[str, Source] = {"train": (data.train, None)}
        if data.eval:
            sources["eval"] = (data.eval, data.eval_limit)
        row_checks: list[tuple[str, Check]] = []
        for name, source in sources.items():
            check = functools.partial(self.rows, name=name, source=source)
            row_checks.append((f"data.{name}", check))
        return [
            ("user code", self.user_code),
            ("tools", self.tools),
            ("model", self.model),
            ("tokenizer", self.tokenizer),
            ("other models", self.other_models),
            ("run folder", self.run_folder),
            *row_checks,
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
        """Return the number of parameters, and the bytes of parameters and optimizer."""
        if self.decoder is None:
            raise UnmetError("the model could not be read")
        count = parameter_count(self.decoder)  # all are trained
        shapes = self.decoder.parameter_shapes()
        return count, MASTER * count + optimizer_bytes(self.config.learner, shapes)

    # --- code, tools, model -----------------------------------------------------------------------

    async def user_code(self, report: Reporter) -> None:
        """Import the files that register agents, environments and rewards."""
        config = self.config
        load_agents(config.agent.module)
        load_environments(config.environments.path)
        await self.stack.enter_async_context(reward_server(config))
        self.user_code_imported = True

        paths = {
            "agent.module": config.agent.module,
            "environments.path": config.environments.path,
            "reward.path": config.reward.path,
        }
        imported = [f"{key}={path}" for key, path in paths.items() if path]
        report.ok(f"imported: {', '.join(imported) or 'none is named'}")

    async def tools(self, report: Reporter) -> None:
        """Open function tools, native tools and tools of MCP servers."""
        tools = await self.stack.enter_async_context(open_tools(self.config.tools))
        self.opened_tools = tools
        if len(tools):
            report.ok(f"{len(tools)}: {', '.join(tools)}")
        else:
            report.ok("none is configured")

    async def model(self, report: Reporter) -> None:
        """Check the model's files, family, tensor shapes, and whether it fits."""
        rollout = self.config.rollout
        path = self.config.model.path
        model = check_files(path)
        self.decoder = model

        count, saved = self._sizes()
        gradients = count * MASTER
        engine_weights = count * (2 if rollout.jetstream.dtype == "bfloat16" else 4)
        need = saved + gradients + engine_weights
        memory = usable_memory()

        size = f"{count / 1e6:.1f} M parameters"
        layers = counted(model.num_layers, "layer")
        report.ok(f"{path}: {model.family}, {size}, {layers}, files complete")

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
        """Check the way from text to ids and back, appended turns, and the tool-call format.

        A turn that is appended must not change what stands before it.
        """
        codec = open_codec(self.config)
        self.codec = codec
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
        tool_format = codec.tool_format
        if self.config.agent.tool_format != "auto":
            tool_format += " (as configured)"
        report.ok(
            f"text and turns are reproduced; tool calls: {tool_format}; a turn ends with"
            f" {codec.eos_token_ids}"
        )

    async def other_models(self, report: Reporter) -> None:
        """Check the models of critic and judge, and the teachers."""
        path = self.config.critic.path
        if path:
            report.ok(f"critic.path={path}: {load_config(path).family}")
        judge = self.config.reward.judge
        if judge and judge.model != POLICY:
            report.ok(f"reward.judge.model={judge.model}: {check_files(judge.model).family}")
        for line in check_teachers(self.config):
            report.ok(line)

    async def run_folder(self, report: Reporter) -> None:
        """Check the space for checkpoints and logs."""
        _, checkpoint_bytes = self._sizes()
        # One more than are kept, while the next one is written.
        need = checkpoint_bytes * (self.config.trainer.keep_checkpoints + 1)
        machine.check_disk(report, Path(self.config.run_dir), need=need, key="run_dir")

    # --- rows -------------------------------------------------------------------------------------

    async def rows(self, report: Reporter, *, name: str, source: Source) -> None:
        """Load a file: every row well-formed, every name in it known."""
        files, _ = source
        if not self.user_code_imported:
            for file in files:
                find_files(file)  # a missing file is reported in any case
            raise UnmetError("the user code, which registers agents, could not be imported")
        self.found_rows[name] = read_rows(self.config, self.opened_tools, source)
        rows = RowsWithoutPrompts(self.found_rows[name])

        default = default_agent(self.config.agent, self.config.tool_config)
        agents: Counter[str] = Counter()
        data_sources: Counter[str] = Counter()
        unlabelled = 0
        misplaced = 0
        for row in rows:
            agents[row.get("agent_name") or f"{default} (the default)"] += 1
            data_sources[str(row["data_source"])] += 1
            if (row.get("reward_model") or {}).get("ground_truth") is None:
                unlabelled += 1
            if row.get("ground_truth") is not None:
                misplaced += 1
        report.ok(
            f"{', '.join(map(str, files))}: {counted(len(rows), 'row')}; agents"
            f" {machine.format_counts(agents)}; data sources {machine.format_counts(data_sources)}"
        )
        if unlabelled:
            report.warn(
                f"no reward_model.ground_truth in {unlabelled} of {counted(len(rows), 'row')}"
            )
        if misplaced:
            report.warn(
                f"a column ground_truth in {misplaced} of {counted(len(rows), 'row')}, which no"
                " reward function is given as ground_truth: write it into reward_model,"
                " {'ground_truth': …}"
            )
        idle_tools = report_idle_tools(self.config, rows)
        if idle_tools:
            report.warn("; ".join(idle_tools))

    async def keys(self, report: Reporter) -> None:
        """Check for keys that neither the rows' agents nor the model use."""
        facts = Facts(agents=select_agents(self.config, self._rows()))
        if self.decoder is not None:
            facts = replace(
                facts,
                has_vision=self.decoder.vision is not None,
                is_recurrent=self.decoder.delta_net is not None,
            )
        problems = list(unused(self.config, facts))
        if problems:
            raise ConfigError(problems)
        report.ok("all that are set are used")

    async def prompts(self, report: Reporter) -> None:
        """Count prompts that are too long."""
        codec = self._codec()
        count = len(self._rows())
        limit = self.config.agent.max_prompt_length
        tools = None
        if self.config.agent.tool_prompt != "none":
            tools = self.opened_tools

        lengths = []
        for rows in self.found_rows.values():
            for row in rows[:: math.ceil(count / MAX_PROMPTS)]:
                if row["prompt"]:
                    lengths.append(self._prompt_length(row, codec, tools))
        if not lengths:
            report.ok("environments write them")
            return

        longest = max(lengths)
        too_long = [length for length in lengths if length > limit]
        share = len(too_long) / len(lengths)
        text = f"{len(lengths)} counted"
        if tools is not None and len(tools):
            text += ", with the tools they describe"
        text += f", the longest has {counted(longest, 'id')}; agent.max_prompt_length={limit}"
        if not too_long:
            report.ok(text)
            return
        text += (
            f": {share:.1%} are longer and would be dropped; raise it to {longest}, or leave"
            " them out"
        )
        if share > 0.5:
            report.fail(text)
        else:
            report.warn(text)

    def _prompt_length(self, row: Row, codec: ChatCodec, tools: ToolRegistry | None) -> int:
        """Return the number of token ids of a row's prompt.

        Args:
            tools: tools that prompts describe; None if they describe none.
        """
        agent = row.get("agent_name") or default_agent(self.config.agent, self.config.tool_config)
        schemas = ()
        if tools is not None and get_agent(agent).describes_tools:
            selection = (row.get("extra_info") or {}).get("tool_selection")
            schemas = list_schemas(tools.select(selection))
        ids, *_ = encode_prompt(
            codec_of_row(codec, row),
            row["prompt"],
            schemas,
            continue_last=bool(row.get("continue_final_message")),
        )
        return len(ids)

    async def rewards(self, report: Reporter) -> None:
        """Call each data source's function with its first row's ground truth as the answer."""
        config = self.config
        services: dict[str, Any] = {}
        if "sandbox" in needed_services(config, self._rows()):
            services["sandbox"] = await open_sandbox(config.reward.sandbox)

        first_rows: dict[str, Row] = {}
        for dataset in self.found_rows.values():
            for number, without_prompt in enumerate(RowsWithoutPrompts(dataset)):
                data_source = without_prompt["data_source"]
                if data_source not in first_rows:
                    first_rows[data_source] = dataset[number]

        for name, row in sorted(first_rows.items()):
            if "judge" in needed_services(config, [row]):
                report.ok(f"{name}: asks for the judge, which starts with the run; not tried")
                continue
            answer = _right_answer(row)
            if answer is None:
                await self._reward(row, str(answer), services)  # it may still raise
                report.ok(f"{name}: called; its first row holds no answer to try it with")
            else:
                await self._try_answer(report, name, row, answer, services)

    async def _try_answer(
        self, report: Reporter, name: str, row: Row, answer: str, services: Mapping[str, Any]
    ) -> None:
        """Report what a right answer earns, in the first usual form that earns something."""
        for form in _ANSWER_FORMS:
            text = form.format(answer)
            reward = await self._reward(row, text, services)
            if reward > 0:
                break
        else:  # no failure: the function may want a program, tool calls, or a form of its own
            other_forms = ", ".join(form.format("…") for form in _ANSWER_FORMS[1:])
            report.warn(
                f"{name}: its first row's ground truth {answer[:60]!r} earns nothing, neither"
                f" bare nor as {other_forms}. Unless it wants another form, check data_source,"
                " which names the function, and reward_model.ground_truth, with which it compares"
            )
            return

        wrong_reward = await self._reward(row, _NO_ANSWER, services)
        if wrong_reward >= reward:
            report.warn(
                f"{name}: {_NO_ANSWER!r} earns {wrong_reward:g}, and its first row's ground truth"
                f" {reward:g}; a function that does not tell answers apart teaches nothing: check"
                " what it compares"
            )
            return

        finding = f"{name}: its first row's ground truth earns {reward:g} as {text[:60]!r}"
        sentence = f"The answer is {answer}."
        if text == answer and await self._reward(row, sentence, services) <= 0:
            finding += (
                f", and nothing as {sentence[:80]!r}: the answer must be all that the policy writes"
            )
        report.ok(finding)

    async def _reward(self, row: Row, text: str, services: Mapping[str, Any]) -> float:
        """Return what the row's reward function pays for an answer."""
        timeout = self.config.reward.timeout
        scored = await score(_answer(row, text), timeout=timeout, services=services)
        return scored.reward

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

        # One row of each agent: preflight looks at the agent, not at its rows.
        last_rows = {}
        for located in self._rows().located():
            last_rows[located.row.get("agent_name") or "(the default)"] = located

        for name, located in last_rows.items():
            try:
                await agents.preflight([located])
                agents.collector.require_branching([located.row])
                report.ok(f"{name}: ready")
            except ConfigError as error:
                for problem in error.problems:
                    report.fail(f"{name}: {problem}")

    async def engine(self, report: Reporter) -> None:
        """Check the backend's packages, or its servers."""
        rollout = self.config.rollout
        if rollout.placement != "colocated":
            machine.require_extra(report, "ray", f"rollout.placement={rollout.placement}")
        lora = self.config.learner.lora
        if lora is not None and lora.quantize != "none":
            machine.require_extra(report, "qlora", f"learner.lora.quantize={lora.quantize}")

        token = None
        if rollout.token_env:
            token = os.environ.get(rollout.token_env)  # check_engine reports a missing one
        for url in rollout.urls:
            await _check_server(report, url, token)
        check_engine(self.config)
        report.ok(f"rollout.backend={rollout.backend}, placement {rollout.placement}")

    async def shared_memory(self, report: Reporter) -> None:
        """Check the shared memory through which weights pass to engines in other processes."""
        rollout = self.config.rollout
        in_this_process = rollout.backend == "jetstream" and rollout.placement == "colocated"
        if rollout.weight_dir or in_this_process or rollout.weight_transport == "jax_transfer":
            return

        if not _SHARED_MEMORY.is_dir():
            raise UnmetError(f"there is no {_SHARED_MEMORY}")

        parameters, _ = self._sizes()
        need = 4 * parameters
        free = shutil.disk_usage(_SHARED_MEMORY).free
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
            processes = "as many processes as JAX detects"
            if multihost.num_processes is not None:
                processes = counted(multihost.num_processes, "process")
            report.ok(f"{multihost.coordinator}, {processes}")


async def _check_server(report: Reporter, url: str, token: str | None) -> None:
    """Check that a rollout server answers, and accepts the first weights of a run."""
    backend = RemoteBackend(url, token=token, start_seconds=REMOTE_SECONDS)
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
    """Return a right answer by the row's ground truth.

    None if the truth is not an answer, as the tests of a program, or if nobody compares it.
    """
    truth = (row.get("reward_model") or {}).get("ground_truth")
    if isinstance(truth, Mapping):
        truth = truth.get("target")
    if isinstance(truth, list | tuple) and truth:  # any of them is right
        truth = truth[0]
    if row.get("agent_name") == EnvironmentAgent.name or not isinstance(truth, str | int | float):
        return None
    answer = str(truth)
    if answer.lstrip().startswith(("{", "[")):  # the tests of a program, as JSON
        return None
    return answer


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
