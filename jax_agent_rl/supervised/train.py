"""One run of ``jax-agent-rl sft`` or ``dpo``, from configuration to summary.

::

    rows ─► Encoder ─► batches of examples or pairs ─► gradient ─► AdamW ─► metrics, checkpoints
"""

from __future__ import annotations

import asyncio
import itertools
import math
import threading
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from jax_agent_rl.chat.codec import ChatCodec
from jax_agent_rl.config import LearnerConfig
from jax_agent_rl.config.commands import DpoConfig, SftConfig
from jax_agent_rl.data.cursor import DataCursor
from jax_agent_rl.learner.checkpoint import Checkpointer
from jax_agent_rl.learner.checkpoint_steps import complete_steps
from jax_agent_rl.learner.optimizer import learning_rate
from jax_agent_rl.learner.sequence_learner import AdamParams, SequenceLearner
from jax_agent_rl.learner.sequences import TrainingSequence
from jax_agent_rl.models.hf import load_hf
from jax_agent_rl.models.lora import describe_adapters
from jax_agent_rl.observe.progress import Progress, duration, print_line
from jax_agent_rl.observe.report.charts import loss_plot
from jax_agent_rl.observe.run_dir import RunDir, read_metrics
from jax_agent_rl.runtime.identity import RunIdentity, run_identity
from jax_agent_rl.runtime.policy import resolve_model
from jax_agent_rl.runtime.provenance import append_provenance
from jax_agent_rl.runtime.resume import Resumption, free_folder, newest_run, nothing_to_do
from jax_agent_rl.supervised.conversations import Encoder, Example, Pair
from jax_agent_rl.utils.shutdown import ExitWithin, Interruption
from jax_agent_rl.utils.text import counted

Metrics = dict[str, float]


@dataclass(frozen=True, kw_only=True)
class Sft:
    """Supervised fine-tuning: the mean cross-entropy of a batch's tokens with loss."""

    learner: SequenceLearner

    def step(self, batch: Sequence[Example]) -> Metrics:
        """Accumulate the gradient of a batch."""
        sequences = _sequences(batch)
        tokens = sum(sequence.num_scored for sequence in sequences)
        weighted = []
        for sequence in sequences:
            weight = np.full(sequence.num_scored, 1 / tokens)
            weighted.append(replace(sequence, weight=weight))
        result = self.learner.forward_backward(weighted)
        return {"loss": result.loss, "entropy": result.metrics["entropy"], **_counts(sequences)}

    def evaluate(self, examples: Sequence[Example]) -> Metrics:
        """Return the mean loss per token."""
        logprobs = np.concatenate(self.learner.forward(_sequences(examples)))
        return {"loss": -float(logprobs.mean())}


@dataclass(frozen=True, kw_only=True)
class Dpo:
    """Direct preference optimization: the mean loss of a batch's pairs.

    A pair's loss depends on its sequences' log-probs only. So its gradient is the gradient of
    the log-probs, weighted by the loss's derivatives, which a forward pass gives.

    References: Rafailov et al. 2023, arXiv 2305.18290; label smoothing: Mitchell 2023, cDPO.
    """

    learner: SequenceLearner
    beta: float
    label_smoothing: float

    def step(self, batch: Sequence[Pair]) -> Metrics:
        """Accumulate the gradient of a batch."""
        metrics, slopes = self._losses(batch)
        weighted = []
        for pair, slope in zip(batch, slopes, strict=True):
            for sign, example in ((1.0, pair.chosen), (-1.0, pair.rejected)):
                for sequence in example:
                    weight = np.full(sequence.num_scored, sign * slope / len(batch))
                    weighted.append(replace(sequence, weight=weight))
        self.learner.forward_backward(weighted)
        return metrics | _counts(weighted)

    def evaluate(self, pairs: Sequence[Pair]) -> Metrics:
        """Return the mean loss, and how often the chosen one has the higher reward."""
        metrics, _ = self._losses(pairs)
        return metrics

    def _losses(self, pairs: Sequence[Pair]) -> tuple[Metrics, np.ndarray]:
        """Return metrics, and minus the derivative of each pair's loss.

        The derivative is by the log-prob of the chosen example, float64 [N].
        """
        examples = []
        for pair in pairs:
            examples += [pair.chosen, pair.rejected]  # neighbours, as their prompts are shared
        rewards = self.beta * (self._logprobs(examples) - self._logprobs(examples, reference=True))
        chosen = rewards[::2]
        rejected = rewards[1::2]
        margin = chosen - rejected

        smoothing = self.label_smoothing
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
        token_logprobs = iter(self.learner.forward(_sequences(examples), reference=reference))
        logprobs = []
        for example in examples:
            logprob = 0.0
            for _ in example:
                logprob += next(token_logprobs).sum()
            logprobs.append(logprob)
        return np.array(logprobs)


