"""What Sphinx is told about the pages of the lessons."""

from docutils import nodes
from docutils.utils.math.latex2mathml import tex2mathml

project = "gpt2lab"
extensions = ["myst_nb"]
html_theme = "sphinx_book_theme"
html_title = "gpt2lab"
html_favicon = "_static/icon.svg"
html_context = {"default_mode": "auto"}
html_static_path = ["_static"]
html_css_files = ["pages.css"]
html_js_files = ["pages.js"]
html_copy_source = False
html_show_copyright = html_show_sphinx = False
html_theme_options = {
    "use_download_button": False,
    "back_to_top_button": False,
    "home_page_in_toc": False,
    "show_toc_level": 2,
    "collapse_navbar": True,
    "navbar_persistent": [],
    "footer_content_items": [],
}
nb_execution_mode = "off"
nb_render_markdown_format = "gfm"
nb_merge_streams = True
myst_enable_extensions = ["colon_fence", "dollarmath", "html_image"]
myst_dmath_allow_space = myst_dmath_allow_digits = False
smartquotes = False  # in tables and hints stand plans and code: --timeout, "slow"
html_math_renderer = "mathml"
myst_heading_anchors = 4
suppress_warnings = [
    "myst.header",
    "myst.xref_missing",
    "mystnb.unknown_mime_type",
    "misc.highlighting_failure",
]


def formula(html, node) -> None:
    """Write a formula as MathML, which a browser shows without a script."""
    block = isinstance(node, nodes.math_block)
    math = tex2mathml(node.astext(), as_block=block)
    html.body.append(f'<div class="math">{math}</div>' if block else math)
    raise nodes.SkipNode


def setup(app) -> None:
    """What Sphinx calls first."""
    app.add_html_math_renderer("mathml", (formula, None), (formula, None))
