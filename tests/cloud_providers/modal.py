"""The parts of Modal's API that Harbor's environment ``modal`` uses, over gRPC.

The control plane keeps sandboxes; the command router runs programs in them. One server is both. The
messages are the classes that Modal's package generates from its protocol.
"""

# pyright: reportMissingImports=false, reportAttributeAccessIssue=false
# Modal is in Harbor's environment (launch/harbor_environment.sh).

from __future__ import annotations

import asyncio
import base64
import json
import shlex
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from google.protobuf.empty_pb2 import Empty
from google.protobuf.message import Message
from grpclib.const import Cardinality, Handler, Status
from grpclib.exceptions import GRPCError
from grpclib.server import Server, Stream
from modal import Client
from modal_proto import api_pb2 as api
from modal_proto import task_command_router_pb2 as router

from tests.cloud_providers.machine import CloudMachine, CloudServer, CommandResult

_CONTROL = "/modal.client.ModalClient/"
_ROUTER = "/modal.task_command_router.TaskCommandRouter/"
_FILE_TOOL = "/__modal/.bin/modal-sandbox-fs-tools"
"""Program of Modal's in each sandbox; its argument is a request in JSON."""
_REFUSALS = {429: Status.RESOURCE_EXHAUSTED, 500: Status.INTERNAL}
_Answer = Callable[[Any], Awaitable[Any]]


class ModalServer(CloudServer):
    """An async context manager, see :meth:`running`."""

    name = "modal"
    environment_options: Mapping[str, Any] = {}

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._url = ""
        self._commands: dict[str, _Command] = {}

    @asynccontextmanager
    async def running(self) -> AsyncIterator[Mapping[str, str]]:
        """Serve; yield the variables that lead Modal's SDK here."""
        with socket.socket() as listening:
            listening.bind(("127.0.0.1", 0))
            listening.listen()
            server = Server([self])
            await server.start(sock=listening)
            self._url = f"http://127.0.0.1:{listening.getsockname()[1]}"
            try:
                yield {
                    "MODAL_SERVER_URL": self._url,
                    # Seconds. The server waits for connections that nothing uses any more.
                    "MODAL_SANDBOX_CHANNEL_IDLE_TIMEOUT": "1",
                    "MODAL_TOKEN_ID": "ak-1",
                    "MODAL_TOKEN_SECRET": "as-1",
                }
            finally:
                # It is the process's, and knows the address of this server.
                client = await Client.from_env.aio()
                await client.close.aio()
                for command in self._commands.values():
                    command.cancel()
                server.close()
                await server.wait_closed()

    def __mapping__(self) -> dict[str, Handler]:
        """Return the calls that are answered; all others are refused as unimplemented."""
        control = {
            "ClientHello": (self._hello, Empty),
            "AuthTokenGet": (self._auth_token, api.AuthTokenGetRequest),
            "EnvironmentGetOrCreate": (self._environment, api.EnvironmentGetOrCreateRequest),
            "AppGetOrCreate": (self._app, api.AppGetOrCreateRequest),
            "ImageGetOrCreate": (self._image, api.ImageGetOrCreateRequest),
            "SandboxCreateV2": (self._create, api.SandboxCreateV2Request),
            "SandboxGetCommandRouterAccess": (
                self._access,
                api.SandboxGetCommandRouterAccessRequest,
            ),
            "SandboxTerminateV2": (self._terminate, api.SandboxTerminateRequest),
            "SandboxWaitV2": (self._wait, api.SandboxWaitRequest),
        }
        commands = {
            "TaskExecStart": (self._start, router.TaskExecStartRequest),
            "TaskExecWait": (self._end, router.TaskExecWaitRequest),
        }
        handlers = {}
        for prefix, calls in ((_CONTROL, control), (_ROUTER, commands)):
            for name, (answer, request_class) in calls.items():
                handlers[prefix + name] = Handler(
                    _unary(answer), Cardinality.UNARY_UNARY, request_class, Message
                )
        handlers[_ROUTER + "TaskExecStdioRead"] = Handler(
            self._output, Cardinality.UNARY_STREAM, router.TaskExecStdioReadRequest, Message
        )
        handlers[_ROUTER + "TaskExecStdinWriteStream"] = Handler(
            self._input, Cardinality.STREAM_UNARY, router.TaskExecStdinWriteStreamRequest, Message
        )
        return handlers

    # --- the control plane ------------------------------------------------------------------------

    async def _hello(self, request: Empty) -> Any:
        return api.ClientHelloResponse(image_builder_version="2025.06")

    async def _auth_token(self, request: Any) -> Any:
        return api.AuthTokenGetResponse(token=_token())

    async def _environment(self, request: Any) -> Any:
        settings = api.EnvironmentSettings(image_builder_version="2025.06")
        metadata = api.EnvironmentMetadata(name="main", settings=settings)
        return api.EnvironmentGetOrCreateResponse(environment_id="en-1", metadata=metadata)

    async def _app(self, request: Any) -> Any:
        return api.AppGetOrCreateResponse(app_id="ap-1")

    async def _image(self, request: Any) -> Any:
        built = api.GenericResult(status=api.GenericResult.GENERIC_STATUS_SUCCESS)
        metadata = api.ImageMetadata(image_builder_version="2025.06")
        return api.ImageGetOrCreateResponse(image_id="im-1", result=built, metadata=metadata)

    async def _create(self, request: Any) -> Any:
        self.create_requests += 1
        if self.create_status is not None:
            raise GRPCError(_REFUSALS[self.create_status], "no more sandboxes")
        if not self.answers_creations:
            await asyncio.Event().wait()
        labels = {tag.tag_name: tag.tag_value for tag in request.tags}
        machine = self.create(labels)
        return api.SandboxCreateV2Response(
            sandbox_id=f"sb-{machine.machine_id}", task_id=f"ta-{machine.machine_id}V"
        )

    async def _access(self, request: Any) -> Any:
        return api.SandboxGetCommandRouterAccessResponse(url=self._url, jwt=_token())

    async def _terminate(self, request: Any) -> Any:
        self.remove(_machine_id(request.sandbox_id))
        return api.SandboxTerminateResponse()

    async def _wait(self, request: Any) -> Any:
        result = api.GenericResult()
        if _machine_id(request.sandbox_id) not in self.machines:
            result.status = api.GenericResult.GENERIC_STATUS_TERMINATED
        return api.SandboxWaitResponse(result=result)

    # --- commands ---------------------------------------------------------------------------------

    async def _start(self, request: Any) -> Any:
        command = shlex.join(request.command_args)
        machine = self.machine_for(_machine_id(request.task_id), command)
        if machine is None:
            raise GRPCError(Status.NOT_FOUND, "the sandbox was not found")
        env = dict(request.env)
        for source in request.secret_sources:
            env.update(source.env.contents)
        if request.command_args[0] == _FILE_TOOL:
            started: _Command = _FileCommand(machine, json.loads(request.command_args[1]))
        else:
            started = _Command(machine.run(command, cwd=request.workdir or "/", env=env))
        self._commands[request.exec_id] = started
        return router.TaskExecStartResponse()

    async def _end(self, request: Any) -> Any:
        result = await self._commands[request.exec_id].result()
        return router.TaskExecWaitResponse(code=result.exit_code)

    async def _output(self, stream: Stream[Any, Any]) -> None:
        request = await stream.recv_message()
        assert request is not None
        result = await self._commands[request.exec_id].result()
        output = result.stderr
        if request.file_descriptor == router.TASK_EXEC_STDIO_FILE_DESCRIPTOR_STDOUT:
            output = result.stdout
        if output[request.offset :]:
            message = router.TaskExecStdioReadResponse(data=output[request.offset :])
            await stream.send_message(message)

    async def _input(self, stream: Stream[Any, Any]) -> None:
        exec_id = ""
        data = b""
        async for request in stream:
            if request.HasField("start"):
                exec_id = request.start.exec_id
            data += request.data
        self._commands[exec_id].input(data)
        await stream.send_message(router.TaskExecStdinWriteStreamResponse())


