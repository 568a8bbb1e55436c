"""odc-launch: starts the ranks of a training script. It imports no torch."""