def _sequences(examples: Sequence[Example]) -> list[TrainingSequence]:
    """Return the sequences of all examples, in order."""
    return list(itertools.chain.from_iterable(examples))


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
    """Train to the end, or until interrupted, and return the summary.

    The summary is also written to ``summary.json``.

    Args:
        config: of ``sft`` or ``dpo``; a number is added to its ``run_dir`` if that folder exists,
            unless resuming.
        resume: continue from the newest checkpoint.
        exit_within: as :func:`jax_agent_rl.runtime.train.train` calls it.
        accept_changes: keys that may differ from what the checkpoint was trained with, although
            they define it.

    Raises:
        asyncio.CancelledError: interrupted; a checkpoint of the last finished step exists.
        ConfigError, DataError, ModelError, CheckpointError: the user has to fix something.
        NonFiniteError: gradients were not finite in ``learner.max_nonfinite_steps`` steps in a row.
    """
    with Interruption(console.print, exit_within) as interruption:
        run_dir = Path(config.run_dir)
        folder = newest_run(run_dir) if resume else free_folder(run_dir)
        checkpoints = folder / "checkpoints"
        model = config.model.model_copy(update={"path": resolve_model(config.model.path)})
        config = config.model_copy(update={"run_dir": str(folder), "model": model})
        data = _read_data(config)
        if resume:
            ended = nothing_to_do(
                folder,
                complete_steps(checkpoints),
                data.steps,
                advice=_advice_to_go_on(config),
            )
            if ended is not None:
                print_line(console, ended.message)
                return ended.summary

        print_line(console, f"run folder: {folder}")
        cursor = DataCursor(data.rows, seed=config.seed)
        identity = run_identity(config, cursor.fingerprints)
        resumption = None
        if resume:
            resumption = Resumption(
                type(config), RunDir(folder), checkpoints, accepted=accept_changes
            )
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
        training = asyncio.ensure_future(asyncio.to_thread(run.run))
        try:
            await asyncio.shield(training)
        except asyncio.CancelledError:
            run.stopping.set()
            await training  # until the step in progress is saved
            interruption.saved(run.step)
            raise
        interruption.training_ended()
    return run.conclude()


@dataclass(frozen=True, kw_only=True)
class _Data:
    """What a run trains on.

    Attributes:
        rows: examples or pairs.
        heldout: examples or pairs; empty without ``data.eval``.
        row_count: number of rows to train on, repetitions counted.
        steps: number of their batches.
    """

    rows: Sequence[Any]
    heldout: Sequence[Any]
    row_count: int
    steps: int


def _read_data(config: SftConfig) -> _Data:
    """Read and encode the rows of a run.

    Raises:
        DataError, ModelError: the user has to fix something.
    """
    codec = ChatCodec.from_pretrained(
        config.model.path,
        tool_format=config.agent.tool_format,
        tool_prompt=config.agent.tool_prompt,
        template_kwargs=config.agent.chat_template_kwargs,
    )
    encoder = Encoder(codec=codec, config=config.data, pack_length=config.learner.pack_length)
    read = encoder.pairs if isinstance(config, DpoConfig) else encoder.examples
    rows = read(config.data.train)
    heldout = read(config.data.eval) if config.data.eval else []

    row_count = config.trainer.epochs * len(rows)
    steps = math.ceil(row_count / config.trainer.batch_size)
    if config.trainer.steps:
        steps = min(steps, config.trainer.steps)
    return _Data(rows=rows, heldout=heldout, row_count=row_count, steps=steps)


def _advice_to_go_on(config: SftConfig) -> str:
    """Say how a run that has ended goes on."""
    trainer = config.trainer
    limits = f"trainer.epochs={trainer.epochs}"
    if trainer.steps is not None:
        limits += f" or trainer.steps={trainer.steps}"
    return f"To go on, raise {limits}, whichever ends it"


