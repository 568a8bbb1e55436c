"""``odc-launch doctor``: is this machine, or every node of this allocation, fit for the job?

``command`` runs it: ``facts`` are gathered on every node, ``probe`` imports torch in a process of its own and
meets the other nodes, ``ranks`` is a small real job, and ``checks`` turns all that into findings, each with a
remedy. Only ``probe`` and ``ranks`` import torch.
"""
