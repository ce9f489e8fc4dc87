"""`make lab` in a real browser: lesson 00 opens, Run All reaches its end, sliders move pictures, nothing is fetched."""

import os
import re
import socket
from contextlib import suppress
from pathlib import Path
from urllib.error import HTTPError
from urllib.parse import urlsplit
from urllib.request import urlopen

import pytest
from playwright.sync_api import TimeoutError

pytestmark = pytest.mark.timeout(400)

READY = """async () => {
    const app = window.jupyterapp;
    await app.restored;
    const panel = app.shell.currentWidget;
    if (!panel || !panel.sessionContext) return 'no notebook';
    await panel.context.ready; await panel.revealed; await panel.sessionContext.ready;
    const kernel = panel.sessionContext.session && panel.sessionContext.session.kernel;
    if (!kernel) return 'no kernel';
    await kernel.info;
    if (kernel.connectionStatus !== 'connected') return kernel.connectionStatus;
    await kernel.requestKernelInfo();
    return kernel.status;
}"""

ALL_RAN = """() => {
    const prompts = [...document.querySelectorAll('.jp-CodeCell .jp-InputArea-prompt')];
    return prompts.length > 0 && prompts.every(p => /^\\[\\d+\\]:$/.test(p.textContent.trim()));
}"""

TROUBLE = """() => [...document.querySelectorAll(
    ".jp-OutputArea-output[data-mime-type='application/vnd.jupyter.error'], " +
    ".jp-OutputArea-output[data-mime-type='application/vnd.jupyter.stderr']")].map(e => e.innerText)"""

BEGUN = """() => [...document.querySelectorAll('.jp-CodeCell .jp-InputArea-prompt')]
    .some(p => /^\\[(\\d+|\\*)\\]:$/.test(p.textContent.trim()))"""

CELLS = """() => [...document.querySelectorAll('.jp-CodeCell')].map(cell => ['prompt', 'input', 'output'].map(
    part => cell.querySelector({prompt: '.jp-InputArea-prompt', input: '.jp-InputArea-editor',
        output: '.jp-OutputArea'}[part])?.innerText.slice(0, 400)))"""

CHANGED = """([cell, old]) => {
    const pictures = [...cell.querySelectorAll('.jp-OutputArea-output img')];
    return pictures.length > 0 && pictures.pop().src !== old;
}"""


@pytest.fixture(scope="module")
def page(chromium, lab):
    """Lesson 00, opened at the printed address, all cells run once."""
    page = chromium.new_page(viewport={"width": 1280, "height": 1000})
    page.foreign = set()
    page.broken = []
    host = urlsplit(lab).netloc
    page.on("request", lambda r: urlsplit(r.url).netloc in (host, "") or page.foreign.add(r.url))
    page.on("pageerror", lambda error: page.broken.append(str(error)))
    page.goto(lab)
    wait_until_ready(page)
    shot(page, "1_opened")
    page.evaluate("() => window.jupyterapp.commands.execute('notebook:clear-all-cell-outputs')")
    assert not page.evaluate(ALL_RAN)
    run_all(page)
    wait_until_all_ran(page)
    yield page
    shot(page, "4_end")
    page.close()


def wait_until_ready(page):
    """Wait until the kernel answers; the idle sign in the toolbar comes too early (JupyterLab issue 8490)."""
    page.wait_for_function("() => window.jupyterapp", timeout=60_000)
    page.wait_for_selector(".jp-Notebook .jp-CodeCell", timeout=60_000)
    for _ in range(600):
        if page.evaluate(READY) == "idle":
            return
        page.wait_for_timeout(100)
    raise TimeoutError(page.evaluate(READY))


def run_all(page, clicks: int = 3):
    """Click it in the menu, as a student does; again where nothing begins, because the menu was not ready yet."""
    for _ in range(clicks):
        page.get_by_role("menuitem", name="Run", exact=True).click()
        page.get_by_role("menuitem", name="Run All Cells", exact=True).click()
        with suppress(TimeoutError):
            page.wait_for_function(BEGUN, timeout=20_000)
            return
    raise TimeoutError(
        f"Run All Cells was clicked {clicks} times, and no cell has begun: {page.evaluate(READY)}"
    )


def wait_until_all_ran(page):
    """Wait until every code cell has a number; raises with the first that has none where one failed or takes long."""
    try:
        page.wait_for_function(f"() => ({ALL_RAN})() || ({TROUBLE})().length", timeout=300_000)
    except TimeoutError as error:
        cell = next(cell for cell in page.evaluate(CELLS) if not re.match(r"\[\d+\]:", cell[0].strip()))
        raise TimeoutError(f"this cell has not run after five minutes: {cell}") from error
    assert page.evaluate(TROUBLE) == []


