"""The pages of `make site` in a real browser: nothing breaks, nothing is fetched from elsewhere, sliders move.

Two lessons are built here; `make test-all` builds all of them.
"""

import os
import re
import subprocess
import threading
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import nbformat
import pytest

from gpt2lab.classroom import NOTEBOOKS, lessons_named
from gpt2lab.classroom.lighter import lighten
from gpt2lab.classroom.site import write_pages

ROOT = Path(__file__).parents[2]
SPHINX = ROOT / ".venv-site" / "bin" / "sphinx-build"
pytestmark = pytest.mark.timeout(600)

CONTRAST = """(selector) => {
    const light = c => { const [r, g, b] = c.match(/[\\d.]+/g).map(Number).map(v => v / 255)
        .map(v => v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
        return 0.2126 * r + 0.7152 * g + 0.0722 * b; };
    const element = document.querySelector(selector);
    let back = element;
    while (back && /rgba\\(0, 0, 0, 0\\)|transparent/.test(getComputedStyle(back).backgroundColor))
        back = back.parentElement;
    const paper = getComputedStyle(back || document.body).backgroundColor;
    const [a, b] = [getComputedStyle(element).color, paper].map(light);
    return (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
}"""


FORMULAS = """() => [...document.querySelectorAll('article p')].map(p => p.textContent)
    .filter(text => /\\$[A-Za-z\\\\][^$]*\\$/.test(text))"""

HIDDEN = """() => [...document.querySelectorAll('.cell_output pre, .tag_exercise .cell_input pre')]
    .filter(e => e.scrollWidth > e.clientWidth + 1).map(e => e.textContent.slice(0, 60))"""
"""What is printed, and what an exercise asks for, so far as its end lies behind a scroll bar."""

APART = """() => [...document.querySelectorAll('article div.math')].filter(e =>
    e.firstChild.getBoundingClientRect().left > e.getBoundingClientRect().left + 30).map(e => e.textContent)"""
"""Formulas that are pushed to the right edge of the text."""

WEIGHT = """() => performance.getEntries().filter(e => !/\\.(png|svg)$/.test(e.name.split('?')[0]))
    .reduce((sum, e) => sum + (e.encodedBodySize || 0), 0)"""
HEAVIEST = 400_000
"""Bytes of a page with all that it loads, its pictures apart."""


LAST = "() => document.querySelector('.projector').firstChild.getBoundingClientRect().bottom / innerHeight"
"""Where the last line of a slide ends, as a part of the height."""
TITLES = (
    "() => [...document.querySelectorAll('article :is(h1, h2, h3)')].map(e => e.textContent.replace('#', ''))"
)
TEN = "10_sequence_splitting.html"


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *_):
        pass


def build(folder, names):
    """Pages of some lessons, built as `make site` does."""
    if not SPHINX.exists():
        pytest.skip("what builds the pages is not installed here: make .venv-site/stamp")
    write_pages(folder / "source", lessons_named(NOTEBOOKS, names), teachers=True)
    words = [SPHINX, "-q", "-b", "html", "-d", folder / "trees", folder / "source", folder / "pages"]
    done = subprocess.run(words, capture_output=True, text=True)
    assert done.returncode == 0 and "ERROR" not in done.stderr, done.stderr
    lighten(folder / "pages")
    return folder / "pages"


@pytest.fixture(scope="module")
def site(tmp_path_factory, request):
    """The address of two built lessons, and the folder with their pages."""
    names = getattr(request, "param", ["07", "10"])
    pages = build(tmp_path_factory.mktemp("site"), names)
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(pages)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/", pages
    server.shutdown()
    server.server_close()


@pytest.fixture
def page(chromium, site):
    """A page that notes what breaks and what it asks of other hosts."""
    page = chromium.new_page(viewport={"width": 1280, "height": 1000})
    page.broken, page.foreign = [], set()
    page.on("console", lambda message: message.type == "error" and page.broken.append(message.text))
    page.on("pageerror", lambda error: page.broken.append(str(error)))
    page.on("request", lambda r: r.url.startswith((site[0], "data:", "blob:")) or page.foreign.add(r.url))
    yield page
    page.close()


def shot(page, name):
    """Keep a screenshot where GPT2LAB_SHOTS says."""
    if folder := os.environ.get("GPT2LAB_SHOTS"):
        page.screenshot(path=str(Path(folder, f"site_{name}.png")))


