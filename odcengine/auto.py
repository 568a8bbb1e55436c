"""``import odcengine.auto``: ``deepspeed.initialize`` attaches engines whose configuration says so.

For code that is not one's own: Accelerate and Hugging Face's Trainer call ``deepspeed.initialize``
themselves. It is the one place where odcengine changes a function of another library, so it does nothing
unless it is imported *and* DeepSpeed's configuration has a top-level section ``"odc": {"enabled": true}``;
that section takes the options of ``odcengine.attach``. Import it before training starts; :func:`disable`
takes it back. An engine has its handle as ``engine.odc_attached``.
"""

from __future__ import annotations

import base64
import binascii
import functools
import json
import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from odcengine._attach import attach
from odcengine._config_schema import did_you_mean
from odcengine.errors import ConfigError

try:
    import deepspeed
except ModuleNotFoundError as missing:
    raise ConfigError(
        f"odcengine.auto needs DeepSpeed ({missing}); install it with "
        "DS_BUILD_OPS=0 pip install 'odcengine[deepspeed]', or remove `import odcengine.auto`"
    ) from missing

logger = logging.getLogger(__name__)

_MARK = "odc_original"


def enable() -> None:
    """Wrap ``deepspeed.initialize``; does nothing where it is wrapped already."""
    original: Callable[..., Any] = deepspeed.initialize
    if hasattr(original, _MARK):
        return

    @functools.wraps(original)
    def initialize(*args: Any, **kwargs: Any) -> Any:
        options = _odc_section(args, kwargs)
        made = original(*args, **kwargs)
        if options is not None and _trains(made[0]):
            attach(made[0], options)
        return made

    setattr(initialize, _MARK, original)
    deepspeed.initialize = initialize
    logger.info('deepspeed.initialize now attaches engines whose configuration has "odc": {"enabled": true}')


def disable() -> None:
    """Give ``deepspeed.initialize`` back; engines that are attached stay so."""
    original = getattr(deepspeed.initialize, _MARK, None)
    if original is not None:
        deepspeed.initialize = original


def _trains(engine: Any) -> bool:
    """Whether it has an optimizer; a reference or reward model beside the trained one often has the same
    configuration and none."""
    if engine.optimizer is not None and type(engine.optimizer).__name__ != "DeepSpeedZeRoOffload":
        return True
    logger.warning(
        "deepspeed.initialize: an engine without an optimizer stays DeepSpeed's own: its forwards are "
        "collectives, of which every rank needs equally many"
    )
    return False


def _odc_section(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any] | None:
    """The ``odc`` section of what ``deepspeed.initialize`` is called with; None where it is not enabled."""
    names: tuple[str, ...] = ("args", "model", "optimizer", "model_parameters", "training_data")
    names += ("lr_scheduler", "distributed_port", "mpu", "dist_init_required", "collate_fn", "config")
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    source = given.get("config") or given.get("config_params")
    source = source or getattr(given.get("args"), "deepspeed_config", None)
    found = _read(source)
    section = found.get("odc")
    if section is None:
        _refuse_misspelt(found)
        return None
    if not isinstance(section, Mapping) or not isinstance(section.get("enabled"), bool):
        raise ConfigError(
            f'DeepSpeed\'s configuration: odc is {section!r}; expected {{"enabled": true}}, with options of '
            "odcengine.attach beside it"
        )
    options = {key: value for key, value in section.items() if key != "enabled"}
    return options if section["enabled"] else None


def _refuse_misspelt(config: Mapping[str, Any]) -> None:
    """DeepSpeed ignores keys that it does not know: a run would go on without what was asked for."""
    for key, value in config.items():
        if isinstance(value, Mapping) and "enabled" in value and did_you_mean(str(key), ("odc", "odcengine")):
            raise ConfigError(
                f"DeepSpeed's configuration: {key}: neither DeepSpeed nor odcengine knows this section; "
                'did you mean "odc"? Else remove it'
            )


def _read(source: Any) -> Mapping[str, Any]:
    """What DeepSpeed takes as a configuration: a mapping, a file, or its text in base64."""
    if isinstance(source, Mapping):
        return source
    if not isinstance(source, (str, Path)):
        return {}
    try:
        text = (
            Path(source).read_text()
            if Path(source).exists()
            else base64.urlsafe_b64decode(str(source)).decode()
        )
        found = json.loads(text)
    except (OSError, ValueError, binascii.Error):
        return {}  # DeepSpeed says what is wrong with it
    return found if isinstance(found, Mapping) else {}


enable()
