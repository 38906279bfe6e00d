"""What got slower and what faster between two profiles, in order."""

from __future__ import annotations

import io
from collections.abc import Iterable
from dataclasses import dataclass

from xopt.profiling.result import Profile
from xopt.profiling.tables import WIDTH, duration

MOST_ROWS = 25


@dataclass(frozen=True)
class Change:
    """Seconds of a step."""

    name: str
    before: float
    after: float

    @property
    def seconds(self) -> float:
        return self.after - self.before

    def ratio(self) -> str:
        if not self.before:
            return "new"
        return "gone" if not self.after else f"x{self.after / self.before:.2f}"


def changes(before: dict[str, float], after: dict[str, float]) -> list[Change]:
    """The largest first."""
    names = dict.fromkeys([*before, *after])
    found = [Change(name, before.get(name, 0.0), after.get(name, 0.0)) for name in names]
    return sorted(found, key=lambda change: -abs(change.seconds))


def category_seconds(profile: Profile) -> dict[str, float]:
    return {name: category.seconds / max(profile.steps, 1) for name, category in profile.categories.items()}


def kernel_seconds(profile: Profile) -> dict[str, float]:
    """By what the kernel is and where; a kernel that is fused otherwise is another one."""
    found: dict[str, float] = {}
    for kernel in profile.kernels:
        name = f"{kernel.name} in {kernel.module}" if kernel.module else kernel.name
        found[name] = found.get(name, 0.0) + kernel.seconds / max(profile.steps, 1)
    return found


def text_of_difference(before: Profile, after: Profile) -> str:
    from rich.console import Console
    from rich.table import Table

    text = io.StringIO()
    console = Console(file=text, width=WIDTH, highlight=False, markup=False)
    step = Change("a step", before.wall_seconds / max(before.steps, 1), after.wall_seconds / max(after.steps, 1))
    console.print(f"a step: {duration(step.before)} before, {duration(step.after)} after ({step.ratio()})")
    for differing in _other_settings(before, after):
        console.print(f"- not the same: {differing}")

    def table(title: str, rows: Iterable[Change]) -> None:
        shown = Table(title=title, title_justify="left")
        shown.add_column("what", overflow="fold")
        for header in ("before", "after", "change", ""):
            shown.add_column(header, justify="right", no_wrap=True)
        for row in rows:
            sign = "+" if row.seconds >= 0 else "-"
            change = f"{sign}{duration(abs(row.seconds))}"
            shown.add_row(row.name, duration(row.before), duration(row.after), change, row.ratio())
        console.print(shown)

    table("Categories, a step", changes(category_seconds(before), category_seconds(after)))
    kernels = changes(kernel_seconds(before), kernel_seconds(after))
    table("Slower kernels, a step", [row for row in kernels if row.seconds > 0][:MOST_ROWS])
    table("Faster kernels, a step", [row for row in kernels if row.seconds < 0][:MOST_ROWS])
    return text.getvalue()


def _other_settings(before: Profile, after: Profile) -> list[str]:
    pairs: list[tuple[str, object, object]] = [("threads", before.threads, after.threads)]
    pairs += [(name, before.machine.get(name), after.machine.get(name)) for name in before.machine]
    return [f"{name}: {first}, then {second}" for name, first, second in pairs if first != second]
