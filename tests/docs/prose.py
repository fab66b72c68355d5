"""Counts, checks and fills the text of Markdown files.

    python -m tests.docs.prose README.md docs/*.md           # words and sentences of each file
    python -m tests.docs.prose --fill docs/search.md         # breaks paragraphs and lists at 88 columns

Code blocks and headings hold no sentences. A code span counts as one word. A list item and a table cell end a sentence.
Averages are of paragraphs and lists; the longest sentence may be in a table cell too.
"""

from __future__ import annotations

import re
import sys
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

COLUMNS = 88
AVERAGE, LONGEST = 25.0, 40
"""Words of a sentence."""
ITEM = re.compile(r"\s*(?:[-*+]|\d+\.)\s+")
GLUE = "\0"
FENCE = re.compile(r"\s*(```|~~~)")


@dataclass
class Block:
    """Consecutive lines of one kind: text, item, table, code or other."""

    kind: str
    first: int
    """The number of its first line, from 1."""
    lines: list[str]

    @property
    def indent(self) -> int:
        """Columns that continued lines of an item are indented by."""
        marker = ITEM.match(self.lines[0])
        return len(marker[0]) if marker and self.kind == "item" else len(self.lines[0]) - len(self.lines[0].lstrip())

    @property
    def passages(self) -> list[str]:
        """Texts that each end a sentence: one of a paragraph or item, one of each cell of a table."""
        if self.kind == "table":
            rows = [line for line in self.lines if not re.fullmatch(r"[\s|:-]+", line)]
            return [plain(cell) for row in rows for cell in re.split(r"(?<!\\)\|", row.strip().strip("|"))]
        return [plain(ITEM.sub("", " ".join(self.lines), count=1) if self.kind == "item" else " ".join(self.lines))]


def blocks(text: str) -> Iterator[Block]:
    """The blocks of a document, in its order; blank lines are left out."""
    current, fenced = Block("other", 0, []), False
    for number, line in enumerate(text.splitlines(), 1):
        fence = bool(FENCE.match(line))
        kind = "code" if fenced or fence else _kind(line, current)
        fenced ^= fence
        continues = (kind == current.kind and kind in ("text", "table", "code")) or (kind, current.kind) == ("text", "item")
        if continues:
            current.lines.append(line)
            continue
        if current.lines:
            yield current
        current = Block(kind, number, [line] if kind != "blank" else [])
    if current.lines:
        yield current


def _kind(line: str, before: Block) -> str:
    if not line.strip():
        # A blank line inside an indented block of code belongs to it.
        return "blank"
    if line.startswith("    ") and before.kind in ("blank", "code") and not ITEM.match(line):
        return "code"
    if line.lstrip().startswith(("#", "<", "![")):
        return "other"
    if line.lstrip().startswith("|"):
        return "table"
    return "item" if ITEM.match(line) else "text"


def plain(markdown: str) -> str:
    """The words of a passage: code spans are one word each, links and images their text."""
    spans = re.sub(r"(`+)(?:.+?)\1", "Code", markdown)
    return re.sub(r"[*_]{2,}", "", re.sub(r"!?\[([^\]]*)\](?:\([^)]*\))?", r"\1", spans))


def sentences(passage: str) -> list[int]:
    """How many words each sentence of a passage has."""
    parts = re.split(r"(?<=[.!?])[\"')\]]*\s+(?=[\"'(\[]*[A-Z0-9])", " ".join(passage.split()))
    counts = (sum(bool(re.search(r"\w", word)) for word in sentence.split()) for sentence in parts)
    return [count for count in counts if count]


@dataclass(frozen=True)
class Count:
    """Counts of a document."""

    words: int
    sentences: int
    average: float
    longest: int


def count(text: str) -> Count:
    """Of a whole document."""
    of_text = [n for block in blocks(text) if block.kind in ("text", "item") for part in block.passages for n in sentences(part)]
    of_cells = [n for block in blocks(text) if block.kind == "table" for part in block.passages for n in sentences(part)]
    average = sum(of_text) / len(of_text) if of_text else 0.0
    return Count(sum(of_text) + sum(of_cells), len(of_text), average, max(of_text + of_cells, default=0))


def complaints(text: str) -> list[str]:
    """Reports each line that is too wide and each sentence that is too long, with the remedy."""
    lines = enumerate(text.splitlines(), 1)
    # A line of one word, such as a long address, cannot be broken.
    wide = [number for number, line in lines if len(line) > COLUMNS and " " in ITEM.sub("", line).strip()]
    errors = [f"{_named(wide)} wider than {COLUMNS} columns: break it, or shorten a table"] if wide else []
    for block in blocks(text):
        if block.kind in ("text", "item", "table"):
            for part in block.passages:
                errors += [
                    f"line {block.first}: a sentence of {words} words; {LONGEST} are allowed: make two of it ({part[:60]} ...)"
                    for words in sentences(part)
                    if words > LONGEST
                ]
    if (average := count(text).average) > AVERAGE:
        errors.append(f"sentences have {average:.1f} words on average; {AVERAGE:.0f} are allowed: split the long ones")
    return errors


def _named(lines: list[int]) -> str:
    return f"line {lines[0]} is" if len(lines) == 1 else f"lines {', '.join(map(str, lines))} are"


def filled(text: str) -> str:
    """The same document with paragraphs and list items filled; tables, code and headings as they are."""
    lines = text.splitlines()
    for block in reversed(list(blocks(text))):
        if block.kind in ("text", "item"):
            margin = re.match(r"\s*", block.lines[0])
            first = margin[0] if margin else ""
            words = _glued(" ".join(" ".join(block.lines).split()))
            lead = {"initial_indent": first, "subsequent_indent": " " * block.indent}
            new = textwrap.wrap(words, COLUMNS, break_long_words=False, break_on_hyphens=False, **lead)
            lines[block.first - 1 : block.first - 1 + len(block.lines)] = [line.replace(GLUE, " ") for line in new]
    return "\n".join(lines) + "\n"


def _glued(words: str) -> str:
    """The same with code spans in one piece, and nothing at which a line could begin that would make it a list item."""
    whole = re.sub(r"`[^`]{,60}`", lambda span: span[0].replace(" ", GLUE), words)
    return re.sub(r"(?<=\S) (?=([-*+]|\d+\.) )", GLUE, whole)


def main(arguments: list[str]) -> int:
    """Prints the counts of files, or fills them."""
    paths = [Path(name) for name in arguments if name != "--fill"]
    if "--fill" in arguments:
        for path in paths:
            path.write_text(filled(path.read_text()))
        return 0
    rows = [(str(path), count(path.read_text())) for path in paths]
    for name, counts in rows:
        print(f"{name:32} {counts.words:6} words  {counts.average:5.1f} a sentence  longest {counts.longest}")
    total = sum(counts.sentences for _, counts in rows) or 1
    average = sum(counts.average * counts.sentences for _, counts in rows) / total
    longest = max((counts.longest for _, counts in rows), default=0)
    print(f"{'together':32} {sum(counts.words for _, counts in rows):6} words  {average:5.1f} a sentence  longest {longest}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
