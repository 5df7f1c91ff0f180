"""Machine code that can lie on disk and be mapped without numba and LLVM.

LLVM compiles into an object file. Laid out once, what is left to do wherever it is put is to add
its own address, or that of a function of libc, libm or Python, to some of its words. Only ELF for
x86-64 is read; what else an object asks for makes it a :class:`NotMovableError`, and the code stays
where LLVM put it. Format: System V ABI, AMD64 supplement, version 1.0, sections 4.1 to 4.4.
"""

from __future__ import annotations

import ctypes
import json
import mmap
import platform
import struct
import sys
from dataclasses import dataclass
from functools import cache

_SECTION = struct.Struct("<IIQQQQIIQQ")
_SYMBOL = struct.Struct("<IBBHQQ")
_RELOCATION = struct.Struct("<QQq")
_WORD = struct.Struct("<q")
_SYMBOLS, _RELOCATIONS, _NO_BITS = 2, 4, 8  # kinds of sections
_WRITABLE, _IN_MEMORY = 1, 2  # their flags
_UNDEFINED, _ABSOLUTE, _COMMON = 0, 0xFFF1, 0xFFF2  # instead of a symbol's section
_R_64, _R_PC32, _R_PLT32, _R_PC64 = 1, 2, 4, 24

# What numba's own library has and code that raises would call. None does: it would abort.
_NEVER_CALLED = ("numba_", "NRT_Free", "NRT_MemInfo_call_dtor")


class NotMovableError(Exception):
    """An object file, or a symbol, that isn't understood here."""


@dataclass(frozen=True)
class Image:
    """``code`` is laid out for address 0 and begins at ``entry``. To the 64-bit words at ``places``
    the address of a symbol is added, of "" that of the image."""

    code: bytes
    entry: int
    places: list[tuple[int, str]]

    def to_bytes(self) -> bytes:
        head = json.dumps({"entry": self.entry, "places": self.places}).encode()
        return head + b"\n" + self.code


def from_bytes(raw: bytes) -> Image:
    head, _, code = raw.partition(b"\n")
    fields = json.loads(head)
    return Image(code, fields["entry"], fields["places"])


def works_here() -> bool:
    """Whether this is a system whose object files are understood."""
    return sys.platform == "linux" and platform.machine() == "x86_64" and sys.maxsize > 2**32


def lay_out(elf: bytes, entry: str) -> Image:
    """The image of an object file whose code begins at the symbol ``entry``."""
    sections = _sections(elf)
    code, starts = bytearray(), {}
    for number, (kind, flags, offset, size, *_, alignment, _) in enumerate(sections):
        if flags & _IN_MEMORY and size:
            if flags & _WRITABLE:
                raise NotMovableError("a section is written to")
            code += bytes(-len(code) % max(alignment, 1))
            starts[number] = len(code)
            code += bytes(size) if kind == _NO_BITS else elf[offset : offset + size]
    tables = [section for section in sections if section[0] == _SYMBOLS]
    if len(tables) != 1:
        raise NotMovableError(f"{len(tables)} symbol tables")
    symbols = _symbols(elf, tables[0], sections, starts, code)
    places: list[tuple[int, str]] = []
    for kind, _, offset, size, _, target, _, _ in sections:
        if kind == _RELOCATIONS and target in starts:
            for where, info, addend in _RELOCATION.iter_unpack(elf[offset : offset + size]):
                name, value = symbols[info >> 32]
                kind_of, at = info & 0xFFFFFFFF, starts[target] + where
                _relocate(code, places, at, kind_of, name, value, addend)
    found = [value for name, value in symbols if name == entry and value is not None]
    if len(found) != 1:
        raise NotMovableError(f"no symbol {entry}")
    return Image(bytes(code), found[0], places)


def _sections(elf: bytes) -> list[tuple[int, ...]]:
    """Kind, flags, offset, size, link, info, alignment, size of an entry, of each."""
    if elf[:6] != b"\x7fELF\x02\x01" or struct.unpack_from("<HH", elf, 16) != (1, 62):
        raise NotMovableError("not an object file for x86-64")
    (start,) = struct.unpack_from("<Q", elf, 40)
    size, count = struct.unpack_from("<HH", elf, 58)
    rows = [_SECTION.unpack_from(elf, start + size * i) for i in range(count)]
    return [(row[1], row[2], *row[4:]) for row in rows]


def _symbols(
    elf: bytes,
    table: tuple[int, ...],
    sections: list[tuple[int, ...]],
    starts: dict[int, int],
    code: bytearray,
) -> list[tuple[str, int | None]]:
    """Name and place in the image of each, None where others have it. Room is made for those that
    are to be cleared memory: numba's pointers to environments, which none of our code sets."""
    _, _, offset, size, names_at, *_ = table
    names = elf[sections[names_at][2] :]
    symbols: list[tuple[str, int | None]] = []
    for name_at, _, _, section, value, length in _SYMBOL.iter_unpack(elf[offset : offset + size]):
        name = names[name_at : names.index(b"\0", name_at)].decode()
        if section == _COMMON:
            code += bytes(-len(code) % value)
            symbols.append((name, len(code)))
            code += bytes(length)
        elif section in starts:
            symbols.append((name, starts[section] + value))
        else:  # undefined, or of a section that isn't there: an error only where it's used
            symbols.append((name if section == _UNDEFINED else "?", None))
    return symbols


def _relocate(
    code: bytearray,
    places: list[tuple[int, str]],
    where: int,
    kind: int,
    name: str,
    value: int | None,
    addend: int,
) -> None:
    if kind == _R_64 and name != "?":
        _WORD.pack_into(code, where, addend + (value or 0))
        places.append((where, name if value is None else ""))
        if name.startswith("NRT_") and not name.startswith(_NEVER_CALLED) and value is None:
            raise NotMovableError("it allocates memory")
    elif kind == _R_PC64 and value is not None:
        _WORD.pack_into(code, where, value + addend - where)
    elif kind in (_R_PC32, _R_PLT32) and value is not None:
        struct.pack_into("<i", code, where, value + addend - where)
    else:
        raise NotMovableError(f"relocation {kind} against {name or 'a section'}")


def place(image: Image) -> int:
    """Put an image into memory, for as long as the process lives (a thread may run it to the end);
    the address of its entry."""
    libc = _libc()
    code = bytearray(image.code)
    private, written = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, mmap.PROT_READ | mmap.PROT_WRITE
    base = libc.mmap(None, len(code), written, private, -1, 0)
    if base in (None, ctypes.c_void_p(-1).value):
        raise NotMovableError("no memory")
    for where, name in image.places:
        address = _address(name) if name else base
        _WORD.pack_into(code, where, _WORD.unpack_from(code, where)[0] + address)
    ctypes.memmove(base, bytes(code), len(code))
    if libc.mprotect(base, len(code), mmap.PROT_READ | mmap.PROT_EXEC):
        libc.munmap(base, len(code))
        raise NotMovableError("memory can't be made executable")
    return int(base) + image.entry


@cache
def _address(name: str) -> int:
    """Of a symbol of Python, libc or libm."""
    if name.startswith(_NEVER_CALLED):
        name = "abort"
    for library in (ctypes.pythonapi, _libc(), ctypes.CDLL("libm.so.6")):
        try:
            return ctypes.addressof(ctypes.c_char.in_dll(library, name))
        except ValueError:
            continue
    raise NotMovableError(f"symbol {name}")


@cache
def _libc() -> ctypes.CDLL:
    libc = ctypes.CDLL(None)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    return libc
