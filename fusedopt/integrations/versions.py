"""Which versions of the training libraries fusedopt works with: decided here, refused here.

    [versions] -> Trainer or accelerate loop

``make test-floor`` runs the integrations' tests on the oldest of each, ``make test`` on those of requirements-dev.txt.
"""

from __future__ import annotations

import importlib.metadata
import re
from typing import Any, NamedTuple

from torch import nn


class Supported(NamedTuple):
    """A half-open range of versions, ``oldest <= version < below``, and what is wrong with older ones."""

    oldest: str
    below: str
    why: str

    @property
    def spec(self) -> str:
        """The range as pip takes it."""
        return f">={self.oldest},<{self.below}"


SUPPORTED = {
    "transformers": Supported(
        "5.6.0",
        "6",
        "older Trainers divide the loss of an accumulation window twice, and clip where it cannot be left out",
    ),
    "accelerate": Supported("1.10.0", "2", "older Accelerators have no parallelism_config to look at"),
    "peft": Supported("0.19.0", "1", "older ones make adapters that are added later in the dtype of the base"),
}
"""By distribution name. setup.cfg's extras, requirements-floor.txt and docs/huggingface.md say the same."""

TRAINER_METHODS = (
    "create_accelerator_and_postprocess",
    "create_optimizer",
    "training_step",
    "_clip_grad_norm",
    "_get_grad_norm",
    "_maybe_log_save_evaluate",
    "_save_optimizer_and_scheduler",
    "_load_optimizer_and_scheduler",
)
"""What `FusedOptMixin` overrides: a Trainer without one of them would train as if nothing were overridden."""


def require(*names: str) -> None:
    """Raise unless each library is installed in a supported version.

    Args:
        *names: keys of `SUPPORTED`.

    Raises:
        ImportError: naming the version that is there, the range, and the command that mends it.
    """
    for name in names:
        supported = SUPPORTED[name]
        remedy = f"pip install '{name}{supported.spec}'"
        try:
            version = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            raise ImportError(f"{name} is not installed; {remedy}") from None
        release = _release(version)
        if release < _release(supported.oldest):
            raise ImportError(f"{name} {version} is too old for fusedopt: {supported.why}. {remedy}")
        if release >= _release(supported.below):
            raise ImportError(
                f"{name} {version} is newer than what fusedopt was tested with, below {supported.below}. {remedy}, or "
                "a newer fusedopt"
            )


def require_of(model: nn.Module) -> None:
    """Raise if ``model`` has modules of PEFT, and PEFT is outside the range.

    Raises:
        ImportError: as `require`.
    """
    if any(cls.__module__.partition(".")[0] == "peft" for module in model.modules() for cls in type(module).__mro__):
        require("peft")


def require_trainer(mixin: type, trainer: Any) -> None:
    """Raise unless the Trainer class behind ``mixin`` has every method that is overridden.

    Raises:
        ImportError, TypeError: for versions outside the range, and for a class that is no such Trainer.
    """
    require("transformers", "accelerate")
    order = type(trainer).__mro__
    behind = order[order.index(mixin) + 1 :]
    missing = [name for name in TRAINER_METHODS if not any(name in vars(cls) for cls in behind)]
    if missing:
        version = importlib.metadata.version("transformers")
        raise TypeError(
            f"{type(trainer).__name__} has no {', '.join(missing)} behind {mixin.__name__} (transformers {version}), "
            f"which trains by overriding them. Put it before a Trainer, class Mine({mixin.__name__}, Trainer); where "
            "it is, use another transformers"
        )


def _release(version: str) -> tuple[int, ...]:
    """Return the leading numbers of a version, at least three: 5.24.0.dev0 is (5, 24, 0)."""
    found = re.match(r"\d+(?:\.\d+)*", version)
    numbers = tuple(map(int, found.group().split("."))) if found else ()
    return numbers + (0,) * (3 - len(numbers))
