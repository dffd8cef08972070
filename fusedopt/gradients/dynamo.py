"""Let torch.compile trace a model while gradients hang on it.

Dynamo refuses an fp32 ``.grad`` on a bf16 parameter. Around each trace the gradients of all live
wrappers are taken off and hung back, the same objects: users need not know.

Knows nothing of layers or of the step.
"""

from __future__ import annotations

import weakref
from typing import Any

from torch import Tensor, nn

from fusedopt.buffers.flat import Buffers

_live: weakref.WeakSet[Buffers] = weakref.WeakSet()
_num_traces = 0
_taken_off: list[tuple[nn.Parameter, Tensor]] = []


def watch(buffers: Buffers) -> None:
    """Take the gradients of ``buffers`` off around every trace, as long as it lives.

    Call it again now and then: ``torch._dynamo.reset()`` clears the callbacks.
    """
    from torch._dynamo.callback import callback_handler as handler  # heavy; importing fusedopt must not pay for it

    _live.add(buffers)
    if _take_off not in handler.start_callbacks:
        handler.register_start_callback(_take_off)
    if _hang_back not in handler.end_callbacks:
        handler.register_end_callback(_hang_back)


def has_traced() -> bool:
    """Return whether anything was compiled while a wrapper lived: compiled code checks the class of parameters."""
    return _num_traces > 0


def _take_off(args: Any) -> None:
    global _num_traces
    # The other triggers (a lazily compiled backward, autotuning) run inside a backward, whose sums must stay.
    if args.callback_trigger.name != "DYNAMO":
        return
    _num_traces += 1
    for buffers in _live:
        for entry in buffers.entries:
            entry.param.data_ptr()  # whoever looks at a pending parameter makes it a plain one; see `gather`
            grad = entry.param.grad
            if grad is not None and grad.dtype is not entry.param.dtype:
                _taken_off.append((entry.param, grad))
                entry.param.grad = None


def _hang_back(args: Any) -> None:
    while _taken_off:
        param, grad = _taken_off.pop()
        # A wrapper that was freed during the trace gave its parameters their own gradient dtype back.
        param.grad = grad if param.grad_dtype in (None, grad.dtype) else grad.to(param.grad_dtype)
