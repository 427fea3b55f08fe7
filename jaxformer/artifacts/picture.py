"""Pictures, written whole and under a title that is shown as it is."""

import os
import warnings
from pathlib import Path


def write_figure(figure, title: str, path: Path, dpi: int) -> None:
    """Write a matplotlib figure to a PNG; a reader, or a kill, finds the old one or the new one.

    No mathematics is read in the title: names of runs are the user's, and may hold a `$`. A
    character that the font lacks is drawn as a box.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    FigureCanvasAgg(figure)
    figure.suptitle(title, parse_math=False)
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=r"Glyph \d+ .* missing from font")
        figure.savefig(temporary, dpi=dpi, format="png")
    os.replace(temporary, path)
