"""``jax-agent-rl report RUN``: data, style and scripts in one HTML file that loads nothing.

The output of models and tools is treated as hostile. It enters the page only as JSON inside script
elements, with ``<``, ``>`` and ``&`` escaped; the scripts show it only as text nodes; and the
page's security policy forbids other scripts and any loading or sending.
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path
from typing import Any

from jax_agent_rl.chat.codec import ChatCodec
from jax_agent_rl.checks import is_number
from jax_agent_rl.errors import ConfigError, DataError, ModelError
from jax_agent_rl.observe.attachments import Attachments
from jax_agent_rl.observe.report.charts import charts, newest_traces, timeline, zero_metrics
from jax_agent_rl.observe.report.trajectories import (
    COLUMNS,
    Forest,
    Prompts,
    Vocabulary,
    facts,
    tokens,
)
from jax_agent_rl.observe.run_dir import (
    Decode,
    RecordSource,
    RunDir,
    read_metrics,
    read_traces,
    read_trajectories,
)
from jax_agent_rl.observe.selection import MAX_TOKENS, Fact, FactTable, choose
from jax_agent_rl.utils.bounded_json import read_json_object
from jax_agent_rl.utils.files import make_folder, replacing
from jax_agent_rl.utils.surrogates import replace_lone_surrogates
from jax_agent_rl.utils.text import counted


@dataclass(frozen=True, kw_only=True)
class RunData:
    """The content of a run folder, or of a table of ``jax-agent-rl rollout``.

    Attributes:
        name: name of the folder or file.
        trajectories: its trajectories; every iteration reads them again.
        config: the resolved configuration; empty if unreadable.
        metrics: records of ``metrics.jsonl``.
        traces: the newest records of ``traces.jsonl``; see
            :mod:`jax_agent_rl.observe.sinks.traces`.
        summary: ``summary.json`` of a finished run.
        notes: messages about missing or unreadable parts, other than trajectories.
        attachments: images and videos of the trajectories; None: there are none.
        make_decoder: makes the decoder of the trajectories' ids from the configuration, and adds
            notes; None: the one of the model at ``model.path``.
    """

    name: str
    trajectories: RecordSource
    config: dict[str, Any] = field(default_factory=dict)
    metrics: list[dict[str, Any]] = field(default_factory=list)
    traces: list[Mapping[str, Any]] = field(default_factory=list)
    summary: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    attachments: Attachments | None = None
    make_decoder: Callable[[Mapping[str, Any], list[str]], Decode] | None = None

    def open_decoder(self, notes: list[str]) -> Decode:
        """Return what turns the trajectories' ids into text; adds notes about what is missing."""
        if self.make_decoder is None:
            return decoder(self.config, notes)
        return self.make_decoder(self.config, notes)


def read_run(run: Path) -> RunData:
    """Read a run folder, except for its trajectories.

    Raises:
        DataError: the folder holds neither metrics nor trajectories nor a configuration.
    """
    names = ("config.json", "metrics.jsonl", "trajectories.jsonl")
    if not any((run / name).is_file() for name in names):
        raise DataError(f"{run} is not a run folder: it has no {', no '.join(names)}")

    run_dir = RunDir(run)
    notes: list[str] = []
    metrics = read_metrics(run_dir.metrics)
    traces = read_traces(run_dir.traces)
    data = RunData(
        name=run.resolve().name,
        trajectories=read_trajectories(run_dir.trajectories),
        config=_read_object(run_dir.config, notes),
        metrics=list(metrics),
        traces=newest_traces(traces),
        summary=_read_object(run_dir.summary, notes) if run_dir.summary.exists() else {},
        notes=notes,
        attachments=run_dir.attachments,
    )
    # Lines were counted while they were read, above.
    notes += metrics.notes
    notes += traces.notes
    return data


def config_value(config: Mapping[str, Any], section: str, key: str) -> Any:
    """Return a value of a configuration; None if it has none.

    Args:
        config: the configuration as recorded, of any shape.
        key: name of the key in the section.
    """
    values = config.get(section)
    if not isinstance(values, Mapping):
        return None
    return values.get(key)


def decoder(config: Mapping[str, Any], notes: list[str]) -> Decode:
    """Return the decoder of the run's tokenizer.

    If the tokenizer is unreadable, the decoder shows ids in brackets.

    Args:
        notes: list to which a note about an unreadable tokenizer is added.
    """
    path = config_value(config, "model", "path")
    try:
        if not isinstance(path, str):
            raise ModelError("its configuration has no model.path")
        codec = ChatCodec.from_pretrained(path)
    except ModelError as problem:
        notes.append(
            f"tokens are shown as ids, because the run's tokenizer cannot be read: {problem}"
        )
        return lambda ids: "".join(f"[{i}]" for i in ids)
    return lambda ids: codec.decode(ids, skip_special_tokens=False)