def walk(page, site):
    """Open every page; nothing may break, come from elsewhere, lack a description or be wider than a phone."""
    address, pages = site
    page.set_viewport_size({"width": 390, "height": 844})
    for file in sorted(pages.glob("*.html")):
        page.goto(address + file.name)
        page.wait_for_load_state("networkidle")
        undescribed = page.evaluate(
            "() => [...document.querySelectorAll('article img')].filter(i => i.alt.length < 10).map(i => i.src)"
        )
        assert not undescribed, (file.name, undescribed)
        wide = page.evaluate("() => document.documentElement.scrollWidth - window.innerWidth")
        assert wide <= 0, f"{file.name} is {wide} pixels too wide for a phone"
        raw = page.evaluate(FORMULAS)
        assert not raw, f"{file.name} shows formulas as they are typed: {raw}"
        assert not page.evaluate(HIDDEN), (file.name, page.evaluate(HIDDEN))
        assert not page.evaluate(APART), (file.name, page.evaluate(APART))
        assert not page.broken and not page.foreign, (file.name, page.broken, page.foreign)
        assert file.stat().st_size < page.evaluate(WEIGHT) < HEAVIEST, (file.name, page.evaluate(WEIGHT))


def test_every_page_opens_whole_on_a_phone_and_asks_nobody_else(page, site):
    walk(page, site)
    page.goto(site[0] + "07_pipeline.html")
    shot(page, "phone")


@pytest.mark.slow
@pytest.mark.parametrize("site", [[]], indirect=True, ids=["all"])
def test_every_page_of_all_lessons_opens(page, site):
    walk(page, site)
    for file in sorted(site[1].glob("[0-9]*.html")):
        assert len([*turned(page, site[0] + file.name)]) >= 12


def test_every_figure_of_a_notebook_is_on_its_page(page, site):
    for lesson in lessons_named(NOTEBOOKS, ["07", "10"]):
        notebook = nbformat.read(NOTEBOOKS / f"{lesson.name}.ipynb", 4)
        outputs = [o for cell in notebook.cells for o in cell.get("outputs", ())]
        alts = [o.metadata["image/png"]["alt"] for o in outputs if "image/png" in o.get("data", {})]
        page.goto(f"{site[0]}{lesson.name}.html")
        assert (
            page.evaluate("() => [...document.querySelectorAll('.cell_output img')].map(i => i.alt)") == alts
        )


def test_a_slider_moves_the_picture_by_keyboard_and_says_where_it_is(page, site):
    page.goto(site[0] + "07_pipeline.html")
    box = page.locator(".explorer").first
    slider, picture = box.get_by_label("ranks", exact=True), box.locator("img")
    before, said = picture.get_attribute("src"), box.locator("figcaption").inner_text()
    slider.focus()
    page.keyboard.press("ArrowRight")
    assert picture.get_attribute("src") != before and box.locator("figcaption").inner_text() != said
    assert slider.get_attribute("aria-valuetext") == box.locator("output").nth(1).inner_text()
    page.wait_for_function("() => document.querySelector('.explorer img').naturalWidth > 100")
    box.get_by_role("button", name="play micros").click()  # the player goes through all steps by itself
    last = box.get_by_label("micros", exact=True)
    page.wait_for_function("s => s.value === s.max", arg=last.element_handle(), timeout=20_000)
    shot(page, "slider")
    assert not page.broken


def test_solutions_are_folded_and_open(page, site):
    page.goto(site[0] + "07_pipeline.html")
    fold = page.locator("details.hide", has_text="Show a solution").first
    code = fold.locator("pre")
    assert not code.is_visible()
    fold.locator("summary").click()
    assert code.is_visible() and "NotImplementedError" not in code.inner_text()


def test_search_finds_zigzag(page, site):
    page.goto(site[0] + "search.html?q=zigzag")
    page.wait_for_selector("ul.search li a")
    assert page.locator("ul.search li a[href^='10_sequence_splitting']").count() > 0
    found = page.locator("ul.search li a").all_inner_texts()
    assert len(found) == len(set(found)), "a teacher's page has a title of its own"


