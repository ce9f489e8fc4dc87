"""Draw the pictures that README and lessons show and that are not outputs: `python -m gpt2lab.plots.draw FOLDER`."""

import sys
from pathlib import Path

from .moving import moving_step
from .rooms import rooms
from .strategies import strategies
from .style import save_figure

PICTURES = {"step.svg": moving_step, "strategies.svg": strategies, "rooms.svg": rooms}
"""File name -> the function that draws it, called without arguments; it returns a figure or the text of an SVG."""


def draw_all(folder) -> list[Path]:
    """Draw every picture into a folder and return the paths."""
    return [save_figure(picture(), Path(folder, name)) for name, picture in PICTURES.items()]


if __name__ == "__main__":
    for path in draw_all(sys.argv[1]):
        print(path)
