"""Checkpoints: written in the background, complete or not there, loaded on any number of ranks."""
