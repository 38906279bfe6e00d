"""Options and fixtures of the numeric tests: batches of random cases, or the one case that `--case` repeats."""

from __future__ import annotations

import pathlib
import signal
from collections.abc import Iterator

import pytest
import torch
from _pytest.terminal import TerminalReporter

BATCHES = 4
BATCH_SIZE = 100
FUZZ_BATCHES = 40
FUZZ_BATCH_SIZE = 500


def pytest_configure() -> None:
    """What shells and `nohup` have this process ignore in the background, programs that tests start shall heed."""
    for number in (signal.SIGINT, signal.SIGHUP):
        if signal.getsignal(number) == signal.SIG_IGN:
            signal.signal(number, lambda *_: None)  # a handler, unlike SIG_IGN, is not inherited


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--case", action="append", default=[], help="run only this case, a line that a failure printed")
    parser.addoption("--fuzz-seed", type=int, default=0, help="another sequence of random cases for the fuzz tests")


def pytest_ignore_collect(collection_path: pathlib.Path, config: pytest.Config) -> bool | None:
    """What has no part in the slice for the sanitizers, under which imports take long, need not be imported for it."""
    if config.option.markexpr != "sanitize" or not collection_path.match("test_*.py"):
        return None
    text = collection_path.read_text()
    return None if "mark.sanitize" in text or "case_batch" in text else True


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """`case_batch`: a list of cases of the family in the test's module, one batch a test."""
    if "case_batch" not in metafunc.fixturenames:
        return
    family = metafunc.module.FAMILY
    lines = metafunc.config.getoption("--case")
    if lines:
        own = [line for line in lines if line.partition(":")[0] == family.name]
        metafunc.parametrize("case_batch", [[family.parse(line)] for line in own], ids=own)
        return
    batches = [
        pytest.param(("batch", seed, BATCH_SIZE), id=f"seed{seed}", marks=[pytest.mark.sanitize] if seed == 0 else [])
        for seed in range(BATCHES)
    ]
    base = 1000 + metafunc.config.getoption("--fuzz-seed") * FUZZ_BATCHES
    batches += [
        pytest.param(("batch", seed, FUZZ_BATCH_SIZE), id=f"fuzz{seed}", marks=pytest.mark.fuzz)
        for seed in range(base, base + FUZZ_BATCHES)
    ]
    metafunc.parametrize("case_batch", batches, indirect=True)


OUR_FAULTS = ("its program failed", "could not be fused")


@pytest.fixture(autouse=True)
def no_program_fails(request: pytest.FixtureRequest, caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """A program that fails where the forward does not, or that an error in a pattern keeps from being made, is made up
    for by the forward, and no result would tell."""
    yield
    known = request.node.get_closest_marker("program_fails") is not None
    messages = [record.getMessage() for record in caplog.get_records("call")]
    failed = [message for message in messages if any(fault in message for fault in OUR_FAULTS)]
    assert known or not failed, failed


@pytest.fixture
def case_batch(request: pytest.FixtureRequest) -> list[object]:
    _, seed, size = request.param
    return list(request.module.FAMILY.cases(seed, size))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: item.get_closest_marker("long") is None)
    if config.getoption("--case"):
        chosen = [item for item in items if "case_batch" in getattr(item, "fixturenames", ())]
        config.hook.pytest_deselected(items=[item for item in items if item not in chosen])
        items[:] = chosen


def pytest_terminal_summary(terminalreporter: TerminalReporter) -> None:
    """What could not be proven on this machine is said at the end, not only in the list of skipped tests."""
    skipped = terminalreporter.getreports("skipped")
    missing = sorted({str(report.longrepr[2]) for report in skipped if "NOT RUN" in str(report.longrepr)})
    for reason in missing:
        terminalreporter.write_line(reason.removeprefix("Skipped: "), yellow=True, bold=True)


@pytest.fixture
def torch_threads() -> Iterator[None]:
    """For a test that sets how many threads torch uses."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)
