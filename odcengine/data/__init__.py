"""Data: tokenised samples on disk, packed micro-batches, and the loader of a rank's share of minibatches."""

from __future__ import annotations

from odcengine.data.batch import IGNORE_INDEX, MicroBatch
from odcengine.data.dataset import TokenDataset
from odcengine.data.loader import MinibatchLoader
from odcengine.data.minibatch import Minibatch
from odcengine.data.pack import pack_samples

__all__ = ["IGNORE_INDEX", "MicroBatch", "Minibatch", "MinibatchLoader", "TokenDataset", "pack_samples"]
