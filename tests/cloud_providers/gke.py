"""The parts of Kubernetes' API that Harbor's environment ``gke`` uses: pods, and commands in them.

A command's streams share one websocket; the first byte of each message says which stream it is of.
Images are built by the program ``gcloud``, of which there is one here that says it has done so.
"""

from __future__ import annotations

import asyncio
import json
import os
import shlex
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route, WebSocketRoute
from starlette.websockets import WebSocket, WebSocketDisconnect

from tests.cloud_providers.machine import CloudMachine, CloudServer, CommandResult
from tests.http_service import serve_apart

_STDOUT = b"\1"
_STDERR = b"\2"
_STATUS = b"\3"
_PROTOCOL = "v4.channel.k8s.io"
_POD = "/api/v1/namespaces/{namespace}/pods"


class GKEServer(CloudServer):
    """An async context manager, see :meth:`running`."""

    name = "gke"
    environment_options: Mapping[str, Any] = {
        "cluster_name": "cluster",
        "region": "europe-west4",
        "namespace": "sandboxes",
        "registry_location": "europe-west4",
        "registry_name": "images",
        "project_id": "project",
    }
    needs_dockerfile = True

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._pods: dict[str, str] = {}
        """Ids of machines by the names of pods."""
        self.app = Starlette(
            routes=[
                Route(_POD, self._create, methods=["POST"]),
                Route(_POD + "/{pod}", self._get, methods=["GET"]),
                Route(_POD + "/{pod}", self._delete, methods=["DELETE"]),
                WebSocketRoute(_POD + "/{pod}/exec", self._exec),
            ]
        )

    @asynccontextmanager
    async def running(self) -> AsyncIterator[Mapping[str, str]]:
        """Serve; yield the variables that lead the client of Kubernetes here."""
        self._folder.mkdir(parents=True, exist_ok=True)
        gcloud = self._folder / "gcloud"
        gcloud.write_text("#!/bin/sh\nexit 0\n")
        gcloud.chmod(0o755)
        async with serve_apart(self.app) as url:
            cluster = {"name": "c", "cluster": {"server": url}}
            context = {"name": "x", "context": {"cluster": "c", "user": "u"}}
            user = {"name": "u", "user": {"token": "key"}}
            kube_config = self._folder / "kube_config"
            kube_config.write_text(
                json.dumps(
                    {
                        "apiVersion": "v1",
                        "kind": "Config",
                        "clusters": [cluster],
                        "contexts": [context],
                        "users": [user],
                        "current-context": "x",
                    }
                )
            )
            yield {
                "KUBECONFIG": str(kube_config),
                "PATH": f"{self._folder}:{os.environ['PATH']}",
            }

    # --- pods -------------------------------------------------------------------------------------

    async def _create(self, request: Request) -> Response:
        self.create_requests += 1
        if self.create_status is not None:
            return _refusal(self.create_status, "the quota is exceeded")
        pod = await request.json()
        name = pod["metadata"]["name"]
        self._pods[name] = self.create(pod["metadata"]["labels"]).machine_id
        if not self.answers_creations:
            await asyncio.Event().wait()
        return JSONResponse(_described(name), status_code=201)

    async def _get(self, request: Request) -> Response:
        name = request.path_params["pod"]
        if self._machine(name) is None:
            return _refusal(404, f'pods "{name}" not found')
        return JSONResponse(_described(name))

    async def _delete(self, request: Request) -> Response:
        name = request.path_params["pod"]
        machine = self._machine(name)
        if machine is None:
            return _refusal(404, f'pods "{name}" not found')
        self.remove(machine.machine_id)
        return JSONResponse(_described(name))

    def _machine(self, pod: str, command: str = "") -> CloudMachine | None:
        """Return the machine of a pod, for a command; None if there is none."""
        return self.machine_for(self._pods.get(pod, ""), command)

    # --- commands ---------------------------------------------------------------------------------

    async def _exec(self, socket: WebSocket) -> None:
        name = socket.path_params["pod"]
        command = shlex.join(socket.query_params.getlist("command"))
        machine = self._machine(name, command)
        if machine is None:
            await socket.send_denial_response(_refusal(404, f'pods "{name}" not found'))
            return

        await socket.accept(subprotocol=_PROTOCOL)
        try:
            stdin = b""
            if socket.query_params.get("stdin", "").lower() == "true":
                # Harbor sends one archive, in one message; its first byte names the stream.
                stdin = (await socket.receive_bytes())[1:]
            result = await machine.run(command, stdin=stdin)
            for stream, output in ((_STDOUT, result.stdout), (_STDERR, result.stderr)):
                if output:
                    await socket.send_bytes(stream + output)
            await socket.send_bytes(_STATUS + json.dumps(_status(result)).encode())
            await socket.close()
        except WebSocketDisconnect:
            pass  # whoever asked has not waited


def _status(result: CommandResult) -> dict[str, Any]:
    if result.exit_code == 0:
        return {"kind": "Status", "status": "Success"}
    cause = {"reason": "ExitCode", "message": str(result.exit_code)}
    return {
        "kind": "Status",
        "status": "Failure",
        "reason": "NonZeroExitCode",
        "details": {"causes": [cause]},
    }


def _described(pod: str) -> dict[str, Any]:
    container = {
        "name": "main",
        "image": "image",
        "imageID": "image",
        "ready": True,
        "restartCount": 0,
        "state": {"running": {}},
    }
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": pod},
        "status": {"phase": "Running", "containerStatuses": [container]},
    }


def _refusal(status: int, message: str) -> Response:
    body = {"kind": "Status", "status": "Failure", "message": message, "code": status}
    if status == 404:
        body["reason"] = "NotFound"
    return JSONResponse(body, status_code=status)
