"""One run of ``jax-agent-rl sft`` or ``dpo``, from configuration to summary.

::

    rows ─► Encoder ─► batches of examples or pairs ─► gradient ─► AdamW ─► metrics.jsonl, checkpoints
"""

from __future__ import annotations

import asyncio
import math
import threading
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from jax_agent_rl.chat.codec import ChatCodec
from jax_agent_rl.config import LearnerConfig
from jax_agent_rl.config.commands import DpoConfig, SftConfig
from jax_agent_rl.data.cursor import DataCursor
from jax_agent_rl.learner.batch import TrainingSequence
from jax_agent_rl.learner.checkpoint import Checkpointer
from jax_agent_rl.learner.checkpoint_steps import complete_steps
from jax_agent_rl.learner.optimizer import learning_rate
from jax_agent_rl.learner.sequence_learner import AdamParams, SequenceLearner
from jax_agent_rl.models.hf import load_hf
from jax_agent_rl.observe.progress import Progress, duration, print_line
from jax_agent_rl.observe.report.charts import loss_plot
from jax_agent_rl.observe.run_dir import RunDir, read_metrics
from jax_agent_rl.runtime.identity import Resumption, RunIdentity, run_identity
from jax_agent_rl.runtime.policy import resolve_model
from jax_agent_rl.runtime.train import free_folder, newest_run, nothing_to_do
from jax_agent_rl.supervised.conversations import Encoder, Example, Pair
from jax_agent_rl.utils.process import ExitWithin, Interruption
from jax_agent_rl.utils.text import counted

Metrics = dict[str, float]


@dataclass(frozen=True, kw_only=True)
class Sft:
    """Supervised fine-tuning: the mean cross-entropy of a batch's tokens with loss."""

    learner: SequenceLearner

    def step(self, batch: Sequence[Example]) -> Metrics:
        """Accumulate the gradient of a batch."""
        sequences = [sequence for example in batch for sequence in example]
        tokens = sum(sequence.num_scored for sequence in sequences)
        weighted = [replace(s, weight=np.full(s.num_scored, 1 / tokens)) for s in sequences]
        result = self.learner.forward_backward(weighted)
        return {"loss": result.loss, "entropy": result.metrics["entropy"], **_counts(sequences)}

    def evaluate(self, examples: Sequence[Example]) -> Metrics:
        """Return the mean loss per token."""
        logprobs = np.concatenate(
            self.learner.forward([sequence for example in examples for sequence in example])
        )
        return {"loss": -float(logprobs.mean())}


@dataclass(frozen=True, kw_only=True)
class Dpo:
    """Direct preference optimization: the mean loss of a batch's pairs.

    A pair's loss depends on its sequences' log-probs only, so its gradient is that of log-probs
    weighted by the loss's derivatives, which take a forward pass to know.

    References: Rafailov et al. 2023, arXiv 2305.18290; label smoothing: Mitchell 2023, cDPO.
    """

    learner: SequenceLearner
    beta: float
    label_smoothing: float

    def step(self, batch: Sequence[Pair]) -> Metrics:
        """Accumulate the gradient of a batch."""
        metrics, slopes = self._losses(batch)
        weighted = [
            replace(sequence, weight=np.full(sequence.num_scored, sign * slope / len(batch)))
            for pair, slope in zip(batch, slopes, strict=True)
            for sign, example in ((1.0, pair.chosen), (-1.0, pair.rejected))
            for sequence in example
        ]
        self.learner.forward_backward(weighted)
        return metrics | _counts(weighted)

    def evaluate(self, pairs: Sequence[Pair]) -> Metrics:
        """Return the mean loss, and how often the chosen one has the higher reward."""
        return self._losses(pairs)[0]

    def _losses(self, pairs: Sequence[Pair]) -> tuple[Metrics, np.ndarray]:
        """Return metrics, and of each pair minus the loss's derivative by the log-prob of what was chosen."""
        examples = [
            example for pair in pairs for example in (pair.chosen, pair.rejected)
        ]  # their prompts are shared
        rewards = self.beta * (self._logprobs(examples) - self._logprobs(examples, reference=True))
        chosen, rejected = rewards[::2], rewards[1::2]
        margin, smoothing = chosen - rejected, self.label_smoothing
        losses = (1 - smoothing) * np.logaddexp(0, -margin) + smoothing * np.logaddexp(0, margin)
        slopes = self.beta * (
            (1 - smoothing) / (1 + np.exp(margin)) - smoothing / (1 + np.exp(-margin))
        )
        metrics = {
            "loss": float(losses.mean()),
            "accuracy": float((margin > 0).mean()),
            "reward_margin": float(margin.mean()),
            "reward_chosen": float(chosen.mean()),
            "reward_rejected": float(rejected.mean()),
        }
        return metrics, slopes

    def _logprobs(self, examples: Sequence[Example], *, reference: bool = False) -> np.ndarray:
        """Return the log-prob of each example, float64 [N]."""
        scored = iter(
            self.learner.forward([s for example in examples for s in example], reference=reference)
        )
        return np.array([sum(next(scored).sum() for _ in example) for example in examples])


