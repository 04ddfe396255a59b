"""The resolved machine: chips, nodes, sites and directed links, in SI units.

Built from a cluster document and the profile catalogue (sim.hardware.build); never edited.
"""

from __future__ import annotations

import msgspec

__all__ = ["Accelerator", "Curve", "HostSide", "Link", "Machine", "Node", "Path", "Rounds"]

Curve = tuple[tuple[float, float], ...]
"""((nbytes [B], fraction of the nominal rate reached), ...), by size; () means 1 everywhere."""

Rounds = dict[str, tuple[float, Curve]]
"""Collective -> (latency [s], curve) of one message, where it differs from a message alone."""


class Accelerator(msgspec.Struct, frozen=True, kw_only=True):
    """One accelerator type.

    Args:
        name: profile name. vendor: maker.
        memory_bytes: [B] physical. memory_bytes_per_s: [B/s] device memory bandwidth.
        peak_flops_per_s: dtype ("fp32", "tf32", "bf16", "fp16", "fp8") -> dense peak [FLOP/s].
        gemm_efficiency: large-product efficiency e0 against the peak (0..1).
        gemm_half: products reach e0 / ((1 + half/m)(1 + half/n)(1 + half/k)).
        attention_efficiency: share of the peak reached by the attention core; it takes
            1 + head_half / width of a head + keys_half / sequence length times as long.
        memory_efficiency: share of the memory bandwidth that elementwise kernels reach.
        optimizer_efficiency: share that the optimizer's step reaches; 0 means the same.
        kernel_overhead_s: [s] fixed cost per kernel-sized piece of work, per block and pass.
        routing_overhead_s: [s] further fixed cost of a pass of a block with routed experts.
        step_overhead_s: [s] fixed cost of a step: the loop around it, clipping, the loader.
        misaligned: share of their rate that products keep whose n or k is no multiple of 64.
        tp_cost, ep_cost, cp_cost: time of collectives inside passes, and sync_cost of sums and
            gathers over replicas, as a multiple of what the links say: below 1 where a framework
            hides part of them, above 1 where they do not reach the links' rate.
        compute_slowdown: factor >= 1 on compute while communication runs on the same chip.
        comm_slowdown: factor >= 1 on communication while compute runs on the same chip.
        async_compute: False where compute blocks the issuer (CPU tensors).
        context_bytes: [B] taken by driver, context and communication library.
        allocator_gap: share of allocated memory the allocator reserves on top.
        price_per_s: [USD/s] per chip, 0 when unknown.
        calibrated: False when no efficiency number of this chip was measured.
        sources: field -> where it was found.
    """

    name: str
    vendor: str = ""
    memory_bytes: float
    memory_bytes_per_s: float
    peak_flops_per_s: dict[str, float]
    gemm_efficiency: float = 0.7
    gemm_half: float = 64.0
    attention_efficiency: float = 0.5
    head_half: float = 0.0
    keys_half: float = 0.0
    memory_efficiency: float = 0.8
    optimizer_efficiency: float = 0.0
    kernel_overhead_s: float = 10e-6
    routing_overhead_s: float = 0.0
    step_overhead_s: float = 0.0
    misaligned: float = 1.0
    tp_cost: float = 1.0
    ep_cost: float = 1.0
    cp_cost: float = 1.0
    sync_cost: float = 1.0
    compute_slowdown: float = 1.0
    comm_slowdown: float = 1.0
    async_compute: bool = True
    context_bytes: float = 1e9
    allocator_gap: float = 0.04
    price_per_s: float = 0.0
    calibrated: bool = False
    sources: dict[str, str] = {}


class Link(msgspec.Struct, frozen=True, kw_only=True):
    """A directed link (one direction of a port, NIC, trunk or WAN route).

    Args:
        name: unique in the machine, e.g. "node3/nic0/out".
        rate: [B/s] nominal, one direction. latency: [s] added once per message crossing it.
        curve: size dependence of the reached rate.
        flow_cap: [B/s] most that one flow gets (window / RTT); 0 means no cap.
        price_per_byte: [USD/B] egress price.
        kind: "fabric", "pcie", "nic", "uplink" or "wan".
        collectives: see ``Rounds``.
    """

    name: str
    rate: float
    latency: float = 0.0
    curve: Curve = ()
    flow_cap: float = 0.0
    price_per_byte: float = 0.0
    kind: str = "nic"
    collectives: Rounds = {}


