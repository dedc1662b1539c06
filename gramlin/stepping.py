"""What hooks on an optimizer's steps have to know: whose steps they see, whether one is made inside another."""

import sys
from collections.abc import Iterable
from types import FrameType
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

# The function of torch that runs the hooks around each step, of a subclass as of the class below it.
_HOOKS_CALLER = Optimizer.profile_hook_step(lambda optimizer: None).__code__


def check_optimizer(optimizer: Optimizer, parameters: Iterable[Tensor]) -> None:
    """Raise unless hooks on the optimizer's steps see each change that its steps make to the parameters.

    Raises:
        TypeError: not a ``torch.optim.Optimizer``, such as a scheduler or a wrapper around an optimizer.
        ValueError: a wrapper that changes the parameters through an optimizer of its own, whose steps and their order
            cannot be known from outside (SAM, Lookahead), or that does not run torch's step hooks.
    """
    if not isinstance(optimizer, Optimizer):
        kind = type(optimizer).__name__
        held = {name for name, value in getattr(optimizer, "__dict__", {}).items() if isinstance(value, Optimizer)}
        hint = f" (this {kind} has one, .{min(held)})" if held else ""
        raise TypeError(f"optimizer: got a {kind}; pass the torch.optim.Optimizer that makes the steps{hint}")
    kind, wanted = type(optimizer).__name__, {id(parameter) for parameter in parameters}
    inner = [
        (name, each)
        for name, value in vars(optimizer).items()
        for each in (value if isinstance(value, (list, tuple)) else [value])
        if isinstance(each, Optimizer)
    ]
    for name, each in inner:
        if wanted & {id(parameter) for group in each.param_groups for parameter in group["params"]}:
            raise ValueError(
                f"{kind} leaves its steps to another optimizer, the {type(each).__name__} in its .{name}: attach to "
                f"that base optimizer (what {kind} does to the weights besides is no step of it)"
            )
    # torch.optim.Optimizer.__init__ prepares both; a wrapper that does not call it would never run a hook.
    if not getattr(type(optimizer).step, "hooked", False) or not hasattr(optimizer, "_optimizer_step_pre_hooks"):
        raise ValueError(
            f"{kind}.step does not run step hooks, for {kind} did not call Optimizer.__init__: attach to the base "
            f"optimizer, the one that {kind} makes its steps with"
        )


def has_closure(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a step, by the arguments that its hooks are given, will compute gradients itself."""
    return any(argument is not None for argument in (*args[1:], *kwargs.values()))


def is_nested_step(optimizer: Optimizer) -> bool:
    """Whether a step hook was called by a step inside another one of the same optimizer, as ``super().step()`` is.

    torch runs the hooks of both. The stack is asked, for a count of the steps begun and ended would be left wrong by a
    step that raises.
    """
    frame: FrameType | None = sys._getframe()
    steps = 0
    while frame is not None:
        code = frame.f_code
        # "in", for torch.compile splits the function and names the pieces after it.
        if code.co_filename == _HOOKS_CALLER.co_filename and _HOOKS_CALLER.co_name in code.co_name:
            steps += frame.f_locals.get("self") is optimizer
        frame = frame.f_back
    return steps > 1
