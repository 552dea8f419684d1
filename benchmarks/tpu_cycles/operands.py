"""What a kernel is called with: the arguments of each `pallas_call` of a function, computed on this machine.

A TPU's program is compiled for shapes; how often its loops turn is in the integers that XLA computes in front of it.
The function is traced as for the TPU, and what precedes each kernel is then compiled for this machine and run; what a
kernel returns is not known, and counts as zeros.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.extend
import jax.numpy as jnp
import numpy as np

_CALLS = {"pjit", "jit", "closed_call", "custom_jvp_call", "custom_vjp_call", "core_call", "shard_map", "remat2"}
_LARGE = 1 << 20  # elements: what has more decides nothing


@dataclass(frozen=True, slots=True)
class KernelCall:
    """One kernel's arguments in their order; the length of a grid that is not static is the first of them.

    Attributes:
        name: of the kernel.
        shapes: of all its arguments.
        operands: those that are not large, by their position.
    """

    name: str
    shapes: tuple[tuple[int, ...], ...]
    operands: Mapping[int, np.ndarray]


def kernel_calls(function: Callable[..., Any], avals: Sequence[Any]) -> Callable[[Sequence[Any]], list[KernelCall]]:
    """Returns what computes the kernels' arguments from the function's.

    Args:
        function: as it is lowered, over a mesh if need be.
        avals: shapes of its arguments with their shardings, as it is lowered for.

    Raises:
        TypeError: a kernel is within a loop or a branch, where its arguments are not one.
    """
    closed = jax.make_jaxpr(function)(*avals)
    names: list[tuple[str, tuple[tuple[int, ...], ...]]] = []

    def evaluate(*arguments: Any) -> list[dict[int, Any]]:
        calls: list[tuple[str, list[Any]]] = []
        _evaluate(closed.jaxpr, closed.consts, arguments, calls)
        names[:] = [(name, tuple(np.shape(one) for one in inputs)) for name, inputs in calls]
        return [{i: one for i, one in enumerate(inputs) if np.size(one) < _LARGE} for _, inputs in calls]

    compiled = jax.jit(evaluate)

    def at(arguments: Sequence[Any]) -> list[KernelCall]:
        found = compiled(*jax.tree.leaves(arguments))
        return [
            KernelCall(name, shapes, {i: np.asarray(one) for i, one in operands.items()})
            for (name, shapes), operands in zip(names, found, strict=True)
        ]

    return at


def _evaluate(jaxpr: Any, consts: Sequence[Any], arguments: Sequence[Any], calls: list[Any]) -> list[Any]:
    values: dict[Any, Any] = {}

    def read(atom: Any) -> Any:
        return atom.val if isinstance(atom, jax.extend.core.Literal) else values[atom]

    values.update(zip(jaxpr.constvars, consts, strict=True))
    values.update(zip(jaxpr.invars, arguments, strict=True))
    for equation in jaxpr.eqns:
        inputs = [read(atom) for atom in equation.invars]
        name = equation.primitive.name
        inner = next((equation.params[key] for key in ("jaxpr", "call_jaxpr") if key in equation.params), None)
        if name == "pallas_call":
            calls.append((_name(equation.params), inputs))
            outputs = [jnp.zeros(variable.aval.shape, variable.aval.dtype) for variable in equation.outvars]
        elif name in _CALLS and inner is not None:
            body, constants = (inner, []) if isinstance(inner, jax.extend.core.Jaxpr) else (inner.jaxpr, inner.consts)
            outputs = _evaluate(body, constants, inputs, calls)
        elif "pallas_call" in str(list(equation.params.values())):
            raise TypeError(f"a kernel within {name} is called on more than one set of arguments: it is not followed")
        else:
            found = equation.primitive.bind(*inputs, **equation.params)
            outputs = found if equation.primitive.multiple_results else [found]
        values.update(zip(equation.outvars, outputs, strict=True))
    return [read(atom) for atom in jaxpr.outvars]


def _name(params: Any) -> str:
    return str(params.get("name") or params["name_and_src_info"].name)
