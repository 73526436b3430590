"""An engine behind a server, in a process of its own, for ``test_pull_transport``: a model folder,
and on how many devices.

Prints the server's address. With ``--dies``, the process ends when weights have arrived, before
they are served.
"""

import argparse
import asyncio
import os
from pathlib import Path

from jax_agent_rl.config import EngineMeshConfig
from jax_agent_rl.jetstream.backend import JetStreamBackend
from jax_agent_rl.jetstream.shapes import EngineShapes
from jax_agent_rl.jetstream.sharding import make_engine_mesh
from jax_agent_rl.models import offered
from jax_agent_rl.models.hf import load_hf
from jax_agent_rl.rollout.http.server import RolloutServer

SHAPES = EngineShapes(
    max_model_len=128,
    max_concurrent_decodes=2,
    kv_cache_tokens=512,
    decode_steps=4,
    prefill_buckets=(32,),
)


def die(array: object) -> str:
    os._exit(1)


async def serve(folder: Path, *, devices: int) -> None:
    model, params = load_hf(folder)
    backend = JetStreamBackend(
        model,
        params,
        SHAPES,
        mesh=make_engine_mesh(EngineMeshConfig(tensor=devices)),
        version=-1,
    )
    await backend.start()
    server = RolloutServer(backend, token=os.environ["ROLLOUT_TOKEN"])
    await server.start()
    print(server.url, flush=True)
    await asyncio.Event().wait()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--devices", type=int, default=1)
    parser.add_argument("--dies", action="store_true")
    options = parser.parse_args()
    if options.dies:
        offered.digest_of = die
    asyncio.run(serve(options.folder, devices=options.devices))


if __name__ == "__main__":
    main()
