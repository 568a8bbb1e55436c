"""What the ranks of test_slurm.py and test_mpi.py run: the toy model's exactness case, under odc-launch.

Arguments: folder for the results, ``odc`` settings as JSON.
"""

from __future__ import annotations

import json
import sys

import torch
from engine.toy import Case, train

from odcengine.ranks import read_rank_info

CASE = Case("cluster", {"tied": True, "unused": True})
STEPS = 6

if __name__ == "__main__":
    torch.set_num_threads(1)
    folder, settings = sys.argv[1], json.loads(sys.argv[2])
    info = read_rank_info()
    result = train(info.rank, info.world_size, CASE, steps=STEPS, **settings)
    torch.save(result, f"{folder}/result{info.rank}")
