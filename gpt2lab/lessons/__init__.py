"""What lessons use: `predict` asks, `show`, `explore`, `show_source` and `table` show; and how lessons are built.

The guide for authors is `notebooks/README.md`.
"""

from .display import explore, show, show_source, static, table
from .guesses import predict

__all__ = ["explore", "predict", "show", "show_source", "static", "table"]
