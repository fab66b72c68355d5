"""Altair charts as small static SVG: text takes the colour of the page, and each mark tells its value to a pointer."""

from __future__ import annotations

import re
from typing import Any
from xml.etree import ElementTree

import vl_convert

NAMESPACE = "http://www.w3.org/2000/svg"
FONT = "Arial, Helvetica, Liberation Sans, sans-serif"
INK = "currentColor"
CONFIG = {
    "background": "transparent",
    "font": FONT,
    "padding": {"left": 28, "right": 12, "top": 5, "bottom": 5},
    "view": {"stroke": None},
    "axis": {
        "labelColor": INK, "titleColor": INK, "ticks": False, "domainColor": INK, "gridColor": INK, "gridOpacity": 0.15,
        "domainOpacity": 0.4, "labelFontSize": 12, "titleFontSize": 12, "titleFontWeight": "normal",
    },
    "legend": {"labelColor": INK, "titleColor": INK, "labelFontSize": 12, "titleFontSize": 12, "titleFontWeight": "normal"},
    "text": {"color": INK, "fontSize": 12},
    "title": {"color": INK, "fontSize": 12, "fontWeight": "normal", "anchor": "start"},
}  # fmt: skip
"""Of all charts."""
NEEDLESS = ("class", "pointer-events", "aria-hidden", "role", "aria-roledescription", "font-family", "version")
USUAL = {"opacity": "1", "fill-opacity": "1", "stroke-opacity": "1", "transform": "translate(0,0)", "stroke-width": "1"}
INHERITED = ("fill", "stroke", "font-size", "font-weight", "text-anchor", "fill-opacity", "stroke-opacity", "stroke-width")
PLACES = ("transform", "d", "x", "y", "x1", "x2", "y1", "y2", "width", "height", "viewBox")
PLACED = re.compile(r"translate\(([-\d.]+),([-\d.]+)\)")
ZEROS = ("x", "y", "x1", "x2", "y1", "y2", "cx", "cy")
CIRCLE = re.compile(r"M([\d.]+),0A\1,\1,0,1,1,-\1,0A\1,\1,0,1,1,\1,0")


def drawn(chart: Any, title: str, told: str, background: str | None = None) -> str:
    """One `<svg>` element of a chart of Altair's. `title` and `told` are its name and its description for screen readers.

    `background` is for pictures that stand alone; without it the picture shows the page behind it.
    """
    chart = chart.configure(**CONFIG)
    root = ElementTree.fromstring(vl_convert.vegalite_to_svg(chart.to_dict()))
    _shrink(root)
    root.set("role", "img")
    root.set("font-family", FONT)
    for tag, text in (("desc", told), ("title", title)):
        root.insert(0, _element(tag, text))
    if background:
        root.set("style", "color: #222222")
        root.insert(2, ElementTree.Element(f"{{{NAMESPACE}}}rect", {"width": "100%", "height": "100%", "fill": background}))
    ElementTree.register_namespace("", NAMESPACE)
    return ElementTree.tostring(root, encoding="unicode")


def _element(tag: str, text: str) -> ElementTree.Element:
    made = ElementTree.Element(f"{{{NAMESPACE}}}{tag}")
    made.text = text
    return made


def _shrink(element: ElementTree.Element) -> None:
    """Drops what draws nothing and what goes without saying. The label of a mark becomes its tooltip.

    What all children of a group have in common becomes an attribute of the group.
    """
    told = element.attrib.pop("aria-label", None)
    for name in NEEDLESS:
        element.attrib.pop(name, None)
    for name, usual in USUAL.items():
        if element.get(name) == usual:
            del element.attrib[name]
    for name in PLACES:
        if name in element.attrib:
            element.set(name, re.sub(r"\d+\.\d+", _shorter, element.attrib[name]))
    for child in list(element):
        _shrink(child)
        if _draws_nothing(child):
            element.remove(child)
    if circle := CIRCLE.fullmatch(element.get("d", "")):
        _round(element, circle[1])
    if element.tag.endswith("}text") and not len(element) and not {"x", "y"} & element.attrib.keys():
        _place(element, "x", "y")
    for name in ZEROS:
        if element.get(name) == "0":
            del element.attrib[name]
    if told and element.tag.endswith(("path", "circle")):
        element.append(_element("title", told))
    for name in INHERITED:
        common = {child.get(name) for child in element}
        if element.tag.endswith("}g") and len(common) == 1 and None not in common:
            element.set(name, common.pop() or "")
            for child in element:
                del child.attrib[name]
    if element.tag.endswith("}g") and len(element) == 1 and element[0].tag.endswith("}g") and not element[0].attrib:
        element[:] = list(element[0])


def _shorter(number: re.Match[str]) -> str:
    return f"{float(number[0]):.1f}".removesuffix(".0")


def _round(element: ElementTree.Element, radius: str) -> None:
    """Turns a path that is a circle into one."""
    del element.attrib["d"]
    element.tag = f"{{{NAMESPACE}}}circle"
    element.set("r", radius)
    _place(element, "cx", "cy")


def _place(element: ElementTree.Element, x: str, y: str) -> None:
    """Turns a translation, if that is its whole transform, into coordinates, which are shorter."""
    if placed := PLACED.fullmatch(element.get("transform", "")):
        del element.attrib["transform"]
        element.attrib |= {x: placed[1], y: placed[2]}


def _draws_nothing(element: ElementTree.Element) -> bool:
    kind = element.tag.rpartition("}")[2]
    if kind == "path":
        unpainted = not element.get("stroke") and element.get("fill", "none") == "none"
        return not element.get("d") or (unpainted and "title" not in {child.tag.rpartition("}")[2] for child in element})
    return kind == "g" and not len(element)
