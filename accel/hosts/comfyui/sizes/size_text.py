"""Sizes and numbers from text that a person typed."""

from __future__ import annotations

import re

from ....sizing.resolution import Size


def parse_sizes(text: str) -> list[Size]:
    """Sizes in pixels from text such as "1024x1024, 720x960".

    Raises ValueError: a part is not a size; the message shows a valid one.
    """
    sizes = []
    for part in _parts(text):
        match = re.fullmatch(r"(\d+)\s*[x×*]\s*(\d+)", part)
        if match is None or not all(16 <= int(side) <= 16384 for side in match.groups()):
            raise ValueError(f"{part!r} is not a size: write width x height in pixels, 16 to 16384, as in 720x960.")
        sizes.append(Size(int(match[1]), int(match[2])))
    return sizes


def parse_numbers(text: str, name: str, largest: int) -> list[int]:
    """Whole numbers from text such as "1, 2, 4".

    Raises ValueError: a part is not a number from 1 to `largest`.
    """
    numbers = []
    for part in _parts(text):
        if not part.isdecimal() or not 1 <= int(part) <= largest:
            raise ValueError(f"{part!r} is not valid for {name}: write whole numbers from 1 to {largest}, as in 1, 4.")
        numbers.append(int(part))
    return numbers


class Limit(str):
    """The least or largest number allowed in a text such as "1, 2, 4", as an input's `min` or `max`.

    Core compares a value with these before the run and marks that input alone, where what `validate_inputs` refuses
    marks all that it is given. A text with anything but numbers is below any limit.
    """

    def __gt__(self, text: str) -> bool:
        return not all(part.isdecimal() and int(part) >= int(self) for part in _parts(text))

    def __lt__(self, text: str) -> bool:
        return any(part.isdecimal() and int(part) > int(self) for part in _parts(text))


def _parts(text: str) -> list[str]:
    return [part.strip() for part in re.split(r"[,;\n]", text) if part.strip()]
