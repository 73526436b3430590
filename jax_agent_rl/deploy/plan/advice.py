"""What to change in a configuration that does not fit: keys, by what fills the chip."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from jax_agent_rl.config import Config, build
from jax_agent_rl.deploy.plan.engine_programs import CACHE, WEIGHTS
from jax_agent_rl.deploy.plan.estimate import estimate
from jax_agent_rl.deploy.plan.layouts import changes, laid_out, learner_meshes
from jax_agent_rl.deploy.plan.plan import BATCH, TEMPORARIES, Load
from jax_agent_rl.deploy.plan.topology import Slice
from jax_agent_rl.errors import ConfigError
from jax_agent_rl.models.config import DecoderConfig
from jax_agent_rl.models.mesh import Device
from jax_agent_rl.runtime.engines import engine_shapes

SHOWN = 3


@dataclass(frozen=True, kw_only=True)
class Adviser:
    """Knows what a run may be changed to: nothing is proposed that the planner would refuse.

    Attributes:
        devices: of the slice.
    """

    config: Config
    model: DecoderConfig
    slice: Slice
    devices: Sequence[Device]

    def advice(self, load: Load) -> list[str]:
        """Return overrides to try, those first that act on most of the chip's memory.

        Args:
            load: of a program that does not fit.
        """
        found: list[str] = []
        for part in sorted(load.parts, key=lambda name: load.parts[name], reverse=True):
            found += [hint for hint in self._hints(load, part) if hint not in found]
        found += [hint for hint in (*self._with_adapters(), self._larger()) if hint not in found]
        return found[:SHOWN]

    def _hints(self, load: Load, part: str) -> Iterator[str]:
        config, engine = self.config, part in (WEIGHTS, CACHE)
        if engine and load.program.phase == "learner" and config.rollout.placement == "colocated":
            if config.trainer.mode == "sync" and not config.rollout.sleep_during_update:
                yield "rollout.sleep_during_update=true"
        if part == CACHE or (part in (BATCH, TEMPORARIES) and load.program.phase == "rollout"):
            yield from self._of_cache()
        elif part == WEIGHTS:
            yield from self._of_engine()
        elif part == TEMPORARIES:
            yield from self._of_activations()
        else:
            yield from self._of_parameters()

    def _of_cache(self) -> Iterator[str]:
        """Yield overrides of the contexts that an engine keeps."""
        shapes = engine_shapes(self.config)
        if shapes.kv_cache_tokens > shapes.max_model_len:
            half = max(shapes.max_model_len, shapes.kv_cache_tokens // 2)
            yield from self._accepted(f"rollout.jetstream.kv_cache_tokens={half}")
        if (slots := shapes.max_concurrent_decodes) > 1:
            yield from self._accepted(f"rollout.jetstream.max_concurrent_decodes={slots // 2}")
        yield from self._of_engine()
        yield f"rollout.max_model_len below {self.config.rollout.max_model_len}"

    def _of_engine(self) -> Iterator[str]:
        engine = self.config.rollout.jetstream
        if engine.dtype == "float32":
            yield from self._accepted("rollout.jetstream.dtype=bfloat16")
        yield from self._accepted(f"rollout.jetstream.mesh.tensor={engine.mesh.tensor * 2}")

    def _of_activations(self) -> Iterator[str]:
        learner = self.config.learner
        if learner.remat != "full":
            yield from self._accepted("learner.remat=full")
        if learner.compute_dtype == "float32":
            yield from self._accepted("learner.compute_dtype=bfloat16")
        if learner.micro_batch_size > 1:
            yield from self._accepted(f"learner.micro_batch_size={learner.micro_batch_size // 2}")
        need = self.config.agent.max_prompt_length + self.config.agent.max_response_length
        if learner.pack_length > need:
            yield from self._accepted(f"learner.pack_length={max(need, learner.pack_length // 2)}")
        yield from self._of_mesh()

    def _of_parameters(self) -> Iterator[str]:
        yield from self._of_mesh()
        yield from self._with_adapters()
        yield self._larger()

    def _of_mesh(self) -> Iterator[str]:
        """Yield the slice's learner mesh that takes least memory, if it takes less than the configured one."""
        least, best = self._estimated(self.config), None
        for choice in learner_meshes(self.config, self.model, self.slice):
            change = changes(self.config, choice)
            if (made := self._changed(change)) is not None and (total := self._estimated(made)) < least:
                least, best = total, " ".join(change)
        if best is not None:
            yield best

    def _with_adapters(self) -> Iterator[str]:
        if self.config.learner.lora is None:
            yield from self._accepted("learner.lora.rank=16")

    def _larger(self) -> str:
        larger = self.slice.larger
        return f"a larger --topology, as {larger.name}" if larger else "a larger --topology"

    def _accepted(self, override: str) -> Iterator[str]:
        if self._changed([override]) is not None:
            yield override

    def _changed(self, overrides: Sequence[str]) -> Config | None:
        """Return the configuration with these overrides; None if it would be refused."""
        try:
            made = build(self.config.model_dump(mode="json", exclude_unset=True), overrides)
            laid_out(made, self.model, self.devices)
        except ConfigError:
            return None
        return made

    def _estimated(self, config: Config) -> float:
        return estimate(config, self.model, self.slice.chip, engines=1).total
