"""Sharding: FSDP2 whose communication is on demand, or left to collectives. It knows nothing of config."""
