"""On-demand communication of a model whose training loop is somebody else's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from odcengine.sharding.base import scale_all
from odcengine.sharding.layout import ParamGroup, write_shard
from odcengine.sharding.on_demand import OnDemandSharding


class AttachedSharding(OnDemandSharding):
    """The same, but any backward counts, and each group's gradients keep the scale that FSDP2 gave them.

    Attributes:
        scales: factor of each group's sums.
        on_pull: called before a group is pulled; raises where it must not be.
        on_push: the same, before gradients are handed over.
    """

    how_to_change = (
        "a load, or an optimizer that attach was not given",
        "Call publish() of the handle on every rank after changing parameters, between minibatches",
    )

    def __init__(
        self,
        *args: Any,
        scales: list[float],
        on_pull: Callable[[], None],
        on_push: Callable[[], None],
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        self.scales = scales
        self._on_pull = on_pull
        self._on_push = on_push

    def pull(self, group: ParamGroup, out: torch.Tensor) -> None:
        self._on_pull()
        super().pull(group, out)

    def check_counted(self) -> None:
        self._on_push()

    @torch.no_grad()
    def show_gradients(self, used: torch.Tensor) -> None:
        """``expose`` with the groups' own scales."""
        for scale in {*self.scales} - {1.0}:
            sums = [total for total, own in zip(self._sums, self.scales, strict=True) if own == scale]
            scale_all(sums, scale)
        self._set_gradients(used)

    @property
    def has_changed(self) -> bool:
        """Whether a parameter was written since it was published."""
        return any(
            self._versions.get(id(entry.param)) != entry.param._version
            for group in self.groups
            for entry in group.entries
        )

    @torch.no_grad()
    def accept_unchanged(self) -> None:
        """Take parameters that were written, but are equal to what is published, for unchanged."""
        for group, window in zip(self.groups, self._param_windows, strict=True):
            published = window.local[self.transport.grid.node]
            own = torch.zeros_like(published)
            write_shard(group, own)
            if torch.equal(own, published):
                self._versions.update((id(entry.param), entry.param._version) for entry in group.entries)

    def close(self) -> None:
        for handle in self._parameter_hooks:
            handle.remove()
        self._parameter_hooks.clear()
        self.release()
        super().close()
