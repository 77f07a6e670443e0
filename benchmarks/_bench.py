"""What the benchmarks share: runs in turns, peak memory in a fresh process, and the results file."""

from __future__ import annotations

import multiprocessing
import platform
import re
import statistics
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "RESULTS.md"


def in_turns(candidates: dict[str, Callable[[], Any]], *, rounds: int) -> dict[str, list[float]]:
    """Seconds of each candidate in each round; one after the other, so that a slow minute hits them all alike."""
    times: dict[str, list[float]] = {name: [] for name in candidates}
    for _ in range(rounds):
        for name, run in candidates.items():
            start = time.perf_counter()
            run()
            times[name].append(time.perf_counter() - start)
    return times


def median_ratio(times: dict[str, list[float]], name: str, base: str) -> float:
    """Median over rounds of the ratio within a round."""
    return statistics.median(a / b for a, b in zip(times[name], times[base], strict=True))


def peak_megabytes(work: Callable[..., Callable[[], Any]], *arguments: Any) -> float:
    """Resident memory that `work(*arguments)()` adds at its peak, in a fresh process (Linux only).

    `work(*arguments)` makes the input and is not counted; the function that it returns is.
    """
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_measure, args=(sender, work, arguments))
    process.start()
    process.join()
    if process.exitcode:
        raise RuntimeError(f"{work.__name__}{arguments} ended with {process.exitcode}: out of memory?")
    return receiver.recv()


def _measure(sender: Any, work: Callable[..., Callable[[], Any]], arguments: tuple[Any, ...]) -> None:
    run = work(*arguments)
    # Linux: forget the peak of making the input, which getrusage would go on reporting.
    Path("/proc/self/clear_refs").write_text("5")
    before = _kilobytes("VmRSS")
    run()
    sender.send((_kilobytes("VmHWM") - before) / 1024)


def _kilobytes(name: str) -> int:
    return int(re.findall(rf"{name}:\s*(\d+)", Path("/proc/self/status").read_text())[0])


def machine() -> str:
    """Processor, cores, torch and date, for the head of a table."""
    import torch

    model = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        found = re.search(r"model name\s*:\s*(.+)", cpuinfo.read_text())
        model = found[1] if found else model
    date = datetime.now(UTC).date().isoformat()
    return f"{model}, {torch.get_num_threads()} threads, torch {torch.__version__}, {date}"


def write_section(name: str, content: str) -> None:
    """Put `content` between the marks of section `name` in RESULTS.md, replacing what stood there."""
    text = (
        RESULTS.read_text(encoding="utf-8") if RESULTS.exists() else "# Results\n\nWritten by the scripts beside it.\n"
    )
    start, end = f"<!-- {name} -->", f"<!-- /{name} -->"
    block = f"{start}\n{content.strip()}\n{end}"
    if start in text:
        head, rest = text.split(start, 1)
        text = head + block + rest.split(end, 1)[1]
    else:
        text = f"{text.rstrip()}\n\n{block}\n"
    RESULTS.write_text(text, encoding="utf-8")
    print(content)