def test_the_first_page_says_for_whom_how_long_and_where_to_start(page, site):
    page.goto(site[0] + "index.html")
    said = page.locator("article").inner_text()
    assert all(word in said for word in ("For whom", "hours with all exercises", "MIT", "micro-batches"))
    assert re.search(r"07 Pipeline parallelism\s+run stages[^\n]*\s+\d+\s+10 Splitting", said)
    page.locator("a.start").click()
    page.wait_for_url("**/07_pipeline.html")


@pytest.mark.parametrize("mode", ["light", "dark"])
def test_text_code_and_links_are_readable(page, site, mode):
    page.add_init_script(f"localStorage.setItem('mode', '{mode}'); localStorage.setItem('theme', '{mode}');")
    page.goto(site[0] + "07_pipeline.html")
    assert page.evaluate("() => document.documentElement.dataset.theme") == mode
    for selector in (
        "article p",
        "article pre",
        "article h2",
        "article p a",
        ".explorer label",
        ".explorer figcaption",
    ):
        assert page.evaluate(CONTRAST, selector) >= 4.5, selector
    assert (
        page.evaluate("() => getComputedStyle(document.querySelector('.cell_output img')).filter") == "none"
    )
    shot(page, mode)


def test_a_click_enlarges_a_figure_on_a_phone_and_another_key_closes_it(page, site):
    page.set_viewport_size({"width": 390, "height": 844})
    page.goto(site[0] + "07_pipeline.html")
    figures = page.locator(".cell_output img").all()
    assert len(figures) >= 10
    for figure in (one for one in figures if one.is_visible()):
        figure.click()
        assert page.locator("dialog.enlarged img").get_attribute("src") == figure.evaluate("e => e.src")
        page.keyboard.press("Escape")
    small = figure.evaluate("e => e.getBoundingClientRect().width")
    figure.click()
    large = page.locator("dialog.enlarged img")
    assert large.get_attribute("alt") == figure.get_attribute("alt")
    assert large.evaluate("e => e.getBoundingClientRect().width") > 1.5 * small
    page.keyboard.press("Escape")
    assert page.locator("dialog.enlarged").count() == 0
    figure.click()
    large.click()
    assert page.locator("dialog.enlarged").count() == 0
    page.set_viewport_size({"width": 1280, "height": 844})
    figure.click()
    assert page.locator("dialog.enlarged").evaluate("e => e.scrollWidth - e.clientWidth") == 0


def test_figures_have_two_dots_for_one_but_those_of_cells_that_measure(page, site):
    page.goto(site[0] + "07_pipeline.html")
    page.wait_for_load_state("networkidle")
    drawn = ".explorer img, .cell:not(.tag_measured, .tag_remove-input, .tag_poster) > .cell_output img"
    dots = page.locator(drawn).evaluate_all(
        "found => found.map(e => e.naturalWidth / e.getBoundingClientRect().width)"
    )
    assert len(dots) >= 4 and min(dots) > 2


def test_the_menu_of_colours_and_the_folded_contents_work_without_the_scripts_that_are_left_out(page, site):
    page.goto(site[0] + "07_pipeline.html")
    page.locator(".theme-switch-button").click()
    page.get_by_role("button", name="Dark").click()
    assert page.evaluate("() => document.documentElement.dataset.theme") == "dark"
    bar = page.locator("#pst-primary-sidebar")
    before = bar.bounding_box()["x"]
    page.locator(".primary-toggle").click()
    page.wait_for_function(
        "x => document.querySelector('#pst-primary-sidebar').getBoundingClientRect().x < x", arg=before
    )
    assert not page.broken


def test_pages_follow_each_other_and_terms_lead_to_the_glossary(page, site):
    page.goto(site[0] + "07_pipeline.html")
    page.locator("article a[href='glossary.html#bubble']").first.click()
    page.wait_for_url("**/glossary.html#bubble")
    assert page.locator("#bubble").is_visible()
    page.goto(site[0] + "07_pipeline.html")
    page.locator("a.right-next").click()
    page.wait_for_url("**/10_sequence_splitting.html")
    page.goto(site[0] + "teachers.html")
    page.locator("article a[href='teach_07_pipeline.html']").click()
    page.wait_for_url("**/teach_07_pipeline.html")
    assert "Expected misconceptions" in page.locator("article").inner_text()


