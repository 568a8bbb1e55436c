"""The shapes of a model's parameters, group by group, without its memory.

``python -m odcengine.models.shapes CONFIG`` prints them as JSON for the model that a configuration names; it
is how ``odc-launch --plan`` knows a model without importing torch itself.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from typing import Any

from torch import nn

from odcengine.config import Config, load_config
from odcengine.errors import ConfigError
from odcengine.models.adapter import add_lora, freeze
from odcengine.models.load import meta_model
from odcengine.sharding.wrap import block_modules, group_modules


def model_shapes(config: Config) -> dict[str, Any]:
    """Shapes of the model that a configuration names.

    Args:
        config: the configuration.

    Returns:
        ``num_parameters``, ``num_trained`` and ``groups``, each with ``name`` ("" for the root), ``shapes``
        and ``itemsize`` of what is trained, ``frozen`` and ``frozen_itemsize`` of the rest; a parameter that
        is used twice is listed once. ``reference`` has such groups of the model that ``model.reference``
        names, or is None.

    Raises:
        ConfigError: the configuration names no model, or there is none.
    """
    source = config.model.path if config.model.path is not None else config.model.config
    if source is None:
        raise ConfigError("model: the configuration names none")
    model = meta_model(source, dtype=config.model.dtype)
    if config.model.lora is not None:
        model = add_lora(model, config.model.lora, base=None, only_shapes=True)
    freeze(model, config.model.freeze or ())
    parameters = list(model.parameters())
    return {
        "num_parameters": sum(p.numel() for p in parameters),
        "num_trained": sum(p.numel() for p in parameters if p.requires_grad),
        "groups": _groups(model, group_modules(model, config.odc.wrap, config.odc.experts)),
        "reference": None if config.model.reference is None else _reference(config.model.reference, config),
    }


def _reference(source: str, config: Config) -> list[dict[str, Any]]:
    model = meta_model(source, dtype="bfloat16" if config.bf16.enabled else None).requires_grad_(False)
    return _groups(model, block_modules(model, config.odc.wrap))


def _groups(model: nn.Module, blocks: Sequence[nn.Module]) -> list[dict[str, Any]]:
    names = {id(module): name for name, module in model.named_modules()}
    groups = []
    seen: set[int] = set()
    # Inner blocks first: a parameter belongs to the innermost, as in shard_model.
    for module in (*reversed(blocks), model):
        parameters = [p for p in module.parameters() if id(p) not in seen]
        seen.update(map(id, parameters))
        trained = [p for p in parameters if p.requires_grad]
        frozen = [p for p in parameters if not p.requires_grad]
        if parameters:
            groups.append(
                {
                    "name": "" if module is model else names[id(module)],
                    "shapes": [list(parameter.shape) for parameter in trained],
                    "itemsize": max((parameter.itemsize for parameter in trained), default=0),
                    "frozen": [list(parameter.shape) for parameter in frozen],
                    "frozen_itemsize": max((parameter.itemsize for parameter in frozen), default=0),
                }
            )
    return groups


def main(arguments: Sequence[str]) -> int:
    """Prints the shapes; exit code 2 where they cannot be known."""
    try:
        shapes = model_shapes(load_config(arguments[0]))
    except ConfigError as error:
        sys.stderr.write("\n".join(error.problems) + "\n")
        return 2
    sys.stdout.write(json.dumps(shapes) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