@dataclass(frozen=True, kw_only=True)
class PageChoice:
    """The trajectories of a page.

    Attributes:
        numbers: numbers of the trajectories among all, in the page's order: members of a group
            follow each other.
        total: number of all trajectories.
        notes: messages about what was left out, and how to get it.
    """

    numbers: Sequence[int]
    total: int
    notes: Sequence[str]


def choose_for_page(records: RecordSource, limit: int) -> PageChoice:
    """Read all trajectories once, and choose up to ``limit`` of them, see :func:`choose`."""
    facts = FactTable(Fact.from_record(record) for record in records)
    chosen, is_full = choose(facts, limit)

    notes = []
    if len(chosen) < len(facts):
        chosen_steps = len({facts[number].step for number in chosen})
        all_steps = len({fact.step for fact in facts})
        remedy = "--limit shows more"
        if is_full:
            remedy = f"a page takes {MAX_TOKENS:,} tokens, --limit 0 shows all"
        notes.append(
            f"shown: {len(chosen)} of {counted(len(facts), 'trajectory')}, from {chosen_steps} of"
            f" {counted(all_steps, 'step')}: the best and the worst of each, and random others;"
            f" {remedy}"
        )

    groups: dict[tuple[str, int, str], list[int]] = {}
    for number in sorted(chosen):
        fact = facts[number]
        groups.setdefault((fact.split, fact.step, fact.group), []).append(number)
    numbers: list[int] = []
    for members in groups.values():
        numbers += members
    return PageChoice(numbers=numbers, total=len(facts), notes=[*notes, *records.notes])


def _read_object(file: Path, notes: list[str]) -> dict[str, Any]:
    try:
        return read_json_object(file)
    except (OSError, ValueError) as error:
        notes.append(f"{file.name} cannot be read: {error}")
        return {}


MAX_TRAJECTORIES = 2000
_NOT_WRITTEN = "{file} could not be written ({reason}); choose another file with --out"
SCRIPTS = ("dom.js", "charts.js", "tokens.js", "browser.js", "main.js")
"""In order; each relies only on those before it."""
_ESCAPES = {ord(c): f"\\u{ord(c):04x}" for c in "<>&\u2028\u2029"}


def write_report(
    run: Path,
    out: Path | None = None,
    *,
    limit: int = MAX_TRAJECTORIES,
    decode: Decode | None = None,
) -> Path:
    """Write the report of a run folder, whether the run has finished, is going on or has failed.

    Args:
        out: the file to write; None means ``report.html`` in the run folder.
        limit: number of trajectories on the page, fewer where they are long (see
            :func:`~jax_agent_rl.observe.selection.choose`); 0 means all.
        decode: turns token ids into text; None loads the run's tokenizer.

    Returns:
        The file.

    Raises:
        ConfigError: ``limit`` is negative.
        DataError: not a run folder.
        StorageError: the file cannot be written.
    """
    return write_page(read_run(run), out or run / "report.html", limit=limit, decode=decode)


def write_page(
    data: RunData, file: Path, *, limit: int = MAX_TRAJECTORIES, decode: Decode | None = None
) -> Path:
    """Write the page of a run or a table to a file; for the arguments see :func:`write_report`."""
    if limit < 0:
        raise ConfigError(f"--limit {limit}: must be 0 (all trajectories) or more")
    make_folder(file.parent, message=_NOT_WRITTEN)
    with replacing(file, message=_NOT_WRITTEN) as stream:
        for piece in render_report(data, limit=limit, decode=decode):
            stream.write(piece.encode())
    return file


def render_report(data: RunData, *, limit: int = 0, decode: Decode | None = None) -> Iterator[str]:
    """Yield the page as pieces of HTML; without ``decode``, load the run's tokenizer.

    A trajectory is read, yielded and forgotten; only its part of the page's index stays in memory.
    """
    choice = choose_for_page(data.trajectories, limit)
    notes = [*data.notes, *choice.notes]
    for warning in data.summary.get("warnings", ()):
        if isinstance(warning, Mapping):
            advice = f"What to do: {warning.get('advice')}"
            notes.append(f"{warning.get('name')}: {warning.get('message')}. {advice}")

    if decode is None:
        decode = data.open_decoder(notes)
    vocabulary = Vocabulary(decode)
    prompts = Prompts(vocabulary)
    forest = Forest(decode)
    rows: list[list[Any]] = []

    def trajectories() -> Iterator[dict[str, Any]]:
        for record in data.trajectories.read(choice.numbers):
            rows.append(facts(record))
            forest.add(record)
            yield tokens(record, vocabulary, prompts)

    def index() -> dict[str, Any]:
        id_column = COLUMNS.index("id")
        numbers = {row[id_column]: number for number, row in enumerate(rows)}
        return {
            "run": _overview(data, total=choice.total),
            "notes": notes,
            "charts": charts(data.metrics),
            "zeros": zero_metrics(data.metrics),
            "timeline": timeline(data.metrics, data.traces, numbers),
            "columns": COLUMNS,
            "rows": rows,
            "forest": forest.trees(),
            "prompts": prompts.rows,
            "vocabulary": {"ids": vocabulary.ids, "texts": vocabulary.texts},
        }

    yield from page(title=f"{data.name} · jax-agent-rl", trajectories=trajectories(), index=index)