def _counts(sequences: Sequence[TrainingSequence]) -> Metrics:
    return {
        "trained_tokens": sum(sequence.num_scored for sequence in sequences),
        "batch_tokens": sum(len(sequence.token_ids) for sequence in sequences),
    }


async def train(
    config: SftConfig,
    *,
    resume: bool,
    console: Console,
    exit_within: ExitWithin,
    accept_changes: Collection[str] = (),
) -> dict[str, Any]:
    """Train to the end, or until interrupted, and return the summary, which is also written to ``summary.json``.

    Args:
        config: of ``sft`` or ``dpo``; a number is added to its ``run_dir`` if that folder exists,
            unless resuming.
        resume: continue from the newest checkpoint.
        console: shows progress and results.
        exit_within: as :func:`jax_agent_rl.runtime.train.train` calls it.
        accept_changes: keys that may differ from what the checkpoint was trained with, although
            they define it.

    Raises:
        asyncio.CancelledError: interrupted; a checkpoint of the last finished step exists.
        ConfigError, DataError, ModelError, CheckpointError: the user has to fix something.
        NonFiniteError: gradients were not finite in ``learner.max_nonfinite_steps`` steps in a row.
    """
    with Interruption(console.print, exit_within) as interruption:
        wanted = Path(config.run_dir)
        folder = newest_run(wanted) if resume else free_folder(wanted)
        start = config.model.model_copy(update={"path": resolve_model(config.model.path)})
        config = config.model_copy(update={"run_dir": str(folder), "model": start})
        data = _read(config)
        if resume:
            done = nothing_to_do(
                folder, complete_steps(folder / "checkpoints"), data.steps, advice=_further(config)
            )
            if done is not None:
                print_line(console, done.message)
                return done.summary
        print_line(console, f"run folder: {folder}")
        cursor = DataCursor(data.rows, seed=config.seed)
        identity = run_identity(config, cursor.fingerprints)
        resumption = None
        if resume:
            place = folder / "checkpoints"
            resumption = Resumption(type(config), RunDir(folder), place, accepted=accept_changes)
            resumption.check(identity)
        run = _Run(
            config,
            data,
            RunDir(folder),
            console,
            cursor=cursor,
            identity=identity,
            resumption=resumption,
        )
        interruption.training_begins()
        work = asyncio.ensure_future(asyncio.to_thread(run.run))
        try:
            await asyncio.shield(work)
        except asyncio.CancelledError:
            run.stopping.set()
            await work
            interruption.saved(run.step)
            raise
        interruption.training_ended()
    return run.conclude()


@dataclass(frozen=True, kw_only=True)
class _Data:
    """What a run trains on.

    Attributes:
        rows: examples or pairs.
        heldout: likewise; empty without ``data.eval``.
        last_row: number of rows to train on, repetitions counted.
        steps: number of batches of them.
    """

    rows: Sequence[Any]
    heldout: Sequence[Any]
    last_row: int
    steps: int


