"""Trajectories in Harbor's interchange format ATIF, written and read.

::

    recorded trajectory          ATIF document, validated by the package ``atif``
    messages of the prompt  ───► steps of system, user and agent
    turn                    ◄──► step of the agent: text, calls; metrics: ids and log-probs, exact
    inserted after it       ───► observation of that step, steps of the user
    segments                ◄──► subagent_trajectories
    everything else         ◄──► extra, under "jax_agent_rl"

What was written here is read back as it was recorded. Documents of others are read as well: a step
whose prompt ids do not go on from the step before begins another segment, and where there are no
ids, each word of a text stands for a token.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from jax_agent_rl import __version__
from jax_agent_rl.agents.request import turn_positions
from jax_agent_rl.checks import as_score, is_number
from jax_agent_rl.errors import ConfigError, DataError
from jax_agent_rl.observe.report.command import RunData, config_value, decoder
from jax_agent_rl.observe.run_dir import Decode, Record, json_line, trajectory_record
from jax_agent_rl.observe.schema import is_trajectory_record
from jax_agent_rl.types import (
    FinishReason,
    StopReason,
    TokenOutput,
    ToolCallRecord,
    Trajectory,
    Turn,
)
from jax_agent_rl.utils.bounded_json import parse_json, read_json_object
from jax_agent_rl.utils.files import make_folder, write_atomically
from jax_agent_rl.utils.packages import import_installed, install_command
from jax_agent_rl.utils.wrong_values import describe_problems

if TYPE_CHECKING:
    import atif

SCHEMA_VERSION = "ATIF-v1.8"
_KEY = "jax_agent_rl"
"""Name of what this project adds to a document, under ``extra``."""
_IN_STEPS = frozenset(
    {
        "policy_versions",
        "prompt_ids",
        "response_ids",
        "response_mask",
        "rollout_logprobs",
        "segments",
        "turns",
    }
)
"""Fields of a record that the steps and embedded documents hold."""
_FIRST_WORD = 1 << 30  # id of the first word of documents without ids; above any vocabulary
_HARBOR_FILES = "**/agent/trajectory.json"  # in a folder of Harbor's trials


def _model() -> type[atif.Trajectory]:
    """Return ATIF's root model.

    Raises:
        ConfigError: the package ``atif`` is not installed.
    """
    try:
        return import_installed("atif").Trajectory
    except ImportError as error:
        raise ConfigError(f"ATIF needs the package atif: {install_command('atif')}") from error


# --- writing --------------------------------------------------------------------------------------


def write_atif(data: RunData, folder: Path) -> int:
    """Write every trajectory of a run as a document of its own; return how many.

    Args:
        folder: gets the files; it may exist, and files of the same names are replaced.

    Raises:
        ConfigError: the package ``atif`` is not installed.
        StorageError: the disk is full.
    """
    model_path = config_value(data.config, "model", "path")
    decode = data.open_decoder([])
    make_folder(folder)
    count = 0
    for record in data.trajectories:
        document = as_document(record, decode=decode, model_name=model_path)
        text = json.dumps(document.to_json_dict(), ensure_ascii=False)
        # Several splits and steps may have a trajectory of the same id.
        name = re.sub("[^a-zA-Z0-9._-]+", "-", f"{record['split']}-{record['trajectory_id']}")
        write_atomically(folder / f"{count:06}-{name[:100]}.json", text + "\n")
        count += 1
    return count


def as_document(record: Record, *, decode: Decode, model_name: str | None) -> atif.Trajectory:
    """Return a recorded trajectory as an ATIF document.

    Args:
        decode: turns token ids into text, for what the messages do not hold.
        model_name: path of the policy's model.

    Raises:
        ConfigError: the package ``atif`` is not installed.
    """
    plain = json.loads(json_line(record))
    return _model().model_validate(_document(plain, decode, model_name))


def _document(record: Record, decode: Decode, model_name: str | None) -> dict[str, Any]:
    steps = []
    for number, step in enumerate(_steps(record, decode), 1):
        steps.append({"step_id": number, **step})

    segments = []
    for number, segment in enumerate(record["segments"], 1):
        document = _document(segment, decode, model_name)
        segments.append({**document, "trajectory_id": f"{record['trajectory_id']}/{number}"})

    fields = {key: value for key, value in record.items() if key not in _IN_STEPS}
    return {
        "schema_version": SCHEMA_VERSION,
        "session_id": record["group_id"],
        "trajectory_id": record["trajectory_id"],
        "agent": {
            "name": record["agent_name"],
            "version": __version__,
            "model_name": model_name,
        },
        "steps": steps,
        "final_metrics": {
            "total_completion_tokens": sum(record["response_mask"]),
            "total_steps": len(steps),
            "extra": {"reward": record["reward"]},
        },
        "subagent_trajectories": segments or None,
        "extra": {_KEY: fields},
    }


def _steps(record: Record, decode: Decode) -> Iterator[dict[str, Any]]:
    """Yield the steps of a record, without their numbers."""
    turns = [_turn_step(record, index) for index in range(len(record["turns"]))]
    messages = record["messages"]
    positions = turn_positions(messages, len(turns))
    if len(positions) != len(turns):  # a segment has no messages
        yield {"source": "user", "message": decode(record["prompt_ids"])}
        for turn, span in zip(turns, _spans(record), strict=True):
            sampled, inserted = span
            yield {**turn, "message": decode(sampled), **_observed(decode(inserted))}
        return

    step: dict[str, Any] | None = None
    for position, message in enumerate(messages):
        text = str(message.get("content") or "")
        if position in positions:
            if step is not None:
                yield step
            step = {**turns[positions.index(position)], "message": text}
            if "tool_calls" not in step:
                step |= _message_calls(message)
        elif message["role"] == "tool" and step is not None and step["source"] == "agent":
            _add_result(step, message, text)
        else:
            if step is not None:
                yield step
            source = {"system": "system", "developer": "system", "assistant": "agent"}
            step = {"source": source.get(message["role"], "user"), "message": text}
            if step["source"] == "agent":  # of the prompt
                step["is_copied_context"] = True
    if step is not None:
        yield step


def _turn_step(record: Record, index: int) -> dict[str, Any]:
    """Return what a turn's step holds besides its text."""
    turn = record["turns"][index]
    starts = [0]
    for other in record["turns"]:
        starts.append(starts[-1] + other["sampled"] + other["appended"])
    window = record.get("history_window")
    first_turn = 0 if window is None else max(0, index - window)

    begin = starts[index]
    end = begin + turn["sampled"]
    response_ids = record["response_ids"]
    prompt_ids = [*record["prompt_ids"], *response_ids[starts[first_turn] : begin]]
    turn_record = {**turn, "policy_versions": record["policy_versions"][begin:end]}
    if index + 1 == len(record["turns"]):  # otherwise the next prompt ends with them
        turn_record["appended_ids"] = response_ids[end : starts[index + 1]]

    step: dict[str, Any] = {
        "source": "agent",
        "llm_call_count": 1,
        "metrics": {
            "prompt_tokens": len(prompt_ids),
            "completion_tokens": turn["sampled"],
            "cached_tokens": turn.get("cached_tokens"),
            "prompt_token_ids": prompt_ids,
            "completion_token_ids": response_ids[begin:end],
            "logprobs": record["rollout_logprobs"][begin:end],
        },
        "extra": {_KEY: turn_record},
    }
    if turn["tool_calls"]:
        step |= _recorded_calls(turn["tool_calls"])
    return step


