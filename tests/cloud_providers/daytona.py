"""The parts of Daytona's API that Harbor uses: sandboxes, and the toolbox in each."""

from __future__ import annotations

import asyncio
import json
import uuid
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.datastructures import UploadFile
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from tests.cloud_providers.machine import CloudMachine, CloudServer, CommandResult
from tests.http_service import serve

_BOUNDARY = "files-of-a-sandbox"


class DaytonaServer(CloudServer):
    """An async context manager, see :meth:`running`."""

    name = "daytona"
    environment_options: Mapping[str, Any] = {}

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._url = ""
        self._results: dict[str, asyncio.Task[CommandResult]] = {}
        toolbox = "/toolbox/{machine_id}"
        session = f"{toolbox}/process/session"
        command = session + "/{session_id}/command/{command_id}"
        self.app = Starlette(
            routes=[
                Route("/api/sandbox", self._create, methods=["POST"]),
                Route("/api/sandbox", self._list, methods=["GET"]),
                Route("/api/sandbox/{machine_id}", self._get, methods=["GET"]),
                Route("/api/sandbox/{machine_id}", self._delete, methods=["DELETE"]),
                Route(session, self._open_session, methods=["POST"]),
                Route(session + "/{session_id}/exec", self._exec, methods=["POST"]),
                Route(command, self._command, methods=["GET"]),
                Route(command + "/logs", self._logs, methods=["GET"]),
                Route(f"{toolbox}/files/bulk-upload", self._upload, methods=["POST"]),
                Route(f"{toolbox}/files/bulk-download", self._download, methods=["POST"]),
            ]
        )

    @asynccontextmanager
    async def running(self) -> AsyncIterator[Mapping[str, str]]:
        """Serve; yield the variables that lead Daytona's SDK here."""
        async with serve(self.app) as url:
            self._url = url
            yield {"DAYTONA_API_URL": f"{url}/api", "DAYTONA_API_KEY": "key"}
        for task in self._results.values():
            task.cancel()

    # --- sandboxes --------------------------------------------------------------------------------

    async def _create(self, request: Request) -> Response:
        self.create_requests += 1
        if self.create_status is not None:
            return _refusal(self.create_status, f"refused with {self.create_status}")
        body = await request.json()
        machine = self.create(body["labels"])
        if not self.answers_creations:
            await asyncio.Event().wait()
        return JSONResponse(self._described(machine))

    async def _list(self, request: Request) -> Response:
        wanted = json.loads(request.query_params.get("labels", "{}"))
        items = []
        for machine in self.machines.values():
            if wanted.items() <= machine.labels.items():
                items.append(self._described(machine))
        return JSONResponse({"items": items, "nextCursor": None})

    async def _get(self, request: Request) -> Response:
        machine = self.machines.get(request.path_params["machine_id"])
        if machine is None:
            return _refusal(404, "Sandbox not found")
        return JSONResponse(self._described(machine))

    async def _delete(self, request: Request) -> Response:
        machine = self.machines.get(request.path_params["machine_id"])
        if machine is None:
            return _refusal(404, "Sandbox not found")
        self.remove(machine.machine_id)
        return JSONResponse({**self._described(machine), "state": "destroyed"})

    def _described(self, machine: CloudMachine) -> dict[str, Any]:
        return {
            "id": machine.machine_id,
            "organizationId": "organization",
            "name": machine.machine_id,
            "user": "root",
            "env": {},
            "labels": machine.labels,
            "public": False,
            "networkBlockAll": False,
            "kvm": False,
            "target": "eu",
            "cpu": 1,
            "gpu": 0,
            "memory": 1,
            "disk": 3,
            "state": "started",
            "toolboxProxyUrl": f"{self._url}/toolbox",
        }

    # --- commands ---------------------------------------------------------------------------------

    async def _open_session(self, request: Request) -> Response:
        if request.path_params["machine_id"] not in self.machines:
            return _refusal(404, "Sandbox not found")
        return JSONResponse({}, status_code=201)

    async def _exec(self, request: Request) -> Response:
        body = await request.json()
        machine = self.machine_for(request.path_params["machine_id"], body["command"])
        if machine is None:
            return _refusal(404, "Sandbox not found")
        command_id = uuid.uuid4().hex
        self._results[command_id] = asyncio.create_task(machine.run(body["command"]))
        return JSONResponse({"cmdId": command_id}, status_code=202)

    async def _command(self, request: Request) -> Response:
        command_id = request.path_params["command_id"]
        description: dict[str, Any] = {"id": command_id, "command": ""}
        done, _ = await asyncio.wait({self._results[command_id]}, timeout=0.5)
        if done:
            description["exitCode"] = self._results[command_id].result().exit_code
        return JSONResponse(description)

    async def _logs(self, request: Request) -> Response:
        result = self._results[request.path_params["command_id"]].result()
        stdout = result.stdout.decode()
        stderr = result.stderr.decode()
        return JSONResponse({"output": stdout + stderr, "stdout": stdout, "stderr": stderr})

    # --- files ------------------------------------------------------------------------------------

    async def _upload(self, request: Request) -> Response:
        machine = self.machines.get(request.path_params["machine_id"])
        if machine is None:
            return _refusal(404, "Sandbox not found")
        async with request.form() as form:
            for name, field in form.items():
                if isinstance(field, UploadFile):
                    path = form[name.replace(".file", ".path")]
                    machine.write(str(path), await field.read())
        return JSONResponse({})

    async def _download(self, request: Request) -> Response:
        machine = self.machines.get(request.path_params["machine_id"])
        if machine is None:
            return _refusal(404, "Sandbox not found")
        parts = []
        for path in (await request.json())["paths"]:
            data = machine.read(path)
            name = "file"
            if data is None:
                name = "error"
                data = b"file not found"
            parts.append(
                f"--{_BOUNDARY}\r\n"
                f'Content-Disposition: form-data; name="{name}"; filename="{path}"\r\n'
                "Content-Type: application/octet-stream\r\n\r\n".encode()
                + data
                + b"\r\n"
            )
        content = b"".join(parts) + f"--{_BOUNDARY}--\r\n".encode()
        return Response(content, media_type=f"multipart/form-data; boundary={_BOUNDARY}")


def _refusal(status: int, message: str) -> Response:
    return JSONResponse({"statusCode": status, "message": message}, status_code=status)
