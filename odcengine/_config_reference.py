"""Writes docs/configuration.md from the schema and the tables of DeepSpeed's keys."""

from __future__ import annotations


def reference() -> str:
    """Returns the reference page (Markdown)."""
    return ""
