"""The page in a browser: nothing sticks out on a phone or a desk, and everything can be read in both colour schemes."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from html import escape, unescape
from pathlib import Path
from typing import Any

import pytest

from tests.db.conftest import PUSH, a_winner
from tests.report.test_ladder import DOCUMENTS
from tests.report.test_page import COMPARED, SMALL, made, some_trials

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")
BROWSER = os.environ.get("AUTOTAX_BROWSER") or next(filter(None, map(shutil.which, BROWSERS)), None)
WIDTHS = {"phone": 360, "tablet": 768, "desk": 1280}
SCHEMES = {"light": 1, "dark": 0}
LEAST_CONTRAST, LEAST_OF_MARKS = 4.5, 3.0
"""Least contrast of text and of graphics in the Web Content Accessibility Guidelines."""
PROBE = """
const found = {};
const wait = [...document.querySelectorAll('iframe')].map(frame => new Promise(done => frame.onload = done));
Promise.all(wait).then(() => {
  for (const frame of document.querySelectorAll('iframe')) {
    const page = frame.contentDocument, root = page.documentElement;
    const style = element => frame.contentWindow.getComputedStyle(element);
    page.querySelectorAll('details').forEach(each => each.open = true);
    const out = [...page.body.querySelectorAll('*')].filter(each =>
      !each.closest('.wide') && !each.closest('.skip') && each.getBoundingClientRect().right > root.clientWidth + 1);
    const cut = [...page.querySelectorAll('svg')].flatMap(svg => {
      const whole = svg.getBoundingClientRect();
      return [...svg.querySelectorAll('text')].filter(text => {
        const own = text.getBoundingClientRect();
        return own.left < whole.left - 1 || own.right > whole.right + 1;
      }).map(text => text.textContent);
    });
    const texts = [...page.querySelectorAll('h1, p, th, td, a, dd, figcaption, summary, label, svg text, .loss')];
    const marks = [...page.querySelectorAll('svg [fill^="#"], svg [stroke^="#"], i.dot')].map(each =>
      each.getAttribute('fill') || each.getAttribute('stroke') || style(each).backgroundColor);
    const chosen = page.getElementById('only-1');
    chosen.checked = true;
    const dimmed = [...page.querySelectorAll('.by-variant svg [fill^="#"]')].map(each =>
      [each.getAttribute('fill'), style(each).opacity]);
    found[frame.name] = {
      width: root.scrollWidth, out: out.map(each => each.outerHTML.slice(0, 80)), cut,
      paper: style(page.body).backgroundColor,
      inks: [...new Set(texts.map(each => style(each)[each.tagName == 'text' ? 'fill' : 'color']))],
      marks: [...new Set(marks.filter(colour => colour.startsWith('#')))],
      dimmed, only: style(chosen.parentElement.querySelector('.dot')).backgroundColor,
      unnamed: page.querySelectorAll('svg:not([role=img]), svg:not(:has(> title))').length,
      unreachable: [...page.querySelectorAll('.wide')].filter(each => each.tabIndex != 0 || !each.ariaLabel).length,
    };
  }
  document.body.textContent = JSON.stringify(found);
});
"""

pytestmark = pytest.mark.skipif(BROWSER is None, reason=f"none of {', '.join(BROWSERS)} is installed")


def seen(folder: Path, content: str, scheme: str) -> dict[str, Any]:
    """The findings of PROBE in the page at each width."""
    page = f'height="800" srcdoc="{escape(content)}"'
    frames = [f'<iframe name="{name}" width="{width}" {page}></iframe>' for name, width in WIDTHS.items()]
    (folder / "probe.html").write_text(f"<!doctype html><body>{''.join(frames)}<script>{PROBE}</script>")
    flags = [
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--virtual-time-budget=20000",
        f"--user-data-dir={folder / 'profile'}",
    ]
    flags += [f"--blink-settings=preferredColorScheme={SCHEMES[scheme]}", "--dump-dom", (folder / "probe.html").as_uri()]
    shown = subprocess.run([str(BROWSER), *flags], capture_output=True, text=True, timeout=280)
    body = re.search(r"<body>(\{.*\})</body>", shown.stdout, re.DOTALL)
    assert body, shown.stdout[-500:] + shown.stderr[-2000:]
    pages: dict[str, Any] = json.loads(unescape(body[1]))
    return pages


def luminance(colour: str) -> float:
    """Relative luminance of `#rrggbb` or `rgb(r, g, b)`."""
    digits = colour.lstrip("#")
    parts = (
        [int(digits[at : at + 2], 16) for at in (0, 2, 4)]
        if colour[0] == "#"
        else [int(n) for n in re.findall(r"\d+", colour)[:3]]
    )
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in (part / 255 for part in parts)]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one: str, other: str) -> float:
    dark, bright = sorted((luminance(one), luminance(other)))
    return (bright + 0.05) / (dark + 0.05)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_in_a_browser(tmp_path: Path, scheme: str) -> None:
    loss = a_winner(2, PUSH, problem=SMALL, speedup=0.97, interval_low=0.95, interval_high=0.99)
    pages = seen(tmp_path, made([a_winner(1), loss], some_trials(), [COMPARED, *DOCUMENTS]), scheme)
    assert pages.keys() == WIDTHS.keys()
    for name, page in pages.items():
        assert page["width"] <= WIDTHS[name], f"{name}: the page is wider than its window: {page['out']}"
        assert not page["out"] and not page["cut"], f"{name}: {page['out']} sticks out, {page['cut']} is cut"
        assert (luminance(page["paper"]) < 0.1) == (scheme == "dark")
        faint = {ink: contrast(ink, page["paper"]) for ink in page["inks"] if contrast(ink, page["paper"]) < LEAST_CONTRAST}
        faint |= {mark: contrast(mark, page["paper"]) for mark in page["marks"] if contrast(mark, page["paper"]) < LEAST_OF_MARKS}
        assert not faint and len(page["marks"]) >= 5
        assert page["unnamed"] == 0 and page["unreachable"] == 0
        shown = {opacity for colour, opacity in page["dimmed"] if luminance(colour) == luminance(page["only"])}
        others = {opacity for colour, opacity in page["dimmed"] if luminance(colour) != luminance(page["only"])}
        assert others == {"0.1"} and shown <= {"1", "0.45"}
