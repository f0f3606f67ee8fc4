"""Shardings as Orbax writes them, with which it restores onto the devices of the save without being told."""

from __future__ import annotations

import base64
import json
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["decode", "encode", "is_of_one_device", "saved"]


def encode(sharding: jax.sharding.Sharding) -> str | None:
    """None for kinds that Orbax does not know."""
    if isinstance(sharding, jax.sharding.SingleDeviceSharding):
        (device,) = sharding.device_set
        return json.dumps({"sharding_type": "SingleDeviceSharding", "device_str": str(device)})
    if isinstance(sharding, jax.sharding.NamedSharding):
        return _named(sharding)
    return None


def _named(sharding: jax.sharding.NamedSharding) -> str:
    mesh = sharding.mesh
    return json.dumps(
        {
            "sharding_type": "NamedSharding",
            "shape": list(mesh.shape.values()),
            "axis_names": list(mesh.axis_names),
            "axis_types": [str(kind) for kind in mesh.axis_types],
            "partition_spec": list(sharding.spec),
            "device_mesh": {"mesh": _ids(mesh.devices.tolist())},
        }
    )


def _ids(devices: Any) -> Any:
    return [_ids(each) for each in devices] if isinstance(devices, list) else {"id": devices.id}


def saved(document: bytes) -> dict[str, str]:
    """The shardings of a `_sharding` file by leaf, as they are encoded. Raises ValueError for what is none."""
    raw = json.loads(document)
    if not isinstance(raw, dict):
        raise ValueError("no shardings")
    return {base64.urlsafe_b64decode(name).decode(): str(value) for name, value in raw.items()}


def decode(text: str) -> jax.sharding.Sharding | None:
    """None if it is of devices that are not there, or of a kind that is not known."""
    try:
        raw = json.loads(text)
        kind = raw["sharding_type"]
        if kind == "SingleDeviceSharding":
            named = {_device_name(str(device)): device for device in jax.local_devices()}
            return jax.sharding.SingleDeviceSharding(named[_device_name(raw["device_str"])])
        return _mesh_sharding(raw) if kind == "NamedSharding" else None
    except (ValueError, LookupError, TypeError, AttributeError):
        return None


def is_of_one_device(text: str) -> bool:
    return '"SingleDeviceSharding"' in text


def _mesh_sharding(raw: Mapping[str, Any]) -> jax.sharding.Sharding:
    devices = {device.id: device for device in jax.devices()}
    stored = raw.get("device_mesh")
    ids = list(devices) if stored is None else _flat_ids(stored["mesh"])
    grid = np.array([devices[number] for number in ids]).reshape(raw["shape"])
    kinds = raw.get("axis_types")
    types = None if kinds is None else tuple(getattr(jax.sharding.AxisType, kind.rpartition(".")[2]) for kind in kinds)
    mesh: Any = jax.sharding.Mesh(grid, tuple(raw["axis_names"]), axis_types=types)
    partition: Any = jax.sharding.PartitionSpec
    spec = partition(*(tuple(axis) if isinstance(axis, list) else axis for axis in raw["partition_spec"]))
    return jax.sharding.NamedSharding(mesh, spec)


def _flat_ids(mesh: Any) -> list[int]:
    return [number for each in mesh for number in _flat_ids(each)] if isinstance(mesh, list) else [mesh["id"]]


def _device_name(text: str) -> str:
    return text.replace("TFRT_CPU_", "cpu:")  # as jax called them before 0.10
