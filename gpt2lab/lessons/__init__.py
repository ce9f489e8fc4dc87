"""What lessons use to show things (`show`, `explore`, `show_source`, `table`), and how lessons are built.

The guide for authors is `notebooks/README.md`.
"""

from .display import explore, show, show_source, static, table

__all__ = ["explore", "show", "show_source", "static", "table"]
