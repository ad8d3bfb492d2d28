"""The torch side of a mesh: process groups by axis, passed as an argument and never global."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn.parallel import DistributedDataParallel

from partita.facts.mesh import Mesh


class Groups:
    """``groups["dp"]`` and ``groups["dp", "cp"]`` are device meshes of one dim; several meshes can live in one process.

    Every rank must make it, and every first use of an axis, in the same order.  ``replicate`` wraps a module that is
    copied over a group; a dry run gives a stand-in, because DDP's reducer touches data that fake tensors do not have.
    """

    def __init__(
        self, mesh: Mesh, device: str = "cpu", replicate: Callable[..., Any] = DistributedDataParallel
    ) -> None:
        self.mesh = mesh
        self.replicate = replicate
        sizes, names = tuple(n for _, n in mesh.sizes), mesh.names
        self.root: DeviceMesh = init_device_mesh(device, sizes, mesh_dim_names=names)
        self._flat: dict[tuple[str, ...], DeviceMesh] = {}

    @property
    def rank(self) -> int:
        return dist.get_rank()

    @property
    def coordinate(self) -> dict[str, int]:
        return self.mesh.coordinate(self.rank)

    def __getitem__(self, axes: str | tuple[str, ...]) -> DeviceMesh:
        names = (axes,) if isinstance(axes, str) else axes
        live = self.mesh.live(*names) or self.mesh.atoms(*names)[:1]
        if len(live) == 1:
            return self.root[live[0]]
        if live not in self._flat:
            self._flat[live] = self.root[live]._flatten("_".join(live))
        return self._flat[live]

    def pair(self, slow: tuple[str, ...], fast: tuple[str, ...]) -> DeviceMesh:
        """A mesh of two dims, each the flattened axes given."""
        names = tuple(self._name(axes) for axes in (slow, fast))
        return self.root[names]

    def _name(self, axes: tuple[str, ...]) -> str:
        """The dim of the root that ``axes`` are, flattened where they are several."""
        dim = self[axes].mesh_dim_names
        assert dim is not None
        return dim[0]

    def group(self, *axes: str) -> dist.ProcessGroup | None:
        """The process group along ``axes``; None where they have one rank."""
        return self[axes].get_group() if self.mesh.live(*axes) else None