def _spans(record: Record) -> Iterator[tuple[list[int], list[int]]]:
    """Yield the sampled and the inserted ids of each turn."""
    begin = 0
    for turn in record["turns"]:
        end = begin + turn["sampled"]
        yield (
            record["response_ids"][begin:end],
            record["response_ids"][end : end + turn["appended"]],
        )
        begin = end + turn["appended"]


def _recorded_calls(calls: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the calls of a turn and their results; one that was malformed has a result alone."""
    tool_calls = []
    results = []
    for number, call in enumerate(calls):
        call_id = call.get("call_id") or f"call_{number}"
        result = {"content": call["observation"]}
        if isinstance(call["arguments"], dict):
            tool_calls.append(
                {
                    "tool_call_id": call_id,
                    "function_name": call["name"],
                    "arguments": call["arguments"],
                }
            )
            result["source_call_id"] = call_id
        results.append(result)
    return {"tool_calls": tool_calls, "observation": {"results": results}}


def _message_calls(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return the calls of an assistant message in OpenAI's format; a client may have sent any."""
    tool_calls = []
    calls = message.get("tool_calls")
    for number, call in enumerate(calls if isinstance(calls, list) else ()):
        function = call.get("function") if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping):
            continue

        arguments = function.get("arguments")
        if isinstance(arguments, str):
            try:
                arguments = parse_json(arguments)
            except ValueError:
                arguments = {"text": arguments}
        if not isinstance(arguments, dict):
            arguments = {"value": arguments}

        tool_calls.append(
            {
                "tool_call_id": str(call.get("id") or f"call_{number}"),
                "function_name": str(function.get("name") or ""),
                "arguments": arguments,
            }
        )
    return {"tool_calls": tool_calls} if tool_calls else {}


