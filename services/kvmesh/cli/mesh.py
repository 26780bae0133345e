"""One run of a mesh in the foreground: children, readiness, first answer, warnings, end."""

from __future__ import annotations

import os
import signal
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import anyio
import yaml
from rich.console import Console
from rich.markup import escape

from kvmesh.cli.console import Progress, print_ready, say_line
from kvmesh.cli.logs import LogFollower
from kvmesh.cli.parent import SUPERVISOR_PID_VARIABLE
from kvmesh.cli.plan import ChildPlan, MeshPlan, event_ports, event_ports_are_free, with_free_event_ports
from kvmesh.cli.ports import PortPicker
from kvmesh.cli.readiness import Waiting, ask_first_question, wait_until_ready, why_not_ready
from kvmesh.cli.rundir import MeshState, ProcessState, RunDir, start_ticks
from kvmesh.cli.supervisor import Child, ChildEvent, Supervisor
from kvmesh.config import MeshSettings, RouterSettings
from kvmesh.config.curve import CurveSettings
from kvmesh.config.sources import ENV_PREFIX
from kvmesh.config.tls import TlsSettings
from kvmesh.net.auth import ApiKeys
from kvmesh.net.tls import Tls

__all__ = ["PROGRAM", "SECRET_VARIABLE", "run_mesh"]

PROGRAM = (sys.executable, "-m", "kvmesh.cli.main")
"""How a child is run."""

_END_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""Ctrl-C, ``kvmesh down``, a closed terminal."""

LOG_POLL_S = 0.5
"""How late a child's warning is shown; each poll asks for a handful of file sizes."""

SECRET_VARIABLE = "KVMESH_CLUSTER_SECRET"  # noqa: S105 - the name, not the secret

_PASSED_ON = frozenset({"KVMESH_FAULTS", "KVMESH_MODEL_DIR"})
"""Other ``KVMESH_`` variables configure the mesh as a whole: it has read them, its children must not."""


async def run_mesh(
    settings: MeshSettings,
    plan: MeshPlan,
    ports: PortPicker,
    secret: str,
    run_dir: RunDir,
    console: Console,
    progress: Progress,
) -> None:
    """Start everything, answer a first question, stay until a signal says to end, stop everything.

    Args:
        settings: of the mesh.
        plan: its processes.
        ports: those of the plan; gives out others for workers whose ports were lost.
        secret: the cluster secret; reaches the children through their environment only.
        run_dir: claimed by the caller.
        console: where people look.
        progress: the steps until it is ready.

    Raises:
        StartFailedError: a child does not come up (in a group).
        TimeoutError: the mesh is not ready in time (in a group).
        ApiError: the first question was refused (in a group).
    """
    # A short path of its own: a socket's path is limited to 107 bytes, and nothing may be left behind.
    with tempfile.TemporaryDirectory(prefix="kvmesh-", ignore_cleanup_errors=True) as temp_dir:
        children = [_Settled(child, settings, ports, run_dir, secret, console).prepare() for child in plan.children]
        mesh = Mesh(settings, plan, children, _environment(secret, temp_dir), temp_dir, run_dir, console, progress)
        with anyio.open_signal_receiver(*_END_SIGNALS) as signals:
            async with anyio.create_task_group() as tasks:

                async def end() -> None:
                    async for _ in signals:
                        tasks.cancel_scope.cancel()

                tasks.start_soon(end)
                await mesh.serve()


