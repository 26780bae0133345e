"""``kvmesh up``: a whole mesh on this machine, from one command to the first answer."""

from __future__ import annotations

import argparse
import os
import secrets
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import anyio
from rich.console import Console
from rich.markup import escape

from kvmesh.cli.console import Progress, print_ready, say_line
from kvmesh.cli.errors import UserError
from kvmesh.cli.flags import parse_assignments
from kvmesh.cli.key_files import check_key_files
from kvmesh.cli.logs import LogFollower, tail
from kvmesh.cli.mesh import PROGRAM, SECRET_VARIABLE, run_mesh
from kvmesh.cli.plan import Machine, MeshPlan, plan_mesh
from kvmesh.cli.ports import PortPicker
from kvmesh.cli.rundir import RunDir, RunDirBusyError, is_running
from kvmesh.cli.supervisor import USER_ERROR, StartFailedError
from kvmesh.config import ConfigError, MeshSettings, WorkerSettings, load_settings
from kvmesh.config.errors import sentence_of
from kvmesh.config.mesh import spread_over_workers
from kvmesh.config.mesh_pairing import refuse_unpairable
from kvmesh.config.mesh_plan import plan_mesh as plan_settings
from kvmesh.config.nearest import unknown_key_message
from kvmesh.config.sources import merged
from kvmesh.config.startup import refuse_unsupported
from kvmesh.models.errors import ModelError
from kvmesh.models.progress import download_bar
from kvmesh.models.store import resolve_model
from kvmesh.net.client import PeerUnreachableError
from kvmesh.net.groups import leaves
from kvmesh.net.tls import Tls
from kvmesh.protocol.errors import ApiError
from kvmesh.worker.preflight import check_model, check_settings, may_have_gpu

__all__ = ["add_arguments", "run"]

FAILED = 1
DETACH_POLL_S = 0.1

_SECTIONS = {"context": "context", "generation": "generation", "both": "aggregated"}

_KNOWN = MeshSettings.model_fields.keys() | WorkerSettings.model_fields.keys()
"""First parts of what ``--set`` can name: a worker's settings go to all of them."""

PLANS = 3
"""How often ports are chosen anew because a chosen one was lost to another program before it was used."""


def add_arguments(parser: argparse.ArgumentParser, name: str) -> None:  # noqa: ARG001 - one command
    """The common choices as flags, every other setting through ``--set``."""
    parser.add_argument("--model", help="built-in name, GGUF file or Hugging Face directory")
    parser.add_argument("--context", type=int, metavar="N", help="context (prefill) servers (default: 1)")
    parser.add_argument("--generation", type=int, metavar="N", help="generation (decode) servers (default: 1)")
    parser.add_argument("--aggregated", type=int, metavar="N", help="servers that do both by themselves (default: 0)")
    parser.add_argument("--port", type=int, help="port of the router (default: 8000; 0: any free one)")
    parser.add_argument("--config", type=Path, metavar="FILE", help="YAML file with the mesh's settings")
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="any setting, such as kv_cache_config.max_tokens=4096, or with context. in front for the context servers "
        "alone; may be repeated",
    )
    parser.add_argument("--detach", action="store_true", help="return once the mesh is up; 'kvmesh down' stops it")


def run(args: argparse.Namespace) -> int:
    """Start the mesh; in the foreground, stay until Ctrl-C."""
    console = Console(stderr=False)
    run_dir = RunDir.from_environment()
    mesh = _settings(args)
    workers = _checked(mesh)
    _refuse_second(run_dir)
    run_dir.prepare()
    try:
        with download_bar(f"fetching {mesh.model}", console) as progress:
            source = resolve_model(mesh.model, progress=progress)
        for section, worker in workers.items():
            with _named(section):
                check_model(worker, source)
    except ModelError as error:
        raise UserError(str(error)) from error
    if args.detach:
        return _detach(args, console, run_dir, mesh)
    secret = os.environ.get(SECRET_VARIABLE) or secrets.token_hex(32)
    try:
        with run_dir.claimed():
            return _foreground(console, run_dir, mesh, secret)
    except RunDirBusyError:
        _refuse_second(run_dir)
        raise UserError(f"another mesh is starting in {run_dir.path}") from None


def _settings(args: argparse.Namespace) -> MeshSettings:
    flags: dict[str, Any] = {
        "model": args.model,
        "num_context": args.context,
        "num_generation": args.generation,
        "num_aggregated": args.aggregated,
    }
    # Whoever asks for whole servers only does not want the default pair beside them.
    if args.aggregated and args.context is None and args.generation is None:
        flags |= {"num_context": 0, "num_generation": 0}
    overrides = {key: value for key, value in flags.items() if value is not None}
    if args.port is not None:
        overrides["router"] = {"port": args.port}
    given = parse_assignments(args.set)
    for key in given.keys() - _KNOWN:
        raise UserError(f"--set: {unknown_key_message(key, _KNOWN)}")
    assigned = spread_over_workers(given)
    try:
        return load_settings(MeshSettings, args.config, overrides=merged(assigned, overrides))
    except ConfigError as error:
        raise UserError(str(error)) from error


