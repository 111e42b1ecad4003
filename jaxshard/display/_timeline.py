"""A picture of how a run went: steps over time, each start, save and failure, and what was lost."""

import itertools
from collections.abc import Iterator, Sequence

from jaxshard._goodput import JobStart
from jaxshard._report import duration_text
from jaxshard.display._markup import Html, element, join, note

_WIDTH, _HEIGHT = 720, 200
_LEFT, _TOP, _RIGHT, _BOTTOM = 46, 8, 12, 22
_POINTS_MAX = 600  # of all starts: dots of saves
_STARTS_MAX = 400


def timeline(starts: Sequence[JobStart]) -> Html:
    """The picture, with its legend; nothing for a run that never began."""
    shown = list(starts)[-_STARTS_MAX:]
    top = max((start.last_step for start in shown), default=0)
    if not top:
        return Html()
    drawing = _Drawing(shown, top)
    svg = element(
        "svg",
        *drawing.grid(),
        *itertools.chain.from_iterable(map(drawing.start, range(len(shown)))),
        viewBox=f"0 0 {_WIDTH} {_HEIGHT}",
        width=f"{_WIDTH}",
        role="img",
        class_="j-timeline",
    )
    legend = ["line: steps over time", "dashed: coming back", "dots: saves"]
    if any(not start.ended for start in shown[:-1]):
        legend.append("\N{MULTIPLICATION SIGN}: killed or failed")
    if any(start.kept < start.last_step for start in shown):
        legend.append("red: done again")
    if len(shown) < len(starts):
        legend.append(f"the last {len(shown)} of {len(starts)} starts")
    return join([svg, note("; ".join(legend))])


class _Drawing:
    """Where everything goes."""

    def __init__(self, starts: Sequence[JobStart], top: int) -> None:
        self._starts = starts
        self._from_s = starts[0].began_s
        self._span_s = max(1e-9, starts[-1].last_s - self._from_s)
        self._top = top
        saves = sum(len(start.saves) for start in starts)
        self._every = max(1, -(-saves // _POINTS_MAX))

    def _x(self, at_s: float) -> float:
        share = (at_s - self._from_s) / self._span_s
        return round(_LEFT + share * (_WIDTH - _LEFT - _RIGHT), 1)

    def _y(self, step: float) -> float:
        return round(_TOP + (1 - step / self._top) * (_HEIGHT - _TOP - _BOTTOM), 1)

    def grid(self) -> Iterator[Html]:
        """Lines and words at the sides."""
        for step in sorted({0, self._top // 2, self._top}):
            y = self._y(step)
            yield _line([(_LEFT, y), (_WIDTH - _RIGHT, y)], "grid")
            yield element("text", f"{step:,}", x=f"{_LEFT - 6}", y=f"{y + 3}", text_anchor="end")
        for quarter in range(5):
            at_s = self._from_s + self._span_s * quarter / 4
            anchor = "start" if quarter == 0 else "end" if quarter == 4 else "middle"
            words = duration_text(at_s) if at_s else "0"
            place = {"x": f"{self._x(at_s)}", "y": f"{_HEIGHT - 6}", "text_anchor": anchor}
            yield element("text", words, **place)

    def start(self, number: int) -> Iterator[Html]:
        """One start of the job."""
        start = self._starts[number]
        ready_s = start.last_s if start.ready_s is None else start.ready_s
        points = [(ready_s, float(start.resumed)), *start.saves]
        points = [p for p in points if p[0] <= start.last_s]
        if start.last_s > points[-1][0] or start.last_step > points[-1][1]:
            points.append((start.last_s, float(start.last_step)))
        kept, lost = _cut(points, start.kept)
        yield self._path([(start.began_s, start.resumed), (ready_s, start.resumed)], "restoring")
        yield self._path(kept, "kept")
        if len(lost) > 1:
            yield self._path(lost, "lost")
        for at_s, step in start.saves[:: self._every]:
            title = element("title", f"step {step}, {duration_text(at_s)}")
            where = {"cx": f"{self._x(at_s)}", "cy": f"{self._y(step)}"}
            yield element("circle", title, r="2", class_="j-save", **where)
        if not start.ended and number < len(self._starts) - 1:
            where = {"x": f"{self._x(start.last_s)}", "y": f"{self._y(start.last_step) + 4}"}
            words = f"ended in step {start.last_step + 1}, {duration_text(start.last_s)}"
            yield element(
                "text", element("title", words), Html("&times;"), text_anchor="middle",
                class_="j-failed", **where,
            )  # fmt: skip

    def _path(self, points: Sequence[tuple[float, float]], name: str) -> Html:
        return _line([(self._x(at_s), self._y(step)) for at_s, step in points], name)


def _line(points: Sequence[tuple[float, float]], name: str) -> Html:
    text = " ".join(f"{x},{y}" for x, y in points)
    return element("polyline", points=Html(text), fill="none", class_=f"j-{name}")


def _cut(
    points: Sequence[tuple[float, float]], step: float
) -> tuple[list[tuple[float, float]], list[tuple[float, float]]]:
    """A rising line up to a step, and from it on."""
    below = [p for p in points if p[1] <= step] or [points[0]]
    above = [p for p in points if p[1] > step]
    if not above:
        return below, []
    (t0, s0), (t1, s1) = below[-1], above[0]
    share = (step - s0) / (s1 - s0) if s1 > s0 else 0.0
    between = (t0 + share * (t1 - t0), max(s0, step))
    return [*below, between], [between, *above]