def _observed(text: str) -> dict[str, Any]:
    return {"observation": {"results": [{"content": text}]}} if text else {}


def _add_result(step: dict[str, Any], message: Mapping[str, Any], text: str) -> None:
    """Add a tool's message to the step whose call it answers."""
    if step.get("extra", {}).get(_KEY, {}).get("tool_calls"):
        return  # its record has the results
    result: dict[str, Any] = {"content": text}
    known = {call["tool_call_id"] for call in step.get("tool_calls", ())}
    call_id = message.get("tool_call_id")
    if isinstance(call_id, str) and call_id in known:
        result["source_call_id"] = call_id
    step.setdefault("observation", {"results": []})["results"].append(result)


# --- reading --------------------------------------------------------------------------------------


def is_atif(path: Path) -> bool:
    """Return whether a path is a document, or a folder of documents or of Harbor's trials."""
    if path.suffix == ".json":
        return True
    return path.is_dir() and bool(_files(path))


def _files(path: Path) -> list[Path]:
    if not path.is_dir():
        return [path]
    if (path / "config.json").is_file() and not (path / "result.json").is_file():
        return []  # a run folder; Harbor's have both files
    found = sorted(path.glob(_HARBOR_FILES))
    if not found:
        found = [file for file in sorted(path.glob("*.json")) if _names_atif(file)]
    return found


def _names_atif(file: Path) -> bool:
    """Return whether the beginning of a file names ATIF."""
    try:
        with file.open("rb") as stream:
            return b"ATIF-v" in stream.read(1000)
    except OSError:
        return False


def read_atif(path: Path) -> RunData:
    """Read what ``view`` and ``report`` show of documents.

    Raises:
        ConfigError: the package ``atif`` is not installed.
        DataError: there is no document.
    """
    files = _files(path)
    if not files or not files[0].is_file():
        raise DataError(f"{path} is not an ATIF document, nor a folder with some")
    records = AtifRecords(files)
    first = next(records.documents(), None)
    config: dict[str, Any] = {}
    if first is not None and first.agent.model_name is not None:
        config = {"model": {"path": first.agent.model_name}}
    return RunData(
        name=path.name, trajectories=records, config=config, make_decoder=records.decoder
    )


@dataclass
class Words:
    """Words in place of tokens, for documents without ids."""

    _texts: list[str] = field(default_factory=list)
    _ids: dict[str, int] = field(default_factory=dict)

    def encode(self, text: str) -> list[int]:
        """Return an id per word, each with the space before it."""
        ids = []
        for word in re.findall(r"\s*\S+|\s+", text):
            if word not in self._ids:
                self._ids[word] = _FIRST_WORD + len(self._texts)
                self._texts.append(word)
            ids.append(self._ids[word])
        return ids

    def is_word(self, token_id: int) -> bool:
        """Return whether an id stands for a word."""
        return _FIRST_WORD <= token_id < _FIRST_WORD + len(self._texts)

    def word(self, token_id: int) -> str:
        """Return the word of an id."""
        return self._texts[token_id - _FIRST_WORD]


class AtifRecords:
    """The trajectories of documents as records of a run.

    It is a :class:`~jax_agent_rl.observe.run_dir.RecordSource`. A file that is not a document is
    skipped with a note.
    """

    def __init__(self, files: Sequence[Path]) -> None:
        self._files = files
        self._words = Words()
        self._valid_files: list[Path] = []
        self.notes: Sequence[str] = ()

    def __iter__(self) -> Iterator[Record]:
        """Yield every record."""
        notes = []
        self._valid_files = []
        for file in self._files:
            try:
                record = as_record(_read(file), words=self._words, name=file.stem)
            except DataError as error:
                notes.append(f"skipped: {error}")
                continue
            self._valid_files.append(file)
            yield record
        self.notes = notes

    def read(self, numbers: Iterable[int]) -> Iterator[Record]:
        """Yield some of the records, see :class:`~jax_agent_rl.observe.run_dir.RecordSource`."""
        for number in numbers:
            file = self._valid_files[number]
            yield as_record(_read(file), words=self._words, name=file.stem)

    def documents(self) -> Iterator[atif.Trajectory]:
        """Yield the documents that can be read."""
        for file in self._files:
            try:
                yield _read(file)
            except DataError:
                continue

    def decoder(self, config: Mapping[str, Any], notes: list[str]) -> Decode:
        """Return what turns ids into text, ids of words included."""
        tokens_of_model = None
        first = next(self.documents(), None)
        if first is not None and _has_ids(first):
            tokens_of_model = decoder(config, notes)

        def decode(ids: Sequence[int]) -> str:
            text = ""
            for is_word, run in itertools.groupby(ids, key=self._words.is_word):
                if is_word:
                    text += "".join(self._words.word(token_id) for token_id in run)
                elif tokens_of_model is not None:
                    text += tokens_of_model(list(run))
                else:
                    text += "".join(f"[{token_id}]" for token_id in run)
            return text

        return decode


