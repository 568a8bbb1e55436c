"""What lock-step loses with two ways of planning `lb_micro`, on the lengths of a data set.

    python benchmarks/lb_micro.py demo_out/tokens

`peers`: an equal number of samples a rank by the largest differencing method (Karmarkar and Karp), each
rank's samples by the same method into as many micro-batches as the rank that needs most, heaviest first.
`ours`: the planner of odcengine. Printed: predicted time over that of `lb_mini` on demand, for 200
minibatches and two ranks.
"""

from __future__ import annotations

import argparse
import heapq
import itertools
from types import SimpleNamespace

import numpy as np

from odcengine.balance.cost import CostModel
from odcengine.balance.plan import make_plan
from odcengine.data import TokenDataset


def differencing(costs: list[float], parts: int, equal: bool = False) -> list[list[int]]:
    """Karmarkar and Karp's largest differencing method; with `equal`, parts of equal count (n a multiple)."""
    ticket = itertools.count()
    order = sorted(range(len(costs)), key=lambda index: -costs[index])
    chunks = [order[i : i + parts] for i in range(0, len(order), parts)] if equal else [[i] for i in order]
    heap = []
    for chunk in chunks:
        bins = sorted(([costs[i], [i]] for i in chunk), key=lambda b: -b[0])
        bins += [[0.0, []] for _ in range(parts - len(bins))]
        heap.append((bins[-1][0] - bins[0][0], next(ticket), bins))
    heapq.heapify(heap)
    while len(heap) > 1:
        first, second = heapq.heappop(heap)[2], heapq.heappop(heap)[2]
        bins = [[a[0] + b[0], a[1] + b[1]] for a, b in zip(first, reversed(second), strict=True)]
        bins.sort(key=lambda b: -b[0])
        heapq.heappush(heap, (bins[-1][0] - bins[0][0], next(ticket), bins))
    return [members for _, members in heap[0][2]]


def peers(lengths: list[int], costs: list[float], ranks: int, max_tokens: int) -> float:
    """Predicted time in lock-step."""
    shares = differencing(costs, ranks, equal=True)
    count = max(-(-sum(lengths[i] for i in share) // max_tokens) for share in shares)
    while True:
        rows = []
        for share in shares:
            groups = differencing([costs[i] for i in share], count)
            rows.append([[share[j] for j in group] for group in groups])
        if all(sum(lengths[i] for i in group) <= max_tokens for row in rows for group in row):
            break
        count += 1
    works = [sorted((sum(costs[i] for i in group) for group in row), reverse=True) for row in rows]
    return sum(max(step) for step in zip(*works, strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("data", help="a data set of `odc prepare`, or demo_out/tokens")
    parser.add_argument("--sequences", type=int, default=16, help="a rank")
    parser.add_argument("--max-tokens", type=int, default=2048, help="of a micro-batch")
    arguments = parser.parse_args()
    all_lengths = np.asarray(TokenDataset.open(arguments.data).lengths)
    # The demo's model: Llama, 8 layers of 256, feed-forward 688, 4 heads, vocabulary 4,096.
    cost = CostModel.from_config(
        SimpleNamespace(
            num_hidden_layers=8,
            hidden_size=256,
            intermediate_size=688,
            num_attention_heads=4,
            num_key_value_heads=4,
            vocab_size=4096,
        )
    )
    generator = np.random.default_rng(0)
    ratios: dict[str, list[float]] = {"ours": [], "peers": []}
    for _ in range(200):
        lengths = generator.choice(all_lengths, 2 * arguments.sequences, replace=False).tolist()
        options = {"num_ranks": 2, "max_tokens": arguments.max_tokens, "cost": cost}
        best = make_plan(lengths, strategy="lb_mini", **options).on_demand_cost
        ratios["ours"].append(make_plan(lengths, strategy="lb_micro", **options).lockstep_cost / best)
        ratios["peers"].append(peers(lengths, cost(lengths).tolist(), 2, arguments.max_tokens) / best)
    for name, values in ratios.items():
        low, high = np.percentile(values, [10, 90])
        spread = f"mean {np.mean(values):.3f} ({low:.3f} to {high:.3f})"
        print(f"{name:6s} lb_micro in lock-step over lb_mini on demand: {spread}")


if __name__ == "__main__":
    main()