def turned(page, address):
    """Go through the slides of a page: each is whole and not half empty. Yields each as it is shown."""
    page.set_viewport_size({"width": 1280, "height": 720})
    page.goto(f"{address}?slides")
    deck = page.locator(".projector[data-place]")
    count = int(deck.get_attribute("data-place").split("/")[1])
    for number in range(1, count + 1):
        assert deck.get_attribute("data-place") == f"{number} / {count}"
        assert page.evaluate("() => fits(document.querySelector('.projector'))"), f"slide {number} is cut off"
        assert page.evaluate(LAST) > 0.5, f"slide {number} of {address} is half empty"
        small = float(page.locator(".projector > div").evaluate("slide => slide.style.zoom")) < 0.79
        assert not small or "more rows stand on the page" in deck.inner_text(), (
            f"slide {number} has small letters"
        )
        yield deck
        page.keyboard.press("ArrowRight")


def test_the_projector_shows_text_and_figures_and_only_tagged_code(page, site):
    seen, pictures, code = [], 0, ""
    for deck in turned(page, site[0] + "07_pipeline.html"):
        seen.append(deck.inner_text())
        pictures += deck.locator("img").count()
        code += "".join(deck.locator(".cell_input").all_inner_texts())
        if len(seen) == 4:
            shot(page, "slide")
    assert len(seen) >= 12 and "The one-minute version" in seen[0]
    assert pictures >= 8 and "def both_send_first" in code
    assert "NotImplementedError" not in "".join(seen) and "import" not in code.replace("\n    import", "")
    page.keyboard.press("Escape")
    page.wait_for_url(lambda url: "slides" not in url)
    assert page.locator("article h1").is_visible() and not page.broken


def test_what_is_short_goes_on_the_slide_of_its_neighbour(page, site):
    slides = [deck.locator("h1, h2, h3").all_inner_texts() for deck in turned(page, site[0] + TEN)]
    assert any(len(set(titles)) > 1 for titles in slides)
    assert all(len(set(titles)) == len(titles) for titles in slides), "a title stands once on a slide"
    page.goto(site[0] + TEN)
    titles = page.evaluate(TITLES)
    shown = [title.rstrip("#") for part in slides for title in part]
    assert list(dict.fromkeys(shown)) == [title for title in titles if title in shown]
    assert set(titles) - set(shown) <= {"Setup"}, "every section that shows something has a slide"


def test_what_is_too_long_for_a_slide_goes_on_on_the_next(page, site):
    """Two dozen rows, and a program of three functions: nothing is lost, and the letters stay large."""
    page.set_viewport_size({"width": 1280, "height": 720})
    page.goto(site[0] + "07_pipeline.html")
    page.evaluate("""() => {
        const body = document.querySelector('.cell_output tbody');
        while (body.rows.length < 24) body.append(body.rows[0].cloneNode(true));
        document.querySelector('.tag_slide pre').innerHTML =
            [1, 2, 3].map((n) => `<span>def f${n}():</span>\\n` + '    pass\\n'.repeat(14)).join('\\n\\n');
        project(); }""")
    rows, code = 0, ""
    for _ in range(12):
        assert float(page.locator(".projector > div").evaluate("slide => slide.style.zoom")) >= 0.79
        rows += page.locator(".projector tbody tr", has_text="gpt2").count()
        code += "".join(page.locator(".projector .cell_input").all_inner_texts())
        page.keyboard.press("ArrowRight")
    assert rows == 24 and code.count("def f") == 3 and code.count("pass") == 42


def test_a_long_table_ends_where_its_slide_does(page, site):
    page.set_viewport_size({"width": 1280, "height": 720})
    page.goto(site[0] + "07_pipeline.html")
    page.evaluate("""() => {
        const body = document.querySelector('.cell_output tbody');
        for (let i = 0; i < 100; i += 1) body.append(body.rows[0].cloneNode(true));
        project(); }""")
    for _ in range(100):
        if (more := page.locator(".projector p", has_text="more rows stand on the page")).count():
            break
        page.keyboard.press("ArrowRight")
    rows = page.locator(".projector tbody tr").count()
    assert rows > 5 and 100 < rows + int(more.inner_text().split()[0]) < 110
    assert page.evaluate("() => fits(document.querySelector('.projector'))")
