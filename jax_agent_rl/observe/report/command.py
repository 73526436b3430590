"""``jax-agent-rl report RUN``: data, style and scripts in one HTML file that loads nothing.

The output of models and tools is hostile here. It enters the page only as JSON inside script
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
from jax_agent_rl.errors import ConfigError, DataError, ModelError
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
from jax_agent_rl.validation import is_number, replace_lone_surrogates


@dataclass(frozen=True, kw_only=True)
class RunData:
    """The content of a run folder, or of a table of ``jax-agent-rl rollout``.

    Attributes:
        name: name of the folder or file.
        trajectories: its trajectories; they are read from there whenever somebody iterates over
            them.
        config: the resolved configuration; empty if unreadable.
        metrics: records of ``metrics.jsonl``.
        traces: the newest records of ``traces.jsonl``; see
            :mod:`jax_agent_rl.observe.sinks.traces`.
        summary: ``summary.json`` of a finished run.
        notes: messages about missing or unreadable parts, other than trajectories.
    """

    name: str
    trajectories: RecordSource
    config: dict[str, Any] = field(default_factory=dict)
    metrics: list[dict[str, Any]] = field(default_factory=list)
    traces: list[Mapping[str, Any]] = field(default_factory=list)
    summary: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


def read_run(run: Path) -> RunData:
    """Read a run folder, except for its trajectories.

    Raises:
        DataError: the folder holds neither metrics nor trajectories nor a configuration.
    """
    files = [run / name for name in ("config.json", "metrics.jsonl", "trajectories.jsonl")]
    if not any(file.is_file() for file in files):
        raise DataError(
            f"{run} is no run folder: it has no {', no '.join(file.name for file in files)}"
        )
    run_dir, notes = RunDir(run), []
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
    )
    for records in (metrics, traces):
        notes += records.notes
    return data


def config_value(config: Mapping[str, Any], section: str, key: str) -> Any:
    """Return a value of a configuration, or None.

    Args:
        config: the configuration as recorded, of any shape.
        section: name of the section.
        key: name of the key in it.
    """
    found = config.get(section)
    return found.get(key) if isinstance(found, Mapping) else None


def decoder(config: Mapping[str, Any], notes: list[str]) -> Decode:
    """Return the decoder of the run's tokenizer; if that is unreadable, add a note and show ids in brackets."""
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
        numbers: their places among all, in the page's order: members of a group follow each other.
        total: number of all trajectories.
        notes: what was left out, and how to get it.
    """

    numbers: Sequence[int]
    total: int
    notes: Sequence[str]


def choose_for_page(records: RecordSource, limit: int) -> PageChoice:
    """Read all trajectories once, and choose up to ``limit`` of them, see :func:`choose`; 0: all."""
    facts = FactTable(Fact.from_record(record) for record in records)
    places, is_full = choose(facts, limit)
    notes = []
    if len(places) < len(facts):
        steps = len({facts[place].step for place in places})
        more = (
            f"a page takes {MAX_TOKENS:,} tokens, --limit 0 shows all"
            if is_full
            else "--limit shows more"
        )
        notes.append(
            f"{len(places)} of {len(facts)} trajectories are shown, from {steps} of"
            f" {len({fact.step for fact in facts})} steps: the best and the worst of each, and"
            f" random others; {more}"
        )
    groups: dict[tuple[str, int, str], list[int]] = {}
    for place in sorted(places):
        fact = facts[place]
        groups.setdefault((fact.split, fact.step, fact.group), []).append(place)
    numbers = [place for members in groups.values() for place in members]
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
        run: the run folder.
        out: the file; None: ``report.html`` in the run folder.
        limit: number of trajectories on the page, fewer where they are long (see
            :func:`~jax_agent_rl.observe.selection.choose`); 0: all.
        decode: the text of ids, where the run's tokenizer is already loaded.

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

    A trajectory is read, yielded and forgotten; what the page's index says of it stays in memory.
    """
    choice = choose_for_page(data.trajectories, limit)
    notes = [*data.notes, *choice.notes]
    for warned in data.summary.get("warnings", ()):
        if isinstance(warned, Mapping):
            advice = f"What to do: {warned.get('advice')}"
            notes.append(f"{warned.get('name')}: {warned.get('message')}. {advice}")
    decode = decode or decoder(data.config, notes)
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
        places = {row[COLUMNS.index("id")]: place for place, row in enumerate(rows)}
        return {
            "run": _overview(data, total=choice.total),
            "notes": notes,
            "charts": charts(data.metrics),
            "zeros": zero_metrics(data.metrics),
            "timeline": timeline(data.metrics, data.traces, places),
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
    rewards = [r["reward_mean"] for r in steps if is_number(r.get("reward_mean"))]
    accuracies = [r["accuracy"] for r in evaluations if is_number(r.get("accuracy"))]
    accounting = (steps[-1].get("accounting") or {}) if steps else {}
    wanted = config_value(data.config, "trainer", "steps")
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
        "step": steps[-1]["step"] if steps else 0,
        "steps": wanted if isinstance(wanted, int) else None,
        "reward": [rewards[0], rewards[-1]] if rewards else None,
        "accuracy": [accuracies[0], accuracies[-1]] if accuracies else None,
        "accounting": {
            k: accounting[k]
            for k in ("started", "trained", "dropped", "in_flight")
            if k in accounting
        },
        "total": total,
    }


def to_json(value: Any) -> str:
    r"""Return JSON that is safe inside a script element; halves of surrogate pairs become question marks.

    >>> to_json({"a": "</script>"})
    '{"a":"\\u003c/script\\u003e"}'
    """
    text = json.dumps(value, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    return replace_lone_surrogates(text).translate(_ESCAPES)


def _has_ended(summary: Mapping[str, Any], steps: Sequence[Mapping[str, Any]]) -> bool:
    """Return whether a run has ended; the summary of a run that was resumed with more steps stays until its end."""
    recorded = summary.get("steps")
    if not summary or not steps or not isinstance(recorded, int):
        return bool(summary)
    return recorded == steps[-1]["step"]


def page(
    *, title: str, trajectories: Iterable[Mapping[str, Any]], index: Callable[[], Mapping[str, Any]]
) -> Iterator[str]:
    """Yield the HTML file in pieces.

    Args:
        title: title of the page.
        trajectories: data read one by one when looked at; each is a line of a JSON array.
        index: returns the data read when the page opens; called after the last trajectory.
    """
    page_dir = files("jax_agent_rl.observe.report") / "page"
    script = "\n".join((page_dir / name).read_text(encoding="utf-8") for name in SCRIPTS)
    script = f'"use strict";\n(() => {{\n{script}\n}})();\n'
    parts: dict[str, Callable[[], Iterable[str]]] = {
        "TITLE": lambda: [html.escape(title)],
        "SCRIPT_HASH": lambda: [
            base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
        ],
        "STYLE": lambda: [(page_dir / "page.css").read_text(encoding="utf-8")],
        "TRAJECTORIES": lambda: _json_lines(trajectories),
        "INDEX": lambda: [to_json(index())],
        "SCRIPT": lambda: [script],
    }
    first, *rest = (page_dir / "page.html").read_text(encoding="utf-8").split("{{")
    yield first  # no str.replace: a value may contain a placeholder
    for piece in rest:
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
