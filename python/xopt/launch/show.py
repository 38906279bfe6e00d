"""`--dry-run`: the plan as tables, or as JSON."""

from __future__ import annotations

import json
import shlex

from xopt.launch.plan import Instance, Plan
from xopt.machine import format_list


def print_plan(plan: Plan, *, as_json: bool, explain: bool) -> None:
    if as_json:
        print(json.dumps(plan.as_data(), indent=2), flush=True)
        return

    from rich.console import Console
    from rich.table import Table

    table = Table(title="Instances that would be started", title_justify="left", show_lines=True)
    for name in ("", "CPUs", "threads", "node", "memory", "allocator", "environment and command"):
        table.add_column(name, overflow="fold")
    for instance in plan.instances:
        table.add_row(*_cells(instance))
    console = Console()
    console.print(table)
    if plan.elastic:
        console.print("As local ranks, by", shlex.join(plan.elastic), markup=False, highlight=False)
    if explain:
        for reason in plan.reasons:
            console.print(f"- {reason}", markup=False, highlight=False)


def _cells(instance: Instance) -> tuple[str, ...]:
    memory = instance.memory
    command = shlex.join(instance.command) + (f" > {instance.log}" if instance.log else "")
    return (
        str(instance.index),
        format_list(instance.cpus),
        str(instance.threads),
        format_list(instance.nodes),
        f"{memory.mode} {format_list(memory.nodes)}".strip(),
        instance.allocator,
        "\n".join([*(f"{name}={value}" for name, value in instance.environment.items()), command]),
    )
