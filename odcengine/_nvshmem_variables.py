"""What NVSHMEM's start is told by variables in ranks that odc-launch has not started.

odc-launch sets them for its ranks (``launcher/odc_launcher/plan.py``). torchrun, ``srun`` and ``mpirun``
alone do not, and NVSHMEM would take the first interface that it finds.
"""

from __future__ import annotations

import os
from collections.abc import MutableMapping

from odcengine.config import Config
from odcengine.errors import ConfigError
from odcengine.host.host import read_host
from odcengine.host.network import NVSHMEM
from odcengine.host.nvshmem_env import Job, Setting, node_settings
from odcengine.ranks import read_rank_info
from odcengine.topology import Topology


def set_variables(
    topology: Topology, config: Config, environ: MutableMapping[str, str] = os.environ
) -> list[Setting]:
    """Set the variables of NVSHMEM's start that nobody has set; before it starts.

    Args:
        topology: the ranks.
        config: the configuration.
        environ: this process's environment, which is changed.

    Returns:
        What was set, with the reasons.

    Raises:
        ConfigError: the user's own values cannot work on this host.
    """
    rendezvous = read_rank_info(environ).rendezvous
    rank0 = topology.hosts[0] if rendezvous is None else rendezvous.rpartition(":")[0]
    several = len(set(topology.machines)) > 1
    job = Job("nvshmem", config.odc.sharding, several, config.launch.interface)
    made = node_settings(read_host(rank0 if several else "127.0.0.1", with_gpus=False), environ, job)
    if made.problems:
        raise ConfigError(*made.problems)
    # gloo has started by now
    settings = [setting for setting in made.settings if setting.name.startswith("NVSHMEM_")]
    if job.interface is not None and not environ.get(NVSHMEM):
        settings.append(Setting(NVSHMEM, job.interface, "launch.interface"))
    environ.update({setting.name: setting.value for setting in settings})
    return settings
