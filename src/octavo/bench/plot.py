"""Time against context as an SVG file, drawn by hand: a plot needs no plotting library."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape

from octavo.bench.attention import Cell

WIDTH, MIN_HEIGHT = 760, 470
LEFT, RIGHT, TOP, BOTTOM = 70, 200, 50, 60  # margins; the legend stands in the right one
COLOURS = ("#0b6fb8", "#d1495b", "#2a9134", "#8e5ea2", "#c77b0a", "#4d4d4d")  # told apart by all
UNSPLIT_DASH = "6 4"


def plot_attention(cells: Sequence[Cell], title: str) -> str:
    """A line for each backend, shape and batch, its unsplit form dashed; both axes logarithmic."""
    lines: dict[tuple[str, str, int], dict[str, list[Cell]]] = {}
    for cell in cells:
        key = cell.backend, cell.heads, cell.batch
        lines.setdefault(key, {}).setdefault(cell.split_kv, []).append(cell)
    height = max(MIN_HEIGHT, TOP + 40 * len(lines) + 40)  # that the legend fits
    contexts = sorted({cell.context for cell in cells})
    times = [cell.us for cell in cells]
    low = 10 ** math.floor(math.log10(min(times)))
    high = 10 ** math.ceil(math.log10(max(times)) + 1e-9)

    def x(context: int) -> float:
        return _place(context, contexts[0], contexts[-1], LEFT, WIDTH - RIGHT)

    def y(us: float) -> float:
        return _place(us, low, high, height - BOTTOM, TOP)

    parts = [_text(LEFT, 26, title, size=15)]
    for context in contexts:
        parts.append(_line(x(context), TOP, x(context), height - BOTTOM))
        parts.append(_text(x(context), height - BOTTOM + 18, _tokens(context), anchor="middle"))
    for decade in range(round(math.log10(low)), round(math.log10(high)) + 1):
        parts.append(_line(LEFT, y(10**decade), WIDTH - RIGHT, y(10**decade)))
        parts.append(_text(LEFT - 8, y(10**decade) + 4, _time(10**decade), anchor="end"))
    middle = (LEFT + WIDTH - RIGHT) / 2
    parts.append(_text(middle, height - 16, "tokens of context", anchor="middle"))
    for number, (key, modes) in enumerate(lines.items()):
        colour = COLOURS[number % len(COLOURS)]
        for mode, found in modes.items():
            points = [(x(cell.context), y(cell.us)) for cell in found]
            parts += _curve(points, colour, dashed=mode == "off")
        backend, heads, batch = key
        place = TOP + 12 + number * 40
        parts += _curve([(WIDTH - RIGHT + 16, place), (WIDTH - RIGHT + 46, place)], colour)
        parts.append(_text(WIDTH - RIGHT + 54, place + 4, f"{backend}, batch {batch}"))
        parts.append(_text(WIDTH - RIGHT + 54, place + 19, heads, grey=True))
    if any("off" in modes for modes in lines.values()):
        place = TOP + 12 + len(lines) * 40
        ends = [(WIDTH - RIGHT + 16, place), (WIDTH - RIGHT + 46, place)]
        parts += _curve(ends, COLOURS[-1], dashed=True)
        parts.append(_text(WIDTH - RIGHT + 54, place + 4, "dashed: unsplit"))
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" '
        f'width="{WIDTH}" height="{height}" font-family="sans-serif">'
        f'<rect width="{WIDTH}" height="{height}" fill="white"/>{"".join(parts)}</svg>\n'
    )


def _place(value: float, low: float, high: float, start: float, stop: float) -> float:
    if low == high:
        return (start + stop) / 2
    return start + (stop - start) * math.log(value / low) / math.log(high / low)


def _curve(points: Sequence[tuple[float, float]], colour: str, dashed: bool = False) -> list[str]:
    dash = f' stroke-dasharray="{UNSPLIT_DASH}"' if dashed else ""
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    return [
        f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"{dash}/>',
        *(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colour}"/>' for x, y in points),
    ]


def _line(x1: float, y1: float, x2: float, y2: float) -> str:
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="#dddddd"/>'


def _text(
    x: float, y: float, text: str, *, anchor: str = "start", size: int = 12, grey: bool = False
) -> str:
    colour = "#666666" if grey else "#222222"
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" fill="{colour}" '
        f'text-anchor="{anchor}">{escape(text)}</text>'
    )


def _tokens(count: int) -> str:
    return f"{count // 1024}K" if count % 1024 == 0 else str(count)


def _time(us: float) -> str:
    if us >= 1e6:
        return f"{us / 1e6:g} s"
    return f"{us / 1e3:g} ms" if us >= 1e3 else f"{us:g} µs"
