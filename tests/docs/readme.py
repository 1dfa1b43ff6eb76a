"""README.md and the pages of docs/ taken apart: code blocks, command lines, tables, the tree."""

import re
import shlex
from pathlib import Path
from typing import Dict, List

README = Path(__file__).resolve().parents[2] / "README.md"
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.DOTALL | re.MULTILINE)


def text() -> str:
    """README.md."""
    return README.read_text(encoding="utf-8")


def pages() -> Dict[str, str]:
    """README.md and the pages of docs/, by path."""
    paths = [README, *sorted((README.parent / "docs").glob("*.md"))]
    return {str(path.relative_to(README.parent)): path.read_text(encoding="utf-8") for path in paths}


def everything() -> str:
    """All pages, one after the other."""
    return "\n".join(pages().values())


def section(title: str) -> str:
    """Text below a heading, up to the next heading."""
    match = re.search(rf"^#+ {re.escape(title)}\n(.*?)(?=^#+ |\Z)", prose_safe(everything()), re.DOTALL | re.MULTILINE)
    assert match, f"no page has the heading {title!r}"
    return match[1]


def prose_safe(markdown: str) -> str:
    """The text without code blocks, in which a line may begin with #."""
    return BLOCK.sub("", markdown)


def blocks(language: str) -> List[str]:
    """Contents of the code blocks of one language."""
    return [match[2] for match in BLOCK.finditer(everything()) if match[1] == language]


def command_lines() -> List[str]:
    """Every command of the bash blocks, in order, continued lines joined and comments cut."""
    joined = "\n".join(blocks("bash")).replace("\\\n", " ")
    lines = [shlex.join(shlex.split(line, comments=True)) for line in joined.splitlines()]
    return [line for line in lines if line]


def table(title: str, first_header: str) -> Dict[str, str]:
    """{first cell: second cell} of the table below a heading whose first header is given."""
    rows = [line.strip().strip("|").split("|") for line in section(title).splitlines() if line.startswith("|")]
    cells = [[cell.strip() for cell in row] for row in rows]
    start = next(index for index, row in enumerate(cells) if row[0] == first_header)
    found = {}
    for row in cells[start + 2 :]:
        found[row[0]] = row[1]
    return found


def code_words(markdown: str) -> List[str]:
    """What stands in single backticks, outside of code blocks."""
    return re.findall(r"`([^`\n]+)`", prose_safe(markdown))


def tree_paths() -> List[str]:
    """Paths of the annotated tree; folders end with a slash."""
    (block,) = (block for block in blocks("text") if block.startswith("megatron_fbt/ "))
    parents, found = [], []
    for line in block.splitlines():
        depth = (len(line) - len(line.lstrip())) // 2
        name = line.split()[0]
        parents = [*parents[:depth], name]
        found.append("".join(parents))
    return found
