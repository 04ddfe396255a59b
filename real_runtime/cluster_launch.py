"""Commands that start a plan on several nodes: torchrun node by node, or one sbatch script.

Imports no torch. Nothing is started here but sbatch itself, and only when asked.
"""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import msgspec

from real_runtime.errors import RunError
from real_runtime.places import DEVICES, RANKS, NodeRanks
from sim.errors import InputError, UsageError

__all__ = ["Launch", "NodeCommand", "commands_of", "hosts_of", "printed", "sbatch_script", "submit"]

_HOST = re.compile(r"[A-Za-z0-9][A-Za-z0-9.:_-]*")


class NodeCommand(msgspec.Struct, frozen=True, kw_only=True):
    """How one node starts.

    Args:
        node_rank: its number for torchrun. host: name, "" when unknown. kind: of node.
        ranks: of the plan, in order of the node's processes. command: a line of shell.
        check: the line that says whether the rendezvous' port is free there, "" where none meets.
        needs: variables that must be set where it is typed. torch: build that is installed, or "".
    """

    node_rank: int
    host: str
    kind: str
    ranks: tuple[int, ...]
    command: str
    check: str = ""
    needs: tuple[str, ...] = ()
    torch: str = ""


class Launch(msgspec.Struct, frozen=True, kw_only=True):
    """All nodes of a launch. Args: nodes, in order of node_rank; port: of the rendezvous."""

    nodes: tuple[NodeCommand, ...]
    port: int


def hosts_of(text: str, num_nodes: int) -> tuple[str, ...]:
    """Read ``--hosts``: the cluster's nodes in the order of its document.

    Raises:
        UsageError: another number of names than nodes, or no host's name.
    """
    if not text:
        return ()
    hosts = tuple(h.strip() for h in text.split(","))
    odd = [h for h in hosts if not _HOST.fullmatch(h)]
    if odd:
        raise UsageError(f"--hosts: not the name of a host: {odd[0]!r}")
    if len(hosts) != num_nodes:
        raise UsageError(
            f"--hosts names {len(hosts)} hosts; the plan's cluster has {num_nodes} nodes, name "
            "each in the order of the cluster file"
        )
    return hosts


def commands_of(
    nodes: tuple[NodeRanks, ...], folder: Path, hosts: tuple[str, ...], port: int
) -> Launch:
    """Return the command of each node.

    Args:
        nodes: of the plan. folder: of the run, the same path on every node.
        hosts: of the cluster's nodes, () when unknown: then the commands take the first node's from
            the variable MASTER_ADDR. port: of the rendezvous, on the first node.
    """
    order = tuple(r for n in nodes for r in n.ranks)
    address = shlex.quote(hosts[nodes[0].node]) if hosts else '"$MASTER_ADDR"'
    found = []
    for number, node in enumerate(nodes):
        runtime, count = node.runtime, len(node.ranks)
        env = dict(sorted(runtime.env.items()))
        if order != tuple(range(len(order))):
            env[RANKS] = ",".join(map(str, order))
        if node.devices != tuple(range(count)):
            env[DEVICES] = ",".join(map(str, node.devices))
        inside, python = shlex.split(runtime.container), runtime.python or sys.executable
        check = [*inside, python, "-m", "real_runtime.port_check", str(port)]
        before = list(inside)
        if env:
            before += ["env", *(f"{name}={value}" for name, value in env.items())]
        before += [
            python, "-m", "torch.distributed.run",
            f"--nnodes={len(nodes)}", f"--node-rank={number}", f"--nproc-per-node={count}",
        ]  # fmt: skip
        after = [f"--master-port={port}", "-m", "real_runtime.worker", str(folder)]
        found.append(
            NodeCommand(
                node_rank=number, host=hosts[node.node] if hosts else "", kind=node.kind,
                ranks=node.ranks, needs=runtime.inherit, torch=runtime.torch,
                check="" if number else shlex.join(check),
                command=f"{shlex.join(before)} --master-addr={address} {shlex.join(after)}",
            )
        )  # fmt: skip
    return Launch(nodes=tuple(found), port=port)


