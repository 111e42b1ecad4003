"""Puts the latest results into docs/performance.md, between two marker comments."""

from pathlib import Path

PAGE = Path(__file__).parent.parent / "docs" / "performance.md"
BEGIN, END = "<!-- results: begin -->", "<!-- results: end -->"


def update(results: Path, page: Path = PAGE) -> None:
    """Replace what stands between the markers.

    Raises:
      SystemExit: there are no results, or the page has not both markers in their order.
    """
    if not results.exists():
        raise SystemExit(f"{results}: expected results, found nothing\nhint: python -m benchmarks")
    text = page.read_text()
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (begin and end):
        raise SystemExit(f"{page}: expected {BEGIN!r} and then {END!r}, found other text")
    page.write_text(f"{before}{BEGIN}\n\n{results.read_text().strip()}\n\n{END}{after}")
