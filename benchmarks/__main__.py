"""``python -m benchmarks [name …] [--quick] [--only CASE]``: measures all figures of the README.

Each benchmark runs stock and ours in turn, in the same run, on servers of its own, and bounds its own time.
It prints medians with (min-max) and ratios round by round, and writes JSON, reST tables and plots to
``benchmarks/out/``. From what lies there it makes ``ratios.rst``: all ratios beside the stock transport. With
``--readme`` it writes them, the tables that the guide has marks for, and the curve by tenant count, into
README.rst and the guide.

``--only`` measures a part of a benchmark with long cases. Its files are called ``NAME-part-CASE``, and with
``--readme`` its rows replace those of the same cases in the table of the guide.
"""

from __future__ import annotations

import argparse
import importlib
import json
import pkgutil
import sys
import time
from pathlib import Path

from benchmarks.measure import BENCHMARKS, UnknownCaseError
from benchmarks.readme import PARTS, part_of, plot_claims, write_figures
from benchmarks.summary import summary

HERE = Path(__file__).resolve().parent
OUT = HERE / "out"

# Each module adds its benchmarks.
for _module in pkgutil.iter_modules([str(HERE)]):
    if _module.name != "__main__":
        importlib.import_module(f"benchmarks.{_module.name}")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="name", help=f"of {', '.join(BENCHMARKS)}; default all")
    parser.add_argument(
        "--out", type=Path, default=OUT, help="folder for the results; default benchmarks/out"
    )
    parser.add_argument(
        "--readme",
        action="store_true",
        help="write the results in --out into README.rst and the guide; without names, measure nothing",
    )
    parser.add_argument("--quick", action="store_true", help="smaller and shorter: a look, not a figure")
    parser.add_argument(
        "--only", default="", metavar="CASE", help=f"cases whose names contain this, of {', '.join(PARTS)}"
    )
    options = parser.parse_args(arguments)
    if unknown := set(options.names) - set(BENCHMARKS):
        parser.error(f"unknown benchmark {', '.join(sorted(unknown))}: choose from {', '.join(BENCHMARKS)}")
    if options.only and (not options.names or set(options.names) - set(PARTS)):
        parser.error(f"--only measures a part of {', '.join(PARTS)}: name one of them")
    out: Path = options.out
    out.mkdir(parents=True, exist_ok=True)
    for name in options.names or ([] if options.readme else BENCHMARKS):
        started = time.monotonic()
        try:
            report = BENCHMARKS[name](options.quick, *([options.only] if options.only else []))
        except UnknownCaseError as error:
            parser.error(f"--only {options.only!r}: {error}")
        stem = part_of(name, options.only) if options.only else name
        print(report.text(), f"   took {time.monotonic() - started:.0f} s", sep="\n", flush=True)
        (out / f"{stem}.json").write_text(json.dumps(report.data, indent=1))
        (out / f"{stem}.rst").write_text(report.rst())
        if stem == "claims":
            plot_claims(report.data, out / "claims.png")
    ratios = summary(out)
    if ratios.rows:
        (out / "ratios.rst").write_text(ratios.rst())
        print(ratios.text())
    if options.readme:
        write_figures(out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