def _read(file: Path) -> atif.Trajectory:
    """Read a document.

    Raises:
        ConfigError: the package ``atif`` is not installed.
        DataError: the file holds none.
    """
    model = _model()
    try:
        return model.model_validate(read_json_object(file))
    except ValidationError as error:
        raise DataError(f"{file} is not an ATIF document: {describe_problems(error)}") from None
    except (OSError, ValueError, RecursionError) as error:
        raise DataError(f"{file} is not an ATIF document: {error}") from None


def as_record(document: atif.Trajectory, *, words: Words, name: str) -> Record:
    """Return a document as the record of a trajectory.

    Args:
        words: gets the words of a document without ids.
        name: id of a trajectory that has none.

    Raises:
        DataError: it holds no step of an agent or a reward that cannot be, or what was written here
            was changed since.
    """
    recorded = (document.extra or {}).get(_KEY)
    if isinstance(recorded, dict):
        record = _recorded(document)
        if not is_trajectory_record(record):
            raise DataError(f"{name}: what jax-agent-rl wrote of it does not fit its steps")
        return record
    try:
        trajectory = _foreign(document, words, name)
    except ValueError as error:
        raise DataError(f"{name}: {error}") from None
    return trajectory_record(trajectory, step=0, split="train")


def _recorded(document: atif.Trajectory) -> Record:
    """Return the record that a document was made of; any parts may be missing."""
    record: Record = dict((document.extra or {}).get(_KEY) or {})
    turns: list[Any] = []
    prompt_ids: list[int] = []
    response_ids: list[int] = []
    logprobs: list[float] = []
    versions: list[int] = []
    mask: list[int] = []
    appended = 0
    longest = max((len(_context_ids(step)) for step in document.steps), default=0)
    for step in document.steps:
        turn_record = (step.extra or {}).get(_KEY)
        if step.metrics is None or not isinstance(turn_record, dict):
            continue
        turn_record = dict(turn_record)
        context_ids = _context_ids(step)
        sampled_ids = step.metrics.completion_token_ids or []
        if not turns:
            prompt_ids = context_ids
        elif appended:
            response_ids += context_ids[-appended:]

        last_ids = _list(turn_record.pop("appended_ids", None))
        # A number that does not fit is noticed when the record is checked.
        appended = 0
        if isinstance(turn_record.get("appended"), int):
            appended = min(turn_record["appended"], max(longest, len(last_ids)))

        response_ids += [*sampled_ids, *last_ids]
        logprobs += [*(step.metrics.logprobs or []), *itertools.repeat(0.0, appended)]
        versions += [
            *_list(turn_record.pop("policy_versions", None)),
            *itertools.repeat(-1, appended),
        ]
        mask += [1] * len(sampled_ids) + [0] * appended
        turns.append(turn_record)

    segments = [_recorded(segment) for segment in document.subagent_trajectories or ()]
    return {
        **record,
        "prompt_ids": prompt_ids,
        "turns": turns,
        "response_ids": response_ids,
        "response_mask": mask,
        "rollout_logprobs": logprobs,
        "policy_versions": versions,
        "segments": segments,
    }


def _context_ids(step: atif.Step) -> list[int]:
    """Return the ids in front of what a step sampled; none where it has none."""
    if step.metrics is None:
        return []
    return step.metrics.prompt_token_ids or []


def _list(value: Any) -> list[Any]:
    """Return a value of a document that has to be a list; an empty one for anything else."""
    return value if isinstance(value, list) else []


# --- documents of others --------------------------------------------------------------------------


def _has_ids(document: atif.Trajectory) -> bool:
    for step in document.steps:
        if step.metrics is not None and step.metrics.completion_token_ids:
            return True
    return False


