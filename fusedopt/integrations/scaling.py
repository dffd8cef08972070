"""The loss scaler of an accelerate ``Accelerator``, in a loop or in a Trainer, over gradients in parts.

Needs accelerate only where it is called.
"""

from __future__ import annotations

from typing import Any


def share_scaler(accelerator: Any) -> None:
    """Have ``accelerator`` scale losses, if it does, with a scaler that decides on all ranks together.

    Each rank sees its share of the gradients.

    Raises:
        RuntimeError: if an optimizer was prepared already, which has the scaler of before.
    """
    from accelerate.utils import DistributedType, get_grad_scaler  # type: ignore[import-untyped]

    scaler = accelerator.scaler
    if scaler is None or hasattr(scaler, "process_group"):
        return
    if accelerator._optimizers:
        raise RuntimeError(
            "under a shard fp16 losses need one scaler for all ranks, and this Accelerator prepared another optimizer "
            "with its own; call fusedopt.integrations.accelerate.prepare before accelerator.prepare"
        )
    accelerator.scaler = get_grad_scaler(
        DistributedType.FSDP,
        device=accelerator.device.type,
        init_scale=scaler.get_scale(),
        growth_factor=scaler.get_growth_factor(),
        backoff_factor=scaler.get_backoff_factor(),
        growth_interval=scaler.get_growth_interval(),
        enabled=scaler.is_enabled(),
    )
