"""TensorBoard, in ``<run folder>/tensorboard``: ``tensorboard --logdir runs``."""

from __future__ import annotations

from collections.abc import Mapping

import yaml
from tensorboardX import SummaryWriter

from jax_agent_rl.observe.sinks.base import RunFacts

FLUSH_SECONDS = 10


class TensorBoardSink:
    """Event files. Those of a resumed run tell TensorBoard to forget what was logged after its step."""

    _writer: SummaryWriter | None = None

    def open(self, run: RunFacts) -> Mapping[str, str]:
        folder = run.folder / "tensorboard"
        resumes = run.identity is not None
        writer = SummaryWriter(
            str(folder),
            flush_secs=FLUSH_SECONDS,
            purge_step=run.step + 1 if resumes else None,
            filename_suffix=f".{run.step}",  # its names are of a second, and a file of that second would be replaced
        )
        self._writer = writer
        if not resumes:
            writer.add_text("config", f"```yaml\n{yaml.safe_dump(dict(run.config), sort_keys=False)}```", 0)
        return {"folder": folder.name}

    def log(self, values: Mapping[str, float], *, step: int) -> None:
        assert self._writer is not None
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