def _foreign(document: atif.Trajectory, words: Words, name: str) -> Trajectory:
    """Return the trajectory of a document that was written elsewhere.

    Raises:
        DataError: no step of it was sampled.
        ValueError: a float32 does not hold the reward.
    """
    sequences = _sequences(document, words)
    if not sequences:
        raise DataError(f"{name}: no step of an agent with a text or token ids")

    trajectory_id = document.trajectory_id or document.session_id or name
    common = {
        "group_id": document.session_id or trajectory_id,
        "agent_name": document.agent.name,
        "finish_reason": FinishReason.ANSWER,
    }

    trajectories = []
    for number, (prompt_ids, turns) in enumerate(sequences):
        trajectories.append(
            Trajectory.from_turns(
                prompt_ids=prompt_ids,
                turns=turns,
                trajectory_id=f"{trajectory_id}/{number}",
                **common,
            )
        )
    *segments, last = trajectories

    messages = []
    for step in document.steps:
        role = {"agent": "assistant"}.get(step.source, step.source)
        messages.append({"role": role, "content": _text(step.message)})

    return replace(
        last,
        trajectory_id=trajectory_id,
        segments=tuple(segments),
        reward=_reward(document),
        messages=tuple(messages),
    )


def _reward(document: atif.Trajectory) -> float:
    final = document.final_metrics
    for extra in (final.extra if final is not None else None, document.extra):
        reward = (extra or {}).get("reward")
        if is_number(reward):
            return as_score(reward, "the reward")
    return 0.0


def _sequences(document: atif.Trajectory, words: Words) -> list[tuple[list[int], list[Turn]]]:
    """Return the contexts that a document's turns were sampled in, its sub-agents' first."""
    sequences: list[tuple[list[int], list[Turn]]] = []
    for subagent in document.subagent_trajectories or ():
        sequences += _sequences(subagent, words)

    has_ids = _has_ids(document)
    context_ids: list[int] = []  # of all steps so far, where there are no ids
    previous: list[int] = []  # prompt and sampled ids of the last turn
    document_sequences: list[tuple[list[int], list[Turn]]] = []
    for step in document.steps:
        is_sampled = step.source == "agent" and not step.is_copied_context
        prompt_ids = context_ids
        sampled_ids: Sequence[int] = ()
        logprobs: Sequence[float] = ()
        if has_ids:
            if step.metrics is not None:
                prompt_ids = step.metrics.prompt_token_ids or []
                sampled_ids = step.metrics.completion_token_ids or []
                logprobs = step.metrics.logprobs or []
        elif is_sampled:
            sampled_ids = words.encode(_spoken(step))
        else:
            context_ids = [*context_ids, *words.encode(f"{step.source}: {_text(step.message)}\n")]

        if is_sampled and sampled_ids and prompt_ids:
            turn = _turn(step, sampled_ids, logprobs)
            continues = bool(previous) and prompt_ids[: len(previous)] == previous
            if continues:
                turns = document_sequences[-1][1]
                appended_ids = tuple(prompt_ids[len(previous) :])
                turns[-1] = replace(turns[-1], appended_ids=appended_ids)
                turns.append(turn)
            else:
                document_sequences.append((list(prompt_ids), [turn]))
            previous = [*prompt_ids, *sampled_ids]
            context_ids = [*previous]
        if not has_ids and step.observation is not None:
            context_ids = [*context_ids, *words.encode(f"\n{_observation(step)}\n")]
    return sequences + document_sequences


def _turn(step: atif.Step, sampled_ids: Sequence[int], logprobs: Sequence[float]) -> Turn:
    if len(logprobs) != len(sampled_ids):
        logprobs = [0.0] * len(sampled_ids)

    observations: dict[str | None, str] = {}
    if step.observation is not None:
        for result in step.observation.results:
            observations[result.source_call_id] = _text(result.content)

    calls = []
    for call in step.tool_calls or ():
        calls.append(
            ToolCallRecord(
                name=call.function_name,
                arguments=call.arguments,
                observation=observations.get(call.tool_call_id, ""),
                call_id=call.tool_call_id,
            )
        )

    output = TokenOutput(
        token_ids=tuple(sampled_ids),
        log_probs=tuple(logprobs),
        policy_versions=(0,) * len(sampled_ids),
        stop_reason=StopReason.EOS,
        context_digest="",
    )
    return Turn(output=output, tool_calls=tuple(calls))


def _spoken(step: atif.Step) -> str:
    """Return the text of an agent's step: its thoughts, its words and its calls."""
    parts = [step.reasoning_content or "", _text(step.message)]
    for call in step.tool_calls or ():
        arguments = json.dumps(call.arguments, ensure_ascii=False)
        parts.append(f"{call.function_name}({arguments})")
    return "\n".join(part for part in parts if part)


def _observation(step: atif.Step) -> str:
    assert step.observation is not None
    return "\n".join(_text(result.content) for result in step.observation.results)


def _text(content: str | Sequence[atif.ContentPart] | None) -> str:
    """Return a content as text; images and sounds are named."""
    if content is None or isinstance(content, str):
        return content or ""
    return "".join(part.text or f"<{part.type}>" for part in content)