def shot(page, name):
    """Keep a screenshot where GPT2LAB_SHOTS says."""
    if folder := os.environ.get("GPT2LAB_SHOTS"):
        page.screenshot(path=str(Path(folder, f"{name}.png")))


def test_make_lab_opens_lesson_00(page):
    title = page.locator(".jp-Notebook .jp-MarkdownCell h1").first.inner_text()
    assert title.startswith("00 Start here")


def test_nothing_pops_up_and_covers_the_lesson(page):
    assert page.locator(".Toastify__toast, .jp-Dialog").all_inner_texts() == []


def test_names_of_lessons_can_be_read_beside_it(page):
    shown = page.evaluate(
        "() => [...document.querySelectorAll('.jp-DirListing-itemText')]"
        ".map(e => [e.innerText, e.clientWidth / e.scrollWidth])"
    )
    names = dict(shown)
    assert "00_start_here.ipynb" in names
    cut = [n for n, part in names.items() if len(Path(n).stem) > part * len(n)]
    assert cut == [], "more than their ending is cut off"


def test_run_all_reaches_the_end_and_exercises_are_to_do(page):
    errors = page.locator(".jp-OutputArea-output[data-mime-type='application/vnd.jupyter.error']")
    assert errors.count() == 0, errors.first.inner_text()
    text = page.locator(".jp-Notebook").inner_text()
    assert text.count("TODO ") >= 4 and "PASS " not in text.replace("`PASS`", "")


def test_ranks_print_into_their_cell_and_figures_have_captions(page):
    text = page.locator(".jp-Notebook").inner_text()
    assert "[rank 3] hello, I am rank 3 of 4" in text
    pictures = page.locator(".jp-OutputArea-output img")
    captions = page.locator(".jp-OutputArea-output em")
    assert 0 < pictures.count() <= captions.count()


def test_a_verdict_is_in_colour_and_a_click_enlarges_a_figure(page):
    badge = page.locator(".jp-OutputArea-output b", has_text="TODO").first
    assert badge.evaluate("e => getComputedStyle(e).backgroundColor") == "rgb(87, 96, 106)"
    figure = page.locator(".gpt2lab-figure img").first
    figure.scroll_into_view_if_needed()
    wide = "e => e.getBoundingClientRect().width"
    before = figure.evaluate(wide)
    figure.click()
    assert figure.evaluate(wide) > 1.5 * before
    shot(page, "5_enlarged")
    figure.click()
    assert figure.evaluate(wide) == before


def test_a_slider_moves_the_picture(page):
    cell = page.locator(".jp-CodeCell", has=page.locator(".widget-slider")).first
    cell.scroll_into_view_if_needed()
    handle, picture = cell.locator(".noUi-handle").first, cell.locator(".jp-OutputArea-output img").last
    picture.wait_for(state="visible", timeout=20_000)
    shot(page, "2_slider")
    before, number = picture.get_attribute("src"), cell.locator(".widget-readout").first.inner_text()
    handle.focus()
    for _ in range(4):
        page.keyboard.press("ArrowRight")
    page.wait_for_function(CHANGED, arg=[cell.element_handle(), before], timeout=20_000)
    shot(page, "3_moved")
    assert cell.locator(".widget-readout").first.inner_text() != number


def test_a_guess_is_a_click_and_stands_beside_the_result(page):
    buttons = page.locator(".jp-CodeCell .widget-toggle-buttons button")
    beside = page.locator(".jp-OutputArea-output", has_text=re.compile(r"^(It is|You said) "))
    assert "No guess was given" in beside.inner_text()
    buttons.first.scroll_into_view_if_needed()
    shot(page, "6_asked")
    buttons.first.click()
    page.wait_for_function("line => line.innerText.startsWith('You said none;')", arg=beside.element_handle())
    shot(page, "7_guessed")
    page.wait_for_function(
        "button => button.classList.contains('mod-active')", arg=buttons.first.element_handle()
    )


def test_nothing_is_fetched_from_elsewhere_and_nothing_breaks(page):
    assert page.foreign == set() and page.broken == []


def test_the_server_listens_on_the_loopback_only_and_wants_its_token(page, lab):
    port = urlsplit(lab).port
    own = {found[4][0] for found in socket.getaddrinfo(socket.gethostname(), None, socket.AF_INET)}
    for host in own - {"127.0.0.1"}:
        with socket.socket() as s:
            s.settimeout(1)
            assert s.connect_ex((host, port)) != 0, f"reachable at {host}"
    with pytest.raises(HTTPError, match="403"):
        urlopen(f"http://127.0.0.1:{port}/api/contents", timeout=5)