class _Command:
    """A command that was started."""

    def __init__(self, run: Awaitable[CommandResult]) -> None:
        self._running = asyncio.ensure_future(run)

    async def result(self) -> CommandResult:
        return await asyncio.shield(self._running)

    def input(self, data: bytes) -> None:
        raise GRPCError(Status.FAILED_PRECONDITION, "the command reads no input")

    def cancel(self) -> None:
        self._running.cancel()


class _FileCommand(_Command):
    """A request to Modal's own program: a file is written, or read."""

    def __init__(self, machine: CloudMachine, request: Mapping[str, Any]) -> None:
        self._machine = machine
        self._data: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        super().__init__(self._serve(request))

    async def _serve(self, request: Mapping[str, Any]) -> CommandResult:
        ((operation, arguments),) = request.items()
        path = arguments["path"]
        if operation == "WriteFile":
            self._machine.write(path, await self._data)
            return CommandResult(exit_code=0, stdout=b"", stderr=b"")

        assert operation == "ReadFile", operation
        data = self._machine.read(path)
        if data is None:
            error = {"error_kind": "NotFound", "message": f"{path} does not exist"}
            return CommandResult(exit_code=1, stdout=b"", stderr=json.dumps(error).encode())
        return CommandResult(exit_code=0, stdout=data, stderr=b"")

    def input(self, data: bytes) -> None:
        self._data.set_result(data)


def _unary(answer: _Answer) -> Callable[[Stream[Any, Any]], Awaitable[None]]:
    """Return the handler of a call with one request and one answer."""

    async def handle(stream: Stream[Any, Any]) -> None:
        request = await stream.recv_message()
        await stream.send_message(await answer(request))

    return handle


def _machine_id(object_id: str) -> str:
    """Return the machine of a sandbox, ``sb-…``, or of its task, ``ta-…V``."""
    return object_id[3:].removesuffix("V")


def _token() -> str:
    """Return a token that the SDK reads as valid for an hour."""
    claims = json.dumps({"exp": int(time.time()) + 3600}).encode()
    return f"e30.{base64.urlsafe_b64encode(claims).decode().rstrip('=')}.c2ln"