def _checked(mesh: MeshSettings) -> dict[str, WorkerSettings]:
    """The worker of each section that is used, as it will be told; all settings are looked at before anything starts.

    Raises:
        UserError: something in them cannot work.
    """
    try:
        refuse_unsupported(mesh)
        Tls(mesh.tls)
    except ConfigError as error:
        raise UserError(sentence_of(error)) from error
    # Neither the secret nor the cores matter to what is checked.
    plan = plan_settings(mesh, cluster_secret="to be made", cpu_count=1)  # noqa: S106
    workers = plan.workers
    sections = {_SECTIONS[worker.role]: worker for worker in workers}
    for section, worker in sections.items():
        with _named(section):
            check_settings(worker)
    try:
        check_key_files(plan)
        refuse_unpairable(
            workers,
            schedule_style=mesh.router.schedule_style,
            environment=os.environ,
            may_have_gpu=may_have_gpu(),
        )
    except ConfigError as error:
        raise UserError(sentence_of(error)) from error
    return sections


@contextmanager
def _named(section: str) -> Iterator[None]:
    """Say which section of the mesh's settings an error is about."""
    try:
        yield
    except ConfigError as error:
        raise UserError(f"section {section}: {sentence_of(error)}") from error


def _machine() -> Machine:
    lines = Path("/proc/meminfo").read_text().splitlines()
    available_kib = next(int(line.split()[1]) for line in lines if line.startswith("MemAvailable:"))
    return Machine(cores=len(os.sched_getaffinity(0)), free_memory_bytes=available_kib << 10)


def _refuse_second(run_dir: RunDir) -> None:
    state = run_dir.read()
    if state is not None and is_running(state.supervisor):
        raise UserError(
            f"a mesh runs already at {state.url}; 'kvmesh down' stops it, and KVMESH_RUN_DIR=DIR makes room for another"
        )


def _foreground(console: Console, run_dir: RunDir, settings: MeshSettings, secret: str) -> int:
    for attempts_left in reversed(range(PLANS)):
        ports = PortPicker()
        plan = plan_mesh(settings, _machine(), ports, secret)
        errors = _run_once(console, run_dir, settings, plan, ports, secret)
        start_failed = any(isinstance(error, StartFailedError) for error in errors)
        # Nothing of ours runs any more: whoever holds a port now took it between its choice and its use.
        if not (attempts_left and start_failed and (lost := ports.lost())):
            break
        console.print(f"[yellow]taken meanwhile: {', '.join(map(str, lost))}[/]; starting again at other ports")
    for error in errors:
        if isinstance(error, StartFailedError):
            _explain(console, error)
        else:
            console.print(f"[red]the mesh did not come up:[/] {escape(str(error))}", soft_wrap=True)
    if any(isinstance(error, StartFailedError) and error.status == USER_ERROR for error in errors):
        return USER_ERROR
    return FAILED if errors else 0


def _run_once(
    console: Console, run_dir: RunDir, settings: MeshSettings, plan: MeshPlan, ports: PortPicker, secret: str
) -> list[Exception]:
    """A mesh from its start to its end; what kept it from coming up."""
    errors: list[Exception] = []
    with Progress(console) as progress:
        try:
            anyio.run(run_mesh, settings, plan, ports, secret, run_dir, console, progress)
        except* (StartFailedError, TimeoutError, ApiError, PeerUnreachableError, UserError) as group:
            errors = leaves(group)
    return errors


def _explain(console: Console, error: StartFailedError) -> None:
    console.print(f"[red]{escape(str(error))}[/]; the end of {escape(str(error.log))}:", soft_wrap=True)
    console.print(escape(tail(error.log)), style="dim", highlight=False, soft_wrap=True)


def _detach(args: argparse.Namespace, console: Console, run_dir: RunDir, mesh: MeshSettings) -> int:
    """Start a foreground mesh in a session of its own and wait until it is ready."""
    log_path = run_dir.log_of("supervisor")
    flags = [value for value in args.raw if value != "--detach"]
    with log_path.open("wb") as log:
        child = subprocess.Popen(  # noqa: S603 - this very program
            [*PROGRAM, *flags],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    deadline_s = time.monotonic() + mesh.ready_timeout_s
    with Progress(console) as progress:
        shown = ""
        while child.poll() is None and time.monotonic() < deadline_s:
            state = run_dir.read()
            if state is not None and state.supervisor.pid == child.pid:
                if state.phase == "ready":
                    break
                if state.message != shown:
                    shown = state.message
                    progress.step(shown)
            time.sleep(DETACH_POLL_S)
    state = run_dir.read()
    if child.poll() is not None or state is None or state.phase != "ready":
        if child.poll() is None:
            child.send_signal(signal.SIGTERM)
            child.wait()
        console.print(f"[red]the mesh did not come up[/]; the end of {escape(str(log_path))}:", soft_wrap=True)
        console.print(escape(tail(log_path)), style="dim", highlight=False, soft_wrap=True)
        return child.returncode if child.returncode == USER_ERROR else FAILED
    # Each log began anew with this start: what its services warn of is what the foreground shows.
    for line in LogFollower.whole((child.name, run_dir.log_of(child.name)) for child in state.children):
        say_line(console, line)
    with_key = bool(mesh.api_keys_file or mesh.router.api_keys_file or mesh.router.api_keys)
    print_ready(console, state, run_dir, detached=True, with_key=with_key)
    return 0
