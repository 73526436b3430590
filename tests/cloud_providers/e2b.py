"""The parts of E2B's API that Harbor uses: sandboxes, and the daemon in each.

The daemon's RPC is served by the classes that E2B's package generates from its protocol.
"""

# pyright: reportMissingImports=false
# E2B is in Harbor's environment (launch/harbor_environment.sh).

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from connectrpc.code import Code
from connectrpc.errors import ConnectError
from e2b.envd.process.process_connect import Process, ProcessASGIApplication
from e2b.envd.process.process_pb import ProcessEvent, StartRequest, StartResponse
from protobuf import Oneof
from starlette.applications import Starlette
from starlette.datastructures import UploadFile
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Mount, Route

from tests.cloud_providers.machine import CloudServer
from tests.http_service import serve

_MACHINE_HEADER = "e2b-sandbox-id"


class E2BServer(CloudServer):
    """An async context manager, see :meth:`running`."""

    name = "e2b"
    environment_options: Mapping[str, Any] = {"prebuilt_template_id": "debian"}

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        processes = ProcessASGIApplication(_Processes(self))
        self.app = Starlette(
            routes=[
                Route("/v2/sandboxes", self._create, methods=["POST"]),
                Route("/sandboxes/{machine_id}", self._delete, methods=["DELETE"]),
                Route("/sandboxes/{machine_id}/timeout", self._renew, methods=["POST"]),
                Route("/files", self._upload, methods=["POST"]),
                Route("/files", self._download, methods=["GET"]),
                Mount("/", app=processes),
            ]
        )

    @asynccontextmanager
    async def running(self) -> AsyncIterator[Mapping[str, str]]:
        """Serve; yield the variables that lead E2B's SDK here."""
        async with serve(self.app) as url:
            yield {
                "E2B_API_URL": url,
                "E2B_SANDBOX_URL": url,
                "E2B_API_KEY": "e2b_" + "0" * 40,
                "E2B_HTTP_VERSION": "1.1",
            }

    # --- sandboxes --------------------------------------------------------------------------------

    async def _create(self, request: Request) -> Response:
        self.create_requests += 1
        if self.create_status is not None:
            return _refusal(self.create_status, "too many sandboxes")
        if not self.answers_creations:
            await asyncio.Event().wait()
        body = await request.json()
        machine = self.create(body["metadata"])
        description = {
            "templateID": body["templateID"],
            "sandboxID": machine.machine_id,
            "clientID": "client",
            "envdVersion": "0.5.8",
        }
        return JSONResponse(description, status_code=201)

    async def _delete(self, request: Request) -> Response:
        machine_id = request.path_params["machine_id"]
        if machine_id not in self.machines:
            return _refusal(404, "the sandbox was not found")
        self.remove(machine_id)
        return Response(status_code=204)

    async def _renew(self, request: Request) -> Response:
        if request.path_params["machine_id"] not in self.machines:
            return _refusal(404, "the sandbox was not found")
        return Response(status_code=204)

    # --- files ------------------------------------------------------------------------------------

    async def _upload(self, request: Request) -> Response:
        machine = self.machines.get(request.headers[_MACHINE_HEADER])
        if machine is None:
            return _refusal(502, "the sandbox was not found")
        written = []
        if request.headers["content-type"] == "application/octet-stream":
            path = request.query_params["path"]
            machine.write(path, await request.body())
            written.append({"name": Path(path).name, "path": path, "type": "file"})
        else:
            async with request.form() as form:
                for field in form.values():
                    if isinstance(field, UploadFile):
                        path = request.query_params.get("path") or field.filename
                        assert path is not None
                        machine.write(path, await field.read())
                        written.append({"name": Path(path).name, "path": path, "type": "file"})
        return JSONResponse(written)

    async def _download(self, request: Request) -> Response:
        machine = self.machines.get(request.headers[_MACHINE_HEADER])
        if machine is None:
            return _refusal(502, "the sandbox was not found")
        path = request.query_params["path"]
        data = machine.read(path)
        if data is None:
            return _refusal(404, f"path {path!r} does not exist")
        return Response(data, media_type="application/octet-stream")


class _Processes(Process):
    """The service ``process.Process`` of the sandboxes' daemon."""

    def __init__(self, server: E2BServer) -> None:
        self._server = server
        self._pid = 100

    async def start(self, request: StartRequest, context: Any) -> AsyncIterator[StartResponse]:
        process = request.process
        assert process is not None
        assert process.args[:2] == ["-l", "-c"], process
        command = process.args[2]
        machine_id = context.request_headers[_MACHINE_HEADER]
        machine = self._server.machine_for(machine_id, command)
        if machine is None:
            raise ConnectError(Code.UNAVAILABLE, "the sandbox was not found")

        self._pid += 1
        yield _event("start", ProcessEvent.StartEvent(pid=self._pid))
        result = await machine.run(command, cwd=process.cwd or "/", env=process.envs)
        if result.stdout:
            output = Oneof("stdout", result.stdout)
            yield _event("data", ProcessEvent.DataEvent(output=output))
        if result.stderr:
            output = Oneof("stderr", result.stderr)
            yield _event("data", ProcessEvent.DataEvent(output=output))
        end = ProcessEvent.EndEvent(exit_code=result.exit_code, exited=True, status="exited")
        yield _event("end", end)


def _event(kind: Any, value: Any) -> StartResponse:
    return StartResponse(event=ProcessEvent(event=Oneof(kind, value)))


def _refusal(status: int, message: str) -> Response:
    return JSONResponse({"code": status, "message": message}, status_code=status)
