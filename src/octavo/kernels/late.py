"""numba's names, looked up when a kernel is compiled and not before.

Importing numba takes 0.2 s and linking its cached code as long, while a second start compiles
nothing: it maps machine code (``machine_code``). So kernel modules take numba's names from here. A
decorator keeps the function as it is; once numba is to compile one, the real things take their
places in its globals and its closure, and in those of what it calls.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from importlib import import_module
from types import CodeType, FunctionType
from typing import Any, TypeVar

F = TypeVar("F", bound=Callable[..., Any])


class Late:
    """A module, or a name of one, that is imported when it's used."""

    def __init__(self, module: str, name: str | None = None) -> None:
        self._module, self._name = module, name

    def real(self) -> Any:
        module = import_module(self._module)
        return module if self._name is None else getattr(module, self._name)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # whoever looks at a module's names means this object
            raise AttributeError(name)
        return getattr(self.real(), name)

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        return self.real()(*arguments, **options)


class LateFunction:
    """A function that ``decorate()``, one of numba's decorators, is put on when it's used."""

    def __init__(self, function: Callable[..., Any], decorate: Callable[[], Any]) -> None:
        self.function = function
        self._decorate = decorate
        self._made: Any = None

    def real(self) -> Any:
        with _turn:
            if self._made is None:
                ready()
                look_up(self.function)
                self._made = self._decorate()(self.function)
        return self._made

    def __call__(self, *arguments: Any) -> Any:
        return self.real()(*arguments)


numba = Late("numba")
types = Late("numba", "types")
carray = Late("numba", "carray")
cgutils = Late("numba.core.cgutils")

_turn = threading.RLock()
_pending: list[Callable[..., Any]] = []  # plain functions that compiled ones may call


def intrinsic(function: Callable[..., Any] | None = None, **options: Any) -> Any:
    """numba's decorator for what is written in LLVM's IR."""
    if function is None:
        return lambda function: intrinsic(function, **options)

    def decorate() -> Any:
        real = numba.extending.intrinsic
        return real(**options) if options else real

    return LateFunction(function, decorate)


def register_jitable(function: F) -> F:
    """numba's decorator for a plain function that compiled ones may call too."""
    _pending.append(function)
    return function


def ready() -> None:
    """To be called before numba compiles anything."""
    with _turn:
        while _pending:
            function = _pending.pop()
            look_up(function)
            numba.extending.register_jitable(function)


def look_up(function: Callable[..., Any]) -> None:
    """Put the real things where a function has late ones."""
    assert isinstance(function, FunctionType)
    names = function.__globals__
    for name in _names(function.__code__):
        if isinstance(value := names.get(name), Late | LateFunction):
            names[name] = value.real()
    for cell in function.__closure__ or ():
        if isinstance(cell.cell_contents, Late | LateFunction):
            cell.cell_contents = cell.cell_contents.real()


def _names(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)