class _Run:
    """A run in progress, whose rows are read.

    Args:
        folder: where results go.
        cursor: the order of the rows.
        resumption: None for a new run.
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
        if config.learner.lora is not None:
            print_line(console, describe_adapters(config.learner.lora, model))
        method: Any = Sft(learner=learner)
        if isinstance(config, DpoConfig):
            method = Dpo(
                learner=learner, beta=config.dpo.beta, label_smoothing=config.dpo.label_smoothing
            )

        self._config = config
        self._folder = folder
        self._console = console
        self._cursor = cursor
        self._identity = identity
        self._resumption = resumption
        self._learner = learner
        self._method = method
        self._heldout = data.heldout
        self._row_count = data.row_count
        self._steps = data.steps
        self._learning_rate = learning_rate(config.learner, self._steps)
        self.step = 0
        self.stopping = threading.Event()
        self._evaluated = 0  # step of the last evaluation
        self._checkpointer = Checkpointer(folder.checkpoints, keep=config.trainer.keep_checkpoints)

    def run(self) -> None:
        """Train until the last step or until told to stop, and save the last finished step."""
        trainer = self._config.trainer

        def is_due(every: int) -> bool:
            if self.step == self._steps:
                return True
            return every > 0 and self.step % every == 0

        with Progress(self._console, total_steps=self._steps) as self._progress:
            try:
                if self._resumption is not None:
                    self._restore(self._resumption)
                recorded = {
                    "command": type(self._method).__name__.lower(),
                    **self._config.model_dump(mode="json"),
                }
                self._folder.write_json(self._folder.config, recorded)
                append_provenance(self._folder.path, self._identity.content, step=self.step)
                if self._heldout and self._resumption is None:
                    self._evaluate()
                while self.step < self._steps and not self.stopping.is_set():
                    self._train_step()
                    if self._heldout and is_due(trainer.eval_every):
                        self._evaluate()
                    if is_due(trainer.checkpoint_every):
                        self._save()
                self._save()
            finally:
                self._checkpointer.close()

    def _train_step(self) -> None:
        """Compute the gradient of the next batch, apply it, and record both."""
        began = time.perf_counter()
        self._progress.phase(f"step {self.step + 1}")
        batch_size = self._config.trainer.batch_size
        remaining = self._row_count - self.step * batch_size
        batch = self._cursor.next_rows(min(batch_size, remaining))
        metrics = self._method.step(batch)

        section = self._config.learner
        applied = self._learner.optim_step(
            AdamParams(
                learning_rate=float(np.asarray(self._learning_rate(self.step))),
                beta1=section.adam_b1,
                beta2=section.adam_b2,
                eps=section.adam_eps,
                weight_decay=section.weight_decay,
                grad_clip_norm=section.max_grad_norm,
            )
        )
        self.step += 1

        seconds = time.perf_counter() - began
        tokens_per_second = metrics["batch_tokens"] / seconds
        line = {
            "kind": "step",
            "step": self.step,
            **metrics,
            "grad_norm": applied.norm,
            "learning_rate": applied.rate,
            "step_seconds": seconds,
            "learner_tokens_per_second": tokens_per_second,
        }
        # Checkpoints of this step and of later ones, if any, are of an earlier attempt.
        self._checkpointer.delete_newer(self.step - 1)
        self._folder.add_metrics(line)
        self._folder.finish_step(self.step)

        remaining_seconds = (self._steps - self.step) * seconds
        self._progress.print_line(
            f"{self.step:>4}/{self._steps}  {_format_metrics(line)}  gradient {applied.norm:.2f}  "
            f"{tokens_per_second:.0f} tokens/s  {duration(remaining_seconds)} left"
        )
        self._learner.require_finite(section.max_nonfinite_steps)

    def _evaluate(self) -> None:
        self._progress.phase(f"evaluation after step {self.step}")
        line = {"kind": "evaluation", "step": self.step, **self._method.evaluate(self._heldout)}
        self._folder.add_metrics(line)
        metrics = _format_metrics(line, names=("loss", "accuracy"))
        self._progress.print_line(f"  held-out rows after step {self.step}: {metrics}")
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

        losses = f"loss: {summary['loss_first']:.3f} -> {summary['loss_last']:.3f}"
        if evaluations:
            before = evaluations[0]["loss"]
            after = evaluations[-1]["loss"]
            losses += f", held-out {before:.3f} -> {after:.3f}"
        seconds = duration(summary["train_seconds"])
        lines = [
            f"{losses} after {counted(self.step, 'step')}, {seconds}",
            f"run folder: {self._folder.path}",
            f"loss plot:  {plot}",
            f"use it:     jax-agent-rl train CONFIG model.path={self._folder.path}",
        ]
        print_line(self._console, "\n".join(lines))
        return summary


def _format_metrics(
    line: Mapping[str, Any], names: Sequence[str] = ("loss", "accuracy", "reward_margin")
) -> str:
    """Return the metrics of these names that a line has, for people."""
    return "  ".join(f"{name} {line[name]:.3f}" for name in names if name in line)
