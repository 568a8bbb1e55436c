"""Watches the sizes of the tensors that torch makes."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class LargestTensor(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records the largest number of elements that an operation returned, except in given tensors' memory."""

    def __init__(self, *given: torch.Tensor) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.given = {tensor.untyped_storage().data_ptr() for tensor in given}
        self.num_elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        for tensor in output if isinstance(output, (tuple, list)) else [output]:
            if isinstance(tensor, torch.Tensor) and tensor.untyped_storage().data_ptr() not in self.given:
                self.num_elements = max(self.num_elements, tensor.numel())
        return output