def printed(launch: Launch) -> str:
    """Return the commands as a person types them, each below what it is."""
    lines = []
    if not launch.nodes[0].host:
        lines += ["# MASTER_ADDR: the host of node 0", ""]
    for n in launch.nodes:
        at = f" on {n.host}" if n.host else ""
        lines.append(f"# node {n.node_rank}{at} ({n.kind}): ranks {_runs(n.ranks)}")
        if n.torch:
            lines.append(f"# torch: {n.torch}")
        if n.needs:
            lines.append("# takes from its environment: " + " ".join(n.needs))
        lines += [n.command, ""]
    return "\n".join(lines[:-1])


def _runs(ranks: tuple[int, ...]) -> str:
    """(0, 1, 2, 5) -> "0-2 5", in the order given."""
    found: list[list[int]] = []
    for rank in ranks:
        if found and rank == found[-1][-1] + 1:
            found[-1].append(rank)
        else:
            found.append([rank])
    return " ".join(f"{r[0]}-{r[-1]}" if len(r) > 1 else str(r[0]) for r in found)


def sbatch_script(launch: Launch, folder: Path, name: str, options: tuple[str, ...] = ()) -> str:
    """Return a script for Slurm: one task per node, each starts its node's command.

    Args:
        launch: commands. folder: of the run. name: of the job.
        options: further lines for sbatch, e.g. "--partition=gpu".

    Raises:
        UsageError: nodes differ and no hosts are named, or one host is named twice.
        InputError: an option of several lines.
    """
    nodes = launch.nodes
    hosts = [n.host for n in nodes if n.host]
    if not hosts and len({_shape(n) for n in nodes}) > 1:
        raise UsageError("nodes of this plan differ: give --hosts, so that each gets its own ranks")
    if len(set(hosts)) < len(hosts):
        raise UsageError("--hosts: Slurm starts one task per host, and a host is named twice")
    head = [
        f"--job-name={re.sub(r'[^A-Za-z0-9_.-]', '-', name)[:64] or 'hetlab'}",
        f"--nodes={len(nodes)}", "--ntasks-per-node=1",
        f"--output={shlex.quote(str(folder / 'slurm-%j.out'))}",
        *([f"--nodelist={','.join(hosts)}"] if hosts else []), *options,
    ]  # fmt: skip
    for line in options:
        if not line.isprintable() or not line.startswith("-"):
            raise InputError(
                "no option of sbatch", key="--sbatch", found=line, expected="e.g. --partition=gpu"
            )
    lines = ["#!/bin/bash", *(f"#SBATCH {line}" for line in head), "set -euo pipefail"]
    for variable in sorted({v for n in nodes for v in n.needs}):
        lines.append(f': "${{{variable}:?is needed by the ranks}}"')
    if not hosts:
        # No pipe into head: scontrol would die of it, and the script with scontrol.
        lines.append('hosts=$(scontrol show hostnames "$SLURM_JOB_NODELIST")')
        lines.append("export MASTER_ADDR=${hosts%%$'\\n'*}")
    key = "$SLURMD_NODENAME" if hosts else "$SLURM_NODEID"
    lines += ["node=$(cat <<'HETLAB_NODE'", f'case "{key}" in']
    for n in nodes:
        first = f"{n.check} && " if n.check else ""
        lines.append(f"{n.host or n.node_rank}) {first}exec {n.command} ;;")
    lines += [f'*) echo "no rank of the plan runs on {key}" >&2; exit 1 ;;', "esac"]
    lines += ["HETLAB_NODE", ")", 'srun --kill-on-bad-exit=1 bash -c "$node"']
    return "\n".join(lines) + "\n"


def _shape(node: NodeCommand) -> tuple[object, ...]:
    """What must be equal for any host to take a node's place."""
    return node.kind, node.command.replace(f"--node-rank={node.node_rank} ", "")


def submit(script: Path) -> str:
    """Hand a script to Slurm and return what sbatch said.

    Raises:
        RunError: there is no sbatch here, or it refused.
    """
    command = shutil.which("sbatch")
    if command is None:
        raise RunError(f"no sbatch on this machine; where Slurm is, type: sbatch {script}")
    done = subprocess.run([command, str(script)], capture_output=True, text=True)
    if done.returncode:
        raise RunError(f"sbatch refused: {(done.stderr or done.stdout).strip()}")
    return done.stdout.strip()
