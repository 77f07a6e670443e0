"""How functions are compiled by numba, and what its language has no word for."""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

_built: Any = intrinsic  # for a type checker, what it makes takes one argument less


def compiled(function: Any) -> Any:
    """Without the lock of Python, sums in any order."""
    return _made(function, "contract", "reassoc")


def strict(function: Any) -> Any:
    """The same, with sums in the order that is written."""
    return _made(function, "contract")


def _made(function: Any, *liberties: str) -> Any:
    """Kept on disk where there is a place for it."""
    options: dict[str, Any] = {"nogil": True, "error_model": "numpy", "fastmath": set(liberties)}
    try:
        return njit(cache=True, **options)(function)
    except RuntimeError:  # numba found no folder that it may write to
        return njit(**options)(function)


@_built
def bits_of(_typing: Any, _x: Any) -> Any:
    """A float32 as the whole number of its bits."""

    def lower(context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        return builder.bitcast(arguments[0], context.get_value_type(types.int32))

    return types.int32(types.float32), lower


@_built
def float_of(_typing: Any, _x: Any) -> Any:
    """The float32 that has these bits."""

    def lower(context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        return builder.bitcast(arguments[0], context.get_value_type(types.float32))

    return types.float32(types.int32), lower


@_built
def prefetch(_typing: Any, row: Any, _index: Any) -> Any:
    """Ask for the line of memory of an element, which may lie behind the end."""

    def lower(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        array = context.make_array(signature.args[0])(context, builder, arguments[0])
        place = builder.bitcast(builder.gep(array.data, [arguments[1]]), ir.IntType(8).as_pointer())
        number = ir.IntType(32)
        kind = ir.FunctionType(ir.VoidType(), [place.type, number, number, number])
        call = builder.module.declare_intrinsic("llvm.prefetch", [place.type], kind)
        builder.call(call, [place, number(0), number(3), number(1)])  # to read, into all caches, data
        return context.get_dummy_value()

    return types.void(row, types.int64), lower


@_built
def widest(_typing: Any) -> Any:
    """Let the loops of the function it is called in use the widest registers there are: LLVM takes half of 512 bits.

    The builder of LLVM's language knows no such attribute, and would refuse the name.
    """

    def lower(context: Any, builder: Any, _signature: Any, _arguments: Any) -> Any:
        set.add(builder.function.attributes, '"prefer-vector-width"="512"')
        return context.get_dummy_value()

    return types.void(), lower