def _read(config: SftConfig) -> _Data:
    """Read and encode the rows of a run; raise DataError or ModelError."""
    codec = ChatCodec.from_pretrained(
        config.model.path,
        tool_format=config.agent.tool_format,
        tool_prompt=config.agent.tool_prompt,
        template_kwargs=config.agent.chat_template_kwargs,
    )
    encoder = Encoder(codec=codec, config=config.data, longest=config.learner.pack_length)
    read = encoder.pairs if isinstance(config, DpoConfig) else encoder.examples
    rows = read(config.data.train)
    last_row = config.trainer.epochs * len(rows)
    steps = math.ceil(last_row / config.trainer.batch_size)
    return _Data(
        rows=rows,
        heldout=read(config.data.eval) if config.data.eval else [],
        last_row=last_row,
        steps=min(steps, config.trainer.steps or steps),
    )


def _further(config: SftConfig) -> str:
    """Say how a run that has ended goes on."""
    trainer = config.trainer
    limits = f"trainer.epochs={trainer.epochs}"
    if trainer.steps is not None:
        limits += f" or trainer.steps={trainer.steps}"
    return f"To go on, raise {limits}, whichever ends it"


class _Run:
    """A run in progress, whose rows are read.

    Args:
        config: the resolved configuration.
        data: its rows.
        folder: where results go.
        console: shows progress and results.
        cursor: the order of its rows.
        identity: what it is of.
        resumption: what it resumes from; None for a new run.
    """

    def __init__(
        self,
        config: SftConfig,
        data: _Data,
        folder: RunDir,
        console: Console,
        *,
        cursor: DataCursor[Any],
        identity: RunIdentity,
        resumption: Resumption | None,
    ) -> None:
        model, params = load_hf(config.model.path)
        learner_config = LearnerConfig(**dict(config.learner))
        learner = SequenceLearner(
            model, params, config=learner_config, reference=isinstance(config, DpoConfig)
        )
        method: Any = Sft(learner=learner)
        if isinstance(config, DpoConfig):
            method = Dpo(
                learner=learner, beta=config.dpo.beta, label_smoothing=config.dpo.label_smoothing
            )
        self._cursor, self._identity, self._resumption = cursor, identity, resumption
        self._config, self._folder, self._console = config, folder, console
        self._learner, self._method, self._heldout = learner, method, data.heldout
        self.stopping = threading.Event()
        self._last_row = data.last_row
        self._steps = data.steps
        self._rate = learning_rate(config.learner, self._steps)
        self.step = self._evaluated = 0
        self._checkpointer = Checkpointer(folder.checkpoints, keep=config.trainer.keep_checkpoints)

    def run(self) -> None:
        """Train until the last step, or until it is told to stop; the last finished step is saved."""
        trainer = self._config.trainer

        def due(every: int) -> bool:
            return self.step == self._steps or bool(every) and self.step % every == 0

        with Progress(self._console, total_steps=self._steps) as self._progress:
            try:
                if self._resumption is not None:
                    self._restore(self._resumption)
                recorded = {
                    "command": type(self._method).__name__.lower(),
                    **self._config.model_dump(mode="json"),
                }
                self._folder.write_json(self._folder.config, recorded)
                if self._heldout and self._resumption is None:
                    self._evaluate()
                while self.step < self._steps and not self.stopping.is_set():
                    self._train_step()
                    if self._heldout and due(trainer.eval_every):
                        self._evaluate()
                    if due(trainer.checkpoint_every):
                        self._save()
                self._save()
            finally:
                self._checkpointer.close()

    def _train_step(self) -> None:
        """Compute the gradient of the next batch, apply it, and record both."""
        began = time.perf_counter()
        self._progress.phase(f"step {self.step + 1}")
        batch_size = self._config.trainer.batch_size
        batch = self._cursor.next_rows(min(batch_size, self._last_row - self.step * batch_size))
        metrics = self._method.step(batch)
        section = self._config.learner
        applied = self._learner.optim_step(
            AdamParams(
                learning_rate=float(np.asarray(self._rate(self.step))),
                beta1=section.adam_b1,
                beta2=section.adam_b2,
                eps=section.adam_eps,
                weight_decay=section.weight_decay,
                grad_clip_norm=section.max_grad_norm,
            )
        )
        self.step += 1
        seconds = time.perf_counter() - began
        line = {
            "kind": "step",
            "step": self.step,
            **metrics,
            "grad_norm": applied.norm,
            "learning_rate": applied.rate,
        }
        line |= {
            "step_seconds": seconds,
            "learner_tokens_per_second": metrics["batch_tokens"] / seconds,
        }
        self._checkpointer.delete_newer(self.step - 1)
        self._folder.add_metrics(line)
        self._folder.finish_step(self.step)
        left = (self._steps - self.step) * seconds
        shown = "  ".join(
            f"{name} {line[name]:.3f}"
            for name in ("loss", "accuracy", "reward_margin")
            if name in line
        )
        self._progress.print_line(
            f"{self.step:>4}/{self._steps}  {shown}  gradient {applied.norm:.2f}  "
            f"{line['learner_tokens_per_second']:.0f} tokens/s  {duration(left)} left"
        )
        self._learner.require_finite(section.max_nonfinite_steps)

    def _evaluate(self) -> None:
        self._progress.phase(f"evaluation after step {self.step}")
        line = {"kind": "evaluation", "step": self.step, **self._method.evaluate(self._heldout)}
        self._folder.add_metrics(line)
        shown = "  ".join(
            f"{name} {line[name]:.3f}" for name in ("loss", "accuracy") if name in line
        )
        self._progress.print_line(f"  held-out rows after step {self.step}: {shown}")
        self._evaluated = self.step

    def _save(self) -> None:
        notes = {
            "step": self.step,
            "evaluated": self._evaluated,
            "cursor": self._cursor.state(),
            "identity": self._identity.to_json(),
        }
        self._checkpointer.save(self.step, self._learner.state, notes)

    def _restore(self, resumption: Resumption) -> None:
        self.step, self._learner.state, notes = self._checkpointer.restore(
            self._learner.state, step=resumption.step
        )
        self._cursor.restore(notes["cursor"], accepted=resumption.accepted)
        self._evaluated = notes["evaluated"]
        self._folder.resume_after(self.step)
        resumption.record_changes()
        self._progress.resumed(self.step)

    def conclude(self) -> dict[str, Any]:
        """Write the summary and the plot, and print the main results."""
        self._folder.finish_step(self.step)
        metrics = list(read_metrics(self._folder.metrics))
        steps = [line for line in metrics if line["kind"] == "step"]
        evaluations = [line for line in metrics if line["kind"] == "evaluation"]
        summary: dict[str, Any] = {
            "steps": self.step,
            "loss_first": steps[0]["loss"],
            "loss_last": steps[-1]["loss"],
            "train_seconds": sum(line["step_seconds"] for line in steps),
            "trained_tokens": sum(line["trained_tokens"] for line in steps),
        }
        if evaluations:
            summary |= {
                "heldout_before": evaluations[0]["loss"],
                "heldout_after": evaluations[-1]["loss"],
            }
        self._folder.write_json(self._folder.summary, summary)
        plot = self._folder.path / "loss.png"
        loss_plot(metrics, plot, title=self._folder.path.name)
        heldout = (
            f", held-out {evaluations[0]['loss']:.3f} -> {evaluations[-1]['loss']:.3f}"
            if evaluations
            else ""
        )
        print_line(
            self._console,
            f"loss: {summary['loss_first']:.3f} -> {summary['loss_last']:.3f}{heldout} "
            f"after {counted(self.step, 'step')}, {duration(summary['train_seconds'])}\n"
            f"run folder: {self._folder.path}\nloss plot:  {plot}\n"
            f"use it:     jax-agent-rl train CONFIG model.path={self._folder.path}",
        )
        return summary