class Mesh:
    """A running mesh; see :func:`run_mesh`."""

    def __init__(
        self,
        settings: MeshSettings,
        plan: MeshPlan,
        children: Sequence[Child],
        env: Mapping[str, str],
        temp_dir: str,
        run_dir: RunDir,
        console: Console,
        progress: Progress,
    ) -> None:
        self._settings = settings
        self._plan = plan
        self._run_dir = run_dir
        self._console = console
        self._progress = progress
        self._tls = Tls(settings.tls)
        self._supervisor = Supervisor(
            children,
            env=env,
            on_event=self._on_event,
            backoff_s=settings.restart_backoff_s,
            backoff_max_s=settings.restart_backoff_max_s,
            drain_s=settings.drain_s,
        )
        self._state = MeshState(
            phase="starting",
            supervisor=ProcessState(name="supervisor", pid=os.getpid(), start_ticks=start_ticks(os.getpid())),
            url=plan.url,
            coordinator_url=plan.coordinator_url,
            indexer_url=plan.indexer_url,
            model=settings.model,
            temp_dir=temp_dir,
            tls=_client_tls(settings.tls),
            curve=_client_curve(settings.curve),
        )

    async def serve(self) -> None:
        """Start, come up, stay until cancelled, stop."""
        async with anyio.create_task_group() as tasks:
            try:
                tasks.start_soon(self._follow_logs)
                self._step(f"starting {len(self._plan.children)} services")
                self._supervisor.start(tasks)
                await self._come_up()
                await anyio.sleep_forever()
            finally:
                # Inside the group: the supervisor's tasks go on until the children have drained.
                with anyio.CancelScope(shield=True):
                    await self._stop()

    async def _come_up(self) -> None:
        headers = self._api_key_headers()
        timeout_s = self._settings.ready_timeout_s
        waiting = Waiting(self._plan, headers, self._tls)
        with anyio.move_on_after(timeout_s) as scope:
            self._step("waiting for " + ", ".join(("indexer", *self._plan.worker_names)))
            await wait_until_ready(waiting, self._progress.up)
            self._step("asking a first question")
            self._state.model, self._state.first_answer = await ask_first_question(self._plan.url, headers, self._tls)
        if scope.cancelled_caught:
            reason = await why_not_ready(waiting) or self._state.message
            raise TimeoutError(f"not ready within {timeout_s:g} s: {reason}; see {self._run_dir.logs}")
        self._supervisor.mark_ready()
        self._state.phase, self._state.message = "ready", ""
        self._write_state()
        self._progress.end()
        print_ready(self._console, self._state, self._run_dir, detached=False, with_key=headers is not None)

    async def _stop(self) -> None:
        self._state.phase = "stopping"
        self._write_state()
        self._console.print("stopping", style="dim")
        with anyio.open_signal_receiver(*_END_SIGNALS) as again:
            async with anyio.create_task_group() as tasks:

                async def hurry() -> None:
                    async for _ in again:
                        self._supervisor.kill()

                tasks.start_soon(hurry)
                await self._supervisor.stop()
                tasks.cancel_scope.cancel()

    async def _follow_logs(self) -> None:
        follower = LogFollower([(child.name, self._run_dir.log_of(child.name)) for child in self._plan.children])
        while True:
            await anyio.sleep(LOG_POLL_S)
            for line in follower.poll():
                say_line(self._console, line)

    def _on_event(self, event: ChildEvent) -> None:
        if event.kind == "died":
            self._console.print(
                f"[red]{escape(event.name)} died[/] ({event.cause}); starting it again in {event.restart_in_s:g} s",
                highlight=False,
            )
        self._write_state()

    def _step(self, text: str) -> None:
        self._state.message = text
        self._write_state()
        self._progress.step(text)

    def _write_state(self) -> None:
        self._state.children = self._supervisor.processes()
        self._run_dir.write(self._state)

    def _api_key_headers(self) -> dict[str, str] | None:
        router = next(child.settings for child in self._plan.children if isinstance(child.settings, RouterSettings))
        keys = ApiKeys(router.api_keys_file, router.api_keys)()
        return {"Authorization": f"Bearer {min(keys)}"} if keys else None


class _Settled:
    """A child's settings in its file."""

    def __init__(
        self, plan: ChildPlan, mesh: MeshSettings, ports: PortPicker, run_dir: RunDir, secret: str, console: Console
    ) -> None:
        self._plan = plan
        self._mesh = mesh
        self._ports = ports
        self._secret = secret
        self._console = console
        self._config = run_dir.configs / f"{plan.name}.yaml"
        self._log = run_dir.log_of(plan.name)

    def prepare(self) -> Child:
        """Write the settings and begin the log anew."""
        self._write()
        self._log.unlink(missing_ok=True)
        argv = [*PROGRAM, self._plan.command, "--config", str(self._config)]
        return Child(self._plan.name, argv, self._log, self._plan.stop_rank, self._renew, self._released)

    def _released(self) -> bool:
        return event_ports_are_free(self._plan, self._ports)

    def _renew(self) -> bool:
        plan = with_free_event_ports(self._mesh, self._plan, self._ports)
        if plan is self._plan:
            return False
        before, after = event_ports(self._plan), event_ports(plan)
        moved = ", ".join(f"{before[field]} is now {after[field]}" for field in before if before[field] != after[field])
        self._console.print(
            f"[yellow]event ports of {escape(plan.name)} are taken:[/] {moved}", highlight=False, soft_wrap=True
        )
        self._plan = plan
        self._write()
        return True

    def _write(self) -> None:
        settings = self._plan.settings.model_dump(mode="json", exclude_unset=True)
        if settings.get("cluster_secret") == self._secret:
            del settings["cluster_secret"]
        # Private: sections may hold API keys.
        descriptor = os.open(self._config, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            yaml.safe_dump(settings, file, sort_keys=False)


def _client_tls(tls: TlsSettings) -> dict[str, str]:
    """What the commands of this machine need, from whatever directory they are run."""
    files = {"ca_file": tls.ca_file, "cert_file": tls.cert_file, "key_file": tls.key_file}
    found = {name: str(Path(file).absolute()) for name, file in files.items() if file is not None}
    return found if tls.server_name is None else {**found, "server_name": tls.server_name}


def _client_curve(curve: CurveSettings) -> dict[str, str]:
    files = {"key_file": curve.key_file, "server_key_file": curve.server_key_file}
    return {name: str(Path(file).absolute()) for name, file in files.items() if file is not None}


def _environment(secret: str, temp_dir: str) -> dict[str, str]:
    env = {key: value for key, value in os.environ.items() if not key.startswith(ENV_PREFIX) or key in _PASSED_ON}
    return {
        **env,
        SECRET_VARIABLE: secret,
        SUPERVISOR_PID_VARIABLE: str(os.getpid()),
        "TMPDIR": temp_dir,
    }
