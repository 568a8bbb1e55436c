"""Make preference pairs to try DPO out, of the demo's instructions (``examples/demo/prepare.py``).

The chosen answer is a function's own body, the rejected one gives up after a third of it.

    python examples/dpo/make_pairs.py demo_out/instructions.jsonl demo_out/pairs.jsonl
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path


def main() -> None:
    parser = argparse.ArgumentParser(description="Make preference pairs of the demo's instructions.")
    parser.add_argument("instructions", type=Path, help="JSONL with prompt and completion")
    parser.add_argument("pairs", type=Path, help="JSONL to write, with prompt, chosen and rejected")
    parser.add_argument(
        "--longest", type=int, default=300, help="characters of prompt and answer (default 300)"
    )
    arguments = parser.parse_args()
    examples = [json.loads(line) for line in arguments.instructions.read_text().splitlines()]
    short = [e for e in examples if len(e["prompt"]) + len(e["completion"]) <= arguments.longest]
    with arguments.pairs.open("w") as file:
        for example in short:
            lines = example["completion"].splitlines(keepends=True)
            rejected = "".join(lines[: len(lines) // 3]) + "    raise NotImplementedError\n"
            pair = {"prompt": example["prompt"], "chosen": example["completion"], "rejected": rejected}
            file.write(json.dumps(pair) + "\n")
    print(f"{len(short)} pairs in {arguments.pairs}")


if __name__ == "__main__":
    main()
