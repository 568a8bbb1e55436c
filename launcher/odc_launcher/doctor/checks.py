"""From the facts of all nodes to the findings of the report. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from odc_launcher.doctor.between_checks import BETWEEN_CHECKS
from odc_launcher.doctor.facts import NodeFacts
from odc_launcher.doctor.finding import Context, Finding
from odc_launcher.doctor.node_checks import NODE_CHECKS


def check_all(nodes: Sequence[NodeFacts], context: Context) -> list[Finding]:
    """All findings: those of single nodes first, equal ones joined, then those between nodes."""
    findings: list[Finding] = []
    for check in NODE_CHECKS:
        for node in nodes:
            findings += [_at(finding, node) for finding in check(node, context)]
    findings = _join(findings, len(nodes))
    if len(nodes) > 1:
        for between in BETWEEN_CHECKS:
            findings += between(nodes, context)
    return findings


def _at(finding: Finding, node: NodeFacts) -> Finding:
    return Finding(finding.level, finding.check, finding.text, finding.remedy, (node.host,))


def _join(findings: Sequence[Finding], num_nodes: int) -> list[Finding]:
    """The same on several nodes is one line; on all nodes it names none."""
    joined: dict[tuple[str, str, str, str], list[str]] = {}
    for finding in findings:
        key = (finding.level, finding.check, finding.text, finding.remedy)
        joined.setdefault(key, []).extend(finding.hosts)
    return [
        Finding(*key, hosts=() if len(set(hosts)) == num_nodes else tuple(hosts))
        for key, hosts in joined.items()
    ]
