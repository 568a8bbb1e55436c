"""Draws losses and gradient norms of the methods of a training benchmark, and prints how far they differ.

    odc bench training --workload sharegpt --shape qwen2.5-1.5b --seeds 0 --minibatches 50 --rounds 1 \\
        --methods fsdp2/lb_micro odc/lb_micro --text /usr/lib/python3.12 --json curves.json
    python benchmarks/gpu/curves.py curves.json curves.png
"""

from __future__ import annotations

import json
import statistics
import sys

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt


def main(result: str, picture: str) -> None:
    with open(result) as file:
        record = json.load(file)
    names = [name for name in record["methods"] if not name.startswith("limit")]
    curves = {
        key: {name: [s[key] for s in record["steps"] if s["method"] == name] for name in names}
        for key in ("loss", "grad_norm")
    }
    figure, axes = plt.subplots(2, 2, figsize=(11, 7), sharex=True)
    for (key, series), (above, below) in zip(curves.items(), axes.T, strict=True):
        for name, values in series.items():
            above.plot(values, label=name, linewidth=1)
            if name == names[0]:
                continue
            off = [abs(a - b) / abs(b) for a, b in zip(values, series[names[0]], strict=True)]
            below.plot(off, label=f"{name} from {names[0]}, relative", linewidth=1)
            sys.stdout.write(
                f"{key}, {name} from {names[0]}, {len(off)} steps: median {statistics.median(off):.1e}, "
                f"largest {max(off):.1e}\n"
            )
        above.set_title(key.replace("_", " "))
        below.set_yscale("log")
        below.set_xlabel("step")
        above.legend()
        below.legend()
    figure.tight_layout()
    figure.savefig(picture, dpi=110)


if __name__ == "__main__":
    main(*sys.argv[1:])
