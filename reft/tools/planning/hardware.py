"""Machines, by their published figures. Nothing here was fitted to a result of reft or of its papers.

Where a figure is an assumption and not published, its line says so.
"""

from __future__ import annotations

from dataclasses import dataclass

GB = 1e9
GIB = 2**30
GBIT = 1e9 / 8

PCIE_3_X16 = 15.75 * GB  # PCI-SIG: 8 GT/s, 128b/130b
PCIE_4_X16 = 31.5 * GB
PCIE_5_X16 = 63.0 * GB
LINK_EFFICIENCY = 0.8
"""Part of a link's line rate that large pinned copies reach: packet headers and flow control leave 80 to
85 % (NVIDIA's bandwidthTest: 12 to 13 GB/s on PCIe 3.0 x16)."""
PAGEABLE_SHARE = 0.39
"""Bandwidth of a copy into memory that is not pinned against one that is: 2.3 against 5.9 GB/s in NVIDIA's
"How to Optimize Data Transfers in CUDA C/C++" (developer blog, 2012)."""


@dataclass(frozen=True)
class Machine:
    """A cluster's node, from the view of one of its devices.

    Attributes:
        name: of the device.
        devices_per_node: GPUs (on MI250X: GCDs).
        peak_flops: half precision with matrix units, dense. achieved_flops: in published LLM training.
        memory_bytes: device memory. memory_bytes_per_sec: its bandwidth.
        host_link_bytes_per_sec: line rate of the link to the host, one direction.
        devices_per_host_link: devices that share it when all copy at once.
        network_bytes_per_sec: of the whole node, one direction.
        network_over_host_link: traffic of the network takes the device's host link.
        network_through_host: and is staged in host memory, so it takes the shared part too.
    """

    name: str
    devices_per_node: int
    peak_flops: float
    achieved_flops: float
    memory_bytes: int
    memory_bytes_per_sec: float
    host_link_bytes_per_sec: float
    devices_per_host_link: int
    network_bytes_per_sec: float
    network_over_host_link: bool = True
    network_through_host: bool = False

    @property
    def copy_bytes_per_sec(self) -> float:
        """Device to pinned host memory, all devices at once: D2H in the tables."""
        return LINK_EFFICIENCY * self.host_link_bytes_per_sec / self.devices_per_host_link

    @property
    def network_share_bytes_per_sec(self) -> float:
        """One device's share of the node's network."""
        return self.network_bytes_per_sec / self.devices_per_node

    def compute_slowdown(self, copy_bytes_per_sec: float) -> float:
        """How many times longer a computation takes beside a copy.

        The copy takes its part of the memory's bandwidth; a computation bound by memory loses all of
        that part, so this is an upper bound for the others. Nothing else is shared: copy engines
        use no compute units.
        """
        return 1.0 + copy_bytes_per_sec / self.memory_bytes_per_sec

    def link_slowdown(self, copy_bytes_per_sec: float) -> float:
        """How many times longer transfers and copies take beside each other.

        On a link that both need and that cannot carry both, each is slowed alike.
        """
        if not self.network_over_host_link:
            return 1.0
        sharing = self.devices_per_host_link if self.network_through_host else 1
        link = LINK_EFFICIENCY * self.host_link_bytes_per_sec / sharing
        return max(1.0, (copy_bytes_per_sec + self.network_share_bytes_per_sec) / link)


V100 = Machine(
    name="V100",
    devices_per_node=4,  # REFT: each GPU is linked by NVLink to three others
    peak_flops=125e12,  # NVIDIA V100 datasheet, SXM2
    achieved_flops=39e12,  # Shoeybi et al. 2019 (Megatron-LM), 1.2B parameters on one V100
    memory_bytes=16 * GIB,
    memory_bytes_per_sec=900 * GB,  # datasheet
    host_link_bytes_per_sec=PCIE_3_X16,
    devices_per_host_link=2,  # assumed, as in DGX-1: four switches for eight GPUs
    network_bytes_per_sec=100 * GBIT,  # REFT: 100 Gbps between nodes
    network_through_host=True,  # assumed: no GPUDirect on the testbed's network
)

MI250X = Machine(
    name="MI250X",
    devices_per_node=8,  # Frontier user guide: four MI250X, eight GCDs
    peak_flops=191.5e12,  # AMD: 383 for the two GCDs
    achieved_flops=0.384 * 191.5e12,  # Dash et al. 2023, 22B parameters on Frontier: 38.4 %
    memory_bytes=64 * GIB,
    memory_bytes_per_sec=1.6e12,  # AMD, per GCD
    host_link_bytes_per_sec=36 * GB,  # Frontier user guide: Infinity Fabric, per GCD
    devices_per_host_link=1,
    network_bytes_per_sec=4 * 200 * GBIT,  # Frontier user guide: four Slingshot interfaces
    network_over_host_link=False,  # Frontier user guide: the interfaces hang on the GPUs
)

A100 = Machine(
    name="A100",
    devices_per_node=8,
    peak_flops=312e12,  # NVIDIA A100 datasheet
    achieved_flops=138e12,  # Narayanan et al. 2021: 137 to 163 for 1.7B to 1T parameters
    memory_bytes=80 * 10**9,
    memory_bytes_per_sec=2.039e12,  # datasheet, 80 GB SXM
    host_link_bytes_per_sec=PCIE_4_X16,
    devices_per_host_link=2,  # DGX A100 system architecture
    network_bytes_per_sec=8 * 200 * GBIT,  # DGX A100: eight HDR interfaces
)

H100 = Machine(
    name="H100",
    devices_per_node=8,
    peak_flops=989e12,  # NVIDIA H100 datasheet, SXM, dense
    achieved_flops=400e12,  # The Llama 3 Herd of Models: 16,384 GPUs, 41 %
    memory_bytes=80 * 10**9,
    memory_bytes_per_sec=3.35e12,  # datasheet
    host_link_bytes_per_sec=PCIE_5_X16,
    devices_per_host_link=2,  # assumed, as in DGX A100
    network_bytes_per_sec=8 * 400 * GBIT,  # DGX H100: eight NDR interfaces
)

MACHINES = {machine.name.lower(): machine for machine in (V100, MI250X, A100, H100)}