def _overview(data: RunData, *, total: int) -> dict[str, Any]:
    """Return the data of the page's head."""
    steps = [record for record in data.metrics if record["kind"] == "step"]
    evaluations = [record for record in data.metrics if record["kind"] == "evaluation"]
    configured_steps = config_value(data.config, "trainer", "steps")

    last_step = 0
    accounting: Mapping[str, Any] = {}
    if steps:
        last_step = steps[-1]["step"]
        accounting = steps[-1].get("accounting") or {}
    accounting_keys = ("started", "trained", "dropped", "in_flight")

    facts = {
        "model": Path(str(config_value(data.config, "model", "path") or "?")).name,
        "algorithm": config_value(data.config, "algorithm", "adv_estimator"),
        "trainer": config_value(data.config, "trainer", "mode"),
        "engine": config_value(data.config, "rollout", "backend"),
    }
    return {
        "name": data.name,
        "created": time.strftime("%Y-%m-%d %H:%M"),
        "state": "finished" if _has_ended(data.summary, steps) else "not finished",
        "facts": {key: value for key, value in facts.items() if value},
        "step": last_step,
        "steps": configured_steps if isinstance(configured_steps, int) else None,
        "reward": _first_and_last(steps, "reward_mean"),
        "accuracy": _first_and_last(evaluations, "accuracy"),
        "accounting": {key: accounting[key] for key in accounting_keys if key in accounting},
        "total": total,
    }


def _first_and_last(records: Sequence[Mapping[str, Any]], key: str) -> list[float] | None:
    """Return the first and the last number that records have under a key; None if none has one."""
    values = [record[key] for record in records if is_number(record.get(key))]
    if not values:
        return None
    return [values[0], values[-1]]


def to_json(value: Any) -> str:
    r"""Return JSON that is safe inside a script element.

    Halves of surrogate pairs become question marks.

    >>> to_json({"a": "</script>"})
    '{"a":"\\u003c/script\\u003e"}'
    """
    text = json.dumps(value, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    return replace_lone_surrogates(text).translate(_ESCAPES)


def _has_ended(summary: Mapping[str, Any], steps: Sequence[Mapping[str, Any]]) -> bool:
    """Return whether a run has ended.

    A run that was resumed with more steps keeps its earlier summary until its end.
    """
    if not summary:
        return False
    summary_steps = summary.get("steps")
    if not steps or not isinstance(summary_steps, int):
        return True
    return summary_steps == steps[-1]["step"]


def page(
    *, title: str, trajectories: Iterable[Mapping[str, Any]], index: Callable[[], Mapping[str, Any]]
) -> Iterator[str]:
    """Yield the HTML file in pieces.

    Args:
        trajectories: data that the page reads one by one; each is a line of a JSON array.
        index: returns the data that the page reads when it opens; called after the last trajectory.
    """
    page_dir = files("jax_agent_rl.observe.report") / "page"
    scripts = [(page_dir / name).read_text(encoding="utf-8") for name in SCRIPTS]
    script = '"use strict";\n(() => {\n' + "\n".join(scripts) + "\n})();\n"
    script_digest = hashlib.sha256(script.encode()).digest()
    style = (page_dir / "page.css").read_text(encoding="utf-8")
    template = (page_dir / "page.html").read_text(encoding="utf-8")

    # Functions, because of the order: the index exists only after the last trajectory.
    parts: dict[str, Callable[[], Iterable[str]]] = {
        "TITLE": lambda: [html.escape(title)],
        "SCRIPT_HASH": lambda: [base64.b64encode(script_digest).decode()],
        "STYLE": lambda: [style],
        "TRAJECTORIES": lambda: _json_lines(trajectories),
        "INDEX": lambda: [to_json(index())],
        "SCRIPT": lambda: [script],
    }
    # Not by str.replace: a value may contain a placeholder.
    beginning, *pieces = template.split("{{")
    yield beginning
    for piece in pieces:
        name, text = piece.split("}}", 1)
        yield from parts[name]()
        yield text


def _json_lines(values: Iterable[Mapping[str, Any]]) -> Iterator[str]:
    """Yield a JSON array with a line for each value."""
    separator = "[\n"
    for value in values:
        yield separator + to_json(value)
        separator = ",\n"
    yield "[\n\n]" if separator == "[\n" else "\n]"
