"""``hetlab run --launcher``: prepare a run on several nodes and say how it starts."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

import msgspec

from real_runtime.cluster_launch import (
    commands_of,
    hosts_of,
    printed,
    sbatch_script,
    submit,
)
from real_runtime.launch import prepare
from real_runtime.places import nodes_of
from real_runtime.port_check import check_port
from real_runtime.settings import RunSettings
from sim.cli_output import emit, emit_text, logger
from sim.errors import InputError, UsageError
from sim.plan.plan import Plan
from sim.problem import Problem, load_problem, problem_hash

__all__ = ["LAUNCHERS", "ClusterOptions", "check_cluster", "check_options", "start_cluster"]

LAUNCHERS = ("torchrun", "sbatch")
SCRIPT = "launch.sbatch"


class ClusterOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Options of the launch.

    Args:
        launcher: "" to start all ranks here. hosts: of ``hosts_of``. port: of the rendezvous.
        sbatch: further options. submit: hand the script to Slurm. dry_run: write nothing.
    """

    launcher: str = ""
    hosts: str = ""
    port: int = 29500
    sbatch: tuple[str, ...] = ()
    submit: bool = False
    dry_run: bool = False


def check_options(options: ClusterOptions, restarts: int) -> None:
    """Refuse what does not go together.

    Raises:
        UsageError: names the options.
    """
    if options.launcher not in ("", *LAUNCHERS):
        raise UsageError(f"--launcher {options.launcher}: expected {' or '.join(LAUNCHERS)}")
    if options.launcher != "sbatch" and (options.submit or options.sbatch):
        raise UsageError("--submit and --sbatch go with --launcher sbatch")
    if options.hosts and not options.launcher:
        raise UsageError("--hosts goes with --launcher torchrun or sbatch")
    if options.submit and options.dry_run:
        raise UsageError("--submit and --dry-run contradict each other")
    if options.launcher and restarts:
        raise UsageError("--restarts counts starts on this machine; leave out --launcher")


def check_cluster(plan: Plan, probed: str, allowed: bool) -> None:
    """Refuse a plan that was made for another cluster than the one that was probed.

    Args:
        plan: to run. probed: cluster file of ``hetlab probe``. allowed: say so only.

    Raises:
        InputError: the plan's cluster document differs.
    """
    planned = plan.problem["cluster"]
    here = load_problem(probed, plan.problem["model"], plan.problem["job"]).documents["cluster"]
    there, own = problem_hash(here), problem_hash(planned)
    if there == own:
        return
    hint = "" if allowed else ", a plan for it, or --allow-other-cluster"
    error = InputError(
        "the plan was made for another cluster than was probed", probed,
        found=f"{planned['name']} {own} in the plan",
        expected=f"{here['name']} {there}{hint}",
    )  # fmt: skip
    if not allowed:
        raise error
    logger.warning("%s", error)


def start_cluster(
    options: ClusterOptions, plan: Plan, problem: Problem, settings: RunSettings, as_json: bool
) -> bool:
    """Write the run's folder, print how each node starts, and submit if asked.

    Args:
        options: of the launch. plan, problem: to run.
        settings: of the run, whose paths must mean the same on every node. as_json: a document.

    Returns:
        False when all ranks start on this machine, as ``hetlab run`` does itself.

    Raises:
        RunError: the port of the rendezvous is in use here; sbatch is missing or refused.
        InputError, UsageError: see ``nodes_of``, ``hosts_of`` and ``sbatch_script``.
    """
    if not options.launcher:
        return False
    nodes = nodes_of(plan, problem)
    if options.launcher == "torchrun" and len(nodes) == 1 and not options.hosts:
        return False
    # Cores of other nodes are not known here; torchrun takes one thread unless env says more.
    settings = msgspec.structs.replace(settings, threads=0, cores=())
    folder = Path(settings.out)
    hosts = hosts_of(options.hosts, len(problem.machine.nodes))
    launch = commands_of(nodes, folder, hosts, options.port)
    script = ""
    if options.launcher == "sbatch":
        name = plan.name or plan.hash
        script = sbatch_script(launch, folder, f"hetlab-{name}", options.sbatch)
    elif _is_here(launch.nodes[0].host):
        check_port(options.port)
    document: dict[str, Any] = {
        "launcher": options.launcher, "plan_hash": plan.hash, "port": options.port,
        "folder": str(folder), "nodes": [msgspec.to_builtins(n) for n in launch.nodes],
        "script": "", "said": "",
    }  # fmt: skip
    if not options.dry_run:
        prepare(settings)
        if script:
            (folder / SCRIPT).write_text(script)
            document["script"] = str(folder / SCRIPT)
            logger.info("script: %s", folder / SCRIPT)
        if options.submit:
            document["said"] = submit(folder / SCRIPT)
            logger.info("%s", document["said"])
    if as_json:
        emit(document, lambda _: None, as_json)
    else:
        emit_text(script or printed(launch))
    if not options.submit and not options.dry_run:
        logger.info("nothing was started; %s and all paths must be the same on every node", folder)
    return True


def _is_here(host: str) -> bool:
    own = socket.gethostname()
    return host in ("localhost", "127.0.0.1", own, own.partition(".")[0])