class HostSide(msgspec.Struct, frozen=True, kw_only=True):
    """What a node's chips share of their host.

    Args:
        shared_by: chips behind one PCIe switch. shared_rate: [B/s] of the switch's way to the host,
            per direction; 0 when no switch is shared.
        both_ways: share of the rate that H2D copies keep while the chip's D2H copies run.
        memory_bytes_per_s, flops_per_s: [B/s], [FLOP/s] that a CPU optimizer reaches, all chips'
            updates together.
        update_s: [s] per parameter, measured; 0 takes the larger of bytes and FLOPs.
        nvme_read, nvme_write: [B/s] of the node's drives. nvme_bytes: [B]; all 0 without drives.
        assumed: what of this nobody stated, in words.
    """

    shared_by: int = 1
    shared_rate: float = 0.0
    both_ways: float = 1.0
    memory_bytes_per_s: float = 0.0
    flops_per_s: float = 0.0
    update_s: float = 0.0
    nvme_read: float = 0.0
    nvme_write: float = 0.0
    nvme_bytes: float = 0.0
    assumed: tuple[str, ...] = ()


class Node(msgspec.Struct, frozen=True, kw_only=True):
    """One host with its accelerators.

    Args:
        index: position in Machine.nodes. profile: node profile name. site: site name.
        island: name of the fast-connected part (one switch fabric) it belongs to.
        accelerator: accelerator name. chips: (first, last + 1) chip indices.
        fabric_rate: [B/s] per chip and direction inside the node. fabric_latency: [s].
        nics: number of NICs. nic_rate: [B/s] per NIC and direction. nic_latency: [s].
        chip_nic: affine NIC of each local chip.
        nonaffine_rate: [B/s] most that a flow gets through a NIC its chip is not affine to; 0 means
            no such cap.
        host_memory_bytes: [B]. pcie_rate: [B/s] host link per direction and chip. host: the rest.
        chip_links: (out, in) indices in Machine.links of each local chip's fabric port; equal where
            the port is half duplex; () in a node of one chip without a fabric.
        nic_links: (out, in) indices of each NIC, likewise.
    """

    index: int
    profile: str
    site: str
    island: str
    accelerator: str
    chips: tuple[int, int]
    fabric_rate: float
    fabric_latency: float = 0.0
    fabric_curve: Curve = ()
    nics: int = 1
    nic_rate: float = 0.0
    nic_latency: float = 0.0
    nic_curve: Curve = ()
    chip_nic: tuple[int, ...] = ()
    nonaffine_rate: float = 0.0
    host_memory_bytes: float = 0.0
    pcie_rate: float = 0.0
    host: HostSide = HostSide()
    chip_links: tuple[tuple[int, int], ...] = ()
    nic_links: tuple[tuple[int, int], ...] = ()

    def nic_of(self, chip: int) -> int:
        """Affine NIC of a chip of this node (numbered in the machine), -1 without NICs."""
        return self.chip_nic[chip - self.chips[0]] if self.chip_nic else -1


class Path(msgspec.Struct, frozen=True):
    """How bytes go from one chip to another.

    Args:
        links: indices into Machine.links, in order.
        latency: [s] sum over the links. rate: [B/s] smallest nominal rate and flow cap on the way.
        curve: size curve of the slowest link.
        price_per_byte: [USD/B] summed. collectives: those that all links know, see ``Rounds``.
    """

    links: tuple[int, ...]
    latency: float
    rate: float
    curve: Curve = ()
    price_per_byte: float = 0.0
    collectives: Rounds = {}


class Machine(msgspec.Struct, frozen=True, kw_only=True):
    """A resolved cluster.

    Args:
        name: for people.
        accelerators: name -> type.
        nodes: in document order; chips are numbered node by node.
        links: all directed links.
        routes: "islandA>islandB" -> link indices between their switches, see sim.hardware.route.
        assumptions: what had to be assumed, in words (stand-ins, guessed latencies ...).
    """

    name: str
    accelerators: dict[str, Accelerator]
    nodes: tuple[Node, ...]
    links: tuple[Link, ...]
    routes: dict[str, tuple[int, ...]] = {}
    assumptions: tuple[str, ...] = ()

    @property
    def num_chips(self) -> int:
        """Number of accelerators in the machine."""
        return self.nodes[-1].chips[1] if self.nodes else 0
