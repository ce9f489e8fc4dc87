"""Run All of every lesson in a real JupyterLab: no error, nothing on stderr, no control that breaks at either end.

`make test` takes one lesson, another with each commit; `make test-all` takes all.
"""

import re

import psutil
import pytest
import tiers
from test_lab import TROUBLE, shot, wait_until_all_ran, wait_until_ready

from gpt2lab.classroom import NOTEBOOKS

LESSONS = sorted(path.stem for path in NOTEBOOKS.glob("*.ipynb"))
TODAY = LESSONS[(tiers.commits() or 0) % len(LESSONS)]
pytestmark = pytest.mark.timeout(900)

CURRENT = "path => window.jupyterapp.shell.currentWidget?.context?.path === path"
FURTHER = """() => {
    const panel = document.querySelector('.jp-Notebook .jp-WindowedPanel-outer, .jp-Notebook.jp-WindowedPanel-outer');
    const before = panel.scrollTop;
    panel.scrollTop += panel.clientHeight - 40;
    return panel.scrollTop > before;
}"""
IDLE = """async () => {
    const kernel = window.jupyterapp.shell.currentWidget.sessionContext.session.kernel;
    await kernel.requestKernelInfo();
    return kernel.status;
}"""


def opened(chromium, lab, name):
    """A lesson in the lab and no other, its kernel ready and its outputs cleared."""
    page = chromium.new_page(viewport={"width": 1280, "height": 1000})
    page.broken = []
    page.on("pageerror", lambda error: page.broken.append(str(error)))
    page.goto(re.sub(r"/lab[^?]*", f"/lab/tree/work/{name}.ipynb", lab) + "&reset")
    wait_until_ready(page)
    page.wait_for_function(CURRENT, arg=f"work/{name}.ipynb", timeout=60_000)
    page.evaluate("() => window.jupyterapp.commands.execute('notebook:clear-all-cell-outputs')")
    return page


def settle(page):
    """Wait until the kernel has drawn what the controls say: idle twice, with time for a message between."""
    calm = 0
    for _ in range(600):
        calm = calm + 1 if page.evaluate(IDLE) == "idle" else 0
        if calm == 2:
            return
        page.wait_for_timeout(100)
    raise TimeoutError("the kernel is busy for a minute after a control was moved")


def to_both_ends(page):
    """Move every control, of explorers and of step players, to its last and first value and wait for the pictures."""
    for slider in page.locator(".widget-slider .noUi-handle").all():
        for key in ("End", "Home"):
            slider.focus()
            page.keyboard.press(key)
            settle(page)
    for menu in page.locator(".widget-dropdown select").all():
        for choice in (menu.locator("option").count() - 1, 0):
            menu.select_option(index=choice)
            settle(page)
    for step in page.locator(".jp-OutputArea-output input[aria-label='step']").all():
        for key in ("End", "Home"):
            step.focus()
            page.keyboard.press(key)
            assert step.input_value() == step.get_attribute("max" if key == "End" else "min")


def read_through(page, name):
    """Screenshots of the lesson from its first line to its last."""
    page.locator(".jp-Cell").first.scroll_into_view_if_needed()
    for number in range(100):
        shot(page, f"whole_{name[:2]}_{number:02d}")
        if not page.evaluate(FURTHER):
            return


@pytest.mark.parametrize(
    "name", [pytest.param(x, marks=[] if x == TODAY else pytest.mark.slow) for x in LESSONS]
)
def test_run_all_of_a_lesson_and_its_controls(chromium, lab, name):
    page = opened(chromium, lab, name)
    page.evaluate("() => { window.jupyterapp.commands.execute('notebook:run-all-cells'); }")
    wait_until_all_ran(page)
    to_both_ends(page)
    assert page.evaluate(TROUBLE) == [] and page.broken == []
    moving = page.locator(
        ".jp-CodeCell", has=page.locator(".widget-slider, .widget-dropdown, [aria-label='step']")
    )
    for number, cell in enumerate(moving.all()):
        cell.scroll_into_view_if_needed()
        shot(page, f"lesson_{name[:2]}_{number}")
    read_through(page, name)
    page.evaluate("() => window.jupyterapp.shell.currentWidget.sessionContext.shutdown()")
    page.close()


def test_no_port_is_open_but_the_labs_own(chromium, lab):
    page = opened(chromium, lab, LESSONS[0])
    (port,) = re.findall(r"127\.0\.0\.1:(\d+)", lab)
    tree = psutil.Process().children(recursive=True)
    kernels = [p for p in tree if "gpt2lab.machine.kernel" in p.cmdline()]
    servers = [p for p in tree if p not in kernels and re.search("jupyter.lab", " ".join(p.cmdline()))]
    assert kernels and ports(kernels) == [] and ports(servers) == [int(port)]
    page.close()


def ports(processes):
    """The TCP ports on which processes listen."""
    return [c.laddr.port for p in processes for c in p.net_connections("tcp") if c.status == "LISTEN"]
