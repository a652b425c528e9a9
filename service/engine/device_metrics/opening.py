"""Finds the meter for the engine's device. Owns the choice among libraries, none of which must be there."""

from __future__ import annotations

import torch

from tilewire.service.engine.device_metrics.contract import Address, Meter, NoMeter


def open_meter(device: str) -> Meter:
    """Opens the meter of a device, by the name that torch has for it.

    Raises:
        NoMeter: There is none; the message says why.
    """
    if not device.startswith("cuda"):
        raise NoMeter(f"{device} has no meter")
    address = address_of(device)
    # Imported here and not above: each is there on machines with such a device only.
    try:
        if torch.version.hip is not None:
            from tilewire.service.engine.device_metrics.amd_smi import AmdSmiMeter  # noqa: PLC0415

            return AmdSmiMeter(address)
        from tilewire.service.engine.device_metrics.nvml import NvmlMeter  # noqa: PLC0415

        return NvmlMeter(address)
    except ImportError as error:
        raise NoMeter(f"{error.name} is not installed") from None


def address_of(device: str) -> Address:
    """Finds the physical device of a torch device: torch counts only what it may see, and in an order of its own."""
    properties = torch.cuda.get_device_properties(device)
    pci = (properties.pci_domain_id, properties.pci_bus_id, properties.pci_device_id)  # type: ignore[attr-defined]
    return Address(str(properties.uuid), pci)
